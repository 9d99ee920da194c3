"""Faults of prefill chunks, prefixes and several tokens at once."""

from __future__ import annotations

import numpy as np
import pytest

import cases
import toy_layer
from dsa_jax import ops
from dsa_jax.metadata import Bucket, StepMetadata

TABLE, SEQUENCE = [7, 2, 11, 5], [3, 14, 15, 9, 26, 5, 35, 8, 9, 7]


def test_b35_windows_belong_to_their_chunk():
    """Keys 5 and 3, new 2 and 3: one chunk starts the second request at 5; alone it starts at 0."""
    layout = cases.layout()
    both = cases.derive(cases.metadata(cases.batch([(5, 2), (3, 3)]), layout))
    assert (both.key_starts.tolist(), both.key_ends.tolist()) == ([0, 0, 5, 5, 5], [4, 5, 6, 7, 8])
    alone = cases.derive(cases.metadata(cases.batch([(3, 3)]), layout))
    assert (alone.key_starts.tolist(), alone.key_ends.tolist()) == ([0, 0, 0], [1, 2, 3])


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_b35_selection_does_not_depend_on_chunks(rows):
    """The same local positions for chunks of 1, 2, 3, 5 rows and none, inside and across requests."""
    layout = cases.layout()
    sequences = [[1, 2, 3, 4, 5], [30, 20, 10]]
    cache = cases.poisoned(layout)
    for table, sequence in (([6, 0], sequences[0]), ([4], sequences[1])):
        cache, _, _ = toy_layer.prefill(cache, table, sequence, 0, len(sequence))
    bucket = Bucket(context_requests=2, context_tokens=5, table_width=2, gathered_keys=8)
    step = cases.derive(StepMetadata.create(layout, bucket, [[6, 0], [4]], [5, 3], [2, 3]))
    ids = np.array([4, 5, 30, 20, 10])
    q, weights = toy_layer.QUERIES[ids], toy_layer.WEIGHTS[ids]
    wanted = toy_layer.reference(sequences[0], 2)[0][3:] + toy_layer.reference(sequences[1], 2)[0]
    chosen = cases.select_tokens(q, weights, cache, 0, step, 2, score_budget=rows * 8 * 4)
    assert chosen.tolist() == wanted
    # The other road: gathered keys, windows, top-k inside the window, start subtracted.
    flat = ops.mqa_logits(q, ops.gather_index_k(cache, 0, step), weights, step.key_starts, step.key_ends)
    starts, ends = np.asarray(step.key_starts), np.asarray(step.key_ends)
    windows = np.full((5, 8), -np.inf, np.float32)
    for t in range(5):
        windows[t, : ends[t] - starts[t]] = flat[t, starts[t] : ends[t]]
    assert cases.topk_indices(windows, (ends - starts).astype(np.int32), 2).tolist() == wanted


def run_chunks(layout, sizes: list[int]):
    """Prefill the sequence in chunks; selections and outputs of all positions, and the pools."""
    cache, done, chosen, outs = cases.poisoned(layout), 0, [], []
    for size in sizes:
        cache, local, out = toy_layer.prefill(cache, TABLE, SEQUENCE, done, size)
        chosen.append(local)
        outs.append(out)
        done += size
    return np.concatenate(chosen), np.concatenate(outs), cases.pool_bytes(cache)


def test_b36_limits_count_the_cached_prefix():
    """Six tokens cached, a chunk of four, pages of four: limits 7, 8, 9, 10."""
    step = cases.derive(cases.metadata(cases.batch([(10, 4)]), cases.layout()))
    assert step.limits.tolist() == [7, 8, 9, 10]


@pytest.mark.parametrize("sizes", [[1] * 10, [2] * 5, [4, 4, 2], [6, 4], [3, 1, 5, 1]])
def test_b36_chunks_equal_one_piece(sizes):
    """All chunkings give the reference, also where a chunk ends inside a page, and leave the same bytes."""
    layout = cases.layout()
    chosen, out, pools = run_chunks(layout, sizes)
    toy_layer.check(chosen, out, SEQUENCE, range(10))
    assert pools == run_chunks(layout, [10])[2]


def test_b38_several_tokens_are_not_a_new_prompt():
    """Prompt of 10, a verify step of 3, then 1: 13 and 14 keys, and selection reaches the prompt."""
    layout, sequence = cases.layout(), [*SEQUENCE, 1, 12, 33, 4]
    cache, _, _ = toy_layer.prefill(cases.poisoned(layout), TABLE, sequence, 0, 10)
    reached = set()
    for done, n in ((10, 3), (13, 1)):
        bucket = Bucket(decode_requests=1, next_n=n, table_width=4)
        meta = StepMetadata.create(layout, bucket, [TABLE], [done + n], [n])
        cache, chosen, out = toy_layer.forward(cache, meta, np.array(sequence[done : done + n], np.int32))
        toy_layer.check(chosen, out, sequence, range(done, done + n))
        reached |= set(np.asarray(chosen).ravel().tolist())
        history = StepMetadata.create(
            layout,
            Bucket(context_requests=1, context_tokens=1, table_width=4, gathered_keys=14),
            [TABLE],
            [done + n],
            [0],
        )
        data, _ = ops.gather_index_k(cache, 0, cases.derive(history))
        np.testing.assert_array_equal(np.asarray(data)[: done + n], toy_layer.KEYS[sequence[: done + n]])
        assert not np.asarray(data)[done + n :].any()
    assert reached & set(range(10))


