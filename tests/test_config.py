"""Configurations: released models, missing and contradicting fields, and which layers own an indexer."""

from __future__ import annotations

import dataclasses
import math

import pytest

from dsa_jax import presets
from dsa_jax.config import DSAConfig, RopeParameters, full_layer_mask, preset

GLM_52_FULL = [0, 1, *range(2, 78, 4)]


def v32(**changes):
    """DeepSeek-V3.2's mapping with fields replaced; None removes one."""
    mapping = dict(presets.PRESETS["deepseek-v3.2"]) | changes
    return {name: value for name, value in mapping.items() if value is not None}


def yarn(**changes):
    """A change to the parameters of YaRN."""
    return {"rope_scaling": presets.PRESETS["deepseek-v3.2"]["rope_scaling"] | changes}


def full_of(mask):
    return [i for i, full in enumerate(mask) if full]


@pytest.mark.parametrize(
    ("name", "layers", "heads", "full", "scale", "theta", "interleave", "longest"),
    [
        ("deepseek-v3", 61, 128, 0, 0.1352338, 1e4, False, 163840),
        ("deepseek-v3.2", 61, 128, 61, 0.1352338, 1e4, False, 163840),
        ("deepseek-v3.2-exp", 61, 128, 61, 0.1352338, 1e4, False, 163840),
        ("glm-5", 78, 64, 78, 0.0625, 1e6, True, 202752),
        ("glm-5.1", 78, 64, 78, 0.0625, 1e6, True, 202752),
        ("glm-5.2", 78, 64, 21, 0.0625, 8e6, True, 1048576),
    ],
)
def test_presets(name, layers, heads, full, scale, theta, interleave, longest):
    config = preset(name)
    assert (config.num_layers, config.num_mtp_layers, config.num_heads) == (layers, 1, heads)
    assert sum(config.full_layers[:layers]) == full
    assert config.full_layers[layers] is bool(full)  # a prediction layer is full wherever there is an indexer
    assert config.softmax_scale == pytest.approx(scale, abs=5e-8)
    assert config.rope.theta == theta
    assert config.indexer_rope_interleave is interleave
    assert config.max_position_embeddings == longest
    assert config.key_width == 576
    assert config.index_hadamard is bool(full)
    assert config.index_share_for_mtp_iteration is (name == "glm-5.2")


def test_index_dimensions_of_released_models():
    by_name = {name: preset(name) for name in ("deepseek-v3", "deepseek-v3.2", "glm-5")}
    assert [c.index_n_heads for c in by_name.values()] == [0, 64, 32]
    assert [c.index_topk for c in by_name.values()] == [0, 2048, 2048]


def test_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'glm-6'.*glm-5\.2"):
        preset("glm-6")


def test_config_is_hashable_and_comparable():
    assert len({preset("glm-5"), preset("glm-5.1"), preset("glm-5.2")}) == 2


@pytest.mark.parametrize(
    ("changes", "field", "wanted"),
    [
        ({"index_topk": 1024}, "index_topk", 1024),
        ({"index_head_dim": None}, "index_head_dim", 128),
        ({"num_nextn_predict_layers": 0}, "num_mtp_layers", 0),
        ({"num_nextn_predict_layers": None}, "num_mtp_layers", 0),
        ({"index_hadamard": False}, "index_hadamard", False),
        ({"indexer_rope_interleave": True}, "indexer_rope_interleave", True),
        # These speak of the main attention and must not reach the indexer or the rotary width.
        ({"rope_interleave": True}, "indexer_rope_interleave", False),
        ({"head_dim": 192}, "qk_rope_head_dim", 64),
    ],
)
def test_fields_and_defaults(changes, field, wanted):
    assert getattr(DSAConfig.from_hf(v32(**changes)), field) == wanted


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"index_topk": 0}, ["index_topk=0"]),
        ({"index_topk": None}, ["index_topk is missing"]),
        ({"index_n_heads": 0}, ["index_n_heads=0", "DeepseekV3ForCausalLM"]),
        ({"index_topk_freq": 0}, ["index_topk_freq=0", "at least 1"]),
        ({"kv_lora_rank": None, "v_head_dim": None}, ["kv_lora_rank is missing", "v_head_dim is missing"]),
        ({"num_hidden_layers": "61"}, ["num_hidden_layers='61'", "integer"]),
        ({"num_attention_heads": True}, ["num_attention_heads=True"]),
        ({"v_head_dim": -1}, ["v_head_dim=-1"]),
        ({"indexer_rope_interleave": "yes"}, ["indexer_rope_interleave='yes'"]),
        ({"qk_rope_head_dim": 63}, ["qk_rope_head_dim=63", "even"]),
        ({"index_head_dim": 96}, ["power of two", "96", "index_hadamard=False"]),
        ({"index_head_dim": 32}, ["index_head_dim=32", "qk_rope_head_dim=64"]),
        ({"architectures": ["LlamaForCausalLM"]}, ["LlamaForCausalLM", "GlmMoeDsaForCausalLM"]),
        ({"architectures": None, "model_type": "llama"}, ["'llama'"]),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, ["index_n_heads=64", "DeepseekV32ForCausalLM"]),
        ({"architectures": 5}, ["architectures=5 is neither a list of names nor a name", "Deepseek"]),
        ({"architectures": [["GlmMoeDsaForCausalLM"]]}, ["architectures=[['GlmMoe", "list of names"]),
        ({"architectures": {"GlmMoeDsaForCausalLM": 1}}, ["list of names"]),
        ({"architectures": False}, ["architectures=False", "list of names"]),
        ({"num_hidden_layers": 10**6}, ["num_hidden_layers=1000000 is too large, wanted at most 1,000"]),
        ({"num_nextn_predict_layers": 10**9}, ["num_nextn_predict_layers=1000000000 is too large"]),
        ({"v_head_dim": 10**5000}, ["v_head_dim=a int too long to print is too large"]),
        ({"max_position_embeddings": 2**31}, ["max_position_embeddings=2147483648", "at most 2,147,483,647"]),
    ],
)
def test_refused_fields(changes, words):
    with pytest.raises(ValueError) as error:
        DSAConfig.from_hf(v32(**changes))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_model_type_is_read_only_where_architectures_are_missing():
    assert DSAConfig.from_hf(v32(architectures=None)).architecture == "DeepseekV32ForCausalLM"
    assert DSAConfig.from_hf(v32(model_type="deepseek_v3")).architecture == "DeepseekV32ForCausalLM"


