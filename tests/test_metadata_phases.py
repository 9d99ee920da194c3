"""Metadata of every phase from lengths alone: chunks, short and empty sequences, chains of length changes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cases
import toy_layer
from dsa_jax import ops
from dsa_jax.chunking import ChunkPart, chunk_lengths, largest_chunk, split_prefill_chunks
from dsa_jax.draft import advance, rewind
from dsa_jax.metadata import Bucket, StepMetadata

# --- splitting by tokens -------------------------------------------------------------------------------------------


def split(lens, limit=1000, first=0) -> list[list[tuple[int, int, int, int]]]:
    """Chunks as tuples of (request, start, end, offset)."""
    chunks = split_prefill_chunks(lens, limit, first)
    return [[(p.request, p.start, p.end, p.offset) for p in chunk] for chunk in chunks]


def test_chunks_of_the_catalogue():
    """Row 27."""
    assert split([200, 300, 400]) == [[(0, 0, 200, 0), (1, 0, 300, 200), (2, 0, 400, 500)]]
    assert split([400, 500, 300, 600]) == [
        [(0, 0, 400, 0), (1, 0, 500, 400)],
        [(2, 0, 300, 900), (3, 0, 600, 1200)],
    ]
    assert split([2500]) == [[(0, 0, 1000, 0)], [(0, 1000, 2000, 0)], [(0, 2000, 2500, 0)]]
    whole = split([400, 2500, 300])
    assert (len(whole), whole[-1]) == (5, [(2, 0, 300, 2900)])
    assert split([1000]) == [[(0, 0, 1000, 0)]]
    assert split([100, 200, 300], first=1) == [[(1, 0, 200, 100), (2, 0, 300, 300)]]


def test_chunks_of_empty_requests():
    assert split([0, 5, 0, 7], 6) == [[(1, 0, 5, 0)], [(3, 0, 6, 5)], [(3, 6, 7, 5)]]
    assert split([]) == split([0, 0]) == split([3], first=1) == []


@given(st.lists(st.integers(0, 30), max_size=6), st.integers(1, 12))
def test_chunks_cover_every_token_once(lens, limit):
    """In order, none above the limit, and no two neighbours that would have fitted together."""
    chunks = split(lens, limit)
    flat = [(r, token) for chunk in chunks for r, start, end, _ in chunk for token in range(start, end)]
    assert flat == [(r, token) for r, length in enumerate(lens) for token in range(length)]
    sizes = [sum(end - start for _, start, end, _ in chunk) for chunk in chunks]
    assert all(0 < size <= limit for size in sizes)
    for a, x, b in zip(chunks, sizes, chunks[1:]):
        whole = all(lens[r] <= limit for r, *_ in a + b[:1])
        assert not whole or x + lens[b[0][0]] > limit


def test_largest_chunk_falls_with_the_longest_context():
    """Above 512 Ki keys 8 Ki tokens, from 256 Ki on 16 Ki, and never more than was asked for."""
    ki = 1024
    assert [largest_chunk(n) for n in (1, 256 * ki - 1, 256 * ki, 512 * ki, 512 * ki + 1)] == [
        32 * ki,
        32 * ki,
        16 * ki,
        16 * ki,
        8 * ki,
    ]
    assert [largest_chunk(n, 1000) for n in (1, 300 * ki, 600 * ki)] == [1000] * 3
    assert [largest_chunk(n, 12 * ki) for n in (1, 300 * ki, 600 * ki)] == [12 * ki, 12 * ki, 8 * ki]


def test_bad_chunks_are_refused():
    with pytest.raises(ValueError) as error:
        split_prefill_chunks([3, -1], 0, first=5)
    for part in ("limit is 0, wanted at least 1", "request 1 has -1 new tokens", "first is 5, wanted 0 to 2"):
        assert part in str(error.value)


LONG_TABLES = ([7, 2, 11, 5], [0, 9, 1, 3], [4, 8, 10, 12], [13, 6, 14, 15])


@pytest.mark.parametrize(
    ("new", "cached", "limit"),
    [([2, 10, 3], [0, 0, 4], 4), ([13, 5], [0, 2], 6), ([2, 3, 9, 2], [5, 0, 0, 1], 4), ([3, 4], [2, 1], 16)],
)
def test_chunks_equal_a_single_pass(new, cached, limit):
    """Row 28: each chunk's metadata comes from its own lengths, and every selection is that of the whole sequence."""
    layout = cases.layout()
    sequences = [[(5 * i + 3 * r) % 40 for i in range(c + n)] for r, (n, c) in enumerate(zip(new, cached))]
    cache = cases.poisoned(layout)
    for table, sequence, held in zip(LONG_TABLES, sequences, cached):
        if held:
            cache, _, _ = toy_layer.prefill(cache, table, sequence, 0, held)
    wanted = [toy_layer.reference(sequence)[0] for sequence in sequences]
    bucket = Bucket(context_requests=4, context_tokens=16, table_width=4, gathered_keys=64)
    for chunk in split_prefill_chunks(new, limit):
        requests, kv_lens, new_lens = chunk_lengths(chunk, cached)
        meta = StepMetadata.create(layout, bucket, [LONG_TABLES[r] for r in requests], kv_lens, new_lens)
        step = cases.derive(meta)
        starts = np.repeat(
            np.cumsum([0, *kv_lens[:-1]]), new_lens
        )  # windows count from this chunk's first key
        assert step.key_starts.tolist()[: len(starts)] == starts.tolist()
        tokens = [t for part in chunk for t in _new_tokens(sequences, cached, part)]
        cache, chosen, _ = toy_layer.forward(cache, meta, toy_layer.pad(tokens, 16))
        rows = [
            row for p in chunk for row in wanted[p.request][cached[p.request] + p.start :][: p.end - p.start]
        ]
        assert np.asarray(chosen).tolist() == rows + [[-1] * toy_layer.K] * (16 - len(rows))


