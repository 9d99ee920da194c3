"""The paged logits kernels, interpreted on the CPU, against the NumPy float64 model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from dsa_jax.compat import Device, target_device
from dsa_jax.pallas import (
    paged_logits_kernel,
    paged_logits_mosaic,
    paged_logits_plan,
    paged_logits_triton,
    score_factors,
)
from dsa_jax.pallas.paged_logits_mosaic import PagedLogitsConfig
from numpy_model import E4M3, encode_e4m3, scores

INTERPRETED = plgpu.InterpretGPUParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
)
NAN_CODE, ONE_CODE, FAR_SLOT = 0x7F, 0x38, 1 << 28
"""The codes of NaN and 1.0, and a slot no pool has: it stands in the page table where nobody may look."""
SCALE, LAYER_OFFSET = 3, 2


def races_found() -> bool:
    """Whether the interpreter saw two accesses in no order since it was last reset."""
    return (
        importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks").get_races().races_found
    )


@functools.cache
def scenario(lengths: tuple[int, ...], *, n: int, heads: int, page_size: int, width: int, seed: int = 0):
    """Arguments and expected scores: unused places hold NaN, unused table entries -1 or a slot that does not exist.

    The rows of a request see one key less each, from the last row back, and none below zero: as in a decode step of
    `n` new tokens.
    """
    rng = np.random.default_rng(seed)
    requests = len(lengths)
    slots = requests * width + 2
    keys = np.full((slots * SCALE, page_size, 128), NAN_CODE, np.uint8)
    scales = np.full((slots * SCALE, page_size), np.nan, np.float32)
    table = np.full((requests, width), -1, np.int32)
    table[:, 1::2] = FAR_SLOT
    free = iter(rng.permutation(slots))
    q = encode_e4m3(rng.normal(size=(requests, n, heads, 128)))
    weights = rng.normal(size=(requests, n, heads)).astype(np.float32)
    limits = np.maximum(np.asarray(lengths)[:, None] - np.arange(n)[::-1], 0).astype(np.int32)
    expected = np.full((requests, n, width * page_size), -np.inf)
    for r, length in enumerate(lengths):
        data = encode_e4m3(rng.normal(size=(length, 128)))
        scale = rng.uniform(0.5, 2.0, length).astype(np.float32)
        for p in range(-(-length // page_size)):
            table[r, p] = next(free)
            part = slice(p * page_size, min((p + 1) * page_size, length))
            page = table[r, p] * SCALE + LAYER_OFFSET
            keys[page, : part.stop - part.start] = data[part]
            scales[page, : part.stop - part.start] = scale[part]
        for j in range(n):
            seen = limits[r, j]
            expected[r, j, :seen] = scores(E4M3[q[r, j]], weights[r, j], E4M3[data[:seen]], scale[:seen])
    return (q, weights, keys, scales, table, limits), expected.reshape(requests * n, -1)


def run(arguments, *, kernel="mosaic", config=None, blocks=3, offset=LAYER_OFFSET, dtype=jnp.float32):
    """A kernel in its interpreter: ``"mosaic"``, the Hopper kernel, or ``"triton"``, the one for all cards."""
    if kernel == "mosaic":
        call = functools.partial(
            paged_logits_mosaic.paged_logits_decode, config=config, blocks=blocks, interpret=INTERPRETED
        )
    else:
        call = functools.partial(paged_logits_triton.paged_logits_decode, config=TRITON[kernel])
    call = jax.jit(functools.partial(call, page_scale=SCALE, dtype=dtype))
    return np.asarray(call(*map(jnp.asarray, arguments), layer_offset=offset))


def check(got: np.ndarray, expected: np.ndarray) -> None:
    """-inf exactly where expected, and float32's accuracy elsewhere."""
    assert got.dtype == np.float32
    assert got.shape == expected.shape
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
    seen = np.isfinite(expected)
    size = np.abs(expected[seen]).max(initial=0.0)
    np.testing.assert_allclose(got[seen], expected[seen], rtol=2e-6, atol=2e-6 * size)


def check_on_card(got: np.ndarray, expected: np.ndarray) -> None:
    """-inf exactly where expected; elsewhere the accuracy of Hopper's FP8 products, which keep about 14 bits of the sum."""
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
    a, b = (np.where(np.isfinite(expected), x, 0).astype(np.float64) for x in (got, expected))
    assert 1 - 2 * (a * b).sum() / (a * a + b * b).sum() < 5e-6


