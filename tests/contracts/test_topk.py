"""Top-k: the exact set, and every corner of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from dsa_jax import ops
from dsa_jax.xla import topk as xla_topk
from numpy_model import topk

NAN, INF = np.nan, np.inf
NEGATIVE_NAN = np.array([0xFFC00000], np.uint32).view(np.float32)[0]
TINY = np.float32(1e-45)

# name: (row, limit, k, wanted)
CORNERS = {
    "ties take the lowest": ([2, 5, 5, 5, 1], 5, 2, [1, 2]),
    "all equal": ([0, 0, 0, 0, 0], 5, 3, [0, 1, 2]),
    "zeros have no sign": ([-0.0, 0.0, -0.0, 0.0, -1], 5, 3, [0, 1, 2]),
    "length below k": ([5, 1, 9, 9, 9], 2, 4, [0, 1, -1, -1]),
    "length k": ([5, 1, 9, 9, 9], 3, 3, [0, 1, 2]),
    "length k plus 1": ([5, 1, 9, 7, 99], 4, 3, [0, 2, 3]),
    "empty": ([5, 1, 9, 7, 99], 0, 2, [-1, -1]),
    "negative limit": ([5, 1, 9, 7, 99], -4, 2, [-1, -1]),
    "limit beyond the width": ([5, 1, 9, 7, 6], 4000, 2, [2, 3]),
    "k beyond the width": ([5, 1, 9, 7, 6], 5, 7, [0, 1, 2, 3, 4, -1, -1]),
    "NaN beyond the limit": ([5, 1, 9, NAN, NEGATIVE_NAN], 3, 2, [0, 2]),
    "NaN ranks last": ([NAN, 1, NEGATIVE_NAN, -INF, 6], 5, 3, [1, 3, 4]),
    "NaN when nothing else is left": ([NAN, 1, NEGATIVE_NAN, -INF, 6], 5, 4, [0, 1, 3, 4]),
    "infinities": ([-INF, INF, 3, INF, -INF], 5, 4, [0, 1, 2, 3]),
    "all -inf inside the limit": ([-INF, -INF, -INF, 5, 5], 3, 2, [0, 1]),
    "negative scores before what lies beyond": ([-2, -1, -3, 0, 0], 3, 2, [0, 1]),
    "subnormals are numbers": ([TINY, 3 * TINY, 2 * TINY, 0, -TINY], 5, 2, [1, 2]),
    "subnormals beside zero": ([-TINY, 0, -0.0, -2 * TINY, TINY], 5, 4, [0, 1, 2, 4]),
    "neighbours in the last bit": ([1, np.nextafter(np.float32(1), np.float32(2)), 1, 1, 0], 5, 1, [1]),
}


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["topk_indices"])
@pytest.mark.parametrize("name", CORNERS)
def test_corners(implementation, name):
    row, limit, k, wanted = CORNERS[name]
    got = cases.topk_indices(
        np.array([row], np.float32), np.array([limit], np.int32), k, implementation=implementation
    )
    assert got.dtype == jnp.int32
    assert got.tolist() == [wanted]


def check(implementation: str, columns: int, k: int, seed: int) -> None:
    """Few distinct scores, so that nearly every choice is a tie; NaN, infinities and both zeros among them."""
    rng = np.random.default_rng(seed)
    pool = np.array([-INF, -2.5, -1, -0.0, 0.0, 1, 1.5, INF, NAN, NEGATIVE_NAN], np.float32)
    logits = rng.choice(pool, (24, columns), p=[0.05, 0.1, 0.2, 0.15, 0.15, 0.2, 0.05, 0.02, 0.04, 0.04])
    limits = rng.integers(-2, columns + 5, 24).astype(np.int32)
    limits[:4] = [0, k, columns, columns + 100]
    got = cases.topk_indices(logits, limits, k, implementation=implementation)
    wanted = [topk(row, limit, k) for row, limit in zip(logits, limits.tolist(), strict=True)]
    assert got.tolist() == wanted


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["topk_indices"])
@pytest.mark.parametrize(("columns", "k"), [(1, 1), (7, 3), (257, 8), (300, 64)])
def test_ragged_rows(implementation, columns, k):
    check(implementation, columns, k, seed=columns)


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["topk_indices"])
def test_shapes(implementation):
    """No rows, no columns."""
    none = ops.topk_indices(jnp.zeros((0, 5)), jnp.zeros(0, jnp.int32), 2, implementation=implementation)
    assert none.shape == (0, 2)
    empty = ops.topk_indices(jnp.zeros((2, 0)), jnp.ones(2, jnp.int32), 3, implementation=implementation)
    assert empty.tolist() == [[-1] * 3] * 2


def test_half_precision_scores():
    row = jnp.array([[1.0, 3.0, 2.0]], jnp.bfloat16)
    assert ops.topk_indices(row, jnp.array([3], jnp.int32), 2).tolist() == [[1, 2]]


def test_planted_unmasked_rows_are_seen(monkeypatch):
    """Without the limit, columns beyond the length are chosen."""
    eager = lambda logits, limits, k, implementation: ops.topk_indices(
        jnp.asarray(logits), jnp.full(len(limits), logits.shape[1], jnp.int32), k
    )
    monkeypatch.setattr(cases, "topk_indices", eager)
    with pytest.raises(AssertionError):
        check("xla", 7, 3, seed=7)


def test_planted_raw_top_k_is_seen(monkeypatch):
    """lax.top_k on floats ranks NaN first and +0.0 above -0.0."""

    def raw(logits, limits, k, implementation):
        masked = jnp.where(jnp.arange(logits.shape[1])[None, :] < limits[:, None], logits, -jnp.inf)
        index = jnp.sort(jax.lax.top_k(masked, k)[1].astype(jnp.int32), axis=1)
        return jnp.where(jnp.arange(k)[None, :] < limits[:, None], index, -1)

    monkeypatch.setattr(cases, "topk_indices", raw)
    with pytest.raises(AssertionError):
        check("xla", 7, 3, seed=7)


def test_planted_numeric_order_of_bits_is_seen(monkeypatch):
    """Negative floats compared as plain integers sort backwards."""
    monkeypatch.setattr(xla_topk, "ordered_bits", lambda x: jax.lax.bitcast_convert_type(x, jnp.int32))
    eager = lambda logits, limits, k, implementation: ops.topk_indices(
        jnp.asarray(logits), jnp.asarray(limits), k
    )
    monkeypatch.setattr(cases, "topk_indices", eager)
    with pytest.raises(AssertionError):
        check("xla", 7, 3, seed=7)


def test_errors():
    logits, limits = jnp.zeros((2, 5)), jnp.ones(2, jnp.int32)
    with pytest.raises(
        ValueError, match=r"topk_indices: k is 0, wanted a Python int of at least 1.*a positive k"
    ):
        ops.topk_indices(logits, limits, 0)
    with pytest.raises(ValueError, match=r"k is -1"):
        ops.topk_indices(logits, limits, -1)
    with pytest.raises(
        ValueError, match=r"limits has shape \[3\], wanted \[N\] = \[2\].*Pass one limit per row"
    ):
        ops.topk_indices(logits, jnp.ones(3, jnp.int32), 2)
    with pytest.raises(
        ValueError,
        match=r"logits has dtype int32, wanted float32 or bfloat16 or float16; limits has dtype float32, wanted int32",
    ):
        ops.topk_indices(jnp.zeros((2, 5), jnp.int32), jnp.ones(2), 2)
    with pytest.raises(ValueError, match=r"logits has shape \[5\], wanted \[N, columns\]"):
        ops.topk_indices(jnp.zeros(5), limits, 2)
