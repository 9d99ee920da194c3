"""Storage forms on a CUDA card (``pytest -m gpu``): the same bytes as anywhere else, and pools beyond 2 and 4 GiB."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import form_cases
import numpy_forms
import test_forms_ops
from contracts.test_limits_of_attention import check_attention
from dsa_jax import ops
from dsa_jax.cache import Cache
from dsa_jax.forms import INDEX_FORMS, KEY_FORMS

pytestmark = pytest.mark.gpu
TOKENS = 6


@pytest.mark.parametrize("form", INDEX_FORMS)
@pytest.mark.parametrize("rule", ["ue8m0", "fp32"])
def test_index_bytes(form, rule):
    """Quantising, writing and reading in one compiled function: the bytes of the NumPy model, every element."""
    layout = form_cases.layout(index=form, scale_rule=rule)
    facts = cases.batch([(40, 40)], slots=cases.SLOTS, gathered=40)
    keys = test_forms_ops.normal(40, 128) * 2.0 ** np.random.default_rng(0).integers(-9, 9, (40, 1))
    keys = keys.astype(np.float32)

    @jax.jit
    def both(cache, keys, step):
        cache = ops.append_index_k(cache, 2, keys, step)
        return cache, ops.gather_index_k(cache, 2, step)

    cache, (data, scale) = both(cases.poisoned(layout), keys, cases.step(facts, layout))
    expected = form_cases.write_keys(cases.poisoned(layout), 2, facts.derive()["rows"].tolist(), keys)
    assert cases.pool_bytes(cache) == cases.pool_bytes(expected)
    wanted = numpy_forms.index_entries(keys, form, scale_rule=rule)
    np.testing.assert_array_equal(data, wanted["index_key"])
    if form != "f32":
        np.testing.assert_array_equal(scale, wanted["index_scale"])


@pytest.mark.parametrize("form", KEY_FORMS)
def test_latent_bytes(form):
    test_forms_ops.test_latents("v2", form, form_cases.page_size_of(form))


@pytest.mark.parametrize("form", INDEX_FORMS)
def test_scores(form):
    test_forms_ops.test_paged_scores("v2", form, 16)


@pytest.mark.parametrize("form", KEY_FORMS)
def test_attention(form):
    test_forms_ops.test_attention("v2", form)


def rows_around(page_bytes: int, page_size: int, limit: int) -> list[int]:
    """Rows whose bytes in an array of one layer lie before, at and past a byte limit."""
    at = limit // (page_bytes // page_size)
    return [1, at - 1, at, at + 1, at + page_size, at + 3 * page_size - 1]


WRITERS = pytest.mark.parametrize("implementation", ["triton", "xla"])


@WRITERS
@pytest.mark.parametrize("gibibytes", [2, 4])
@pytest.mark.parametrize(("index", "page_bytes"), [("fp8", 8192), ("fp4", 4096), ("f32", 32768)])
def test_index_pools_beyond_int32_bytes(gibibytes, index, page_bytes, implementation):
    """B01: writes on both sides of 2^31 and 2^32 bytes of the array read back, and no other page changes."""
    layout = form_cases.layout(key="nvfp4", index=index, page_size=64, full=(True,))
    rows = rows_around(page_bytes, 64, gibibytes << 30)
    step = far_step(layout, rows)
    cache = Cache.create(layout, rows[-1] // 64 + 2)
    keys = test_forms_ops.normal(TOKENS, 128)
    append = jax.jit(partial(ops.append_index_k, implementation=implementation), donate_argnums=0)
    cache = append(cache, 0, keys, step)
    data, scale = cases.gather_index_k(cache, 0, step, implementation=implementation)
    wanted = numpy_forms.index_entries(keys, index)
    np.testing.assert_array_equal(data, wanted["index_key"])
    if index != "f32":
        np.testing.assert_array_equal(scale, wanted["index_scale"])
    for name in ("index_key", "index_scale"):
        if name in cache.pools():
            assert touched(cache, name) == sorted({row // 64 for row in rows})
    assert not np.asarray(jnp.any(cache.key)) and not np.asarray(jnp.any(cache.key_scale))


@WRITERS
@pytest.mark.parametrize("gibibytes", [2, 4])
@pytest.mark.parametrize(
    ("key", "page_bytes"),
    [("bf16", 73_728), ("f32", 147_456), ("fp8", 36_864), ("nvfp4", 18_432), ("fp8_ds_mla", 32_768)],
)
def test_latent_pools_beyond_int32_bytes(gibibytes, key, page_bytes, implementation):
    """The same for latents, and attention finds them."""
    model = dataclasses.replace(cases.config((True,), 128), kv_lora_rank=512, qk_rope_head_dim=64)
    layout = form_cases.CacheLayout.create(model, key_form=key, index_form="fp4", page_size=64)
    rows = rows_around(page_bytes, 64, gibibytes << 30)
    step = far_step(layout, rows)
    latent, rope = form_cases.latents(layout, TOKENS)
    cache = Cache.create(layout, rows[-1] // 64 + 2)
    append = jax.jit(partial(ops.append_latent, implementation=implementation), donate_argnums=0)
    cache = append(cache, 0, latent, rope, step)
    assert touched(cache, "key") == sorted({row // 64 for row in rows})
    values = numpy_forms.latent_values(numpy_forms.latent_entries(latent, rope, key), key)
    check_attention(cache, np.array(rows, np.int32), values, ops.sparse_mla)


def far_step(layout, rows):
    """A step of one context whose tokens lie at these rows."""
    facts = cases.batch([(TOKENS, TOKENS)], page_size=64, gathered=TOKENS)
    far = jnp.asarray(rows, jnp.int32)
    return dataclasses.replace(cases.step(facts, layout), rows=far, gather_rows=far)


def touched(cache: Cache, name: str) -> list[int]:
    """Pages of a pool that are not all zeros."""
    pages = cache.pages(name)
    return jnp.any(pages.reshape(pages.shape[0], -1) != 0, axis=1).nonzero()[0].tolist()
