"""What one program of the top-k kernels does: select from one span of one row (topk_triton.py launches it)."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from dsa_jax.pallas import topk_scores, topk_search
from dsa_jax.pallas.topk_ranks import first_of_level, ranked
from dsa_jax.pallas.topk_scores import Geometry, Scores

_SAMPLE = 2048  # scores that the first guess of a threshold is made from


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static facts of one launch.

    Attributes:
        k: entries per row.
        columns: columns of the row that limits count.
        spans: programs per row.
        span: columns of a program.
        tiles: tile sizes, ascending.
        listed: a span may be longer than a tile, so that its program keeps a candidate list.
        merged: spans of all launches before, of which this one merges the last one's finds; empty if it is the first.
        page_size: the result holds cache rows of pages this large; 0 for positions.
        warps: warps of a program.
        exact: compare integers, so that flushed subnormals do not matter.
    """

    k: int
    columns: int
    spans: int
    span: int
    tiles: tuple[int, ...]
    listed: bool
    merged: tuple[int, ...]
    page_size: int
    warps: int
    exact: bool
    interpret: bool

    @property
    def kept(self) -> int:
        """Finds of a full span: k, or all of a span that is shorter."""
        return min(self.span, self.k)


def select_span(shape: Shape, refs: dict[str, Any]) -> None:
    """Decide what there is to do for one span of one row, and with which tile."""
    program = pl.program_id(0)
    row, span = program // shape.spans, program % shape.spans
    limit = jnp.clip(pltriton.load(refs["limits"].at[row]), 0, shape.columns)
    # What the launches before left of the row. All spans of a row but its last are full, so its finds lie without gaps.
    left, busy = limit, limit > shape.k
    for merged in shape.merged:
        busy &= left > merged  # where one span held all that was left, the result is complete
        full, kept = left // merged, min(merged, shape.k)
        left = full * kept + jnp.minimum(left - full * merged, kept)
    length = jnp.clip(left - span * shape.span, 0, shape.span)
    if not shape.merged:

        @pl.when((limit <= shape.k) & (span == 0))
        def _():
            index = jnp.arange(pl.next_power_of_2(shape.k), dtype=jnp.int32)
            value = jnp.where(index < limit, _result(shape, refs, row, index, index < limit), -1)
            pltriton.store(refs["result"].at[row, index], value, mask=index < shape.k)

    work = _Work(shape, refs, row, span, left <= shape.span)
    for smaller, tile in zip((0, *shape.tiles[:-1]), shape.tiles, strict=True):
        largest = tile == shape.tiles[-1]
        fits = busy & (length > smaller) if largest else busy & (length > smaller) & (length <= tile)

        @pl.when(fits)
        def _(tile=tile, listed=largest and shape.listed):
            (_select_long if listed else _select_short)(work, tile, length)


class _Work(NamedTuple):
    """What a program works on; `final` tells whether its finds are the row's result."""

    shape: Shape
    refs: dict[str, Any]
    row: Array
    span: Array
    final: Array


class _Source(NamedTuple):
    """Where a tile comes from: `count` scores of the row from `start` of the span on, or of the candidate list."""

    start: Array
    count: Array
    listed: Array | None  # bool scalar; None if never


def _select_short(work: _Work, tile: int, length: Array) -> None:
    """A span that one tile holds."""
    source = _Source(jnp.int32(0), length, None)
    geometry, scores, sample = _read_tile(work, source, tile)
    threshold = _threshold(work, source, scores, sample, _constant(topk_scores.NAN, length), length)

    def store(column, take, rank):
        _store_finds(work, source, column, take, rank)

    _emit(geometry, source, _chosen(work, source, geometry, scores, threshold), store)


