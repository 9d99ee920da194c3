"""Read rows back from a pool, in plain JAX."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from dsa_jax.cache import Cache
from dsa_jax.layout import Role


def read_rows(cache: Cache, name: str, role: Role, layer: int | Array, rows: Array) -> Array:
    """Values of one pool at cache rows, zeros where a row is -1 or its page does not exist.

    Args:
        cache: the cache.
        name: the pool leaf.
        role: the role that the leaf belongs to.
        layer: local layer.
        rows: ``int32[...]`` rows ``slot * T + offset``.

    Returns:
        ``[..., *entry]`` in the pool's dtype.
    """
    pages, page_size = cache.pages(name), cache.layout.page_size
    page = cache.page_of(role, layer, jnp.where(rows >= 0, rows // page_size, -1))
    return pages.at[page, rows % page_size].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def gather_index_k(cache: Cache, layer: int | Array, rows: Array) -> tuple[Array, Array | None]:
    """Codes and scales of the indexer keys at ``rows``; no scale in the ``f32`` form."""
    data = read_rows(cache, "index_key", Role.INDEX_KEY, layer, rows)
    if cache.index_scale is None:
        return data, None
    return data, read_rows(cache, "index_scale", Role.INDEX_KEY, layer, rows)
