"""Rotary parameters and their forms in Hugging Face configurations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from dsa_jax.hf_fields import FieldReader


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
                f"{sources[key]} gives {key}={found[key]!r}, but {source} gives {value!r}; keep one"
            )
        found.setdefault(key, value)
        sources.setdefault(key, source)

    for source in ("rope_parameters", "rope_scaling"):
        nested = read.mapping.get(source)
        if nested is None:
            continue
        if not isinstance(nested, Mapping):
            read.problems.append(f"{source}={nested!r} is not a mapping")
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
        missing.append(f"rope_type={kind!r} is not supported; use 'default' or 'yarn'")
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
        value = found.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            missing.append(f"{name}={value!r} is not a positive number")
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
