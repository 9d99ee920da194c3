"""Quantise and append a step's keys, in place and in one launch, in Pallas-Triton.

A token's destination is its row `slot * T + offset`; its page is `slot * page_scale + layer_offset`. Rows below 0, and
rows whose page does not exist, write nothing. FP8 codes are made by the card's instruction or, where it has none (sm80),
with integer arithmetic on the float's bits, as FP4 codes and NVFP4's scales are everywhere. What the storage forms look
like is in append_parts.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from dsa_jax.compat import Device, target_device
from dsa_jax.pallas import append_parts as parts_of
from dsa_jax.pallas import tuning
from dsa_jax.pallas.append_encode import Arithmetic, arithmetic
from dsa_jax.pallas.append_parts import Part, Place, Spot
from dsa_jax.pallas.config_checks import check_fields, power_of_two
from dsa_jax.pallas.triton_call import interpret_here, triton_call
from dsa_jax.quant import ScaleRule, TieRule


@dataclasses.dataclass(frozen=True)
class Config:
    """How an append is laid out on the card; no field has an effect on what is written.

    Attributes:
        block: most tokens of a program, a power of two; a step of fewer takes smaller programs.
        warps: warps of a program.
        fp8_instruction: make the codes of FP8 keys and latents with the card's instruction, instead of integer arithmetic;
            None does so where there is one, from compute capability 8.9 on. Other forms do not ask.
    """

    block: int
    warps: int = 4
    fp8_instruction: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self, block=power_of_two(1, 1024), warps=power_of_two(1, 32))


def supported_on(device: Device, *, page_size: int | None = None) -> None:
    """Raise NotImplementedError with the reason if the kernels cannot run there."""
    if device.platform != "gpu" or device.capability is None or device.capability < (8, 0):
        raise NotImplementedError("needs an NVIDIA GPU of compute capability 8.0 or more")
    if page_size is not None and page_size & (page_size - 1):
        raise NotImplementedError(f"page_size is {page_size}; this kernel needs a power of two")


def default_config(form: str, *, tokens: int, row_bytes: int, latent: bool = False) -> Config:
    """Tokens and warps of a program, by the rules of `tuning`.

    Args:
        form: INDEX form of the pages, or KEY form.
        tokens: token places of the step.
        row_bytes: of a token in the pool of keys or latents; scales have a pool of their own.
        latent: whether they are latents.
    """
    facts = dict(form=form, tokens=tokens, row_bytes=row_bytes)
    return tuning.choose("append_triton_latent" if latent else "append_triton", Config, facts)


@functools.partial(jax.jit, static_argnames=("page_scale", "scale_rule", "tie_rule", "config", "interpret"))
def append_index_k(
    k: Array,
    rows: Array,
    keys: Array,
    scales: Array | None,
    *,
    page_scale: int,
    layer_offset: int | Array,
    scale_rule: ScaleRule = "ue8m0",
    tie_rule: TieRule = "deepgemm",
    config: Config | None = None,
    interpret: bool | None = None,
) -> tuple[Array, Array | None]:
    """Quantise indexer keys and write codes and scales at `rows`.

    Args:
        k: f32, bf16 or f16 `[N, D]`, D a power of two of at least 4; 128 for FP4.
        rows: int32`[N]`, -1 for tokens that write nothing.
        keys: pages, uint8`[P, T, D]` (FP8 codes), uint8`[P, T, D / 2]` (packed FP4) or f32`[P, T, D]` (values as they
            are), T a power of two.
        scales: f32`[P, T]` for FP8, int32`[P, T]` (four UE8M0 bytes) for FP4, None for f32 pages.
        page_scale: pages of a slot.
        layer_offset: int32 scalar, static or traced.
        scale_rule: of FP8, "ue8m0" or "fp32", as `dsa_jax.quant.quantize_fp8` defines them.
        tie_rule: of FP4, "deepgemm" or "even", as `dsa_jax.quant.encode_e2m1` defines them.
        config: layout on the card, `default_config` if None.
        interpret: run as XLA operations; None does so where the target is no GPU.

    Returns:
        The pages and scales; in place if the caller's `jit` donates them.
    """
    interpret = interpret_here() if interpret is None else interpret
    form = "f32" if scales is None else "fp4" if scales.dtype == jnp.int32 else "fp8"
    config = config or _config_of(keys, rows, form)
    pools = [keys] if scales is None else [keys, scales]
    arguments = [k], pools, [Place(page_scale, layer_offset)] * len(pools)
    if form == "f32":
        part = parts_of.FloatPart(*arguments)
    elif form == "fp4":
        part = parts_of.Fp4IndexPart(*arguments, tie_rule)
    else:
        part = parts_of.Fp8IndexPart(*arguments, _arithmetic(config, interpret, form), scale_rule)
    keys, *scales_written = part.result(_launch("append_index_k", rows, [part], config, interpret)[0])
    return keys, scales_written[0] if scales_written else None


@functools.partial(jax.jit, static_argnames=("page_scale", "config", "interpret"))
def append_latent(
    latent: Array,
    k_rope: Array,
    rows: Array,
    pages: Array,
    *,
    page_scale: int,
    layer_offset: int | Array,
    config: Config | None = None,
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
        config: layout on the card, `default_config` if None.
        interpret: run as XLA operations; None does so where the target is no GPU.

    Returns:
        The pages; in place if the caller's `jit` donates them.
    """
    interpret = interpret_here() if interpret is None else interpret
    part = parts_of.FloatPart([latent, k_rope], [pages], [Place(page_scale, layer_offset)])
    config = config or _config_of(pages, rows, _float_form(pages), latent=True)
    return part.result(_launch("append_latent", rows, [part], config, interpret)[0])[0]


