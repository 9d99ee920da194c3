"""Scores and top-k in one go: the same choice for every score budget, and the right one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from compile_without_gpu import compile_case
from dsa_jax import ops
from dsa_jax.cache import Cache
from dsa_jax.metadata import Bucket, Step, StepMetadata
from dsa_jax.ops import dispatch
from numpy_model import Facts, row_of, scores, to_rows, topk

HEADS, K = 3, 4
MIXED = dict(
    contexts=[(9, 3), (0, 0), (14, 14)],
    decodes=[(11, 2), (7, 3), (3, 1), (1, 1), (6, 3)],
    next_n=3,
    padding=2,
    spare_requests=1,
    spare_columns=1,
)


def scenario(layout, facts: Facts, seed: int = 0):
    """Small whole numbers everywhere, so that scores are exact and most choices are ties; NaN in every free byte."""
    rng = np.random.default_rng(seed)
    table, width, cache, data = facts.held_table(), layout.index_head_dim, cases.poisoned(layout), {}
    for r, length in enumerate(facts.kv_lens):
        data[r] = rng.integers(-1, 2, (length, width)).astype(np.float32)
        rows = [row_of(table, r, p, facts.page_size) for p in range(length)]
        if layout.index_form == "f32":
            cache = cases.write(cache, "index_key", 0, rows, data[r])
        else:  # codes of -1, 0, 1 with scale 1
            codes = np.array([0xB8, 0x00, 0x38], np.uint8)[data[r].astype(int) + 1]
            cache = cases.write(
                cases.write(cache, "index_key", 0, rows, codes), "index_scale", 0, rows, np.ones(length)
            )
    tokens = facts.tokens()
    values = rng.integers(-1, 2, (len(tokens), HEADS, width)).astype(np.float32)
    weights = rng.integers(-2, 3, (len(tokens), HEADS)).astype(np.float32)
    wanted = [
        topk(scores(values[t], weights[t], data[r][: p + 1]), p + 1, K) if p >= 0 else [-1] * K
        for t, (r, p) in enumerate(tokens)
    ]
    return cache, cases.query(layout, values), weights, wanted


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["select_tokens"])
@pytest.mark.parametrize(
    ("manager", "form", "page_size"),
    [("v2", "f32", 4), ("v1", "fp8", 4), ("v2", "fp8", 1), ("v1", "f32", 16)],
)
def test_selection(implementation, manager, form, page_size):
    requests = (
        MIXED
        if page_size > 1
        else MIXED | {"contexts": [(7, 3), (0, 0)], "decodes": [(9, 3), (6, 2), (1, 1)]}
    )
    layout, facts = (
        cases.layout(manager, index=form, page_size=page_size),
        cases.batch(**requests, page_size=page_size),
    )
    cache, q, weights, wanted = scenario(layout, facts)
    got = cases.select_tokens(
        q, weights, cache, 0, cases.step(facts, layout), K, implementation=implementation
    )
    assert got.tolist() == wanted
    assert sum(-1 not in row for row in wanted) > 6  # the choice really drops tokens


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["select_tokens"])
@pytest.mark.parametrize("rows", [1, 3, 5, 16])
def test_budget_changes_nothing(implementation, rows, monkeypatch):
    """A budget of so many rows, in a batch of contexts and decode requests that no chunk size divides."""
    layout, facts = cases.layout(), cases.batch(**MIXED)
    cache, q, weights, wanted = scenario(layout, facts, seed=2)
    columns = facts.width * facts.page_size
    chunks = []
    monkeypatch.setattr(ops.select, "paged_mqa_logits", _counting(chunks, ops.select.paged_mqa_logits))
    budget = rows * columns * 4 + 3
    select = jax.jit(
        lambda *args: ops.select_tokens(*args, K, score_budget=budget, implementation=implementation)
    )
    assert select(q, weights, cache, 0, cases.step(facts, layout)).tolist() == wanted
    assert chunks
    assert max(chunks) <= max(rows, facts.next_n)


def _counting(chunks: list[int], original):
    def count(q, weights, cache, layer, step, **kwargs):
        chunks.append(step.bucket.tokens)
        return original(q, weights, cache, layer, step, **kwargs)

    return count


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["select_tokens"])
@pytest.mark.parametrize("kind", ["contexts", "decodes"])
def test_one_kind_of_request(implementation, kind):
    """Prefill alone and decode alone, chunked."""
    requests = {kind: MIXED[kind]} | ({"next_n": 3} if kind == "decodes" else {"padding": 3})
    layout, facts = cases.layout(index="f32"), cases.batch(**requests)
    cache, q, weights, wanted = scenario(layout, facts, seed=3)
    budget = 6 * facts.width * facts.page_size * 4
    step = cases.step(facts, layout)
    got = cases.select_tokens(
        q, weights, cache, 0, step, K, score_budget=budget, implementation=implementation
    )
    assert got.tolist() == wanted


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["select_tokens"])
def test_k_beyond_the_width(implementation):
    layout, facts = cases.layout(), cases.batch(decodes=[(3, 1), (4, 1)])
    cache, q, weights, _ = scenario(layout, facts)
    got = cases.select_tokens(
        q, weights, cache, 0, cases.step(facts, layout), 9, implementation=implementation
    )
    assert got.tolist() == [[0, 1, 2] + [-1] * 6, [0, 1, 2, 3] + [-1] * 5]


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["select_tokens"])
def test_no_tokens(implementation):
    layout = cases.layout()
    step = StepMetadata.create(layout, Bucket(table_width=2), [], [], []).derive()
    out = ops.select_tokens(
        jnp.zeros((0, HEADS, 8)),
        jnp.zeros((0, HEADS)),
        cases.poisoned(layout),
        0,
        step,
        K,
        implementation=implementation,
    )
    assert out.shape == (0, K)


def rows_of(facts: Facts, wanted: list[list[int]]) -> list[list[int]]:
    """Cache rows of wanted positions, by the NumPy model."""
    requests = [r for r, _ in facts.tokens()]
    return to_rows(np.array(wanted, np.int32), requests, facts.held_table(), facts.page_size).tolist()


@pytest.mark.sample(0, 3, 4, 5)
@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["select_rows"])
@pytest.mark.parametrize(
    ("manager", "form", "page_size", "budget"),
    [
        ("v2", "f32", 4, 1000),
        ("v1", "fp8", 4, 5),
        ("v2", "fp8", 64, 1000),
        pytest.param("v2", "fp8", 1, 3, marks=pytest.mark.full),
        pytest.param("v1", "f32", 16, 1, marks=pytest.mark.full),
    ],
)
def test_rows(implementation, manager, form, page_size, budget):
    """Rows of the right positions: contexts, decode requests, padding, stale columns; whole and in chunks of rows."""
    requests = (
        MIXED
        if page_size > 1
        else MIXED | {"contexts": [(7, 3), (0, 0)], "decodes": [(9, 3), (6, 2), (1, 1)]}
    )
    layout = cases.layout(manager, index=form, page_size=page_size)
    facts = cases.batch(**requests, page_size=page_size)
    cache, q, weights, wanted = scenario(layout, facts, seed=4)
    options = dict(score_budget=budget * facts.width * page_size * 4, implementation=implementation)
    got = cases.select_rows(q, weights, cache, 0, cases.step(facts, layout), K, **options)
    assert got.dtype == jnp.int32
    assert got.tolist() == rows_of(facts, wanted)
    assert got.tolist() != wanted  # the pages are shuffled
    assert sum(-1 not in row for row in wanted) > 5  # the choice really drops tokens


def test_rows_from_kernels_alone(monkeypatch):
    """FP8 decode requests with 16 heads, as the kernels of the scores want them."""
    monkeypatch.setattr(dispatch, "target_device", lambda: cases.CARD)
    layout, facts = (
        cases.layout(index="fp8", page_size=16),
        cases.batch(
            decodes=[(40, 2), (33, 1), (16, 2)], next_n=2, page_size=16, spare_requests=1, spare_columns=1
        ),
    )
    cache, q, weights, _ = scenario(layout, facts, seed=5)
    q, weights = np.tile(q, (1, 6, 1))[:, :16], np.tile(weights, (1, 6))[:, :16]
    step = cases.step(facts, layout)
    wanted = cases.to_rows(cases.select_tokens(q, weights, cache, 0, step, K, implementation="xla"), step)
    got = cases.select_rows(q, weights, cache, 0, step, K, implementation="triton")
    assert got.tolist() == wanted.tolist()
    assert (np.asarray(got) >= 0).sum() == 5 * K


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["select_rows"])
def test_rows_of_no_tokens_and_k_beyond_the_width(implementation):
    layout = cases.layout()
    step = StepMetadata.create(layout, Bucket(table_width=2), [], [], []).derive()
    nothing = jnp.zeros((0, HEADS, 8)), jnp.zeros((0, HEADS)), cases.poisoned(layout)
    assert ops.select_rows(*nothing, 0, step, K, implementation=implementation).shape == (0, K)
    facts = cases.batch(decodes=[(3, 1), (4, 1)])
    cache, q, weights, _ = scenario(layout, facts)
    got = cases.select_rows(q, weights, cache, 0, cases.step(facts, layout), 9, implementation=implementation)
    everything = [[*range(3)] + [-1] * 6, [*range(4)] + [-1] * 5]
    assert got.tolist() == rows_of(facts, everything)


def test_planted_stale_chunk_is_seen(monkeypatch):
    """A chunk that keeps the first chunk's request numbers reads another request's keys."""

    def careless(self, start, size):
        return original(self, 0, size)

    original = Step.decode_chunk
    monkeypatch.setattr(Step, "decode_chunk", careless)
    layout, facts = cases.layout(), cases.batch(decodes=MIXED["decodes"], next_n=3)
    cache, q, weights, wanted = scenario(layout, facts)
    budget = 3 * facts.width * facts.page_size * 4
    args = q, weights, cache, 0, cases.step(facts, layout)
    assert jax.jit(lambda *a: ops.select_tokens(*a, K, score_budget=budget))(*args).tolist() != wanted
    monkeypatch.undo()
    assert jax.jit(lambda *a: ops.select_tokens(*a, K, score_budget=budget))(*args).tolist() == wanted


def test_errors():
    layout, facts = cases.layout(), cases.batch(decodes=[(1, 1)])
    cache, step = Cache.create(layout, 2), cases.step(facts, layout)
    q, weights = jnp.zeros((1, HEADS, 8)), jnp.zeros((1, HEADS))
    with pytest.raises(ValueError, match=r"select_tokens: k is 0.*Pass the model's index_topk"):
        ops.select_tokens(q, weights, cache, 0, step, 0)
    with pytest.raises(ValueError, match="select_tokens: .*score_budget"):
        ops.select_tokens(q, weights, cache, 0, step, 2, score_budget=0)
    with pytest.raises(ValueError, match=r"select_tokens: q has shape \[2, 3, 8\]"):
        ops.select_tokens(jnp.zeros((2, HEADS, 8)), weights, cache, 0, step, 2)
    with pytest.raises(ValueError, match="shared-indexer layer"):
        ops.select_tokens(q, weights, cache, 1, step, 2)
    with pytest.raises(
        ValueError, match=r"select_rows: k is -1.*; score_budget is 0.*Pass the model's index_topk"
    ):
        ops.select_rows(q, weights, cache, 0, step, -1, score_budget=0)
    with pytest.raises(
        NotImplementedError, match="select_rows: has no mosaic|paged_mqa_logits: mosaic on cpu"
    ):
        ops.select_rows(q, weights, cache, 0, step, 2, implementation="mosaic")


def compiled_case(*, rows: bool):
    """For `compile_without_gpu`: selection of a decode step, positions or rows."""
    layout = cases.layout(index="fp8", page_size=64)
    bucket = Bucket(decode_requests=8, table_width=64)
    meta = StepMetadata.create(layout, bucket, [[r] for r in range(8)], [9] * 8, [1] * 8)

    def run(q, weights, cache, step):
        return (ops.select_rows if rows else ops.select_tokens)(q, weights, cache, 0, step, 2048)

    shapes = jax.ShapeDtypeStruct((8, 64, 128), jnp.uint8), jax.ShapeDtypeStruct((8, 64), jnp.float32)
    return run, [*shapes, Cache.abstract(layout, 64), jax.eval_shape(meta.derive)]


@pytest.mark.sample(0)
@pytest.mark.compile
@pytest.mark.parametrize("card", ["sm80", "sm90"])
def test_rows_cost_no_launch(compile_environment, card):
    """As many kernels and fusions as positions take."""
    case = "contracts.test_select:compiled_case"
    results = [compile_case(compile_environment, card, case, rows=rows) for rows in (False, True)]
    positions, rows = [(len(r.get("calls", [])), r.get("fusions")) for r in results]
    assert positions[0] >= 2, results
    assert rows == positions, results
