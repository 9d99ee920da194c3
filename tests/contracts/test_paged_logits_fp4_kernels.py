"""The scoring kernels on FP4 keys, interpreted on the CPU, against the NumPy model and the reference."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4_scores
from dsa_jax import quant
from dsa_jax.compat import Device
from dsa_jax.pallas import paged_logits_fp4_codes as codes
from dsa_jax.pallas import paged_logits_fp4_kernel, paged_logits_fp4_mosaic, paged_logits_triton
from dsa_jax.pallas.paged_logits_fp4_mosaic import PagedLogitsFp4Config as Config
from fp4_scores import FAR, LAYER_OFFSET, NEAR, SCALE, check, scenario
from interpreted import INTERPRETED, races_found
from numpy_model import E4M3

KERNELS = ("mosaic", "triton")


@functools.cache
def kernel_of(name: str, config: Config | None = None, blocks: int = 3, dtype=jnp.float32, planted: str = ""):
    """A kernel in its interpreter: ``"mosaic"``, the Hopper kernel, or ``"triton"``, the one for all cards.

    Args:
        planted: names a change of the kernel's source, so that nothing traced without it is used again.
    """
    if name == "mosaic":
        call = functools.partial(
            paged_logits_fp4_mosaic.paged_logits_decode,
            config=config or Config(stages=4),
            blocks=blocks,
            interpret=INTERPRETED,
        )
    else:
        call = paged_logits_triton.paged_logits_decode
    return jax.jit(functools.partial(call, page_scale=SCALE, dtype=dtype))


def run(arguments, *, kernel="mosaic", offset=LAYER_OFFSET, dtype=jnp.float32, **schedule):
    call = kernel_of(kernel, dtype=dtype, **schedule if kernel == "mosaic" else {})
    return np.asarray(call(*jax.tree.map(jnp.asarray, arguments), layer_offset=offset))


@pytest.mark.parametrize(("heads", "n", "page_size"), [(64, 5, 64), (32, 7, 16)])
def test_contexts(heads, n, page_size):
    """The rows of requests as tokens of contexts, more of a request than a group takes, between padding."""
    arguments, expected = scenario(
        (3 * page_size, 0, 1, page_size + 1), n=n, heads=heads, page_size=page_size, width=3
    )
    q, weights, keys, scales, table, limits = arguments
    packed = lambda x: np.concatenate([x.reshape(-1, *x.shape[2:]), np.zeros_like(x[0, :2])])
    owners = np.append(np.repeat(np.arange(4, dtype=np.int32), n), np.int32([-1, -1]))
    context = (*jax.tree.map(packed, (q, weights)), keys, scales, table, owners, packed(limits))
    call = jax.jit(functools.partial(paged_logits_triton.paged_logits_prefill, page_scale=SCALE))
    got = np.asarray(call(*jax.tree.map(jnp.asarray, context), layer_offset=LAYER_OFFSET))
    check(got[:-2], expected)
    assert np.isneginf(got[-2:]).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("key_bytes", "query_bytes"), [(FAR, NEAR), (NEAR, FAR), (FAR, FAR)])
def test_exponents_of_any_distance(kernel, key_bytes, query_bytes):
    """Groups so far apart that e4m3 cannot carry a vector's codes under one scale: checked for, and exact all the same."""
    arguments, expected = scenario(
        (130, 0, 64, 1), n=2, heads=32, page_size=32, width=5, key_bytes=key_bytes, query_bytes=query_bytes
    )
    check(run(arguments, kernel=kernel), expected)
    assert kernel == "triton" or not races_found()


@pytest.mark.parametrize("kernel", [pytest.param("mosaic", marks=pytest.mark.full), "triton"])
def test_bfloat16_scores_are_those_of_float32_rounded(kernel):
    arguments, expected = scenario((70, 0, 128), n=2, heads=32, page_size=64, width=3)
    rounded, exact = (run(arguments, kernel=kernel, dtype=d) for d in (jnp.bfloat16, jnp.float32))
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rounded, exact.astype(jnp.bfloat16))
    check(exact, expected)


def one_key_apart(distance: int, group: int = 2):
    """Keys with equal exponents but for one group of one key, which lies `distance` below."""
    (q, weights, keys, words, table, limits), _ = scenario(
        (190, 3), n=1, heads=32, page_size=64, width=3, key_bytes=(130,)
    )
    words = words.copy()
    page, place = table[0, 1] * SCALE + LAYER_OFFSET, 17
    words[page, place] -= distance << (8 * group)
    return q, weights, keys, words, table, limits


