"""Facts in, everything else derived: against the NumPy model, the catalogue's examples, and bad facts."""

from __future__ import annotations

from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cases
from dsa_jax import metadata as metadata_module
from dsa_jax.metadata import Bucket, StepMetadata, rows_of
from numpy_model import Facts


def check(facts: Facts, derive=None) -> None:
    """Every derived array against the NumPy model."""
    got = (derive or cases.derive)(cases.metadata(facts, cases.layout(page_size=facts.page_size)))
    for name, wanted in facts.derive().items():
        array = np.asarray(getattr(got, name))
        assert array.dtype == np.int32, name
        np.testing.assert_array_equal(array, wanted, err_msg=name)
    assert got.kv_lens.tolist() == facts.kv_lens
    assert got.new_lens.tolist() == facts.new_lens


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_mixed_batch(page_size):
    """Prefix, empty and fresh contexts, padding, decode requests with fewer tokens than places, unused places."""
    check(
        cases.batch(
            [(7, 3), (0, 0), (5, 5)],
            [(9, 2), (3, 3), (1, 1)],
            page_size=page_size,
            next_n=3,
            padding=4,
            spare_requests=2,
            spare_columns=2,
            slots=60,
        )
    )


lengths = st.integers(0, 9).flatmap(lambda kv: st.tuples(st.just(kv), st.integers(0, min(kv, 3))))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(lengths, min_size=3, max_size=3),
    st.lists(lengths, min_size=2, max_size=2),
    st.integers(0, 1000),
)
def test_random_batches(contexts, decodes, seed):
    """All batches of one bucket, so that one trace serves: three contexts, two decode requests of up to 3 tokens."""
    facts = cases.batch(contexts, decodes, next_n=3, seed=seed)
    width, places, keys = 4, 11, 30
    facts.tables = [(table + [-5, 99, 0, 5])[:width] for table in facts.tables]
    facts.width, facts.context_tokens, facts.gathered_keys = width, places, keys
    check(facts)


@pytest.mark.parametrize(
    ("new", "cached", "starts", "ends"),
    [
        ([3, 4], [0, 0], [0, 0, 0, 3, 3, 3, 3], [1, 2, 3, 4, 5, 6, 7]),
        ([3, 4], [2, 1], [0, 0, 0, 5, 5, 5, 5], [3, 4, 5, 7, 8, 9, 10]),
        ([2, 3], [0, 0], [0, 0, 2, 2, 2], [1, 2, 3, 4, 5]),
        ([1, 1], [5, 3], [0, 6], [6, 10]),
        ([2, 1, 3], [10, 0, 5], [0, 0, 12, 13, 13, 13], [11, 12, 13, 19, 20, 21]),
        ([1], [100], [0], [101]),
        ([3, 2], [2, 0], [0, 0, 0, 5, 5], [3, 4, 5, 6, 7]),
    ],
)
def test_window_bounds(new, cached, starts, ends):
    """Key windows of the packed contexts (catalogue row 25)."""
    contexts = [(c + n, n) for c, n in zip(cached, new, strict=True)]
    step = cases.derive(cases.metadata(cases.batch(contexts, page_size=64), cases.layout(page_size=64)))
    assert step.key_starts.tolist() == starts
    assert step.key_ends.tolist() == ends


def test_destination_rows_of_the_catalogue():
    """Row 15: past [64, 128], new [32, 4], pages of 64: request 0 fills block 1 from offset 0, request 1 block 2."""
    layout = cases.layout(page_size=64)
    bucket = Bucket(context_requests=2, context_tokens=36, table_width=3)
    meta = StepMetadata.create(layout, bucket, [[4, 9], [2, 0, 7]], [96, 132], [32, 4])
    rows = cases.derive(meta).rows.tolist()
    assert rows == [9 * 64 + i for i in range(32)] + [7 * 64 + i for i in range(4)]


def test_nothing_to_refresh():
    """Row 16: one context and two decode requests, one of them without new tokens; deriving again changes nothing."""
    facts = cases.batch([(96, 32)], [(129, 1), (128, 0)], page_size=64)
    meta = cases.metadata(facts, cases.layout(page_size=64))
    first, second = cases.derive(meta), cases.derive(meta)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    check(facts)
    assert first.requests.tolist() == [0] * 32 + [1, -1]


