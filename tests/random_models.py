"""Small models whose weights hide nothing: no zero biases, no unit norms, deviations that let every part matter."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsa_jax.models.decoder import Decoder
from dsa_jax.models.indexer import Indexer
from dsa_jax.models.presets import preset

QUICK_COMPILE = {"xla_backend_optimization_level": 0}
"""Compiler options for ``jax.jit`` that halve a small model's compilation; its results are no less exact."""


def random_model(name: str = "tiny", seed: int = 0, **dsa_changes) -> Decoder:
    """A model of preset ``name`` with other attention fields where given.

    Matrices are N(0, 1 / fan-in), norm weights 1 + 0.1 N, biases (those of the index key and of the router) 0.1 N.
    """
    config = preset(name)
    config = dataclasses.replace(config, dsa=dataclasses.replace(config.dsa, **dsa_changes))
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    draw = np.random.default_rng(seed)
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        value = draw.standard_normal(variable.shape)
        if path[-1] in ("bias", "e_score_correction_bias"):
            value *= 0.1
        elif len(variable.shape) == 1:
            value = 1 + 0.1 * value
        elif path[-2] != "embed_tokens":
            value /= np.sqrt(variable.shape[-1])
        variable.set_value(jnp.asarray(value, jnp.float32))
    return model


def indexer_of(model: Decoder, layer: int = 0) -> Indexer:
    """The indexer of a full layer."""
    indexer = model.model.layers[layer].self_attn.indexer
    assert indexer is not None
    return indexer


def random_tokens(model: Decoder, *shape: int, seed: int = 1) -> jax.Array:
    """Tokens of the model's vocabulary."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, model.config.vocab_size, shape), jnp.int32)
