"""Copying tokens and pages: the right bytes of every pool, and not one byte more."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import form_cases
from dsa_jax.cache import Cache
from dsa_jax.transfer import copy_pages, copy_tokens
from test_codec_forms import random_cache

FORMS = form_cases.PAIRS
ints = functools.partial(jnp.array, dtype=jnp.int32)


def by_slot(cache: Cache, name: str) -> np.ndarray:
    """A pool as [slots, pages of a slot, T, ...] in NumPy."""
    pages = np.array(cache.pages(name))
    return pages.reshape(cache.slots, -1, *pages.shape[1:])


@pytest.mark.parametrize("manager", ["v1", "v2"])
@pytest.mark.parametrize(("key", "index", "page_size"), FORMS)
def test_tokens(manager, key, index, page_size):
    """In-bounds pairs of rows are copied in all layers and roles; -1 and rows past the cache copy nothing."""
    cache = random_cache(form_cases.layout(manager, key=key, index=index, page_size=page_size))
    rows = 3 * page_size
    pairs = [
        (0, rows - 1),
        (rows - 1, 1 % rows),
        (-1, 0),
        (0, -1),
        (rows, 0),
        (1 % rows, rows),
        (-7, 2**31 - 1),
    ]
    after = jax.jit(copy_tokens)(cache, ints([a for a, _ in pairs]), ints([b for _, b in pairs]))
    for name in cache.pools():
        wanted, source = by_slot(cache, name), by_slot(cache, name)
        for a, b in pairs[:2]:
            wanted[b // page_size, :, b % page_size] = source[a // page_size, :, a % page_size]
        np.testing.assert_array_equal(_bytes(by_slot(after, name)), _bytes(wanted), err_msg=name)
    assert cases.pool_bytes(after) != cases.pool_bytes(cache)


def test_sources_are_read_before_targets_are_written():
    """A chain and a swap copy the old values."""
    cache = random_cache(form_cases.layout(index="fp4"))
    after = copy_tokens(cache, ints([0, 1, 2, 5, 9]), ints([1, 2, 3, 9, 5]))
    for name in cache.pools():
        old, new = by_slot(cache, name), by_slot(after, name)
        for a, b in ((0, 1), (1, 2), (2, 3), (5, 9), (9, 5)):
            np.testing.assert_array_equal(_bytes(new[b // 4, :, b % 4]), _bytes(old[a // 4, :, a % 4]))


@pytest.mark.parametrize(("key", "index", "page_size"), FORMS)
def test_pages(key, index, page_size):
    """Slots of one cache in another with more slots: every leaf, every layer, and nothing else."""
    layout = form_cases.layout(key=key, index=index, page_size=page_size)
    source, target = random_cache(layout), cases.poisoned(layout, slots=5)
    after = jax.jit(copy_pages)(source, target, ints([2, 0, -1, 1, 3]), ints([0, 4, 2, -1, 1]))
    for name in source.pools():
        wanted = by_slot(target, name)
        wanted[0], wanted[4] = by_slot(source, name)[2], by_slot(source, name)[0]
        np.testing.assert_array_equal(_bytes(by_slot(after, name)), _bytes(wanted), err_msg=name)


@pytest.mark.parametrize("copy", [copy_tokens, lambda cache, a, b: copy_pages(cache, cache, a, b)])
def test_in_place_and_without_a_new_trace(copy):
    """Donated pools are reused, whatever their size; other rows are data, not another program."""
    layout, traces = form_cases.layout(key="nvfp4", index="fp4"), []

    def counted(cache, a, b):
        traces.append(1)
        return copy(cache, a, b)

    jitted = jax.jit(counted, donate_argnums=0)
    temp = []
    for slots in (100, 400):
        abstract = Cache.abstract(layout, slots)
        index = jax.ShapeDtypeStruct((3,), jnp.int32)
        stats = jitted.lower(abstract, index, index).compile().memory_analysis()
        assert stats.alias_size_in_bytes >= abstract.nbytes
        temp.append(stats.temp_size_in_bytes)
    assert abs(temp[0] - temp[1]) <= 4096
    cache, before = Cache.create(layout, 7), len(traces)
    for a in range(3):
        cache = jitted(cache, ints([a, 0, 1]), ints([4, 5, 6]))
    assert len(traces) == before + 1


def test_errors():
    cache = Cache.create(form_cases.layout(), 3)
    with pytest.raises(
        ValueError,
        match=r"copy_tokens: source_rows is int32\[2\] and target_rows int32\[1\]; wanted int32\[n\]",
    ):
        copy_tokens(cache, ints([0, 1]), ints([0]))
    with pytest.raises(ValueError, match=r"copy_pages: source_slots is float32\[1\].*Pair every source"):
        copy_pages(cache, cache, jnp.zeros(1), ints([0]))
    other = Cache.create(form_cases.layout(index="fp4"), 3)
    with pytest.raises(
        ValueError,
        match=r"copy_pages: the layouts differ.*index_key 136 B.*Create both caches with one layout",
    ):
        copy_pages(cache, other, ints([0]), ints([0]))


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)
