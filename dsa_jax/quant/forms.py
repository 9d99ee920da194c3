"""Storage forms: what a token's key or latent looks like in the pools, there and back.

An entry is a dict from pool name (``index_key``, ``index_scale``, ``key``, ``key_scale``, ``key_rope``) to that pool's part
of the token. Writers encode, readers decode, and nobody else knows what the bytes mean. ``dsa_jax.forms`` knows which pools
a form has and how wide they are.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from dsa_jax.forms import FP8_TILE
from dsa_jax.quant import fp4, fp8, nvfp4

Query = Array | tuple[Array, Array]
"""Floats ``[..., D]``, FP8 codes ``uint8[..., D]``, or an FP4 pair ``(uint8[..., D/2], int32[...])``."""

TILE_SCALE_FLOOR = 1e-4
"""Smallest tile scale of the 656-byte token; it stands after the division by 448."""


def encode_index(
    k: Array, form: str, scale_rule: fp8.ScaleRule = "ue8m0", tie_rule: fp4.TieRule = "deepgemm"
) -> dict[str, Array]:
    """Indexer keys as pool entries.

    Args:
        k: floats ``[..., D]``.
        form: ``"f32"``, ``"fp8"`` or ``"fp4"``.
        scale_rule: of FP8, see ``quantize_fp8``.
        tie_rule: of FP4, see ``encode_e2m1``.

    Returns:
        ``index_key`` and, but for ``"f32"``, ``index_scale``.

    Raises:
        ValueError: for an unknown form or rule.
    """
    if form == "f32":
        return {"index_key": k.astype(jnp.float32)}
    if form == "fp8":
        data, scale = fp8.quantize_fp8(k, scale_rule)
    elif form == "fp4":
        data, scale = fp4.quantize_fp4(k, tie_rule)
    else:
        raise _unknown("encode_index", form, "fp8, f32 or fp4")
    return {"index_key": data, "index_scale": scale}


def decode_index(entry: dict[str, Array], form: str) -> Array:
    """Values of indexer keys, all scales applied.

    Args:
        entry: as ``encode_index`` returns it, any leading axes.
        form: ``"f32"``, ``"fp8"`` or ``"fp4"``.

    Returns:
        ``float32[..., D]``.
    """
    values, scale = decode_keys(entry["index_key"], entry.get("index_scale"), form)
    return values if scale is None else values * scale[..., None]


def decode_keys(data: Array, scale: Array | None, form: str) -> tuple[Array, Array | None]:
    """Values of indexer keys, and the positive scale that a whole key has left.

    One scale for all of a key may leave the dot products and the ReLU and come last, as the reference kernels do with FP8.
    The four scales of an FP4 key may not, so its values carry them.

    Args:
        data: ``f32[..., D]``, ``uint8[..., D]`` or ``uint8[..., D/2]``.
        scale: the pool's scales ``[...]``, None for ``"f32"``.
        form: ``"f32"``, ``"fp8"`` or ``"fp4"``.

    Returns:
        ``float32[..., D]``, and ``float32[...]`` for ``"fp8"``, None for the others.

    Raises:
        ValueError: for an unknown form.
    """
    if form == "f32":
        return data.astype(jnp.float32), None
    if form == "fp8":
        return fp8.decode_e4m3(data), scale
    if form == "fp4" and scale is not None:
        return fp4.dequantize_fp4(data, scale), None
    raise _unknown("decode_keys", form, "fp8, f32 or fp4, the last with its scales")


def decode_query(q: Query, form: str) -> Array:
    """Values of indexer queries.

    The scale of an FP8 query is not part of it: it is folded into the head's weight. An FP4 query brings its block scales.

    Args:
        q: floats ``[..., D]``, codes ``uint8[..., D]``, or the pair ``(uint8[..., D/2], int32[...])``.
        form: form of the keys: ``"f32"``, ``"fp8"`` or ``"fp4"``.

    Returns:
        ``float32[..., D]``.
    """
    data, scale = q if isinstance(q, tuple) else (q, None)
    return decode_keys(data, scale, form)[0]


def encode_latent(
    latent: Array, k_rope: Array, form: str, key_scale: Array | float | None = None
) -> dict[str, Array]:
    """MLA latents and rotary keys as pool entries.

    * ``bf16``, ``f32``: both side by side.
    * ``fp8``: both side by side as e4m3 of ``x / key_scale``, to nearest even, saturating.
    * ``nvfp4``: both side by side, see ``quantize_nvfp4``; ``key_scale`` is the global scale.
    * ``fp8_ds_mla``: the 656-byte token of FlashMLA: e4m3 latents in tiles of 128, each with the float32 scale
      ``pow2_ceil(max(max|x| / 448, 1e-4))``, and the rotary part in bfloat16.

    Args:
        latent: floats ``[..., latent_dim]``.
        k_rope: floats ``[..., rope_dim]``.
        form: storage form of KEY.
        key_scale: scale of ``fp8`` and ``nvfp4``, 1 by default.

    Returns:
        ``key``, and ``key_scale`` and ``key_rope`` where the form has them.

    Raises:
        ValueError: for an unknown form.
    """
    if form == "fp8_ds_mla":
        tiles = latent.astype(jnp.float32).reshape(*latent.shape[:-1], latent.shape[-1] // FP8_TILE, FP8_TILE)
        largest = fp8.finite_amax(tiles) * jnp.float32(1.0 / fp8.E4M3_MAX)
        scale = fp8.pow2_ceil(jnp.maximum(largest, TILE_SCALE_FLOOR))
        codes = fp8.encode_e4m3(tiles * fp8.pow2_reciprocal(scale)[..., None]).reshape(latent.shape)
        return {"key": codes, "key_scale": scale, "key_rope": _bfloat16(k_rope)}
    if form == "bf16":
        return {"key": jnp.concatenate([_bfloat16(latent), _bfloat16(k_rope)], axis=-1)}
    values = jnp.concatenate([latent.astype(jnp.float32), k_rope.astype(jnp.float32)], axis=-1)
    if form == "f32":
        return {"key": values}
    factor = 1.0 if key_scale is None else key_scale
    if form == "fp8":
        return {"key": fp8.encode_e4m3(fp8.exact_divide(values, factor))}
    if form == "nvfp4":
        codes, scale = nvfp4.quantize_nvfp4(values, factor)
        return {"key": codes, "key_scale": scale}
    raise _unknown("encode_latent", form, "bf16, f32, fp8, nvfp4 or fp8_ds_mla")


def decode_latent(entry: dict[str, Array], form: str, key_scale: Array | float | None = None) -> Array:
    """Values of cached latents and rotary keys.

    Args:
        entry: as ``encode_latent`` returns it, any leading axes. Tile scales may be any float32, not powers of two only.
        form: storage form of KEY.
        key_scale: the scale that ``fp8`` and ``nvfp4`` were written with, 1 by default.

    Returns:
        ``float32[..., latent_dim + rope_dim]``.

    Raises:
        ValueError: for an unknown form.
    """
    factor = jnp.asarray(1.0 if key_scale is None else key_scale, jnp.float32)
    if form in ("bf16", "f32"):
        return entry["key"].astype(jnp.float32)
    if form == "fp8":
        return fp8.decode_e4m3(entry["key"]) * factor
    if form == "nvfp4":
        return nvfp4.dequantize_nvfp4(entry["key"], entry["key_scale"], factor)
    if form == "fp8_ds_mla":
        codes, scale = entry["key"], entry["key_scale"]
        tiles = fp8.decode_e4m3(codes).reshape(*scale.shape, FP8_TILE) * scale[..., None]
        return jnp.concatenate([tiles.reshape(codes.shape), entry["key_rope"].astype(jnp.float32)], axis=-1)
    raise _unknown("decode_latent", form, "bf16, f32, fp8, nvfp4 or fp8_ds_mla")


def _bfloat16(x: Array) -> Array:
    """Round to bfloat16 in a way that XLA cannot cancel against a later conversion back to float32."""
    if x.dtype == jnp.bfloat16:
        return x
    return lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)


def _unknown(operation: str, form: str, wanted: str) -> ValueError:
    return ValueError(f"{operation}: form is {form!r}; wanted {wanted}. Pass one of these storage forms.")
