"""The paged logits kernels, interpreted on the CPU, against the NumPy float64 model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_jax.compat import Device
from dsa_jax.pallas import (
    paged_logits_kernel,
    paged_logits_mosaic,
    paged_logits_triton,
    score_factors,
)
from dsa_jax.pallas.paged_logits_mosaic import PagedLogitsConfig
from fp8_scores import FAR_SLOT, LAYER_OFFSET, NAN_CODE, SCALE, check, scenario
from interpreted import INTERPRETED, races_found
from numpy_model import E4M3

ONE_CODE = 0x38
"""The code of 1.0."""
TRITON = {"triton": None, "triton for Ampere": paged_logits_triton.Config(fp8_products=False)}
KERNELS = ("mosaic", *TRITON)


@functools.cache
def kernel_of(name: str, config: PagedLogitsConfig | None, blocks: int, dtype, planted: str):
    """A kernel in its interpreter: ``"mosaic"``, the Hopper kernel, or ``"triton"``, the one for all cards.

    Args:
        planted: names a change of the kernel's source, so that nothing traced without it is used again.
    """
    if name == "mosaic":
        call = functools.partial(
            paged_logits_mosaic.paged_logits_decode, config=config, blocks=blocks, interpret=INTERPRETED
        )
    else:
        call = functools.partial(paged_logits_triton.paged_logits_decode, config=TRITON[name])
    return jax.jit(functools.partial(call, page_scale=SCALE, dtype=dtype))


def run(arguments, *, kernel="mosaic", config=None, blocks=3, dtype=jnp.float32, planted=""):
    """Scores of `kernel_of`, to which the layer's offset is a value on the device."""
    call = kernel_of(kernel, config, blocks, dtype, planted)
    return np.asarray(call(*map(jnp.asarray, arguments), layer_offset=LAYER_OFFSET))


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
    arguments, expected = scenario((0, 0, 0), n=2, heads=32, page_size=64, width=11)
    check(run(arguments, kernel=kernel), expected)
    assert np.isneginf(expected).all()


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


@pytest.mark.parametrize("kernel", TRITON)
def test_a_nan_among_numbers_scores_nan(kernel):
    """Two keys that are NaN in one element or in their scale: those score NaN, for rows that see them, and no others change.

    With 64 heads XLA makes one call of an interpreted product and its sum, which must not lose NaN either.
    """
    arguments, expected = scenario((100,), n=2, heads=64, page_size=64, width=2)
    q, weights, keys, scales, table, limits = arguments
    keys, scales = keys.copy(), scales.copy()
    page = table[0] * SCALE + LAYER_OFFSET
    keys[page[0], 7, 5], scales[page[1], 99 - 64] = NAN_CODE, np.nan
    got = run((q, weights, keys, scales, table, limits), kernel=kernel)
    assert np.argwhere(np.isnan(got)).tolist() == [[0, 7], [1, 7], [1, 99]]
    check(np.where(np.isnan(got), expected, got).astype(np.float32), expected)
    np.testing.assert_array_equal(got[~np.isnan(got)], run(arguments, kernel=kernel)[~np.isnan(got)])


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
    run(arguments, blocks=1, config=PagedLogitsConfig(query_buffers=1), planted="no fence")
    assert races_found()


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
