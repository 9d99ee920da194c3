"""Quantise and write, in plain JAX: in place under donation, because a scatter with dropped padding aliases its pool."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from dsa_jax import quant
from dsa_jax.cache import Cache
from dsa_jax.layout import Role


def quantize_index_k(k: Array, form: str, scale_rule: quant.ScaleRule) -> tuple[Array, Array | None]:
    """Codes and scale of indexer keys ``[N, D]`` in a storage form; the ``f32`` form has no scale."""
    if form == "f32":
        return k.astype(jnp.float32), None
    if form == "fp8":
        return quant.quantize_fp8(k, scale_rule)
    raise NotImplementedError(f"index form {form!r} is not implemented")


def append_index_k(cache: Cache, layer: int | Array, k: Array, rows: Array) -> Cache:
    """Write quantised keys at ``rows``; a row of -1 writes nothing."""
    data, scale = quantize_index_k(k, cache.layout.index_form, cache.layout.scale_rule)
    written = {"index_key": _write(cache, "index_key", Role.INDEX_KEY, layer, rows, data)}
    if scale is not None:
        written["index_scale"] = _write(cache, "index_scale", Role.INDEX_KEY, layer, rows, scale)
    return cache.replace_pages(**written)


def append_latent(cache: Cache, layer: int | Array, latent: Array, k_rope: Array, rows: Array) -> Cache:
    """Write latent and rotary key side by side at ``rows``; a row of -1 writes nothing."""
    if cache.layout.key_form not in ("bf16", "f32"):
        raise NotImplementedError(f"key form {cache.layout.key_form!r} is not implemented")
    values = jnp.concatenate([latent.astype(cache.key.dtype), k_rope.astype(cache.key.dtype)], axis=-1)
    return cache.replace_pages(key=_write(cache, "key", Role.KEY, layer, rows, values))


def _write(cache: Cache, name: str, role: Role, layer: int | Array, rows: Array, values: Array) -> Array:
    pages, page_size = cache.pages(name), cache.layout.page_size
    page = cache.page_of(role, layer, jnp.where(rows >= 0, rows // page_size, -1))
    # Without wrap_negative_indices=False, -1 would wrap to the last page before "drop" could apply.
    return pages.at[page, rows % page_size].set(values, mode="drop", wrap_negative_indices=False)
