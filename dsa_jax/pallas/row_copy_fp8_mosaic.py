"""Copies of selected rows of the 656-byte FP8 form into shared memory, as bfloat16, for Mosaic GPU kernels on Hopper.

As ``row_copy_mosaic``, but the 512 latent codes pass through registers, where they are decoded and scaled; the rotary part
is copied as it is. Sixteen threads read 256 codes of a row, 16 bytes each; a thread serves eight rows, half a row at a time.

Eight reads of every thread are always under way: as soon as a row's codes are decoded, those of half a tile later are read
into the same registers. Half a tile later is often the next tile, whose codes so arrive before its buffer is free. These
registers live as long as the kernel: PTX declares them once, outside of any block (`begin_copies`).

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
    barrier_address,
    emit,
    fetch_ahead,
    fetch_next,
    read_next_number,
    row_address,
)  # fmt: skip

PARTS = ((0, 256), (256, 512))
"""As in ``row_copy_mosaic``."""
_TWO_TO_60 = 0x5D805D80  # as two bfloat16
_TWO_TO_60_FLOAT = "0f5D800000"


def begin_copies(key_refs, numbers_smem, *, layer_offset, row_limit, page_scale: int, prefetch: int) -> None:
    """Read the codes of the first half tile; its row numbers are the set 0 of buffer 0. The arguments are `copy_rows`'."""
    page_size = key_refs[0].shape[1]

    @plgpu.inline_mgpu(arg_types=(_RAW, _RAW, _RAW, _SCALAR, _SCALAR))
    def begin(_, *operands):
        refs, scalars = operands[:3], operands[3:]
        words = [f"{code}_{w}" for code in _CODES for w in range(4)]
        declare = f".reg .b32 {', '.join(words)};\n.reg .f32 {', '.join(_SCALES)};"
        mgpu.utils.inline_ptx(declare, has_side_effects=True)
        mgpu.warpgroup_barrier()
        ptx = [*_REGISTERS, *_begin_reading("$0", "$1"), "mov.u32 numbers, $2;"]
        for i in range(8):
            ptx += _read_numbers("numbers", i) if i % 4 == 0 else []
            ptx += _read_codes(0, i, page_size, page_scale, prefetch, "$3", "$4")
        emit(ptx, *map(mgpu.utils.memref_ptr, refs), *(x.registers.item() for x in scalars))

    begin(*key_refs[:2], numbers_smem, layer_offset, row_limit)


def copy_rows(
    key_refs, next_rows_ref, numbers_smem, latent_smem, rope_smem, barriers_smem, *,
    buffer: int, slot, has_next, layer_offset, row_limit, page_scale: int, prefetch: int = 128, ahead: int = 0,
) -> None:  # fmt: skip
    """``row_copy_mosaic.copy_rows`` for three ``key_refs``: codes, scales and rope of the pool's rows."""
    page_size = key_refs[0].shape[1]

    @plgpu.inline_mgpu(arg_types=(*[_RAW] * 5, _TILED, _TILED, _RAW, *[_SCALAR] * 4))
    def copy(_, *operands):
        refs, scalars = operands[:8], operands[8:]
        emit(
            ["cp.async.wait_group 0;"]
        )  # what was fetched with the last tile: the row numbers of the next one
        mgpu.warpgroup_barrier()
        ptx = _copy_ptx(page_size, page_scale, buffer, prefetch, ahead)
        emit(ptx, *map(mgpu.utils.memref_ptr, refs), *(x.registers.item() for x in scalars))

    copy(
        *key_refs, next_rows_ref, numbers_smem, latent_smem, rope_smem, barriers_smem,
        slot, has_next, layer_offset, row_limit,
    )  # fmt: skip


