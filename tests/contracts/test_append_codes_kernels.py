"""The Triton append kernels of FP4 keys and of FP8, NVFP4 and 656-byte latents, interpreted: every byte of every pool
against the NumPy model, canaries in every page that no row names, and the corners against the reference.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import form_cases
import numpy_forms
from compile_without_gpu import compile_case
from dsa_jax import quant
from dsa_jax.compat import target_device
from dsa_jax.pallas import append_encode, append_triton
from numpy_model import encode_e4m3

SLOTS, CANARY = 5, 0xAB
POOLS = {
    "fp8": [(np.uint8, lambda c, e: (c + e,))],
    "nvfp4": [(np.uint8, lambda c, e: ((c + e) // 2,)), (np.uint8, lambda c, e: ((c + e) // 16,))],
    "fp8_ds_mla": [
        (np.uint8, lambda c, e: (c,)),
        (np.float32, lambda c, e: (c // 128,)),
        (ml_dtypes.bfloat16, lambda c, e: (e,)),
    ],
}
"""Dtype and token shape of each pool of a form."""
NAMES = ("key", "key_scale", "key_rope")


def canaries(shape: tuple[int, ...], dtype) -> np.ndarray:
    """An array of canary bytes."""
    return np.full((*shape, np.dtype(dtype).itemsize), CANARY, np.uint8).view(dtype).reshape(shape)


def rows_for(rng: np.random.Generator, tokens: int, page_size: int) -> np.ndarray:
    """Shuffled rows, at the end the first of the first page, the last of the last one, -1, and slots that do not exist."""
    if tokens == 1:
        return np.array([SLOTS * page_size - 1], np.int32)
    special = [0, SLOTS * page_size - 1, -1, SLOTS * page_size, 2**31 - 1]
    shuffled = 1 + rng.permutation(SLOTS * page_size - 2)[: tokens - len(special)]
    return np.array([*shuffled, *special], np.int32)


def write(pools, rows, entries, page_size, places) -> list[np.ndarray]:
    """Entries at their rows by plain assignment."""
    pools = [pool.copy() for pool in pools]
    for token, row in enumerate(rows.tolist()):
        if 0 <= row < SLOTS * page_size:
            for pool, entry, (scale, offset) in zip(pools, entries, places, strict=True):
                pool[row // page_size * scale + offset, row % page_size] = entry[token]
    return pools


def same_bytes(got, want) -> None:
    """All arrays are equal bit for bit."""
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


# --- FP4 keys ------------------------------------------------------------------------------------------------------


def index_keys(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Vectors of many sizes in whole eighths, so that ties are frequent; zeros; sizes next to powers of two."""
    k = np.round(rng.normal(size=(tokens, 128)) * 8) / 8 * 2.0 ** rng.integers(-12, 12, (tokens, 1))
    special = [
        np.zeros(128),
        np.full(128, 6.0),
        np.full(128, -0.0),
        np.full(128, np.nextafter(np.float32(6), np.float32(7))),
    ]
    special += [np.resize([6.0, 0.25, 0.75, 1.25, -1.75, 2.5, -3.5, 5.0], 128), np.full(128, 1e-5)]
    for i, row in enumerate(special[:tokens]):
        k[i] = row
    return k.astype(np.float32)


@pytest.mark.parametrize(
    ("tokens", "page_size", "dtype", "tie_rule", "layers"),
    [
        (1, 1, jnp.float32, "deepgemm", 1),
        (13, 4, jnp.float32, "even", 3),
        (14, 16, jnp.bfloat16, "deepgemm", 3),
        (15, 64, jnp.float16, "even", 2),
        (21, 32, jnp.bfloat16, "even", 1),
        (11, 256, jnp.float32, "deepgemm", 2),
    ],
)
def test_fp4_keys(tokens, page_size, dtype, tie_rule, layers):
    rng = np.random.default_rng(tokens)
    rows = rows_for(rng, tokens, page_size)
    k = jnp.asarray(index_keys(rng, tokens)).astype(dtype)
    pools = [
        canaries((SLOTS * layers, page_size, 64), np.uint8),
        canaries((SLOTS * layers, page_size), np.int32),
    ]
    got = append_triton.append_index_k(
        k, jnp.asarray(rows), *map(jnp.asarray, pools), page_scale=layers, layer_offset=layers - 1,
        tie_rule=tie_rule,
    )  # fmt: skip
    entries = numpy_forms.quantize_fp4(np.asarray(k.astype(jnp.float32)), tie_rule)
    same_bytes(got, write(pools, rows, entries, page_size, [(layers, layers - 1)] * 2))


