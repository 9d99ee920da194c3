"""Every storage form through the ops: the bytes that writing leaves, and what scoring, selecting and attending read."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import form_cases
import numpy_forms
from dsa_jax import ops, quant
from dsa_jax.cache import Cache
from dsa_jax.forms import INDEX_FORMS, KEY_FORMS
from dsa_jax.layout import Role
from numpy_model import attention, row_of, scores, topk

RAGGED = dict(contexts=[(7, 3), (5, 5), (0, 0)], decodes=[(9, 1), (6, 3), (1, 1)], next_n=3, padding=2)
HEADS, SCALE = 3, 0.37


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    """Random float32 values."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# --- writing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("manager", ["v1", "v2"])
@pytest.mark.parametrize(
    ("form", "tie_rule"), [*((form, "deepgemm") for form in INDEX_FORMS), ("fp4", "even")]
)
def test_index_keys(manager, form, tie_rule):
    """All bytes of all pools after appending to both owning layers of a poisoned cache."""
    layout = form_cases.layout(manager, index=form, tie_rule=tie_rule)
    facts = cases.batch(**RAGGED)
    cache = expected = cases.poisoned(layout)
    step, rows = cases.step(facts, layout), facts.derive()["rows"].tolist()
    for layer in (0, 2):
        keys = np.round(normal(len(rows), 128, seed=layer) * 4) / 8  # eighths: many ties
        keys[:, :4] = [6.0, 0.75, -1.75, 3.5]
        cache = cases.append_index_k(cache, layer, keys, step)
        expected = form_cases.write_keys(expected, layer, rows, keys)
    assert cases.pool_bytes(cache) == cases.pool_bytes(expected)


@pytest.mark.parametrize("manager", ["v1", "v2"])
@pytest.mark.parametrize(
    ("form", "page_size"),
    [
        ("bf16", 1),
        ("f32", 4),
        ("fp8", 1),
        ("fp8", 64),
        ("nvfp4", 1),
        ("nvfp4", 4),
        ("nvfp4", 64),
        ("fp8_ds_mla", 64),
    ],
)
def test_latents(manager, form, page_size):
    """All bytes of all pools, block scales too, after appending to every layer of a poisoned cache."""
    layout = form_cases.layout(manager, key=form, page_size=page_size)
    facts, scale = cases.batch(**RAGGED, page_size=page_size, slots=60), form_cases.KEY_SCALE.get(form)
    cache = expected = cases.poisoned(layout, slots=60)
    step, rows = cases.step(facts, layout), facts.derive()["rows"].tolist()
    for layer in range(3):
        latent, rope = form_cases.latents(layout, len(rows), seed=layer)
        cache = form_cases.append_latent(cache, layer, latent, rope, step, key_scale=scale)
        entry = numpy_forms.latent_entries(latent, rope, form, scale or 1.0)
        expected = form_cases.write_entry(expected, layer, rows, entry)
    assert cases.pool_bytes(cache) == cases.pool_bytes(expected)


def test_block_scales_have_their_own_index():
    """NVFP4's scales are another role in another pool; a layer's page is found with that role's own index."""
    cache = Cache.create(form_cases.layout(key="nvfp4"), 5)
    assert cache.block_scale_offsets is not None
    assert cache.role("key_scale") == Role.KEY_BLOCK_SCALE
    assert Cache.create(form_cases.layout(key="fp8_ds_mla", page_size=64), 5).role("key_scale") == Role.KEY
    moved = jnp.array([2, 0, 1], jnp.int32)  # as if that pool held its layers in another order
    cache = replace(cache, block_scale_offsets=moved)
    facts = cases.batch(decodes=[(3, 1)], slots=5)
    latent, rope = form_cases.latents(cache.layout, 1)
    after = ops.append_latent(
        cache, 0, jnp.asarray(latent), jnp.asarray(rope), cases.step(facts, cache.layout)
    )
    assert after.key_scale is not None
    slot = facts.tables[0][0]
    assert np.unique(np.asarray(after.key_scale).nonzero()[0]).tolist() == [slot * 3 + 2]
    assert np.unique(np.asarray(after.key).nonzero()[0]).tolist() == [slot * 3]