@functools.partial(jax.jit, static_argnames=("page_scales", "config", "interpret"))
def append_latent_codes(
    latent: Array,
    k_rope: Array,
    rows: Array,
    pools: Sequence[Array],
    *,
    page_scales: tuple[int, ...],
    layer_offsets: Sequence[int | Array],
    key_scale: float | Array | None = None,
    config: Config | None = None,
    interpret: bool | None = None,
) -> tuple[Array, ...]:
    """Quantise latents and rotary keys and write them at `rows`. The pools tell the form:

    * FP8: codes uint8`[P, T, C + E]` of `x / key_scale`;
    * NVFP4: packed codes uint8`[P, T, (C + E) / 2]` and e4m3 scales uint8`[P', T, (C + E) / 16]`, C and E of at least 64;
    * the 656-byte token: codes uint8`[P, T, C]`, scales f32`[P, T, C / 128]` and bf16`[P, T, E]`.

    Args:
        latent: floats `[N, C]`, C a power of two (512).
        k_rope: floats `[N, E]`, E a power of two (64).
        rows: int32`[N]`, -1 for tokens that write nothing.
        pools: one, two or three arrays, T a power of two.
        page_scales: pages of a slot, in each pool.
        layer_offsets: int32 scalars, static or traced, one for each pool.
        key_scale: f32 scalar of FP8 and NVFP4, 1 if None; the 656-byte token has none.
        config: layout on the card, `default_config` if None.
        interpret: run as XLA operations; None does so where the target is no GPU.

    Returns:
        The pools; in place if the caller's `jit` donates them.
    """
    interpret = interpret_here() if interpret is None else interpret
    places = [Place(*place) for place in zip(page_scales, layer_offsets, strict=True)]
    scale = [] if key_scale is None else [jnp.asarray(key_scale, jnp.float32).reshape(1)]
    form = {1: "fp8", 2: "nvfp4", 3: "fp8_ds_mla"}[len(pools)]
    config = config or _config_of(pools[0], rows, form, latent=True)
    numbers = _arithmetic(config, interpret, form)
    if form == "fp8":
        part = parts_of.Fp8LatentPart([latent, k_rope, *scale], pools, places, numbers)
    elif form == "nvfp4":
        scale = scale or [jnp.ones(1, jnp.float32)]
        part = parts_of.NvFp4LatentPart([latent, k_rope, *scale], pools, places, numbers)
    else:
        part = parts_of.DsMlaLatentPart([latent, k_rope], pools, places, numbers)
    return part.result(_launch("append_latent", rows, [part], config, interpret)[0])


