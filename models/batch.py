"""Whole sequences at once, without a cache: the forward pass for training and evaluation.

It runs the same weights as the paged step, with attention in its expanded form and selections as masks. Besides logits it
gives what the published recipe trains and judges an indexer by: the divergence of its scores from the attention they stand
for, and the attention mass that a selection catches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
from jax import Array

from dsa_jax import quant
from dsa_jax.models.batch_attention import Attention, AttentionOptions, IndexKeys, Selection, batch_attention
from dsa_jax.models.decoder import Decoder
from dsa_jax.models.layer import DecoderLayer
from dsa_jax.models.rope import Rotation, rotation


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class BatchOutputs:
    """Results of ``forward_batch``. Layers are counted with the prediction layers last.

    Attributes:
        logits: ``float32[B, S, vocab]``, at position i for token i + 1.
        hidden: ``[B, S, hidden]`` after the final norm.
        mtp_logits: ``float32[B, S, vocab]`` of the first prediction layer, at position i for token i + 2; the last position
            has no next token to embed and means nothing. None without a prediction layer or with ``mtp=False``.
        index_kl: ``float32[F]``, one entry for each layer that owns an indexer: mean over tokens of the divergence
            KL(attention || softmax of the index scores), in nats; zeros unless ``index_loss``.
        recall: ``float32[layers]``, mean share of the full causal attention that falls on the selected tokens, over all
            heads and all positions from ``recall_from`` on; zeros unless ``recall``.
        moe_load: ``float32[M, E]``, for each layer with experts the share of choices that went to each expert.
    """

    logits: Array
    hidden: Array
    mtp_logits: Array | None
    index_kl: Array
    recall: Array
    moe_load: Array


def forward_batch(
    model: Decoder,
    tokens: Array,
    *,
    attention: Attention = "sparse",
    index_keys: IndexKeys = "f32",
    selection: Selection = "indexer",
    index_loss: bool = False,
    recall: bool = False,
    recall_from: int = 0,
    mtp: bool = True,
    index_topk: int | None = None,
    rng: Array | None = None,
    dtype: jnp.dtype | type = jnp.float32,
    remat: bool = False,
    scale_rule: quant.ScaleRule = "ue8m0",
) -> BatchOutputs:
    """Run whole sequences that all start at position 0.

    The indexer sees its inputs and its target through ``stop_gradient``: the language-model loss trains everything but the
    indexers, ``index_kl`` trains the indexers and nothing else (recipe of the DeepSeek-V3.2 report).

    Args:
        model: the weights; differentiate with respect to them or to a part of them.
        tokens: ``int32[B, S]``.
        attention: ``"dense"`` attends to all earlier tokens, ``"sparse"`` to the selected ones.
        index_keys: ``"fp8"`` passes the indexer's queries and keys through the FP8 form of the cache; not differentiable.
        selection: who selects: the indexer, the ``index_topk`` most recent tokens, or so many random earlier ones.
        index_loss: whether to compute ``index_kl``: over all earlier tokens under dense attention, over the selected tokens
            (both distributions renormalised) under sparse attention.
        recall: whether to compute ``recall``.
        recall_from: first position that counts for ``recall``.
        mtp: whether to run the first prediction layer.
        index_topk: tokens to select instead of the configuration's ``index_topk``.
        rng: key for ``selection="random"``.
        dtype: of the activations. Softmax, norms, router, index scores and logits are float32 throughout.
        remat: recompute each layer in the backward pass instead of keeping its activations.
        scale_rule: of ``index_keys="fp8"``.

    Raises:
        ValueError: for an unknown choice, tokens that are not ``[B, S]``, a length beyond the context, or a missing ``rng``.
    """
    dsa = model.config.dsa
    topk = dsa.index_topk if index_topk is None else index_topk
    _check(tokens, dsa.max_position_embeddings, attention, index_keys, selection, index_loss, topk, rng)
    options = AttentionOptions(
        attention, index_keys, selection, index_loss, recall, recall_from, topk, scale_rule
    )
    length = tokens.shape[1]
    turn = rotation(dsa.rope, dsa.qk_rope_head_dim, jnp.arange(length, dtype=jnp.int32)[None, :])
    run = partial(_layer, options=options)
    if remat:
        run = jax.checkpoint(run)
    keys = (
        [None] * len(model.model.layers)
        if rng is None
        else list(jax.random.split(rng, len(model.model.layers)))
    )

    kls, recalls, loads = [], [], []

    def through(
        layer: DecoderLayer, x: Array, inherited: Array | None, key: Array | None
    ) -> tuple[Array, Array | None]:
        x, selected, kl, caught, load = run(layer, x, turn, inherited, key)
        if kl is not None:
            kls.append(kl)
        recalls.append(caught)
        if load is not None:
            loads.append(load)
        return x, selected

    x = model.model.embed_tokens(tokens).astype(dtype)
    selected = None
    for layer, key in zip(model.decoder_layers, keys, strict=False):
        x, selected = through(layer, x, selected, key)
    hidden = model.model.norm(x)

    mtp_logits = None
    if mtp and model.prediction_layers:
        layer = model.prediction_layers[0]
        following = jnp.concatenate([tokens[:, 1:], jnp.zeros_like(tokens[:, :1])], axis=1)
        x = layer.join(model.model.embed_tokens(following), hidden)
        x, _ = through(layer, x, None, keys[dsa.num_layers])
        mtp_logits = model.logits(layer.shared_head.norm(x))
    return BatchOutputs(
        logits=model.logits(hidden),
        hidden=hidden,
        mtp_logits=mtp_logits,
        index_kl=jnp.stack(kls),
        recall=jnp.stack(recalls),
        moe_load=jnp.stack(loads) if loads else jnp.zeros((0, model.config.n_routed_experts)),
    )


def _layer(
    layer: DecoderLayer,
    x: Array,
    turn: Rotation,
    inherited: Array | None,
    key: Array | None,
    *,
    options: AttentionOptions,
):
    """One layer: residual stream, selection, divergence (None without an indexer), caught mass, expert load."""
    normed = layer.input_layernorm(x)
    attended, selected, kl, caught = batch_attention(layer.self_attn, normed, turn, inherited, key, options)
    x, load = layer.feed_forward(x + attended)
    return x, selected, kl, caught, load


def _check(tokens, longest: int, attention, index_keys, selection, index_loss: bool, topk: int, rng) -> None:
    problems = []
    for name, value, choices in (
        ("attention", attention, get_args(Attention)),
        ("index_keys", index_keys, get_args(IndexKeys)),
        ("selection", selection, get_args(Selection)),
    ):
        if value not in choices:
            problems.append(f"{name} is {value!r}; wanted one of {', '.join(choices)}")
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        problems.append(f"tokens is {tokens.dtype}{list(tokens.shape)}; wanted integers [B, S]")
    elif not 1 <= tokens.shape[1] <= longest:
        problems.append(
            f"tokens has length {tokens.shape[1]}; wanted 1 to {longest}, the context of the model"
        )
    if topk < 1:
        problems.append(f"index_topk is {topk}; wanted at least 1")
    if selection == "random" and rng is None:
        problems.append("selection 'random' needs rng; pass a jax.random key")
    if index_loss and index_keys == "fp8":
        problems.append("index_loss with index_keys 'fp8' has no gradient; train with 'f32'")
    if problems:
        raise ValueError("forward_batch: " + "; ".join(problems) + ".")
