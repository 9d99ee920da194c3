"""How the work of one paged scoring call is shared out over the blocks of a persistent grid.

The unit is a tile of `TILE` keys of one request, scored for all of its new tokens at once. Counting tiles from the
first request to the last, every block gets a contiguous share; shares differ by at most one tile, whatever the lengths. A
group of context tokens counts for more tiles than it has, because a block takes time to go on to it: of a causal triangle
the first block would have many times the groups of the last.
The columns beyond a request's last tile are only filled with -inf; they are shared out the same way on their own.

The plan depends on the page table and the lengths, not on the layer, so XLA computes it once for all layers of a step.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

TILE = 64
"""Keys of one tile: the rows of one wgmma instruction."""

FILL = 512
"""Columns of one fill unit: one 16-byte store of each thread of a warpgroup."""

TRIANGLE_LIMIT = 1024
"""Up to this many requests, running sums are one masked reduction (one small kernel) instead of a scan (several)."""


HEADER = 9
"""Numbers of a block's share, see `work_plan`; the slots of its first tiles follow."""

ROW = 32
"""Numbers of a block in the plan: one line of the cache."""


def context_groups(requests: Array, *, size: int, most_requests: int) -> Array:
    """Cut packed context tokens into groups of consecutive tokens of one request.

    Args:
        requests: ``int32[N]`` request of every token, tokens of a request side by side; -1 is padding, which forms groups
            of its own, because its scores have to be written too.
        size: most tokens of a group.
        most_requests: bound on the number of requests.

    Returns:
        ``int32[G, 3]``, G = ceil(N / size) + most_requests + 1: request (-1 for padding), first token and token count;
        groups that are not needed have count 0.
    """
    tokens = requests.shape[0]
    number = jnp.arange(tokens, dtype=jnp.int32)
    changed = jnp.concatenate([jnp.ones((1,), bool), requests[1:] != requests[:-1]])
    run_start = lax.cummax(jnp.where(changed, number, 0))
    (first,) = jnp.nonzero(
        (number - run_start) % size == 0, size=-(-tokens // size) + most_requests + 1, fill_value=tokens
    )
    first = first.astype(jnp.int32)
    count = jnp.concatenate([first[1:], jnp.full((1,), tokens, jnp.int32)]) - first
    request = jnp.where(count > 0, requests[jnp.minimum(first, tokens - 1)], -1)
    return jnp.stack([request, first, count], axis=1)


def work_plan(limits: Array, page_table: Array, *, blocks: int, page_size: int, visit: int = 0) -> Array:
    """Share out tiles and fill units over the blocks.

    Args:
        limits: ``int32[R, n]`` visible keys of every row; the largest of a request decides how many tiles it has. What
            lies beyond the table's width is cut.
        page_table: ``int32[R, W]``.
        blocks: blocks of the grid, M.
        page_size: tokens of a page.
        visit: as in `shares`.

    Returns:
        ``int32[M, 32]``. A block's share: its first request, first tile and the end of the first request's tiles, its last
        request and the end (exclusive) of that one's tiles; then its filling: request and unit where it begins and where
        it ends, units counted as in `fill_items`. Then the slots of its first tiles, so that
        a block can start to copy as soon as it has read this row.
    """
    page_table = whole_tiles(page_table, page_size)
    columns = page_table.shape[1] * page_size
    lengths = jnp.clip(jnp.max(limits, axis=1), 0, columns).astype(jnp.int32)
    tiles = (lengths + (TILE - 1)) // TILE
    *_, fill = fill_items(jnp.zeros_like(tiles), tiles, columns)
    header, cut = shares(0, tiles, fill, blocks=blocks, visit=visit)
    slots = _first_slots(cut[:-1], lengths, page_table, page_size)
    return jnp.pad(jnp.concatenate([header, slots], axis=1), ((0, 0), (0, ROW - HEADER - slots.shape[1])))


def shares(
    first_tile: Array | int,
    end_tile: Array,
    items: Array,
    *,
    blocks: int,
    visit: int = 0,
) -> tuple[Array, Array]:
    """Every block's equal share of tiles and of filling.

    Args:
        first_tile: ``int32[R]`` where the tiles of a request begin, or 0 for all.
        end_tile: ``int32[R]`` where they end.
        items: ``int32[R]`` fill units of a request.
        blocks: blocks of the grid, M.
        visit: what going on to another request costs, in tiles.

    Returns:
        ``int32[M, 9]``, the first numbers that `work_plan` describes, and ``int32[M + 1]``, where the tiles of all requests
        one behind the other are cut.
    """
    tiles = end_tile - first_tile
    request, item = _cuts(jnp.where(tiles > 0, tiles + visit, 0), blocks)
    tile = jnp.maximum(item - visit, 0)
    cut = (_running_sum(tiles) - tiles)[request] + tile
    fill_request, item = _cuts(items, blocks)
    tile = tile + _at(first_tile, request)
    first_end = jnp.where(request[:-1] == request[1:], tile[1:], end_tile[request[:-1]])
    share = [request[:-1], tile[:-1], first_end, request[1:], tile[1:]]
    filling = [fill_request[:-1], item[:-1], fill_request[1:], item[1:]]
    return jnp.stack(share + filling, axis=1).astype(jnp.int32), cut


def fill_items(begin: Array, end: Array, columns: int) -> tuple[Array, Array, Array]:
    """Fill units that reach beyond the tiles from `begin` to `end`: how many before, the first behind, how many in all.

    Unit u is the columns from ``u * FILL`` on. A unit with columns on both sides counts before; one that holds the last
    tiles and no column behind them counts not at all.
    """
    per_unit = FILL // TILE
    before = (begin + (per_unit - 1)) // per_unit
    after = jnp.maximum(end // per_unit, before)
    units = -(-columns // FILL)
    return before, after, before + jnp.where(end * TILE < columns, units - after, 0)


def _at(values: Array | int, index: Array) -> Array | int:
    return values if isinstance(values, int) else values[index]


def whole_tiles(page_table: Array, page_size: int) -> Array:
    """The page table as int32, with one more column if it ends in the middle of a tile."""
    odd = page_table.shape[1] * page_size % TILE != 0
    return jnp.pad(page_table.astype(jnp.int32), ((0, 0), (0, int(odd))))


def pages_per_tile(page_size: int) -> int:
    """Pages that a tile is put together from, 1 for pages of a tile or more."""
    return max(1, TILE // page_size)


def planned_tiles(page_size: int) -> int:
    """How many of a block's first tiles have their slots in the plan."""
    return (ROW - HEADER) // pages_per_tile(page_size)


def _first_slots(cut: Array, lengths: Array, page_table: Array, page_size: int) -> Array:
    """Slots of every block's first tiles, ``int32[M, planned tiles * pages per tile]``.

    A place behind a request's last page repeats that page; places behind the block's share hold anything.
    """
    parts = pages_per_tile(page_size)
    tiles = (lengths + (TILE - 1)) // TILE
    ends = _running_sum(tiles)
    place = lambda count, shape: jnp.arange(count, dtype=jnp.int32).reshape(shape)
    item = cut[:, None] + place(planned_tiles(page_size), (1, -1))
    passed = ends[None, None, :] <= item[:, :, None]
    request = jnp.minimum(jnp.sum(passed, axis=2, dtype=jnp.int32), tiles.shape[0] - 1)
    tile = item - (ends - tiles)[request]
    page = (tile[:, :, None] * parts + place(parts, (1, 1, -1))) // max(1, page_size // TILE)
    page = jnp.clip(page, 0, jnp.maximum(lengths - 1, 0)[request][:, :, None] // page_size)
    return page_table[request[:, :, None], page].reshape(cut.shape[0], -1)


def _cuts(counts: Array, blocks: int) -> tuple[Array, Array]:
    """Cut the concatenation of all requests' items into equal shares.

    Args:
        counts: ``int32[R]`` items of every request.
        blocks: number of shares, M.

    Returns:
        ``int32[M + 1]`` each, both ends included: the requests in which the cuts lie and the items within these. A cut at
        the very end lies in the last request.
    """
    ends = _running_sum(counts)
    total = ends[-1]
    share = jnp.arange(blocks + 1, dtype=jnp.int32)
    cut = share * (total // blocks) + jnp.minimum(share, total % blocks)
    # Comparing with all ends is one small fused reduction; a binary search would be a loop of kernels.
    request = jnp.sum(ends[None, :] <= cut[:, None], axis=1, dtype=jnp.int32)
    request = jnp.minimum(request, counts.shape[0] - 1)
    return request, cut - (ends - counts)[request]


def _running_sum(counts: Array) -> Array:
    """Inclusive running sum of ``int32[R]``."""
    size = counts.shape[0]
    if size > TRIANGLE_LIMIT:
        return jnp.cumsum(counts)
    index = jnp.arange(size, dtype=jnp.int32)
    return jnp.sum(jnp.where(index[None, :] <= index[:, None], counts[None, :], 0), axis=1, dtype=jnp.int32)
