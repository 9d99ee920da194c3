"""Kernels for scores of contiguous keys inside windows, interpreted on the CPU, against the NumPy float64 model."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from dsa_jax.compat import Device
from dsa_jax.pallas import (
    paged_logits_mosaic,
    paged_logits_plan,
    paged_logits_triton,
    window_logits_mosaic,
    window_logits_triton,
)
from dsa_jax.pallas.paged_logits_mosaic import PagedLogitsConfig
from fp8_scores import check
from interpreted import INTERPRETED, races_found
from window_problems import CASES, FAR, PACKED, Windows, fp4_scenario, scenario


def run(arguments, *, blocks=3, dtype=jnp.float32, **config):
    """The Hopper kernel in its interpreter."""
    call = functools.partial(
        window_logits_mosaic.window_logits,
        config=PagedLogitsConfig(**config),
        blocks=blocks,
        dtype=dtype,
        interpret=INTERPRETED,
    )
    return np.asarray(jax.jit(call)(*map(jnp.asarray, arguments)))


def run_triton(arguments, dtype=jnp.float32, config=None):
    """The kernel for all cards in its interpreter."""
    call = jax.jit(functools.partial(window_logits_triton.window_logits, dtype=dtype, config=config))
    return np.asarray(call(*jax.tree.map(jnp.asarray, arguments)))


NAMES = [pytest.param("causal", marks=pytest.mark.full), *(name for name in CASES if name != "causal")]
"""What "causal" shows, "texts" shows as well; it takes the interpreters longest."""


@pytest.mark.sample(0, 2, 4)
@pytest.mark.parametrize("blocks", [pytest.param(1, marks=pytest.mark.full), 5])
@pytest.mark.parametrize("name", NAMES)
def test_windows(name, blocks):
    windows, keys, config = CASES[name]
    arguments, expected = scenario(windows, keys=keys)
    check(run(arguments, blocks=blocks, **config), expected)
    assert not races_found()


TRITON = {"triton": None, "triton for Ampere": paged_logits_triton.Config(fp8_products=False)}
"""FP8 codes multiplied as they are, and as float16."""


@pytest.mark.parametrize("kernel", TRITON)
@pytest.mark.parametrize("cores", [pytest.param(1, marks=pytest.mark.full), 108])
@pytest.mark.parametrize("name", NAMES)
def test_windows_on_every_card(name, cores, kernel, monkeypatch):
    """On few cores a program has many pages: some before the windows, some inside, some behind."""
    monkeypatch.setattr(paged_logits_triton, "target_device", lambda: Device("cpu", "cpu", None, cores))
    windows, keys, _ = CASES[name]
    arguments, expected = scenario(windows, keys=keys)
    check(run_triton(arguments, config=TRITON[kernel]), expected)


def test_ampere_multiplies_no_fp8():
    arguments, _ = scenario(PACKED, keys=193)
    trace = lambda config: str(
        jax.make_jaxpr(functools.partial(window_logits_triton.window_logits, config=config))(*arguments)
    )
    assert ["f8_e4m3fn" in trace(config) for config in TRITON.values()] == [True, False]


@pytest.mark.parametrize("name", ["texts", "far apart"])
def test_windows_of_fp4_keys(name):
    windows, keys, _ = CASES[name]
    arguments, expected = fp4_scenario(windows, keys=keys, heads=16)
    check(run_triton(arguments), expected)


@pytest.mark.parametrize("implementation", ["triton"])
@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_the_op_with_a_kernel(implementation, form):
    """Through the op's signature and dispatch; weights in bfloat16 are scored in float32."""
    case = scenario if form == "fp8" else fp4_scenario
    (q, weights, data, scale, starts, ends), _ = case(PACKED, keys=193, heads=16)
    score = lambda name: np.asarray(
        cases.mqa_logits(q, (data, scale), weights.astype(jnp.bfloat16), starts, ends, implementation=name)
    )
    check(score(implementation), score("xla"))


