"""Cutting a prefill into chunks: which tokens of which request are processed together.

A chunk is a step of its own. Its metadata is built from lengths alone, so its windows count from the first key of the chunk
and nothing has to be re-based.

The engine feeds chunks of one size; a scheduler with long contexts asks `largest_chunk` for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dsa_jax.arguments import described, is_whole

LARGEST_CHUNK = 32768
"""Tokens of a prefill chunk at most, unless said otherwise."""
_LONG, _LONGER = 256 * 1024, 512 * 1024


@dataclass(frozen=True)
class ChunkPart:
    """New tokens of one request that a chunk processes.

    Attributes:
        request: number of the request.
        start, end: first of its new tokens, and the one after the last.
        offset: new tokens of earlier requests; the part starts at place ``offset + start`` of the whole batch's.
    """

    request: int
    start: int
    end: int
    offset: int


Chunk = tuple[ChunkPart, ...]


def largest_chunk(longest: int, limit: int = LARGEST_CHUNK) -> int:
    """Tokens of a chunk at most: fewer where a context is long, because scores take tokens x keys.

    Args:
        longest: keys of the longest context of the batch, its new tokens included.
        limit: never more than this.

    >>> [largest_chunk(k * 1024) for k in (255, 256, 512, 513)]
    [32768, 16384, 16384, 8192]
    """
    if longest > _LONGER:
        return min(limit, 8192)
    return min(limit, 16384) if longest >= _LONG else limit


def split_prefill_chunks(new_lens: Sequence[int], limit: int, first: int = 0) -> tuple[Chunk, ...]:
    """Pack whole requests into chunks in their order; one that is longer than a chunk is cut, and shares none.

    Args:
        new_lens: new tokens of each request.
        limit: tokens of a chunk at most; ``largest_chunk`` gives it.
        first: request to begin with; the ones before only count for the offsets.

    Returns:
        The chunks. Requests without new tokens are left out.

    Raises:
        ValueError: for a limit below 1, negative lengths, or a first request that is not there.

    >>> [[(p.request, p.start, p.end) for p in chunk] for chunk in split_prefill_chunks([3, 4, 9, 2], 7)]
    [[(0, 0, 3), (1, 0, 4)], [(2, 0, 7)], [(2, 7, 9)], [(3, 0, 2)]]
    """
    problems = []
    if isinstance(new_lens, str | bytes) or not hasattr(new_lens, "__len__"):
        problems.append(f"new_lens is {described(new_lens)}, wanted a number of new tokens for each request")
        new_lens = ()
    if not is_whole(limit) or limit < 1:
        problems.append(f"limit is {described(limit)}, wanted at least 1 token")
    problems += [
        f"request {r} has {described(length)} new tokens, wanted at least 0"
        for r, length in enumerate(new_lens)
        if not is_whole(length) or length < 0
    ]
    if not is_whole(first) or not 0 <= first <= len(new_lens):
        problems.append(f"first is {described(first)}, wanted 0 to {len(new_lens)}")
    if problems:
        raise ValueError(
            "split_prefill_chunks: " + "; ".join(problems) + ". Pass the contexts' new-token counts."
        )

    new_lens, limit, first = [int(length) for length in new_lens], int(limit), int(first)
    chunks: list[Chunk] = []
    gathered: list[ChunkPart] = []
    offset = sum(new_lens[:first])
    for request in range(first, len(new_lens)):
        length = new_lens[request]
        if gathered and sum(part.end for part in gathered) + length > limit:
            chunks.append(tuple(gathered))
            gathered = []
        if length > limit:
            cuts = [*range(0, length, limit), length]
            chunks += [(ChunkPart(request, start, end, offset),) for start, end in pairwise(cuts)]
        elif length:
            gathered.append(ChunkPart(request, 0, length, offset))
        offset += length
    return tuple(chunks) + ((tuple(gathered),) if gathered else ())


def chunk_lengths(
    chunk: Chunk, cached: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """What a chunk's metadata is made of.

    Args:
        chunk: one of ``split_prefill_chunks``.
        cached: for every request the tokens that are in the cache before its first new one.

    Returns:
        For each of the chunk's requests in turn: its number, its ``kv_lens`` after the chunk, its ``new_lens``.
    """
    return (
        tuple(part.request for part in chunk),
        tuple(cached[part.request] + part.end for part in chunk),
        tuple(part.end - part.start for part in chunk),
    )
