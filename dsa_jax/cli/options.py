"""Option types and lookups that several commands share."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

from dsa_jax import config as configs
from dsa_jax import presets
from dsa_jax.arguments import described
from dsa_jax.config import DSAConfig
from dsa_jax.draft_engine import MOST_DRAFTS

DEFAULT_MODEL = "docs-8m"
"""The model that ships with the library."""


MOST = 2**31 - 1
"""Largest count: positions, rows and slots are int32."""


HOTTEST = 3.4e38
"""Highest temperature: a finite float32."""


def count(text: str) -> int:
    """An option's value as a whole number from 1 to 2**31 - 1."""
    try:
        value = int(text)
    except ValueError:  # also for more digits than Python reads
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{described(text)} is no count; give a whole number of at least 1")
    if value > MOST:
        raise argparse.ArgumentTypeError(
            f"{described(text)} is too large; give a whole number of at most {MOST}"
        )
    return value


def drafts(text: str) -> int:
    """An option's value as a number of draft tokens."""
    if text not in {str(number) for number in range(MOST_DRAFTS + 1)}:
        raise argparse.ArgumentTypeError(
            f"{described(text)} is no number of draft tokens; give 0 (none) to {MOST_DRAFTS}"
        )
    return int(text)


def seed(text: str) -> int:
    """An option's value as a seed: a whole number of 32 bits."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(
            f"{described(text)} is no seed; give a whole number from 0 to 4294967295"
        )
    return value


def temperature(text: str) -> float:
    """An option's value as a finite float32 of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= HOTTEST:
        raise argparse.ArgumentTypeError(
            f"{described(text)} is no temperature; give a number from 0 (the best token) to 3.4e38"
        )
    return value


def implementations(text: str) -> tuple[str, ...]:
    """An option's value as names of implementations, separated by commas."""
    names = tuple(text.split(","))
    if not set(names) <= {"mosaic", "triton", "xla"}:
        raise argparse.ArgumentTypeError(
            f"{described(text)} names no implementation; give mosaic, triton, xla or several with commas between"
        )
    return names


def find_config(model: str | None) -> tuple[str, DSAConfig]:
    """A model's name and configuration.

    Args:
        model: a preset's name, a folder with a ``config.json``, such a file, or None for the shipped model.

    Raises:
        ValueError: if it is none of these, or the file describes no model that the library knows.
    """
    if model is not None and model in presets.PRESETS:
        return model, configs.preset(model)
    if model is not None:
        path = Path(model)
    else:  # found without importing the models, which need Flax
        spec = importlib.util.find_spec("dsa_jax.models")
        folders = spec.submodule_search_locations if spec else None
        path = Path(folders[0] if folders else "models") / "checkpoints" / DEFAULT_MODEL
    wanted = f"Pass a folder with a config.json or one of the presets: {', '.join(presets.PRESETS)}."
    shown = described(DEFAULT_MODEL if model is None else model)
    try:
        if model is not None and (not model or not path.exists()):
            raise ValueError(f"model {shown} is neither a preset nor a folder. {wanted}")
        file = path / "config.json" if path.is_dir() else path
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:  # also a name that no file system takes
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"model {shown}: its config.json cannot be read ({why}). {wanted}") from error
    try:
        mapping = json.loads(text)
    except (ValueError, RecursionError) as error:  # no JSON, a number of too many digits, too many brackets
        raise ValueError(f"model {shown}: {file} cannot be read as JSON ({error}). {wanted}") from error
    if not isinstance(mapping, dict):
        raise ValueError(
            f"model {shown}: {file} holds no JSON object; pass a Hugging Face style config.json."
        )
    try:
        return model or DEFAULT_MODEL, DSAConfig.from_hf(mapping)
    except ValueError as error:  # of several configurations one has to know which is meant
        raise ValueError(f"{file}: {error}") from error
