"""FP4 indexer keys: golden vectors, both tie rules, every code, scales, and what is not a number."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import numpy_forms
import numpy_model
from dsa_jax import quant
from dsa_jax.quant import fp4

GOLDEN = (np.arange(128) - 63.5) / 8
"""The input of the golden vectors."""
TIES = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -0.1]


@pytest.fixture(scope="module")
def quantize():
    return jax.jit(quant.quantize_fp4, static_argnums=1)


def test_golden_bytes(quantize):
    codes, scale = quantize(jnp.asarray(GOLDEN[None], jnp.float32), "deepgemm")
    assert scale.dtype == jnp.int32
    assert np.asarray(scale).view(np.uint32).tolist() == [0x807F7F80]
    assert np.asarray(scale).tobytes().hex(" ") == "80 7f 7f 80"
    assert bytes(np.asarray(codes)[0, :16]).hex(" ") == "ee ee ee ee dd dd dd dd dd dd dd dd cc cc cc cc"
    assert bytes(np.asarray(codes)[0, 16:32]).hex(" ") == "ee ee dd dd dd dd cc cc cc bb bb aa aa 99 99 00"


def test_golden_ties():
    """Half-way values: towards zero without -0, or to the even code with -0 kept."""
    codes = lambda rule: quant.encode_e2m1(jnp.array(TIES, jnp.float32), rule).tolist()
    assert codes("deepgemm") == [7, 0, 1, 2, 3, 4, 5, 6, 0, 9, 10, 11, 12, 13, 14, 0]
    assert codes("even") == [7, 0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14, 8]


def test_even_is_the_rounding_of_the_hardware_type():
    """Round-to-even agrees with float4_e2m1fn of ml_dtypes on every multiple of 1/16, ties and -0 included."""
    values = np.arange(-120, 121).astype(np.float32) / 16
    values = np.append(values, np.float32(-0.0))
    wanted = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    np.testing.assert_array_equal(quant.encode_e2m1(jnp.asarray(values), "even"), wanted)


def test_every_code():
    """All sixteen codes decode to their values and, -0 apart, encode back under both rules."""
    values = quant.decode_e2m1(jnp.arange(16, dtype=jnp.uint8))
    np.testing.assert_array_equal(values, numpy_forms.E2M1.astype(np.float32))
    for rule in ("deepgemm", "even"):
        codes = quant.encode_e2m1(values, rule).tolist()
        assert codes == [*range(8), 0 if rule == "deepgemm" else 8, *range(9, 16)]


@pytest.mark.parametrize("rule", ["deepgemm", "even"])
def test_rounding_next_to_ties(rule):
    middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    around = np.concatenate(
        [np.nextafter(middles, np.float32(0)), middles, np.nextafter(middles, np.float32(9))]
    )
    around = np.concatenate([around, -around, [7, 1e30, np.inf, -np.inf]]).astype(np.float32)
    wanted = [numpy_forms.e2m1_code(x, rule) for x in around]
    assert quant.encode_e2m1(jnp.asarray(around), rule).tolist() == wanted


@pytest.mark.parametrize("rule", ["deepgemm", "even"])
def test_random_vectors(quantize, rule):
    """Vectors of every size, bfloat16 ones with their many ties, bit for bit."""
    rng = np.random.default_rng(1)
    vectors = rng.normal(size=(40, 128)) * 2.0 ** rng.integers(-20, 30, (40, 1))
    vectors = np.concatenate([vectors, rng.integers(-48, 49, (10, 128)) / 8]).astype(ml_dtypes.bfloat16)
    codes, scale = quantize(jnp.asarray(vectors), rule)
    wanted_codes, wanted_scale = numpy_forms.quantize_fp4(vectors.astype(np.float32), rule)
    np.testing.assert_array_equal(scale, wanted_scale)
    np.testing.assert_array_equal(codes, wanted_codes)
    back = quant.dequantize_fp4(codes, scale)
    np.testing.assert_array_equal(back, numpy_forms.dequantize_fp4(wanted_codes, wanted_scale))


def test_rules_differ_on_ties_only(quantize):
    ties = np.tile(np.array([6.0, 0.75, 1.75, 3.5], np.float32), 32)
    low, _ = quantize(jnp.asarray(ties[None]), "deepgemm")
    even, _ = quantize(jnp.asarray(ties[None]), "even")
    assert bytes(np.asarray(low)[0, :2]).hex() == "1753"
    assert bytes(np.asarray(even)[0, :2]).hex() == "2764"


def test_scale_next_to_powers_of_two(quantize):
    """The scale is the smallest power of two with 6 * scale >= amax: exactly at, one bit below and one bit above."""
    at = 6 * np.ldexp(np.float32(1), np.arange(-12, 100)).astype(np.float32)
    inputs = np.concatenate([np.nextafter(at, np.float32(0)), at, np.nextafter(at, np.float32(np.inf))])
    vectors = np.repeat(inputs[:, None], 128, axis=1)
    codes, scale = quantize(jnp.asarray(vectors), "deepgemm")
    exponents = np.asarray(scale).view(np.uint8).reshape(3, -1, 4)
    np.testing.assert_array_equal(
        exponents,
        np.broadcast_to(np.arange(115, 227)[:, None], (112, 4)) + np.array([0, 0, 1])[:, None, None],
    )
    assert np.unique(np.asarray(codes)[:224]).tolist() == [0x77]  # 6 and 6
    assert np.unique(np.asarray(codes)[224:]).tolist() == [0x55]  # a little over 3


def test_zero_and_tiny_vectors(quantize):
    """Zero bytes, and the scale of the floor 1e-4 / 6 rounded up: 2^-15, byte 112."""
    codes, scale = quantize(jnp.stack([jnp.zeros(128), jnp.full(128, 1e-30, jnp.float32)]), "deepgemm")
    assert np.asarray(scale).tobytes() == bytes([112] * 8)
    assert not np.asarray(codes).any()
    assert not np.asarray(quant.dequantize_fp4(codes, scale)).any()


def test_groups_have_their_own_scales(quantize):
    """One big element moves its own group's byte; the other groups keep theirs and their codes."""
    vector = np.ones((1, 128), np.float32)
    changed = vector.copy()
    changed[0, 40] = 96.0
    codes, scale = (np.asarray(x) for x in quantize(jnp.asarray(vector), "deepgemm"))
    other, other_scale = (np.asarray(x) for x in quantize(jnp.asarray(changed), "deepgemm"))
    assert scale.tobytes().hex(" ") == "7d 7d 7d 7d"  # 6 * 2^-2 >= 1
    assert other_scale.tobytes().hex(" ") == "7d 83 7d 7d"  # 6 * 2^4 = 96
    assert (codes != other).nonzero()[1].tolist() == list(range(16, 32))
    assert other[0, 20] == 0x07  # element 40 is even, so it is in the low nibble; its neighbour rounds to 0


