"""Multi-token prediction: one more decoder layer that guesses the token after the next.

At position i it joins the main model's hidden state (after the final norm) with the embedding of token i + 1 and predicts
token i + 2. Embedding and head are the main model's.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array

from dsa_jax.models.config import ModelConfig
from dsa_jax.models.layer import DecoderLayer
from dsa_jax.models.norm import Linear, RMSNorm


class SharedHead(nnx.Module):
    """The norm in front of the main model's head."""

    def __init__(self, config: ModelConfig):
        """Start with unit weights."""
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class MTPLayer(DecoderLayer):
    """A decoder layer with the projection in front of it and the norm behind it. Always owns an indexer and experts."""

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs):
        """Draw random weights for layer number ``layer``, counted on from the decoder layers."""
        super().__init__(config, layer, rngs=rngs)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = Linear(2 * config.hidden_size, config.hidden_size, rngs=rngs)
        self.shared_head = SharedHead(config)

    def join(self, embedded: Array, hidden: Array) -> Array:
        """Input of the decoder layer.

        Args:
            embedded: ``[..., hidden]``, embedding of the token after each position.
            hidden: ``[..., hidden]``, the main model's state after its final norm; in later draft steps this layer's own
                output after ``shared_head.norm``.

        Returns:
            ``[..., hidden]`` in the dtype of ``hidden``; the embedding comes first in the concatenation.
        """
        both = jnp.concatenate([self.enorm(embedded.astype(hidden.dtype)), self.hnorm(hidden)], axis=-1)
        return self.eh_proj(both)
