"""Scores of FP4 keys on a CUDA card (``pytest -m gpu``): both kernels against the model and the reference."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import form_cases
from card_scores import no_case
from dsa_jax import Cache, ops, support
from dsa_jax.compat import target_device
from dsa_jax.ops import gpu
from dsa_jax.pallas import paged_logits_fp4_mosaic, paged_logits_triton
from fp4_scores import FAR, LAYER_OFFSET, NEAR, SCALE, scenario

pytestmark = pytest.mark.gpu
KERNELS = {"mosaic": paged_logits_fp4_mosaic, "triton": paged_logits_triton}


def check(got, expected) -> None:
    """-inf exactly where expected; elsewhere, row by row, the accuracy of Hopper's FP8 products: 14 bits of the sum."""
    got = np.asarray(got)
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
    a, b = (np.where(np.isfinite(expected), x, 0).astype(np.float64) for x in (got, expected))
    size = np.maximum(np.abs(b).max(axis=1, keepdims=True), 1e-30)
    a, b = a / size, b / size
    assert 1 - 2 * (a * b).sum() / (a * a + b * b).sum() < 5e-6


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("shape", "far"),
    [
        (dict(n=1, heads=64, page_size=64, width=5), (NEAR, NEAR)),
        (dict(n=2, heads=32, page_size=32, width=9), (NEAR, NEAR)),
        (dict(n=3, heads=64, page_size=128, width=3), (FAR, NEAR)),
        (dict(n=1, heads=32, page_size=64, width=5), (NEAR, FAR)),
        (dict(n=8, heads=64, page_size=64, width=5), (FAR, FAR)),
    ],
    ids=str,
)
def test_kernels(name, shape, far):
    """Ragged requests, near and far exponents: right, and the same bits 20 times."""
    module, whole = KERNELS[name], shape["width"] * shape["page_size"]
    try:
        module.supported_on(
            target_device(), heads=shape["heads"], new_tokens=shape["n"], page_size=shape["page_size"]
        )
    except NotImplementedError as reason:
        no_case(reason)
    arguments, expected = scenario(
        (whole, 0, 1, 63, 64, 65, 0, 257, 255), **shape, key_bytes=far[0], query_bytes=far[1]
    )
    call = jax.jit(functools.partial(module.paged_logits_decode, page_scale=SCALE, layer_offset=LAYER_OFFSET))
    arguments = jax.tree.map(jnp.asarray, arguments)
    first = np.asarray(call(*arguments))
    check(first, expected)
    if name == "mosaic" and shape["n"] == 1:
        pairs = paged_logits_fp4_mosaic.PagedLogitsFp4Config(
            compute_warpgroups=3, registers=(152, 40), together=2
        )
        np.testing.assert_array_equal(
            np.asarray(jax.jit(functools.partial(call.__wrapped__, config=pairs))(*arguments)), first
        )
    for _ in range(19):
        np.testing.assert_array_equal(np.asarray(call(*arguments)), first)


@pytest.mark.parametrize("manager", ["v1", "v2"])
@pytest.mark.parametrize("implementation", ["mosaic", "triton", None])
def test_the_op(manager, implementation):
    """Through the public signature, on a poisoned cache: the reference's scores."""
    layout = form_cases.layout(manager, index="fp4", page_size=64)
    facts = cases.batch([], decodes=[(130, 2), (2, 2), (65, 2)], next_n=2, page_size=64)
    cache, rng = cases.poisoned(layout), np.random.default_rng(0)
    for r, length in enumerate(facts.kv_lens):
        rows = [facts.tables[r][p // 64] * 64 + p % 64 for p in range(length)]
        cache = form_cases.write_keys(cache, 2, rows, rng.normal(size=(length, 128)).astype(np.float32))
    q, _, _ = form_cases.query(layout, rng.normal(size=(6, 32, 128)))
    weights, step = rng.normal(size=(6, 32)).astype(np.float32), cases.step(facts, layout)
    score = jax.jit(ops.paged_mqa_logits, static_argnames=("layer", "implementation"))
    try:
        got = score(q, weights, cache, layer=2, step=step, implementation=implementation)
    except NotImplementedError as reason:
        no_case(reason)
    check(got, np.asarray(score(q, weights, cache, layer=2, step=step, implementation="xla")))


def test_the_library_chooses_a_kernel_here():
    """None must not quietly mean the reference where a kernel is claimed."""
    device = target_device()
    cache = Cache.abstract(form_cases.layout(index="fp4", page_size=64), 8)
    step = cases.step(cases.batch([], decodes=[(2, 2)], next_n=2, page_size=64), cache.layout)
    wanted = "mosaic" if device.capability and device.capability[0] == 9 else "triton"
    assert support.chosen("paged_mqa_logits", gpu.paged_mqa_logits(cache, 64, step), device) == wanted
