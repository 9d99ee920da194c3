"""Multi-head latent attention: the projections around the attention, in absorbed and in expanded form.

The cache holds one latent and one rotary key a token, shared by all heads. Absorbed, the query is carried into the latent
space and attends to the cached latents themselves; expanded, keys and values of every head are made from the latents. Both
give the same attention; the paged step uses the first, whole-sequence training the second, which is cheaper there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array

from dsa_jax.models.indexer import Indexer
from dsa_jax.models.norm import Linear, RMSNorm, contract
from dsa_jax.models.rope import Rotation, rotate

if TYPE_CHECKING:
    from dsa_jax.models.config import ModelConfig

LATENT_NORM_EPS = 1e-6
"""Epsilon of the two inner norms in DeepSeek's and transformers' code, also for GLM, whose block norms use 1e-5."""


class Projected(NamedTuple):
    """What a layer makes of its new tokens.

    Attributes:
        q_nope: ``[..., h, qk_nope_head_dim]``.
        q_rope: ``[..., h, qk_rope_head_dim]``, rotated.
        latent: ``[..., kv_lora_rank]``, normalised: what the cache stores.
        k_rope: ``[..., qk_rope_head_dim]``, rotated: what the cache stores next to it.
        q_lora: ``[..., q_lora_rank]``, normalised: the input of the indexer's queries.
    """

    q_nope: Array
    q_rope: Array
    latent: Array
    k_rope: Array
    q_lora: Array


class MLA(nnx.Module):
    """Projections of one attention layer and, in full layers, its indexer. Names are those of the checkpoint."""

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs):
        """Draw random projections for layer number ``layer`` of ``config``."""
        dsa = config.dsa
        self.config = dsa
        heads = dsa.num_heads
        self.q_a_proj = Linear(config.hidden_size, dsa.q_lora_rank, rngs=rngs)
        self.q_a_layernorm = RMSNorm(dsa.q_lora_rank, LATENT_NORM_EPS)
        self.q_b_proj = Linear(
            dsa.q_lora_rank, heads * (dsa.qk_nope_head_dim + dsa.qk_rope_head_dim), rngs=rngs
        )
        self.kv_a_proj_with_mqa = Linear(config.hidden_size, dsa.key_width, rngs=rngs)
        self.kv_a_layernorm = RMSNorm(dsa.kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b_proj = Linear(dsa.kv_lora_rank, heads * (dsa.qk_nope_head_dim + dsa.v_head_dim), rngs=rngs)
        self.o_proj = Linear(
            heads * dsa.v_head_dim, config.hidden_size, rngs=rngs, scale=config.residual_scale
        )
        self.indexer = Indexer(config, rngs=rngs) if dsa.full_layers[layer] else None

    def project(self, x: Array, rotation: Rotation) -> Projected:
        """Project the normalised input of the layer.

        Args:
            x: ``[..., hidden]``.
            rotation: cosine and sine of the tokens' positions, ``[..., rope / 2]``.

        Returns:
            Everything that attention and indexer need, in the dtype of ``x``.
        """
        dsa = self.config
        q_lora = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_lora)
        q = q.reshape(*q.shape[:-1], dsa.num_heads, dsa.qk_nope_head_dim + dsa.qk_rope_head_dim)
        q_nope, q_rope = jnp.split(q, [dsa.qk_nope_head_dim], axis=-1)
        latent, k_rope = jnp.split(self.kv_a_proj_with_mqa(x), [dsa.kv_lora_rank], axis=-1)
        per_head = Rotation(rotation.cos[..., None, :], rotation.sin[..., None, :])
        return Projected(
            q_nope=q_nope,
            q_rope=rotate(q_rope, per_head, interleaved=True),
            latent=self.kv_a_layernorm(latent),
            k_rope=rotate(k_rope, rotation, interleaved=True),
            q_lora=q_lora,
        )

    def absorbed_query(self, projected: Projected) -> Array:
        """Queries in the space of the cache: ``[q_nope . W_UK | q_rope]``.

        Returns:
            ``[..., h, kv_lora_rank + qk_rope_head_dim]``.
        """
        key_up, _ = self._up_projections(projected.q_nope.dtype)
        return jnp.concatenate(
            [contract("...hd,hdl->...hl", projected.q_nope, key_up), projected.q_rope], axis=-1
        )

    def absorbed_output(self, latent: Array) -> Array:
        """From attended latents to the residual stream.

        Args:
            latent: ``[..., h, kv_lora_rank]``, output of the attention.

        Returns:
            ``[..., hidden]``.
        """
        _, value_up = self._up_projections(latent.dtype)
        return self.output(contract("...hl,hdl->...hd", latent, value_up))

    def expand(self, latent: Array) -> tuple[Array, Array]:
        """Keys (without their rotary part) and values of every head.

        Args:
            latent: ``[..., kv_lora_rank]``.

        Returns:
            ``[..., h, qk_nope_head_dim]`` and ``[..., h, v_head_dim]``.
        """
        key_up, value_up = self._up_projections(latent.dtype)
        return contract("...l,hdl->...hd", latent, key_up), contract("...l,hdl->...hd", latent, value_up)

    def output(self, values: Array) -> Array:
        """From attended values ``[..., h, v_head_dim]`` to ``[..., hidden]``."""
        return self.o_proj(values.reshape(*values.shape[:-2], values.shape[-2] * values.shape[-1]))

    def _up_projections(self, dtype) -> tuple[Array, Array]:
        """``kv_b_proj`` as ``[h, nope, latent]`` and ``[h, v, latent]``: its rows are ``[nope | v]`` head by head."""
        dsa = self.config
        weight = self.kv_b_proj.weight[...].astype(dtype)
        weight = weight.reshape(dsa.num_heads, dsa.qk_nope_head_dim + dsa.v_head_dim, dsa.kv_lora_rank)
        return weight[:, : dsa.qk_nope_head_dim], weight[:, dsa.qk_nope_head_dim :]
