"""Property: the coalesced pools of random layouts equal separate single-layer caches after random appends, byte for byte."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cases
import form_cases
import numpy_forms
from dsa_jax import ops
from dsa_jax.cache import Cache
from dsa_jax.layout import CacheLayout
from numpy_model import row_of

FORMS = [*form_cases.PAIRS, ("bf16", "fp8", 4), ("f32", "f32", 1), ("bf16", "fp4", 16)]
SLOTS = 7


@st.composite
def histories(draw):
    """A layout of up to five layers, some of its layers in any order, and a few appends to any of them."""
    key, index, page_size = draw(st.sampled_from(FORMS))
    full = (True, *draw(st.lists(st.booleans(), min_size=0, max_size=4)))
    layers = draw(st.permutations(range(len(full))))[: draw(st.integers(1, len(full)))]
    manager = draw(st.sampled_from(["v1", "v2"]))
    steps = draw(
        st.lists(st.tuples(st.integers(0, len(layers) - 1), st.integers(0, 2**16)), min_size=1, max_size=3)
    )
    return key, index, page_size, full, tuple(layers), manager, steps


def caches(key, index, page_size, full, layers, manager) -> tuple[Cache, list[Cache]]:
    """One cache of all layers, and one cache for each layer alone, all poisoned."""
    latent, rope = form_cases.widths(key)
    model = dataclasses.replace(cases.config(full, 128), kv_lora_rank=latent, qk_rope_head_dim=rope)
    make = lambda layers: CacheLayout.create(
        model, manager=manager, key_form=key, index_form=index, page_size=page_size, layers=layers
    )
    alone = [cases.poisoned(make((layer,)), slots=SLOTS) for layer in layers]
    return cases.poisoned(make(layers), slots=SLOTS), alone


def append(cache: Cache, layer: int, facts, seed: int) -> Cache:
    """Index keys, where the layer has them, and latents of one step through the ops."""
    layout, step = cache.layout, cases.step(facts, cache.layout)
    count = step.bucket.tokens
    keys = np.random.default_rng(seed).normal(size=(count, 128)).astype(np.float32)
    latent, rope = form_cases.latents(layout, count, seed)
    if layout.full[layer]:
        cache = ops.append_index_k(cache, layer, jnp.asarray(keys), step)
    scale = form_cases.KEY_SCALE.get(layout.key_form)
    return ops.append_latent(cache, layer, jnp.asarray(latent), jnp.asarray(rope), step, key_scale=scale)


def check(history) -> None:
    """Append everywhere; then every layer's pages in the pool are those of its own cache, and so are the rest's: NaN."""
    key, index, page_size, full, layers, manager, steps = history
    pool, alone = caches(key, index, page_size, full, layers, manager)
    for layer, seed in steps:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, 2 * page_size + 1, 2)
        new = int(rng.integers(1, min(lengths[0], 3) + 1))
        facts = cases.batch(
            [(int(lengths[0]), new)], [(int(lengths[1]), 1)],
            page_size=page_size, slots=SLOTS, seed=seed, padding=4 - new,
        )  # fmt: skip
        pool = append(pool, layer, facts, seed)
        alone[layer] = append(alone[layer], 0, facts, seed)
    for layer, own in enumerate(alone):
        for name in own.pools():
            owners = cases.owners(pool.layout, name)
            pages = np.asarray(pool.pages(name))
            pages = pages.reshape(SLOTS, sum(owners), *pages.shape[1:])[:, sum(owners[:layer])]
            assert np.ascontiguousarray(pages).tobytes() == np.asarray(own.pages(name)).tobytes(), (
                layer,
                name,
            )
    assert sum(own.nbytes for own in alone) == pool.nbytes


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(histories())
def test_pool_equals_single_layer_caches(history):
    check(history)


@pytest.mark.full
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories())
def test_pool_equals_single_layer_caches_exhaustive(history):
    check(history)


def test_planted_offset_is_seen(monkeypatch):
    """An op that writes every layer at offset 0 leaves the other layers' pages poisoned: the property must see it."""
    original = Cache._offset
    monkeypatch.setattr(Cache, "_offset", lambda self, *place: original(self, *place) * 0)
    with pytest.raises(AssertionError):
        check(("nvfp4", "fp4", 4, (True, True), (0, 1), "v2", [(1, 3)]))


def test_a_history_by_hand():
    """One of the histories against the NumPy model: what both caches hold is also right."""
    pool, _ = caches("nvfp4", "fp4", 4, (True, False, True), (2, 0, 1), "v2")
    facts = cases.batch([(5, 3)], slots=SLOTS, seed=9)
    after = append(pool, 1, facts, 9)
    rows = [row_of(facts.held_table(), 0, p, 4) for p in (2, 3, 4)]
    latent, rope = form_cases.latents(pool.layout, 3, 9)
    keys = np.random.default_rng(9).normal(size=(3, 128)).astype(np.float32)
    wanted = form_cases.write_keys(pool, 1, rows, keys)
    entry = numpy_forms.latent_entries(latent, rope, "nvfp4", form_cases.KEY_SCALE["nvfp4"])
    wanted = form_cases.write_entry(wanted, 1, rows, entry)
    assert cases.pool_bytes(after) == cases.pool_bytes(wanted)
