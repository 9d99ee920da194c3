"""What Mosaic GPU's interpreter cannot run, in two forms, so that it interprets the same kernel body as Hopper runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dsa_jax.pallas import row_copy_fp8_mosaic, row_copy_mosaic
from dsa_jax.pallas.row_copy_mosaic import LATENT, TILE


@dataclasses.dataclass(frozen=True)
class Machine:
    """Operations of a kernel body.

    Attributes:
        parts: latent columns of a tile whose arrival is signalled together.
        multiply: ``(acc or None, step, ...) -> acc + a b + ...``, float32 ``[64, n]``; a step is a product ``(a, b)``,
            a in shared memory or in registers and b in shared memory, or a function to call between products, which may
            return one.
        opaque_zero: see ``row_copy_mosaic``.
        create_barriers: see ``row_copy_mosaic``.
        fetch_row_numbers: the same.
        begin_copies: see ``row_copy_fp8_mosaic``; called once, when the first tile's row numbers are there.
        copy_rows: see ``row_copy_mosaic``; ``barriers`` are the Pallas barriers that the interpreter uses instead.
        wait_rows: the same, with those as second argument.
    """

    parts: tuple[tuple[int, int], ...]
    multiply: Callable[..., Any]
    opaque_zero: Callable[[], Array]
    fetch_row_numbers: Callable[..., None]
    create_barriers: Callable[..., None]
    begin_copies: Callable[..., None]
    copy_rows: Callable[..., None]
    wait_rows: Callable[..., None]


def _multiply(acc, *steps: Any):
    def issue(acc_ref):
        for step in steps:
            product: Any = step() if callable(step) else step
            if product is not None:
                plgpu.wgmma(acc_ref, *product)

    def issue_and_read(acc_ref):
        issue(acc_ref)
        return acc_ref[...]

    if acc is not None:
        return pl.run_state(issue)(plgpu.ACC.init(acc))
    a, b = next(step for step in steps if not callable(step))
    return pl.run_scoped(issue_and_read, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


HOPPER = Machine(
    parts=row_copy_mosaic.PARTS,
    multiply=_multiply,
    opaque_zero=row_copy_mosaic.opaque_zero,
    fetch_row_numbers=row_copy_mosaic.fetch_row_numbers,
    create_barriers=row_copy_mosaic.create_barriers,
    begin_copies=lambda *refs, **options: None,
    copy_rows=lambda *refs, barriers, **options: row_copy_mosaic.copy_rows(*refs, **options),
    wait_rows=lambda raw, barriers, *which: row_copy_mosaic.wait_rows(raw, *which),
)
HOPPER_FP8 = dataclasses.replace(
    HOPPER,
    parts=row_copy_fp8_mosaic.PARTS,
    begin_copies=row_copy_fp8_mosaic.begin_copies,
    copy_rows=lambda *refs, barriers, **options: row_copy_fp8_mosaic.copy_rows(*refs, **options),
)


def _multiply_interpreted(acc, *steps: Any):
    for step in steps:
        pair: Any = step() if callable(step) else step
        if pair is None:
            continue
        a, b = pair
        a = a if isinstance(a, Array) else a[...]
        product = jnp.dot(a.astype(jnp.float32), b[...].astype(jnp.float32), precision="highest")
        acc = product if acc is None else acc + product
    return acc


def _fetch_row_numbers_interpreted(rows_ref, numbers_smem):
    numbers_smem[0, :] = rows_ref[...]


def _copy_rows_interpreted(
    key_refs, next_rows_ref, numbers_smem, latent_smem, rope_smem, _, *,
    parts, read, barriers, buffer, slot, has_next, layer_offset, row_limit, page_scale, prefetch, ahead,
):  # fmt: skip
    del prefetch, ahead
    page_size = key_refs[0].shape[1]

    def copy_row(i, _):
        row = numbers_smem[buffer, slot, i]
        valid = (row >= 0) & (row < row_limit)
        row = jnp.where(valid, row, 0)
        page = jnp.where(valid, lax.div(row, jnp.int32(page_size)) * page_scale + layer_offset, 0)
        latent, rope = read(key_refs, page, lax.rem(row, jnp.int32(page_size)))
        latent_smem[i, :] = jnp.where(valid, latent, jnp.zeros_like(latent))
        rope_smem[i, :] = jnp.where(valid, rope, jnp.zeros_like(rope))
        return ()

    lax.fori_loop(0, TILE, copy_row, ())

    @pl.when(has_next != 0)
    def _():
        numbers_smem[buffer, 1 - slot, :] = next_rows_ref[...]

    plgpu.commit_smem()
    for part in range(len(parts)):
        plgpu.barrier_arrive(barriers.at[buffer * len(parts) + part])


def _wait_rows_interpreted(raw, barriers, buffer, part, turn):
    del raw, turn
    plgpu.barrier_wait(barriers.at[buffer * (barriers.shape[0] // 2) + part])


def _read_bf16(key_refs, page, offset):
    key = key_refs[0][page, offset, :]
    return key[:LATENT], key[LATENT:]


def _read_fp8(key_refs, page, offset):
    codes, scales, rope = (ref[page, offset, :] for ref in key_refs)
    values = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    return (values.reshape(4, -1) * scales[:, None]).reshape(-1).astype(jnp.bfloat16), rope


INTERPRETER = Machine(
    parts=row_copy_mosaic.PARTS,
    multiply=_multiply_interpreted,
    opaque_zero=lambda: jnp.int32(0),
    fetch_row_numbers=_fetch_row_numbers_interpreted,
    create_barriers=lambda raw: None,
    begin_copies=lambda *refs, **options: None,
    copy_rows=partial(_copy_rows_interpreted, parts=row_copy_mosaic.PARTS, read=_read_bf16),
    wait_rows=_wait_rows_interpreted,
)
INTERPRETER_FP8 = dataclasses.replace(
    INTERPRETER,
    parts=row_copy_fp8_mosaic.PARTS,
    copy_rows=partial(_copy_rows_interpreted, parts=row_copy_fp8_mosaic.PARTS, read=_read_fp8),
)