@functools.partial(jax.jit, static_argnames=("index_scale", "key_scale", "scale_rule", "interpret"))
def append_both(
    k: Array,
    latent: Array,
    k_rope: Array,
    rows: Array,
    keys: Array,
    scales: Array,
    pages: Array,
    *,
    index_scale: int,
    index_offset: int | Array,
    key_scale: int,
    key_offset: int | Array,
    scale_rule: ScaleRule = "ue8m0",
    interpret: bool | None = None,
) -> tuple[Array, Array, Array]:
    """`append_index_k` in FP8 and `append_latent` of the same tokens in one launch: 64 on an H200 take 1.3 us, not 2.2.

    No op and no step uses it, only the benchmark and the tests. The ops hand back a cache each, so neither can wait for the
    other; a step that calls this in their place has both keys before it selects, but would have to choose implementations
    and refuse arguments as they do, which is an op of its own. It takes FP8 keys and latents that are stored as floats, and
    its programs have the tokens of those of the append that takes fewer.

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
    interpret = interpret_here() if interpret is None else interpret
    config = _config_of(pages, rows, _float_form(pages), latent=True)
    config = dataclasses.replace(config, block=min(config.block, _config_of(keys, rows, "fp8").block))
    index_places = [Place(index_scale, index_offset)] * 2
    numbers = _arithmetic(config, interpret, "fp8")
    index = parts_of.Fp8IndexPart([k], [keys, scales], index_places, numbers, scale_rule)
    latents = parts_of.FloatPart([latent, k_rope], [pages], [Place(key_scale, key_offset)])
    index_written, latents_written = _launch("append_both", rows, [index, latents], config, interpret)
    keys, scales = index.result(index_written)
    return keys, scales, latents.result(latents_written)[0]


def _float_form(pages: Array) -> str:
    """KEY form of latents that are stored as they are."""
    return "f32" if pages.dtype == jnp.float32 else "bf16"


def _config_of(pool: Array, rows: Array, form: str, latent: bool = False) -> Config:
    """What the rules say for a step's keys or latents, by their pool."""
    row_bytes = pool.shape[-1] * pool.dtype.itemsize
    return default_config(form, tokens=rows.shape[0], row_bytes=row_bytes, latent=latent)


def _arithmetic(config: Config, interpret: bool, form: str) -> Arithmetic:
    """The configuration's, or the card's; codes of NVFP4, and of its scales, are made of integers everywhere.

    Raises:
        NotImplementedError: FP8 codes shall be made by an instruction that the card does not have.
    """
    device = target_device()
    able = device.capability is None or device.capability >= (8, 9)
    if config.fp8_instruction and not able and form != "nvfp4":
        raise NotImplementedError(
            f"append (Triton): fp8_instruction is True; {device} has no such instruction: it takes compute capability "
            "8.9 or more. Leave it None."
        )
    by_instruction = able if config.fp8_instruction is None else config.fp8_instruction
    return arithmetic(interpret=interpret, fp8_instruction=by_instruction)


def _launch(
    name: str, rows: Array, parts: Sequence[Part], config: Config, interpret: bool
) -> list[list[Array]]:
    """Run all parts over all tokens; the second grid axis is the part. Returns each part's pools."""
    tokens = rows.shape[0]
    if tokens == 0:
        return [part.pools for part in parts]
    block = min(config.block, pl.next_power_of_2(tokens))
    offsets = [jnp.asarray(p.layer_offset, jnp.int32).reshape(1) for part in parts for p in part.places]
    inputs = [x for part in parts for x in part.inputs]
    pools = [x for part in parts for x in part.pools]
    first_pool = 1 + len(offsets) + len(inputs)

    def body(rows_ref, *refs):
        offset_refs, input_refs = iter(refs[: len(offsets)]), iter(refs[len(offsets) : first_pool - 1])
        pool_refs = iter(refs[first_pool - 1 + len(pools) :])  # the outputs: the same memory
        token = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
        exists = token < tokens
        row = pltriton.load(rows_ref.at[token], mask=exists, other=-1)
        for number, part in enumerate(parts):
            ins = [next(input_refs) for _ in part.inputs]
            outs = [next(pool_refs) for _ in part.pools]
            starts = [next(offset_refs) for _ in part.pools]

            def one(part=part, ins=ins, outs=outs, starts=starts):
                values, first_pages = part.read(ins, token, exists), [start[0] for start in starts]
                places = zip(outs, part.places, first_pages, strict=True)
                spots = [_spot(row, pool, place.page_scale, first) for pool, place, first in places]
                part.write(values, outs, spots)

            if len(parts) == 1:
                one()
            else:
                pl.when(pl.program_id(1) == number)(one)

    call = triton_call(
        body,
        grid=(pl.cdiv(tokens, block), len(parts)),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools),
        name=name,
        num_warps=config.warps,
        input_output_aliases={first_pool + i: i for i in range(len(pools))},
        interpret=interpret,
    )
    written = iter(call(rows, *offsets, *inputs, *pools))
    return [[next(written) for _ in part.pools] for part in parts]


def _spot(row: Array, pool, page_scale: int, layer_offset: Array) -> Spot:
    """Where rows are in a pool `[P, T, ...]`; masked where there is no such page."""
    pages, page_size = pool.shape[:2]
    slot, offset = row >> (page_size.bit_length() - 1), row & (page_size - 1)
    page = slot * page_scale + layer_offset
    # The slot is bounded too: the page of a slot far beyond the pool may wrap around into it.
    mask = (row >= 0) & (slot < pl.cdiv(pages, page_scale)) & (page >= 0) & (page < pages)
    # The interpreter writes old values back where masked, so masked rows go nowhere there.
    return Spot(jnp.where(mask, page, pages), offset, mask)
