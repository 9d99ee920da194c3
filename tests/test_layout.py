"""CacheLayout: the worked example and all storage forms, figure by figure."""

from __future__ import annotations

import pytest

from dsa_jax import layout as layout_module
from dsa_jax.layout import AddressMode, CacheLayout, Role
from layout_cases import array_bytes, narrow_config, small_config

MANAGERS = ("v1", "v2")
KEY_FORMS = {"bf16": 1152, "f32": 2304, "fp8": 576, "nvfp4": 324, "fp8_ds_mla": 656}
INDEX_FORMS = {"fp8": 132, "fp4": 68, "f32": 512}


# Four layers, the second and fourth shared, 64 tokens a page: all figures worked out by hand.


@pytest.mark.parametrize(
    ("key_form", "index_form", "key_page", "index_page", "slot"),
    [
        ("bf16", "fp8", 73728, 8448, 311808),
        ("fp8", "fp8", 36864, 8448, 164352),
        ("fp8", "fp4", 36864, 4352, 156160),
    ],
)
def test_worked_example_bytes(key_form, index_form, key_page, index_page, slot):
    layout = CacheLayout.create(small_config(), key_form=key_form, index_form=index_form)
    assert [pool.slot_bytes for pool in layout.pools] == [4 * key_page, 2 * index_page]
    assert [pool.roles for pool in layout.pools] == [(Role.KEY,), (Role.INDEX_KEY,)]
    assert layout.bytes_per_slot == slot
    assert layout.buffer(0, Role.KEY).size == key_page
    assert layout.buffer(2, Role.INDEX_KEY).size == index_page
    assert {pool.group for pool in layout.pools} == {0}


def test_worked_example_indices():
    layout = CacheLayout.create(small_config(), key_form="fp8")
    keys = [layout.page_index(layer, Role.KEY) for layer in range(4)]
    assert [(k.pool, k.scale, k.layer_offset, k.expansion) for k in keys] == [(0, 4, i, 1) for i in range(4)]
    assert [k.upper_bound(10) for k in keys] == [40, 39, 38, 37]
    assert [k.slots(k.upper_bound(10)) for k in keys] == [10] * 4  # the slot count, not the page bound
    assert [k.convert([7, -1]) for k in keys] == [[28, -1]] * 4
    assert [k.convert([7, -1], AddressMode.PER_LAYER) for k in keys] == [[28 + i, -1] for i in range(4)]
    indexers = [layout.page_index(layer, Role.INDEX_KEY) for layer in (0, 2)]
    assert [(k.pool, k.scale, k.layer_offset) for k in indexers] == [(1, 2, 0), (1, 2, 1)]
    assert [k.upper_bound(10) for k in indexers] == [20, 19]
    assert [k.convert([7]) for k in indexers] == [[14], [14]]
    assert layout.scale(Role.KEY) == 4
    assert layout.scale(Role.INDEX_KEY) == 2
    assert layout.scale(Role.KEY_BLOCK_SCALE) == 0
    assert layout.layer_offsets(Role.KEY) == (0, 1, 2, 3)
    assert layout.layer_offsets(Role.INDEX_KEY) == (0, -1, 1, -1)
    # Local position 200 lies 8 tokens into the fourth page, which is slot 7.
    assert keys[2].rows(7 * 64 + 8, 64) == 1928


@pytest.mark.parametrize(
    ("index_form", "page", "position", "data", "scale"),
    [("fp8", 8448, 126720, 119296, 126496), ("fp4", 4352, 65280, 61440, 65056)],
)
def test_worked_example_bytes_of_a_token(index_form, page, position, data, scale):
    layout = CacheLayout.create(small_config(), key_form="fp8", index_form=index_form)
    buffer = layout.buffer(2, Role.INDEX_KEY)
    assert buffer.base_offset() == page
    assert [buffer.byte_offset(7, mode) for mode in AddressMode] == [position, position]
    codes, scales = layout.arrays(10)[1:]
    # Relative to the layer's shared base, token 8 of slot 7.
    assert codes.byte_offset(14, 8) == data
    assert scales.byte_offset(14, 8) == scale


def test_worked_example_under_v1():
    layout = CacheLayout.create(small_config(), manager="v1", key_form="fp8")
    codes, scales = layout.arrays(10)[1:]
    # One page per block id in a layer's own view: page scale 1.
    assert codes.byte_offset(7, 8) == 60160
    assert scales.byte_offset(7, 8) == 67360
    assert codes.shape == (10, 2, 64, 128)
    assert layout.arrays(10)[0].shape == (10, 4, 64, 576)


