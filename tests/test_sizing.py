"""Bytes per token, quotas and slots, score chunks, and plans: figures of released models, worked out by "
"hand.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_jax.cache import Cache
from dsa_jax.config import preset
from dsa_jax.layout import CacheLayout, Role
from dsa_jax.planning import plan
from dsa_jax.sizing import (
    CacheCost,
    agree_on_tokens,
    cache_quota,
    layout_cost,
    pages_per_seq,
    parse_bytes,
    quota_for_slots,
    quota_for_tokens,
    rows_per_chunk,
    slots_for_quota,
    static_cost,
    tokens_for_quota,
)
from layout_cases import array_bytes, small_config

GIB, GRAIN = 2**30, 2**21

# model, KEY, INDEX_KEY, bytes a token, bytes a page slot of 64, slots in 40 GiB, share of the indexer in percent
FIGURES = [
    ("deepseek-v3.2", "bf16", "fp8", 78324, 5012736, 8568, 10.3),
    ("deepseek-v3.2", "bf16", "fp4", 74420, 4762880, 9017, 5.6),
    ("deepseek-v3.2", "fp8", "fp8", 43188, 2764032, 15538, 18.6),
    ("deepseek-v3.2", "fp8", "fp4", 39284, 2514176, 17083, 10.6),
    ("deepseek-v3.2", "nvfp4", "fp8", 27816, 1780224, 24125, 28.9),
    ("deepseek-v3.2", "fp8_ds_mla", "fp8", 48068, 3076352, 13961, 16.8),
    ("glm-5", "bf16", "fp8", 100152, 6409728, 6700, 10.3),
    ("glm-5", "fp8", "fp8", 55224, 3534336, 12152, 18.6),
    ("glm-5", "fp8", "fp4", 50232, 3214848, 13359, 10.6),
    ("glm-5", "fp8_ds_mla", "fp8", 61464, 3933696, 10918, 16.8),
    ("glm-5.1", "fp8", "fp8", 55224, 3534336, 12152, 18.6),
    ("glm-5.2", "bf16", "fp8", 92628, 5928192, 7244, 3.0),
    ("glm-5.2", "bf16", "fp4", 91284, 5842176, 7351, 1.6),
    ("glm-5.2", "fp8", "fp8", 47700, 3052800, 14068, 5.8),
    ("glm-5.2", "fp8", "fp4", 46356, 2966784, 14476, 3.1),
    ("glm-5.2", "nvfp4", "fp8", 28044, 1794816, 23929, 9.9),
    ("glm-5.2", "fp8_ds_mla", "fp8", 53940, 3452160, 12441, 5.1),
]


@pytest.mark.parametrize("manager", ["v1", "v2"])
@pytest.mark.parametrize(("model", "key_form", "index_form", "token", "slot", "slots", "share"), FIGURES)
def test_figures_of_released_models(manager, model, key_form, index_form, token, slot, slots, share):
    config = preset(model)
    layout = CacheLayout.create(config, manager=manager, key_form=key_form, index_form=index_form)
    assert layout.bytes_per_token == token
    assert layout.bytes_per_slot == slot
    assert slots_for_quota(layout, 40 * GIB) == slots
    assert 100 * layout.bytes_per_token_by_role[Role.INDEX_KEY] / token == pytest.approx(share, abs=0.05001)
    assert (
        static_cost(config, key_form=key_form, index_form=index_form)
        == layout_cost(layout)
        == CacheCost(token)
    )
    assert sum(array_bytes(spec) for spec in layout.arrays(16)) == 16 * slot


@pytest.mark.parametrize("manager", ["v1", "v2"])
@pytest.mark.parametrize(
    ("model", "wanted"), [("deepseek-v3.2", 78324), ("glm-5.2", 92628), ("deepseek-v3", 70272)]
)
def test_abstract_caches_have_exactly_these_bytes(manager, model, wanted):
    layout = CacheLayout.create(preset(model), manager=manager)
    assert Cache.abstract(layout, 16).nbytes == 16 * 64 * wanted


@pytest.mark.parametrize("manager", ["v1", "v2"])
def test_allocated_cache_has_exactly_these_bytes(manager):
    layout = CacheLayout.create(small_config("FSF"), manager=manager, page_size=16)
    leaves = Cache.create(layout, 16).pools().values()
    assert sum(leaf.nbytes for leaf in leaves) == 16 * 16 * (3 * 1152 + 2 * 132)


def test_slot_bytes_of_released_models():
    v32 = CacheLayout.create(preset("deepseek-v3.2"), key_form="fp8")
    assert [(pool.slot_bytes, pool.scale) for pool in v32.pools] == [(2248704, 61), (515328, 61)]
    glm = CacheLayout.create(preset("glm-5.2"), key_form="fp8")
    assert (glm.scale(Role.KEY), glm.scale(Role.INDEX_KEY)) == (78, 21)
    draft = CacheLayout.create(preset("glm-5.2"), key_form="fp8", layers=(78,))
    assert draft.bytes_per_token == 708
    assert (draft.scale(Role.KEY), draft.scale(Role.INDEX_KEY)) == (1, 1)


def test_indexer_bytes_do_not_follow_the_latent():
    """The indexer's bytes are the same under every KEY form, and never charged at the latent's item size."""
    for model, fp8, fp4 in (("deepseek-v3.2", 8052, 4148), ("glm-5", 10296, 5304), ("glm-5.2", 2772, 1428)):
        for key_form in ("bf16", "f32", "fp8", "nvfp4", "fp8_ds_mla"):
            for index_form, wanted in (("fp8", fp8), ("fp4", fp4)):
                layout = CacheLayout.create(preset(model), key_form=key_form, index_form=index_form)
                assert layout.bytes_per_token_by_role[Role.INDEX_KEY] == wanted


def test_fp4_index_keys_take_about_half():
    fp8, fp4 = (
        CacheLayout.create(small_config("F"), index_form=form).bytes_per_token_by_role[Role.INDEX_KEY]
        for form in ("fp8", "fp4")
    )
    assert (fp8, fp4) == (132, 68)
    assert fp4 / fp8 < 0.52


# Estimates before a cache exists.


@pytest.mark.parametrize(
    ("key_form", "index_form", "wanted"),
    [
        ("bf16", "fp8", 1284),
        ("bf16", "fp4", 1220),
        ("fp8", "fp8", 708),
        ("fp8", "fp4", 644),
        ("nvfp4", "fp8", 456),
    ],
)
def test_draft_caches_are_charged_with_their_own_layers(key_form, index_form, wanted):
    config = preset("glm-5.2")
    forms: dict[str, Any] = {"key_form": key_form, "index_form": index_form}
    assert static_cost(config, num_layers=1, **forms).bytes_per_token == wanted
    assert static_cost(config, num_layers=0, **forms).bytes_per_token == wanted
    assert static_cost(config, num_layers=3, **forms).bytes_per_token == 3 * wanted
    assert static_cost(config, layers=(78,), **forms).bytes_per_token == wanted
    both = static_cost(config, **forms) + static_cost(config, num_layers=1, **forms)
    assert both.bytes_per_token == static_cost(config, layers=range(79), **forms).bytes_per_token


def test_estimate_of_a_stage_and_of_a_model_without_indexer():
    assert static_cost(preset("glm-5.2"), layers=(3, 4, 5)).bytes_per_token == 3 * 1152
    assert static_cost(preset("glm-5.2"), layers=(5, 6)).bytes_per_token == 2 * 1152 + 132
    assert static_cost(preset("deepseek-v3")).bytes_per_token == 61 * 1152
    assert static_cost(preset("deepseek-v3"), num_layers=1).bytes_per_token == 1152


def test_refused_estimates():
    with pytest.raises(ValueError, match="layers and num_layers are both given"):
        static_cost(preset("glm-5"), layers=(0,), num_layers=1)
    with pytest.raises(ValueError, match="cannot support key_form='int4'"):
        static_cost(preset("glm-5"), key_form="int4")
    with pytest.raises(TypeError, match="kv_heads"):
        static_cost(preset("glm-5"), kv_heads=2)  # type: ignore[call-arg]


def test_cost_line():
    cost = CacheCost(100, 1000) + CacheCost(20)
    assert cost == CacheCost(120, 1000)
    assert cost.bytes(5) == 1600
    assert [cost.tokens(budget) for budget in (999, 1119, 1120, 1600, 1719)] == [0, 0, 1, 5, 5]
    assert CacheCost(0, 10).tokens(100) == 0


# Quotas and slots.


@pytest.mark.parametrize(
    ("model", "key_form", "quota", "grain", "slots"),
    [
        ("deepseek-v3.2", "fp8", 40 * GIB, GRAIN, 15538),
        ("deepseek-v3.2", "fp8", 40 * GIB, 1, 15538),
        ("FSFS", "fp8", 64 * 2**20, GRAIN, 398),
        ("FSFS", "fp8", 64 * 2**20, 1, 408),
        ("FSFS", "bf16", 64 * 2**20, GRAIN, 213),
        ("FSFS", "bf16", 64 * 2**20, 1, 215),
        ("FSFS", "bf16", 311807, 1, 0),
        ("FSFS", "bf16", 311808, 1, 1),
        ("FSFS", "bf16", 2 * GRAIN - 1, GRAIN, 0),
        ("FSFS", "bf16", -5, 1, 0),
    ],
)
def test_slots_for_quota(model, key_form, quota, grain, slots):
    config = small_config(model) if set(model) <= set("FS") else preset(model)
    layout = CacheLayout.create(config, key_form=key_form)
    assert slots_for_quota(layout, quota, grain_bytes=grain) == slots
    assert quota_for_slots(layout, slots, grain_bytes=grain) <= max(quota, 0)
    assert quota_for_slots(layout, slots + 1, grain_bytes=grain) > quota // grain * grain


def test_each_pool_rounds_up_on_its_own():
    layout = CacheLayout.create(small_config(), key_form="fp8")
    # 147,456 and 16,896 bytes a slot: one grain each, then 15 slots of KEY pass the first grain.
    assert quota_for_slots(layout, 1, grain_bytes=GRAIN) == 2 * GRAIN
    assert quota_for_slots(layout, 14, grain_bytes=GRAIN) == 2 * GRAIN
    assert quota_for_slots(layout, 15, grain_bytes=GRAIN) == 3 * GRAIN
    assert quota_for_slots(layout, 0, grain_bytes=GRAIN) == 0


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**34), st.sampled_from([1, 4096, GRAIN]), st.sampled_from([1, 64, 256]), st.booleans())
def test_quota_and_back(quota, grain, page_size, with_draft):
    config = preset("glm-5.2")
    layouts = [CacheLayout.create(config, page_size=page_size)]
    if with_draft:
        layouts.append(CacheLayout.create(config, page_size=page_size, layers=(78,)))
    slots = slots_for_quota(layouts, quota, grain_bytes=grain)
    assert quota_for_slots(layouts, slots, grain_bytes=grain) <= quota
    assert quota_for_slots(layouts, slots + 1, grain_bytes=grain) > quota // grain * grain
    assert slots <= quota // sum(layout.bytes_per_slot for layout in layouts)
    assert slots_for_quota(layouts, quota + grain, grain_bytes=grain) >= slots
    tokens = tokens_for_quota(layouts, quota)
    assert quota_for_tokens(layouts, tokens) <= quota < quota_for_tokens(layouts, tokens + 1)
    assert tokens_for_quota(layouts, quota_for_tokens(layouts, tokens)) == tokens


def test_cache_quota():
    layout = CacheLayout.create(small_config())  # 4,872 bytes a token
    assert cache_quota(layout, max_tokens=100) == 487200
    assert cache_quota(layout, max_tokens=100, max_bytes=400000) == 400000
    assert cache_quota(layout, max_bytes=400000) == 400000
    assert cache_quota(layout, max_tokens=100, usable_fraction=0.95) == 512843  # 487,200 / 0.95 = 512,842.1
    assert cache_quota(layout, max_tokens=10**15) == 4872 * 10**15
    with pytest.raises(ValueError, match="neither max_tokens nor max_bytes"):
        cache_quota(layout)
    with pytest.raises(ValueError, match=r"max_tokens=0.*usable_fraction=0"):
        cache_quota(layout, max_tokens=0, usable_fraction=0)


def test_ranks_agree_on_tokens():
    config = preset("glm-5.2")
    stages = [CacheLayout.create(config, layers=tuple(range(*ends))) for ends in ((0, 40), (40, 78))]
    owners = [sum(stage.full) for stage in stages]
    assert owners == [12, 9]
    per_token = [40 * 1152 + 12 * 132, 38 * 1152 + 9 * 132]
    tokens, quotas = agree_on_tokens(stages, [10 * GIB, 9 * GIB])
    assert tokens == min(10 * GIB // per_token[0], 9 * GIB // per_token[1]) == 214_920
    assert quotas == (tokens * per_token[0], tokens * per_token[1])
    with pytest.raises(ValueError, match="2 layouts and 1 quotas"):
        agree_on_tokens(stages, [GIB])
    with pytest.raises(ValueError, match="0 layouts"):
        agree_on_tokens([], [])


# Page tables and score chunks.


@pytest.mark.parametrize(
    ("length", "extra", "pages"), [(128, 0, 2), (128, 3, 3), (129, 0, 3), (0, 0, 0), (1, 0, 1), (64, 64, 2)]
)
def test_pages_per_seq(length, extra, pages):
    assert pages_per_seq(length, 64, extra_tokens=extra) == pages


def test_rows_per_chunk():
    assert rows_per_chunk(512 * 2**20, 135168) == 992
    assert rows_per_chunk(512 * 2**20, 135168, bytes_per_score=2) == 1985
    assert rows_per_chunk(100, 135168) == 1
    assert 992 * 135168 * 4 <= 512 * 2**20 < 993 * 135168 * 4


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: pages_per_seq(-1, 64), "max_len=-1"),
        (lambda: pages_per_seq(1, 0), "page_size=0"),
        (lambda: rows_per_chunk(0, 10), "budget_bytes=0"),
        (lambda: rows_per_chunk(10, 0), "keys=0"),
        (lambda: slots_for_quota(CacheLayout.create(small_config()), 10, grain_bytes=0), "grain_bytes=0"),
        (lambda: quota_for_slots(CacheLayout.create(small_config()), -1), "slots=-1"),
        (lambda: parse_bytes("80 Gigs"), "'80 Gigs' is no size"),
        (lambda: parse_bytes("-1GB"), "'-1GB'"),
        (lambda: parse_bytes(""), "'' is no size"),
    ],
)
def test_refused_numbers(call, word):
    with pytest.raises(ValueError, match=word):
        call()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        ("141 gb", 141 * 10**9),
        ("1.5MiB", 3 * 2**19),
        ("7", 7),
        ("2B", 2),
    ],
)
def test_parse_bytes(text, size):
    assert parse_bytes(text) == size


# Plans.


def test_plan_of_a_device():
    """All terms worked out by hand: 2,048 pages, 131,072 keys, 1,024 rows of scores in 512 MiB."""
    config = preset("glm-5.2")
    chosen: dict[str, Any] = {"key_form": "fp8", "batch": 4, "context": 131072, "draft": True}
    found = plan(config, gpu_memory=80 * 10**9, weight_bytes=40 * 10**9, **chosen)
    assert found.workspace_bytes == {
        "scores": 1024 * 131072 * 4,
        "selected positions and rows": 2 * 2048 * 2048 * 4,
        "page table": 4 * 2048 * 4,
    }
    left = 40 * 10**9 - 536870912 - 33554432 - 32768
    assert found.slots == left // (64 * (47700 + 708)) == 12726
    assert found.tokens == found.slots * 64
    assert found.bytes_by_role == {
        "key": 78 * 576 * 64 * found.slots,
        "index_key": 21 * 132 * 64 * found.slots,
        "draft": 708 * 64 * found.slots,
    }
    assert found.cache_bytes == sum(found.bytes_by_role.values())
    assert 0 <= found.free_bytes < 64 * 48408
    assert (found.pages_per_request, found.requests, found.fits) == (2048, 6, True)
    chosen["batch"] = 7
    assert not plan(config, gpu_memory=80 * 10**9, weight_bytes=40 * 10**9, **chosen).fits
    assert json.loads(json.dumps(found.to_dict()))["slots"] == 12726
    assert "12,726 slots" in found.table()
    assert "4 requests of 131,072 tokens fit" in found.table()


def test_plan_counts_scores_over_the_longest_context():
    config = preset("deepseek-v3.2")
    wide = plan(config, gpu_memory=10**12, context=135168, chunk_tokens=8192, score_budget=2**40)
    assert wide.workspace_bytes["scores"] == 8192 * 135168 * 4 == 4_429_185_024
    narrow = plan(config, gpu_memory=10**12, context=135168, chunk_tokens=8192)
    assert narrow.workspace_bytes["scores"] == 992 * 135168 * 4
    assert narrow.slots > wide.slots
    assert plan(preset("deepseek-v3"), gpu_memory=10**12, context=64).workspace_bytes == {"page table": 4}
    assert plan(config, gpu_memory=10**12, context=64, extra_tokens=1).pages_per_request == 2
    assert plan(config, gpu_memory=10**12).context == 163840


def test_plan_grains_and_stages():
    config = preset("deepseek-v3.2")
    exact = plan(config, gpu_memory=10 * GIB, context=4096, layers=(0, 1, 2))
    coarse = plan(config, gpu_memory=10 * GIB, context=4096, layers=(0, 1, 2), grain_bytes=GRAIN)
    assert exact.layout.bytes_per_token == 3 * 1284
    assert exact.slots >= coarse.slots
    assert coarse.cache_bytes % GRAIN == 0
    assert coarse.free_bytes >= 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu_memory": 10**6}, ["leaves", "one slot takes 5,012,736"]),
        ({"weight_bytes": 10**12}, ["leaves -"]),
        ({"batch": 0, "context": 0}, ["batch=0", "context=0"]),
        ({"weight_bytes": -1}, ["weight_bytes=-1"]),
        ({"context": 163841}, ["context=163841", "163840"]),
        ({"page_size": 48}, ["page_size=48"]),
        ({"key_form": "int8"}, ["key_form='int8'"]),
    ],
)
def test_refused_plans(changes, words):
    with pytest.raises(ValueError) as error:
        plan(preset("deepseek-v3.2"), **{"gpu_memory": 80 * 10**9, "context": 4096} | changes)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_plan_refuses_a_draft_without_prediction_layers():
    with pytest.raises(ValueError, match="no prediction layers"):
        plan(small_config(), gpu_memory=10**9, context=64, draft=True)
