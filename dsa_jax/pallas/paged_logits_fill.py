"""Writing -inf to the columns of a request or group that belong to no tile, beside or after the copies of tiles.

While tiles of contexts are scored, the copying warpgroup and the memory have time to spare: a row of one unit after each
tile is free, where all of them at the end of a block took 110 to 170 us of 655 (8,192 tokens on 8,192 keys, H200).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from dsa_jax.pallas.paged_logits_plan import FILL, TILE, fill_items

_PER_KEY = plgpu.Layout.WGMMA.reduce(1)

Place = tuple[Any, ...]
"""Where filling goes on, int32 scalars: request, row of its units, end of these rows, and the request's `Extent`."""
Extent = tuple[Any, Any, Any, Any]
"""First tile of a request or group and the end of its tiles, its first row and its rows; int32 scalars."""


@dataclasses.dataclass(frozen=True)
class Filling:
    """A block's share of filling.

    Attributes:
        out: scores ``[rows, columns]`` in global memory.
        share: first request and fill unit, last request and the end of its units: int32 scalars.
        extent: ``(request) -> Extent``.
        n: rows of a request, or most rows of a group.
        whole: whether every request has n rows.
    """

    out: Any
    share: tuple[Any, Any, Any, Any]
    extent: Callable[[Any], Extent]
    n: int
    whole: bool

    def begin(self) -> Place:
        """Before the first request."""
        nothing = jnp.int32(0)
        return self.share[0] - 1, *(nothing,) * 6

    def step(self, place: Place) -> Place:
        """Fill one row of one unit, or read where the next request's are; nothing once all is filled."""
        request, row, end, *extent = place

        def fill() -> Place:
            self._row(row, *extent)
            return request, row + 1, end, *extent

        onward = lambda: lax.cond(request < self.share[2], lambda: self._enter(request + 1), lambda: place)
        return lax.cond(row < end, fill, onward)

    def rest(self, place: Place | None) -> None:
        """Fill all that is left from a place on, or all."""
        first_request, first_unit, last_request, last_unit = self.share

        def rows(place: Place) -> None:
            _, row, end, *extent = place
            lax.fori_loop(row, end, lambda i, _: self._row(i, *extent), None)

        @pl.when((first_request < last_request) | (first_unit < last_unit))
        def _():
            if place is not None:
                rows(place)
            begin = first_request if place is None else place[0] + 1
            lax.fori_loop(begin, last_request + 1, lambda request, _: rows(self._enter(request)), None)

    def _enter(self, request) -> Place:
        """The first of the block's rows of a request."""
        first_request, first_unit, last_request, last_unit = self.share
        extent = self.extent(request)
        *_, units = fill_items(extent[0], extent[1], self.out.shape[1])
        row = jnp.where(request == first_request, first_unit, 0) * self.n
        end = jnp.where(request == last_request, last_unit, units) * self.n
        return request, row, end, *extent

    def _row(self, i, begin, end, first_row, rows) -> None:
        """Fill what belongs to no tile in row i % n of unit i // n."""
        columns = self.out.shape[1]
        before, after = fill_items(begin, end, columns)[:2]
        unit, j = lax.div(i, jnp.int32(self.n)), lax.rem(i, jnp.int32(self.n))
        left = jnp.where(unit < before, unit, unit - before + after) * FILL
        outside = lambda column, size: (column + size <= begin * TILE) | (column >= end * TILE)

        def store(column, nothing: Array) -> None:
            target = self.out.at[first_row + j, pl.ds(column, nothing.shape[0])]

            @pl.when(True if self.whole else j < rows)
            def _():
                target[...] = nothing.astype(self.out.dtype)

        everything = outside(left, FILL) & (left + FILL <= columns)

        @pl.when(everything)
        def _():
            store(left, jnp.full((FILL,), -jnp.inf, jnp.float32))

        @pl.when(jnp.logical_not(everything))
        def _():
            def of_tile(i, _):
                column = left + i * TILE

                @pl.when(outside(column, TILE) & (column < columns))
                def _():
                    store(column, plgpu.layout_cast(jnp.full((TILE,), -jnp.inf, jnp.float32), _PER_KEY))

            lax.fori_loop(0, FILL // TILE, of_tile, None)