def _new_tokens(sequences, cached, part: ChunkPart) -> list[int]:
    held = cached[part.request]
    return sequences[part.request][held + part.start : held + part.end]


# --- splitting by scores, short sequences --------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_score_budgets_change_nothing(rows):
    """A prefix, a fresh context, padding and decode requests of up to two tokens, scored in pieces of so many rows."""
    layout = cases.layout()
    facts = cases.batch([(7, 3), (0, 0), (5, 5)], [(9, 2), (6, 1), (3, 2)], next_n=2, padding=2)
    step, places = cases.step(facts, layout), facts.context_tokens + 3 * 2
    rng = np.random.default_rng(3)
    cache = cases.poisoned(layout)
    for table, length in zip(facts.tables, facts.kv_lens):
        held = [table[p // 4] * 4 + p % 4 for p in range(length)]
        cache = cases.write_keys(cache, 0, held, rng.integers(-2, 3, (length, 8)).astype(np.float32))
    q = rng.integers(-2, 3, (places, 2, 8)).astype(np.float32)
    weights = rng.integers(-2, 3, (places, 2)).astype(np.float32)
    whole = cases.select_tokens(q, weights, cache, 0, step, 3)
    budget = rows * facts.width * 4 * 4
    np.testing.assert_array_equal(
        cases.select_tokens(q, weights, cache, 0, step, 3, score_budget=budget), whole
    )
    assert (np.asarray(whole) >= 0).sum() == sum(np.minimum(step.limits, 3))


@pytest.mark.parametrize("cached", [[0, 448], [32, 73]])
def test_cached_contexts_select_exactly_k(cached):
    """Row 30 at an eighth of its size: new [32, 29], k 256; gathered keys are arrays of their own.

    With the shorter prefixes every row is dense.
    """
    layout = cases.layout(page_size=64)
    new, k = [32, 29], 256
    lens = [a + b for a, b in zip(cached, new, strict=True)]
    tables = [[3], [9, 0, 7, 5, 1, 12, 2, 8]]
    bucket = Bucket(context_requests=2, context_tokens=64, table_width=8, gathered_keys=512)
    meta = StepMetadata.create(layout, bucket, tables, lens, new)
    step = cases.derive(meta)
    wanted = [
        table[p // 64] * 64 + p % 64
        for table, length in zip(tables, lens, strict=True)
        for p in range(length)
    ]
    assert step.gather_rows.tolist() == wanted + [-1] * (512 - sum(lens))
    rng = np.random.default_rng(0)
    cache = cases.write_keys(
        cases.poisoned(layout), 0, wanted, rng.normal(size=(sum(lens), 8)).astype(np.float32)
    )
    q, weights = rng.normal(size=(64, 2, 8)).astype(np.float32), rng.normal(size=(64, 2)).astype(np.float32)
    chosen = np.asarray(cases.select_tokens(q, weights, cache, 0, step, k))
    windows = np.asarray(step.key_ends - step.key_starts)
    ends = [c + i + 1 for c, n in zip(cached, new, strict=True) for i in range(n)]
    assert windows[:61].tolist() == ends
    assert (chosen >= 0).sum(axis=1).tolist() == np.minimum(windows, k).tolist()
    # The other road, over the gathered keys: the same sets.
    keys = cases.gather_index_k(cache, 0, step)
    flat = np.asarray(cases.mqa_logits(q, keys, weights, step.key_starts, step.key_ends))
    for token in range(61):
        window = flat[token, step.key_starts[token] : step.key_ends[token]]
        best = np.sort(np.argsort(-window, kind="stable")[:k])
        assert chosen[token][chosen[token] >= 0].tolist() == best.tolist()


@pytest.mark.parametrize("decode", [False, True])
def test_short_sequences_are_dense_and_still_written(decode):
    """Lengths of at most k: row p is [0..p, -1...], in any phase, and the keys are in the pool afterwards."""
    layout, table, sequence = cases.layout(), LONG_TABLES[0], [3, 14, 15, 9]
    cache = cases.poisoned(layout)
    part = {"decode_requests": 1, "next_n": 4} if decode else {"context_requests": 1, "context_tokens": 4}
    meta = StepMetadata.create(layout, Bucket(table_width=4, **part), [table], [4], [4])
    cache, chosen, _ = toy_layer.forward(cache, meta, np.array(sequence, np.int32), k=4)
    assert np.asarray(chosen).tolist() == [[*range(p + 1), *[-1] * (3 - p)] for p in range(4)]
    page = table[0] * layout.scale("index_key")
    np.testing.assert_array_equal(cache.pages("index_key")[page, :4], toy_layer.KEYS[sequence])


# --- nothing to do -------------------------------------------------------------------------------------------------


def test_a_rank_that_holds_nothing_of_a_request():
    """Context parallelism: request 1 lies on other ranks. No row is written for it, its own rows are empty.

    The lengths of this rank are all that there is: nothing computes with the request's length on other ranks.
    """
    layout, tables, sequences = (
        cases.layout(),
        [LONG_TABLES[0], [], LONG_TABLES[2]],
        [[3, 14, 15, 9, 26], [], [7, 1]],
    )
    cache = cases.poisoned(layout)
    for table, sequence in zip(tables, sequences):
        if sequence:
            cache, _, _ = toy_layer.prefill(cache, table, sequence, 0, len(sequence) - 1)
    before = np.array(cache.index_key)
    bucket = Bucket(decode_requests=3, table_width=4)
    meta = StepMetadata.create(layout, bucket, tables, [5, 0, 2], [1, 0, 1])
    # A stale table row and padding tokens: still nothing.
    meta = replace(meta, page_table=meta.page_table.at[1].set(jnp.array([13, 6, 0, 1], jnp.int32)))
    step = cases.derive(meta)
    assert (step.rows.tolist()[1], step.limits.tolist(), step.requests.tolist()) == (
        -1,
        [5, 0, 2],
        [0, -1, 2],
    )
    cache, chosen, out = toy_layer.forward(cache, meta, np.array([26, 39, 1], np.int32))
    toy_layer.check(chosen[:1], out[:1], sequences[0], [4])
    toy_layer.check(chosen[2:], out[2:], sequences[2], [1])
    assert np.asarray(chosen)[1].tolist() == [-1] * toy_layer.K
    assert not np.asarray(out)[1].any()
    changed = np.argwhere((np.array(cache.index_key).view(np.uint32) != before.view(np.uint32)).any(axis=-1))
    scale = layout.scale("index_key")
    assert changed.tolist() == sorted([[tables[0][1] * scale, 0], [tables[2][0] * scale, 1]])


def test_a_rank_that_only_keeps_what_it_has():
    """Request 0 grows on another rank: its keys stay readable here, and nothing is written."""
    layout, sequence = cases.layout(), [3, 14, 15, 9, 26]
    cache, _, _ = toy_layer.prefill(cases.poisoned(layout), LONG_TABLES[0], sequence, 0, 5)
    before = cases.pool_bytes(cache)
    bucket = Bucket(context_requests=1, context_tokens=1, decode_requests=1, table_width=4, gathered_keys=8)
    meta = StepMetadata.create(layout, bucket, [LONG_TABLES[0]], [5], [0])
    cache, chosen, out = toy_layer.forward(cache, meta, np.array([1, 2], np.int32))
    assert cases.pool_bytes(cache) == before
    assert (np.asarray(chosen) == -1).all() and not np.asarray(out).any()
    data, _ = ops.gather_index_k(cache, 0, cases.derive(meta))
    np.testing.assert_array_equal(data[:5], toy_layer.KEYS[sequence])


# --- chains of length changes --------------------------------------------------------------------------------------

PLACES, TABLES = 4, ([3, 1, 9, 22], [0, 2, 6, 11], [7, 8, 4, 5])
counts = st.tuples(*[st.integers(0, PLACES)] * 3)


@partial(jax.jit, static_argnames="next_n")
def change(meta: StepMetadata, kept, added, next_n: int) -> StepMetadata:
    """One turn: keep some of the newest tokens, add others."""
    return advance(rewind(meta, kept), added, next_n=next_n)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(counts, counts, st.booleans()), max_size=5))
def test_any_chain_of_length_changes_equals_building_at_once(turns):
    """Rewinds, empty turns, turns of one token and of four, on ragged requests."""
    layout, bucket = cases.layout(), Bucket(decode_requests=3, next_n=PLACES, table_width=4)
    kv, new = [5, 3, 4], [4, 1, 0]
    meta = StepMetadata.create(layout, bucket, TABLES, kv, new)
    for kept, added, single in turns:
        most = 1 if single else PLACES
        held = [length - n + min(k, n) for length, n, k in zip(kv, new, kept)]
        new = [min(a, most, 16 - h) for a, h in zip(added, held)]
        kv = [h + n for h, n in zip(held, new)]
        bucket = replace(bucket, next_n=most)
        meta = change(meta, jnp.array(kept, jnp.int32), jnp.array(new, jnp.int32), most)
    at_once = StepMetadata.create(layout, bucket, TABLES, kv, new)
    got, wanted = cases.derive(meta), cases.derive(at_once)
    assert (got.bucket, got.layout) == (wanted.bucket, wanted.layout)
    jax.tree.map(np.testing.assert_array_equal, (meta, got), (at_once, wanted))
