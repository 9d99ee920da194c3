"""Attention over chosen rows against the NumPy float64 model."""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from dsa_jax import ops
from dsa_jax.cache import Cache
from numpy_model import attention

xla_sparse_mla = importlib.import_module(
    "dsa_jax.xla.sparse_mla"
)  # the package shows the function of this name

HEADS, SCALE = 3, 0.37
WIDTH = cases.LATENT + cases.ROPE
PAST = cases.SLOTS * 64 * 4
"""A row that no pool of these tests has."""


def scenario(layout, seed: int = 0, layer: int = 1):
    """Every fifth row of one layer written, the rest NaN; rows chosen at random with -1 and rows past the pool between."""
    rng = np.random.default_rng(seed)
    count = cases.SLOTS * layout.page_size
    written = rng.permutation(count)[: max(8, count // 5)]
    values = rng.normal(size=(len(written), WIDTH)).astype(np.float32)
    cache = cases.poisoned(layout)
    values = np.asarray(jnp.asarray(values).astype(cache.key.dtype))
    cache = cases.write(cache, "key", layer, written.tolist(), values)
    rows = np.full((6, 7), -1, np.int32)
    rows[0] = written[:7]
    rows[1, 2:5] = written[[5, 0, 3]]  # invalid entries in front and behind
    rows[2, 0] = written[1]
    rows[3, [0, 3, 6]] = [PAST, written[4], 2**31 - 1]
    # row 4 stays empty, row 5 holds nothing but rows past the pool
    rows[5] = PAST
    known = {int(row): np.asarray(v, np.float64) for row, v in zip(written, values, strict=True)}
    q = rng.normal(size=(6, HEADS, WIDTH)).astype(np.float32)
    expected = [
        attention(q[t], np.array([known[r] for r in row if r in known]), cases.LATENT, SCALE)
        for t, row in enumerate(rows.tolist())
    ]
    return cache, q, rows, np.stack([o for o, _ in expected]), np.stack([s for _, s in expected])


def check(implementation: str, layout) -> None:
    """Outputs and log-sum-exp of all kinds of rows."""
    cache, q, rows, out, lse = scenario(layout)
    got, got_lse = cases.sparse_mla(q, cache, 1, rows, SCALE, implementation=implementation)
    assert got.dtype == jnp.float32
    assert got_lse.dtype == jnp.float32
    np.testing.assert_allclose(got, out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got_lse, lse, rtol=1e-5, atol=1e-6)
    assert np.isneginf(got_lse[4:]).all()
    assert not np.asarray(got[4:]).any()


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["sparse_mla"])
@pytest.mark.parametrize(
    ("manager", "form", "page_size"),
    [
        ("v1", "f32", 1),
        ("v2", "bf16", 1),
        ("v2", "f32", 4),
        ("v1", "bf16", 4),
        ("v2", "f32", 16),
        ("v2", "bf16", 64),
    ],
)
def test_rows_of_all_kinds(implementation, manager, form, page_size):
    check(implementation, cases.layout(manager, key=form, page_size=page_size))


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["sparse_mla"])
def test_bf16_queries_give_bf16(implementation):
    layout = cases.layout(key="bf16")
    cache, q, rows, _, _ = scenario(layout)
    half = jnp.asarray(q, jnp.bfloat16)
    got, lse = ops.sparse_mla(half, cache, 1, jnp.asarray(rows), SCALE, implementation=implementation)
    exact, exact_lse = ops.sparse_mla(half.astype(jnp.float32), cache, 1, jnp.asarray(rows), SCALE)
    assert got.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(got.astype(jnp.float32), exact, rtol=2**-8, atol=2**-9)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-5)


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["sparse_mla"])
def test_garbage_in_padding_queries_cannot_matter(implementation):
    cache, q, rows, out, _ = scenario(cases.layout())
    q[4:] = np.nan
    got, lse = cases.sparse_mla(q, cache, 1, rows, SCALE, implementation=implementation)
    np.testing.assert_allclose(got, out, rtol=1e-5, atol=1e-6)
    assert np.isneginf(lse[4:]).all()


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["sparse_mla"])
def test_large_scores(implementation):
    """Scores near 1e4 neither overflow nor lose the smaller ones' order."""
    layout = cases.layout()
    cache, q, rows, _, _ = scenario(layout)
    got, lse = cases.sparse_mla(q * np.float32(3000), cache, 1, rows, SCALE, implementation=implementation)
    assert np.isfinite(got).all()
    assert np.isfinite(np.asarray(lse)[:4]).all()


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["sparse_mla"])
def test_rows_given_twice_count_twice(implementation):
    layout = cases.layout()
    cache, q, rows, _, _ = scenario(layout)
    once = cases.sparse_mla(q[:1], cache, 1, rows[:1, :1], SCALE, implementation=implementation)
    twice = cases.sparse_mla(q[:1], cache, 1, rows[:1, [0, 0]], SCALE, implementation=implementation)
    np.testing.assert_allclose(twice[0], once[0], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(twice[1] - once[1], np.full((1, HEADS), np.log(2)), rtol=1e-4)


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["sparse_mla"])
@pytest.mark.parametrize(("tokens", "k"), [(0, 4), (2, 0)])
def test_no_tokens_or_rows(implementation, tokens, k):
    out, lse = ops.sparse_mla(
        jnp.ones((tokens, HEADS, WIDTH)),
        cases.poisoned(cases.layout()),
        0,
        jnp.zeros((tokens, k), jnp.int32),
        SCALE,
        implementation=implementation,
    )
    assert out.shape == (tokens, HEADS, cases.LATENT)
    assert not np.asarray(out).any()
    assert lse.shape == (tokens, HEADS)
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["sparse_mla"])
def test_traced_layer(implementation):
    """Inside scan each layer reads its own pages; a layer that does not exist reads none."""
    layout = cases.layout()
    cache, q, rows, out, _ = scenario(layout, layer=1)
    body = lambda _, layer: (
        None,
        ops.sparse_mla(jnp.asarray(q), cache, layer, jnp.asarray(rows), SCALE, implementation=implementation),
    )
    scanned, lse = jax.jit(lambda layers: jax.lax.scan(body, None, layers)[1])(
        jnp.array([1, 3, -1], jnp.int32)
    )
    np.testing.assert_allclose(scanned[0], out, rtol=1e-5, atol=1e-6)
    assert np.isneginf(lse[1:]).all()