def test_fp4_golden_bytes():
    """Worked values. Group 0 holds 6 and so has scale 1 (byte 127); group 1 holds 7, scale 2; group 2 is zero, 2^-15."""
    k = np.zeros((1, 128), np.float32)
    k[0, :4] = [6.0, 0.75, -3.5, -0.2]  # codes 7; a tie of 1 and 2; a tie of 5 and 6; -0
    k[0, 32:34] = [7.0, -12.0 + 5.0]  # 3.5 and -3.5 under scale 2: ties again
    pools = jnp.zeros((1, 1, 64), jnp.uint8), jnp.zeros((1, 1), jnp.int32)
    for rule, head, second in (
        ("deepgemm", [0x17, 0x0D], 0xD5),
        ("even", [0x27, 0x8E], 0xE6),
    ):
        data, scale = append_triton.append_index_k(
            jnp.asarray(k), jnp.zeros(1, jnp.int32), *pools, page_scale=1, layer_offset=0, tie_rule=rule
        )
        data = np.asarray(data)[0, 0]
        assert data[:2].tolist() == head
        assert data[16] == second
        assert not data[2:16].any() and not data[17:].any()
        assert np.asarray(scale).tobytes() == bytes([127, 128, 112, 112])


@pytest.mark.parametrize("tie_rule", ["deepgemm", "even"])
def test_every_fp4_code_and_tie(tie_rule):
    """All values of the format, the middles between neighbours, the floats next to those, both signs."""
    middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    x = np.concatenate([numpy_forms.MAGNITUDES, middles, np.nextafter(middles, 0), np.nextafter(middles, 9)])
    x = np.concatenate([x, -x, [7, 1e30, np.inf, -np.inf, 1e-40]]).astype(np.float32)
    got = jax.jit(append_encode.e2m1_codes, static_argnums=1)(jnp.asarray(x), tie_rule)
    assert np.asarray(got).tolist() == [numpy_forms.e2m1_code(v, tie_rule) for v in x]


# --- latents -------------------------------------------------------------------------------------------------------


