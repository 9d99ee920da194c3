"""The lightning indexer's scores, in plain JAX.

``score[t, s] = scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s])`` in float32 (DeepSeek-V3.2, equation 1; the
query's scale and the constants ``H**-0.5 * D**-0.5`` are folded into the weights). ReLU comes before the mask, or a
masked key would score 0 and beat every negative score.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array, lax

from dsa_jax import quant
from dsa_jax.cache import Cache
from dsa_jax.metadata import Step
from dsa_jax.xla.gather import gather_index_k

HEADS_BUDGET = 256 << 20
"""Bytes that the intermediate with the heads axis may take; rows are processed in chunks that stay below."""


def scores(q: Array, weights: Array, keys: Array, scale: Array | None) -> Array:
    """Unmasked scores of every query against every key of its group.

    Args:
        q: ``float32[..., M, H, D]``.
        weights: ``float32[..., M, H]``.
        keys: ``float32[..., S, D]``.
        scale: ``float32[..., S]`` or None.

    Returns:
        ``float32[..., M, S]``.
    """
    dots = jnp.einsum("...mhd,...sd->...mhs", q, keys, precision=lax.Precision.HIGHEST)
    total = jnp.einsum(
        "...mhs,...mh->...ms", jnp.maximum(dots, 0.0), weights, precision=lax.Precision.HIGHEST
    )
    return total if scale is None else total * scale[..., None, :]


def query_values(q: Array) -> Array:
    """A query as float32: e4m3 codes decoded, floats converted."""
    return quant.decode_e4m3(q) if q.dtype == jnp.uint8 else q.astype(jnp.float32)


def paged_mqa_logits(q: Array, weights: Array, cache: Cache, layer: int | Array, step: Step) -> Array:
    """Scores over the pages of each token's own request, -inf at and beyond its limit: ``float32[N, W * T]``."""
    weights = weights.astype(jnp.float32)
    if not step.bucket.decode_requests:
        return _context_logits(q, weights, cache, layer, step)
    return _decode_logits(q, weights, cache, layer, step)


def mqa_logits(
    q: Array, keys: Array, scale: Array | None, weights: Array, starts: Array, ends: Array
) -> Array:
    """Scores against contiguous keys inside each row's window, -inf outside: ``float32[S, keys]``."""
    values = query_values(keys)
    column = jnp.arange(keys.shape[0], dtype=jnp.int32)[None, :]

    def rows(chunk):
        q, weights, starts, ends = chunk
        inside = (column >= starts[:, None]) & (column < ends[:, None])
        return jnp.where(inside, scores(query_values(q), weights, values, scale), -jnp.inf)

    per_row = keys.shape[0] * q.shape[1] * 4
    return map_rows(rows, (q, weights.astype(jnp.float32), starts, ends), per_row)


def _page_rows(cache: Cache, step: Step) -> Array:
    """``int32[R, W * T]`` rows of every place of every request's pages, -1 where the pool has no such page."""
    page_size = step.layout.page_size
    offset = jnp.arange(page_size, dtype=jnp.int32)
    table = step.page_table[:, :, None]
    rows = jnp.where((table >= 0) & (table < cache.slots), table * page_size + offset[None, None, :], -1)
    return rows.reshape(step.page_table.shape[0], step.page_table.shape[1] * page_size)


def _decode_logits(q: Array, weights: Array, cache: Cache, layer: int | Array, step: Step) -> Array:
    """All ``next_n`` rows of a request share its keys: gather them once per request."""
    requests, n = step.bucket.decode_requests, step.bucket.next_n
    column = jnp.arange(step.bucket.table_width * step.layout.page_size, dtype=jnp.int32)

    def of_requests(chunk):
        q, weights, limits, rows = chunk
        data, scale = gather_index_k(cache, layer, rows)
        values = scores(query_values(q), weights, query_values(data), scale)
        visible = (column[None, None, :] < limits[:, :, None]) & (rows >= 0)[:, None, :]
        return jnp.where(visible, values, -jnp.inf)

    grouped = (
        q.reshape(requests, n, *q.shape[1:]),
        weights.reshape(requests, n, -1),
        step.limits.reshape(requests, n),
        _page_rows(cache, step),
    )
    per_request = column.size * (n * q.shape[1] * 4 + q.shape[2] * 5)
    return map_rows(of_requests, grouped, per_request).reshape(requests * n, column.size)


def _context_logits(q: Array, weights: Array, cache: Cache, layer: int | Array, step: Step) -> Array:
    """Score all context rows against one request's keys at a time and keep the rows that belong to it."""
    rows = _page_rows(cache, step)
    column = jnp.arange(rows.shape[1], dtype=jnp.int32)

    def add_request(request, out):
        data, scale = gather_index_k(cache, layer, rows[request])
        keys = query_values(data)

        def of_rows(chunk):
            q, weights, limits, previous = chunk
            values = scores(query_values(q), weights, keys, scale)
            visible = (column[None, :] < limits[:, None]) & (rows[request] >= 0)[None, :]
            return jnp.where(visible, values, previous)

        limits = jnp.where(step.requests == request, step.limits, 0)
        return map_rows(of_rows, (q, weights, limits, out), column.size * q.shape[1] * 4)

    empty = jnp.full((q.shape[0], column.size), -jnp.inf, jnp.float32)
    if not step.bucket.context_requests:
        return empty
    return lax.fori_loop(0, step.bucket.context_requests, add_request, empty)


def map_rows(f, arrays, bytes_per_row: int, budget: int = HEADS_BUDGET):
    """``f`` over the leading axis in equal chunks whose intermediate stays below ``budget`` bytes.

    One chunk runs without a loop. The last rows are padded with the first ones and cut off again.
    """
    count = arrays[0].shape[0]
    size = max(1, min(count, budget // max(1, bytes_per_row)))
    chunks = math.ceil(count / size) if count else 0
    if chunks <= 1:
        return f(arrays)
    size = math.ceil(count / chunks)
    index = jnp.arange(chunks * size, dtype=jnp.int32) % count
    split = tuple(a[index].reshape(chunks, size, *a.shape[1:]) for a in arrays)
    out = lax.map(f, split)
    return out.reshape(chunks * size, *out.shape[2:])[:count]
