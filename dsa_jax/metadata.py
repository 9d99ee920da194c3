"""What a step knows: facts in, everything else derived.

``StepMetadata`` holds the page table, the lengths and the new-token counts, nothing that could go stale. ``derive()`` is
called at the top of the jitted step and gives positions, destination rows, causal limits and windows. To correct a length
is to replace a fact: ``dataclasses.replace(meta, kv_lens=...)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dsa_jax.arguments import described, expect, is_whole
from dsa_jax.bucket import Bucket
from dsa_jax.layout import FIX_LAYOUT, CacheLayout


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepMetadata:
    """The facts of one step. Contexts come first, then decode requests; unused request places have both lengths 0.

    Attributes:
        page_table: ``int32[R, W]`` raw slots, -1 where there is no page. What lies past a sequence's length is ignored.
        kv_lens: ``int32[R]`` tokens of each sequence after this step, its new tokens included.
        new_lens: ``int32[R]`` tokens that this step adds.
        layout: layout of the cache that the step runs on; every op checks it against the cache it is given.
        bucket: the static sizes.
    """

    page_table: Array
    kv_lens: Array
    new_lens: Array
    layout: CacheLayout = field(metadata={"static": True})
    bucket: Bucket = field(metadata={"static": True})

    @classmethod
    def create(
        cls,
        layout: CacheLayout,
        bucket: Bucket,
        page_tables: Sequence[Sequence[int]] | np.ndarray,
        kv_lens: Sequence[int] | np.ndarray,
        new_lens: Sequence[int] | np.ndarray,
        *,
        slots: int | None = None,
    ) -> StepMetadata:
        """Build and check the facts on the host. Arrays are fresh, so the caller's may be reused at once.

        Args:
            layout: layout of the cache.
            bucket: static sizes; requests are padded up to ``bucket.requests``.
            page_tables: for each request its raw slots. The first ``bucket.context_requests`` entries are contexts
                (pass empty entries to leave places unused), the rest decode requests. An integer array ``[requests,
                columns]`` with -1 behind a request's slots says the same and is quick to read: a host loop that keeps
                one and writes into it when a page is added pays for no list. Slots beyond the bucket's ``table_width`` are
                left out, as long as no length needs them.
            kv_lens: tokens of each request after the step.
            new_lens: tokens that the step adds to each.
            slots: the cache's ``slots``, so that a slot beyond its pools is refused here; a step would drop what is written
                there, and read nothing. None checks only what the facts alone tell.

        Raises:
            ValueError: listing every request that does not fit.
        """
        expect("StepMetadata.create", "layout", layout, CacheLayout, FIX_LAYOUT)
        expect(
            "StepMetadata.create",
            "bucket",
            bucket,
            Bucket,
            "Pass Bucket(table_width=...) with the batch's sizes.",
        )
        bucket.validate()
        count, width = bucket.requests, bucket.table_width
        for name, values in (("page_tables", page_tables), ("kv_lens", kv_lens), ("new_lens", new_lens)):
            if not hasattr(values, "__len__") or (name == "page_tables" and getattr(values, "ndim", 2) != 2):
                raise ValueError(
                    f"StepMetadata.create: {name} is {described(values)}; wanted one entry for each request. "
                    "Pass lists, or arrays of whole numbers."
                )
        if not len(page_tables) == len(kv_lens) == len(new_lens) or len(kv_lens) > count:
            raise ValueError(
                f"StepMetadata.create: {len(page_tables)} page tables, {len(kv_lens)} kv_lens and {len(new_lens)} new_lens; "
                f"wanted the same number of each, at most {count} (the bucket's requests). Use a larger bucket."
            )
        # One array, so that it can travel at once: the page table, then a column of each length.
        facts = np.full((count, width + 2), -1, np.int32)
        table, kv, new = facts[:, :-2], facts[:, -2], facts[:, -1]
        facts[:, -2:] = 0
        kv[: len(kv_lens)] = _int32("kv_lens", kv_lens)
        new[: len(new_lens)] = _int32("new_lens", new_lens)
        # A wider table is fine as long as no length needs the columns that are cut.
        as_array = isinstance(page_tables, np.ndarray)
        if as_array:
            kept = _int32("page_tables", page_tables[:, :width], 2)
            table[: len(kept), : kept.shape[1]] = kept
        else:
            for row, own in enumerate(page_tables):
                if not hasattr(own, "__iter__") or isinstance(own, str | set | frozenset):
                    raise ValueError(
                        f"StepMetadata.create: page table {row} is {described(own)}; wanted the raw slots of a request. "
                        "Pass what grow returned for it."
                    )
                kept = _int32(f"page table {row}", list(own)[:width])
                table[row, : len(kept)] = kept
        _check_facts(table, kv, new, layout, bucket, slots)
        # A program for every bucket pays where the same one comes again and again: in the loops that keep an array.
        arrays = _unpack(facts) if as_array else [jnp.array(part) for part in (table, kv, new)]
        return cls(page_table=arrays[0], kv_lens=arrays[1], new_lens=arrays[2], layout=layout, bucket=bucket)

    def validate(self, slots: int | None = None) -> None:
        """Check the facts on the host (copies them from the device).

        Args:
            slots: as `create` takes it.

        Raises:
            ValueError: listing all problems.
        """
        self.bucket.validate()
        self.check_shapes()
        _check_facts(
            np.asarray(self.page_table),
            np.asarray(self.kv_lens),
            np.asarray(self.new_lens),
            self.layout,
            self.bucket,
            slots,
        )

    def check_shapes(self) -> None:
        """Raise ValueError naming every array that is not of the bucket's shape, or not int32. Looks at no value."""
        count, width = self.bucket.requests, self.bucket.table_width
        problems = []
        for name, wanted in (("page_table", (count, width)), ("kv_lens", (count,)), ("new_lens", (count,))):
            array = getattr(self, name)
            if getattr(array, "shape", None) != wanted or array.dtype != jnp.int32:
                problems.append(f"{name} is {described(array)}, wanted int32{list(wanted)}")
        if problems:
            raise ValueError(
                "StepMetadata: "
                + "; ".join(problems)
                + ". The bucket says R and W: build the facts with StepMetadata.create."
            )

    def derive(self) -> Step:
        """Everything that follows from the facts. Pure jnp, meant for the top of a jitted step."""
        self.check_shapes()
        bucket, page_size = self.bucket, self.layout.page_size
        kv_lens = jnp.maximum(self.kv_lens, 0)
        new_lens = jnp.maximum(self.new_lens, 0)
        page = jnp.arange(bucket.table_width, dtype=jnp.int32)
        held = page[None, :] * page_size < kv_lens[:, None]
        table = jnp.where(held, jnp.maximum(self.page_table, -1), -1)

        requests, ordinal = _token_places(bucket, new_lens)
        real = requests >= 0
        request = jnp.maximum(requests, 0)
        positions = (
            jnp.where(real, kv_lens[request] - new_lens[request] + ordinal, -1)
            if bucket.requests
            else requests
        )
        positions = jnp.maximum(positions, -1)

        context_lens = kv_lens[: bucket.context_requests]
        ends = jnp.cumsum(context_lens, dtype=jnp.int32)
        starts = ends - context_lens
        in_context = jnp.arange(bucket.tokens, dtype=jnp.int32) < bucket.context_tokens
        if bucket.context_requests:
            start = starts[jnp.minimum(request, bucket.context_requests - 1)]
            key_starts = jnp.where(in_context & (positions >= 0), start, 0)
        else:
            key_starts = jnp.zeros_like(positions)
        key_ends = jnp.where(in_context & (positions >= 0), key_starts + positions + 1, key_starts)

        return Step(
            page_table=table,
            kv_lens=kv_lens,
            new_lens=new_lens,
            requests=requests,
            positions=positions,
            limits=positions + 1,
            rows=rows_of(table, requests, positions, page_size),
            key_starts=key_starts,
            key_ends=key_ends,
            gather_rows=_gather_rows(table[: bucket.context_requests], ends, bucket, page_size),
            layout=self.layout,
            bucket=bucket,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Step:
    """What ``StepMetadata.derive`` gives. It lives inside a jitted step only: never stored, never returned.

    Attributes:
        page_table: ``int32[R, W]`` raw slots, -1 at and beyond the sequence's last page.
        kv_lens, new_lens: ``int32[R]``, not negative.
        requests: ``int32[N]`` request of each token place, -1 for padding.
        positions: ``int32[N]`` position in its sequence, -1 for padding.
        limits: ``int32[N]`` keys that a token may see, ``positions + 1``; 0 for padding.
        rows: ``int32[N]`` destination ``slot * T + offset`` of each new token, -1 where nothing is written.
        key_starts, key_ends: ``int32[N]`` window of a context token in the gathered keys; empty for all others.
        gather_rows: ``int32[gathered_keys]`` rows of the contexts' whole key history, request after request, then -1.
        layout, bucket: static, as in the metadata.
    """

    page_table: Array
    kv_lens: Array
    new_lens: Array
    requests: Array
    positions: Array
    limits: Array
    rows: Array
    key_starts: Array
    key_ends: Array
    gather_rows: Array
    layout: CacheLayout = field(metadata={"static": True})
    bucket: Bucket = field(metadata={"static": True})

    def context_part(self) -> Step:
        """The step of the context tokens alone: ``N = context_tokens``, ``R = context_requests``."""
        bucket = replace(self.bucket, decode_requests=0)
        return self._part(slice(0, bucket.requests), slice(0, bucket.tokens), bucket)

    def decode_part(self) -> Step:
        """The step of the decode requests alone, their tokens on a grid ``[decode_requests, next_n]``."""
        bucket = replace(self.bucket, context_requests=0, context_tokens=0, gathered_keys=0)
        first, start = self.bucket.context_requests, self.bucket.context_tokens
        return self._part(slice(first, None), slice(start, None), bucket)

    def context_chunk(self, start: Array | int, size: int) -> Step:
        """``size`` consecutive token places of a step without decode requests; ``start`` may be traced."""
        if self.bucket.decode_requests:
            raise ValueError("Step.context_chunk: the step has decode requests; call context_part() first.")
        _check_chunk("context_chunk", start, size, self.bucket.context_tokens, "token places")
        tokens = {n: lax.dynamic_slice_in_dim(getattr(self, n), start, size) for n in _TOKEN_FIELDS}
        return replace(self, **tokens, bucket=replace(self.bucket, context_tokens=size))

    def decode_chunk(self, start: Array | int, size: int) -> Step:
        """``size`` consecutive requests of a step without contexts; ``start`` may be traced."""
        if self.bucket.context_requests:
            raise ValueError("Step.decode_chunk: the step has contexts; call decode_part() first.")
        _check_chunk("decode_chunk", start, size, self.bucket.decode_requests, "requests")
        n = self.bucket.next_n
        tokens = {f: lax.dynamic_slice_in_dim(getattr(self, f), start * n, size * n) for f in _TOKEN_FIELDS}
        requests = {f: lax.dynamic_slice_in_dim(getattr(self, f), start, size) for f in _REQUEST_FIELDS}
        number = tokens["requests"]
        tokens["requests"] = jnp.where(number >= 0, number - start, -1)
        return replace(self, **tokens, **requests, bucket=replace(self.bucket, decode_requests=size))

    def _part(self, requests: slice, tokens: slice, bucket: Bucket) -> Step:
        per_token = {n: getattr(self, n)[tokens] for n in _TOKEN_FIELDS}
        per_request = {n: getattr(self, n)[requests] for n in _REQUEST_FIELDS}
        number = per_token["requests"]
        per_token["requests"] = jnp.where(number >= 0, number - (requests.start or 0), -1)
        gather_rows = self.gather_rows[: bucket.gathered_keys]
        return replace(self, **per_token, **per_request, gather_rows=gather_rows, bucket=bucket)


_TOKEN_FIELDS = ("requests", "positions", "limits", "rows", "key_starts", "key_ends")
_REQUEST_FIELDS = ("page_table", "kv_lens", "new_lens")


def _check_chunk(name: str, start: Any, size: Any, count: int, unit: str) -> None:
    """A known start beyond the step would be moved into it in silence, as a slice's is."""
    known = is_whole(start)
    fits = is_whole(size) and 0 <= size <= count and (not known or 0 <= start <= count - size)
    if not fits:
        raise ValueError(
            f"Step.{name}: start is {described(start)} and size {described(size)}; the step has {count} {unit}. Ask for a "
            "part of them."
        )


def rows_of(table: Array, requests: Array, positions: Array, page_size: int) -> Array:
    """Cache row of a position of a request: ``table[request, position // T] * T + position % T``.

    -1 where the position is negative, its column lies beyond the table, the request lies outside it, or the table has no
    page there. Nothing wraps and nothing is clamped into another request's pages.

    Args:
        table: ``int32[R, W]`` raw slots.
        requests: ``int32[...]``.
        positions: ``int32[...]``, broadcast with ``requests``.
        page_size: T.

    Returns:
        ``int32`` rows.
    """
    count, width = table.shape
    if not count:
        return jnp.full_like(positions, -1)
    column = positions // page_size
    inside = (positions >= 0) & (column < width) & (requests >= 0) & (requests < count)
    slot = table[jnp.clip(requests, 0, count - 1), jnp.clip(column, 0, width - 1)]
    return jnp.where(inside & (slot >= 0), slot * page_size + positions % page_size, -1)


def _token_places(bucket: Bucket, new_lens: Array) -> tuple[Array, Array]:
    """Request of each token place (-1 for padding) and the token's number among its request's new tokens."""
    contexts = bucket.context_requests
    place = jnp.arange(bucket.context_tokens, dtype=jnp.int32)
    ends = jnp.cumsum(new_lens[:contexts], dtype=jnp.int32)
    # Compared with all ends at once: the default searchsorted is a loop, and empty requests are skipped naturally.
    request = jnp.sum((place[:, None] >= ends[None, :]).astype(jnp.int32), axis=1, dtype=jnp.int32)
    if contexts:
        start = (ends - new_lens[:contexts])[jnp.minimum(request, contexts - 1)]
        context = jnp.where(request < contexts, request, -1), place - start
    else:
        context = jnp.full_like(place, -1), place

    ordinal = jnp.arange(bucket.next_n, dtype=jnp.int32)[None, :]
    number = jnp.arange(contexts, bucket.requests, dtype=jnp.int32)[:, None]
    used = ordinal < new_lens[contexts:, None]
    decode = jnp.where(used, number, -1), jnp.broadcast_to(ordinal, used.shape)
    return (
        jnp.concatenate([context[0], decode[0].reshape(-1)]),
        jnp.concatenate([context[1], decode[1].reshape(-1)]),
    )


def _gather_rows(table: Array, ends: Array, bucket: Bucket, page_size: int) -> Array:
    """Rows of the contexts' keys, packed: key g belongs to the first request whose cumulative length exceeds g."""
    key = jnp.arange(bucket.gathered_keys, dtype=jnp.int32)
    contexts = bucket.context_requests
    if not contexts or not bucket.gathered_keys:
        return jnp.full_like(key, -1)
    request = jnp.sum((key[:, None] >= ends[None, :]).astype(jnp.int32), axis=1, dtype=jnp.int32)
    start = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])[jnp.minimum(request, contexts)]
    return rows_of(table, request, key - start, page_size)


