"""Who owns which page slot, as an immutable value.

Every function takes a state and returns a new one; a state that was kept stays valid, so a scheduler can try a plan and
drop it. The same calls give the same slots on every process: freed slots are reused last in, first out, then fresh slots
in ascending order.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from rpds import (
    HashTrieMap,
    Stack,  # pyright: ignore[reportAttributeAccessIssue]  # missing in the stubs only
)

from dsa_jax.arguments import described, expect, is_whole


class OutOfPages(ValueError):
    """The pool has fewer free slots than asked for. Nothing was allocated."""


@dataclass(frozen=True, kw_only=True)
class PagePoolState:
    """Slots of one pool group. Make one with ``create``.

    Attributes:
        slots: physical slots of the pools.
        page_size: tokens per page.
        fresh: lowest slot that was never handed out.
        freed: slots given back, the latest first.
        owned: request -> its slots in sequence order.
        references: slot -> number of requests that hold it, for slots in use.
    """

    slots: int
    page_size: int
    fresh: int
    freed: Stack
    owned: HashTrieMap
    references: HashTrieMap

    @classmethod
    def create(cls, slots: int, page_size: int) -> PagePoolState:
        """A pool with every slot free.

        Raises:
            ValueError: for fewer than one slot or one token per page.

        >>> state = PagePoolState.create(slots=4, page_size=64)
        >>> state, slots = grow(state, "a", tokens=100)
        >>> slots, state.free_slots
        ((0, 1), 2)
        """
        if not is_whole(slots) or not is_whole(page_size) or slots < 1 or page_size < 1:
            raise ValueError(
                f"PagePoolState.create: slots is {described(slots)} and page_size {described(page_size)}; wanted at "
                "least 1 of each. Give the pool at least one page."
            )
        return cls(
            slots=int(slots),
            page_size=int(page_size),
            fresh=0,
            freed=Stack(),
            owned=HashTrieMap(),
            references=HashTrieMap(),
        )

    @property
    def free_slots(self) -> int:
        """Slots that can still be handed out."""
        return self.slots - len(self.references)

    def pages(self, request: Hashable) -> tuple[int, ...]:
        """Slots of a request in sequence order; empty for a request that holds none."""
        return self.owned.get(request, ())

    def pages_for(self, tokens: int) -> int:
        """Pages that hold ``tokens`` tokens of one sequence."""
        return -(-int(tokens) // self.page_size)


def grow(state: PagePoolState, request: Hashable, tokens: int) -> tuple[PagePoolState, tuple[int, ...]]:
    """Give a request the pages for ``tokens`` tokens in all; pages that it has are kept.

    Args:
        state: the pool.
        request: any hashable name; a new one starts a sequence.
        tokens: length that the sequence must be able to hold.

    Returns:
        The new state and all slots of the request.

    Raises:
        ValueError: for a negative length.
        OutOfPages: when the pool has too few free slots; the state that was passed in is still good.
    """
    _check("grow", state, request=request)
    if not is_whole(tokens) or tokens < 0:
        raise ValueError(
            f"grow: tokens is {described(tokens)}; wanted at least 0, a whole number. Pass the whole length of the sequence."
        )
    held = state.pages(request)
    missing = state.pages_for(tokens) - len(held)
    if missing <= 0 and held:
        return state, held  # the usual answer in a decode step
    if missing > state.free_slots:
        raise OutOfPages(
            f"grow: request {request!r} needs {missing} more pages for {tokens} tokens (page_size {state.page_size}); "
            f"{state.free_slots} of {state.slots} are free. Free a request, or build the pool with more slots."
        )
    fresh, freed, references, taken = state.fresh, state.freed, state.references, []
    for _ in range(max(0, missing)):
        if freed:
            slot, freed = freed.peek(), freed.pop()
        else:
            slot, fresh = fresh, fresh + 1
        references = references.insert(slot, 1)
        taken.append(slot)
    slots = held + tuple(taken)
    owned = state.owned.insert(request, slots)
    return replace(state, fresh=fresh, freed=freed, references=references, owned=owned), slots


def fork(
    state: PagePoolState, source: Hashable, request: Hashable, tokens: int
) -> tuple[PagePoolState, tuple[int, ...]]:
    """Start a request on the pages that hold the first ``tokens`` tokens of another one.

    Only whole pages can be shared, because a shared page is never written again: ``tokens`` must be a multiple of the page
    size.

    Returns:
        The new state and the shared slots.

    Raises:
        ValueError: if the request exists already, the source has no such pages, or ``tokens`` cuts a page.
    """
    _check("fork", state, source=source, request=request)
    if not is_whole(tokens):
        raise ValueError(
            f"fork: tokens is {described(tokens)}; wanted a whole number. Pass the tokens to share."
        )
    tokens = int(tokens)
    problems = []
    if request in state.owned:
        problems.append(f"request {request!r} already holds {len(state.pages(request))} pages")
    if tokens < 0 or tokens % state.page_size:
        problems.append(f"tokens is {tokens}, not a multiple of the page size {state.page_size}")
    count = state.pages_for(max(tokens, 0))
    if count > len(state.pages(source)):
        problems.append(f"source {source!r} holds {len(state.pages(source))} pages, {count} are wanted")
    if problems:
        raise ValueError(
            "fork: " + "; ".join(problems) + ". Share whole pages of a live request under a new name."
        )
    shared = state.pages(source)[:count]
    references = state.references
    for slot in shared:
        references = references.insert(slot, references[slot] + 1)
    return replace(state, references=references, owned=state.owned.insert(request, shared)), shared


def shrink(state: PagePoolState, request: Hashable, tokens: int) -> tuple[PagePoolState, tuple[int, ...]]:
    """Keep only the pages that hold a request's first ``tokens`` tokens.

    Returns:
        The new state and the slots that became free (shared pages stay in use).

    Raises:
        ValueError: for an unknown request, a negative length, or one that the request does not hold.
    """
    _check("shrink", state, request=request)
    if not is_whole(tokens):
        raise ValueError(
            f"shrink: tokens is {described(tokens)}; wanted a whole number. Pass the tokens to keep."
        )
    tokens = int(tokens)
    held = state.pages(request)
    if request not in state.owned or tokens < 0 or state.pages_for(tokens) > len(held):
        raise ValueError(
            f"shrink: request {request!r} holds {len(held)} pages, tokens is {tokens}; wanted a live request and a length "
            "between 0 and what it holds. Use grow to lengthen."
        )
    count = state.pages_for(tokens)
    if tokens % state.page_size and state.references[held[count - 1]] > 1:
        raise ValueError(
            f"shrink: {tokens} tokens of request {request!r} end inside slot {held[count - 1]}, which other requests share; "
            f"its next token would overwrite theirs. Shrink to a multiple of {state.page_size}, or free the others first."
        )
    state, released = _release(state, held[count:])
    return replace(state, owned=state.owned.insert(request, held[:count])), released


def free(state: PagePoolState, request: Hashable) -> tuple[PagePoolState, tuple[int, ...]]:
    """End a request.

    Returns:
        The new state and the slots that became free (shared pages stay in use).

    Raises:
        ValueError: for an unknown request.
    """
    _check("free", state, request=request)
    if request not in state.owned:
        raise ValueError(
            f"free: request {request!r} holds no pages; live requests: {sorted(map(str, state.owned))}. "
            "Free each request once."
        )
    state, released = _release(state, state.pages(request))
    return replace(state, owned=state.owned.remove(request)), released


def _check(operation: str, state: PagePoolState, **names: Hashable) -> None:
    """Raise ValueError for a state that is none and for names that nothing can be kept under."""
    expect(
        operation, "state", state, PagePoolState, "Pass what PagePoolState.create or the last call returned."
    )
    for argument, name in names.items():
        try:
            hash(name)
        except TypeError:
            raise ValueError(
                f"{operation}: {argument} is {described(name)}, which has no hash. Name a request by a number, a string or "
                "a tuple of them."
            ) from None


def _release(state: PagePoolState, slots: Sequence[int]) -> tuple[PagePoolState, tuple[int, ...]]:
    references, freed, released = state.references, state.freed, []
    for slot in slots:
        count = references[slot] - 1
        if count:
            references = references.insert(slot, count)
        else:
            references, freed = references.remove(slot), freed.push(slot)
            released.append(slot)
    return replace(state, references=references, freed=freed), tuple(released)
