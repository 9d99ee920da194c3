"""Attention of whole sequences with selections as masks, and what an indexer is trained and judged by."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from dsa_jax import quant
from dsa_jax.models.indexer import Indexer, index_scores
from dsa_jax.models.mla import MLA, Projected
from dsa_jax.models.norm import contract
from dsa_jax.models.rope import Rotation

Attention = Literal["dense", "sparse"]
IndexKeys = Literal["f32", "fp8"]
Selection = Literal["indexer", "recent", "random"]


class AttentionOptions(NamedTuple):
    """What every layer needs to know; static."""

    attention: Attention
    index_keys: IndexKeys
    selection: Selection
    index_loss: bool
    recall: bool
    recall_from: int
    topk: int
    scale_rule: quant.ScaleRule

    @property
    def needs_selection(self) -> bool:
        """Whether a selection is made at all."""
        return self.attention == "sparse" or self.recall


def batch_attention(
    mla: MLA, x: Array, turn: Rotation, inherited: Array | None, key: Array | None, options: AttentionOptions
) -> tuple[Array, Array | None, Array | None, Array]:
    """Attention half of a layer, between its norm and its residual connection.

    Args:
        mla: the weights.
        x: ``[B, S, hidden]``, normalised.
        turn: cosine and sine of the positions, ``[1, S, rope / 2]``.
        inherited: selection of the full layer before, ``bool[B, S, S]``; used where this layer has no indexer.
        key: for a random selection.
        options: static choices.

    Returns:
        ``[B, S, hidden]``; the selection ``bool[B, S, S]`` (None where nothing needs one); the divergence of the index
        scores (None without an indexer, zero unless asked for); and the attention mass that the selection catches.
    """
    length = x.shape[1]
    projected = mla.project(x, turn)
    keys, values = mla.expand(projected.latent)
    causal = jnp.tril(jnp.ones((1, length, length), jnp.bool_))
    logits = _attention_scores(mla, projected, keys)
    scores = None
    if mla.indexer is not None and (
        options.index_loss or (options.needs_selection and options.selection == "indexer")
    ):
        scores = _index_scores(
            mla.indexer, lax.stop_gradient(x), lax.stop_gradient(projected.q_lora), turn, options
        )
    selected = None
    if options.needs_selection:
        selected = _select(scores, causal, inherited, key, x.shape[0], options)
    visible = selected if selected is not None and options.attention == "sparse" else causal

    probabilities = masked_softmax(logits, visible[:, None])
    attended = contract("bhts,bshd->bthd", probabilities.astype(x.dtype), values)

    kl = None
    if mla.indexer is not None:
        kl = jnp.zeros((), jnp.float32)
        if options.index_loss and scores is not None:
            target = lax.stop_gradient(jnp.mean(probabilities, axis=1))
            kl = divergence(target, scores, visible)
    caught = jnp.zeros((), jnp.float32)
    if options.recall and selected is not None:
        full = probabilities if options.attention == "dense" else masked_softmax(logits, causal[:, None])
        mass = jnp.sum(jnp.where(selected, jnp.mean(full, axis=1), 0.0), axis=-1)
        caught = lax.stop_gradient(jnp.mean(mass[:, options.recall_from :]))
    return mla.output(attended), selected, kl, caught


def _attention_scores(mla: MLA, projected: Projected, keys: Array) -> Array:
    """Scaled attention scores ``float32[B, h, S, S]`` without a mask, in the expanded form."""
    rotary = jnp.broadcast_to(projected.k_rope[:, :, None], (*keys.shape[:-1], projected.k_rope.shape[-1]))
    q = jnp.concatenate([projected.q_nope, projected.q_rope], axis=-1)
    k = jnp.concatenate([keys, rotary], axis=-1)
    return contract("bthd,bshd->bhts", q, k, wide=True) * mla.config.softmax_scale


def _index_scores(
    indexer: Indexer, x: Array, q_lora: Array, turn: Rotation, options: AttentionOptions
) -> Array:
    hadamard = indexer.config.index_hadamard
    q, k = indexer.query(q_lora, turn, hadamard=hadamard), indexer.key(x, turn, hadamard=hadamard)
    weights = indexer.head_weights(x)
    if options.index_keys == "f32":
        return index_scores(q, k, weights)
    # Codes are exact in any float type; the scales stay outside of the dot products, as in the paged step.
    q_codes, q_scale = quant.quantize_fp8(q, options.scale_rule)
    k_codes, k_scale = quant.quantize_fp8(k, options.scale_rule)
    q, k = quant.decode_e4m3(q_codes).astype(x.dtype), quant.decode_e4m3(k_codes).astype(x.dtype)
    return index_scores(q, k, weights * q_scale) * k_scale[:, None, :]


def _select(
    scores: Array | None,
    causal: Array,
    inherited: Array | None,
    key: Array | None,
    batch: int,
    options: AttentionOptions,
):
    """Selected tokens as a mask ``bool[B, S, S]``: among the causal ones the best ``topk``, the lowest position on ties."""
    length = causal.shape[-1]
    if options.selection == "recent":
        recent = jnp.arange(length)[:, None] - jnp.arange(length)[None, :] < options.topk
        return jnp.broadcast_to(causal & recent[None], (batch, length, length))
    if options.selection == "random":
        assert key is not None  # checked by forward_batch
        scores = jax.random.uniform(key, (batch, length, length))
    elif scores is None:
        if inherited is None:
            raise ValueError(
                "forward_batch: a shared layer has no full layer before it; make layer 0 full in full_layers."
            )
        return inherited
    return top_mask(lax.stop_gradient(scores), causal, options.topk)


def top_mask(scores: Array, allowed: Array, k: int) -> Array:
    """Mask of the k greatest allowed scores of each row; +0.0 equals -0.0 and the lowest index wins ties.

    Args:
        scores: ``float32[..., S, S]``.
        allowed: ``bool``, broadcast with ``scores``.
        k: entries to keep; a row with fewer allowed entries keeps them all.

    Returns:
        ``bool`` of the broadcast shape.
    """
    ranked = jnp.where(allowed, jnp.where(scores == 0, 0.0, scores), -jnp.inf)
    best = lax.top_k(ranked, min(k, ranked.shape[-1]))[1]
    mask = jnp.zeros(ranked.shape, jnp.bool_)
    mask = jnp.put_along_axis(mask, best, True, axis=-1, inplace=False)
    return mask & allowed


def divergence(target: Array, scores: Array, visible: Array) -> Array:
    """Mean over rows of KL(target || softmax of the visible scores), in nats. Its gradient is ``softmax - target``.

    Args:
        target: ``float32[B, S, S]``, rows sum to 1 and are zero where not visible.
        scores: ``float32[B, S, S]``.
        visible: ``bool``, broadcast with both; every row has a visible entry.

    Returns:
        ``float32`` scalar.
    """
    masked = jnp.where(visible, scores, -1e30)
    log_q = jax.nn.log_softmax(masked, axis=-1)
    log_p = jnp.log(jnp.maximum(target, 1e-30))
    return jnp.mean(jnp.sum(jnp.where(visible & (target > 0), target * (log_p - log_q), 0.0), axis=-1))


def masked_softmax(scores: Array, visible: Array) -> Array:
    """Softmax over the visible entries of the last axis, exactly zero elsewhere; every row has a visible entry."""
    return jnp.where(visible, jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1), 0.0)
