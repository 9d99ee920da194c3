"""Sparse MLA on a CUDA card: every kernel in every KEY form against NumPy in float64, with itself, and who is chosen.

Run with ``pytest -m gpu`` on the card. Problems are those of the interpreter's tests, at the widths of the released models.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import form_cases
from contracts import test_sparse_mla_forms as forms
from contracts import test_sparse_mla_kernels as kernels
from dsa_jax import Cache, CacheLayout, ops, support
from dsa_jax.compat import target_device
from dsa_jax.config import preset
from dsa_jax.metadata import Bucket, StepMetadata
from dsa_jax.ops import gpu
from numpy_forms import E2M1
from numpy_model import attention, calc_diff

pytestmark = pytest.mark.gpu
TWENTY = 20
KERNELS = [("mosaic", "bf16"), ("mosaic", "fp8_ds_mla"), *(("triton", form) for form in forms.WITH_KERNEL)]
"""Every kernel with every KEY form that it reads."""


def same_bits(run, arguments) -> tuple[jax.Array, jax.Array]:
    """The result of a compiled function that gives the same bits twenty times."""
    results = [run(*arguments) for _ in range(TWENTY)]
    first = [np.asarray(x) for x in results[0]]
    for result in results[1:]:
        for a, b in zip(first, result, strict=True):
            np.testing.assert_array_equal(a.view(np.uint8), np.asarray(b).view(np.uint8))
    return results[0]


@pytest.mark.parametrize(
    ("kernel", "form", "heads", "splits"),
    [
        ("triton", "bf16", 16, 2),
        ("triton", "bf16", 128, 1),
        ("triton", "fp8_ds_mla", 64, 2),
        ("mosaic", "bf16", 128, 1),
        ("mosaic", "bf16", 8, 3),
        ("mosaic", "fp8_ds_mla", 64, 1),
        ("mosaic", "fp8_ds_mla", 128, 2),
    ],
)
def test_agrees_with_numpy_and_with_itself(kernel, form, heads, splits):
    """Rows that are none, an empty query, 600 keys: five pairs of tiles, the last not full."""
    module = importlib.import_module(f"dsa_jax.pallas.sparse_mla_{kernel}")
    p = kernels.problem(5, heads, 600, latent=512, rope=64, page_size=64)
    keys = (p.pages,)
    if form == "fp8_ds_mla":
        p, keys = kernels.fp8_problem(5, heads, 600)
    default = module.default_config(target_device(), form, tokens=5, heads=heads, keys=600)
    config = dataclasses.replace(default, splits=splits)

    @jax.jit
    def run(q, keys, rows, offset):
        return module.sparse_mla(
            q, keys, rows, page_scale=kernels.SCALE, layer_offset=offset, softmax_scale=kernels.SOFTMAX_SCALE,
            form=form, config=config,
        )  # fmt: skip

    # The compiled copy has checks of its own, which the interpreter replaces.
    rows = jnp.asarray(kernels.nowhere(p.rows, kernels.rows_in_all(p)))
    kernels.check(p, same_bits(run, (p.q, keys, rows, jnp.int32(kernels.LAYER_OFFSET))))


def released(form: str, manager: str, page_size: int) -> CacheLayout:
    return CacheLayout.create(
        preset("deepseek-v3.2"), layers=(0, 1, 2), manager=manager, page_size=page_size, key_form=form
    )


@pytest.mark.parametrize(
    ("form", "manager", "page_size", "heads"),
    [
        ("fp8", "v2", 64, 128),
        ("fp8", "v1", 1, 8),
        ("nvfp4", "v2", 64, 128),
        ("nvfp4", "v1", 32, 16),
        ("fp8_ds_mla", "v2", 64, 128),
    ],
)
def test_triton_reads_every_form(form, manager, page_size, heads):
    """Traced layer and scale; another layer's pages hold poison, and a layer that does not exist gives nothing."""
    p = forms.problem(released(form, manager, page_size), heads, 200)
    run = jax.jit(p.run)
    scale = None if p.key_scale is None else jnp.float32(p.key_scale)
    forms.check(p, same_bits(run, (jnp.int32(1), scale)))
    assert np.isnan(np.asarray(run(jnp.int32(0), scale)[0], np.float32)).any()
    out, lse = run(jnp.int32(3), scale)
    assert not np.asarray(out, np.float32).any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("form", forms.WITH_KERNEL)
