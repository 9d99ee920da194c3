"""The body of the Hopper kernel for FP4 keys; see `paged_logits_fp4_mosaic` for what it does."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from dsa_jax.pallas import paged_logits_fp4_codes as codes
from dsa_jax.pallas import paged_logits_fp4_steps as steps
from dsa_jax.pallas.paged_logits_config import HEAD_DIM
from dsa_jax.pallas.paged_logits_kernel import PagedLogitsKernel
from dsa_jax.pallas.paged_logits_plan import TILE, whole_tiles
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
    whose queries do not fit. Behind the ring every compute warpgroup has a stage of its own, for tiles it has to see again.
    """

    steps: steps.Steps = dataclasses.field(default_factory=steps.on_card)
    weights_in_registers: int = 128
    """Up to this many weights (new tokens x heads) stay in registers over a whole request."""

    def call(
        self, plan, misfits, limits, table, offset, q, factors, keys, scales, *, rows: int, interpret
    ) -> Array:
        """Run the kernel for `rows` rows of scores; cuts off the columns added to complete a tile."""
        kernel = plgpu.kernel(
            self.body,
            out_type=jax.ShapeDtypeStruct((rows, self.columns), jnp.float32),
            grid=(plan.shape[0],),
            grid_names=("block",),
            num_threads=self.config.compute_warpgroups + 1,
            thread_name="warpgroup",
            scratch_types=self.scratch(),
            interpret=interpret,
            compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
            kernel_name="paged_mqa_logits_fp4",
        )
        lines = keys.reshape(keys.shape[0], -1, _LINE, 4)
        out = kernel(
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
        return out[:, : table.shape[1] * self.page_size]

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers of one block."""
        buffers, stages = self.config.query_buffers, self.stages + self.config.compute_warpgroups
        return super().scratch() | dict(
            head_weights=plgpu.SMEM((buffers, self.n, 1 + GROUPS, self.heads), jnp.float32),
            tiles=plgpu.SMEM((stages, _LINES, _LINE), jnp.int32),
            tile_scales=plgpu.SMEM((stages, TILE), jnp.int32),
            full=plgpu.Barrier(num_arrivals=2 * self.parts, num_barriers=stages),
        )

    def _copy_part(self, refs, page, tile, stage, i: int):
        """Start the copies of a tile's i-th page, or of the tile's part of a larger page."""
        source, scales_source = (page,), (page,)
        target, scales_target = (stage,), (stage,)
        if self.tiles_per_page > 1:
            part = lax.rem(tile, jnp.int32(self.tiles_per_page))
            source, scales_source = (page, pl.ds(part * _LINES, _LINES)), (page, pl.ds(part * TILE, TILE))
        if self.parts > 1:
            lines = _LINES // self.parts
            target = (stage, pl.ds(i * lines, lines))
            scales_target = (stage, pl.ds(i * self.page_size, self.page_size))
        full = refs.full.at[stage]
        plgpu.copy_gmem_to_smem(refs.keys.at[source], refs.tiles.at[target], full)
        plgpu.copy_gmem_to_smem(refs.key_scales.at[scales_source], refs.tile_scales.at[scales_target], full)

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
            if n * self.heads <= self.weights_in_registers:
                kept = [load_weights(j) for j in range(n)]
                load_weights = lambda j: kept[j]
            # The first of this request's tiles that is this warpgroup's turn.
            skip = lax.rem(warpgroup + consumers - lax.rem(count, jnp.int32(consumers)), jnp.int32(consumers))
            tiles = lax.div(jnp.maximum(end - begin - skip, 0) + consumers - 1, jnp.int32(consumers))

            def score_tile(step, carry):
                stage, *doubts = carry
                left = (begin + skip + step * consumers) * TILE
                plgpu.barrier_wait(refs.full.at[stage])
                words = self.steps.load(refs.tiles.at[stage])
                scales = plgpu.load(refs.tile_scales.at[stage], layout=_PER_KEY, optimized=False)
                self.fence()
                plgpu.barrier_arrive(refs.free.at[stage])
                column = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=_PER_KEY) + left
                top, drop = codes.spread(scales)
                inside = column < longest
                doubts = [
                    jnp.where(inside, old | new, old)
                    for old, new in zip(doubts, codes.doubts(top, drop), strict=True)
                ]
                scores = self._scores(refs, buffer, self.steps.expand(words, drop), load_weights)
                scale = lax.bitcast_convert_type((top - codes.SHIFT) << 23, jnp.float32)
                for j in range(n):
                    seen = jnp.where(column < row_limits[j], scores[j] * scale, -jnp.inf)
                    self._store(refs, request, first, j, left, seen)
                following = stage + consumers
                return jnp.where(following >= self.stages, following - self.stages, following), *doubts

            none = plgpu.layout_cast(jnp.zeros((TILE,), jnp.int32), _PER_KEY)
            stage = lax.rem(count + skip, jnp.int32(self.stages))
            _, *doubts = lax.fori_loop(0, tiles, score_tile, (stage, none, none))
            # The warps agree on whether one of them has met an exception.
            again = self.steps.any_of(codes.doubtful(*doubts).astype(jnp.int32)) | refs.groups[request, 0]

            @pl.when(again != 0)
            def _():
                spare = self.stages + warpgroup
                place = lambda step: begin + skip + step * consumers

                def score_again(step, carry):
                    self._score_exception(refs, spare, request, first, buffer, place(step), longest)
                    return carry

                lax.fori_loop(0, tiles, score_again, ())

            self.fence()
            plgpu.barrier_arrive(refs.query_free.at[buffer])

        self._walk(refs, share, visit)

    def _scores(self, refs, buffer, expanded, load_weights):
        """Scores of one tile before the keys' scales, float32[64] for each new token."""
        n, heads = self.n, self.heads
        group = -(-n // -(-n // (self.config.product_columns // heads)))
        scores = []
        for first in range(0, n, group):
            size = min(group, n - first)
            some = refs.queries.at[buffer, pl.ds(first * heads, size * heads)]
            products = self.steps.multiply(expanded, some)
            for j in range(size):
                scores.append(_head_sum(products[:, j * heads : (j + 1) * heads], load_weights(first + j)))
        return scores

    def _score_exception(self, refs, spare, request, first, buffer, tile, longest):
        """Look at a tile again, and if it is the exception or the queries are, score it group by group."""
        last_page = refs.table.shape[1] - 1
        for i in range(self.parts):
            page = tile // self.tiles_per_page if self.parts == 1 else tile * self.parts + i
            # A page behind the request's last is nobody's: the last is read again.
            page = jnp.minimum(jnp.minimum(page, last_page), (longest - 1) // self.page_size)
            slot = refs.table[request, page]
            self._copy_part(refs, slot * self.page_scale + refs.offset[0], tile, spare, i)
        plgpu.barrier_wait(refs.full.at[spare])
        scales = plgpu.load(refs.tile_scales.at[spare], layout=_PER_KEY, optimized=False)
        column = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=_PER_KEY) + tile * TILE
        doubtful = codes.doubtful(*codes.doubts(*codes.spread(scales))) & (column < longest)
        once = self.steps.any_of(doubtful.astype(jnp.int32)) | refs.groups[request, 0]

        @pl.when(once != 0)
        def _():
            self._score_by_groups(refs, spare, request, first, buffer, scales, column, tile * TILE, once)

        plgpu.commit_smem()  # all threads have read before the next copy

    def _score_by_groups(self, refs, stage, request, first, buffer, scales, column, left, once):
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
                    words = self.steps.load(refs.tiles.at[stage])
                    group = plgpu.broadcasted_iota(jnp.int32, words.shape, 1, layout=steps.WORD_LAYOUT) >> 2
                    own = jnp.where(group == g, words, 0)
                    products = self.steps.multiply(self.steps.expand(own, None), some)
                    of_key = codes.power(codes.scale_bytes(scales, g)) * 2.0**-codes.SHIFT
                    products = products * lax.broadcast_in_dim(of_key, products.shape, [0])
                    return total + products * lax.broadcast_in_dim(load(1 + g), products.shape, [1])

                nothing = plgpu.layout_cast(jnp.zeros((TILE, _FEW_HEADS), jnp.float32), plgpu.Layout.WGMMA)
                return score + _head_sum(lax.fori_loop(0, GROUPS * once, of_group, nothing), load(0))

            nothing = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), _PER_KEY)
            score = lax.fori_loop(0, self.heads // _FEW_HEADS * once, of_heads, nothing)
            seen = jnp.where(column < refs.limits[request, j], score, -jnp.inf)
            self._store(refs, request, first, j, left, seen)
            return carry

        lax.fori_loop(0, self.n * once, of_row, ())


def _head_sum(products: Array, half_weights: Array) -> Array:
    """``sum_h weight[h] * max(product[h], 0)``. x + |x| is twice the maximum, and needs no comparison."""
    doubled = products + jnp.abs(products)
    return jnp.sum(doubled * lax.broadcast_in_dim(half_weights, doubled.shape, [1]), axis=1)
