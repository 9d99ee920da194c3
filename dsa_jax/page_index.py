"""From slots and rows to the pages of one (layer, role)."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import numpy as np


class AddressMode(enum.StrEnum):
    """Where the layer stands in an address: both modes give the same bytes.

    SHARED adds the layer's byte offset to the base address, so that all layers share one integer table.
    PER_LAYER keeps the base of the pool and adds the layer to the integers.
    """

    SHARED = "shared"
    PER_LAYER = "per_layer"


@dataclasses.dataclass(frozen=True)
class PageIndex:
    """Turns slots and rows into the pages of one (layer, role).

    Attributes:
        pool: number of the pool.
        scale: pages of the pool per slot.
        layer_offset: which page of a slot belongs to this layer; an integer, or a traced int32 scalar inside
            a scan.
        expansion: kernel pages per page, 1 unless the buffer has finer pages than the manager.
    """

    pool: int
    scale: int
    layer_offset: Any
    expansion: int = 1

    def page(self, slot: Any) -> Any:
        """Page number `slot * scale + layer_offset`; -1 stays -1.

        Args:
            slot: an int, or an integer NumPy or JAX array of any shape.

        Raises:
            ValueError: the buffer is expanded, so that a slot has several pages; use `convert`.
        """
        self._refuse_expansion("page")
        return _keep_missing(slot, slot * self.scale + self.layer_offset)

    def rows(self, row: Any, page_size: int) -> Any:
        """Row of the pool seen as `[pages * page_size, width]`, for a row `slot * page_size + offset`; -1
        stays -1.

        Example: scale 3, layer_offset 1, page_size 4, row 7 * 4 + 2 gives (7 * 3 + 1) * 4 + 2 = 90.

        Args:
            row: an int, or an integer NumPy or JAX array of any shape.
            page_size: tokens per page.

        Raises:
            ValueError: the buffer is expanded.
        """
        self._refuse_expansion("rows")
        page = (row // page_size) * self.scale + self.layer_offset
        return _keep_missing(row, page * page_size + row % page_size)

    def convert(self, slots: Sequence[int], mode: AddressMode = AddressMode.SHARED) -> list[int]:
        """Kernel page indices of slots, `expansion` for each slot; -1 gives -1 that many times.

        They count pages of `PlacedBuffer.page_stride` bytes from `PlacedBuffer.base_offset(mode)`.
        """
        offset = self.layer_offset if mode == AddressMode.PER_LAYER else 0
        indices = []
        for slot in slots:
            first = (slot * self.scale + offset) * self.expansion
            indices += [-1 if slot < 0 else first + part for part in range(self.expansion)]
        return indices

    def slot(self, page: int) -> int:
        """Slot that owns a page of this layer, the inverse of `page`; -1 stays -1.

        Raises:
            ValueError: the page belongs to another layer, or the buffer is expanded.
        """
        self._refuse_expansion("slot")
        if page < 0:
            return -1
        slot, offset = divmod(page - self.layer_offset, self.scale)
        if offset or slot < 0:
            raise ValueError(
                f"PageIndex.slot: page {page} is no page of layer offset {self.layer_offset} at scale "
                f"{self.scale}; pages of "
                f"this layer are {self.layer_offset}, {self.layer_offset + self.scale}, ..."
            )
        return slot

    def upper_bound(self, slots: int) -> int:
        """Number of kernel pages from this layer's SHARED base to the end of a pool of `slots` slots."""
        return (self.scale * slots - self.layer_offset) * self.expansion

    def slots(self, upper_bound: int) -> int:
        """Number of slots of a pool whose page bound for this layer is `upper_bound`: the slot count, not the
        page bound.

        Raises:
            ValueError: `upper_bound` is no page bound of this layer.
        """
        pages, rest = divmod(upper_bound, self.expansion)
        slots, rest_of_pages = divmod(pages + self.layer_offset, self.scale)
        if rest or rest_of_pages:
            raise ValueError(
                f"PageIndex.slots: {upper_bound} is no page bound for scale {self.scale}, layer offset "
                f"{self.layer_offset} and "
                f"expansion {self.expansion}; pass the value of upper_bound(slots)"
            )
        return slots

    def _refuse_expansion(self, operation: str) -> None:
        if self.expansion != 1:
            raise ValueError(
                f"PageIndex.{operation}: expansion {self.expansion} gives several pages per slot, wanted 1; "
                "use convert()"
            )


def _keep_missing(source: Any, value: Any) -> Any:
    if isinstance(source, int):
        return -1 if source < 0 else value
    # The value's own namespace, so that NumPy arrays and traced JAX arrays take the same path and keep their dtype.
    namespace = value.__array_namespace__() if hasattr(value, "__array_namespace__") else np
    return namespace.where(source < 0, -1, value)
