"""The lightning indexer: scores every cached token for every query token with cheap 128-dimensional heads.

``score[t, s] = sum_h w[t, h] * relu(q[t, h] . k[s])`` with ``w`` scaled by ``H^-0.5 * D^-0.5`` (DeepSeek-V3.2 report).
The attention of a token then sees only its ``index_topk`` best tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from dsa_jax.models.norm import LayerNorm, Linear, contract, contract_exactly
from dsa_jax.models.rope import Rotation, rotate
from dsa_jax.quant import hadamard as hadamard_rotation

if TYPE_CHECKING:
    from dsa_jax.models.config import ModelConfig


class Indexer(nnx.Module):
    """Projections of the indexer of one full layer.

    Query and key are ``[rope | rest]`` (MLA's heads are the other way round). Names are those of the checkpoint.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Draw random projections for ``config``."""
        dsa = config.dsa
        self.config = dsa
        self.wq_b = Linear(dsa.q_lora_rank, dsa.index_n_heads * dsa.index_head_dim, rngs=rngs)
        self.wk = Linear(config.hidden_size, dsa.index_head_dim, rngs=rngs)
        self.k_norm = LayerNorm(dsa.index_head_dim)
        self.weights_proj = Linear(config.hidden_size, dsa.index_n_heads, rngs=rngs)

    def query(self, q_lora: Array, rotation: Rotation, *, hadamard: bool) -> Array:
        """Index queries of new tokens.

        Args:
            q_lora: ``[..., q_lora_rank]``, normalised low-rank query of MLA.
            rotation: cosine and sine of the tokens' positions.
            hadamard: must be what the keys in the cache were made with.

        Returns:
            ``[..., H, D]`` in the dtype of ``q_lora``.
        """
        dsa = self.config
        q = self.wq_b(q_lora)
        q = q.reshape(*q.shape[:-1], dsa.index_n_heads, dsa.index_head_dim)
        per_head = Rotation(rotation.cos[..., None, :], rotation.sin[..., None, :])
        return self._turn(q, per_head, hadamard)

    def key(self, x: Array, rotation: Rotation, *, hadamard: bool) -> Array:
        """Index keys of new tokens.

        Args:
            x: ``[..., hidden]``, normalised input of the layer.
            rotation: cosine and sine of the tokens' positions.
            hadamard: must be what the queries will be made with.

        Returns:
            ``[..., D]`` in the dtype of ``x``.
        """
        return self._turn(self.k_norm(self.wk(x)), rotation, hadamard)

    def head_weights(self, x: Array) -> Array:
        """Signed weight of each head with the scales ``H^-0.5 * D^-0.5`` in it, in float32.

        Sums rounded to bfloat16 would change selections between near ties.

        Args:
            x: ``[..., hidden]``, normalised input of the layer.

        Returns:
            ``float32[..., H]``.
        """
        dsa = self.config
        weights = contract_exactly("...i,oi->...o", x, self.weights_proj.weight[...])
        return weights * (dsa.index_n_heads * dsa.index_head_dim) ** -0.5

    def _turn(self, x: Array, rotation: Rotation, hadamard: bool) -> Array:
        dsa = self.config
        rope, rest = jnp.split(x, [dsa.qk_rope_head_dim], axis=-1)
        x = jnp.concatenate([rotate(rope, rotation, interleaved=dsa.indexer_rope_interleave), rest], axis=-1)
        return hadamard_rotation(x) if hadamard else x


def index_scores(q: Array, k: Array, weights: Array, *, heads_at_once: int = 8) -> Array:
    """Scores of contiguous keys, differentiable, without a mask: the form for training.

    Heads are summed a few at a time and recomputed in the backward pass, so that ``[B, S, H, S]`` never exists.

    Args:
        q: ``[B, S, H, D]``.
        k: ``[B, S, D]``.
        weights: ``float32[B, S, H]``, scales included.
        heads_at_once: heads whose dot products exist together.

    Returns:
        ``float32[B, S, S]``, query by key.
    """
    batch, length, heads, _ = q.shape
    while heads % heads_at_once:
        heads_at_once -= 1

    @jax.checkpoint
    def add(total: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
        q_part, w_part = part
        dots = contract("bthd,bsd->bths", q_part, k, wide=True)
        return total + contract("bths,bth->bts", jax.nn.relu(dots), w_part), None

    def grouped(x: Array) -> Array:
        parts = x.reshape(batch, length, heads // heads_at_once, heads_at_once, *x.shape[3:])
        return jnp.moveaxis(parts, 2, 0)

    total = jnp.zeros((batch, length, length), jnp.float32)
    return jax.lax.scan(add, total, (grouped(q), grouped(weights)))[0]
