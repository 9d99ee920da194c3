"""What training carries from step to step, on the device and in the file from which it resumes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np


@dataclass(kw_only=True)
class Progress:
    """Where a run stands, on the host.

    Attributes:
        stage: number of the stage under way.
        step: steps of it that are done.
        planned: steps it will have; 0 until the first ones have been timed.
        best: lowest validation result of the stage.
        since_best: validations since then.
        seconds: time spent in earlier calls.
        log: one record a validation.
    """

    stage: int = 0
    step: int = 0
    planned: int = 0
    best: float = float("inf")
    since_best: int = 0
    seconds: float = 0.0
    log: list[dict[str, Any]] = field(default_factory=list)


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file in one step, so that an interruption leaves the old one or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".partial")
    beside.write_bytes(content)
    os.replace(beside, path)


def save(path: Path, arrays: Any, progress: Progress, settings: dict[str, Any]) -> None:
    """Writes a resumable state.

    Args:
        path: file to write (replaced in one step).
        arrays: pytree of device arrays.
        progress: host state.
        settings: everything that must be equal for a resumed run to continue this one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    leaves: dict[str, Any] = {
        f"leaf{number}": np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(arrays))
    }
    facts = json.dumps({"progress": asdict(progress), "settings": settings})
    beside = path.with_name(path.name + ".partial")
    with beside.open("wb") as file:
        np.savez(file, facts=np.asarray(facts), **leaves)
    os.replace(beside, path)


def restore(path: Path, like: Any, settings: dict[str, Any]) -> tuple[Any, Progress]:
    """Reads what `save` wrote.

    Args:
        path: the file.
        like: pytree with the structure, shapes and dtypes wanted.
        settings: of the run that resumes.

    Returns:
        The arrays in the structure of ``like`` and the progress.

    Raises:
        ValueError: there is no such file, it belongs to a run with other settings, or its arrays do not fit.
    """
    if not path.is_file():
        raise ValueError(
            f"resume: no state at {str(path)!r}; want one left by an earlier run: leave out --resume to start"
        )
    with np.load(path) as stored:
        facts = json.loads(str(stored["facts"]))
        different = [
            f"{name}={settings.get(name)!r} (stored {facts['settings'].get(name)!r})"
            for name in sorted({*settings, *facts["settings"]})
            if settings.get(name) != facts["settings"].get(name)
        ]
        wanted, structure = jax.tree.flatten(like)
        leaves = [stored[f"leaf{number}"] for number in range(len(stored.files) - 1)]
    if different:
        raise ValueError(
            "resume: the state is of another run: " + "; ".join(different) + "; pass the same options"
        )
    shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
    if shapes != [(leaf.shape, leaf.dtype) for leaf in wanted]:
        raise ValueError(
            "resume: the stored arrays are not those of this model; want the state of the same preset"
        )
    return jax.tree.unflatten(structure, [jax.numpy.asarray(leaf) for leaf in leaves]), Progress(
        **facts["progress"]
    )