# Heads, new tokens, page size, table width, blocks, schedule: pairwise. Lengths are those around a tile, a page and the
# whole width, with empty requests between.
CASES = {
    "one token, pages of 64": dict(heads=64, n=1, page_size=64, width=5),
    "two tokens, half tiles, odd table": dict(heads=32, n=2, page_size=32, width=9),
    "three tokens, pages of two tiles": dict(heads=64, n=3, page_size=128, width=3),
    "five tokens in two products": dict(heads=64, n=5, page_size=32, width=10),
    "eight tokens": dict(heads=32, n=8, page_size=128, width=3),
}
SCHEDULES = {
    "one token, pages of 64": dict(blocks=1, config=PagedLogitsConfig(compute_warpgroups=3, stages=3)),
    "two tokens, half tiles, odd table": dict(blocks=4, config=PagedLogitsConfig(stages=2, query_buffers=1)),
    "three tokens, pages of two tiles": dict(blocks=12),
    "five tokens in two products": dict(blocks=2, config=PagedLogitsConfig(compute_warpgroups=1, stages=2)),
    "eight tokens": dict(blocks=3),
}


TRITON = {"triton": None, "triton for Ampere": paged_logits_triton.Config(fp8_products=False)}
KERNELS = ("mosaic", *TRITON)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_ragged_batches(name, kernel):
    case = CASES[name]
    whole = case["width"] * case["page_size"]
    arguments, expected = scenario((whole, 0, 1, 63, 64, 65, 0, 257, 255), **case)
    check(run(arguments, kernel=kernel, **SCHEDULES[name]), expected)
    assert kernel in TRITON or not races_found()


@pytest.mark.parametrize("kernel", KERNELS)
def test_long_requests_go_around_the_ring(kernel):
    arguments, expected = scenario((2049, 2047, 0), n=1, heads=32, page_size=64, width=34)
    check(run(arguments, kernel=kernel, blocks=2, config=PagedLogitsConfig(stages=4)), expected)
    assert kernel in TRITON or not races_found()


def test_pages_are_counted_to_the_last_key():
    found = [paged_logits_triton.pages_with(keys, 64) for keys in (0, 1, 63, 64, 65, 128, 129)]
    assert found == [0, 1, 1, 1, 2, 2, 3]