def test_the_op_runs_each_implementation(form):
    """Through the public signature: all implementations that claim this card agree with the reference."""
    p = forms.problem(released(form, "v2", 64), 32, 100)
    cache, q, rows = p.cache, p.q, jnp.asarray(p.rows)
    candidates = gpu.sparse_mla(cache, len(q), 32, q.dtype, forms.SOFTMAX_SCALE)
    claimed = [c.name for c in candidates if c.supported is not None and support_of(c)]
    assert "triton" in claimed
    assert support.chosen("sparse_mla", candidates, target_device()) == claimed[0] != "xla"
    run = jax.jit(ops.sparse_mla, static_argnames=("layer", "softmax_scale", "implementation"))
    options: dict = dict(layer=1, softmax_scale=forms.SOFTMAX_SCALE, key_scale=form_cases.KEY_SCALE.get(form))
    chosen = run(q, cache, rows=rows, **options)
    want = run(q.astype(jnp.float32), cache, rows=rows, implementation="xla", **options)
    for got, model in zip(want, p.expected(), strict=True):
        np.testing.assert_allclose(got, model, rtol=1e-4, atol=1e-5)
    for name in claimed:
        result = run(q, cache, rows=rows, implementation=name, **options)
        forms.check(p, result)
        if name == claimed[0]:
            for a, b in zip(chosen, result, strict=True):
                np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Latents with their rotary parts ``float64[S, 576]``, the pool's rows where they are written, queries, selections
    ``int32[N, K]``, and attention over them.
    """

    keys: np.ndarray
    written: np.ndarray
    q: np.ndarray
    rows: np.ndarray
    out: np.ndarray
    lse: np.ndarray


PREFILL_SCALE, UNIT, SLOTS = 0.5, 2.0**-4, 130
"""Softmax scale, what the codes of latents count, and the size of the pool in pages of 64 rows."""


@functools.cache
def prefill(tokens: int = 200, heads: int = 128, keys: int = 2_048) -> Prefill:
    """Latents that every form holds exactly, and queries whose products with them float32 adds up exactly.

    Some queries see as many rows as tiles have, one fewer or one more, others most of 2,048 with gaps; one sees none.
    """
    rng, total = np.random.default_rng(0), SLOTS * 64
    count = total * 3 // 4
    codes = rng.integers(0, 16, (count, 576))
    codes[:, ::16] = 7 + 8 * rng.integers(0, 2, (count, 36))  # the largest, so that all groups have one scale
    values, written = E2M1[codes] * UNIT, rng.permutation(total)[:count]
    q = rng.integers(-8, 9, (tokens, heads, 576)) / 8
    sizes = rng.integers(keys // 2, keys + 1, tokens)
    sizes[:10] = np.minimum([keys, 0, 1, 63, 64, 65, 127, 129, keys - 1, 5], keys)
    chosen = np.stack([rng.permutation(count)[:keys] for _ in range(tokens)])
    chosen[np.arange(keys) >= sizes[:, None]] = -1
    chosen[10:][rng.random((tokens - 10, keys)) < 0.05] = -1
    seen = [
        attention(x, values[line[line >= 0]], 512, PREFILL_SCALE) for x, line in zip(q, chosen, strict=True)
    ]
    out, lse = (np.stack(arrays) for arrays in zip(*seen, strict=True))
    rows = kernels.nowhere(np.where(chosen >= 0, written[chosen], -1), total)
    return Prefill(values, written.astype(np.int32), q, rows, out, lse)


def prefill_cache(form: str, p: Prefill) -> tuple[Cache, float | None]:
    """The middle layer of three holds the latents; every other byte is 0xFF. With the scale that they are stored with."""
    layout, count = released(form, "v2", 64), len(p.keys)
    pages = -(-count // 64)
    bucket = Bucket(context_requests=1, context_tokens=count, table_width=pages)
    step = StepMetadata.create(layout, bucket, [range(pages)], [count], [count]).derive()
    step = dataclasses.replace(step, rows=jnp.asarray(p.written))
    scale = UNIT if form in form_cases.KEY_SCALE else None
    latent, rope = (jnp.asarray(part, jnp.float32) for part in np.split(p.keys, [512], axis=1))
    append = jax.jit(partial(ops.append_latent, key_scale=scale, implementation="xla"), static_argnums=1)
    return append(cases.poisoned(layout, SLOTS), 1, latent, rope, step), scale


@pytest.mark.parametrize(("kernel", "form"), [*KERNELS, *(("xla", form) for form in forms.WITH_KERNEL)])
def test_a_prefill_of_200_queries_and_2048_keys(kernel, form):
    """Against NumPy, within FlashMLA's tolerances for prefill; kernels give the same bits 20 times, and the keys of a query
    are shared among programs, as few queries have it, or not, as many have it.
    """
    p = prefill()
    cache, scale = prefill_cache(form, p)
    attend = partial(ops.sparse_mla, key_scale=scale, implementation=kernel)
    run = jax.jit(
        lambda q, cache, rows, **how: attend(q, cache, 1, rows, PREFILL_SCALE, **how),
        static_argnames="config",
    )
    arguments = jnp.asarray(p.q, jnp.bfloat16), cache, jnp.asarray(p.rows)
    if kernel == "xla":
        return check_prefill(p, run(*arguments))
    module = importlib.import_module(f"dsa_jax.pallas.sparse_mla_{kernel}")
    tokens, heads, _ = p.q.shape
    config = module.default_config(target_device(), form, tokens=tokens, heads=heads, keys=p.rows.shape[1])
    for splits in (1, 2):
        check_prefill(
            p, same_bits(partial(run, config=dataclasses.replace(config, splits=splits)), arguments)
        )


def check_prefill(p: Prefill, result) -> None:
    """FlashMLA's tolerances for prefill."""
    out, lse = (np.asarray(x, np.float64) for x in result)
    kernels.close(out, p.out, 8e-4, 3.01 / 128)
    kernels.close(lse, p.lse, 1e-6, 2.01 / 65536)
    assert calc_diff(out, p.out) < 7e-6
    assert np.isneginf(lse[1]).all() and not out[1].any()


def support_of(candidate) -> bool:
    try:
        candidate.supported(target_device())
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize(("form", "first"), [("bf16", "triton"), ("fp8_ds_mla", "mosaic")])
def test_what_hopper_takes_for_few_heads(form, first):
    """128 heads stand in the support matrix."""
    if target_device().capability != (9, 0):
        pytest.skip("another card")
    cache = Cache.abstract(released(form, "v2", 64), 8)
    candidates = gpu.sparse_mla(cache, 64, 16, jnp.bfloat16, 0.1)
    assert support.chosen("sparse_mla", candidates, target_device()) == first
