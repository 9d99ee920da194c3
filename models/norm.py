"""Normalisation and linear layers. Every weight is kept as the checkpoint has it: ``[out, in]``, under the same name."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array


def contract(equation: str, *operands: Array, wide: bool = False) -> Array:
    """``jnp.einsum`` of operands of one dtype, with float32 accumulation.

    Float32 products are exact to float32 everywhere: left alone, a GPU rounds their operands to ten bits of mantissa, which
    is enough to change what the router and the indexer choose.

    Args:
        equation: subscripts as for ``jnp.einsum``.
        operands: the factors.
        wide: give the float32 sums instead of rounding them to the operands' dtype.
    """
    exact = all(x.dtype == jnp.float32 for x in operands)
    return jnp.einsum(
        equation,
        *operands,
        precision=jax.lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32 if wide else None,
    )


def contract_exactly(equation: str, x: Array, weight: Array) -> Array:
    """Float32 sums of unrounded products, for what a choice depends on.

    A product of two numbers of 16 bits is exact in float32, so such factors are multiplied as they are: tensor cores do that
    several times as fast as for factors that were raised to float32 first.

    Args:
        equation: subscripts as for ``jnp.einsum``.
        x: activations.
        weight: of any float dtype.

    Returns:
        float32, whatever the factors' dtypes.
    """
    if x.dtype == weight.dtype and x.dtype.itemsize == 2:
        # The precision is named, so that a setting of the caller's for all products does not round these.
        precision = jax.lax.Precision.DEFAULT
        return jnp.einsum(equation, x, weight, precision=precision, preferred_element_type=jnp.float32)
    return contract(equation, x.astype(jnp.float32), weight.astype(jnp.float32), wide=True)


class Buffer(nnx.Variable):
    """A value that is saved with the weights but never trained by gradient."""


class Linear(nnx.Module):
    """``x @ weight.T``, computed in the dtype of ``x`` with float32 accumulation.

    Attributes:
        weight: ``[out, in]``.
    """

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs, scale: float = 1.0):
        """Draw the weight from N(0, scale^2 / inputs)."""
        deviation = scale * inputs**-0.5
        self.weight = nnx.Param(deviation * jax.random.normal(rngs.params(), (outputs, inputs), jnp.float32))

    def __call__(self, x: Array) -> Array:
        """Map ``[..., in]`` to ``[..., out]`` in the dtype of ``x``."""
        return contract("...i,oi->...o", x, self.weight[...].astype(x.dtype))


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x^2) + eps) * weight``, in float32, cast back at the end (DeepSeek's reference order).

    Attributes:
        weight: ``[width]``.
        eps: added to the mean square.
    """

    def __init__(self, width: int, eps: float):
        """Start with unit weights."""
        self.weight = nnx.Param(jnp.ones((width,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        """Normalise the last axis of ``[..., width]``; the result has the dtype of ``x``."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        return (y * _along_last(self.weight[...], y)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Mean-subtracting normalisation with weight and bias, in float32: the norm of the indexer key.

    It is not an RMSNorm: the mean is removed and the bias is part of the checkpoint.

    Attributes:
        weight, bias: ``[width]``.
        eps: added to the variance, 1e-6 in DeepSeek-V3.2 and GLM-5.
    """

    def __init__(self, width: int, eps: float = 1e-6):
        """Start with unit weights and zero bias."""
        self.weight = nnx.Param(jnp.ones((width,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((width,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        """Normalise the last axis of ``[..., width]``; the result has the dtype of ``x``."""
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        return (y * _along_last(self.weight[...], y) + _along_last(self.bias[...], y)).astype(x.dtype)


def _along_last(vector: Array, x: Array) -> Array:
    """``vector`` in float32, shaped to broadcast along the last axis of ``x``."""
    return vector.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + vector.shape)
