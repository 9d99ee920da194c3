"""Restated rows of the catalogue that this library was written from: scatter, gather, decode scores, FP4 against FP8.

The original addresses flat bytes of one layer's view; here a page and an offset do that, and the codec gives the bytes. It
also compresses keys of another model by four: that has no counterpart here.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import cases
import form_cases
import numpy_forms
from dsa_jax import ops, quant
from dsa_jax.cache import Cache
from dsa_jax.codec import pack_pages
from dsa_jax.config import preset
from dsa_jax.layout import CacheLayout, Role
from numpy_model import calc_diff, row_of


def keys_of(count: int, seed: int = 0) -> np.ndarray:
    """Gaussian keys in bfloat16's values."""
    values = np.random.default_rng(seed).normal(size=(count, 128))
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize("index", ["fp8", "fp4"])
def test_scatter_equals_the_reference(index):
    """Three requests of 32 tokens, pages of 64, three layers: the op's layer 1 is the reference's, all other bytes are 0."""
    layout = form_cases.layout(index=index, page_size=64, full=(True, True, True))
    facts = cases.batch([(32, 32)] * 3, page_size=64, slots=5)
    keys, step = keys_of(96), cases.step(facts, layout)
    empty = Cache.create(layout, 5)
    cache = cases.append_index_k(empty, 1, keys, step)
    wanted = form_cases.write_keys(empty, 1, facts.derive()["rows"].tolist(), keys)
    assert cases.pool_bytes(cache) == cases.pool_bytes(wanted)
    packed = np.asarray(pack_pages(cache, Role.INDEX_KEY)).reshape(5, 3, -1)
    assert not packed[:, [0, 2]].any()
    assert packed[:, 1].any(axis=1).sum() == 3


@pytest.mark.parametrize("scale", [1, 2, 3])
@pytest.mark.parametrize("index", ["fp8", "fp4"])
def test_round_trip_with_page_scales(scale, index):
    """With one, two or three pages in a slot, a layer's pages are slot * scale; what is read back is what was written."""
    layout = form_cases.layout(index=index, page_size=16, full=(True,) * scale)
    facts = cases.batch([(20, 20), (7, 7)], page_size=16, slots=6, gathered=27)
    cache, step = cases.poisoned(layout, slots=6, byte=0x5A), cases.step(facts, layout)
    written = cases.append_index_k(cache, 0, keys := keys_of(27), step)
    data, factor = cases.gather_index_k(written, 0, step)
    wanted = numpy_forms.index_entries(keys, index)
    np.testing.assert_array_equal(data, wanted["index_key"])
    np.testing.assert_array_equal(factor, wanted["index_scale"])
    packed = np.asarray(pack_pages(written, Role.INDEX_KEY))
    touched = (packed != 0x5A).any(axis=1).nonzero()[0]
    assert touched.tolist() == sorted(
        slot * scale for table, n in zip(facts.tables, (2, 1), strict=True) for slot in table[:n]
    )