# Storage forms.


@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize("key_form", KEY_FORMS)
@pytest.mark.parametrize("index_form", INDEX_FORMS)
@pytest.mark.parametrize("page_size", [1, 64, 256])
def test_array_bytes_equal_pool_bytes(manager, key_form, index_form, page_size):
    if key_form == "fp8_ds_mla":
        page_size = 64  # the only one that it takes
    config = small_config("FSSF")
    layout = CacheLayout.create(
        config, manager=manager, key_form=key_form, index_form=index_form, page_size=page_size
    )
    wanted = 4 * KEY_FORMS[key_form] + 2 * INDEX_FORMS[index_form]
    assert layout.bytes_per_token == wanted == sum(layout.bytes_per_token_by_role.values())
    assert (
        sum(array_bytes(spec) for spec in layout.arrays(5))
        == 5 * page_size * wanted
        == 5 * layout.bytes_per_slot
    )
    assert sum(pool.slot_bytes for pool in layout.pools) == layout.bytes_per_slot


@pytest.mark.parametrize(
    ("forms", "wanted"),
    [
        (
            ("bf16", "fp8"),
            {"key": ("bfloat16", (576,)), "index_key": ("uint8", (128,)), "index_scale": ("float32", ())},
        ),
        (("f32", "f32"), {"key": ("float32", (576,)), "index_key": ("float32", (128,))}),
        (
            ("fp8", "fp4"),
            {"key": ("uint8", (576,)), "index_key": ("uint8", (64,)), "index_scale": ("int32", ())},
        ),
        (
            ("nvfp4", "f32"),
            {"key": ("uint8", (288,)), "key_scale": ("uint8", (36,)), "index_key": ("float32", (128,))},
        ),
        (
            ("fp8_ds_mla", "f32"),
            {
                "key": ("uint8", (512,)),
                "key_scale": ("float32", (4,)),
                "key_rope": ("bfloat16", (64,)),
                "index_key": ("float32", (128,)),
            },
        ),
    ],
)
def test_array_shapes(forms, wanted):
    layout = CacheLayout.create(small_config("FSSF"), key_form=forms[0], index_form=forms[1])
    arrays = {spec.name: (spec.dtype, spec.shape[2:]) for spec in layout.arrays(3)}
    assert arrays == wanted
    pages = {spec.name: spec.shape[:2] for spec in layout.arrays(3)}
    assert pages == {name: (3 * (2 if name.startswith("index") else 4), 64) for name in wanted}


def test_block_scales_have_a_pool_of_their_own():
    layout = CacheLayout.create(small_config("FF"), key_form="nvfp4")
    assert layout.bytes_per_token_by_role == {Role.KEY: 576, Role.KEY_BLOCK_SCALE: 72, Role.INDEX_KEY: 264}
    assert [pool.roles for pool in layout.pools] == [(Role.KEY,), (Role.INDEX_KEY,), (Role.KEY_BLOCK_SCALE,)]
    assert layout.page_index(1, Role.KEY_BLOCK_SCALE) == layout_module.PageIndex(2, 2, 1)


# Narrow models.


def test_shared_layer_mask_of_a_narrow_model():
    for index_form, last, total in (("fp8", 132, 1032), ("fp4", 68, 904)):
        layout = CacheLayout.create(narrow_config("FSF"), index_form=index_form, page_size=16)
        assert layout.full == (True, False, True)
        assert layout.scale(Role.INDEX_KEY) == 2
        assert layout.bytes_per_token == 3 * 256 + 2 * last == total
        blocks = 8  # 2 requests of at most 64 tokens
        assert layout.page_index(0, Role.INDEX_KEY).upper_bound(blocks) == blocks * 2
        assert layout.buffer(0, Role.INDEX_KEY).size == 16 * last
        owners = [b.layer for pool in layout.pools for b in pool.buffers if b.role == Role.INDEX_KEY]
        assert owners == [0, 2]
        with pytest.raises(ValueError, match="shared-indexer layer"):
            layout.page_index(1, Role.INDEX_KEY)


@pytest.mark.parametrize("manager", MANAGERS)
def test_role_bytes_follow_the_mask(manager):
    layout = CacheLayout.create(small_config("FSF"), manager=manager, key_form="fp8")
    for layer, owner in enumerate((True, False, True)):
        roles = {b.role: b.size // 64 for pool in layout.pools for b in pool.buffers if b.layer == layer}
        assert roles == {Role.KEY: 576} | ({Role.INDEX_KEY: 132} if owner else {})
