"""Sparse MLA on a CUDA card: every kernel in every KEY form against NumPy in float64, with itself, and who is chosen.

Run with ``pytest -m gpu`` on the card. Problems are those of the interpreter's tests, at the widths of the released models.
"""

from __future__ import annotations

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import form_cases
from contracts import test_sparse_mla_forms as forms
from contracts import test_sparse_mla_kernels as kernels
from dsa_jax import Cache, CacheLayout, ops, support
from dsa_jax.compat import target_device
from dsa_jax.config import preset
from dsa_jax.ops import gpu

pytestmark = pytest.mark.gpu
TWENTY = 20


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
    """Rows of -1, an empty query, 600 keys: five pairs of tiles, the last not full."""
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

    kernels.check(p, same_bits(run, (p.q, keys, p.rows, jnp.int32(kernels.LAYER_OFFSET))))


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
    candidates = gpu.sparse_mla(cache, 32, q.dtype, forms.SOFTMAX_SCALE)
    claimed = [c.name for c in candidates if c.supported is not None and support_of(c)]
    assert "triton" in claimed
    assert support.chosen("sparse_mla", candidates, target_device()) == claimed[0] != "xla"
    run = jax.jit(ops.sparse_mla, static_argnames=("layer", "softmax_scale", "implementation"))
    options: dict = dict(layer=1, softmax_scale=forms.SOFTMAX_SCALE, key_scale=form_cases.KEY_SCALE.get(form))
    chosen = run(q, cache, rows=rows, **options)
    want = run(q.astype(jnp.float32), cache, rows=rows, implementation="xla", **options)
    np.testing.assert_allclose(want[0], p.expected()[0], rtol=1e-4, atol=1e-5)
    for name in claimed:
        result = run(q, cache, rows=rows, implementation=name, **options)
        forms.check(p, result)
        if name == claimed[0]:
            for a, b in zip(chosen, result, strict=True):
                np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def support_of(candidate) -> bool:
    try:
        candidate.supported(target_device())
    except NotImplementedError:
        return False
    return True


def test_hopper_takes_mosaic_where_it_pays():
    if target_device().capability != (9, 0):
        pytest.skip("another card")
    for form, heads, wanted in (
        ("bf16", 128, "mosaic"),
        ("bf16", 16, "triton"),
        ("fp8_ds_mla", 128, "mosaic"),
        ("fp8", 128, "triton"),
        ("nvfp4", 128, "triton"),
        ("f32", 128, "xla"),
    ):
        cache = Cache.abstract(released(form, "v2", 64), 8)
        candidates = gpu.sparse_mla(cache, heads, jnp.bfloat16, 0.1)
        assert support.chosen("sparse_mla", candidates, target_device()) == wanted, form
