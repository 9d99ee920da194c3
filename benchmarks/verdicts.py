"""How a benchmark ends: with 1 if a result was wrong or a variant did not run, which it names once more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

BOUND = 5e-6
"""Largest calc_diff of right scores; FP8 products on Hopper keep about 14 bits of their sums."""


def scores_agree(row: Mapping[str, Any]) -> bool:
    """Whether scores ran and agree with the reference: ``diff`` below the bound, no -inf ``misplaced``, no ``error``."""
    return "error" not in row and row["diff"] < BOUND and not row["misplaced"]


def end(wrong: Iterable[str]) -> None:
    """End the process with 1 unless there is nothing in ``wrong``: names of what was wrong or failed."""
    if names := list(wrong):
        print(f"wrong or failed: {', '.join(names)}", flush=True)
        raise SystemExit(1)
