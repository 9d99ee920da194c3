"""The training loop: three stages, validation, early stopping, a time budget and resuming."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsa_jax.models.decoder import Decoder
from dsa_jax.models.train import state as state_
from dsa_jax.models.train.stages import Stage
from dsa_jax.models.train.streams import Sampler, Streams
from dsa_jax.models.train.updates import Settings, optimizer, train_chunk, validation, validation_contexts


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
        self.contexts = validation_contexts(streams, settings)
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
        take = train_chunk(self.graph, stage, settings)
        validate = validation(self.graph, stage, settings)
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
                progress.planned = self.plan(stage, timed / settings.chunk)
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

    def plan(self, stage: Stage, seconds_a_step: float) -> int:
        """Steps of the stage: all, or what fits its share of the time."""
        if self.minutes is None:
            return stage.steps
        shares = self.settings.stages[: self.progress.stage + 1]
        left = self.minutes * 60 * sum(each.share for each in shares) - self._seconds()
        return max(2 * self.settings.chunk, min(stage.steps, self.progress.step + int(left / seconds_a_step)))

    def _validate(self, stage: Stage, validate: Callable, training: dict[str, float]) -> None:
        progress = self.progress
        parts = {
            k: float(v)
            for k, v in validate(self.arrays["params"], self.arrays["buffers"], self.contexts).items()
        }
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
