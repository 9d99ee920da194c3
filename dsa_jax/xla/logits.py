"""The lightning indexer's scores, in plain JAX.

``score[t, s] = scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s])`` in float32 (DeepSeek-V3.2, equation 1; the
query's scale and the constants ``H**-0.5 * D**-0.5`` are folded into the weights). FP4 queries and keys have a scale for
each 32 elements, which cannot leave the dot product: their values carry it, and ``scale[s]`` is 1. ReLU comes before the
mask, or a masked key would score 0 and beat every negative score.
"""

from __future__ import annotations

import math
from typing import Any

import jax
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


def paged_mqa_logits(
    q: quant.Query, weights: Array, cache: Cache, layer: int | Array, step: Step, dtype: Any = jnp.float32
) -> Array:
    """Scores over the pages of each token's own request, -inf at and beyond its limit: ``dtype[N, W * T]``."""
    weights = weights.astype(jnp.float32)
    of_part = _decode_logits if step.bucket.decode_requests else _context_logits
    return of_part(q, weights, cache, layer, step).astype(dtype)


def mqa_logits(
    q: quant.Query,
    keys: Array,
    scale: Array | None,
    weights: Array,
    starts: Array,
    ends: Array,
    dtype: Any = jnp.float32,
) -> Array:
    """Scores against contiguous keys inside each row's window, -inf outside: ``dtype[S, keys]``."""
    form = "fp4" if isinstance(q, tuple) else "fp8" if q.dtype == jnp.uint8 else "f32"
    values, scale = quant.decode_keys(keys, scale, form)
    column = jnp.arange(keys.shape[0], dtype=jnp.int32)[None, :]

    def rows(chunk):
        q, weights, starts, ends = chunk
        inside = (column >= starts[:, None]) & (column < ends[:, None])
        return jnp.where(inside, scores(quant.decode_query(q, form), weights, values, scale), -jnp.inf)

    per_row = keys.shape[0] * weights.shape[1] * 4
    return map_rows(rows, (q, weights.astype(jnp.float32), starts, ends), per_row).astype(dtype)


def _page_rows(cache: Cache, step: Step) -> Array:
    """``int32[R, W * T]`` rows of every place of every request's pages, -1 where the pool has no such page."""
    page_size = step.layout.page_size
    offset = jnp.arange(page_size, dtype=jnp.int32)
    table = step.page_table[:, :, None]
    rows = jnp.where((table >= 0) & (table < cache.slots), table * page_size + offset[None, None, :], -1)
    return rows.reshape(step.page_table.shape[0], step.page_table.shape[1] * page_size)


def _decode_logits(q: quant.Query, weights: Array, cache: Cache, layer: int | Array, step: Step) -> Array:
    """All ``next_n`` rows of a request share its keys: gather them once per request."""
    requests, n, layout = step.bucket.decode_requests, step.bucket.next_n, cache.layout
    column = jnp.arange(step.bucket.table_width * step.layout.page_size, dtype=jnp.int32)

    def of_requests(chunk):
        q, weights, limits, rows = chunk
        keys, scale = quant.decode_keys(*gather_index_k(cache, layer, rows), layout.index_form)
        values = scores(quant.decode_query(q, layout.index_form), weights, keys, scale)
        visible = (column[None, None, :] < limits[:, :, None]) & (rows >= 0)[:, None, :]
        return jnp.where(visible, values, -jnp.inf)

    grouped = (
        jax.tree.map(lambda x: x.reshape(requests, n, *x.shape[1:]), q),
        weights.reshape(requests, n, -1),
        step.limits.reshape(requests, n),
        _page_rows(cache, step),
    )
    per_request = column.size * (n * weights.shape[1] * 4 + layout.index_head_dim * 5)
    return map_rows(of_requests, grouped, per_request).reshape(requests * n, column.size)


def _context_logits(q: quant.Query, weights: Array, cache: Cache, layer: int | Array, step: Step) -> Array:
    """Score all context rows against one request's keys at a time and keep the rows that belong to it."""
    rows, form = _page_rows(cache, step), cache.layout.index_form
    column = jnp.arange(rows.shape[1], dtype=jnp.int32)

    def add_request(request, out):
        keys, scale = quant.decode_keys(*gather_index_k(cache, layer, rows[request]), form)

        def of_rows(chunk):
            q, weights, limits, previous = chunk
            values = scores(quant.decode_query(q, form), weights, keys, scale)
            visible = (column[None, :] < limits[:, None]) & (rows[request] >= 0)[None, :]
            return jnp.where(visible, values, previous)

        limits = jnp.where(step.requests == request, step.limits, 0)
        return map_rows(of_rows, (q, weights, limits, out), column.size * weights.shape[1] * 4)

    empty = jnp.full((weights.shape[0], column.size), -jnp.inf, jnp.float32)
    if not step.bucket.context_requests:
        return empty
    return lax.fori_loop(0, step.bucket.context_requests, add_request, empty)


def map_rows(f, arrays, bytes_per_row: int, budget: int = HEADS_BUDGET):
    """``f`` over the leading axis of all ``arrays`` (a pytree) in chunks whose intermediate stays below ``budget`` bytes.

    The chunks are equal. One chunk runs without a loop. The last rows are padded with the first ones and cut off again.
    """
    count = jax.tree.leaves(arrays)[0].shape[0]
    size = max(1, min(count, budget // max(1, bytes_per_row)))
    chunks = math.ceil(count / size) if count else 0
    if chunks <= 1:
        return f(arrays)
    size = math.ceil(count / chunks)
    index = jnp.arange(chunks * size, dtype=jnp.int32) % count
    split = jax.tree.map(lambda a: a[index].reshape(chunks, size, *a.shape[1:]), arrays)
    out = lax.map(f, split)
    return out.reshape(chunks * size, *out.shape[2:])[:count]
