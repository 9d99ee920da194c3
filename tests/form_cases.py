"""Layouts and caches of every storage form, on top of ``cases``: small widths where the form allows them."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np

import cases
import numpy_forms
from dsa_jax import ops
from dsa_jax.cache import Cache
from dsa_jax.layout import CacheLayout

KEY_SCALE = {"fp8": 0.37, "nvfp4": 0.0123}
"""Scales of the forms that take one; neither is a power of two."""
PAIRS = [
    ("nvfp4", "fp4", 4),
    ("fp8", "fp4", 1),
    ("fp8_ds_mla", "fp4", 64),
    ("fp8_ds_mla", "fp8", 64),
    ("nvfp4", "fp8", 16),
    ("fp8", "f32", 4),
]
"""Key form, index form and page size of the combinations that run."""


def widths(key: str) -> tuple[int, int]:
    """Latent and rotary elements: the released ones for the 656-byte token, else a group of 16 across both."""
    return (512, 64) if key == "fp8_ds_mla" else (24, 8)


@functools.cache
def layout(manager="v2", *, key="bf16", index="fp8", page_size=4, full=cases.FULL, **changes) -> CacheLayout:
    """A layout of three layers, of which the middle one shares, with index keys of 128 elements."""
    latent, rope = widths(key)
    model = dataclasses.replace(cases.config(full, 128), kv_lora_rank=latent, qk_rope_head_dim=rope)
    return CacheLayout.create(
        model, manager=manager, key_form=key, index_form=index, page_size=page_size, **changes
    )


def page_size_of(key: str) -> int:
    """A small page size that the form takes."""
    return 64 if key == "fp8_ds_mla" else 4


def write_entry(cache: Cache, layer: int, rows, entry: dict[str, np.ndarray]) -> Cache:
    """Put entries at cache rows by plain NumPy assignment, without any op of the library."""
    for name, values in entry.items():
        cache = cases.write(cache, name, layer, rows, values)
    return cache


def write_keys(cache: Cache, layer: int, rows, keys: np.ndarray) -> Cache:
    """Put indexer keys at rows as the NumPy model encodes them."""
    layout = cache.layout
    entry = numpy_forms.index_entries(
        keys, layout.index_form, scale_rule=layout.scale_rule, tie_rule=layout.tie_rule
    )
    return write_entry(cache, layer, rows, entry)


def latents(layout: CacheLayout, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random latents and rotary keys."""
    values = np.random.default_rng(seed).normal(size=(count, layout.latent_dim + layout.rope_dim))
    return tuple(np.split(values.astype(np.float32), [layout.latent_dim], axis=1))


def near_middles(scale: float) -> np.ndarray:
    """320 floats whose quotients by a scale lie at, or next to, the middle between two e4m3 codes: a product with the
    reciprocal, or any division that is off by a bit, gives other codes for some of them.
    """
    middles = np.repeat(np.arange(8, 16) + 0.5, 40).astype(np.float32) * np.float32(scale)
    return (middles.view(np.int32) + np.tile(np.arange(-20, 20), 8)).astype(np.int32).view(np.float32)


def query(layout: CacheLayout, values: np.ndarray):
    """A query in the cache's form, its values, and the factor that belongs into the weights: per token and head."""
    shape = values.shape
    if layout.index_form == "f32":
        return values.astype(np.float32), values.astype(np.float64), np.ones(shape[:2])
    entry = numpy_forms.index_entries(values.reshape(-1, shape[-1]), layout.index_form)
    data, scale = entry["index_key"], entry["index_scale"]
    decoded = numpy_forms.index_values(entry, layout.index_form).reshape(shape)
    data, scale = data.reshape(*shape[:2], -1), scale.reshape(shape[:2])
    if layout.index_form == "fp4":
        return (data, scale), decoded, np.ones(shape[:2])
    return data, decoded / scale[..., None], scale.astype(np.float64)


append_latent = jax.jit(ops.append_latent, static_argnames=("implementation",))
sparse_mla = jax.jit(ops.sparse_mla, static_argnames=("implementation",))
