"""The paged step: new tokens of a ragged batch through the model, every key read back from the cache.

One function serves prefill, chunked prefill, decoding and mixtures; the metadata's bucket tells them apart. The cache is a
value: passed in, handed back, donated by the caller's outermost ``jit``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from dsa_jax import ops
from dsa_jax.arguments import FLOATS, described, expect, is_whole, misfit
from dsa_jax.cache import Cache
from dsa_jax.metadata import Step, StepMetadata
from dsa_jax.models.config import ModelConfig
from dsa_jax.models.decoder import Decoder
from dsa_jax.models.indexer import Indexer
from dsa_jax.models.layer import DecoderLayer
from dsa_jax.models.mla import MLA
from dsa_jax.models.rope import Rotation, rotation
from dsa_jax.models.weights import Parameters, take_apart
from dsa_jax.ops.dispatch import Choice

StepFunction = Callable[[Parameters, Cache, StepMetadata, Array], tuple[Cache, Array]]


def make_step(
    model: Decoder,
    *,
    index_topk: int | None = None,
    implementation: Choice = None,
    stacked: bool | None = None,
) -> tuple[StepFunction, Parameters]:
    """Take a model apart into a pure function and its weights.

    Args:
        model: the weights; activations have the dtype of its embedding.
        index_topk: tokens that a query attends to, instead of the configuration's.
        implementation: of every op, see ``dsa_jax.ops``.
        stacked: see `weights.take_apart`.

    Returns:
        ``step(params, cache, metadata, tokens) -> (cache, logits)`` and ``params``. Jit the step with the cache donated:
        ``jax.jit(step, donate_argnums=1)``. ``tokens`` is ``int32[N]`` by the bucket's places; ``logits`` is
        ``float32[N, vocab]``, meaningless at padding places.

    Raises:
        ValueError: ``model`` is none. The step raises it for weights, metadata, cache and tokens that are not its own.
    """
    expect("make_step", "model", model, Decoder, _FIX_MODEL)
    params, rebuild = take_apart(model, model.config.dsa, stacked=stacked)

    def step(params: Parameters, cache: Cache, metadata: StepMetadata, tokens: Array) -> tuple[Cache, Array]:
        model = rebuild(params)
        cache, logits, _ = decode_tokens(
            model, tokens, cache, _derived(metadata), index_topk=index_topk, implementation=implementation
        )
        return cache, logits

    return step, params


def make_speculative(
    model: Decoder,
    *,
    index_topk: int | None = None,
    implementation: Choice = None,
    stacked: bool | None = False,
) -> tuple[Callable, Callable, Parameters]:
    """The functions that ``dsa_jax.loops`` asks of a model with a prediction layer.

    Args:
        model: the weights.
        index_topk: tokens that a query attends to, instead of the configuration's.
        implementation: of every op, see ``dsa_jax.ops``.
        stacked: see `weights.take_apart`, but False unless said otherwise. A program of many steps is called once for all of
            them, so the number of its arguments hardly counts; but in the body of a loop XLA copies each weight out of its
            stack again, in every turn.

    Returns:
        ``step(params, cache, metadata, tokens) -> (cache, logits, hidden)`` of the main model,
        ``draft(params, cache, metadata, tokens, hidden, rows) -> (cache, logits, hidden, rows)`` of the prediction layer,
        and ``params``. A model without a prediction layer has a step for loops without drafts; its draft raises.

    Raises:
        ValueError: ``model`` is none. Step and draft raise it for weights, metadata, cache, tokens and states that are not
            their own.
    """
    expect("make_speculative", "model", model, Decoder, _FIX_MODEL)
    params, rebuild = take_apart(model, model.config.dsa, stacked=stacked)
    options: Any = {"index_topk": index_topk, "implementation": implementation}

    def step(params: Parameters, cache: Cache, metadata: StepMetadata, tokens: Array):
        model = rebuild(params)
        return decode_tokens(model, tokens, cache, _derived(metadata), **options)

    def draft(
        params, cache: Cache, metadata: StepMetadata, tokens: Array, hidden: Array, rows: Array | None = None
    ):
        model = rebuild(params)
        return predict_tokens(model, tokens, hidden, cache, _derived(metadata), rows, **options)

    return step, draft, params


def decode_tokens(
    model: Decoder,
    tokens: Array,
    cache: Cache,
    step: Step,
    *,
    index_topk: int | None = None,
    implementation: Choice = None,
) -> tuple[Cache, Array, Array]:
    """Run new tokens through the main model.

    Args:
        model: the weights.
        tokens: ``int32[N]``, one per token place of the step's bucket; anything at padding places.
        cache: holds every earlier token of the requests; its layout must hold all decoder layers.
        step: ``metadata.derive()``.
        index_topk: tokens that a query attends to, instead of the configuration's.
        implementation: of every op, see ``dsa_jax.ops``.

    Returns:
        The cache with the new tokens, ``float32[N, vocab]`` logits, and the hidden states ``[N, hidden]`` after the final
        norm, which a prediction layer continues from.

    Raises:
        ValueError: if the cache's layout is not one of this model, or ``tokens`` has another length.
    """
    dsa = model.config.dsa
    _check(model.config, cache, tuple(range(dsa.num_layers)), tokens, step, index_topk)
    turn = rotation(dsa.rope, dsa.qk_rope_head_dim, step.positions)
    x = model.model.embed_tokens(tokens)
    rows = None
    for number, layer in enumerate(model.decoder_layers):
        local = cache.layout.layers.index(number)
        cache, x, rows = _layer(
            layer, x, turn, cache, local, step, rows, index_topk or dsa.index_topk, implementation
        )
    hidden = model.model.norm(x)
    return cache, model.logits(hidden), hidden


def predict_tokens(
    model: Decoder,
    tokens: Array,
    hidden: Array,
    cache: Cache,
    step: Step,
    rows: Array | None = None,
    *,
    index_topk: int | None = None,
    implementation: Choice = None,
) -> tuple[Cache, Array, Array, Array]:
    """Run the first prediction layer over the same token places.

    Args:
        model: the weights.
        tokens: ``int32[N]``: at each place the token *after* the one that the main model saw there.
        hidden: ``[N, hidden]`` from ``decode_tokens``, or from the previous call in later draft steps.
        cache: a draft cache; its layout holds the prediction layer.
        step: of the draft cache, with the positions of ``hidden``.
        rows: ``int32[N, index_topk]`` rows of the draft cache to attend to instead of selecting any (later draft steps under
            ``index_share_for_mtp_iteration``); the index keys are written all the same.
        index_topk: tokens that a query attends to, instead of the configuration's.
        implementation: of every op, see ``dsa_jax.ops``.

    Returns:
        The cache, ``float32[N, vocab]`` logits for the token after ``tokens``, the layer's state ``[N, hidden]`` after its
        own norm, and the rows that were attended to.

    Raises:
        ValueError: if the model has no prediction layer, the layout does not hold it, or ``tokens`` or ``hidden`` has
            another shape or dtype.
    """
    dsa = model.config.dsa
    if not model.prediction_layers:
        raise ValueError(
            "predict_tokens: the model has no prediction layer; load a checkpoint with num_nextn_predict_layers."
        )
    places = step.bucket.tokens
    states = misfit(
        "hidden",
        hidden,
        (places, model.config.hidden_size),
        FLOATS,
        f"float[{places}, {model.config.hidden_size}]",
    )
    _check(model.config, cache, (dsa.num_layers,), tokens, step, index_topk, states)
    layer, local = model.prediction_layers[0], cache.layout.layers.index(dsa.num_layers)
    turn = rotation(dsa.rope, dsa.qk_rope_head_dim, step.positions)
    x = layer.join(model.model.embed_tokens(tokens), hidden)
    cache, x, rows = _layer(
        layer,
        x,
        turn,
        cache,
        local,
        step,
        rows,
        index_topk or dsa.index_topk,
        implementation,
        reuse=rows is not None,
    )
    hidden = layer.shared_head.norm(x)
    return cache, model.logits(hidden), hidden, rows


def _layer(
    layer: DecoderLayer,
    x: Array,
    turn: Rotation,
    cache: Cache,
    local: int,
    step: Step,
    rows: Array | None,
    index_topk: int,
    implementation: Choice,
    *,
    reuse: bool = False,
) -> tuple[Cache, Array, Array]:
    """One layer as a straight line: cache, residual stream, and the rows that a following shared layer reuses.

    ``reuse`` attends to ``rows`` also in a layer that could select; its index keys are written all the same.
    """
    mla: MLA = layer.self_attn
    normed = layer.input_layernorm(x)
    projected = mla.project(normed, turn)
    if mla.indexer is not None:
        key = mla.indexer.key(normed, turn, hadamard=cache.layout.hadamard)
        cache = ops.append_index_k(cache, local, key, step, implementation=implementation)
        if not reuse:
            rows = _select(
                mla.indexer, normed, projected.q_lora, turn, cache, local, step, index_topk, implementation
            )
    assert rows is not None  # the configuration makes layer 0 and every prediction layer full
    cache = ops.append_latent(
        cache, local, projected.latent, projected.k_rope, step, implementation=implementation
    )
    attended, _ = ops.sparse_mla(
        mla.absorbed_query(projected),
        cache,
        local,
        rows,
        mla.config.softmax_scale,
        implementation=implementation,
    )
    x, _ = layer.feed_forward(x + mla.absorbed_output(attended))
    return cache, x, rows


def _select(
    indexer: Indexer,
    x: Array,
    q_lora: Array,
    turn: Rotation,
    cache: Cache,
    local: int,
    step: Step,
    index_topk: int,
    implementation: Choice,
) -> Array:
    """Score all keys, the new ones included, and give the selected rows ``int32[N, index_topk]``."""
    layout = cache.layout
    projected = indexer.query(q_lora, turn, hadamard=layout.hadamard)
    weights = indexer.head_weights(x)
    tokens, heads, width = projected.shape
    data, scale = ops.quantize_index_k(
        projected.reshape(-1, width),
        layout.index_form,
        scale_rule=layout.scale_rule,
        tie_rule=layout.tie_rule,
        implementation=implementation,
    )
    query: Any = data.reshape(tokens, heads, data.shape[-1])
    if scale is not None:
        scale = scale.reshape(tokens, heads)
        if layout.index_form == "fp4":  # block scales cannot leave the dot product
            query = query, scale
        else:  # positive, so it may leave the ReLU and join the head's weight
            weights = weights * scale
    return ops.select_rows(
        query,
        weights,
        cache,
        local,
        step,
        index_topk,
        implementation=implementation,
    )


def _check(
    config: ModelConfig,
    cache: Cache,
    layers: tuple[int, ...],
    tokens: Array,
    step: Step,
    index_topk: int | None,
    states: Sequence[str] = (),
) -> None:
    """Raise ValueError naming everything that is wrong, with ``states``, what was found wrong with the hidden states."""
    expect(
        "paged step", "cache", cache, Cache, "Pass what Cache.create(layout, slots) or another step returned."
    )
    dsa, layout = config.dsa, cache.layout
    problems = [
        f"the layout's {name} is {came}, the model's {want}"
        for name, came, want in (
            ("latent_dim", layout.latent_dim, dsa.kv_lora_rank),
            ("rope_dim", layout.rope_dim, dsa.qk_rope_head_dim),
            ("index_head_dim", layout.index_head_dim, dsa.index_head_dim),
        )
        if came != want
    ]
    missing = [i for i in layers if i not in layout.layers]
    if missing:
        problems.append(f"the layout holds layers {list(layout.layers)}, layers {missing} are missing")
    full = [
        i for i in layers if i in layout.layers and layout.full[layout.layers.index(i)] != dsa.full_layers[i]
    ]
    if full:
        problems.append(f"layout and model disagree on which of layers {full} own an indexer")
    fixes = ["Create the layout with CacheLayout.create(model.config.dsa, ...)."] if problems else []
    places, others = step.bucket.tokens, list(states)
    if getattr(tokens, "shape", None) != (places,) or not jnp.issubdtype(tokens.dtype, jnp.integer):
        others.insert(0, f"tokens is {described(tokens)}; wanted int32[{places}]")
    if others:
        fixes.append("Pass one entry for each token place of the metadata's bucket.")
    if index_topk is not None and not (is_whole(index_topk) and index_topk >= 1):
        others.append(f"index_topk is {described(index_topk)}; wanted a whole number of at least 1")
        fixes.append("Leave index_topk out for the configuration's.")
    if problems + others:
        raise ValueError(f"paged step: {'; '.join(problems + others)}. {' '.join(fixes)}")


_FIX_MODEL = "Pass what checkpoint.load_pretrained(...) returned, or another Decoder."


def _derived(metadata: StepMetadata) -> Step:
    fix = "Pass what StepMetadata.create returned, not the step derived from it."
    expect("paged step", "metadata", metadata, StepMetadata, fix)
    return metadata.derive()
