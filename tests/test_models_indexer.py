"""The indexer against an independent float64 model, published scores, and the Hadamard faults."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import numpy_decoder
from dsa_jax import quant
from dsa_jax.models.batch_attention import top_mask
from dsa_jax.models.indexer import index_scores
from dsa_jax.models.norm import LayerNorm, RMSNorm
from dsa_jax.models.rope import rotation
from random_models import indexer_of, random_model

LENGTH = 24


def tokens_of(indexer, hidden: int, seed: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Inputs of an indexer for a sequence: normalised states and low-rank queries."""
    draw = np.random.default_rng(seed)
    return draw.standard_normal((LENGTH, hidden)), draw.standard_normal((LENGTH, indexer.config.q_lora_rank))


def scores_of(indexer, xs, q_loras):
    turn = rotation(
        indexer.config.rope, indexer.config.qk_rope_head_dim, jnp.arange(LENGTH, dtype=jnp.int32)[None]
    )
    x, q_lora = jnp.asarray(xs[None], jnp.float32), jnp.asarray(q_loras[None], jnp.float32)
    hadamard = indexer.config.index_hadamard
    q, k = indexer.query(q_lora, turn, hadamard=hadamard), indexer.key(x, turn, hadamard=hadamard)
    return index_scores(q, k, indexer.head_weights(x))[0]


@pytest.mark.parametrize("name", ["tiny", "tiny-glm"])
@pytest.mark.parametrize("hadamard", [True, False])
def test_scores_and_selection_agree_with_numpy(name, hadamard):
    model = random_model(name, seed=2, index_hadamard=hadamard)
    indexer = indexer_of(model)
    xs, q_loras = tokens_of(indexer, model.config.hidden_size)
    wanted = numpy_decoder.index_score_rows(
        numpy_decoder.weights_of(model), "model.layers.0.self_attn.indexer.", model.config, xs, q_loras
    )
    causal = np.tril(np.ones((LENGTH, LENGTH), bool))
    got = scores_of(indexer, xs, q_loras)
    np.testing.assert_allclose(np.asarray(got)[causal], wanted[causal], atol=2e-6)
    assert (wanted[causal] < 0).any()
    assert (wanted[causal] > 0).any()

    mask = top_mask(got, jnp.asarray(causal), indexer.config.index_topk)
    selection = numpy_decoder.selected_rows(wanted, indexer.config.index_topk)
    assert [np.flatnonzero(row).tolist() for row in mask] == selection
    assert len(selection[-1]) == indexer.config.index_topk < LENGTH


