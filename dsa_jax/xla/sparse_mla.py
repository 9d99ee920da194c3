"""Absorbed multi-head latent attention over selected rows, in plain JAX."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from dsa_jax import quant
from dsa_jax.cache import Cache
from dsa_jax.layout import Role
from dsa_jax.xla.gather import read_rows
from dsa_jax.xla.logits import map_rows

SPARSE_BUDGET = 512 << 20
"""Bytes that gathered rows and scores of one chunk of queries may take."""


def sparse_mla(
    q: Array,
    cache: Cache,
    layer: int | Array,
    rows: Array,
    softmax_scale: float,
    key_scale: Array | float | None = None,
) -> tuple[Array, Array]:
    """``softmax(q k^T * scale) v`` over ``rows`` of the cache, where v is the latent part of the same row.

    Rows of -1 are masked by select, on scores and on values, so that whatever lies in memory for them cannot matter.
    """
    layout, heads, keys = cache.layout, q.shape[1], rows.shape[1]
    latent, leaves = layout.latent_dim, [name for name in cache.pools() if cache.role(name) != Role.INDEX_KEY]

    def of_queries(chunk):
        q, rows = chunk
        page_exists = cache.page_of(Role.KEY, layer, jnp.where(rows >= 0, rows // layout.page_size, -1)) >= 0
        entry = {name: read_rows(cache, name, cache.role(name), layer, rows) for name in leaves}
        values = quant.decode_latent(entry, layout.key_form, key_scale)
        out, lse = attend(q.astype(jnp.float32), values, page_exists, softmax_scale, latent)
        return jnp.concatenate([out, lse[:, :, None]], axis=-1)  # one array, so that chunks stack

    per_query = keys * (q.shape[2] * 8 + heads * 12)
    both = map_rows(of_queries, (q, rows), per_query, SPARSE_BUDGET)
    return both[..., :latent].astype(q.dtype), both[..., latent]


def attend(q: Array, keys: Array, valid: Array, softmax_scale: float, latent: int) -> tuple[Array, Array]:
    """Attention of each query over its own keys.

    Args:
        q: ``float32[N, h, width]``.
        keys: ``float32[N, K, width]``; the first ``latent`` entries are the values.
        valid: ``bool[N, K]``.
        softmax_scale: factor on the scores.
        latent: width of the values.

    Returns:
        ``float32[N, h, latent]`` and the natural-log sum of exponentials ``float32[N, h]``; 0 and -inf for rows
        without a valid key.
    """
    keys = jnp.where(valid[:, :, None], keys, 0.0)
    scores = jnp.einsum("nhd,nkd->nhk", q, keys, precision=lax.Precision.HIGHEST) * softmax_scale
    scores = jnp.where(valid[:, None, :], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    top = jnp.where(jnp.isneginf(top), 0.0, top)  # an empty row: exp(-inf - 0) = 0 instead of NaN
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1)
    out = jnp.einsum("nhk,nkd->nhd", weights, keys[:, :, :latent], precision=lax.Precision.HIGHEST)
    out = out / jnp.where(total == 0.0, 1.0, total)[:, :, None]
    return out, jnp.where(total == 0.0, -jnp.inf, jnp.log(total) + top[:, :, 0])
