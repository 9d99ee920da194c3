"""The cache as a value: bytes, shapes, index maps, checks."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from dsa_jax.cache import Cache
from dsa_jax.layout import CacheLayout, Role

FULLS = [(True,), (True, False, True), (True, True, False, False, False, True), (False, False)]


@pytest.mark.parametrize("manager", ["v1", "v2"])
@pytest.mark.parametrize("full", FULLS)
@pytest.mark.parametrize(
    ("key", "index", "page_size"), [("bf16", "fp8", 64), ("f32", "f32", 1), ("bf16", "f32", 16)]
)
def test_bytes(manager, full, key, index, page_size):
    """The pools sum to slots * page_size * bytes_per_token, worked out by hand; abstract says it without allocating."""
    layout = cases.layout(manager, index=index, key=key, page_size=page_size, full=full)
    latent = (cases.LATENT + cases.ROPE) * (2 if key == "bf16" else 4)
    indexer = 132 if index == "fp8" else 4 * 8
    assert layout.bytes_per_token == latent * len(full) + indexer * sum(full)
    cache, abstract = Cache.create(layout, 5), Cache.abstract(layout, 5)
    assert cache.nbytes == abstract.nbytes == 5 * page_size * layout.bytes_per_token
    assert sum(pool.nbytes for pool in cache.pools().values()) == cache.nbytes
    assert cache.slots == abstract.slots == 5
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert shapes(cache) == shapes(abstract)
    cache.validate()


def test_shapes_of_both_managers():
    """V2 counts pages, V1 keeps slots and compact rows apart: two of three layers own an indexer."""
    new, old = (Cache.create(cases.layout(m, index="fp8", key="bf16", page_size=16), 5) for m in ("v2", "v1"))
    assert new.key.shape == (15, 16, 12)
    assert old.key.shape == (5, 3, 16, 12)
    assert new.index_key is not None
    assert old.index_key is not None
    assert (new.index_key.shape, new.index_key.dtype) == ((10, 16, 128), jnp.uint8)
    assert old.index_key.shape == (5, 2, 16, 128)
    assert new.index_scale is not None
    assert (new.index_scale.shape, new.index_scale.dtype) == ((10, 16), jnp.float32)
    assert old.pages("key").shape == new.pages("key").shape
    assert old.pages("index_scale").shape == new.pages("index_scale").shape


@pytest.mark.parametrize("manager", ["v1", "v2"])
def test_index_maps_are_leaves(manager):
    """The state describes itself: offsets by layer, -1 without an indexer, as arrays that a trace can index."""
    cache = Cache.create(cases.layout(manager, full=(True, False, False, True, True)), 2)
    assert cache.key_offsets.tolist() == [0, 1, 2, 3, 4]
    assert cache.index_offsets.tolist() == [0, -1, -1, 1, 2]
    assert cache.index_offsets.dtype == jnp.int32
    assert len(jax.tree.leaves(cache)) == 4


@pytest.mark.parametrize("manager", ["v1", "v2"])
def test_page_of(manager):
    """slot * scale + layer offset by number and traced; -1, slots past the pool and layers without an indexer give -1."""
    cache = Cache.create(cases.layout(manager), 9)
    slots = jnp.array([[7, -1], [0, -5]], jnp.int32)
    assert cache.page_of(Role.INDEX_KEY, 2, slots).tolist() == [[15, -1], [1, -1]]
    assert cache.page_of(Role.KEY, 1, slots).tolist() == [[22, -1], [1, -1]]
    traced = jax.jit(lambda layer: cache.page_of(Role.INDEX_KEY, layer, slots))
    assert traced(2).tolist() == [[15, -1], [1, -1]]
    for missing in (1, 3, -1, 2**31 - 1, -(2**31)):
        assert traced(jnp.int32(missing)).tolist() == [[-1, -1], [-1, -1]]
    with pytest.raises(ValueError, match="shared-indexer layer"):
        cache.page_of(Role.INDEX_KEY, 1, slots)
    with pytest.raises(ValueError, match="layer -1 is out of range"):
        cache.page_of(Role.KEY, -1, slots)


def test_every_page_belongs_to_one_layer_and_slot():
    """Over all layers and slots, page_of is a bijection onto the pool."""
    for manager in ("v1", "v2"):
        layout = cases.layout(manager, full=(True, False, True, True))
        cache, slots = Cache.create(layout, 5), jnp.arange(5, dtype=jnp.int32)
        for role, layers, name in ((Role.KEY, range(4), "key"), (Role.INDEX_KEY, (0, 2, 3), "index_key")):
            pages = np.concatenate([np.asarray(cache.page_of(role, layer, slots)) for layer in layers])
            assert sorted(pages.tolist()) == list(range(cache.pages(name).shape[0]))


def test_pages_and_replace_pages_are_inverse():
    layout = cases.layout("v1", index="fp8")
    cache = cases.poisoned(layout, byte=0x5A)
    again = cache.replace_pages(**{name: cache.pages(name) for name in cache.pools()})
    assert cases.pool_bytes(again) == cases.pool_bytes(cache)
    again.validate()
    changed = cache.replace_pages(index_key=jnp.zeros_like(cache.pages("index_key")))
    assert not np.asarray(changed.index_key).any()
    assert cases.pool_bytes(changed)["key"] == cases.pool_bytes(cache)["key"]


def test_donation_reuses_every_buffer():
    """Each leaf owns its buffer: donating a fresh cache neither warns nor fails, and the old one is gone."""
    cache = Cache.create(cases.layout(index="fp8"), 3)
    out = jax.jit(lambda c: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), c), donate_argnums=0)(cache)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
    assert out.key_offsets.tolist() == [1, 2, 3]


def test_validate_names_every_difference():
    layout = cases.layout(index="fp8")
    cache = Cache.create(layout, 3)
    wrong = replace(
        cache,
        index_key=jnp.zeros((6, 4, 64), jnp.uint8),
        index_scale=None,
        key_rope=jnp.zeros((1,)),
        index_offsets=jnp.array([0, 1, 2], jnp.int32),
    )
    with pytest.raises(ValueError, match="Cache.validate: ") as error:
        wrong.validate()
    message = str(error.value)
    assert "index_key is uint8[6, 4, 64], wanted uint8[6, 4, 128]" in message
    assert "index_scale is nothing, wanted float32[6, 4]" in message
    assert "key_rope is present, wanted nothing" in message
    assert "index_offsets differs from the layout's [0, -1, 1]" in message
    assert "Build the cache with Cache.create" in message
    cache.validate()


def test_wrong_dtype_is_seen():
    cache = Cache.create(cases.layout(key="bf16"), 3)
    with pytest.raises(ValueError, match=r"key is float32\[9, 4, 12\], wanted bfloat16"):
        replace(cache, key=cache.key.astype(jnp.float32)).validate()


@pytest.mark.parametrize("slots", [0, -3, 1.5, "4", None, True])
def test_slots_are_checked(slots):
    for make in (Cache.create, Cache.abstract):
        with pytest.raises(ValueError, match="slots"):
            make(cases.layout(), slots)


def test_roles_in_one_pool_are_refused_by_name():
    """FP8 latents of 132 elements and FP8 index keys take 132 bytes a token each: coalescing puts them into one pool."""
    model = replace(cases.config(), kv_lora_rank=128, qk_rope_head_dim=4, index_head_dim=128)
    layout = CacheLayout.create(model, key_form="fp8", index_form="fp8", page_size=16)
    for make in (Cache.create, Cache.abstract):
        with pytest.raises(
            ValueError,
            match=rf"{make.__qualname__}: .*key and index_key have 2112 bytes per page.*manager='v1'",
        ):
            make(layout, 2)
    Cache.create(
        CacheLayout.create(model, manager="v1", key_form="fp8", index_form="fp8", page_size=16), 2
    ).validate()


def test_repr():
    """Short, and printable for trees of anything, since JAX prints such trees in its own errors."""
    cache = Cache.create(cases.layout(index="fp8"), 3)
    assert "v2" in repr(cache)
    assert "3 slots x 4 tokens" in repr(cache)
    assert len(repr(cache)) < 200
    for tree in (
        jax.tree.map(lambda x: 0, cache),
        jax.tree.map(lambda x: None, cache),
        Cache.abstract(cache.layout, 3),
    ):
        assert repr(tree)


def test_layout_is_static():
    """Same layout, same trace; another layout, another one."""
    traces = []

    @jax.jit
    def count(cache):
        traces.append(cache.layout.manager)
        return cache.key

    for manager in ("v1", "v2", "v1", "v2"):
        count(Cache.create(cases.layout.__wrapped__(manager), 2))
    assert traces == ["v1", "v2"]
