"""Faults of configuration and of sizes, in one line each; the full tables stand beside the modules' own tests."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from dsa_jax import ops
from dsa_jax.cache import Cache
from dsa_jax.config import DSAConfig, preset
from dsa_jax.layout import CacheLayout
from dsa_jax.metadata import Bucket, StepMetadata
from dsa_jax.presets import PRESETS
from dsa_jax.sizing import rows_per_chunk


def hf(model: str, **changes):
    """A released configuration with changes; None takes a field away."""
    fields = dict(PRESETS[model]) | changes
    return DSAConfig.from_hf({name: value for name, value in fields.items() if value is not None})


@pytest.mark.parametrize(("model", "wanted"), [("deepseek-v3.2", 78_324), ("glm-5.2", 92_628)])
@pytest.mark.parametrize("manager", ["v1", "v2"])
def test_b48_indexer_bytes_are_counted(model, wanted, manager):
    """bf16 latents and FP8 indexer keys: the layout, the pools and the report say the same number."""
    layout = CacheLayout.create(preset(model), manager=manager, page_size=64)
    assert layout.bytes_per_token == wanted
    assert sum(layout.bytes_per_token_by_role.values()) == wanted
    assert Cache.abstract(layout, 7).nbytes == 7 * 64 * wanted


def test_b48_fp4_indexer_bytes():
    assert CacheLayout.create(preset("glm-5.2"), index_form="fp4").bytes_per_token == 91_284


def test_b49_each_pool_has_its_own_dtype():
    """78 full layers: 78 * (1152 + 132), and the indexer's share does not depend on the latent's form."""
    config = replace(preset("glm-5.2"), full_layers=(True,) * len(preset("glm-5.2").full_layers))
    assert CacheLayout.create(config).bytes_per_token == 100_152
    shares = {
        CacheLayout.create(config, key_form=form).bytes_per_token_by_role["index_key"]  # pyright: ignore[reportArgumentType]
        for form in ("bf16", "fp8", "f32")
    }
    assert shares == {78 * 132}


def test_b53_scores_are_counted_over_the_longest_context():
    """512 MiB hold 992 rows of 135,168 keys; the compiled selection stays near its budget, whatever the chunk."""
    assert rows_per_chunk(512 << 20, 135_168) == 992
    assert rows_per_chunk(1000, 135_168) == 1
    layout = cases.layout(page_size=64)
    bucket = Bucket(context_requests=1, context_tokens=256, table_width=64)
    meta, cache = StepMetadata.create(layout, bucket, [], [], []), Cache.abstract(layout, 64)
    scores_of_all_rows = 256 * 64 * 64 * 4

    def select(cache, meta, q, weights, budget):
        return ops.select_tokens(q, weights, cache, 0, meta.derive(), 8, score_budget=budget)

    sizes = []
    for budget in (scores_of_all_rows, scores_of_all_rows // 16):
        compiled = (
            jax.jit(select, static_argnums=4)
            .lower(cache, meta, jnp.ones((256, 2, 8)), jnp.ones((256, 2)), budget)
            .compile()
        )
        analysis = compiled.memory_analysis()
        assert analysis is not None
        sizes.append(analysis.temp_size_in_bytes)
    assert sizes[1] < sizes[0] / 4


def test_b54_a_default_never_hides_the_checkpoint():
    """An explicit value wins, an explicit 0 is refused and not replaced, a missing head dimension is 128."""
    assert hf("deepseek-v3.2", index_topk=1024).index_topk == 1024
    assert hf("deepseek-v3.2", index_head_dim=None).index_head_dim == 128
    with pytest.raises(ValueError, match="index_topk=0"):
        hf("deepseek-v3.2", index_topk=0)
    with pytest.raises(ValueError, match="index_topk_freq"):
        hf("glm-5.1", index_topk_freq=0)
    with pytest.raises(ValueError, match="index_topk"):
        hf("deepseek-v3.2", index_topk=None)


def test_b55_rotary_base_nested_or_flat():
    """Both places are read, must agree where both are given, and one must be given."""
    base = dict(rope_theta=None, rope_scaling=None, rope_parameters=None)
    assert hf("glm-5.2", **(base | {"rope_parameters": {"rope_theta": 8_000_000}})).rope.theta == 8e6
    assert hf("glm-5.2", **(base | {"rope_theta": 10_000})).rope.theta == 1e4
    assert hf("glm-5.2", **(base | {"rope_theta": 7, "rope_parameters": {"rope_theta": 7}})).rope.theta == 7
    with pytest.raises(ValueError, match="rope_theta"):
        hf("glm-5.2", **(base | {"rope_theta": 7, "rope_parameters": {"rope_theta": 8}}))
    with pytest.raises(ValueError, match="rope"):
        hf("glm-5.2", **base)


def test_b57_rotary_layout_of_the_indexer_has_its_own_field():
    """Missing means half-split; GLM-5.2 says interleaved; the field of the attention is not read."""
    assert not hf("deepseek-v3.2").indexer_rope_interleave
    assert not hf("deepseek-v3.2", rope_interleave=True).indexer_rope_interleave
    assert hf("glm-5.2").indexer_rope_interleave


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_b58_powers_of_two_work(page_size):
    """A round trip through the reference for every page size; slots that the pool has, and none else."""
    layout = cases.layout(page_size=page_size)
    facts = cases.batch([(5, 5)], page_size=page_size)
    keys = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    step = cases.step(facts, layout)
    data, _ = cases.gather_index_k(cases.append_index_k(cases.poisoned(layout), 0, keys, step), 0, step)
    np.testing.assert_array_equal(np.asarray(data)[:5], keys)


@pytest.mark.parametrize("page_size", [48, 0, 512, 3])
def test_b58_other_page_sizes_are_refused(page_size):
    with pytest.raises(ValueError, match=rf"page_size={page_size}: .*power of two from 1 to 256.*use 64"):
        CacheLayout.create(cases.config(), page_size=page_size)


def test_b59_which_layers_are_full():
    """GLM-5.2: 0, 1, 2, 6, ..., 74; no list means all; prediction layers are full; a wrong length is refused."""
    full = preset("glm-5.2").full_layers
    assert [i for i, owner in enumerate(full[:78]) if owner] == [0, 1, *range(2, 78, 4)]
    assert all(full[78:])
    assert all(preset("glm-5.1").full_layers)
    with pytest.raises(ValueError, match="indexer_types has 77 entries"):
        hf("glm-5.2", indexer_types=["full"] * 77)
