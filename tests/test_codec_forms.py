"""Packed pages of every form and page size, both ways, against a byte model that knows nothing of the library."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import form_cases
import numpy_forms
from dsa_jax.cache import Cache
from dsa_jax.codec import pack_index_pages, pack_pages, unpack_index_pages, unpack_pages
from dsa_jax.forms import INDEX_FORMS
from dsa_jax.layout import Role

PAGE_SIZES = (1, 16, 32, 64, 128)
SLOTS = 3


def random_cache(layout, seed: int = 0) -> Cache:
    """Every byte of every pool at random, NaN patterns among them."""
    rng = np.random.default_rng(seed)
    cache = Cache.create(layout, SLOTS)
    fill = lambda pool: rng.integers(0, 256, (*pool.shape, pool.dtype.itemsize), np.uint8).view(pool.dtype)[
        ..., 0
    ]
    return replace(cache, **{name: jnp.asarray(fill(pool)) for name, pool in cache.pools().items()})


def packed_by_hand(cache: Cache, role: Role, form: str) -> list[bytes]:
    """Bytes of each page of a role, token by token or plane by plane, from the NumPy byte model."""
    names = [name for name in cache.pools() if (name.startswith("index")) == (role == Role.INDEX_KEY)]
    pools = {name: np.asarray(cache.pages(name)) for name in names}
    return [
        numpy_forms.page_bytes({name: pool[page] for name, pool in pools.items()}, form)[str(role)]
        for page in range(len(pools[names[0]]))
    ]


def check(cache: Cache, role: Role, form: str, token_bytes: int) -> None:
    """The bytes are the model's; reading them into an empty cache gives the same pools; packing again the same bytes."""
    packed = jax.jit(pack_pages, static_argnums=1)(cache, role)
    by_hand = packed_by_hand(cache, role, form)
    assert (packed.dtype, packed.shape) == (jnp.uint8, (len(by_hand), cache.layout.page_size * token_bytes))
    assert [row.tobytes() for row in np.asarray(packed)] == by_hand
    empty = Cache.create(cache.layout, SLOTS)
    back = jax.jit(unpack_pages, static_argnums=1)(empty, role, packed)
    for name, raw in cases.pool_bytes(back).items():
        own = cache.role(name) == role
        assert raw == cases.pool_bytes(cache if own else empty)[name], name
    np.testing.assert_array_equal(pack_pages(back, role), packed)


