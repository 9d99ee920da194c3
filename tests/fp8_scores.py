"""Problems of the FP8 scoring kernels, with the scores of the NumPy float64 model, and how close results have to be."""

from __future__ import annotations

import functools

import numpy as np

from numpy_model import E4M3, encode_e4m3, scores

NAN_CODE, FAR_SLOT = 0x7F, 1 << 28
"""The code of NaN, and a slot no pool has: it stands in the page table where nobody may look."""
SCALE, LAYER_OFFSET = 3, 2
"""Pages of a slot, and the layer's among them."""


@functools.cache
def scenario(lengths: tuple[int, ...], *, n: int, heads: int, page_size: int, width: int, seed: int = 0):
    """Arguments and expected scores: unused places hold NaN, unused table entries -1 or a slot that does not exist.

    The rows of a request see one key less each, from the last row back, and none below zero: as in a decode step of
    `n` new tokens.
    """
    rng = np.random.default_rng(seed)
    requests = len(lengths)
    slots = requests * width + 2
    keys = np.full((slots * SCALE, page_size, 128), NAN_CODE, np.uint8)
    scales = np.full((slots * SCALE, page_size), np.nan, np.float32)
    table = np.full((requests, width), -1, np.int32)
    table[:, 1::2] = FAR_SLOT
    free = iter(rng.permutation(slots))
    q = encode_e4m3(rng.normal(size=(requests, n, heads, 128)))
    weights = rng.normal(size=(requests, n, heads)).astype(np.float32)
    limits = np.maximum(np.asarray(lengths)[:, None] - np.arange(n)[::-1], 0).astype(np.int32)
    expected = np.full((requests, n, width * page_size), -np.inf)
    for r, length in enumerate(lengths):
        data = encode_e4m3(rng.normal(size=(length, 128)))
        scale = rng.uniform(0.5, 2.0, length).astype(np.float32)
        for p in range(-(-length // page_size)):
            table[r, p] = next(free)
            part = slice(p * page_size, min((p + 1) * page_size, length))
            page = table[r, p] * SCALE + LAYER_OFFSET
            keys[page, : part.stop - part.start] = data[part]
            scales[page, : part.stop - part.start] = scale[part]
        for j in range(n):
            seen = limits[r, j]
            expected[r, j, :seen] = scores(E4M3[q[r, j]], weights[r, j], E4M3[data[:seen]], scale[:seen])
    return (q, weights, keys, scales, table, limits), expected.reshape(requests * n, -1)


def check(got: np.ndarray, expected: np.ndarray) -> None:
    """-inf exactly where expected, and float32's accuracy elsewhere."""
    assert got.dtype == np.float32
    assert got.shape == expected.shape
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
    seen = np.isfinite(expected)
    size = np.abs(expected[seen]).max(initial=0.0)
    np.testing.assert_allclose(got[seen], expected[seen], rtol=2e-6, atol=2e-6 * size)
