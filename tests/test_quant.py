"""Bytes of FP8 keys: golden vectors, every code, every corner of the scale."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import numpy_model
from dsa_jax import quant

GOLDEN = (np.arange(128) - 63.5) / 8
"""The input of the golden vectors."""


@pytest.fixture(scope="module")
def quantize():
    return jax.jit(quant.quantize_fp8, static_argnums=1)


def test_golden_bytes_with_power_of_two_scale(quantize):
    codes, scale = quantize(jnp.asarray(GOLDEN[None], jnp.float32), "ue8m0")
    assert np.asarray(scale).view(np.uint32).tolist() == [0x3D000000]
    assert bytes(np.asarray(codes)[0, :16]).hex(" ") == "f8 f8 f7 f7 f7 f7 f6 f6 f6 f6 f5 f5 f5 f5 f4 f4"
    assert bytes(np.asarray(codes)[0, 60:68]).hex(" ") == "d6 d2 cc c0 40 4c 52 56"


def test_golden_bytes_with_exact_scale(quantize):
    codes, scale = quantize(jnp.asarray(GOLDEN[None], jnp.float32), "fp32")
    assert np.asarray(scale).view(np.uint32).tolist() == [0x3C912493]
    assert bytes(np.asarray(codes)[0, :16]).hex(" ") == "fe fe fe fd fd fd fd fc fc fc fc fc fb fb fb fb"


def test_golden_logits(quantize):
    """Structured queries and keys, their scores in float64 from the library's bytes."""
    bf16 = lambda x: np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    h, d, t = np.arange(64)[:, None], np.arange(128)[None, :], np.arange(6)[:, None]
    q = bf16(np.sin(0.1 * (h + 1) * (d + 1)))
    k = bf16((1 + t) * np.cos(0.07 * (t + 1) * (d + 1)))
    weights = ((np.arange(64) % 5) - 1) / 8 * 64**-0.5 * 128**-0.5
    exact = numpy_model.scores(q, weights, k)
    np.testing.assert_allclose(
        exact, [-0.002593, 0.082654, -0.032383, 0.469092, 0.383428, 0.552159], atol=2e-6
    )
    wanted = {
        "ue8m0": [-0.001972, 0.087341, -0.026593, 0.483655, 0.394811, 0.544726],
        "fp32": [-0.003494, 0.080383, -0.042299, 0.477390, 0.401651, 0.558650],
    }
    for rule, scores in wanted.items():
        q_codes, q_scale = quantize(jnp.asarray(q, jnp.float32), rule)
        k_codes, k_scale = quantize(jnp.asarray(k, jnp.float32), rule)
        if rule == "ue8m0":
            assert np.log2(k_scale).tolist() == [-8, -7, -7, -6, -6, -6]
        folded = weights * np.asarray(q_scale, np.float64)
        got = numpy_model.scores(
            numpy_model.E4M3[np.asarray(q_codes)],
            folded,
            numpy_model.E4M3[np.asarray(k_codes)],
            np.asarray(k_scale),
        )
        np.testing.assert_allclose(got, scores, atol=1e-5)


def test_every_code():
    """All 256 codes decode as the format says, and the 254 finite ones encode back to themselves."""
    codes = np.arange(256, dtype=np.uint8)
    values = np.asarray(quant.decode_e4m3(jnp.asarray(codes)))
    np.testing.assert_array_equal(values, numpy_model.E4M3.astype(np.float32))
    finite = ~np.isnan(values)
    assert finite.sum() == 254
    np.testing.assert_array_equal(quant.encode_e4m3(jnp.asarray(values[finite])), codes[finite])


def test_rounding():
    """Every middle between two codes goes to the even one; its neighbours go to the nearer one."""
    middles = numpy_model._MIDDLES.astype(np.float32)
    around = np.concatenate(
        [middles, np.nextafter(middles, 0, dtype=np.float32), np.nextafter(middles, 1e9, dtype=np.float32)]
    )
    both = np.concatenate([around, -around])
    np.testing.assert_array_equal(quant.encode_e4m3(jnp.asarray(both)), numpy_model.encode_e4m3(both))


def test_saturation():
    inputs = jnp.array([464, 465, 500, 1e30, jnp.inf, -449, -jnp.inf], jnp.float32)
    assert quant.encode_e4m3(inputs).tolist() == [0x7E] * 5 + [0xFE] * 2
    assert np.isnan(quant.decode_e4m3(quant.encode_e4m3(jnp.array([jnp.nan], jnp.float32)))).all()


def test_pow2_ceil_of_every_exponent():
    """At each power of two, one bit below and one bit above, and at random floats: exact, bit for bit."""
    powers = np.ldexp(np.float32(1), np.arange(-126, 128)).astype(np.float32)
    above = np.nextafter(powers[:-1], np.float32(np.inf))
    below = np.nextafter(powers[1:], np.float32(0))
    bits = np.random.default_rng(0).integers(0x00800000, 0x7F000000, 5000).astype(np.uint32)
    inputs = np.concatenate([powers, above, below, bits.view(np.float32)])
    wanted = np.array([numpy_model.pow2_ceil(float(x)) for x in inputs], np.float32)
    np.testing.assert_array_equal(jax.jit(quant.pow2_ceil)(inputs), wanted)
    assert quant.pow2_ceil(jnp.array([0.0, 1e-45], jnp.float32)).tolist() == [2.0**-126] * 2


