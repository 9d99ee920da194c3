"""The training loop: three stages, several steps a call, validation, early stopping, a time budget and resuming."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from dsa_jax.models.decoder import Decoder
from dsa_jax.models.train import state as state_
from dsa_jax.models.train.stages import Stage, learning_rate, objective, rebalance
from dsa_jax.models.train.streams import Sampler, Streams, windows


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
        balance_speed: move of the experts' correction bias a step, in stages that train the main model.
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
    balance_speed: float = 1e-3
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


def _train_chunk(graph: Any, stage: Stage, settings: Settings) -> Callable:
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
            buffers = _rebalance_all(buffers, outputs.moe_load, settings.balance_speed)
        arrays = arrays | {"params": params, "moments": moments, "buffers": buffers}
        return arrays, parts | {"balance": jnp.max(outputs.moe_load) * outputs.moe_load.shape[-1]}

    @partial(jax.jit, donate_argnums=0)
    def chunk(arrays: dict, tokens: Array, starts: Array, step: Array, steps: Array) -> tuple[dict, dict]:
        numbers = step + jnp.arange(starts.shape[0])
        arrays, parts = jax.lax.scan(partial(one, tokens, steps), arrays, (starts, numbers))
        return arrays, jax.tree.map(jnp.mean, parts)

    return chunk


def _rebalance_all(buffers: Any, loads: Array, speed: float) -> Any:
    leaves, structure = jax.tree.flatten(buffers)
    if len(leaves) != len(loads):
        raise ValueError(
            f"train: {len(leaves)} buffers for {len(loads)} layers with experts; want one correction bias a layer: "
            "treat the new buffer in the training loop"
        )
    return jax.tree.unflatten(
        structure, [rebalance(leaf, load, speed) for leaf, load in zip(leaves, loads, strict=True)]
    )


def _validation(graph: Any, stage: Stage, settings: Settings, contexts: Array) -> Callable:
    """Compiled ``(params, buffers) -> parts``: means over all validation contexts, ``int32[batches, batch, length]``."""
    quiet = dataclasses.replace(stage, noise=0.0)

    @jax.jit
    def validate(params: Any, buffers: Any) -> dict[str, Array]:
        def one(batch: Array) -> dict[str, Array]:
            model = nnx.merge(graph, params, buffers)
            key = jax.random.key(0)
            return objective(
                model, batch, quiet, key=key, mtp_weight=settings.mtp_weight, dtype=settings.dtype
            )[1][0]

        return jax.tree.map(jnp.mean, jax.lax.map(one, contexts))

    return validate


def _validation_contexts(streams: Streams, settings: Settings) -> Array:
    found = windows(streams.modules("validation"), [settings.length]).get(settings.length)
    if found is None:
        raise ValueError(
            f"train: no validation module has length={settings.length} tokens; want at least one context: "
            "use shorter contexts or more text"
        )
    batch = min(settings.batch, len(found))
    whole = len(found) // batch * batch
    return jnp.asarray(found[:whole].reshape(-1, batch, settings.length))


class Trainer:
    """One run. ``run()`` does all that is left of it."""

    def __init__(
        self,
        model: Decoder,
        streams: Streams,
        settings: Settings,
        *,
        state_path: Path,
        minutes: float | None = None,
        save_every: int = 500,
    ):
        """Prepare a run from the model's present weights.

        Args:
            model: supplies graph and initial weights; not changed.
            streams: the data.
            settings: of the run.
            state_path: where the resumable state is kept.
            minutes: time for all stages, compilation included; None takes the stages' full steps.
            save_every: steps between saves of the state.

        Raises:
            ValueError: the data is too short.
        """
        self.graph, params, buffers = nnx.split(model, nnx.Param, ...)
        # Copies, since every chunk gives its input away.
        self.arrays = jax.tree.map(
            jnp.array, {"params": params, "buffers": buffers, "best": (params, buffers)}
        )
        self.settings, self.state_path, self.minutes, self.save_every = (
            settings,
            state_path,
            minutes,
            save_every,
        )
        self.tokens = jnp.asarray(streams.tokens["train"].astype(np.int32))
        self.sampler = Sampler(
            len(self.tokens), length=settings.length, batch=settings.batch, seed=settings.seed
        )
        self.contexts = _validation_contexts(streams, settings)
        self.progress = state_.Progress()
        self._begin_moments()
        self._clock = time.monotonic()

    def resume(self) -> None:
        """Continue from the saved state."""
        self.arrays, self.progress = state_.restore(self.state_path, self.arrays, self.facts())

    def run(self, *, stop_after: int | None = None) -> Decoder | None:
        """Train to the end.

        Args:
            stop_after: leave after so many steps of this call, with the state saved; for tests and short leases.

        Returns:
            The trained model, or None if ``stop_after`` came first.
        """
        budget = stop_after
        while self.progress.stage < len(self.settings.stages):
            done = self._run_stage(self.settings.stages[self.progress.stage], budget)
            if budget is not None:
                budget -= done
            if budget is not None and budget <= 0 and self.progress.stage < len(self.settings.stages):
                self.save()
                return None
            self.save()
        return nnx.merge(self.graph, self.arrays["params"], self.arrays["buffers"])

    def save(self) -> None:
        """Write the resumable state."""
        now = time.monotonic()
        self.progress.seconds += now - self._clock
        self._clock = now
        state_.save(self.state_path, self.arrays, self.progress, self.facts())

    def facts(self) -> dict[str, Any]:
        """The settings as plain values."""
        facts = dataclasses.asdict(self.settings)
        return facts | {"stages": [dataclasses.asdict(stage) for stage in self.settings.stages]}

    def _seconds(self) -> float:
        return self.progress.seconds + time.monotonic() - self._clock

    def _begin_moments(self) -> None:
        self.arrays["moments"] = optimizer(self.arrays["params"], self.settings.decay).init(
            self.arrays["params"]
        )

    def _run_stage(self, stage: Stage, budget: int | None) -> int:
        """Steps taken. On the stage's end its best weights become the present ones."""
        settings, progress = self.settings, self.progress
        take = _train_chunk(self.graph, stage, settings)
        validate = _validation(self.graph, stage, settings, self.contexts)
        offset = 1_000_003 * progress.stage  # another order of the contexts in each stage
        started, timed = progress.step, 0.0
        finished = False
        while not finished:
            if budget is not None and progress.step - started >= budget:
                return progress.step - started
            began = time.monotonic()
            starts = jnp.asarray(self.sampler.starts(offset + progress.step, settings.chunk))
            steps = progress.planned or stage.steps
            self.arrays, parts = take(
                self.arrays, self.tokens, starts, jnp.int32(progress.step), jnp.int32(steps)
            )
            parts = {name: float(value) for name, value in parts.items()}
            timed = time.monotonic() - began
            progress.step += settings.chunk
            if not progress.planned and progress.step >= 2 * settings.chunk:
                progress.planned = self._plan(stage, timed / settings.chunk)
            steps = progress.planned or stage.steps
            finished = progress.step + settings.chunk > steps
            _show(stage, progress, steps, parts, settings.chunk / timed)
            if progress.step % settings.validate_every == 0 or finished:
                self._validate(stage, validate, parts)
                finished = finished or progress.since_best >= stage.patience
            if progress.step % self.save_every == 0 and not finished:
                self.save()
        taken = progress.step - started
        # A copy: the best weights must outlive the next stage's donated ones.
        self.arrays["params"], self.arrays["buffers"] = jax.tree.map(jnp.array, self.arrays["best"])
        self._begin_moments()
        progress.stage, progress.step, progress.planned = progress.stage + 1, 0, 0
        progress.best, progress.since_best = float("inf"), 0
        return taken

    def _plan(self, stage: Stage, seconds_a_step: float) -> int:
        """Steps of the stage: all, or what fits its share of the time."""
        if self.minutes is None:
            return stage.steps
        shares = self.settings.stages[: self.progress.stage + 1]
        left = self.minutes * 60 * sum(each.share for each in shares) - self._seconds()
        return max(2 * self.settings.chunk, min(stage.steps, self.progress.step + int(left / seconds_a_step)))

    def _validate(self, stage: Stage, validate: Callable, training: dict[str, float]) -> None:
        progress = self.progress
        parts = {k: float(v) for k, v in validate(self.arrays["params"], self.arrays["buffers"]).items()}
        result = parts["loss" if stage.language else "index_kl"]
        progress.since_best += 1
        if result < progress.best:
            progress.best, progress.since_best = result, 0
            self.arrays["best"] = jax.tree.map(jnp.array, (self.arrays["params"], self.arrays["buffers"]))
        record = {
            "stage": stage.name,
            "step": progress.step,
            "steps": progress.planned,
            "seconds": self._seconds(),
        }
        progress.log.append(record | {"training": training, "validation": parts})
        print(f"\n  validation {parts}", file=sys.stderr, flush=True)


def _show(stage: Stage, progress: state_.Progress, steps: int, parts: dict[str, float], speed: float) -> None:
    filled = int(24 * min(1.0, progress.step / steps))
    values = " ".join(f"{name} {value:.3f}" for name, value in parts.items())
    bar = "#" * filled + "." * (24 - filled)
    line = f"{stage.name:8} [{bar}] {progress.step}/{steps} {speed:.1f} steps/s {values}"
    # On a terminal the line is redrawn; in a file only now and then is it worth one.
    if sys.stderr.isatty():
        print(f"\r{line:<120}", end="", file=sys.stderr, flush=True)
    elif progress.step * 10 // steps != (progress.step - 1) * 10 // steps:
        print(line, file=sys.stderr, flush=True)
