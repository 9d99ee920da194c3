"""Scores of FP4 keys for many rows, contexts and windows, on Hopper: keys and queries become FP8, whose kernel scores them.

A key is written out once and then multiplied with hundreds of rows, so its expansion costs next to nothing here; in decode,
where every key is read once, it would cost more than the scores (`paged_logits_fp4_mosaic` expands in registers). FP4 as
FP8 is exact while the groups of a vector are not too far apart (`paged_logits_fp4_codes`). If a visible key or a query is
not such a one, the kernel for all cards scores the whole call from the packed codes: the device decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from dsa_jax.compat import Device
from dsa_jax.pallas import (
    paged_logits_mosaic,
    paged_logits_triton,
    window_logits_mosaic,
    window_logits_triton,
)
from dsa_jax.pallas.paged_logits_config import HEAD_DIM, PagedLogitsConfig
from dsa_jax.pallas.paged_logits_fp4_codes import as_fp8, key_fits, query_fits


def supported_on(
    device: Device, *, heads: int, new_tokens: int = 1, page_size: int = 64, head_dim: int = HEAD_DIM
) -> None:
    """Whether both kernels can run; `new_tokens` is of decode.

    Raises:
        NotImplementedError: with the reason, where one cannot.
    """
    for module in (paged_logits_mosaic, paged_logits_triton):
        module.supported_on(
            device, heads=heads, new_tokens=new_tokens, page_size=page_size, head_dim=head_dim
        )


def paged_logits_prefill(
    q: tuple[Array, Array],
    weights: Array,
    keys: Array,
    scales: Array,
    page_table: Array,
    requests: Array,
    limits: Array,
    *,
    page_scale: int,
    layer_offset: int | Array,
    config: PagedLogitsConfig | None = None,
    blocks: int | None = None,
    dtype: Any = jnp.float32,
    interpret: Any = None,
) -> Array:
    """Score the packed tokens of contexts. The pages of the table are copied, with twice the bytes that they have.

    Args:
        q: ``(uint8[N, H, 64], int32[N, H])`` packed codes and four UE8M0 bytes each.
        weights: ``float32[N, H]``.
        keys: ``uint8[P, T, 64]`` packed codes.
        scales: ``int32[P, T]``.
        page_table, requests, limits, page_scale, layer_offset, config, blocks, dtype, interpret: as in
            `paged_logits_mosaic`.

    Returns:
        ``dtype[N, W * T]``, -inf at and beyond each token's limit.
    """
    (packed, powers), page_size = q, keys.shape[1]
    if not weights.shape[0]:
        return jnp.zeros((0, page_table.shape[1] * page_size), dtype)
    slots = -(-keys.shape[0] // page_scale)
    page = page_table * page_scale + layer_offset
    known = (page_table >= 0) & (page_table < slots) & (page >= 0) & (page < keys.shape[0])
    page = jnp.where(known, page, 0)
    own_table = jnp.where(known, jnp.arange(page.size, dtype=jnp.int32).reshape(page.shape), -1)
    of_table = lambda pool: pool.at[page].get(mode="promise_in_bounds", wrap_negative_indices=False)
    own_scales = of_table(scales)
    # The most that a token of the request sees; padding, whose request is -1, is dropped.
    length = (
        jnp.zeros(page.shape[0], jnp.int32).at[requests].max(limits, mode="drop", wrap_negative_indices=False)
    )
    place = jnp.arange(page.shape[1] * page_size, dtype=jnp.int32).reshape(1, -1, page_size)
    unseen = (place >= length[:, None, None]) | jnp.logical_not(known)[..., None]

    def as_codes(q: Array, weights: Array) -> Array:
        codes, factors = (x.reshape(-1, *x.shape[2:]) for x in as_fp8(of_table(keys), own_scales))
        return paged_logits_mosaic.paged_logits_prefill(
            q, weights, codes, factors, own_table, requests, limits,
            page_scale=1, layer_offset=0, config=config, blocks=blocks, dtype=dtype, interpret=interpret,
        )  # fmt: skip

    def as_they_are() -> Array:
        return paged_logits_triton.paged_logits_prefill(
            q, weights, keys, scales, page_table, requests, limits,
            page_scale=page_scale, layer_offset=layer_offset, dtype=dtype,
        )  # fmt: skip

    fit = jnp.all(key_fits(own_scales) | unseen)
    return _score(packed, powers, weights, limits <= 0, fit, as_codes, as_they_are)


def window_logits(
    q: tuple[Array, Array],
    weights: Array,
    keys: Array,
    scales: Array,
    starts: Array,
    ends: Array,
    *,
    config: PagedLogitsConfig | None = None,
    blocks: int | None = None,
    dtype: Any = jnp.float32,
    interpret: Any = None,
) -> Array:
    """Score the keys of every row's window.

    Args:
        q: ``(uint8[N, H, 64], int32[N, H])`` packed codes and four UE8M0 bytes each.
        weights: ``float32[N, H]``.
        keys: ``uint8[S, 64]`` packed codes.
        scales: ``int32[S]``.
        starts, ends, config, blocks, dtype, interpret: as in `window_logits_mosaic`.

    Returns:
        ``dtype[N, S]``, -inf outside the windows.
    """
    (packed, powers), count = q, keys.shape[0]
    if not weights.shape[0] or not count:
        return jnp.full((weights.shape[0], count), -jnp.inf, dtype)
    first, end = jnp.clip(starts, 0, count), jnp.clip(ends, 0, count)
    blind = end <= first
    # Windows that are open at a key: opened up to there, less closed.
    opened = jnp.zeros(count + 1, jnp.int32).at[jnp.where(blind, count, first)].add(1)
    unseen = jnp.cumsum(opened.at[jnp.where(blind, count, end)].add(-1))[:count] == 0

    def as_codes(q: Array, weights: Array) -> Array:
        codes, factors = as_fp8(keys, scales)
        return window_logits_mosaic.window_logits(
            q, weights, codes, factors, starts, ends,
            config=config, blocks=blocks, dtype=dtype, interpret=interpret,
        )  # fmt: skip

    def as_they_are() -> Array:
        return window_logits_triton.window_logits(q, weights, keys, scales, starts, ends, dtype=dtype)

    fit = jnp.all(key_fits(scales) | unseen)
    return _score(packed, powers, weights, blind, fit, as_codes, as_they_are)


def _score(
    packed: Array,
    powers: Array,
    weights: Array,
    blind: Array,
    keys_fit: Array,
    as_codes: Callable[[Array, Array], Array],
    as_they_are: Callable[[], Array],
) -> Array:
    """One kernel or the other, as keys and queries allow; `blind` rows see nothing and count for nothing."""

    def expanded() -> Array:
        codes, factors = as_fp8(packed, powers)
        return as_codes(codes, weights * factors)

    fit = keys_fit & jnp.all(query_fits(powers) | blind[:, None])
    return lax.cond(fit, expanded, as_they_are)
