"""The only place that turns values into cache bytes and cache bytes into values.

Quantised bytes are ``uint8`` everywhere: a float8 scatter copies its pool on CPU, and sm80 cannot load float8 at all.
Scales that are powers of two are built from the bits of the float, because ``exp2(ceil(log2(x)))`` misses the right power
next to powers of two.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

E4M3_MAX = 448.0
"""Greatest finite value of float8_e4m3fn."""
AMAX_FLOOR = 1e-4
"""Smallest maximum a vector is quantised for, so that a zero vector gets zero bytes and a finite scale."""

ScaleRule = Literal["ue8m0", "fp32"]


def pow2_ceil(x: Array) -> Array:
    """Smallest power of two that is at least ``x``, from the bits: exponent plus one if any mantissa bit is set.

    Args:
        x: positive ``float32`` of any shape. The exponent field of the result is clamped to 1..254, so zero and
            subnormal inputs give ``2**-126``.

    Returns:
        ``float32`` of the same shape.

    >>> pow2_ceil(jnp.array([1.0, 1.0000001, 0.3], jnp.float32)).tolist()
    [1.0, 2.0, 0.5]
    """
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    exponent = lax.shift_right_logical(bits, 23) + ((bits & 0x7FFFFF) != 0).astype(jnp.int32)
    return lax.bitcast_convert_type(lax.shift_left(jnp.clip(exponent, 1, 254), 23), jnp.float32)


def encode_e4m3(x: Array) -> Array:
    """Round to float8_e4m3fn, to nearest even, saturating at +-448.

    The cast of XLA does not saturate (465 becomes NaN), so the values are clamped first. NaN stays NaN (byte 0x7F or 0xFF).

    Args:
        x: floats of any shape.

    Returns:
        ``uint8`` codes of the same shape.
    """
    clamped = jnp.clip(x.astype(jnp.float32), -E4M3_MAX, E4M3_MAX)
    return lax.bitcast_convert_type(clamped.astype(jnp.float8_e4m3fn), jnp.uint8)


def decode_e4m3(codes: Array) -> Array:
    """Values of float8_e4m3fn codes, exactly, NaN codes as NaN.

    The bits are moved into a float16 and rescaled, not converted from float8: inside one ``jit`` XLA cancels a conversion to
    float8 against the conversion back (its default is to allow excess precision), and the quantisation would vanish.

    Args:
        codes: ``uint8`` of any shape.

    Returns:
        ``float32`` of the same shape.

    >>> decode_e4m3(jnp.array([0x38, 0x7E, 0x01, 0xB8], jnp.uint8)).tolist()
    [1.0, 448.0, 0.001953125, -1.0]
    """
    bits = codes.astype(jnp.uint16)
    magnitude = bits & jnp.uint16(0x7F)
    # e4m3 subnormals are float16 subnormals here; float16 keeps them where float32 arithmetic would flush.
    half = lax.bitcast_convert_type(
        ((bits & jnp.uint16(0x80)) << jnp.uint16(8)) | (magnitude << jnp.uint16(7)), jnp.float16
    )
    values = half.astype(jnp.float32) * jnp.float32(256.0)  # exponent bias 15 against 7
    return jnp.where(magnitude == 0x7F, jnp.float32(jnp.nan), values)


def quantize_fp8(x: Array, scale_rule: ScaleRule = "ue8m0") -> tuple[Array, Array]:
    """Quantise vectors to e4m3 with one scale each.

    ``a = max(max|x|, 1e-4)``; the scale is ``a / 448``, rounded up to a power of two under ``"ue8m0"`` before the data is
    divided by it (DeepSeek-V3.2's reference kernel); the codes are ``e4m3(x / scale)``, saturating. An infinite element
    saturates and a NaN element stays NaN: a bad key never turns into a plausible one.

    Args:
        x: floats ``[..., D]``.
        scale_rule: ``"ue8m0"`` (powers of two) or ``"fp32"`` (the exact quotient).

    Returns:
        ``uint8[..., D]`` codes and ``float32[...]`` scales.

    Raises:
        ValueError: for an unknown ``scale_rule``.
    """
    if scale_rule not in ("ue8m0", "fp32"):
        raise ValueError(
            f"quantize_fp8: scale_rule is {scale_rule!r}; wanted 'ue8m0' (power-of-two scales) or 'fp32'. "
            "Pass one of the two."
        )
    x = x.astype(jnp.float32)
    magnitude = jnp.abs(x)
    # An infinite element must not make the scale infinite (0/inf and inf/inf would ruin the other elements).
    finite = jnp.where(jnp.isfinite(magnitude), magnitude, 0.0)
    amax = jnp.maximum(jnp.max(finite, axis=-1), AMAX_FLOOR)
    scale = amax * jnp.float32(1.0 / E4M3_MAX)
    if scale_rule == "ue8m0":
        scale = pow2_ceil(scale)
    return encode_e4m3(x / scale[..., None]), scale


def dequantize_fp8(codes: Array, scale: Array) -> Array:
    """Values of FP8 vectors: ``decode_e4m3(codes) * scale``.

    Args:
        codes: ``uint8[..., D]``.
        scale: ``float32[...]``.

    Returns:
        ``float32[..., D]``.
    """
    return decode_e4m3(codes) * scale[..., None]


def hadamard(x: Array) -> Array:
    """Multiply by the Sylvester Hadamard matrix times ``D**-0.5``: orthonormal, symmetric, its own inverse.

    Applied to query and key together it leaves their dot product unchanged and spreads outliers before quantisation
    (DeepSeek-V3.2's indexer). Computed in float32.

    Args:
        x: floats ``[..., D]``, D a power of two.

    Returns:
        The rotated vectors, in the dtype of ``x``.

    Raises:
        ValueError: if D is not a power of two.

    >>> hadamard(jnp.array([2.0, 0.0, 0.0, 0.0], jnp.float32)).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    width = x.shape[-1]
    if width < 1 or width & (width - 1):
        raise ValueError(
            f"hadamard: x has last dimension {width}; wanted a power of two. Pad the head dimension, or switch the "
            "Hadamard rotation off in the layout and the model."
        )
    return jnp.matmul(x.astype(jnp.float32), _hadamard_matrix(width), precision=lax.Precision.HIGHEST).astype(
        x.dtype
    )


def _hadamard_matrix(width: int) -> Array:
    """Sylvester's matrix, entry (i, j) = (-1)**popcount(i & j), times ``width**-0.5``."""
    index = jnp.arange(width, dtype=jnp.int32)
    odd = lax.population_count(index[:, None] & index[None, :]) & 1
    with jax.numpy_dtype_promotion("standard"):
        return (1 - 2 * odd).astype(jnp.float32) * (width**-0.5)