def published_inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Structured queries [64, 128], keys [6, 128] (both rounded to bfloat16) and scaled weights [64]."""
    h, d, t = np.arange(64)[:, None], np.arange(128)[None, :], np.arange(6)[:, None]
    q = np.sin(0.1 * (h + 1) * (d + 1)).astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    k = ((1 + t) * np.cos(0.07 * (t + 1) * (d + 1))).astype(np.float32)
    k = k.astype(ml_dtypes.bfloat16).astype(np.float32)
    return q, k, ((np.arange(64) % 5) - 1) / 8 * (64 * 128) ** -0.5


PUBLISHED = {
    None: [-0.002593, 0.082654, -0.032383, 0.469092, 0.383428, 0.552159],
    "ue8m0": [-0.001972, 0.087341, -0.026593, 0.483655, 0.394811, 0.544726],
    "fp32": [-0.003494, 0.080383, -0.042299, 0.477390, 0.401651, 0.558650],
}


@pytest.mark.parametrize("scale_rule", PUBLISHED)
def test_scores_of_structured_vectors(scale_rule):
    q, k, weights = published_inputs()
    # One query against six keys: the same query stands at all six places.
    q, weights = (
        jnp.asarray(np.broadcast_to(q, (1, 6, 64, 128))),
        jnp.asarray(np.broadcast_to(weights, (1, 6, 64)), jnp.float32),
    )
    keys, factor = jnp.asarray(k[None]), jnp.ones((1, 6))
    if scale_rule:
        (q_codes, q_scale), (k_codes, factor) = (quant.quantize_fp8(x, scale_rule) for x in (q, keys))
        q, weights, keys = quant.decode_e4m3(q_codes), weights * q_scale, quant.decode_e4m3(k_codes)
    got = index_scores(q, keys, weights) * factor[:, None, :]
    np.testing.assert_allclose(got[0, 3], PUBLISHED[scale_rule], atol=2e-5)


def test_heads_are_summed_alike_in_any_grouping():
    draw = np.random.default_rng(0)
    q, k = (jnp.asarray(draw.standard_normal(s), jnp.float32) for s in ((2, 5, 6, 8), (2, 5, 8)))
    weights = jnp.asarray(draw.standard_normal((2, 5, 6)), jnp.float32)
    wanted = np.einsum(
        "bths,bth->bts", np.maximum(np.einsum("bthd,bsd->bths", q, k, dtype=np.float64), 0), weights
    )
    for heads in (1, 2, 4, 6, 8):
        np.testing.assert_allclose(index_scores(q, k, weights, heads_at_once=heads), wanted, atol=1e-5)


def test_hadamard_on_both_sides_or_on_none():
    one = jnp.zeros(128).at[0].set(1.0)
    turned = quant.hadamard(one)
    assert float(turned @ turned) == pytest.approx(1.0, abs=1e-6)
    assert float(one @ turned) == pytest.approx(128**-0.5, abs=1e-6)


def test_hadamard_is_in_query_and_key():
    indexer = indexer_of(random_model("tiny"))
    xs, q_loras = (jnp.asarray(v, jnp.float32) for v in tokens_of(indexer, 48))
    turn = rotation(indexer.config.rope, 16, jnp.arange(LENGTH, dtype=jnp.int32))
    q, k = indexer.query(q_loras, turn, hadamard=False), indexer.key(xs, turn, hadamard=False)
    q_turned, k_turned = indexer.query(q_loras, turn, hadamard=True), indexer.key(xs, turn, hadamard=True)
    np.testing.assert_allclose(k_turned, k @ numpy_decoder.sylvester(128).astype(np.float32), atol=1e-5)
    plain = jnp.einsum("thd,td->th", q, k)
    np.testing.assert_allclose(jnp.einsum("thd,td->th", q_turned, k_turned), plain, atol=1e-4)
    assert float(jnp.abs(jnp.einsum("thd,td->th", q_turned, k) - plain).max()) > 1


def test_hadamard_halves_the_error_of_an_outlier():
    """One element of 100 among 0.5: under a power-of-two scale 100 is stored as 96; spread over all elements the errors
    partly cancel. The norm of the key's error is the root mean square error of its score with a white query."""
    key = jnp.full((128,), 0.5).at[7].set(100.0)

    def error(rotate) -> float:
        return float(jnp.linalg.norm(quant.dequantize_fp8(*quant.quantize_fp8(rotate(key))) - rotate(key)))

    assert error(lambda x: x) == 4.0
    assert error(quant.hadamard) < 2.5


def test_key_norm_removes_the_mean_and_adds_a_bias():
    norm = LayerNorm(4)
    norm.bias.set_value(jnp.array([0.0, 0.0, 0.0, 5.0]))
    got = norm(jnp.array([[10.0, 12.0, 10.0, 12.0]]))
    np.testing.assert_allclose(got, [[-1.0, 1.0, -1.0, 6.0]], atol=1e-5)
    assert float(jnp.abs(RMSNorm(4, 1e-6)(jnp.array([[10.0, 12.0, 10.0, 12.0]]))).min()) > 0.8


@pytest.mark.parametrize("kept", [jnp.float32, jnp.bfloat16])
def test_head_weights_are_float32_products(kept):
    """Of weights in either dtype; sums rounded to bfloat16 would be off by 1e-3."""
    indexer = indexer_of(random_model("tiny"))
    indexer.weights_proj.weight.set_value(indexer.weights_proj.weight[...].astype(kept))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((50, 48)), jnp.bfloat16)
    got = indexer.head_weights(x)
    assert got.dtype == jnp.float32
    weight = np.asarray(indexer.weights_proj.weight[...], np.float64)
    wanted = np.asarray(x, np.float64) @ weight.T * 16**-0.5 * 128**-0.5
    np.testing.assert_allclose(got, wanted, atol=1e-6)