@pytest.mark.parametrize("rule", ["ue8m0", "fp32"])
def test_random_vectors(quantize, rule):
    """Vectors of every size and bfloat16 inputs, bit for bit."""
    rng = np.random.default_rng(1)
    vectors = rng.normal(size=(300, 16)).astype(np.float32) * np.float32(2.0) ** rng.integers(
        -30, 30, (300, 1)
    )
    vectors = np.concatenate([vectors, vectors.astype(ml_dtypes.bfloat16).astype(np.float32)]).astype(
        np.float32
    )
    codes, scale = quantize(jnp.asarray(vectors), rule)
    wanted_codes, wanted_scale = numpy_model.quantize_fp8(vectors, rule)
    np.testing.assert_array_equal(scale, wanted_scale)
    np.testing.assert_array_equal(codes, wanted_codes)
    half = jnp.asarray(vectors[300:], jnp.bfloat16)
    np.testing.assert_array_equal(quantize(half, rule)[0], codes[300:])


def test_x64_changes_no_byte(quantize):
    """Whoever enables 64-bit types gets the same codes, scales and dtypes."""
    vectors = np.random.default_rng(4).normal(size=(5, 16)).astype(np.float32)
    codes, scale = quantize(jnp.asarray(vectors), "ue8m0")
    with jax.enable_x64(True):
        again, scale_again = jax.jit(lambda x: quant.quantize_fp8(x, "ue8m0"))(vectors)
        values = jax.jit(quant.dequantize_fp8)(again, scale_again)
        rotated = jax.jit(quant.hadamard)(vectors)
    np.testing.assert_array_equal(again, codes)
    np.testing.assert_array_equal(scale_again, scale)
    assert (again.dtype, scale_again.dtype, values.dtype) == (jnp.uint8, jnp.float32, jnp.float32)
    np.testing.assert_allclose(rotated, quant.hadamard(jnp.asarray(vectors)), rtol=1e-6, atol=1e-6)
    assert rotated.dtype == jnp.float32


def test_error_of_a_round_trip(quantize):
    """Half a step of e4m3: 1/16 of the value, or half the smallest step."""
    vectors = np.random.default_rng(2).normal(size=(50, 128)).astype(np.float32)
    codes, scale = quantize(jnp.asarray(vectors), "ue8m0")
    back = np.asarray(quant.dequantize_fp8(codes, scale))
    bound = np.maximum(np.abs(vectors) / 16, np.asarray(scale)[:, None] * 2.0**-10)
    assert (np.abs(back - vectors) <= bound * (1 + 1e-6)).all()
    assert np.abs(back - vectors).max() > 0


@pytest.mark.parametrize("width", [1, 2, 8, 128])
def test_hadamard(width):
    x = np.random.default_rng(3).normal(size=(3, 5, width)).astype(np.float32)
    rotated = np.asarray(jax.jit(quant.hadamard)(x))
    np.testing.assert_allclose(rotated, x @ numpy_model.hadamard(width), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(quant.hadamard(jnp.asarray(rotated)), x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ambient", [None, "BF16_BF16_F32"])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_hadamard_of_16_bits_rounds_once(dtype, ambient):
    """The entries of the matrix are exact; scaled ones, rounded to the dtype, would change one result in twenty."""
    x = np.random.default_rng(3).normal(size=(50, 128)).astype(dtype)
    with jax.default_matmul_precision(ambient):
        got = np.asarray(jax.jit(quant.hadamard)(x))
    wanted = (x.astype(np.float64) @ numpy_model.hadamard(128)).astype(dtype)
    assert got.dtype == dtype
    assert np.mean(got != wanted) < 0.002
    np.testing.assert_allclose(got.astype(float), wanted.astype(float), rtol=2**-7)


def test_errors():
    with pytest.raises(
        ValueError, match=r"hadamard: x has last dimension 6; wanted a power of two.*Pad the head dimension"
    ):
        quant.hadamard(jnp.zeros((2, 6)))
    for wrong, words in (
        ([1.0, 2.0], r"a list|\[1.0, 2.0\]"),
        (jnp.float32(1), r"float32\[\]"),
        (jnp.ones((2, 4), jnp.int32), r"int32\[2, 4\]"),
        (jnp.ones((2, 4), bool), r"bool\[2, 4\]"),
        (jnp.ones((2, 4), jnp.complex64), r"complex64\[2, 4\]"),
    ):
        with pytest.raises(ValueError, match=f"hadamard: x is ({words}); wanted floats"):
            quant.hadamard(wrong)
    with pytest.raises(ValueError, match=r"scale_rule is 'e8m0'; wanted 'ue8m0'.*'fp32'"):
        quant.quantize_fp8(jnp.zeros((1, 4)), "e8m0")  # pyright: ignore[reportArgumentType]


def test_planted_cast_without_clamp_is_seen(monkeypatch):
    """XLA's cast turns 465 into NaN."""
    monkeypatch.setattr(
        quant, "encode_e4m3", lambda x: jax.lax.bitcast_convert_type(x.astype(jnp.float8_e4m3fn), jnp.uint8)
    )
    with pytest.raises(AssertionError):
        test_saturation()