@pytest.mark.parametrize("key", ["fp8", "nvfp4", "fp8_ds_mla"])
def test_traced_layers_write_what_numbers_write(key):
    """Inside a scan over layers, all pools of the form."""
    layout = form_cases.layout(key=key, index="fp4", page_size=form_cases.page_size_of(key))
    facts = cases.batch(decodes=[(5, 1), (2, 1)], page_size=layout.page_size)
    step, cache = cases.step(facts, layout), cases.poisoned(layout)
    latent, rope = (jnp.asarray(x) for x in form_cases.latents(layout, 2))
    keys = jnp.asarray(normal(2, 128))

    @jax.jit
    def scanned(cache):
        def body(cache, layer):
            cache = ops.append_index_k(cache, layer, keys, step)
            return ops.append_latent(cache, layer, latent, rope, step), None

        return jax.lax.scan(body, cache, jnp.arange(-1, 4, dtype=jnp.int32))[0]  # two that do not exist

    expected = cache
    for layer in range(3):
        expected = ops.append_latent(expected, layer, latent, rope, step)
    for layer in (0, 2):
        expected = ops.append_index_k(expected, layer, keys, step)
    assert cases.pool_bytes(scanned(cache)) == cases.pool_bytes(expected)


# --- gathering and scoring -----------------------------------------------------------------------------------------


def filled(layout, facts, layer: int = 2, seed: int = 0):
    """A poisoned cache with random keys at all positions of all requests, and their values per request."""
    rng, table = np.random.default_rng(seed), facts.held_table()
    cache, values = cases.poisoned(layout), {}
    for r, length in enumerate(facts.kv_lens):
        keys = rng.normal(size=(length, 128)).astype(np.float32)
        cache = form_cases.write_keys(
            cache, layer, [row_of(table, r, p, facts.page_size) for p in range(length)], keys
        )
        entry = numpy_forms.index_entries(keys, layout.index_form)
        values[r] = numpy_forms.index_values(entry, layout.index_form)
    return cache, values


@pytest.mark.parametrize("manager", ["v1", "v2"])
@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_gathered_fp4_keys_are_the_bytes(manager, page_size):
    """Half a byte an element: 64 bytes and four scale bytes a token, zeros behind the last key."""
    layout = form_cases.layout(manager, index="fp4", page_size=page_size)
    facts = cases.batch([(7, 3), (5, 5)], page_size=page_size, gathered=14)
    cache, _ = filled(layout, facts)
    data, scale = cases.gather_index_k(cache, 2, cases.step(facts, layout))
    assert (data.shape, data.dtype, scale.shape, scale.dtype) == ((14, 64), jnp.uint8, (14,), jnp.int32)
    rng = np.random.default_rng(0)
    keys = np.concatenate([rng.normal(size=(n, 128)).astype(np.float32) for n in (7, 5)])
    wanted, words = numpy_forms.quantize_fp4(keys)
    np.testing.assert_array_equal(data[:12], wanted)
    np.testing.assert_array_equal(scale[:12], words)
    assert not np.asarray(data[12:]).any() and not np.asarray(scale[12:]).any()


@pytest.mark.parametrize("manager", ["v1", "v2"])
@pytest.mark.parametrize("form", INDEX_FORMS)
@pytest.mark.parametrize("page_size", [4, 16])
def test_paged_scores(manager, form, page_size):
    """Contexts, decode requests and padding; the same -inf places and the model's scores."""
    layout, facts = (
        form_cases.layout(manager, index=form, page_size=page_size),
        cases.batch(**RAGGED, page_size=page_size),
    )
    cache, keys = filled(layout, facts)
    tokens, weights = facts.tokens(), normal(len(facts.tokens()), HEADS, seed=3)
    q, q_values, factor = form_cases.query(layout, normal(len(tokens), HEADS, 128, seed=2))
    folded = (weights * factor).astype(np.float32)
    expected = np.full((len(tokens), facts.width * page_size), -np.inf)
    for t, (r, position) in enumerate(tokens):
        if position >= 0:
            expected[t, : position + 1] = scores(q_values[t], folded[t], keys[r][: position + 1])
    got = np.asarray(cases.paged_mqa_logits(q, folded, cache, 2, cases.step(facts, layout)))
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
    seen = np.isfinite(expected)
    np.testing.assert_allclose(got[seen], expected[seen], rtol=2e-6, atol=2e-6 * np.abs(expected[seen]).max())