def test_64_heads_and_the_librarys_schedule():
    arguments, expected = scenario(PACKED, keys=256, heads=64)
    call = functools.partial(window_logits_mosaic.window_logits, blocks=4, interpret=INTERPRETED)
    check(np.asarray(jax.jit(call)(*map(jnp.asarray, arguments))), expected)
    assert not races_found()


@pytest.mark.parametrize(
    ("kernel", "form"),
    [pytest.param(run, "fp8", marks=pytest.mark.full), (run_triton, "fp8"), (run_triton, "fp4")],
)
def test_bfloat16_scores_are_those_of_float32_rounded(kernel, form):
    arguments, _ = (
        scenario(FAR, keys=1280) if form == "fp8" else fp4_scenario(((0, 7), (3, 5)), keys=7, heads=16)
    )
    got = kernel(arguments, dtype=jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, kernel(arguments).astype(jnp.bfloat16))


@pytest.mark.full
def test_the_schedule_never_changes_a_bit():
    arguments, _ = scenario(PACKED, keys=193)
    first = run(arguments, group_columns=256)
    other = run(arguments, blocks=7, group_columns=96, compute_warpgroups=3, product_columns=32)
    np.testing.assert_array_equal(first, other)


def test_a_plan_of_its_own():
    """A plan may be made once for all layers; float8 queries are the same bytes."""
    (q, *rest), expected = scenario(PACKED, keys=193)
    config = PagedLogitsConfig(group_columns=128, stages=2)
    *_, starts, ends = rest
    plan = window_logits_mosaic.window_plan(starts, ends, heads=32, keys=193, config=config, blocks=2)
    got = window_logits_mosaic.window_logits(
        q.view(jnp.float8_e4m3fn), *map(jnp.asarray, rest), plan=plan, config=config, interpret=INTERPRETED
    )
    check(np.asarray(got), expected)


@pytest.mark.parametrize("kernel", [run, run_triton])
@pytest.mark.parametrize(("rows", "keys"), [(0, 5), (3, 0)])
def test_without_rows_or_keys(rows, keys, kernel):
    zeros = lambda *shape: np.zeros(shape, np.int32)
    q, data = zeros(rows, 32, 128).astype(np.uint8), zeros(keys, 128).astype(np.uint8)
    weights, scales = (np.ones(shape, np.float32) for shape in ((rows, 32), keys))
    got = kernel((q, weights, data, scales, zeros(rows), zeros(rows) + 9))
    assert got.shape == (rows, keys)
    assert np.isneginf(got).all()


def random_windows(keys: int, seed: int) -> Windows:
    """As many rows as a step may have, in groups around each other, far apart, empty, or beyond the keys."""
    rng = np.random.default_rng(seed)
    centre = rng.integers(0, keys, 13).repeat(5)
    starts = centre - rng.integers(0, 300, 65)
    return tuple(zip(starts.tolist(), (starts + rng.integers(-50, 700, 65)).tolist(), strict=True))


