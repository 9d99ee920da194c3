"""Faults of padded and empty batches."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import cases
import toy_layer
from dsa_jax import ops
from dsa_jax.metadata import Bucket, StepMetadata


@pytest.mark.parametrize("length", [0, 1])
def test_b31_padded_rows_have_no_negative_lengths(length):
    """A padded request of length 1 (or 0) with six places: limits [0, 0, 0, 0, 0, length], the first five rows empty."""
    layout, sequences = cases.layout(), [list(range(10, 19)), list(range(20, 27))]
    bucket = Bucket(decode_requests=3, next_n=6, table_width=3)
    meta = StepMetadata.create(layout, bucket, [[3, 8, 1], [5, 0], [7]], [9, 7, length], [6, 6, length])
    meta = replace(meta, new_lens=jnp.array([6, 6, 6], jnp.int32))  # what a careless scheduler pads with
    step = cases.derive(meta)
    assert step.limits.tolist() == [4, 5, 6, 7, 8, 9, 2, 3, 4, 5, 6, 7, 0, 0, 0, 0, 0, length]
    assert step.positions.tolist()[12:17] == [-1] * 5
    assert step.rows.tolist()[12:17] == [-1] * 5
    cache = cases.poisoned(layout)
    for table, sequence, done in (([3, 8, 1], sequences[0], 3), ([5, 0], sequences[1], 1)):
        cache, _, _ = toy_layer.prefill(cache, table, sequence, 0, done)
    tokens = np.array(sequences[0][3:] + sequences[1][1:] + [0] * 6, np.int32)
    _, chosen, out = toy_layer.forward(cache, meta, tokens, k=3)
    toy_layer.check(chosen[:6], out[:6], sequences[0], range(3, 9))
    toy_layer.check(chosen[6:12], out[6:12], sequences[1], range(1, 7))
    assert chosen[12:17].tolist() == [[-1] * 3] * 5
    assert not np.asarray(out[12:17]).any()


def test_b31_negative_new_tokens_are_none():
    """Lengths that nobody checked: a request that adds -1 token adds none, and its neighbours keep their places."""
    layout = cases.layout()
    for sizes in (
        dict(context_requests=2, context_tokens=4),
        dict(decode_requests=2, next_n=2),
    ):
        bucket = Bucket(table_width=2, **sizes)
        good = StepMetadata.create(layout, bucket, [[3, 8], [5, 0]], [5, 6], [0, 2])
        bad = replace(good, new_lens=jnp.array([-1, 2], jnp.int32))
        wanted, got = cases.derive(good), cases.derive(bad)
        for name in ("requests", "positions", "limits", "rows"):
            assert getattr(got, name).tolist() == getattr(wanted, name).tolist(), name


def test_b32_some_inputs_padded_others_not():
    """3 requests of 2, 1, 2 tokens in places for 2: shapes must agree, and the five real rows are those of single runs."""
    layout, sequences = cases.layout(), [[4, 8, 15], [16, 23], [9, 3, 1, 2]]
    tables, cache = [[6, 2], [4, 0], [9, 1]], cases.poisoned(cases.layout())
    new = [2, 1, 2]
    for table, sequence, n in zip(tables, sequences, new, strict=True):
        cache, _, _ = toy_layer.prefill(cache, table, sequence, 0, len(sequence) - n)
    bucket = Bucket(decode_requests=3, next_n=2, table_width=2)
    meta = StepMetadata.create(layout, bucket, tables, [len(s) for s in sequences], new)
    tokens = np.array([8, 15, 23, 0, 1, 2], np.int32)
    _, chosen, out = toy_layer.forward(cache, meta, tokens)
    for rows, sequence, n in (
        (slice(0, 2), sequences[0], 2),
        (slice(2, 3), sequences[1], 1),
        (slice(4, 6), sequences[2], 2),
    ):
        toy_layer.check(chosen[rows], out[rows], sequence, range(len(sequence) - n, len(sequence)))
    assert chosen[3].tolist() == [-1] * toy_layer.K
    assert not np.asarray(out[3]).any()
    step = cases.derive(meta)
    q, weights = jnp.ones((6, 3, 8)), jnp.ones((6, 3))
    with pytest.raises(ValueError, match=r"weights has shape \[5, 3\], wanted \[N, H\] = \[6, 3\]"):
        ops.select_tokens(q, weights[:5], cache, 0, step, 2)
    with pytest.raises(ValueError, match=r"q has shape \[8, 3, 8\]"):
        ops.select_tokens(jnp.ones((8, 3, 8)), weights, cache, 0, step, 2)


@pytest.mark.parametrize("lengths", [[0, 0, 0], [0, 5, 0]])
@pytest.mark.parametrize("kind", ["decode", "context"])
def test_b34_empty_requests(lengths, kind):
    """(a), (b): shapes are kept; empty rows choose nothing, give 0 and -inf, and write nothing."""
    layout, sequence = cases.layout(), [3, 1, 4, 1, 5]
    new = [min(n, 1) for n in lengths]
    if kind == "decode":
        bucket = Bucket(decode_requests=3, table_width=2)
    else:
        bucket = Bucket(context_requests=3, context_tokens=3, table_width=2, gathered_keys=6)
    meta = StepMetadata.create(layout, bucket, [[], [6, 2], []], lengths, new)
    cache = cases.poisoned(layout)
    if any(lengths):
        cache, _, _ = toy_layer.prefill(cache, [6, 2], sequence, 0, 4)
    before = cases.pool_bytes(cache)
    place = 1 if kind == "decode" else 0
    tokens = np.full(3, 9, np.int32)
    tokens[place] = 5
    cache, chosen, out = toy_layer.forward(cache, meta, tokens)
    if any(lengths):
        toy_layer.check(chosen[place : place + 1], out[place : place + 1], sequence, [4])
    else:
        assert cases.pool_bytes(cache) == before
    empty = [i for i in range(3) if i != place or not any(lengths)]
    assert chosen[jnp.array(empty)].tolist() == [[-1] * 3] * len(empty)
    assert not np.asarray(out)[empty].any()
    step = cases.derive(meta)
    _, lse = ops.sparse_mla(jnp.ones((3, 2, 12)), cache, 0, ops.to_rows(chosen, step), 1.0)
    assert np.isneginf(np.asarray(lse)[empty]).all()
    if kind == "context":
        data, _ = ops.gather_index_k(cache, 0, step)
        held = sum(lengths)
        assert not np.asarray(data)[held:].any()
        np.testing.assert_array_equal(np.asarray(data)[:held], toy_layer.KEYS[sequence][:held])


def test_b34_no_requests_and_no_rows():
    """(c), (d): empty arrays and a pool without a changed byte."""
    layout = cases.layout()
    meta = StepMetadata.create(layout, Bucket(table_width=2), [], [], [])
    cache = cases.poisoned(layout)
    after, chosen, out = toy_layer.forward(cache, meta, np.zeros(0, np.int32))
    assert chosen.shape == (0, toy_layer.K)
    assert out.shape == (0, toy_layer.HEADS, cases.LATENT)
    assert cases.pool_bytes(after) == cases.pool_bytes(cache)