def test_bad_elements_stay_bad(quantize):
    """An infinity saturates and spoils no other element; a NaN makes its own group NaN and nothing else."""
    vectors = np.ones((2, 128), np.float32)
    vectors[0, [3, 70]] = [np.inf, -np.inf]
    vectors[1, 33] = np.nan
    codes, scale = quantize(jnp.asarray(vectors), "deepgemm")
    values = np.asarray(quant.dequantize_fp4(codes, scale))
    wanted = np.ones((2, 128))
    wanted[0, [3, 70]] = [1.5, -1.5]  # the largest magnitude under the scale of the other elements
    wanted[1, 32:64] = np.nan
    np.testing.assert_array_equal(values, wanted)
    assert np.asarray(scale).view(np.uint8)[5] == 255


def test_inside_one_jit_the_bytes_decide():
    """Encoding and decoding in one compiled function gives what the bytes say; XLA must not cancel the two."""
    vectors = jnp.asarray(np.random.default_rng(3).normal(size=(5, 128)), jnp.float32)
    both = jax.jit(lambda x: quant.decode_index(quant.encode_index(x, "fp4"), "fp4"))(vectors)
    apart = numpy_forms.dequantize_fp4(*numpy_forms.quantize_fp4(np.asarray(vectors)))
    np.testing.assert_array_equal(both, apart)
    assert np.abs(np.asarray(both) - np.asarray(vectors)).max() > 0.01


