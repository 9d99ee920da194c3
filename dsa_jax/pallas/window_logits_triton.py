"""Scores of contiguous keys inside a window of each row on any NVIDIA card from sm80 on: `paged_logits_triton`'s kernel.

The keys are pages in their order, and neighbouring rows form groups, of which a program scores the pages from the least
start to the greatest end of the rows' windows.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from dsa_jax import quant
from dsa_jax.compat import Device, target_device
from dsa_jax.pallas import paged_logits_triton
from dsa_jax.pallas.paged_logits_triton import HEAD_DIM, Config

PAGE = 64
"""Keys scored at a time."""
_NOWHERE = 1 << 30
"""Start of an empty window: beyond every column."""


def supported_on(device: Device, *, heads: int, head_dim: int = HEAD_DIM) -> None:
    """Whether the kernel can run.

    Raises:
        NotImplementedError: with the reason, where it cannot.
    """
    paged_logits_triton.supported_on(device, heads=heads, new_tokens=1, page_size=PAGE, head_dim=head_dim)


def window_logits(
    q: quant.Query,
    weights: Array,
    keys: Array,
    scales: Array,
    starts: Array,
    ends: Array,
    *,
    config: Config | None = None,
    dtype: Any = jnp.float32,
    interpret: bool | None = None,
) -> Array:
    """Score the keys of every row's window; arguments and result as in `window_logits_mosaic`.

    FP4 keys are ``uint8[S, 64]`` packed codes with ``int32[S]`` scales; their q is the pair ``(uint8[N, H, 64],
    int32[N, H])``.
    The result is copied once if S is no multiple of 64.
    """
    (rows, heads), count = weights.shape, keys.shape[0]
    if not rows or not count:
        return jnp.full((rows, count), -jnp.inf, dtype)
    fp4 = isinstance(q, tuple)
    most = paged_logits_triton.rows_at_once(target_device(), heads=heads, page_size=PAGE, fp4=fp4)
    starts, ends = jnp.clip(starts, 0, count), jnp.clip(ends, 0, count)
    starts, ends = jnp.where(starts < ends, starts, _NOWHERE), jnp.where(starts < ends, ends, 0)

    def paged(x: Array) -> Array:
        x = jnp.pad(x, ((0, -count % PAGE), *[(0, 0)] * (x.ndim - 1)))
        return x.reshape(-1, PAGE, *x.shape[1:])

    scored = paged_logits_triton.score_groups(
        q,
        weights,
        paged(keys),
        paged(scales),
        None,
        ends,
        starts,
        rows=min(max(most, 1), rows),
        config=config,
        dtype=dtype,
        interpret=interpret,
        name="mqa_logits_triton",
    )
    return scored[:, :count]
