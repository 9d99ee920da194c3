"""Paged scoring on Hopper: e4m3 wgmma in Mosaic GPU, for decode rows and for contexts.

A persistent grid walks the tiles of `paged_logits_plan`. In every block one warpgroup copies tiles of keys and their
scales into a ring of shared-memory stages with the copy engine; the compute warpgroups take the tiles in turn, multiply
them with all heads of the request's new tokens at once (keys along M, heads along N) and reduce over the heads in
registers. A stage is handed over through two barriers and nothing else: results go from registers straight to memory.
The compiler's own barriers around shared-memory accesses are switched off, which is safe here because no thread both
reads and writes the same shared memory.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from dsa_jax.compat import Device, target_device
from dsa_jax.pallas.paged_logits_config import (
    HEAD_DIM,
    PagedLogitsConfig,
    default_config,
    prefill_config,
    tokens_at_once,
)
from dsa_jax.pallas.paged_logits_kernel import PagedLogitsKernel
from dsa_jax.pallas.paged_logits_plan import context_groups, work_plan

__all__ = [
    "PagedLogitsConfig",
    "decode_plan",
    "paged_logits_decode",
    "paged_logits_prefill",
    "prefill_plan",
    "supported_on",
]

PAGE_SIZES = (32, 64, 128)
HEADS = (32, 64)
MAX_NEW_TOKENS = 8


def supported_on(
    device: Device, *, heads: int, new_tokens: int, page_size: int, head_dim: int = HEAD_DIM
) -> None:
    """Whether the kernel can run.

    Raises:
        NotImplementedError: with the reason, where it cannot.
    """
    if device.capability is None or device.capability[0] != 9:
        raise NotImplementedError(
            f"wgmma exists on compute capability 9.0 only (H100, H200); this is {device}"
        )
    for name, value, wanted in (
        ("page_size", page_size, PAGE_SIZES),
        ("index heads", heads, HEADS),
        ("index head dim", head_dim, (HEAD_DIM,)),
        ("new tokens per request", new_tokens, tuple(range(1, MAX_NEW_TOKENS + 1))),
    ):
        if value not in wanted:
            raise NotImplementedError(f"{name} is {value}; the kernel takes {', '.join(map(str, wanted))}")


def paged_logits_decode(
    q: Array,
    weights: Array,
    keys: Array,
    scales: Array,
    page_table: Array,
    limits: Array,
    *,
    page_scale: int,
    layer_offset: int | Array,
    plan: Array | None = None,
    config: PagedLogitsConfig | None = None,
    blocks: int | None = None,
    dtype: Any = jnp.float32,
    interpret: Any = None,
) -> Array:
    """Score every visible cached key for every new token: ``scale[s] * sum_h weights[h] * relu(q[h] . k[s])``.

    Args:
        q: e4m3 codes ``[R, n, H, 128]``, ``uint8`` or ``float8_e4m3fn``.
        weights: ``float32[R, n, H]``.
        keys: e4m3 codes ``uint8[P, T, 128]``.
        scales: ``float32[P, T]``.
        page_table: ``int32[R, W]`` slots. Entries at and beyond a request's length are never read as pages.
        limits: ``int32[R, n]`` visible keys of every row, 0 for a row that sees nothing.
        page_scale: pages of one slot; the page of a slot is ``slot * page_scale + layer_offset``.
        layer_offset: ``int32`` scalar, may be traced.
        plan: `decode_plan` of the same page table, limits, config and blocks; None computes it here.
        config: schedule; None picks one from the shape.
        blocks: blocks of the grid; None for what the config says about the target device.
        dtype: ``float32`` or ``bfloat16``, to which scores are rounded as they are written.
        interpret: ``plgpu.InterpretGPUParams`` to run on the CPU.

    Returns:
        ``dtype[R * n, W * T]``, -inf at and beyond each row's limit. An odd W with pages of 32 costs a copy of it.
    """
    requests, n, heads, _ = q.shape
    page_size = keys.shape[1]
    if not requests:
        return jnp.zeros((0, page_table.shape[1] * page_size), dtype)
    config = config or _default(page_table, n, heads=heads, page_size=page_size)
    if plan is None:
        plan = decode_plan(page_table, limits, heads=heads, page_size=page_size, config=config, blocks=blocks)
    problem = PagedLogitsKernel.create(
        n, heads, page_table, page_size, page_scale, plan, requests, config, interpret, dtype=dtype
    )
    # The kernel of decode rows looks at no groups; any integers do.
    return problem.call(
        plan,
        plan,
        limits,
        page_table,
        layer_offset,
        q,
        weights,
        keys,
        scales,
        rows=requests * n,
        interpret=interpret,
    )


def paged_logits_prefill(
    q: Array,
    weights: Array,
    keys: Array,
    scales: Array,
    page_table: Array,
    requests: Array,
    limits: Array,
    *,
    page_scale: int,
    layer_offset: int | Array,
    plan: tuple[Array, Array, Array] | None = None,
    config: PagedLogitsConfig | None = None,
    blocks: int | None = None,
    dtype: Any = jnp.float32,
    interpret: Any = None,
) -> Array:
    """Score the packed tokens of contexts: groups of a request's tokens take the place of a decode request's rows.

    Args:
        q: e4m3 codes ``[N, H, 128]``.
        weights: ``float32[N, H]``.
        keys, scales, page_table, page_scale, layer_offset, config, blocks, dtype, interpret: as in `paged_logits_decode`.
        requests: ``int32[N]`` request of every token, -1 for padding; tokens of a request stand side by side.
        limits: ``int32[N]`` visible keys of every token, 0 for padding.
        plan: `prefill_plan` of the same page table, requests, limits, config and blocks; None computes it here.

    Returns:
        ``dtype[N, W * T]``, -inf at and beyond each token's limit.
    """
    tokens, heads, _ = q.shape
    page_size = keys.shape[1]
    if not tokens:  # no group to plan
        return jnp.zeros((0, page_table.shape[1] * page_size), dtype)
    config = config or prefill_config(heads=heads)
    if plan is None:
        plan = prefill_plan(
            page_table, requests, limits, heads=heads, page_size=page_size, config=config, blocks=blocks
        )
    shares, groups, group_limits = plan
    count, n = group_limits.shape
    problem = PagedLogitsKernel.create(
        n,
        heads,
        page_table,
        page_size,
        page_scale,
        shares,
        count,
        config,
        interpret,
        grouped=True,
        dtype=dtype,
    )
    return problem.call(
        shares,
        groups,
        group_limits,
        page_table,
        layer_offset,
        q,
        weights,
        keys,
        scales,
        rows=tokens,
        interpret=interpret,
    )


def prefill_plan(
    page_table: Array,
    requests: Array,
    limits: Array,
    *,
    heads: int,
    page_size: int,
    config: PagedLogitsConfig | None = None,
    blocks: int | None = None,
) -> tuple[Array, Array, Array]:
    """Work plan, groups and the groups' limits of a step's contexts; arguments as in `paged_logits_prefill`."""
    config = config or prefill_config(heads=heads)
    blocks = blocks or _cores() * config.blocks_per_core * config.waves
    size = tokens_at_once(config, "group_columns", heads)
    groups = context_groups(requests, size=size, most_requests=page_table.shape[0])
    row = jnp.arange(size, dtype=jnp.int32)[None, :]
    token = jnp.minimum(groups[:, 1:2] + row, requests.shape[0] - 1)
    group_limits = jnp.where(row < groups[:, 2:3], limits[token], 0)
    shares = work_plan(
        group_limits,
        page_table[jnp.maximum(groups[:, 0], 0)],
        blocks=blocks,
        page_size=page_size,
        visit=config.visit,
    )
    return shares, groups, group_limits


def decode_plan(
    page_table: Array,
    limits: Array,
    *,
    heads: int,
    page_size: int,
    config: PagedLogitsConfig | None = None,
    blocks: int | None = None,
) -> Array:
    """The work plan of a decode step, for all layers at once; arguments as in `paged_logits_decode`."""
    config = config or _default(page_table, limits.shape[1], heads=heads, page_size=page_size)
    blocks = blocks or _cores() * config.blocks_per_core * config.waves
    return work_plan(limits, page_table, blocks=blocks, page_size=page_size)


def _default(page_table: Array, new_tokens: int, *, heads: int, page_size: int) -> PagedLogitsConfig:
    requests, width = page_table.shape
    return default_config(
        heads=heads, new_tokens=new_tokens, requests=requests, keys=width * page_size, cores=_cores()
    )


def _cores() -> int:
    """Streaming multiprocessors of the target; an H100's where it does not say."""
    return target_device().cores or 132
