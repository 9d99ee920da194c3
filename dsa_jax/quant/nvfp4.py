"""NVFP4: e2m1 codes with an e4m3 scale for each 16 elements and one float32 scale for all, for latents."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from dsa_jax.forms import FP4_GROUP
from dsa_jax.quant.fp4 import E2M1_MAX, decode_e2m1, encode_e2m1, pack_nibbles, unpack_nibbles
from dsa_jax.quant.fp8 import decode_e4m3, encode_e4m3, exact_divide, finite_amax


def quantize_nvfp4(x: Array, global_scale: Array | float) -> tuple[Array, Array]:
    """Quantise vectors to NVFP4.

    Roundings, in this order: the divisor ``6 * global_scale`` to float32; per group the quotient of its greatest magnitude
    and that divisor to float32; the quotient to the nearest e4m3, ties to even, saturating at 448: the stored scale; its
    product with ``global_scale`` to float32; each element divided by the product, to float32; the quotient to the nearest
    e2m1, ties to even, saturating at 6. A group whose scale rounds to 0 gets zero codes. An infinite element saturates; a
    NaN element makes its group's scale NaN, so that the whole group decodes to NaN.

    Args:
        x: floats ``[..., width]``, width a multiple of 16.
        global_scale: positive ``float32`` scalar of the model. ``max|x| / (6 * 448)`` uses the whole range; some runtimes
            store its reciprocal.

    Returns:
        ``uint8[..., width / 2]`` packed codes and ``uint8[..., width / 16]`` e4m3 scale codes.

    Raises:
        ValueError: if the width is not a multiple of 16.
    """
    if x.shape[-1] % FP4_GROUP:
        raise ValueError(
            f"quantize_nvfp4: x has last dimension {x.shape[-1]}; wanted a multiple of {FP4_GROUP}, the elements under one "
            "scale. Pad the vectors, or use the fp8 or bf16 form."
        )
    groups = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // FP4_GROUP, FP4_GROUP)
    global_scale = jnp.asarray(global_scale, jnp.float32)
    quotient = exact_divide(finite_amax(groups), E2M1_MAX * global_scale)
    scale_codes = encode_e4m3(jnp.where(jnp.any(jnp.isnan(groups), axis=-1), jnp.float32(jnp.nan), quotient))
    scale = (decode_e4m3(scale_codes) * global_scale)[..., None]
    scaled = jnp.where(scale > 0, exact_divide(groups, jnp.where(scale > 0, scale, 1.0)), 0.0)
    return pack_nibbles(encode_e2m1(scaled, "even").reshape(x.shape)), scale_codes


def dequantize_nvfp4(packed: Array, scale_codes: Array, global_scale: Array | float) -> Array:
    """Values of NVFP4 vectors: ``e2m1 * (e4m3 scale * global_scale)``, the product of the scales rounded first.

    Args:
        packed: ``uint8[..., width / 2]``.
        scale_codes: ``uint8[..., width / 16]`` e4m3.
        global_scale: the scale that they were quantised with.

    Returns:
        ``float32[..., width]``.
    """
    values = decode_e2m1(unpack_nibbles(packed)).reshape(*scale_codes.shape, FP4_GROUP)
    scale = decode_e4m3(scale_codes) * jnp.asarray(global_scale, jnp.float32)
    return (values * scale[..., None]).reshape(*packed.shape[:-1], packed.shape[-1] * 2)
