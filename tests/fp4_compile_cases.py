"""FP4 scoring kernels with their arguments' shapes, for `compile_without_gpu`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dsa_jax.pallas import tuning


def paged_logits(
    *,
    kernel,
    requests=64,
    new_tokens=1,
    heads=64,
    page_size=64,
    context=32768,
    traced_offset=False,
    config=None,
):
    """A decode kernel, ``"fp4_mosaic"`` or ``"triton"``; refused where its `supported_on` says so."""
    import importlib

    from dsa_jax import compat

    module = importlib.import_module(f"dsa_jax.pallas.paged_logits_{kernel}")
    width, pages = context // page_size, 3 * requests * context // page_size
    chosen = tuning.Rule("of the case", {}, config).build(module.PagedLogitsFp4Config) if config else None

    def run(codes, powers, weights, keys, scales, table, limits, offset):
        module.supported_on(compat.target_device(), heads=heads, new_tokens=new_tokens, page_size=page_size)
        return module.paged_logits_decode(
            (codes, powers), weights, keys, scales, table, limits, page_scale=3,
            layer_offset=offset if traced_offset else 2, config=chosen,
        )  # fmt: skip

    rows = (requests, new_tokens, heads)
    return run, [
        jax.ShapeDtypeStruct((*rows, 64), jnp.uint8),
        jax.ShapeDtypeStruct(rows, jnp.int32),
        jax.ShapeDtypeStruct(rows, jnp.float32),
        jax.ShapeDtypeStruct((pages, page_size, 64), jnp.uint8),
        jax.ShapeDtypeStruct((pages, page_size), jnp.int32),
        jax.ShapeDtypeStruct((requests, width), jnp.int32),
        jax.ShapeDtypeStruct((requests, new_tokens), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
    ]
