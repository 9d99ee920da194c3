"""Whole decode loops inside one program: no token and no length leaves the device until the end.

Both loops take the model as functions and the batch as a value, and return a value: the old one can be continued again
(branching), as long as its cache was not donated. Pages are reserved ahead for every token that a loop may write; a request
whose pages end early (a -1 in its table) pauses there, live, and writes on in another loop once it has more. To know before:
``replace(meta, kv_lens=meta.kv_lens + count).validate(cache.slots)`` names every request that lacks one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from dsa_jax.arguments import FLOATS, described, expect, is_whole, misfit, returned
from dsa_jax.cache import Cache
from dsa_jax.draft import advance, draft_metadata, rewind
from dsa_jax.metadata import StepMetadata
from dsa_jax.sampling import Sampling

Step = Callable[[Any, Cache, StepMetadata, Array], tuple[Cache, Array, Array]]
"""``(params, cache, metadata, tokens) -> (cache, logits, hidden)`` of the main model."""
Draft = Callable[..., tuple[Cache, Array, Array, Array]]
"""``(params, cache, metadata, tokens, hidden, rows=None) -> (cache, logits, hidden, rows)`` of the prediction layer."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Batch:
    """Requests in the middle of their text.

    Attributes:
        last: ``int32[R]`` newest token of each request, not yet in the cache.
        meta: decode metadata of the step that came before: ``kv_lens`` are the tokens in the cache.
        live: ``bool[R]``; the others are left alone.
    """

    last: Array
    meta: StepMetadata
    live: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DraftBatch:
    """Requests in the middle of their text, with what a prediction layer has not seen yet.

    Attributes:
        meta: decode metadata of the step that came before, rewound: ``kv_lens`` are the tokens in the target's cache,
            ``new_lens`` those of them that the draft cache has not seen (at least 1).
        following: ``int32[R, n]`` the token after each of these, the newest token last; anything beyond ``new_lens``.
        hidden: ``[R, n, width]`` the main model's state at each of these.
        live: ``bool[R]``; the others are left alone.
    """

    meta: StepMetadata
    following: Array
    hidden: Array
    live: Array

    @classmethod
    def create(cls, meta: StepMetadata, last: Array, hidden: Array, live: Array) -> DraftBatch:
        """From the newest token of each request and the main model's state at the token before it.

        Args:
            meta: decode metadata with ``kv_lens`` tokens in both caches, less one in the draft cache.
            last: ``int32[R]``.
            hidden: ``[R, width]``.
            live: ``bool[R]``.

        Raises:
            ValueError: naming every argument of another shape or dtype.
        """
        expect("DraftBatch.create", "meta", meta, StepMetadata, "Pass what StepMetadata.create returned.")
        r = meta.bucket.requests
        problems = misfit("last", last, (r,), ("int32",), f"int32[{r}]")
        problems += misfit("hidden", hidden, (r, None), FLOATS, f"float[{r}, width]")
        problems += misfit("live", live, (r,), ("bool",), f"bool[{r}]")
        if problems:
            raise ValueError(
                "DraftBatch.create: "
                + "; ".join(problems)
                + ". Pass one entry for each request of the bucket."
            )
        more = meta.bucket.next_n - 1
        return cls(
            meta=replace(meta, new_lens=jnp.ones_like(meta.kv_lens)),
            following=jnp.pad(last[:, None], ((0, 0), (0, more))),
            hidden=jnp.pad(hidden[:, None], ((0, 0), (0, more), (0, 0))),
            live=live,
        )

    @property
    def last(self) -> Array:
        """``int32[R]`` newest token of each request, not yet in the target's cache."""
        return _at(self.following, self.meta.new_lens - 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Written:
    """What a loop wrote.

    Attributes:
        tokens: ``int32[R, count]`` new tokens, -1 after a request's end.
        counts: ``int32[R]`` new tokens of each request.
        turns: ``int32`` scalar, model steps of the loop.
        accepted: ``int32[R]`` draft tokens that were kept; 0 without drafts.
        drafted: ``int32[R]`` draft tokens that were verified.
    """

    tokens: Array
    counts: Array
    turns: Array
    accepted: Array
    drafted: Array


def decode_loop(
    step: Step, params: Any, cache: Cache, batch: Batch, count: int, sampling: Sampling
) -> tuple[Cache, Batch, Written]:
    """Write ``count`` tokens for every live request, one model step each, with a fixed trip count.

    Args:
        step: the main model.
        params: its weights.
        cache: holds ``batch.meta.kv_lens`` tokens of each request, with pages for ``count`` more; with fewer a request
            pauses where they end.
        batch: where the requests stand; its bucket has decode requests only. Of ``next_n`` token places of a request all
            but the first stay empty: more than one make the products of this loop as wide as those of a verification, so
            that both round alike.
        count: static number of tokens.
        sampling: how to draw.

    Returns:
        Cache and batch after the last token, and the tokens.

    Raises:
        ValueError: for another kind of bucket, arrays that are not for its requests, a count below 1 or more than a page
            table holds, or an argument of another class.
    """
    _check_classes("decode_loop", {"step": step}, batch, Batch, sampling)
    expect("decode_loop", "cache", cache, Cache, _FIX_CACHE)
    places, requests = batch.meta.bucket.next_n, batch.meta.bucket.requests
    problems = misfit("batch.last", batch.last, (requests,), ("int32",), f"int32[{requests}]")
    _check("decode_loop", batch, problems, count, next_n=places)

    held = _tokens_held(batch.meta.page_table, batch.meta.kv_lens, batch.meta.layout.page_size)

    def turn(i, state):
        cache, batch, written = state
        going = batch.live & (batch.meta.kv_lens < held)
        meta = advance(batch.meta, going.astype(jnp.int32))
        tokens = jnp.pad(batch.last[:, None], ((0, 0), (0, places - 1))).reshape(-1)
        cache, logits, _ = _result("decode_loop", "step", step(params, cache, meta, tokens), tokens, cache)
        token, _ = sampling.draw(logits.reshape(requests, places, -1)[:, 0], meta.kv_lens)
        written = written.at[:, i].set(jnp.where(going, token, -1))
        last = jnp.where(going, token, batch.last)
        return cache, Batch(last=last, meta=meta, live=batch.live & ~(going & sampling.stops(token))), written

    start = (cache, batch, jnp.full((requests, count), -1, jnp.int32))
    cache, batch, tokens = lax.fori_loop(0, count, turn, start)
    zero = jnp.zeros((requests,), jnp.int32)
    counts = jnp.sum(tokens >= 0, axis=1, dtype=jnp.int32)
    return (
        cache,
        batch,
        Written(tokens=tokens, counts=counts, turns=jnp.int32(count), accepted=zero, drafted=zero),
    )


def speculative_loop(
    step: Step,
    draft: Draft,
    params: Any,
    caches: tuple[Cache, Cache],
    batch: DraftBatch,
    draft_table: Array,
    count: int,
    sampling: Sampling,
    *,
    share_selection: bool = False,
    turns: int | None = None,
) -> tuple[tuple[Cache, Cache], DraftBatch, Written]:
    """Write ``count`` tokens for every live request, several a model step where drafts are accepted.

    A turn runs the prediction layer over the tokens it has not seen, which gives the first draft token, and then over its
    own drafts; one step of the main model verifies them all, with a limit of its own for each; what is not accepted is
    rewound by lengths. The output is distributed as ``decode_loop``'s, and at temperature 0 it is the same tokens up to the
    rounding of differently shaped products.

    Args:
        step: the main model.
        draft: the prediction layer.
        params: weights of both.
        caches: target and draft cache, with pages for ``count`` tokens and one turn more. A request pauses where pages
            of the target end; missing pages of the draft cache only make its drafts worse.
        batch: where the requests stand; a turn drafts one token less than its bucket's ``next_n``.
        draft_table: ``int32[R, W_draft]`` page table of the draft cache.
        count: static number of tokens.
        sampling: how to draw; drafts are drawn by the same rule.
        share_selection: later draft tokens attend to the selection of the first (GLM-5.2).
        turns: static number of model steps; None for as many as it takes, which is a ``while`` whose predicate the host
            reads before every turn. With a fixed number no predicate is read; turns after the last request has ended
            change nothing, and requests may be left with fewer than ``count`` tokens, still live.

    Returns:
        Caches and batch after the last kept token, and the tokens. A request ends at ``count`` tokens or a stop token; what
        a turn gave beyond is dropped, and the batch stands where the output ends.

    Raises:
        ValueError: for another kind of bucket, arrays that are not for its requests, fewer than two token places, a count
            or number of turns below 1, a count of more than a page table holds, or an argument of another class.
    """
    _check_classes("speculative_loop", {"step": step, "draft": draft}, batch, DraftBatch, sampling)
    if (
        not isinstance(caches, tuple | list)
        or len(caches) != 2
        or not all(isinstance(c, Cache) for c in caches)
    ):
        raise ValueError(
            f"speculative_loop: caches is {_listed(caches)}, wanted the pair (target cache, draft cache). {_FIX_CACHE}"
        )
    caches = (caches[0], caches[1])
    places, requests = batch.meta.bucket.next_n, batch.meta.bucket.requests
    r, drafts = requests, places - 1
    problems = misfit("batch.following", batch.following, (r, places), ("int32",), f"int32[{r}, {places}]")
    problems += misfit(
        "batch.hidden", batch.hidden, (r, places, None), FLOATS, f"float[{r}, {places}, width]"
    )
    found = misfit("draft_table", draft_table, (r, None), ("int32",), f"int32[{r}, W_draft]")
    if not found and is_whole(count):
        found = _room_problems("draft_table", draft_table.shape[1], caches[1].layout.page_size, count)
    if not isinstance(share_selection, bool):
        found.append(f"share_selection is {described(share_selection)}, wanted True or False")
    _check("speculative_loop", batch, problems + found, count, next_n=max(places, 2), turns=turns)
    held = _tokens_held(batch.meta.page_table, batch.meta.kv_lens, batch.meta.layout.page_size)
    place = jnp.arange(places, dtype=jnp.int32)[None, :]
    request = jnp.arange(requests, dtype=jnp.int32)[:, None]

    def propose(cache: Cache, batch: DraftBatch) -> tuple[Cache, Array, Array | None]:
        """Draft tokens ``int32[R, drafts]`` and the probabilities that they were drawn from, if they were drawn."""
        live = batch.live.astype(jnp.int32)
        meta = draft_metadata(batch.meta, cache.layout, draft_table, batch.meta.new_lens * live)
        newest = jnp.maximum(batch.meta.new_lens - 1, 0)
        flat = batch.hidden.reshape(requests * places, -1)
        following = batch.following.reshape(-1)
        drafted = draft(params, cache, meta, following, flat, None)
        cache, logits, states, rows = _result("speculative_loop", "draft", drafted, following, cache)
        logits, state, rows = (_at(x.reshape(requests, places, -1), newest) for x in (logits, states, rows))
        tokens, given = [], []
        for number in range(drafts):
            if number:
                meta = advance(meta, live, next_n=1)
                reused = rows if share_selection else None
                drafted = draft(params, cache, meta, tokens[-1], state, reused)
                cache, logits, state, _ = _result("speculative_loop", "draft", drafted, tokens[-1], cache)
            token, p = sampling.draw(logits, meta.kv_lens, stream=1 + number)
            tokens.append(token)
            given.append(p)
        drawn = None if given[0] is None else jnp.stack(given, axis=1)
        return cache, jnp.stack(tokens, axis=1), drawn

    def going(batch: DraftBatch) -> Array:
        return batch.live & (batch.meta.kv_lens < held)

    def turn(state):
        (cache, draft_cache), batch, written = state
        before, batch = batch.live, replace(batch, live=going(batch))
        draft_cache, proposed, given = propose(draft_cache, batch)
        live = batch.live.astype(jnp.int32)
        meta = advance(batch.meta, live * places)
        tokens = jnp.concatenate([batch.last[:, None], proposed], axis=1)
        stepped = step(params, cache, meta, tokens.reshape(-1))
        cache, logits, hidden = _result("speculative_loop", "step", stepped, tokens.reshape(-1), cache)
        _check_states(hidden, batch.hidden)
        logits = logits.reshape(requests, places, -1)
        accepted, token = sampling.accept(logits, meta.kv_lens, proposed, given)

        # The accepted drafts, then the target's own token; cut at the count, after a stop token, and where pages end: a
        # token that has none was not written, so what follows it is not known.
        output = jnp.where(place < accepted[:, None], jnp.pad(proposed, ((0, 0), (0, 1))), token[:, None])
        stops = sampling.stops(output).astype(jnp.int32)
        ended = jnp.cumsum(stops, axis=1, dtype=jnp.int32) > stops
        room = jnp.minimum(count - written.counts, held - batch.meta.kv_lens)[:, None]
        kept = batch.live[:, None] & (place <= accepted[:, None]) & (place < room) & ~ended
        number = jnp.sum(kept, axis=1, dtype=jnp.int32)
        column = jnp.where(kept, written.counts[:, None] + place, count)
        counts = written.counts + number
        written = Written(
            tokens=written.tokens.at[request, column].set(output, mode="drop"),
            counts=counts,
            turns=written.turns + 1,
            accepted=written.accepted + jnp.minimum(accepted, number) * live,
            drafted=written.drafted + drafts * live,
        )
        # The cache keeps the token that the turn began with and all of the output but its last token.
        meta = rewind(meta, number)
        alive = batch.live[:, None]
        batch = DraftBatch(
            meta=replace(meta, new_lens=jnp.where(batch.live, number, batch.meta.new_lens)),
            following=jnp.where(alive, output, batch.following),
            hidden=jnp.where(alive[:, :, None], hidden.reshape(batch.hidden.shape), batch.hidden),
            live=before & ~jnp.any(kept & (stops > 0), axis=1) & (counts < count),
        )
        return (cache, draft_cache), batch, written

    zero = jnp.zeros((requests,), jnp.int32)
    empty = jnp.full((requests, count), -1, jnp.int32)
    written = Written(tokens=empty, counts=zero, turns=jnp.int32(0), accepted=zero, drafted=zero)
    start = (caches, batch, written)
    if turns is not None:
        return lax.fori_loop(0, turns, lambda _, state: turn(state), start)
    return lax.while_loop(lambda state: jnp.any(going(state[1])), turn, start)


def _tokens_held(table: Array, kv_lens: Array, page_size: int) -> Array:
    """``int32[R]``: tokens of each request, from those that it has on, up to the first page that is missing."""
    column = jnp.arange(table.shape[1], dtype=jnp.int32)[None, :]
    missing = (table < 0) & (column >= (kv_lens // page_size)[:, None])
    return jnp.min(jnp.where(missing, column, table.shape[1]), axis=1) * page_size


def _at(array: Array, index: Array) -> Array:
    """Entry ``index[r]`` of row r: ``[R, n, ...]`` and ``int32[R]`` to ``[R, ...]``."""
    index = index.reshape(index.shape + (1,) * (array.ndim - 1))
    return jnp.take_along_axis(array, index, axis=1)[:, 0]


_FIX_CACHE = "Pass what Cache.create(layout, slots) or another loop returned."


_PARTS = {"step": ("cache", "logits", "hidden"), "draft": ("cache", "logits", "hidden", "rows")}


def _result(operation: str, name: str, result: Any, tokens: Array, cache: Cache) -> Any:
    """What a step or a draft returned, if it has every part, with a row for each token place; ValueError otherwise."""
    wanted = _PARTS[name]
    fix = "Pass what make_speculative returned, or one of the same results."
    result = returned(operation, name, result, wanted, fix)
    after = result[0]
    if not isinstance(after, Cache) or after.layout != cache.layout:
        came = f"{described(after)}{' of another layout' * isinstance(after, Cache)}"
        raise ValueError(
            f"{operation}: {name} returned {came}, wanted the cache that it was given, with the new tokens. {fix}"
        )
    problems = [
        f"{part} {described(value)}, wanted {tokens.shape[0]} rows"
        for part, value in zip(wanted[1:], result[1:], strict=True)
        if len(getattr(value, "shape", ())) < 2 or value.shape[0] != tokens.shape[0]
    ]
    if problems:
        raise ValueError(
            f"{operation}: {name} returned {'; '.join(problems)}. Return a row for each of the tokens that it is given."
        )
    return result


def _check_states(hidden: Array, held: Array) -> None:
    """Raise ValueError where the main model's states cannot take the place of those that the batch holds."""
    if hidden.shape[1:] != held.shape[2:] or hidden.dtype != held.dtype:
        raise ValueError(
            f"speculative_loop: batch.hidden is {described(held)}, and step returned hidden {described(hidden)}, wanted "
            "states of one width and dtype. Begin the batch with what the same step returned."
        )


def _listed(caches: Any) -> str:
    if not isinstance(caches, tuple | list):
        return described(caches)
    return "(" + ", ".join(map(described, caches)) + ")"


def _check_classes(
    operation: str, functions: dict[str, Any], batch: Any, batch_class: type, sampling: Any
) -> None:
    """Raise ValueError for arguments that a loop could not even look into."""
    for name, function in functions.items():
        if not callable(function):
            raise ValueError(
                f"{operation}: {name} is {described(function)}, wanted a function. Pass what make_speculative "
                "returned, or one of the same arguments."
            )
    fix = (
        ".create(meta, last, hidden, live)" if batch_class is DraftBatch else "(last=..., meta=..., live=...)"
    )
    expect(operation, "batch", batch, batch_class, f"Pass {batch_class.__name__}{fix}.")
    expect(operation, "sampling", sampling, Sampling, "Pass Sampling.create(), which takes the best token.")
    expect(operation, "batch.meta", batch.meta, StepMetadata, "Pass what StepMetadata.create returned.")
    batch.meta.check_shapes()


def _room_problems(table: str, width: int, page_size: int, count: int) -> list[str]:
    """Even sequences that begin empty cannot hold more tokens than their page table has room for."""
    if count <= width * page_size:
        return []
    return [
        f"count is {count}, wanted at most {width * page_size}: {table} has {width} pages of {page_size} tokens"
    ]


def _check(
    operation: str,
    batch: Batch | DraftBatch,
    problems: list[str],
    count: int,
    next_n: int,
    turns: int | None = None,
) -> None:
    """Raise ValueError naming ``problems`` and what is wrong with the bucket and the numbers."""
    bucket, found = batch.meta.bucket, []
    if bucket.context_requests or not bucket.decode_requests:
        found.append(
            f"the bucket has {bucket.context_requests} contexts and {bucket.decode_requests} decode requests, wanted decode "
            "requests alone"
        )
    if bucket.next_n != next_n:
        found.append(f"the bucket's next_n is {bucket.next_n}, wanted {next_n}")
    if not is_whole(count):
        found.append(f"count is {described(count)}, wanted a Python int of at least 1")
    elif count < 1:
        found.append(f"count is {count}, wanted at least 1")
    else:
        found += _room_problems("the page table", bucket.table_width, batch.meta.layout.page_size, count)
    if turns is not None and not (is_whole(turns) and turns >= 1):
        found.append(f"turns is {described(turns)}, wanted at least 1, or None for as many as it takes")
    found += misfit("batch.live", batch.live, (bucket.requests,), ("bool",), f"bool[{bucket.requests}]")
    if found + problems:
        raise ValueError(
            f"{operation}: "
            + "; ".join(found + problems)
            + ". Prefill first, then loop over decode requests, with one entry of each array a request."
        )
