"""Paged scoring of FP4 keys on Hopper, which has no FP4: the codes become e4m3 in registers on their way into wgmma.

The persistent grid, its plan and its ring of shared-memory stages are those of `paged_logits_mosaic`; tiles are half as
large. A compute warpgroup takes the packed codes of 64 keys into registers, expands them to e4m3 relative to each key's
greatest group exponent (`paged_logits_fp4_codes`: exact while the exponents of a key differ by at most 11) and multiplies
from there. The queries were re-expressed the same way beforehand. Every key and query is checked: tiles with a key that does
not fit, and requests with a query that does not, are scored again with a product for each group, which is always exact.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from dsa_jax.compat import target_device
from dsa_jax.pallas import paged_logits_fp4_steps as steps
from dsa_jax.pallas import tuning
from dsa_jax.pallas.config_checks import check_fields, multiple_of
from dsa_jax.pallas.paged_logits_config import HEAD_DIM, SHARED_MEMORY, PagedLogitsConfig
from dsa_jax.pallas.paged_logits_fp4_codes import query_codes
from dsa_jax.pallas.paged_logits_fp4_kernel import PagedLogitsFp4Kernel
from dsa_jax.pallas.paged_logits_mosaic import supported_on
from dsa_jax.pallas.paged_logits_plan import TILE, work_plan
from dsa_jax.quant.fp4 import GROUPS

__all__ = ["PagedLogitsFp4Config", "decode_plan", "default_config", "paged_logits_decode", "supported_on"]


TILES_IN_FLIGHT = 16
"""Tiles in the stages of a block: as many bytes as the kernel of FP8 keys has in flight."""


@dataclasses.dataclass(frozen=True)
class PagedLogitsFp4Config(PagedLogitsConfig):
    """Schedule of the kernel. It never changes the result, not even the rounding.

    Attributes:
        together: tiles of one stage, taken by one warpgroup, which expands one while it multiplies another.
    """

    kept_weights: int = 128
    together: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, together=multiple_of(1, 1, TILES_IN_FLIGHT))


def default_config(*, heads: int, new_tokens: int, requests: int, keys: int) -> PagedLogitsFp4Config:
    """The schedule for a shape, by the rules of `tuning`, except for its stages; `keys` is the width of the scores."""
    facts = dict(heads=heads, new_tokens=new_tokens, columns=heads * new_tokens, requests=requests, keys=keys)
    return tuning.choose("paged_logits_fp4_mosaic", PagedLogitsFp4Config, facts)


def _default(page_table: Array, new_tokens: int, *, heads: int, page_size: int) -> PagedLogitsFp4Config:
    requests, width = page_table.shape
    return default_config(heads=heads, new_tokens=new_tokens, requests=requests, keys=width * page_size)


def stages_for(rows: int, config: PagedLogitsFp4Config) -> int:
    """Stages of a block: what keeps memory busy, as far as it fits beside the stages for exceptions.

    Args:
        rows: new tokens x heads of a request.
        config: schedule, for the rest of it.
    """
    fixed = config.query_buffers * rows * (HEAD_DIM + 4 * (1 + GROUPS)) + 4096
    stage = config.together * TILE * (HEAD_DIM // 2 + 4) + 16
    room, consumers = (SHARED_MEMORY // config.blocks_per_core - fixed) // stage, config.compute_warpgroups
    return max(consumers, min(TILES_IN_FLIGHT // config.together, room - consumers) // consumers * consumers)


def paged_logits_decode(
    q: tuple[Array, Array],
    weights: Array,
    keys: Array,
    scales: Array,
    page_table: Array,
    limits: Array,
    *,
    page_scale: int,
    layer_offset: int | Array,
    plan: Array | None = None,
    config: PagedLogitsFp4Config | None = None,
    blocks: int | None = None,
    dtype: Any = jnp.float32,
    interpret: Any = None,
) -> Array:
    """Score every visible cached key for every new token: ``sum_h weights[h] * relu(q[h] . k[s])``.

    Args:
        q: ``uint8[R, n, H, 64]`` packed codes and ``int32[R, n, H]`` scales, four UE8M0 bytes each.
        weights: ``float32[R, n, H]``.
        keys: ``uint8[P, T, 64]`` packed codes.
        scales: ``int32[P, T]``.
        page_table, limits, page_scale, layer_offset, plan, config, blocks, dtype, interpret: as in `paged_logits_mosaic`.

    Returns:
        ``dtype[R * n, W * T]``, -inf at and beyond each row's limit. An odd W with pages of 32 costs a copy of it.
    """
    packed, powers = q
    requests, n, heads, _ = packed.shape
    page_size = keys.shape[1]
    if not requests:
        return jnp.zeros((0, page_table.shape[1] * page_size), dtype)
    config = config or _default(page_table, n, heads=heads, page_size=page_size)
    if config.stages is None:
        config = dataclasses.replace(config, stages=stages_for(n * heads, config))
    if plan is None:
        plan = decode_plan(page_table, limits, heads=heads, page_size=page_size, config=config, blocks=blocks)
    problem = PagedLogitsFp4Kernel.create(
        n, heads, page_table, page_size, page_scale, plan, requests, config, interpret, dtype=dtype
    )
    own = steps.interpreted() if interpret else steps.on_card()
    problem = dataclasses.replace(problem, steps=own, together=config.together)
    e4m3, factors, misfits = query_codes(packed, powers, weights)
    return problem.call(
        plan,
        misfits,
        limits,
        page_table,
        layer_offset,
        e4m3,
        factors,
        keys,
        scales,
        rows=requests * n,
        interpret=interpret,
    )


def decode_plan(
    page_table: Array,
    limits: Array,
    *,
    heads: int,
    page_size: int,
    config: PagedLogitsFp4Config | None = None,
    blocks: int | None = None,
) -> Array:
    """The work plan of a decode step, for all layers at once; arguments as in `paged_logits_decode`."""
    config = config or _default(page_table, limits.shape[1], heads=heads, page_size=page_size)
    blocks = blocks or (target_device().cores or 132) * config.blocks_per_core * config.waves
    return work_plan(limits, page_table, blocks=blocks, page_size=page_size)
