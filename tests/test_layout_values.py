"""Layouts as values: refused arguments, equality, and the description as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from dsa_jax.config import preset
from dsa_jax.layout import CacheLayout, Role
from layout_cases import narrow_config, small_config

MANAGERS = ("v1", "v2")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"page_size": 48}, ["page_size=48", "power of two", "64"]),
        ({"page_size": 0}, ["page_size=0"]),
        ({"page_size": 512}, ["page_size=512"]),
        ({"page_size": True}, ["page_size=True"]),
        ({"page_size": 32, "key_form": "fp8_ds_mla"}, ["page_size=32", "fp8_ds_mla", "64"]),
        ({"key_form": "int8"}, ["key_form='int8'", "nvfp4"]),
        ({"index_form": "bf16"}, ["index_form='bf16'"]),
        ({"manager": "V2"}, ["manager='V2'"]),
        ({"scale_rule": "none"}, ["scale_rule='none'"]),
        ({"tie_rule": "up", "manager": "v3"}, ["tie_rule='up'", "manager='v3'"]),
        ({"layers": ()}, ["layers is empty"]),
        ({"layers": (0, 4)}, ["layers [4]", "0 .. 3"]),
        ({"layers": (1, 1)}, ["repeats"]),
        ({"layers": (-1,)}, ["layers [-1]"]),
    ],
)
def test_refused_arguments(changes, words):
    with pytest.raises(ValueError) as error:
        CacheLayout.create(small_config(), **changes)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_refused_dimensions():
    with pytest.raises(ValueError, match=r"656-byte token.*448"):
        CacheLayout.create(small_config(kv_lora_rank=448), key_form="fp8_ds_mla")
    with pytest.raises(ValueError, match=r"index_head_dim=128 only, got 64.*index_form='f32'"):
        CacheLayout.create(small_config(index_head_dim=64))
    with pytest.raises(ValueError, match="16 elements under one scale"):
        CacheLayout.create(small_config(kv_lora_rank=504), key_form="nvfp4")
    assert CacheLayout.create(small_config(index_head_dim=64), index_form="f32").index_head_dim == 64


def test_roles_of_equal_width_share_a_pool_and_have_no_typed_array():
    # 64 + 64 elements of KEY are as wide as an indexer key: V2 puts both into one pool.
    config = narrow_config("FSF", key_width=128)
    layout = CacheLayout.create(config, key_form="f32", index_form="f32")
    assert [pool.roles for pool in layout.pools] == [(Role.KEY, Role.INDEX_KEY)]
    assert layout.layer_offsets(Role.KEY) == (0, 2, 3)
    assert layout.layer_offsets(Role.INDEX_KEY) == (1, -1, 4)
    with pytest.raises(ValueError, match=r"key and index_key have 32768 bytes.*coalesced into pool 0"):
        layout.arrays(2)
    assert "coalesced into pool 0" in layout.to_dict()["arrays_refused"]
    assert "no typed arrays" in layout.table()
    separate = CacheLayout.create(config, manager="v1", key_form="f32", index_form="f32")
    assert [spec.name for spec in separate.arrays(2)] == ["key", "index_key"]


def test_unknown_roles_and_slot_counts():
    layout = CacheLayout.create(small_config())
    with pytest.raises(ValueError, match="no key_block_scale buffer"):
        layout.page_index(0, Role.KEY_BLOCK_SCALE)
    with pytest.raises(ValueError, match="slots=0"):
        layout.arrays(0)


# As values.


def test_layouts_are_values():
    first = CacheLayout.create(small_config())
    second = CacheLayout.create(small_config())
    assert first == second
    assert hash(first) == hash(second)
    assert len({first, second, CacheLayout.create(small_config(), manager="v1")}) == 2
    assert first != CacheLayout.create(small_config(), hadamard=False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.page_size = 32  # type: ignore[misc]


def test_forms_survive_a_rebuild():
    layout = CacheLayout.create(small_config(), index_form="fp4", tie_rule="even")
    again = dataclasses.replace(layout, hadamard=False)
    assert (again.index_form, again.tie_rule) == ("fp4", "even")
    assert again.arrays(1) == layout.arrays(1)


def test_table_names_pools_and_bytes():
    text = str(CacheLayout.create(preset("glm-5.2"), key_form="fp8"))
    assert "21 of 78 with an indexer" in text
    assert "47,700" in text
    assert "3,052,800" in text
    assert "78x64x576" in text


@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize(
    ("key_form", "index_form"), [("fp8_ds_mla", "fp8"), ("nvfp4", "fp4"), ("bf16", "f32")]
)
def test_json_is_enough_to_move_pages(manager, key_form, index_form):
    """Packs typed arrays by the JSON text alone; every byte of the pools is written exactly once and reads
    back.
    """
    layout = CacheLayout.create(
        small_config("FSF"), manager=manager, key_form=key_form, index_form=index_form
    )
    slots = 3
    described = json.loads(layout.to_json(slots))
    rng = np.random.default_rng(0)
    sizes = {"uint8": 1, "bfloat16": 2, "float32": 4, "int32": 4}
    pools = [np.zeros(slots * pool["slot_bytes"], np.uint8) for pool in described["pools"]]
    written = [np.zeros(slots * pool["slot_bytes"], np.int8) for pool in described["pools"]]
    arrays = {}
    for array in described["arrays"]:
        size = sizes[array["dtype"]] * int(np.prod(array["shape"]))
        values = rng.integers(1, 256, size, dtype=np.uint8).reshape(-1, 64, array["token_bytes"])
        arrays[array["name"]] = values
        for page in range(values.shape[0]):
            for token in range(64):
                start = page * array["page_bytes"] + array["page_offset"] + token * array["token_stride"]
                pools[array["pool"]][start : start + array["token_bytes"]] = values[page, token]
                written[array["pool"]][start : start + array["token_bytes"]] += 1
    assert all((pool == 1).all() for pool in written)
    # The buffers' own description finds the same page: slot 2 of local layer 2, token 5 of its indexer keys.
    place = next(
        b for p in described["pools"] for b in p["buffers"] if (b["layer"], b["role"]) == (2, "index_key")
    )
    array = next(a for a in described["arrays"] if a["name"] == "index_key")
    start = 2 * described["pools"][array["pool"]]["slot_bytes"] + place["offset"] + 5 * array["token_stride"]
    found = pools[array["pool"]][start : start + array["token_bytes"]]
    page = layout.page_index(2, Role.INDEX_KEY).page(2)
    np.testing.assert_array_equal(found, arrays["index_key"][page, 5])
