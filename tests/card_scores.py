"""How scores that a card computed are compared with exact ones: as a whole, and every row for itself; and who may skip."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import pytest

from dsa_jax.compat import target_device
from numpy_model import calc_diff

BOUND = 5e-6
"""Largest calc_diff, of all scores and of any row with `FEWEST` of them.

Hopper's FP8 products keep about 14 bits of their sums. An emulation of them in NumPy puts rows of many keys at 1e-8 and the
worst row of eight at 7e-8 (float32 sums: 1e-14). In a row of 300 the bound finds one score that is off by 6 % of their root
mean square.
"""
FEWEST = 8


def check_scores(got, want, visible: np.ndarray) -> None:
    """-inf where a row sees nothing, numbers everywhere else, and those within the bound, whole and row by row.

    Args:
        got, want: ``float32[N, S]``.
        visible: ``bool[N, S]``.
    """
    got, want = np.asarray(got), np.asarray(want)
    assert np.isneginf(got[~visible]).all()
    assert np.isfinite(got[visible]).all()
    assert calc_diff(got[visible], want[visible]) < BOUND
    rows = np.flatnonzero(visible.sum(axis=1) >= FEWEST)
    diffs = np.array([calc_diff(got[row, visible[row]], want[row, visible[row]]) for row in rows])
    wrong = diffs >= BOUND
    assert not wrong.any(), f"rows {rows[wrong][:9].tolist()} by up to {diffs.max():.1e}"


def no_case(reason: Exception) -> NoReturn:
    """Skip what a card has no kernel for. On Hopper, which has them all, a kernel that refuses is a failure."""
    if target_device().capability == (9, 0):
        raise reason
    pytest.skip(str(reason))
