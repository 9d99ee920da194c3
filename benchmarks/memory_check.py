"""Does a planned cache need the memory that the plan says? ``python -m benchmarks.memory_check --json FILE``.

Plans the caches of a slice of DeepSeek-V3.2 for a budget, compiles a prefill and a decode step of all ops, allocates the
cache, runs both steps in place, and compares the device's peak with the plan: cache and workspace together. Model
activations are not part of a plan, so the steps make their inputs from one number a token.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dsa_jax import ops
from dsa_jax.cache import Cache
from dsa_jax.config import DSAConfig, preset
from dsa_jax.forms import INDEX_FORMS, KEY_FORMS
from dsa_jax.layout import CacheLayout
from dsa_jax.metadata import Bucket, StepMetadata
from dsa_jax.planning import Plan, plan
from dsa_jax.sizing import parse_bytes

BOUND = 0.03
"""Greatest difference of peak and plan, as a share of the plan."""


def spread(x: Array, *shape: int) -> Array:
    """``bfloat16[N, *shape]`` that depends on ``x``, so that no layer starts before the one before it has ended."""
    steps = jnp.cos(jnp.arange(np.prod(shape), dtype=jnp.float32)).reshape(shape)
    return (x.reshape(-1, *(1,) * len(shape)) + steps[None]).astype(jnp.bfloat16)


def layer_of(cache: Cache, layer: Array, x: Array, step, model: DSAConfig) -> tuple[Cache, Array]:
    """All ops of a full layer, in a straight line."""
    layout, tokens = cache.layout, x.shape[0]
    heads, width = model.index_n_heads, model.index_head_dim
    cache = ops.append_index_k(cache, layer, spread(x, width), step)
    data, scale = ops.quantize_index_k(spread(x, heads, width).reshape(-1, width), layout.index_form)
    query, weights = data.reshape(tokens, heads, -1), spread(x, heads).astype(jnp.float32)
    if layout.index_form == "fp4":
        assert scale is not None
        query = query, scale.reshape(tokens, heads)
    elif scale is not None:
        weights = weights * scale.reshape(tokens, heads)
    local = ops.select_tokens(query, weights, cache, layer, step, model.index_topk)
    rows = ops.to_rows(local, step)
    cache = ops.append_latent(cache, layer, spread(x, layout.latent_dim), spread(x, layout.rope_dim), step)
    queries = spread(x, model.num_heads, layout.latent_dim + layout.rope_dim)
    out, _ = ops.sparse_mla(queries, cache, layer, rows, model.softmax_scale)
    return cache, x + jnp.mean(out.astype(jnp.float32), axis=(1, 2))


def step_of(model: DSAConfig, cache: Cache, meta: StepMetadata, x: Array) -> tuple[Cache, Array]:
    """All layers of the cache in one loop."""
    step = meta.derive()

    def body(carry, layer):
        return layer_of(carry[0], layer, carry[1], step, model), None

    return jax.lax.scan(body, (cache, x), jnp.arange(len(cache.layout.layers), dtype=jnp.int32))[0]


def arguments(layout: CacheLayout, bucket: Bucket, slots: int) -> tuple[Any, ...]:
    """Shapes of the arguments of a step, nothing allocated."""
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.int32)
    facts: dict[str, Any] = {
        "page_table": shape(bucket.requests, bucket.table_width),
        "kv_lens": shape(bucket.requests),
        "new_lens": shape(bucket.requests),
    }
    meta = StepMetadata(layout=layout, bucket=bucket, **facts)
    return Cache.abstract(layout, slots), meta, jax.ShapeDtypeStruct((bucket.tokens,), jnp.float32)


def buckets(planned: Plan, chunk: int) -> dict[str, tuple[Bucket, list[tuple[int, int]]]]:
    """The two steps: bucket, and (length, new tokens) of each request."""
    width, context = planned.pages_per_request, planned.context
    prefill = Bucket(context_requests=1, context_tokens=chunk, table_width=width)
    decode = Bucket(decode_requests=planned.batch, table_width=width)
    return {"prefill": (prefill, [(context, chunk)]), "decode": (decode, [(context, 1)] * planned.batch)}


def measure(options: argparse.Namespace) -> dict:
    """Plan, compile, allocate, run, and read the device's counters."""
    device = jax.local_devices()[0]

    def counters() -> dict[str, int]:
        return device.memory_stats() or {}

    if not counters():
        raise SystemExit(f"memory_check: {device.device_kind} counts no memory; run this on a CUDA card.")
    model = preset("deepseek-v3.2")
    planned = plan(
        model,
        gpu_memory=parse_bytes(options.budget),
        key_form=options.kv_dtype,
        index_form=options.index_dtype,
        layers=tuple(range(options.layers)),
        batch=options.batch,
        context=options.context,
        chunk_tokens=options.chunk,
    )
    if not planned.fits:
        raise SystemExit(f"memory_check: the batch does not fit.\n{planned.table()}")
    layout, steps, start = planned.layout, buckets(planned, options.chunk), time.perf_counter()
    # Compiled first: searching for the best matrix kernels takes device memory of its own.
    jitted = jax.jit(functools.partial(step_of, model), donate_argnums=0)
    programs = {
        n: jitted.lower(*arguments(layout, b, planned.slots)).compile() for n, (b, _) in steps.items()
    }
    result: dict = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "plan": planned.to_dict(),
        "compile_s": time.perf_counter() - start,
        "before": counters()["peak_bytes_in_use"],
    }
    cache = jax.block_until_ready(Cache.create(layout, planned.slots))
    result["allocated"] = counters()["bytes_in_use"]
    free = np.arange(planned.slots)
    for name, (bucket, requests) in steps.items():
        tables = [free[i * bucket.table_width :][: bucket.table_width].tolist() for i in range(len(requests))]
        lens, new = ([r[i] for r in requests] for i in (0, 1))
        meta = StepMetadata.create(layout, bucket, tables, lens, new)
        start = time.perf_counter()
        cache, x = programs[name](cache, meta, jnp.ones(bucket.tokens, jnp.float32))
        assert bool(jnp.isfinite(x).all()), f"{name}: the step gave values that are not finite"
        temporary = getattr(programs[name].memory_analysis(), "temp_size_in_bytes", None)
        peak = counters()["peak_bytes_in_use"]
        result[name] = {"s": time.perf_counter() - start, "temporary": temporary, "peak": peak}
    result["wanted"] = planned.cache_bytes + sum(planned.workspace_bytes.values())
    result["peak"] = counters()["peak_bytes_in_use"]
    result["difference"] = result["peak"] / result["wanted"] - 1
    result["ok"] = abs(result["difference"]) <= BOUND
    return result


