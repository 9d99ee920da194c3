"""Paged scores past 2 and 4 GiB on a CUDA card (B01), for every kernel by name: ``pytest -m gpu``.

Keys and queries are those of `test_limits_on_the_card`, whose scores are planted numbers; every one of them is compared.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from contracts.test_limits_on_the_card import (
    GIB,
    MANY,
    NUMBERS,
    SCORES,
    call,
    keys_that_count,
    layout_of,
    unit_queries,
    wrong_scores,
)
from dsa_jax import ops
from dsa_jax.cache import Cache
from dsa_jax.metadata import Bucket, StepMetadata

pytestmark = pytest.mark.gpu


def cache_of_two_pages(form: str) -> Cache:
    """Two pages that hold the same keys: a table may name them in any order and the numbers go on."""
    cache, (codes, scale) = Cache.create(layout_of(index=form), 2), keys_that_count(64, form)
    return cache.replace_pages(
        index_key=jnp.tile(codes[None], (2, 1, 1)), index_scale=jnp.tile(scale[None], (2, 1))
    )


def check(form: str, implementation: Any, cache: Cache, step, limits: np.ndarray, columns: int) -> None:
    """Every score of a step whose rows see so many keys."""
    q, weights = unit_queries(len(limits), form)
    score = lambda q, w, c, s: ops.paged_mqa_logits(q, w, c, 0, s, implementation=implementation)
    got = call(score, q, weights, cache, step)
    assert got.shape == (len(limits), columns)
    ends = jnp.asarray(limits, jnp.int32)
    assert int(wrong_scores(got, jnp.asarray(NUMBERS[form], jnp.float32), jnp.zeros_like(ends), ends)) == 0


@pytest.mark.parametrize(("implementation", "form"), SCORES)
@pytest.mark.parametrize("gibibytes", [2, 4])
def test_b01_many_scores_of_contexts(gibibytes, implementation, form):
    """8,232 and 16,424 tokens of one context of 65,536: limits wander over it, and the last rows see everything."""
    cache, rows, width = cache_of_two_pages(form), gibibytes * GIB // (4 * MANY) + 40, MANY // 64
    bucket = Bucket(context_requests=1, context_tokens=rows, table_width=width)
    step = StepMetadata.create(cache.layout, bucket, [], [], []).derive()
    limits = (np.arange(rows) * 37 % MANY).astype(np.int32)
    limits[-2:] = MANY
    step = dataclasses.replace(
        step,
        page_table=(jnp.arange(width, dtype=jnp.int32) % 2)[None],
        requests=jnp.zeros(rows, jnp.int32),
        limits=jnp.asarray(limits),
    )
    check(form, implementation, cache, step, limits, MANY)


@pytest.mark.parametrize(("implementation", "form"), SCORES)
@pytest.mark.parametrize("requests", [72, 144])
def test_b01_many_scores_of_decode(requests, implementation, form):
    """2.4 and 4.8 GB: eight rows a request over tables of 1,048,576 keys, few of them seen or all."""
    cache, width = cache_of_two_pages(form), (1 << 20) // 64
    bucket = Bucket(decode_requests=requests, next_n=8, table_width=width)
    meta = StepMetadata.create(cache.layout, bucket, [], [], [])
    lens = (8 + np.arange(requests) * 14_563 % (1 << 20)).astype(np.int32)
    lens[-1] = 1 << 20
    table = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32) % 2, (requests, width))
    meta = dataclasses.replace(
        meta, page_table=table, kv_lens=jnp.asarray(lens), new_lens=jnp.full(requests, 8, jnp.int32)
    )
    limits = (lens[:, None] - 7 + np.arange(8)).reshape(-1)
    check(form, implementation, cache, meta.derive(), limits, 1 << 20)
