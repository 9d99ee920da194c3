"""FP4 codes re-expressed as e4m3, on integers alone.

A code of e2m1 times a power of two is a code of e4m3 as long as the power stays in range. The groups of a vector have
powers of their own: a group whose power is 2**-d of the vector's greatest gets the codes of its values times 2**(6 - d),
and the greatest power times 2**-6 is the scale of the whole vector. That is exact, with nothing but normal codes, for d up
to 11. Who meets greater differences has to take the groups one by one, which needs no re-expression: d is 0 then.

Eight codes of a group make a word. They become the bytes of two words, looked up four at a time by a byte permutation whose
selector is the codes themselves. The elements are not put back into their order: a product over them does not care, if the
other factor has them in the same one (`REORDER`).

The functions take anything with integer operators and a `permute`, so that kernel and interpreter compute the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dsa_jax.quant.fp4 import GROUPS, NAN_SCALE

MOST_DROP = 11
"""Greatest difference of two exponents in one vector that the codes can carry."""
SHIFT = 6
"""Codes are those of the values times 2**SHIFT: 6 becomes 384, near e4m3's greatest, 448."""
LEAST, GREATEST = SHIFT + 1, 254
"""Greatest scale bytes of a key between which its scale is a normal float32; 255 means NaN."""
LEAST_QUERY, GREATEST_QUERY = 64, 190
"""The same of a query, whose scale meets its weight before anything else: no product overflows on the way."""
WORDS = 16
"""Words of a vector."""
ONES = 0x7F7F7F7F
"""Scale bytes that all mean 1."""
_SIGNS = np.uint32(0x80808080)

Permute = Callable[[Any, Any, Any], Any]
"""``permute(a, b, selector)``: nibble i of the selector's lower half says which of the eight bytes of b and a is byte i."""


def tables(drop: Any, group: Any, permute: Permute) -> tuple[Any, Any]:
    """The e4m3 codes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6 times ``2**(SHIFT - d)``, as bytes of two words.

    Args:
        drop: four bytes d, one a group.
        group: which one is meant, 0 to 3.
        permute: see `Permute`.
    """
    # Seven codes have eight for each power of two; byte 0 of the first table is the code of 0 and stays.
    return (
        0x6C686000 - (permute(drop, 0, group * 0x1110 + 4) << 3),
        0x7C787470 - (permute(drop, 0, group * 0x1111) << 3),
    )


def expand(word: Any, table: tuple[Any, Any], permute: Permute) -> tuple[Any, Any]:
    """The e4m3 codes of a word's eight elements, 0 to 3 as bytes of the first result and 4 to 7 of the second."""
    sizes = word & 0x77777777
    # A sign is bit 7 of a byte of the word, or of the word moved by a nibble.
    moved = word << 4
    first = permute(*table, sizes) | (permute(moved, word, 0x5140) & _SIGNS)
    second = permute(*table, sizes >> 16) | (permute(moved, word, 0x7362) & _SIGNS)
    return first, second


def reorder(words: Array) -> Array:
    """Put words of four elements, ``[..., 4, 4, 2]``, where the kernel's product has them.

    Column ``32 t + 16 c + 4 g + i`` of a product is element ``32 g + 8 t + 4 c + i``: step t of the product takes word t of
    each of the four groups, its first four elements (c = 0) and its last.
    """
    return jnp.moveaxis(words, -3, -1)


def spread(scales: Any) -> tuple[Any, Any]:
    """Greatest scale byte of a vector, ``int32`` 0 to 255, and the four bytes' distances from it as bytes of an ``int32``.

    Args:
        scales: ``int32``, four UE8M0 bytes.
    """
    top = scale_bytes(scales, 0)
    for group in range(1, GROUPS):
        top = jnp.maximum(top, scale_bytes(scales, group))
    return top, top * 0x01010101 - scales


def doubts(top: Array, drop: Array, distances: Array, tops: Array) -> tuple[Array, Array]:
    """Add a vector to what `doubtful` judges, ``int32`` and ``uint32``, both 0 at first."""
    # 15 - MOST_DROP more than a distance passes 15 exactly where the distance passes MOST_DROP. A top below LEAST wraps.
    height = lax.bitcast_convert_type(top - LEAST, jnp.uint32)
    return distances | drop | (drop + (15 - MOST_DROP) * 0x01010101), jnp.maximum(tops, height)


def doubtful(distances: Array, tops: Array) -> Array:
    """Whether one of the vectors behind these is beyond what codes and a float32 scale can carry, bool."""
    return ((distances & -0x0F0F0F10) != 0) | (tops > GREATEST - LEAST)


def power(byte: Array) -> Array:
    """``2**(byte - 127)`` as float32, NaN for 255 and 0 for 0 (never written)."""
    value = lax.bitcast_convert_type(byte << 23, jnp.float32)
    return jnp.where(byte == NAN_SCALE, jnp.nan, value)


