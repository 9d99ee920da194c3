"""The three stages of the published recipe and what each one minimises.

Source: DeepSeek-V3.2-Exp report. Dense language modelling, then indexer warm-up (only the indexers learn, from the dense
attention summed over heads), then the sparse stage (everything learns; the indexers see the model through
``stop_gradient`` and learn from their own loss alone).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array

from dsa_jax.models.batch import BatchOutputs, forward_batch
from dsa_jax.models.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of training.

    Attributes:
        name: for logs and checkpoints.
        attention: what the main model attends to.
        language: whether the language-model and MTP losses are minimised.
        index: whether the indexers' divergence is minimised.
        steps: greatest number of optimizer steps.
        share: share of the time budget, if there is one.
        main_rate: peak learning rate of everything but the indexers; 0 freezes it.
        index_rate: the same of the indexers.
        warmup: steps of linear increase.
        noise: share of input tokens replaced by random ones (the targets stay), against overfitting.
        patience: validations without a new best before the stage ends.
    """

    name: str
    attention: Literal["dense", "sparse"]
    language: bool
    index: bool
    steps: int
    share: float
    main_rate: float
    index_rate: float
    warmup: int
    noise: float = 0.0
    patience: int = 10


def recipe(
    *, steps: tuple[int, int, int], rate: float = 2e-3, noise: float = 0.05, warmup: int = 100
) -> tuple[Stage, ...]:
    """The three stages.

    Args:
        steps: of each stage.
        rate: peak learning rate of the dense stage; the sparse stage starts from a fifth of it.
        noise: of the dense stage.
        warmup: of the dense stage; half of it in the others.

    Returns:
        Dense, indexer warm-up and sparse stage.
    """
    dense = Stage(
        name="dense", attention="dense", language=True, index=False, steps=steps[0], share=0.5,
        main_rate=rate, index_rate=0.0, warmup=warmup, noise=noise,
    )  # fmt: skip
    indexer = Stage(
        name="indexer", attention="dense", language=False, index=True, steps=steps[1], share=0.15,
        main_rate=0.0, index_rate=2e-3, warmup=warmup // 2,
    )  # fmt: skip
    sparse = Stage(
        name="sparse", attention="sparse", language=True, index=True, steps=steps[2], share=0.35,
        main_rate=rate / 5, index_rate=1e-3, warmup=warmup // 2, noise=noise / 2,
    )  # fmt: skip
    return dense, indexer, sparse


def token_losses(logits: Array, tokens: Array, ahead: int) -> Array:
    """Cross entropy in nats of the token ``ahead`` places on, ``float32[B, S - ahead]``."""
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-ahead], tokens[:, ahead:])


def objective(
    model: Decoder, tokens: Array, stage: Stage, *, key: Array, mtp_weight: float, dtype: jnp.dtype | type
) -> tuple[Array, tuple[dict[str, Array], BatchOutputs]]:
    """What a stage minimises.

    Args:
        model: the weights.
        tokens: ``int32[B, S]``.
        stage: which losses, which attention, how much noise.
        key: for the noise.
        mtp_weight: factor on the MTP loss.
        dtype: of the activations.

    Returns:
        The loss, and its parts by name (``loss`` of the next token, ``mtp_loss`` of the one after, ``index_kl`` summed
        over layers) with the outputs of the forward pass.
    """
    chosen, random = jax.random.split(key)
    noisy = jax.random.bernoulli(chosen, stage.noise, tokens.shape)
    seen = jnp.where(noisy, jax.random.randint(random, tokens.shape, 0, model.config.vocab_size), tokens)
    outputs = forward_batch(
        model, seen if stage.noise else tokens, attention=stage.attention, index_loss=stage.index, dtype=dtype
    )
    parts = {"index_kl": jnp.sum(outputs.index_kl), "loss": jnp.mean(token_losses(outputs.logits, tokens, 1))}
    total = parts["index_kl"] if stage.index else jnp.zeros(())
    if outputs.mtp_logits is not None:
        parts["mtp_loss"] = jnp.mean(token_losses(outputs.mtp_logits, tokens, 2))
    if stage.language:
        total = total + parts["loss"] + mtp_weight * parts.get("mtp_loss", 0.0)
    return total, (parts, outputs)


def rebalance(bias: Array, load: Array, speed: Array | float) -> Array:
    """Moves the correction bias towards experts that got less than their share, without any auxiliary loss.

    Source: DeepSeek-V3 report, section 2.1.2: add ``speed`` where an expert was underloaded, subtract it where overloaded.

    Args:
        bias: ``float32[..., E]``.
        load: ``float32[..., E]``, shares of the choices, summing to 1.
        speed: size of one move.

    Returns:
        The new bias.
    """
    return bias + speed * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)


def learning_rate(step: Array, steps: Array, warmup: int, *, final: float = 0.02) -> Array:
    """Factor on the peak rate: linear increase, then half a cosine down to ``final`` at ``steps``."""
    ramp = jnp.minimum(1.0, (step + 1) / max(warmup, 1))
    progress = jnp.clip((step - warmup) / jnp.maximum(steps - warmup, 1), 0.0, 1.0)
    return ramp * (final + (1.0 - final) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress)))
