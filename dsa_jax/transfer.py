"""Copying tokens and pages: partial prefix reuse inside a cache, hand-over between caches.

A copy goes through every pool that the cache has, so that no part of a token can be left behind. Rows and slots are data:
one compiled copy serves any of them. Bytes are copied as they are, never decoded.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from dsa_jax.arguments import described, expect
from dsa_jax.cache import Cache


def copy_tokens(cache: Cache, source_rows: Array, target_rows: Array) -> Cache:
    """Copy tokens to other rows of the same cache, in all layers and roles.

    The use: a request shares the first 63 tokens of a page of 64 with another and then goes on differently. Give it a page
    of its own, copy 63 tokens, and leave whatever the rest of that page holds untouched.

    Args:
        cache: the cache; not changed. Under a ``jit`` that donates it, the pools are updated in place.
        source_rows: ``int32[n]`` rows ``slot * page_size + offset``.
        target_rows: ``int32[n]``. Where either row is -1 or not in the cache, nothing is copied. Targets must be unique;
            all sources are read before any target is written.

    Returns:
        A cache with the copies.

    Raises:
        ValueError: if the rows are not two ``int32`` vectors of one length.
    """
    expect("copy_tokens", "cache", cache, Cache, _FIX)
    _check("copy_tokens", "rows", source_rows, target_rows)
    page_size, slots = cache.layout.page_size, cache.slots
    source_slot, target_slot = source_rows // page_size, target_rows // page_size  # -1 stays negative
    valid = _inside(source_slot, slots) & _inside(target_slot, slots)
    source_slot = jnp.where(valid, source_slot, 0)
    target_slot = jnp.where(valid, target_slot, slots)  # past the end: dropped
    copied = {}
    for name in cache.pools():
        view = _by_slot(cache, name)
        tokens = view[source_slot, :, source_rows % page_size]
        copied[name] = view.at[target_slot, :, target_rows % page_size].set(tokens, mode="drop")
    return cache.replace_pages(**copied)


def copy_pages(source: Cache, target: Cache, source_slots: Array, target_slots: Array) -> Cache:
    """Copy whole slots, that is the pages of all layers and roles, into another cache of the same layout.

    Args:
        source: read only; may be the target itself.
        target: the cache that is written to; not changed. It may have another number of slots.
        source_slots: ``int32[n]``.
        target_slots: ``int32[n]``. Where either slot is -1 or not in its cache, nothing is copied. Targets must be unique.

    Returns:
        The target with the pages.

    Raises:
        ValueError: if the layouts differ, or the slots are not two ``int32`` vectors of one length.
    """
    expect("copy_pages", "source", source, Cache, _FIX)
    expect("copy_pages", "target", target, Cache, _FIX)
    _check("copy_pages", "slots", source_slots, target_slots)
    if source.layout != target.layout:
        raise ValueError(
            f"copy_pages: the layouts differ: {source!r} and {target!r}. Create both caches with one layout, or pass the "
            "pages through dsa_jax.codec."
        )
    valid = _inside(source_slots, source.slots) & _inside(target_slots, target.slots)
    from_slot = jnp.where(valid, source_slots, 0)
    to_slot = jnp.where(valid, target_slots, target.slots)
    copied = {
        name: _by_slot(target, name).at[to_slot].set(_by_slot(source, name)[from_slot], mode="drop")
        for name in target.pools()
    }
    return target.replace_pages(**copied)


def _by_slot(cache: Cache, name: str) -> Array:
    """A pool as ``[slots, pages of a slot, T, ...]``, the same for both managers; a free reshape."""
    pages = cache.pages(name)
    return pages.reshape(cache.slots, pages.shape[0] // cache.slots, *pages.shape[1:])


def _inside(index: Array, count: int) -> Array:
    return (index >= 0) & (index < count)


_FIX = "Pass what Cache.create(layout, slots) or an op returned."


def _check(operation: str, what: str, source: Array, target: Array) -> None:
    if (
        not all(isinstance(array, (Array, np.ndarray)) for array in (source, target))
        or source.ndim != 1
        or source.shape != target.shape
        or {source.dtype, target.dtype} != {jnp.dtype("int32")}
    ):
        raise ValueError(
            f"{operation}: source_{what} is {described(source)} and target_{what} {described(target)}; wanted "
            "int32[n] both. Pair every source with its target."
        )
