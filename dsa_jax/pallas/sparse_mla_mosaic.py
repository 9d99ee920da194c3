"""Sparse MLA on Mosaic GPU for Hopper: asynchronous row copies feed two compute warpgroups.

A block owns 64 heads of one query and a share of its keys. A warpgroup copies the keys in tiles of 64, alternately into
two buffers (see ``row_copy_mosaic``). The two compute warpgroups divide the scores by tiles (warpgroup w scores the tiles
of buffer w) and the output by columns (warpgroup w accumulates columns ``256 w`` to ``256 w + 255`` of every tile), so they
exchange weights and running maxima through shared memory, and nothing is computed twice.

A row of -1 is not read: its copy has source size 0, which fills zeros, and its score is -inf.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dsa_jax.compat import Device, target_device
from dsa_jax.pallas import tuning
from dsa_jax.pallas.config_checks import check_fields, multiple_of, one_of
from dsa_jax.pallas.machine_mosaic import HOPPER, HOPPER_FP8, INTERPRETER, INTERPRETER_FP8
from dsa_jax.pallas.sparse_mla_triton import attention_facts, merge, row_limit

LATENT, ROPE, HEADS, TILE = 512, 64, 64, 64
_HALF = LATENT // 2
_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2.0)
_FLOOR = -1e30
_MINUS_INFINITY = 0xFF800000 - (1 << 32)  # the bits of float32's, as an int32
_REGISTERS = 504
"""Of a thread of each of the three warpgroups together."""
_ROW, _COLUMN, _TILED = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0), plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
        splits: blocks that share the keys of one query and 64 heads; 0 chooses by the device's number of cores.
        compute_registers: registers of a thread of the compute warpgroups, a multiple of 8.
        prefetch: bytes that the L2 cache fetches around each access of a row: 64, 128 or 256.
        ahead: let the L2 cache fetch a tile's rows while the tile before it in the same buffer is copied, so many bytes with
            an instruction: 32, 64 or 128; 0 does not.
        copy_registers: the same of the copying warpgroup; at most 504 together with two computing ones.
    """

    splits: int = 0
    compute_registers: int = 224
    copy_registers: int = 56
    prefetch: int = 128
    ahead: int = 0

    def __post_init__(self) -> None:
        most = _REGISTERS - 2 * self.compute_registers
        check_fields(
            self,
            splits=multiple_of(1),
            compute_registers=multiple_of(8, 24, 240),
            copy_registers=multiple_of(8, 24, most),
            prefetch=one_of(64, 128, 256),
            ahead=one_of(0, 32, 64, 128),
        )


_DTYPES = {"bf16": ("bfloat16",), "fp8_ds_mla": ("uint8", "float32", "bfloat16")}


def supported_on(
    device: Device,
    *,
    form: str = "bf16",
    latent_dim: int = LATENT,
    rope_dim: int = ROPE,
    page_size: int | None = None,
) -> None:
    """Refuse devices and problems that the kernel cannot serve.

    Raises:
        NotImplementedError: with the reason.
    """
    if device.capability is None or device.capability[0] != 9:
        raise NotImplementedError(
            f"uses wgmma, which Hopper (compute capability 9.0) alone has, not {device}"
        )
    if form not in _DTYPES:
        raise NotImplementedError(f"reads the KEY forms {' and '.join(_DTYPES)}, not {form}")
    if (latent_dim, rope_dim) != (LATENT, ROPE):
        raise NotImplementedError(f"takes keys of {LATENT} + {ROPE} entries, not {latent_dim} + {rope_dim}")
    if page_size is not None and page_size & (page_size - 1):
        raise NotImplementedError(f"page_size is {page_size}; this kernel needs a power of two")


def default_config(device: Device, form: str = "bf16", *, tokens: int, heads: int, keys: int) -> Config:
    """How to cut a problem of ``keys`` rows a query, by the rules of `tuning`: decoding takes registers from computing."""
    return tuning.choose(
        "sparse_mla_mosaic", Config, attention_facts(device, form, tokens, heads, keys), device
    )