def latents(rng: np.random.Generator, tokens: int, c: int, e: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of very different sizes, a zero token, a zero tile, and one large element."""
    both = (rng.normal(size=(tokens, c + e)) * 2.0 ** rng.integers(-12, 8, (tokens, 1))).astype(np.float32)
    if tokens > 1:
        both[0], both[1, :128], both[1, 200 % c] = 0.0, 0.0, 448.0
    return both[:, :c], both[:, c:]


def append(form, latent, rope, rows, pools, places, key_scale=None, implementation=append_triton):
    """The kernel on the pools of a form."""
    scales, offsets = zip(*places, strict=True)
    return implementation.append_latent_codes(
        jnp.asarray(latent), jnp.asarray(rope), jnp.asarray(rows), [jnp.asarray(p) for p in pools],
        page_scales=scales, layer_offsets=offsets, key_scale=key_scale,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("form", "tokens", "page_size", "widths", "dtype", "key_scale"),
    [
        ("fp8", 1, 1, (64, 16), jnp.float32, None),
        ("fp8", 10, 64, (512, 64), jnp.bfloat16, None),
        ("fp8", 11, 16, (512, 64), jnp.bfloat16, 0.37),
        ("fp8", 12, 4, (32, 4), jnp.float16, 2.0),
        ("fp8", 9, 256, (64, 64), jnp.float32, 3.7),
        ("nvfp4", 9, 4, (64, 64), jnp.float32, 0.0123),
        ("nvfp4", 10, 64, (512, 64), jnp.bfloat16, 3.7),
        ("nvfp4", 1, 1, (128, 64), jnp.float32, None),
        ("nvfp4", 8, 32, (256, 64), jnp.float16, 1.0),
        ("fp8_ds_mla", 9, 64, (512, 64), jnp.float32, None),
        ("fp8_ds_mla", 8, 4, (256, 16), jnp.bfloat16, None),
        ("fp8_ds_mla", 10, 128, (512, 64), jnp.float16, None),
    ],
)
def test_latents(form, tokens, page_size, widths, dtype, key_scale):
    """Each pool has another number of pages a slot and another offset, as the block scales of NVFP4 have."""
    rng = np.random.default_rng(tokens)
    rows = rows_for(rng, tokens, page_size)
    places = [(3, 1), (2, 1), (3, 2)][: len(POOLS[form])]
    pools = [
        canaries((SLOTS * place[0], page_size, *shape(*widths)), kind)
        for place, (kind, shape) in zip(places, POOLS[form], strict=True)
    ]
    latent, rope = (jnp.asarray(x).astype(dtype) for x in latents(rng, tokens, *widths))
    got = append(form, latent, rope, rows, pools, places, key_scale)
    values = (np.asarray(x.astype(jnp.float32)) for x in (latent, rope))
    entry = numpy_forms.latent_entries(*values, form, 1.0 if key_scale is None else key_scale)
    entries = [entry[name] for name in NAMES[: len(pools)]]
    same_bytes(got, write(pools, rows, entries, page_size, places))


def test_latent_golden_bytes():
    """Worked values. FP8 under scale 2: 1 -> 0.5 (0x30), 896 -> 448 (0x7E), more saturates. The 656-byte token: 448 in
    tile 0 has scale 1, 449 in tile 1 scale 2, a zero tile 2^-13. NVFP4: a group whose largest is 12 has scale 2 (0x40).
    """
    row, place = jnp.zeros(1, jnp.int32), [(1, 0)]
    latent, rope = np.zeros((1, 512), np.float32), np.zeros((1, 64), np.float32)
    latent[0, :4], rope[0, 63] = [1.0, 896.0, -1e9, np.inf], -1.0
    [codes] = append("fp8", latent, rope, row, [np.zeros((1, 1, 576), np.uint8)], place, 2.0)
    assert np.asarray(codes)[0, 0, [0, 1, 2, 3, 4, 575]].tolist() == [0x30, 0x7E, 0xFE, 0x7E, 0, 0xB0]

    latent[0, :4], latent[0, 128] = [448.0, 1.0, np.inf, -17.0], 449.0
    pools = [np.zeros((1, 1, *shape(512, 64)), kind) for kind, shape in POOLS["fp8_ds_mla"]]
    codes, scale, bf16 = append("fp8_ds_mla", latent, rope, row, pools, place * 3)
    assert np.asarray(scale)[0, 0].tolist() == [1.0, 2.0, 2.0**-13, 2.0**-13]
    # 17 lies between 16 and 18 and goes to the even code; 449 / 2 = 224.5 goes to 224
    assert np.asarray(codes)[0, 0, [0, 1, 2, 3, 128]].tolist() == [0x7E, 0x38, 0x7E, 0xD8, 0x76]
    assert np.asarray(bf16).view(np.uint16)[0, 0, 63] == 0xBF80

    latent[:], rope[:] = 0.0, 0.0
    rope[0, :4] = [12.0, -2.0, 0.5, np.inf]
    latent[0, 16] = 6.0  # group 1
    pools = [np.zeros((1, 1, *shape(512, 64)), kind) for kind, shape in POOLS["nvfp4"]]
    codes, scale = append("nvfp4", latent, rope, row, pools, place * 2)
    assert np.asarray(scale)[0, 0].nonzero()[0].tolist() == [1, 32]
    assert np.asarray(scale)[0, 0, [1, 32]].tolist() == [0x38, 0x40]
    # group 32 under scale 2: 6, -1, 0.25 (a tie of 0 and 0.5, to the even code 0), and 6 for the infinite one
    assert np.asarray(codes)[0, 0].nonzero()[0].tolist() == [8, 256, 257]
    assert np.asarray(codes)[0, 0, [8, 256, 257]].tolist() == [0x07, 0xA7, 0x70]


def test_division_is_correctly_rounded():
    """Quotients next to the middles between codes, under FP8's one scale."""
    x = form_cases.near_middles(3.7).reshape(10, 32)
    rows = np.arange(10, dtype=np.int32)
    [codes] = append("fp8", x[:, :16], x[:, 16:], rows, [np.zeros((1, 16, 32), np.uint8)], [(1, 0)], 3.7)
    np.testing.assert_array_equal(codes[0, :10], encode_e4m3(x / np.float32(3.7)))
    assert (encode_e4m3(x * (np.float32(1) / np.float32(3.7))) != encode_e4m3(x / np.float32(3.7))).any()


def corners(width: int) -> np.ndarray:
    """Vectors with NaN of both signs, infinities, zeros of both signs, subnormals, huge and tiny elements."""
    odd = [np.nan, -np.nan, np.inf, -np.inf, -0.0, 1e-42, -1e-42, 3e38, -3e38, 1e-30, 464.0, 465.0, 2.0**-10]
    rng = np.random.default_rng(8)
    x = rng.normal(size=(len(odd) + 2, width)).astype(np.float32)
    for i, value in enumerate(odd):
        x[i, rng.permutation(width)[:5]] = value
    x[-2], x[-1] = np.nan, np.inf
    return x


def test_corners_agree_with_the_reference():
    """Bytes of `dsa_jax.quant` for whatever a broken layer may hand over."""
    x, rows = corners(576), np.arange(15, dtype=np.int32)
    for form, key_scale in (
        ("fp8", 0.37), ("fp8", 1e-38), ("nvfp4", 0.0123), ("nvfp4", 1e30), ("nvfp4", 1e-30), ("fp8_ds_mla", None),
    ):  # fmt: skip
        pools = [canaries((2, 8, *shape(512, 64)), kind) for kind, shape in POOLS[form]]
        places = [(1, 0)] * len(pools)
        got = append(form, x[:, :512], x[:, 512:], rows, pools, places, key_scale)
        entry = jax.jit(quant.encode_latent, static_argnums=(2, 3))(x[:, :512], x[:, 512:], form, key_scale)
        for name, pool in zip(NAMES, got, strict=False):
            written = np.asarray(pool).reshape(16, -1)[:15]
            want = np.asarray(entry[name]).reshape(15, -1)
            np.testing.assert_array_equal(
                written.view(np.uint8), want.view(np.uint8), err_msg=f"{form} {name}"
            )
    for rule in ("deepgemm", "even"):
        pools = canaries((2, 8, 64), np.uint8), canaries((2, 8), np.int32)
        got = append_triton.append_index_k(
            jnp.asarray(x[:, :128]), jnp.asarray(rows), *map(jnp.asarray, pools),
            page_scale=1, layer_offset=0, tie_rule=rule,
        )  # fmt: skip
        want = jax.jit(quant.quantize_fp4, static_argnums=1)(x[:, :128], rule)
        np.testing.assert_array_equal(np.asarray(got[0]).reshape(16, 64)[:15], want[0])
        np.testing.assert_array_equal(np.asarray(got[1]).reshape(16)[:15], want[1])


def test_traced_scale_and_layer():
    """A traced key_scale and traced layers give the bytes of numbers; a layer without pages (-1) writes nothing."""
    rng = np.random.default_rng(3)
    latent, rope = latents(rng, 4, 64, 64)
    rows, places = np.array([3, 0, 9, -1], np.int32), [(3, 1), (2, 1)]
    pools = [
        canaries((SLOTS * s, 2, *shape(64, 64)), kind)
        for (s, _), (kind, shape) in zip(places, POOLS["nvfp4"], strict=True)
    ]

    @jax.jit
    def traced(layers, key_scale):
        return append("nvfp4", latent, rope, rows, pools, [(3, layers[0]), (2, layers[1])], key_scale)

    same_bytes(
        traced(jnp.array([1, 1], jnp.int32), jnp.float32(0.3)),
        append("nvfp4", latent, rope, rows, pools, places, 0.3),
    )
    # A slot with offset -1 would be the last page of the slot before it.
    untouched = append("nvfp4", latent, rope, np.where(rows < 0, rows, rows % 2), pools, [(3, -1), (2, -1)])
    same_bytes(untouched, pools)


def test_many_tokens():
    """Past the block size of prefill, with a tail that fills no block."""
    tokens, page_size, slots = 1030, 64, 17
    rng = np.random.default_rng(0)
    rows = rng.permutation(slots * page_size)[:tokens].astype(np.int32)
    rows[::7] = -1
    kept = rows >= 0
    latent, rope = latents(rng, tokens, 64, 16)
    pages = canaries((slots * 2, page_size, 80), np.uint8)
    [got] = append("fp8", latent, rope, rows, [pages], [(2, 1)], 0.37)
    want = pages.copy()
    codes = np.asarray(quant.encode_latent(jnp.asarray(latent), jnp.asarray(rope), "fp8", 0.37)["key"])
    want[rows[kept] // page_size * 2 + 1, rows[kept] % page_size] = codes[kept]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("form", POOLS)
def test_no_tokens(form):
    pools = [canaries((2, 2, *shape(512, 64)), kind) for kind, shape in POOLS[form]]
    empty = np.zeros((0, 512), np.float32), np.zeros((0, 64), np.float32), np.zeros(0, np.int32)
    same_bytes(append(form, *empty, pools, [(1, 0)] * len(pools)), pools)


# --- compiled ------------------------------------------------------------------------------------------------------


def compiled_latent(*, form, tokens, traced=False, dtype="bfloat16", slots=6_400):
    """For `compile_without_gpu`: latents of a form, layer 3 of 61, refused where `supported_on` says so."""

    def run(latent, k_rope, rows, key_scale, layer, *pools):
        append_triton.supported_on(target_device(), page_size=64)
        return append_triton.append_latent_codes(
            latent, k_rope, rows, pools, page_scales=(61,) * len(pools),
            layer_offsets=(layer if traced else 3,) * len(pools), key_scale=key_scale,
        )  # fmt: skip

    shapes = [((tokens, n), jnp.dtype(dtype)) for n in (512, 64)]
    shapes += [((tokens,), jnp.int32), ((), jnp.float32), ((), jnp.int32)]
    shapes += [((slots * 61, 64, *shape(512, 64)), kind) for kind, shape in POOLS[form]]
    return run, [jax.ShapeDtypeStruct(*shape) for shape in shapes]


def compiled_fp4(*, tokens, tie_rule="deepgemm", dtype="bfloat16", slots=6_400):
    """The same for FP4 keys."""

    def run(k, rows, keys, scales):
        append_triton.supported_on(target_device(), page_size=64)
        place = dict(page_scale=61, layer_offset=3)
        return append_triton.append_index_k(k, rows, keys, scales, **place, tie_rule=tie_rule)

    pages = slots * 61
    shapes = (
        ((tokens, 128), jnp.dtype(dtype)),
        ((tokens,), jnp.int32),
        ((pages, 64, 64), jnp.uint8),
        ((pages, 64), jnp.int32),
    )
    return run, [jax.ShapeDtypeStruct(*shape) for shape in shapes]


@pytest.mark.sample(0, 3, 5, 6, 9)
@pytest.mark.compile
@pytest.mark.parametrize(
    ("card", "case", "options"),
    [
        ("sm80", "compiled_latent", dict(form="fp8", tokens=64)),
        ("sm80", "compiled_latent", dict(form="nvfp4", tokens=8_192)),
        ("sm80", "compiled_latent", dict(form="fp8_ds_mla", tokens=64, dtype="float16")),
        ("sm80", "compiled_fp4", dict(tokens=64, tie_rule="even")),
        ("sm90", "compiled_latent", dict(form="fp8", tokens=8_192, slots=1_000)),
        ("sm90", "compiled_latent", dict(form="nvfp4", tokens=64, traced=True)),
        ("sm90", "compiled_latent", dict(form="fp8_ds_mla", tokens=8_192)),
        ("sm90", "compiled_fp4", dict(tokens=8_192, dtype="float16")),
        ("sm100", "compiled_latent", dict(form="nvfp4", tokens=64, dtype="float32")),
        ("sm100", "compiled_latent", dict(form="fp8_ds_mla", tokens=64)),
        ("sm100", "compiled_fp4", dict(tokens=64, dtype="float32")),
    ],
)
def test_compiles(compile_environment, card, case, options):
    """One launch without spilled registers, and no copy of a pool for its view as words."""
    result = compile_case(compile_environment, card, f"contracts.test_append_codes_kernels:{case}", **options)
    assert len(result.get("calls", [])) == 1, result
    assert result["temp"] < 4_096, result
    assert not result["spilled"], result
