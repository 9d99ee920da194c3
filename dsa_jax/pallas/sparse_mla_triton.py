"""Sparse MLA on Pallas-Triton: a vector gather of the selected rows feeds two matrix products.

One program owns a block of heads of one query and a share of its keys; shares of one query ("splits") are merged by a
second small kernel through their log-sum-exps. A row of -1 is never read: the gather is masked, its score is -inf.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from dsa_jax.compat import Device, target_device
from dsa_jax.pallas.triton_call import triton_call

_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2.0)
_FLOOR = -1e30
"""Where the running maximum begins: finite, so that a tile without a valid key gives exp2(-inf) and not NaN."""


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
    """

    block_keys: int = 64
    block_heads: int = 64
    splits: int = 0
    num_warps: int = 8
    num_stages: int = 3
    prefetch: bool = False


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
    check_form(form, latent_dim, rope_dim)
    if page_size is not None and page_size & (page_size - 1):
        raise NotImplementedError(f"page_size is {page_size}; this kernel needs a power of two")


def check_form(form: str, latent_dim: int, rope_dim: int) -> None:
    """Refuse KEY forms and widths that no body here reads."""
    if form != "bf16":
        raise NotImplementedError(f"reads the KEY form bf16, not {form}")
    for name, width in (("latent_dim", latent_dim), ("rope_dim", rope_dim)):
        if width < 16 or width & (width - 1):
            raise NotImplementedError(f"{name}={width}: Triton's matrix product takes powers of two from 16")


def sparse_mla(
    q: Array,
    pages: Array,
    rows: Array,
    *,
    page_scale: int,
    layer_offset: int | Array,
    softmax_scale: float,
    latent_dim: int = 512,
    config: Config | None = None,
    interpret: bool | None = None,
) -> tuple[Array, Array]:
    """``softmax(q k^T * softmax_scale) v`` over selected rows, v being the first ``latent_dim`` entries of k.

    Args:
        q: bfloat16 ``[N, h, latent_dim + rope_dim]``.
        pages: bfloat16 ``[P, T, latent_dim + rope_dim]``, all layers' pages of the pool.
        rows: ``int32[N, K]``, ``slot * T + offset``; -1 is skipped wherever it stands.
        page_scale: pages per slot; a row's page is ``slot * page_scale + layer_offset``.
        layer_offset: the layer's first page, a Python int or an int32 scalar that may be traced.
        softmax_scale: factor on the scores.
        latent_dim: width of the values.
        config: how to cut the work; None chooses by device and shape.
        interpret: run as XLA operations; None does so on a CPU back end.

    Returns:
        ``out`` ``[N, h, latent_dim]`` in q's dtype and the natural-log sum of exponentials ``float32[N, h]``. A query
        without a valid row gives 0 and -inf.

    Raises:
        NotImplementedError: for dtypes and widths that Triton cannot take.
    """
    tokens, heads, width = q.shape
    check_form(pages.dtype.name.replace("bfloat16", "bf16"), latent_dim, width - latent_dim)
    if q.dtype != jnp.bfloat16:
        raise NotImplementedError(f"reads bfloat16 queries, not {q.dtype.name}")
    if tokens == 0:
        return jnp.zeros((0, heads, latent_dim), q.dtype), jnp.zeros((0, heads), jnp.float32)
    device = target_device()
    config = fit(config or default_config(device), tokens, heads, rows.shape[1], device.cores)
    body = partial(
        _attend_body, shape=(heads, rows.shape[1], pages.shape[1], latent_dim, width - latent_dim),
        page_scale=page_scale, score_scale=softmax_scale * _LOG2_E, config=config,
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
    )(q, pages, rows, jnp.asarray(layer_offset, jnp.int32).reshape(1))
    if splits == 1:
        return out.reshape(tokens, heads, latent_dim), lse.reshape(tokens, heads)
    return merge(out, lse, q.dtype, interpret=interpret)


