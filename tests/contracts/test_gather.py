"""Reading back: the contexts' whole key history, packed, and zeros where there is nothing."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import cases
from dsa_jax import ops
from dsa_jax.cache import Cache
from numpy_model import Facts, row_of

CONTEXTS = [(9, 2), (0, 0), (1, 1), (6, 6)]
"""A prefix, an empty request, a single token, a fresh prompt."""


def history(facts: Facts, request: int) -> list[int]:
    """Rows of all keys of a request."""
    table = facts.held_table()
    return [row_of(table, request, p, facts.page_size) for p in range(facts.kv_lens[request])]


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["gather_index_k"])
@pytest.mark.parametrize(
    ("manager", "form", "page_size"),
    [
        ("v1", "fp8", 1),
        ("v2", "fp8", 1),
        ("v1", "f32", 4),
        ("v2", "fp8", 4),
        ("v2", "f32", 16),
        ("v1", "fp8", 64),
    ],
)
def test_round_trip(implementation, manager, form, page_size):
    """Bit for bit what was written, layer by layer, out of a pool of NaN bytes; zeros beyond the last key."""
    layout = cases.layout(manager, index=form, page_size=page_size)
    facts = cases.batch(CONTEXTS, [(5, 1)], page_size=page_size, spare_columns=1, gathered=19)
    cache, rng, written = cases.poisoned(layout), np.random.default_rng(3), {}
    for layer in (0, 2):
        keys = rng.normal(size=(16, layout.index_head_dim)).astype(np.float32)
        rows = [row for request in range(4) for row in history(facts, request)]
        cache = cases.write_keys(cache, layer, rows, keys)
        written[layer] = cases.stored_keys(layout, keys)
    step = cases.step(facts, layout)
    for layer, (data, scale) in written.items():
        got, got_scale = cases.gather_index_k(cache, layer, step, implementation=implementation)
        assert got.shape == (19, layout.index_head_dim)
        np.testing.assert_array_equal(got[:16], data)
        assert not np.asarray(got[16:]).any()
        if scale is None:
            assert got_scale is None
        else:
            np.testing.assert_array_equal(got_scale, np.concatenate([scale, np.zeros(3, np.float32)]))


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["gather_index_k"])
def test_missing_pages_read_as_zeros(implementation):
    """A page that does not exist, or lies past the pool, gives zeros and no one else's keys."""
    layout = cases.layout(index="fp8")
    facts = cases.batch([(9, 9)], gathered=9)
    facts.tables[0][1] = cases.SLOTS  # one past the pool
    step = cases.step(facts, layout)
    keys = np.random.default_rng(0).normal(size=(9, 128))
    cache = cases.write_keys(
        cases.poisoned(layout), 2, [*history(facts, 0)[:4], -1, -1, -1, -1, history(facts, 0)[8]], keys
    )
    codes, scale = cases.gather_index_k(cache, 2, step, implementation=implementation)
    expected_codes, expected_scale = cases.stored_keys(layout, keys)
    assert expected_scale is not None
    expected_codes[4:8], expected_scale[4:8] = 0, 0
    np.testing.assert_array_equal(codes, expected_codes)
    np.testing.assert_array_equal(scale, expected_scale)


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["gather_index_k"])
def test_traced_layer_without_indexer_reads_zeros(implementation):
    layout = cases.layout()
    step = cases.step(cases.batch([(3, 3)]), layout)
    data, _ = cases.gather_index_k(cases.poisoned(layout), jnp.int32(1), step, implementation=implementation)
    assert data.shape == (5, 8)
    assert not np.asarray(data).any()


def test_errors():
    layout = cases.layout()
    cache = Cache.create(layout, 3)
    step = cases.step(cases.batch([(3, 3)]), layout)
    with pytest.raises(ValueError, match="shared-indexer layer"):
        ops.gather_index_k(cache, 1, step)
    with pytest.raises(ValueError, match=r"gather_index_k: .*layout is not the cache's.*layout=cache.layout"):
        ops.gather_index_k(Cache.create(cases.layout(page_size=16), 3), 0, step)
    without_room = cases.step(cases.batch([(3, 3)], gathered=0), layout)
    with pytest.raises(ValueError, match=r"gather_index_k: .*gathered_keys"):
        ops.gather_index_k(cache, 0, without_room)
