"""The Triton kernel over caches of every KEY form, interpreted on the CPU, against attention in NumPy float64.

It is called as the op calls it, through its candidate, so that pools, page numbers and scales are chosen by the library.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import cases
import form_cases
import numpy_forms
from contracts.test_sparse_mla_kernels import close, nowhere
from dsa_jax.cache import Cache
from dsa_jax.compat import Device
from dsa_jax.forms import KEY_FORMS
from dsa_jax.layout import CacheLayout
from dsa_jax.ops import gpu
from dsa_jax.pallas import sparse_mla_forms
from dsa_jax.pallas.triton_call import triton_call
from numpy_model import attention, calc_diff

SOFTMAX_SCALE = 0.135
WITH_KERNEL = [form for form in KEY_FORMS if form != "f32"]
CODED = [form for form in WITH_KERNEL if form != "bf16"]


@functools.cache
def layout_of(form: str, manager: str = "v2", page_size: int = 16) -> CacheLayout:
    """Three layers; the smallest widths that cut a latent in two, the released ones for the 656-byte token."""
    latent, rope = (512, 64) if form == "fp8_ds_mla" else (256, 32)
    model = dataclasses.replace(cases.config(index_head_dim=128), kv_lora_rank=latent, qk_rope_head_dim=rope)
    return CacheLayout.create(model, manager=manager, key_form=form, page_size=page_size)


@dataclasses.dataclass
class Problem:
    """A poisoned cache with a few written rows, what they hold, queries and selections."""

    cache: Cache
    q: jax.Array
    rows: np.ndarray
    values: dict[int, np.ndarray]
    key_scale: float | None

    def expected(self, rounded: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Output and log-sum-exp in float64, over keys as they are stored or as bfloat16 holds them."""
        latent = self.cache.layout.latent_dim
        none = (np.zeros((self.q.shape[1], latent)), np.full(self.q.shape[1], -np.inf))
        as_read = lambda keys: keys.astype(ml_dtypes.bfloat16) if rounded else keys
        chosen = [[self.values[row] for row in line if row in self.values] for line in self.rows.tolist()]
        results = [
            attention(np.asarray(q, np.float64), as_read(np.array(keys)), latent, SOFTMAX_SCALE)
            if keys
            else none
            for q, keys in zip(self.q, chosen, strict=True)
        ]
        return np.stack([out for out, _ in results]), np.stack([lse for _, lse in results])

    def run(self, layer=1, key_scale=None) -> tuple[jax.Array, jax.Array]:
        """The kernel, by the candidate that the op would ask."""
        candidates = gpu.sparse_mla(self.cache, *self.q.shape[:2], self.q.dtype, SOFTMAX_SCALE)
        (triton,) = (candidate for candidate in candidates if candidate.name == "triton")
        key_scale = self.key_scale if key_scale is None else key_scale
        return triton.run(self.q, self.cache, layer, jnp.asarray(self.rows), SOFTMAX_SCALE, key_scale)


