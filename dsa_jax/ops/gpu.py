"""The GPU kernels as candidates of the ops: what each can take, and how an op's arguments become a kernel's.

Kernels are imported when a GPU is meant and not before: Mosaic and Triton cost a second of import that a CPU never needs.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from dsa_jax.cache import Cache
from dsa_jax.compat import Device
from dsa_jax.layout import Role
from dsa_jax.metadata import Step
from dsa_jax.ops.dispatch import Candidate


def append_index_k(cache: Cache) -> tuple[Candidate, ...]:
    """Quantise and write in one launch, for FP8 and float32 keys."""
    layout = cache.layout

    def supported(device: Device) -> None:
        _need_gpu(device)
        _need("index_form", layout.index_form, ("fp8", "f32"))
        from dsa_jax.pallas import append_triton

        append_triton.supported_on(device, page_size=layout.page_size)
        _need_power_of_two("index_head_dim", layout.index_head_dim)

    def run(cache: Cache, layer: int | Array, k: Array, rows: Array) -> Cache:
        from dsa_jax.pallas import append_triton

        offset = cache.layer_offset(Role.INDEX_KEY, layer)
        scales = None if cache.index_scale is None else cache.pages("index_scale")
        keys, scales = append_triton.append_index_k(
            k, _rows(layer, offset, rows), cache.pages("index_key"), scales,
            page_scale=layout.scale(Role.INDEX_KEY), layer_offset=offset, scale_rule=layout.scale_rule,
        )  # fmt: skip
        written: dict[str, Any] = {"index_key": keys} | ({} if scales is None else {"index_scale": scales})
        return cache.replace_pages(**written)

    return (Candidate("triton", run, supported),)


def append_latent(cache: Cache) -> tuple[Candidate, ...]:
    """Write latent and rotary key in one launch, for the float forms."""
    layout = cache.layout

    def supported(device: Device) -> None:
        _need_gpu(device)
        _need("key_form", layout.key_form, ("bf16", "f32"))
        from dsa_jax.pallas import append_triton

        append_triton.supported_on(device, page_size=layout.page_size)
        _need_power_of_two("latent_dim", layout.latent_dim)
        _need_power_of_two("rope_dim", layout.rope_dim)

    def run(cache: Cache, layer: int | Array, latent: Array, k_rope: Array, rows: Array, key_scale) -> Cache:
        from dsa_jax.pallas import append_triton

        offset = cache.layer_offset(Role.KEY, layer)
        pages = append_triton.append_latent(
            latent, k_rope, _rows(layer, offset, rows), cache.pages("key"),
            page_scale=layout.scale(Role.KEY), layer_offset=offset,
        )  # fmt: skip
        return cache.replace_pages(key=pages)

    return (Candidate("triton", run, supported),)


def gather_index_k(cache: Cache) -> tuple[Candidate, ...]:
    """One launch for keys and scales of every form."""
    layout = cache.layout

    def supported(device: Device) -> None:
        _need_gpu(device)
        from dsa_jax.pallas import gather_triton

        gather_triton.supported_on(device, page_size=layout.page_size)
        _need_power_of_two("index_head_dim", layout.index_head_dim)

    def run(cache: Cache, layer: int | Array, rows: Array) -> tuple[Array, Array | None]:
        from dsa_jax.pallas import gather_triton

        offset = cache.layer_offset(Role.INDEX_KEY, layer)
        scales = None if cache.index_scale is None else cache.pages("index_scale")
        return gather_triton.gather_index_k(
            _rows(layer, offset, rows), cache.pages("index_key"), scales,
            page_scale=layout.scale(Role.INDEX_KEY), layer_offset=offset,
        )  # fmt: skip

    return (Candidate("triton", run, supported),)


def paged_mqa_logits(cache: Cache, heads: int, step: Step) -> tuple[Candidate, ...]:
    """Scores for FP8 keys: wgmma on Hopper, for decode rows and contexts; integer decoding elsewhere, for decode rows."""
    layout, bucket = cache.layout, step.bucket
    decode = bool(bucket.decode_requests)

    def kernel(name: str) -> Any:
        if name == "mosaic":
            from dsa_jax.pallas import paged_logits_mosaic as module
        else:
            from dsa_jax.pallas import paged_logits_triton as module
        return module

    def candidate(name: Any) -> Candidate:
        def supported(device: Device) -> None:
            _need_gpu(device)
            _need("index_form", layout.index_form, ("fp8",))
            if not decode and name == "triton":
                raise NotImplementedError(
                    "the kernel scores decode requests; contexts have a Hopper kernel only"
                )
            kernel(name).supported_on(
                device,
                heads=heads,
                new_tokens=bucket.next_n if decode else 1,
                page_size=layout.page_size,
                head_dim=layout.index_head_dim,
            )

        def run(q: Array, weights: Array, cache: Cache, layer: int | Array, step: Step) -> Array:
            offset = cache.layer_offset(Role.INDEX_KEY, layer)
            limits = step.limits if _is_known(layer) else jnp.where(offset >= 0, step.limits, 0)
            weights, keys, scales = (
                weights.astype(jnp.float32),
                cache.pages("index_key"),
                cache.pages("index_scale"),
            )
            place: Any = {"page_scale": layout.scale(Role.INDEX_KEY), "layer_offset": offset}
            if not decode:
                return kernel(name).paged_logits_prefill(
                    q, weights, keys, scales, step.page_table, step.requests, limits, **place
                )
            grid = (bucket.decode_requests, bucket.next_n)
            q, weights, limits = (x.reshape(*grid, *x.shape[1:]) for x in (q, weights, limits))
            return kernel(name).paged_logits_decode(
                q, weights, keys, scales, step.page_table, limits, **place
            )

        return Candidate(name, run, supported)

    return candidate("mosaic"), candidate("triton")


def topk_indices(k: int) -> tuple[Candidate, ...]:
    """Exact selection of up to 2,048 entries."""

    def supported(device: Device) -> None:
        _need_gpu(device)
        from dsa_jax.pallas import topk_triton

        topk_triton.supported_on(device, k=k)

    def run(logits: Array, limits: Array, k: int) -> Array:
        from dsa_jax.pallas import topk_triton

        return topk_triton.topk(logits, limits, k)

    return (Candidate("triton", run, supported),)


def sparse_mla(cache: Cache, heads: int, dtype: Any, softmax_scale: float | Array) -> tuple[Candidate, ...]:
    """Attention over gathered rows for bfloat16 queries. wgmma computes 64 heads, wanted or not."""
    layout = cache.layout

    def kernel(name: str) -> Any:
        if name == "mosaic":
            from dsa_jax.pallas import sparse_mla_mosaic as module
        else:
            from dsa_jax.pallas import sparse_mla_triton as module
        return module

    def candidate(name: Any) -> Candidate:
        def supported(device: Device) -> None:
            _need_gpu(device)
            _need("query dtype", np.dtype(dtype).name, ("bfloat16",))
            if isinstance(softmax_scale, Array):
                raise NotImplementedError("softmax_scale is an array; the kernel takes a Python float")
            kernel(name).supported_on(
                device, form=layout.key_form, latent_dim=layout.latent_dim, rope_dim=layout.rope_dim,
                page_size=layout.page_size,
            )  # fmt: skip

        def run(q: Array, cache: Cache, layer: int | Array, rows: Array, softmax_scale: float, key_scale):
            offset = cache.layer_offset(Role.KEY, layer)
            rows = _rows(layer, offset, rows)
            place: Any = {"page_scale": layout.scale(Role.KEY), "layer_offset": offset}
            place["softmax_scale"] = float(softmax_scale)
            if layout.key_form == "fp8_ds_mla":
                parts = (cache.pages(part) for part in ("key", "key_scale", "key_rope"))
                return kernel(name).sparse_mla_fp8(q, *parts, rows, **place)
            return kernel(name).sparse_mla(q, cache.pages("key"), rows, **place)

        return Candidate(name, run, supported)

    order = (
        ("triton", "mosaic") if heads <= 16 else ("mosaic", "triton")
    )  # measured, see benchmarks/RESULTS.md
    return tuple(candidate(name) for name in order)


def _rows(layer: int | Array, offset: Array, rows: Array) -> Array:
    """Rows for a kernel. A traced layer may own no such pages, which only the device can see."""
    return rows if _is_known(layer) else jnp.where(offset >= 0, rows, -1)


def _is_known(layer: int | Array) -> bool:
    return isinstance(layer, (int, np.integer))


def _need_gpu(device: Device) -> None:
    if device.platform != "gpu":
        raise NotImplementedError("needs an NVIDIA GPU")


def _need_power_of_two(name: str, value: int) -> None:
    if value < 4 or value & (value - 1):
        raise NotImplementedError(f"{name} is {value}; Triton takes powers of two from 4")


def _need(name: str, value: str, wanted: tuple[str, ...]) -> None:
    if value not in wanted:
        raise NotImplementedError(f"{name} is {value!r}; the kernel takes {' or '.join(wanted)}")
