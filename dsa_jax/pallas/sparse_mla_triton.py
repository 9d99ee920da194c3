"""Sparse MLA on Pallas-Triton: a vector gather of the selected rows, decoded in registers, feeds two matrix products.

One program owns a block of heads of one query and a share of its keys; shares of one query ("splits") are merged by a
second small kernel through their log-sum-exps. A row of -1 is never read: the gather is masked, its score is -inf.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from dsa_jax.compat import Device, target_device
from dsa_jax.pallas import tuning
from dsa_jax.pallas.config_checks import check_fields, multiple_of, power_of_two
from dsa_jax.pallas.sparse_mla_forms import blocks, viewed
from dsa_jax.pallas.triton_call import interpret_here, triton_call

_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2.0)
_FLOOR = -1e30
"""Where the running maximum begins: finite, so that a tile without a valid key gives exp2(-inf) and not NaN."""
_LARGE = {"bf16": 114_816, "nvfp4": 113_792}
"""Shared memory that Ampere's schedules ask for, the smallest of their forms, where it is more than some cards have."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut; every field has an effect on time only, except for rounding.

    Attributes:
        block_keys: keys of one step of a program, a power of two of at least 16.
        block_heads: heads of one program, a power of two of at least 16.
        splits: programs that share the keys of one query; 0 chooses by the device's number of cores.
        num_warps: warps of one program; 4 at most where it has 16 heads.
        num_stages: Triton's software pipelining depth.
        prefetch: load the row numbers of the next step during this one, so that the gather of the keys does not wait
            for them inside Triton's pipeline.
        piece: columns of a key that are loaded and decoded at a time, a power of two.
    """

    block_keys: int = 64
    block_heads: int = 64
    splits: int = 0
    num_warps: int = 8
    num_stages: int = 3
    prefetch: bool = False
    piece: int = 512

    def __post_init__(self) -> None:
        check_fields(
            self,
            block_keys=power_of_two(16),
            block_heads=power_of_two(16),
            splits=multiple_of(1),
            num_warps=power_of_two(1, 32),
            num_stages=multiple_of(1, 1),
            piece=power_of_two(),
        )


def supported_on(
    device: Device,
    *,
    form: str = "bf16",
    latent_dim: int = 512,
    rope_dim: int = 64,
    page_size: int | None = None,
) -> None:
    """Refuse devices and forms that the kernel cannot serve.

    Raises:
        NotImplementedError: with the reason.
    """
    if device.platform != "gpu" or device.capability is None:
        raise NotImplementedError(f"needs an NVIDIA GPU of compute capability 8.0 or newer, not {device}")
    if device.capability < (8, 0):
        raise NotImplementedError(f"needs compute capability 8.0 or newer, not {device}")
    blocks(form, latent_dim, rope_dim)
    if form in _LARGE and device.shared_memory < _LARGE[form]:
        raise NotImplementedError(
            f"{form} keys take {_LARGE[form]} bytes of shared memory of a block; {device} has {device.shared_memory}"
        )
    if page_size is not None and page_size & (page_size - 1):
        raise NotImplementedError(f"page_size is {page_size}; this kernel needs a power of two")


def sparse_mla(
    q: Array,
    keys: tuple[Array, ...],
    rows: Array,
    *,
    page_scale: int,
    layer_offset: int | Array,
    softmax_scale: float,
    form: str = "bf16",
    key_scale: float | Array | None = None,
    latent_dim: int = 512,
    config: Config | None = None,
    interpret: bool | None = None,
) -> tuple[Array, Array]:
    """``softmax(q k^T * softmax_scale) v`` over selected rows, v being the first ``latent_dim`` entries of k.

    Args:
        q: bfloat16``[N, h, latent_dim + rope_dim]``.
        keys: all layers' pages of the pools of a KEY form, each ``[P, T, ...]``: codes or values, scales, rotary keys.
        rows: ``int32[N, K]``, ``slot * T + offset``; -1 is skipped wherever it stands.
        page_scale: pages per slot; a row's page is ``slot * page_scale + layer_offset``.
        layer_offset: the layer's first page, a Python int or an int32 scalar that may be traced.
        softmax_scale: factor on the scores.
        form: KEY form of ``keys``.
        key_scale: the scale that fp8 and nvfp4 were written with, 1 by default; it may be traced.
        latent_dim: width of the values.
        config: how to cut the work; None chooses by device, form and shape.
        interpret: run as XLA operations; None does so on a CPU back end.

    Returns:
        ``out`` ``[N, h, latent_dim]`` in q's dtype and the natural-log sum of exponentials ``float32[N, h]``. A query
        without a valid row gives 0 and -inf.

    Raises:
        NotImplementedError: for dtypes and widths that Triton cannot take.
    """
    tokens, heads, width = q.shape
    blocks(form, latent_dim, width - latent_dim)
    if q.dtype != jnp.bfloat16:
        raise NotImplementedError(f"reads bfloat16 queries, not {q.dtype.name}")
    if tokens == 0 or rows.shape[1] == 0:  # nothing to write, or nothing to read
        empty = jnp.full((tokens, heads), -jnp.inf, jnp.float32)
        return jnp.zeros((tokens, heads, latent_dim), q.dtype), empty
    device, page_size = target_device(), keys[0].shape[1]
    interpret = interpret_here() if interpret is None else interpret
    shape: dict = dict(tokens=tokens, heads=heads, keys=rows.shape[1])
    config = fit(config or default_config(device, form, **shape), **shape, cores=device.cores)
    latent_blocks, rope_blocks = blocks(form, latent_dim, width - latent_dim, config.piece)
    body = partial(
        _attend_body, shape=(heads, rows.shape[1], page_size), latent_blocks=latent_blocks,
        rope_blocks=rope_blocks, page_scale=page_scale, score_scale=softmax_scale * _LOG2_E, config=config,
    )  # fmt: skip
    splits, head_blocks = config.splits, -(-heads // config.block_heads)
    partials = jnp.float32 if splits > 1 else q.dtype
    out, lse = triton_call(
        body,
        grid=(tokens * splits * head_blocks,),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, splits, heads, latent_dim), partials),
            jax.ShapeDtypeStruct((tokens, splits, heads), jnp.float32),
        ),
        name="sparse_mla",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )(
        q,
        *map(viewed, keys),
        rows,
        jnp.asarray(layer_offset, jnp.int32).reshape(1),
        jnp.asarray(1.0 if key_scale is None else key_scale, jnp.float32).reshape(1),
    )
    if splits == 1:
        return out.reshape(tokens, heads, latent_dim), lse.reshape(tokens, heads)
    return merge(out, lse, q.dtype, interpret=interpret)


def default_config(device: Device, form: str = "bf16", *, tokens: int, heads: int, keys: int) -> Config:
    """How to cut a problem of ``keys`` rows a query, by the rules of `tuning`.

    Steps of 64 keys where shared memory holds three buffers of them, of 32 keys on Ampere. Decoding takes registers. Blocks
    of 64 heads spill on Ampere, and Blackwell's tensor memory has no room for the outputs and the scores of so many in
    pieces.
    """
    return tuning.choose(
        "sparse_mla_triton", Config, attention_facts(device, form, tokens, heads, keys), device
    )


def attention_facts(device: Device, form: str, tokens: int, heads: int, keys: int) -> dict[str, float | str]:
    """What the rules of the attention kernels may speak of; a device without a known capability counts as Hopper."""
    major = device.capability[0] if device.capability else 9
    return dict(form=form, major=major, tokens=tokens, heads=heads, keys=keys, cores=device.cores)


def fit(config: Config, tokens: int, heads: int, keys: int, cores: int) -> Config:
    """Bound a configuration by the problem, and choose the number of splits if it is 0.

    Splitting pays while programs are fewer than cores. The estimate counts steps of the slowest core, with a fixed cost
    per program and per merged split, both in steps.
    """
    block_heads = min(config.block_heads, max(16, pl.next_power_of_2(heads)))
    block_keys = min(config.block_keys, max(16, pl.next_power_of_2(max(keys, 1))))
    steps = max(-(-keys // block_keys), 1)
    splits = config.splits
    if splits == 0:
        programs = tokens * -(-heads // block_heads)

        def cost(count: int) -> float:
            waves = -(-programs * count // max(cores, 1))
            merging = 2.0 + 0.25 * count if count > 1 else 0.0
            return waves * (-(-steps // count) + 3.0) + merging

        splits = min(range(1, min(steps, 32) + 1), key=cost)
    splits = -(-steps // -(-steps // min(splits, steps)))  # no split without a step
    num_warps = min(config.num_warps, 4) if block_heads == 16 else config.num_warps
    return dataclasses.replace(
        config, block_heads=block_heads, block_keys=block_keys, splits=splits, num_warps=num_warps
    )


def _attend_body(
    q_ref, *refs, shape, latent_blocks, rope_blocks, page_scale, score_scale, config
):  # fmt: skip
    *key_refs, rows_ref, offset_ref, key_scale_ref, out_ref, lse_ref = refs
    heads, keys, page_size = shape
    block_keys, block_heads, splits = config.block_keys, config.block_heads, config.splits
    head_blocks = -(-heads // block_heads)
    steps = -(-keys // (block_keys * splits))
    program = pl.program_id(0)
    token = program // (head_blocks * splits)
    # Blocks of heads of one share run side by side, so that its keys are read from memory once.
    rest = program % (head_blocks * splits)
    split, head_block = rest // head_blocks, rest % head_blocks

    layer_offset, page_shift = offset_ref[0], page_size.bit_length() - 1
    limit = row_limit(key_refs[0].shape[0], page_size, page_scale, layer_offset)
    head = head_block * block_heads + jnp.arange(block_heads, dtype=jnp.int32)
    has_head = head < heads
    head = head[:, None]
    values = [part for block in latent_blocks for part in block.parts]
    parts = values + [part for block in rope_blocks for part in block.parts]
    queries = [_load_heads(q_ref, token, head, part.columns(), has_head) for part in parts]
    key_scale = key_scale_ref[0]
    factor = key_scale * score_scale

    def load_rows(step):
        position = (split * steps + step) * block_keys + jnp.arange(block_keys, dtype=jnp.int32)
        if keys % block_keys or steps * splits * block_keys > keys or config.prefetch:
            return pltriton.load(rows_ref.at[token, position], mask=position < keys, other=-1)
        return pltriton.load(rows_ref.at[token, position])

    def step_over_keys(step, carry):
        top, total, accs, row = carry
        if config.prefetch:
            next_row = load_rows(step + 1)
        else:
            row = next_row = load_rows(step)
        valid = (row >= 0) & (row < limit)
        row = jnp.where(valid, row, 0)
        page = ((row >> page_shift) * page_scale + layer_offset)[:, None]
        offset = (row & (page_size - 1))[:, None]
        read = [block.read(key_refs, page, offset, valid) for block in (*latent_blocks, *rope_blocks)]
        columns = [matrix for matrices in read for matrix in matrices]
        products = [
            pltriton.dot(q, k, trans_b=True) for q, k in zip(queries[::-1], columns[::-1], strict=True)
        ]
        score = reduce(operator.add, products)
        score = jnp.where(valid[None, :], score * factor, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(score, axis=1))
        weight = jnp.exp2(score - new_top[:, None])
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + jnp.sum(weight, axis=1)
        weight = weight.astype(columns[0].dtype)
        accs = tuple(
            acc * shrink[:, None] + pltriton.dot(weight, k) for acc, k in zip(accs, columns, strict=False)
        )
        return new_top, total, accs, next_row

    init = (
        jnp.full((block_heads,), _FLOOR, jnp.float32),
        jnp.zeros((block_heads,), jnp.float32),
        tuple(jnp.zeros((block_heads, part.width), jnp.float32) for part in values),
        load_rows(0),
    )
    top, total, accs, _ = lax.fori_loop(0, steps, step_over_keys, init)
    empty = total == 0.0
    total = jnp.where(empty, 1.0, total)
    scale = (key_scale / total)[:, None]
    for part, acc in zip(values, accs, strict=True):
        mask = jnp.broadcast_to(has_head[:, None], acc.shape)
        out = (acc * scale).astype(out_ref.dtype)
        pltriton.store(out_ref.at[token, split, head, part.columns()], out, mask=mask)
    lse = jnp.where(empty, -jnp.inf, (top + jnp.log2(total)) * _LN_2)
    pltriton.store(lse_ref.at[token, split, head[:, 0]], lse, mask=has_head)


def row_limit(pages: int, page_size: int, page_scale: int, layer_offset: Array) -> Array:
    """One more than the last row that lies in a pool of ``pages`` pages, in the given layer; 0 for a layer of -1."""
    slots = lax.div(pages - layer_offset + (page_scale - 1), jnp.int32(page_scale))
    return jnp.where(layer_offset >= 0, slots * page_size, 0)


def _load_heads(q_ref, token, head, column, has_head):
    mask = jnp.broadcast_to(has_head[:, None], (head.shape[0], column.shape[1]))
    return pltriton.load(q_ref.at[token, head, column], mask=mask, other=0.0)


def merge(partials: Array, lses: Array, dtype, *, interpret: bool | None = None) -> tuple[Array, Array]:
    """Merge the shares of every query by their log-sum-exps.

    Args:
        partials: ``float32[N, S, h, width]`` normalised outputs; ``width`` a power of two.
        lses: ``float32[N, S, h]`` natural-log sums of exponentials, -inf for an empty share.
        dtype: of the merged output.
        interpret: as in `sparse_mla`.

    Returns:
        ``[N, h, width]`` and ``float32[N, h]``.
    """
    tokens, splits, heads, width = partials.shape
    block = min(4, pl.next_power_of_2(heads))

    def body(partials_ref, lses_ref, out_ref, lse_ref):
        program = pl.program_id(0)
        blocks = -(-heads // block)
        token = program // blocks
        head = program % blocks * block + jnp.arange(block, dtype=jnp.int32)
        has_head = head < heads
        column = jnp.arange(width, dtype=jnp.int32)[None, :]
        mask = jnp.broadcast_to(has_head[:, None], (block, width))

        def add(split, carry):
            top, total, acc = carry
            lse = pltriton.load(lses_ref.at[token, split, head], mask=has_head, other=-jnp.inf)
            new_top = jnp.maximum(top, lse)
            shrink, weight = jnp.exp2((top - new_top) * _LOG2_E), jnp.exp2((lse - new_top) * _LOG2_E)
            part = pltriton.load(partials_ref.at[token, split, head[:, None], column], mask=mask, other=0.0)
            return new_top, total * shrink + weight, acc * shrink[:, None] + part * weight[:, None]

        zeros = jnp.zeros((block,), jnp.float32)
        top, total, acc = lax.fori_loop(
            0, splits, add, (zeros + _FLOOR, zeros, jnp.zeros((block, width), jnp.float32))
        )
        empty = total == 0.0
        total = jnp.where(empty, 1.0, total)
        pltriton.store(
            out_ref.at[token, head[:, None], column], (acc / total[:, None]).astype(dtype), mask=mask
        )
        pltriton.store(
            lse_ref.at[token, head], jnp.where(empty, -jnp.inf, top + jnp.log(total)), mask=has_head
        )

    return triton_call(
        body,
        grid=(tokens * -(-heads // block),),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, heads, width), dtype),
            jax.ShapeDtypeStruct((tokens, heads), jnp.float32),
        ),
        name="sparse_mla_merge",
        num_warps=4,
        num_stages=3,
        interpret=interpret,
    )(partials, lses)
