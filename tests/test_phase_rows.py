"""Rows of the catalogue on gathered contexts, shared selections and lengths: what is an alias elsewhere is derived here."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import cases
from dsa_jax import ops
from dsa_jax.cache import Cache
from dsa_jax.layout import CacheLayout
from dsa_jax.metadata import Bucket, StepMetadata
from dsa_jax.models.decoder import Decoder
from dsa_jax.models.presets import preset
from dsa_jax.models.step import decode_tokens

TABLES = [[3, 1], [0, 2, 6], [7]]


def derived(bucket: Bucket, tables, kv, new):
    return cases.derive(StepMetadata.create(cases.layout(), bucket, tables, kv, new))


# --- row 31: when the whole context is gathered -------------------------------------------------------------------


def test_row_31_nothing_is_gathered_where_nobody_asks():
    """Conditions 1 and 2: without a gather (or without an indexer) the bucket holds no gathered keys."""
    step = derived(Bucket(context_requests=2, context_tokens=8, table_width=3), TABLES[:2], [7, 9], [3, 2])
    assert step.gather_rows.shape == (0,)


def test_row_31_no_contexts():
    """Condition 3: decode requests have no gathered keys, and none are made up for them."""
    step = derived(Bucket(decode_requests=3, table_width=3, gathered_keys=4), TABLES, [7, 9, 3], [1, 1, 1])
    assert step.gather_rows.tolist() == [-1] * 4


@pytest.mark.parametrize("lens", [[3, 2], [1, 0], [8, 12]])
def test_row_31_without_a_cached_prefix_it_is_what_is_written(lens):
    """Conditions 4 and 5: the rows of the new tokens, in their order, whether or not the indexer runs on them."""
    bucket = Bucket(context_requests=2, context_tokens=20, table_width=3, gathered_keys=20)
    step = derived(bucket, TABLES[:2], lens, lens)
    np.testing.assert_array_equal(step.gather_rows, step.rows)
    assert (np.asarray(step.rows) >= 0).sum() == sum(lens)


def test_row_31_no_keys_at_all():
    """Condition 6: contexts of length 0."""
    bucket = Bucket(context_requests=2, context_tokens=4, table_width=3, gathered_keys=5)
    assert derived(bucket, [[], []], [0, 0], [0, 0]).gather_rows.tolist() == [-1] * 5


def test_row_31_a_cached_prefix_is_gathered_whole():
    """Otherwise: positions 0..6 of the first context and 0..8 of the second, though 3 and 2 tokens are new."""
    bucket = Bucket(context_requests=2, context_tokens=8, table_width=3, gathered_keys=18)
    step = derived(bucket, TABLES[:2], [7, 9], [3, 2])
    assert step.gather_rows.tolist() == [12, 13, 14, 15, 4, 5, 6, 0, 1, 2, 3, 8, 9, 10, 11, 24, -1, -1]
    assert step.rows.tolist() == [4, 5, 6, 11, 24, -1, -1, -1]


# --- row 36: selections of shared layers --------------------------------------------------------------------------


def test_row_36_shared_layers_get_the_rows_of_the_full_one(monkeypatch):
    """In one step of contexts and decode requests: not equal rows but the same ones, for all tokens."""
    given, attend = [], ops.sparse_mla

    def spy(q, cache, layer, rows, *rest, **named):
        given.append((layer, rows))
        return attend(q, cache, layer, rows, *rest, **named)

    monkeypatch.setattr(ops, "sparse_mla", spy)
    config = preset("tiny-glm")
    layout = CacheLayout.create(config.dsa, page_size=4)
    bucket = Bucket(context_requests=1, context_tokens=4, decode_requests=2, next_n=2, table_width=3)
    meta = StepMetadata.create(layout, bucket, TABLES, [7, 9, 3], [3, 2, 1])

    def step(cache, meta):
        model = Decoder(config, rngs=nnx.Rngs(0))
        return decode_tokens(model, jnp.zeros(8, jnp.int32), cache, meta.derive())[1]

    jax.eval_shape(step, Cache.abstract(layout, 8), meta)
    assert config.dsa.full_layers[:4] == (True, True, False, False)
    assert [layer for layer, _ in given] == [0, 1, 2, 3]
    first, second, third, fourth = (rows for _, rows in given)
    assert first is not second
    assert second is third is fourth
    assert second.shape == (bucket.tokens, config.dsa.index_topk)


# --- row 38: lengths with a compress ratio of 1 -------------------------------------------------------------------


@pytest.mark.parametrize("f", [lambda meta: meta.derive(), jax.jit(lambda meta: meta.derive())])
def test_row_38_lengths_are_the_caches(f):
    """Every token has its key: lengths 0, 1, 128 and 4,096 stay as they are, and so do the limits."""
    layout = cases.layout(page_size=64)
    bucket = Bucket(decode_requests=4, table_width=64)
    tables = [[], [64], [65, 66], range(64)]
    step = f(StepMetadata.create(layout, bucket, tables, [0, 1, 128, 4096], [0, 1, 1, 1]))
    assert step.kv_lens.tolist() == [0, 1, 128, 4096]
    assert step.limits.tolist() == [0, 1, 128, 4096]
    assert step.positions.tolist() == [-1, 0, 127, 4095]
