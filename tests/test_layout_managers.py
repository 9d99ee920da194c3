"""V1 and V2 derive their own maps: rank-local layers, compact indexer rows, encoded tables."""

from __future__ import annotations

import numpy as np
import pytest

from dsa_jax import layout as layout_module
from dsa_jax.config import preset
from dsa_jax.layout import CacheLayout, Role
from dsa_jax.layout_v1 import v1_rows
from layout_cases import small_config

MANAGERS = ("v1", "v2")


# Layers.


@pytest.mark.parametrize("manager", MANAGERS)
def test_compact_indexer_rows(manager):
    config = small_config("FFFSSSFS")
    layout = CacheLayout.create(config, manager=manager)
    assert layout.layer_offsets(Role.INDEX_KEY) == (0, 1, 2, -1, -1, -1, 3, -1)
    assert layout.scale(Role.INDEX_KEY) == 4
    with pytest.raises(ValueError, match=r"local layer 4.*shared-indexer layer"):
        layout.page_index(4, Role.INDEX_KEY)
    everything = CacheLayout.create(small_config("F" * 8), manager=manager)
    assert everything.layer_offsets(Role.INDEX_KEY) == tuple(range(8))


@pytest.mark.parametrize("manager", MANAGERS)
def test_pipeline_stage_uses_local_numbers(manager):
    config = small_config("FFFSSSFS", num_mtp_layers=1, full_layers=(*map("F".__eq__, "FFFSSSFS"), True))
    stage = CacheLayout.create(config, manager=manager, layers=(4, 5, 6, 7))
    assert stage.full == (False, False, True, False)
    assert stage.page_index(1, Role.KEY) == layout_module.PageIndex(0, 4, 1)  # global layer 5
    assert stage.page_index(2, Role.INDEX_KEY) == layout_module.PageIndex(1, 1, 0)
    draft = CacheLayout.create(config, manager=manager, layers=(8,))
    assert draft.page_index(0, Role.KEY) == layout_module.PageIndex(0, 1, 0)
    assert draft.full == (True,)
    with pytest.raises(ValueError, match=r"layer 5 is out of range.*0 \.\. 3.*4-7"):
        stage.page_index(5, Role.KEY)


@pytest.mark.parametrize("manager", MANAGERS)
def test_stage_of_shared_layers_has_no_indexer_bytes(manager):
    stage = CacheLayout.create(preset("glm-5.2"), manager=manager, layers=(3, 4, 5))
    assert stage.bytes_per_token == 3 * 1152
    assert Role.INDEX_KEY not in stage.bytes_per_token_by_role
    assert stage.scale(Role.INDEX_KEY) == 0
    assert stage.layer_offsets(Role.INDEX_KEY) == (-1, -1, -1)
    assert [spec.name for spec in stage.arrays(2)] == ["key"]
    with pytest.raises(ValueError, match=r"global 4.*shared-indexer layer"):
        stage.page_index(1, Role.INDEX_KEY)


@pytest.mark.parametrize("manager", MANAGERS)
def test_model_without_indexer(manager):
    layout = CacheLayout.create(preset("deepseek-v3"), manager=manager)
    assert layout.bytes_per_token == 61 * 1152
    assert layout.hadamard is False


# V1 and V2 are two derivations.


def both_maps(config):
    maps = []
    for manager in MANAGERS:
        layout = CacheLayout.create(config, manager=manager)
        maps.append(tuple(layout.layer_offsets(role) for role in (Role.KEY, Role.INDEX_KEY)))
    return maps


def test_both_managers_derive_the_same_maps():
    wanted = ((0, 1, 2, 3, 4, 5, 6, 7), (0, 1, 2, -1, -1, -1, 3, -1))
    assert both_maps(small_config("FFFSSSFS")) == [wanted, wanted]


def test_a_broken_v1_derivation_shows_in_v1_only(monkeypatch):
    right = both_maps(small_config("FFSF"))
    monkeypatch.setattr("dsa_jax.layout_v1.v1_rows", lambda owners: tuple(reversed(v1_rows(owners))))
    wrong = both_maps(small_config("FFSF"))
    assert wrong[0] != right[0]
    assert wrong[1] == right[1]


def test_a_broken_v2_derivation_shows_in_v2_only(monkeypatch):
    right = both_maps(small_config("FFSF"))
    coalesce = layout_module.coalesce
    monkeypatch.setattr(
        layout_module, "coalesce", lambda layers, page_size: coalesce(layers[::-1], page_size)
    )
    wrong = both_maps(small_config("FFSF"))
    assert wrong[0] == right[0]
    assert wrong[1] != right[1]


@pytest.mark.parametrize("manager", MANAGERS)
def test_layers_of_a_pool_do_not_mix(manager):
    """Pages written through each layer's index lie where the pool's own shape says, scales included."""
    layout = CacheLayout.create(small_config("FFSF"), manager=manager, page_size=4)
    owners = {0: 0, 1: 1, 3: 2}  # local layer -> row of the compact pool
    for spec in layout.arrays(2)[1:]:
        pages = np.zeros((2 * 3, *spec.shape[2 if manager == "v1" else 1 :]))
        for layer in owners:
            for slot in range(2):
                pages[layout.page_index(layer, Role.INDEX_KEY).page(slot)] += 10 * layer + slot + 1
        pool = pages.reshape(2, 3, -1)
        for layer, row in owners.items():
            assert (pool[:, row] == 10 * layer + np.array([[1], [2]])).all()


def test_encoded_tables_of_v1():
    raw = np.array([[5, 0, -1], [15, -1, -1]], np.int32)
    encoded = layout_module.encode_v1_table(raw, 61)
    assert encoded.tolist() == [[305, 0, -1], [915, -1, -1]]
    decoded = layout_module.decode_v1_table(encoded, 61, 16)
    assert decoded.dtype == np.int32
    np.testing.assert_array_equal(decoded, raw)
    # An entry beyond the pool is clamped to the last slot; a missing page stays missing.
    assert layout_module.decode_v1_table([61 * 40, -61, 3], 61, 16).tolist() == [15, -1, 0]
    # Offsets pass 2**31 before they are divided.
    assert layout_module.decode_v1_table([61 * (2**30)], 61, 2**31 - 1).tolist() == [2**30]
    for arguments in ((0, 16), (61, 0)):
        with pytest.raises(ValueError, match="must be at least 1"):
            layout_module.decode_v1_table([0], *arguments)