def test_stored_scales():
    """Requests of 150 and 100 tokens, pages of 64: position p's scale is a float32 at 64 * 128 + 4 * (p mod 64)."""
    layout = form_cases.layout(index="fp8", page_size=64, full=(True,))
    facts = cases.batch([(150, 150), (100, 100)], page_size=64, slots=6)
    keys = keys_of(250) * np.float32(2.0) ** (np.arange(250)[:, None] % 11).astype(np.float32)
    packed = np.asarray(
        pack_pages(
            cases.append_index_k(Cache.create(layout, 6), 0, keys, cases.step(facts, layout)), Role.INDEX_KEY
        )
    )
    _, scales = quant.quantize_fp8(jnp.asarray(keys))
    for request, start, length in ((0, 0, 150), (1, 150, 100)):
        for p in range(length):
            raw = packed[facts.tables[request][p // 64], 64 * 128 + 4 * (p % 64) :][:4]
            assert raw.view(np.float32)[0] == scales[start + p]


@pytest.mark.parametrize("index", ["fp8", "fp4"])
def test_negative_rows(index):
    """Tokens without a row write nothing; places without a row gather zeros."""
    layout = form_cases.layout(index=index)
    facts = cases.batch([(5, 5)], padding=3, gathered=8)
    step, cache = cases.step(facts, layout), cases.poisoned(layout)
    nothing = dataclasses.replace(step, rows=jnp.full(8, -1, jnp.int32))
    assert cases.pool_bytes(cases.append_index_k(cache, 0, keys_of(8), nothing)) == cases.pool_bytes(cache)
    data, scale = cases.gather_index_k(cases.append_index_k(cache, 0, keys_of(8), step), 0, step)
    assert np.asarray(data[:5]).any(axis=1).all()
    assert not np.asarray(data[5:]).any()
    assert not np.asarray(scale[5:]).any()


@pytest.mark.sample(0, 3)
@pytest.mark.parametrize(("index", "heads", "bound"), [("fp8", 32, 1e-3), ("fp4", 64, 0.02)])
@pytest.mark.parametrize(
    ("requests", "next_n"),
    [pytest.param(4, 1, marks=pytest.mark.full), (2, 2), pytest.param(4, 3, marks=pytest.mark.full), (4, 4)],
)
@pytest.mark.parametrize("context", [300, pytest.param(2048, marks=pytest.mark.full)])
def test_paged_decode_scores(index, heads, bound, requests, next_n, context):
    """Gaussian keys and queries, ragged contexts: against the unquantised product, and against the decoded bytes."""
    layout = form_cases.layout(index=index, page_size=64, full=(True,))
    rng = np.random.default_rng(requests * 10 + next_n)
    lengths = rng.integers(int(0.7 * context), int(1.4 * context) + 1, requests).tolist()
    facts = cases.batch(decodes=[(n, next_n) for n in lengths], next_n=next_n, page_size=64, slots=200)
    table, keys = facts.held_table(), [keys_of(n, seed=r) for r, n in enumerate(lengths)]
    rows = [row_of(table, r, p, 64) for r, n in enumerate(lengths) for p in range(n)]
    entry = _encoded(np.concatenate(keys), layout)
    cache = form_cases.write_entry(cases.poisoned(layout, slots=200), 0, rows, entry)
    tokens = requests * next_n
    q = keys_of(tokens * heads, seed=99).reshape(tokens, heads, 128)
    weights = rng.normal(size=(tokens, heads)).astype(np.float32)
    parts = _encoded(q.reshape(-1, 128), layout)
    data, scale = parts["index_key"].reshape(tokens, heads, -1), parts["index_scale"].reshape(tokens, heads)
    query, folded = (data, weights * scale) if index == "fp8" else ((data, scale), weights)
    got = np.asarray(cases.paged_mqa_logits(query, folded, cache, 0, cases.step(facts, layout)))
    decoded_keys = np.split(numpy_forms.index_values(entry, index), np.cumsum(lengths)[:-1])
    decoded_q = numpy_forms.index_values(parts, index).reshape(q.shape)
    exact, simulated, seen = [], [], []
    for t in range(tokens):
        r, visible = t // next_n, lengths[t // next_n] - next_n + t % next_n + 1
        exact.append(_scores(q[t], weights[t], keys[r][:visible]))
        simulated.append(_scores(decoded_q[t], weights[t], decoded_keys[r][:visible]))
        seen.append(got[t, :visible])
        assert np.isneginf(got[t, visible:]).all()
    assert calc_diff(np.concatenate(seen), np.concatenate(exact)) < bound
    assert calc_diff(np.concatenate(seen), np.concatenate(simulated)) < 5e-6


def test_fp4_packing():
    """Random 128 x 128: low nibble even, the eight magnitudes, bit 3 the sign, scale byte b is 2^(b - 127); small error."""
    x = np.random.default_rng(5).normal(size=(128, 128)).astype(np.float32) * 3
    packed, words = (np.asarray(a) for a in ops.quantize_index_k(jnp.asarray(x), "fp4"))
    scale_bytes = np.ascontiguousarray(words).view(np.uint8).reshape(128, 4)
    powers = np.repeat(2.0 ** (scale_bytes.astype(float) - 127), 32, axis=1)
    low, high = packed & 15, packed >> 4
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.empty((128, 128))
    for nibbles, first in ((low, 0), (high, 1)):
        values[:, first::2] = np.where(nibbles & 8, -1, 1) * magnitudes[nibbles & 7]
    values *= powers
    assert np.abs(values - x).mean() < 0.3  # 1.0 is asked for, which all zeros would nearly meet
    np.testing.assert_array_equal(quant.dequantize_fp4(jnp.asarray(packed), jnp.asarray(words)), values)


@pytest.mark.full
def test_fp4_chooses_nearly_what_fp8_chooses():
    """128 queries of 64 heads on 512 keys: the mean overlap of the best 32 is at least 0.80."""
    rng = np.random.default_rng(6)
    q, k = keys_of(128 * 64, seed=7), keys_of(512, seed=8)
    weights = np.abs(rng.normal(size=(128, 64))).astype(np.float32)
    windows = jnp.zeros(128, jnp.int32), jnp.full(128, 512, jnp.int32)
    chosen = {}
    for form in ("fp8", "fp4"):
        q_data, q_scale = ops.quantize_index_k(jnp.asarray(q), form)
        assert q_scale is not None
        data, scale = q_data.reshape(128, 64, -1), q_scale.reshape(128, 64)
        query, folded = (data, weights * scale) if form == "fp8" else ((data, scale), jnp.asarray(weights))
        logits = ops.mqa_logits(query, ops.quantize_index_k(jnp.asarray(k), form), folded, *windows)
        chosen[form] = np.asarray(jax.lax.top_k(logits, 32)[1])
    overlap = [
        len({*a} & {*b}) / 32 for a, b in zip(chosen["fp8"].tolist(), chosen["fp4"].tolist(), strict=True)
    ]
    assert 0.80 <= np.mean(overlap) < 1


@pytest.mark.full
@pytest.mark.parametrize(("form", "least"), [("fp8", 0.965), ("fp4", 0.87)])
def test_what_is_chosen_without_quantisation_is_chosen(form, least):
    """Recall of the best 2,048 of 16,384 Gaussian keys, 64 heads: measured elsewhere 0.972 and 0.877."""
    rng, queries = np.random.default_rng(9), 12
    q, k = keys_of(queries * 64, seed=10), keys_of(16_384, seed=11)
    weights = jnp.asarray(rng.normal(size=(queries, 64)), jnp.float32)
    q_data, q_scale = ops.quantize_index_k(jnp.asarray(q), form)
    assert q_scale is not None
    data, scale = q_data.reshape(queries, 64, -1), q_scale.reshape(queries, 64)
    query, folded = (data, weights * scale) if form == "fp8" else ((data, scale), weights)
    windows = jnp.zeros(queries, jnp.int32), jnp.full(queries, len(k), jnp.int32)
    logits = ops.mqa_logits(query, ops.quantize_index_k(jnp.asarray(k), form), folded, *windows)
    exact = jnp.einsum("qhk,qh->qk", jnp.maximum(jnp.asarray(q @ k.T).reshape(queries, 64, -1), 0), weights)
    got, want = (np.asarray(ops.topk_indices(x, windows[1], 2_048)) for x in (logits, exact))
    recall = [len({*a} & {*b}) / 2_048 for a, b in zip(got.tolist(), want.tolist(), strict=True)]
    assert least <= np.mean(recall) < 1


def test_bytes_of_a_token():
    """132 and 68 bytes an indexer layer, in layout and allocated arrays; FP4 takes less than 0.52 of FP8."""
    sizes = {}
    for form in ("fp8", "fp4"):
        cache = Cache.create(form_cases.layout(index=form, page_size=64, full=(True,)), 3)
        assert cache.index_key is not None and cache.index_scale is not None
        sizes[form] = (cache.index_key.nbytes + cache.index_scale.nbytes) // (3 * 64)
    assert sizes == {"fp8": 132, "fp4": 68}
    assert sizes["fp4"] / sizes["fp8"] < 0.52


def test_fp4_survives_a_rebuild():
    """A layout rebuilt from its own fields, or with one changed, keeps FP4, and so does the cache made from it."""
    layout = CacheLayout.create(preset("glm-5.2"), index_form="fp4", layers=(0, 1))
    again = dataclasses.replace(dataclasses.replace(layout, hadamard=True), hadamard=layout.hadamard)
    assert (again, hash(again)) == (layout, hash(layout))
    assert Cache.abstract(again, 2).index_scale.dtype == jnp.int32  # pyright: ignore[reportOptionalMemberAccess]


def _encoded(values: np.ndarray, layout: CacheLayout) -> dict[str, np.ndarray]:
    """Entries by the library's quantiser, whose bytes other tests compare with the NumPy model."""
    data, scale = ops.quantize_index_k(jnp.asarray(values), layout.index_form)
    return {"index_key": np.asarray(data), "index_scale": np.asarray(scale)}


def _scores(q: np.ndarray, weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Scores of one token in float64, all heads at once: ``numpy_model.scores`` would take minutes here."""
    return weights.astype(np.float64) @ np.maximum(q.astype(np.float64) @ keys.astype(np.float64).T, 0)
