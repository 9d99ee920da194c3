"""Scores of the indexer against the NumPy float64 model: values, the exact mask, and indifference to garbage."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import cases
from dsa_jax import ops
from dsa_jax.cache import Cache
from dsa_jax.metadata import Bucket, StepMetadata
from dsa_jax.xla import logits as xla_logits
from numpy_model import E4M3, Facts, row_of, scores

MIXED = dict(
    contexts=[(7, 3), (0, 0), (5, 5)], decodes=[(9, 1), (6, 2), (1, 1)], next_n=2, padding=2, spare_columns=1
)
HEADS = 4


def scenario(layout, facts: Facts, seed: int = 0, layer: int = 2):
    """A poisoned cache with all keys of the batch, queries, weights, and the expected scores of every token place."""
    rng = np.random.default_rng(seed)
    table, width = facts.held_table(), layout.index_head_dim
    cache, data, scale = cases.poisoned(layout), {}, {}
    for r, length in enumerate(facts.kv_lens):
        keys = rng.normal(size=(length, width)).astype(np.float32)
        cache = cases.write_keys(
            cache, layer, [row_of(table, r, p, facts.page_size) for p in range(length)], keys
        )
        stored, scale[r] = cases.stored_keys(layout, keys)
        data[r] = stored if stored.dtype != np.uint8 else E4M3[stored]
    tokens = facts.tokens()
    q = cases.query(layout, rng.normal(size=(len(tokens), HEADS, width)))
    weights = rng.normal(size=(len(tokens), HEADS)).astype(np.float32)  # negative ones, too
    expected = np.full((len(tokens), facts.width * facts.page_size), -np.inf)
    values = q if q.dtype != np.uint8 else E4M3[q]
    for t, (r, position) in enumerate(tokens):
        if position >= 0:
            own = slice(0, position + 1)
            expected[t, own] = scores(
                values[t], weights[t], data[r][own], None if scale[r] is None else scale[r][own]
            )
    return cache, q, weights, expected


def check(implementation: str, layout, facts: Facts, seed: int = 0) -> None:
    """The op against the model: the same -inf positions, finite scores to float32's accuracy."""
    cache, q, weights, expected = scenario(layout, facts, seed)
    step = cases.step(facts, layout)
    got = np.asarray(cases.paged_mqa_logits(q, weights, cache, 2, step, implementation=implementation))
    assert got.dtype == np.float32
    assert got.shape == expected.shape
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
    seen = np.isfinite(expected)
    assert seen.any()
    size = np.abs(expected[seen]).max()
    np.testing.assert_allclose(got[seen], expected[seen], rtol=2e-6, atol=2e-6 * size)


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["paged_mqa_logits"])
@pytest.mark.parametrize(
    ("manager", "form", "page_size"),
    [
        ("v1", "fp8", 1),
        ("v2", "f32", 1),
        ("v2", "fp8", 4),
        ("v1", "f32", 4),
        ("v2", "fp8", 16),
        ("v2", "fp8", 64),
    ],
)
def test_mixed_batch(implementation, manager, form, page_size):
    requests = MIXED | ({"contexts": [(4, 3), (0, 0), (2, 2)]} if page_size == 1 else {})  # 22 of 23 slots
    check(
        implementation,
        cases.layout(manager, index=form, page_size=page_size),
        cases.batch(**requests, page_size=page_size),
    )


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["paged_mqa_logits"])
@pytest.mark.parametrize("next_n", range(1, 7))
def test_decode_limits(implementation, next_n):
    """Row j of a request sees positions 0 .. length - next_n + j; a request with fewer new tokens is padded."""
    facts = cases.batch(decodes=[(10, next_n), (7, 1), (6, next_n)], next_n=next_n, spare_requests=1)
    check(implementation, cases.layout(), facts)


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["paged_mqa_logits"])
@pytest.mark.parametrize("contexts", [[(257, 2)], [(64, 1), (65, 2), (63, 3)]])
def test_lengths_around_a_page(implementation, contexts):
    facts = cases.batch(contexts, page_size=64, padding=1)
    check(implementation, cases.layout(index="f32", page_size=64), facts)


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["paged_mqa_logits"])
def test_garbage_in_padding_cannot_matter(implementation):
    """NaN queries and weights in padding places, other NaN bytes in the pool: real rows do not change by a bit."""
    layout, facts = cases.layout(index="fp8"), cases.batch(**MIXED)
    cache, q, weights, _ = scenario(layout, facts)
    step = cases.step(facts, layout)
    first = np.asarray(cases.paged_mqa_logits(q, weights, cache, 2, step, implementation=implementation))
    padding = facts.derive()["positions"] < 0
    assert padding.sum() == 4
    q, weights = q.copy(), weights.copy()
    q[padding], weights[padding] = 0x7F, np.nan
    again = np.asarray(cases.paged_mqa_logits(q, weights, cache, 2, step, implementation=implementation))
    np.testing.assert_array_equal(first, again)
    assert np.isneginf(again[padding]).all()


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["paged_mqa_logits"])
def test_float8_queries_are_codes(implementation):
    layout, facts = cases.layout(index="fp8"), cases.batch(decodes=[(5, 1)])
    cache, q, weights, _ = scenario(layout, facts)
    step = cases.step(facts, layout)
    as_float8 = jnp.asarray(q).view(jnp.float8_e4m3fn)
    np.testing.assert_array_equal(
        cases.paged_mqa_logits(as_float8, weights, cache, 2, step, implementation=implementation),
        cases.paged_mqa_logits(q, weights, cache, 2, step, implementation=implementation),
    )


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["paged_mqa_logits"])
@pytest.mark.parametrize("requests", [0, 2])
def test_no_tokens(implementation, requests):
    """No requests at all, and requests that hold nothing."""
    layout = cases.layout()
    bucket = Bucket(decode_requests=requests, table_width=3)
    step = StepMetadata.create(layout, bucket, [], [], []).derive()
    out = ops.paged_mqa_logits(
        jnp.ones((requests, HEADS, 8)),
        jnp.ones((requests, HEADS)),
        cases.poisoned(layout),
        0,
        step,
        implementation=implementation,
    )
    assert out.shape == (requests, 12)
    assert np.isneginf(out).all()


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["paged_mqa_logits"])
def test_limit_beyond_the_table(implementation):
    """Lengths that outgrow the table score the columns that exist and nothing else."""
    layout, facts = cases.layout(), cases.batch(decodes=[(8, 1)])
    cache, q, weights, expected = scenario(layout, facts)
    step = cases.step(facts, layout)
    longer = replace(step, limits=jnp.array([13], jnp.int32))
    got = cases.paged_mqa_logits(q, weights, cache, 2, longer, implementation=implementation)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_planted_mask_before_relu_is_seen(monkeypatch):
    """relu(-inf) is 0, so a mask in front of ReLU leaves zeros beyond the limit."""
    monkeypatch.setattr(cases, "paged_mqa_logits", lambda *a, **k: jnp.maximum(_eager(*a, **k), 0.0))
    with pytest.raises(AssertionError):
        check("xla", cases.layout(), cases.batch(decodes=[(5, 1)]))


