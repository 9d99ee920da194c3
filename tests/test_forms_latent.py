"""Storage forms of latents: FP8 with one scale, NVFP4, and the 656-byte token, byte for byte against the NumPy model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import numpy_forms
from dsa_jax import quant
from dsa_jax.quant import forms, fp8, nvfp4

FORMS = ("bf16", "f32", "fp8", "nvfp4", "fp8_ds_mla")
SCALES = (1.0, 0.5, 3.7)
"""A power of two divides exactly; 3.7 does not, and a reciprocal in place of the division would show."""

encode = jax.jit(quant.encode_latent, static_argnums=(2, 3))
decode = jax.jit(quant.decode_latent, static_argnums=(1, 2))


def tokens(
    count: int = 30, latent: int = 512, rope: int = 64, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Latents and rotary keys of very different sizes, in bfloat16's values, with zero tokens and zero tiles."""
    rng = np.random.default_rng(seed)
    sizes = 2.0 ** rng.integers(-12, 8, (count, 1))
    both = (rng.normal(size=(count, latent + rope)) * sizes).astype(ml_dtypes.bfloat16).astype(np.float32)
    both[0], both[1, :128] = 0.0, 0.0
    return both[:, :latent], both[:, latent:]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key_scale", SCALES)
def test_bytes_and_values(form, key_scale):
    """Bytes of every pool, and the values that reading gives, in one compiled function and apart."""
    key_scale = key_scale if form in ("fp8", "nvfp4") else None
    scale = key_scale or 1.0
    latent, rope = tokens()
    entry = encode(latent, rope, form, key_scale)
    wanted = numpy_forms.latent_entries(latent, rope, form, scale)
    assert entry.keys() == wanted.keys()
    for name, part in wanted.items():
        assert entry[name].dtype == part.dtype
        assert np.asarray(entry[name]).tobytes() == part.tobytes(), name
    values = numpy_forms.latent_values(wanted, form, scale)
    got = decode(entry, form, key_scale)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, values, rtol=3e-7, atol=0)
    both = jax.jit(
        lambda c, r: quant.decode_latent(quant.encode_latent(c, r, form, key_scale), form, key_scale)
    )
    np.testing.assert_array_equal(both(latent, rope), got)


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_scale_as_an_array(form):
    """A traced scale gives the bytes that the same number gives."""
    latent, rope = tokens()
    traced = jax.jit(lambda c, r, s: quant.encode_latent(c, r, form, s))(latent, rope, jnp.float32(3.7))
    for name, part in encode(latent, rope, form, 3.7).items():
        np.testing.assert_array_equal(traced[name], part)


@pytest.mark.parametrize("form", FORMS)
def test_x64_changes_no_byte(form):
    """Whoever enables 64-bit types gets the same bytes and values."""
    latent, rope = tokens(4)
    entry = encode(latent, rope, form, None)
    with jax.enable_x64(True):
        again = jax.jit(lambda c, r: quant.encode_latent(c, r, form))(latent, rope)
        values = jax.jit(lambda e: quant.decode_latent(e, form))(again)
    assert values.dtype == jnp.float32
    np.testing.assert_array_equal(values, decode(entry, form, None))
    for name, part in entry.items():
        assert again[name].dtype == part.dtype
        assert np.asarray(again[name]).tobytes() == np.asarray(part).tobytes()


def test_rounding_is_not_that_of_a_reciprocal():
    """Quotients at a middle between two codes: x / s hits it exactly where x * (1 / s) misses it by a bit."""
    scale = np.float32(3.7)
    middles = np.repeat(np.arange(8, 16) + 0.5, 40).astype(np.float32)
    x = ((middles * scale).view(np.int32) + np.tile(np.arange(-20, 20), 8)).astype(np.int32).view(np.float32)
    wanted = numpy_forms.encode_e4m3(x / scale)
    latent, rope = x.reshape(-1, 40)[:, :30], x.reshape(-1, 40)[:, 30:]
    np.testing.assert_array_equal(encode(latent, rope, "fp8", 3.7)["key"], wanted.reshape(-1, 40))
    reciprocal = numpy_forms.encode_e4m3(x * (np.float32(1) / scale))
    assert (reciprocal != wanted).any(), "the inputs must tell the two apart"


# --- the 656-byte token --------------------------------------------------------------------------------------------


def test_tile_scales():
    """A power of two of at least max/448, with the floor 1e-4 behind the division: 2^-13."""
    latent = np.zeros((1, 512), np.float32)
    latent[0, 130], latent[0, 256], latent[0, 384] = 448.0, 449.0, -448.0 * 1e-4 / 4
    entry = encode(latent, np.full((1, 64), -3.0, np.float32), "fp8_ds_mla", None)
    assert entry["key_scale"].tolist() == [[2.0**-13, 1.0, 2.0, 2.0**-13]]
    codes = np.asarray(entry["key"])[0]
    assert [codes[130], codes[256], codes[0]] == [0x7E, 0x76, 0]  # 448, 224 (449 / 2 rounds to it), 0
    assert entry["key_rope"].astype(jnp.float32).tolist() == [[-3.0] * 64]


def test_any_tile_scale_can_be_read():
    """Other writers store plain quotients: scales that are no power of two multiply in float32."""
    codes = jnp.full((2, 512), 0x38, jnp.uint8)  # 1.0
    scale = jnp.asarray([[0.3, 1e-30, 7.7, 1e30]] * 2, jnp.float32)
    entry = {"key": codes, "key_scale": scale, "key_rope": jnp.zeros((2, 64), jnp.bfloat16)}
    values = np.asarray(decode(entry, "fp8_ds_mla", None))
    np.testing.assert_array_equal(values[:, [0, 128, 256, 511]], np.asarray(scale))


