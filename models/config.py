"""Configuration of a whole model: the attention's ``DSAConfig`` and the widths around it, to and from ``config.json``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dsa_jax.arguments import described
from dsa_jax.config import ARCHITECTURES, DSAConfig
from dsa_jax.hf_fields import LARGEST

_INTEGERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "first_k_dense_replace",
)
_NUMBERS = ("routed_scaling_factor", "rms_norm_eps")

# Fields whose other values would need other arithmetic: (name, the value that is computed here).
_FIXED = (
    ("hidden_act", "silu"),
    ("scoring_func", "sigmoid"),
    ("topk_method", "noaux_tc"),
    ("moe_layer_freq", 1),
    ("attention_bias", False),
    ("tie_word_embeddings", False),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Dimensions of a DeepSeek-V3.2 or GLM-5 model.

    Attributes:
        dsa: attention, indexer, layers and rotary parameters.
        vocab_size: rows of the embedding and of the (untied) head.
        hidden_size: width of the residual stream.
        intermediate_size: width of the dense feed-forward layers.
        moe_intermediate_size: width of one expert.
        n_routed_experts: experts to choose from.
        num_experts_per_tok: experts chosen for each token.
        n_shared_experts: experts that see every token; they are stored as one wider expert.
        n_group: groups that the experts are divided into.
        topk_group: groups that the chosen experts may come from.
        routed_scaling_factor: factor on the routed experts' weights.
        norm_topk_prob: whether the chosen weights are divided by their sum.
        first_k_dense_replace: leading layers with a dense feed-forward layer instead of experts.
        rms_norm_eps: epsilon of the block norms and the final norm.
        bos_token_id: token that starts a text, or None.
        eos_token_ids: tokens that end a text.
    """

    dsa: DSAConfig
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    first_k_dense_replace: int
    rms_norm_eps: float
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse values that contradict each other.

        Raises:
            ValueError: one message that names every problem.
        """
        optional = ("n_shared_experts", "first_k_dense_replace")
        problems = [
            f"{name}={getattr(self, name)} must be at least {0 if name in optional else 1}"
            for name in _INTEGERS
            if getattr(self, name) < (0 if name in optional else 1)
        ]
        problems += [f"{n}={getattr(self, n)} must be positive" for n in _NUMBERS if getattr(self, n) <= 0]
        if not self.dsa.index_n_heads:
            problems.append("the model has no indexer (index_n_heads 0); sparse attention needs one")
        if not problems:
            problems += self._expert_problems()
        tokens = (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,)))
        problems += [
            f"token id {t} is outside the vocabulary of {self.vocab_size}"
            for t in tokens
            if not 0 <= t < self.vocab_size
        ]
        if problems:
            raise ValueError(f"ModelConfig({self.dsa.architecture}): " + "; ".join(problems))

    def _expert_problems(self) -> list[str]:
        if self.n_routed_experts % self.n_group:
            return [f"n_routed_experts={self.n_routed_experts} must be a multiple of n_group={self.n_group}"]
        if self.topk_group > self.n_group:
            return [f"topk_group={self.topk_group} must not exceed n_group={self.n_group}"]
        reachable = self.n_routed_experts // self.n_group * self.topk_group
        if self.num_experts_per_tok > reachable:
            return [
                f"num_experts_per_tok={self.num_experts_per_tok} exceeds the {reachable} experts that "
                f"topk_group={self.topk_group} groups hold"
            ]
        return []

    @property
    def residual_scale(self) -> float:
        """Factor on the initial deviation of projections into the residual stream, so that depth keeps its variance."""
        return (2 * self.dsa.num_layers) ** -0.5

    def is_dense(self, layer: int) -> bool:
        """Whether layer number ``layer`` has a dense feed-forward layer; prediction layers always have experts."""
        return layer < min(self.first_k_dense_replace, self.dsa.num_layers)

    @classmethod
    def from_hf(cls, mapping: Mapping[str, Any]) -> ModelConfig:
        """Read a parsed Hugging Face ``config.json``.

        Args:
            mapping: the configuration. Nothing but ``bos_token_id`` and ``eos_token_id`` has a default here;
                ``DSAConfig.from_hf`` documents those of the attention.

        Raises:
            ValueError: fields are missing, have the wrong type, contradict each other or ask for something that is not
                computed here; all such problems of the fields outside the attention in one message.
        """
        dsa = DSAConfig.from_hf(mapping)
        problems = [
            f"{name}={described(mapping[name])}; only {want!r} is supported"
            for name, want in _FIXED
            if mapping.get(name, want) != want
        ]
        values: dict[str, Any] = {}
        for name in (*_INTEGERS, *_NUMBERS, "norm_topk_prob"):
            kind = bool if name == "norm_topk_prob" else int if name in _INTEGERS else (int, float)
            value = mapping.get(name)
            if value is None:
                problems.append(f"{name} is missing")
            elif not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
                problems.append(f"{name}={described(value)} has the wrong type")
            elif kind is not bool and not abs(value) <= LARGEST:  # Python's JSON knows NaN and Infinity
                problems.append(f"{name}={described(value)} is out of range")
                continue
            values[name] = float(value) if name in _NUMBERS and isinstance(value, int) else value
        end = mapping.get("eos_token_id")
        ends = [] if end is None else end if isinstance(end, list | tuple) else [end]
        begin = mapping.get("bos_token_id")
        if not all(
            isinstance(t, int) and not isinstance(t, bool)
            for t in (*ends, *([] if begin is None else [begin]))
        ):
            problems.append(
                f"bos_token_id={described(begin)} and eos_token_id={described(end)} must be integers, a list of them, "
                "or left out"
            )
        if problems:
            raise ValueError(
                f"ModelConfig.from_hf({dsa.architecture}): " + "; ".join(problems) + ". Correct config.json."
            )
        return cls(dsa=dsa, bos_token_id=begin, eos_token_ids=tuple(ends), **values)

    def to_hf(self) -> dict[str, Any]:
        """The inverse of ``from_hf``: a mapping of plain values, ready for ``json.dump``."""
        dsa, rope = self.dsa, self.dsa.rope
        parameters: dict[str, Any] = {"rope_type": rope.type, "rope_theta": rope.theta}
        if rope.type == "yarn":
            skipped = ("type", "theta")
            parameters |= {
                f.name: getattr(rope, f.name) for f in dataclasses.fields(rope) if f.name not in skipped
            }
        return {
            "architectures": [dsa.architecture],
            "model_type": ARCHITECTURES[dsa.architecture][0],
            "num_hidden_layers": dsa.num_layers,
            "num_nextn_predict_layers": dsa.num_mtp_layers,
            "num_attention_heads": dsa.num_heads,
            "num_key_value_heads": dsa.num_heads,
            "q_lora_rank": dsa.q_lora_rank,
            "kv_lora_rank": dsa.kv_lora_rank,
            "qk_nope_head_dim": dsa.qk_nope_head_dim,
            "qk_rope_head_dim": dsa.qk_rope_head_dim,
            "v_head_dim": dsa.v_head_dim,
            "index_n_heads": dsa.index_n_heads,
            "index_head_dim": dsa.index_head_dim,
            "index_topk": dsa.index_topk,
            "indexer_types": ["full" if full else "shared" for full in dsa.full_layers[: dsa.num_layers]],
            "index_share_for_mtp_iteration": dsa.index_share_for_mtp_iteration,
            "indexer_rope_interleave": dsa.indexer_rope_interleave,
            "index_hadamard": dsa.index_hadamard,
            "max_position_embeddings": dsa.max_position_embeddings,
            "rope_parameters": parameters,
            **{name: getattr(self, name) for name in (*_INTEGERS, *_NUMBERS, "norm_topk_prob")},
            **dict(_FIXED),
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids),
        }