def _select_long(work: _Work, tile: int, length: Array) -> None:
    """A span of several tiles: each adds to a candidate list, from which the last turn selects."""
    program = work.row * work.shape.spans + work.span
    # With no chunks the last and only turn reads the row itself.
    chunks = jnp.where(length > tile, (length + (tile - 1)) // tile, 0)

    def turn(index, state):
        found, floor = state
        last = index == chunks
        listed = last & (chunks > 0)
        start = jnp.where(last, 0, index * tile)
        source = _Source(start, jnp.where(listed, found, jnp.minimum(length - start, tile)), listed)
        floor = jnp.where(listed, topk_scores.NAN, floor)
        geometry, scores, sample = _read_tile(work, source, tile)
        reached = lax.cond(
            floor > topk_scores.NAN, lambda: scores.counts(floor, floor)[0], lambda: source.count
        )
        threshold = _threshold(work, source, scores, sample, floor, reached)

        def store(column, take, rank):
            @pl.when(last)
            def _():
                _store_finds(work, source, column, take, rank)

            @pl.when(~last)
            def _():
                place = found + jnp.where(take, rank, work.shape.k)
                position = work.span * work.shape.span + source.start + column
                value = _load(work, source, column, take)
                pltriton.store(work.refs["list_positions"].at[program, place], position, mask=take)
                pltriton.store(work.refs["list_values"].at[program, place], value, mask=take)

        _emit(geometry, source, _chosen(work, source, geometry, scores, threshold), store)
        _barrier(work)  # the list must be complete before it is read
        # k scores reach the threshold; a later one only has a chance above it.
        floor = jnp.where(reached > work.shape.k, threshold.key + 1, floor)
        return found + jnp.minimum(threshold.reached, work.shape.k), floor

    lax.fori_loop(jnp.int32(0), chunks + 1, turn, (jnp.int32(0), jnp.int32(topk_scores.NAN)))


def _load(work: _Work, source: _Source, index: Array, mask: Array | None = None) -> Array:
    """Scores of a source at some indices as f32, NaN beyond its end."""
    shape, refs = work.shape, work.refs
    inside = index < source.count if mask is None else mask

    def read(ref, *at):
        # A mask that is constant over four neighbours lets four be loaded at once; where rows end inside a group of
        # four, the loads are single anyway. (Written with `//`, the sign rules would hide the constancy from Triton.)
        quad = lax.div(index, jnp.full_like(index, 4)) * 4
        quads = quad < source.count if ref.shape[-1] % 4 == 0 and mask is None else inside
        value = pltriton.load(ref.at[at], mask=quads, other=jnp.nan).astype(jnp.float32)
        return jnp.where(inside, value, jnp.nan)

    from_row = lambda: read(refs["logits"], work.row, work.span * shape.span + source.start + index)
    if source.listed is None:
        return from_row()
    program = work.row * shape.spans + work.span
    return lax.cond(source.listed, lambda: read(refs["list_values"], program, index), from_row)


class _Sample(NamedTuple):
    """Some scores of a tile, spread over it, and its first one."""

    scores: Array
    one: Array
    count: Array


def _read_tile(work: _Work, source: _Source, tile: int) -> tuple[Geometry, Scores, _Sample]:
    """All scores of a source, in registers, and a sample that arrives before them."""
    size = min(_SAMPLE, tile)
    stride = jnp.maximum(source.count // size, 1)
    spread = _load(work, source, jnp.arange(size, dtype=jnp.int32) * stride)
    sample = _Sample(spread, _load(work, source, jnp.int32(0)), jnp.minimum(source.count, size))
    geometry = Geometry.of(tile, work.shape.warps)
    leaves = [_load(work, source, geometry.columns(leaf)) for leaf in range(geometry.leaves)]
    if work.shape.exact:
        return geometry, topk_scores.KeyScores(leaves), sample
    return geometry, topk_scores.FloatScores(leaves, hardware=not work.shape.interpret), sample


def _threshold(
    work: _Work, source: _Source, scores: Scores, sample: _Sample, floor: Array, reached: Array
) -> topk_search.Threshold:
    """The cut of a tile: the floor itself if no more than k scores reach it."""

    def search():
        wanted = jnp.int32(work.shape.k)
        first = topk_search.guess(*sample, wanted, source.count)
        return tuple(topk_search.find_threshold(scores, first, wanted, floor, reached))

    found = lax.cond(reached > work.shape.k, search, lambda: (floor, reached, _constant(0, reached)))
    return topk_search.Threshold(*found)


def _constant(value: int, like: Array) -> Array:
    """An int32 scalar that is computed: a literal cannot be the result of a branch in Triton."""
    return like - like + value


def _chosen(
    work: _Work, source: _Source, geometry: Geometry, scores: Scores, threshold: topk_search.Threshold
) -> list[Array]:
    """Masks of the scores that pass a threshold."""
    k, at_nan = work.shape.k, threshold.key == topk_scores.NAN
    key = jnp.maximum(threshold.key, topk_scores.NEGATIVE_INFINITY)

    def tied():
        # More reach the threshold than there is room for: of those on it, the first ones. On the NaN level all numbers
        # are above it and all else that exists is on it.
        reaching = scores.compared(key)
        beyond = scores.compared(jnp.where(key == -1, 1, key + 1))  # -0.0 and +0.0 are one level
        columns = [geometry.columns(leaf) for leaf in range(geometry.leaves)]
        existing = topk_scores.present([column < source.count for column in columns])
        above = [jnp.where(at_nan, r, b) for r, b in zip(reaching, beyond, strict=True)]
        level = [jnp.where(at_nan, e, r) & ~a for e, r, a in zip(existing, reaching, above, strict=True)]
        room = jnp.where(threshold.reached > k, k - threshold.above, k)
        return [
            a | t for a, t in zip(above, first_of_level(level, room, _rows(geometry, source)), strict=True)
        ]

    return lax.cond((threshold.reached <= k) & ~at_nan, lambda: scores.masks(key), tied)


def _rows(geometry: Geometry, source: _Source) -> Array:
    """Rows of a leaf, as a number that the compiler does not know: it would unroll the loops over them."""
    return jnp.minimum(source.count, geometry.rows)  # a source of fewer scores has them all in row 0


def _emit(geometry: Geometry, source: _Source, masks: list[Array], store) -> None:
    """Hand what the masks choose to `store(column, take, rank)`, ranked by column."""
    ranks = ranked(masks)
    for leaf in range(geometry.leaves):

        def one_row(row, _, leaf=leaf):
            rank = ranks.first(leaf, row)
            for i in range(4):
                take = ranks.bit(leaf, row, i)
                store(geometry.column(leaf, row, i), take > 0, rank)
                rank = rank + take
            return _

        lax.fori_loop(jnp.int32(0), _rows(geometry, source), one_row, jnp.int32(0))


def _store_finds(work: _Work, source: _Source, column: Array, take: Array, rank: Array) -> None:
    """Write what was selected: as the row's result, or as this span's finds."""
    shape, refs = work.shape, work.refs
    rank = jnp.where(take, rank, shape.k)  # apart: the interpreter writes old values back where masked
    own = work.span * shape.span + source.start + column
    if shape.merged:
        position = pltriton.load(refs["found"].at[work.row, own], mask=take, other=0)
    elif source.listed is not None:
        program = work.row * shape.spans + work.span
        listed = lambda: pltriton.load(refs["list_positions"].at[program, column], mask=take, other=0)
        position = lax.cond(source.listed, listed, lambda: own)
    else:
        position = own

    @pl.when(work.final)
    def _():
        value = _result(shape, refs, work.row, position, take)
        pltriton.store(refs["result"].at[work.row, rank], value, mask=take)

    if shape.spans > 1:

        @pl.when(~work.final)
        def _():
            place = work.span * shape.kept + rank
            pltriton.store(refs["positions"].at[work.row, place], position, mask=take)
            pltriton.store(refs["values"].at[work.row, place], _load(work, source, column, take), mask=take)


def _result(shape: Shape, refs: dict[str, Any], row: Array, position: Array, mask: Array) -> Array:
    """What stands for a position in the result: itself, or its row in the cache, -1 where the table has no page."""
    if not shape.page_size:
        return position
    count, width = refs["page_table"].shape
    request = pltriton.load(refs["requests"].at[row])
    page = lax.shift_right_logical(position, jnp.full_like(position, shape.page_size.bit_length() - 1))
    # What the table lacks is not loaded: the address could lie anywhere.
    mask &= (request >= 0) & (request < count) & (page < width)
    slot = pltriton.load(refs["page_table"].at[request, page], mask=mask, other=-1)
    return jnp.where(slot >= 0, slot * shape.page_size + (position & (shape.page_size - 1)), -1)


def _barrier(work: _Work) -> None:
    """Wait for all threads of the program and their stores; the interpreter has only one."""
    if not work.shape.interpret:
        pltriton.debug_barrier()