def _copy_ptx(page_size: int, page_scale: int, buffer: int, prefetch: int, ahead: int) -> list[str]:
    """Operands: codes, scales, rope, next rows, numbers, latent, rope, barriers, slot, has_next, offset, limit."""
    set_bytes, buffer_bytes = TILE * 4, 2 * TILE * 4
    ptx = [
        *_REGISTERS,
        ".reg .pred odd, more;",
        ".reg .b32 group, own, size, high, low, bits, magnitude, large, next, quad<4>, out<4>, word<4>;",
        ".reg .f32 scaled, rest;",
        f"mov.b32 large, {_TWO_TO_60};",
        *_begin_reading("$0", "$1"),
        f"mad.lo.u32 own, $8, {set_bytes}, $4;",
        f"add.u32 own, own, {buffer * buffer_bytes};",
        *(read_next_number("$3", "$9") if ahead else []),
        # The rotary part: eight threads a row, four rows a thread.
        "and.b32 chunk, thread, 7;",
        "shr.u32 group, thread, 3;",
        "shl.b32 to, group, 4;",
        "add.u32 to, to, own;",
        "ld.shared.v4.b32 {quad0, quad1, quad2, quad3}, [to];",
        "and.b32 group, group, 1;",
        "shl.b32 group, group, 2;",
        "mul.wide.u32 from, chunk, 16;",
        "add.u64 rope, from, $2;",
    ]
    for i in range(4):
        ptx += row_address(f"quad{i}", page_size, page_scale, "$10", "$11")
        ptx += [
            f"selp.b32 size, {_CHUNK}, 0, valid;",
            "mad.wide.u32 from, page, 128, rope;",
            f"add.u32 place, group, {i};",
            "xor.b32 to, chunk, place;",
            "shl.b32 to, to, 4;",
            f"mad.lo.u32 to, place, {_SEGMENT}, to;",
            f"mad.lo.u32 to, tile, {_SMEM_TILE}, to;",
            "add.u32 to, to, $6;",
            f"cp.async.cg.shared.global.L2::{prefetch}B [to], [from], {_CHUNK}, size;",
        ]
    # Not an arrival: it makes the barrier wait for these copies as well.
    ptx += [f"cp.async.mbarrier.arrive.shared.b64 {barrier_address('$7', buffer, 0)};"]
    ptx += [
        "and.b32 chunk, thread, 15;",
        "shr.u32 place, chunk, 2;",  # column tile within the half
        "and.b32 to, place, 1;",
        "setp.ne.u32 odd, to, 0;",
        "mad.lo.u32 place, tile, 8, place;",
        f"mad.lo.u32 place, place, {_SMEM_TILE}, $5;",
        "and.b32 chunk, chunk, 3;",
        "shl.b32 chunk, chunk, 1;",
        "or.b32 chunk, chunk, to;",
        "mov.u32 numbers, own;",
        "setp.ne.u32 more, $9, 0;",
    ]
    for half in range(2):
        if half == 1:  # what is read from here on is the next tile's, in the other buffer
            ptx += [
                f"xor.b32 numbers, $8, {buffer};",
                f"mad.lo.u32 numbers, numbers, {set_bytes}, $4;",
                f"add.u32 numbers, numbers, {(1 - buffer) * buffer_bytes};",
            ]
        for i in range(8):
            if i % 4 == 0:
                ptx += _read_numbers("numbers", i)
                if half == buffer == 1:  # there may be no next tile: then nothing is read
                    ptx += [f"selp.b32 row{j}, row{j}, -1, more;" for j in range(4)]
            ptx += _take_codes(i)
            ptx += _read_codes(1 - half, i, page_size, page_scale, prefetch, "$10", "$11")
            ptx += _decode(half, i)
        ptx += [
            "fence.proxy.async.shared::cta;",  # wgmma reads through the asynchronous proxy
            f"mbarrier.arrive.shared.b64 _, {barrier_address('$7', buffer, half)};",
        ]
    if ahead:
        ptx += row_address("next", page_size, page_scale, "$10", "$11")
        for array, row_bytes in (("$0", 512), ("$1", 16), ("$2", 128)):
            ptx += fetch_ahead(array, row_bytes, ahead)
    return [*ptx, f"add.u32 own, $4, {buffer * buffer_bytes};", *fetch_next("$3", "own", "$8", "$9")]


_CODES = [f"dsa_codes{i}" for i in range(8)]
_SCALES = [f"dsa_scale{i}" for i in range(8)]
_REGISTERS = [
    ".reg .pred first, valid;",
    ".reg .b32 thread, chunk, numbers, to, place, tile, page, offset, row<4>;",
    ".reg .b64 from, base, scales, rope;",
]


