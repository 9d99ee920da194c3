"""The body of the Hopper kernel for FP4 keys; see `paged_logits_fp4_mosaic` for what it does."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from dsa_jax.pallas import paged_logits_fp4_codes as codes
from dsa_jax.pallas import paged_logits_fp4_steps as steps
from dsa_jax.pallas.paged_logits_config import HEAD_DIM, tokens_at_once
from dsa_jax.pallas.paged_logits_kernel import PagedLogitsKernel, weighted_sum
from dsa_jax.pallas.paged_logits_plan import HEADER, TILE, planned_tiles, whole_tiles
from dsa_jax.quant.fp4 import GROUPS

_E4M3 = jnp.float8_e4m3fn
_PER_KEY = steps.PER_KEY
_PER_HEAD = plgpu.Layout.WGMMA.reduce(0)
_LINE = 128
"""Words of a line of eight keys: what the copy engine takes at a time."""
_LINES = TILE * codes.WORDS // _LINE
"""Lines of a tile."""
_FEW_HEADS = 32
"""Heads of one product in the exceptional case."""


@dataclasses.dataclass(frozen=True)
class PagedLogitsFp4Kernel(PagedLogitsKernel):
    """The kernel of FP8 keys with other tiles: words of codes, which a warpgroup expands in its registers.

    The queries come as `query_codes` makes them; the groups' place among the arguments, which decode rows leave empty, says
    whose queries do not fit. A stage of the ring holds `together` consecutive tiles of a request; where a share ends with
    fewer, its last tile stands there again. Behind the ring every compute warpgroup has a stage of its own, for tiles it has
    to see again.
    """

    kernel_name: ClassVar[str] = "paged_mqa_logits_fp4"

    steps: steps.Steps = dataclasses.field(default_factory=steps.on_card)
    together: int = 1

    def call(
        self, plan, misfits, limits, table, offset, q, factors, keys, scales, *, rows: int, interpret
    ) -> Array:
        """Run the kernel for `rows` rows of scores; cuts off the columns added to complete a tile."""
        lines = keys.reshape(keys.shape[0], -1, _LINE, 4)
        out = self.launch(plan.shape[0], rows, interpret)(
            plan,
            misfits,
            limits.astype(jnp.int32),
            whole_tiles(table, self.page_size),
            jnp.asarray(offset, jnp.int32).reshape(1),
            lax.bitcast_convert_type(q, _E4M3).reshape(rows * self.heads, HEAD_DIM),
            factors.reshape(rows, 1 + GROUPS, self.heads),
            lax.bitcast_convert_type(lines, jnp.int32),
            scales,
        )
        return out[:, : table.shape[1] * self.page_size].astype(self.dtype)

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers of one block."""
        buffers, stages = self.config.query_buffers, self.stages + self.config.compute_warpgroups
        return super().scratch() | dict(
            head_weights=plgpu.SMEM((buffers, self.n, 1 + GROUPS, self.heads), jnp.float32),
            tiles=plgpu.SMEM((stages, self.together * _LINES, _LINE), jnp.int32),
            tile_scales=plgpu.SMEM((stages, self.together * TILE), jnp.int32),
            full=plgpu.Barrier(num_arrivals=2 * self.parts * self.together, num_barriers=stages),
        )

    def _walk(self, refs, share, visit):
        """As for FP8 keys, but ``count`` counts stages: of two tiles, perhaps, and the last of a request one."""
        first_request, first_tile, first_end, last_request, last_tile = share[:5]

        def of_request(request, carry):
            segment, count = carry
            begin = jnp.where(request == first_request, first_tile, 0)
            end = lax.cond(
                request == first_request,
                lambda: first_end,
                lambda: jnp.where(request == last_request, last_tile, self._tiles(refs, request)),
            )
            some = end > begin

            @pl.when(some)
            def _():
                visit(request, begin, end, segment, count)

            used = jnp.where(some, self._stages_of(begin, end), 0)
            return segment + some.astype(jnp.int32), count + used

        return lax.fori_loop(first_request, last_request + 1, of_request, (jnp.int32(0), jnp.int32(0)))

    def _stages_of(self, begin, end):
        return (end - begin + (self.together - 1)) // self.together

    def _copy_tiles(self, refs, share, layer_offset, filling):
        """Copy the block's share into the ring; returns how many requests and how many stages that were."""
        block = lax.axis_index("block")

        def visit(request, begin, end, segment, count):
            buffer = lax.rem(segment, jnp.int32(self.config.query_buffers))

            @pl.when(segment >= self.config.query_buffers)
            def _():
                plgpu.barrier_wait(refs.query_free.at[buffer])

            query_full = refs.query_full.at[buffer]
            rows, columns = (
                pl.ds(request * self.n, self.n),
                pl.ds(request * self.n * self.heads, self.n * self.heads),
            )
            plgpu.copy_gmem_to_smem(refs.q.at[columns], refs.queries.at[buffer], query_full)
            plgpu.copy_gmem_to_smem(refs.weights.at[rows], refs.head_weights.at[buffer], query_full)

            def slots_of(tile):
                """Slots of a stage's pages; the plan has the block's first ones, which is one trip to memory less."""
                tiles = [jnp.minimum(tile + t, end - 1) for t in range(self.together)]
                planned = lambda: [
                    refs.plan[block, HEADER + (each - begin) * self.parts + i]
                    for each in tiles
                    for i in range(self.parts)
                ]
                of_table = lambda: [slot for each in tiles for slot in self._slots_of(refs, request, each)]
                soon = (segment == 0) & (tile - begin + self.together <= planned_tiles(self.page_size))
                return lax.cond(soon, planned, of_table)

            def copy_stage(i, carry):
                stage, count, *slots = carry
                tile = begin + i * self.together

                @pl.when(count >= self.stages)
                def _():
                    plgpu.barrier_wait(refs.free.at[stage])

                self._copy_stage(refs, slots, tile, end, stage, layer_offset)
                following = slots_of(tile + self.together)
                return jnp.where(stage == self.stages - 1, 0, stage + 1), count + 1, *following

            stage = lax.rem(count, jnp.int32(self.stages))
            lax.fori_loop(0, self._stages_of(begin, end), copy_stage, (stage, count, *slots_of(begin)))

        return self._walk(refs, share, visit)

    def _slots_of(self, refs, request, tile):
        """Slots of a tile's pages. The page after a request's last one is nobody's: the last is read again."""
        last = refs.table.shape[1] - 1
        if self.parts == 1:
            return [refs.table[request, jnp.minimum(tile // self.tiles_per_page, last)]]
        last = jnp.maximum((self._length(refs, request) - 1) // self.page_size, 0)
        return [refs.table[request, jnp.minimum(tile * self.parts + i, last)] for i in range(self.parts)]

    def _copy_stage(self, refs, slots, tile, end, stage, layer_offset):
        """Start the copies of a stage's tiles; `slots` are those of the tiles' pages."""
        full = refs.full.at[stage]
        for k, slot in enumerate(slots):
            t, i = divmod(k, self.parts)
            page = slot * self.page_scale + layer_offset
            lines, keys = _LINES // self.parts, TILE // self.parts
            source, scales_source = (page,), (page,)
            if self.tiles_per_page > 1:
                part = lax.rem(jnp.minimum(tile + t, end - 1), jnp.int32(self.tiles_per_page))
                source, scales_source = (page, pl.ds(part * lines, lines)), (page, pl.ds(part * keys, keys))
            place = t * self.parts + i
            target = refs.tiles.at[stage, pl.ds(place * lines, lines)]
            scales_target = refs.tile_scales.at[stage, pl.ds(place * keys, keys)]
            plgpu.copy_gmem_to_smem(refs.keys.at[source], target, full)
            plgpu.copy_gmem_to_smem(refs.key_scales.at[scales_source], scales_target, full)

    def _score_tiles(self, refs, share, warpgroup):
        n, consumers = self.n, self.config.compute_warpgroups

        def visit(request, begin, end, segment, count):
            buffer = lax.rem(segment, jnp.int32(self.config.query_buffers))
            row_limits = [refs.limits[request, j] for j in range(n)]
            longest = row_limits[0]
            for limit in row_limits[1:]:
                longest = jnp.maximum(longest, limit)
            first = self._first_row(refs, request)
            plgpu.barrier_wait(refs.query_full.at[buffer])
            load_weights = lambda j: plgpu.load(refs.head_weights.at[buffer, j, 0], layout=_PER_HEAD)
            if n * self.heads <= self.config.kept_weights:
                kept = [load_weights(j) for j in range(n)]
                load_weights = lambda j: kept[j]
            # The first of this request's tiles that is this warpgroup's turn.
            skip = lax.rem(warpgroup + consumers - lax.rem(count, jnp.int32(consumers)), jnp.int32(consumers))
            mine = jnp.maximum(self._stages_of(begin, end) - skip, 0)
            turns = lax.div(mine + consumers - 1, jnp.int32(consumers))
            first_tile = lambda turn: begin + (skip + turn * consumers) * self.together

            def score_stage(turn, carry):
                stage, *doubts = carry
                tile = first_tile(turn)
                left = tile * TILE
                plgpu.barrier_wait(refs.full.at[stage])
                words, scales = zip(
                    *(self._load_tile(refs, stage, t) for t in range(self.together)), strict=True
                )
                self.machine.fence()
                plgpu.barrier_arrive(refs.free.at[stage])
                tops, expand = [], []
                for t in range(self.together):
                    column = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=_PER_KEY) + (
                        left + t * TILE
                    )
                    # What lies beyond the request may look like anything; it must look like nothing special.
                    top, drop = codes.spread(jnp.where(column < longest, scales[t], codes.ONES))
                    doubts = codes.doubts(top, drop, *doubts)
                    tops.append(top)
                    expand.append(lambda words=words[t], drop=drop: self.steps.expand(words, drop))
                scores = self._scores(refs, buffer, expand, load_weights)

                def store(t):
                    scale = lax.bitcast_convert_type((tops[t] - codes.SHIFT) << 23, jnp.float32)
                    for j in range(0, n, 2):
                        bounds = [(None, limit) for limit in row_limits[j : j + 2]]
                        parts = scores[t][j : j + 2]
                        self.machine.finish(refs.out, first + j, left + t * TILE, parts, scale, bounds, None)

                store(0)
                for t in range(1, self.together):  # the last tile may stand here twice
                    pl.when(tile + t < end)(functools.partial(store, t))
                following = stage + consumers
                return jnp.where(following >= self.stages, following - self.stages, following), *doubts

            stage = lax.rem(count + skip, jnp.int32(self.stages))
            _, *doubts = lax.fori_loop(0, turns, score_stage, (stage, *_no_doubts()))
            # The warps agree on whether one of them has met an exception.
            again = self.steps.any_of(codes.doubtful(*doubts).astype(jnp.int32)) | refs.groups[request, 0]

            @pl.when(again != 0)
            def _():
                spare = self.stages + warpgroup

                def score_again(turn, carry):
                    self._score_exceptions(
                        refs, spare, request, first, buffer, first_tile(turn), end, longest
                    )
                    return carry

                lax.fori_loop(0, turns, score_again, ())

            self.machine.fence()
            plgpu.barrier_arrive(refs.query_free.at[buffer])

        self._walk(refs, share, visit)

    def _load_tile(self, refs, stage, t: int):
        """Words and scales of a tile of a stage."""
        words = self.steps.load(refs.tiles.at[stage, pl.ds(t * _LINES, _LINES)])
        scales = refs.tile_scales.at[stage, pl.ds(t * TILE, TILE)]
        return words, plgpu.load(scales, layout=_PER_KEY, optimized=False)

    def _scores(self, refs, buffer, expand, load_weights):
        """What a stage's tiles give before the keys' scales: for each tile, for each new token, float32[64, 8]."""
        n, heads = self.n, self.heads
        group = -(-n // -(-n // tokens_at_once(self.config, "product_columns", heads)))
        if group < n:  # several products with the same keys
            expanded = [make() for make in expand]
            expand = [lambda t=t: expanded[t] for t in range(self.together)]
        scores = [[] for _ in expand]
        for first in range(0, n, group):
            size = min(group, n - first)
            some = refs.queries.at[buffer, pl.ds(first * heads, size * heads)]
            for t, products in enumerate(self.steps.multiply(expand, some)):
                for j in range(size):
                    own = products[:, j * heads : (j + 1) * heads]
                    scores[t].append(weighted_sum(own, load_weights(first + j)))
        return scores

    def _score_exceptions(self, refs, spare, request, first, buffer, tile, end, longest):
        """Look at a stage's tiles again, and score those group by group that are exceptions, or all if the queries are."""
        tiles = [jnp.minimum(tile + t, end - 1) for t in range(self.together)]
        slots = [slot for each in tiles for slot in self._slots_of(refs, request, each)]
        self._copy_stage(refs, slots, tile, end, spare, refs.offset[0])
        plgpu.barrier_wait(refs.full.at[spare])
        for t, each in enumerate(tiles):
            _, scales = self._load_tile(refs, spare, t)
            column = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=_PER_KEY) + each * TILE
            doubts = codes.doubts(*codes.spread(scales), *_no_doubts())
            doubtful = codes.doubtful(*doubts) & (column < longest)
            once = self.steps.any_of(doubtful.astype(jnp.int32)) | refs.groups[request, 0]
            place = functools.partial(self._score_by_groups, refs, spare, t, request, first, buffer)
            pl.when(once != 0)(functools.partial(place, scales, column, each * TILE, once))
        plgpu.commit_smem()  # all threads have read before the next copy

    def _score_by_groups(self, refs, stage, t, request, first, buffer, scales, column, left, once):
        """Scores of a tile with a product of its own for each group, whose powers come after it: any powers will do.

        Loops in loops over a few heads at a time, because this must not take the registers that the common case needs;
        `once` is 1, but the compiler must not know that all of them are short, or it unrolls them.
        """

        def of_row(j, carry):
            def of_heads(i, score):
                heads = pl.ds(i * _FEW_HEADS, _FEW_HEADS)
                load = lambda k: plgpu.load(refs.head_weights.at[buffer, j, k, heads], layout=_PER_HEAD)
                some = refs.queries.at[buffer, pl.ds(j * self.heads + i * _FEW_HEADS, _FEW_HEADS)]

                def of_group(g, total):
                    words, _ = self._load_tile(refs, stage, t)
                    group = plgpu.broadcasted_iota(jnp.int32, words.shape, 1, layout=steps.WORD_LAYOUT) >> 2
                    own = jnp.where(group == g, words, 0)
                    (products,) = self.steps.multiply([lambda: self.steps.expand(own, None)], some)
                    of_key = codes.power(codes.scale_bytes(scales, g)) * 2.0**-codes.SHIFT
                    products = products * lax.broadcast_in_dim(of_key, products.shape, [0])
                    return total + products * lax.broadcast_in_dim(load(1 + g), products.shape, [1])

                nothing = plgpu.layout_cast(jnp.zeros((TILE, _FEW_HEADS), jnp.float32), plgpu.Layout.WGMMA)
                own = weighted_sum(lax.fori_loop(0, GROUPS * once, of_group, nothing), load(0))
                return score + jnp.sum(own, axis=1)

            nothing = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), _PER_KEY)
            score = lax.fori_loop(0, self.heads // _FEW_HEADS * once, of_heads, nothing)
            seen = jnp.where(column < refs.limits[request, j], score, -jnp.inf)
            refs.out.at[first + j, pl.ds(left, TILE)][...] = seen.astype(self.written)
            return carry

        lax.fori_loop(0, self.n * once, of_row, ())


def _no_doubts() -> list[Array]:
    return [plgpu.layout_cast(jnp.zeros((TILE,), dtype), _PER_KEY) for dtype in (jnp.int32, jnp.uint32)]
