"""B36 and B38 where several requests of different lengths stand in one step: contexts beside decode requests.

``test_chunks`` has the catalogue's single request. All steps here have one bucket, so that one trace serves: places for two
contexts of 16 tokens together and for three decode requests of up to three tokens, often more than are used.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
import pytest

import cases
import toy_layer
from dsa_jax.cache import Cache
from dsa_jax.metadata import Bucket, Step, StepMetadata

BUCKET = Bucket(
    context_requests=2, context_tokens=16, decode_requests=3, next_n=3, table_width=4, gathered_keys=32
)
TABLES = ([7, 2, 11, 5], [0, 9, 1, 3], [4, 8, 10, 12], [13, 6, 14, 15])
"""Raw slots of four requests, pages of 4 tokens."""
TEXTS = (
    [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 1, 12, 33, 4],
    [1, 2, 3, 5, 8, 13, 21, 34, 15],
    [2, 7, 1, 8, 2, 8, 1, 8, 28, 4, 5],
    [31, 4, 15, 9, 2],
)
"""What the four write, prompts included."""


def run(cache: Cache, requests: Sequence[int], done: Sequence[int], new: Sequence[int]):
    """One step: ``new[i]`` tokens of a request's text after its first ``done[i]``, each checked against the whole text.

    Args:
        cache: holds the first ``done[i]`` tokens.
        requests: up to two contexts, then up to three decode requests, as numbers into the texts; -1 for an empty place.
        done, new: of each.

    Returns:
        Cache, derived metadata, and for each of ``requests`` the set of positions that its tokens selected.
    """
    texts = [TEXTS[r] if r >= 0 else [] for r in requests]
    ends = [d + n for d, n in zip(done, new)]
    meta = StepMetadata.create(
        cache.layout, BUCKET, [TABLES[r] if r >= 0 else [] for r in requests], ends, new
    )
    pieces = [text[d:e] for text, d, e in zip(texts, done, ends)]
    decoded = [*pieces[2:], *[[]] * (5 - len(pieces))]
    flat = [toy_layer.pad(pieces[0] + pieces[1], 16), *(toy_layer.pad(piece, 3) for piece in decoded)]
    cache, chosen, out = toy_layer.forward(cache, meta, np.concatenate(flat))
    step = cases.derive(meta)
    chosen, out, owner = np.asarray(chosen), np.asarray(out), np.asarray(step.requests)
    reached = []
    for i, text in enumerate(texts):
        assert (owner == i).sum() == new[i]
        if new[i]:
            toy_layer.check(chosen[owner == i], out[owner == i], text, range(done[i], ends[i]))
        reached.append(set(chosen[owner == i].ravel().tolist()) - {-1})
    assert (chosen[owner < 0] == -1).all() and not out[owner < 0].any()
    return cache, step, reached


def limits_of(step: Step) -> list[list[int]]:
    """Limits of the new tokens of the first four request places."""
    owner, limits = np.asarray(step.requests), np.asarray(step.limits)
    return [limits[owner == i].tolist() for i in range(4)]


def keys_held(cache: Cache, lens: dict[int, int]) -> None:
    """The cache has the first ``lens[r]`` keys of request r's text, as a gather of its whole history reads them."""
    for r, length in lens.items():
        meta = StepMetadata.create(cache.layout, BUCKET, [[], TABLES[r]], [0, length], [0, 0])
        data = np.asarray(cases.gather_index_k(cache, 0, cases.derive(meta))[0])
        np.testing.assert_array_equal(data[:length], toy_layer.KEYS[TEXTS[r][:length]])
        assert not data[length:].any()


def test_b36_limits_of_several_requests():
    """Six and three tokens cached, chunks of four and five; verify steps of 3 and 1 after five and four tokens."""
    meta = StepMetadata.create(cases.layout(), BUCKET, TABLES, [10, 8, 8, 5], [4, 5, 3, 1])
    assert limits_of(cases.derive(meta)) == [[7, 8, 9, 10], [4, 5, 6, 7, 8], [6, 7, 8], [5]]