def sparse_mla(
    q: Array,
    keys: tuple[Array, ...],
    rows: Array,
    *,
    page_scale: int,
    layer_offset: int | Array,
    softmax_scale: float,
    form: str = "bf16",
    config: Config | None = None,
    interpret=None,
) -> tuple[Array, Array]:
    """``softmax(q k^T * softmax_scale) v`` over selected rows, v being the first 512 entries of k.

    Args:
        q: bfloat16 ``[N, h, 576]``; h is padded to a multiple of 64.
        keys: all layers' pages of the pools. ``"bf16"``: bfloat16 ``[P, T, 576]``. ``"fp8_ds_mla"``: uint8
            ``[P, T, 512]`` e4m3 codes, ``float32[P, T, 4]`` scales, any numbers from 2**-60 to 2**66, and bfloat16
            ``[P, T, 64]``.
        rows: ``int32[N, K]``, ``slot * T + offset``; -1 is skipped wherever it stands.
        page_scale: pages per slot; a row's page is ``slot * page_scale + layer_offset``.
        layer_offset: the layer's first page, a Python int or an int32 scalar that may be traced.
        softmax_scale: factor on the scores.
        form: KEY form of ``keys``.
        config: how to cut the work; None chooses by device and shape.
        interpret: `plgpu.InterpretGPUParams` to interpret, None to compile.

    Returns:
        ``out`` bfloat16 ``[N, h, 512]`` and the natural-log sum of exponentials ``float32[N, h]``. A query without a
        valid row gives 0 and -inf.

    Raises:
        NotImplementedError: for dtypes and widths that the kernel cannot take.
    """
    wanted = _DTYPES[form]
    if (found := tuple(array.dtype.name for array in keys)) != wanted:
        raise NotImplementedError(f"takes {form} keys as {' '.join(wanted)}, not {' '.join(found)}")
    if form == "bf16":
        machine = HOPPER if interpret is None else INTERPRETER
    else:
        machine = HOPPER_FP8 if interpret is None else INTERPRETER_FP8
    tokens, heads, _ = q.shape
    default = partial(default_config, target_device(), form, tokens=tokens, heads=heads, keys=rows.shape[1])
    return _launch(
        q, keys, rows, machine, page_scale=page_scale, layer_offset=layer_offset, softmax_scale=softmax_scale,
        config=config or default(), interpret=interpret,
    )  # fmt: skip


