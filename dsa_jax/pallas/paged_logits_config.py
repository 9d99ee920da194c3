"""Schedules of the Hopper kernel for paged scores."""

from __future__ import annotations

import dataclasses

from dsa_jax.pallas import tuning
from dsa_jax.pallas.config_checks import check_fields, multiple_of, one_of
from dsa_jax.pallas.paged_logits_plan import TILE

HEAD_DIM = 128
MAX_COLUMNS = 256
"""Columns of one wgmma instruction."""
TILES_IN_FLIGHT = 8
"""Stages of all blocks of a multiprocessor together. On an H200, 64 requests of 32,768 keys took 71.2 us with 8 tiles in
flight, 72.6 with 16 and 80.9 with 24: more make the memory slower, not faster."""
SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that one streaming multiprocessor of Hopper gives to its blocks."""

MAX_COMPUTE_WARPGROUPS = 7
"""A block has at most eight warpgroups, of which one copies."""
REGISTERS = 512
"""Registers of a thread in each warpgroup of a multiprocessor, summed."""


@dataclasses.dataclass(frozen=True)
class PagedLogitsConfig:
    """Schedule of the kernel. It never changes the result, not even the rounding.

    Attributes:
        compute_warpgroups: warpgroups that take tiles in turn.
        stages: tiles in flight per block, a multiple of `compute_warpgroups`; None for what keeps memory busiest.
        blocks_per_core: blocks that share a streaming multiprocessor.
        waves: blocks of the grid over blocks that run at a time; more than 1 lets the hardware even out the end.
        query_buffers: requests whose queries are in shared memory at a time, 1 or 2.
        product_columns: most columns (new tokens x heads) of one product, at most 256.
        group_columns: columns of one group of context tokens, a multiple of the heads; decode rows are not regrouped.
        visit: what going on to another group of context tokens costs a block, in tiles; decode rows have no such price.
        kept_weights: weights (new tokens x heads) that stay in registers over a whole request; more are read for every tile.
        registers: registers of a compute thread and of a copying thread; None leaves the even split.
        fence: order reads of shared memory before the copy engine's next writes with a fence, as the memory model asks;
            without it the hand-over through the barriers alone does that: a value that has been read cannot be overwritten.
    """

    compute_warpgroups: int = 2
    stages: int | None = None
    blocks_per_core: int = 1
    waves: int = 1
    query_buffers: int = 2
    product_columns: int = MAX_COLUMNS
    group_columns: int = 2 * MAX_COLUMNS
    visit: int = 1
    kept_weights: int = MAX_COLUMNS
    registers: tuple[int, int] | None = None
    fence: bool = False

    def __post_init__(self) -> None:
        check_fields(self)  # types first: limits are computed of other fields
        groups, good = self.compute_warpgroups, multiple_of(8, 24, 240)[0]
        fits = lambda pair: all(map(good, pair)) and groups * pair[0] + pair[1] <= REGISTERS
        check_fields(self, compute_warpgroups=multiple_of(1, 1, MAX_COMPUTE_WARPGROUPS))
        check_fields(
            self,
            stages=(
                lambda stages: stages is None or (stages > 0 and stages % groups == 0),
                f"None or a multiple of the {groups} compute warpgroups",
            ),
            blocks_per_core=multiple_of(1, 1, 32),
            waves=multiple_of(1, 1),
            query_buffers=one_of(1, 2),
            product_columns=multiple_of(8, 8, MAX_COLUMNS),
            group_columns=multiple_of(8, 8),
            visit=multiple_of(1),
            kept_weights=multiple_of(1),
            registers=(
                lambda pair: pair is None or fits(pair),
                f"None or two multiples of 8 from 24 to 240, {groups} times the first and the second at most {REGISTERS}",
            ),
        )


def tokens_at_once(config: PagedLogitsConfig, field: str, heads: int) -> int:
    """Tokens whose heads fit the columns of a field, ``"product_columns"`` or ``"group_columns"``.

    Raises:
        ValueError: if not even those of one token do.
    """
    if (columns := getattr(config, field)) < heads:
        raise ValueError(
            f"{type(config).__name__}: {field} is {columns}, wanted at least the {heads} heads of a token. Raise it, or "
            "pass config=None."
        )
    return columns // heads


def default_config(*, heads: int, new_tokens: int, requests: int, keys: int, cores: int) -> PagedLogitsConfig:
    """The schedule for a shape, by the rules of `tuning`.

    Args:
        heads: index heads.
        new_tokens: new tokens of a request.
        requests: decode requests.
        keys: most keys of a request, the width of the scores.
        cores: streaming multiprocessors.

    Returns:
        Two blocks share a multiprocessor where their registers allow it, up to 64 columns, and where a block has few tiles,
        which finishes sooner with few barriers to set up. Wide products take registers from the copying warpgroup.
    """
    facts = dict(heads=heads, new_tokens=new_tokens, requests=requests, keys=keys, cores=cores)
    facts |= dict(columns=heads * new_tokens, tiles_per_core=requests * keys / (cores * TILE))
    return tuning.choose("paged_logits_mosaic", PagedLogitsConfig, facts)


def prefill_config(*, heads: int) -> PagedLogitsConfig:
    """The schedule of contexts: groups of four tokens of 64 heads, or eight of 32."""
    return tuning.choose("paged_logits_mosaic_prefill", PagedLogitsConfig, {"heads": heads})


def stages_for(rows: int, tiles: int, config: PagedLogitsConfig) -> int:
    """Stages of a block: what fits, what keeps memory busy, and no more than a block can have tiles."""
    fixed = config.query_buffers * rows * (HEAD_DIM + 4) + 1024
    room = (SHARED_MEMORY // config.blocks_per_core - 1024 - fixed) // (TILE * (HEAD_DIM + 4) + 16)
    step = config.compute_warpgroups
    useful = -(-tiles // step) * step
    return max(step, min(TILES_IN_FLIGHT // config.blocks_per_core, room, useful) // step * step)
