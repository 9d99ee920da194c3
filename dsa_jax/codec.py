"""The packed pages of DeepGEMM, FlashMLA, TensorRT-LLM and vLLM, bit for bit, both ways.

The library keeps the parts of a token as typed arrays; other tools keep them in one buffer of bytes. This file is the
boundary. Two orders exist:

* *planar*, the indexer's page: ``T*D`` bytes of codes, token after token (``T*D/2`` of FP4), then ``T*4`` bytes of scales,
  little-endian: a float32 each, or the four UE8M0 bytes of FP4. It is *not* interleaved per token, although tools like to
  view it as ``[pages, T, 1, D + 4]``.
* *interleaved*, the 656-byte token: 512 codes, four float32 scales, 64 bfloat16, then the next token.

Forms of one array (bfloat16, FP8 and float32 latents; the two buffers of NVFP4) are the same in both.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from dsa_jax.arguments import described, expect, is_whole
from dsa_jax.cache import Cache
from dsa_jax.layout import ArraySpec, Role, as_role

SCALE_BYTES = 4
"""Bytes of scale that one token has in a packed index-key page."""


def pack_pages(cache: Cache, role: Role) -> Array:
    """All pages of a role as bytes, in the order of the packed pool.

    Args:
        cache: the cache.
        role: ``Role.KEY``, ``Role.KEY_BLOCK_SCALE`` (NVFP4) or ``Role.INDEX_KEY``.

    Returns:
        ``uint8[P, page_bytes]``: page ``slot * scale + layer_offset`` of the role. A 656-byte token t is at
        ``[:, 656 * t : 656 * (t + 1)]``.

    Raises:
        ValueError: if no layer of this cache has such pages.
    """
    specs = _specs("pack_pages", cache, role)
    parts = [_as_bytes(cache.pages(spec.name)) for spec in specs]
    if _interleaved(specs):
        parts = [jnp.concatenate(parts, axis=2)]
    return jnp.concatenate([part.reshape(part.shape[0], -1) for part in parts], axis=1)


def unpack_pages(cache: Cache, role: Role, packed: Array) -> Cache:
    """A cache whose pages of a role are read from bytes; the inverse of ``pack_pages``.

    Args:
        cache: the cache that says the shapes; not changed.
        role: whose pages the bytes are.
        packed: ``uint8[P, page_bytes]``.

    Returns:
        The cache with those pages, everything else as it was.

    Raises:
        ValueError: if no layer of this cache has such pages, or ``packed`` has another shape or dtype.
    """
    specs = _specs("unpack_pages", cache, role)
    count, page_size = cache.pages(specs[0].name).shape[:2]
    wanted = (count, specs[0].page_bytes)
    if getattr(packed, "shape", None) != wanted or packed.dtype != jnp.uint8:
        raise ValueError(
            f"unpack_pages: packed is {described(packed)}; wanted uint8{list(wanted)}, {role} pages of "
            f"{page_size} tokens of {cache.layout.key_form}/{cache.layout.index_form}. Create the cache with the layout "
            "that the bytes were written with."
        )
    if not isinstance(packed, Array):
        packed = jnp.array(packed)  # a copy: the caller's buffer may be written into afterwards
    pages = {}
    tokens = packed.reshape(count, page_size, -1)
    for spec in specs:
        if _interleaved(specs):
            raw = tokens[:, :, spec.page_offset : spec.page_offset + spec.token_bytes]
        else:
            raw = packed[:, spec.page_offset : spec.page_offset + page_size * spec.token_bytes]
        pages[spec.name] = _from_bytes(raw, cache.pages(spec.name))
    return cache.replace_pages(**pages)


def pack_index_pages(data: Array, scale: Array) -> Array:
    """Packed pages from the two typed arrays, without a cache.

    Args:
        data: ``uint8[P, T, D]`` codes (FP8) or ``uint8[P, T, D/2]`` (FP4).
        scale: ``float32[P, T]`` (FP8) or ``int32[P, T]`` (FP4) scales.

    Returns:
        ``uint8[P, T * (D + 4)]``, for FP4 ``uint8[P, T * (D/2 + 4)]``.

    Raises:
        ValueError: if shapes or dtypes do not belong together.

    >>> pages = pack_index_pages(jnp.ones((1, 2, 4), jnp.uint8), jnp.array([[1.0, 2.0]], jnp.float32))
    >>> pages[0].tolist()
    [1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 128, 63, 0, 0, 0, 64]
    """
    if (
        not all(hasattr(array, "shape") and hasattr(array, "dtype") for array in (data, scale))
        or data.ndim != 3
        or data.dtype != jnp.uint8
        or scale.shape != data.shape[:2]
        or scale.dtype.itemsize != 4
    ):
        raise ValueError(
            f"pack_index_pages: got data {described(data)} and scale {described(scale)}; "
            "wanted uint8[P, T, D] and a four-byte scale [P, T]. Pass the cache's index_key and index_scale as flat pages."
        )
    pages = data.shape[0]
    return jnp.concatenate([data.reshape(pages, -1), _as_bytes(scale).reshape(pages, -1)], axis=1)


def unpack_index_pages(packed: Array, page_size: int, *, scale_dtype=jnp.float32) -> tuple[Array, Array]:
    """The two typed arrays from packed pages, without a cache.

    Args:
        packed: ``uint8[P, T * (D + 4)]``, for FP4 ``uint8[P, T * (D/2 + 4)]``.
        page_size: T, tokens per page. The width alone cannot tell it, so it is asked for.
        scale_dtype: the four-byte dtype of the scales: ``float32`` for FP8 pages, ``int32`` for FP4.

    Returns:
        ``uint8[P, T, D]`` (FP4: ``[P, T, D/2]``) codes and ``[P, T]`` scales.

    Raises:
        ValueError: if the width is not ``page_size`` times a row of codes and four bytes.
    """
    if (
        getattr(packed, "ndim", None) != 2
        or packed.dtype != jnp.uint8
        or not is_whole(page_size)
        or page_size < 1
        or packed.shape[-1] % page_size
        or packed.shape[-1] // page_size <= SCALE_BYTES
    ):
        raise ValueError(
            f"unpack_index_pages: packed is {described(packed)} with page_size {described(page_size)}; wanted "
            "uint8[P, page_size * (D + 4)], for example [P, 8448] at 64 tokens of 128 codes. Check the page size."
        )
    pages, width = packed.shape
    codes = width // page_size - SCALE_BYTES
    data = packed[:, : page_size * codes].reshape(pages, page_size, codes)
    scale_bytes = packed[:, page_size * codes :].reshape(pages, page_size, SCALE_BYTES)
    return data, lax.bitcast_convert_type(scale_bytes, scale_dtype)


def _specs(operation: str, cache: Cache, role: Role) -> list[ArraySpec]:
    """The arrays of a role, in the order in which they follow each other in a packed page."""
    expect(operation, "cache", cache, Cache, "Pass what Cache.create(layout, slots) or an op returned.")
    role = as_role(operation, role)
    specs = [spec for spec in cache.layout.arrays(cache.slots) if spec.role == role]
    if not specs:
        raise ValueError(
            f"{operation}: no layer of this cache has {role} pages (forms {cache.layout.key_form}/"
            f"{cache.layout.index_form}). Ask for one of {', '.join(cache.layout.bytes_per_token_by_role)}."
        )
    return specs


def _interleaved(specs: list[ArraySpec]) -> bool:
    return specs[0].token_stride != specs[0].token_bytes


def _as_bytes(pages: Array) -> Array:
    """``[P, T, ...]`` of any dtype as ``uint8[P, T, token_bytes]``, little-endian."""
    raw = pages if pages.dtype == jnp.uint8 else lax.bitcast_convert_type(pages, jnp.uint8)
    return raw.reshape(*pages.shape[:2], -1)


def _from_bytes(raw: Array, like: Array) -> Array:
    """The inverse of ``_as_bytes``, in the shape and dtype of ``like``."""
    if like.dtype == jnp.uint8:
        return raw.reshape(like.shape)
    return lax.bitcast_convert_type(raw.reshape(*like.shape, like.dtype.itemsize), like.dtype)