def test_planted_limit_of_the_whole_length_is_seen(monkeypatch):
    """All rows of a request given the request's length: every draft row would see the later ones."""
    monkeypatch.setattr(cases, "paged_mqa_logits", _eager)
    good = cases.step

    def careless(facts, layout):
        step = good(facts, layout)
        return replace(step, limits=jnp.where(step.positions >= 0, step.kv_lens[step.requests], 0))

    monkeypatch.setattr(cases, "step", careless)
    with pytest.raises(AssertionError):
        check("xla", cases.layout(), cases.batch(decodes=[(5, 2)], next_n=2))


def test_planted_dropped_scale_is_seen(monkeypatch):
    monkeypatch.setattr(cases, "paged_mqa_logits", _eager)
    original = xla_logits.scores
    monkeypatch.setattr(xla_logits, "scores", lambda q, w, k, scale: original(q, w, k, None))
    with pytest.raises(AssertionError):
        check("xla", cases.layout(index="fp8"), cases.batch(decodes=[(5, 1)]))


def _eager(*args, **kwargs):
    arrays = [jnp.asarray(a) if isinstance(a, np.ndarray) else a for a in args]
    return ops.paged_mqa_logits(*arrays, **kwargs)


@pytest.mark.parametrize("form", ["f32", "fp8"])
def test_bfloat16(form):
    """Half the bytes: the float32 scores rounded once, in both parts of a mixed step and for contiguous keys."""
    layout, facts = cases.layout(index=form), cases.batch(**MIXED)
    cache, q, weights, expected = scenario(layout, facts)
    step = cases.step(facts, layout)
    exact = np.asarray(_eager(q, weights, cache, 2, step))
    got = np.asarray(_eager(q, weights, cache, 2, step, dtype="bfloat16"))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, exact.astype(jnp.bfloat16))
    assert (got.astype(np.float32) != exact).any()
    limits = np.isfinite(expected).sum(axis=1).astype(np.int32)
    best = cases.topk_indices(jnp.asarray(got), limits, 3)
    np.testing.assert_array_equal(best, cases.topk_indices(got.astype(np.float32), limits, 3))
    keys, windows = cases.gather_index_k(cache, 2, step), (np.zeros_like(limits), limits)
    flat = [ops.mqa_logits(q, keys, weights, *windows, dtype=d) for d in (jnp.float32, jnp.bfloat16)]
    np.testing.assert_array_equal(np.asarray(flat[1]), np.asarray(flat[0]).astype(jnp.bfloat16))


