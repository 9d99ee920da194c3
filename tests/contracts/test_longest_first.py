"""Row 39 of the catalogue: elsewhere rows are reordered, longest first, so that multiprocessors end together.

Here a plan cuts the tiles of all requests into equal shares, and rows stay where they are: 16 multiprocessors, two new
tokens, one request and 16 in any order.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_jax.pallas.paged_logits_plan import TILE, work_plan

SMS, NEW = 16, 2
plan_of = jax.jit(functools.partial(work_plan, blocks=SMS, page_size=64))


def share_sizes(lengths: np.ndarray) -> np.ndarray:
    """Tiles of each multiprocessor, counted from the plan: (first request, tile) to (last request, tile)."""
    limits = jnp.asarray(lengths[:, None] - np.arange(NEW)[::-1], jnp.int32)
    table = jnp.zeros((len(lengths), 64), jnp.int32)
    plan = np.asarray(plan_of(limits, table))
    before = np.concatenate([[0], np.cumsum(-(-lengths // TILE))])
    begin, end = before[plan[:, 0]] + plan[:, 1], before[plan[:, 3]] + plan[:, 4]
    assert begin[0] == 0 and end[-1] == before[-1]
    np.testing.assert_array_equal(begin[1:], end[:-1])  # in the order of the requests, nothing twice
    return end - begin


@pytest.mark.parametrize("requests", [pytest.param(1, marks=pytest.mark.full), 16])
def test_row_39_no_order_is_needed(requests):
    lengths = np.random.default_rng(39).integers(2, 4_096, requests)
    if requests == SMS:  # what order is for elsewhere: a request each would be dozens of tiles apart
        assert np.ptp(-(-lengths // TILE)) > 20
    for order in (lengths, np.sort(lengths), np.sort(lengths)[::-1]):
        sizes = share_sizes(order)
        assert len(sizes) == SMS
        assert np.ptp(sizes) <= 1