def _launch(q, keys, rows, machine, *, page_scale, layer_offset, softmax_scale, config, interpret):
    tokens, heads, width = q.shape
    if width != LATENT + ROPE or q.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"takes bfloat16 queries of width {LATENT + ROPE}, not {q.dtype.name}{q.shape}"
        )
    if tokens == 0:
        return jnp.zeros((0, heads, LATENT), q.dtype), jnp.zeros((0, heads), jnp.float32)
    if rest := -heads % HEADS:  # wgmma computes 64 rows, wanted or not
        q = jnp.pad(q, ((0, 0), (0, rest), (0, 0)))
        out, lse = _launch(
            q, keys, rows, machine, page_scale=page_scale, layer_offset=layer_offset, softmax_scale=softmax_scale,
            config=config, interpret=interpret,
        )  # fmt: skip
        return out[:, :heads], lse[:, :heads]
    pairs = max(-(-rows.shape[1] // (2 * TILE)), 1)
    rows = jnp.pad(rows, ((0, 0), (0, pairs * 2 * TILE - rows.shape[1])), constant_values=-1)
    splits = config.splits or choose_splits(tokens * heads // HEADS, pairs, target_device().cores)
    splits = -(-pairs // -(-pairs // min(splits, pairs)))
    partials = jnp.float32 if splits > 1 else q.dtype
    body = partial(
        _body, blocks=heads // HEADS, splits=splits, pairs=pairs, page_scale=page_scale,
        score_scale=softmax_scale * _LOG2_E, config=config, machine=machine,
    )  # fmt: skip
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    out, lse = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((tokens, splits, heads, LATENT), partials),
            jax.ShapeDtypeStruct((tokens, splits, heads), jnp.float32),
        ),
        grid=(tokens * splits * (heads // HEADS),),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=dict(
            q_smem=plgpu.SMEM((1, HEADS, LATENT), jnp.bfloat16, transforms=tiled),
            latent_smem=plgpu.SMEM((2, TILE, LATENT), jnp.bfloat16, transforms=tiled),
            rope_smem=plgpu.SMEM((2, TILE, ROPE), jnp.bfloat16, transforms=tiled),
            weight_smem=plgpu.SMEM((2, HEADS, TILE), jnp.bfloat16, transforms=tiled),
            number_smem=plgpu.SMEM((2, 2, TILE), jnp.int32),
            # Maximum of either warpgroup, sum of one, barriers: one array, because each takes a whole KiB.
            state_smem=plgpu.SMEM((4, HEADS), jnp.float32),
            started=plgpu.Barrier(num_arrivals=3),
            query_ready=plgpu.Barrier(),
            keys_ready=plgpu.Barrier(num_barriers=2 * len(machine.parts)),
            keys_free=plgpu.Barrier(num_arrivals=2, num_barriers=2),
            weights_ready=plgpu.Barrier(num_barriers=2),
            exchanged=plgpu.Barrier(num_arrivals=2),
            stored=plgpu.Barrier(num_arrivals=2),
        ),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=0,
            unsafe_no_auto_barriers=True,  # those round every access cost 5 %; the race detector sees a missing one
        ),
        kernel_name="sparse_mla",
        interpret=interpret,
    )(q, rows, jnp.asarray(layer_offset, jnp.int32).reshape(1), *keys)
    if splits == 1:
        return out.reshape(tokens, heads, LATENT), lse.reshape(tokens, heads)
    return merge(out, lse, q.dtype)


def choose_splits(blocks: int, pairs: int, cores: int) -> int:
    """Splits that minimise the slowest core's time, in pairs of tiles, with a fixed cost per block and per merge."""

    def cost(splits: int) -> float:
        waves = -(-blocks * splits // max(cores, 1))
        return waves * (-(-pairs // splits) + 1.5) + (1.0 + 0.12 * splits if splits > 1 else 0.0)

    return min(range(1, min(pairs, 32) + 1), key=cost)


def _body(
    q_ref, rows_ref, offset_ref, *refs,
    q_smem, latent_smem, rope_smem, weight_smem, number_smem, state_smem,
    started, query_ready, keys_ready, keys_free, weights_ready, exchanged, stored,
    blocks, splits, pairs, page_scale, score_scale, config, machine,
):  # fmt: skip
    *key_refs, out_ref, lse_ref = refs
    block = lax.axis_index("block")
    warpgroup = lax.axis_index("warpgroup")
    # Blocks of one share run side by side, so that its keys are read from memory once.
    head = lax.rem(block, jnp.int32(blocks)) * HEADS
    share = lax.div(block, jnp.int32(blocks))
    split, token = lax.rem(share, jnp.int32(splits)), lax.div(share, jnp.int32(splits))
    per_split = -(-pairs // splits)
    first = split * per_split
    steps = jnp.minimum(jnp.int32(per_split), pairs - first)
    offset = offset_ref[0]
    limit = row_limit(key_refs[0].shape[0], key_refs[0].shape[1], page_scale, offset)
    barriers = state_smem.at[3]
    # The first's sum replaces its maximum: the second has read that before it published its last weights.
    sums = (state_smem.at[0], state_smem.at[2])

    def start():
        plgpu.barrier_arrive(started)
        plgpu.barrier_wait(started)

    def fill():
        plgpu.set_max_registers(config.copy_registers, action="decrease")

        def rows_of(step, buffer):
            return rows_ref.at[token, pl.ds((first + step) * (2 * TILE) + buffer * TILE, TILE)]

        machine.create_barriers(barriers)
        for buffer in range(2):
            machine.fetch_row_numbers(rows_of(0, buffer), number_smem.at[buffer])
        start()

        where = dict(layer_offset=offset, row_limit=limit, page_scale=page_scale, prefetch=config.prefetch)
        machine.begin_copies(key_refs, number_smem, **where)

        def pair(step, _):
            for buffer in range(2):

                @pl.when(step > 0)
                def _(buffer=buffer):
                    plgpu.barrier_wait(keys_free.at[buffer])

                machine.copy_rows(
                    key_refs, rows_of(jnp.minimum(step + 1, steps - 1), buffer), number_smem,
                    latent_smem.at[buffer], rope_smem.at[buffer], barriers, barriers=keys_ready, buffer=buffer,
                    slot=lax.rem(step, jnp.int32(2)), has_next=(step + 1 < steps).astype(jnp.int32),
                    ahead=config.ahead, **where,
                )  # fmt: skip
            return ()

        lax.fori_loop(0, steps, pair, ())
        for buffer in range(2):
            plgpu.barrier_wait(keys_free.at[buffer])

    def compute(own: int):
        other = 1 - own
        half = pl.ds(own * _HALF, _HALF)
        plgpu.set_max_registers(config.compute_registers, action="increase")
        if own == 0:
            plgpu.copy_gmem_to_smem(
                q_ref.at[token, pl.ds(head, HEADS), pl.ds(0, LATENT)], q_smem.at[0], query_ready
            )
        q_rope = plgpu.load(
            q_ref.at[token, pl.ds(head, HEADS), pl.ds(LATENT, ROPE)], layout=_TILED, optimized=False
        )
        start()
        plgpu.barrier_wait(query_ready)

        def values(buffer):
            """Columns of a tile that this warpgroup accumulates."""
            return latent_smem.at[buffer + machine.opaque_zero(), :, half]

        def free(buffer):
            plgpu.barrier_arrive(keys_free.at[buffer])

        def scaled(x, factor):
            return x * lax.broadcast_in_dim(factor, x.shape, [0])

        def score_own(step):
            """Scores of this warpgroup's tile, times log2(e), and the row maxima."""
            position = (first + step) * (2 * TILE) + own * TILE
            rows = plgpu.load(rows_ref.at[token, pl.ds(position, TILE)], layout=_COLUMN, optimized=False)
            seen = jnp.where((rows >= 0) & (rows < limit), jnp.int32(-1), jnp.int32(0))
            zero = machine.opaque_zero()
            products: list = []
            for part, (begin, end) in enumerate(machine.parts):
                columns = pl.ds(begin, end - begin)
                products.append(partial(machine.wait_rows, barriers, keys_ready, own, part, step))
                if part == 0:
                    products.append((q_rope, rope_smem.at[own + zero].transpose((1, 0))))
                key_part = latent_smem.at[own + zero, :, columns].transpose((1, 0))
                products.append((q_smem.at[zero, :, columns], key_part))
            score = machine.multiply(None, *products)
            # By bits, because a query may be NaN, and one instruction does it: the score where seen, else -inf.
            seen = lax.broadcast_in_dim(seen, score.shape, [1])
            bits = lax.bitcast_convert_type(score * score_scale, jnp.int32)
            score = lax.bitcast_convert_type((bits & seen) | (~seen & _MINUS_INFINITY), jnp.float32)
            return score, jnp.max(score, axis=1)

        def publish(score, top):
            """Weights of this warpgroup's tile: to shared memory, and back in registers with row sums and maxima."""
            weight = jnp.exp2(score - lax.broadcast_in_dim(top, score.shape, [0]))
            weights = weight.astype(jnp.bfloat16)
            weight_smem.at[own][...] = weights
            state_smem.at[own][...] = top
            plgpu.commit_smem()
            plgpu.barrier_arrive(weights_ready.at[own])
            # Read back after it was published, the maximum keeps the scaling of the outputs behind that.
            top = plgpu.load(state_smem.at[own], layout=_ROW)
            return weights, jnp.sum(weight, axis=1), top

        def first_pair(step, carry):
            acc, total, top = carry
            score, tile_top = score_own(step)
            weights, tile_total, own_top = publish(score, jnp.maximum(top, tile_top))
            shrink = jnp.exp2(top - own_top)
            acc = machine.multiply(scaled(acc, shrink), (weights, values(own)))
            free(own)
            plgpu.barrier_wait(weights_ready.at[other])
            new_top = plgpu.load(state_smem.at[other], layout=_ROW)
            rest = jnp.exp2(own_top - new_top)
            acc = machine.multiply(scaled(acc, rest), (weight_smem.at[other], values(other)))
            free(other)
            return acc, (total * shrink + tile_total) * rest, new_top

        def second_pair(step, carry):
            acc, total, top = carry
            score, tile_top = score_own(step)
            plgpu.barrier_wait(weights_ready.at[other])
            other_top = plgpu.load(state_smem.at[other], layout=_ROW)
            weights, tile_total, new_top = publish(score, jnp.maximum(other_top, tile_top))
            shrink, rest = jnp.exp2(top - other_top), jnp.exp2(other_top - new_top)
            acc = machine.multiply(scaled(acc, shrink), (weight_smem.at[other], values(other)))
            free(other)
            acc = machine.multiply(scaled(acc, rest), (weights, values(own)))
            free(own)
            return acc, total * shrink * rest + tile_total, new_top

        zeros = plgpu.layout_cast(jnp.zeros((HEADS,), jnp.float32), _ROW)
        floor = plgpu.layout_cast(jnp.full((HEADS,), _FLOOR, jnp.float32), _ROW)
        acc = plgpu.layout_cast(jnp.zeros((HEADS, _HALF), jnp.float32), _TILED)
        acc, total, top = lax.fori_loop(0, steps, (first_pair, second_pair)[own], (acc, zeros, floor))

        sums[own][...] = total
        plgpu.barrier_arrive(exchanged)
        plgpu.barrier_wait(exchanged)
        total = total + plgpu.load(sums[other], layout=_ROW)
        empty = total == 0.0
        total = jnp.where(empty, jnp.float32(1), total)
        out = acc * lax.broadcast_in_dim(1.0 / total, acc.shape, [0])
        heads = pl.ds(head, HEADS)
        if out_ref.dtype == jnp.float32:
            out_ref.at[token, split, heads, half][...] = out
        else:  # no score is left to compute, so the queries' memory is free
            q_smem.at[0, :, half][...] = out.astype(out_ref.dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(stored)
            if own == 0:
                plgpu.barrier_wait(stored)
                plgpu.copy_smem_to_gmem(q_smem.at[0], out_ref.at[token, split, heads])
        if own == 0:
            lse = jnp.where(empty, jnp.float32(-jnp.inf), (top + jnp.log(total) * _LOG2_E) * _LN_2)
            lse_ref.at[token, split, heads][...] = lse
        plgpu.wait_smem_to_gmem(0)

    pl.when(warpgroup == 0)(lambda: compute(0))
    pl.when(warpgroup == 1)(lambda: compute(1))
    pl.when(warpgroup == 2)(fill)