def problem(layout: CacheLayout, heads: int, keys: int, seed: int = 0) -> Problem:
    """Selections with numbers that are no rows anywhere, and an empty one; every byte that was not written is 0xFF."""
    form, rng = layout.key_form, np.random.default_rng(seed)
    scale = form_cases.KEY_SCALE.get(form)
    slots = -(-2 * keys // layout.page_size) + 1
    total = slots * layout.page_size
    rows = np.stack([rng.permutation(total)[:keys] for _ in range(4)]).astype(np.int32)
    rows[rng.random(rows.shape) < 0.2] = -1
    rows[0, [0, -1]] = -1
    rows[1, keys // 2 :] = -1
    rows[1, 0] = total - 1
    rows[3] = -1
    rows = nowhere(rows, total)
    written = np.unique(rows[(rows >= 0) & (rows < total)]).tolist()
    latent, rope = (values / 10 for values in form_cases.latents(layout, len(written), seed))
    entry = numpy_forms.latent_entries(latent, rope, form, scale or 1.0)
    if form == "fp8_ds_mla":
        entry["key_scale"] = (entry["key_scale"] * rng.uniform(1, 2, entry["key_scale"].shape)).astype(
            np.float32
        )
    values = numpy_forms.latent_values(entry, form, scale or 1.0)
    cache = form_cases.write_entry(cases.poisoned(layout, slots), 1, written, entry)
    q = jnp.asarray(rng.normal(size=(4, heads, values.shape[1])) / 4, jnp.bfloat16)
    return Problem(cache, q, rows, dict(zip(written, values, strict=True)), scale)


def check(p: Problem, result) -> None:
    """FlashMLA's tolerances for a decode step, over the keys that its own tests decode.

    Those are bfloat16, which tile scales that are no powers of two do not leave exact; all other forms lose nothing.
    """
    out, lse = (np.asarray(x, np.float64) for x in result)
    want, want_lse = p.expected(rounded=p.cache.layout.key_form == "fp8_ds_mla")
    close(out, want, 1e-3, 2.01 / 128)
    close(lse, want_lse, 1e-6, 8.01 / 65536)
    assert calc_diff(out, want) < 5e-6


@pytest.mark.parametrize(
    ("form", "manager", "page_size", "heads", "keys"),
    [
        ("fp8", "v2", 1, 8, 70),
        ("fp8", "v1", 64, 64, 40),
        ("fp8", "v2", 128, 24, 33),
        ("nvfp4", "v1", 16, 16, 64),
        ("nvfp4", "v2", 4, 128, 33),
        ("nvfp4", "v2", 256, 8, 1),
        ("fp8_ds_mla", "v2", 64, 16, 40),
        ("fp8_ds_mla", "v1", 64, 128, 17),
        ("bf16", "v1", 8, 8, 50),
    ],
)
def test_agrees_with_numpy(form, manager, page_size, heads, keys):
    p = problem(layout_of(form, manager, page_size), heads, keys, seed=keys)
    run = jax.jit(p.run)  # layer and scale are traced
    scale = None if p.key_scale is None else jnp.float32(p.key_scale)
    result = run(jnp.int32(1), scale)
    assert result[0].dtype == p.q.dtype
    check(p, result)
    poisoned = run(jnp.int32(0), scale)[0]
    assert np.isnan(np.asarray(poisoned, np.float32)).any()  # the other layers hold nothing else
    out, lse = run(jnp.int32(3), scale)  # no such layer
    assert not np.asarray(out, np.float32).any()
    assert np.isneginf(lse).all()


def test_the_scale_acts_on_scores_and_values():
    """One key: its weight is one, so the output is its value, and the log-sum-exp its score."""
    layout = layout_of("fp8")
    p = problem(layout, 8, 1)
    p.rows = p.rows[1:2]
    p.q = p.q[:1]
    (row,) = p.rows[0].tolist()
    code = np.asarray(p.values[row]) / p.key_scale
    for scale in (1.0, 4.0):
        out, lse = p.run(key_scale=scale)
        np.testing.assert_allclose(np.asarray(out[0, 0], np.float64), code[:256] * scale, rtol=2**-8)
        score = np.asarray(p.q[0], np.float64) @ code * scale * SOFTMAX_SCALE
        np.testing.assert_allclose(lse[0], score, rtol=1e-5, atol=1e-6)


def decoded(form: str, keys: tuple[np.ndarray, ...], latent: int, rope: int, piece: int = 128) -> np.ndarray:
    """What the kernel's blocks read of a page of rows, put together in the order of columns."""
    every = [block for blocks in sparse_mla_forms.blocks(form, latent, rope, piece) for block in blocks]
    parts, rows = [part for block in every for part in block.parts], len(keys[0])

    def body(*refs):
        key_refs, out_refs = refs[: len(keys)], refs[len(keys) :]
        page, offset = jnp.zeros((rows, 1), jnp.int32), jnp.arange(rows, dtype=jnp.int32)[:, None]
        read = [block.read(key_refs, page, offset, jnp.ones((rows,), bool)) for block in every]
        for ref, matrix in zip(out_refs, [m for matrices in read for m in matrices], strict=True):
            ref[...] = matrix

    shapes = [jax.ShapeDtypeStruct((rows, part.width), jnp.bfloat16) for part in parts]
    call = triton_call(body, grid=1, out_shape=shapes, name="decode", interpret=True)
    pools = [sparse_mla_forms.viewed(jnp.asarray(k)[None]) for k in keys]
    values = np.full((rows, latent + rope), np.nan)
    for part, matrix in zip(parts, call(*pools), strict=True):
        values[:, part.first : part.first + part.step * part.width : part.step] = np.asarray(
            matrix, np.float64
        )
    return values


@pytest.mark.parametrize("piece", [32, 128])
def test_every_code_is_decoded(piece):
    """All 256 bytes of FP8, and NVFP4 codes under all 256 scales, exactly; NaN codes as NaN."""
    codes = np.arange(288, dtype=np.uint16).astype(np.uint8)[None]
    np.testing.assert_array_equal(decoded("fp8", (codes,), 256, 32, piece), numpy_forms.E4M3[codes])
    packed = np.tile(np.arange(0, 256, 2, dtype=np.uint16).astype(np.uint8) + np.uint8(16), (16, 2))[:, :144]
    scales = np.arange(16 * 18, dtype=np.uint16).astype(np.uint8).reshape(16, 18)
    packed = (packed + np.arange(16, dtype=np.uint8)[:, None]).astype(np.uint8)
    wanted = numpy_forms.dequantize_nvfp4(packed, scales, 1.0)
    np.testing.assert_array_equal(decoded("nvfp4", (packed, scales), 256, 32, piece), wanted)


def test_tiles_of_the_656_byte_token_have_scales_of_their_own():
    codes = np.full((1, 512), 0x38, np.uint8)  # ones
    scales, rope = np.array([[1, 2.5, -3, 2.0**-40]], np.float32), np.arange(64)[None]
    wanted = np.concatenate([np.repeat(scales.astype(np.float64), 128, axis=1), rope], axis=1)
    keys = (codes, scales, rope.astype(jnp.bfloat16))
    np.testing.assert_array_equal(decoded("fp8_ds_mla", keys, 512, 64), wanted)


@pytest.mark.parametrize("form", CODED)
def test_a_nan_that_was_selected_is_not_hidden(form):
    p = problem(layout_of(form, page_size=64), 8, 5)
    rows = sorted(p.values)[:1]
    name = "key_scale" if form == "nvfp4" else "key"
    width = np.asarray(p.cache.pages(name)).shape[-1]
    p.cache = cases.write(p.cache, name, 1, rows, np.full((1, width), 0x7F, np.uint8))
    p.rows, p.q = np.full((1, 5), rows[0], np.int32), p.q[:1]
    assert np.isnan(np.asarray(p.run()[0], np.float32)).all()


def triton_of(form: str, dtype):
    cache = Cache.abstract(layout_of(form, page_size=64), 2)
    (found,) = (c for c in gpu.sparse_mla(cache, 3, 128, dtype, SOFTMAX_SCALE) if c.name == "triton")
    return found


@pytest.mark.parametrize("form", WITH_KERNEL)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_every_form_but_float32_has_a_kernel_on_every_card(form, capability):
    device = Device("gpu", "a card", capability, 100)
    triton_of(form, jnp.bfloat16).supported(device)
    with pytest.raises(NotImplementedError, match="query dtype is 'float32'"):
        triton_of(form, jnp.float32).supported(device)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_float32_latents_are_the_reference_s(dtype):
    """A kernel for them took 3.3 times as long as the reference: see benchmarks/RESULTS.md."""
    for candidate in gpu.sparse_mla(Cache.abstract(layout_of("f32"), 2), 3, 128, dtype, SOFTMAX_SCALE):
        with pytest.raises(NotImplementedError, match="faster by the reference|not f32"):
            candidate.supported(Device("gpu", "a card", (9, 0), 132))
