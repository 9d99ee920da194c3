"""Sampling with top-p through the whole speculative loop: texts are distributed as the target alone would draw them.

The toy of ``test_loops`` with graded logits in place of one likely token, so that the smallest set of tokens with mass top-p
has from one to several of them, and the draft's set is another one. What is wanted comes from NumPy in float64.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

import test_loops as toy
from dsa_jax.loops import DraftBatch, Sampling, speculative_loop

SAMPLES, COUNT, DRAFTS, HEAT, TOP_P = 20_000, 3, 2, 0.9, 0.8
_RNG = np.random.default_rng(17)
SCORES = _RNG.normal(0, 1.6, (toy.VOCABULARY, toy.VOCABULARY)).astype(np.float32)
GUESSES = SCORES + _RNG.normal(0, 0.8, SCORES.shape).astype(np.float32)
"""Logits of target and draft: a row for each value of the toy's hash, which depends on the last three tokens."""


def graded(table: np.ndarray, step, *arguments):
    """A step of the toy whose one likely token chooses a row of ``table`` as logits."""
    cache, logits, *rest = step(*arguments)
    return cache, jnp.asarray(table)[jnp.argmax(logits, axis=-1)], *rest


def texts() -> np.ndarray:
    """``int32[SAMPLES, 3, COUNT]``: what the loop writes after each prompt, one batch a seed."""
    caches, meta, last, hidden, table = toy.prefilled("v2", DRAFTS + 1)
    batch = DraftBatch.create(meta, last, hidden, jnp.ones(3, bool))
    loop = partial(
        speculative_loop,
        partial(graded, SCORES, toy.target_step),
        partial(graded, GUESSES, toy.draft_step, 0),
        None,
        caches,
        batch,
        table,
        COUNT,
    )
    sampling = Sampling.create(0, HEAT, TOP_P)
    one = lambda key: loop(replace(sampling, key=key))[2].tokens
    keys = jax.random.split(jax.random.key(23), SAMPLES)
    # In groups whose caches fit a processor's cache.
    return np.asarray(jax.jit(lambda keys: jax.lax.map(one, keys, batch_size=250))(keys))


def nucleus(table: np.ndarray) -> np.ndarray:
    """``float64[VOCABULARY, VOCABULARY]``: what each row of logits is drawn from."""
    p = np.exp(table.astype(np.float64) / HEAT)
    p /= p.sum(axis=1, keepdims=True)
    for row in p:
        order = np.argsort(-row)
        before = np.cumsum(row[order]) - row[order]
        # No set hangs on the rounding of float32: no mass is close to the bound.
        assert np.abs(before - TOP_P).min() > 1e-5
        row[order[before >= TOP_P]] = 0
    return p / p.sum(axis=1, keepdims=True)


def wanted(prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Every text of COUNT tokens that can follow, and its probability."""
    rows, found = nucleus(SCORES), {(): 1.0}
    for _ in range(COUNT):
        found = {
            (*text, token): p * rows[state, token]
            for text, p in found.items()
            for state in toy.expected([*prompt, *text], 1)
            for token in np.flatnonzero(rows[state]).tolist()
        }
    return found


def fit(seen: np.ndarray, prompt: list[int]) -> tuple[float, int]:
    """p-value of the texts that can be, rare ones taken together (0 without any), and how many could not be."""
    odds = wanted(prompt)
    assert len(odds) > 20
    tuples = [tuple(text) for text in seen.tolist()]
    possible = [text for text in tuples if text in odds]
    if not possible:
        return 0.0, len(tuples)
    numbers = Counter(possible)
    expected = np.array(list(odds.values())) * len(possible)
    counts, often = np.array([numbers[text] for text in odds]), expected >= 5
    pool = lambda values: np.append(values[often], values[~often].sum() if (~often).any() else [])
    return float(chisquare(pool(counts), pool(expected)).pvalue), len(tuples) - len(possible)


def test_the_sets_differ_in_size_and_between_target_and_draft():
    """Otherwise the tests below would show little: small and large sets, drafts that the target never draws."""
    kept, drafted = nucleus(SCORES) > 0, nucleus(GUESSES) > 0
    sizes = kept.sum(axis=1)
    assert sizes.min() <= 2 and sizes.max() >= 5
    assert (drafted & ~kept).any(axis=1).sum() > 5 and (kept & ~drafted).any(axis=1).sum() > 5


@pytest.mark.full
def test_top_p_through_the_loop_is_lossless():
    """All three requests, texts of three tokens: one to three turns, drafts kept, refused and replaced."""
    seen = texts()
    assert seen.shape == (SAMPLES, 3, COUNT)
    found = [fit(seen[:, r], prompt) for r, prompt in enumerate(toy.PROMPTS)]
    assert [outside for _, outside in found] == [0, 0, 0]
    assert min(p for p, _ in found) > 0.001


@pytest.mark.full
def test_always_accepting_is_seen(monkeypatch):
    """Keeping every draft writes tokens outside of the target's sets, and too many of some that are inside.

    Of the shortest prompt the draft has not seen enough to guess anything right.
    """

    def always(keys, target, given, drafts, lens):
        token = jax.vmap(jax.random.categorical)(keys, jnp.log(target[:, -1]))
        return lens, token.astype(jnp.int32)

    monkeypatch.setattr("dsa_jax.sampling.accept_sampled", always)
    seen = texts()
    for r, prompt in enumerate(toy.PROMPTS):
        p, outside = fit(seen[:, r], prompt)
        assert p < 1e-6 and outside > 0
