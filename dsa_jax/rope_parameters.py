"""Rotary parameters and their forms in Hugging Face configurations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from dsa_jax.arguments import described, is_whole
from dsa_jax.hf_fields import LARGEST, FieldReader


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeParameters:
    """Rotary parameters.

    Attributes:
        theta: base of the frequencies.
        type: "default" (plain) or "yarn".
        factor: YaRN's context extension; 1.0 for the plain type.
        original_max_position_embeddings: context length before the extension; 0 for the plain type.
        beta_fast: YaRN's upper rotation count; frequencies that turn more often are left alone.
        beta_slow: YaRN's lower rotation count; frequencies that turn less often are divided by `factor`.
        mscale: YaRN's attention scale coefficient.
        mscale_all_dim: the same for all dimensions; equal to `mscale` in every released model.
    """

    theta: float
    type: Literal["default", "yarn"] = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0

    def __post_init__(self) -> None:
        """Refuses what no table of angles can be made of.

        Raises:
            ValueError: one message that names every problem.
        """
        problems = [] if self.type in ("default", "yarn") else [_unknown_type(self.type)]
        positive = ("theta", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        problems += [problem for name in positive for problem in _not_positive(name, getattr(self, name))]
        if not is_whole(self.original_max_position_embeddings) or self.original_max_position_embeddings < 0:
            came = described(self.original_max_position_embeddings)
            problems.append(f"original_max_position_embeddings={came} must be a whole number of at least 0")
        if problems:
            raise ValueError(
                "RopeParameters: " + "; ".join(problems) + ". Take them from the model's config.json."
            )


def read_rope(read: FieldReader) -> RopeParameters | None:
    """Merges `rope_theta`, `rope_scaling` and `rope_parameters`; equal values may repeat, different ones are
    refused.
    """
    found: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def note(key: str, value: Any, source: str) -> None:
        if value is None:
            return
        if key in found and found[key] != value:
            read.problems.append(
                f"{sources[key]} gives {key}={described(found[key])}, but {source} gives {described(value)}; keep one"
            )
        found.setdefault(key, value)
        sources.setdefault(key, source)

    for source in ("rope_parameters", "rope_scaling"):
        nested = read.mapping.get(source)
        if nested is None:
            continue
        if not isinstance(nested, Mapping):
            read.problems.append(f"{source}={described(nested)} is not a mapping")
            continue
        for key, value in nested.items():
            note("rope_type" if key == "type" else key, value, source)
    note("rope_theta", read.mapping.get("rope_theta"), "rope_theta")

    kind = found.get("rope_type", "default")
    wanted = ["rope_theta"] + (["factor", "original_max_position_embeddings"] if kind == "yarn" else [])
    missing = [
        f"{name} is missing (rope_parameters, rope_scaling or flat)" for name in wanted if name not in found
    ]
    if kind not in ("default", "yarn"):
        missing.append(_unknown_type(kind))
    names = (
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
    )
    for name in names:
        missing += _not_positive(name, found.get(name, 1))
    positions = found.get("original_max_position_embeddings", 1)
    if not missing and (positions != math.floor(positions) or positions > LARGEST):
        missing.append(
            f"original_max_position_embeddings={positions!r} is not a whole number of tokens up to {LARGEST:,}"
        )
    if not missing and kind == "yarn" and found.get("mscale", 1) != found.get("mscale_all_dim", 1):
        missing.append(
            f"mscale={found.get('mscale', 1)} and mscale_all_dim={found.get('mscale_all_dim', 1)} differ, "
            "which would scale "
            "the rotary table too; only equal values are supported"
        )
    read.problems += missing
    if missing:
        return None
    if kind == "default":
        return RopeParameters(theta=float(found["rope_theta"]))
    return RopeParameters(
        theta=float(found["rope_theta"]),
        type="yarn",
        factor=float(found["factor"]),
        original_max_position_embeddings=int(found["original_max_position_embeddings"]),
        beta_fast=float(found.get("beta_fast", 32)),
        beta_slow=float(found.get("beta_slow", 1)),
        mscale=float(found.get("mscale", 1)),
        mscale_all_dim=float(found.get("mscale_all_dim", 1)),
    )


_LARGEST_FLOAT = (2 - 2**-23) * 2.0**127  # of float32


def _not_positive(name: str, value: Any) -> list[str]:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        return [f"{name}={described(value)} is not a positive number"]
    if value > _LARGEST_FLOAT:  # Python's JSON knows Infinity, and integers of any size
        return [f"{name}={described(value)} is not a finite number of float32"]
    return []


def _unknown_type(kind: Any) -> str:
    return f"rope_type={described(kind)} is not supported; use 'default' or 'yarn'"