@pytest.mark.full
def test_every_distance_of_one_key(monkeypatch):
    """Up to 11 in one go; from 12 on that tile alone is scored again, and the result is the reference's."""
    again = []
    original = paged_logits_fp4_kernel.PagedLogitsFp4Kernel._score_by_groups

    def counted(self, refs, stage, t, request, first, buffer, scales, column, left, once):
        jax.debug.callback(lambda left: again.append(int(left)), left)
        original(self, refs, stage, t, request, first, buffer, scales, column, left, once)

    monkeypatch.setattr(paged_logits_fp4_kernel.PagedLogitsFp4Kernel, "_score_by_groups", counted)
    for distance in (0, 1, 11, 12, 14, 15, 16, 60):
        again.clear()
        arguments = one_key_apart(distance)
        check(run(arguments, planted="counted"), run(arguments, kernel="triton"))
        jax.effects_barrier()
        assert again == ([64] if distance > codes.MOST_DROP else []), distance


def test_the_exception_is_needed(monkeypatch):
    """Planted: if nobody looks for exceptions, keys far apart come out wrong."""
    monkeypatch.setattr(codes, "doubtful", lambda distances, tops: tops != tops)
    arguments = one_key_apart(14)
    with pytest.raises(AssertionError):
        check(run(arguments, planted="blind"), run(arguments, kernel="triton"))


