"""The compiled parts of training: the optimizer, several steps in one call, and validation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from dsa_jax.models.train.stages import Stage, learning_rate, objective, rebalance
from dsa_jax.models.train.streams import Streams, windows


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides the result, besides the model's configuration and the data.

    Attributes:
        stages: in order.
        batch: contexts a step.
        length: tokens a context.
        seed: of the initial weights, the order of the contexts and the noise.
        decay: decoupled weight decay on matrices, times the learning rate.
        mtp_weight: factor on the MTP loss.
        balance_speed: greatest move of the experts' correction bias a step, in stages that train the main model; it
            falls with the learning rate. Ten times the published value, since this run has thousands of steps.
        chunk: steps in one call of the compiled function; a stage's steps are rounded down to a multiple.
        validate_every: steps between validations, a multiple of ``chunk``.
        bfloat16: activations in bfloat16 (weights stay float32).
    """

    stages: tuple[Stage, ...]
    batch: int = 8
    length: int = 2048
    seed: int = 0
    decay: float = 0.5
    mtp_weight: float = 0.3
    balance_speed: float = 1e-2
    chunk: int = 10
    validate_every: int = 100
    bfloat16: bool = True

    @property
    def dtype(self) -> jnp.dtype:
        """Of the activations."""
        return jnp.dtype(jnp.bfloat16 if self.bfloat16 else jnp.float32)


def optimizer(params: Any, decay: float) -> optax.GradientTransformation:
    """AdamW without the learning rate, separate for indexers and the rest, so that neither's gradient clips the other's.

    Args:
        params: the trainable weights; leaves whose path names an indexer form a group of their own.
        decay: weight decay of matrices.

    Returns:
        A transformation whose updates are to be multiplied by minus the learning rate of their group.
    """

    def adamw() -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.scale_by_adam(b1=0.9, b2=0.95),
            optax.add_decayed_weights(
                decay, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)
            ),
        )

    return optax.partition({"indexer": adamw(), "main": adamw()}, groups(params))


def groups(params: Any) -> Any:
    """For each leaf, ``"indexer"`` or ``"main"``."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "indexer" if "indexer" in jax.tree_util.keystr(path) else "main", params
    )


@lru_cache(maxsize=16)
def train_chunk(graph: Any, stage: Stage, settings: Settings) -> Callable:
    """Compiled function that takes several steps: ``(arrays, tokens, starts, step, steps) -> (arrays, parts)``."""
    offsets = jnp.arange(settings.length, dtype=jnp.int32)
    rates = {"main": stage.main_rate, "indexer": stage.index_rate}

    def one(tokens: Array, steps: Array, arrays: dict, now: tuple[Array, Array]) -> tuple[dict, dict]:
        starts, step = now
        # One key a step and stage, so that a resumed run draws the same noise.
        key = jax.random.fold_in(jax.random.key(settings.seed), step)
        context = tokens[starts[:, None] + offsets[None]]

        def loss(params: Any) -> tuple[Array, Any]:
            model = nnx.merge(graph, params, arrays["buffers"])
            return objective(
                model, context, stage, key=key, mtp_weight=settings.mtp_weight, dtype=settings.dtype
            )

        (_, (parts, outputs)), gradient = jax.value_and_grad(loss, has_aux=True)(arrays["params"])
        params = arrays["params"]
        tx = optimizer(params, settings.decay)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
            updates, moments = tx.update(gradient, arrays["moments"], params)
        factor = learning_rate(step, steps, stage.warmup)
        params = jax.tree.map(
            lambda weight, update, group: weight - factor * rates[group] * update,
            params,
            updates,
            groups(params),
        )
        buffers = arrays["buffers"]
        if stage.main_rate:
            buffers = _rebalance_all(buffers, outputs.moe_load, settings.balance_speed * factor)
        arrays = arrays | {"params": params, "moments": moments, "buffers": buffers}
        return arrays, parts | {"balance": jnp.max(outputs.moe_load) * outputs.moe_load.shape[-1]}

    @partial(jax.jit, donate_argnums=0)
    def chunk(arrays: dict, tokens: Array, starts: Array, step: Array, steps: Array) -> tuple[dict, dict]:
        numbers = step + jnp.arange(starts.shape[0])
        arrays, parts = jax.lax.scan(partial(one, tokens, steps), arrays, (starts, numbers))
        return arrays, jax.tree.map(jnp.mean, parts)

    return chunk


def _rebalance_all(buffers: Any, loads: Array, speed: Array) -> Any:
    leaves, structure = jax.tree.flatten(buffers)
    if len(leaves) != len(loads):
        raise ValueError(
            f"train: {len(leaves)} buffers for {len(loads)} layers with experts; want one correction bias a layer: "
            "treat the new buffer in the training loop"
        )
    return jax.tree.unflatten(
        structure, [rebalance(leaf, load, speed) for leaf, load in zip(leaves, loads, strict=True)]
    )


@lru_cache(maxsize=16)
def validation(graph: Any, stage: Stage, settings: Settings) -> Callable:
    """Compiled ``(params, buffers, contexts) -> parts``: means over contexts ``int32[batches, batch, length]``."""
    quiet = dataclasses.replace(stage, noise=0.0)

    @jax.jit
    def validate(params: Any, buffers: Any, contexts: Array) -> dict[str, Array]:
        def one(batch: Array) -> dict[str, Array]:
            model = nnx.merge(graph, params, buffers)
            key, dtype = jax.random.key(0), settings.dtype
            return objective(model, batch, quiet, key=key, mtp_weight=settings.mtp_weight, dtype=dtype)[1][0]

        return jax.tree.map(jnp.mean, jax.lax.map(one, contexts))

    return validate


def validation_contexts(streams: Streams, settings: Settings) -> Array:
    """Contexts of the validation modules, ``int32[batches, batch, length]``; what fills no batch is left out.

    Raises:
        ValueError: no module is long enough.
    """
    found = windows(streams.modules("validation"), [settings.length]).get(settings.length)
    if found is None:
        raise ValueError(
            f"train: no validation module has length={settings.length} tokens; want at least one context: "
            "use shorter contexts or more text"
        )
    batch = min(settings.batch, len(found))
    whole = len(found) // batch * batch
    return jnp.asarray(found[:whole].reshape(-1, batch, settings.length))
