"""Kernels where there is nothing to read: no rows, no tokens, rows and layers that do not exist, garbage in what is unused.

B16, B23, B34 and B64 on every implementation of attention and scoring.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import contracts.test_sparse_mla_kernels as kernels
from card_scores import no_case
from dsa_jax import ops
from dsa_jax.metadata import Bucket, StepMetadata
from dsa_jax.ops import dispatch
from dsa_jax.pallas import paged_logits_mosaic, sparse_mla_mosaic, sparse_mla_triton
from interpreted import INTERPRETED

RUNS = {
    "triton": functools.partial(sparse_mla_triton.sparse_mla, interpret=True),
    "mosaic": functools.partial(sparse_mla_mosaic.sparse_mla, interpret=INTERPRETED),
}


def problem(tokens: int, keys: int) -> kernels.Problem:
    """Widths that Mosaic takes; the last query has no valid row."""
    return kernels.problem(tokens, 8, keys, latent=512, rope=64, page_size=64)


def attend(name: str, p: kernels.Problem, *, q=None, rows=None, layer_offset: Any = kernels.LAYER_OFFSET):
    return RUNS[name](
        p.q if q is None else q,
        (p.pages,),
        p.rows if rows is None else rows,
        page_scale=kernels.SCALE,
        layer_offset=layer_offset,
        softmax_scale=kernels.SOFTMAX_SCALE,
    )


def nothing(result) -> None:
    """0 and -inf."""
    out, lse = (np.asarray(x, np.float32) for x in result)
    np.testing.assert_array_equal(out, np.zeros_like(out))
    np.testing.assert_array_equal(lse, np.full_like(lse, -np.inf))


@pytest.mark.parametrize("name", RUNS)
def test_rows_past_the_pool_are_not_read(name):
    """They count as little as -1 does, wherever they stand."""
    p = problem(2, 40)
    past = p.pages.shape[0] // kernels.SCALE * p.pages.shape[1]
    for row in (past, 2**31 - 1):
        kernels.check(p, attend(name, p, rows=jnp.where(p.rows < 0, jnp.int32(row), p.rows)))


@pytest.mark.full
@pytest.mark.parametrize("name", RUNS)
def test_a_layer_that_does_not_exist(name):
    p = problem(1, 16)
    rows = jnp.arange(16, dtype=jnp.int32)[None]
    nothing(attend(name, p, rows=rows, layer_offset=jnp.int32(-1)))


@pytest.mark.full
@pytest.mark.parametrize("name", ["triton", "mosaic"])
def test_garbage_in_queries_without_rows(name):
    """A padding token's query may hold anything: its output is 0 and -inf all the same."""
    p = problem(1, 16)
    nothing(attend(name, p, q=jnp.full_like(p.q, jnp.nan)))


@pytest.mark.parametrize("name", ["triton", pytest.param("mosaic", marks=pytest.mark.full)])
def test_no_rows_at_all(name):
    """K of 0, which the reference takes."""
    p = problem(2, 16)
    nothing(attend(name, p, rows=jnp.zeros((2, 0), jnp.int32)))


@pytest.fixture
def card(monkeypatch):
    """Dispatch takes an H200 for granted, its kernels are interpreted."""
    monkeypatch.setattr(dispatch, "target_device", lambda: cases.CARD)
    for name in ("paged_logits_decode", "paged_logits_prefill"):
        call = functools.partial(getattr(paged_logits_mosaic, name), blocks=3, interpret=INTERPRETED)
        monkeypatch.setattr(paged_logits_mosaic, name, call)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        pytest.param(dict(decode_requests=2, next_n=2), marks=pytest.mark.full),
        pytest.param(dict(context_requests=2, context_tokens=3), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_none_never_fails_on_steps_without_tokens(card, sizes):
    """B34, (c) and (d): no requests at all, and requests that hold nothing; scores, positions and rows."""
    layout = cases.layout(index="fp8", page_size=64)
    step = StepMetadata.create(layout, Bucket(table_width=2, **sizes), [], [], []).derive()
    tokens = step.bucket.tokens
    arguments = (
        jnp.zeros((tokens, 32, 128), jnp.uint8),
        jnp.ones((tokens, 32)),
        cases.poisoned(layout),
        0,
        step,
    )
    scores = ops.paged_mqa_logits(*arguments)
    assert scores.shape == (tokens, 128)
    assert np.isneginf(scores).all()
    for select in (ops.select_tokens, ops.select_rows):
        assert select(*arguments, 4).tolist() == [[-1] * 4] * tokens


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("tokens", [0, 2])
def test_nothing_on_the_card(tokens, implementation):
    """The public ops with no tokens, and with tokens that may see nothing, under jit."""
    layout = cases.layout(index="fp8", page_size=64)
    bucket = Bucket(decode_requests=tokens, table_width=2)
    step = StepMetadata.create(layout, bucket, [], [], []).derive()
    q, weights = jnp.full((tokens, 32, 128), 0x7F, jnp.uint8), jnp.full((tokens, 32), jnp.nan)
    select = functools.partial(ops.select_rows, implementation=implementation)
    rows = jax.jit(lambda c, q, w, s: select(q, w, c, 0, s, 4))(cases.poisoned(layout), q, weights, step)
    assert rows.tolist() == [[-1] * 4] * tokens


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [sparse_mla_triton, sparse_mla_mosaic])
@pytest.mark.parametrize("keys", [0, 200])
def test_attention_of_nothing_on_the_card(kernel, keys):
    """No rows, or -1 alone, under garbage queries."""
    q, rows = jnp.full((3, 64, 576), jnp.nan, jnp.bfloat16), jnp.full((3, keys), -1, jnp.int32)
    pages = jnp.full((6, 64, 576), jnp.nan, jnp.bfloat16)
    call = functools.partial(kernel.sparse_mla, page_scale=3, layer_offset=2, softmax_scale=0.1)
    try:
        kernel.supported_on(kernels.compat.target_device())
    except NotImplementedError as reason:
        no_case(reason)
    nothing(jax.jit(lambda q, p, r: call(q, (p,), r))(q, pages, rows))
