"""The end of a tile of the scoring kernels: sums over heads from a thread's columns to scores in global memory.

After the products and weights a thread of a warpgroup holds, for each new token, sums of two columns for two keys eight
apart; the four threads of a quad hold the same keys and other columns. Each of them shall add up one value of a pair of
tokens: it gives away two of its four values and then one of the two left, so a pair takes three exchanges and one store.
Sums of each value in all four threads would take eight exchanges and four stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array

from dsa_jax.pallas.paged_logits_plan import TILE

COLUMNS = 8
"""Columns of the smallest piece of a product's layout: what `finish` adds up."""
_LEAST_KEPT, _MOST_KEPT = 1 << 18, 1 << 21
_STAY = 0x14F << 52
"""What ``createpolicy.fractional.L2::evict_last`` gives for the fraction 1, with five instructions before every store."""
_PER_KEY = plgpu.Layout.WGMMA.reduce(1)
_SCALAR = plgpu.Layout.WG_SPLAT(())

Bounds = tuple[Any, Any]
"""First column that a row sees, or None for the first of all, and the one after the last; int32 scalars."""


def finish(out, row, left, parts: Sequence[Array], scale: Array, bounds: Sequence[Bounds], rows_left) -> None:
    """Write a tile's scores of one or two rows: ``scale * sum(part, axis=1)``, -inf where a row does not see.

    Args:
        out: float32 or bfloat16 ``[rows, columns]`` in global memory.
        row: int32 scalar, the first of the rows.
        left: int32 scalar, the tile's first column.
        parts: for each row float32 ``[64, 8]`` in the layout of a product.
        scale: float32 ``[64]``, of the keys.
        bounds: of each row.
        rows_left: int32 scalar, how many rows from the first on exist; None if all do.
    """
    rows, columns = out.shape
    half_words = out.dtype == jnp.bfloat16
    windows = bounds[0][0] is not None
    scalars = [b for pair in bounds for b in (pair if windows else pair[1:])]
    scalars += [left] + ([] if rows_left is None else [rows_left])
    layouts = [plgpu.Layout.WGMMA] * len(parts) + [_PER_KEY] + [_SCALAR] * len(scalars)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *layouts))
    def write(_, target, *operands):
        i32, i64 = map(mgpu.utils.dtype_to_ir_type, (jnp.int32, jnp.int64))
        names: dict[str, Any] = {"to": mgpu.utils.memref_ptr(target)}
        for token, part in enumerate(operands[: len(parts)]):
            for key, pair in enumerate(part.registers.flat):
                names[f"pair{token}{key}"] = mgpu.utils.bitcast(pair, i64)
        for key, value in enumerate(operands[len(parts)].registers.flat):
            names[f"scale{key}"] = mgpu.utils.bitcast(value, i32)
        kinds = [
            f"{kind}{token}"
            for token in range(len(parts))
            for kind in (("begin", "end") if windows else ("end",))
        ]
        for name, value in zip([*kinds, "left", "rows"], operands[len(parts) + 1 :], strict=False):
            names[name] = value.registers.item()
        # Computed from the thread's number out here, these leave the loops.
        thread = mgpu.FragmentedArray.splat(mgpu.utils.thread_idx(), (), is_signed=False)
        odd, second = thread & 1, thread >> 1 & 1
        key = (thread >> 2 & 7) | (thread >> 1 & 48) | odd * 8
        place = (key + second * columns if len(parts) == 2 else key) * (2 if half_words else 4)
        for name, value in (("odd", odd), ("second", second), ("key", key), ("place", place)):
            names[name] = value.registers.item()
        number = {name: f"${i}" for i, name in enumerate(names)}
        ptx = _ptx(number, len(parts), windows, rows_left is not None, half_words, _policy(rows * columns))
        mgpu.utils.inline_ptx("{\n" + "\n".join(ptx) + "\n}", *names.values(), has_side_effects=True)

    target = out.at[row, pl.ds(left, TILE)]
    write(target, *parts, scale, *(jnp.asarray(x, jnp.int32) for x in scalars))


