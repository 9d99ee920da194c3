"""Model configurations: round trips, published files, and errors that name everything."""

from __future__ import annotations

import json
import math

import pytest
from flax import nnx

from dsa_jax.models.config import ModelConfig
from dsa_jax.models.decoder import Decoder
from dsa_jax.models.presets import PRESETS, preset
from dsa_jax.presets import PRESETS as RELEASED

WIDTHS = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@pytest.mark.parametrize("name", PRESETS)
def test_round_trip(name):
    config = preset(name)
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_released_model():
    config = ModelConfig.from_hf(RELEASED["deepseek-v3.2"] | WIDTHS | {"hidden_act": "silu", "ep_size": 1})
    assert config.eos_token_ids == (1,)
    assert [config.is_dense(i) for i in (0, 2, 3, 60, 61)] == [True, True, False, False, False]
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_several_end_tokens():
    widths = WIDTHS | {"vocab_size": 154880, "eos_token_id": [154820, 154827, 154829], "bos_token_id": None}
    config = ModelConfig.from_hf(RELEASED["glm-5.2"] | widths | {"n_group": 1, "topk_group": 1})
    assert config.eos_token_ids == (154820, 154827, 154829)
    assert config.bos_token_id is None


def test_shipped_dimensions():
    model = nnx.eval_shape(lambda: Decoder(preset("small"), rngs=nnx.Rngs(0)))
    count = sum(math.prod(leaf.shape) for _, leaf in nnx.to_flat_state(nnx.state(model)))
    assert count == 7_577_184


def test_all_problems_in_one_message():
    broken = PRESETS["tiny"] | {
        "hidden_size": "48",
        "n_group": 3,
        "tie_word_embeddings": True,
        "scoring_func": "softmax",
    }
    del broken["vocab_size"]
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_hf(broken)
    for part in (
        "vocab_size is missing",
        "hidden_size='48'",
        "tie_word_embeddings=True",
        "scoring_func='softmax'",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3}, "multiple of n_group=3"),
        ({"topk_group": 5}, "must not exceed n_group=4"),
        ({"num_experts_per_tok": 5}, "exceeds the 4 experts"),
        ({"eos_token_id": 96}, "token id 96 is outside the vocabulary of 96"),
        ({"n_routed_experts": 0}, "n_routed_experts=0 must be at least 1"),
        ({"eos_token_id": "end"}, "must be integers"),
    ],
)
def test_contradictions(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(PRESETS["tiny"] | changes)


def test_unknown_preset():
    with pytest.raises(ValueError, match="choose one of small, tiny, tiny-glm"):
        preset("big")
