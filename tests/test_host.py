"""Host work between two decode steps: no tracing, no look at the device, the same metadata by every road."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cases
from benchmarks import host_check
from dsa_jax.draft import advance
from dsa_jax.metadata import Bucket, StepMetadata
from dsa_jax.pages import grow
from test_loops import target_step

BUCKET = Bucket(decode_requests=3, table_width=4)
TABLES = [[3, 1], [0, 2, 6], [7]]


def host(lengths=(5, 8, 3), width: int = 7, steps: int = 1) -> host_check.Host:
    """The benchmark's loop on a toy with pages of 4 tokens."""
    run = host_check.several(target_step, steps)
    return host_check.Host(run, None, cases.layout(page_size=4), np.array(lengths), width, steps)


# --- one step after another ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "anew"), [(1, False), (1, True), (3, False)])
def test_lengths_change_inside_a_bucket_without_tracing(steps, anew):
    """Twelve tokens over page boundaries; pages and lengths on the device are those that the host knows."""
    run = host(steps=steps)
    for _ in range(12 // steps):
        run.turn(anew=anew)
    assert run.traces == 1
    assert run.lengths.tolist() == [17, 20, 15]
    np.testing.assert_array_equal(run.meta.kv_lens, run.lengths)
    np.testing.assert_array_equal(run.meta.page_table, run.table)
    assert [len(run.pool.pages(r)) for r in range(3)] == [5, 5, 4]
    at_once = StepMetadata.create(run.layout, run.bucket, run.table, run.lengths, run.ones)
    jax.tree.map(partial(np.testing.assert_array_equal, strict=True), run.meta, at_once)


def test_another_bucket_is_traced_again():
    """The count of the test above would see it."""
    run = host()
    run.turn()
    run.meta = replace(run.meta, bucket=replace(run.meta.bucket, next_n=2))
    run.turn()
    assert run.traces == 2


@pytest.mark.parametrize("looks", [False, True])
def test_the_host_reads_nothing_back(looks, monkeypatch):
    """Every way from an array to NumPy or to a number is blocked; a host that looks at a token is caught."""
    run = host()
    run.turn()

    def refuse(*_):
        raise AssertionError("a copy to the host")

    for name in ("_value", "__array__", "__int__", "tolist", "item"):
        monkeypatch.setattr(type(run.tokens), name, property(refuse) if name == "_value" else refuse)
    if looks:
        with pytest.raises(AssertionError, match="a copy to the host"):
            int(run.tokens[0])
    for _ in range(9):
        run.turn()
    assert run.traces == 1


@pytest.mark.parametrize(
    ("only", "wanted"),
    [("queue", {"queued": [1, 2], "queued anew": [3, 4]}), ("awaited", {"awaited": [1, 2]})],
)
def test_rows_that_are_asked_for(only, wanted, monkeypatch, tmp_path, capsys):
    """Those alone whose name contains a text, each as often as asked; every measurement is kept."""
    number, report = itertools.count(1), tmp_path / "host.json"
    names = ("queued", "awaited", "queued anew")
    rows = dict.fromkeys(names, lambda: {"median_us": next(number), "each_us": []})
    monkeypatch.setattr(host_check, "rows", lambda options: rows)
    host_check.main(["--only", only, "--repeat", "2", "--json", str(report)])
    found = json.loads(report.read_text())["rows"]
    assert {name: [row["median_us"] for row in each] for name, each in found.items()} == wanted
    assert capsys.readouterr().out.count("bound 300 us") == sum(map(len, wanted.values()))
    with pytest.raises(SystemExit, match="--only 'queued 2' is in none of: queued, awaited, queued anew"):
        host_check.main(["--only", "queued 2"])


@pytest.mark.full
def test_benchmark_runs(capsys, tmp_path):
    """All cases, small; figures are not looked at."""
    report = tmp_path / "host.json"
    options = ["--requests", "2", "--context", "192", "--turns", "2", "--weights", "3", "--json", str(report)]
    host_check.main(options)
    assert capsys.readouterr().out.count("bound 300 us") == 7
    assert '"traced_again": 0' in report.read_text()


# --- new pages, sent alone -----------------------------------------------------------------------------------------


def start() -> StepMetadata:
    return StepMetadata.create(cases.layout(), BUCKET, TABLES, [8, 9, 4], [1, 1, 1])


def test_new_pages_join_the_table():
    """Requests 0 and 2 reach a boundary; the facts are those of building them at once."""
    pages = jnp.array([[0, 2, 11], [-1, -1, -1], [2, 1, 5]], jnp.int32)
    got = jax.jit(advance)(start(), jnp.ones(3, jnp.int32), pages=pages)
    tables = [[3, 1, 11], [0, 2, 6], [7, 5]]
    wanted = StepMetadata.create(cases.layout(), BUCKET, tables, [9, 10, 5], [1, 1, 1])
    jax.tree.map(partial(np.testing.assert_array_equal, strict=True), got, wanted)


@pytest.mark.parametrize("row", [[-1, 2, 11], [0, -1, 11], [0, 2, -1], [3, 0, 11], [0, 4, 11]])
def test_rows_that_are_no_page_change_nothing(row):
    """Negative entries do not count from the end, and what lies outside of the table is dropped."""
    got = advance(start(), jnp.zeros(3, jnp.int32), pages=jnp.array([row], jnp.int32))
    np.testing.assert_array_equal(got.page_table, start().page_table)


def test_misshapen_pages_are_refused():
    with pytest.raises(ValueError, match=r"next_n is 0.*pages is float32\[3\], wanted int32\[A, 3\]"):
        advance(start(), jnp.ones(3, jnp.int32), pages=jnp.zeros(3, jnp.float32), next_n=0)


# --- tables as arrays ----------------------------------------------------------------------------------------------


def test_an_array_is_the_same_as_lists():
    """Narrower and wider tables, fewer requests than places, any integer dtype; the array may be reused at once."""
    layout, lens = cases.layout(), [8, 9, 4]
    wanted = start()
    array = np.array([[3, 1, -1], [0, 2, 6], [7, -1, -1]], np.int64)
    for table in (array, np.pad(array, ((0, 0), (0, 3)), constant_values=99), array.astype(np.int32)):
        got = StepMetadata.create(layout, BUCKET, table, np.array(lens), np.ones(3, np.int32))
        table[:] = 50
        kept = np.asarray(got.page_table)[:, :3]
        np.testing.assert_array_equal(kept, np.asarray(wanted.page_table)[:, :3])
        np.testing.assert_array_equal(got.kv_lens, lens)
        np.testing.assert_array_equal(got.new_lens, 1)
    few = StepMetadata.create(layout, BUCKET, np.array([[3, 1]]), [8], [1])
    assert few.page_table.tolist() == [[3, 1, -1, -1], [-1] * 4, [-1] * 4]
    assert few.kv_lens.tolist() == [8, 0, 0]
    with pytest.raises(ValueError, match="page_tables is .*wanted whole numbers"):
        StepMetadata.create(layout, BUCKET, np.array([[0.5, 1.0]]), [8], [1])


def said(tables, kv, new) -> str | None:
    """The error of metadata that makes no sense."""
    try:
        StepMetadata.create(cases.layout(), BUCKET, tables, kv, new)
    except ValueError as error:
        return str(error)
    return None


slot = st.integers(-1, 5)
request = st.tuples(st.lists(slot, min_size=4, max_size=4), st.integers(0, 17), st.integers(0, 2))


@settings(max_examples=200, deadline=None)
@given(st.lists(request, min_size=1, max_size=3))
def test_what_is_refused(requests):
    """Against the rules in plain Python: lengths, gaps, and pages that receive tokens but are held twice."""
    tables, kv, new = (list(part) for part in zip(*requests, strict=True))
    wrong = set()
    held = [t[: -(-k // 4)] for t, k in zip(tables, kv, strict=True)]
    every = [s for slots in held for s in slots if s >= 0]
    for r, (k, n) in enumerate(zip(kv, new, strict=True)):
        if n > k:
            wrong.add(f"request {r} has kv_len {k}")
            continue
        if k > 16:
            wrong.add(f"request {r} of {k} tokens needs 5 pages, the table is 4 wide")
        elif -1 in held[r]:
            wrong.add(f"request {r} of {k} tokens needs {len(held[r])} pages, its table has a gap")
        if n > 1:
            wrong.add(f"decode request {r} adds {n} tokens")
    # Written pages of requests whose new tokens are more than all tokens begin before the table; they count as well.
    for k, n, slots in zip(kv, new, held, strict=True):
        for column, s in enumerate(slots):
            if n and s >= 0 and 4 * column + 4 > k - n and every.count(s) > 1:
                wrong.add(f"slot {s} receives tokens but is held {every.count(s)} times")
    for given_tables in (tables, np.array(tables)):
        error = said(given_tables, kv, new)
        assert (error is not None) == bool(wrong)
        assert all(part in (error or "") for part in wrong)


def test_slots_beyond_the_look_up_are_compared_all_the_same():
    """Such numbers make no look-up table; a page that two requests hold is found, and single ones are fine."""
    far = 2**28
    assert said([[far, 1], [far + 1], [2]], [5, 2, 3], [1, 1, 1]) is None
    error = said([[1, far], [far], [2]], [5, 2, 3], [1, 1, 1])
    assert error is not None and f"slot {far} receives tokens but is held 2 times, by requests 0, 1" in error


# --- pages ---------------------------------------------------------------------------------------------------------


def test_a_request_that_needs_no_page_leaves_the_pool_as_it_is():
    run = host()
    same, slots = grow(run.pool, 1, 8)
    assert same is run.pool and slots == run.pool.pages(1)
    more, longer = grow(run.pool, 1, 9)
    assert more is not run.pool and longer[:2] == slots and len(longer) == 3
