"""FP8 and FP4 quantisation for kernel bodies.

Equal bit for bit to `dsa_jax.quant` wherever that gives the same bytes on every device; a NaN is 0x7F or 0xFF in e4m3. The
first axis is that of tokens. Vectors that become FP8 are flat, since a program then reads 16 bytes at once; of FP4 the last
axis is what fills one int32 word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import triton as pltriton

from dsa_jax.quant import AMAX_FLOOR, E4M3_MAX, ScaleRule, TieRule
from dsa_jax.quant.forms import TILE_SCALE_FLOOR
from dsa_jax.quant.fp4 import E2M1_MAX, MIDPOINTS, NAN_SCALE
from dsa_jax.quant.fp8 import exact_divide


class Arithmetic(NamedTuple):
    """What a body computes with, which differs between cards and the interpreter.

    Attributes:
        divide: correctly rounded division of two f32 arrays of one shape.
        e4m3_words: f32`[..., 4 n]` to int32`[..., n]`, codes of four values side by side, the first in the lowest byte.
    """

    divide: Callable[[Array, Array], Array]
    e4m3_words: Callable[[Array], Array]


_SMALLEST_NORMAL = 2.0**-6
_SUBNORMAL_MAGIC = 2.0**14  # one unit in the last place of 2**14 is 2**-9, the step of e4m3's subnormals
_SIZE_BITS = 0x7FFFFFFF
_INFINITY_BITS = 0x7F800000
_NAN_CODE = 0x7F


def e4m3_codes(x: Array) -> Array:
    """Codes of float8_e4m3fn as int32, rounded to nearest even, saturating at +-448, NaN as 0x7F or 0xFF.

    Args:
        x: f32 of any shape.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    sign = (bits >> 24) & 0x80
    size = bits & _SIZE_BITS
    magnitude = lax.bitcast_convert_type(size, jnp.float32)
    # Normal numbers: round the 20 bits that go, carrying into the exponent, then move the bias from 127 to 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Subnormal ones: the addition itself rounds to multiples of 2**-9.
    magic = jnp.float32(_SUBNORMAL_MAGIC)
    subnormal = lax.bitcast_convert_type(magnitude + magic, jnp.int32) & 0xFF
    code = jnp.where(magnitude < _SMALLEST_NORMAL, subnormal, normal)
    code = jnp.where(magnitude >= E4M3_MAX, 0x7E, code)
    return sign | jnp.where(size > _INFINITY_BITS, _NAN_CODE, code)


def e4m3_words(x: Array) -> Array:
    """Codes of four values in a word, with integer arithmetic; see `Arithmetic`."""
    one, two, three, four = (e4m3_codes(values) for values in _by_four(x))
    return one | (two << 8) | (three << 16) | (four << 24)


def e4m3_words_by_instruction(x: Array) -> Array:
    """The same with an instruction that cards have from compute capability 8.9 on; a NaN is 0x7F there."""
    fours = _by_four(x)
    # An instruction converts two values, and has the first of its operands in the upper byte.
    code = """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
    }"""
    shape = jax.ShapeDtypeStruct(fours[0].shape, jnp.int32)
    [words] = pltriton.elementwise_inline_asm(
        code, args=fours, constraints="=r,f,f,f,f", pack=1, result_shape_dtypes=[shape]
    )
    return words


def arithmetic(*, interpret: bool, fp8_instruction: bool) -> Arithmetic:
    """What there is: the interpreter runs no instructions of a card."""
    if interpret:
        return Arithmetic(exact_divide, e4m3_words)
    return Arithmetic(_divide, e4m3_words_by_instruction if fp8_instruction else e4m3_words)


def e4m3_magnitudes(codes: Array) -> Array:
    """Values of codes 0..126 as f32; what a NaN code gives is of no use."""
    normal = lax.bitcast_convert_type((codes << 20) + ((127 - 7) << 23), jnp.float32)
    return jnp.where(codes < 8, codes.astype(jnp.float32) * jnp.float32(2.0**-9), normal)


