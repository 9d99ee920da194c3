"""A second opinion: the cache and the indexer in NumPy float64, in plain loops, knowing nothing of the library.

Every function restates a definition as directly as possible and is slow on purpose. Nothing here imports ``dsa_jax``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# --- bytes ---------------------------------------------------------------------------------------------------------


def e4m3_value(code: int) -> float:
    """Value of one float8_e4m3fn code: sign, four exponent bits with bias 7, three mantissa bits; 0x7F and 0xFF are NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


E4M3 = np.array([e4m3_value(code) for code in range(256)])
_MAGNITUDES = E4M3[:127]
_MIDDLES = (_MAGNITUDES[:-1] + _MAGNITUDES[1:]) / 2


def encode_e4m3(values: np.ndarray) -> np.ndarray:
    """Nearest code, an exact middle goes to the even code, magnitudes beyond 448 saturate; NaN gives a NaN code."""
    values = np.asarray(values, np.float64)
    size = np.abs(values)
    below = np.searchsorted(_MIDDLES, size, side="left")  # number of middles < size
    tie = (below < 126) & (_MIDDLES[np.minimum(below, 125)] == size)
    codes = np.where(tie & (below % 2 == 1), below + 1, below)
    codes = np.where(np.signbit(values), codes | 0x80, codes)
    return np.where(np.isnan(values), 0x7F, codes).astype(np.uint8)


def pow2_ceil(x: float) -> float:
    """Smallest power of two >= x, in float32's normal range."""
    mantissa, exponent = math.frexp(x)  # x = mantissa * 2**exponent, 0.5 <= mantissa < 1
    return 2.0 ** min(max(exponent - 1 if mantissa == 0.5 else exponent, -126), 127)


def quantize_fp8(vectors: np.ndarray, rule: str = "ue8m0") -> tuple[np.ndarray, np.ndarray]:
    """Codes and float32 scales of vectors ``[n, D]``; the scale is found first, then the data is divided by it."""
    codes, scales = [], []
    for vector in np.asarray(vectors, np.float32):
        largest = np.float32(max(np.abs(vector).max(initial=0.0), np.float32(1e-4)))
        scale = np.float32(largest * np.float32(1 / 448))
        if rule == "ue8m0":
            scale = np.float32(pow2_ceil(float(scale)))
        codes.append(encode_e4m3(vector / scale))
        scales.append(scale)
    width = np.shape(vectors)[1]
    return np.array(codes, np.uint8).reshape(-1, width), np.array(scales, np.float32)


def hadamard(width: int) -> np.ndarray:
    """Sylvester's construction, scaled to be orthonormal."""
    matrix = np.ones((1, 1))
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / math.sqrt(width)


# --- addresses -----------------------------------------------------------------------------------------------------


def page_number(owners: Sequence[bool], layer: int, slot: int) -> int:
    """Page of a slot for a layer, in a pool whose slots hold one page for each layer that owns the role, in layer order."""
    assert owners[layer]
    return slot * sum(owners) + sum(owners[:layer])


