"""Quantise and write, in plain JAX: in place under donation, because a scatter with dropped padding aliases its pool."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax import Array

from dsa_jax import quant
from dsa_jax.cache import Cache
from dsa_jax.layout import Role


def quantize_index_k(
    k: Array, form: str, scale_rule: quant.ScaleRule = "ue8m0", tie_rule: quant.TieRule = "deepgemm"
) -> tuple[Array, Array | None]:
    """Codes and scale of indexer keys ``[N, D]`` in a storage form; the ``f32`` form has no scale."""
    entry = quant.encode_index(k, form, scale_rule, tie_rule)
    return entry["index_key"], entry.get("index_scale")


def append_index_k(cache: Cache, layer: int | Array, k: Array, rows: Array) -> Cache:
    """Write quantised keys at ``rows``; a row of -1 writes nothing."""
    layout = cache.layout
    entry = quant.encode_index(k, layout.index_form, layout.scale_rule, layout.tie_rule)
    return _write_entry(cache, layer, rows, entry)


def append_latent(
    cache: Cache,
    layer: int | Array,
    latent: Array,
    k_rope: Array,
    rows: Array,
    key_scale: Array | float | None = None,
) -> Cache:
    """Write latents and rotary keys, in the cache's form, at ``rows``; a row of -1 writes nothing."""
    entry = quant.encode_latent(latent, k_rope, cache.layout.key_form, key_scale)
    return _write_entry(cache, layer, rows, entry)


def _write_entry(cache: Cache, layer: int | Array, rows: Array, entry: dict[str, Array]) -> Cache:
    written = {
        name: _write(cache, name, cache.role(name), layer, rows, values) for name, values in entry.items()
    }
    return replace(cache, **written)


def _write(cache: Cache, name: str, role: Role, layer: int | Array, rows: Array, values: Array) -> Array:
    """The pool in its own shape, with values at rows. Seen as flat pages, a V1 pool would be copied for a single token."""
    pool = jnp.asarray(getattr(cache, name))  # a restored one may be NumPy's
    page_size = cache.layout.page_size
    page = cache.page_of(role, layer, jnp.where(rows >= 0, rows // page_size, -1))
    pages = pool.shape[1] if cache.layout.manager == "v1" else 0
    place = (page // pages, page % pages) if pages else (page,)
    # Without wrap_negative_indices=False, -1 would wrap to the last page before "drop" could apply.
    return pool.at[(*place, rows % page_size)].set(values, mode="drop", wrap_negative_indices=False)
