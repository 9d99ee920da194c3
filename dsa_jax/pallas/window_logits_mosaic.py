"""Scores of contiguous keys inside a window of each row, on Hopper: the kernel of paged scores without pages.

Neighbouring rows form groups of a fixed size. A group's tiles run from the least start to the greatest end of its rows'
windows, so rows with windows far apart should not stand side by side; they cost time, never a wrong score. A tile is
masked for the rows that do not see all of it, and the columns on both sides of a group's tiles are only filled with -inf.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from dsa_jax.compat import Device, target_device
from dsa_jax.pallas import paged_logits_mosaic
from dsa_jax.pallas.paged_logits_config import HEAD_DIM, PagedLogitsConfig, prefill_config, tokens_at_once
from dsa_jax.pallas.paged_logits_kernel import PagedLogitsKernel
from dsa_jax.pallas.paged_logits_plan import TILE, fill_items, shares

_NOWHERE = 1 << 30
"""Start of an empty window: beyond every column."""


@dataclasses.dataclass(frozen=True)
class WindowLogitsKernel(PagedLogitsKernel):
    """The kernel of contexts with tiles that begin where a group's windows do; a tile's slot is its own number.

    `groups` are ``(0, first row, rows, first tile, end of the tiles)``, `limits` the rows' ends and then their starts.
    """

    kernel_name: ClassVar[str] = "mqa_logits"

    def _first_tile(self, refs, request):
        return refs.groups[request, 3]

    def _tiles(self, refs, request):
        return refs.groups[request, 4]

    def _bounds(self, refs, request, j: int):
        return refs.limits[request, self.n + j], refs.limits[request, j]

    def _slots(self, refs, block, request, tile, count):
        return (tile,)


def supported_on(device: Device, *, heads: int, head_dim: int = HEAD_DIM) -> None:
    """Whether the kernel can run.

    Raises:
        NotImplementedError: with the reason, where it cannot.
    """
    paged_logits_mosaic.supported_on(device, heads=heads, new_tokens=1, page_size=TILE, head_dim=head_dim)


def window_logits(
    q: Array,
    weights: Array,
    keys: Array,
    scales: Array,
    starts: Array,
    ends: Array,
    *,
    plan: tuple[Array, Array, Array] | None = None,
    config: PagedLogitsConfig | None = None,
    blocks: int | None = None,
    dtype: Any = jnp.float32,
    interpret: Any = None,
) -> Array:
    """Score the keys of every row's window: ``scale[s] * sum_h weights[h] * relu(q[h] . k[s])``.

    Args:
        q: e4m3 codes ``[N, H, 128]``, ``uint8`` or ``float8_e4m3fn``.
        weights: ``float32[N, H]``.
        keys: e4m3 codes ``uint8[S, 128]``.
        scales: ``float32[S]``.
        starts, ends: ``int32[N]``, first key of each row's window and one past the last; what lies outside 0 to S is cut,
            and an end at or before its start makes an empty window.
        plan: `window_plan` of the same windows, keys, config and blocks; None computes it here.
        config: schedule; None picks one from the shape.
        blocks: blocks of the grid; None for what the config says about the target device.
        dtype: ``float32`` or ``bfloat16``, to which scores are rounded as they are written.
        interpret: ``plgpu.InterpretGPUParams`` to run on the CPU.

    Returns:
        ``dtype[N, S]``, -inf outside the windows. If S is no multiple of 64, keys and result are copied once.
    """
    (rows, heads, _), count = q.shape, keys.shape[0]
    if not rows or not count:
        return jnp.full((rows, count), -jnp.inf, dtype)
    config = config or prefill_config(heads=heads)
    if plan is None:
        plan = window_plan(starts, ends, heads=heads, keys=count, config=config, blocks=blocks)
    work, groups, limits = plan
    rest = -count % TILE
    table = jnp.arange((count + rest) // TILE, dtype=jnp.int32)[None]
    kernel = WindowLogitsKernel.create(
        limits.shape[1] // 2,
        heads,
        table,
        TILE,
        1,
        work,
        len(groups),
        config,
        interpret,
        grouped=True,
        dtype=dtype,
    )
    scored = kernel.call(
        work,
        groups,
        limits,
        table,
        0,
        q,
        weights,
        jnp.pad(keys, ((0, rest), (0, 0))).reshape(-1, TILE, HEAD_DIM),
        jnp.pad(scales, (0, rest)).reshape(-1, TILE),
        rows=rows,
        interpret=interpret,
    )
    return scored[:, :count]


def window_plan(
    starts: Array,
    ends: Array,
    *,
    heads: int,
    keys: int,
    config: PagedLogitsConfig | None = None,
    blocks: int | None = None,
) -> tuple[Array, Array, Array]:
    """Work plan, groups and the groups' limits of some windows, for all layers at once.

    Args:
        starts, ends: ``int32[N]`` as in `window_logits`, N > 0.
        heads: index heads.
        keys: S > 0.
        config, blocks: as in `window_logits`.

    Returns:
        ``int32[M, 9]`` shares of the blocks, ``int32[G, 5]`` groups and ``int32[G, 2 n]`` ends and starts of their n rows;
        see `WindowLogitsKernel`.
    """
    config = config or prefill_config(heads=heads)
    blocks = blocks or (target_device().cores or 132) * config.blocks_per_core * config.waves
    rows = starts.shape[0]
    n = min(tokens_at_once(config, "group_columns", heads), rows)
    count = -(-rows // n)
    starts, ends = jnp.clip(starts, 0, keys), jnp.clip(ends, 0, keys)
    empty = starts >= ends
    spare = (0, count * n - rows)
    starts = jnp.pad(jnp.where(empty, _NOWHERE, starts), spare, constant_values=_NOWHERE).reshape(count, n)
    ends = jnp.pad(jnp.where(empty, 0, ends), spare).reshape(count, n)
    end_tile = (jnp.max(ends, axis=1) + (TILE - 1)) // TILE
    first_tile = jnp.minimum(jnp.min(starts, axis=1) // TILE, end_tile)  # no tiles: both are 0
    *_, fill = fill_items(first_tile, end_tile, -(-keys // TILE) * TILE)
    work, _ = shares(first_tile, end_tile, fill, blocks=blocks, visit=config.visit)
    first_row = jnp.arange(count, dtype=jnp.int32) * n
    groups = [
        jnp.zeros_like(first_row),
        first_row,
        jnp.minimum(n, rows - first_row),
        first_tile,
        end_tile,
    ]
    limits = jnp.concatenate([ends, starts], axis=1)
    return work, jnp.stack(groups, axis=1).astype(jnp.int32), limits.astype(jnp.int32)