def main() -> None:
    """Run the check; exit code 1 if the peak is further from the plan than the bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the full result")
    parser.add_argument("--budget", default="40GiB", help="memory to plan for (default 40GiB)")
    parser.add_argument("--layers", type=int, default=8, help="layers of the slice (default 8)")
    parser.add_argument("--batch", type=int, default=32, help="decode requests (default 32)")
    parser.add_argument("--context", type=int, default=32768, help="tokens of each request (default 32768)")
    parser.add_argument("--chunk", type=int, default=256, help="new tokens of the prefill step (default 256)")
    parser.add_argument("--kv-dtype", choices=KEY_FORMS, default="bf16", help="form of the latents")
    parser.add_argument("--index-dtype", choices=INDEX_FORMS, default="fp8", help="form of the index keys")
    options = parser.parse_args()
    result = measure(options)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    print(
        f"{result['device']}: plan {result['wanted'] / 2**30:.3f} GiB (cache {result['plan']['cache_bytes'] / 2**30:.3f}), "
        f"allocated {result['allocated'] / 2**30:.3f}, peak {result['peak'] / 2**30:.3f} GiB, "
        f"{result['difference']:+.2%}, bound {BOUND:.0%}: {'ok' if result['ok'] else 'TOO FAR'}"
    )
    raise SystemExit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