def _begin_reading(codes: str, scales: str) -> list[str]:
    """Addresses of a thread's codes and scales in row 0: sixteen threads for half a row, eight rows a thread."""
    return [
        "mov.u32 thread, %tid.x;",
        "and.b32 thread, thread, 127;",
        "shr.u32 tile, thread, 4;",
        "and.b32 to, thread, 15;",
        "mul.wide.u32 base, to, 16;",
        f"add.u64 base, base, {codes};",
        "shr.u32 to, to, 3;",
        "mul.wide.u32 scales, to, 4;",
        f"add.u64 scales, scales, {scales};",
    ]


def _read_numbers(numbers: str, first: int) -> list[str]:
    """The numbers of four of the thread's eight rows, from row ``first`` on."""
    return [
        "shl.b32 to, tile, 5;",
        f"add.u32 to, to, {numbers};",
        f"ld.shared.v4.b32 {{row0, row1, row2, row3}}, [to+{first * 4}];",
    ]


def _read_codes(
    half: int, i: int, page_size: int, page_scale: int, prefetch: int, layer_offset: str, limit: str
) -> list[str]:
    """Read sixteen codes of the thread's row i, and their scale; zeros for a row that is not valid."""
    target = ", ".join(f"{_CODES[i]}_{w}" for w in range(4))
    return [
        *row_address(f"row{i % 4}", page_size, page_scale, layer_offset, limit),
        *[f"mov.b32 {_CODES[i]}_{w}, 0;" for w in range(4)],
        f"mov.f32 {_SCALES[i]}, 0f00000000;",
        "mad.wide.u32 from, page, 512, base;",
        f"@valid ld.global.nc.L1::no_allocate.L2::{prefetch}B.v4.b32 {{{target}}}, [from+{half * 256}];",
        "mad.wide.u32 from, page, 16, scales;",
        f"@valid ld.global.nc.f32 {_SCALES[i]}, [from+{half * 8}];",
    ]


def _take_codes(i: int) -> list[str]:
    """Copy what `_read_codes` read, so that its registers are free: four words of codes, and the scale in two parts.

    Sixteen values are two chunks of 16 bytes. Threads of odd column tiles store theirs in the other order, so that eight
    threads always store to eight different places modulo 128 bytes.
    """
    return [
        *[f"selp.b32 word{w}, {_CODES[i]}_{(w + 2) % 4}, {_CODES[i]}_{w}, odd;" for w in range(4)],
        f"mul.f32 scaled, {_SCALES[i]}, {_TWO_TO_60_FLOAT};",
        "cvt.rn.bf16x2.f32 high, scaled, scaled;",
        "shl.b32 low, high, 16;",
        "mov.b32 rest, low;",
        "sub.f32 rest, scaled, rest;",
        "cvt.rn.bf16x2.f32 low, rest, rest;",
    ]


def _decode(half: int, i: int) -> list[str]:
    """Decode and store what `_take_codes` took."""
    ptx = [
        f"xor.b32 to, chunk, {i};",
        "shl.b32 to, to, 4;",
        "add.u32 to, to, place;",
        f"add.u32 to, to, {half * 4 * _SMEM_TILE + i * _SEGMENT};",
    ]
    for pair in range(2):  # of words
        for k in range(4):  # two values each
            selector = 0x1404 if k % 2 == 0 else 0x3424
            ptx += [
                f"prmt.b32 bits, word{2 * pair + k // 2}, 0, {selector};",
                "shr.u32 magnitude, bits, 4;",
                "and.b32 magnitude, magnitude, 0x07f007f0;",
                "and.b32 bits, bits, 0x80008000;",
                "or.b32 bits, bits, magnitude;",
                "mul.rn.bf16x2 magnitude, bits, low;",
                "fma.rn.bf16x2 bits, bits, high, magnitude;",
                f"mul.rn.bf16x2 out{k}, bits, large;",
            ]
        ptx += ["st.shared.v4.b32 [to], {out0, out1, out2, out3};", "xor.b32 to, to, 16;"]
    return ptx
