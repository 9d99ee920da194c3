"""Whole-sequence forward: against a NumPy model, and its own promises about selections, losses and gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import numpy_decoder
from dsa_jax.models.batch import forward_batch
from dsa_jax.models.batch_attention import divergence, masked_softmax, top_mask
from random_models import QUICK_COMPILE, random_model, random_tokens

LENGTH = 28  # more than three times index_topk, so that most rows drop most tokens


@pytest.fixture(scope="module")
def model():
    return random_model("tiny")


@functools.partial(
    jax.jit,
    static_argnames=("attention", "index_keys", "index_topk", "mtp", "recall", "recall_from", "selection"),
    compiler_options=QUICK_COMPILE,
)
def run(model, tokens, rng=None, mtp=False, **options):
    return forward_batch(model, tokens, rng=rng, mtp=mtp, **options)


@pytest.mark.parametrize("name", ["tiny", "tiny-glm"])
def test_agrees_with_numpy(name):
    model = random_model(name, seed=3)
    tokens = random_tokens(model, 2, LENGTH)
    got = run(model, tokens, mtp=True)
    for b in range(2):
        logits, predicted = numpy_decoder.forward(model, np.asarray(tokens[b]))
        assert logits.std() > 0.5
        np.testing.assert_allclose(got.logits[b], logits, atol=1e-4)
        assert got.mtp_logits is not None
        np.testing.assert_allclose(got.mtp_logits[b, :-1], predicted, atol=1e-4)


def test_topk_of_the_length_is_dense_attention_and_a_smaller_one_is_not(model):
    tokens = random_tokens(model, 2, LENGTH)
    dense = run(model, tokens, attention="dense").logits
    np.testing.assert_array_equal(run(model, tokens, index_topk=LENGTH).logits, dense)
    difference = jnp.abs(run(model, tokens, index_topk=4).logits - dense).max(axis=(0, 2))
    assert float(difference[:4].max()) < 1e-5
    assert float(difference[4:].min()) > 1e-3


def test_wrong_pairs_in_the_indexer_show_only_past_topk():
    """The fault of a wrong rotary rule: invisible while every token is selected, large afterwards."""
    right, wrong = random_model("tiny"), random_model("tiny", indexer_rope_interleave=True)
    tokens = random_tokens(right, 4, LENGTH)
    moved = jnp.abs(run(right, tokens).logits - run(wrong, tokens).logits).max(axis=(0, 2))
    topk = right.config.dsa.index_topk
    assert float(moved[:topk].max()) < 1e-5
    assert float(moved[topk:].max()) > 0.1


def test_no_token_sees_a_later_one(model):
    tokens = random_tokens(model, 1, LENGTH)
    changed = tokens.at[0, 20].set((tokens[0, 20] + 1) % model.config.vocab_size)
    before, after = run(model, tokens, mtp=True), run(model, changed, mtp=True)
    np.testing.assert_array_equal(before.logits[0, :20], after.logits[0, :20])
    assert float(jnp.abs(before.logits[0, 20] - after.logits[0, 20]).max()) > 1e-3
    # Position 19 of the prediction layer embeds token 20, position 18 does not.
    np.testing.assert_array_equal(before.mtp_logits[0, :19], after.mtp_logits[0, :19])
    assert float(jnp.abs(before.mtp_logits[0, 19] - after.mtp_logits[0, 19]).max()) > 1e-3


def test_recent_and_random_selections(model):
    tokens = random_tokens(model, 1, LENGTH)
    everything = run(model, tokens, selection="random", rng=jax.random.key(0), index_topk=LENGTH, recall=True)
    np.testing.assert_allclose(everything.recall, 1.0, atol=1e-6)
    first, second = (
        run(model, tokens, selection="random", rng=jax.random.key(seed), recall=True).logits
        for seed in (0, 1)
    )
    assert float(jnp.abs(first - second).max()) > 1e-3
    # With one recent token attention returns that token's own value: earlier tokens cannot matter.
    changed = tokens.at[0, 0].set((tokens[0, 0] + 1) % model.config.vocab_size)
    alone, other = (run(model, t, selection="recent", index_topk=1).logits for t in (tokens, changed))
    np.testing.assert_array_equal(alone[0, 1:], other[0, 1:])


def test_recall_is_the_share_of_full_attention():
    """With all scores equal every token of t + 1 has the same mass, so k selected ones catch k / (t + 1)."""
    model = random_model("tiny")
    for layer in model.model.layers:
        layer.self_attn.q_b_proj.weight.set_value(jnp.zeros_like(layer.self_attn.q_b_proj.weight[...]))
    tokens = random_tokens(model, 2, LENGTH)
    for attention in ("dense", "sparse"):
        got = run(
            model, tokens, attention=attention, selection="recent", index_topk=4, recall=True, recall_from=10
        )
        np.testing.assert_allclose(got.recall, np.mean([4 / (t + 1) for t in range(10, LENGTH)]), rtol=1e-6)


def test_fp8_keys_move_the_logits_a_little(model):
    tokens = random_tokens(model, 2, LENGTH)
    exact, rounded = run(model, tokens), run(model, tokens, index_keys="fp8")
    assert not np.array_equal(exact.logits, rounded.logits)
    agreeing = jnp.argmax(exact.logits, -1) == jnp.argmax(rounded.logits, -1)
    assert float(agreeing.mean()) > 0.7


def test_divergence_and_its_gradient():
    """KL by hand for two rows; the gradient is softmax minus target on the support, and zero off it."""
    visible = jnp.array([[[True, False], [True, True]]])
    target = jnp.array([[[1.0, 0.0], [0.75, 0.25]]])
    scores = jnp.array([[[3.0, 9.0], [0.0, 0.0]]])
    value, gradient = jax.value_and_grad(lambda s: divergence(target, s, visible))(scores)
    by_hand = (0.75 * np.log(0.75 / 0.5) + 0.25 * np.log(0.25 / 0.5)) / 2
    assert float(value) == pytest.approx(by_hand, rel=1e-6)
    np.testing.assert_allclose(gradient, [[[0.0, 0.0], [(0.5 - 0.75) / 2, (0.5 - 0.25) / 2]]], atol=1e-7)


def test_divergence_is_zero_only_for_the_target_itself():
    visible = jnp.tril(jnp.ones((1, 5, 5), jnp.bool_))
    scores = jnp.asarray(np.random.default_rng(0).standard_normal((1, 5, 5)), jnp.float32)
    own = masked_softmax(scores, visible)
    assert float(divergence(own, scores, visible)) == pytest.approx(0.0, abs=1e-6)
    assert float(divergence(own, scores[:, :, ::-1], visible)) > 1e-2


@pytest.mark.full
@pytest.mark.parametrize(
    ("attention", "remat"), [pytest.param("dense", False, marks=pytest.mark.full), ("sparse", True)]
)
def test_each_loss_trains_its_own_part(attention, remat):
    model = random_model("tiny", num_layers=1, full_layers=(True, True))
    graph, state = nnx.split(model)
    tokens = random_tokens(model, 1, LENGTH)

    def loss(state, index_share, language_share):
        got = forward_batch(
            nnx.merge(graph, state), tokens, attention=attention, index_loss=True, remat=remat
        )
        assert got.mtp_logits is not None
        language = got.logits.var() + got.mtp_logits[:, :-1].var()
        return index_share * got.index_kl.mean() + language_share * language

    gradient = jax.jit(jax.grad(loss), compiler_options=QUICK_COMPILE)
    for which, shares in (("indexer", (1.0, 0.0)), ("rest", (0.0, 1.0))):
        for path, leaf in nnx.to_flat_state(gradient(state, *shares)):
            if path[-1] == "e_score_correction_bias":
                continue
            belongs = ("indexer" in path) == (which == "indexer")
            assert bool(jnp.any(leaf[...] != 0)) == belongs, (which, path)


def test_load_counts_choices(model):
    load = run(model, random_tokens(model, 2, LENGTH), mtp=True).moe_load
    assert load.shape == (2, 8)  # one layer with experts and the prediction layer
    np.testing.assert_allclose(load.sum(axis=1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(load * 2 * LENGTH * 2, np.round(load * 2 * LENGTH * 2), atol=1e-3)


def test_top_mask_ties():
    allowed = jnp.tril(jnp.ones((5, 5), jnp.bool_))
    scores = jnp.array([[2.0, 5.0, 5.0, 5.0, 1.0]] * 5)
    np.testing.assert_array_equal(np.flatnonzero(top_mask(scores, allowed, 2)[4]), [1, 2])
    zeros = jnp.array([[-0.0, 0.0, -0.0, 0.0, 0.0]] * 5)
    np.testing.assert_array_equal(np.flatnonzero(top_mask(zeros, allowed, 3)[4]), [0, 1, 2])
    np.testing.assert_array_equal(top_mask(scores, allowed, 2).sum(axis=1), [1, 2, 2, 2, 2])


def test_all_bad_arguments_are_named_together(model):
    with pytest.raises(ValueError) as caught:
        forward_batch(
            model,
            jnp.zeros((1, 300), jnp.int32),
            attention="full",  # type: ignore[arg-type]
            selection="random",
            index_topk=0,
        )
    message = str(caught.value)
    for part in ("attention is 'full'", "length 300", "1 to 256", "index_topk is 0", "needs rng"):
        assert part in message
    with pytest.raises(ValueError, match=r"tokens is float32\[3\]; wanted integers"):
        forward_batch(model, jnp.zeros((3,)))
    with pytest.raises(ValueError, match="no gradient"):
        forward_batch(model, jnp.zeros((1, 3), jnp.int32), index_keys="fp8", index_loss=True)