def test_corrected_lengths_are_a_replacement():
    """A rewind is new facts: the positions follow, the old value is as it was."""
    layout = cases.layout()
    meta = cases.metadata(cases.batch(decodes=[(9, 2), (6, 2)], next_n=2), layout)
    before = jax.tree.map(np.array, meta)
    corrected = cases.derive(replace(meta, kv_lens=jnp.array([8, 6], jnp.int32)))
    assert corrected.positions.tolist() == [6, 7, 4, 5]
    assert cases.derive(meta).positions.tolist() == [7, 8, 4, 5]
    jax.tree.map(np.testing.assert_array_equal, meta, before)


def test_draft_steps_follow_the_new_lengths():
    """Row 17: a verify step of 8 tokens for 4 requests, then draft steps of one: requests 0..3, four distinct rows."""
    layout = cases.layout(page_size=64)
    tables = [[5, 1, 2], [9, 0, 3], [7, 8, 4], [6, 10, 11]]
    verify = StepMetadata.create(
        layout, Bucket(decode_requests=4, next_n=8, table_width=3), tables, [136] * 4, [8] * 4
    )
    assert cases.derive(verify).requests.tolist() == [r for r in range(4) for _ in range(8)]
    draft = StepMetadata.create(layout, Bucket(decode_requests=4, table_width=3), tables, [137] * 4, [1] * 4)
    step = cases.derive(draft)
    assert step.requests.tolist() == [0, 1, 2, 3]
    assert step.rows.tolist() == [slot * 64 + 8 for slot in (2, 3, 4, 11)]


def test_x64_changes_no_dtype():
    """Whoever enables 64-bit types gets the same int32 arrays."""
    facts = cases.batch([(7, 3)], [(9, 2)], next_n=2, padding=1)
    with jax.enable_x64(True):
        step = jax.jit(StepMetadata.derive)(cases.metadata(facts, cases.layout()))
    assert {leaf.dtype for leaf in jax.tree.leaves(step)} == {np.dtype(np.int32)}


def test_one_trace_for_all_batches_of_a_bucket():
    traces = []

    @jax.jit
    def derive(meta):
        traces.append(meta.bucket)
        return meta.derive()

    bucket = Bucket(
        context_requests=2, context_tokens=8, decode_requests=2, next_n=2, table_width=3, gathered_keys=20
    )
    layout = cases.layout()
    for tables, kv, new in (
        ([], [], []),
        ([[1]], [4], [4]),
        ([[1], [2, 3], [5], [0, 7]], [2, 8, 4, 5], [1, 7, 2, 1]),
    ):
        derive(StepMetadata.create(layout, bucket, tables, kv, new))
    assert len(traces) == 1


# --- parts ---------------------------------------------------------------------------------------------------------


def test_parts_of_a_mixed_step():
    """The context part and the decode part are the steps of those requests alone."""
    contexts, decodes = [(7, 3), (0, 0), (5, 5)], [(9, 2), (3, 3)]
    facts = cases.batch(contexts, decodes, next_n=3, padding=2)
    layout = cases.layout()
    step = cases.derive(cases.metadata(facts, layout))
    alone = replace(
        facts, tables=facts.tables[:3], kv_lens=facts.kv_lens[:3], new_lens=facts.new_lens[:3], decodes=0
    )
    same(step.context_part(), cases.derive(cases.metadata(alone, layout)))
    alone = replace(
        facts,
        tables=facts.tables[3:],
        kv_lens=facts.kv_lens[3:],
        new_lens=facts.new_lens[3:],
        contexts=0,
        context_tokens=0,
        gathered_keys=0,
    )
    same(step.decode_part(), cases.derive(cases.metadata(alone, layout)))


def same(a, b) -> None:
    """Equal fields, static ones included."""
    assert a.bucket == b.bucket
    for field in fields(a):
        if field.name not in ("layout", "bucket"):
            np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name), err_msg=field.name)


