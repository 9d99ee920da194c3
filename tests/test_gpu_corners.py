"""Corners of the catalogue of faults on a CUDA card (``pytest -m gpu``), whose tests for the CPU interpret the kernels: NaN
of either sign and subnormals among scores (B20), and a pool of one page (B65).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from contracts.test_layer_of_kernels import Case, Request
from contracts.test_topk_kernels import COLUMNS, NEGATIVE_NAN, TINY, K, model, rows
from dsa_jax import ops

pytestmark = pytest.mark.gpu

IMPLEMENTATIONS = [None, "mosaic", "triton"]
TWENTY = 20


def corners() -> dict[str, tuple[np.ndarray, int]]:
    """The rows that the interpreted kernels are tested on."""
    tiny = np.array([TINY, 3 * TINY, 0, -TINY, 2 * TINY], np.float32)
    return rows(np.random.default_rng(5)) | {
        "subnormals": (np.resize(tiny, COLUMNS), 30),
        "subnormals beside NaN": (np.resize([*tiny, NEGATIVE_NAN, np.nan], COLUMNS).astype(np.float32), 33),
    }


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("k", [K, 64])
def test_b20_corners_of_a_row(implementation, k):
    """-NaN, subnormals, ties and the rest, through the op: what a stable sort selects, 20 times."""
    named = corners()
    logits = jnp.asarray(np.stack([row for row, _ in named.values()]))
    limits = jnp.asarray([limit for _, limit in named.values()], jnp.int32)
    bits = np.asarray(jax.lax.bitcast_convert_type(logits, jnp.uint32))
    assert (bits == 0xFFC00000).any() and (bits == 1).any()  # the card has them as they were made
    run = jax.jit(partial(ops.topk_indices, k=k, implementation=implementation))
    for _ in range(TWENTY):
        for name, got in zip(named, np.asarray(run(logits, limits)), strict=True):
            np.testing.assert_array_equal(got, model(*named[name], k), err_msg=name)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("place", [1_023, 1_000, 999, 0])
def test_b20_a_negative_nan(place, implementation):
    """1,024 scores of which 1,000 count, k 8: -NaN is never among the best, beyond the length or within."""
    scores = np.random.default_rng(0).normal(size=(3, 1_024)).astype(np.float32)
    scores[0, place] = NEGATIVE_NAN
    scores[1, :992] = NEGATIVE_NAN  # eight numbers are left
    scores[2, 1_000:] = NEGATIVE_NAN
    run = jax.jit(partial(ops.topk_indices, k=8, implementation=implementation))
    got = np.asarray(run(jnp.asarray(scores), jnp.full(3, 1_000, jnp.int32)))
    np.testing.assert_array_equal(got, np.stack([model(row, 1_000, 8) for row in scores]))
    assert place not in got[0]
    assert got[1].tolist() == list(range(992, 1_000))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("next_n", "index_heads", "page_size"), [(2, 32, 64), (8, 64, 32), (1, 64, 128)])
def test_b65_one_page(implementation, next_n, index_heads, page_size):
    """The whole pool is one page, the first and the last: appended to, selected from and attended to, twice the same."""
    request = Request(page_size, next_n)
    case = Case((request,), (), next_n=next_n, index_heads=index_heads, page_size=page_size, slots=1)
    first = case.run(implementation)
    case.check(first)
    bits = lambda result: [np.asarray(x).view(np.uint8) for x in jax.tree.leaves(result)]
    # Every run compiles the step anew.
    for a, b in zip(bits(case.run(implementation)), bits(first), strict=True):
        np.testing.assert_array_equal(a, b)