def default_config(device: Device) -> Config:
    """Steps of 64 keys where shared memory holds three buffers of them, of 32 keys on Ampere."""
    if device.capability is not None and device.capability < (9, 0):
        return Config(block_keys=32, num_stages=2)
    return Config()


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
    q_ref, pages_ref, rows_ref, offset_ref, out_ref, lse_ref, *, shape, page_scale, score_scale, config
):
    heads, keys, page_size, latent, rope = shape
    block_keys, block_heads, splits = config.block_keys, config.block_heads, config.splits
    head_blocks = -(-heads // block_heads)
    steps = -(-keys // (block_keys * splits))
    program = pl.program_id(0)
    token = program // (head_blocks * splits)
    # Blocks of heads of one share run side by side, so that its keys are read from memory once.
    rest = program % (head_blocks * splits)
    split, head_block = rest // head_blocks, rest % head_blocks

    layer_offset, page_shift = offset_ref[0], page_size.bit_length() - 1
    limit = row_limit(pages_ref.shape[0], page_size, page_scale, layer_offset)
    head = head_block * block_heads + jnp.arange(block_heads, dtype=jnp.int32)
    has_head = head < heads
    head = head[:, None]
    latent_column = jnp.arange(latent, dtype=jnp.int32)[None, :]
    rope_column = latent + jnp.arange(rope, dtype=jnp.int32)[None, :]
    q_latent = _load_heads(q_ref, token, head, latent_column, has_head)
    q_rope = _load_heads(q_ref, token, head, rope_column, has_head)

    def load_rows(step):
        position = (split * steps + step) * block_keys + jnp.arange(block_keys, dtype=jnp.int32)
        if keys % block_keys or steps * splits * block_keys > keys or config.prefetch:
            return pltriton.load(rows_ref.at[token, position], mask=position < keys, other=-1)
        return pltriton.load(rows_ref.at[token, position])

    def step_over_keys(step, carry):
        top, total, acc, row = carry
        if config.prefetch:
            next_row = load_rows(step + 1)
        else:
            row = next_row = load_rows(step)
        valid = (row >= 0) & (row < limit)
        row = jnp.where(valid, row, 0)
        page = ((row >> page_shift) * page_scale + layer_offset)[:, None]
        offset = (row & (page_size - 1))[:, None]
        k_latent = _gather(pages_ref, page, offset, latent_column, valid)
        k_rope = _gather(pages_ref, page, offset, rope_column, valid)
        score = pltriton.dot(q_rope, k_rope, trans_b=True) + pltriton.dot(q_latent, k_latent, trans_b=True)
        score = jnp.where(valid[None, :], score * score_scale, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(score, axis=1))
        weight = jnp.exp2(score - new_top[:, None])
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + jnp.sum(weight, axis=1)
        acc = acc * shrink[:, None] + pltriton.dot(weight.astype(k_latent.dtype), k_latent)
        return new_top, total, acc, next_row

    init = (
        jnp.full((block_heads,), _FLOOR, jnp.float32),
        jnp.zeros((block_heads,), jnp.float32),
        jnp.zeros((block_heads, latent), jnp.float32),
        load_rows(0),
    )
    top, total, acc, _ = lax.fori_loop(0, steps, step_over_keys, init)
    empty = total == 0.0
    total = jnp.where(empty, 1.0, total)
    mask = jnp.broadcast_to(has_head[:, None], (block_heads, latent))
    out = (acc / total[:, None]).astype(out_ref.dtype)
    pltriton.store(out_ref.at[token, split, head, latent_column], out, mask=mask)
    lse = jnp.where(empty, -jnp.inf, (top + jnp.log2(total)) * _LN_2)
    pltriton.store(lse_ref.at[token, split, head[:, 0]], lse, mask=has_head)


def row_limit(pages: int, page_size: int, page_scale: int, layer_offset: Array) -> Array:
    """One more than the last row that lies in a pool of ``pages`` pages, in the given layer; 0 for a layer of -1."""
    slots = lax.div(pages - layer_offset + (page_scale - 1), jnp.int32(page_scale))
    return jnp.where(layer_offset >= 0, slots * page_size, 0)


def _load_heads(q_ref, token, head, column, has_head):
    mask = jnp.broadcast_to(has_head[:, None], (head.shape[0], column.shape[1]))
    return pltriton.load(q_ref.at[token, head, column], mask=mask, other=0.0)


def _gather(pages_ref, page, offset, column, valid):
    mask = jnp.broadcast_to(valid[:, None], (valid.shape[0], column.shape[1]))
    return pltriton.load(pages_ref.at[page, offset, column], mask=mask, other=0.0)


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
