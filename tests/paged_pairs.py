"""Decode steps for the paged scoring kernels among which every two values of any two factors meet, run through the op.

The factors are index heads, new tokens, page size, manager and number of requests. 8 numbers of new tokens and 3 page sizes
take 24 steps, and 24 are enough: without any one of them a pair would be missing.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import cases
import form_cases
from card_scores import check_scores, no_case
from dsa_jax import ops
from dsa_jax.cache import Cache
from dsa_jax.layout import Role
from numpy_model import Facts

FACTORS = dict(
    heads=(32, 64), next_n=range(1, 9), page_size=(32, 64, 128), manager=("v1", "v2"), requests=(2, 3, 5)
)
"""Every value that has to meet every value of the others."""
LENGTHS = {0, 1, 63, 64, 65, 255, 256, 257, 2047, 2048, 2049}
LAYER = 2
"""The last of three layers, all of which have index keys."""


class Case(NamedTuple):
    """A decode step. The table is as wide as the longest request, of two tiles or more, asks for."""

    heads: int
    next_n: int
    page_size: int
    manager: Literal["v1", "v2"]
    lengths: tuple[int, ...]

    def __str__(self) -> str:
        return "-".join(map(str, self))

    @property
    def factors(self) -> tuple[tuple[str, Any], ...]:
        """What is paired, by name."""
        return (*list(self._asdict().items())[:-1], ("requests", len(self.lengths)))

    @property
    def shape(self) -> dict[str, int]:
        """The problem's numbers, as `fp8_scores.scenario` and `fp4_scores.scenario` take them."""
        width = -(-max(self.lengths) // self.page_size)
        return dict(n=self.next_n, heads=self.heads, page_size=self.page_size, width=width)


CASES = (
    Case(32, 1, 32, "v1", (65, 0, 64)),
    Case(64, 1, 64, "v2", (0, 2049, 2048, 1, 2047)),
    Case(32, 1, 128, "v1", (257, 63)),
    Case(32, 2, 32, "v1", (256, 0, 1, 63, 65)),
    Case(32, 2, 64, "v2", (64, 65)),
    Case(64, 2, 128, "v1", (65, 1, 0)),
    Case(64, 3, 32, "v2", (0, 65)),
    Case(32, 3, 64, "v1", (255, 257, 64)),
    Case(32, 3, 128, "v2", (63, 0, 65, 64, 1)),
    Case(32, 4, 32, "v2", (1, 256, 63)),
    Case(64, 4, 64, "v1", (65, 64, 0, 63, 1)),
    Case(32, 4, 128, "v2", (255, 0)),
    Case(32, 5, 32, "v1", (0, 64, 65, 1, 63)),
    Case(32, 5, 64, "v2", (257, 256)),
    Case(64, 5, 128, "v1", (64, 0, 65)),
    Case(64, 6, 32, "v1", (63, 65)),
    Case(32, 6, 64, "v2", (0, 65, 1)),
    Case(32, 6, 128, "v1", (1, 255, 256, 0, 257)),
    Case(32, 7, 32, "v2", (257, 64, 0)),
    Case(64, 7, 64, "v1", (1, 63, 64, 65, 0)),
    Case(32, 7, 128, "v2", (65, 256)),
    Case(32, 8, 32, "v2", (64, 1, 65, 0, 63)),
    Case(32, 8, 64, "v1", (255, 65)),
    Case(64, 8, 128, "v2", (0, 1, 65)),
)


def missing_pairs(found: Iterable[Case]) -> set[tuple[tuple[str, Any], ...]]:
    """Two values of two factors, each with its name, that stand together in none of the cases."""
    factors = ([(name, value) for value in values] for name, values in FACTORS.items())
    wanted = {pair for two in itertools.combinations(factors, 2) for pair in itertools.product(*two)}
    return wanted - {pair for case in found for pair in itertools.combinations(case.factors, 2)}


def check_cover(found: Sequence[Case]) -> None:
    """Every pair and every length has a case, and no case is there for nothing."""
    assert not missing_pairs(found)
    assert {length for case in found for length in case.lengths} == LENGTHS
    assert all(missing_pairs([case for case in found if case is not one]) for one in found)


def on_cache(case: Case, form: str, arguments) -> tuple[Any, Any, Cache, Any]:
    """Query, weights, cache and step of a scenario, as the op takes them: the pools are those of the case's manager."""
    q, weights, keys, scales, table, limits = arguments
    requests = len(case.lengths)
    layout = form_cases.layout(case.manager, index=form, page_size=case.page_size, full=(True,) * (LAYER + 1))
    facts = Facts(
        tables=table.tolist(),
        kv_lens=list(case.lengths),
        new_lens=[case.next_n] * requests,
        page_size=case.page_size,
        contexts=0,
        context_tokens=0,
        decodes=requests,
        next_n=case.next_n,
        width=table.shape[1],
        gathered_keys=0,
    )
    step = cases.step(facts, layout)
    np.testing.assert_array_equal(step.limits, limits.reshape(-1))
    # The scenario's own table names slots that do not exist where nobody may look.
    step = dataclasses.replace(step, page_table=jnp.asarray(table))
    pools = dict(index_key=jnp.asarray(keys), index_scale=jnp.asarray(scales))
    cache = Cache.create(layout, len(keys) // layout.scale(Role.INDEX_KEY)).replace_pages(**pools)
    packed = lambda x: jnp.asarray(x.reshape(-1, *x.shape[2:]))
    return jax.tree.map(packed, q), packed(weights), cache, step


def scorer(implementation: str, config: Any = None):
    """The compiled op on `LAYER`, with one kernel."""
    score = functools.partial(ops.paged_mqa_logits, implementation=implementation, config=config)
    return jax.jit(lambda q, weights, cache, step: score(q, weights, cache, LAYER, step))


def check_on_card(score, arguments, expected: np.ndarray) -> None:
    """What a card scores is right, and 20 times the same bits."""
    try:
        first = np.asarray(score(*arguments))
    except NotImplementedError as reason:
        no_case(reason)
    check_scores(first, expected, np.isfinite(expected))
    for _ in range(19):
        np.testing.assert_array_equal(np.asarray(score(*arguments)), first)