def test_fp4_scores_of_gathered_keys():
    """The contiguous op on gathered FP4 keys equals the paged op inside each window, chunked or not."""
    layout, facts = form_cases.layout(index="fp4"), cases.batch([(7, 3), (5, 5)], padding=1, gathered=14)
    cache, _ = filled(layout, facts)
    step, weights = cases.step(facts, layout), normal(9, HEADS, seed=3)
    q, _, _ = form_cases.query(layout, normal(9, HEADS, 128, seed=2))
    paged = np.asarray(cases.paged_mqa_logits(q, weights, cache, 2, step))
    keys = cases.gather_index_k(cache, 2, step)
    flat = np.asarray(cases.mqa_logits(q, keys, weights, step.key_starts, step.key_ends))
    for t, (start, end) in enumerate(zip(step.key_starts.tolist(), step.key_ends.tolist(), strict=True)):
        np.testing.assert_allclose(flat[t, start:end], paged[t, : end - start], rtol=1e-5, atol=1e-5)
        assert np.isfinite(flat[t]).sum() == end - start


@pytest.mark.parametrize("rows", [2, 5, 100])
def test_fp4_selection_in_chunks(rows):
    """The choice of the model's scores, for every score budget; small whole numbers, so that most choices are ties."""
    layout, facts = form_cases.layout(index="fp4"), cases.batch(**RAGGED, spare_requests=1)
    rng, table, cache, keys = np.random.default_rng(4), facts.held_table(), cases.poisoned(layout), {}
    for r, length in enumerate(facts.kv_lens):
        keys[r] = rng.integers(-1, 2, (length, 128)).astype(np.float32)
        cache = form_cases.write_keys(cache, 0, [row_of(table, r, p, 4) for p in range(length)], keys[r])
    tokens = facts.tokens()
    values = rng.integers(-1, 2, (len(tokens), HEADS, 128)).astype(np.float32)
    q, decoded, _ = form_cases.query(layout, values)
    np.testing.assert_array_equal(decoded, values)
    weights = rng.integers(-2, 3, (len(tokens), HEADS)).astype(np.float32)
    wanted = [
        topk(scores(values[t], weights[t], keys[r][: p + 1]), p + 1, 4) if p >= 0 else [-1] * 4
        for t, (r, p) in enumerate(tokens)
    ]
    budget = rows * facts.width * 4 * 4
    got = cases.select_tokens(q, weights, cache, 0, cases.step(facts, layout), 4, score_budget=budget)
    assert got.tolist() == wanted
    assert sum(-1 not in row for row in wanted) > 4, "the choice must drop tokens"


