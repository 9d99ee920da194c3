"""The allocator against a plain model: random histories, nothing leaks, failed calls change nothing."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_jax.pages import OutOfPages, PagePoolState, fork, free, grow, shrink

SLOTS, PAGE_SIZE = 7, 4


@dataclass
class Model:
    """Mutable and obvious: a list of free slots, a list of slots per request."""

    free: list[int] = field(default_factory=lambda: list(range(SLOTS)))  # the next one to hand out first
    owned: dict[str, list[int]] = field(default_factory=dict)

    def users(self, slot: int) -> int:
        return sum(slot in slots for slots in self.owned.values())

    def grow(self, name: str, tokens: int) -> list[int]:
        held = self.owned.get(name, [])
        missing = -(-tokens // PAGE_SIZE) - len(held)
        if tokens < 0 or missing > len(self.free):
            raise ValueError
        self.owned[name] = held + [self.free.pop(0) for _ in range(missing)]
        return self.owned[name]

    def fork(self, source: str, name: str, tokens: int) -> list[int]:
        pages = tokens // PAGE_SIZE
        if name in self.owned or tokens < 0 or tokens % PAGE_SIZE or pages > len(self.owned.get(source, [])):
            raise ValueError
        self.owned[name] = self.owned.get(source, [])[:pages]
        return self.owned[name]

    def shrink(self, name: str, tokens: int) -> list[int]:
        pages = -(-tokens // PAGE_SIZE)
        if name not in self.owned or tokens < 0 or pages > len(self.owned[name]):
            raise ValueError
        if tokens % PAGE_SIZE and self.users(self.owned[name][pages - 1]) > 1:
            raise ValueError  # its next token would be written into a page that someone else reads
        return self.release(name, pages)

    def end(self, name: str) -> list[int]:
        if name not in self.owned:
            raise ValueError
        released = self.release(name, 0)
        del self.owned[name]
        return released

    def release(self, name: str, keep: int) -> list[int]:
        gone, self.owned[name] = self.owned[name][keep:], self.owned[name][:keep]
        released = [slot for slot in gone if not self.users(slot)]
        self.free = released[::-1] + self.free
        return released


names = st.sampled_from(["a", "b", "c", "d"])
tokens = st.integers(-1, 5 * PAGE_SIZE)
calls = st.one_of(
    st.tuples(st.just("grow"), names, tokens),
    st.tuples(st.just("grow"), names, tokens),
    st.tuples(
        st.just("fork"), names, names, st.integers(-1, 4).map(lambda pages: pages * PAGE_SIZE) | tokens
    ),
    st.tuples(st.just("shrink"), names, tokens),
    st.tuples(st.just("end"), names),
)
FUNCTIONS = {"grow": grow, "fork": fork, "shrink": shrink, "end": free}


def snapshot(state: PagePoolState):
    """Everything that a caller can see of a state."""
    requests = sorted(map(str, state.owned))
    return state.free_slots, [(name, state.pages(name)) for name in requests]


def check_invariants(state: PagePoolState, model: Model) -> None:
    """The state says what the model says, and every slot is either free or used as often as it is referenced."""
    assert snapshot(state) == (len(model.free), sorted((n, tuple(s)) for n, s in model.owned.items()))
    used = {slot for slots in model.owned.values() for slot in slots}
    assert used | set(model.free) == set(range(SLOTS))
    assert not used & set(model.free)
    assert {slot: state.references[slot] for slot in used} == {slot: model.users(slot) for slot in used}
    assert len(state.references) == len(used)


def run(history) -> PagePoolState:
    """Run a history on the library and on the model, comparing after each call."""
    state, model = PagePoolState.create(SLOTS, PAGE_SIZE), Model()
    for operation, *arguments in history:
        before, kept = snapshot(state), copy.deepcopy(model)
        try:
            wanted = getattr(model, operation)(*arguments)
        except ValueError:
            model = kept
            with pytest.raises(ValueError):
                FUNCTIONS[operation](state, *arguments)
            assert snapshot(state) == before
            continue
        after, got = FUNCTIONS[operation](state, *arguments)
        assert got == tuple(wanted)
        assert snapshot(state) == before  # the old value is as good as ever
        state = after
        check_invariants(state, model)
    return state


@settings(max_examples=150, deadline=None)
@given(st.lists(calls, max_size=25))
def test_random_histories(history):
    state = run(history)
    assert snapshot(run(history)) == snapshot(state)  # the same calls give the same slots
    for name in [n for n in "abcd" if n in state.owned]:
        state, _ = free(state, name)
    assert state.free_slots == SLOTS  # nothing leaked
    state, slots = grow(state, "all", SLOTS * PAGE_SIZE)
    assert sorted(slots) == list(range(SLOTS))


def test_order_of_reuse():
    """The slot that was freed last is handed out first, fresh ones in ascending order."""
    state = PagePoolState.create(5, 4)
    state, slots = grow(state, "a", 9)
    assert slots == (0, 1, 2)
    state, released = shrink(state, "a", 4)
    assert released == (1, 2)
    state, slots = grow(state, "b", 16)
    assert slots == (2, 1, 3, 4)


def test_growing_keeps_the_pages():
    state = PagePoolState.create(5, 4)
    state, first = grow(state, "a", 5)
    state, more = grow(state, "a", 12)
    assert more[:2] == first
    assert grow(state, "a", 1)[1] == more  # a shorter length takes nothing away


def test_shared_pages_live_until_the_last_reader():
    state = PagePoolState.create(5, 4)
    state, whole = grow(state, "a", 12)
    state, shared = fork(state, "a", "b", 8)
    assert shared == whole[:2]
    state, released = free(state, "a")
    assert released == whole[2:]
    state, own = grow(state, "b", 12)
    assert own[:2] == shared
    assert set(own[2:]).isdisjoint(shared)
    state, released = free(state, "b")
    assert sorted(released) == sorted(own)
    assert state.free_slots == 5


@pytest.mark.parametrize("name", ["a", "b"])
def test_rewinding_into_a_shared_page_is_refused(name):
    """After such a rewind the next token would be written where the other request still reads."""
    state, _ = grow(PagePoolState.create(5, 4), "a", 12)
    state, _ = fork(state, "a", "b", 8)
    with pytest.raises(ValueError, match="shrink: 6 tokens .*share"):
        shrink(state, name, 6)
    state, _ = shrink(state, name, 4)
    assert len(state.pages(name)) == 1


def test_errors():
    state, _ = grow(PagePoolState.create(3, 4), "a", 8)
    with pytest.raises(
        OutOfPages, match=r"request 'b' needs 2 more pages for 5 tokens \(page_size 4\); 1 of 3 are free"
    ):
        grow(state, "b", 5)
    with pytest.raises(ValueError, match="grow: tokens is -1; wanted at least 0"):
        grow(state, "a", -1)
    with pytest.raises(ValueError, match=r"free: request 'x' holds no pages; live requests: \['a'\]"):
        free(state, "x")
    with pytest.raises(
        ValueError, match=r"shrink: request 'a' holds 2 pages, tokens is 9.*Use grow to lengthen"
    ):
        shrink(state, "a", 9)
    with pytest.raises(
        ValueError,
        match=r"fork: request 'a' already holds 2 pages; tokens is 6, not a multiple.*; source 'x'",
    ):
        fork(state, "x", "a", 6)
    with pytest.raises(ValueError, match="slots is 0 and page_size 4; wanted at least 1 of each"):
        PagePoolState.create(0, 4)
    with pytest.raises(ValueError, match="page_size 0"):
        PagePoolState.create(3, 0)
    assert state.pages("a") == (0, 1)
    assert state.pages("nobody") == ()


@pytest.mark.parametrize("name", [[1], ("a", [1]), np.arange(2)])
def test_names_without_a_hash_are_refused(name):
    state = PagePoolState.create(4, 4)
    for words, call in {
        "grow: request is": lambda: grow(state, name, 4),
        "fork: source is": lambda: fork(state, name, "new", 4),
        "fork: request is": lambda: fork(state, "old", name, 4),
        "shrink: request is": lambda: shrink(state, name, 0),
        "free: request is": lambda: free(state, name),
    }.items():
        with pytest.raises(ValueError, match=f"{words} .*, which has no hash. Name a request by a number"):
            call()


def test_planted_leak_is_seen(monkeypatch):
    """A release that forgets to give slots back is noticed by the histories."""
    import dsa_jax.pages.allocator as allocator

    original = allocator._release

    def forgetful(state, slots):
        after, released = original(state, slots)
        return (state if released else after), released

    monkeypatch.setattr(allocator, "_release", forgetful)
    with pytest.raises(AssertionError):
        run([("grow", "a", 8), ("end", "a")])