def test_x64_changes_no_byte(quantize):
    """Whoever enables 64-bit types gets the same codes, scales, values and dtypes."""
    vectors = np.random.default_rng(4).normal(size=(3, 128)).astype(np.float32)
    codes, scale = quantize(jnp.asarray(vectors), "deepgemm")
    with jax.enable_x64(True):
        again, scale_again = jax.jit(lambda x: quant.quantize_fp4(x))(vectors)
        values = jax.jit(lambda c, s: quant.dequantize_fp4(c, s))(again, scale_again)
    np.testing.assert_array_equal(again, codes)
    np.testing.assert_array_equal(scale_again, scale)
    np.testing.assert_array_equal(values, quant.dequantize_fp4(codes, scale))
    assert (again.dtype, scale_again.dtype, values.dtype) == (jnp.uint8, jnp.int32, jnp.float32)


def test_golden_logits(quantize):
    """Structured queries and keys, their scores in float64 from the library's bytes, all scales inside the product."""
    bf16 = lambda x: np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    h, d, t = np.arange(64)[:, None], np.arange(128)[None, :], np.arange(6)[:, None]
    q, q_scale = quantize(jnp.asarray(bf16(np.sin(0.1 * (h + 1) * (d + 1)))), "deepgemm")
    k, k_scale = quantize(jnp.asarray(bf16((1 + t) * np.cos(0.07 * (t + 1) * (d + 1)))), "deepgemm")
    assert np.asarray(k_scale)[[0, 5]].tobytes() == bytes([125] * 4 + [127] * 4)
    weights = ((np.arange(64) % 5) - 1) / 8 * 64**-0.5 * 128**-0.5
    values = [
        numpy_forms.dequantize_fp4(np.asarray(c), np.asarray(s)) for c, s in ((q, q_scale), (k, k_scale))
    ]
    got = numpy_model.scores(values[0], weights, values[1])
    np.testing.assert_allclose(got, [0.003625, 0.104314, -0.032282, 0.502795, 0.359078, 0.583674], atol=1e-5)


def test_errors():
    with pytest.raises(
        ValueError, match=r"quantize_fp4: x has last dimension 64; wanted 128.*fp8 or f32 form"
    ):
        quant.quantize_fp4(jnp.zeros((2, 64)))
    with pytest.raises(ValueError, match=r"tie_rule is 'odd'; wanted 'deepgemm'.*'even'"):
        quant.quantize_fp4(jnp.zeros((2, 128)), "odd")  # pyright: ignore[reportArgumentType]
    for call in (quant.encode_index, lambda x, form: quant.decode_keys(x, None, form)):
        with pytest.raises(ValueError, match=r"form is 'int4'; wanted fp8, f32 or fp4.*Pass one of these"):
            call(jnp.zeros((2, 128)), "int4")


@pytest.mark.parametrize("mistake", ["nibbles", "no floor", "nearest scale"])
def test_planted_mistakes_are_seen(mistake, monkeypatch):
    """The ties see swapped nibbles (the golden bytes are symmetric and do not); the zero vector sees a missing floor; sizes
    next to powers of two see a wrong scale.
    """
    eager = lambda x, rule: quant.quantize_fp4(x, rule)
    if mistake == "nibbles":
        monkeypatch.setattr(fp4, "pack_nibbles", lambda c: c[..., 1::2] | (c[..., 0::2] << jnp.uint8(4)))
        checked = test_rules_differ_on_ties_only
    elif mistake == "no floor":
        monkeypatch.setattr(fp4, "AMAX_FLOOR", 1e-20)
        checked = test_zero_and_tiny_vectors
    else:
        original = fp4.finite_amax
        monkeypatch.setattr(fp4, "finite_amax", lambda x: original(x) * 0.7)
        checked = test_scale_next_to_powers_of_two
    with pytest.raises(AssertionError):
        checked(eager)