@jax.jit
def _unpack(facts: Array) -> tuple[Array, Array, Array]:
    """Page table and lengths of an array that travelled to the device as one."""
    return facts[:, :-2], facts[:, -2], facts[:, -1]


def _check_facts(
    table, kv_lens, new_lens, layout: CacheLayout, bucket: Bucket, slots: int | None = None
) -> None:
    """Raise ValueError listing every request that makes no sense. Whole arrays first: a step that is right costs no loop."""
    contexts, page_size = bucket.context_requests, layout.page_size
    if slots is not None and not (is_whole(slots) and slots >= 1):
        raise ValueError(
            f"StepMetadata: slots is {described(slots)}; wanted the cache's number of slots, at least 1. Pass cache.slots."
        )
    countable = (2**31 - 1) // page_size
    most = countable if slots is None else min(countable, slots - 1)
    held = np.arange(table.shape[1], dtype=np.int64)[None, :] * page_size < kv_lens[:, None]
    gaps = (held & (table < 0)).any(axis=1)
    far = (held & (table > most)).any(axis=1)
    wrong = (new_lens < 0) | (new_lens > kv_lens) | gaps | far | (kv_lens > table.shape[1] * page_size)
    wrong[contexts:] |= new_lens[contexts:] > bucket.next_n
    problems = []
    for r in np.flatnonzero(wrong).tolist():
        kv, new = int(kv_lens[r]), int(new_lens[r])
        if kv < 0 or new < 0 or new > kv:
            problems.append(f"request {r} has kv_len {kv} and new_len {new}; wanted 0 <= new_len <= kv_len")
            continue
        pages = -(-kv // page_size)
        if pages > bucket.table_width:
            problems.append(
                f"request {r} of {kv} tokens needs {pages} pages, the table is {bucket.table_width} wide"
            )
        elif gaps[r]:
            problems.append(f"request {r} of {kv} tokens needs {pages} pages, its table has a gap")
        elif far[r]:
            why = "whose cache rows int32 cannot count" if most == countable else "beyond the pools"
            problems.append(
                f"request {r} has slot {int(table[r][held[r]].max())}, {why}; wanted at most {most} with pages of "
                f"{page_size} tokens"
            )
        if r >= contexts and new > bucket.next_n:
            problems.append(f"decode request {r} adds {new} tokens, next_n is {bucket.next_n}")
    problems += _shared_writes(table, held, kv_lens, new_lens, page_size)
    added = int(new_lens[:contexts].sum())
    if added > bucket.context_tokens:
        problems.append(f"the contexts add {added} tokens, the bucket has {bucket.context_tokens} places")
    keys = int(kv_lens[:contexts].sum())
    if bucket.gathered_keys and keys > bucket.gathered_keys:
        problems.append(f"the contexts hold {keys} keys, gathered_keys is {bucket.gathered_keys}")
    if problems:
        raise ValueError(
            "StepMetadata: "
            + "; ".join(problems)
            + ". Use a larger bucket, or split the step into smaller ones."
        )


def _shared_writes(table, held, kv_lens, new_lens, page_size: int) -> list[str]:
    """Pages may be shared, but a page that receives a token must be one request's alone, once."""
    held = held & (table >= 0)
    ends = (np.arange(table.shape[1], dtype=np.int64)[None, :] + 1) * page_size
    written = held & (ends > np.where(new_lens > 0, kv_lens - new_lens, 2**31 - 1)[:, None])
    slots = table[written]
    if _held_once(table, held, slots):
        return []
    request, place = np.nonzero(held & np.isin(table, slots))
    slots, first, counts = np.unique(table[request, place], return_index=True, return_counts=True)
    problems = []
    for slot, r, count in zip(slots.tolist(), request[first].tolist(), counts.tolist(), strict=True):
        if count > 1:
            others = sorted(set(request[table[request, place] == slot].tolist()))
            problems.append(
                f"slot {slot} receives tokens but is held {count} times, by request{'s' * (len(others) > 1)} "
                f"{', '.join(map(str, others or [r]))}; a page that is written belongs to one request, once"
            )
    return problems


def _held_once(table, held, slots) -> bool:
    """Whether each of ``slots`` is held in one place: a look-up instead of a sort. False also where that cannot be told."""
    if not slots.size:
        return True
    end = int(slots.max()) + 1
    if end > _MOST_SLOTS:
        return False
    marked = np.zeros(end + 1, bool)
    marked[slots] = True  # all larger slots are cut to ``end``, which is not marked
    places = np.count_nonzero(np.take(marked, table, mode="clip") & held)
    return places == slots.size == np.count_nonzero(marked)


_MOST_SLOTS = 2**24
"""Slots up to which a look-up table is made."""


def _int32(name: str, values, ndim: int = 1) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != ndim:
        raise ValueError(
            f"StepMetadata.create: {name} is {list(values)!r:.80}; wanted one whole number in each place. Pass a flat list."
        )
    if array.dtype == np.int32:
        return array
    if array.size and (array.dtype.kind not in "iu" or array.min() < -(2**31) or array.max() >= 2**31):
        raise ValueError(
            f"StepMetadata.create: {name} is {list(values)!r:.80}; wanted whole numbers that fit int32. "
            "Pass lengths and slots as integers."
        )
    return array.astype(np.int32)
