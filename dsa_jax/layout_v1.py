"""The V1 manager's layout: one pool per role, shaped `[slots, rows, ...]`, and its encoded page tables.

This is a derivation of its own: it does not coalesce, so that an error in the V2 derivation cannot hide
behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dsa_jax.arguments import described, is_whole
from dsa_jax.coalesce import PageIndex, PlacedBuffer, PoolSpec
from dsa_jax.forms import Role


def v1_rows(owners: Sequence[bool]) -> tuple[int, ...]:
    """Row of each local layer in a pool that has rows for owners only; -1 where the layer owns none.

    Example: owners T T T F F F T F give 0, 1, 2, -1, -1, -1, 3, -1.
    """
    rows, count = [], 0
    for owner in owners:
        rows.append(count if owner else -1)
        count += bool(owner)
    return tuple(rows)


def v1_pools(
    layers: Sequence[int], full: Sequence[bool], page_bytes: Mapping[Role, int]
) -> tuple[PoolSpec, ...]:
    """One pool per role. KEY roles have a row for every local layer, INDEX_KEY for layers that own an
    indexer.

    Args:
        layers: layer ids, in local order.
        full: per local layer, whether it owns an indexer.
        page_bytes: bytes of one page of one layer, by role, in the order of the pools.

    Returns:
        The pools that have rows at all.
    """
    pools = []
    for role, size in page_bytes.items():
        rows = v1_rows(full if role == Role.INDEX_KEY else [True] * len(layers))
        count = max(rows, default=-1) + 1
        if not count:
            continue
        buffers = tuple(
            PlacedBuffer(
                layer=layer,
                role=role,
                life_cycle=0,
                offset=row * size,
                size=size,
                index=PageIndex(len(pools), count, row),
            )
            for layer, row in zip(layers, rows, strict=True)
            if row >= 0
        )
        pools.append(PoolSpec(number=len(pools), group=0, slot_bytes=count * size, buffers=buffers))
    return tuple(pools)


def encode_v1_table(table: Any, num_layers: int) -> np.ndarray:
    """Encodes raw slots as the V1 manager's host table does: `slot * num_layers`; -1 stays -1.

    Args:
        table: integer array of slots, any shape.
        num_layers: local layers of the KEY pool.

    Returns:
        int64 array of the same shape.
    """
    _check_layers("encode_v1_table", num_layers)
    slots = _offsets("encode_v1_table", "table", table)
    return np.where(slots < 0, -1, slots * num_layers)


def decode_v1_table(encoded: Any, num_layers: int, slots: int) -> np.ndarray:
    """Decodes a V1 host table into raw slots: `encoded // num_layers`, clamped to the last slot; negative
    stays -1.

    The table must hold encoded memory offsets. Block ids are something else: after offloading to the host, a
    block's id may lie beyond the pool while its memory has a slot.

    Args:
        encoded: integer array of encoded offsets, any shape.
        num_layers: local layers of the KEY pool.
        slots: slots of the pool.

    Returns:
        int32 array of the same shape.

    Raises:
        ValueError: `num_layers` or `slots` is not positive.
    """
    _check_layers("decode_v1_table", num_layers)
    if not is_whole(slots) or slots < 1:
        raise ValueError(
            f"decode_v1_table: slots={described(slots)} must be at least 1 and whole; pass the slot count of the pool"
        )
    offsets = _offsets("decode_v1_table", "encoded", encoded)
    decoded = np.where(offsets < 0, -1, np.minimum(offsets // num_layers, slots - 1))
    return decoded.astype(np.int32)


def _check_layers(operation: str, num_layers: int) -> None:
    if not is_whole(num_layers) or num_layers < 1:
        raise ValueError(
            f"{operation}: num_layers={described(num_layers)} must be at least 1 and whole; pass the number of local layers"
        )


def _offsets(operation: str, name: str, table: Any) -> np.ndarray:
    try:
        array = np.asarray(table)
    except ValueError:  # rows of different lengths
        array = np.asarray(None)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(
            f"{operation}: {name} is {described(table)}, wanted integers, -1 for none; pass a rectangular integer array"
        )
    return array.astype(np.int64)