def row_of(table: Sequence[Sequence[int]], request: int, position: int, page_size: int) -> int:
    """Row ``slot * T + offset`` of a position, -1 for anything out of range."""
    if position < 0 or not 0 <= request < len(table) or position // page_size >= len(table[request]):
        return -1
    slot = table[request][position // page_size]
    return -1 if slot < 0 else slot * page_size + position % page_size


def to_rows(
    local: np.ndarray, requests: Sequence[int], table: Sequence[Sequence[int]], page_size: int
) -> np.ndarray:
    """Rows of local positions, valid ones first and in order, then -1."""
    out = np.full(np.shape(local), -1, np.int32)
    for token, positions in enumerate(np.asarray(local).tolist()):
        rows = [row_of(table, requests[token], p, page_size) for p in positions]
        rows = [row for row in rows if row >= 0]
        out[token, : len(rows)] = rows
    return out


# --- one step ------------------------------------------------------------------------------------------------------


@dataclass
class Facts:
    """A batch as a scheduler sees it: contexts first, then decode requests on a grid of ``next_n``."""

    tables: list[list[int]]
    kv_lens: list[int]
    new_lens: list[int]
    page_size: int
    contexts: int
    context_tokens: int
    decodes: int
    next_n: int
    width: int
    gathered_keys: int

    def held_table(self) -> list[list[int]]:
        """Tables of ``width`` columns without what lies past the length."""
        out = []
        for table, length in zip(self.tables, self.kv_lens, strict=True):
            pages = min(-(-max(length, 0) // self.page_size), self.width)
            row = [slot if slot >= 0 else -1 for slot in table[:pages]]
            out.append(row + [-1] * (self.width - len(row)))
        return out

    def tokens(self) -> list[tuple[int, int]]:
        """(request, position) of each token place, (-1, -1) for padding; a position before 0 is padding as well."""
        places: list[tuple[int, int]] = []
        for r in range(self.contexts):
            places += [(r, self.kv_lens[r] - self.new_lens[r] + j) for j in range(self.new_lens[r])]
        places = (places + [(-1, -1)] * self.context_tokens)[: self.context_tokens]
        for r in range(self.contexts, self.contexts + self.decodes):
            for j in range(self.next_n):
                real = j < self.new_lens[r]
                places.append((r, self.kv_lens[r] - self.new_lens[r] + j) if real else (-1, -1))
        return [(r, max(p, -1)) for r, p in places]

    def derive(self) -> dict[str, np.ndarray]:
        """What ``StepMetadata.derive`` must give, by name."""
        table, tokens = self.held_table(), self.tokens()
        starts = [sum(self.kv_lens[:r]) for r in range(self.contexts)]
        windows = [
            (starts[r], starts[r] + p + 1) if i < self.context_tokens and r >= 0 and p >= 0 else (0, 0)
            for i, (r, p) in enumerate(tokens)
        ]
        gathered = [
            row_of(table, r, p, self.page_size) for r in range(self.contexts) for p in range(self.kv_lens[r])
        ]
        gathered = (gathered + [-1] * self.gathered_keys)[: self.gathered_keys]
        columns = {
            "requests": [r for r, _ in tokens],
            "positions": [p for _, p in tokens],
            "limits": [p + 1 for _, p in tokens],
            "rows": [row_of(table, r, p, self.page_size) for r, p in tokens],
            "key_starts": [start for start, _ in windows],
            "key_ends": [end for _, end in windows],
            "gather_rows": gathered,
        }
        arrays = {name: np.array(values, np.int32) for name, values in columns.items()}
        return arrays | {"page_table": np.array(table, np.int32).reshape(len(table), self.width)}


# --- indexer and attention -----------------------------------------------------------------------------------------


def scores(
    q: np.ndarray, weights: np.ndarray, keys: np.ndarray, scale: np.ndarray | None = None
) -> np.ndarray:
    """``scale[s] * sum_h weights[h] * relu(q[h] . keys[s])`` of one token: q ``[H, D]``, keys ``[S, D]``."""
    out = np.zeros(len(keys))
    for s, key in enumerate(np.asarray(keys, np.float64)):
        dots = np.asarray(q, np.float64) @ key
        out[s] = np.sum(np.where(dots > 0, dots, 0.0) * np.asarray(weights, np.float64))
    return out if scale is None else out * np.asarray(scale, np.float64)


def topk(row: np.ndarray, limit: int, k: int) -> list[int]:
    """k best of the first ``limit`` columns: NaN last, lowest position wins ties; ascending, then -1."""
    limit = min(max(limit, 0), len(row))
    order = sorted(range(limit), key=lambda s: (np.isnan(row[s]), 0.0 if np.isnan(row[s]) else -row[s], s))
    chosen = sorted(order[:k])
    return chosen + [-1] * (k - len(chosen))


def attention(
    q: np.ndarray, keys: np.ndarray, latent: int, softmax_scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """One token over its keys ``[K, width]``: ``(out [h, latent], lse [h])``; 0 and -inf without a key."""
    heads = len(q)
    if not len(keys):
        return np.zeros((heads, latent)), np.full(heads, -np.inf)
    keys = np.asarray(keys, np.float64)
    logits = np.asarray(q, np.float64) @ keys.T * softmax_scale
    top = logits.max(axis=1, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(axis=1, keepdims=True)
    return weights / total @ keys[:, :latent], (np.log(total) + top)[:, 0]


def calc_diff(x: np.ndarray, y: np.ndarray) -> float:
    """``1 - 2 sum(xy) / sum(x^2 + y^2)`` in float64, the usual measure of kernel error; 0 for two zero arrays."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    total = np.sum(x * x + y * y)
    return 0.0 if total == 0 else float(1 - 2 * np.sum(x * y) / total)