def test_query_chunks_change_nothing(monkeypatch):
    cache, q, rows, _, _ = scenario(cases.layout())
    whole = ops.sparse_mla(jnp.asarray(q), cache, 1, jnp.asarray(rows), SCALE)
    per_query = 7 * (WIDTH * 8 + HEADS * 12)
    monkeypatch.setattr(xla_sparse_mla, "SPARSE_BUDGET", 4 * per_query)
    chunked = ops.sparse_mla(jnp.asarray(q), cache, 1, jnp.asarray(rows), SCALE)
    np.testing.assert_allclose(chunked[0], whole[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(chunked[1], whole[1], rtol=1e-6, atol=1e-6)
    assert "scan" in str(
        jax.make_jaxpr(lambda q: ops.sparse_mla(q, cache, 1, jnp.asarray(rows), SCALE))(jnp.asarray(q))
    )


def test_planted_mask_by_multiplication_is_seen(monkeypatch):
    """0 times NaN is NaN: a mask that multiplies lets never-written bytes through."""
    original = xla_sparse_mla.attend

    def multiply(q, keys, valid, softmax_scale, latent):
        return original(q, keys * valid[:, :, None].astype(keys.dtype), valid | True, softmax_scale, latent)

    monkeypatch.setattr(xla_sparse_mla, "attend", multiply)
    monkeypatch.setattr(cases, "sparse_mla", _eager)
    with pytest.raises(AssertionError):
        check("xla", cases.layout())


def test_planted_default_scale_is_seen(monkeypatch):
    monkeypatch.setattr(cases, "sparse_mla", lambda q, c, l, r, s, **k: _eager(q, c, l, r, WIDTH**-0.5, **k))
    with pytest.raises(AssertionError):
        check("xla", cases.layout())


def _eager(*args, **kwargs):
    arrays = [jnp.asarray(a) if isinstance(a, np.ndarray) else a for a in args]
    return ops.sparse_mla(*arrays, **kwargs)


def test_errors():
    layout = cases.layout()
    cache, q, rows = Cache.create(layout, 2), jnp.zeros((2, HEADS, WIDTH)), jnp.zeros((2, 4), jnp.int32)
    with pytest.raises(
        ValueError,
        match=r"sparse_mla: q has shape \[2, 3, 8\], wanted \[N, h, latent_dim \+ rope_dim\].*absorbed",
    ):
        ops.sparse_mla(q[..., :8], cache, 0, rows, SCALE)
    with pytest.raises(ValueError, match=r"rows has shape \[3, 4\], wanted \[N, K\] = \[2, any\]"):
        ops.sparse_mla(q, cache, 0, jnp.zeros((3, 4), jnp.int32), SCALE)
    with pytest.raises(
        ValueError, match=r"q has dtype int32, wanted float; rows has dtype float32, wanted int32"
    ):
        ops.sparse_mla(q.astype(jnp.int32), cache, 0, rows.astype(jnp.float32), SCALE)
    with pytest.raises(ValueError, match=r"layer 3 is out of range.*pass the local number"):
        ops.sparse_mla(q, cache, 3, rows, SCALE)
    with pytest.raises(ValueError, match=r"key_scale is given.*leave it out"):
        ops.sparse_mla(q, cache, 0, rows, SCALE, key_scale=2.0)
    with pytest.raises(TypeError, match="softmax_scale"):
        ops.sparse_mla(q, cache, 0, rows)  # pyright: ignore[reportCallIssue]


def test_keys_of_invalid_rows_may_be_anything():
    """The arithmetic itself, without the cache in front of it: a weight of 0 times NaN would be NaN."""
    rng = np.random.default_rng(0)
    q, keys = rng.normal(size=(2, HEADS, WIDTH)), rng.normal(size=(2, 5, WIDTH))
    valid = np.array([[True, False, True, True, False], [False] * 5])
    poisoned = np.where(valid[:, :, None], keys, np.nan)
    arguments = [jnp.asarray(x, jnp.float32) for x in (q, poisoned)]
    out, lse = xla_sparse_mla.attend(*arguments, jnp.asarray(valid), SCALE, cases.LATENT)
    want, want_lse = attention(q[0], keys[0][valid[0]], cases.LATENT, SCALE)
    np.testing.assert_allclose(out[0], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse[0], want_lse, rtol=1e-5)
    assert not np.asarray(out[1]).any()
    assert np.isneginf(lse[1]).all()
