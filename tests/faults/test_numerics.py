"""Faults of quantisation and scoring."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import cases
from dsa_jax import ops
from dsa_jax.metadata import Bucket, StepMetadata
from dsa_jax.quant import decode_e4m3, dequantize_fp8, encode_e4m3, hadamard, pow2_ceil, quantize_fp8

ATTENDED = dict(decodes=[(1, 1)])


def test_b10_scale_is_rounded_before_the_data_is_divided():
    """amax 449: scale 1.00223 becomes 2 first, so 449 is stored as 224 and comes back as 448, not as 896."""
    key = np.zeros((2, 128), np.float32)
    key[:, 0], key[:, 1] = [449, 448], 224.5
    codes, scale = ops.quantize_index_k(jnp.asarray(key), "fp8")
    assert scale is not None
    assert scale.tolist() == [2.0, 1.0]
    assert decode_e4m3(codes)[:, :2].tolist() == [[224, 112], [448, 224]]
    assert dequantize_fp8(codes, scale)[:, 0].tolist() == [448, 448]


def test_b10_scales_next_to_powers_of_two():
    """2**ceil(log2(s)) in float32 misses 2**-10 * (1 + 2**-23); the rule on the bits does not."""
    just_above = np.float32(2.0**-10) * (1 + np.float32(2.0**-23))
    assert pow2_ceil(jnp.array([2.0**-10, just_above], jnp.float32)).tolist() == [2.0**-10, 2.0**-9]


@pytest.mark.parametrize(
    ("rule", "scale"), [("ue8m0", 2.0**-22), ("fp32", np.float32(1e-4) * np.float32(1 / 448))]
)
def test_b11_zero_keys(rule, scale):
    """Zero keys around a one-hot: zero bytes, a finite scale, scores of exactly 0."""
    layout = cases.layout(index="fp8", scale_rule=rule)
    facts = cases.batch([(3, 3)])
    keys = np.zeros((3, 128), np.float32)
    keys[1, 7] = 5.0
    cache = cases.append_index_k(cases.poisoned(layout), 0, keys, step := cases.step(facts, layout))
    data, scales = cases.gather_index_k(cache, 0, step)
    assert not np.asarray(data)[[0, 2]].any()
    assert np.asarray(scales)[[0, 2]].tolist() == [scale, scale]
    q = np.full((3, 4, 128), 0x38, np.uint8)  # ones
    logits = np.asarray(cases.paged_mqa_logits(q, np.ones((3, 4), np.float32), cache, 0, step))
    assert logits[2, [0, 2]].tolist() == [0.0, 0.0]
    assert logits[2, 1] == pytest.approx(20.0, rel=0.07)


def test_b12_codes_saturate():
    """500, 1e30 and infinity give 448; NaN stays NaN and never becomes a plausible key."""
    values = jnp.array([500.0, 1e30, jnp.inf, -500.0, 465.0, jnp.nan], jnp.float32)
    decoded = decode_e4m3(encode_e4m3(values)).tolist()
    assert decoded[:5] == [448, 448, 448, -448, 448]
    assert np.isnan(decoded[5])
    for bad in (np.inf, -np.inf, np.nan):
        key = np.ones((1, 128), np.float32)
        key[0, 3] = bad
        codes, scale = quantize_fp8(jnp.asarray(key))
        back = np.asarray(dequantize_fp8(codes, scale))[0]
        assert np.isfinite(np.asarray(scale)).all()
        assert np.delete(back, 3).tolist() == [1.0] * 127
        assert np.isnan(back[3]) == np.isnan(bad)
        if np.isinf(bad):
            assert np.sign(back[3]) == np.sign(bad)


def score(q, k, layout) -> float:
    """Score of one query head with weight 1 against one cached key."""
    facts = cases.batch(**ATTENDED)
    step = cases.step(facts, layout)
    cache = cases.append_index_k(cases.poisoned(layout), 0, k[None], step)
    return float(cases.paged_mqa_logits(q[None, None], np.ones((1, 1), np.float32), cache, 0, step)[0, 0])


def test_b13_rotation_on_both_sides_or_on_none():
    """q = k = e0: 1 with both or none rotated, 1/sqrt(128) with one; so one side alone would be seen."""
    layout = cases.CacheLayout.create(
        cases.config(index_head_dim=128), index_form="f32", key_form="f32", page_size=4
    )
    unit = np.eye(128, dtype=np.float32)[0]
    rotated = np.asarray(hadamard(jnp.asarray(unit)))
    assert score(unit, unit, layout) == 1.0
    assert score(rotated, rotated, layout) == pytest.approx(1.0, rel=1e-6)
    assert score(rotated, unit, layout) == pytest.approx(128**-0.5, rel=1e-6)


def test_b13_rotation_helps_an_outlier():
    """One element 100, the others 0.5: the quantised scores of random queries are nearer with rotation."""
    key = np.full(128, 0.5, np.float32)
    key[0] = 100
    queries = np.random.default_rng(0).normal(size=(200, 128)).astype(np.float32)
    exact = queries @ key
    errors = []
    for rotate in (lambda x: x, hadamard):
        codes, scale = quantize_fp8(rotate(jnp.asarray(key[None])))
        back = np.asarray(dequantize_fp8(codes, scale))[0]
        errors.append(np.sqrt(np.mean((np.asarray(rotate(jnp.asarray(queries))) @ back - exact) ** 2)))
    assert errors[1] < 0.6 * errors[0]


@pytest.mark.parametrize("context", [2, 257])
def test_b15_relu_comes_before_the_mask(context):
    """Weight -0.5 makes every real score negative; positions beyond the context are -inf, never 0, and never chosen."""
    page_size = 4 if context == 2 else 64
    layout = cases.layout(page_size=page_size)
    pages = -(-context // page_size)
    bucket = Bucket(decode_requests=1, table_width=pages)
    meta = StepMetadata.create(layout, bucket, [list(range(pages))], [context], [1])
    keys = np.zeros((context, 8), np.float32)
    keys[:, 0] = np.arange(context, 0, -1)  # relu dots [2, 1] for a context of two
    cache = cases.write_keys(cases.poisoned(layout), 0, list(range(context)), keys)
    q = np.zeros((1, 1, 8), np.float32)
    q[0, 0, 0] = 1
    weights = np.full((1, 1), -0.5, np.float32)
    step = cases.derive(meta)
    logits = np.asarray(cases.paged_mqa_logits(q, weights, cache, 0, step))[0]
    assert logits.shape == (pages * page_size,)
    assert logits[:context].tolist() == (-0.5 * keys[:, 0]).tolist()
    assert np.isneginf(logits[context:]).all()
    assert cases.select_tokens(q, weights, cache, 0, step, 2).tolist() == [[context - 2, context - 1]]
