"""The body of the Hopper kernel for paged scores; see `paged_logits_mosaic` for what it does."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from dsa_jax.compat import MOSAIC_STORES_HALF_WORDS
from dsa_jax.pallas.paged_logits_config import HEAD_DIM, PagedLogitsConfig, stages_for, tokens_at_once
from dsa_jax.pallas.paged_logits_fill import Filling
from dsa_jax.pallas.paged_logits_finish import COLUMNS, Bounds, writes_much
from dsa_jax.pallas.paged_logits_machine import CARD, FENCED_CARD, INTERPRETER, Machine
from dsa_jax.pallas.paged_logits_plan import HEADER, TILE, pages_per_tile, planned_tiles, whole_tiles

_E4M3 = jnp.float8_e4m3fn
_PER_KEY = plgpu.Layout.WGMMA.reduce(1)
_PER_HEAD = plgpu.Layout.WGMMA.reduce(0)
_SWIZZLED = (plgpu.TilingTransform((8, HEAD_DIM)), plgpu.SwizzleTransform(HEAD_DIM))


@dataclasses.dataclass(frozen=True)
class _Refs:
    """What a block sees: arrays in global memory, then its shared memory and barriers."""

    plan: Any
    groups: Any
    limits: Any
    table: Any
    offset: Any
    q: Any
    weights: Any
    keys: Any
    key_scales: Any
    out: Any
    queries: Any
    head_weights: Any
    tiles: Any
    tile_scales: Any
    query_full: Any
    query_free: Any
    full: Any
    free: Any


@dataclasses.dataclass(frozen=True)
class PagedLogitsKernel:
    """The numbers a kernel is specialised for, and its body."""

    kernel_name: ClassVar[str] = "paged_mqa_logits"

    n: int
    heads: int
    page_size: int
    page_scale: int
    columns: int
    stages: int
    config: PagedLogitsConfig
    machine: Machine
    grouped: bool = False
    dtype: Any = jnp.float32

    @classmethod
    def create(
        cls, n, heads, page_table, page_size, page_scale, plan, requests, config, interpret, **fields: Any
    ):
        """Choose what is left open; `requests` counts the groups where rows are grouped."""
        columns = -(-page_table.shape[1] * page_size // TILE) * TILE
        most_tiles = -(-requests * columns // TILE // plan.shape[0])
        return cls(
            n=n,
            heads=heads,
            page_size=page_size,
            page_scale=page_scale,
            columns=columns,
            stages=config.stages or stages_for(n * heads, most_tiles, config),
            config=config,
            machine=INTERPRETER if interpret else (FENCED_CARD if config.fence else CARD),
            **fields,
        )

    def call(
        self, plan, groups, limits, table, offset, q, weights, keys, scales, *, rows: int, interpret
    ) -> Array:
        """Run the kernel for `rows` rows of scores; cuts off the columns added to complete a tile."""
        if q.dtype == jnp.uint8:
            q = lax.bitcast_convert_type(q, _E4M3)
        out = self.launch(plan.shape[0], rows, interpret)(
            plan,
            groups,
            limits.astype(jnp.int32),
            whole_tiles(table, self.page_size),
            jnp.asarray(offset, jnp.int32).reshape(1),
            q.reshape(rows * self.heads, HEAD_DIM),
            weights.astype(jnp.float32).reshape(rows, self.heads),
            lax.bitcast_convert_type(keys, _E4M3),
            scales,
        )
        return out[:, : table.shape[1] * self.page_size].astype(self.dtype)

    def launch(self, blocks: int, rows: int, interpret) -> Callable[..., Array]:
        """The kernel as a function of its arrays: `blocks` blocks that write `rows` rows of scores."""
        return plgpu.kernel(
            self.body,
            out_type=jax.ShapeDtypeStruct((rows, self.columns), self.written),
            grid=(blocks,),
            grid_names=("block",),
            num_threads=self.config.compute_warpgroups + 1,
            thread_name="warpgroup",
            scratch_types=self.scratch(),
            interpret=interpret,
            compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
            kernel_name=self.kernel_name,
        )

    @property
    def written(self) -> Any:
        """The type that the kernel itself writes."""
        return self.dtype if MOSAIC_STORES_HALF_WORDS else jnp.float32

    @property
    def parts(self) -> int:
        """Pages of a tile."""
        return pages_per_tile(self.page_size)

    @property
    def tiles_per_page(self) -> int:
        """Tiles of one page; 1 where a tile takes several pages."""
        return max(1, self.page_size // TILE)

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers of one block.

        A stage always belongs to the same compute warpgroup (`stages` is a multiple of their number), because a
        warpgroup has to observe every phase of a barrier that it waits for.
        """
        buffers, consumers = self.config.query_buffers, self.config.compute_warpgroups
        if self.stages % consumers:
            raise ValueError(
                f"PagedLogitsConfig: stages is {self.stages}; wanted a multiple of the {consumers} compute warpgroups"
            )
        return dict(
            queries=plgpu.SMEM((buffers, self.n * self.heads, HEAD_DIM), _E4M3, transforms=_SWIZZLED),
            head_weights=plgpu.SMEM((buffers, self.n, self.heads), jnp.float32),
            tiles=plgpu.SMEM((self.stages, TILE, HEAD_DIM), _E4M3, transforms=_SWIZZLED),
            tile_scales=plgpu.SMEM((self.stages, TILE), jnp.float32),
            query_full=plgpu.Barrier(num_arrivals=2, num_barriers=buffers),
            query_free=plgpu.Barrier(num_arrivals=consumers, num_barriers=buffers),
            full=plgpu.Barrier(num_arrivals=2 * self.parts, num_barriers=self.stages),
            free=plgpu.Barrier(num_barriers=self.stages),
        )

    def body(self, *arrays, **scratch):
        """One block: the last warpgroup copies and fills, the others compute."""
        refs = _Refs(*arrays, **scratch)
        # Beside the block's share: put off until it is needed, this would cost another trip to memory before the first copy.
        layer_offset = self.machine.read_now(refs.offset)
        # Groups of context tokens share their keys, and a few scores need no room.
        if not self.grouped and writes_much(math.prod(refs.out.shape)):
            self.machine.read_once(refs.keys, refs.key_scales)
        share = [refs.plan[lax.axis_index("block"), i] for i in range(HEADER)]
        warpgroup = lax.axis_index("warpgroup")
        consumers = self.config.compute_warpgroups

        @pl.when(warpgroup == consumers)
        def _copy():
            if self.config.registers:
                plgpu.set_max_registers(self.config.registers[1], action="decrease")
            filling = self._filling(refs, share)
            segments, count, *place = self._copy_tiles(refs, share, layer_offset, filling)
            filling.rest(tuple(place) or None)
            self.machine.drain(refs.query_free, segments, self.config.query_buffers)
            self.machine.drain(refs.free, count, self.stages)

        @pl.when(warpgroup < consumers)
        def _compute():
            if self.config.registers:
                plgpu.set_max_registers(self.config.registers[0], action="increase")
            self._score_tiles(refs, share, warpgroup)

    def _filling(self, refs: _Refs, share) -> Filling:
        """The block's share of columns that belong to no tile."""

        def extent(request):
            rows = refs.groups[request, 2] if self.grouped else self.n
            return (
                self._first_tile(refs, request),
                self._tiles(refs, request),
                self._first_row(refs, request),
                jnp.int32(rows),
            )

        return Filling(refs.out, tuple(share[5:]), extent, self.n, whole=not self.grouped)

    def _walk(self, refs: _Refs, share, visit: Callable[..., tuple], *carried):
        """Call ``visit(request, begin, end, segment, count, *carried)`` for every request that the block has tiles of.

        It returns what the next call is given as ``carried``. ``segment`` counts the requests visited, ``count`` the tiles
        before this request's. The first request's tiles are in the plan, so that nothing else has to be read before work
        begins.
        """
        first_request, first_tile, first_end, last_request, last_tile = share[:5]

        def of_request(request, carry):
            segment, count, *carried = carry
            begin = jnp.where(request == first_request, first_tile, self._first_tile(refs, request))
            end = lax.cond(
                request == first_request,
                lambda: first_end,
                lambda: jnp.where(request == last_request, last_tile, self._tiles(refs, request)),
            )
            some = end > begin
            visited = lambda: tuple(visit(request, begin, end, segment, count, *carried))
            carried = lax.cond(some, visited, lambda: tuple(carried))
            return segment + some.astype(jnp.int32), count + jnp.where(some, end - begin, 0), *carried

        start = jnp.int32(0), jnp.int32(0), *carried
        return lax.fori_loop(first_request, last_request + 1, of_request, start)

    def _first_row(self, refs: _Refs, request):
        """Row of q, weights and scores where a request or group begins."""
        return refs.groups[request, 1] if self.grouped else request * self.n

    def _length(self, refs: _Refs, request):
        """Keys of a request that any of its rows sees."""
        length = refs.limits[request, 0]
        for j in range(1, self.n):
            length = jnp.maximum(length, refs.limits[request, j])
        return jnp.clip(length, 0, self.columns)

    def _first_tile(self, refs: _Refs, request):
        """Where a request's tiles begin; all tiles and columns before have to be filled."""
        return jnp.int32(0)

    def _tiles(self, refs: _Refs, request):
        """Where a request's tiles end."""
        return (self._length(refs, request) + (TILE - 1)) // TILE

    def _bounds(self, refs: _Refs, request, j: int) -> Bounds:
        """What row j of a request or group sees."""
        return None, refs.limits[request, j]

    def _slots(self, refs: _Refs, block, request, tile, count):
        """Slots of a tile's pages; `count` is the tile's number in the block's share."""

        def planned_slots():
            return tuple(refs.plan[block, HEADER + count * self.parts + i] for i in range(self.parts))

        def table_slots():
            """Slots of a tile's pages. The page after a request's last one is nobody's: the last is read again."""
            row = jnp.maximum(refs.groups[request, 0], 0) if self.grouped else request
            if self.parts == 1:
                page = jnp.minimum(tile // self.tiles_per_page, refs.table.shape[1] - 1)
                return (refs.table[row, page],)
            last_page = (self._length(refs, request) - 1) // self.page_size
            pages = (jnp.minimum(tile * self.parts + i, last_page) for i in range(self.parts))
            return tuple(refs.table[row, jnp.maximum(page, 0)] for page in pages)

        return lax.cond(count < planned_tiles(self.page_size), planned_slots, table_slots)

    def _copy_tiles(self, refs: _Refs, share, layer_offset, filling: Filling):
        """Copy the block's tiles, and fill beside it; returns how many requests and tiles, and where filling goes on.

        Decode rows wait for memory all the time, so filling would not be free: they are filled afterwards.
        """
        block = lax.axis_index("block")

        def visit(request, begin, end, segment, count, *place):
            def copy_tile(tile, stage, count, *slots):

                @pl.when(count >= self.stages)
                def _():
                    plgpu.barrier_wait(refs.free.at[stage])

                for i, slot in enumerate(slots):
                    self._copy_part(refs, slot * self.page_scale + layer_offset, tile, stage, i)
                following = self._slots(refs, block, request, tile + 1, count + 1)
                return jnp.where(stage == self.stages - 1, 0, stage + 1), count + 1, *following

            # A tile goes first: it comes from far, the queries from the L2 cache, where every block wants them at once.
            slots = self._slots(refs, block, request, begin, count)
            copied = copy_tile(begin, lax.rem(count, jnp.int32(self.stages)), count, *slots)
            self._copy_queries(refs, request, segment)

            def next_tile(tile, carry):
                place, copied = carry
                return filling.step(place) if self.grouped else place, copy_tile(tile, *copied)

            return lax.fori_loop(begin + 1, end, next_tile, (place, copied))[0]

        return self._walk(refs, share, visit, *(filling.begin() if self.grouped else ()))

    def _copy_queries(self, refs: _Refs, request, segment):
        buffer = lax.rem(segment, jnp.int32(self.config.query_buffers))

        @pl.when(segment >= self.config.query_buffers)
        def _():
            plgpu.barrier_wait(refs.query_free.at[buffer])

        full = refs.query_full.at[buffer]
        first = self._first_row(refs, request)
        rows, columns = pl.ds(first, self.n), pl.ds(first * self.heads, self.n * self.heads)
        plgpu.copy_gmem_to_smem(refs.q.at[columns], refs.queries.at[buffer], full)
        plgpu.copy_gmem_to_smem(refs.weights.at[rows], refs.head_weights.at[buffer], full)

    def _copy_part(self, refs: _Refs, page, tile, stage, i: int):
        """Start the copies of a tile's i-th page, or of the tile's part of a larger page."""
        source, target = (page,), (stage,)
        if self.tiles_per_page > 1:
            source += (pl.ds(lax.rem(tile, jnp.int32(self.tiles_per_page)) * TILE, TILE),)
        if self.parts > 1:
            target += (pl.ds(i * self.page_size, self.page_size),)
        full = refs.full.at[stage]
        plgpu.copy_gmem_to_smem(refs.keys.at[source], refs.tiles.at[target], full)
        plgpu.copy_gmem_to_smem(refs.key_scales.at[source], refs.tile_scales.at[target], full)

    def _score_tiles(self, refs: _Refs, share, warpgroup):
        n, heads, consumers = self.n, self.heads, self.config.compute_warpgroups

        def visit(request, begin, end, segment, count):
            buffer = lax.rem(segment, jnp.int32(self.config.query_buffers))
            bounds = [self._bounds(refs, request, j) for j in range(n)]
            first = self._first_row(refs, request)
            plgpu.barrier_wait(refs.query_full.at[buffer])
            load_weights = lambda j: plgpu.load(refs.head_weights.at[buffer, j], layout=_PER_HEAD)
            if n * heads <= self.config.kept_weights:
                kept = [load_weights(j) for j in range(n)]
                load_weights = lambda j: kept[j]
            # The first of this request's tiles that is this warpgroup's turn.
            skip = lax.rem(warpgroup + consumers - lax.rem(count, jnp.int32(consumers)), jnp.int32(consumers))

            def score_tile(step, stage):
                plgpu.barrier_wait(refs.full.at[stage])
                left = (begin + skip + step * consumers) * TILE

                def finish(j, parts, scale):
                    rows_left = refs.groups[request, 2] - j if self.grouped else None
                    some = bounds[j : j + len(parts)]
                    self.machine.finish(refs.out, first + j, left, parts, scale, some, rows_left)

                release = lambda: plgpu.barrier_arrive(refs.free.at[stage])
                self._scores(refs, stage, buffer, load_weights, bounds, release, finish)
                following = stage + consumers
                return jnp.where(following >= self.stages, following - self.stages, following)

            steps = lax.div(jnp.maximum(end - begin - skip, 0) + consumers - 1, jnp.int32(consumers))
            lax.fori_loop(0, steps, score_tile, lax.rem(count + skip, jnp.int32(self.stages)))
            self.machine.fence()
            plgpu.barrier_arrive(refs.query_free.at[buffer])
            return ()

        self._walk(refs, share, visit)

    def _scores(
        self, refs: _Refs, stage, buffer, load_weights: Callable[[int], Array], bounds, release, finish
    ):
        """Call ``finish(j, parts, scale)`` with what a tile gives for one or two new tokens from j on.

        As many tokens as fit share one product. `release` is called as soon as the tile has been read for the last time.
        """
        n, heads = self.n, self.heads
        products_needed = -(-n // tokens_at_once(self.config, "product_columns", heads))
        group = -(-n // products_needed)
        half_scale = 0.5 * plgpu.load(refs.tile_scales.at[stage], layout=_PER_KEY, optimized=False)

        def score(first: int):
            size = min(group, n - first)

            def multiply(products):
                some = refs.queries.at[buffer, pl.ds(first * heads, size * heads)]
                plgpu.wgmma(products, refs.tiles.at[stage], some.transpose((1, 0)))
                if first == 0:
                    # The scales have been read; waiting for that costs nothing while the product runs.
                    self.machine.fence()
                return products[...]

            products = pl.run_scoped(multiply, plgpu.ACC((TILE, size * heads), jnp.float32))
            if first + size == n:
                release()
            for j in range(0, size, 2):
                some = range(j, min(j + 2, size))
                own = [products[:, k * heads : (k + 1) * heads] for k in some]
                parts = [weighted_sum(x, load_weights(first + k)) for x, k in zip(own, some, strict=True)]
                finish(first + j, parts, half_scale)

        if group == n:
            score(0)
            return
        for first in range(0, n, group):
            # Always true, but the compiler must not know: it would mix a product's sums with the next product, for which
            # there are not enough registers.
            pl.when(bounds[first][1] >= 0)(functools.partial(score, first))


def weighted_sum(products: Array, weights: Array) -> Array:
    """``2 * weights[h] * relu(products[:, h])``, added up over groups of columns: float32[64, 8].

    Twice relu is ``x + |x|``: an addition, of which a multiprocessor does twice as many a cycle as maxima. `finish` adds up
    the rest, of which a thread has two columns; a sum over all columns here would leave it eight, whose additions are a
    tenth of the kernel's instructions.
    """
    parts = []
    for left in range(0, products.shape[1], COLUMNS):
        product = products[:, left : left + COLUMNS]
        weight = lax.broadcast_in_dim(weights[left : left + COLUMNS], product.shape, [1])
        parts.append((product + jnp.abs(product)) * weight)
    return functools.reduce(jnp.add, parts)