def e2m1_codes(x: Array, tie_rule: TieRule) -> Array:
    """Codes 0..15 of e2m1 as int32, saturating at +-6, NaN as 0.

    Args:
        x: f32 of any shape.
        tie_rule: as `dsa_jax.quant.encode_e2m1` defines it.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    size = bits & _SIZE_BITS
    magnitude = lax.bitcast_convert_type(size, jnp.float32)
    code = jnp.zeros(x.shape, jnp.int32)
    for below, midpoint in enumerate(MIDPOINTS):
        # Codes below and below + 1 meet here; under "even" the odd code loses the tie.
        exceeds = magnitude >= midpoint if tie_rule == "even" and below % 2 else magnitude > midpoint
        code = code + exceeds.astype(jnp.int32)
    negative = (bits < 0) & (size <= _INFINITY_BITS)
    if tie_rule == "deepgemm":
        negative = negative & (code != 0)
    return code | (negative.astype(jnp.int32) << 3)


def quantize(x: Array, scale_rule: ScaleRule, arithmetic: Arithmetic) -> tuple[Array, Array]:
    """FP8 codes and scales of one vector a row, as `dsa_jax.quant.quantize_fp8` defines them.

    Args:
        x: f32`[rows, width]`.
        scale_rule: "ue8m0" or "fp32".
        arithmetic: see there.

    Returns:
        int32`[rows, width / 4]`, four codes a word, and f32`[rows]` scales.
    """
    scale = jnp.maximum(_finite_amax(x), AMAX_FLOOR) * jnp.float32(1.0 / E4M3_MAX)
    if scale_rule == "fp32":
        return arithmetic.e4m3_words(arithmetic.divide(x, jnp.broadcast_to(scale[:, None], x.shape))), scale
    scale, reciprocal = _pow2_ceil(scale)
    return arithmetic.e4m3_words(x * reciprocal[:, None]), scale


def quantize_tiles(x: Array, arithmetic: Arithmetic) -> tuple[Array, Array]:
    """FP8 codes and tile scales of the 656-byte token.

    Args:
        x: f32`[rows, tiles, 128]`.
        arithmetic: see there.

    Returns:
        int32`[rows, tiles, 32]`, four codes a word, and f32`[rows, tiles]` scales, powers of two.
    """
    largest = _finite_amax(x) * jnp.float32(1.0 / E4M3_MAX)
    scale, reciprocal = _pow2_ceil(jnp.maximum(largest, TILE_SCALE_FLOOR))
    return arithmetic.e4m3_words(x * reciprocal[:, :, None]), scale


def quantize_fp4(x: Array, tie_rule: TieRule) -> tuple[Array, Array]:
    """FP4 codes and scale bytes of indexer keys, as `dsa_jax.quant.quantize_fp4` defines them.

    Args:
        x: f32`[rows, groups, words, 8]`.
        tie_rule: see `e2m1_codes`.

    Returns:
        int32 codes of the same shape and int32`[rows, groups]` UE8M0 bytes.
    """
    bits = lax.bitcast_convert_type(jnp.maximum(_finite_amax(x, 2), AMAX_FLOOR), jnp.int32)
    # 6 = 1.5 * 2^2: two exponents down, one more up if the significand passes 1.5.
    exponent = (bits >> 23) - 2 + ((bits & 0x7FFFFF) > 0x400000).astype(jnp.int32)
    reciprocal = lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)
    codes = e2m1_codes(x * reciprocal[:, :, None, None], tie_rule)
    return codes, jnp.where(_has_nan(x), NAN_SCALE, exponent)


def quantize_nvfp4(x: Array, global_scale: Array, arithmetic: Arithmetic) -> tuple[Array, Array]:
    """FP4 codes and e4m3 scale codes of latents, as `dsa_jax.quant.quantize_nvfp4` defines them.

    Args:
        x: f32`[rows, words, groups, 2, 8]`, 16 elements under one scale.
        global_scale: f32 scalar.
        arithmetic: see there.

    Returns:
        int32 codes of the same shape and int32`[rows, words, groups]` scale codes.
    """
    amax = _finite_amax(x, 2)
    quotient = arithmetic.divide(amax, jnp.broadcast_to(jnp.float32(E2M1_MAX) * global_scale, amax.shape))
    scale_codes = jnp.where(_has_nan(x), _NAN_CODE, e4m3_codes(quotient))
    scale = e4m3_magnitudes(scale_codes) * global_scale
    usable = (scale > 0) & (scale_codes != _NAN_CODE)
    divisor = jnp.broadcast_to(jnp.where(usable, scale, 1.0)[..., None, None], x.shape)
    codes = jnp.where(usable[..., None, None], e2m1_codes(arithmetic.divide(x, divisor), "even"), 0)
    return codes, scale_codes


def pack_words(codes: Array, bits: int = 8) -> Array:
    """Codes of 8 or 4 bits side by side in a word, the first in the lowest bits: the last axis, of 4 or 8, goes."""
    shift = lax.broadcasted_iota(jnp.int32, codes.shape, codes.ndim - 1) * bits
    return jnp.sum(lax.shift_left(codes, shift), axis=-1, dtype=jnp.int32)


def _finite_amax(x: Array, axes: int = 1) -> Array:
    """Greatest magnitude over the last axes; an infinite or NaN element must not decide the scale of the others."""
    magnitude = jnp.abs(x)
    magnitude = jnp.where(magnitude < jnp.inf, magnitude, 0.0)
    for _ in range(axes):
        magnitude = jnp.max(magnitude, axis=-1)
    return magnitude


def _has_nan(x: Array) -> Array:
    """Whether there is a NaN in the last two axes."""
    size = lax.bitcast_convert_type(x, jnp.int32) & _SIZE_BITS
    return jnp.max(jnp.max(size, axis=-1), axis=-1) > _INFINITY_BITS


def _pow2_ceil(x: Array) -> tuple[Array, Array]:
    """The smallest power of two that is at least `x`, at most 2**127, and its reciprocal, which is exact."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).astype(jnp.int32)
    exponent = jnp.minimum(jnp.maximum(exponent, 1), 254)
    power = lambda e: lax.bitcast_convert_type(e << 23, jnp.float32)
    return power(exponent), power(254 - exponent)


def _by_four(x: Array) -> list[Array]:
    """`[..., 4 n]` as four arrays `[..., n]`: elements 0, 4, ...; 1, 5, ...; 2, 6, ...; 3, 7, ...

    By halves, which is how Triton takes arrays apart without moving what a thread holds.
    """
    half = lambda y: jnp.unstack(y.reshape(*y.shape[:-1], y.shape[-1] // 2, 2), axis=-1)
    (first, third), (second, fourth) = map(half, half(x))
    return [first, second, third, fourth]


def _divide(x: Array, y: Array) -> Array:
    """Triton's own division is off by up to two units in the last place."""
    shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    [quotient] = pltriton.elementwise_inline_asm(
        "div.rn.f32 $0, $1, $2;", args=[x, y], constraints="=f,f,f", pack=1, result_shape_dtypes=[shape]
    )
    return quotient