def test_chunks_cover_their_part():
    facts = cases.batch(decodes=[(9, 2), (6, 3), (3, 1), (1, 1)], next_n=3)
    step = cases.step(facts, cases.layout())
    for start in (0, 1, 2):
        part = step.decode_chunk(start, 2)
        assert part.bucket.tokens == 6
        assert part.rows.tolist() == step.rows[start * 3 : start * 3 + 6].tolist()
        assert part.page_table.tolist() == step.page_table[start : start + 2].tolist()
        expected = step.requests[start * 3 : start * 3 + 6]
        assert part.requests.tolist() == [r - start if r >= 0 else -1 for r in expected.tolist()]
    contexts = cases.step(cases.batch([(7, 3), (5, 5)]), cases.layout())
    for start, owners in (
        (2, [0, 1, 1, 1]),
        (3, [1, 1, 1, 1]),
    ):  # the second begins behind the first request's keys
        part = contexts.context_chunk(start, 4)
        assert part.bucket.context_tokens == 4
        assert part.requests.tolist() == owners
        for name in ("key_starts", "key_ends", "limits", "positions", "rows"):
            whole = getattr(contexts, name)[start : start + 4]
            assert getattr(part, name).tolist() == whole.tolist(), name


def test_chunk_errors():
    mixed = cases.step(cases.batch([(7, 3)], [(9, 2)], next_n=2), cases.layout())
    with pytest.raises(ValueError, match=r"context_chunk: .*call context_part\(\) first"):
        mixed.context_chunk(0, 1)
    with pytest.raises(ValueError, match=r"decode_chunk: .*call decode_part\(\) first"):
        mixed.decode_chunk(0, 1)


# --- rows ----------------------------------------------------------------------------------------------------------


def test_rows_of_out_of_range():
    """Neither wraps nor clamps: request or column out of range, negative positions, missing pages."""
    table = jnp.array([[3, 7], [5, -1]], jnp.int32)
    requests = jnp.array([0, 0, 0, 1, 1, 2, -1, 0, 0], jnp.int32)
    positions = jnp.array([0, 7, 8, 3, 4, 0, 0, -1, 2**31 - 1], jnp.int32)
    assert rows_of(table, requests, positions, 4).tolist() == [12, 31, -1, 23, -1, -1, -1, -1, -1]
    assert rows_of(table[:0], requests, positions, 4).tolist() == [-1] * 9


def test_planted_clamp_is_seen(monkeypatch):
    """A column clamped into the table writes one token of a sequence over another."""

    def clamped(table, requests, positions, page_size):
        column = jnp.clip(positions // page_size, 0, table.shape[1] - 1)
        slot = table[jnp.clip(requests, 0, table.shape[0] - 1), column]
        return slot * page_size + positions % page_size

    monkeypatch.setattr(metadata_module, "rows_of", clamped)
    with pytest.raises(AssertionError):
        check(
            cases.batch([(7, 3)], [(9, 1)], padding=1, next_n=2), derive=jax.jit(lambda meta: meta.derive())
        )


def test_planted_total_length_windows_are_seen():
    """A causal limit that counts from 1 instead of from the prefix."""
    good = StepMetadata.derive

    def forgets_prefix(meta):
        return good(replace(meta, kv_lens=meta.new_lens))

    with pytest.raises(AssertionError):
        check(cases.batch([(7, 3)]), derive=jax.jit(forgets_prefix))


# --- bad facts -----------------------------------------------------------------------------------------------------


def create(tables, kv, new, **sizes):
    """Metadata in a bucket of two decode requests of two tokens, unless said otherwise."""
    bucket = Bucket(**({"decode_requests": 2, "next_n": 2, "table_width": 3} | sizes))
    return StepMetadata.create(cases.layout(), bucket, tables, kv, new)


def test_all_bad_requests_are_listed():
    with pytest.raises(ValueError, match="StepMetadata: ") as error:
        create([[1, 2, 3], [4]], [13, 5], [3, 6])
    message = str(error.value)
    assert "request 0 of 13 tokens needs 4 pages, the table is 3 wide" in message
    assert "request 1 has kv_len 5 and new_len 6; wanted 0 <= new_len <= kv_len" in message
    assert "Use a larger bucket" in message


@pytest.mark.parametrize(
    ("tables", "kv", "new", "sizes", "message"),
    [
        ([[1]], [5], [1], {}, "request 0 of 5 tokens needs 2 pages, its table has a gap"),
        ([[1, -1]], [5], [1], {}, "has a gap"),
        ([[1, 2]], [5], [3], {}, "decode request 0 adds 3 tokens, next_n is 2"),
        ([[1]], [-1], [0], {}, "request 0 has kv_len -1"),
        ([[1]], [3], [-1], {}, "new_len -1"),
        (
            [[1]],
            [3],
            [3],
            {"context_requests": 1, "context_tokens": 2},
            "the contexts add 3 tokens, the bucket has 2 places",
        ),
        (
            [[1]],
            [3],
            [1],
            {"context_requests": 1, "context_tokens": 2, "gathered_keys": 2},
            "the contexts hold 3 keys, gathered_keys is 2",
        ),
        (
            [[1]] * 3,
            [1] * 3,
            [1] * 3,
            {},
            "3 page tables, 3 kv_lens and 3 new_lens.*at most 2.*Use a larger bucket",
        ),
        ([[1]], [1, 1], [1], {}, "1 page tables, 2 kv_lens and 1 new_lens; wanted the same number"),
    ],
)
def test_bad_facts(tables, kv, new, sizes, message):
    with pytest.raises(ValueError, match=message):
        create(tables, kv, new, **sizes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"table_width": 0}, "table_width is 0; wanted at least 1 page"),
        ({"next_n": 0}, "next_n is 0"),
        ({"decode_requests": -1}, "decode_requests is -1"),
        ({"gathered_keys": -1}, "gathered_keys is -1"),
        ({"context_requests": 1}, "context_requests is 1 and context_tokens 0; wanted both or neither"),
        ({"next_n": 0, "table_width": 0}, "next_n is 0.*table_width is 0.*Choose sizes that hold the batch"),
    ],
)
def test_bad_buckets(sizes, message):
    with pytest.raises(ValueError, match=f"Bucket: .*{message}"):
        create([], [], [], **sizes)


