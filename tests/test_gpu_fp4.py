"""Scores of FP4 keys on a CUDA card (``pytest -m gpu``): both kernels against the model and the reference."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import form_cases
from card_scores import no_case
from dsa_jax import ops
from dsa_jax.compat import target_device
from dsa_jax.pallas import many_rows_fp4_mosaic as many_rows
from dsa_jax.pallas import paged_logits_fp4_mosaic, paged_logits_triton, window_logits_triton
from fp4_scores import FAR, LAYER_OFFSET, NEAR, SCALE, context_scenario, far_key, rescored, scenario
from window_problems import CASES, fp4_scenario

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


BOTH = [
    (dict(n=1, heads=64, page_size=64, width=5), (NEAR, NEAR)),
    (dict(n=2, heads=32, page_size=32, width=9), (NEAR, NEAR)),
    (dict(n=3, heads=64, page_size=128, width=3), (FAR, NEAR)),
    (dict(n=1, heads=32, page_size=64, width=5), (NEAR, FAR)),
    (dict(n=8, heads=64, page_size=64, width=5), (FAR, FAR)),
]
ONLY_TRITON = [
    (dict(n=4, heads=128, page_size=256, width=2), (NEAR, FAR)),
    (dict(n=8, heads=16, page_size=16, width=17), (FAR, FAR)),
    (dict(n=1, heads=16, page_size=256, width=2), (FAR, NEAR)),
    (dict(n=3, heads=128, page_size=16, width=17), (NEAR, NEAR)),
]
"""Pages and heads that Mosaic does not take."""


@pytest.mark.parametrize(
    ("name", "shape", "far"),
    [*((name, *case) for name in KERNELS for case in BOTH), *(("triton", *case) for case in ONLY_TRITON)],
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
    call = jax.jit(partial(module.paged_logits_decode, page_scale=SCALE, layer_offset=LAYER_OFFSET))
    arguments = jax.tree.map(jnp.asarray, arguments)
    first = np.asarray(call(*arguments))
    check(first, expected)
    if name == "mosaic" and shape["n"] == 1:
        pairs = paged_logits_fp4_mosaic.PagedLogitsFp4Config(
            compute_warpgroups=3, registers=(152, 40), together=2
        )
        np.testing.assert_array_equal(
            np.asarray(jax.jit(partial(call.__wrapped__, config=pairs))(*arguments)), first
        )
    for _ in range(19):
        np.testing.assert_array_equal(np.asarray(call(*arguments)), first)


MANY_ROWS = {"mosaic": (many_rows, many_rows), "triton": (paged_logits_triton, window_logits_triton)}
"""Where the kernels for contexts and for windows are."""


def check_exception(name: str, kernel: str, arguments, expected: np.ndarray, **place) -> None:
    """Scores of what FP8 cannot express: right, from the kernel for all cards whoever is asked, the same bits 20 times, and
    in bfloat16 the same rounded.
    """
    windows = kernel == "window_logits"
    module, other = (MANY_ROWS[n][windows] for n in (name, "triton"))
    problem = dict(heads=arguments[1].shape[1])
    if not windows:
        problem |= dict(new_tokens=1, page_size=arguments[2].shape[1])
    try:
        module.supported_on(target_device(), **problem)
    except NotImplementedError as reason:
        no_case(reason)
    call, plain = (partial(getattr(m, kernel), **place) for m in (module, other))
    arguments = jax.tree.map(jnp.asarray, arguments)
    score = jax.jit(call)
    first = np.asarray(score(*arguments))
    check(first, expected)
    if module is not other:
        np.testing.assert_array_equal(first, np.asarray(jax.jit(plain)(*arguments)))
    for _ in range(19):
        np.testing.assert_array_equal(np.asarray(score(*arguments)), first)
    rounded = np.asarray(jax.jit(partial(call, dtype=jnp.bfloat16))(*arguments)).astype(np.float32)
    np.testing.assert_array_equal(rounded, first.astype(jnp.bfloat16).astype(np.float32))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("page_size", "heads", "far"),
    [(64, 64, (FAR, NEAR)), (32, 32, (NEAR, FAR)), (128, 32, (FAR, FAR))],
    ids=["keys", "queries", "both"],
)
def test_far_exponents_in_contexts(name, page_size, heads, far):
    """Exponents that FP8 cannot express, in many keys or queries."""
    arguments, expected = context_scenario(page_size, heads=heads, key_bytes=far[0], query_bytes=far[1])
    place = dict(page_scale=SCALE, layer_offset=LAYER_OFFSET)
    check_exception(name, "paged_logits_prefill", arguments, expected, **place)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("case", "heads"), [("texts", 64), ("far apart", 32), ("odd", 64)])
def test_far_exponents_in_windows(name, case, heads):
    """Keys that FP8 cannot express, in windows one behind the other, far apart, and empty, reversed or cut."""
    windows, keys, _ = CASES[case]
    arguments, expected = fp4_scenario(windows, keys=keys, heads=heads)
    check_exception(name, "window_logits", arguments, expected)


def check_one_far_key(score, arguments, expected, rows: np.ndarray, place, position: int) -> None:
    """Scores with one far key at a place of the pools, which only `rows` see: theirs at that position, and all others."""
    q, weights, keys, words, *rest = arguments
    keys, words, expected = keys.copy(), words.copy(), expected.copy()
    keys[place], words[place] = far_key(keys[place], words[place])
    own = rescored(tuple(x[rows] for x in q), weights[rows], keys[place], words[place])
    size = np.abs(np.where(np.isfinite(expected[rows]), expected[rows], 0)).max()
    assert rows.size and np.abs(own).max() > 0.1 * size
    expected[rows, position] = own
    got = np.asarray(score(*jax.tree.map(jnp.asarray, (q, weights, keys, words, *rest))))
    check(got, expected)
    # As FP8 the key would score 0.
    np.testing.assert_allclose(got[rows, position], own, rtol=1e-4, atol=1e-5 * size)


def hopper(kernel: str, **place):
    """A compiled kernel for many rows, with 64 heads."""
    try:
        many_rows.supported_on(target_device(), heads=64)
    except NotImplementedError as reason:
        no_case(reason)
    return jax.jit(partial(getattr(many_rows, kernel), **place))


def test_one_far_key_in_contexts():
    """A key of the first request, which all, some or one of its rows see and no other request does."""
    arguments, expected = context_scenario(64, heads=64)
    table, requests, limits = arguments[4:]
    score = hopper("paged_logits_prefill", page_scale=SCALE, layer_offset=LAYER_OFFSET)
    for position in (0, 190, 199):
        place = table[0, position // 64] * SCALE + LAYER_OFFSET, position % 64
        rows = np.flatnonzero((requests == 0) & (limits > position))
        check_one_far_key(score, arguments, expected, rows, place, position)


def test_one_far_key_in_windows():
    """A key that one row sees, and one that a few do."""
    windows, keys, _ = CASES["texts"]
    arguments, expected = fp4_scenario(windows, keys=keys, heads=64, key_bytes=NEAR)
    starts, ends = arguments[4:]
    score = hopper("window_logits")
    for position in (74, 191):
        rows = np.flatnonzero((starts <= position) & (position < ends))
        check_one_far_key(score, arguments, expected, rows, position, position)


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
    for _ in range(19):
        again = score(q, weights, cache, layer=2, step=step, implementation=implementation)
        np.testing.assert_array_equal(np.asarray(again), np.asarray(got))
