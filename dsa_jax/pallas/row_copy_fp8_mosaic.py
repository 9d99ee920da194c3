"""Copies of selected rows of the 656-byte FP8 form into shared memory, as bfloat16, for Mosaic GPU kernels on Hopper.

As ``row_copy_mosaic``, but the 512 latent codes pass through registers, where they are decoded and scaled; the rotary part
is copied as it is. Sixteen threads read 256 codes of a row, 16 bytes each; a thread serves eight rows, half a row at a time.

Decoding by bits: an e4m3 code shifted by four within a bfloat16 is the value times ``2**-120`` (subnormal codes included,
because multiplication of bfloat16 keeps subnormal numbers). The scale is split into two bfloat16 that carry 16 bits of it,
so the result is rounded once; a power of two is exact. Scales have to lie between ``2**-60`` and ``2**66``.
"""

from __future__ import annotations

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from dsa_jax.pallas.row_copy_mosaic import (
    _CHUNK,
    _RAW,
    _SCALAR,
    _SEGMENT,
    _SMEM_TILE,
    _TILED,
    TILE,
    Schedule,
    barrier_address,
    emit,
    fetch_ahead,
    fetch_next,
    read_next_number,
    row_address,
)  # fmt: skip

TILES = Schedule(((0, 256), (256, 512)), ((0, (0, 1)), (1, (0, 1))))
HALVES = Schedule(((0, 256), (256, 512)), ((0, (0, 1)), (1, (1, 0))))
"""As in ``row_copy_mosaic``, but whole tiles: one part's codes are on their way while the other is decoded."""
_TWO_TO_60 = 0x5D805D80  # as two bfloat16
_TWO_TO_60_FLOAT = "0f5D800000"


def copy_rows(
    key_refs, next_rows_ref, numbers_smem, latent_smem, rope_smem, barriers_smem, *,
    schedule: Schedule, call: int, slot, has_next, layer_offset, row_limit, page_scale: int,
    prefetch: int = 128, ahead: bool = True,
) -> None:  # fmt: skip
    """``row_copy_mosaic.copy_rows`` for three ``key_refs``: codes, scales and rope of the pool's rows."""
    page_size = key_refs[0].shape[1]

    @plgpu.inline_mgpu(arg_types=(*[_RAW] * 5, _TILED, _TILED, _RAW, *[_SCALAR] * 4))
    def copy(_, *operands):
        refs, scalars = operands[:8], operands[8:]
        emit(["cp.async.wait_group 1;"])  # what was fetched with this buffer's last tile: the row numbers
        mgpu.warpgroup_barrier()
        ptx = _copy_ptx(page_size, page_scale, schedule.order[call], prefetch, ahead)
        emit(ptx, *map(mgpu.utils.memref_ptr, refs), *(x.registers.item() for x in scalars))

    copy(
        *key_refs, next_rows_ref, numbers_smem, latent_smem, rope_smem, barriers_smem,
        slot, has_next, layer_offset, row_limit,
    )  # fmt: skip


