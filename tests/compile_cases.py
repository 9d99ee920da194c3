"""Kernels with their arguments' shapes, for `compile_without_gpu`."""

from __future__ import annotations

import importlib

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
    dtype="float32",
):
    """A decode kernel of the paged logits, ``"mosaic"`` or ``"triton"``; refused where its `supported_on` says so."""
    from dsa_jax import compat

    module = importlib.import_module(f"dsa_jax.pallas.paged_logits_{kernel}")
    width, pages = context // page_size, 3 * requests * context // page_size
    chosen = tuning.Rule("of the case", {}, config).build(module.PagedLogitsConfig) if config else None

    def run(q, weights, keys, scales, table, limits, offset):
        device = compat.target_device()
        module.supported_on(device, heads=heads, new_tokens=new_tokens, page_size=page_size)
        offset = offset if traced_offset else 2
        return module.paged_logits_decode(
            q, weights, keys, scales, table, limits,
            page_scale=3, layer_offset=offset, config=chosen, dtype=jnp.dtype(dtype),
        )  # fmt: skip

    return run, [
        jax.ShapeDtypeStruct((requests, new_tokens, heads, 128), jnp.uint8),
        jax.ShapeDtypeStruct((requests, new_tokens, heads), jnp.float32),
        jax.ShapeDtypeStruct((pages, page_size, 128), jnp.uint8),
        jax.ShapeDtypeStruct((pages, page_size), jnp.float32),
        jax.ShapeDtypeStruct((requests, width), jnp.int32),
        jax.ShapeDtypeStruct((requests, new_tokens), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
    ]


def paged_logits_prefill(
    *,
    kernel="mosaic",
    tokens=8192,
    requests=4,
    heads=64,
    page_size=64,
    context=32768,
    config=None,
    form="fp8",
):
    """A kernel over packed context tokens."""
    from dsa_jax import compat

    name = "many_rows_fp4_mosaic" if (kernel, form) == ("mosaic", "fp4") else f"paged_logits_{kernel}"
    module = importlib.import_module(f"dsa_jax.pallas.{name}")
    width, pages = context // page_size, 3 * requests * context // page_size
    chosen = tuning.Rule("of the case", {}, config).build(module.PagedLogitsConfig) if config else None

    def run(q, weights, keys, scales, table, owners, limits, offset):
        module.supported_on(compat.target_device(), heads=heads, new_tokens=1, page_size=page_size)
        return module.paged_logits_prefill(
            q, weights, keys, scales, table, owners, limits, page_scale=3, layer_offset=offset, config=chosen
        )

    shape, codes = jax.ShapeDtypeStruct, 128 if form == "fp8" else 64
    q = shape((tokens, heads, codes), jnp.uint8)
    return run, [
        q if form == "fp8" else (q, shape((tokens, heads), jnp.int32)),
        shape((tokens, heads), jnp.float32),
        shape((pages, page_size, codes), jnp.uint8),
        shape((pages, page_size), jnp.float32 if form == "fp8" else jnp.int32),
        shape((requests, width), jnp.int32),
        shape((tokens,), jnp.int32),
        shape((tokens,), jnp.int32),
        shape((), jnp.int32),
    ]


def prefill_of_two_layers(*, form, slots):
    """Appends and selections of two layers of one donated cache, in pools of so many slots: contexts of 2,048 tokens."""
    from dsa_jax import Bucket, Cache, CacheLayout, StepMetadata, ops
    from dsa_jax.config import preset

    layout = CacheLayout.create(preset("deepseek-v3.2"), layers=(0, 1), index_form=form)
    bucket = Bucket(context_requests=2, context_tokens=2048, table_width=256)
    meta = StepMetadata.create(layout, bucket, [[0, 1, 2], [3, 4]], [150, 70], [100, 70])

    def run(cache, meta, k, q, weights):
        step, rows = meta.derive(), []
        for layer in (0, 1):
            cache = ops.append_index_k(cache, layer, k, step)
            rows.append(ops.select_rows(q, weights, cache, layer, step, 2048))
            k = k + rows[-1][:, :1].astype(k.dtype)  # a layer's keys come from the layer before
        return cache, rows

    codes = lambda width: jax.ShapeDtypeStruct((2048, 64, width), jnp.uint8)
    q = codes(128) if form == "fp8" else (codes(64), jax.ShapeDtypeStruct((2048, 64), jnp.int32))
    keys = jax.ShapeDtypeStruct((2048, 128), jnp.bfloat16)
    arguments = [Cache.abstract(layout, slots), jax.eval_shape(lambda: meta), keys, q]
    return run, [*arguments, jax.ShapeDtypeStruct((2048, 64), jnp.float32)], 0


def window_logits(*, kernel, rows=2048, keys=8192, heads=64, form="fp8", dtype="float32"):
    """A kernel for contiguous keys inside windows, ``"mosaic"`` or ``"triton"``; refused as its `supported_on` says."""
    from dsa_jax import compat

    name = "many_rows_fp4_mosaic" if (kernel, form) == ("mosaic", "fp4") else f"window_logits_{kernel}"
    module = importlib.import_module(f"dsa_jax.pallas.{name}")

    def run(q, powers, weights, data, scales, starts, ends):
        module.supported_on(compat.target_device(), heads=heads)
        query = q if form == "fp8" else (q, powers)
        return module.window_logits(query, weights, data, scales, starts, ends, dtype=jnp.dtype(dtype))

    width, scale = (128, jnp.float32) if form == "fp8" else (64, jnp.int32)
    return run, [
        jax.ShapeDtypeStruct((rows, heads, width), jnp.uint8),
        jax.ShapeDtypeStruct((rows, heads), jnp.int32),
        jax.ShapeDtypeStruct((rows, heads), jnp.float32),
        jax.ShapeDtypeStruct((keys, width), jnp.uint8),
        jax.ShapeDtypeStruct((keys,), scale),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    ]
