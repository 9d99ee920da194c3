"""FP8 quantisation with integer arithmetic, for kernel bodies. Equal bit for bit to `dsa_jax.quant` on finite values."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from dsa_jax.quant import AMAX_FLOOR, E4M3_MAX, ScaleRule

_SMALLEST_NORMAL = 2.0**-6
_SUBNORMAL_MAGIC = 2.0**14  # one unit in the last place of 2**14 is 2**-9, the step of e4m3's subnormals
_NAN_CODE = 0x7F


def e4m3_codes(x: Array) -> Array:
    """Codes of float8_e4m3fn as int32, rounded to nearest even, saturating at +-448, NaN as 0x7F or 0xFF.

    Args:
        x: f32 of any shape.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    magnitude = lax.bitcast_convert_type(size, jnp.float32)
    # Normal numbers: round the 20 bits that go, carrying into the exponent, then move the bias from 127 to 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Subnormal ones: the addition itself rounds to multiples of 2**-9.
    magic = jnp.float32(_SUBNORMAL_MAGIC)
    subnormal = lax.bitcast_convert_type(magnitude + magic, jnp.int32) & 0xFF
    code = jnp.where(magnitude < _SMALLEST_NORMAL, subnormal, normal)
    code = jnp.where(magnitude >= E4M3_MAX, 0x7E, code)
    return sign | jnp.where(size > 0x7F800000, _NAN_CODE, code)


def quantize(x: Array, scale_rule: ScaleRule, divide: Callable[[Array, Array], Array]) -> tuple[Array, Array]:
    """Codes and scales of the rows of a tile.

    Args:
        x: f32`[rows, words, 4]`, one vector a row.
        scale_rule: "ue8m0" or "fp32".
        divide: correctly rounded division of two f32 arrays.

    Returns:
        int32`[rows, words, 4]` codes and f32`[rows]` scales.
    """
    magnitude = jnp.abs(x)
    # An infinite or NaN element must not decide the scale of the others.
    amax = jnp.max(jnp.max(jnp.where(magnitude < jnp.inf, magnitude, 0.0), axis=2), axis=1)
    scale = jnp.maximum(amax, AMAX_FLOOR) * jnp.float32(1.0 / E4M3_MAX)
    if scale_rule == "fp32":
        return e4m3_codes(divide(x, jnp.broadcast_to(scale[:, None, None], x.shape))), scale
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).astype(jnp.int32)
    exponent = jnp.minimum(jnp.maximum(exponent, 1), 254)
    scale = lax.bitcast_convert_type(exponent << 23, jnp.float32)
    # The reciprocal of a power of two is exact, so that multiplying by it divides. Scales lie in 2**-22 .. 2**120.
    reciprocal = lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)
    return e4m3_codes(x * reciprocal[:, None, None]), scale


def pack_words(codes: Array) -> Array:
    """Four codes to a word, the first in the lowest byte: int32`[rows, words, 4]` to int32`[rows, words]`."""
    shift = lax.broadcasted_iota(jnp.int32, codes.shape, 2) * 8
    return jnp.sum(lax.shift_left(codes, shift), axis=2)
