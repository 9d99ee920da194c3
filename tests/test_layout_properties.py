"""Properties of coalescing over random declarations."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_jax.coalesce import Buffer, LayerBuffers, coalesce, find_buffer
from dsa_jax.layout import AddressMode, CacheLayout, Role
from layout_cases import array_bytes, small_config

few = settings(max_examples=40, deadline=None)
role_sizes = st.dictionaries(
    st.sampled_from(list(Role)), st.sampled_from([3, 4, 8, 12, 24]), min_size=1, max_size=4
)
page_sizes = st.sampled_from([1, 2, 4, 8])


@st.composite
def declarations(draw):
    """Layers with random ids, windows, roles, sizes and finer pages, and the manager's page size."""
    page_size = draw(page_sizes)
    layers = []
    for layer in draw(st.lists(st.integers(0, 40), min_size=1, max_size=6, unique=True)):
        sizes = draw(role_sizes)
        fine = {role: draw(st.sampled_from([None, 1, page_size])) for role in sizes}
        buffers = tuple(Buffer(role=r, page_bytes=s, tokens_per_page=fine[r]) for r, s in sizes.items())
        layers.append(
            LayerBuffers(layer=layer, buffers=buffers, window=draw(st.sampled_from([None, None, 16])))
        )
    return layers, page_size


@few
@given(declarations())
def test_every_byte_of_a_slot_belongs_to_one_buffer(case):
    layers, page_size = case
    pools = coalesce(layers, page_size)
    declared = {(layer.layer, buffer.role) for layer in layers for buffer in layer.buffers}
    assert {(b.layer, b.role) for pool in pools for b in pool.buffers} == declared
    for pool in pools:
        for life_cycle in {b.life_cycle for b in pool.buffers}:
            owners = np.zeros(pool.slot_bytes, np.int32)
            for buffer in (b for b in pool.buffers if b.life_cycle == life_cycle):
                owners[buffer.offset : buffer.offset + buffer.size] += 1
                assert buffer.index.scale * buffer.size == pool.slot_bytes
                assert buffer.offset == buffer.index.layer_offset * buffer.size
            assert (owners == 1).all()
    for group in {pool.group for pool in pools}:
        sizes = [pool.slot_bytes for pool in pools if pool.group == group]
        assert sizes == sorted(sizes, reverse=True)


@few
@given(declarations(), st.integers(0, 100), st.integers(1, 100))
def test_conversion_modes_and_inverse(case, slot, slots):
    layers, page_size = case
    for pool in coalesce(layers, page_size):
        for buffer in pool.buffers:
            index = buffer.index
            wanted = slot * pool.slot_bytes + buffer.offset
            assert [buffer.byte_offset(slot, mode) for mode in AddressMode] == [wanted, wanted]
            for mode in AddressMode:
                assert index.convert([-1, slot], mode)[: index.expansion] == [-1] * index.expansion
            assert index.slots(index.upper_bound(slots)) == slots
            # The last page of the last slot is the last below the bound.
            assert (
                index.convert([slots - 1])[-1]
                < index.upper_bound(slots)
                <= slots * index.scale * index.expansion
            )
            if index.expansion == 1:
                assert index.slot(index.page(slot)) == slot
                rows = np.arange(slot * 4, slot * 4 + 4)
                assert (index.rows(rows, 4) // 4 == index.page(slot)).all()
                assert (index.rows(rows, 4) % 4 == np.arange(4)).all()


@few
@given(declarations(), st.integers(0, 2**32 - 1))
def test_coalesced_pool_equals_separate_pools(case, seed):
    """The same random page writes into coalesced pools and into one array per buffer leave the same bytes."""
    layers, page_size = case
    layers = [
        LayerBuffers(layer=la.layer, buffers=la.buffers) for la in layers
    ]  # one life cycle: all live at once
    pools, slots = coalesce(layers, page_size), 3
    rng = np.random.default_rng(seed)
    memory = [np.zeros(slots * pool.slot_bytes, np.uint8) for pool in pools]
    separate = {}
    for layer in layers:
        for buffer in layer.buffers:
            size = find_buffer(pools, layer.layer, buffer.role).size
            separate[layer.layer, buffer.role] = np.zeros((slots, size), np.uint8)
    names = list(separate)
    for _ in range(10):
        name, slot = names[rng.integers(len(names))], int(rng.integers(slots))
        place = find_buffer(pools, *name)
        values = rng.integers(0, 256, place.page_stride, dtype=np.uint8)
        part = int(rng.integers(place.index.expansion))
        mode = list(AddressMode)[rng.integers(2)]
        start = place.base_offset(mode) + place.index.convert([slot], mode)[part] * place.page_stride
        memory[place.index.pool][start : start + values.size] = values
        separate[name][slot, part * values.size : (part + 1) * values.size] = values
    for name, wanted in separate.items():
        place = find_buffer(pools, *name)
        pool = memory[place.index.pool].reshape(slots, -1)
        np.testing.assert_array_equal(pool[:, place.offset : place.offset + place.size], wanted)


@few
@given(
    st.text("FS", min_size=0, max_size=7).map(lambda rest: "F" + rest),
    st.sampled_from(["bf16", "f32", "fp8", "nvfp4"]),
    st.sampled_from(["fp8", "fp4", "f32"]),
    st.sampled_from([1, 4, 32, 256]),
    st.data(),
)
def test_managers_agree_on_everything_but_shape(letters, key_form, index_form, page_size, data):
    first = data.draw(st.integers(0, len(letters) - 1))
    stage = tuple(range(first, data.draw(st.integers(first, len(letters) - 1)) + 1))
    forms = {"key_form": key_form, "index_form": index_form, "page_size": page_size, "layers": stage}
    v1, v2 = (CacheLayout.create(small_config(letters), manager=m, **forms) for m in ("v1", "v2"))
    for role in (Role.KEY, Role.KEY_BLOCK_SCALE, Role.INDEX_KEY):
        assert v1.layer_offsets(role) == v2.layer_offsets(role)
        assert v1.scale(role) == v2.scale(role)
    assert v1.bytes_per_token_by_role == v2.bytes_per_token_by_role
    for a, b in zip(v1.arrays(3), v2.arrays(3), strict=True):
        assert (a.name, a.dtype) == (b.name, b.dtype)
        assert (a.shape[0] * a.shape[1], *a.shape[2:]) == b.shape
        assert array_bytes(a) == array_bytes(b)
