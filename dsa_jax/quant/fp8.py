"""FP8: float8_e4m3fn codes, and vectors of them under one scale."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax import Array, lax

E4M3_MAX = 448.0
"""Greatest finite value of float8_e4m3fn."""
AMAX_FLOOR = 1e-4
"""Smallest maximum a vector is quantised for, so that a zero vector gets zero bytes and a finite scale."""

_SIGN_BIT = -(1 << 31)
_INFINITY_BITS = 0x7F800000

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
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).astype(jnp.int32)
    return lax.bitcast_convert_type(jnp.clip(exponent, 1, 254) << 23, jnp.float32)


def pow2_reciprocal(power: Array) -> Array:
    """``1 / power`` exactly, from the bits.

    Args:
        power: ``float32`` powers of two from ``2**-126`` to ``2**126``, as scales are.

    >>> pow2_reciprocal(jnp.array([1.0, 0.25, 64.0], jnp.float32)).tolist()
    [1.0, 4.0, 0.015625]
    """
    return lax.bitcast_convert_type((254 << 23) - lax.bitcast_convert_type(power, jnp.int32), jnp.float32)


def exact_divide(x: Array, divisor: Array | float) -> Array:
    """``x / divisor`` correctly rounded on every device; quotients below ``2**-126`` become zeros of their sign.

    XLA's own division is not: on GPUs it is the approximate ``div.full.f32``, and one by a constant or a broadcast value is
    on any device a product with its reciprocal. Either is off by a unit in the last place for many inputs, and the code
    next to a rounding boundary changes. Here such a division is an estimate only, and integers make it exact. Powers of two
    need none of this: see `pow2_reciprocal`.

    Args:
        x: ``float32`` of any shape.
        divisor: ``float32`` that broadcasts to it (same rank, or a scalar).
    """
    y = jnp.broadcast_to(jnp.asarray(divisor, jnp.float32), x.shape)
    (digits_x, exponent_x), (digits_y, exponent_y) = _digits(x), _digits(y)
    # So many places to the left, digits_x over digits_y has 24 bits before the point.
    shift = 23 + (digits_x < digits_y).astype(jnp.int32)
    estimate = _estimate(digits_x.astype(jnp.float32), digits_y.astype(jnp.float32))
    digits = (estimate * lax.bitcast_convert_type((127 + shift) << 23, jnp.float32)).astype(jnp.int32)
    # The products have 48 bits, but their difference is a few times digits_y: its low 32 bits are all of it.
    rest = (digits_x << shift) - digits * digits_y
    step = jnp.round(_estimate(rest.astype(jnp.float32), digits_y.astype(jnp.float32))).astype(jnp.int32)
    digits, rest = digits + step, rest - step * digits_y
    # No quotient of two floats lies half-way between two others, so there are no ties.
    digits = digits + (2 * rest > digits_y).astype(jnp.int32) - (2 * rest < -digits_y).astype(jnp.int32)
    field = exponent_x - exponent_y - shift + 150
    size = jnp.where(field > 254, _INFINITY_BITS, (field << 23) + digits - (1 << 23))
    size = jnp.where((field < 1) | (digits_x == 0), 0, size)
    sign = (lax.bitcast_convert_type(x, jnp.int32) ^ lax.bitcast_convert_type(y, jnp.int32)) & _SIGN_BIT
    quotient = lax.bitcast_convert_type(sign | size, jnp.float32)
    ordinary = (digits_y > 0) & jnp.isfinite(x) & jnp.isfinite(y)
    # A NaN keeps its sign: x / 1 is x.
    return jnp.where(ordinary, quotient, x / jnp.where(jnp.isnan(x), jnp.float32(1), y))


def _digits(x: Array) -> tuple[Array, Array]:
    """Integers with ``|x| = digits * 2**exponent``, digits of 24 bits, 0 for zeros; ``x`` is finite, or the result is of no
    use.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    field, fraction = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    digits = jnp.where(field == 0, fraction, fraction | (1 << 23))
    spare = lax.clz(digits) - 8  # not 0 for subnormal numbers alone
    return digits << spare, jnp.maximum(field, 1) - 150 - spare


def _estimate(x: Array, y: Array) -> Array:
    """``x / y`` as the device does it."""
    return x / y


def finite_amax(x: Array) -> Array:
    """Greatest finite magnitude along the last axis, 0 if there is none.

    An infinite element must not make the scale infinite (0/inf and inf/inf would ruin the other elements).
    """
    magnitude = jnp.abs(x)
    return jnp.max(jnp.where(jnp.isfinite(magnitude), magnitude, 0.0), axis=-1)


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
    scale = jnp.maximum(finite_amax(x), AMAX_FLOOR) * jnp.float32(1.0 / E4M3_MAX)
    if scale_rule == "ue8m0":
        scale = pow2_ceil(scale)
        return encode_e4m3(x * pow2_reciprocal(scale)[..., None]), scale
    return encode_e4m3(exact_divide(x, scale[..., None])), scale


def dequantize_fp8(codes: Array, scale: Array) -> Array:
    """Values of FP8 vectors: ``decode_e4m3(codes) * scale``.

    Args:
        codes: ``uint8[..., D]``.
        scale: ``float32[...]``.

    Returns:
        ``float32[..., D]``.
    """
    return decode_e4m3(codes) * scale[..., None]
