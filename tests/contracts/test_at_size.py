"""The catalogue's shapes, scaled to a laptop: quantised scores at real head counts, top-k of 2,048 out of thousands."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cases
from dsa_jax.codec import pack_index_pages
from dsa_jax.metadata import Bucket, StepMetadata
from numpy_model import E4M3, calc_diff, quantize_fp8

bf16 = lambda x: np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def exact(q, weights, keys):
    """Scores in float64 of ``[M, H, D]`` against ``[S, D]``."""
    return np.einsum("mhs,mh->ms", np.maximum(np.einsum("mhd,sd->mhs", q, keys), 0), weights)


def quantised_query(q, weights):
    """Codes, their values, and the weights with the query's scale folded in."""
    codes, scale = quantize_fp8(q.reshape(-1, q.shape[-1]), "fp32")
    folded = weights * scale.reshape(weights.shape)
    return codes.reshape(q.shape), E4M3[codes].reshape(q.shape), folded.astype(np.float32)


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["paged_mqa_logits"])
@pytest.mark.parametrize(("requests", "next_n"), [(4, 1), (2, 2), (3, 4)])
def test_paged_scores(implementation, requests, next_n):
    """Row 22: 32 heads, contexts of 0.7 to 1.4 times 320: 1e-3 from the unquantised scores, 5e-6 from the bytes' own."""
    rng = np.random.default_rng(next_n)
    layout, lengths = (
        cases.layout(index="fp8", page_size=64, scale_rule="fp32"),
        rng.integers(224, 448, requests),
    )
    width = 7
    tables = rng.permutation(requests * width).reshape(requests, width)
    meta = StepMetadata.create(
        layout,
        Bucket(decode_requests=requests, next_n=next_n, table_width=width),
        tables.tolist(),
        lengths.tolist(),
        [next_n] * requests,
    )
    cache = cases.poisoned(layout, slots=requests * width)
    q, weights = bf16(rng.normal(size=(requests * next_n, 32, 128))), rng.normal(size=(requests * next_n, 32))
    codes, values, folded = quantised_query(q, weights)
    plain, own = [np.zeros((requests * next_n, width * 64)) for _ in range(2)]
    for r, length in enumerate(lengths.tolist()):
        keys = bf16(rng.normal(size=(length, 128)))
        rows = [int(tables[r, p // 64]) * 64 + p % 64 for p in range(length)]
        cache = cases.write_keys(cache, 0, rows, keys)
        key_codes, key_scale = quantize_fp8(keys, "fp32")
        of_request = slice(r * next_n, (r + 1) * next_n)
        plain[of_request, :length] = exact(q[of_request], weights[of_request], keys)
        own[of_request, :length] = exact(values[of_request], folded[of_request], E4M3[key_codes]) * key_scale
    step = cases.derive(meta)
    got = np.asarray(cases.paged_mqa_logits(codes, folded, cache, 0, step, implementation=implementation))
    seen = np.arange(width * 64)[None, :] < np.asarray(step.limits)[:, None]
    np.testing.assert_array_equal(np.isneginf(got), ~seen)
    assert calc_diff(got[seen], own[seen]) < 5e-6
    assert calc_diff(got[seen], plain[seen]) < 1e-3
    again = np.asarray(cases.paged_mqa_logits(codes, folded, cache, 0, step, implementation=implementation))
    np.testing.assert_array_equal(got, again)


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["mqa_logits"])
def test_contiguous_scores(implementation):
    """Row 24: 64 heads, 64 queries after a prefix of 128 of 256 keys: the mask exactly, the scores to 1e-3."""
    rng = np.random.default_rng(0)
    q, weights = bf16(rng.normal(size=(64, 64, 128))), rng.normal(size=(64, 64))
    keys = bf16(rng.normal(size=(256, 128)))
    codes, _, folded = quantised_query(q, weights)
    starts, ends = np.zeros(64, np.int32), np.arange(129, 193, dtype=np.int32)
    got = np.asarray(
        cases.mqa_logits(
            codes, quantize_fp8(keys, "fp32"), folded, starts, ends, implementation=implementation
        )
    )
    seen = np.arange(256)[None, :] < ends[:, None]
    np.testing.assert_array_equal(np.isneginf(got), ~seen)
    assert 1e-6 < calc_diff(got[seen], exact(q, weights, keys)[seen]) < 1e-3


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["topk_indices"])
@pytest.mark.parametrize(
    ("requests", "next_n", "lengths"), [(1, 1, (2048, 8192)), (8, 4, (2048, 8192)), (8, 2, (512, 1024))]
)
def test_top_2048(implementation, requests, next_n, lengths):
    """Row 29: limits of a decode step, k = 2,048; exactly the set of a stable sort; short rows are dense."""
    rng = np.random.default_rng(requests)
    rows, width = requests * next_n, lengths[1] + 1  # a width that no tile divides
    logits = rng.normal(size=(rows, width)).astype(np.float32)
    ends = np.repeat(rng.integers(*lengths, requests), next_n)
    limits = (ends - next_n + np.tile(np.arange(next_n), requests) + 1).astype(np.int32)
    got = np.asarray(cases.topk_indices(logits, limits, 2048, implementation=implementation))
    for row, limit, chosen in zip(logits, limits.tolist(), got, strict=True):
        wanted = np.sort(np.argsort(-row[:limit], kind="stable")[:2048])
        np.testing.assert_array_equal(chosen[: len(wanted)], wanted)
        assert (chosen[len(wanted) :] == -1).all()


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["append_index_k"])
@pytest.mark.parametrize("owners", [1, 2, 3])
def test_scatter_and_gather_with_page_scale(implementation, owners):
    """Rows 18 to 21: 150 and 100 tokens in pages of 64, one to three layers a slot: a round trip bit for bit, the scale
    at T*128 + 4t of the packed page, and pages of other layers untouched.
    """
    layout = cases.layout(index="fp8", page_size=64, full=(True,) * owners)
    facts = cases.batch([(150, 150), (100, 100)], page_size=64, padding=6, gathered=256, slots=7)
    step, layer = cases.step(facts, layout), owners - 1
    keys = np.random.default_rng(owners).normal(size=(256, 128)).astype(np.float32)
    cache = cases.poisoned(layout, 7, byte=0x5A)
    after = cases.append_index_k(cache, layer, keys, step, implementation=implementation)
    data, scale = cases.gather_index_k(after, layer, step, implementation=implementation)
    codes, scales = quantize_fp8(keys[:250])
    np.testing.assert_array_equal(np.asarray(data)[:250], codes)
    np.testing.assert_array_equal(np.asarray(scale)[:250], scales)
    assert not np.asarray(data)[250:].any()
    assert not np.asarray(scale)[250:].any()
    packed = np.asarray(pack_index_pages(after.pages("index_key"), after.pages("index_scale")))
    for position in (0, 63, 64, 149):
        page = facts.tables[0][position // 64] * owners + layer
        start = 64 * 128 + 4 * (position % 64)
        assert packed[page, start : start + 4].tobytes() == scales[position].tobytes()
    written = {
        slot * owners + layer
        for table, pages in zip(facts.tables, (3, 2), strict=True)
        for slot in table[:pages]
    }
    for page in set(range(7 * owners)) - written:
        assert (packed[page] == 0x5A).all()
