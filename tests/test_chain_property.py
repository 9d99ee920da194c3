"""Chains of length changes over contexts, decode requests and both give the metadata that building it at once gives.

Contexts and decode requests stand in one step, cached contexts grow chunk by chunk, a context becomes a decode request,
requests rest, end below their last length or never begin. Values are compared with ``StepMetadata.create`` and, derived,
with the NumPy model.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cases
from dsa_jax.chunking import chunk_lengths, split_prefill_chunks
from dsa_jax.draft import advance, rewind
from dsa_jax.metadata import Bucket, Step, StepMetadata
from numpy_model import Facts

few = settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
many = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])

REQUESTS, PLACES, NEXT_N, PAGE, WIDTH = 5, 9, 3, 4, 4
MOST = PAGE * WIDTH
"""Tokens that a page table can hold."""


def bucket_of(contexts: int, next_n: int) -> Bucket:
    """Of five requests the first ``contexts`` are contexts; all other sizes are the same everywhere, to save traces."""
    return Bucket(
        context_requests=contexts,
        context_tokens=PLACES if contexts else 0,
        decode_requests=REQUESTS - contexts,
        next_n=next_n,
        table_width=WIDTH,
        gathered_keys=REQUESTS * MOST,
    )


BOTH = bucket_of(3, NEXT_N)
FEW = [BOTH, bucket_of(2, NEXT_N)]
MANY = [*FEW, bucket_of(5, 1), bucket_of(2, 1), bucket_of(0, NEXT_N), bucket_of(0, 1)]
"""Contexts and decode requests, contexts alone, decode requests alone. Between buckets the border moves: a context becomes
a decode request, or the other way round."""


@partial(jax.jit, static_argnames="next_n")
def change(meta: StepMetadata, kept, added, pages, next_n: int) -> StepMetadata:
    """One turn: keep some of the newest tokens, add others and the pages for them."""
    return advance(rewind(meta, kept), added, pages=pages, next_n=next_n)


@dataclass
class Host:
    """What a scheduler keeps: lengths and page tables, in plain lists."""

    kv: list[int]
    new: list[int]
    tables: list[list[int]] = field(default_factory=lambda: [[] for _ in range(REQUESTS)])
    free: list[int] = field(default_factory=lambda: np.random.default_rng(5).permutation(40).tolist())

    def grow(self) -> list[tuple[int, int, int]]:
        """Pages for what the requests hold, as request, column and slot; a page once given stays."""
        given = []
        for r, table in enumerate(self.tables):
            while len(table) * PAGE < self.kv[r]:
                given.append((r, len(table), self.free[-1]))
                table.append(self.free.pop())
        return given

    def fit(self, bucket: Bucket, wanted: list[int]) -> list[int]:
        """As many of the wanted new tokens as the bucket has places for."""
        contexts, left, added = bucket.context_requests, bucket.context_tokens, []
        for r, number in enumerate(wanted):
            number = min(number, MOST - self.kv[r], left if r < contexts else bucket.next_n)
            left -= number if r < contexts else 0
            added.append(number)
        return added

    def turn(self, meta: StepMetadata, bucket: Bucket, kept: list[int], wanted: list[int]) -> StepMetadata:
        """Keep some of the newest tokens, move the border, add tokens: in the lists, and in metadata by its functions."""
        held = [k - n + min(n, most) for k, n, most in zip(self.kv, self.new, kept)]
        self.kv = held
        self.new = self.fit(bucket, wanted)
        self.kv = [k + n for k, n in zip(held, self.new)]
        pages = self.grow()
        pages += [(-1, -1, -1)] * (REQUESTS * WIDTH - len(pages))
        meta = replace(meta, bucket=replace(bucket, next_n=meta.bucket.next_n))
        return change(meta, *(np.array(a, np.int32) for a in (kept, self.new, pages)), next_n=bucket.next_n)

    def facts(self, bucket: Bucket) -> Facts:
        """For the NumPy model."""
        return Facts(
            tables=[(table + [-1] * WIDTH)[:WIDTH] for table in self.tables],
            kv_lens=self.kv,
            new_lens=self.new,
            page_size=PAGE,
            contexts=bucket.context_requests,
            context_tokens=bucket.context_tokens,
            decodes=bucket.decode_requests,
            next_n=bucket.next_n,
            width=WIDTH,
            gathered_keys=bucket.gathered_keys,
        )


def same_facts(chained: StepMetadata, host: Host) -> StepMetadata:
    """The chain's metadata against that of the host's facts, which is returned."""
    at_once = StepMetadata.create(chained.layout, chained.bucket, host.tables, host.kv, host.new)
    assert jax.tree.structure(chained) == jax.tree.structure(at_once)  # layout and bucket are static
    jax.tree.map(partial(np.testing.assert_array_equal, strict=True), chained, at_once)
    return at_once


def same(chained: StepMetadata, host: Host) -> Step:
    """Facts and all that follows from them, also as NumPy derives it."""
    step, other = cases.derive(chained), cases.derive(same_facts(chained, host))
    jax.tree.map(partial(np.testing.assert_array_equal, strict=True), step, other)
    for name, array in host.facts(chained.bucket).derive().items():
        np.testing.assert_array_equal(getattr(step, name), array, err_msg=name, strict=True)
    return step


# --- any turns -----------------------------------------------------------------------------------------------------

numbers = st.lists(st.integers(0, PLACES), min_size=REQUESTS, max_size=REQUESTS)
absences = st.sets(st.integers(0, REQUESTS - 1), max_size=2)


def chains(buckets: list[Bucket], last: list[Bucket]):
    """A start and turns; each bucket costs a trace, and what is derived in the last one another."""
    among = st.sampled_from(buckets)
    turns = st.lists(st.tuples(among, numbers, numbers), max_size=6)
    end = st.tuples(st.sampled_from(last), numbers, numbers)
    return st.tuples(among, numbers, numbers, absences), st.builds(lambda a, b: [*a, b], turns, end)


def check_chain(start, turns) -> None:
    """From cached lengths and new tokens through the turns; the ``absent`` requests never begin: their rows are padding."""
    bucket, cached, wanted, absent = start
    only_present = lambda values: [0 if r in absent else n for r, n in enumerate(values)]
    host = Host(kv=only_present(cached), new=[0] * REQUESTS)
    host.new = host.fit(bucket, only_present(wanted))
    host.kv = [k + n for k, n in zip(host.kv, host.new)]
    host.grow()
    meta = StepMetadata.create(cases.layout(), bucket, host.tables, host.kv, host.new)
    for bucket, kept, wanted in turns:
        meta = host.turn(meta, bucket, kept, only_present(wanted))
        same_facts(meta, host)
    same(meta, host)
    assert not any(host.tables[r] for r in absent)


@few
@given(*chains(FEW, [BOTH]))
def test_any_chain_equals_building_at_once(start, turns):
    check_chain(start, turns)


@pytest.mark.full
@many
@given(*chains(MANY, MANY))
def test_many_chains_equal_building_at_once(start, turns):
    check_chain(start, turns)


# --- chunk after chunk ---------------------------------------------------------------------------------------------

prompts = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), min_size=3, max_size=3)
decoded = st.lists(st.tuples(st.integers(0, NEXT_N), st.integers(0, NEXT_N)), min_size=2, max_size=9)


def keys_of(step: Step, requests) -> dict[tuple[int, int], tuple[int, list[int]]]:
    """By context and position of each of its new tokens: the row that it goes to and the rows of the keys it may see."""
    of, places, rows, starts, ends = (
        np.asarray(a).tolist()
        for a in (step.requests, step.positions, step.rows, step.key_starts, step.key_ends)
    )
    gathered = np.asarray(step.gather_rows).tolist()
    return {
        (requests[of[i]], places[i]): (rows[i], gathered[starts[i] : ends[i]])
        for i in range(step.bucket.context_tokens)
        if of[i] >= 0
    }


def check_chunks(prompts, limit: int, decoded) -> None:
    """Contexts with cached tokens go in by chunks; beside them two decode requests add tokens and lose some again.

    Each context token has the row and the keys that NumPy gives it, in the chain of all requests and in metadata of its
    chunk's requests alone, whose windows count from the chunk's first key.
    """
    layout, cached, new = cases.layout(), [c for c, _ in prompts], [n for _, n in prompts]
    host = Host(kv=[*cached, 4, 1], new=[0] * REQUESTS)
    host.grow()
    meta = StepMetadata.create(layout, BOTH, host.tables, host.kv, host.new)
    chained, alone = {}, {}
    for number, chunk in enumerate(split_prefill_chunks(new, limit)):
        requests, kv, fresh = chunk_lengths(chunk, cached)
        kept, proposed = zip(*(decoded[(number + i) % len(decoded)] for i in range(2)))
        lens = dict(zip(requests, fresh))
        wanted = [*(lens.get(r, 0) for r in range(3)), *proposed]
        meta = host.turn(meta, BOTH, [*host.new[:3], *kept], wanted)
        chained |= keys_of(same(meta, host), range(REQUESTS))
        assert tuple(host.kv[r] for r in requests) == kv
        part = StepMetadata.create(layout, BOTH, [host.tables[r] for r in requests], kv, fresh)
        rebased = cases.derive(part)
        assert int(rebased.key_starts[0]) == 0
        alone |= keys_of(rebased, requests)

    def row(r: int, position: int) -> int:
        return host.tables[r][position // PAGE] * PAGE + position % PAGE

    wanted = {
        (r, p): (row(r, p), [row(r, seen) for seen in range(p + 1)])
        for r, (c, n) in enumerate(prompts)
        for p in range(c, c + n)
    }
    assert chained == alone == wanted


@few
@given(prompts, st.integers(1, PLACES), decoded)
def test_chunks_are_a_chain(prompts, limit, decoded):
    check_chunks(prompts, limit, decoded)


@pytest.mark.full
@many
@given(prompts, st.integers(1, PLACES), decoded)
def test_many_chunks_are_chains(prompts, limit, decoded):
    check_chunks(prompts, limit, decoded)
