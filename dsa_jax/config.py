"""What the caches and the indexer need to know of a model, read from a Hugging Face style configuration."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from dsa_jax import presets
from dsa_jax.arguments import described, expect, is_whole
from dsa_jax.full_layers import full_layer_mask
from dsa_jax.hf_fields import LARGEST, FieldReader
from dsa_jax.rope_parameters import RopeParameters, read_rope

__all__ = ["ARCHITECTURES", "DSAConfig", "RopeParameters", "full_layer_mask", "preset"]

# Architecture -> (model_type, owns an indexer).
ARCHITECTURES: dict[str, tuple[str, bool]] = {
    "DeepseekV3ForCausalLM": ("deepseek_v3", False),
    "DeepseekV32ForCausalLM": ("deepseek_v32", True),
    "GlmMoeDsaForCausalLM": ("glm_moe_dsa", True),
}
DEFAULT_INDEX_HEAD_DIM = 128
MOST_LAYERS = 1000
"""Layers of one kind at most: a layout lists every one, and more is a typing error."""

# Numbers of a configuration and the largest that they may be.
_LARGEST = {"num_layers": MOST_LAYERS, "num_mtp_layers": MOST_LAYERS} | dict.fromkeys(
    (
        "num_heads",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "index_n_heads",
        "index_head_dim",
        "index_topk",
        "max_position_embeddings",
    ),
    LARGEST,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSAConfig:
    """Dimensions of a model with multi-head latent attention and, unless `index_n_heads` is 0, an indexer.

    Attributes:
        architecture: Hugging Face class name, a key of `ARCHITECTURES`.
        num_layers: decoder layers; global layer ids are 0 .. num_layers - 1.
        num_mtp_layers: multi-token-prediction layers; their ids follow those of the decoder layers.
        num_heads: attention heads.
        q_lora_rank: width of the compressed query; 0 where the model does not compress it.
        kv_lora_rank: width of the latent.
        qk_nope_head_dim: head width without rotation.
        qk_rope_head_dim: rotated head width.
        v_head_dim: value head width.
        index_n_heads: indexer heads; 0 means that the model has no indexer.
        index_head_dim: indexer head width.
        index_topk: tokens that a query attends.
        full_layers: per global layer id (decoder and prediction layers), whether it owns an indexer.
        index_share_for_mtp_iteration: later draft steps reuse the selection of the first.
        indexer_rope_interleave: the indexer rotates neighbouring pairs instead of halves.
        index_hadamard: queries and keys of the indexer pass a Hadamard rotation.
        rope: rotary parameters.
        max_position_embeddings: longest context.
    """

    architecture: str
    num_layers: int
    num_mtp_layers: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    full_layers: tuple[bool, ...]
    index_share_for_mtp_iteration: bool
    indexer_rope_interleave: bool
    index_hadamard: bool
    rope: RopeParameters
    max_position_embeddings: int

    def __post_init__(self) -> None:
        """Refuses values that contradict each other.

        Raises:
            ValueError: one message that names every problem.
        """
        if isinstance(self.full_layers, list):
            object.__setattr__(self, "full_layers", tuple(self.full_layers))  # configurations are hashed
        problems = self._kind_problems()
        if problems:  # what follows compares numbers
            raise ValueError(f"DSAConfig({described(self.architecture)}): " + "; ".join(problems))
        positive = [
            "num_layers",
            "num_heads",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
        ]
        positive.append("max_position_embeddings")
        if self.index_n_heads:
            positive += ["q_lora_rank", "index_head_dim", "index_topk", "index_n_heads"]
        problems += [
            f"{name}={getattr(self, name)} must be at least 1" for name in positive if getattr(self, name) < 1
        ]
        problems += [
            f"{name}={getattr(self, name)} is too large, wanted at most {most:,}"
            for name, most in _LARGEST.items()
            if getattr(self, name) > most
        ]
        if self.num_mtp_layers < 0:
            problems.append(f"num_mtp_layers={self.num_mtp_layers} must not be negative")
        if self.qk_rope_head_dim % 2:
            problems.append(f"qk_rope_head_dim={self.qk_rope_head_dim} must be even, rotation works on pairs")
        if len(self.full_layers) != self.num_layers + self.num_mtp_layers:
            problems.append(
                f"full_layers has {len(self.full_layers)} entries, wanted num_layers + num_mtp_layers = "
                f"{self.num_layers} + {self.num_mtp_layers}"
            )
        elif self.index_n_heads:
            problems += self._indexer_problems()
        elif any(self.full_layers):
            problems.append("full_layers names indexers, but index_n_heads is 0; set every entry to False")
        if problems:
            raise ValueError(f"DSAConfig({self.architecture}): " + "; ".join(problems))

    def _kind_problems(self) -> list[str]:
        """Values of the wrong type."""
        problems = []
        for name in _LARGEST:
            if not is_whole(getattr(self, name)):
                problems.append(f"{name}={described(getattr(self, name))} must be a whole number")
        for name in ("index_share_for_mtp_iteration", "indexer_rope_interleave", "index_hadamard"):
            if not isinstance(getattr(self, name), bool):
                problems.append(f"{name}={described(getattr(self, name))} must be True or False")
        if not isinstance(self.full_layers, tuple):
            problems.append(f"full_layers is {described(self.full_layers)}, wanted a tuple of True and False")
        if not isinstance(self.rope, RopeParameters):
            problems.append(f"rope is {described(self.rope)}, wanted RopeParameters")
        return problems

    def _indexer_problems(self) -> list[str]:
        problems = []
        if not self.full_layers[0]:
            problems.append(
                "layer 0 is shared, but no layer before it has a selection to reuse; make layer 0 full"
            )
        if not all(self.full_layers[self.num_layers :]):
            problems.append(
                "multi-token-prediction layers always own an indexer; their entries of full_layers must be "
                "True"
            )
        if self.index_head_dim < self.qk_rope_head_dim:
            problems.append(
                f"index_head_dim={self.index_head_dim} is smaller than "
                f"qk_rope_head_dim={self.qk_rope_head_dim}, "
                "which the indexer rotates"
            )
        if self.index_hadamard and self.index_head_dim & (self.index_head_dim - 1):
            problems.append(
                f"index_hadamard needs a power of two as index_head_dim, got {self.index_head_dim}; set "
                "index_hadamard=False"
            )
        return problems

    @property
    def key_width(self) -> int:
        """Elements of one cached KEY row: latent and rotary part, 576 in the released models."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor on attention scores: `head_dim ** -0.5`, times YaRN's squared `0.1 * mscale * ln(factor) +
        1`.

        The head dimension is that of the expanded query (nope + rope) also in the absorbed form, where 576
        elements are multiplied. Source: DeepSeek-V3.2 reference inference code. DeepSeek-V3.2: 0.1352338;
        GLM-5.x: 0.0625.
        """
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        if self.rope.type == "yarn" and self.rope.factor > 1:
            scale *= (0.1 * self.rope.mscale_all_dim * math.log(self.rope.factor) + 1.0) ** 2
        return scale

    @classmethod
    def from_hf(cls, mapping: Mapping[str, Any]) -> DSAConfig:
        """Reads a Hugging Face `config.json` that was parsed into a mapping.

        A field that stands in the mapping is never replaced by a default, an explicit 0 included. Defaults
        exist for: index_head_dim 128, num_nextn_predict_layers 0, index_topk_freq 1, index_skip_topk_offset
        2, indexer_rope_interleave False, index_share_for_mtp_iteration False, index_hadamard True (with an
        indexer). `head_dim` and `rope_interleave` speak of other things in these models and are not read.

        Args:
            mapping: the configuration. `architectures` names the model; `model_type` is read only where it is
                missing.

        Returns:
            The configuration.

        Raises:
            ValueError: the architecture is unknown, fields are missing or contradict each other; all of it in
                one message.
        """
        expect("DSAConfig.from_hf", "mapping", mapping, Mapping, "Pass the parsed config.json.")
        architecture = _architecture(mapping)
        has_indexer = ARCHITECTURES[architecture][1]
        read = FieldReader(mapping)
        num_layers = read.integer("num_hidden_layers", most=MOST_LAYERS)
        num_mtp_layers = read.integer("num_nextn_predict_layers", 0, most=MOST_LAYERS)
        index_n_heads = read.integer("index_n_heads", None if has_indexer else 0)
        index_topk = read.integer("index_topk", None if has_indexer else 0)
        if has_indexer and "index_n_heads" in mapping and index_n_heads == 0:
            read.problems.append(
                f"index_n_heads=0, but {architecture} has an indexer; DeepseekV3ForCausalLM is the one "
                "without"
            )
        if not has_indexer and index_n_heads:
            read.problems.append(
                f"index_n_heads={index_n_heads}, but {architecture} has no indexer; DeepseekV32ForCausalLM "
                "has one"
            )
        values: dict[str, Any] = {
            "num_heads": read.integer("num_attention_heads"),
            "q_lora_rank": read.integer("q_lora_rank", None if has_indexer else 0),
            "kv_lora_rank": read.integer("kv_lora_rank"),
            "qk_nope_head_dim": read.integer("qk_nope_head_dim"),
            "qk_rope_head_dim": read.integer("qk_rope_head_dim"),
            "v_head_dim": read.integer("v_head_dim"),
            "index_head_dim": read.integer("index_head_dim", DEFAULT_INDEX_HEAD_DIM),
            "index_share_for_mtp_iteration": read.flag("index_share_for_mtp_iteration", False),
            "indexer_rope_interleave": read.flag("indexer_rope_interleave", False),
            "index_hadamard": read.flag("index_hadamard", has_indexer),
            "max_position_embeddings": read.integer("max_position_embeddings"),
        }
        rope = read_rope(read)
        read.finish(architecture)
        if has_indexer:
            full = full_layer_mask(
                num_layers,
                num_mtp_layers,
                types=mapping.get("indexer_types"),
                pattern=mapping.get("index_topk_pattern"),
                frequency=mapping.get("index_topk_freq"),
                offset=mapping.get("index_skip_topk_offset"),
            )
        else:
            full = (False,) * (num_layers + num_mtp_layers)
        assert rope is not None  # finish() raised otherwise
        return cls(
            architecture=architecture,
            num_layers=num_layers,
            num_mtp_layers=num_mtp_layers,
            index_n_heads=index_n_heads,
            index_topk=index_topk,
            full_layers=full,
            rope=rope,
            **values,
        )


def preset(name: str) -> DSAConfig:
    """Configuration of a released model from its published values.

    Args:
        name: a key of `dsa_jax.presets.PRESETS`, such as "deepseek-v3.2" or "glm-5.2".

    Raises:
        ValueError: there is no such preset.
    """
    if not isinstance(name, str) or name not in presets.PRESETS:
        raise ValueError(
            f"preset: no model is called {described(name)}; choose one of {', '.join(presets.PRESETS)}"
        )
    return DSAConfig.from_hf(presets.PRESETS[name])


def _architecture(mapping: Mapping[str, Any]) -> str:
    names = mapping.get("architectures")
    if isinstance(names, str):
        names = [names]
    known = ", ".join(ARCHITECTURES)
    if names is not None and not (
        isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    ):
        raise ValueError(
            f"DSAConfig.from_hf: architectures={described(names)} is neither a list of names nor a name; set it to "
            f'["{next(iter(ARCHITECTURES))}"] or one of {known}'
        )
    if names:
        for name in names:
            if name in ARCHITECTURES:
                return name
        raise ValueError(
            f"DSAConfig.from_hf: architecture {', '.join(map(str, names))} is not supported; supported are "
            f"{known}"
        )
    model_type = mapping.get("model_type")
    for name, (known_type, _) in ARCHITECTURES.items():
        if model_type == known_type:
            return name
    raise ValueError(
        f"DSAConfig.from_hf: no architectures, and model_type={described(model_type)} is not supported; set "
        f"architectures to one of {known}"
    )