def _copy_ptx(
    page_size: int, page_scale: int, call: tuple[int, tuple[int, ...]], prefetch: int, ahead: bool
) -> list[str]:
    """Operands: codes, scales, rope, next rows, numbers, latent, rope, barriers, slot, has_next, offset, limit."""
    buffer, parts = call
    registers = "thread, chunk, group, numbers, to, place, tile, page, offset, size, next"
    words = [f"code{i}_{w}" for i in range(8) for w in range(4)]
    ptx = [
        ".reg .pred first, valid, odd;",
        f".reg .b32 {registers}, high, low, bits, magnitude, large;",
        ".reg .b32 row<8>, quad<4>, out<8>, part<8>;",
        ".reg .f32 scaled, rest;",
        ".reg .b64 from, base, scales;",
        f".reg .b32 {', '.join(words)};",
        ".reg .f32 scale<8>;",
        f"mov.b32 large, {_TWO_TO_60};",
        "mov.u32 thread, %tid.x;",
        "and.b32 thread, thread, 127;",
        f"mad.lo.u32 numbers, $8, {TILE * 4}, $4;",
        *(read_next_number("$3", "$9") if ahead else []),
        # The rotary part: eight threads a row, four rows a thread.
        "and.b32 chunk, thread, 7;",
        "shr.u32 group, thread, 3;",
        "shl.b32 to, group, 4;",
        "add.u32 to, to, numbers;",
        "ld.shared.v4.b32 {quad0, quad1, quad2, quad3}, [to];",
        "shr.u32 tile, thread, 4;",
        "and.b32 group, group, 1;",
        "shl.b32 group, group, 2;",
        "mul.wide.u32 base, chunk, 16;",
        "add.u64 base, base, $2;",
    ]
    for i in range(4):
        ptx += row_address(f"quad{i}", page_size, page_scale, "$10", "$11")
        ptx += [
            f"selp.b32 size, {_CHUNK}, 0, valid;",
            "mad.wide.u32 from, page, 128, base;",
            f"add.u32 place, group, {i};",
            "xor.b32 to, chunk, place;",
            "shl.b32 to, to, 4;",
            f"mad.lo.u32 to, place, {_SEGMENT}, to;",
            f"mad.lo.u32 to, tile, {_SMEM_TILE}, to;",
            "add.u32 to, to, $6;",
            f"cp.async.cg.shared.global.L2::{prefetch}B [to], [from], {_CHUNK}, size;",
        ]
    # Not an arrival: it makes the barrier wait for these copies as well.
    ptx += [f"cp.async.mbarrier.arrive.shared.b64 {barrier_address('$7', buffer, parts[0])};"]
    # The codes: sixteen threads for half a row, eight rows a thread.
    ptx += [
        "and.b32 chunk, thread, 15;",
        "shl.b32 to, tile, 5;",
        "add.u32 to, to, numbers;",
        "ld.shared.v4.b32 {row0, row1, row2, row3}, [to];",
        "ld.shared.v4.b32 {row4, row5, row6, row7}, [to+16];",
        "mul.wide.u32 base, chunk, 16;",
        "add.u64 base, base, $0;",
        "shr.u32 to, chunk, 3;",
        "mul.wide.u32 scales, to, 4;",
        "add.u64 scales, scales, $1;",
    ]
    # The second part's codes are read one by one as the first part's are decoded: eight reads are always under way.
    for i in range(8):
        ptx += _read_codes(parts[0], i, page_size, page_scale, prefetch)
    ptx += [
        "shr.u32 place, chunk, 2;",  # column tile within the half
        "and.b32 to, place, 1;",
        "setp.ne.u32 odd, to, 0;",
        "mad.lo.u32 tile, tile, 8, place;",
        f"mad.lo.u32 tile, tile, {_SMEM_TILE}, $5;",
        "and.b32 chunk, chunk, 3;",
        "shl.b32 chunk, chunk, 1;",
        # Sixteen values are two chunks. Threads of odd column tiles store theirs in the other order, so that eight
        # threads always store to eight different places modulo 128 bytes.
        "or.b32 chunk, chunk, to;",
    ]
    for h in parts:
        for i in range(8):
            ptx += _decode(h, i)
            if h == parts[0]:
                ptx += _read_codes(parts[1], i, page_size, page_scale, prefetch)
        ptx += [
            "fence.proxy.async.shared::cta;",  # wgmma reads through the asynchronous proxy
            f"mbarrier.arrive.shared.b64 _, {barrier_address('$7', buffer, h)};",
        ]
    if ahead:
        ptx += row_address("next", page_size, page_scale, "$10", "$11")
        ptx += [*fetch_ahead("$0", 512), *fetch_ahead("$1", 16), *fetch_ahead("$2", 128)]
    ptx += fetch_next("$3", "$4", "$8", "$9")
    return ptx


def _read_codes(half: int, i: int, page_size: int, page_scale: int, prefetch: int) -> list[str]:
    """Read sixteen codes of the thread's row i, and their scale; zeros for a row that is not valid."""
    target = ", ".join(f"code{i}_{w}" for w in range(4))
    return [
        *row_address(f"row{i}", page_size, page_scale, "$10", "$11"),
        *[f"mov.b32 code{i}_{w}, 0;" for w in range(4)],
        f"mov.f32 scale{i}, 0f00000000;",
        "mad.wide.u32 from, page, 512, base;",
        f"@valid ld.global.nc.L1::no_allocate.L2::{prefetch}B.v4.b32 {{{target}}}, [from+{half * 256}];",
        "mad.wide.u32 from, page, 16, scales;",
        f"@valid ld.global.nc.f32 scale{i}, [from+{half * 8}];",
    ]


def _decode(half: int, i: int) -> list[str]:
    """Decode and store what `_read_codes` read."""
    ptx = [
        f"mul.f32 scaled, scale{i}, {_TWO_TO_60_FLOAT};",
        "cvt.rn.bf16x2.f32 high, scaled, scaled;",
        "shl.b32 low, high, 16;",
        "mov.b32 rest, low;",
        "sub.f32 rest, scaled, rest;",
        "cvt.rn.bf16x2.f32 low, rest, rest;",
    ]
    for k in range(8):  # two values each
        selector = 0x1404 if k % 2 == 0 else 0x3424
        ptx += [
            f"prmt.b32 bits, code{i}_{k // 2}, 0, {selector};",
            "shr.u32 magnitude, bits, 4;",
            "and.b32 magnitude, magnitude, 0x07f007f0;",
            "and.b32 bits, bits, 0x80008000;",
            "or.b32 bits, bits, magnitude;",
            "mul.rn.bf16x2 magnitude, bits, low;",
            "fma.rn.bf16x2 bits, bits, high, magnitude;",
            f"mul.rn.bf16x2 out{k}, bits, large;",
        ]
    return ptx + [
        *[f"selp.b32 part{k}, out{(k + 4) % 8}, out{k}, odd;" for k in range(8)],
        f"xor.b32 to, chunk, {i};",
        "shl.b32 to, to, 4;",
        "add.u32 to, to, tile;",
        f"add.u32 to, to, {half * 4 * _SMEM_TILE + i * _SEGMENT};",
        "st.shared.v4.b32 [to], {part0, part1, part2, part3};",
        "xor.b32 to, to, 16;",
        "st.shared.v4.b32 [to], {part4, part5, part6, part7};",
    ]
