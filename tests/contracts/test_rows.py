"""From local positions to rows of the cache."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import cases
from dsa_jax import metadata, ops
from dsa_jax.layout import PageIndex
from dsa_jax.metadata import Bucket, StepMetadata
from dsa_jax.xla import rows as xla_rows
from numpy_model import to_rows

MIXED = dict(
    contexts=[(7, 3), (0, 0)],
    decodes=[(9, 2), (6, 1)],
    next_n=2,
    padding=2,
    spare_requests=1,
    spare_columns=1,
)


def check(implementation: str, layout, facts) -> None:
    """Random positions, valid and not, against the NumPy model."""
    rng = np.random.default_rng(0)
    tokens = facts.tokens()
    local = rng.integers(-3, facts.width * facts.page_size + 5, (len(tokens), 9)).astype(np.int32)
    got = cases.to_rows(local, cases.step(facts, layout), implementation=implementation)
    wanted = to_rows(local, [r for r, _ in tokens], facts.held_table(), facts.page_size)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, wanted)
    assert (wanted >= 0).any()
    assert (wanted < 0).any()


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["to_rows"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_random_positions(implementation, page_size):
    requests = MIXED if page_size > 1 else MIXED | {"contexts": [(5, 3), (0, 0)]}
    check(implementation, cases.layout(page_size=page_size), cases.batch(**requests, page_size=page_size))


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["to_rows"])
def test_vector_90(implementation):
    """scale 3, layer offset 1, pages of 4, table [3, 7], position 6: row 7*4+2, in the pool (7*3+1)*4+2 = 90."""
    layout = cases.layout(full=(True, True, True))
    meta = StepMetadata.create(layout, Bucket(decode_requests=1, table_width=2), [[3, 7]], [8], [1])
    rows = cases.to_rows(np.array([[6]], np.int32), meta.derive(), implementation=implementation)
    assert rows.tolist() == [[30]]
    assert PageIndex(0, 3, 1).rows(rows, 4).tolist() == [[90]]
    assert layout.page_index(1, "key").rows(30, 4) == 90
    assert PageIndex(0, 3, 1).rows(jnp.array([-1], jnp.int32), 4).tolist() == [-1]


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["to_rows"])
def test_invalid_positions(implementation):
    """-1, a column past the table, a table entry of -1: each -1, and what is valid moves to the front."""
    layout = cases.layout()
    meta = StepMetadata.create(
        layout, Bucket(decode_requests=2, table_width=3), [[3, 7], [5]], [8, 2], [1, 1]
    )
    local = np.array([[-1, 6, 12, 8, 0], [4, 3, 99, -7, 0]], np.int32)
    rows = cases.to_rows(local, meta.derive(), implementation=implementation)
    assert rows.tolist() == [[30, 12, -1, -1, -1], [23, 20, -1, -1, -1]]


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["to_rows"])
@pytest.mark.parametrize(("tokens", "k"), [(0, 4), (2, 0)])
def test_no_tokens_or_positions(implementation, tokens, k):
    layout = cases.layout()
    step = StepMetadata.create(layout, Bucket(decode_requests=tokens, table_width=2), [], [], []).derive()
    assert ops.to_rows(jnp.zeros((tokens, k), jnp.int32), step, implementation=implementation).shape == (
        tokens,
        k,
    )


def test_planted_wrapping_table_lookup_is_seen(monkeypatch):
    """Plain indexing turns -1 into the last column and a request that does not exist into the last one."""

    def careless(table, requests, positions, page_size):
        slot = table[requests, positions // page_size]
        return slot * page_size + positions % page_size

    monkeypatch.setattr(xla_rows, "rows_of", careless)
    monkeypatch.setattr(
        cases, "to_rows", lambda local, step, implementation: ops.to_rows(jnp.asarray(local), step)
    )
    with pytest.raises(AssertionError):
        check("xla", cases.layout(), cases.batch(**(MIXED | {"spare_columns": 0})))
    assert metadata.rows_of is not careless


def test_errors():
    step = cases.step(cases.batch(decodes=[(1, 1), (1, 1)]), cases.layout())
    with pytest.raises(
        ValueError, match=r"to_rows: local has shape \[3, 4\], wanted \[N, K\] = \[2, any\].*per token place"
    ):
        ops.to_rows(jnp.zeros((3, 4), jnp.int32), step)
    with pytest.raises(ValueError, match=r"local has dtype float32, wanted int32"):
        ops.to_rows(jnp.zeros((2, 4)), step)
