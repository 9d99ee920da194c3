"""The GPU kernels as candidates of the ops: what each can take, and how an op's arguments become a kernel's.

Kernels are imported when a GPU is meant and not before: Mosaic and Triton cost a second of import that a CPU never needs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dsa_jax.cache import Cache
from dsa_jax.compat import Device
from dsa_jax.layout import Role
from dsa_jax.metadata import Step
from dsa_jax.ops.dispatch import Candidate
from dsa_jax.pallas.tuning import KERNELS, Preference, choose
from dsa_jax.quant import Query

NVFP4_LEAST_WIDTH = 64
"""Four groups of NVFP4, whose scales fill a word."""


def append_index_k(cache: Cache) -> tuple[Candidate, ...]:
    """Quantise and write in one launch, for every form."""
    layout = cache.layout

    def supported(device: Device) -> None:
        _need_gpu(device)
        from dsa_jax.pallas import append_triton

        append_triton.supported_on(device, page_size=layout.page_size)
        _need_power_of_two("index_head_dim", layout.index_head_dim)

    def run(cache: Cache, layer: int | Array, k: Array, rows: Array, config: Any = None) -> Cache:
        from dsa_jax.pallas import append_triton

        offset = _offset(cache, Role.INDEX_KEY, layer)
        scales = None if cache.index_scale is None else cache.pages("index_scale")
        keys, scales = append_triton.append_index_k(
            k, _rows(offset, rows), cache.pages("index_key"), scales,
            page_scale=layout.scale(Role.INDEX_KEY), layer_offset=offset, scale_rule=layout.scale_rule,
            tie_rule=layout.tie_rule, config=config,
        )  # fmt: skip
        written: dict[str, Any] = {"index_key": keys} | ({} if scales is None else {"index_scale": scales})
        return cache.replace_pages(**written)

    return (Candidate("triton", run, supported, KERNELS["append_triton"].config_type),)


def append_latent(cache: Cache) -> tuple[Candidate, ...]:
    """Quantise and write latent and rotary key in one launch, for every form."""
    layout = cache.layout
    floats = layout.key_form in ("bf16", "f32")

    def supported(device: Device) -> None:
        _need_gpu(device)
        from dsa_jax.pallas import append_triton

        append_triton.supported_on(device, page_size=layout.page_size)
        least = NVFP4_LEAST_WIDTH if layout.key_form == "nvfp4" else 4
        _need_power_of_two("latent_dim", layout.latent_dim, least)
        _need_power_of_two("rope_dim", layout.rope_dim, least)

    def run(
        cache: Cache,
        layer: int | Array,
        latent: Array,
        k_rope: Array,
        rows: Array,
        key_scale,
        config: Any = None,
    ) -> Cache:
        from dsa_jax.pallas import append_triton

        names = [name for name in ("key", "key_scale", "key_rope") if getattr(cache, name) is not None]
        offsets = [_offset(cache, cache.role(name), layer) for name in names]
        rows = _rows(offsets[0], rows)
        if floats:
            pages = append_triton.append_latent(
                latent, k_rope, rows, cache.pages("key"),
                page_scale=layout.scale(Role.KEY), layer_offset=offsets[0], config=config,
            )  # fmt: skip
            return cache.replace_pages(key=pages)
        pools = append_triton.append_latent_codes(
            latent, k_rope, rows, [cache.pages(name) for name in names],
            page_scales=tuple(layout.scale(cache.role(name)) for name in names), layer_offsets=offsets,
            key_scale=key_scale, config=config,
        )  # fmt: skip
        return cache.replace_pages(**dict(zip(names, pools, strict=True)))

    return (Candidate("triton", run, supported, KERNELS["append_triton_latent"].config_type),)


def gather_index_k(cache: Cache) -> tuple[Candidate, ...]:
    """One launch for keys and scales of every form."""
    layout = cache.layout

    def supported(device: Device) -> None:
        _need_gpu(device)
        from dsa_jax.pallas import gather_triton

        gather_triton.supported_on(device, page_size=layout.page_size)
        _need_power_of_two("index_head_dim", layout.index_head_dim)

    def run(cache: Cache, layer: int | Array, rows: Array, config: Any = None) -> tuple[Array, Array | None]:
        from dsa_jax.pallas import gather_triton

        offset = _offset(cache, Role.INDEX_KEY, layer)
        scales = None if cache.index_scale is None else cache.pages("index_scale")
        return gather_triton.gather_index_k(
            _rows(offset, rows), cache.pages("index_key"), scales,
            page_scale=layout.scale(Role.INDEX_KEY), layer_offset=offset, config=config,
        )  # fmt: skip

    return (Candidate("triton", run, supported, KERNELS["gather_triton"].config_type),)


def paged_mqa_logits(cache: Cache, heads: int, step: Step) -> tuple[Candidate, ...]:
    """Scores for FP8 and FP4 keys: wgmma on Hopper, Triton elsewhere.

    On Hopper contexts of FP4 keys are copied as FP8, which few rows are not worth.
    """
    layout, bucket = cache.layout, step.bucket
    decode = bool(bucket.decode_requests)
    keys = bucket.table_width * layout.page_size
    order = ("mosaic", "triton")
    if not decode:
        order = _order_of_many(layout.index_form, bucket.context_tokens, bucket.context_requests, keys, heads)

    def kernel(name: str) -> Any:
        if name == "triton":
            from dsa_jax.pallas import paged_logits_triton as module
        elif layout.index_form == "fp4" and not decode:
            from dsa_jax.pallas import many_rows_fp4_mosaic as module
        elif layout.index_form == "fp4":
            from dsa_jax.pallas import paged_logits_fp4_mosaic as module
        else:
            from dsa_jax.pallas import paged_logits_mosaic as module
        return module

    def candidate(name: Any) -> Candidate:
        def supported(device: Device) -> None:
            _need_gpu(device)
            _need("index_form", layout.index_form, ("fp8", "fp4"))
            kernel(name).supported_on(
                device,
                heads=heads,
                new_tokens=bucket.next_n if decode else 1,
                page_size=layout.page_size,
                head_dim=layout.index_head_dim,
            )

        def run(
            q: Query,
            weights: Array,
            cache: Cache,
            layer: int | Array,
            step: Step,
            dtype: Any,
            config: Any = None,
        ) -> Array:
            offset = _offset(cache, Role.INDEX_KEY, layer)
            limits = step.limits if isinstance(offset, int) else jnp.where(offset >= 0, step.limits, 0)
            weights, keys, scales = (
                weights.astype(jnp.float32),
                cache.pages("index_key"),
                cache.pages("index_scale"),
            )
            place: Any = {
                "page_scale": layout.scale(Role.INDEX_KEY),
                "layer_offset": offset,
                "config": config,
            }
            place |= {"dtype": dtype}
            if not decode:
                return kernel(name).paged_logits_prefill(
                    q, weights, keys, scales, step.page_table, step.requests, limits, **place
                )
            grid = (bucket.decode_requests, bucket.next_n)
            q, weights, limits = jax.tree.map(lambda x: x.reshape(*grid, *x.shape[1:]), (q, weights, limits))
            return kernel(name).paged_logits_decode(
                q, weights, keys, scales, step.page_table, limits, **place
            )

        rules = f"paged_logits_{'fp4_' if (name, layout.index_form) == ('mosaic', 'fp4') else ''}{name}"
        return Candidate(name, run, supported, KERNELS[rules].config_type)

    return tuple(candidate(name) for name in order)


def mqa_logits(form: str, heads: int, width: int, rows: int, keys: int) -> tuple[Candidate, ...]:
    """Scores of contiguous keys inside windows: wgmma on Hopper, Triton elsewhere and for few rows of FP4.

    `width` is the index head dim, `rows` and `keys` are the size of the result.
    """

    def kernel(name: str) -> Any:
        if name == "mosaic" and form == "fp4":
            from dsa_jax.pallas import many_rows_fp4_mosaic as module
        elif name == "mosaic":
            from dsa_jax.pallas import window_logits_mosaic as module
        else:
            from dsa_jax.pallas import window_logits_triton as module
        return module

    def candidate(name: Any) -> Candidate:
        def supported(device: Device) -> None:
            _need_gpu(device)
            _need("form of the keys", form, ("fp8", "fp4"))
            kernel(name).supported_on(device, heads=heads, head_dim=width)

        def run(
            q: Query,
            keys: Array,
            scale: Array,
            weights: Array,
            starts: Array,
            ends: Array,
            dtype: Any,
            config: Any = None,
        ) -> Array:
            weights = weights.astype(jnp.float32)
            return kernel(name).window_logits(
                q, weights, keys, scale, starts, ends, dtype=dtype, config=config
            )

        return Candidate(name, run, supported, KERNELS[f"paged_logits_{name}"].config_type)

    return tuple(candidate(name) for name in _order_of_many(form, rows, 1, keys, heads))


def topk_indices(k: int) -> tuple[Candidate, ...]:
    """Exact selection of up to 2,048 entries: positions, or with `page_table`, `requests` and `page_size` cache rows."""

    def kernel(name: str) -> Any:
        if name == "mosaic":
            from dsa_jax.pallas import topk_mosaic as module
        else:
            from dsa_jax.pallas import topk_triton as module
        return module

    def candidate(name: Any) -> Candidate:
        def supported(device: Device) -> None:
            _need_gpu(device)
            kernel(name).supported_on(device, k=k)

        def run(logits: Array, limits: Array, k: int, **options: Any) -> Array:
            return kernel(name).topk(logits, limits, k, **options)  # paging and config

        return Candidate(name, run, supported, KERNELS[f"topk_{name}"].config_type)

    return candidate("mosaic"), candidate("triton")


def sparse_mla(
    cache: Cache, tokens: int, heads: int, dtype: Any, softmax_scale: float | Array
) -> tuple[Candidate, ...]:
    """Attention over gathered rows. wgmma computes 64 heads, wanted or not."""
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
            kernel(name).supported_on(
                device, form=layout.key_form, latent_dim=layout.latent_dim, rope_dim=layout.rope_dim,
                page_size=layout.page_size,
            )  # fmt: skip
            _need("query dtype", np.dtype(dtype).name, ("bfloat16",))
            if isinstance(softmax_scale, Array):
                raise NotImplementedError("softmax_scale is an array; the kernel takes a Python float")
            _need_scales_beside_keys(cache)

        def run(
            q: Array,
            cache: Cache,
            layer: int | Array,
            rows: Array,
            softmax_scale: float,
            key_scale,
            config=None,
        ):
            offset = _offset(cache, Role.KEY, layer)
            keys = tuple(cache.pages(part) for part in cache.pools() if cache.role(part) != Role.INDEX_KEY)
            options: Any = {"page_scale": layout.scale(Role.KEY), "layer_offset": offset}
            options |= {"softmax_scale": float(softmax_scale), "form": layout.key_form, "config": config}
            if name == "triton":  # it alone reads forms that have such a scale
                options |= {"key_scale": key_scale, "latent_dim": layout.latent_dim}
            return kernel(name).sparse_mla(q, keys, _rows(offset, rows), **options)

        return Candidate(name, run, supported, KERNELS[f"sparse_mla_{name}"].config_type)

    facts = {"form": layout.key_form, "tokens": tokens, "heads": heads}
    first = choose("sparse_mla", Preference, facts).first
    return tuple(candidate(name) for name in _order(first))


def _order_of_many(form: str, rows: int, requests: int, keys: int, heads: int) -> tuple[str, str]:
    """Kernels for the scores of contexts or windows, in order of preference."""
    facts = {"form": form, "rows_per_request": rows / max(requests, 1), "products": rows * keys * heads}
    return _order(choose("many_row_scores", Preference, facts).first)


def _order(first: str) -> tuple[str, str]:
    return (first, "triton" if first == "mosaic" else "mosaic")


def _offset(cache: Cache, role: Role, layer: int | Array) -> int | Array:
    """Layer offset for a kernel: of a known layer a number, because reading it from the index map costs a launch."""
    if isinstance(layer, (int, np.integer)):
        return cache.layout.page_index(int(layer), role).layer_offset
    return cache.layer_offset(role, layer)


def _rows(offset: int | Array, rows: Array) -> Array:
    """Rows for a kernel. A traced layer may own no such pages, which only the device can see."""
    return rows if isinstance(offset, int) else jnp.where(offset >= 0, rows, -1)


def _need_gpu(device: Device) -> None:
    if device.platform != "gpu":
        raise NotImplementedError("needs an NVIDIA GPU")


def _need_scales_beside_keys(cache: Cache) -> None:
    """NVFP4's scales are another role; the attention kernels find them with the keys' own index."""
    layout = cache.layout
    if not layout.scale(Role.KEY_BLOCK_SCALE):
        return
    same_places = layout.layer_offsets(Role.KEY) == layout.layer_offsets(Role.KEY_BLOCK_SCALE)
    if layout.scale(Role.KEY) != layout.scale(Role.KEY_BLOCK_SCALE) or not same_places:
        raise NotImplementedError("key and key_block_scale pages have different places in their pools")


def _need_power_of_two(name: str, value: int, least: int = 4) -> None:
    if value < least or value & (value - 1):
        raise NotImplementedError(f"{name} is {value}; the Triton kernel takes powers of two from {least}")


def _need(name: str, value: str, wanted: tuple[str, ...]) -> None:
    if value not in wanted:
        raise NotImplementedError(f"{name} is {value!r}; the kernel takes {' or '.join(wanted)}")
