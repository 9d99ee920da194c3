"""Scores on a CUDA card (``pytest -m gpu``), by every kernel: contexts of every length, keys that are NaN, scores rounded to
bfloat16, and selections whose scores come in chunks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import form_cases
import paged_pairs
from card_scores import check_scores, no_case
from dsa_jax import ops, quant
from dsa_jax.cache import Cache
from fp8_scores import FAR_SLOT, NAN_CODE
from numpy_model import Facts, page_number, row_of, topk
from paged_pairs import LAYER, LENGTHS
from test_gpu import WINDOWS, query

KERNELS = WINDOWS
"""Names of the scoring kernels: the form of the keys that each takes, and how an op is asked for it."""
FORMS = [(name, form) for name in ("mosaic", "triton") for form in ("fp8", "fp4")]
EVERY = (
    (2049, 130), (0, 0), (64, 64), (257, 9), (1, 1), (2048, 1), (63, 63), (255, 100), (65, 33), (2047, 257), (256, 2),
)  # fmt: skip
"""Length and new tokens of contexts: fresh ones, ones with a cached prefix, an empty one."""
SOME = ((700, 130), (0, 0), (65, 65), (300, 7))
DECODES = ((257, 2), (0, 0), (66, 1), (700, 2))
"""Decode requests of two places; one has nothing, and one a single new token."""


class Problem(NamedTuple):
    """Arguments of the op on `LAYER`, and what they were made of."""

    q: Any
    weights: jax.Array
    cache: Cache
    step: Any
    facts: Facts
    keys: np.ndarray
    values: np.ndarray
    plain: np.ndarray

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self[:4]

    @property
    def visible(self) -> np.ndarray:
        """``bool[N, columns]`` of the NumPy model's limits."""
        columns = self.facts.width * self.facts.page_size
        return np.arange(columns) < self.facts.derive()["limits"][:, None]


