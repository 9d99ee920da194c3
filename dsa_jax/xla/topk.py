"""Exact top-k with every corner pinned down, in plain JAX."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

_LOWEST = -(2**31)


def ordered_bits(x: Array) -> Array:
    """Floats as int32 that sort alike: +0.0 equals -0.0, and every NaN sorts below -inf but above ``-2**31``."""
    # All on the bits: float comparisons would flush subnormal scores to zero on CPU and not on GPU.
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    ordered = jnp.where(bits < 0, -magnitude, magnitude)
    return jnp.where(magnitude > 0x7F800000, _LOWEST + 1, ordered)


def topk_indices(logits: Array, limits: Array, k: int) -> Array:
    """Positions of the k largest of the first ``limits`` columns, ascending, then -1: ``int32[N, k]``."""
    width = logits.shape[1]
    column = jnp.arange(width, dtype=jnp.int32)
    limits = jnp.clip(limits, 0, width)[:, None]
    keys = jnp.where(column[None, :] < limits, ordered_bits(logits), _LOWEST)
    kept = min(k, width)
    # top_k takes the lowest index among equals; columns beyond the limit sort below everything, NaN included.
    _, index = lax.top_k(keys, kept)
    valid = jnp.arange(kept, dtype=jnp.int32)[None, :] < limits
    positions = jnp.sort(jnp.where(valid, index.astype(jnp.int32), 2**31 - 1), axis=1)
    positions = jnp.where(valid, positions, -1)
    return jnp.pad(positions, ((0, 0), (0, k - kept)), constant_values=-1)
