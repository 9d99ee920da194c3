"""Paged scoring of decode rows and contexts on any NVIDIA card from sm80 on, in Pallas-Triton: the kernel for A100.

Ampere has no FP8. Four e4m3 codes are loaded as one word and each is turned into float16 by moving bits: sign to bit 15,
the other seven bits up by seven. That is the value times 2**-8, exactly, subnormals included; products of two such numbers
are exact in the tensor core's float32 sums, and ReLU lets the factor 2**16 wait until the end. The NaN codes become NaN.

The words of a key are multiplied byte by byte: four products over 32 elements, against queries whose elements were
reordered the same way.

FP4 keys come as words of eight codes and are multiplied nibble by nibble: eight products over 16 elements. A code times its
group's power of two is exact in bfloat16, whose exponents are float32's, so nothing is left for the end.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from dsa_jax import quant
from dsa_jax.compat import Device, target_device
from dsa_jax.pallas import tuning
from dsa_jax.pallas.config_checks import check_fields, multiple_of, power_of_two
from dsa_jax.pallas.paged_logits_plan import context_groups
from dsa_jax.pallas.triton_call import interpret_here, triton_call
from dsa_jax.quant.fp4 import GROUP, NAN_SCALE

HEAD_DIM = 128
PAGE_SIZES = (16, 32, 64, 128, 256)
MAX_NEW_TOKENS = 8
MAX_COLUMNS = 512
"""Most heads times new tokens."""
MAX_PROGRAM_COLUMNS = 256
"""Most heads times rows of one program."""
MAX_PROGRAM_PRODUCTS = 32
"""Most products of one program and page: Triton's time grows with their square, to half a minute for 64."""
_BYTES, _NIBBLES = 4, 8
_UNSCALE = 2.0**16


@dataclasses.dataclass(frozen=True)
class Config:
    """How the scores are laid out on the card.

    Attributes:
        waves: programs per multiprocessor that the columns of all requests are cut into.
        num_warps: warps of a program.
        num_stages: pages in flight.
    """

    waves: int = 8
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        check_fields(
            self, waves=multiple_of(1, 1), num_warps=power_of_two(1, 32), num_stages=multiple_of(1, 1)
        )


def default_config(device: Device, *, heads: int, new_tokens: int, requests: int, keys: int) -> Config:
    """The schedule for a shape, by the rules of `tuning`; `keys` is the width of the scores."""
    facts = dict(heads=heads, new_tokens=new_tokens, columns=heads * new_tokens, requests=requests, keys=keys)
    facts |= dict(cores=device.cores or 108, major=device.capability[0] if device.capability else 9)
    return tuning.choose("paged_logits_triton", Config, facts, device)


def supported_on(
    device: Device, *, heads: int, new_tokens: int, page_size: int, head_dim: int = HEAD_DIM
) -> None:
    """Whether the kernel can run.

    Raises:
        NotImplementedError: with the reason, where it cannot.
    """
    if device.platform != "gpu" or device.capability is None or device.capability < (8, 0):
        raise NotImplementedError("needs an NVIDIA GPU of compute capability 8.0 or more")
    if heads < 16 or heads > 128 or heads & (heads - 1):
        raise NotImplementedError(f"index heads is {heads}; the kernel takes 16, 32, 64 or 128")
    if head_dim != HEAD_DIM:
        raise NotImplementedError(f"index head dim is {head_dim}; the kernel takes {HEAD_DIM}")
    if page_size not in PAGE_SIZES:
        raise NotImplementedError(
            f"page_size is {page_size}; the kernel takes {', '.join(map(str, PAGE_SIZES))}"
        )
    if not 1 <= new_tokens <= MAX_NEW_TOKENS:
        raise NotImplementedError(
            f"new tokens per request is {new_tokens}; the kernel takes 1 to {MAX_NEW_TOKENS}"
        )
    if heads * new_tokens > MAX_COLUMNS:
        raise NotImplementedError(
            f"index heads times new tokens is {heads * new_tokens}; the kernel takes at most {MAX_COLUMNS}"
        )
    if not rows_at_once(device, heads=heads, page_size=page_size):
        raise NotImplementedError(
            f"page_size is {page_size}; {device} has too little shared memory, {_shared_memory(device)} bytes, for pages of "
            f"that size beside {heads} heads"
        )


