"""Quantise and append a step's keys, in place and in one launch, in Pallas-Triton.

A token's destination is its row `slot * T + offset`; its page is `slot * page_scale + layer_offset`. Rows below 0, and
rows whose page does not exist, write nothing. FP8 codes are made with integer arithmetic on the float's bits, so that the
same kernel runs where the hardware has no FP8 conversion (sm80), and stored four to an int32 word: a view of the pool as
words costs nothing and keeps element offsets within int32 for pools between 2 and 4 GiB.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from dsa_jax.compat import Device
from dsa_jax.pallas.append_encode import pack_words, quantize
from dsa_jax.pallas.triton_call import interpret_here, triton_call
from dsa_jax.quant import ScaleRule

_MANY_TOKENS = 1024
"""From here on a warp takes several tokens."""


def supported_on(device: Device, *, page_size: int | None = None) -> None:
    """Raise NotImplementedError with the reason if the kernels cannot run there."""
    if device.platform != "gpu" or device.capability is None or device.capability < (8, 0):
        raise NotImplementedError("needs an NVIDIA GPU of compute capability 8.0 or more")
    if page_size is not None and page_size & (page_size - 1):
        raise NotImplementedError(f"page_size is {page_size}; this kernel needs a power of two")


@functools.partial(jax.jit, static_argnames=("page_scale", "scale_rule", "interpret"))
def append_index_k(
    k: Array,
    rows: Array,
    keys: Array,
    scales: Array | None,
    *,
    page_scale: int,
    layer_offset: int | Array,
    scale_rule: ScaleRule = "ue8m0",
    interpret: bool | None = None,
) -> tuple[Array, Array | None]:
    """Quantise indexer keys and write codes and scales at `rows`.

    Args:
        k: f32, bf16 or f16 `[N, D]`, D a power of two of at least 4.
        rows: int32`[N]`, -1 for tokens that write nothing.
        keys: pages, uint8`[P, T, D]` (FP8 codes) or f32`[P, T, D]` (values as they are), T a power of two.
        scales: f32`[P, T]`; None for f32 pages.
        page_scale: pages of a slot.
        layer_offset: int32 scalar, static or traced.
        scale_rule: "ue8m0" or "fp32", as `dsa_jax.quant.quantize_fp8` defines them.
        interpret: run as XLA operations; None does so where the target is no GPU.

    Returns:
        The pages and scales; in place if the caller's `jit` donates them.
    """
    part = _IndexPart(k, keys, scales, page_scale, layer_offset, scale_rule)
    [written] = _launch("append_index_k", rows, [part], interpret)
    return part.result(written)


@functools.partial(jax.jit, static_argnames=("page_scale", "interpret"))
def append_latent(
    latent: Array,
    k_rope: Array,
    rows: Array,
    pages: Array,
    *,
    page_scale: int,
    layer_offset: int | Array,
    interpret: bool | None = None,
) -> Array:
    """Write latents and rotary keys side by side at `rows`.

    Args:
        latent: floats `[N, C]`, C a power of two (512).
        k_rope: floats `[N, E]`, E a power of two (64).
        rows: int32`[N]`, -1 for tokens that write nothing.
        pages: bf16 or f32`[P, T, C + E]`, T a power of two.
        page_scale: pages of a slot.
        layer_offset: int32 scalar, static or traced.
        interpret: run as XLA operations; None does so where the target is no GPU.

    Returns:
        The pages; in place if the caller's `jit` donates them.
    """
    part = _LatentPart(latent, k_rope, pages, page_scale, layer_offset)
    [written] = _launch("append_latent", rows, [part], interpret)
    return written[0]


@functools.partial(jax.jit, static_argnames=("index_scale", "key_scale", "scale_rule", "interpret"))
def append_both(
    k: Array,
    latent: Array,
    k_rope: Array,
    rows: Array,
    keys: Array,
    scales: Array | None,
    pages: Array,
    *,
    index_scale: int,
    index_offset: int | Array,
    key_scale: int,
    key_offset: int | Array,
    scale_rule: ScaleRule = "ue8m0",
    interpret: bool | None = None,
) -> tuple[Array, Array | None, Array]:
    """`append_index_k` and `append_latent` of the same tokens in one launch.

    Args:
        k, keys, scales, scale_rule: as in `append_index_k`.
        latent, k_rope, pages: as in `append_latent`.
        rows: int32`[N]`, -1 for tokens that write nothing.
        index_scale, index_offset: pages of a slot and layer offset of the indexer's pool.
        key_scale, key_offset: the same of the latents' pool.
        interpret: run as XLA operations; None does so where the target is no GPU.

    Returns:
        `(keys, scales, pages)`.
    """
    index = _IndexPart(k, keys, scales, index_scale, index_offset, scale_rule)
    both = [index, _LatentPart(latent, k_rope, pages, key_scale, key_offset)]
    index_written, [pages] = _launch("append_both", rows, both, interpret)
    return *index.result(index_written), pages


class _IndexPart:
    """Indexer keys: one vector a token, quantised unless the pages are floats."""

    def __init__(self, k, keys, scales, page_scale, layer_offset, scale_rule):
        self.page_scale, self.layer_offset, self.page_size = page_scale, layer_offset, keys.shape[1]
        self.scale_rule, self.float_pages = scale_rule, scales is None
        self.inputs = [k]
        self.pools = [keys] if scales is None else [_as_words(keys), scales]

    def result(self, written: Sequence[Array]) -> tuple[Array, Array | None]:
        if self.float_pages:
            return written[0], None
        return _as_bytes(written[0]), written[1]

    def write(self, inputs, pools, token, page, offset, mask, interpret: bool) -> None:
        [k_ref], dim = inputs, inputs[0].shape[1]
        if self.float_pages:
            _copy_rows(k_ref, pools[0], 0, token, page, offset, mask)
            return
        word = jnp.arange(dim // 4, dtype=jnp.int32)
        column = word[None, :, None] * 4 + jnp.arange(4, dtype=jnp.int32)[None, None, :]
        at = k_ref.at[token[:, None, None], column]
        x = pltriton.load(at, mask=mask[:, None, None], other=0.0).astype(jnp.float32)
        codes, scale = quantize(x, self.scale_rule, jnp.divide if interpret else _divide)
        at = pools[0].at[page[:, None], offset[:, None], word[None, :]]
        pltriton.store(at, pack_words(codes), mask=mask[:, None])
        pltriton.store(pools[1].at[page, offset], scale, mask=mask)


class _LatentPart:
    """Latents and rotary keys, side by side in wide rows."""

    def __init__(self, latent, k_rope, pages, page_scale, layer_offset):
        self.page_scale, self.layer_offset, self.page_size = page_scale, layer_offset, pages.shape[1]
        self.inputs, self.pools = [latent, k_rope], [pages]

    def write(self, inputs, pools, token, page, offset, mask, interpret: bool) -> None:
        del interpret
        latent, k_rope = inputs
        _copy_rows(latent, pools[0], 0, token, page, offset, mask)
        _copy_rows(k_rope, pools[0], latent.shape[1], token, page, offset, mask)


def _launch(name: str, rows: Array, parts: Sequence[Any], interpret: bool | None) -> list[list[Array]]:
    """Run all parts over all tokens; the second grid axis is the part. Returns each part's pools."""
    tokens = rows.shape[0]
    if tokens == 0:
        return [part.pools for part in parts]
    interpret = interpret_here() if interpret is None else interpret
    block, warps = (16, 4) if tokens >= _MANY_TOKENS else (min(4, pl.next_power_of_2(tokens)), 4)
    offsets = [jnp.asarray(part.layer_offset, jnp.int32).reshape(1) for part in parts]
    inputs = [x for part in parts for x in part.inputs]
    pools = [x for part in parts for x in part.pools]
    first_pool = 1 + len(offsets) + len(inputs)

    def body(rows_ref, *refs):
        refs, written = list(refs), list(refs[len(offsets) + len(inputs) + len(pools) :])
        token = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
        row = pltriton.load(rows_ref.at[token], mask=token < tokens, other=-1)
        for number, part in enumerate(parts):
            offset_ref = refs[number]
            ins = _take(refs, len(offsets) + sum(len(p.inputs) for p in parts[:number]), len(part.inputs))
            outs = _take(written, sum(len(p.pools) for p in parts[:number]), len(part.pools))

            def one(part=part, offset_ref=offset_ref, ins=ins, outs=outs):
                slot, offset = row >> (part.page_size.bit_length() - 1), row & (part.page_size - 1)
                page = slot * part.page_scale + offset_ref[0]
                # The interpreter writes old values back where masked, so masked rows go nowhere there.
                mask = (row >= 0) & (page >= 0) & (page < outs[0].shape[0])
                part.write(ins, outs, token, jnp.where(mask, page, outs[0].shape[0]), offset, mask, interpret)

            if len(parts) == 1:
                one()
            else:
                pl.when(pl.program_id(1) == number)(one)

    call = triton_call(
        body,
        grid=(pl.cdiv(tokens, block), len(parts)),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools),
        name=name,
        num_warps=warps,
        input_output_aliases={first_pool + i: i for i in range(len(pools))},
        interpret=interpret,
    )
    written = list(call(rows, *offsets, *inputs, *pools))
    return [_take(written, sum(len(p.pools) for p in parts[:n]), len(p.pools)) for n, p in enumerate(parts)]