def _ptx(
    at: dict[str, str], tokens: int, windows: bool, some: bool, half_words: bool, policy: int | None
) -> list[str]:
    """`at` says which operand has which name; see `finish`."""
    ptx = [
        ".reg .pred odd, second, seen, here;",
        ".reg .b32 value<4>, keep<2>, give<2>, got<2>, scale, column, bound, rest;",
        ".reg .b64 to, wide, policy;",
        ".reg .b16 half;",
        f"setp.ne.u32 odd, {at['odd']}, 0;",
        f"setp.ne.u32 second, {at['second']}, 0;",
    ]
    for token in range(tokens):
        for key in range(2):
            i = 2 * token + key
            ptx += [
                f"mov.b64 {{keep0, give0}}, {at[f'pair{token}{key}']};",
                f"add.f32 value{i}, keep0, give0;",
            ]
    if tokens == 2:
        for key in range(2):
            ptx += _exchange(f"value{key}", f"value{2 + key}", f"keep{key}", key, "second", 2)
    else:
        ptx += ["mov.b32 keep0, value0;", "mov.b32 keep1, value1;"]
    ptx += _exchange("keep0", "keep1", "value0", 0, "odd", 1)
    if tokens == 1:
        ptx += ["shfl.sync.bfly.b32 got0, value0, 2, 0x1f, 0xffffffff;", "add.f32 value0, value0, got0;"]
    ptx += [
        f"selp.b32 scale, {at['scale1']}, {at['scale0']}, odd;",
        "mul.f32 value0, value0, scale;",
        f"add.s32 column, {at['left']}, {at['key']};",
    ]
    for number, kind in enumerate(("end", "begin") if windows else ("end",)):
        one = at[f"{kind}0"]
        ptx += (
            [f"selp.b32 bound, {at[f'{kind}1']}, {one}, second;"]
            if tokens == 2
            else [f"mov.b32 bound, {one};"]
        )
        compare = (
            "setp.lt.s32 seen, column, bound;"
            if number == 0
            else "setp.ge.and.s32 seen, column, bound, seen;"
        )
        ptx += [compare]
    ptx += [
        "selp.b32 value0, value0, 0fFF800000, seen;",
        f"cvt.u64.u32 wide, {at['place']};",
        f"add.u64 to, {at['to']}, wide;",
    ]
    # Of one token both halves of a quad have the same value: one writes it.
    here = "" if tokens == 2 else "@!second "
    if some:
        ptx += ["selp.b32 rest, 1, 0, second;"] if tokens == 2 else ["mov.b32 rest, 0;"]
        ptx += [f"setp.gt.s32 here, {at['rows']}, rest;"]
        ptx += [] if tokens == 2 else ["@second setp.ne.u32 here, 0, 0;"]
        here = "@here "
    hint, operand = ("", "")
    if policy is not None:
        ptx += [f"mov.b64 policy, {policy};"]
        hint, operand = ".L2::cache_hint", ", policy"
    if half_words:
        return [*ptx, "cvt.rn.bf16.f32 half, value0;", f"{here}st.global{hint}.b16 [to], half{operand};"]
    return [*ptx, f"{here}st.global{hint}.b32 [to], value0{operand};"]


def _exchange(first: str, second: str, target: str, number: int, which: str, lanes: int) -> list[str]:
    """Keep one of two values, by the predicate `which`, and add what the thread `lanes` away gives for it."""
    return [
        f"selp.b32 {target}, {second}, {first}, {which};",
        f"selp.b32 give{number}, {first}, {second}, {which};",
        f"shfl.sync.bfly.b32 got{number}, give{number}, {lanes}, 0x1f, 0xffffffff;",
        f"add.f32 {target}, {target}, got{number};",
    ]


def writes_much(scores: int) -> bool:
    """Whether a kernel writes so many scores that its keys should make room for them in the L2 cache."""
    return scores >= _LEAST_KEPT


def _policy(scores: int) -> int | None:
    """An L2 policy for a kernel that writes so many scores.

    The keys are read once and would push the scores out to memory, where what runs next has to fetch them. Asked to stay,
    8 MiB of scores do; of more, nothing is gained, and a few stay without asking.
    """
    return _STAY if _LEAST_KEPT <= scores <= _MOST_KEPT else None


def finish_interpreted(out, row, left, parts, scale, bounds, rows_left) -> None:
    """`finish` in plain operations."""
    column = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=_PER_KEY) + left
    for token, (part, (begin, end)) in enumerate(zip(parts, bounds, strict=True)):
        seen = column < end if begin is None else (column >= begin) & (column < end)
        scores = jnp.where(seen, jnp.sum(part, axis=1) * scale, -jnp.inf).astype(out.dtype)

        @pl.when(True if rows_left is None else rows_left > token)
        def _(token=token, scores=scores):
            out[row + token, pl.ds(left, TILE)] = scores