def test_rotary_part_is_not_quantised():
    latent, rope = tokens()
    got = decode(encode(latent, rope * 1000, "fp8_ds_mla", None), "fp8_ds_mla", None)
    np.testing.assert_array_equal(got[:, 512:], (rope * 1000).astype(ml_dtypes.bfloat16).astype(np.float32))


# --- NVFP4 ---------------------------------------------------------------------------------------------------------


def test_nvfp4_by_hand():
    """Sixteen elements: amax 12, global scale 0.5: stored scale 12 / 6 / 0.5 = 4 (0x48), elements divided by 2."""
    group = np.array([12, -12, 1, 0.5, -0.5, 1.5, 2.5, 3.5, 0, -0.0, 7, 9, 10, 11, 3, 5], np.float32)
    packed, scale = quant.quantize_nvfp4(jnp.asarray(group[None]), 0.5)
    assert np.asarray(scale).tolist() == [[0x48]]
    # halves: 6 -6 .5 .25 -.25 .75 1.25 1.75 0 -0 3.5 4.5 5 5.5 1.5 2.5, ties to even codes
    assert numpy_forms.unpack(np.asarray(packed)[0]).tolist() == [
        7,
        15,
        1,
        0,
        8,
        2,
        2,
        4,
        0,
        8,
        6,
        6,
        6,
        7,
        3,
        4,
    ]


def test_nvfp4_scale_rounds_to_nearest():
    """A stored scale may round down: then the largest element saturates at 6 instead of growing."""
    amax = np.float32(6 * 1.0625)  # half-way between the scales 1 and 1.125: the even code is 1
    packed, scale = quant.quantize_nvfp4(jnp.full((1, 16), amax), 1.0)
    assert np.asarray(scale).tolist() == [[0x38]]
    assert np.asarray(packed).tolist() == [[0x77] * 8]
    _, above = quant.quantize_nvfp4(jnp.full((1, 16), np.float32(6 * 1.0626)), 1.0)
    assert np.asarray(above).tolist() == [[0x39]]


def test_nvfp4_small_and_large_groups():
    """A group whose scale rounds to 0 is zero; one beyond 6 * 448 * global saturates at that value."""
    groups = np.stack([np.full(16, 6 * 2.0**-11), np.full(16, 6 * 2.0**-9), np.full(16, 1e6)]).astype(
        np.float32
    )
    packed, scale = quant.quantize_nvfp4(jnp.asarray(groups), 1.0)
    assert np.asarray(scale)[:, 0].tolist() == [0, 1, 0x7E]
    values = np.asarray(quant.dequantize_nvfp4(packed, scale, 1.0))
    assert values[:, 0].tolist() == [0.0, 6 * 2.0**-9, 6 * 448.0]


def test_nvfp4_groups_cross_from_latent_to_rope():
    """All elements count, latent and rotary alike: a group may hold both (24 + 8 elements, groups of 16)."""
    latent, rope = tokens(6, 24, 8)
    entry = encode(latent, rope, "nvfp4", 1.0)
    assert entry["key"].shape == (6, 16)
    assert entry["key_scale"].shape == (6, 2)
    bigger = encode(latent, rope * 64, "nvfp4", 1.0)
    changed = np.asarray(entry["key_scale"]) != np.asarray(bigger["key_scale"])
    assert not changed[:, 0].any()
    assert changed[2:, 1].all()


# --- what is not a number ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["fp8", "nvfp4", "fp8_ds_mla"])
def test_bad_elements_stay_bad(form):
    """An infinite element saturates and leaves the others alone; a NaN is still a NaN after reading."""
    latent, rope = np.full((2, 512), 1.5, np.float32), np.full((2, 64), 1.5, np.float32)
    latent[0, 5], latent[1, 5] = np.inf, np.nan
    values = np.asarray(decode(encode(latent, rope, form, None), form, None))
    assert np.isfinite(values[0]).all()
    assert values[0, 5] >= 1.5
    np.testing.assert_array_equal(np.delete(values[0], 5), 1.5)
    assert np.isnan(values[1, 5])
    np.testing.assert_array_equal(values[1, 16:], 1.5)


def test_errors():
    latent, rope = (jnp.asarray(x) for x in tokens(2))
    with pytest.raises(
        ValueError, match=r"encode_latent: form is 'int8'; wanted bf16, f32, fp8, nvfp4 or fp8_ds_mla"
    ):
        quant.encode_latent(latent, rope, "int8")
    with pytest.raises(ValueError, match=r"decode_latent: form is 'int8'.*Pass one of these storage forms"):
        quant.decode_latent({"key": latent}, "int8")
    with pytest.raises(ValueError, match=r"quantize_nvfp4: x has last dimension 12; wanted a multiple of 16"):
        quant.quantize_nvfp4(jnp.zeros((2, 12)), 1.0)


@pytest.mark.parametrize(
    ("mistake", "seen"),
    [
        ("reciprocal", lambda: test_rounding_is_not_that_of_a_reciprocal()),
        ("floor before the division", lambda: test_tile_scales()),
        ("ties of DeepGEMM", lambda: test_nvfp4_by_hand()),
    ],
)
def test_planted_mistakes_are_seen(mistake, seen, monkeypatch):
    monkeypatch.setattr(f"{__name__}.encode", quant.encode_latent)
    if mistake == "reciprocal":
        monkeypatch.setattr(fp8, "exact_divide", lambda x, y: x * (jnp.float32(1) / y))
    elif mistake == "floor before the division":
        monkeypatch.setattr(forms, "TILE_SCALE_FLOOR", 1e-4 / 448)
    else:
        original = nvfp4.encode_e2m1
        monkeypatch.setattr(nvfp4, "encode_e2m1", lambda x, rule: original(x))
    with pytest.raises(AssertionError):
        seen()