# --- attention -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("manager", ["v1", "v2"])
@pytest.mark.parametrize("form", KEY_FORMS)
def test_attention(manager, form):
    """Rows of all kinds over a poisoned pool: some written, -1, rows past the pool, none at all."""
    layout = form_cases.layout(manager, key=form, page_size=form_cases.page_size_of(form))
    scale, rng = form_cases.KEY_SCALE.get(form), np.random.default_rng(5)
    written = rng.permutation(cases.SLOTS * layout.page_size)[:9].tolist()
    latent, rope = form_cases.latents(layout, 9)
    entry = numpy_forms.latent_entries(latent, rope, form, scale or 1.0)
    cache = form_cases.write_entry(cases.poisoned(layout), 1, written, entry)
    known = dict(zip(written, numpy_forms.latent_values(entry, form, scale or 1.0), strict=True))
    rows = np.full((4, 6), -1, np.int32)
    rows[0], rows[1, [1, 4]], rows[2, [0, 5]] = (
        written[:6],
        written[6:8],
        [written[8], cases.SLOTS * layout.page_size],
    )
    q = normal(4, HEADS, layout.latent_dim + layout.rope_dim) / 4
    expected = [
        attention(q[t], np.array([known[r] for r in row if r in known]), layout.latent_dim, SCALE)
        for t, row in enumerate(rows.tolist())
    ]
    out, lse = form_cases.sparse_mla(q, cache, 1, rows, SCALE, key_scale=scale)
    np.testing.assert_allclose(out, np.stack([o for o, _ in expected]), rtol=1e-5, atol=3e-6)
    np.testing.assert_allclose(lse, np.stack([s for _, s in expected]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_the_default_scale_is_one(form):
    layout = form_cases.layout(key=form)
    facts = cases.batch(decodes=[(3, 1)])
    step, (latent, rope) = cases.step(facts, layout), form_cases.latents(layout, 1)
    caches = [
        form_cases.append_latent(cases.poisoned(layout), 0, latent, rope, step, key_scale=scale)
        for scale in (None, 1.0, jnp.float32(2.0))
    ]
    assert cases.pool_bytes(caches[0]) == cases.pool_bytes(caches[1])
    assert cases.pool_bytes(caches[0]) != cases.pool_bytes(caches[2])
    rows, q = jnp.asarray(facts.derive()["rows"])[:, None], normal(1, HEADS, 32)
    out = [
        form_cases.sparse_mla(q, caches[0], 0, rows, SCALE, key_scale=scale)[0] for scale in (None, 1.0, 2.0)
    ]
    np.testing.assert_array_equal(out[0], out[1])
    np.testing.assert_allclose(out[2], 2 * out[0], rtol=1e-6)


# --- errors --------------------------------------------------------------------------------------------------------


def test_quantize_index_k_forms():
    keys = normal(3, 128)
    data, scale = ops.quantize_index_k(jnp.asarray(keys), "fp4", tie_rule="even")
    wanted, words = numpy_forms.quantize_fp4(keys, "even")
    np.testing.assert_array_equal(data, wanted)
    np.testing.assert_array_equal(scale, words)
    with pytest.raises(ValueError, match=r"tie_rule is 'up', wanted 'deepgemm'"):
        ops.quantize_index_k(jnp.asarray(keys), "fp4", tie_rule="up")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"k has D = 64, wanted 128"):
        ops.quantize_index_k(jnp.zeros((3, 64)), "fp4")


@pytest.mark.parametrize("op", [ops.paged_mqa_logits, lambda *a: ops.select_tokens(*a, 2)])
def test_queries_that_are_not_in_the_keys_form(op):
    facts = cases.batch(decodes=[(1, 1), (1, 1)])
    pair = jnp.zeros((2, HEADS, 64), jnp.uint8), jnp.zeros((2, HEADS), jnp.int32)
    codes, floats, weights = (
        jnp.zeros((2, HEADS, 128), jnp.uint8),
        jnp.zeros((2, HEADS, 128)),
        jnp.zeros((2, HEADS)),
    )

    def call(form, q):
        layout = form_cases.layout(index=form)
        return op(q, weights, Cache.create(layout, 2), 0, cases.step(facts, layout))

    for form, good in (("fp4", pair), ("fp8", codes), ("f32", floats)):
        call(form, good)
    fix = "quantise the query as the cache's index_form says"
    for form, q, words in (
        ("fp4", codes, r"q \(keys are fp4\) is one array, wanted the pair \(packed codes, int32 scales\)"),
        ("fp4", pair[:1], r"q \(keys are fp4\) is a tuple of 1, wanted the pair"),
        ("fp4", (codes, pair[1]), r"q has shape \[2, 3, 128\], wanted \[N, H, D/2\] = \[2, any, 64\]"),
        ("fp4", (pair[0], pair[1][:, :2]), r"scales of q has shape \[2, 2\], wanted \[N, H\] = \[2, 3\]"),
        ("fp4", (pair[0], weights), r"scales of q has dtype float32, wanted int32"),
        ("fp4", (pair[0].astype(jnp.int8), pair[1]), r"q \(keys are fp4\) has dtype int8, wanted uint8"),
        ("fp8", pair, r"q \(keys are fp8\) is a tuple of 2, wanted one array"),
        ("fp8", floats, r"q \(keys are fp8\) has dtype float32"),
        ("f32", pair, r"q \(keys are f32\) is a tuple of 2, wanted one array"),
    ):
        with pytest.raises(ValueError, match=words + f".*{fix}"):
            call(form, q)


def test_contiguous_queries_and_keys_of_two_forms():
    pair = jnp.zeros((1, 2, 64), jnp.uint8), jnp.zeros((1, 2), jnp.int32)
    packed, words = jnp.zeros((3, 64), jnp.uint8), jnp.zeros(3, jnp.int32)
    codes, factors = jnp.zeros((3, 128), jnp.uint8), jnp.ones(3)
    windows = jnp.zeros((1, 2)), jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)
    assert ops.mqa_logits(pair, (packed, words), *windows).shape == (1, 3)
    for q, k in (
        (pair, (codes, factors)),
        (pair, codes),
        (jnp.zeros((1, 2, 128), jnp.uint8), (packed, words)),
        (pair, (codes, words)),
        (pair, (packed, words[:2])),
        ((jnp.zeros((1, 2, 32), jnp.uint8), pair[1]), (packed[:, :32], words)),
    ):
        with pytest.raises(
            ValueError, match=r"mqa_logits: .*both FP4 pairs of packed codes and int32 scales"
        ):
            ops.mqa_logits(q, k, *windows)


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (0.0, "key_scale is 0.0, wanted a positive finite number"),
        (-1.0, "key_scale is -1.0, wanted a positive"),
        (float("inf"), "key_scale is inf, wanted a positive finite number"),
        (jnp.ones(3), r"key_scale has shape \[3\], wanted a scalar"),
        (jnp.int32(1), "key_scale has dtype int32, wanted float"),
    ],
)
def test_scales_that_cannot_be(scale, words):
    layout = form_cases.layout(key="fp8")
    cache, step = Cache.create(layout, 2), cases.step(cases.batch(decodes=[(1, 1)]), layout)
    latent, rope = (jnp.asarray(x) for x in form_cases.latents(layout, 1))
    with pytest.raises(ValueError, match=f"append_latent: {words}"):
        ops.append_latent(cache, 0, latent, rope, step, key_scale=scale)
    with pytest.raises(ValueError, match=f"sparse_mla: {words}"):
        ops.sparse_mla(jnp.zeros((1, 2, 32)), cache, 0, jnp.zeros((1, 2), jnp.int32), SCALE, key_scale=scale)


@pytest.mark.parametrize("form", ["bf16", "f32", "fp8_ds_mla"])
def test_scales_that_a_form_has_not(form):
    layout = form_cases.layout(key=form, page_size=64)
    cache, rows = Cache.create(layout, 2), jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(ValueError, match=f"key_form '{form}' has no per-tensor scale: leave it out"):
        ops.sparse_mla(jnp.zeros((1, 2, sum(form_cases.widths(form)))), cache, 0, rows, SCALE, key_scale=1.0)


def test_planted_scale_folded_into_fp4_weights_is_seen(monkeypatch):
    """Reading FP4 keys without their block scales changes the scores: the test of scores must see it."""
    original = quant.dequantize_fp4
    monkeypatch.setattr(
        "dsa_jax.quant.fp4.dequantize_fp4", lambda c, s: original(c, jnp.full_like(s, 0x7F7F7F7F))
    )
    monkeypatch.setattr(
        cases, "paged_mqa_logits", lambda *a: ops.paged_mqa_logits(*jax.tree.map(jnp.asarray, a[:2]), *a[2:])
    )
    with pytest.raises(AssertionError):
        test_paged_scores("v2", "fp4", 4)
