"""From positions in a sequence to rows of the cache, in plain JAX."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from dsa_jax.metadata import Step, rows_of


def to_rows(local: Array, step: Step) -> Array:
    """Rows ``slot * T + offset`` of local positions, valid ones kept in order at the front, then -1."""
    rows = rows_of(step.page_table, step.requests[:, None], local, step.layout.page_size)
    valid = rows >= 0
    place = jnp.where(valid, jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, local.shape[1])
    token = jnp.broadcast_to(jnp.arange(local.shape[0], dtype=jnp.int32)[:, None], local.shape)
    return jnp.full_like(rows, -1).at[token, place].set(rows, mode="drop")
