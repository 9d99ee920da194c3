"""Manager selection: defaults, "auto", and which options go together."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest

from dsa_jax.layout import CacheLayout
from dsa_jax.selection import (
    LIBRARY_DEFAULTS,
    MODEL_DEFAULTS,
    RULES,
    compatibility_table,
    merge_defaults,
    resolve_manager,
    select,
)
from layout_cases import small_config

GLM = "GlmMoeDsaForCausalLM"
FAMILY = ("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", GLM, "MistralLarge3ForCausalLM")


@pytest.mark.parametrize(
    ("setting", "manager", "source"),
    [
        (True, "v2", "user"),
        ("v2", "v2", "user"),
        (False, "v1", "user"),
        ("v1", "v1", "user"),
        ("auto", "v2", "model"),
    ],
)
def test_manager_of_a_dsa_model(setting, manager, source):
    found = select(GLM, {"cache": {"manager": setting}})
    assert (found.manager, found.source) == (manager, source)
    assert found.settings["cache"]["manager"] == manager  # resolved once, and visible


@pytest.mark.parametrize("architecture", FAMILY)
def test_family_defaults_to_v2(architecture):
    found = select(architecture)
    assert (found.manager, found.source) == ("v2", "model")
    assert found.settings["attention"] == ("dsa" if architecture in FAMILY[1:3] else "dense")


def test_other_models_default_to_v1():
    found = select("LlamaForCausalLM", {"attention": "dense"})
    assert (found.manager, found.source) == ("v1", "library")


@pytest.mark.parametrize(
    ("model_default", "manager", "source"),
    [(True, "v2", "model"), (False, "v1", "model"), ("v2", "v2", "model"), ("auto", "v1", "library")],
)
def test_auto_takes_the_models_default(model_default, manager, source):
    assert resolve_manager("auto", model_default) == (manager, source)
    assert resolve_manager(True, model_default) == ("v2", "user")
    assert resolve_manager(False, model_default) == ("v1", "user")


def test_model_without_a_default_resolves_to_v1():
    assert resolve_manager("auto") == ("v1", "library")


@pytest.mark.parametrize(
    ("setting", "model_default"), [("yes", "auto"), ("auto", "yes"), (1, "auto"), (None, "auto")]
)
def test_unknown_managers_are_refused_by_name(setting, model_default):
    with pytest.raises(ValueError, match=r"cache\.manager=.*'auto', 'v1', 'v2', False or True"):
        resolve_manager(setting, model_default)


# Merging.


def test_nested_settings_survive():
    user = {"cache": {"page_size": 32}, "beam_width": 1}
    before = copy.deepcopy(user)
    found = select(GLM, user)
    assert found.manager == "v2"
    assert found.settings["cache"] == {
        "manager": "v2",
        "page_size": 32,
        "key_form": "bf16",
        "index_form": "fp8",
    }
    assert user == before


def test_merge_fills_leaves_only():
    defaults = {"a": {"x": 1, "y": {"z": 2}}, "b": {"c": 3}, "d": 4}
    assert merge_defaults({"a": {"x": 9}, "b": 5}, defaults) == {"a": {"x": 9, "y": {"z": 2}}, "b": 5, "d": 4}
    assert merge_defaults({"a": {"y": {"w": 0}}, "d": None}, defaults) == {
        "a": {"x": 1, "y": {"w": 0, "z": 2}},
        "b": {"c": 3},
        "d": None,
    }
    assert merge_defaults({"d": 0, "b": {}}, defaults)["d"] == 0  # a false value is a value
    assert defaults == {"a": {"x": 1, "y": {"z": 2}}, "b": {"c": 3}, "d": 4}


def test_merged_settings_do_not_share_the_defaults():
    found = select(GLM)
    found.settings["cache"]["page_size"] = 1
    assert LIBRARY_DEFAULTS["cache"]["page_size"] == 64
    assert select(GLM).settings["cache"]["page_size"] == 64
    with pytest.raises(TypeError):
        MODEL_DEFAULTS[GLM]["cache"]["manager"] = "v1"  # type: ignore[index]


def test_index_form_survives_selection_and_rebuilding():
    found = select(GLM, {"cache": {"index_form": "fp4"}})
    again = select(GLM, found.settings)
    assert again.source == "user"  # what was resolved once is explicit from then on
    layout = CacheLayout.create(small_config(), **again.settings["cache"])
    assert (layout.index_form, layout.manager) == ("fp4", "v2")


# Combinations.


@pytest.mark.parametrize("setting", ["auto", True, "v2"])
def test_star_on_v2_names_both_and_the_remedies(setting):
    with pytest.raises(ValueError) as error:
        select(GLM, {"context_parallel": "star", "cache": {"manager": setting}})
    message = str(error.value)
    assert all(
        word in message
        for word in ("DSA", "V2", "STAR", "another context_parallel mode", "cache.manager='v1'")
    )


def test_star_on_v1_and_helix_on_v2_are_taken():
    assert select(GLM, {"context_parallel": "star", "cache": {"manager": False}}).manager == "v1"
    assert select(GLM, {"context_parallel": "helix"}).manager == "v2"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"beam_width": 2}, ["beam width > 1"]),
        ({"external_connector": True}, ["external cache connector"]),
        ({"beam_width": 2, "external_connector": True}, ["beam width > 1", "external cache connector"]),
        (
            {"beam_width": 4, "external_connector": True, "context_parallel": "star"},
            ["beam width > 1", "external cache connector", "STAR"],
        ),
    ],
)
def test_everything_that_clashes_is_listed_at_once(settings, words):
    for architecture in (GLM, "DeepseekV3ForCausalLM"):
        with pytest.raises(ValueError) as error:
            select(architecture, settings)
        assert all(word in str(error.value) for word in words), str(error.value)
        # Nothing falls back in silence, and the explicit V1 is not refused.
        assert select(architecture, settings | {"cache": {"manager": "v1"}}).manager == "v1"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kache": {}}, ["kache is no setting", "cache"]),
        ({"cache": {"pagesize": 64, "use_v2": True}}, ["cache.pagesize", "cache.use_v2", "cache.page_size"]),
        ({"cache": 5}, ["cache=5 must be a mapping"]),
        ({"context_parallel": "ring"}, ["context_parallel='ring'", "helix"]),
        ({"attention": "rocket"}, ["attention='rocket'", "dsa, dense"]),
        ({"beam_width": 0}, ["beam_width=0"]),
        ({"beam_width": True}, ["beam_width=True"]),
        ({"cache": {"page_size": 48}}, ["cache.page_size=48"]),
        (
            {"cache": {"key_form": "int8", "index_form": "int4"}},
            ["cache.key_form='int8'", "cache.index_form='int4'"],
        ),
        ({"cache": {"key_form": "fp8_ds_mla", "page_size": 32}}, ["fp8_ds_mla", "page size other than 64"]),
        ({"external_connector": "lmcache"}, ["external_connector='lmcache'"]),
    ],
)
def test_refused_settings(settings, words):
    with pytest.raises(ValueError) as error:
        select(GLM, settings)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_dsa_needs_an_indexer():
    with pytest.raises(ValueError, match="DeepseekV3ForCausalLM has no indexer"):
        select("DeepseekV3ForCausalLM", {"attention": "dsa"})


def test_every_combination_is_taken_or_refused_for_a_listed_reason():
    """The whole matrix, against a statement of the rules of its own."""
    options = itertools.product(
        ("auto", True, False),
        ("bf16", "fp8", "nvfp4", "fp8_ds_mla"),
        ("fp8", "fp4"),
        (32, 64),
        ("none", "helix", "star"),
        (1, 2),
        (False, True),
    )
    refused = 0
    for manager, key_form, index_form, page_size, parallel, beam, connector in options:
        settings = {
            "context_parallel": parallel,
            "beam_width": beam,
            "external_connector": connector,
            "cache": {
                "manager": manager,
                "key_form": key_form,
                "index_form": index_form,
                "page_size": page_size,
            },
        }
        wanted = (manager is not False) and (parallel == "star" or beam > 1 or connector)
        wanted = wanted or (key_form == "fp8_ds_mla" and page_size != 64)
        if wanted:
            refused += 1
            with pytest.raises(ValueError, match=r"select: DSA on"):
                select(GLM, settings)
        else:
            assert select(GLM, settings).manager == ("v1" if manager is False else "v2")
    # Of 576: 320 clash with V2, 8 more on V2 and 24 on V1 have the 656-byte token in pages of 32.
    assert refused == 352


def test_table_has_a_row_for_every_rule():
    lines = compatibility_table().splitlines()
    assert len(lines) == 2 + len(RULES)
    for rule, line in zip(RULES, lines[2:], strict=True):
        assert rule.remedy in line
        assert rule.reason in line


def test_documentation_holds_the_generated_table():
    page = Path(__file__).parents[1] / "docs" / "compatibility.md"
    assert compatibility_table() in page.read_text(encoding="utf-8")