def _take(items: list[Any], start: int, count: int) -> list[Any]:
    return items[start : start + count]


def _copy_rows(source, pages, first: int, token, page, offset, mask) -> None:
    """Copy rows into columns from `first` on, in the pages' dtype."""
    column = jnp.arange(source.shape[1], dtype=jnp.int32)[None, :]
    value = pltriton.load(source.at[token[:, None], column], mask=mask[:, None], other=0.0)
    at = pages.at[page[:, None], offset[:, None], first + column]
    pltriton.store(at, value.astype(pages.dtype), mask=mask[:, None])


def _divide(x: Array, y: Array) -> Array:
    """Correctly rounded division; Triton's own is off by up to two units in the last place."""
    shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    [quotient] = pltriton.elementwise_inline_asm(
        "div.rn.f32 $0, $1, $2;", args=[x, y], constraints="=f,f,f", pack=1, result_shape_dtypes=[shape]
    )
    return quotient


def _as_words(pages: Array) -> Array:
    """uint8`[P, T, D]` as int32`[P, T, D / 4]`."""
    return lax.bitcast_convert_type(pages.reshape(*pages.shape[:-1], pages.shape[-1] // 4, 4), jnp.int32)


def _as_bytes(words: Array) -> Array:
    """The reverse of `_as_words`."""
    return lax.bitcast_convert_type(words, jnp.uint8).reshape(*words.shape[:-1], words.shape[-1] * 4)
