"""Scores of context tokens on FP8 keys: both kernels, interpreted on the CPU and on a card, against the NumPy model."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import paged_pairs
from card_scores import check_scores, no_case
from dsa_jax.compat import target_device
from dsa_jax.ops import dispatch
from dsa_jax.pallas import paged_logits_mosaic, paged_logits_triton
from dsa_jax.pallas.paged_logits_mosaic import PagedLogitsConfig
from fp8_scores import LAYER_OFFSET, NAN_CODE, SCALE, check, scenario
from interpreted import INTERPRETED, races_found
from numpy_model import E4M3, encode_e4m3, scores
from test_gpu_scores import EVERY, problem

TRITON = {"triton": None, "triton for Ampere": paged_logits_triton.Config(fp8_products=False)}
KERNELS = ("mosaic", *TRITON)


@functools.cache
def context_scenario(page_size: int, heads: int = 32):
    """Packed tokens of three requests with 200, 70 and 33 keys, an empty request and padding; 19, 3 and 9 new tokens."""
    width = 256 // page_size
    held, new = (200, 70, 0, 33), (19, 3, 0, 9)
    (_, _, keys, scales, table, _), _ = scenario(held, n=1, heads=heads, page_size=page_size, width=width)
    requests = np.concatenate([np.full(count, r) for r, count in enumerate(new)] + [np.full(4, -1)]).astype(
        np.int32
    )
    ends = [np.arange(length - count + 1, length + 1) for length, count in zip(held, new, strict=True)]
    limits = np.concatenate([*ends, np.zeros(4)]).astype(np.int32)
    rng = np.random.default_rng(1)
    q = encode_e4m3(rng.normal(size=(len(requests), heads, 128)))
    weights = rng.normal(size=(len(requests), heads)).astype(np.float32)
    expected = np.full((len(requests), width * page_size), -np.inf)
    for t, (r, limit) in enumerate(zip(requests, limits, strict=True)):
        place = np.arange(limit)
        page = table[r, place // page_size] * SCALE + LAYER_OFFSET
        data, scale = keys[page, place % page_size], scales[page, place % page_size]
        expected[t, :limit] = scores(E4M3[q[t]], weights[t], E4M3[data], scale)
    return (q, weights, keys, scales, table, requests, limits), expected


@pytest.mark.parametrize(
    ("page_size", "group", "config"),
    [
        (64, 8, dict(stages=2)),
        (32, 5, dict(stages=4, product_columns=64)),
        (128, 16, dict(compute_warpgroups=1, stages=1, query_buffers=1)),
    ],
)
def test_contexts(page_size, group, config):
    """Groups of a request's tokens, the last of them smaller, none across two requests, padding filled."""
    arguments, expected = context_scenario(page_size)
    call = functools.partial(
        paged_logits_mosaic.paged_logits_prefill,
        page_scale=SCALE,
        config=PagedLogitsConfig(group_columns=32 * group, **config),
        blocks=3,
        interpret=INTERPRETED,
    )
    got = jax.jit(call)(*map(jnp.asarray, arguments), layer_offset=LAYER_OFFSET)
    check(np.asarray(got), expected)
    assert not races_found()
    if page_size == 64:
        rounded = jax.jit(functools.partial(call, dtype=jnp.bfloat16))
        rounded = rounded(*map(jnp.asarray, arguments), layer_offset=LAYER_OFFSET)
        np.testing.assert_array_equal(np.asarray(rounded), np.asarray(got).astype(jnp.bfloat16))


@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_every_length(form, monkeypatch):
    """Triton on contexts of eleven requests with 0 to 2,049 keys: the reference's scores; the pool is NaN elsewhere."""
    monkeypatch.setattr(dispatch, "target_device", lambda: cases.CARD)
    some = problem(form, EVERY, manager="v1", page_size=32, heads=32)
    want = np.asarray(paged_pairs.scorer("xla")(*some.arguments))
    np.testing.assert_array_equal(np.isfinite(want), some.visible)
    check_scores(paged_pairs.scorer("triton")(*some.arguments), want, some.visible)


@pytest.mark.sample(0, 2, 3, 4)
@pytest.mark.parametrize("config", TRITON.values(), ids=TRITON)
@pytest.mark.parametrize(("page_size", "heads"), [(16, 32), (64, 64), (256, 16)])
def test_contexts_on_triton(page_size, heads, config):
    """Groups of 8 or 4 tokens, whose last ones are smaller; padding holds queries that are NaN."""
    (q, weights, *rest), expected = context_scenario(page_size, heads)
    q, weights = q.copy(), weights.copy()
    q[-4:], weights[-4:] = NAN_CODE, np.nan
    call = functools.partial(paged_logits_triton.paged_logits_prefill, page_scale=SCALE, config=config)
    arguments = [jnp.asarray(x) for x in (q, weights, *rest)]
    got = np.asarray(jax.jit(call)(*arguments, layer_offset=jnp.int32(LAYER_OFFSET)))
    check(got, expected)
    if page_size == 64:
        rounded = jax.jit(functools.partial(call, dtype=jnp.bfloat16))(*arguments, layer_offset=LAYER_OFFSET)
        np.testing.assert_array_equal(np.asarray(rounded), got.astype(jnp.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_contexts_on_the_card(kernel):
    module = paged_logits_triton if kernel in TRITON else paged_logits_mosaic
    try:
        module.supported_on(target_device(), heads=32, new_tokens=1, page_size=64)
    except NotImplementedError as reason:
        no_case(reason)
    arguments, expected = context_scenario(64)
    call = jax.jit(
        functools.partial(module.paged_logits_prefill, page_scale=SCALE, config=TRITON.get(kernel))
    )
    arguments = [jnp.asarray(x) for x in arguments]
    first = np.asarray(call(*arguments, layer_offset=LAYER_OFFSET))
    check_scores(first, expected, np.isfinite(expected))
    for _ in range(19):
        np.testing.assert_array_equal(np.asarray(call(*arguments, layer_offset=LAYER_OFFSET)), first)
