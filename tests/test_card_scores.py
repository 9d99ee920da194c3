"""The comparison that the card's tests share finds what it is for; no card is needed to see that."""

from __future__ import annotations

import numpy as np
import pytest

from card_scores import BOUND, check_scores
from numpy_model import calc_diff

ROWS, KEYS = 500, 300
WANT = np.random.default_rng(0).normal(size=(ROWS, KEYS)).astype(np.float32)
VISIBLE = np.arange(KEYS) < np.linspace(1, KEYS, ROWS).astype(int)[:, None]


def scores() -> np.ndarray:
    return np.where(VISIBLE, WANT * np.float32(1 + 1e-4), -np.inf)


def test_rounding_passes():
    check_scores(scores(), WANT, VISIBLE)


def test_one_wrong_score_of_150_000():
    """A score of usual size that a kernel never wrote: the whole array does not show it, its row does."""
    got, place = scores(), int(np.argsort(np.abs(WANT[-1]))[KEYS // 2])
    got[-1, place] = 0
    assert calc_diff(got[VISIBLE], WANT[VISIBLE]) < BOUND
    with pytest.raises(AssertionError, match=f"rows .{ROWS - 1}. by"):
        check_scores(got, WANT, VISIBLE)


@pytest.mark.parametrize(("row", "column", "value"), [(0, 5, 0.0), (0, 0, np.nan), (3, 0, -np.inf)])
def test_what_may_not_be_seen_and_what_must(row, column, value):
    got = scores()
    got[row, column] = value
    with pytest.raises(AssertionError):
        check_scores(got, WANT, VISIBLE)
