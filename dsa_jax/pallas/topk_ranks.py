"""From masks of chosen scores to ranks in order of column.

A mask is int32`[warps, 32]` a leaf, bit `4 * row + i` for each score of a thread (topk_scores.py). Since a warp owns a
contiguous range of columns, only one number a warp has to cross warps: how many scores it chose.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class Ranked(NamedTuple):
    """Ranks of a tile's chosen scores.

    Attributes:
        masks: who is chosen.
        lanes: for each leaf int32`[warps, 32]`, four bytes: chosen in lower lanes of the warp, by row of the leaf.
        rows: for each leaf int32`[warps]`, four bytes: chosen in the whole warp, by row of the leaf.
        starts: for each leaf int32`[warps]`, chosen in all columns before the leaf's first of the warp.
    """

    masks: list[Array]
    lanes: list[Array]
    rows: list[Array]
    starts: list[Array]

    def first(self, leaf: int, row: Array) -> Array:
        """int32`[warps, 32]`, rank of a thread's first column of a row of a leaf."""
        before = self.starts[leaf]
        for earlier in range(3):
            before = before + jnp.where(row > earlier, _byte(self.rows[leaf], jnp.int32(earlier)), 0)
        return before[:, None] + _byte(self.lanes[leaf], row)

    def bit(self, leaf: int, row: Array, i: int) -> Array:
        """int32`[warps, 32]`, 1 where a thread's i-th column of a row is chosen."""
        return lax.shift_right_logical(self.masks[leaf], jnp.full_like(self.masks[leaf], 4 * row + i)) & 1


def ranked(masks: list[Array]) -> Ranked:
    """Rank the chosen scores of a tile."""
    counts = [_row_counts(mask) for mask in masks]
    lanes = [jnp.cumsum(count, axis=1) - count for count in counts]
    rows = [jnp.sum(count, axis=1) for count in counts]
    sums = [sum((_byte(row, jnp.int32(i)) for i in range(1, 4)), _byte(row, jnp.int32(0))) for row in rows]
    before = _before(sum(sums[1:], sums[0]))
    starts = []
    for leaf_sum in sums:
        starts.append(before)
        before = before + leaf_sum
    return Ranked(masks, lanes, rows, starts)


def first_of_level(level: list[Array], room: Array, rows: Array) -> list[Array]:
    """The first `room` of the scores that masks choose, as masks; `rows` is the number of rows of a leaf."""
    ranks = ranked(level)

    def keep(leaf: int) -> Array:
        def one_row(row, mask):
            rank = ranks.first(leaf, row)
            for i in range(4):
                bit = ranks.bit(leaf, row, i)
                mask = mask | lax.shift_left(jnp.where(rank < room, bit, 0), jnp.full_like(bit, 4 * row + i))
                rank = rank + bit
            return mask

        return lax.fori_loop(jnp.int32(0), rows, one_row, level[leaf] & 0)

    return [keep(leaf) for leaf in range(len(level))]


def _row_counts(mask: Array) -> Array:
    """Bits set in each of four groups of four, as four bytes."""
    pairs = mask - (lax.shift_right_logical(mask, jnp.full_like(mask, 1)) & 0x5555)
    fours = (pairs & 0x3333) + (lax.shift_right_logical(pairs, jnp.full_like(mask, 2)) & 0x3333)
    spread = (fours | (fours << 8)) & 0x00FF00FF
    return (spread | (spread << 4)) & 0x0F0F0F0F


def _byte(word: Array, index: Array) -> Array:
    """A byte of a word. A row of a warp holds 128 scores, so that sums of counts fit."""
    return lax.shift_right_logical(word, jnp.full_like(word, 8 * index)) & 0xFF


def _before(totals: Array) -> Array:
    """int32`[warps]`, sums of all lower warps."""
    shape = (totals.shape[0], totals.shape[0])
    lower = lax.broadcasted_iota(jnp.int32, shape, 1) < lax.broadcasted_iota(jnp.int32, shape, 0)
    return jnp.sum(jnp.where(lower, totals[None, :], 0), axis=1)