# --- contiguous keys -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["mqa_logits"])
@pytest.mark.parametrize("form", ["f32", "fp8"])
def test_contiguous(implementation, form):
    """Windows that are ordinary, empty, reversed, negative, and beyond the keys."""
    layout, rng = cases.layout(index=form), np.random.default_rng(5)
    width = layout.index_head_dim
    keys, scale = cases.stored_keys(layout, rng.normal(size=(11, width)))
    q = cases.query(layout, rng.normal(size=(6, HEADS, width)))
    weights = rng.normal(size=(6, HEADS)).astype(np.float32)
    starts = np.array([0, 3, 5, 7, -2, 9], np.int32)
    ends = np.array([11, 4, 5, 2, 3, 40], np.int32)
    values, key_values = (q, keys) if form == "f32" else (E4M3[q], E4M3[keys])
    expected = np.stack([scores(values[s], weights[s], key_values, scale) for s in range(6)])
    column = np.arange(11)
    inside = (column >= starts[:, None]) & (column < ends[:, None])
    got = np.asarray(cases.mqa_logits(q, (keys, scale), weights, starts, ends, implementation=implementation))
    np.testing.assert_array_equal(np.isneginf(got), ~inside)
    np.testing.assert_allclose(got[inside], expected[inside], rtol=1e-5, atol=1e-6 * np.abs(expected).max())
    assert inside.any(axis=1).tolist() == [True, True, False, False, True, True]


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["mqa_logits"])
def test_windows_of_gathered_keys_equal_the_paged_scores(implementation):
    """Gather, score the windows, subtract the start: column for column what the paged op gives."""
    layout, facts = cases.layout(index="fp8"), cases.batch(**(MIXED | {"decodes": []}), gathered=14)
    cache, q, weights, _ = scenario(layout, facts)
    step = cases.step(facts, layout)
    paged = np.asarray(cases.paged_mqa_logits(q, weights, cache, 2, step))
    keys = cases.gather_index_k(cache, 2, step)
    flat = np.asarray(
        cases.mqa_logits(q, keys, weights, step.key_starts, step.key_ends, implementation=implementation)
    )
    for t, (start, end) in enumerate(zip(step.key_starts.tolist(), step.key_ends.tolist(), strict=True)):
        np.testing.assert_allclose(flat[t, start:end], paged[t, : end - start], rtol=1e-5, atol=1e-5)
        assert np.isfinite(flat[t]).sum() == np.isfinite(paged[t]).sum() == end - start


@pytest.mark.parametrize(("rows", "keys"), [(0, 5), (3, 0)])
def test_contiguous_without_rows_or_keys(rows, keys):
    out = ops.mqa_logits(
        jnp.zeros((rows, 2, 8)),
        jnp.zeros((keys, 8)),
        jnp.zeros((rows, 2)),
        jnp.zeros(rows, jnp.int32),
        jnp.ones(rows, jnp.int32),
    )
    assert out.shape == (rows, keys)


def test_row_chunks_change_nothing(monkeypatch):
    """A budget that forces chunks, with a last chunk that is not full, gives the same bits."""
    layout, facts = cases.layout(), cases.batch(contexts=[(13, 11)], padding=2)
    cache, q, weights, _ = scenario(layout, facts)
    whole = np.asarray(cases.paged_mqa_logits(q, weights, cache, 2, cases.step(facts, layout)))
    calls = []

    def small(f, arrays, bytes_per_row, budget=0):
        calls.append(bytes_per_row)
        return original(f, arrays, bytes_per_row, 5 * bytes_per_row)

    original = xla_logits.map_rows
    monkeypatch.setattr(xla_logits, "map_rows", small)
    np.testing.assert_array_equal(_eager(q, weights, cache, 2, cases.step(facts, layout)), whole)
    assert calls


# --- errors --------------------------------------------------------------------------------------------------------


