"""Exact, deterministic top-k on GPU, in Pallas-Triton.

One program selects from one span of one row. It holds a tile of scores in registers, finds the threshold by counting
(topk_search.py) and writes the positions that pass in ascending order. A span longer than a tile is taken tile by tile:
each tile adds to a candidate list only what the tiles before leave possible, and the list is the last tile. A row of
several spans costs further launches: each selects from what the one before found, cut in spans again where one tile does
not hold it, until a single span is left. The work follows each row's true length: tiles beyond it are never read, a short
row takes a small tile and skips the launches that it does not need, and a row no longer than k is not read at all.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from dsa_jax.compat import Device
from dsa_jax.pallas import tuning
from dsa_jax.pallas.config_checks import check_fields, power_of_two
from dsa_jax.pallas.topk_program import Shape, select_span
from dsa_jax.pallas.triton_call import interpret_here, triton_call

MAX_K = 2048
"""Largest k: a tile must hold the finds of several spans."""
MAX_TILE = 32768
"""Two counts of a tile share one int32."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How a top-k is laid out on the card.

    Attributes:
        tiles: tile sizes in ascending order, powers of two from 128 times `warps` up to 32,768; a span takes the
            smallest that holds it.
        warps: warps of a program.
        span: columns of one program, a multiple of the largest tile; rows up to this length take one launch. None for the
            largest tile.
        exact: compare scores as integers; None does so in the interpreter, where XLA flushes subnormal floats.
        merge_tile: most finds that a program of a merge takes, a power of two from 256 to 32,768. At least 2 k where rows
            are split, so that every merge leaves fewer.
    """

    tiles: tuple[int, ...]
    warps: int
    span: int | None = None
    exact: bool | None = None
    merge_tile: int = MAX_TILE

    def __post_init__(self) -> None:
        # Types first: limits are computed of other fields.
        check_fields(self)
        good = power_of_two(128 * self.warps, MAX_TILE)[0]
        rising = lambda tiles: bool(tiles) and list(tiles) == sorted({*tiles}) and all(map(good, tiles))
        check_fields(
            self,
            warps=power_of_two(1, 32),
            tiles=(rising, f"ascending powers of two from {128 * self.warps} (128 a warp) to {MAX_TILE:,}"),
            span=(
                lambda span: span is None or (span > 0 and span % self.tiles[-1] == 0),
                "None or a multiple of the largest tile",
            ),
            merge_tile=power_of_two(256, MAX_TILE),
        )

    @property
    def columns(self) -> int:
        """Columns of one program: the span, or the largest tile if none is set."""
        return self.span or self.tiles[-1]


def supported_on(device: Device, *, k: int | None = None) -> None:
    """Raise NotImplementedError with the reason if the kernel cannot run there."""
    if device.platform != "gpu" or device.capability is None or device.capability < (8, 0):
        raise NotImplementedError("needs an NVIDIA GPU of compute capability 8.0 or more")
    if k is not None and k > MAX_K:
        raise NotImplementedError(f"k is {k}; this kernel selects at most {MAX_K}")


def default_config(rows: int, columns: int, k: int, cores: int = 132) -> Config:
    """Tiles and warps for a problem, by the rules of `tuning`.

    A row that a tile holds takes one launch. Longer rows are split over several programs, and further launches merge what
    they find. Where the programs outnumber the multiprocessors, their tiles are smaller, so that two programs share one
    multiprocessor and short rows cost what they should.
    """
    programs = rows * pl.cdiv(columns, MAX_TILE)
    facts = dict(rows=rows, columns=columns, k=k, cores=cores)
    facts |= dict(rows_per_core=rows / cores, programs_per_core=programs / cores)
    return tuning.choose("topk_triton", Config, facts)


def levels(config: Config, columns: int, k: int) -> list[Config]:
    """Configurations of all launches: of the rows, then of merges until one program holds what is left of a row.

    Raises:
        NotImplementedError: if a span's tiles leave more candidates than a tile holds.
        ValueError: if merges would not make the finds fewer.
    """
    largest = config.tiles[-1]
    chunks = pl.cdiv(min(config.columns, columns), largest)
    if chunks > 1 and chunks * k > largest:
        raise NotImplementedError(
            f"topk (Triton): {chunks} tiles in a span of {config.columns} leave {chunks * k} candidates for k {k}, more "
            f"candidates than a tile holds ({largest}). Choose another span, larger tiles or another implementation."
        )
    found = [config]
    while (spans := pl.cdiv(columns, found[-1].columns)) > 1:
        if config.merge_tile < 2 * k:
            raise ValueError(
                f"topk (Triton): config.merge_tile is {config.merge_tile}, wanted at least {2 * k}, twice k, where rows are "
                f"split ({spans} spans of {config.columns}). Raise merge_tile or let a span hold the row."
            )
        columns = spans * min(found[-1].columns, k)
        tile = min(config.merge_tile, max(1024, pl.next_power_of_2(columns)))
        found.append(dataclasses.replace(config, tiles=_tiles(tile), warps=_warps(tile), span=None))
    return found


def _warps(tile: int) -> int:
    """Few warps with many scores each: all warps do the search's scalar arithmetic, and all wait for each other."""
    return 16 if tile > 16384 else min(8, max(2, tile // 1024))


def _tiles(largest: int) -> tuple[int, ...]:
    """The largest tile, and one for short rows if that is more than they need."""
    return (8192, largest) if largest > 8192 else (largest,)


@functools.partial(jax.jit, static_argnames=("k", "page_size", "config", "interpret"))
def topk(
    logits: Array,
    limits: Array,
    k: int,
    *,
    page_table: Array | None = None,
    requests: Array | None = None,
    page_size: int | None = None,
    config: Config | None = None,
    interpret: bool | None = None,
) -> Array:
    """Positions, or cache rows, of the k largest of the first `limits` columns of each row.

    The lowest position wins among equal scores, +0.0 equals -0.0, a NaN ranks below -inf. What stands in columns at and
    beyond a row's limit has no influence.

    Args:
        logits: f32, bf16 or f16 `[N, S]`.
        limits: int32`[N]`; what lies outside 0..S is clipped.
        k: entries per row, 1 to 2,048.
        page_table: int32`[R, W]` slots. With it the result holds rows `slot * page_size + offset` instead of positions,
            which saves the launch of a conversion. Every page below the limit must be there; one that is not (a
            negative slot, a column beyond the table) leaves -1 in place.
        requests: int32`[N]`, the line of the page table of each row; needed with `page_table`. A row whose request is
            none of the R gives -1.
        page_size: tokens of a page, a power of two; needed with `page_table`.
        config: layout on the card, `default_config` if None.
        interpret: run as XLA operations; None does so where the target is no GPU.

    Returns:
        int32`[N, k]`: in ascending order of position, then -1.

    Raises:
        NotImplementedError: if k is over 2,048, or a span's tiles leave more candidates than a tile holds.
        ValueError: if arguments of the cache rows are missing, or `config.merge_tile` is too small for k.
    """
    rows, columns = logits.shape
    if k > MAX_K:
        raise NotImplementedError(f"topk (Triton): k is {k}; this kernel selects at most {MAX_K}")
    paging = Paging.of(page_table, requests, page_size)
    if rows == 0 or columns == 0 or (paging and paging.page_table.size == 0):
        return jnp.full((rows, k), -1, jnp.int32)
    first, *merges = levels(config or default_config(rows, columns, k), columns, k)
    interpret = interpret_here() if interpret is None else interpret
    result, *finds = _launch(logits, limits, k, first, interpret, paging)
    merged = (first.columns,)
    for config in merges:
        positions, values = finds
        before = _Before(columns, merged, result, positions)
        result, *finds = _launch(values, limits, k, config, interpret, paging, before)
        merged = (*merged, config.columns)
    return result


class Paging(NamedTuple):
    """What turns positions into cache rows: int32`[R, W]` slots, int32`[N]` requests, tokens of a page."""

    page_table: Array
    requests: Array
    page_size: int

    @classmethod
    def of(cls, page_table: Array | None, requests: Array | None, page_size: int | None) -> Paging | None:
        """From the arguments of a top-k; None without any of them."""
        if page_table is None and requests is None and page_size is None:
            return None
        if page_table is None or requests is None or page_size is None or page_size & (page_size - 1):
            raise ValueError(
                "topk: cache rows need page_table, requests and a page_size that is a power of two; got page_table "
                f"{page_table is not None}, requests {requests is not None}, page_size {page_size}. Pass all three or none."
            )
        return cls(page_table, requests, page_size)


class _Before(NamedTuple):
    """What a merge needs of the launches before: the rows' columns, all spans, the result, positions of the last finds."""

    columns: int
    merged: tuple[int, ...]
    result: Array
    positions: Array


def _launch(
    logits, limits, k, config, interpret, paging: Paging | None, before: _Before | None = None
) -> tuple[Array, ...]:
    """One launch: `(result,)`, followed by positions and values of the spans' finds if there are several spans.

    With `before` the rows of `logits` are the values of the finds of the launch before.
    """
    rows, columns = logits.shape
    spans, chunks = pl.cdiv(columns, config.columns), pl.cdiv(min(config.columns, columns), config.tiles[-1])
    shape = Shape(
        k=k,
        columns=before.columns if before else columns,
        spans=spans,
        span=config.columns,
        tiles=config.tiles,
        listed=chunks > 1,
        merged=before.merged if before else (),
        page_size=paging.page_size if paging else 0,
        warps=config.warps,
        exact=interpret if config.exact is None else config.exact,
        interpret=interpret,
    )
    operands = {"logits": logits, "limits": limits}
    outputs = {"result": jax.ShapeDtypeStruct((rows, k), jnp.int32)}
    if spans > 1:
        outputs["positions"] = jax.ShapeDtypeStruct((rows, spans * shape.kept), jnp.int32)
        outputs["values"] = jax.ShapeDtypeStruct((rows, spans * shape.kept), jnp.float32)
    if chunks > 1:
        outputs["list_positions"] = jax.ShapeDtypeStruct((rows * spans, chunks * k), jnp.int32)
        outputs["list_values"] = jax.ShapeDtypeStruct((rows * spans, chunks * k), jnp.float32)
    if paging:
        operands |= {"page_table": paging.page_table, "requests": paging.requests}
    aliases = {}
    if before:
        aliases = {len(operands): 0}  # rows of one span are done: the merge completes the result in place
        operands |= {"short": before.result, "found": before.positions}
    names = (*operands, *outputs)

    def body(*refs):
        select_span(shape, dict(zip(names, refs, strict=True)))

    call = triton_call(
        body,
        grid=(rows * spans,),
        out_shape=tuple(outputs.values()),
        name="topk_merge" if before else "topk",
        num_warps=config.warps,
        input_output_aliases=aliases,
        interpret=interpret,
    )
    return call(*operands.values())[: 3 if spans > 1 else 1]
