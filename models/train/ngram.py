"""A 5-gram model over the same tokens: interpolated modified Kneser-Ney, the yardstick for the trained model.

Chen and Goodman, "An Empirical Study of Smoothing Techniques for Language Modeling" (1998), section 3.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

_CLASSES = 3
"""Discounts differ for counts of 1, 2, and 3 or more."""


@dataclass(frozen=True, kw_only=True)
class _Order:
    """Tables of one order, sorted for binary search."""

    grams: np.ndarray  # uint64[g], context and word
    discounted: np.ndarray  # float64[g], (count - discount) / total of the context
    contexts: np.ndarray  # uint64[c]
    backoff: np.ndarray  # float64[c], weight of the next lower order


@dataclass(frozen=True, kw_only=True)
class NGram:
    """A trained model.

    Attributes:
        order: words of the longest gram, its last word predicted from the others.
        vocabulary: number of tokens.
    """

    order: int
    vocabulary: int
    tables: tuple[_Order, ...]  # lowest order first

    def log_probabilities(self, run: np.ndarray, *, start: int) -> np.ndarray:
        """Natural log probability of every token given those before it.

        Args:
            run: ``int[n]``, the tokens.
            start: token that stands for what precedes the run.

        Returns:
            ``float64[n]``.
        """
        padded = _pad(run, self.order, start)
        probability = np.full(len(run), 1.0 / self.vocabulary)
        for number, table in enumerate(self.tables, start=1):
            grams = _encode(padded, number, self.vocabulary)[self.order - number :]
            share = _look_up(table.grams, table.discounted, grams, 0.0)
            weight = _look_up(table.contexts, table.backoff, grams // np.uint64(self.vocabulary), 1.0)
            probability = share + weight * probability
        return np.log(probability)


def train(runs: Iterable[np.ndarray], *, vocabulary: int, start: int, order: int = 5) -> NGram:
    """Counts the grams of all runs and sets the discounts from the counts of counts.

    Args:
        runs: token runs; grams do not cross from one to the next.
        vocabulary: number of tokens.
        start: token that stands for what precedes a run.
        order: words of the longest gram.

    Returns:
        The model.

    Raises:
        ValueError: grams of this order do not fit 64 bits.
    """
    if order < 1 or vocabulary**order >= 2**64:
        raise ValueError(
            f"train n-gram: order={order} with vocabulary={vocabulary}; want 1 <= order and vocabulary**order < 2**64: "
            "lower the order"
        )
    padded = [_pad(run, order, start) for run in runs]
    codes = np.concatenate([_encode(run, order, vocabulary) for run in padded])
    grams, counts = np.unique(codes, return_counts=True)
    tables = [_table(grams, counts, vocabulary)]
    for number in range(order - 1, 0, -1):
        # A lower order counts in how many longer contexts a gram was seen, not how often (Kneser-Ney).
        grams, counts = np.unique(grams % np.uint64(vocabulary**number), return_counts=True)
        tables.append(_table(grams, counts, vocabulary))
    return NGram(order=order, vocabulary=vocabulary, tables=tuple(reversed(tables)))


def _table(grams: np.ndarray, counts: np.ndarray, vocabulary: int) -> _Order:
    classes = np.minimum(counts, _CLASSES)
    discounts = _discounts(counts)
    contexts, first, inverse = np.unique(
        grams // np.uint64(vocabulary), return_index=True, return_inverse=True
    )
    totals = np.add.reduceat(counts, first).astype(np.float64)
    kept_back = np.add.reduceat(discounts[classes], first)
    return _Order(
        grams=grams,
        discounted=(counts - discounts[classes]) / totals[inverse],
        contexts=contexts,
        backoff=kept_back / totals,
    )


def _discounts(counts: np.ndarray) -> np.ndarray:
    """Discounts for counts 0 (none), 1, 2 and more; too little data to estimate them gives plain 0.5."""
    n = np.bincount(np.minimum(counts, 5), minlength=6).astype(np.float64)
    if not np.all(n[1:5] > 0):
        return np.asarray([0.0, 0.5, 0.5, 0.5])
    y = n[1] / (n[1] + 2 * n[2])
    estimates = [k - (k + 1) * y * n[k + 1] / n[k] for k in range(1, _CLASSES + 1)]
    return np.asarray([0.0, *np.clip(estimates, 0.05, np.arange(1, _CLASSES + 1) - 0.05)])


def _pad(run: np.ndarray, order: int, start: int) -> np.ndarray:
    return np.concatenate([np.full(order - 1, start, np.uint64), np.asarray(run, np.uint64)])


def _encode(run: np.ndarray, number: int, vocabulary: int) -> np.ndarray:
    """Codes of all grams of ``number`` words: the words as digits in base ``vocabulary``."""
    codes = np.zeros(len(run) - number + 1, np.uint64)
    for offset in range(number):
        codes = codes * np.uint64(vocabulary) + run[offset : offset + len(codes)]
    return codes


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray, absent: float) -> np.ndarray:
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], absent)