def scale_bytes(scales: Array, group: int | Array) -> Array:
    """One of the four bytes, ``int32`` 0 to 255."""
    # Under jax_enable_x64 a bare number is an int64, by which lax shifts no int32.
    places = np.int32(8 * group) if isinstance(group, int) else 8 * group
    return lax.shift_right_logical(scales, places) & 0xFF


def query_codes(packed: Array, scales: Array, weights: Array) -> tuple[Array, Array, Array]:
    """Queries as the kernel takes them.

    Where all heads of a request fit, its codes carry the groups' exponents and its weights the heads'. Otherwise the codes
    are those of the bare e2m1 values, and the kernel has to multiply each group's products with the groups' powers.

    Args:
        packed: ``uint8[R, n, H, 64]``.
        scales: ``int32[R, n, H]``.
        weights: ``float32[R, n, H]``.

    Returns:
        ``uint8[R, n, H, 128]`` e4m3 codes in the kernel's order; ``float32[R, n, 5, H]`` factors: half the weight (the
        kernel adds x and |x|), then the power of each group; ``int32[R, 1]``, 1 for requests that do not fit.
    """
    top, drop = spread(scales)
    fits = jnp.all(query_fits(scales), axis=(1, 2), keepdims=True)
    codes = _e4m3(packed, jnp.where(fits[..., None], _bytes(drop), 0))
    half = weights.astype(jnp.float32) * jnp.where(fits, power(top) * 2.0**-SHIFT, 1.0) * 0.5
    powers = jnp.where(fits[..., None], 1.0, power(_bytes(scales)) * 2.0**-SHIFT)
    factors = jnp.concatenate([half[..., None], powers], axis=-1).swapaxes(2, 3)
    return _as_bytes(reorder(codes)), factors, jnp.logical_not(fits).astype(jnp.int32).reshape(-1, 1)


def as_fp8(packed: Array, scales: Array) -> tuple[Array, Array]:
    """FP4 vectors as FP8 ones, elements in their order, where `key_fits` or `query_fits` says so.

    Args:
        packed: ``uint8[..., 64]``.
        scales: ``int32[...]``.

    Returns:
        ``uint8[..., 128]`` e4m3 codes and ``float32[...]`` scales.
    """
    top, drop = spread(scales)
    return _as_bytes(_e4m3(packed, _bytes(drop))), power(top) * 2.0**-SHIFT


def key_fits(scales: Array) -> Array:
    """Whether e4m3 codes and a float32 scale can carry vectors with these scales, ``bool`` of the same shape.

    Not those at `LEAST`: the kernel of FP8 keys halves a key's scale first, and half of the least normal number may be 0.
    """
    top, drop = spread(scales)
    none = jnp.zeros_like(drop)
    return jnp.logical_not(doubtful(*doubts(top, drop, none, none.astype(jnp.uint32)))) & (top > LEAST)


def query_fits(scales: Array) -> Array:
    """The same where the scale meets a weight."""
    top, _ = spread(scales)
    return key_fits(scales) & (top >= LEAST_QUERY) & (top <= GREATEST_QUERY)


def _bytes(word: Array) -> Array:
    """``int32[..., 4]``, 0 to 255."""
    group = lax.broadcasted_iota(jnp.int32, (*word.shape, GROUPS), word.ndim)
    return (word[..., None] >> (8 * group)) & 0xFF


def _e4m3(packed: Array, lower: Array) -> Array:
    """Codes of the values times ``2**(SHIFT - d)``, four a word: ``int32[..., 4, 4, 2]``, in the elements' order.

    Words, not bytes, because the bytes of a step's queries would take XLA longer than a kernel takes to score them.

    Args:
        packed: ``uint8[..., 64]``.
        lower: d of each group, ``int32[..., 4]``.
    """
    shape = (*lower.shape, WORDS // GROUPS)
    word = lax.bitcast_convert_type(packed.reshape(*shape, 4), jnp.int32)
    # Half of a word, then its nibbles as bytes: e2m1's three bits of size below a sign.
    half = lax.broadcasted_iota(jnp.int32, (*shape, 2), len(shape))
    nibbles = (word[..., None] >> (16 * half)) & 0xFFFF
    nibbles = (nibbles | (nibbles << 8)) & 0x00FF00FF
    nibbles = (nibbles | (nibbles << 4)) & 0x0F0F0F0F
    size = nibbles & 0x07070707
    # A byte is 1 where the size is not 0, and where it is not 0 or 0.5. No sum carries into the next byte.
    some, more = (((size + 0x08080808 - least * 0x01010101) >> 3) & 0x01010101 for least in (1, 2))
    bits = some * (0x60 - 8 * lower[..., None, None]) + 4 * (size - some + more)
    return bits | ((nibbles & 0x08080808) << 4)


def _as_bytes(words: Array) -> Array:
    """``uint8[..., 128]`` of ``int32`` words, whose axes are the last three."""
    return lax.bitcast_convert_type(words, jnp.uint8).reshape(*words.shape[:-3], -1)