@pytest.mark.parametrize("manager", ["v1", "v2"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("form", INDEX_FORMS)
def test_index_pages(manager, page_size, form):
    """Planar: 132, 68 or 512 bytes a token, the scales behind all codes."""
    cache = random_cache(form_cases.layout(manager, index=form, page_size=page_size))
    check(cache, Role.INDEX_KEY, form, {"fp8": 132, "fp4": 68, "f32": 512}[form])


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("form", ["bf16", "f32", "fp8", "nvfp4"])
def test_latent_pages(page_size, form):
    """One array each, and for NVFP4 a second buffer of block scales."""
    cache = random_cache(form_cases.layout(key=form, page_size=page_size))
    check(cache, Role.KEY, form, {"bf16": 64, "f32": 128, "fp8": 32, "nvfp4": 16}[form])
    if form == "nvfp4":
        check(cache, Role.KEY_BLOCK_SCALE, form, 2)


@pytest.mark.parametrize("manager", ["v1", "v2"])
def test_656_byte_tokens(manager):
    """Interleaved: token t is bytes 656 t to 656 t + 656: codes, four scales, 64 bfloat16."""
    cache = random_cache(form_cases.layout(manager, key="fp8_ds_mla", page_size=64))
    check(cache, Role.KEY, "fp8_ds_mla", 656)
    packed = np.asarray(pack_pages(cache, Role.KEY))
    token = packed[4, 5 * 656 : 6 * 656]
    assert cache.key_scale is not None and cache.key_rope is not None
    assert token[:512].tobytes() == np.asarray(cache.pages("key"))[4, 5].tobytes()
    assert token[512:528].tobytes() == np.asarray(cache.pages("key_scale"))[4, 5].tobytes()
    assert token[528:].tobytes() == np.asarray(cache.pages("key_rope"))[4, 5].tobytes()


def test_the_released_widths():
    """A page of 64 tokens is 8,448 or 4,352 bytes of index keys, 41,984 of packed tokens; scales begin where they should."""
    cache = random_cache(form_cases.layout(key="fp8_ds_mla", index="fp4", page_size=64))
    assert pack_pages(cache, Role.KEY).shape == (SLOTS * 3, 41_984)
    fp4 = np.asarray(pack_pages(cache, Role.INDEX_KEY))
    assert fp4.shape == (SLOTS * 2, 4_352)
    assert fp4[1, 4_096:4_100].tobytes() == np.asarray(cache.pages("index_scale"))[1, 0].tobytes()
    fp8 = random_cache(form_cases.layout(index="fp8", page_size=64))
    assert np.asarray(pack_pages(fp8, Role.INDEX_KEY)).shape == (SLOTS * 2, 8_448)


def test_index_pages_without_a_cache():
    """The functions on plain arrays give the same bytes, FP4's int32 scales included."""
    cache = random_cache(form_cases.layout(index="fp4", page_size=16))
    data, scale = cache.pages("index_key"), cache.pages("index_scale")
    packed = pack_index_pages(data, scale)
    np.testing.assert_array_equal(packed, pack_pages(cache, Role.INDEX_KEY))
    codes, words = unpack_index_pages(packed, 16, scale_dtype=jnp.int32)
    assert words.dtype == jnp.int32
    np.testing.assert_array_equal(codes, data)
    np.testing.assert_array_equal(words, scale)


def test_packed_pages_are_where_the_layout_says():
    """byte_offset of every array of the layout, on the bytes of the codec: one fact, two places that must agree."""
    cache = random_cache(form_cases.layout(key="fp8_ds_mla", index="fp4", page_size=64))
    for spec in cache.layout.arrays(SLOTS):
        flat = np.asarray(pack_pages(cache, spec.role)).reshape(-1)
        pages = np.asarray(cache.pages(spec.name))
        for page, token in ((0, 0), (4, 63), (5, 17)):
            start = spec.byte_offset(page, token)
            assert flat[start : start + spec.token_bytes].tobytes() == pages[page, token].tobytes()


def test_errors():
    cache = random_cache(form_cases.layout(key="bf16", index="fp4"))
    with pytest.raises(
        ValueError, match=r"pack_pages: no layer of this cache has key_block_scale pages \(forms bf16/fp4\)"
    ):
        pack_pages(cache, Role.KEY_BLOCK_SCALE)
    shared = Cache.create(form_cases.layout(full=(False, False)), 2)
    with pytest.raises(
        ValueError, match=r"unpack_pages: no layer of this cache has index_key pages.*Ask for one of key"
    ):
        unpack_pages(shared, Role.INDEX_KEY, jnp.zeros((1, 1), jnp.uint8))
    packed = pack_pages(cache, Role.INDEX_KEY)
    for wrong in (packed[:5], packed[:, :-4], packed.astype(jnp.int8), packed.reshape(-1)):
        with pytest.raises(
            ValueError, match=r"unpack_pages: packed is .*wanted uint8\[6, 272\].*Create the cache with the"
        ):
            unpack_pages(cache, Role.INDEX_KEY, wrong)


def test_planted_interleaving_is_seen(monkeypatch):
    """An index page packed token by token has the right size and the wrong bytes."""
    monkeypatch.setattr("dsa_jax.codec._interleaved", lambda specs: len(specs) > 1)
    layout = form_cases.layout.__wrapped__(index="fp4", page_size=16, scale_rule="fp32")  # a fresh trace
    with pytest.raises(AssertionError):
        check(random_cache(layout), Role.INDEX_KEY, "fp4", 68)
