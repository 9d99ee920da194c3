"""The Triton append kernels, interpreted: bytes against a NumPy model of quantiser and pool, canaries everywhere else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from compile_without_gpu import compile_case
from dsa_jax.compat import Device, target_device
from dsa_jax.pallas import append_triton
from dsa_jax.pallas.append_encode import e4m3_codes, e4m3_words

LAYERS, OFFSET, SLOTS = 3, 1, 5
CANARY = 0xAB
E4M3 = np.arange(127).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
"""The finite non-negative values of float8_e4m3fn, by code."""


def code(x: float) -> int:
    """Nearest code, ties to the even one, saturating."""
    sign = 0x80 if np.signbit(x) else 0
    if np.isnan(x):
        return 0x7F
    gap = np.abs(E4M3 - min(abs(x), 448.0))
    best = np.flatnonzero(gap == gap.min())
    return sign | int(best[best % 2 == 0][0] if len(best) > 1 else best[0])


def quantised(k: np.ndarray, rule: str) -> tuple[np.ndarray, np.float32]:
    """Codes and scale of one vector, from the definition, in float64 but for the one float32 product it asks for."""
    amax = np.float32(max(np.abs(k[np.isfinite(k)]).max(initial=0), 1e-4))
    scale = np.float32(amax * np.float32(1 / 448))
    if rule == "ue8m0":
        scale = np.float32(2.0 ** np.ceil(np.log2(np.float64(scale))))
    with np.errstate(invalid="ignore"):
        ratio = (k.astype(np.float32) / scale).astype(np.float64)
    return np.array([code(x) for x in ratio], np.uint8), scale


def keys_of(rng: np.random.Generator, tokens: int, dim: int) -> np.ndarray:
    """Keys of many magnitudes, a zero vector, one hot, exact ties and values at powers of two."""
    k = (rng.normal(size=(tokens, dim)) * np.exp(4 * rng.normal(size=(tokens, 1)))).astype(np.float32)
    special = [
        np.zeros(dim),
        np.eye(dim)[3] * 5,
        np.full(dim, 448.0),
        (np.arange(dim) % 16 + 16.5) * 16,
        np.full(dim, 2.0**-9),
    ]
    for i, row in enumerate(special[:tokens]):
        k[i] = row
    return k


@pytest.mark.parametrize("rule", ["ue8m0", "fp32"])
@pytest.mark.parametrize(
    ("tokens", "page_size", "dim", "dtype"),
    [
        (1, 1, 32, jnp.bfloat16),
        (7, 4, 128, jnp.bfloat16),
        (13, 16, 32, jnp.float32),
        (5, 64, 64, jnp.float16),
        (9, 256, 128, jnp.bfloat16),
    ],
)
def test_index_bytes(tokens, page_size, dim, dtype, rule):
    """Codes and scales land at their rows bit for bit; -1 and pages that do not exist write nothing; the rest stays."""
    rng = np.random.default_rng(tokens)
    k = jnp.asarray(keys_of(rng, tokens, dim)).astype(dtype)
    k = jnp.where(jnp.isfinite(k), k, 1)
    rows = rng.permutation(SLOTS * page_size + 2 * page_size)[:tokens].astype(
        np.int32
    )  # some slots do not exist
    rows[-1] = -1 if tokens > 1 else SLOTS * page_size - 1  # the last row of the last page
    pages = SLOTS * LAYERS
    keys = jnp.full((pages, page_size, dim), CANARY, jnp.uint8)
    scales = jnp.full((pages, page_size), -7, jnp.float32)
    got, got_scales = append_triton.append_index_k(
        k, jnp.asarray(rows), keys, scales, page_scale=LAYERS, layer_offset=OFFSET, scale_rule=rule
    )
    want, want_scales = np.array(keys), np.array(scales)
    for vector, row in zip(np.asarray(k.astype(jnp.float32)), rows, strict=True):
        page = row // page_size * LAYERS + OFFSET
        if row >= 0 and page < pages:
            want[page, row % page_size], want_scales[page, row % page_size] = quantised(vector, rule)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got_scales, want_scales)


def test_golden_bytes():
    """Worked values: x_i = (i - 63.5) / 8."""
    k = jnp.asarray((np.arange(128) - 63.5) / 8, jnp.float32)[None]
    args = (k, jnp.zeros(1, jnp.int32), jnp.zeros((1, 1, 128), jnp.uint8), jnp.zeros((1, 1), jnp.float32))
    data, scale = append_triton.append_index_k(*args, page_scale=1, layer_offset=0)
    assert np.asarray(scale).view(np.uint32).item() == 0x3D000000
    assert bytes(np.asarray(data)[0, 0, :16]).hex() == "f8f8f7f7f7f7f6f6f6f6f5f5f5f5f4f4"
    assert bytes(np.asarray(data)[0, 0, 60:68]).hex() == "d6d2ccc0404c5256"
    data, scale = append_triton.append_index_k(*args, page_scale=1, layer_offset=0, scale_rule="fp32")
    assert np.asarray(scale).view(np.uint32).item() == 0x3C912493
    assert bytes(np.asarray(data)[0, 0, :16]).hex() == "fefefefdfdfdfdfcfcfcfcfcfbfbfbfb"


def test_infinite_and_nan_elements():
    """An infinite element saturates, a NaN stays NaN, and neither decides the scale of the others."""
    k = np.full((1, 32), 2.0, np.float32)
    k[0, :4] = [np.inf, -np.inf, np.nan, -4.0]
    data, scale = append_triton.append_index_k(
        jnp.asarray(k),
        jnp.zeros(1, jnp.int32),
        jnp.zeros((1, 1, 32), jnp.uint8),
        jnp.zeros((1, 1), jnp.float32),
        page_scale=1,
        layer_offset=0,
    )
    assert float(scale[0, 0]) == 2.0**-6  # 4 / 448 rounded up to a power of two
    assert np.asarray(data)[0, 0, :5].tolist() == [0x7E, 0xFE, 0x7F, 0x80 | code(256), code(128)]


def test_every_code_and_every_tie():
    """All values of the format, the middles between neighbours, and the floats next to those."""
    middles = ((E4M3[1:] + E4M3[:-1]) / 2).astype(np.float32)
    x = np.concatenate(
        [E4M3.astype(np.float32), middles, np.nextafter(middles, 0), np.nextafter(middles, np.float32(1e9))]
    )
    x = np.concatenate([x, -x, np.array([449, 464, 465, 500, 1e30, np.inf, -np.inf], np.float32)])
    got = np.asarray(jax.jit(e4m3_codes)(jnp.asarray(x)))
    np.testing.assert_array_equal(got, [code(v) for v in x.astype(np.float64)])


def test_four_codes_a_word():
    """In the order of memory, the first in the lowest byte."""
    x = np.concatenate([E4M3, -E4M3, [1.0, 2.0]]).astype(np.float32)
    words = np.asarray(jax.jit(e4m3_words)(jnp.asarray(x).reshape(2, 4, 32)))
    assert words.shape == (2, 4, 8)
    assert words.tobytes() == bytes(code(v) for v in x.astype(np.float64))


def test_many_tokens_take_larger_blocks():
    """Past the block size of prefill, with a tail that fills no block, and a traced layer."""
    tokens, page_size, dim = 1030, 64, 32
    rng = np.random.default_rng(0)
    k = rng.normal(size=(tokens, dim)).astype(np.float32)
    slots = 20
    rows = rng.permutation(slots * page_size)[:tokens].astype(np.int32)
    rows[::7] = -1
    keys = jnp.full((slots * LAYERS, page_size, dim), CANARY, jnp.uint8)
    scales = jnp.full((slots * LAYERS, page_size), -7, jnp.float32)

    @jax.jit
    def append(layer):
        args = (jnp.asarray(k), jnp.asarray(rows), keys, scales)
        return append_triton.append_index_k(*args, page_scale=LAYERS, layer_offset=layer)

    got, got_scales = append(jnp.int32(2))
    want, want_scales = np.array(keys), np.array(scales)
    kept = np.flatnonzero(rows >= 0)
    pages = rows[kept] // page_size * LAYERS + 2
    for token, page in zip(kept, pages, strict=True):
        want_scales[page, rows[token] % page_size] = quantised(k[token], "ue8m0")[1]
    np.testing.assert_array_equal(got_scales, want_scales)
    for token, page in zip(kept[::50], pages[::50], strict=True):
        np.testing.assert_array_equal(got[page, rows[token] % page_size], quantised(k[token], "ue8m0")[0])
    want[pages, rows[kept] % page_size] = np.asarray(got)[pages, rows[kept] % page_size]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_latent_and_both(dtype):
    """Latent and rotary key side by side; the two pools in one launch get what two launches give them."""
    rng, page_size, tokens = np.random.default_rng(1), 4, 6
    latent, k_rope = (jnp.asarray(rng.normal(size=(tokens, n)), jnp.float32) for n in (64, 16))
    k = jnp.asarray(keys_of(rng, tokens, 32))
    rows = jnp.array([3, -1, 7, 19, 4, 20], jnp.int32)  # 20 lies in a slot that does not exist
    pages = jnp.full((SLOTS * 2, page_size, 80), 9, dtype)
    got = append_triton.append_latent(latent, k_rope, rows, pages, page_scale=2, layer_offset=1)
    want = np.array(pages)
    for token, row in enumerate([3, -1, 7, 19, 4]):
        if row >= 0:
            want[row // page_size * 2 + 1, row % page_size] = np.concatenate(
                [latent[token], k_rope[token]]
            ).astype(dtype)
    np.testing.assert_array_equal(np.asarray(got), want)

    keys = jnp.full((SLOTS * LAYERS, page_size, 32), CANARY, jnp.uint8)
    scales = jnp.full((SLOTS * LAYERS, page_size), -7, jnp.float32)
    index = append_triton.append_index_k(k, rows, keys, scales, page_scale=LAYERS, layer_offset=OFFSET)
    both = append_triton.append_both(
        k,
        latent,
        k_rope,
        rows,
        keys,
        scales,
        pages,
        index_scale=LAYERS,
        index_offset=OFFSET,
        key_scale=2,
        key_offset=1,
    )
    for a, b in zip(both, (*index, got), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_float_pages():
    """The f32 form keeps values as they are and has no scales."""
    k = jnp.asarray(np.random.default_rng(2).normal(size=(3, 32)), jnp.float32)
    pages = jnp.full((4, 2, 32), 9, jnp.float32)
    got, scales = append_triton.append_index_k(
        k, jnp.array([0, -1, 3], jnp.int32), pages, None, page_scale=2, layer_offset=1
    )
    assert scales is None
    want = np.array(pages)
    want[1, 0], want[3, 1] = k[0], k[2]
    np.testing.assert_array_equal(got, want)


def test_slots_far_beyond_the_pool_do_not_wrap_into_it():
    """Slot 1,431,655,766 times three pages is 2 in 32 bits, and with the offset a page that exists."""
    keys, scales = jnp.full((6, 1, 32), CANARY, jnp.uint8), jnp.full((6, 1), -7, jnp.float32)
    rows = jnp.array([1_431_655_766, 2**31 - 1, -(2**31), -1_431_655_765], jnp.int32)
    got = append_triton.append_index_k(jnp.ones((4, 32)), rows, keys, scales, page_scale=3, layer_offset=1)
    np.testing.assert_array_equal(got[0], keys)
    np.testing.assert_array_equal(got[1], scales)


def test_no_tokens():
    pages = jnp.full((4, 2, 32), 9, jnp.float32)
    got, _ = append_triton.append_index_k(
        jnp.zeros((0, 32)), jnp.zeros(0, jnp.int32), pages, None, page_scale=1, layer_offset=0
    )
    np.testing.assert_array_equal(got, pages)


def test_unsupported():
    card = Device("gpu", "NVIDIA A100", (8, 0))
    append_triton.supported_on(card, page_size=64)
    with pytest.raises(NotImplementedError, match="power of two"):
        append_triton.supported_on(card, page_size=48)
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        append_triton.supported_on(Device("cpu", "cpu"))


def compiled_case(*, tokens, rule="ue8m0", slots=6_400):
    """For `compile_without_gpu`: both pools in one launch, refused where `supported_on` says so."""

    def run(k, latent, k_rope, rows, keys, scales, pages, layer):
        append_triton.supported_on(target_device(), page_size=64)
        places = dict(index_scale=61, index_offset=layer, key_scale=61, key_offset=3, scale_rule=rule)
        return append_triton.append_both(k, latent, k_rope, rows, keys, scales, pages, **places)

    pages = slots * 61
    shapes = [
        *(((tokens, n), jnp.bfloat16) for n in (128, 512, 64)),
        ((tokens,), jnp.int32),
        ((pages, 64, 128), jnp.uint8),
        ((pages, 64), jnp.float32),
        ((61 * 100, 64, 576), jnp.bfloat16),
        ((), jnp.int32),
    ]
    return run, [jax.ShapeDtypeStruct(*shape) for shape in shapes]


@pytest.mark.compile
@pytest.mark.parametrize(
    ("card", "options"),
    [
        ("sm80", {"tokens": 64}),
        ("sm90", {"tokens": 64, "rule": "fp32"}),
        ("sm90", {"tokens": 8_192}),
        ("sm100", {"tokens": 64}),
    ],
)
def test_compiles(compile_environment, card, options):
    """One launch, on a pool of 3.2 GB viewed as words without a copy; FP8 by integer arithmetic on the first card."""
    result = compile_case(compile_environment, card, "contracts.test_append_kernels:compiled_case", **options)
    assert len(result.get("calls", [])) == 1, result
    assert result["temp"] < 4_096, result
