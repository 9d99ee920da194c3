"""How the paged scoring kernels share out their work: plans of tiles, groups of context tokens, pages of a request."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from dsa_jax.pallas import paged_logits_plan, paged_logits_triton


def test_pages_are_counted_to_the_last_key():
    found = [paged_logits_triton.pages_with(keys, 64) for keys in (0, 1, 63, 64, 65, 128, 129)]
    assert found == [0, 1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("requests", "size", "wanted"),
    [
        ([0] * 5, 2, [(0, 0, 2), (0, 2, 2), (0, 4, 1)]),
        ([0, 1, 1, 1, -1, -1, -1], 2, [(0, 0, 1), (1, 1, 2), (1, 3, 1), (-1, 4, 2), (-1, 6, 1)]),
        ([3, 3, 3, 5], 4, [(3, 0, 3), (5, 3, 1)]),
        ([-1, -1], 4, [(-1, 0, 2)]),
    ],
)
def test_groups_of_context_tokens(requests, size, wanted):
    groups = paged_logits_plan.context_groups(jnp.asarray(requests, jnp.int32), size=size, most_requests=6)
    groups = [tuple(group) for group in np.asarray(groups).tolist()]
    assert groups[: len(wanted)] == wanted
    assert all(count == 0 for _, _, count in groups[len(wanted) :])


@pytest.mark.parametrize("page_size", [32, 64, 128])
@pytest.mark.parametrize("blocks", [1, 7, 132])
@pytest.mark.parametrize(
    "lengths", [(0,), (1,), (64, 0, 0, 65, 1000), (0, 0, 0), (1000, 1000, 1), tuple(range(0, 1000, 37))]
)
def test_the_plan_covers_everything_once_and_evenly(lengths, blocks, page_size):
    tile, fill, columns = paged_logits_plan.TILE, paged_logits_plan.FILL, 1024
    pages = columns // page_size
    limits = jnp.asarray(lengths, jnp.int32)[:, None] - jnp.asarray([[1, 0]], jnp.int32)
    held = np.arange(pages)[None] * page_size < np.asarray(lengths)[:, None]
    table = np.where(held, np.arange(held.size).reshape(held.shape), -1)
    plan = paged_logits_plan.work_plan(limits, jnp.asarray(table), blocks=blocks, page_size=page_size)
    plan = np.asarray(plan)
    tiles = [-(-length // tile) for length in lengths]
    # Units from the one that holds the first column behind the tiles, none if there is no such column.
    units = [columns // fill - count * tile // fill if count * tile < columns else 0 for count in tiles]

    def walk(first, begin, last, end, limits):
        for r in range(first, last + 1):
            for item in range(begin if r == first else 0, end if r == last else limits[r]):
                yield r, item

    scored = [list(walk(*row[[0, 1, 3, 4]], tiles)) for row in plan]
    filled = [list(walk(*row[5:9], units)) for row in plan]
    everything = [(r, t) for r, count in enumerate(tiles) for t in range(count)]
    assert list(itertools.chain(*scored)) == everything
    assert list(itertools.chain(*filled)) == [(r, u) for r, count in enumerate(units) for u in range(count)]
    for shares in (scored, filled):
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
    for row, share in zip(plan, scored, strict=True):
        assert row[2] == (row[4] if row[0] == row[3] else tiles[row[0]])
        wanted = []
        for r, t in share[: paged_logits_plan.planned_tiles(page_size)]:
            last = (lengths[r] - 1) // page_size
            first = t * tile // page_size
            wanted += [table[r, min(first + i, last)] for i in range(max(1, tile // page_size))]
        np.testing.assert_array_equal(row[9 : 9 + len(wanted)], wanted)


@pytest.mark.parametrize(
    ("visit", "cut"),
    [
        (0, (0, 10)),  # 12 + 8 tiles, half of them are 10
        (1, (2, 0)),  # 13 + 8 x 2 = 29: 15 are the long request and one of the others
        (3, (3, 0)),  # 15 + 8 x 4 = 47: 24 are the long one, two others and a part of the price of the third
    ],
)
def test_a_visit_has_its_price(visit, cut):
    """One request of 12 tiles and eight of one, for two blocks: that with many requests gets fewer tiles."""
    limits = jnp.asarray([12 * 64, *[64] * 8], jnp.int32)[:, None]
    table = np.arange(9 * 12).reshape(9, 12)
    plan = paged_logits_plan.work_plan(limits, jnp.asarray(table), blocks=2, page_size=64, visit=visit)
    one, two = np.asarray(plan).tolist()
    assert (one[:2], tuple(one[3:5]), tuple(two[:2]), two[3:5]) == ([0, 0], cut, cut, [8, 1])
    assert (one[9], two[9]) == (table[0, 0], table[cut])


def test_the_plan_of_many_requests_uses_the_scan():
    limits = jnp.asarray(np.random.default_rng(0).integers(0, 500, (1500, 1)), jnp.int32)
    table = jnp.zeros((1500, 8), jnp.int32)
    plan = np.asarray(paged_logits_plan.work_plan(limits, table, blocks=5, page_size=64))
    tiles = -(-np.asarray(limits)[:, 0] // 64)
    ends = np.cumsum(tiles)
    cuts = [(ends[r] - tiles[r] + t) for r, t in plan[:, 3:5]]
    np.testing.assert_array_equal(
        cuts, np.arange(1, 6) * (ends[-1] // 5) + np.minimum(np.arange(1, 6), ends[-1] % 5)
    )