# Rotary parameters, nested and flat.


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_theta": 8000000}, "rope_theta": None},
        {"rope_theta": 8000000},
        {"rope_parameters": {"rope_theta": 8000000, "rope_type": "default"}, "rope_theta": 8000000},
    ],
)
def test_theta_nested_flat_and_equal(changes):
    assert DSAConfig.from_hf(v32(rope_scaling=None, **changes)).rope == RopeParameters(theta=8e6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_parameters": {"rope_theta": 8000000}}, ["8000000", "10000", "keep one"]),
        ({"rope_theta": None, "rope_scaling": None}, ["rope_theta is missing"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, ["original_max_position_embeddings is missing"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4}}, ["'linear'"]),
        ({"rope_theta": 0}, ["rope_theta=0"]),
        ({"rope_scaling": 4}, ["rope_scaling=4"]),
        ({"rope_theta": math.inf}, ["rope_theta=inf is not a finite number"]),
        ({"rope_theta": math.nan}, ["rope_theta=nan is not a positive number"]),
        ({"rope_theta": 10**400}, ["is not a finite number"]),
        (yarn(factor=math.inf), ["factor=inf is not a finite number"]),
        (yarn(factor=-math.inf), ["factor=-inf is not a positive number"]),
        (yarn(beta_fast=math.nan, beta_slow=math.inf), ["beta_fast=nan", "beta_slow=inf"]),
        (yarn(original_max_position_embeddings=math.inf), ["original_max_position_embeddings=inf"]),
        (yarn(original_max_position_embeddings=math.nan), ["original_max_position_embeddings=nan"]),
        (yarn(original_max_position_embeddings=4096.5), ["4096.5 is not a whole number of tokens"]),
        (yarn(rope_type=["yarn"], type=None), ["rope_type=['yarn'] is not supported"]),
        (
            {"rope_scaling": presets.PRESETS["deepseek-v3.2"]["rope_scaling"] | {"mscale": 0.5}},
            ["mscale=0.5", "mscale_all_dim=1.0"],
        ),
    ],
)
def test_refused_rotary_parameters(changes, words):
    with pytest.raises(ValueError) as error:
        DSAConfig.from_hf(v32(**changes))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_yarn_flat_and_nested_agree():
    yarn = dict(presets.PRESETS["deepseek-v3.2"]["rope_scaling"])
    nested = {"rope_type": yarn.pop("type"), "rope_theta": 10000, **yarn}
    flat = DSAConfig.from_hf(v32())
    assert DSAConfig.from_hf(v32(rope_parameters=nested, rope_scaling=None, rope_theta=None)) == flat
    assert flat.rope == RopeParameters(
        theta=1e4,
        type="yarn",
        factor=40.0,
        original_max_position_embeddings=4096,
        beta_fast=32.0,
        beta_slow=1.0,
    )


def test_softmax_scale_ignores_a_factor_of_one():
    plain = dataclasses.replace(
        preset("deepseek-v3.2"), rope=RopeParameters(theta=1e4, type="yarn", factor=1.0)
    )
    assert plain.softmax_scale == pytest.approx(192**-0.5)


# Which layers own an indexer.