def test_b39_a_shared_layer_uses_the_rows_of_its_own_call():
    """A prompt of 10 in chunks of 4, 4, 2 beside a decode request: the shared layer attends what the full layer chose."""
    layout, decoded = cases.layout(), [2, 7, 1, 8, 2, 8]
    cache = cases.poisoned(layout)
    cache, _, _ = toy_layer.prefill(cache, [0, 9], decoded, 0, 3)
    cache = append_latents(cache, 1, [0, 9], decoded, 0, 3)
    for number, (done, size) in enumerate(((0, 4), (4, 4), (8, 2))):
        bucket = Bucket(context_requests=1, context_tokens=4, decode_requests=1, table_width=4)
        meta = StepMetadata.create(layout, bucket, [TABLE, [0, 9]], [done + size, 4 + number], [size, 1])
        tokens = np.append(toy_layer.pad(SEQUENCE[done : done + size], 4), decoded[3 + number]).astype(
            np.int32
        )
        cache, local, out = toy_layer.forward(cache, meta, tokens)
        step = cases.derive(meta)
        latent = toy_layer.LATENTS[tokens]
        cache = cases.append_latent(cache, 1, latent[:, : cases.LATENT], latent[:, cases.LATENT :], step)
        rows = cases.to_rows(local, step)
        shared, _ = cases.sparse_mla(toy_layer.ATTENTION[tokens], cache, 1, rows, toy_layer.SCALE)
        np.testing.assert_allclose(shared, out, rtol=1e-5, atol=1e-6)
        toy_layer.check(local[:size], shared[:size], SEQUENCE, range(done, done + size))
        toy_layer.check(local[4:], shared[4:], decoded, [3 + number])


def append_latents(cache, layer: int, table: list[int], sequence: list[int], done: int, take: int):
    """Write the latents of a stretch of a sequence into one layer."""
    bucket = Bucket(context_requests=1, context_tokens=take, table_width=4)
    step = cases.derive(StepMetadata.create(cache.layout, bucket, [table], [done + take], [take]))
    latent = toy_layer.LATENTS[np.array(sequence[done : done + take])]
    return cases.append_latent(cache, layer, latent[:, : cases.LATENT], latent[:, cases.LATENT :], step)


def test_b41_token_map_follows_the_new_counts():
    """A verify step of four tokens each, then draft steps of one; and ragged contexts of [3, 1, 4, 1]."""
    layout, tables = cases.layout(), [[0, 1], [2, 3], [4, 5]]
    verify = StepMetadata.create(
        layout, Bucket(decode_requests=3, next_n=4, table_width=2), tables, [5] * 3, [4] * 3
    )
    assert cases.derive(verify).requests.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    draft = StepMetadata.create(layout, Bucket(decode_requests=3, table_width=2), tables, [6] * 3, [1] * 3)
    step = cases.derive(draft)
    assert step.requests.tolist() == [0, 1, 2]
    cache = cases.poisoned(layout)
    after = cases.append_index_k(cache, 0, np.ones((3, 8), np.float32), step)
    changed = np.argwhere(np.asarray(after.pages("index_key") == 1).all(axis=-1)).tolist()
    assert changed == [[2 * 1, 1], [2 * 3, 1], [2 * 5, 1]]  # layer 0 of slots 1, 3, 5, offset 1: one row each
    ragged = cases.batch([(3, 3), (1, 1), (4, 4), (1, 1)])
    assert cases.derive(cases.metadata(ragged, layout)).requests.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 3]


@pytest.mark.parametrize("next_n", range(1, 7))
def test_b42_limits_count_back_from_the_end(next_n):
    """Lengths 10 and 7 with up to six new tokens: with four, limits 7, 8, 9, 10 and 4, 5, 6, 7."""
    step = cases.derive(
        cases.metadata(cases.batch(decodes=[(10, next_n), (7, next_n)], next_n=next_n), cases.layout())
    )
    assert step.limits.tolist() == [*range(11 - next_n, 11), *range(8 - next_n, 8)]


@pytest.mark.parametrize("next_n", [1, 4, 6])
def test_b42_several_new_tokens_equal_as_many_single_steps(next_n):
    """Each row of a step of several tokens equals a one-token call."""
    layout, tables = cases.layout(), [TABLE, [0, 9, 4]]
    sequences = [SEQUENCE, [1, 2, 3, 5, 8, 13, 21]]
    cache = cases.poisoned(layout)
    for table, sequence in zip(tables, sequences, strict=True):
        cache, _, _ = toy_layer.prefill(cache, table, sequence, 0, len(sequence) - next_n)
    bucket = Bucket(decode_requests=2, next_n=next_n, table_width=4)
    meta = StepMetadata.create(layout, bucket, tables, [10, 7], [next_n] * 2)
    tokens = np.array(sequences[0][-next_n:] + sequences[1][-next_n:], np.int32)
    _, chosen, out = toy_layer.forward(cache, meta, tokens)
    toy_layer.check(chosen[:next_n], out[:next_n], sequences[0], range(10 - next_n, 10))
    toy_layer.check(chosen[next_n:], out[next_n:], sequences[1], range(7 - next_n, 7))
