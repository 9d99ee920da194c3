"""The packed index-key page of DeepGEMM, TensorRT-LLM and vLLM, bit for bit, both ways.

A packed page of T tokens is all codes first, then all scales: ``T*D`` bytes of codes, token after token, followed by
``T*4`` bytes of little-endian float32 scales. It is *not* interleaved per token, although tools like to view it as
``[pages, T, 1, D + 4]``. The library keeps codes and scales as two typed arrays; this file is the boundary.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

SCALE_BYTES = 4
"""Bytes of scale that one token has in a packed index-key page."""


def pack_index_pages(data: Array, scale: Array) -> Array:
    """Packed pages from the two typed arrays.

    Args:
        data: ``uint8[P, T, D]`` codes.
        scale: ``float32[P, T]`` (FP8) scales.

    Returns:
        ``uint8[P, T * (D + 4)]``.

    Raises:
        ValueError: if shapes or dtypes do not belong together.

    >>> pages = pack_index_pages(jnp.ones((1, 2, 4), jnp.uint8), jnp.array([[1.0, 2.0]], jnp.float32))
    >>> pages[0].tolist()
    [1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 128, 63, 0, 0, 0, 64]
    """
    if (
        data.ndim != 3
        or data.dtype != jnp.uint8
        or scale.shape != data.shape[:2]
        or scale.dtype.itemsize != 4
    ):
        raise ValueError(
            f"pack_index_pages: got data {data.dtype}{list(data.shape)} and scale {scale.dtype}{list(scale.shape)}; "
            "wanted uint8[P, T, D] and a four-byte scale [P, T]. Pass the cache's index_key and index_scale as flat pages."
        )
    pages = data.shape[0]
    scale_bytes = lax.bitcast_convert_type(scale, jnp.uint8)  # appends an axis of four bytes, little-endian
    return jnp.concatenate([data.reshape(pages, -1), scale_bytes.reshape(pages, -1)], axis=1)


def unpack_index_pages(packed: Array, page_size: int, *, scale_dtype=jnp.float32) -> tuple[Array, Array]:
    """The two typed arrays from packed pages.

    Args:
        packed: ``uint8[P, T * (D + 4)]``.
        page_size: T, tokens per page. The width alone cannot tell it, so it is asked for.
        scale_dtype: the four-byte dtype of the scales: ``float32`` for FP8 pages.

    Returns:
        ``uint8[P, T, D]`` codes and ``[P, T]`` scales.

    Raises:
        ValueError: if the width is not ``page_size`` times a row of codes and four bytes.
    """
    width = packed.shape[-1]
    if (
        packed.ndim != 2
        or packed.dtype != jnp.uint8
        or page_size < 1
        or width % page_size
        or width // page_size <= SCALE_BYTES
    ):
        raise ValueError(
            f"unpack_index_pages: packed is {packed.dtype}{list(packed.shape)} with page_size {page_size}; wanted "
            "uint8[P, page_size * (D + 4)], for example [P, 8448] at 64 tokens of 128 codes. Check the page size."
        )
    pages = packed.shape[0]
    codes = width // page_size - SCALE_BYTES
    data = packed[:, : page_size * codes].reshape(pages, page_size, codes)
    scale_bytes = packed[:, page_size * codes :].reshape(pages, page_size, SCALE_BYTES)
    return data, lax.bitcast_convert_type(scale_bytes, scale_dtype)