def test_b38_positions_follow_the_prompts():
    """A context's chunk after 8 tokens; verify steps of 3, 2 and none after 13, 6 and 3: places, limits and rows."""
    tables = [TABLES[1], [], TABLES[0], TABLES[2], TABLES[3]]
    meta = StepMetadata.create(cases.layout(), BUCKET, tables, [9, 0, 16, 8, 3], [1, 0, 3, 2, 0])
    step = cases.derive(meta)
    assert limits_of(step) == [[9], [], [14, 15, 16], [7, 8]]
    at = lambda table, position: table[position // 4] * 4 + position % 4
    wanted = [at(TABLES[1], 8), *[-1] * 15]
    wanted += [at(TABLES[0], p) for p in (13, 14, 15)] + [at(TABLES[2], p) for p in (6, 7)] + [-1] * 4
    assert step.rows.tolist() == wanted
    assert (step.key_starts.tolist()[0], step.key_ends.tolist()[0]) == (0, 9)
    assert not (np.asarray(step.key_ends) - np.asarray(step.key_starts))[1:].any()


# Tests that compile the layer for this bucket, which takes seconds.


@functools.cache
def in_large_pieces() -> dict[str, bytes]:
    """The pools after both contexts in one piece and the decode requests in as few as there can be."""
    cache, lens = cases.poisoned(cases.layout()), (10, 6, 8, 5)
    for done, new in (
        ((0, 0, 0, 0), (10, 6, 3, 3)),
        ((10, 6, 3, 3), (0, 0, 3, 2)),
        ((10, 6, 6, 5), (0, 0, 2, 0)),
    ):
        cache, _, _ = run(cache, range(4), done, new)
    keys_held(cache, dict(enumerate(lens)))
    return cases.pool_bytes(cache)


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes",
    [
        ([1] * 10, [1] * 6, [1] * 8, [1] * 5),
        ([2] * 5, [4, 2], [3, 3, 2], [2, 1, 2]),
        ([4, 4, 2], [0, 3, 0, 3], [0, 1, 3, 1, 3], [3, 0, 0, 2]),
        ([6, 4], [3, 2, 1], [2] * 4, [0, 0, 0, 3, 2]),
        ([3, 1, 5, 1], [6], [3, 2, 3], [1, 3, 1]),
    ],
)
def test_b36_chunks_of_several_requests_equal_one_piece(sizes):
    """However the texts are cut, and whoever rests meanwhile: the reference's selections and the same bytes."""
    cache, done = cases.poisoned(cases.layout()), [0, 0, 0, 0]
    for new in zip_longest(*sizes, fillvalue=0):
        cache, step, _ = run(cache, range(4), done, new)
        assert limits_of(step) == [[*range(d + 1, d + n + 1)] for d, n in zip(done, new)]
        done = [d + n for d, n in zip(done, new)]
    assert done == [10, 6, 8, 5]
    assert cases.pool_bytes(cache) == in_large_pieces()


@pytest.mark.full
def test_b38_several_tokens_of_several_requests_are_no_new_prompts():
    """Prompts of 10, 6 and 3; a verify step of 3, 2 and none beside a new prompt of 7; then 1, 3, 1 and a chunk of 2."""
    cache = cases.poisoned(cases.layout())
    cache, _, _ = run(cache, [0, 2], [0, 0], [10, 6])
    cache, _, _ = run(cache, [-1, 3], [0, 0], [0, 3])
    keys_held(cache, {0: 10, 2: 6, 3: 3})
    cache, step, verified = run(cache, [1, -1, 0, 2, 3], [0, 0, 10, 6, 3], [7, 0, 3, 2, 0])
    assert limits_of(step) == [[1, 2, 3, 4, 5, 6, 7], [], [11, 12, 13], [7, 8]]
    keys_held(cache, {0: 13, 1: 7, 2: 8, 3: 3})
    cache, _, after = run(cache, [1, -1, 0, 2, 3], [7, 0, 13, 8, 3], [2, 0, 1, 3, 1])
    keys_held(cache, {0: 14, 1: 9, 2: 11, 3: 4})
    for place, prompt in ((2, 10), (3, 6)):
        assert verified[place] & set(range(prompt)) and after[place] & set(range(prompt))
