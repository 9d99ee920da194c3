"""What each stage minimises: values by hand, and which weights each loss reaches."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsa_jax.models.decoder import Decoder
from dsa_jax.models.train import stages, updates
from train_models import one_layer

DENSE, INDEXER, SPARSE = stages.recipe(steps=(40, 20, 20), noise=0.0, warmup=4)


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 96, (2, 12)), jnp.int32)
"""Contexts of 12 tokens of which a query attends 4."""


def run(model: Decoder, stage: stages.Stage) -> tuple[jax.Array, dict[str, jax.Array]]:
    total, (parts, _) = stages.objective(
        model, TOKENS, stage, key=jax.random.key(0), mtp_weight=0.3, dtype=jnp.float32
    )
    return total, parts


@pytest.fixture(scope="module", params=[pytest.param("dense", marks=pytest.mark.full), "sparse"])
def gradients(request) -> dict[str, tuple[float, float]]:
    """Greatest absolute gradient by path, of the language losses and of the divergence."""
    graph, params, rest = nnx.split(one_layer(), nnx.Param, ...)
    stage = dataclasses.replace(SPARSE, attention=request.param)

    def losses(params):
        parts = run(nnx.merge(graph, params, rest), stage)[1]
        return jnp.stack([parts["loss"] + parts["mtp_loss"], parts["index_kl"]])

    found = jax.jit(jax.jacrev(losses))(params)
    return {
        jax.tree_util.keystr(path): (float(jnp.max(jnp.abs(leaf[0]))), float(jnp.max(jnp.abs(leaf[1]))))
        for path, leaf in jax.tree_util.tree_leaves_with_path(found)
    }


@pytest.mark.full
def test_language_losses_reach_all_but_the_indexers_and_the_divergence_nothing_else(gradients):
    for path, (language, divergence) in gradients.items():
        assert (language == 0.0) == ("indexer" in path), path
        assert (divergence == 0.0) == ("indexer" not in path), path


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize(
    ("stage", "weights"), [(DENSE, (1.0, 0.3, 0.0)), (INDEXER, (0.0, 0.0, 1.0)), (SPARSE, (1.0, 0.3, 1.0))]
)
def test_each_stage_minimises_its_own_losses(stage: stages.Stage, weights: tuple[float, ...]):
    total, parts = nnx.jit(run, static_argnums=1)(one_layer(), stage)
    values = [float(parts[name]) for name in ("loss", "mtp_loss", "index_kl")]
    assert float(total) == pytest.approx(sum(w * v for w, v in zip(weights, values, strict=True)), rel=1e-5)
    assert (values[2] > 0.0) == stage.index


def test_stages_freeze_what_they_do_not_train():
    rates = [
        (stage.main_rate > 0, stage.index_rate > 0, stage.attention) for stage in (DENSE, INDEXER, SPARSE)
    ]
    assert rates == [(True, False, "dense"), (False, True, "dense"), (True, True, "sparse")]


def test_groups_name_every_indexer_weight():
    params = nnx.split(one_layer(), nnx.Param, ...)[1]
    named = jax.tree_util.tree_leaves_with_path(updates.groups(params))
    indexers = [path for path, group in named if group == "indexer"]
    # wq_b, wk, weights_proj, and weight and bias of k_norm, in a decoder layer and in the prediction layer.
    assert len(indexers) == 10
    assert {group for _, group in named} == {"indexer", "main"}


def test_token_losses_look_ahead_as_far_as_asked():
    tokens = jnp.asarray([[2, 0, 1, 2]])
    logits = jnp.log(jnp.asarray([[[0.1, 0.2, 0.7], [0.3, 0.3, 0.4], [0.25, 0.25, 0.5], [1.0, 0.0, 0.0]]]))
    np.testing.assert_allclose(stages.token_losses(logits, tokens, 1), -np.log([[0.1, 0.3, 0.5]]), rtol=1e-5)
    np.testing.assert_allclose(stages.token_losses(logits, tokens, 2), -np.log([[0.2, 0.4]]), rtol=1e-5)


def test_rebalance_moves_towards_experts_below_their_share():
    load = jnp.asarray([[0.5, 0.25, 0.2, 0.05], [0.25, 0.25, 0.25, 0.25]])
    moved = stages.rebalance(jnp.asarray([[0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 0.0, 0.0]]), load, 0.01)
    np.testing.assert_allclose(moved, [[0.09, 0.2, 0.31, 0.41], [0.0, 0.0, 0.0, 0.0]], rtol=1e-6)


def test_learning_rate_rises_linearly_and_falls_as_half_a_cosine():
    factors = [
        float(stages.learning_rate(jnp.int32(s), jnp.int32(12), 4, final=0.1)) for s in (0, 1, 3, 4, 8, 12)
    ]
    assert factors == pytest.approx([0.25, 0.5, 1.0, 1.0, 0.55, 0.1])


def test_noise_replaces_inputs_and_leaves_targets():
    model = one_layer()
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 96, (2, 16)), jnp.int32)

    @nnx.jit(static_argnums=1)
    def loss(model, noise, seed):
        stage = dataclasses.replace(DENSE, noise=noise)
        return stages.objective(
            model, tokens, stage, key=jax.random.key(seed), mtp_weight=0.3, dtype=jnp.float32
        )[1][0]["loss"]

    assert float(loss(model, 0.0, 0)) == float(loss(model, 0.0, 1))
    # All inputs are random: other ones with another key, and the targets are still the true next tokens.
    noisy = [float(loss(model, 1.0, seed)) for seed in (0, 1)]
    assert len({*noisy, float(loss(model, 0.0, 0))}) == 3
    assert noisy == pytest.approx([np.log(96)] * 2, abs=1.0)