def test_half_tiles_behind_the_planned_ones():
    """One block, more tiles than the plan holds slots for, the last of which has one page: the next is nobody's."""
    arguments, expected = scenario((769, 0), n=1, heads=32, page_size=32, width=26)
    table = arguments[4].copy()
    table[table < 0] = FAR_SLOT
    params = dataclasses.replace(INTERPRETED, out_of_bounds_reads="raise")
    call = functools.partial(
        paged_logits_mosaic.paged_logits_decode, blocks=1, interpret=params, page_scale=SCALE
    )
    arguments = [jnp.asarray(x) for x in (*arguments[:4], table, *arguments[5:])]
    check(np.asarray(jax.jit(call)(*arguments, layer_offset=LAYER_OFFSET)), expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_to_score_is_filled(kernel):
    """No visible key at all: every column is written, no page is read, no barrier is left waiting."""
    arguments, expected = scenario((0, 0), n=2, heads=32, page_size=64, width=9)
    check(run(arguments, kernel=kernel), expected)
    assert np.isneginf(expected).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_traced_layer_offset(kernel):
    arguments, expected = scenario((70, 64), n=1, heads=32, page_size=64, width=2)
    check(run(arguments, kernel=kernel, offset=jnp.int32(LAYER_OFFSET)), expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_code_is_decoded(kernel):
    """Keys that hold one code each against a query of ones: all finite codes exactly, NaN codes as NaN, never as 480."""
    (q, weights, keys, scales, table, limits), _ = scenario((256,), n=1, heads=32, page_size=64, width=4)
    q, weights = np.full_like(q, ONE_CODE), np.ones_like(weights)
    keys, scales = keys.copy(), np.ones_like(scales)
    for p in range(4):
        keys[table[0, p] * SCALE + LAYER_OFFSET] = np.arange(p * 64, p * 64 + 64, dtype=np.uint8)[:, None]
    got = run((q, weights, keys, scales, table, limits), kernel=kernel)
    np.testing.assert_array_equal(got[0], np.maximum(E4M3, 0) * 128 * 32)


def test_the_schedule_never_changes_a_bit():
    arguments, _ = scenario((200, 130, 3), n=2, heads=32, page_size=64, width=4)
    first = run(arguments)
    other = run(arguments, blocks=5, config=PagedLogitsConfig(compute_warpgroups=3, product_columns=32))
    np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize("kernel", KERNELS)
def test_bfloat16_scores_are_those_of_float32_rounded(kernel):
    """Scores, masked scores and what is filled: a table of more than one unit of filling, and of a part of one."""
    arguments, _ = scenario((70, 0, 128), n=2, heads=32, page_size=64, width=11)
    got = run(arguments, kernel=kernel, dtype=jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, run(arguments, kernel=kernel).astype(jnp.bfloat16))
    assert kernel in TRITON or not races_found()


@pytest.mark.parametrize("kernel", KERNELS)
def test_float8_queries_are_the_same_bytes(kernel):
    (q, *rest), expected = scenario((70, 64), n=1, heads=32, page_size=64, width=2)
    check(run((q.view(jnp.float8_e4m3fn), *rest), kernel=kernel), expected)


@pytest.mark.planted
def test_the_race_detector_sees_a_missing_fence(monkeypatch):
    """Planted: without the fence, the copy engine may overwrite weights that are still being read."""
    monkeypatch.setattr(paged_logits_kernel.plgpu, "commit_smem", lambda: None)
    arguments, _ = scenario((70, 64, 65), n=1, heads=32, page_size=64, width=2)
    run(arguments, blocks=1, config=PagedLogitsConfig(query_buffers=1))
    assert races_found()


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


@pytest.mark.parametrize("config", TRITON.values(), ids=TRITON)
@pytest.mark.parametrize(("page_size", "heads"), [(16, 32), (64, 64), (256, 16)])
def test_contexts_on_triton(page_size, heads, config):
    """Groups of 8 or 4 tokens, whose last ones are smaller; padding holds queries that are NaN."""
    (q, weights, *rest), expected = context_scenario(page_size, heads)
    q, weights = q.copy(), weights.copy()
    q[-4:], weights[-4:] = 0x7F, np.nan
    call = functools.partial(paged_logits_triton.paged_logits_prefill, page_scale=SCALE, config=config)
    arguments = [jnp.asarray(x) for x in (q, weights, *rest)]
    got = np.asarray(jax.jit(call)(*arguments, layer_offset=jnp.int32(LAYER_OFFSET)))
    check(got, expected)
    rounded = jax.jit(functools.partial(call, dtype=jnp.bfloat16))(*arguments, layer_offset=LAYER_OFFSET)
    np.testing.assert_array_equal(np.asarray(rounded), got.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("requests", "size", "wanted"),
    [
        ([0] * 5, 2, [(0, 0, 2), (0, 2, 2), (0, 4, 1)]),
        ([0, 1, 1, 1, -1, -1, -1], 2, [(0, 0, 1), (1, 1, 2), (1, 3, 1), (-1, 4, 2), (-1, 6, 1)]),
        ([3, 3, 3, 5], 4, [(3, 0, 3), (5, 3, 1)]),
        ([-1, -1], 4, [(-1, 0, 2)]),
    ],
)
def test_groups_of_context_tokens(requests, size, wanted):
    groups = paged_logits_plan.context_groups(jnp.asarray(requests, jnp.int32), size=size, most_requests=6)
    groups = [tuple(group) for group in np.asarray(groups).tolist()]
    assert groups[: len(wanted)] == wanted
    assert all(count == 0 for _, _, count in groups[len(wanted) :])


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_on_the_card(name, kernel):
    """The compiled kernels, with the library's own schedules: right, and the same bits 20 times."""
    case = CASES[name]
    module = paged_logits_triton if kernel in TRITON else paged_logits_mosaic
    fits = dict(heads=case["heads"], new_tokens=case["n"], page_size=case["page_size"])
    try:
        module.supported_on(target_device(), **fits)
    except NotImplementedError as reason:
        pytest.skip(str(reason))
    arguments, expected = scenario((case["width"] * case["page_size"], 0, 1, 63, 64, 65, 0, 257, 255), **case)
    place = dict(page_scale=SCALE, layer_offset=LAYER_OFFSET, config=TRITON.get(kernel))
    call = jax.jit(functools.partial(module.paged_logits_decode, **place))
    arguments = [jnp.asarray(array) for array in arguments]
    first = np.asarray(call(*arguments))
    check_on_card(first, expected)
    for _ in range(19):
        np.testing.assert_array_equal(np.asarray(call(*arguments)), first)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_contexts_on_the_card(kernel):
    module = paged_logits_triton if kernel in TRITON else paged_logits_mosaic
    try:
        module.supported_on(target_device(), heads=32, new_tokens=1, page_size=64)
    except NotImplementedError as reason:
        pytest.skip(str(reason))
    arguments, expected = context_scenario(64)
    call = jax.jit(
        functools.partial(module.paged_logits_prefill, page_scale=SCALE, config=TRITON.get(kernel))
    )
    arguments = [jnp.asarray(x) for x in arguments]
    first = np.asarray(call(*arguments, layer_offset=LAYER_OFFSET))
    check_on_card(first, expected)
    for _ in range(19):
        np.testing.assert_array_equal(np.asarray(call(*arguments, layer_offset=LAYER_OFFSET)), first)


HOPPER = Device("gpu", "NVIDIA H200", (9, 0), 132)
FITTING = dict(heads=64, new_tokens=1, page_size=64)


def test_supported_on_hopper():
    paged_logits_mosaic.supported_on(HOPPER, **FITTING)


@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_schedules_know_the_form_of_keys(form, monkeypatch):
    """Rules may tell FP8 keys from FP4, and page sizes apart: decode rows and contexts ask for their own."""
    seen, codes = [], 128 if form == "fp8" else 64

    def default(device, **facts):
        seen.append((facts["form"], facts["page_size"]))
        return paged_logits_triton.Config()

    monkeypatch.setattr(paged_logits_triton, "default_config", default)
    shape, place = jax.ShapeDtypeStruct, dict(page_scale=1, layer_offset=0)
    keys = shape((3, 32, codes), jnp.uint8), shape((3, 32), jnp.float32 if form == "fp8" else jnp.int32)
    table, numbers = shape((2, 1), jnp.int32), shape((2,), jnp.int32)
    cases = [
        (paged_logits_triton.paged_logits_decode, (2, 1), [shape((2, 1), jnp.int32)]),
        (paged_logits_triton.paged_logits_prefill, (2,), [numbers, numbers]),
    ]
    for score, rows, limits in cases:
        q = shape((*rows, 32, codes), jnp.uint8)
        q = q if form == "fp8" else (q, shape((*rows, 32), jnp.int32))
        weights = shape((*rows, 32), jnp.float32)
        got = jax.eval_shape(functools.partial(score, **place), q, weights, *keys, table, *limits)
        assert got.shape == (2, 32)
    assert seen == [(form, 32)] * 2


@pytest.mark.parametrize(
    ("device", "problem", "reason"),
    [
        (Device("gpu", "NVIDIA A100", (8, 0), 108), FITTING, "9.0"),
        (Device("gpu", "NVIDIA B200", (10, 0), 148), FITTING, "9.0"),
        (Device("cpu", "cpu"), FITTING, "9.0"),
        (HOPPER, FITTING | dict(page_size=16), "page_size is 16"),
        (HOPPER, FITTING | dict(heads=16), "index heads is 16"),
        (HOPPER, FITTING | dict(new_tokens=9), "new tokens per request is 9"),
        (HOPPER, FITTING | dict(head_dim=64), "index head dim is 64"),
    ],
)
def test_refusals_give_the_reason(device, problem, reason):
    with pytest.raises(NotImplementedError, match=reason):
        paged_logits_mosaic.supported_on(device, **problem)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
def test_the_triton_kernel_runs_everywhere(capability):
    paged_logits_triton.supported_on(Device("gpu", "a card", capability, 100), **FITTING)


@pytest.mark.parametrize(
    ("capability", "gib", "able"),
    [((8, 0), 1, False), ((8, 9), 1, False), ((9, 0), 1, True), ((10, 0), 2, True), ((9, 0), 3, False),
     ((9, 0), 4, False), ((9, 0), 5, True), (None, 1, True)],
)  # fmt: skip
def test_where_codes_are_multiplied_as_they_are(capability, gib, able, monkeypatch):
    """Not before Hopper, and not in a pool whose bytes 32 bits do not count: there it is refused, and not the default."""
    device = Device("gpu", "a card", capability, 100)
    keys = jax.ShapeDtypeStruct((gib << 30 >> 13, 64, 128), jnp.uint8)
    assert score_factors.takes_codes(device, keys) is able
    monkeypatch.setattr(paged_logits_triton, "target_device", lambda: device)
    shapes = [jax.ShapeDtypeStruct((2, 1, 32, 128), jnp.uint8), jax.ShapeDtypeStruct((2, 1, 32), jnp.float32)]
    shapes += [keys, jax.ShapeDtypeStruct(keys.shape[:2], jnp.float32)]
    shapes += [jax.ShapeDtypeStruct((2, 4), jnp.int32), jax.ShapeDtypeStruct((2, 1), jnp.int32)]

    def trace(wanted):
        config = paged_logits_triton.Config(fp8_products=wanted)
        call = functools.partial(paged_logits_triton.paged_logits_decode, config=config, interpret=False)
        return str(jax.make_jaxpr(functools.partial(call, page_scale=1, layer_offset=0))(*shapes))

    assert ("f8_e4m3fn" in trace(None)) is able
    assert "f8_e4m3fn" not in trace(False)
    with (
        contextlib.nullcontext()
        if able
        else pytest.raises(NotImplementedError, match="fp8_products is True; a card")
    ):
        trace(True)


@pytest.mark.parametrize(
    ("device", "problem", "reason"),
    [
        (Device("gpu", "an old card", (7, 5), 40), FITTING, "8.0"),
        (Device("cpu", "cpu"), FITTING, "8.0"),
        (HOPPER, FITTING | dict(page_size=8), "page_size is 8"),
        (HOPPER, FITTING | dict(heads=48), "index heads is 48"),
        (HOPPER, FITTING | dict(heads=128, new_tokens=5), "times new tokens is 640"),
        (HOPPER, FITTING | dict(new_tokens=0), "new tokens per request is 0"),
        (HOPPER, FITTING | dict(head_dim=64), "index head dim is 64"),
    ],
)
def test_triton_refusals_give_the_reason(device, problem, reason):
    with pytest.raises(NotImplementedError, match=reason):
        paged_logits_triton.supported_on(device, **problem)


@pytest.mark.parametrize("page_size", [32, 64, 128])
@pytest.mark.parametrize("blocks", [1, 7, 132])
@pytest.mark.parametrize(
    "lengths", [(0,), (1,), (64, 0, 0, 65, 1000), (0, 0, 0), (1000, 1000, 1), tuple(range(0, 1000, 37))]
)
def test_the_plan_covers_everything_once_and_evenly(lengths, blocks, page_size):
    tile, fill, columns = paged_logits_plan.TILE, paged_logits_plan.FILL, 1024
    pages = columns // page_size
    limits = jnp.asarray(lengths, jnp.int32)[:, None] - jnp.asarray([[1, 0]], jnp.int32)
    held = np.arange(pages)[None] * page_size < np.asarray(lengths)[:, None]
    table = np.where(held, np.arange(held.size).reshape(held.shape), -1)
    plan = paged_logits_plan.work_plan(limits, jnp.asarray(table), blocks=blocks, page_size=page_size)
    plan = np.asarray(plan)
    tiles = [-(-length // tile) for length in lengths]
    starts = [count * tile // fill for count in tiles]
    ends = [
        columns // fill if count * tile < columns else start
        for count, start in zip(tiles, starts, strict=True)
    ]

    def walk(first, begin, last, end, begins, limits):
        for r in range(first, last + 1):
            for item in range(begin if r == first else begins[r], end if r == last else limits[r]):
                yield r, item

    scored = [list(walk(*row[[0, 1, 3, 4]], [0] * len(lengths), tiles)) for row in plan]
    filled = [list(walk(*row[5:9], starts, ends)) for row in plan]
    everything = [(r, t) for r, count in enumerate(tiles) for t in range(count)]
    assert list(itertools.chain(*scored)) == everything
    assert list(itertools.chain(*filled)) == [
        (r, u) for r in range(len(lengths)) for u in range(starts[r], ends[r])
    ]
    for shares in (scored, filled):
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
    for row, share in zip(plan, scored, strict=True):
        assert row[2] == (row[4] if row[0] == row[3] else tiles[row[0]])
        wanted = []
        for r, t in share[: paged_logits_plan.planned_tiles(page_size)]:
            last = (lengths[r] - 1) // page_size
            first = t * tile // page_size
            wanted += [table[r, min(first + i, last)] for i in range(max(1, tile // page_size))]
        np.testing.assert_array_equal(row[9 : 9 + len(wanted)], wanted)


def test_the_plan_of_many_requests_uses_the_scan():
    limits = jnp.asarray(np.random.default_rng(0).integers(0, 500, (1500, 1)), jnp.int32)
    table = jnp.zeros((1500, 8), jnp.int32)
    plan = np.asarray(paged_logits_plan.work_plan(limits, table, blocks=5, page_size=64))
    tiles = -(-np.asarray(limits)[:, 0] // 64)
    ends = np.cumsum(tiles)
    cuts = [(ends[r] - tiles[r] + t) for r, t in plan[:, 3:5]]
    np.testing.assert_array_equal(
        cuts, np.arange(1, 6) * (ends[-1] // 5) + np.minimum(np.arange(1, 6), ends[-1] % 5)
    )
