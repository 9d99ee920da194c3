"""Faults of addresses and page bytes."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import cases
from dsa_jax.cache import Cache
from dsa_jax.codec import pack_index_pages
from dsa_jax.config import preset
from dsa_jax.layout import CacheLayout, PageIndex
from dsa_jax.quant import dequantize_fp8


def test_b01_byte_offsets_beyond_two_gibibytes():
    """No op multiplies a page by its bytes: pages and offsets are int32 pairs, byte offsets are Python integers."""
    page_bytes = 8448
    assert PageIndex(0, 1, 0).page(254_200) * page_bytes + 16 * 128 == 2**31
    assert PageIndex(0, 1, 0).page(254_201) * page_bytes == 2_147_490_048
    layout = CacheLayout.create(preset("deepseek-v3.2"), page_size=64)
    index_key = next(spec for spec in layout.arrays(5000) if spec.name == "index_key")
    assert index_key.shape == (61 * 5000, 64, 128)
    assert np.prod(index_key.shape, dtype=np.int64) > 2**31
    pages = PageIndex(0, 61, 60).page(jnp.array([4999, -1], jnp.int32))
    assert pages.tolist() == [304_999, -1]


def test_b01_more_rows_than_int32_counts_are_refused():
    """slot * page_size + offset is an int32: a pool that needs more is refused when it is built, by name."""
    layout = cases.layout(page_size=64)
    Cache.abstract(layout, 2**25)  # the last row is 2**31 - 1
    for slots in (2**25 + 1, 2**40):
        with pytest.raises(ValueError, match=r"Cache.abstract: .*slots"):
            Cache.abstract(layout, slots)


@pytest.mark.parametrize("tokens", [65_535, 65_536])
def test_b03_more_than_65535_query_rows(tokens):
    """Row i attends row i alone, whose value says i: every output is right on both sides of the limit of a launch grid."""
    layout = cases.layout(page_size=64)
    cache = Cache.create(layout, 1024)
    values = jnp.broadcast_to(jnp.arange(65_536, dtype=jnp.float32)[:, None], (65_536, 12)).reshape(
        1024, 1, 64, 12
    )
    pages = cache.pages("key").reshape(1024, 3, 64, 12).at[:, 1:2].set(values)
    cache = cache.replace_pages(key=pages.reshape(-1, 64, 12))
    rows = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    out, lse = cases.sparse_mla(jnp.zeros((tokens, 1, 12)), cache, 1, rows, 1.0)
    np.testing.assert_array_equal(out[:, 0, 0], np.arange(tokens))
    np.testing.assert_array_equal(lse, np.zeros((tokens, 1)))


@pytest.mark.parametrize(
    ("page_size", "rule"),
    [(1, "ue8m0"), (4, "ue8m0"), (32, "ue8m0"), (64, "ue8m0"), (128, "ue8m0"), (4, "fp32")],
)
def test_b04_pages_are_planar(page_size, rule):
    """Token t holds ones times (t mod 8) + 1: gathered exactly; its scale lies at T*128 + 4t of the packed page."""
    layout = cases.layout(index="fp8", page_size=page_size, scale_rule=rule)
    facts = cases.batch([(page_size, page_size)], page_size=page_size, gathered=page_size)
    keys = np.repeat((np.arange(page_size) % 8 + 1.0)[:, None], 128, axis=1).astype(np.float32)
    cache = cases.append_index_k(cases.poisoned(layout), 0, keys, step := cases.step(facts, layout))
    data, scale = cases.gather_index_k(cache, 0, step)
    np.testing.assert_allclose(dequantize_fp8(data, scale), keys, rtol=0 if rule == "ue8m0" else 1e-7)
    packed = np.asarray(pack_index_pages(cache.pages("index_key"), cache.pages("index_scale")))
    page = packed[2 * facts.tables[0][0]]
    for t in range(page_size):
        start = page_size * 128 + 4 * t
        assert page[start : start + 4].tobytes() == np.asarray(scale)[t].tobytes()


@pytest.mark.parametrize("manager", ["v1", "v2"])
def test_b05_layers_of_a_pool_do_not_mix(manager):
    """Two slots, three layers: each reads its own keys and scales, and a write to one leaves the others' bytes."""
    layout = cases.layout(manager, index="fp8", full=(True, True, True))
    facts = cases.batch([(8, 8)], slots=2, gathered=8)
    step, rng = cases.step(facts, layout), np.random.default_rng(0)
    keys = (
        rng.normal(size=(3, 8, 128)).astype(np.float32) * np.array([1, 100, 1e-3], np.float32)[:, None, None]
    )
    cache = Cache.create(layout, 2)
    for layer in range(3):
        cache = cases.append_index_k(cache, layer, keys[layer], step)
    for layer in range(3):
        data, scale = cases.gather_index_k(cache, layer, step)
        wanted, wanted_scale = cases.stored_keys(layout, keys[layer])
        np.testing.assert_array_equal(data, wanted)
        np.testing.assert_array_equal(scale, wanted_scale)
    after = cases.append_index_k(cache, 1, keys[1] + 1, step)
    for name in ("index_key", "index_scale"):
        changed = np.asarray(after.pages(name) != cache.pages(name)).reshape(2, 3, -1).any(axis=(0, 2))
        assert changed.tolist()[::2] == [False, False]
    assert np.asarray(after.pages("index_key") != cache.pages("index_key")).any()


def test_b09_one_place_knows_the_width():
    """A pool of another width or dtype is refused by name; bytes are never taken for numbers."""
    layout = cases.layout(index="fp8")
    cache = Cache.create(layout, 3)
    with pytest.raises(ValueError, match=r"index_key is uint8\[6, 4, 132\], wanted uint8\[6, 4, 128\]"):
        replace(cache, index_key=jnp.zeros((6, 4, 132), jnp.uint8)).validate()
    with pytest.raises(ValueError, match="index_key is float8_e4m3fn"):
        replace(cache, index_key=jnp.zeros((6, 4, 128), jnp.float8_e4m3fn)).validate()
    assert layout.bytes_per_token_by_role["index_key"] == 2 * 132  # pyright: ignore[reportArgumentType]
