"""The smallest model that has every part: one decoder layer with experts and one prediction layer."""

from __future__ import annotations

import dataclasses

from flax import nnx

from dsa_jax.models.decoder import Decoder
from dsa_jax.models.presets import preset


def one_layer(*, vocabulary: int = 96, topk: int = 4) -> Decoder:
    """A model with random weights whose queries attend ``topk`` tokens."""
    config = preset("tiny")
    dsa = dataclasses.replace(
        config.dsa, num_layers=1, full_layers=(True, True), index_topk=topk, index_n_heads=4
    )
    config = dataclasses.replace(
        config, dsa=dsa, vocab_size=vocabulary, hidden_size=32, first_k_dense_replace=0
    )
    return Decoder(config, rngs=nnx.Rngs(0))
