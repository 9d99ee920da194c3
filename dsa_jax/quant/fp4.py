"""FP4: float4_e2m1fn codes, and the indexer's vectors of them with a power-of-two scale for each 32 elements."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax import Array, lax

from dsa_jax.forms import QUANT_BLOCK_SIZE
from dsa_jax.quant.fp8 import AMAX_FLOOR, finite_amax, pow2_reciprocal

TieRule = Literal["deepgemm", "even"]

E2M1_MAX = 6.0
"""Greatest value of e2m1; the values are 0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign."""
GROUPS = 4
"""Groups of a vector: their scale bytes fill one int32."""
GROUP = QUANT_BLOCK_SIZE // GROUPS
"""Elements under one scale byte."""
NAN_SCALE = 255
"""The scale byte that means NaN (UE8M0 has no other special value)."""

# Half-way points between neighbouring magnitudes; a code is the number of them that |x| exceeds.
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def encode_e2m1(x: Array, tie_rule: TieRule = "deepgemm") -> Array:
    """Round to e2m1, saturating at +-6.

    Args:
        x: floats of any shape. NaN becomes 0: e2m1 has no NaN, so whoever quantises has to keep it in the scale.
        tie_rule: ``"deepgemm"`` rounds a value half-way between two codes towards zero and knows no -0; ``"even"`` rounds
            it to the code with an even last bit and keeps -0, as IEEE conversion and PTX do.

    Returns:
        ``uint8`` codes 0..15 of the same shape: three bits of magnitude, bit 3 the sign.

    Raises:
        ValueError: for an unknown ``tie_rule``.

    >>> encode_e2m1(jnp.array([6.0, 0.75, -0.75, -0.1], jnp.float32)).tolist()
    [7, 1, 9, 0]
    >>> encode_e2m1(jnp.array([6.0, 0.75, -0.75, -0.1], jnp.float32), "even").tolist()
    [7, 2, 10, 8]
    """
    if tie_rule not in ("deepgemm", "even"):
        raise ValueError(
            f"encode_e2m1: tie_rule is {tie_rule!r}; wanted 'deepgemm' (ties towards zero) or 'even'. Pass one of the two."
        )
    x = x.astype(jnp.float32)
    magnitude = jnp.abs(x)
    code = jnp.zeros(x.shape, jnp.uint8)
    for below, midpoint in enumerate(MIDPOINTS):
        # Codes below and below + 1 meet here; under "even" the odd code loses the tie.
        exceeds = magnitude >= midpoint if tie_rule == "even" and below % 2 else magnitude > midpoint
        code = code + exceeds.astype(jnp.uint8)
    negative = jnp.signbit(x) & ~jnp.isnan(x)
    if tie_rule == "deepgemm":
        negative = negative & (code != 0)
    return code | (negative.astype(jnp.uint8) << jnp.uint8(3))


def decode_e2m1(codes: Array) -> Array:
    """Values of e2m1 codes.

    Args:
        codes: ``uint8`` 0..15 of any shape.

    Returns:
        ``float32`` of the same shape.

    >>> decode_e2m1(jnp.array([1, 7, 8 + 5], jnp.uint8)).tolist()
    [0.5, 6.0, -3.0]
    """
    exponent, mantissa = (codes >> jnp.uint8(1)) & jnp.uint8(3), codes & jnp.uint8(1)
    # Twice the magnitude is a whole number: 0 or 1 where the exponent is 0 (subnormal), (2 + m) * 2^(e-1) above.
    above = (jnp.uint8(2) | mantissa) << jnp.maximum(exponent, jnp.uint8(1)) >> jnp.uint8(1)
    magnitude = jnp.where(exponent == 0, mantissa, above).astype(jnp.float32) * 0.5
    return jnp.where(codes >= jnp.uint8(8), -magnitude, magnitude)


def pack_nibbles(codes: Array) -> Array:
    """Two codes a byte: element 2i in the low nibble, 2i + 1 in the high one. ``uint8[..., D]`` to ``uint8[..., D/2]``."""
    return codes[..., 0::2] | (codes[..., 1::2] << jnp.uint8(4))


def unpack_nibbles(packed: Array) -> Array:
    """The inverse of ``pack_nibbles``: ``uint8[..., D/2]`` to ``uint8[..., D]``."""
    pairs = jnp.stack([packed & jnp.uint8(15), packed >> jnp.uint8(4)], axis=-1)
    return pairs.reshape(*packed.shape[:-1], packed.shape[-1] * 2)


def quantize_fp4(x: Array, tie_rule: TieRule = "deepgemm") -> tuple[Array, Array]:
    """Quantise 128-dimensional vectors to e2m1 with one power-of-two scale for each 32 elements (DeepGEMM's rule).

    Per group ``a = max(max|x|, 1e-4)``; the scale is the smallest power of two with ``6 * scale >= a``; the codes are
    ``e2m1(x / scale)``. An infinite element saturates. A NaN element makes its group's scale byte 255, so that the whole
    group decodes to NaN: a bad key never turns into a plausible one.

    Args:
        x: floats ``[..., 128]``.
        tie_rule: see ``encode_e2m1``.

    Returns:
        ``uint8[..., 64]`` packed codes and ``int32[...]``: four UE8M0 bytes, byte g (little-endian) scaling elements
        ``32 g .. 32 g + 31`` by ``2**(byte - 127)``.

    Raises:
        ValueError: if the vectors are not 128 wide, or for an unknown ``tie_rule``.
    """
    if x.shape[-1] != QUANT_BLOCK_SIZE:
        raise ValueError(
            f"quantize_fp4: x has last dimension {x.shape[-1]}; wanted {QUANT_BLOCK_SIZE}, {GROUPS} groups of {GROUP} whose "
            "scales fill one int32. Use the fp8 or f32 form for other widths."
        )
    groups = x.astype(jnp.float32).reshape(*x.shape[:-1], GROUPS, GROUP)
    bits = lax.bitcast_convert_type(jnp.maximum(finite_amax(groups), AMAX_FLOOR), jnp.int32)
    # 6 = 1.5 * 2^2: two exponents down, one more up if the significand passes 1.5. No division, so nothing rounds.
    exponent = (bits >> 23) - 2 + ((bits & 0x7FFFFF) > 0x400000).astype(jnp.int32)
    scale = lax.bitcast_convert_type(exponent << 23, jnp.float32)
    codes = encode_e2m1(groups * pow2_reciprocal(scale)[..., None], tie_rule).reshape(x.shape)
    byte = jnp.where(jnp.any(jnp.isnan(groups), axis=-1), NAN_SCALE, exponent).astype(jnp.uint8)
    return pack_nibbles(codes), lax.bitcast_convert_type(byte, jnp.int32)


def dequantize_fp4(packed: Array, scale: Array) -> Array:
    """Values of FP4 vectors. A group under scale byte 255 is NaN; byte 0 (never written) counts as 0.

    Args:
        packed: ``uint8[..., 64]``.
        scale: ``int32[...]``, four UE8M0 bytes.

    Returns:
        ``float32[..., 128]``.
    """
    # The bitcast appends the axis of four, lowest byte first.
    byte = lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32)
    power = lax.bitcast_convert_type(byte << 23, jnp.float32)
    power = jnp.where(byte == NAN_SCALE, jnp.float32(jnp.nan), power)
    values = decode_e2m1(unpack_nibbles(packed)).reshape(*scale.shape, GROUPS, GROUP)
    return (values * power[..., None]).reshape(*scale.shape, QUANT_BLOCK_SIZE)
