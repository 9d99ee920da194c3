"""Problems of the FP4 scoring kernels, with the scores of a NumPy model that reads one nibble after another."""

from __future__ import annotations

import functools

import numpy as np

from numpy_forms import E2M1
from numpy_model import scores

SCALE, LAYER_OFFSET, FAR_SLOT = 3, 2, 1 << 28
"""Pages of a slot, the layer's among them, and a slot no pool has: it stands where nobody may look."""

NEAR, FAR = range(122, 130), range(90, 165)
"""Scale bytes whose differences e4m3 codes can carry, and bytes among which some cannot be."""


def values(codes: np.ndarray, bytes_: np.ndarray) -> np.ndarray:
    """``float64[..., 128]`` of codes 0 to 15 and scale bytes ``[..., 4]``; byte 255 is NaN, 0 (never written) is 0."""
    power = np.where(
        bytes_ == 255, np.nan, np.where(bytes_ == 0, 0.0, 2.0 ** (bytes_.astype(np.float64) - 127))
    )
    return E2M1[codes] * np.repeat(power, 32, axis=-1)


def packed(codes: np.ndarray) -> np.ndarray:
    """Two codes a byte, the even element in the low nibble."""
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8)


def words(bytes_: np.ndarray) -> np.ndarray:
    """``int32[...]`` of scale bytes ``[..., 4]``, byte 0 lowest."""
    return np.ascontiguousarray(bytes_.astype(np.uint8)).view("<i4")[..., 0]


def draw(rng, shape: tuple[int, ...], bytes_of=NEAR):
    """Random codes and scale bytes."""
    return rng.integers(0, 16, (*shape, 128)), rng.choice(np.asarray(bytes_of), (*shape, 4))


@functools.cache
def scenario(
    lengths: tuple[int, ...],
    *,
    n: int,
    heads: int,
    page_size: int,
    width: int,
    seed=0,
    key_bytes=NEAR,
    query_bytes=NEAR,
):
    """Arguments and expected scores: unused places are NaN, unused table entries -1 or a slot that does not exist.

    The rows of a request see one key less each, from the last row back, and none below zero: as in a decode step of
    `n` new tokens.
    """
    rng = np.random.default_rng(seed)
    requests = len(lengths)
    slots = requests * width + 2
    keys = np.full((slots * SCALE, page_size, 64), 0x77, np.uint8)
    key_words = np.full((slots * SCALE, page_size), -1, np.int32)
    table = np.full((requests, width), -1, np.int32)
    table[:, 1::2] = FAR_SLOT
    free = iter(rng.permutation(slots))
    q_codes, q_bytes = draw(rng, (requests, n, heads), query_bytes)
    weights = rng.normal(size=(requests, n, heads)).astype(np.float32)
    limits = np.maximum(np.asarray(lengths)[:, None] - np.arange(n)[::-1], 0).astype(np.int32)
    expected = np.full((requests, n, width * page_size), -np.inf)
    for r, length in enumerate(lengths):
        codes, bytes_ = draw(rng, (length,), key_bytes)
        for p in range(-(-length // page_size)):
            table[r, p] = next(free)
            part = slice(p * page_size, min((p + 1) * page_size, length))
            page = table[r, p] * SCALE + LAYER_OFFSET
            keys[page, : part.stop - part.start] = packed(codes[part])
            key_words[page, : part.stop - part.start] = words(bytes_[part])
        known = values(codes, bytes_)
        for j in range(n):
            seen = limits[r, j]
            expected[r, j, :seen] = scores(values(q_codes[r, j], q_bytes[r, j]), weights[r, j], known[:seen])
    q = packed(q_codes), words(q_bytes)
    return (q, weights, keys, key_words, table, limits), expected.reshape(requests * n, -1)


@functools.cache
def context_scenario(page_size: int, *, heads: int = 32, key_bytes=NEAR, query_bytes=NEAR):
    """Packed tokens of three requests with 200, 70 and 33 keys, an empty request and padding; 19, 3 and 9 new tokens."""
    width, held, new = 256 // page_size, (200, 70, 0, 33), (19, 3, 0, 9)
    problem = dict(n=max(new), heads=heads, page_size=page_size, width=width)
    (q, weights, keys, key_words, table, limits), expected = scenario(
        held, **problem, key_bytes=key_bytes, query_bytes=query_bytes
    )
    # The last rows of a request are its new tokens; padding behind them is NaN where it can be.
    own = [(r, max(new) - count + i) for r, count in enumerate(new) for i in range(count)]
    place, pad = tuple(np.array(own).T), 4
    append = lambda x, value: np.concatenate([x[place], np.full((pad, *x.shape[2:]), value, x.dtype)])
    query = append(q[0], 0x77), append(q[1], -1)
    requests = np.concatenate([place[0], np.full(pad, -1)]).astype(np.int32)
    expected = append(expected.reshape(len(held), max(new), -1), -np.inf)
    return (query, append(weights, np.nan), keys, key_words, table, requests, append(limits, 0)), expected


def far_key(code: np.ndarray, word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The packed codes ``uint8[64]`` and the scale word of a key whose first group is 0 under a scale 20 above the others'.

    Under one scale for all of it, e4m3 would lose the others, and with them the whole key.
    """
    code, bytes_ = code.copy(), word.reshape(1).view(np.uint8).copy()
    code[:16] = 0
    bytes_[:] = 128
    bytes_[0] += 20
    return code, bytes_.view(np.int32)[0]


def rescored(q, weights: np.ndarray, code: np.ndarray, word: np.ndarray) -> np.ndarray:
    """``float64[n]`` scores of one packed key against packed queries ``[n, H, 64]``, ``[n, H]``."""
    unpack = lambda packed: np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 128)
    split = lambda words: np.ascontiguousarray(words[..., None]).view(np.uint8)
    key = values(unpack(code), split(word))
    query = values(unpack(q[0]), split(q[1]))
    return np.array([scores(*row, key[None])[0] for row in zip(query, weights, strict=True)])


def check(got: np.ndarray, expected: np.ndarray, relative: float = 2e-6) -> None:
    """-inf exactly where expected, and float32's accuracy, row by row, elsewhere."""
    assert got.dtype == np.float32
    assert got.shape == expected.shape
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
    seen = np.isfinite(expected)
    size = np.abs(np.where(seen, expected, 0)).max(axis=1, keepdims=True)
    np.testing.assert_allclose(
        np.where(seen, got, 0), np.where(seen, expected, 0), rtol=relative, atol=relative * size.max()
    )