@pytest.mark.parametrize(
    ("changes", "full"),
    [
        ({"frequency": 4, "offset": 3}, [0, 1, 2, 6, 10]),
        ({"frequency": 4}, [0, 1, 5, 9]),
        ({"frequency": 1}, list(range(12))),
        ({}, list(range(12))),
        ({"offset": 3}, list(range(12))),
        ({"pattern": "FSSSFSSSFSSS"}, [0, 4, 8]),
        ({"pattern": ["f", "s", "s", "s"] * 3}, [0, 4, 8]),
        ({"types": ["full", "shared"] * 6}, [0, 2, 4, 6, 8, 10]),
        ({"types": ["full", "shared"] * 6, "pattern": "FS" * 6}, [0, 2, 4, 6, 8, 10]),
    ],
)
def test_full_layers(changes, full):
    mask = full_layer_mask(12, 1, **changes)
    assert full_of(mask) == [*full, 12]  # the prediction layer is number 12


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pattern": "FSS"}, ["index_topk_pattern has 3 entries", "4 decoder layers"]),
        ({"pattern": "FSXS"}, ["index_topk_pattern", "X"]),
        ({"types": ["full"] * 5}, ["indexer_types has 5 entries"]),
        ({"types": ["full", "full", "half", "full"]}, ["half"]),
        ({"pattern": "SFFF"}, ["layer 0 shared"]),
        (
            {"types": ["full"] * 4, "frequency": 4},
            ["indexer_types", "index_topk_freq", "disagree from layer 2"],
        ),
        ({"types": ["full"] * 4, "pattern": "FFFS"}, ["indexer_types", "index_topk_pattern", "layer 3"]),
        ({"frequency": 2, "offset": 0}, ["layer 0 shared"]),
        ({"frequency": -4}, ["index_topk_freq=-4"]),
        ({"pattern": 4}, ["index_topk_pattern=4"]),
        ({"offset": -1}, ["index_skip_topk_offset=-1"]),
        ({"pattern": "FSS", "types": ["full"]}, ["index_topk_pattern has 3", "indexer_types has 1"]),
    ],
)
def test_refused_full_layers(changes, words):
    with pytest.raises(ValueError) as error:
        full_layer_mask(4, 0, **changes)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_glm_52_by_list_and_by_frequency():
    assert full_of(preset("glm-5.2").full_layers) == [*GLM_52_FULL, 78]
    by_frequency = dict(presets.PRESETS["glm-5.2"])
    del by_frequency["indexer_types"]
    assert DSAConfig.from_hf(by_frequency) == preset("glm-5.2")
    too_short = dict(presets.PRESETS["glm-5.2"]) | {
        "indexer_types": presets.PRESETS["glm-5.2"]["indexer_types"][:77]
    }
    with pytest.raises(ValueError, match="77 entries"):
        DSAConfig.from_hf(too_short)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"full_layers": (True,) * 3}, "3 entries"),
        ({"full_layers": (False,) + (True,) * 61}, "layer 0"),
        ({"full_layers": (True,) * 61 + (False,)}, "prediction"),
        ({"index_n_heads": 0}, "index_n_heads is 0"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"num_mtp_layers": -1}, "num_mtp_layers=-1"),
        ({"num_heads": "8"}, "num_heads='8' must be a whole number"),
        ({"index_topk": 2048.0}, "index_topk=2048.0 must be a whole number"),
        ({"num_layers": True}, "num_layers=True must be a whole number"),
        ({"num_layers": 1001, "full_layers": (True,) * 1002}, "num_layers=1001 is too large"),
        ({"index_hadamard": "no"}, "index_hadamard='no' must be True or False"),
        ({"full_layers": None}, "full_layers is None, wanted a tuple"),
        ({"rope": {"theta": 1e4}}, "rope is {'theta': 10000.0}, wanted RopeParameters"),
    ],
)
def test_replaced_fields_are_checked(changes, word):
    with pytest.raises(ValueError, match=word):
        dataclasses.replace(preset("deepseek-v3.2"), **changes)


@pytest.mark.parametrize("mapping", [None, [], "glm-5", 3])
def test_what_is_no_mapping_is_refused(mapping):
    with pytest.raises(
        ValueError, match=r"from_hf: mapping is .*, wanted a Mapping. Pass the parsed config.json"
    ):
        DSAConfig.from_hf(mapping)


@pytest.mark.parametrize("name", [None, ["glm-5"], 5])
def test_what_is_no_name_is_no_preset(name):
    with pytest.raises(ValueError, match="no model is called .*; choose one of deepseek-v3,"):
        preset(name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"theta": math.nan}, "theta=nan is not a positive number"),
        ({"theta": "1e4"}, "theta='1e4'"),
        ({"theta": 1e4, "factor": math.inf}, "factor=inf is not a finite number"),
        ({"theta": 1e4, "type": "linear"}, "rope_type='linear' is not supported; use 'default' or 'yarn'"),
        ({"theta": 1e4, "original_max_position_embeddings": 0.5}, "=0.5 must be a whole number"),
    ],
)
def test_refused_rope_parameters(changes, words):
    with pytest.raises(ValueError, match=f"RopeParameters: .*{words}"):
        RopeParameters(**changes)


def test_a_list_of_full_layers_becomes_hashable():
    config = preset("glm-5.2")
    assert dataclasses.replace(config, full_layers=list(config.full_layers)) == config
