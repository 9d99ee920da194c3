"""Kernels where there is nothing to read: no rows, no tokens, rows and layers that do not exist, garbage in what is unused.

B16, B23, B34 and B64 on every implementation of attention and scoring.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import contracts.test_sparse_mla_kernels as kernels
import form_cases
from card_scores import no_case
from dsa_jax import ops
from dsa_jax.layout import CacheLayout
from dsa_jax.metadata import Bucket, Step, StepMetadata
from dsa_jax.ops import dispatch
from dsa_jax.pallas import (
    many_rows_fp4_mosaic,
    paged_logits_fp4_mosaic,
    paged_logits_mosaic,
    paged_logits_triton,
    sparse_mla_mosaic,
    sparse_mla_triton,
)
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
    """They count as little as -1 does, wherever they stand, and so does any other negative number."""
    p = problem(2, 40)
    kernels.check(p, attend(name, p, rows=jnp.asarray(kernels.nowhere(p.rows, kernels.rows_in_all(p)))))


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


@pytest.mark.parametrize("form", ["fp8", "fp4"])
@pytest.mark.parametrize("mosaic", [False, True])
@pytest.mark.parametrize("context", [False, True])
def test_kernels_of_scores_without_tokens(form, mosaic, context):
    """B34, (c) and (d), of each kernel by itself: an array of the width of two pages, without rows."""
    module: Any = paged_logits_triton
    if mosaic:
        module = (
            paged_logits_mosaic
            if form == "fp8"
            else many_rows_fp4_mosaic
            if context
            else paged_logits_fp4_mosaic
        )
    lead = (0,) if context else (0, 2)
    codes, dtype = (128, jnp.float32) if form == "fp8" else (64, jnp.int32)
    q: Any = jnp.zeros((*lead, 64, codes), jnp.uint8)
    q = q if form == "fp8" else (q, jnp.zeros((*lead, 64), jnp.int32))
    stored = jnp.zeros((4, 64, codes), jnp.uint8), jnp.zeros((4, 64), dtype)
    table, rows = jnp.zeros((3 if context else 0, 2), jnp.int32), jnp.zeros(lead, jnp.int32)
    facts = (rows, rows) if context else (rows,)
    score = module.paged_logits_prefill if context else module.paged_logits_decode
    got = score(q, jnp.zeros((*lead, 64)), *stored, table, *facts, page_scale=1, layer_offset=0)
    assert got.shape == (0, 128)


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


SIZES: dict[str, dict[str, int]] = {
    "no requests": {},
    "empty decodes": dict(decode_requests=3, next_n=2),
    "empty contexts": dict(context_requests=2, context_tokens=5, gathered_keys=3),
}
NAMED = [None, "xla", "triton", "mosaic"]


def released(index: str, key: str) -> CacheLayout:
    """Three layers of the released widths."""
    model = dataclasses.replace(cases.config(index_head_dim=128), kv_lora_rank=512, qk_rope_head_dim=64)
    return CacheLayout.create(model, key_form=key, index_form=index, page_size=64)


def empty_step(layout: CacheLayout, sizes: str) -> Step:
    """A step without a single token."""
    return StepMetadata.create(layout, Bucket(table_width=2, **SIZES[sizes]), [], [], []).derive()


def run(implementation, op, *arguments):
    """The op under jit, by an implementation that may not exist on another card than Hopper."""
    try:
        return jax.jit(functools.partial(op, implementation=implementation))(*arguments)
    except (NotImplementedError, ExceptionGroup) as reason:
        no_case(reason)


def garbage(form: str, *shape: int):
    """Codes of queries or keys that are all NaN, or under scales that are none, with the scales of either form."""
    if form == "fp4":
        return jnp.full((*shape, 64), 0xFF, jnp.uint8), jnp.full(shape, -1, jnp.int32)
    return jnp.full((*shape, 128), 0x7F, jnp.uint8), jnp.full(shape, jnp.nan)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", NAMED)
@pytest.mark.parametrize("index", ["fp8", "fp4"])
@pytest.mark.parametrize("sizes", SIZES)
def test_nothing_on_the_card(sizes, index, implementation):
    """Scores, positions and rows of steps without tokens, under jit: B34 (a), (c) and (d)."""
    layout = form_cases.layout(index=index, page_size=64)
    cache, step = cases.poisoned(layout), empty_step(layout, sizes)
    tokens, (codes, scale) = step.bucket.tokens, garbage(index, step.bucket.tokens, 32)
    arguments = (codes, scale) if index == "fp4" else codes, jnp.full((tokens, 32), jnp.nan), cache, step
    score = lambda q, w, c, s, **how: ops.paged_mqa_logits(q, w, c, 0, s, **how)
    scores = run(implementation, score, *arguments)
    assert scores.shape == (tokens, 128)
    assert np.isneginf(scores).all()
    for select in (ops.select_tokens, ops.select_rows):
        choose = lambda q, w, c, s, select=select, **how: select(q, w, c, 0, s, 4, **how)
        chosen = run(implementation, choose, *arguments)
        assert chosen.tolist() == [[-1] * 4] * tokens


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", NAMED)
@pytest.mark.parametrize("index", ["fp8", "fp4"])
@pytest.mark.parametrize(("rows", "keys"), [(0, 300), (5, 300), (0, 0)])
def test_windows_of_nothing_on_the_card(rows, keys, index, implementation):
    """No rows, rows whose windows are empty, no keys; and the choice among such scores."""
    codes, scale = garbage(index, rows, 32)
    q = (codes, scale) if index == "fp4" else codes
    ends = jnp.arange(rows, dtype=jnp.int32)
    arguments = q, garbage(index, keys), jnp.full((rows, 32), jnp.nan), ends, ends
    scores = run(implementation, ops.mqa_logits, *arguments)
    assert scores.shape == (rows, keys)
    assert np.isneginf(scores).all()
    logits, limits = jnp.full((rows, max(keys, 1)), jnp.nan), jnp.zeros(rows, jnp.int32)
    choose = lambda x, limits, **how: ops.topk_indices(x, limits, 4, **how)
    assert run(implementation, choose, logits, limits).tolist() == [[-1] * 4] * rows


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize(
    ("index", "key"), [("fp8", "bf16"), ("fp4", "nvfp4"), ("f32", "fp8"), ("fp8", "fp8_ds_mla")]
)
@pytest.mark.parametrize("sizes", SIZES)
def test_appends_of_nothing_on_the_card(sizes, index, key, implementation):
    """No byte of a pool changes, and the places of keys that no context has read as zeros."""
    layout = released(index, key)
    cache, step = cases.poisoned(layout), empty_step(layout, sizes)
    k, latent, rope = (jnp.ones((step.bucket.tokens, width)) for width in (128, 512, 64))

    def both(cache, k, latent, rope, step, **how):
        cache = ops.append_index_k(cache, 0, k, step, **how)
        cache = ops.append_latent(cache, 0, latent, rope, step, **how)
        return cache, ops.gather_index_k(cache, 0, step, **how)

    after, (keys, _) = run(implementation, both, cache, k, latent, rope, step)
    assert cases.pool_bytes(after) == cases.pool_bytes(cache)
    assert keys.shape[0] == step.bucket.gathered_keys
    assert not np.asarray(keys).any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("implementation", "key"),
    [("mosaic", "bf16"), ("mosaic", "fp8_ds_mla")]
    + [(name, key) for name in ("triton", "xla") for key in ("bf16", "fp8", "nvfp4", "fp8_ds_mla")],
)
@pytest.mark.parametrize(("tokens", "keys"), [(3, 0), (3, 200), (0, 200)])
def test_attention_of_nothing_on_the_card(tokens, keys, key, implementation):
    """No queries, no rows, or numbers of no row alone, under garbage queries."""
    cache, q = cases.poisoned(released("fp8", key)), jnp.full((tokens, 64, 576), jnp.nan, jnp.bfloat16)
    rows = kernels.nowhere(np.full((tokens, keys), -1), cases.SLOTS * 64)
    attend = lambda q, c, r, **how: ops.sparse_mla(q, c, 1, r, 0.1, **how)
    result = run(implementation, attend, q, cache, jnp.asarray(rows))
    assert [array.shape for array in result] == [(tokens, 64, 512), (tokens, 64)]
    nothing(result)