def test_wider_tables_are_cut_and_narrower_ones_refused():
    """Extra columns that no length needs are ignored; a missing one that a length needs is an error."""
    meta = create([[1, 2, 3, 4, 5]], [12], [1])
    assert meta.page_table[0].tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="needs 4 pages, the table is 3 wide"):
        create([[1, 2, 3, 4, 5]], [13], [1])


def test_two_requests_may_read_a_page_but_not_write_it():
    """A shared prefix is fine; two requests whose new tokens go to one page are named."""
    assert create([[3, 1], [3, 2]], [5, 6], [1, 2]).page_table.tolist() == [[3, 1, -1], [3, 2, -1]]
    with pytest.raises(ValueError, match="slot 3 receives tokens but is held 2 times, by requests 0, 1"):
        create([[3], [3]], [2, 2], [1, 1])
    with pytest.raises(ValueError, match="slot 1 receives tokens but is held 2 times, by requests 0, 1"):
        create([[3, 1], [0, 1]], [6, 5], [2, 1])


def test_validate_sees_arrays_that_do_not_fit():
    """Facts built by hand: wrong widths and dtypes are named before anything is derived from them."""
    meta = create([[1, 2]], [5], [1])
    for wrong in (
        replace(meta, page_table=jnp.zeros((2, 5), jnp.int32)),
        replace(meta, kv_lens=jnp.zeros(3, jnp.int32)),
        replace(meta, new_lens=jnp.zeros((2, 1), jnp.int32)),
        replace(meta, kv_lens=jnp.ones(2, jnp.float32)),
    ):
        with pytest.raises(ValueError, match="page_table|kv_lens|new_lens"):
            wrong.validate()
        with pytest.raises(ValueError, match="page_table|kv_lens|new_lens"):
            wrong.derive()
    meta.validate()


def test_arrays_are_fresh():
    """The caller's lists and arrays may be reused at once."""
    table, kv, new = (
        np.array([[1, 2, 3], [4, 5, 6]], np.int32),
        np.array([9, 5], np.int32),
        np.array([1, 1], np.int32),
    )
    meta = create(table, kv, new)
    table[:], kv[:], new[:] = 0, 0, 0
    assert meta.page_table.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert meta.kv_lens.tolist() == [9, 5]
    assert meta.new_lens.tolist() == [1, 1]
