"""Codes as factors of products that a card's tensor cores form: what the Triton scoring kernels multiply.

From Hopper on, tensor cores multiply FP8 codes as they are. Ampere has no FP8. There, four e4m3 codes are loaded as one word
and each is turned into float16 by moving bits: sign to bit 15, the other seven bits up by seven. That is the value times
2**-8, exactly, subnormals included; products of two such numbers are exact in the tensor core's float32 sums, and ReLU lets
the factor 2**16 wait until the end. The NaN codes become NaN. The words of a key are multiplied byte by byte: four products
over 32 elements, against queries whose elements were reordered the same way.

FP4 keys come as words of eight codes and are multiplied nibble by nibble: eight products over 16 elements. A code times its
group's power of two is exact in bfloat16, whose exponents are float32's, so nothing is left for the end.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import triton as pltriton

from dsa_jax import quant
from dsa_jax.compat import Device
from dsa_jax.quant.fp4 import GROUP, NAN_SCALE

_BYTES, _NIBBLES = 4, 8
_UNSCALE = 2.0**16
_MOST_BYTES = 2**31


def products(*, fp4: bool) -> int:
    """Most products that a page's scores for one row are made of."""
    return _NIBBLES if fp4 else _BYTES


def takes_codes(device: Device, keys: Array) -> bool:
    """Whether FP8 codes are multiplied as they are.

    Triton counts bytes of an array of 2 to 4 GiB in 32 bits, which is not enough; words it can count.

    Args:
        device: a card; the interpreter, whose capability is unknown, multiplies anything.
        keys: ``uint8[P, T, 128]``.
    """
    able = device.capability is None or device.capability >= (9, 0)
    return able and not _MOST_BYTES < keys.size <= 2 * _MOST_BYTES


def of_queries(q: quant.Query, *, codes: bool) -> Array:
    """What a page's keys are multiplied with.

    Args:
        q: ``[N, H, 128]`` of one byte each, or for FP4 the pair ``uint8[N, H, 64]``, ``int32[N, H]``.
        codes: keep FP8 as it is.

    Returns:
        ``float8_e4m3fn[N, 1, H, 128]``; or ``float16[N, 4, 32, H]``, of which plane b holds elements b, b + 4, b + 8, ...
        of all heads times 2**-8; or for FP4 ``bfloat16[N, 8, 16, H]``, planes of the same kind with the scales applied.
    """
    if isinstance(q, tuple):
        values = quant.dequantize_fp4(*q).astype(jnp.bfloat16)
        return values.reshape(*q[1].shape, -1, _NIBBLES).transpose(0, 3, 2, 1)
    if codes:
        q = q if q.dtype == jnp.float8_e4m3fn else lax.bitcast_convert_type(q, jnp.float8_e4m3fn)
        return q[:, None]
    q = q if q.dtype == jnp.uint8 else lax.bitcast_convert_type(q, jnp.uint8)
    planes = q.reshape(*q.shape[:2], -1, _BYTES).transpose(0, 3, 2, 1)
    return _half(planes.astype(jnp.int32))


def stored(keys: Array, *, codes: bool) -> Array:
    """The pool ``uint8[P, T, bytes]`` as a kernel reads it: codes, or words of four bytes as ``int32[P, T, bytes / 4]``."""
    if codes:
        return lax.bitcast_convert_type(keys, jnp.float8_e4m3fn)
    return lax.bitcast_convert_type(keys.reshape(*keys.shape[:2], -1, _BYTES), jnp.int32)


def of_page(read: Array, scale: Array, queries: jnp.dtype) -> tuple[list[Array], Array | float]:
    """The factors of a page's keys, one for each plane of the queries, and what the sums have to be multiplied by.

    Args:
        read: the page, as `stored` has it.
        scale: of its keys, as the pool has it.
        queries: dtype of `of_queries`, which tells the three ways apart.
    """
    if queries == jnp.bfloat16:
        return _fp4_planes(read, scale), 1.0
    if queries == jnp.float16:
        return [_half((read >> (8 * b)) & 0xFF) for b in range(_BYTES)], scale * _UNSCALE
    return [read], scale


def product(keys: Array, queries: Array) -> Array:
    """``float32[T, H]`` of one plane."""
    return pltriton.dot(keys, queries, trans_b=queries.dtype == jnp.float8_e4m3fn)


def _half(code: Array) -> Array:
    """The value of an e4m3 code, times 2**-8, as float16.

    Args:
        code: ``int32``, 0 to 255.
    """
    size = code & 0x7F
    bits = ((code & 0x80) << 8) | jnp.where(size == 0x7F, 0x7FFF, size << 7)
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16)


def _fp4_planes(word: Array, scale: Array) -> list[Array]:
    """The planes of a page's keys, ``bfloat16[T, 16]``."""
    group = jnp.arange(word.shape[1], dtype=jnp.int32) // (GROUP // _NIBBLES)
    byte = (scale[:, None] >> (8 * group)[None, :]) & 0xFF
    power = lax.bitcast_convert_type(byte << 23, jnp.float32)
    power = jnp.where(byte == NAN_SCALE, jnp.nan, power)
    return [(_e2m1((word >> (4 * i)) & 0xF) * power).astype(jnp.bfloat16) for i in range(_NIBBLES)]


def _e2m1(code: Array) -> Array:
    """The value of an e2m1 code, ``int32`` 0 to 15, as float32: exponent and mantissa in place, 0 and 0.5 apart."""
    size = code & 7
    bits = jnp.where(size == 0, 0, 0x3F000000 + jnp.where(size > 1, size << 22, 0))
    return lax.bitcast_convert_type(bits | ((code & 8) << 28), jnp.float32)
