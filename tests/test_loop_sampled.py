"""Sampled text of the loop with drafts is the target's own, by chi-square over 20,000 draws; a loop that cheats is seen."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

import test_loops as toy
from dsa_jax.loops import Sampling

SAMPLES, HEAT = 20_000, 9.0


def sampled_pairs(monkeypatch, accept=None) -> np.ndarray:
    """The first two tokens of the first prompt, drawn by the whole loop with drafts: ``int32[SAMPLES, 2]``.

    One request of a batch a seed; drafts err, and the temperature makes every token likely.
    """
    if accept is not None:
        monkeypatch.setattr("dsa_jax.sampling.accept_sampled", accept)
    loop, arguments = toy.speculative(drafts=1, count=2)
    keys = jax.random.split(jax.random.key(7), SAMPLES)

    def one(key):
        sampling = replace(Sampling.create(0, HEAT), key=key)
        return loop(**(arguments | {"sampling": sampling}))[2].tokens[0]

    return np.asarray(jax.jit(jax.vmap(one))(keys))


def fits(pairs: np.ndarray) -> list[float]:
    """p-values of the first token, and of the second after each first one that is frequent enough."""
    likely = np.exp(9.0 / HEAT)

    def value(tokens, prompt):
        wanted = np.ones(toy.VOCABULARY)
        wanted[toy.expected(prompt, 1)[0]] = likely
        seen = np.bincount(tokens, minlength=toy.VOCABULARY)
        return float(chisquare(seen, wanted / wanted.sum() * seen.sum()).pvalue)

    after = [value(pairs[pairs[:, 0] == t, 1], [*toy.PROMPTS[0], t]) for t in range(toy.VOCABULARY)]
    return [value(pairs[:, 0], toy.PROMPTS[0]), *after]


def test_sampled_loop_is_lossless(monkeypatch):
    """The text of the loop with drafts is distributed as the target alone would draw it."""
    found = fits(sampled_pairs(monkeypatch))
    assert len(found) == 1 + toy.VOCABULARY and min(found) > 0.001


@pytest.mark.full
def test_a_loop_that_always_accepts_is_seen(monkeypatch):
    """Keeping every draft leaves the draft's distribution, which the same test refuses."""

    def always(keys, target, given, drafts, lens):
        token = jax.vmap(jax.random.categorical)(keys, jnp.log(target[:, -1]))
        return lens, token.astype(jnp.int32)

    assert min(fits(sampled_pairs(monkeypatch, always))) < 1e-6
