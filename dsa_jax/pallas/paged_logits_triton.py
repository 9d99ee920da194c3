"""Paged scoring of decode rows and contexts on any NVIDIA card from sm80 on, in Pallas-Triton: the kernel for A100 and B200.

A program takes some pages of one request and scores them for a few neighbouring rows. How codes become factors of a product
that the card can form is `score_factors`' part.
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
from dsa_jax.pallas import score_factors, tuning
from dsa_jax.pallas.config_checks import check_fields, multiple_of, power_of_two
from dsa_jax.pallas.paged_logits_plan import context_groups
from dsa_jax.pallas.triton_call import interpret_here, triton_call

HEAD_DIM = 128
PAGE_SIZES = (16, 32, 64, 128, 256)
MAX_NEW_TOKENS = 8
MAX_COLUMNS = 512
"""Most heads times new tokens."""
MAX_PROGRAM_COLUMNS = 256
"""Most heads times rows of one program."""
MAX_PROGRAM_PRODUCTS = 32
"""Most products of one program and page: Triton's time grows with their square, to half a minute for 64."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the scores are laid out on the card.

    Attributes:
        waves: programs per multiprocessor that the columns of all requests are cut into.
        num_warps: warps of a program.
        num_stages: pages in flight.
        fp8_products: multiply FP8 codes as they are, instead of as float16; None does so where the card can and the
            pool has no 2 to 4 GiB, whose bytes Triton does not count right. FP4 keys leave it unread.
    """

    waves: int = 8
    num_warps: int = 4
    num_stages: int = 3
    fp8_products: bool | None = None

    def __post_init__(self) -> None:
        check_fields(
            self, waves=multiple_of(1, 1), num_warps=power_of_two(1, 32), num_stages=multiple_of(1, 1)
        )


def default_config(
    device: Device,
    *,
    heads: int,
    new_tokens: int,
    requests: int,
    keys: int,
    page_size: int = 64,
    form: str = "fp8",
) -> Config:
    """The schedule for a shape and a form of keys, by the rules of `tuning`; `keys` is the width of the scores.

    The form is ``"fp8"`` or ``"fp4"``.
    """
    facts: dict[str, Any] = dict(form=form, page_size=page_size)
    facts |= dict(
        heads=heads, new_tokens=new_tokens, columns=heads * new_tokens, requests=requests, keys=keys
    )
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
            f"page_size is {page_size}; {device} has too little shared memory, {device.shared_memory} bytes, for pages of "
            f"that size beside {heads} heads"
        )


def rows_at_once(device: Device, *, heads: int, page_size: int, fp4: bool = False) -> int:
    """How many rows a program scores at most, 0 if shared memory is too small for one; more are shared out among programs.

    Shared memory holds a program's queries, on Hopper also those for the next page, and a page in three buffers with its
    scales; this is what the compiler asks for, or a little more.
    """
    query = 2 * HEAD_DIM * heads * (2 if _major(device) == 9 else 1)
    left = device.shared_memory - (3 * HEAD_DIM + 4) * page_size - 64
    products = MAX_PROGRAM_PRODUCTS // score_factors.products(fp4=fp4)
    return max(0, min(MAX_NEW_TOKENS, left // query, MAX_PROGRAM_COLUMNS // heads, products))


def _major(device: Device) -> int:
    """The first number of the compute capability; Hopper's where none is known, as in the interpreter."""
    return device.capability[0] if device.capability else 9


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
    if not weights.shape[0]:
        return jnp.zeros((0, page_table.shape[1] * keys.shape[1]), dtype)
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
    (tokens, heads), page_size, own_pages = weights.shape, keys.shape[1], page_table is None
    if page_table is None:
        page_table = jnp.arange(keys.shape[0], dtype=jnp.int32)[None]
    width, grouped = page_table.shape[1], groups is not None
    if groups is None:  # not read
        groups = jnp.zeros((1, 3), jnp.int32)
    count = groups.shape[0] if grouped else pl.cdiv(tokens, rows)
    device = target_device()
    config = config or default_config(
        device,
        heads=heads,
        new_tokens=rows,
        requests=count,
        keys=width * page_size,
        page_size=page_size,
        form="fp4" if fp4 else "fp8",
    )
    codes = not fp4 and _fp8_products(config, device, keys)
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
        score_factors.of_queries(q, codes=codes),
        weights.astype(jnp.float32),
        score_factors.stored(keys, codes=codes),
        scales,
    )


def _fp8_products(config: Config, device: Device, keys: Array) -> bool:
    """Whether FP8 codes are multiplied as they are: the configuration's word, or what card and pool allow.

    Raises:
        NotImplementedError: they shall be, and cannot.
    """
    able = score_factors.takes_codes(device, keys)
    if config.fp8_products and not able:
        raise NotImplementedError(
            f"paged_logits (Triton): fp8_products is True; {device} with a pool of {keys.size} bytes cannot: it "
            "takes compute capability 9.0 or more and a pool outside of 2 to 4 GiB. Leave it None."
        )
    return able if config.fp8_products is None else config.fp8_products


def _score(
    groups,
    ends,
    starts,
    table,
    offset,
    planes,
    weights,
    keys,
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
    (tokens, width), page_size = (out.shape[0], table.shape[1]), keys.shape[1]
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
        parts, scale = score_factors.of_page(keys[page], scales[page], planes.dtype)
        column = p * page_size + within
        for r, end, start in zip(row, row_ends, row_starts, strict=True):
            products = [score_factors.product(part, planes[r, b]) for b, part in enumerate(parts)]
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
    """``max(x, 0)`` that keeps NaN: Triton's own maximum would score a NaN key 0, as if it were a poor one.

    So would XLA's on a CPU where it fuses product, maximum and sum into one call.
    """
    if interpret:
        return jnp.where(x < 0.0, 0.0, x)
    shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    [positive] = pltriton.elementwise_inline_asm(
        "max.NaN.f32 $0, $1, 0f00000000;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[shape],
    )
    return positive
