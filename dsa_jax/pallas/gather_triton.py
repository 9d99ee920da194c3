"""Read indexer keys and scales back as contiguous arrays, in Pallas-Triton.

One launch copies data and scales. Keys are moved as 32-bit words whatever they hold, so FP8, packed FP4 and f32 pages
take the same kernel; a pool of bytes is viewed as words at no cost.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from dsa_jax.compat import Device
from dsa_jax.pallas import tuning
from dsa_jax.pallas.config_checks import check_fields, power_of_two
from dsa_jax.pallas.triton_call import interpret_here, triton_call


@dataclasses.dataclass(frozen=True)
class Config:
    """How a gather is laid out on the card; no field has an effect on what is read.

    Attributes:
        block: tokens of a program, a power of two.
        warps: warps of a program.
    """

    block: int
    warps: int = 4

    def __post_init__(self) -> None:
        check_fields(self, block=power_of_two(1, 1024), warps=power_of_two(1, 32))


def supported_on(device: Device, *, page_size: int | None = None) -> None:
    """Raise NotImplementedError with the reason if the kernel cannot run there."""
    if device.platform != "gpu" or device.capability is None or device.capability < (8, 0):
        raise NotImplementedError("needs an NVIDIA GPU of compute capability 8.0 or more")
    if page_size is not None and page_size & (page_size - 1):
        raise NotImplementedError(f"page_size is {page_size}; this kernel needs a power of two")


def default_config(form: str, *, rows: int) -> Config:
    """Tokens and warps of a program that reads keys of an INDEX form, by the rules of `tuning`."""
    return tuning.choose("gather_triton", Config, dict(form=form, rows=rows))


@functools.partial(jax.jit, static_argnames=("page_scale", "config", "interpret"))
def gather_index_k(
    rows: Array,
    keys: Array,
    scales: Array | None,
    *,
    page_scale: int,
    layer_offset: int | Array,
    config: Config | None = None,
    interpret: bool | None = None,
) -> tuple[Array, Array | None]:
    """Keys and scales at cache rows, zeros where a row is negative or its page does not exist.

    Args:
        rows: int32`[G]`, `slot * T + offset`.
        keys: pages, uint8`[P, T, B]` (FP8 codes, packed FP4) or f32`[P, T, D]`; T a power of two, and so the words of a
            token.
        scales: f32 or int32`[P, T]`, or None.
        page_scale: pages of a slot.
        layer_offset: int32 scalar, static or traced.
        config: layout on the card, `default_config` if None.
        interpret: run as XLA operations; None does so where the target is no GPU.

    Returns:
        `[G, B]` in the pages' dtype and `[G]` in the scales', or None.
    """
    count = rows.shape[0]
    if count == 0:
        return jnp.zeros((0, keys.shape[2]), keys.dtype), None if scales is None else jnp.zeros(
            (0,), scales.dtype
        )
    config = config or default_config(_form(keys, scales), rows=count)
    words, block = _words(keys), config.block
    pages, page_size, width = words.shape
    pools = [words] if scales is None else [words, scales]

    def body(rows_ref, offset_ref, *refs):
        sources, targets = refs[: len(pools)], refs[len(pools) :]
        token = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
        row = pltriton.load(rows_ref.at[token], mask=token < count, other=-1)
        slot, offset = row >> (page_size.bit_length() - 1), row & (page_size - 1)
        page = slot * page_scale + offset_ref[0]
        # The slot is bounded too: the page of a slot far beyond the pool may wrap around into it.
        valid = (row >= 0) & (slot < pl.cdiv(pages, page_scale)) & (page >= 0) & (page < pages)
        page = jnp.where(valid, page, 0)
        word = jnp.arange(width, dtype=jnp.int32)[None, :]
        at = sources[0].at[page[:, None], offset[:, None], word]
        value = pltriton.load(at, mask=valid[:, None], other=0)
        inside = token < count
        target = jnp.where(inside, token, count)  # the interpreter writes old values back where masked
        pltriton.store(targets[0].at[target[:, None], word], value, mask=inside[:, None])
        if len(pools) > 1:
            scale = pltriton.load(sources[1].at[page, offset], mask=valid, other=0)
            pltriton.store(targets[1].at[target], scale, mask=inside)

    shapes = [jax.ShapeDtypeStruct((count, width), jnp.int32)]
    if scales is not None:
        shapes.append(jax.ShapeDtypeStruct((count,), scales.dtype))
    call = triton_call(
        body,
        grid=(pl.cdiv(count, block),),
        out_shape=tuple(shapes),
        name="gather_index_k",
        num_warps=config.warps,
        interpret=interpret_here() if interpret is None else interpret,
    )
    data, *rest = call(rows, jnp.asarray(layer_offset, jnp.int32).reshape(1), *pools)
    return _unwords(data, keys.dtype), rest[0] if rest else None


def _form(keys: Array, scales: Array | None) -> str:
    """INDEX form of pages."""
    if scales is None or keys.dtype != jnp.uint8:
        return "f32"
    return "fp4" if scales.dtype == jnp.int32 else "fp8"


def _words(pages: Array) -> Array:
    """Pages of any dtype as int32 words."""
    size = pages.dtype.itemsize
    if size == 4:
        return lax.bitcast_convert_type(pages, jnp.int32)
    per_word = 4 // size
    return lax.bitcast_convert_type(
        pages.reshape(*pages.shape[:-1], pages.shape[-1] // per_word, per_word), jnp.int32
    )


def _unwords(words: Array, dtype: jnp.dtype) -> Array:
    """The reverse of `_words`."""
    values = lax.bitcast_convert_type(words, dtype)
    return values if dtype.itemsize == 4 else values.reshape(*words.shape[:-1], -1)
