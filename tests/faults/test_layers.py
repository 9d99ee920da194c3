"""Faults of layers without an indexer and of pipeline stages."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import cases
import toy_layer
from dsa_jax import ops
from dsa_jax.cache import Cache
from dsa_jax.layout import CacheLayout, Role
from dsa_jax.metadata import Bucket, StepMetadata


@pytest.mark.parametrize("manager", ["v1", "v2"])
def test_b45_compact_rows(manager):
    """Full layers 0, 1, 2, 6 of eight: layer 6 has row 3, layer 4 none; nothing is written elsewhere."""
    full = tuple(letter == "F" for letter in "FFFSSSFS")
    layout = cases.layout(manager, full=full)
    assert layout.layer_offsets(Role.INDEX_KEY) == (0, 1, 2, -1, -1, -1, 3, -1)
    facts = cases.batch(decodes=[(6, 1), (3, 1)])
    cache, step = cases.poisoned(layout), cases.step(facts, layout)
    keys = np.arange(16, dtype=np.float32).reshape(2, 8)
    after = cases.append_index_k(cache, 6, keys, step)
    changed = np.argwhere((np.asarray(after.pages("index_key")) == keys[0]).all(axis=-1)).tolist()
    assert changed == [[facts.tables[0][1] * 4 + 3, 1]]
    with pytest.raises(ValueError, match=r"layer 4 .*shared-indexer layer"):
        ops.gather_index_k(after, 4, step)
    assert cases.layout(manager, full=(True,) * 8).layer_offsets(Role.INDEX_KEY) == tuple(range(8))


def test_b46_a_shared_layer_stays_sparse():
    """Layers full, shared; k = 2, length 6: the shared layer attends the two tokens that layer 0 chose, not six."""
    layout, sequence = cases.layout(full=(True, False)), [5, 17, 30, 2, 9, 11]
    meta = StepMetadata.create(
        layout, Bucket(context_requests=1, context_tokens=6, table_width=2), [[3, 1]], [6], [6]
    )
    ids = np.array(sequence)
    cache, local, _ = toy_layer.forward(cases.poisoned(layout), meta, ids.astype(np.int32), k=2)
    latent, step = toy_layer.LATENTS[ids], cases.derive(meta)
    cache = cases.append_latent(cache, 1, latent[:, : cases.LATENT], latent[:, cases.LATENT :], step)
    sparse, _ = cases.sparse_mla(
        toy_layer.ATTENTION[ids], cache, 1, cases.to_rows(local, step), toy_layer.SCALE
    )
    np.testing.assert_allclose(sparse, toy_layer.reference(sequence, 2)[1], rtol=1e-4, atol=1e-5)
    every = np.broadcast_to(np.arange(6, dtype=np.int32), (6, 6))
    causal = np.where(every <= np.arange(6)[:, None], every, -1).astype(np.int32)
    dense, _ = cases.sparse_mla(
        toy_layer.ATTENTION[ids], cache, 1, cases.to_rows(causal, step), toy_layer.SCALE
    )
    assert np.abs(np.asarray(dense - sparse)[3:]).max() > 0.05
    with pytest.raises(ValueError, match="layer 0 is shared"):
        cases.config((False, True))


def test_b62_stages_count_their_own_layers():
    """Layers 4..7 of eight: global layer 5 is number 1 there; a stage of shared layers has no indexer pool."""
    config = cases.config(tuple(letter == "F" for letter in "FFFSFFSS"), 8)
    stage = CacheLayout.create(config, layers=(4, 5, 6, 7), index_form="f32", page_size=4)
    assert stage.page_index(1, Role.INDEX_KEY).layer_offset == 1
    assert stage.page_index(1, Role.KEY).layer_offset == 1
    with pytest.raises(ValueError, match=r"layer 5 is out of range.*pass the local number"):
        stage.page_index(5, Role.KEY)
    shared = CacheLayout.create(config, layers=(6, 7), index_form="f32", page_size=4)
    cache = Cache.create(shared, 3)
    assert cache.index_key is None
    assert cache.nbytes == 3 * 4 * 2 * 12 * 2
    draft = CacheLayout.create(
        cases.config((True, False, True), 8, mtp=1), layers=(2,), index_form="f32", page_size=4
    )
    assert draft.page_index(0, Role.INDEX_KEY).layer_offset == 0
    assert Cache.create(draft, 3).key_offsets.tolist() == [0]


def test_b62_a_traced_stage_number_of_the_whole_model_reads_nothing():
    """The global number 5, traced, does not exist on a stage of four layers: it must not read another layer's pages."""
    layout = cases.layout(full=(True,) * 4)
    step = cases.step(cases.batch([(3, 3)]), layout)
    data, _ = cases.gather_index_k(cases.poisoned(layout, byte=0x11), jnp.int32(5), step)
    assert not np.asarray(data).any()
