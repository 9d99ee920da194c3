"""Triton top-k of rows that take several launches: merges in levels, their borders, ties and cache rows across them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from contracts.test_topk_kernels import INF, NAN, model, scores_of
from dsa_jax.pallas import topk_triton
from dsa_jax.pallas.topk_triton import Config

LEVELS = {
    # columns, k, config, spans of all launches, greatest lengths for which the first, the second, ... is the last
    "three": (8_500, 8, Config((256,), 2, merge_tile=256), [256, 256, 256], [256, 8_192]),
    "four": (4_001, 64, Config((128,), 1, merge_tile=256), [128, 256, 256, 256], [128, 512, 2_048]),
    "candidate lists": (3_000, 64, Config((128, 256), 1, 512, merge_tile=256), [512, 256, 256], [512, 2_048]),
    "spans shorter than k": (
        3_000,
        200,
        Config((128,), 1, merge_tile=512),
        [128, 512, 512, 512, 512],
        [
            128,
            512,
            1_136,
            2_696,
        ],  # 1,136 leave 2 x 200 + 112, and 2,696 leave 5 x 200 + 136, which leave 512 again
    ),
}


def level_rows(name: str, kind: str) -> tuple[np.ndarray, list[int]]:
    """Scores of one call whose rows are complete after different launches, with their limits."""
    columns, k, _, spans, ends = LEVELS[name]
    limits = {0, 1, k - 1, k, k + 1, columns - 1, columns} | {end + i for end in ends for i in (-1, 0, 1)}
    limits |= {columns // spans[0] * spans[0] + i for i in (-1, 0, 1)}
    limits = np.random.default_rng(1).permutation(sorted(limits)).tolist()
    return scores_of(kind, np.random.default_rng(7), (len(limits), columns)), limits


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("kind", ["normal", "rounded", "mostly NaN", "equal"])
def test_levels(name, kind):
    """Merges of several levels: all lengths at which a row is complete one launch later, in one call."""
    _, k, config, _, _ = LEVELS[name]
    logits, limits = level_rows(name, kind)
    got = topk_triton.topk(jnp.asarray(logits), jnp.asarray(limits, jnp.int32), k, config=config)
    for row, limit, positions in zip(logits, limits, np.asarray(got), strict=True):
        np.testing.assert_array_equal(positions, model(row, limit, k), err_msg=f"limit {limit}")


@pytest.mark.sample(0)
@pytest.mark.parametrize("name", ["three", "spans shorter than k"])
def test_cache_rows_of_levels(name):
    """Every launch that completes rows translates them; pages of 32 in reverse order, one of them missing."""
    columns, k, config, _, _ = LEVELS[name]
    logits, limits = level_rows(name, "normal")
    pages = -(-columns // 32)
    table = np.arange(pages, dtype=np.int32)[::-1].copy()
    table[2] = -1
    logits[:, 70] = 50  # one of the best lies on the missing page, wherever the row reaches it
    paging = dict(
        page_table=jnp.asarray(table[None]), requests=jnp.zeros(len(limits), jnp.int32), page_size=32
    )
    got = topk_triton.topk(jnp.asarray(logits), jnp.asarray(limits, jnp.int32), k, config=config, **paging)
    for row, limit, entries in zip(logits, limits, np.asarray(got), strict=True):
        positions = model(row, limit, k)
        there = (positions >= 0) & (positions // 32 != 2)
        wanted = np.where(there, (pages - 1 - positions // 32) * 32 + positions % 32, -1)
        np.testing.assert_array_equal(entries, wanted, err_msg=f"limit {limit}")


def test_ties_across_levels():
    """By hand: of equal scores in all spans the lowest positions are left after every merge, whatever lies between."""
    columns, k, config, _, _ = LEVELS["four"]
    logits = np.full((4, columns), -INF, np.float32)
    logits[0, -1] = 1  # the last of the last span, and the first of the rest
    logits[1, 31::125] = 2  # 32 scores all over the row; 32 of the ties below remain to be chosen
    logits[1, 1_000:] = np.maximum(logits[1, 1_000:], 1)
    logits[2, :300] = logits[2, 3_000:] = 4  # the tied group is full long before its second part
    logits[3] = NAN
    logits[3, [127, 128, 4_000]] = -INF, 3, -INF
    got = topk_triton.topk(jnp.asarray(logits), jnp.full(4, columns, jnp.int32), k, config=config)
    best = list(range(31, columns, 125))
    wanted = [
        [*range(63), 4_000],
        sorted(best + [i for i in range(1_000, 1_100) if i not in best][:32]),
        list(range(64)),
        [*range(61), 127, 128, 4_000],
    ]
    assert got.tolist() == wanted


@pytest.mark.parametrize("name", LEVELS)
def test_spans_of_levels(name):
    columns, k, config, spans, _ = LEVELS[name]
    assert [launch.columns for launch in topk_triton.levels(config, columns, k)] == spans


@pytest.mark.parametrize(
    ("columns", "k", "config", "spans"),
    [
        (512, 200, Config((128,), 1, merge_tile=512), [128, 512]),  # 4 x 128 finds, not 4 x 200
        (257, 128, Config((256,), 2, merge_tile=256), [256, 256]),  # the smallest merge tile: twice k
        (512, 128, Config((256,), 2, 512, merge_tile=256), [512]),  # the list of two tiles fills a tile
    ],
)
def test_what_just_fits(columns, k, config, spans):
    assert [launch.columns for launch in topk_triton.levels(config, columns, k)] == spans
    logits = scores_of("rounded", np.random.default_rng(2), (2, columns))
    got = topk_triton.topk(jnp.asarray(logits), jnp.array([columns, k + 1], jnp.int32), k, config=config)
    assert got.tolist() == [model(logits[0], columns, k).tolist(), model(logits[1], k + 1, k).tolist()]


@pytest.mark.parametrize("exact", [None, False, True])
def test_merges_compare_as_the_rows_do(exact):
    launches = topk_triton.levels(Config((128,), 1, exact=exact, merge_tile=256), 4_001, 64)
    assert [launch.exact for launch in launches] == [exact] * 4


def test_launches_of_a_million_columns():
    """32 spans leave 65,536 finds, their two spans 4,096, which one small tile holds; a small k needs one merge."""
    columns = 1 << 20
    launches = topk_triton.levels(topk_triton.default_config(1, columns, 2_048), columns, 2_048)
    tiles = [(launch.tiles, launch.warps, launch.columns) for launch in launches]
    large = ((8_192, 32_768), 16, 32_768)
    assert tiles == [large, large, ((4_096,), 4, 4_096)]
    assert len(topk_triton.levels(topk_triton.default_config(1, columns, 8), columns, 8)) == 2


def test_a_merge_that_would_not_end_is_refused():
    """A tile of less than twice k may leave as many finds as it was given; a row of one span needs no merge."""
    config = Config((256,), 2, merge_tile=256)
    with pytest.raises(ValueError, match="merge_tile is 256, wanted at least 258.* Raise merge_tile or"):
        topk_triton.topk(jnp.zeros((1, 257)), jnp.zeros(1, jnp.int32), 129, config=config)
    got = topk_triton.topk(jnp.zeros((1, 256)), jnp.full(1, 256, jnp.int32), 129, config=config)
    assert got.tolist() == [list(range(129))]
