"""Router against a NumPy model, and the two ways to evaluate experts against each other and against a loop."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import numpy_decoder
from dsa_jax.models import moe
from dsa_jax.models.presets import preset
from random_models import random_model


def config_of(**changes):
    return dataclasses.replace(preset("tiny"), **changes)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("groups", "kept"), [(4, 2), (1, 1), (8, 3)])
def test_route_agrees_with_numpy(groups, kept, norm):
    config = config_of(n_group=groups, topk_group=kept, norm_topk_prob=norm)
    draw = np.random.default_rng(groups)
    logits, bias = draw.standard_normal((50, 8)), 0.3 * draw.standard_normal(8)
    weights, experts = moe.route(jnp.asarray(logits, jnp.float32), jnp.asarray(bias, jnp.float32), config)
    for row in range(50):
        chosen, wanted = numpy_decoder.choose_experts(numpy_decoder.sigmoid(logits[row]), bias, config)
        assert experts[row].tolist() == list(chosen)
        np.testing.assert_allclose(weights[row], wanted, rtol=1e-5)


def test_bias_steers_the_choice_and_not_the_weights():
    config = config_of(n_group=1, topk_group=1)
    logits = jnp.array([[3.0, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0, -4.0]])
    weights, experts = moe.route(logits, jnp.zeros(8).at[7].set(2.0), config)
    assert experts.tolist() == [[7, 0]]
    scores = numpy_decoder.sigmoid(np.array([-4.0, 3.0]))
    np.testing.assert_allclose(weights[0], 2.5 * scores / scores.sum(), rtol=1e-6)


def test_a_dropped_group_is_not_chosen_for_its_zeros():
    """With all biased scores negative, a mask of zeros instead of minus infinity would choose a dropped expert."""
    logits = jnp.array([[0.0, 0.0, -9.0, -9.0, 1.0, 1.0, -9.0, -9.0]])
    _, experts = moe.route(logits, jnp.full(8, -5.0), config_of(topk_group=1))
    assert experts.tolist() == [[4, 5]]


def test_a_group_is_ranked_by_its_two_best():
    """Group 0 holds the best single expert, group 1 the best pair."""
    logits = jnp.array([[4.0, -9.0, 1.5, 1.5, -9.0, -9.0, -9.0, -9.0]])
    assert moe.route(logits, jnp.zeros(8), config_of(topk_group=1))[1].tolist() == [[2, 3]]


def test_the_lower_expert_wins_ties():
    assert moe.route(jnp.zeros((1, 8)), jnp.zeros(8), config_of())[1].tolist() == [[0, 1]]


@pytest.mark.parametrize("kept", [jnp.float32, jnp.bfloat16])
def test_the_gate_sums_in_float32(kept):
    """Of weights in either dtype; logits rounded to bfloat16 would be off by 1e-2 and choose others between near ties."""
    config = config_of(n_group=1, topk_group=1)
    gate = moe.Gate(config, rngs=nnx.Rngs(0))
    gate.weight.set_value(gate.weight[...].astype(kept))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((200, 48)), jnp.bfloat16)
    logits = np.asarray(x, np.float64) @ np.asarray(gate.weight[...], np.float64).T
    wanted, numbers = moe.route(jnp.asarray(logits, jnp.float32), jnp.zeros(8), config)
    weights, experts = gate(x)
    np.testing.assert_array_equal(experts, numbers)
    np.testing.assert_allclose(weights, wanted, rtol=1e-5)


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("tokens", [1, 33, 300])
def test_both_ways_to_evaluate_experts(tokens, monkeypatch):
    layer = random_model("tiny").model.layers[1].mlp
    assert isinstance(layer, moe.MoE)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((tokens, 48)), jnp.float32)
    weights, experts = layer.gate(x)
    dense = layer.experts(x, weights, experts)
    monkeypatch.setattr(moe, "DENSE_EXPERTS", 0)
    np.testing.assert_allclose(layer.experts(x, weights, experts), dense, atol=1e-5)
    assert float(jnp.abs(dense).max()) > 0.5


@pytest.mark.parametrize("dense", [0, 16])
def test_an_expert_that_was_not_chosen_may_overflow(dense, monkeypatch):
    monkeypatch.setattr(moe, "DENSE_EXPERTS", dense)
    layer = random_model("tiny").model.layers[1].mlp
    assert isinstance(layer, moe.MoE)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 48)), jnp.float32)
    experts, weights = jnp.full((5, 1), 3, jnp.int32), jnp.ones((5, 1), jnp.float32)
    wanted = layer.experts(x, weights, experts)
    for projection in (layer.experts.gate_proj, layer.experts.up_proj):
        projection.set_value(projection[...].at[6].multiply(1e30))
    np.testing.assert_array_equal(layer.experts(x, weights, experts), wanted)


@pytest.mark.parametrize("dense", [0, 16])
def test_no_tokens(dense, monkeypatch):
    monkeypatch.setattr(moe, "DENSE_EXPERTS", dense)
    layer = random_model("tiny").model.layers[1].mlp
    assert layer(jnp.zeros((0, 48), jnp.float32)).shape == (0, 48)


def test_layer_agrees_with_numpy():
    model = random_model("tiny", seed=4)
    x = np.random.default_rng(0).standard_normal((7, 48))
    layer = model.model.layers[1].mlp
    assert isinstance(layer, moe.MoE)
    got, load = layer.with_load(jnp.asarray(x, jnp.float32))
    weights = numpy_decoder.weights_of(model)
    wanted = [numpy_decoder.feed_forward(weights, "model.layers.1.mlp.", model.config, row) for row in x]
    np.testing.assert_allclose(got, wanted, atol=2e-5)
    assert float(load.sum()) == pytest.approx(1.0)


def test_dense_layer_agrees_with_numpy():
    model = random_model("tiny", seed=4)
    x = np.random.default_rng(0).standard_normal((3, 48))
    got = model.model.layers[0].mlp(jnp.asarray(x, jnp.float32))
    weights = numpy_decoder.weights_of(model)
    wanted = [numpy_decoder.feed_forward(weights, "model.layers.0.mlp.", model.config, row) for row in x]
    np.testing.assert_allclose(got, wanted, atol=2e-5)
