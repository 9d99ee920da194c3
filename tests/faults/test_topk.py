"""Faults of top-k."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import cases
from dsa_jax import ops
from numpy_model import attention

NEGATIVE_NAN = np.array([0xFFFFFFFF], np.uint32).view(np.float32)[0]


def choose(rows, limits, k) -> list[list[int]]:
    """Top-k of rows of equal width."""
    return cases.topk_indices(np.array(rows, np.float32), np.array(limits, np.int32), k).tolist()


def test_b16_entries_past_the_count_are_not_read():
    """Rows 4, 0, 9 and then nothing: attention over those three, though every other row of the pool is NaN."""
    layout = cases.layout(page_size=16)
    values = np.random.default_rng(0).normal(size=(3, 12)).astype(np.float32)
    cache = cases.write(cases.poisoned(layout), "key", 0, [4, 0, 9], values)
    q = np.random.default_rng(1).normal(size=(1, 2, 12)).astype(np.float32)
    wanted, _ = attention(q[0], values, cases.LATENT, 0.5)
    for rows in ([4, 0, 9] + [-1] * 5, [-1, 4, -1, -1, 0, 9, -1, -1], [4, 0, 9] + [10**6] * 5):
        out, _ = cases.sparse_mla(q, cache, 0, np.array([rows], np.int32), 0.5)
        np.testing.assert_allclose(out[0], wanted, rtol=1e-5, atol=1e-6)


def test_b16_columns_past_the_length_are_not_chosen():
    """Whatever the scores past the length hold, the selection is that of the first three columns."""
    for stale in (np.inf, np.nan, 99.0, NEGATIVE_NAN):
        assert choose([[1, 3, 2] + [stale] * 6], [3], 8) == [[0, 1, 2] + [-1] * 5]
        assert choose([[1, 3, 2] + [stale] * 6], [3], 2) == [[1, 2]]


def test_b18_thousands_of_equal_scores():
    """5 large, 9,990 equal, 5 small, k = 2,048: all large ones, no small one, no repetition; and all zeros."""
    rng = np.random.default_rng(0)
    row = np.ones(10_000, np.float32)
    special = rng.permutation(10_000)[:10]
    row[special[:5]], row[special[5:]] = [5, 6, 7, 8, 9], [-1, 0, 0.5, 0.25, -7]
    chosen = choose([row, np.zeros(10_000)], [10_000, 10_000], 2048)
    assert set(special[:5].tolist()) <= set(chosen[0])
    assert not set(special[5:].tolist()) & set(chosen[0])
    assert [len(set(c)) for c in chosen] == [2048, 2048]
    assert chosen[1] == list(range(2048))


def test_b19_lowest_position_wins_ties():
    """[2, 5, 5, 5, 1] gives 1 and 2, alone and among other rows; zeros of either sign are equal."""
    assert choose([[2, 5, 5, 5, 1]], [5], 2) == [[1, 2]]
    assert choose([[2, 5, 5, 5, 1]] * 3 + [[0, -0.0, 0, -0.0, 0]], [5] * 4, 2) == [[1, 2]] * 3 + [[0, 1]]
    assert choose([[-0.0, 0.0, -0.0, 0.0, 0.0]], [5], 3) == [[0, 1, 2]]
    rows = np.random.default_rng(0).integers(0, 3, (4, 300)).astype(np.float32)
    wanted = [sorted(np.argsort(-row, kind="stable")[:50].tolist()) for row in rows]
    assert choose(rows, [300] * 4, 50) == wanted


def test_b20_nan_beyond_and_inside_the_length():
    """A never-written place is not chosen; a NaN inside the length ranks last, whatever its sign."""
    row = np.random.default_rng(0).normal(size=1024).astype(np.float32)
    wanted = sorted(np.argsort(-row[:1000], kind="stable")[:8].tolist())
    row[1000:] = 50
    row[1023] = NEGATIVE_NAN
    assert choose([row], [1000], 8) == [wanted]
    inside = row.copy()
    inside[5:8] = [np.nan, NEGATIVE_NAN, -np.inf]
    survivors = [
        p
        for p in np.argsort(-np.where(np.isnan(inside[:1000]), -np.inf, inside[:1000]), kind="stable")
        if p not in (5, 6)
    ]
    assert choose([inside], [1000], 8) == [sorted(int(p) for p in survivors[:8])]
    assert choose([inside], [1000], 998) == [sorted(int(p) for p in survivors[:998])]
    assert choose([inside], [1000], 999)[0].count(5) == 1


@pytest.mark.parametrize("width", [6, 9, 12])
def test_b22_lengths_around_k(width):
    """Lengths 7, 8, 9 at k = 8 in one batch, and a table narrower than k: always eight entries."""
    rows = np.random.default_rng(0).permutation(3 * width).reshape(3, width).astype(np.float32)
    chosen = choose(rows, [7, 8, 9], 8)
    assert [len(c) for c in chosen] == [8, 8, 8]
    if width == 6:
        assert chosen == [[0, 1, 2, 3, 4, 5, -1, -1]] * 3
        return
    assert chosen[0] == [*range(7), -1]
    assert chosen[1] == list(range(8))
    dropped = int(np.argmin(rows[2, :9]))
    assert chosen[2] == [p for p in range(9) if p != dropped]


def test_b22_dense_rows_equal_scored_rows():
    """Where length <= k every position is chosen, so skipping the scores would give the same set."""
    limits = jnp.arange(9, dtype=jnp.int32)
    scored = ops.topk_indices(
        jnp.asarray(np.random.default_rng(0).normal(size=(9, 12)), jnp.float32), limits, 8
    )
    dense = np.where(np.arange(8) < np.arange(9)[:, None], np.arange(8), -1)
    np.testing.assert_array_equal(scored, dense)
