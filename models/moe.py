"""Feed-forward layers: the dense SwiGLU, the sigmoid router with its correction bias, and the experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from dsa_jax.models.norm import Buffer, Linear, contract, contract_exactly

if TYPE_CHECKING:
    from dsa_jax.models.config import ModelConfig

DENSE_EXPERTS = 16
"""Up to so many experts all of them are evaluated for every token: two large products beat sorting tokens."""
STEP_TOKENS = 256
"""Up to so many tokens the sum over such experts is made of one result for each of them."""


class MLP(nnx.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden: int, width: int, *, rngs: nnx.Rngs, residual_scale: float = 1.0):
        """Draw random projections."""
        self.gate_proj = Linear(hidden, width, rngs=rngs)
        self.up_proj = Linear(hidden, width, rngs=rngs)
        self.down_proj = Linear(width, hidden, rngs=rngs, scale=residual_scale)

    def __call__(self, x: Array) -> Array:
        """Map ``[..., hidden]`` to the same shape and dtype; the gate is evaluated in float32."""
        gate = jax.nn.silu(self.gate_proj(x).astype(jnp.float32)) * self.up_proj(x).astype(jnp.float32)
        return self.down_proj(gate.astype(x.dtype))


def route(logits: Array, bias: Array, config: ModelConfig) -> tuple[Array, Array]:
    """Choose experts and their weights (DeepSeek-V3's "noaux_tc").

    Scores are ``sigmoid(logits)``. The bias steers the choice only: groups are ranked by the sum of their two best biased
    scores, experts outside the ``topk_group`` best groups cannot be chosen (minus infinity, since a biased score can be
    negative), and the best remaining biased scores win. The weights are the scores without the bias, divided by their sum
    if ``norm_topk_prob``, times ``routed_scaling_factor``. Ties go to the lower number.

    Args:
        logits: ``float32[N, E]``.
        bias: ``float32[E]``, the correction bias.
        config: the model.

    Returns:
        ``float32[N, k]`` weights and ``int32[N, k]`` expert numbers, k = ``num_experts_per_tok``.
    """
    scores = jax.nn.sigmoid(logits)
    biased = scores + bias[None, :]
    if config.n_group > 1:
        size = biased.shape[-1] // config.n_group
        groups = biased.reshape(*biased.shape[:-1], config.n_group, size)
        best = lax.top_k(groups, min(2, groups.shape[-1]))[0].sum(axis=-1)
        kept = jax.nn.one_hot(lax.top_k(best, config.topk_group)[1], config.n_group, dtype=jnp.bool_).any(
            axis=-2
        )
        biased = jnp.where(kept[..., None], groups, -jnp.inf).reshape(biased.shape)
    experts = lax.top_k(biased, config.num_experts_per_tok)[1]
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return weights * config.routed_scaling_factor, experts


class Gate(nnx.Module):
    """Router of one layer, float32 throughout.

    Attributes:
        weight: ``[E, hidden]``.
        e_score_correction_bias: ``[E]``; not trained by gradient.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Draw a random router without bias."""
        shape = config.n_routed_experts, config.hidden_size
        self.config = config
        self.weight = nnx.Param(
            config.hidden_size**-0.5 * jax.random.normal(rngs.params(), shape, jnp.float32)
        )
        self.e_score_correction_bias = Buffer(jnp.zeros((config.n_routed_experts,), jnp.float32))

    def __call__(self, x: Array) -> tuple[Array, Array]:
        """Route ``[N, hidden]``: ``float32[N, k]`` weights and ``int32[N, k]`` experts."""
        logits = contract_exactly("ni,ei->ne", x, self.weight[...])
        return route(logits, self.e_score_correction_bias[...].astype(jnp.float32), self.config)


class Experts(nnx.Module):
    """All routed experts of a layer, stacked.

    Attributes:
        gate_proj, up_proj: ``[E, width, hidden]``.
        down_proj: ``[E, hidden, width]``.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Draw random experts."""
        count, hidden, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size

        def draw(outputs: int, inputs: int, scale: float) -> nnx.Param:
            normal = jax.random.normal(rngs.params(), (count, outputs, inputs), jnp.float32)
            return nnx.Param(scale * inputs**-0.5 * normal)

        self.gate_proj = draw(width, hidden, 1.0)
        self.up_proj = draw(width, hidden, 1.0)
        self.down_proj = draw(hidden, width, config.residual_scale)

    def __call__(self, x: Array, weights: Array, experts: Array) -> Array:
        """Weighted sum of the chosen experts.

        Args:
            x: ``[N, hidden]``.
            weights: ``float32[N, k]``.
            experts: ``int32[N, k]``.

        Returns:
            ``float32[N, hidden]``.
        """
        if self.gate_proj.shape[0] <= DENSE_EXPERTS:
            return self._all(x, weights, experts)
        return self._chosen(x, weights, experts)

    def _all(self, x: Array, weights: Array, experts: Array) -> Array:
        """Every expert on every token; the weight of an expert that was not chosen is zero."""
        gate, up, down = (w[...].astype(x.dtype) for w in (self.gate_proj, self.up_proj, self.down_proj))
        chosen = jax.nn.one_hot(experts, gate.shape[0], dtype=jnp.float32)
        share = jnp.sum(chosen * weights[..., None], axis=-2)[..., None]
        hidden = jax.nn.silu(contract("ni,ewi->new", x, gate, wide=True))
        hidden = hidden * contract("ni,ewi->new", x, up, wide=True)
        # An expert that was not chosen may overflow, and infinity times its share of zero is NaN.
        shared = hidden * share
        hidden = jnp.where(jnp.isinf(hidden) & jnp.isnan(shared), 0, shared).astype(x.dtype)
        if x.shape[0] > STEP_TOKENS:
            return contract("new,eow->no", hidden, down, wide=True)
        # Over experts and width at once XLA copies the weights into that order, in every step.
        return jnp.sum(contract("new,eow->eno", hidden, down, wide=True), axis=0)

    def _chosen(self, x: Array, weights: Array, experts: Array) -> Array:
        """Only the chosen experts: tokens sorted by expert, one grouped product a projection."""
        count, chosen = experts.shape
        flat = experts.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        sizes = jnp.sum(
            flat[:, None] == jnp.arange(self.gate_proj.shape[0], dtype=flat.dtype)[None, :],
            axis=0,
            dtype=jnp.int32,
        )
        rows = x[order // chosen]

        def product(left: Array, stacked: nnx.Param) -> Array:
            right = jnp.swapaxes(stacked[...].astype(x.dtype), 1, 2)
            return lax.ragged_dot(
                left,
                right,
                sizes,
                precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
                preferred_element_type=jnp.float32,
            )

        hidden = jax.nn.silu(product(rows, self.gate_proj)) * product(rows, self.up_proj)
        result = product(hidden.astype(x.dtype), self.down_proj)
        result = jnp.zeros_like(result).at[order].set(result, unique_indices=True)
        result = result.reshape(count, chosen, x.shape[-1])
        return jnp.sum(result * weights[..., None], axis=1)


class MoE(nnx.Module):
    """Routed experts plus the shared expert, which sees every token with weight 1."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Draw random weights."""
        self.gate = Gate(config, rngs=rngs)
        self.experts = Experts(config, rngs=rngs)
        self.shared_experts = (
            MLP(
                config.hidden_size,
                config.moe_intermediate_size * config.n_shared_experts,
                rngs=rngs,
                residual_scale=config.residual_scale,
            )
            if config.n_shared_experts
            else None
        )

    def __call__(self, x: Array) -> Array:
        """Map ``[..., hidden]`` to the same shape and dtype."""
        return self.with_load(x)[0]

    def with_load(self, x: Array) -> tuple[Array, Array]:
        """The same, and the share of all choices that went to each expert, ``float32[E]``, which sums to 1."""
        tokens = x.reshape(-1, x.shape[-1])
        weights, experts = self.gate(tokens)
        result = self.experts(tokens, weights, experts).reshape(x.shape)
        if self.shared_experts is not None:
            result = result + self.shared_experts(x).astype(jnp.float32)
        numbers = jnp.arange(self.gate.weight.shape[0], dtype=experts.dtype)
        chosen = experts.reshape(-1, 1) == numbers[None, :]
        return result.astype(x.dtype), jnp.mean(chosen.astype(jnp.float32), axis=0)
