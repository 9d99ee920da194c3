"""Problems of the kernels for contiguous keys inside windows, with the scores of the NumPy float64 model."""

from __future__ import annotations

import functools

import numpy as np

import fp4_scores
from numpy_model import E4M3, encode_e4m3, scores

NAN_CODE = 0x7F
LEAST, MOST = -(1 << 31), (1 << 31) - 1

Windows = tuple[tuple[int, int], ...]
"""Where the window of each row begins and ends."""


def masks(windows: Windows, keys: int):
    """Starts and ends as the kernels take them, and which keys lie inside each row's window."""
    starts, ends = np.asarray(windows, np.int64).T
    column = np.arange(keys)
    inside = (column >= starts[:, None]) & (column < ends[:, None])
    return starts.astype(np.int32), ends.astype(np.int32), inside


@functools.cache
def scenario(windows: Windows, *, keys: int, heads: int = 32):
    """Arguments and expected scores. Keys in no window and rows with an empty one are NaN in every array they have."""
    rng = np.random.default_rng(0)
    starts, ends, inside = masks(windows, keys)
    q, data = (encode_e4m3(rng.normal(size=shape)) for shape in ((len(windows), heads, 128), (keys, 128)))
    weights = rng.normal(size=(len(windows), heads)).astype(np.float32)
    scale = rng.uniform(0.5, 2.0, keys).astype(np.float32)
    unseen, blind = ~inside.any(axis=0), ~inside.any(axis=1)
    data[unseen], scale[unseen] = NAN_CODE, np.nan
    q[blind], weights[blind] = NAN_CODE, np.nan
    expected = np.full((len(windows), keys), -np.inf)
    for row, own in enumerate(inside):
        expected[row, own] = scores(E4M3[q[row]], weights[row], E4M3[data[own]], scale[own])
    return (q, weights, data, scale, starts, ends), expected


@functools.cache
def fp4_scenario(windows: Windows, *, keys: int, heads: int = 32, key_bytes=fp4_scores.FAR):
    """The same with FP4 queries and keys; `key_bytes` are the keys' scales."""
    rng = np.random.default_rng(1)
    starts, ends, inside = masks(windows, keys)
    q, q_bytes = fp4_scores.draw(rng, (len(windows), heads))
    data, bytes_ = fp4_scores.draw(rng, (keys,), key_bytes)
    bytes_[~inside.any(axis=0)] = 255
    q_bytes[~inside.any(axis=1)] = 255
    weights = rng.normal(size=(len(windows), heads)).astype(np.float32)
    weights[~inside.any(axis=1)] = np.nan
    q_values, values = fp4_scores.values(q, q_bytes), fp4_scores.values(data, bytes_)
    expected = np.full((len(windows), keys), -np.inf)
    for row, own in enumerate(inside):
        expected[row, own] = scores(q_values[row], weights[row], values[own], None)
    query = (fp4_scores.packed(q), fp4_scores.words(q_bytes))
    return (query, weights, fp4_scores.packed(data), fp4_scores.words(bytes_), starts, ends), expected


CAUSAL = tuple((0, end) for end in range(120, 141))
PACKED = (*((0, end) for end in range(1, 8)), *((70, 70 + i) for i in range(1, 6)), *[(130, 193)] * 5)
"""Three texts one behind the other; two groups of rows hold the end of one and the beginning of the next."""
FAR = ((600, 640), (0, 3), (1279, 1280), (640, 641), (0, 0), (0, 0), (0, 0), (0, 0), (700, 1100))
"""Groups of four: all keys between two windows are read in vain, a group of nothing, and a last group of one row."""
ODD = (
    (5, 5),
    (9, 2),
    (-7, 3),
    (LEAST, MOST),
    (63, 65),
    (64, 128),
    (190, MOST),
    (LEAST, 0),
    (300, 400),
    (0, 1),
)
"""Empty, reversed, cut at either end, outside altogether, and around a tile."""
CASES = {
    "causal": (CAUSAL, 192, dict(group_columns=256, stages=2)),
    "texts": (PACKED, 193, dict(group_columns=160, stages=4, product_columns=64)),
    "far apart": (FAR, 1280, dict(group_columns=128, compute_warpgroups=1, stages=3, query_buffers=1)),
    "odd": (ODD, 200, dict(group_columns=128, stages=2)),
    "one row": (((65, 66),), 129, dict(compute_warpgroups=3, stages=3)),
    "fewer keys than a tile": (((0, 7), (3, 5)), 7, dict(stages=2)),
    "nothing": (((4, 4), (700, 800)), 600, dict(stages=2)),
}