@pytest.mark.parametrize("kernel", KERNELS)
def test_scale_bytes_without_a_power(kernel):
    """Byte 255 is NaN and poisons its key alone; byte 0, never written, is 0; the greatest and least powers are powers."""
    (q, weights, keys, words, table, limits), _ = scenario(
        (64,), n=1, heads=32, page_size=64, width=1, query_bytes=(127,)
    )
    words = words.copy()
    page = table[0, 0] * SCALE + LAYER_OFFSET
    bytes_ = np.full((64, 4), 127)
    bytes_[3, 1], bytes_[5], bytes_[7, 3], bytes_[9], bytes_[11] = 255, 0, 0, 190, 64
    bytes_[13], bytes_[15] = 200, 40
    words[page] = fp4_scores.words(bytes_)
    got = run((q, weights, keys, words, table, limits), kernel=kernel)
    assert np.flatnonzero(np.isnan(got[0])).tolist() == [3]
    assert got[0, 5] == 0
    value = quant.dequantize_fp4(jnp.asarray(keys[page]), jnp.asarray(words[page]))
    dots = (
        np.asarray(quant.dequantize_fp4(*map(jnp.asarray, q)), np.float64)[0, 0]
        @ np.asarray(value, np.float64).T
    )
    expected = weights[0, 0].astype(np.float64) @ np.maximum(dots, 0)
    rest = np.arange(64) != 3
    np.testing.assert_allclose(got[0, rest], expected[rest], rtol=2e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_code_is_decoded(kernel):
    """Keys that hold one code each, in every place of a word, against queries that see one element each."""
    heads, elements = 32, np.r_[0:8, 30:34, 60:68, 90:94, 120:128]
    (_, weights, keys, words, table, limits), _ = scenario((64,), n=1, heads=heads, page_size=64, width=1)
    ones = np.zeros((1, 1, heads, 128), np.int64)
    ones[0, 0, np.arange(heads), elements] = 2
    weights = 2.0 ** np.arange(heads, dtype=np.float32)[None, None] * 2.0**-16
    page = table[0, 0] * SCALE + LAYER_OFFSET
    keys, words = keys.copy(), words.copy()
    stored = np.random.default_rng(0).integers(0, 16, (64, 128))
    stored[:16] = np.arange(16)[:, None]
    keys[page], words[page] = fp4_scores.packed(stored), 0x7F7F7F7F
    got = run(
        (
            (fp4_scores.packed(ones), np.full((1, 1, heads), 0x7F7F7F7F, np.int32)),
            weights,
            keys,
            words,
            table,
            limits,
        ),
        kernel=kernel,
    )
    values = fp4_scores.values(stored, np.full((64, 4), 127))[:, elements]
    expected = np.maximum(values, 0) @ weights[0, 0].astype(np.float64)
    np.testing.assert_allclose(got[0], expected, rtol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_to_score_is_filled(kernel):
    """No visible key at all: every column is written, no page is read, no barrier is left waiting."""
    arguments, expected = scenario((0, 0, 0, 0), n=2, heads=32, page_size=32, width=5)
    check(run(arguments, kernel=kernel), expected)
    assert np.isneginf(expected).all()


@pytest.mark.full
def test_traced_layer_offset_and_schedules():
    """The offset as a device value; and neither the schedule nor the number of blocks changes a bit."""
    arguments, expected = scenario((150, 64, 3), n=2, heads=32, page_size=64, width=3)
    first = run(arguments, offset=jnp.int32(LAYER_OFFSET))
    check(first, expected)
    config = Config(compute_warpgroups=3, stages=6, product_columns=32, together=2)
    np.testing.assert_array_equal(first, run(arguments, blocks=5, config=config))


def test_garbage_beyond_the_length_is_no_exception(monkeypatch):
    """Scales of never written keys in a request's last tile cost nothing: no tile is looked at again."""
    again = []
    original = paged_logits_fp4_kernel.PagedLogitsFp4Kernel._score_exceptions

    def counted(self, refs, spare, request, first, buffer, tile, end, longest):
        jax.debug.callback(lambda tile: again.append(int(tile)), tile)
        original(self, refs, spare, request, first, buffer, tile, end, longest)

    monkeypatch.setattr(paged_logits_fp4_kernel.PagedLogitsFp4Kernel, "_score_exceptions", counted)
    arguments, expected = scenario((70, 3), n=1, heads=32, page_size=64, width=2)
    check(run(arguments, planted="looks"), expected)
    jax.effects_barrier()
    assert not again


@pytest.mark.planted
def test_the_race_detector_sees_a_missing_barrier(monkeypatch):
    """Planted: without the barrier after an exception, the next copy may overwrite what is still being read."""
    monkeypatch.setattr(paged_logits_fp4_kernel.plgpu, "commit_smem", lambda: None)
    arguments, _ = scenario((190,), n=1, heads=32, page_size=64, width=3, key_bytes=FAR)
    run(arguments, blocks=1, config=Config(compute_warpgroups=1, stages=2), planted="no barrier")
    assert races_found()


def test_codes_are_those_of_the_values():
    """All codes and all distances that fit: the tables give exactly the value times a power of two."""
    from dsa_jax.pallas.paged_logits_fp4_steps import _permute_arrays

    packed = fp4_scores.packed(np.arange(128) % 16).view(np.uint32)
    for group in range(4):
        for drop in range(codes.MOST_DROP + 1):
            table = codes.tables(jnp.uint32(drop << (8 * group)), jnp.uint32(group), _permute_arrays)
            for word in (0, 1):
                halves = codes.expand(jnp.uint32(packed[word]), table, _permute_arrays)
                got = E4M3[np.array(halves, np.uint32).view(np.uint8)]
                wanted = fp4_scores.E2M1[np.arange(8) + 8 * word] * 2.0 ** (codes.SHIFT - drop)
                np.testing.assert_array_equal(got, wanted)


def test_reordered_elements_meet():
    """Column 32 t + 16 c + 4 g + i is element 32 g + 8 t + 4 c + i; four of them are a word."""
    got = np.asarray(codes.reorder(jnp.arange(32).reshape(4, 4, 2))).reshape(-1)
    for place, word in enumerate(got):
        t, c, g = place // 8, place // 4 % 2, place % 4
        assert word == 8 * g + 2 * t + c


HOPPER = Device("gpu", "NVIDIA H200", (9, 0), 132)


def test_supported_on_hopper_alone():
    fits = dict(heads=64, new_tokens=1, page_size=64)
    paged_logits_fp4_mosaic.supported_on(HOPPER, **fits)
    for device in (Device("gpu", "NVIDIA A100", (8, 0), 108), Device("gpu", "NVIDIA B200", (10, 0), 148)):
        with pytest.raises(NotImplementedError, match="9.0"):
            paged_logits_fp4_mosaic.supported_on(device, **fits)
    with pytest.raises(NotImplementedError, match="page_size is 16"):
        paged_logits_fp4_mosaic.supported_on(HOPPER, **fits | dict(page_size=16))
