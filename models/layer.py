"""One decoder layer: its two norms, its attention and its feed-forward layer."""

from __future__ import annotations

from flax import nnx
from jax import Array

from dsa_jax.models.config import ModelConfig
from dsa_jax.models.mla import MLA
from dsa_jax.models.moe import MLP, MoE
from dsa_jax.models.norm import RMSNorm


class DecoderLayer(nnx.Module):
    """Norm, attention, norm, feed-forward, each half with a residual connection."""

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs):
        """Draw random weights for layer number ``layer``."""
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MLA(config, layer, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.is_dense(layer):
            self.mlp: MLP | MoE = MLP(
                config.hidden_size, config.intermediate_size, rngs=rngs, residual_scale=config.residual_scale
            )
        else:
            self.mlp = MoE(config, rngs=rngs)

    def feed_forward(self, x: Array) -> tuple[Array, Array | None]:
        """Second half of the layer.

        Args:
            x: residual stream ``[..., hidden]``.

        Returns:
            The new residual stream, and the experts' load ``float32[E]`` (None in a dense layer).
        """
        y = self.post_attention_layernorm(x)
        if isinstance(self.mlp, MoE):
            y, load = self.mlp.with_load(y)
            return x + y, load
        return x + self.mlp(y), None
