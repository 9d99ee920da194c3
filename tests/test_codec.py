"""The packed page: all codes first, then all scales."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from dsa_jax.codec import pack_index_pages, unpack_index_pages


def arrays(pages: int, page_size: int, width: int = 128) -> tuple[np.ndarray, np.ndarray]:
    """Random codes and scales, NaN patterns among them."""
    rng = np.random.default_rng(page_size)
    data = rng.integers(0, 256, (pages, page_size, width)).astype(np.uint8)
    scale = rng.integers(0, 2**32, (pages, page_size), np.uint32).view(np.float32)
    return data, scale


@pytest.mark.parametrize("page_size", [1, 4, 16, 32, 64, 128])
def test_addresses(page_size):
    """Token t's codes lie at t*D, its scale at T*D + 4t, little-endian."""
    data, scale = arrays(3, page_size)
    packed = np.asarray(pack_index_pages(jnp.asarray(data), jnp.asarray(scale)))
    assert packed.shape == (3, page_size * 132)
    assert packed.dtype == np.uint8
    for page in range(3):
        for t in {0, 1 % page_size, page_size - 1}:
            assert packed[page, t * 128 : (t + 1) * 128].tobytes() == data[page, t].tobytes()
            start = page_size * 128 + 4 * t
            assert packed[page, start : start + 4].tobytes() == scale[page, t].astype("<f4").tobytes()


@pytest.mark.parametrize(("page_size", "width"), [(1, 128), (4, 8), (64, 128)])
def test_both_ways_bit_for_bit(page_size, width):
    data, scale = arrays(2, page_size, width)
    packed = pack_index_pages(jnp.asarray(data), jnp.asarray(scale))
    codes, scales = unpack_index_pages(packed, page_size)
    assert np.asarray(codes).tobytes() == data.tobytes()
    assert np.asarray(scales).tobytes() == scale.tobytes()
    assert np.asarray(pack_index_pages(codes, scales)).tobytes() == np.asarray(packed).tobytes()


def test_a_page_of_64_tokens():
    data, scale = arrays(1, 64)
    packed = np.asarray(pack_index_pages(jnp.asarray(data), jnp.asarray(scale)))
    assert packed.shape == (1, 8448)
    assert packed[0, 8192:8196].tobytes() == scale[0, 0].tobytes()


def test_interleaved_reading_differs():
    """A reader that takes 132 bytes a token gets codes as scales from the second token on, and the first scale wrong."""
    data, scale = arrays(1, 4)
    packed = np.asarray(pack_index_pages(jnp.asarray(data), jnp.asarray(scale)))
    interleaved = packed.reshape(4, 132)
    assert interleaved[1, :128].tobytes() != data[0, 1].tobytes()
    assert interleaved[0, 128:].tobytes() == data[0, 1, :4].tobytes()


def test_errors():
    data, scale = (jnp.asarray(a) for a in arrays(2, 4))
    with pytest.raises(
        ValueError, match=r"pack_index_pages: got data float32\[2, 4, 128\].*Pass the cache's index_key"
    ):
        pack_index_pages(data.astype(jnp.float32), scale)
    with pytest.raises(ValueError, match=r"scale float32\[2, 3\]; wanted"):
        pack_index_pages(data, scale[:, :3])
    with pytest.raises(ValueError, match=r"scale bfloat16\[2, 4\]"):
        pack_index_pages(data, scale.astype(jnp.bfloat16))
    packed = pack_index_pages(data, scale)
    for page_size in (5, 132, 264, 0, -4):
        with pytest.raises(
            ValueError, match=rf"unpack_index_pages: .*page_size {page_size}; .*Check the page size"
        ):
            unpack_index_pages(packed, page_size)
    with pytest.raises(ValueError, match=r"packed is uint8\[528\]"):
        unpack_index_pages(packed[0], 4)
