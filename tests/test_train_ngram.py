"""The n-gram model against a plain dictionary version and against itself as a distribution."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest

from dsa_jax.models.train import ngram

VOCABULARY, START = 6, 5


def plain_kneser_ney(runs, order: int):
    """Interpolated modified Kneser-Ney in dictionaries, straight from Chen and Goodman (1998)."""
    padded = [(START,) * (order - 1) + tuple(run) for run in runs]
    counts = {order: Counter(run[i : i + order] for run in padded for i in range(len(run) - order + 1))}
    for number in range(order - 1, 0, -1):
        counts[number] = Counter(gram[1:] for gram in counts[number + 1])
    discounts, followers = {}, {}
    for number, grams in counts.items():
        n = [0, *(sum(1 for count in grams.values() if count == k) for k in (1, 2, 3, 4))]
        if all(n[1:]):
            y = n[1] / (n[1] + 2 * n[2])
            raw = [k - (k + 1) * y * n[k + 1] / n[k] for k in (1, 2, 3)]
            discounts[number] = [0, *(min(max(d, 0.05), k - 0.05) for k, d in enumerate(raw, start=1))]
        else:
            discounts[number] = [0, 0.5, 0.5, 0.5]
        followers[number] = defaultdict(dict)
        for gram, count in grams.items():
            followers[number][gram[:-1]][gram[-1]] = count

    def probability(context, word):
        number = len(context) + 1
        lower = 1 / VOCABULARY if number == 1 else probability(context[1:], word)
        seen = followers[number].get(context)
        if not seen:
            return lower
        total = sum(seen.values())
        discount = discounts[number]
        kept_back = sum(discount[min(count, 3)] for count in seen.values())
        count = seen.get(word, 0)
        return (count - discount[min(count, 3)]) / total + kept_back / total * lower

    return probability


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_agrees_with_the_dictionary_version(order: int):
    random = np.random.default_rng(order)
    runs = [random.choice(4, size=n, p=[0.5, 0.3, 0.15, 0.05]) for n in (60, 9, 31)]
    model = ngram.train(runs, vocabulary=VOCABULARY, start=START, order=order)
    probability = plain_kneser_ney([run.tolist() for run in runs], order)
    text = random.choice(VOCABULARY, size=40)
    padded = (START,) * (order - 1) + tuple(text.tolist())
    expected = [
        np.log(probability(padded[i : i + order - 1], padded[i + order - 1])) for i in range(len(text))
    ]
    np.testing.assert_allclose(model.log_probabilities(text, start=START), expected, rtol=1e-12)


def test_probabilities_sum_to_one_in_seen_and_unseen_contexts():
    model = ngram.train(
        [np.asarray([0, 1, 2, 0, 1, 3, 0, 1, 2])], vocabulary=VOCABULARY, start=START, order=3
    )
    for context in ([0, 1], [4, 4], [2, 0]):
        total = sum(
            np.exp(model.log_probabilities(np.asarray([*context, word]), start=START)[-1])
            for word in range(VOCABULARY)
        )
        assert total == pytest.approx(1.0)


def test_refuses_grams_that_do_not_fit():
    with pytest.raises(ValueError, match="order=6 with vocabulary=2048.*lower the order"):
        ngram.train([np.arange(9)], vocabulary=2048, start=0, order=6)
