"""Faults that come with JAX: index traps and hidden copies."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from dsa_jax import ops
from dsa_jax.cache import Cache
from dsa_jax.config import preset
from dsa_jax.layout import CacheLayout
from dsa_jax.metadata import Bucket, StepMetadata


def five_rows(byte: int = 0xFF) -> Cache:
    """A pool of five rows: one layer, pages of one token."""
    return cases.poisoned(cases.layout(page_size=1, full=(True,)), slots=5, byte=byte)


@pytest.mark.parametrize("write", ["index", "latent"])
def test_b64_padding_writes_nowhere(write):
    """Rows [2, -1, 7] of a pool of five, with drop: only row 2 changes; -1 does not reach row 4."""
    cache = five_rows()
    step = cases.step(cases.batch(decodes=[(1, 1)] * 3, page_size=1, slots=5), cache.layout)
    step = replace(step, rows=jnp.array([2, -1, 7], jnp.int32))
    if write == "index":
        after, name = cases.append_index_k(cache, 0, np.ones((3, 8), np.float32), step), "index_key"
    else:
        ones = np.ones((3, 8), np.float32)
        after, name = cases.append_latent(cache, 0, ones, ones[:, :4], step), "key"
    written = np.asarray(after.pages(name) == 1).reshape(5, -1)
    assert written.all(axis=1).tolist() == [False, False, True, False, False]
    assert written.any(axis=1).tolist() == [False, False, True, False, False]
    np.testing.assert_array_equal(  # the first, plain JAX way does reach row 4
        jnp.zeros(5).at[jnp.array([2, -1, 7])].set(1.0, mode="drop"), [0, 0, 1, 0, 1]
    )


def test_b64_padding_reads_nothing():
    """Rows [2, -1, 7]: one value and twice zero; in attention the two do not exist."""
    cache = five_rows(byte=0x11)
    meta = StepMetadata.create(
        cache.layout,
        Bucket(context_requests=1, context_tokens=1, table_width=3, gathered_keys=3),
        [[2, 0, 1]],
        [3],
        [1],
    )
    step = replace(cases.derive(meta), gather_rows=jnp.array([2, -1, 7], jnp.int32))
    data, _ = cases.gather_index_k(cache, 0, step)
    assert np.asarray(data).all(axis=1).tolist() == [True, False, False]
    assert not np.asarray(data)[1:].any()
    q = np.random.default_rng(0).normal(size=(1, 2, 12)).astype(np.float32)
    cache = cases.write(five_rows(), "key", 0, [2], np.ones((1, 12), np.float32))
    out, _ = cases.sparse_mla(q, cache, 0, np.array([[2, -1, 7]], np.int32), 1.0)
    np.testing.assert_allclose(out, np.ones((1, 2, 8)), rtol=1e-6)


@pytest.mark.parametrize("manager", ["v1", "v2"])
def test_b66_a_large_pool_is_not_copied(manager):
    """512 MiB and more, never allocated: write four tokens, then score over the pages; temporaries stay far below."""
    layout = CacheLayout.create(preset("deepseek-v3.2"), manager=manager, page_size=64, layers=(0, 1, 2))
    cache = Cache.abstract(layout, 6000)
    assert cache.nbytes > 512 << 20
    meta = StepMetadata.create(layout, Bucket(decode_requests=4, table_width=8), [], [], [])

    def step(cache, meta, k, q, weights):
        derived = meta.derive()
        cache = ops.append_index_k(cache, 1, k, derived)
        return cache, ops.paged_mqa_logits(q, weights, cache, 1, derived)

    arguments = cache, meta, jnp.ones((4, 128)), jnp.ones((4, 64, 128), jnp.uint8), jnp.ones((4, 64))
    analysis = jax.jit(step, donate_argnums=0).lower(*arguments).compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 16 << 20
    assert analysis.alias_size_in_bytes == cache.nbytes + 2 * 4 * 3


def test_b66_without_donation_the_old_state_is_readable():
    cache, step = (
        five_rows(),
        cases.step(cases.batch(decodes=[(1, 1)], page_size=1, slots=5), five_rows().layout),
    )
    before = cases.pool_bytes(cache)
    after = cases.append_index_k(cache, 0, np.ones((1, 8), np.float32), step)
    assert cases.pool_bytes(cache) == before != cases.pool_bytes(after)