def test_errors():
    layout, facts = cases.layout(index="fp8"), cases.batch(decodes=[(1, 1), (1, 1)])
    cache, step = Cache.create(layout, 2), cases.step(facts, layout)
    q, weights = jnp.zeros((2, HEADS, 128), jnp.uint8), jnp.zeros((2, HEADS))
    with pytest.raises(
        ValueError,
        match=r"q \(keys are fp8\) has dtype float32.*quantise the query as the cache's index_form",
    ):
        ops.paged_mqa_logits(q.astype(jnp.float32), weights, cache, 0, step)
    with pytest.raises(
        ValueError, match=r"q has shape \[3, 4, 128\], wanted .*weights has shape \[2, 4\]|q has shape \[3"
    ):
        ops.paged_mqa_logits(jnp.zeros((3, HEADS, 128), jnp.uint8), weights, cache, 0, step)
    with pytest.raises(ValueError, match=r"weights has shape \[2, 3\], wanted \[N, H\] = \[2, 4\]"):
        ops.paged_mqa_logits(q, weights[:, :3], cache, 0, step)
    with pytest.raises(ValueError, match="shared-indexer layer"):
        ops.paged_mqa_logits(q, weights, cache, 1, step)
    floats = cases.layout(index="f32")
    with pytest.raises(ValueError, match=r"q \(keys are f32\) has dtype uint8"):
        ops.paged_mqa_logits(
            jnp.zeros((2, HEADS, 8), jnp.uint8),
            weights,
            Cache.create(floats, 2),
            0,
            cases.step(facts, floats),
        )
    with pytest.raises(ValueError, match="build the metadata with layout=cache.layout"):
        ops.paged_mqa_logits(q, weights, Cache.create(cases.layout("v1", index="fp8"), 2), 0, step)
    for dtype in (jnp.float16, "bf16", None):
        with pytest.raises(
            ValueError, match=r"paged_mqa_logits: dtype is .*wanted float32 or bfloat16. Pass"
        ):
            ops.paged_mqa_logits(q, weights, cache, 0, step, dtype=dtype)


def test_contiguous_errors():
    windows = jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)
    q, keys, weights = jnp.zeros((1, 2, 8)), jnp.zeros((3, 8)), jnp.zeros((1, 2))
    with pytest.raises(ValueError, match="mqa_logits: dtype is 'int8', wanted float32 or bfloat16"):
        ops.mqa_logits(q, keys, weights, *windows, dtype="int8")
    codes = keys.astype(jnp.uint8)
    with pytest.raises(ValueError, match=r"mqa_logits: .*k has shape \[3, 7\]"):
        ops.mqa_logits(q, keys[:, :7], weights, *windows)
    with pytest.raises(ValueError, match=r"starts has shape \[2\], wanted \[S\] = \[1\]"):
        ops.mqa_logits(q, keys, weights, jnp.zeros(2, jnp.int32), windows[1])
    with pytest.raises(ValueError, match=r"starts has dtype float32"):
        ops.mqa_logits(q, keys, weights, jnp.zeros(1), windows[1])
    for name, query, key in (
        ("codes and floats", q.astype(jnp.uint8), keys),
        ("floats and codes", q, (codes, jnp.ones(3))),
        ("codes without scales", q.astype(jnp.uint8), codes),
        ("floats with scales", q, (keys, jnp.ones(3))),
    ):
        with pytest.raises(ValueError, match="mqa_logits: "):
            ops.mqa_logits(query, key, weights, *windows)
            pytest.fail(name)


@pytest.mark.parametrize("missing", [-1, cases.SLOTS, 2**28])
@pytest.mark.parametrize("kind", ["contexts", "decodes"])
def test_pages_that_are_not_there_score_nothing(kind, missing):
    """Tables that nobody checked: a hole, or a slot that no pool has, inside of a length. No other request's scores show."""
    layout = cases.layout(page_size=4)
    facts = cases.batch(**{kind: [(9, 2), (10, 2)]}, next_n=2)
    cache, q, weights, expected = scenario(layout, facts)
    step = cases.step(facts, layout)
    table = step.page_table.at[0, 2].set(missing).at[1, 1].set(missing)
    got = np.asarray(
        cases.paged_mqa_logits(q, weights, cache, 2, replace(step, page_table=table), implementation="xla")
    )
    assert np.isfinite(expected[:2, 8]).any()  # what the holes hide
    assert np.isfinite(expected[2:, 4:8]).all()
    expected[:2, 8:12], expected[2:, 4:8] = -np.inf, -np.inf
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
    seen = np.isfinite(expected)
    np.testing.assert_allclose(got[seen], expected[seen], rtol=2e-6, atol=2e-6 * np.abs(expected[seen]).max())