@pytest.mark.parametrize("blocks", [1, 7, 132])
@pytest.mark.parametrize("keys", [1, 640, 2000])
@pytest.mark.parametrize("size", [1, 4])
def test_the_plan_covers_everything_once_and_evenly(size, keys, blocks):
    """Tiles and fill units of all blocks, walked as the kernel does, are every column of every group, once."""
    tile, unit = paged_logits_plan.TILE, paged_logits_plan.FILL
    windows = random_windows(keys, seed=keys)
    starts, ends = np.asarray(windows, np.int32).T
    plan = window_logits_mosaic.window_plan(
        jnp.asarray(starts), jnp.asarray(ends), heads=32, keys=keys, blocks=blocks,
        config=PagedLogitsConfig(group_columns=32 * size),
    )  # fmt: skip
    work, groups, limits = map(np.asarray, plan)
    columns = -(-keys // tile) * tile
    written = np.zeros((len(groups), columns), int)
    scored, begun, filled = np.zeros((3, blocks), int)
    for block, share in enumerate(work.tolist()):
        first, begin, first_end, last, end = share[:5]
        for g in range(first, last + 1):
            left = begin if g == first else groups[g, 3]
            right = first_end if g == first else end if g == last else groups[g, 4]
            written[g, left * tile : right * tile] += 1
            scored[block] += max(0, right - left)
            begun[block] += right > left == groups[g, 3]
        first, begin, last, end = share[5:]
        for g in range(first, last + 1):
            before, after, items = map(int, paged_logits_plan.fill_items(groups[g, 3], groups[g, 4], columns))
            for item in range(begin if g == first else 0, end if g == last else items):
                left = (item if item < before else item - before + after) * unit
                place = np.arange(left, min(left + unit, columns))
                outside = (place < groups[g, 3] * tile) | (place >= groups[g, 4] * tile)
                assert outside.any(), "a unit in vain"
                written[g, place[outside]] += 1
                filled[block] += 1
    assert (written == 1).all()
    # A group costs a tile more than it has; a cut may part that price from the group's first tile.
    assert np.ptp(scored + begun) <= 3
    assert np.ptp(filled) <= 1
    for g, (_, first_row, count, begin, end) in enumerate(groups.tolist()):
        assert count == min(size, 65 - g * size)
        seen = [
            np.arange(keys)[max(0, a) : max(0, b)] for a, b in windows[first_row : first_row + count] if a < b
        ]
        seen = np.concatenate([np.zeros(0, int), *seen])
        wanted = (seen.min() // tile, seen.max() // tile + 1) if seen.size else (begin, begin)
        assert (begin, end) == wanted
    assert limits.shape == (len(groups), 2 * size)


@pytest.mark.parametrize(("visit", "cut"), [(0, (63, 1)), (1, (48, 0)), (3, (40, 0))])
def test_groups_have_their_price(visit, cut):
    """63 rows see a tile and one 64, for two blocks: halves of 127 tiles, of 63 x 2 + 65 and of 63 x 4 + 67."""
    ends = jnp.asarray([64] * 63 + [4096], jnp.int32)
    config = PagedLogitsConfig(group_columns=32, visit=visit)
    some: dict = dict(heads=32, config=config, blocks=2)
    of_windows, *_ = window_logits_mosaic.window_plan(jnp.zeros_like(ends), ends, keys=4096, **some)
    table, requests = jnp.arange(64)[None], jnp.zeros(64, jnp.int32)
    of_contexts, *_ = paged_logits_mosaic.prefill_plan(table, requests, ends, page_size=64, **some)
    for work in map(np.asarray, (of_windows, of_contexts)):
        assert tuple(work[0, 3:5]) == tuple(work[1, :2]) == cut


HOPPER = Device("gpu", "NVIDIA H200", (9, 0), 132)


def test_supported():
    window_logits_mosaic.supported_on(HOPPER, heads=64)
    window_logits_triton.supported_on(Device("gpu", "NVIDIA A100", (8, 0), 108), heads=16)


@pytest.mark.parametrize(
    ("device", "problem", "reason"),
    [
        (Device("gpu", "NVIDIA A100", (8, 0), 108), dict(heads=64), "9.0"),
        (Device("cpu", "cpu"), dict(heads=64), "9.0"),
        (HOPPER, dict(heads=16), "index heads is 16"),
        (HOPPER, dict(heads=64, head_dim=64), "index head dim is 64"),
    ],
)
def test_refusals_give_the_reason(device, problem, reason):
    with pytest.raises(NotImplementedError, match=reason):
        window_logits_mosaic.supported_on(device, **problem)


def test_refusals_of_the_kernel_for_every_card():
    with pytest.raises(NotImplementedError, match="8.0"):
        window_logits_triton.supported_on(Device("gpu", "an old card", (7, 5), 40), heads=64)
    with pytest.raises(NotImplementedError, match="index heads is 48"):
        window_logits_triton.supported_on(HOPPER, heads=48)
