"""A pipeline stage whose layers all share: no index pool, index ops that refuse, and a step that runs all the same."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import form_cases
from dsa_jax import ops, xla
from dsa_jax.cache import Cache
from dsa_jax.config import preset
from dsa_jax.layout import CacheLayout, Role
from numpy_model import attention

STAGE = (3, 4, 5)
"""Layers of GLM-5.2 between the full layers 2 and 6."""
HEADS, SCALE = 2, 0.3


def stage(manager="v2", key="bf16", index="fp8", page_size=4) -> CacheLayout:
    """The middle stage of a model of six small layers, full ones at 0 and 1."""
    latent, rope = form_cases.widths(key)
    model = cases.config((True, True, False, False, False, True), 128)
    model = dataclasses.replace(model, kv_lora_rank=latent, qk_rope_head_dim=rope)
    return CacheLayout.create(
        model, manager=manager, key_form=key, index_form=index, page_size=page_size, layers=(2, 3, 4)
    )


@pytest.mark.parametrize("manager", ["v1", "v2"])
def test_the_index_pool_has_no_bytes(manager):
    layout = CacheLayout.create(preset("glm-5.2"), manager=manager, layers=STAGE)
    assert layout.full == (False, False, False)
    assert layout.bytes_per_token == 3 * 1152
    assert layout.scale(Role.INDEX_KEY) == 0
    cache = Cache.abstract(layout, 16)
    assert (cache.index_key, cache.index_scale) == (None, None)
    assert cache.nbytes == 16 * 64 * 3 * 1152
    assert set(cache.pools()) == {"key"}
    small = Cache.create(stage(manager), 5)
    assert small.index_offsets.tolist() == [-1, -1, -1]
    small.validate()


@pytest.mark.parametrize("layer", [0, 2, jnp.int32(1)])
@pytest.mark.parametrize("index", ["fp8", "fp4", "f32"])
def test_index_ops_refuse_before_they_read(layer, index, monkeypatch):
    """A number and a traced layer alike; nothing of the reference implementation is even entered."""
    layout = stage(index=index)
    facts = cases.batch([(3, 2)], decodes=[(5, 1)])
    step, cache = cases.step(facts, layout), Cache.create(layout, cases.SLOTS)
    for name in ("append_index_k", "gather_index_k", "paged_mqa_logits"):
        monkeypatch.setattr(xla, name, lambda *a: pytest.fail("the op was entered"))
    q, _, _ = form_cases.query(layout, np.ones((3, HEADS, 128), np.float32))
    q, weights = jax.tree.map(jnp.asarray, q), jnp.ones((3, HEADS))
    for call in (
        lambda layer: ops.append_index_k(cache, layer, jnp.ones((3, 128)), step),
        lambda layer: ops.gather_index_k(cache, layer, step),
        lambda layer: ops.paged_mqa_logits(q, weights, cache, layer, step),
        lambda layer: ops.select_tokens(q, weights, cache, layer, step, 2),
    ):
        with pytest.raises(
            ValueError, match=r"shared-indexer layer.*use the selection of the nearest full layer"
        ):
            call(layer) if isinstance(layer, int) else jax.jit(call)(layer)


@pytest.mark.sample(0, 3, 4, 7, 8)
@pytest.mark.parametrize("manager", ["v1", "v2"])
@pytest.mark.parametrize("key", ["bf16", "f32", "fp8", "nvfp4", "fp8_ds_mla"])
def test_a_step_runs(manager, key):
    """The selection comes from the stage before; latents are written and attended in every layer, in one trace."""
    layout = stage(manager, key, page_size=form_cases.page_size_of(key))
    facts, traces = cases.batch(decodes=[(6, 1), (3, 1)], page_size=layout.page_size), []
    meta = cases.metadata(facts, layout)

    def step_of(cache, meta, latents, ropes, q, positions):
        traces.append(1)
        step = meta.derive()
        rows, outputs = ops.to_rows(positions, step), []
        for layer in range(3):
            cache = ops.append_latent(cache, layer, latents[layer], ropes[layer], step)
            outputs.append(ops.sparse_mla(q, cache, layer, rows, SCALE)[0])
        return cache, jnp.stack(outputs)

    jitted = jax.jit(step_of, donate_argnums=0)
    cache = cases.poisoned(layout)
    both = [form_cases.latents(layout, 2, seed=layer) for layer in range(3)]
    latents, ropes = (jnp.asarray(np.stack([pair[i] for pair in both])) for i in (0, 1))
    q = (
        np.random.default_rng(1)
        .normal(size=(2, HEADS, layout.latent_dim + layout.rope_dim))
        .astype(np.float32)
    )
    positions = jnp.array([[5, -1], [2, -1]], jnp.int32)  # each its own token, the only ones written
    for _ in range(2):
        cache, outputs = jitted(cache, meta, latents, ropes, q, positions)
    assert len(traces) == 1
    tolerance = {"bf16": 2**-8, "f32": 1e-6, "fp8": 2**-3, "nvfp4": 0.6, "fp8_ds_mla": 2**-3}[key]
    for layer in range(3):
        for token in range(2):
            own = np.concatenate([latents[layer, token], ropes[layer, token]])[None]
            wanted, _ = attention(q[token], own, layout.latent_dim, SCALE)
            np.testing.assert_allclose(outputs[layer, token], wanted, rtol=tolerance, atol=tolerance)
