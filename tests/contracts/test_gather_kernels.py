"""The Triton gather kernel, interpreted: whole pools of NaN bytes, and only what a row names comes out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compile_without_gpu import compile_case
from dsa_jax.compat import Device, target_device
from dsa_jax.pallas import append_triton, gather_triton

LAYERS, SLOTS = 3, 6


def pool(rng: np.random.Generator, page_size: int, width: int, dtype, scale_dtype):
    """Random pages of one layer in a pool of NaN, and what each row holds."""
    data = np.full((SLOTS * LAYERS, page_size, width), 0xFF, np.uint8).astype(dtype)
    if dtype == np.float32:
        data[:] = np.nan
    scales = np.full((SLOTS * LAYERS, page_size), -1, np.int32).view(
        scale_dtype
    )  # 0xFF bytes: NaN as a float
    values = rng.integers(0, 255, (SLOTS * page_size, width)).astype(dtype)
    value_scales = rng.integers(1, 1 << 30, SLOTS * page_size).astype(np.int32).view(scale_dtype)
    pages = np.arange(SLOTS) * LAYERS + 1
    data[pages] = values.reshape(SLOTS, page_size, width)
    scales[pages] = value_scales.reshape(SLOTS, page_size)
    return data, scales, values, value_scales


@pytest.mark.parametrize(
    ("page_size", "width", "dtype", "scale_dtype", "count"),
    [
        (1, 128, np.uint8, np.float32, 4),
        (4, 128, np.uint8, np.float32, 30),
        (64, 128, np.uint8, np.float32, 300),
        (16, 64, np.uint8, np.int32, 65),  # packed FP4 with four scale bytes a token
        (8, 32, np.float32, np.float32, 40),
        (128, 64, np.uint8, np.int32, 7),
        (256, 128, np.uint8, np.float32, 129),
        (32, 128, np.float32, np.float32, 64),
    ],
)
def test_rows(page_size, width, dtype, scale_dtype, count):
    """Any order, repetitions, the last row of the last page; zeros for -1 and for slots that do not exist."""
    rng = np.random.default_rng(page_size)
    data, scales, values, value_scales = pool(rng, page_size, width, dtype, scale_dtype)
    rows = rng.integers(0, SLOTS * page_size, count).astype(np.int32)
    rows[0], rows[1], rows[-1] = -1, SLOTS * page_size - 1, SLOTS * page_size + 1
    got, got_scales = gather_triton.gather_index_k(
        jnp.asarray(rows), jnp.asarray(data), jnp.asarray(scales), page_scale=LAYERS, layer_offset=1
    )
    inside = (rows >= 0) & (rows < SLOTS * page_size)
    at = np.where(inside, rows, 0)
    assert got.dtype == data.dtype
    np.testing.assert_array_equal(got, np.where(inside[:, None], values[at], 0))
    np.testing.assert_array_equal(
        np.asarray(got_scales).view(np.int32), np.where(inside, value_scales[at].view(np.int32), 0)
    )


def test_slots_far_beyond_the_pool_do_not_wrap_into_it():
    """Slot 1,431,655,766 times three pages is 2 in 32 bits, and with the offset a page that exists."""
    rng = np.random.default_rng(6)
    data, scales, values, _ = pool(rng, 1, 128, np.uint8, np.float32)
    rows = np.array([1_431_655_766, 2**31 - 1, -(2**31), -1_431_655_765, 0], np.int32)
    got, got_scales = gather_triton.gather_index_k(
        jnp.asarray(rows), jnp.asarray(data), jnp.asarray(scales), page_scale=LAYERS, layer_offset=1
    )
    assert not np.asarray(got[:4]).any() and not np.asarray(got_scales[:4]).any()
    np.testing.assert_array_equal(got[4], values[0])


def test_a_layer_without_pages_reads_zeros():
    """Offset -1 would be the last page of the slot before."""
    data, scales, *_ = pool(np.random.default_rng(7), 4, 64, np.uint8, np.int32)
    rows = jnp.arange(4, dtype=jnp.int32)
    got = gather_triton.gather_index_k(
        rows, jnp.asarray(data), jnp.asarray(scales), page_scale=LAYERS, layer_offset=jnp.int32(-1)
    )
    assert not any(np.asarray(x).any() for x in got)


def test_without_scales_and_one_page():
    pages = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4, 16)), jnp.float32)
    rows = jnp.array([3, 0, -1], jnp.int32)
    got, scales = gather_triton.gather_index_k(rows, pages, None, page_scale=1, layer_offset=0)
    assert scales is None
    np.testing.assert_array_equal(got, np.stack([pages[0, 3], pages[0, 0], np.zeros(16, np.float32)]))


def test_round_trip_with_a_traced_layer():
    """What append wrote comes back bit for bit, of the layer asked for."""
    rng, page_size = np.random.default_rng(4), 4
    k = jnp.asarray(rng.normal(size=(9, 32)), jnp.float32)
    rows = jnp.asarray(rng.permutation(SLOTS * page_size)[:9].astype(np.int32))
    keys = jnp.full((SLOTS * LAYERS, page_size, 32), 0xFF, jnp.uint8)
    scales = jnp.full((SLOTS * LAYERS, page_size), jnp.nan, jnp.float32)

    @jax.jit
    def both(layer):
        written = append_triton.append_index_k(k, rows, keys, scales, page_scale=LAYERS, layer_offset=layer)
        return written, gather_triton.gather_index_k(rows, *written, page_scale=LAYERS, layer_offset=layer)

    (pages, page_scales), (data, scale) = both(jnp.int32(2))
    at = np.asarray(rows) // page_size * LAYERS + 2, np.asarray(rows) % page_size
    np.testing.assert_array_equal(data, np.asarray(pages)[at])
    np.testing.assert_array_equal(scale, np.asarray(page_scales)[at])
    assert np.isfinite(np.asarray(scale)).all()


def test_no_rows():
    data, scale = gather_triton.gather_index_k(
        jnp.zeros(0, jnp.int32),
        jnp.zeros((2, 4, 32), jnp.uint8),
        jnp.zeros((2, 4)),
        page_scale=1,
        layer_offset=0,
    )
    assert data.shape == (0, 32)
    assert data.dtype == jnp.uint8
    assert scale is not None
    assert scale.shape == (0,)


def test_unsupported():
    card = Device("gpu", "NVIDIA H100", (9, 0))
    gather_triton.supported_on(card, page_size=128)
    with pytest.raises(NotImplementedError, match="power of two"):
        gather_triton.supported_on(card, page_size=3)
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        gather_triton.supported_on(Device("cpu", "cpu"))


def compiled_case(*, width, dtype="uint8"):
    """For `compile_without_gpu`: a whole context out of a large pool, refused where `supported_on` says so."""

    def run(rows, keys, scales):
        gather_triton.supported_on(target_device(), page_size=64)
        return gather_triton.gather_index_k(rows, keys, scales, page_scale=61, layer_offset=3)

    shapes = ((131_072,), jnp.int32), ((390_400, 64, width), jnp.dtype(dtype)), ((390_400, 64), jnp.float32)
    return run, [jax.ShapeDtypeStruct(*shape) for shape in shapes]


@pytest.mark.compile
@pytest.mark.parametrize(
    ("card", "options"),
    [
        ("sm80", {"width": 128}),
        ("sm90", {"width": 64}),
        ("sm90", {"width": 128, "dtype": "float32"}),
        ("sm100", {"width": 128}),
    ],
)
def test_compiles(compile_environment, card, options):
    """One launch, and no copy of the pool for its view as words."""
    result = compile_case(compile_environment, card, "contracts.test_gather_kernels:compiled_case", **options)
    assert len(result.get("calls", [])) == 1, result
    assert result["temp"] < 4_096, result
