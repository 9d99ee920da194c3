"""Coalescing of any declared buffers, conversion of slots to pages, representative layers, and the one KEY "
"pool.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_jax.coalesce import Buffer, LayerBuffers, coalesce, find_buffer
from dsa_jax.forms import Role
from dsa_jax.layout import check_dsa_pools
from dsa_jax.page_index import AddressMode, PageIndex
from dsa_jax.pool_views import pool_mapping, representatives, unique_primary_pool

K, V, I = Role.KEY, Role.VALUE, Role.INDEX_KEY


def declare(layer, window=None, sink_pages=0, **sizes):
    """`declare(0, key=100, index_key=20)`: a layer with buffers of these bytes per page."""
    buffers = tuple(Buffer(role=Role(role), page_bytes=size) for role, size in sizes.items())
    return LayerBuffers(layer=layer, buffers=buffers, window=window, sink_pages=sink_pages)


def places(pools):
    return [
        [(b.layer, str(b.role), b.offset, b.size, b.index.scale, b.index.layer_offset) for b in pool.buffers]
        for pool in pools
    ]


def test_grouping_by_size_in_declaration_order():
    pools = coalesce(
        [declare(0, key=30, index_key=50), declare(1, key=30), declare(2, key=30, index_key=50)], 4
    )
    # The two 50-byte buffers make the larger slot, so their pool comes first.
    assert [pool.slot_bytes for pool in pools] == [100, 90]
    assert places(pools) == [
        [(0, "index_key", 0, 50, 2, 0), (2, "index_key", 50, 50, 2, 1)],
        [(0, "key", 0, 30, 3, 0), (1, "key", 30, 30, 3, 1), (2, "key", 60, 30, 3, 2)],
    ]
    assert [pool.number for pool in pools] == [0, 1]


def test_equal_sizes_share_a_pool_layer_by_layer():
    pools = coalesce([declare(0, key=64, value=64), declare(1, key=64, value=64)], 4)
    assert places(pools) == [
        [
            (0, "key", 0, 64, 4, 0),
            (0, "value", 64, 64, 4, 1),
            (1, "key", 128, 64, 4, 2),
            (1, "value", 192, 64, 4, 3),
        ]
    ]


def test_life_cycles_make_groups():
    layers = [
        declare(0, key=10),
        declare(1, window=128, key=10),
        declare(2, key=20),
        declare(3, window=128, key=20),
    ]
    merged = coalesce(layers, 4)
    # Full and windowed layers have slots of 20 and 10 bytes each, so they share slots and pools.
    assert [(pool.group, pool.slot_bytes) for pool in merged] == [(0, 20), (0, 10)]
    assert [{b.life_cycle for b in pool.buffers} for pool in merged] == [{0, 1}, {0, 1}]
    assert {b.offset for pool in merged for b in pool.buffers} == {0}  # alternative uses of one slot
    apart = coalesce([*layers, declare(4, window=128, key=20)], 4)
    assert [(pool.group, pool.slot_bytes) for pool in apart] == [(0, 20), (0, 10), (1, 40), (1, 10)]
    sinks = coalesce([declare(0, window=128, key=10), declare(1, window=128, sink_pages=1, key=11)], 4)
    assert [pool.group for pool in sinks] == [0, 1]


def test_expansion():
    fine = Buffer(role=I, page_bytes=8, tokens_per_page=4)
    pools = coalesce([LayerBuffers(layer=0, buffers=(fine,)), LayerBuffers(layer=1, buffers=(fine,))], 16)
    buffer = find_buffer(pools, 1, I)
    assert (buffer.size, buffer.offset, buffer.index) == (32, 32, PageIndex(0, 2, 1, 4))
    assert buffer.page_stride == 8
    assert buffer.index.convert([3, -1]) == [24, 25, 26, 27, -1, -1, -1, -1]
    assert buffer.index.convert([3], AddressMode.PER_LAYER) == [28, 29, 30, 31]
    assert buffer.index.upper_bound(10) == (2 * 10 - 1) * 4
    assert buffer.index.slots(76) == 10
    assert buffer.byte_offset(3) == buffer.byte_offset(3, AddressMode.PER_LAYER) == 3 * 64 + 32
    for operation in (buffer.index.page, buffer.index.slot, lambda x: buffer.index.rows(x, 16)):
        with pytest.raises(ValueError, match="expansion 4"):
            operation(3)
    with pytest.raises(ValueError, match="index_key of layer 0 has expansion 4"):
        check_dsa_pools(pools)


def test_dsa_refuses_different_indexer_scales():
    pools = coalesce([declare(0, index_key=8), declare(1, index_key=8), declare(2, index_key=9)], 4)
    with pytest.raises(ValueError, match=r"different INDEX_KEY scales \[1, 2\]"):
        check_dsa_pools(pools)


@pytest.mark.parametrize(
    ("layers", "word"),
    [
        ([declare(0, key=1), declare(0, key=1)], "layer 0 is declared twice"),
        (
            [LayerBuffers(layer=3, buffers=(Buffer(role=K, page_bytes=1),) * 2)],
            "layer 3 declares role key twice",
        ),
        ([declare(0, key=0)], "page_bytes=0"),
        (
            [LayerBuffers(layer=0, buffers=(Buffer(role=K, page_bytes=1, tokens_per_page=3),))],
            "does not divide",
        ),
    ],
)
def test_refused_declarations(layers, word):
    with pytest.raises(ValueError, match=word):
        coalesce(layers, 16)


def test_extra_buffer_on_one_layer_only():
    """Four layers with KEY and VALUE of 1,024 bytes a token; the last one has an indexer key too."""
    page = 32
    layers = [declare(i, key=1024 * page, value=1024 * page) for i in range(3)]
    layers.append(declare(3, key=1024 * page, value=1024 * page, index_key=132 * page))
    pools = coalesce(layers, page)
    roles = {i: [b.role for pool in pools for b in pool.buffers if b.layer == i] for i in range(4)}
    assert roles == {0: [K, V], 1: [K, V], 2: [K, V], 3: [K, V, I]}
    assert find_buffer(pools, 3, I).size == 132 * page
    assert {find_buffer(pools, i, K).size for i in range(4)} == {1024 * page}
    with pytest.raises(ValueError, match="layer 0 has no index_key buffer"):
        find_buffer(pools, 0, I)


# Conversion.


def test_conversion_vector():
    index = PageIndex(0, 3, 1)
    table, token, page_size = [3, 7], 6, 4
    row = table[token // page_size] * page_size + token % page_size
    assert index.rows(row, page_size) == 90
    assert index.rows(-1, page_size) == -1
    assert index.page(-1) == -1
    assert index.page(7) == 22
    assert index.slot(22) == 7
    assert index.slot(-1) == -1
    with pytest.raises(ValueError, match="page 23 is no page of layer offset 1"):
        index.slot(23)
    with pytest.raises(ValueError, match="page 0 is no page"):
        index.slot(0)
    with pytest.raises(ValueError, match="21 is no page bound"):
        index.slots(21)


@pytest.mark.parametrize("kind", ["numpy", "jax", "traced", "traced offset"])
def test_conversion_of_arrays(kind):
    index = PageIndex(0, 3, 1)
    rows, slots = np.array([[30, -1], [0, 3]], np.int32), np.array([7, -1, 0], np.int32)
    if kind == "numpy":
        answers = index.rows(rows, 4), index.page(slots)
    elif kind == "jax":
        answers = index.rows(jnp.asarray(rows), 4), index.page(jnp.asarray(slots))
    elif kind == "traced":
        answers = jax.jit(lambda r, s: (index.rows(r, 4), index.page(s)))(rows, slots)
    else:
        traced = jax.jit(lambda r, s, o: (PageIndex(0, 3, o).rows(r, 4), PageIndex(0, 3, o).page(s)))
        answers = traced(rows, slots, jnp.int32(1))
    assert all(answer.dtype == np.int32 for answer in answers)
    np.testing.assert_array_equal(answers[0], [[90, -1], [4, 7]])
    np.testing.assert_array_equal(answers[1], [22, -1, 1])


def test_byte_offsets_pass_two_gibibytes():
    pools = coalesce([declare(0, index_key=64 * 132)], 64)
    buffer = find_buffer(pools, 0, I)
    assert buffer.byte_offset(254_200) + 16 * 128 == 2**31
    assert buffer.byte_offset(254_201) == 2_147_490_048
    with pytest.raises(ValueError, match="slot -1"):
        buffer.byte_offset(-1)


# Representatives.


def test_representative_does_not_depend_on_listing_order():
    """Head dimensions 64, 192, 64, 192: two pools, each of whose lists is reversed."""
    layers = [declare(i, key=dim) for i, dim in enumerate((64, 192, 64, 192))]
    pools = coalesce(layers, 1)
    reversed_pools = tuple(dataclasses.replace(pool, buffers=pool.buffers[::-1]) for pool in pools)
    for listing in (pools, reversed_pools):
        found = representatives(listing, K, range(4))
        assert {pool: buffer.layer for pool, buffer in found.items()} == {0: 1, 1: 0}
        assert all(buffer.offset == 0 for buffer in found.values())
        assert pool_mapping(listing, K, range(4)) == ((1, 0), (0, 0), (1, 1), (0, 1))


# The one KEY pool.


def test_unique_primary_pool():
    pools = coalesce([declare(i, key=64 * 1152, index_key=64 * 132) for i in range(3)], 64)
    assert unique_primary_pool(pools, range(3), 10, item_bytes=2) == (0, (10, 3, 1, 64 * 576))
    packed = coalesce([declare(0, key=64 * 288, key_block_scale=64 * 36)], 64)
    assert unique_primary_pool(packed, [0], 10) == (0, (10, 1, 1, 64 * 576 // 2))


def change(pools, layer, offset=None, **index):
    """The pools with one KEY buffer changed."""
    buffer = find_buffer(pools, layer, K)
    other = dataclasses.replace(buffer, index=dataclasses.replace(buffer.index, **index))
    if offset is not None:
        other = dataclasses.replace(other, offset=offset)
    return tuple(
        dataclasses.replace(pool, buffers=tuple(other if b is buffer else b for b in pool.buffers))
        for pool in pools
    )


PLAIN = coalesce([declare(i, key=8) for i in range(3)], 4)


@pytest.mark.parametrize(
    ("pools", "order", "keywords", "word"),
    [
        (PLAIN, (), {}, "no layers"),
        (coalesce([declare(0, key=8, value=16)], 4), (0,), {}, "VALUE buffers"),
        (PLAIN, (0, 1, 2), {"head_dims": [64, 192, 64]}, r"head dimensions \[64, 192\]"),
        (PLAIN, (0, 1, 2), {"head_counts": [1, 1, 2]}, r"head counts \[1, 2\]"),
        (change(PLAIN, 0, expansion=2), (0, 1, 2), {}, "layer 0 has expansion 2"),
        (PLAIN, (1, 0, 2), {}, "layer 1 has layer offset 1, wanted 0"),
        (coalesce([declare(i, key=8, index_key=8) for i in range(3)], 4), (0, 1, 2), {}, "6 pages per slot"),
        (PLAIN, (0, 2, 1), {}, "layer 2 has layer offset 2, wanted its position 1"),
        (change(PLAIN, 2, expansion=2), (0, 1, 2), {}, "layer 2 has pool 0, scale 3 and expansion 2"),
        (change(PLAIN, 1, scale=4), (0, 1, 2), {}, "layer 1 has pool 0, scale 4"),
        (change(PLAIN, 1, offset=9), (0, 1, 2), {}, "layer 1 starts at byte 9 of a slot, wanted 8"),
    ],
)
def test_unique_primary_pool_preconditions(pools, order, keywords, word):
    with pytest.raises(ValueError, match=word):
        unique_primary_pool(pools, order, 10, **keywords)