def problem(
    form: str,
    contexts: Sequence[tuple[int, int]],
    decodes: Sequence[tuple[int, int]] = (),
    *,
    manager: Any = "v2",
    page_size: int = 64,
    heads: int = 64,
    whole: bool = False,
) -> Problem:
    """Shuffled pages in a pool of NaN, and 18 places of padding behind contexts.

    Args:
        form: of the keys, which the reference appends.
        contexts, decodes: length and new tokens of each request.
        manager, page_size, heads: of the layout and the query.
        whole: draw keys, queries and weights from few small whole numbers, whose scores every sum has exactly.
    """
    layout, rng = form_cases.layout(manager, index=form, page_size=page_size), np.random.default_rng(7)
    lengths = [length for length, _ in (*contexts, *decodes)]
    slots = sum(-(-length // page_size) for length in lengths) + 5
    shape: Any = dict(page_size=page_size, next_n=2 if decodes else 1, padding=18, spare_columns=1)
    facts = cases.batch(contexts, decodes, gathered=0, slots=slots, **shape)
    some = lambda *size: rng.integers(-1, 2, size) if whole else rng.normal(size=size)
    keys = some(sum(lengths), 128).astype(np.float32)
    fill = dataclasses.replace(
        facts, contexts=len(lengths), context_tokens=len(keys), new_lens=lengths, decodes=0, next_n=1
    )
    poison, append = cases.poisoned(layout, slots), partial(cases.append_index_k, implementation="xla")
    cache = append(poison, LAYER, jnp.asarray(keys), cases.step(fill, layout))
    step = cases.step(facts, layout)
    # Where nobody may look stands no slot, or one that no pool has.
    table = np.array(step.page_table)
    table[:, 1::2] = np.where(table[:, 1::2] < 0, FAR_SLOT, table[:, 1::2])
    step = dataclasses.replace(step, page_table=jnp.asarray(table))
    values = some(step.bucket.tokens, heads, 128).astype(np.float32)
    plain = some(step.bucket.tokens, heads).astype(np.float32)
    q, weights = query(form, jnp.asarray(values), jnp.asarray(plain))
    return Problem(q, weights, cache, step, facts, keys, values, plain)


def compiled(kernel: str, **options):
    """The op on `LAYER` with a kernel of `KERNELS`, as a function of `Problem.arguments`."""
    score = partial(ops.paged_mqa_logits, **KERNELS[kernel][1], **options)
    return jax.jit(lambda q, weights, cache, step: score(q, weights, cache, LAYER, step))


def result(compute, *arguments, **options):
    """What a compiled function gives, or the end of the test where the card has no such kernel."""
    try:
        return jax.tree.map(np.asarray, compute(*arguments, **options))
    except NotImplementedError as reason:
        no_case(reason)


# --- contexts ------------------------------------------------------------------------------------------------------

PAIRED = [
    (32, 32, "v1", 11),
    (32, 64, "v2", 2),
    (64, 32, "v1", 2),
    (64, 64, "v2", 11),
    (128, 32, "v2", 11),
    (128, 64, "v1", 2),
]
"""Page size, heads, manager and number of requests: every two values of any two meet."""


def test_every_pair_of_contexts_has_a_case():
    values = [set(factor) for factor in zip(*PAIRED, strict=True)]
    for i, j in itertools.combinations(range(len(values)), 2):
        assert {(case[i], case[j]) for case in PAIRED} == set(itertools.product(values[i], values[j]))
    assert values == [{32, 64, 128}, {32, 64}, {"v1", "v2"}, {2, len(EVERY)}]
    assert {length for length, _ in EVERY} == LENGTHS


@pytest.mark.gpu
@pytest.mark.parametrize(("implementation", "form"), FORMS)
@pytest.mark.parametrize(("page_size", "heads", "manager", "requests"), PAIRED)
def test_contexts(implementation, form, page_size, heads, manager, requests):
    """The reference's scores, 20 times the same bits; eleven requests have every length, two are the first and the last."""
    contexts = EVERY if requests == len(EVERY) else (EVERY[0], EVERY[-1])
    some = problem(form, contexts, manager=manager, page_size=page_size, heads=heads)
    want = np.asarray(paged_pairs.scorer("xla")(*some.arguments))
    np.testing.assert_array_equal(np.isfinite(want), some.visible)
    paged_pairs.check_on_card(paged_pairs.scorer(implementation), some.arguments, want)


# --- keys that are NaN ---------------------------------------------------------------------------------------------

BODIES = {"decode": ((), DECODES), "contexts": (SOME, ())}
"""Contexts and decode requests of a step."""
NAN_KEYS = {"decode": ((0, 200), (2, 64), (3, 699)), "contexts": ((0, 200), (2, 64), (3, 299))}
"""Requests and positions: within a tile, the first of a page, and a last key, which the request's last row alone sees."""


def spoiled(some: Problem, form: str, places: Sequence[tuple[int, int]]) -> Cache:
    """The cache with keys of NaN: a code or scale byte of the first and second, the scale of the third."""
    table, (cache, size) = some.facts.held_table(), (some.cache, some.facts.page_size)
    owners = cases.owners(cache.layout, "index_key")
    for number, (request, position) in enumerate(places):
        row = row_of(table, request, position, size)
        page = page_number(owners, LAYER, row // size)
        name = "index_key" if form == "fp8" and number < 2 else "index_scale"
        value = np.array(cache.pages(name)[page, row % size])
        if name == "index_key":
            value[[3, 127][number]] = [NAN_CODE, NAN_CODE + 128][number]
        elif form == "fp8":
            value = np.float32(np.nan)
        else:
            value = value | np.array([0xFF, 0xFF << 24, -1]).astype(np.int32)[number]
        cache = cases.write(cache, name, LAYER, [row], value[None])
    return cache


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("body", BODIES)
def test_a_nan_key_of_the_pool_scores_nan(kernel, body):
    """In its column, for the rows that see it and no others, as with the reference. Every other score stays: bit by bit,
    but for Hopper's FP4, where a key that FP8 cannot express has others scored in another way.
    """
    form = KERNELS[kernel][0]
    some, score = problem(form, *BODIES[body]), compiled(kernel)
    q, weights, cache, step = some.arguments
    clean = result(score, q, weights, cache, step)
    check_scores(clean, paged_pairs.scorer("xla")(*some.arguments), some.visible)
    bad = np.zeros_like(some.visible)
    for request, position in NAN_KEYS[body]:
        bad[np.asarray(step.requests) == request, position] = True
    bad &= some.visible
    assert bad.any(axis=0).sum() == 3 and bad[:, NAN_KEYS[body][2][1]].sum() == 1
    spoilt = spoiled(some, form, NAN_KEYS[body])
    for got in (score(q, weights, spoilt, step), paged_pairs.scorer("xla")(q, weights, spoilt, step)):
        np.testing.assert_array_equal(np.isnan(got), bad)
    got = np.asarray(score(q, weights, spoilt, step))
    check_scores(np.where(bad, -np.inf, got), clean, some.visible & ~bad)
    if kernel != "mosaic, fp4":
        np.testing.assert_array_equal(got[~bad], clean[~bad])


# --- rounded scores ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("body", [*BODIES, "windows"])
def test_bfloat16_scores(kernel, body):
    """The scores of the same kernel in float32, rounded once, 20 times."""
    form, how = KERNELS[kernel]
    some = problem(form, *BODIES.get(body, (SOME, ())))
    q, weights, _, step = some.arguments
    if body == "windows":
        # The keys of all contexts in a row, of which each token sees its own.
        keys = (quant.quantize_fp8 if form == "fp8" else quant.quantize_fp4)(jnp.asarray(some.keys))
        arguments = (q, keys, weights, step.key_starts, step.key_ends)
        exact, rounded = (
            jax.jit(partial(ops.mqa_logits, dtype=d, **how)) for d in (jnp.float32, jnp.bfloat16)
        )
    else:
        arguments = some.arguments
        exact, rounded = (compiled(kernel, dtype=d) for d in (jnp.float32, jnp.bfloat16))
    want = result(exact, *arguments)
    for _ in range(20):
        got = rounded(*arguments)
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(
            np.asarray(got).astype(np.float32), want.astype(jnp.bfloat16).astype(np.float32)
        )
    assert (np.isfinite(want).sum(axis=1) == some.facts.derive()["limits"]).all()
    assert (want.astype(jnp.bfloat16).astype(np.float32) != want).any()


# --- selections in chunks ------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("implementation", "form"), FORMS)
def test_selection_in_chunks(implementation, form):
    """Contexts whose scores come in 13 chunks of 17 rows: what NumPy selects, as one chunk does; the same 20 times.

    Whole numbers tie at the threshold of most rows. Chunks end within a request or have several, and the last, which begins
    within the one before, has none.
    """
    (some, k), rows = (problem(form, SOME, whole=True), 64), 17
    tokens, columns = some.visible.shape
    chosen: Any = dict(k=k, implementation=implementation)

    @partial(jax.jit, static_argnames="budget")
    def both(q, weights, cache, step, budget):
        arguments = q, weights, cache, LAYER, step
        return tuple(
            op(*arguments, score_budget=budget, **chosen) for op in (ops.select_tokens, ops.select_rows)
        )

    starts = np.cumsum([0, *some.facts.kv_lens])
    table, want = some.facts.held_table(), np.full((tokens, k), -1)
    for t, (request, position) in enumerate(some.facts.tokens()):
        if position >= 0:
            own = some.keys[starts[request] : starts[request] + position + 1]
            scores = some.plain[t] @ np.maximum(some.values[t] @ own.T, 0)
            want[t] = topk(scores, position + 1, k)
    want_rows = [
        [row_of(table, request, p, some.facts.page_size) for p in line]
        for line, (request, _) in zip(want.tolist(), some.facts.tokens(), strict=True)
    ]
    chunked = str(jax.make_jaxpr(partial(both, budget=4 * columns * rows))(*some.arguments))
    assert f"length={-(-tokens // rows)}" in chunked
    for budget in (1 << 30, *[4 * columns * rows] * 20):
        got, got_rows = result(both, *some.arguments, budget=budget)
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(got_rows, want_rows)
