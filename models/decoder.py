"""The module tree of a model. Attribute paths are the tensor names of the Hugging Face checkpoint.

The tree holds weights only. ``batch`` runs whole sequences through it, for training and evaluation; ``step`` runs the new
tokens of a paged batch through it, with the cache as a value that is passed in and handed back.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from dsa_jax.models.config import ModelConfig
from dsa_jax.models.layer import DecoderLayer
from dsa_jax.models.mtp import MTPLayer
from dsa_jax.models.norm import Linear, RMSNorm, contract


class Embedding(nnx.Module):
    """Token embedding.

    Attributes:
        weight: ``[vocab, hidden]``.
    """

    def __init__(self, vocabulary: int, hidden: int, *, rngs: nnx.Rngs):
        """Draw the weight from N(0, 0.02^2)."""
        self.weight = nnx.Param(0.02 * jax.random.normal(rngs.params(), (vocabulary, hidden), jnp.float32))

    def __call__(self, tokens: Array) -> Array:
        """Rows of ``int32[...]`` tokens, ``[..., hidden]`` in the dtype of the weight.

        Padding may hold any token; what lies outside the vocabulary reads its nearest row.
        """
        return jnp.take(self.weight[...], tokens, axis=0, mode="clip")


class Backbone(nnx.Module):
    """Embedding, layers (prediction layers after the decoder layers) and the final norm."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Draw random weights."""
        count = config.dsa.num_layers
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, rngs=rngs)
        self.layers = nnx.List(
            [DecoderLayer(config, i, rngs=rngs) for i in range(count)]
            + [MTPLayer(config, count + i, rngs=rngs) for i in range(config.dsa.num_mtp_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nnx.Module):
    """A DeepSeek-V3.2 or GLM-5 language model.

    Attributes:
        config: static.
        model: embedding, layers, norm.
        lm_head: ``[vocab, hidden]`` projection.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Draw random weights; ``nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))`` gives shapes only."""
        self.config = config
        self.model = Backbone(config, rngs=rngs)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, rngs=rngs)

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        """The layers of the main model."""
        return list(self.model.layers)[: self.config.dsa.num_layers]

    @property
    def prediction_layers(self) -> list[MTPLayer]:
        """The multi-token-prediction layers."""
        return [layer for layer in self.model.layers if isinstance(layer, MTPLayer)]

    def logits(self, hidden: Array) -> Array:
        """Project normalised hidden states ``[..., hidden]`` to ``float32[..., vocab]``."""
        weight = self.lm_head.weight[...].astype(hidden.dtype)
        return contract("...i,oi->...o", hidden, weight, wide=True)