def rows_at_once(device: Device, *, heads: int, page_size: int, fp4: bool = False) -> int:
    """How many rows a program scores at most, 0 if shared memory is too small for one; more are shared out among programs.

    Shared memory holds a program's queries, on Hopper also those for the next page, and a page in three buffers with its
    scales; this is what the compiler asks for, or a little more.
    """
    query = 2 * HEAD_DIM * heads * (2 if _major(device) == 9 else 1)
    left = _shared_memory(device) - (3 * HEAD_DIM + 4) * page_size - 64
    products = _NIBBLES if fp4 else _BYTES
    return max(
        0, min(MAX_NEW_TOKENS, left // query, MAX_PROGRAM_COLUMNS // heads, MAX_PROGRAM_PRODUCTS // products)
    )


def _major(device: Device) -> int:
    """The first number of the compute capability; Hopper's where none is known, as in the interpreter."""
    return device.capability[0] if device.capability else 9


def _shared_memory(device: Device) -> int:
    """Bytes of shared memory that a block may have, from CUDA's table of compute capabilities."""
    if _major(device) == 8:
        return (163 if device.capability in ((8, 0), (8, 7)) else 99) << 10
    return (227 if _major(device) < 12 else 99) << 10


def paged_logits_decode(
    q: quant.Query,
    weights: Array,
    keys: Array,
    scales: Array,
    page_table: Array,
    limits: Array,
    *,
    page_scale: int,
    layer_offset: int | Array,
    config: Config | None = None,
    dtype: Any = jnp.float32,
    interpret: bool | None = None,
) -> Array:
    """Score every visible cached key for every new token; arguments and result as in `paged_logits_mosaic`.

    FP4 keys are ``uint8[P, T, 64]`` packed codes with ``int32[P, T]`` scales, four UE8M0 bytes each; their q is the pair
    ``(uint8[R, n, H, 64], int32[R, n, H])`` of the same.
    """
    rows, flat = weights.shape[1], lambda x: x.reshape(-1, *x.shape[2:])
    return score_groups(
        jax.tree.map(flat, q), flat(weights), keys, scales, page_table, limits.reshape(-1),
        rows=rows, page_scale=page_scale, layer_offset=layer_offset, config=config, dtype=dtype,
        interpret=interpret,
    )  # fmt: skip


def paged_logits_prefill(
    q: quant.Query,
    weights: Array,
    keys: Array,
    scales: Array,
    page_table: Array,
    requests: Array,
    limits: Array,
    *,
    page_scale: int,
    layer_offset: int | Array,
    config: Config | None = None,
    dtype: Any = jnp.float32,
    interpret: bool | None = None,
) -> Array:
    """Score the packed tokens of contexts; arguments and result as in `paged_logits_mosaic`, FP4 as above without R."""
    tokens, heads = weights.shape
    if not tokens:
        return jnp.zeros((0, page_table.shape[1] * keys.shape[1]), dtype)
    fp4 = isinstance(q, tuple)
    rows = rows_at_once(target_device(), heads=heads, page_size=keys.shape[1], fp4=fp4)
    groups = context_groups(requests.astype(jnp.int32), size=rows, most_requests=page_table.shape[0])
    return score_groups(
        q, weights, keys, scales, page_table, limits,
        rows=rows, groups=groups, page_scale=page_scale, layer_offset=layer_offset, config=config, dtype=dtype,
        interpret=interpret,
    )  # fmt: skip


def score_groups(
    q: quant.Query,
    weights: Array,
    keys: Array,
    scales: Array,
    page_table: Array | None,
    ends: Array,
    starts: Array | None = None,
    *,
    rows: int,
    groups: Array | None = None,
    page_scale: int = 1,
    layer_offset: int | Array = 0,
    config: Config | None = None,
    dtype: Any = jnp.float32,
    interpret: bool | None = None,
    name: str = "paged_mqa_logits_triton",
) -> Array:
    """Scores of groups of neighbouring rows, each of which sees one request's pages.

    Args:
        q: codes of the queries, ``[N, H, 128]`` or for FP4 the pair ``[N, H, 64]``, ``[N, H]``.
        weights: ``float32[N, H]``.
        keys, scales: as in `paged_logits_decode`.
        page_table: ``int32[R, W]``; None for one request that has all pages in their order.
        ends: ``int32[N]`` where a row's window of visible keys ends.
        starts: ``int32[N]`` where it starts; None for 0.
        rows: most rows of a group.
        groups: ``int32[G, 3]``, see `context_groups`; None for ``rows`` rows of each request in turn.
        page_scale, layer_offset, config, dtype, interpret: as in `paged_logits_decode`.
        name: of the kernel.

    Returns:
        ``dtype[N, W * T]``.
    """
    fp4 = isinstance(q, tuple)
    planes = _fp4_query_planes(*q) if isinstance(q, tuple) else _query_planes(q)
    (tokens, heads), page_size, own_pages = weights.shape, keys.shape[1], page_table is None
    if page_table is None:
        page_table = jnp.arange(keys.shape[0], dtype=jnp.int32)[None]
    width, grouped = page_table.shape[1], groups is not None
    if groups is None:  # not read
        groups = jnp.zeros((1, 3), jnp.int32)
    count = groups.shape[0] if grouped else pl.cdiv(tokens, rows)
    device = target_device()
    config = config or default_config(
        device, heads=heads, new_tokens=rows, requests=count, keys=width * page_size
    )
    cores = device.cores or 108
    shares = pl.cdiv(rows, max(rows_at_once(device, heads=heads, page_size=page_size, fp4=fp4), 1))
    pages_per_program = max(1, min(width, count * shares * width // (cores * config.waves)))
    programs = pl.cdiv(width, pages_per_program)
    interpret = interpret_here() if interpret is None else interpret

    def body(*refs):
        _score(
            *refs,
            rows=rows,
            page_scale=page_scale,
            pages_per_program=pages_per_program,
            programs=programs,
            shares=shares,
            grouped=grouped,
            own_pages=own_pages,
            windows=starts is not None,
            interpret=interpret,
        )

    call = triton_call(
        body,
        grid=(count * programs * shares,),
        out_shape=jax.ShapeDtypeStruct((tokens, width * page_size), dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        name=name,
    )
    return call(
        groups,
        ends.astype(jnp.int32),
        (ends if starts is None else starts).astype(jnp.int32),
        page_table.astype(jnp.int32),
        jnp.asarray(layer_offset, jnp.int32).reshape(1),
        planes,
        weights.astype(jnp.float32),
        lax.bitcast_convert_type(keys.reshape(*keys.shape[:2], -1, _BYTES), jnp.int32),
        scales,
    )


def _query_planes(q: Array) -> Array:
    """``float16[N, 4, 32, H]``: plane b holds elements b, b + 4, b + 8, ... of all heads, times 2**-8."""
    if q.dtype != jnp.uint8:
        q = lax.bitcast_convert_type(q, jnp.uint8)
    planes = q.reshape(*q.shape[:2], -1, _BYTES).transpose(0, 3, 2, 1)
    return _half(planes.astype(jnp.int32))


def _fp4_query_planes(codes: Array, scales: Array) -> Array:
    """``bfloat16[N, 8, 16, H]``: plane i holds elements i, i + 8, i + 16, ... of all heads, their scales applied."""
    values = quant.dequantize_fp4(codes, scales).astype(jnp.bfloat16)
    return values.reshape(*scales.shape, -1, _NIBBLES).transpose(0, 3, 2, 1)


def _half(code: Array) -> Array:
    """The value of an e4m3 code, times 2**-8, as float16.

    Args:
        code: ``int32``, 0 to 255.
    """
    size = code & 0x7F
    bits = ((code & 0x80) << 8) | jnp.where(size == 0x7F, 0x7FFF, size << 7)
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16)


def _fp8_planes(word: Array, scale: Array) -> tuple[list[Array], Array]:
    """The planes of a page's keys, float16[T, 32] times 2**-8, and what its scores have to be multiplied by."""
    return [_half((word >> (8 * b)) & 0xFF) for b in range(_BYTES)], scale * _UNSCALE


def _fp4_planes(word: Array, scale: Array) -> tuple[list[Array], float]:
    """The planes of a page's keys, bfloat16[T, 16], and what its scores have to be multiplied by."""
    group = jnp.arange(word.shape[1], dtype=jnp.int32) // (GROUP // _NIBBLES)
    byte = (scale[:, None] >> (8 * group)[None, :]) & 0xFF
    power = lax.bitcast_convert_type(byte << 23, jnp.float32)
    power = jnp.where(byte == NAN_SCALE, jnp.nan, power)
    return [(_e2m1((word >> (4 * i)) & 0xF) * power).astype(jnp.bfloat16) for i in range(_NIBBLES)], 1.0


def _e2m1(code: Array) -> Array:
    """The value of an e2m1 code, ``int32`` 0 to 15, as float32: exponent and mantissa in place, 0 and 0.5 apart."""
    size = code & 7
    bits = jnp.where(size == 0, 0, 0x3F000000 + jnp.where(size > 1, size << 22, 0))
    return lax.bitcast_convert_type(bits | ((code & 8) << 28), jnp.float32)


def _score(
    groups,
    ends,
    starts,
    table,
    offset,
    planes,
    weights,
    words,
    scales,
    out,
    *,
    rows,
    page_scale,
    pages_per_program,
    programs,
    shares,
    grouped,
    own_pages,
    windows,
    interpret,
):
    """One program: some consecutive pages of one group, all its rows or an equal share of them."""
    # Programs that share a group's rows are neighbours: the second finds the pages in the L2 cache.
    program, share = pl.program_id(0) // shares, pl.program_id(0) % shares
    group, first = program // programs, program % programs * pages_per_program
    (tokens, width), page_size = (out.shape[0], table.shape[1]), words.shape[1]
    request, begin, count = group, group * rows, rows
    last = jnp.minimum(first + pages_per_program, width)
    if tokens % rows:
        count = jnp.minimum(rows, tokens - begin)
    if grouped:
        request, begin, count = (groups[group, i] for i in range(3))
        request = jnp.maximum(request, 0)  # padding, which sees nothing
        last = jnp.where(count > 0, last, first)
    own = pl.cdiv(rows, shares)
    row = [begin + share * own + j for j in range(own)]
    if (
        grouped or tokens % rows or rows % shares
    ):  # some groups have fewer rows: those score their last one again
        row = [jnp.maximum(jnp.minimum(r, begin + count - 1), 0) for r in row]
    row_ends = [ends[r] for r in row]
    seen = jnp.clip(pages_with(functools.reduce(jnp.maximum, row_ends), page_size), first, last)
    within = jnp.arange(page_size, dtype=jnp.int32)
    row_starts, unseen = [0] * own, first
    if windows:
        row_starts = [starts[r] for r in row]
        unseen = jnp.clip(functools.reduce(jnp.minimum, row_starts) // page_size, first, seen)

    def score_page(p, carry):
        page = table[0 if own_pages else request, p] * page_scale + offset[0]
        decode = _fp4_planes if planes.dtype == jnp.bfloat16 else _fp8_planes
        parts, scale = decode(words[page], scales[page])
        column = p * page_size + within
        for r, end, start in zip(row, row_ends, row_starts, strict=True):
            products = [pltriton.dot(part, planes[r, b]) for b, part in enumerate(parts)]
            positive = _relu(functools.reduce(jnp.add, products), interpret)
            score = jnp.sum(positive * weights[r][None, :], axis=1) * scale
            inside = column < end
            if windows:
                inside &= column >= start
            out[r, pl.ds(p * page_size, page_size)] = jnp.where(inside, score, -jnp.inf).astype(out.dtype)
        return carry

    def fill_page(p, carry):
        for r in row:
            out[r, pl.ds(p * page_size, page_size)] = jnp.full((page_size,), -jnp.inf, out.dtype)
        return carry

    if windows:
        lax.fori_loop(first, unseen, fill_page, None)
    lax.fori_loop(unseen, seen, score_page, None)
    lax.fori_loop(seen, last, fill_page, None)


def pages_with(keys: Array | int, page_size: int) -> Array | int:
    """Pages that so many keys stand on. The one behind them is nobody's and may not be read."""
    return (keys + page_size - 1) // page_size


def _relu(x: Array, interpret: bool) -> Array:
    """``max(x, 0)`` that keeps NaN: Triton's own maximum would score a NaN key 0, as if it were a poor one."""
    if interpret:
        return jnp.maximum(x, 0.0)
    shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    [positive] = pltriton.elementwise_inline_asm(
        "max.NaN.f32 $0, $1, 0f00000000;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[shape],
    )
    return positive
