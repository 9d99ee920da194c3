"""Copies of selected cache rows into shared memory, for Mosaic GPU kernels on Hopper.

Hopper's TMA cannot gather rows, so a warpgroup copies a tile of 64 rows with 16-byte ``cp.async`` instructions, straight
into the tiled and swizzled form that wgmma reads: tiles of 8 rows by 128 bytes, in each of which the 16-byte chunk c of
row r stands at place ``c xor r``. Eight threads copy one row, 128 bytes at a time; each thread serves four rows.

The row numbers of the tile that uses the same buffer next are fetched together with this tile's keys, so that no copy
waits for them. A row of -1 is copied with source size 0: nothing is read and zeros are written.

Arrival is signalled by barriers of our own: Pallas does not hand its barriers to inline code, and only code that has the
address can let ``cp.async`` itself arrive.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE, LATENT, ROPE = 64, 512, 64
_CHUNK, _SEGMENT, _SMEM_TILE = 16, 128, 1024  # bytes: of one copy, of a row's part in one tile, of a tile
_THREADS, _BARRIER_BYTES = 128, 8
_MOST_PARTS = 4


PARTS = ((0, 192), (192, 384), (384, 512))
"""Latent columns whose arrival is signalled together; the rotary columns come with the first."""
_RAW = plgpu.RefType()
_TILED = plgpu.RefType((plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))
_SCALAR = plgpu.Layout.WG_SPLAT(())


def opaque_zero():
    """An int32 zero that LLVM does not know to be one.

    Added to the index of a matrix product's operand inside a loop, it keeps LLVM from computing the operand's dozens of
    descriptors in front of the loop, where they would not fit into the registers; ptxas sees a plain constant.
    """

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR))
    def zero(_):
        i32 = mgpu.utils.dtype_to_ir_type(jnp.int32)
        value = mgpu.utils.inline_ptx("mov.b32 $0, 0;", result_types=i32, has_side_effects=True)
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return zero()


def create_barriers(barriers_smem) -> None:
    """Create the barriers of two buffers' parts at the start of ``barriers_smem``.

    Every warpgroup must wait for this to be done before it uses one.
    """

    @plgpu.inline_mgpu(arg_types=(_RAW,))
    def create(_, barriers):
        ptx = [
            ".reg .pred first;",
            ".reg .b32 thread;",
            "mov.u32 thread, %tid.x;",
            "and.b32 thread, thread, 127;",
        ]
        ptx += ["setp.eq.u32 first, thread, 0;"]
        addresses = [
            barrier_address("$0", buffer, part) for buffer in range(2) for part in range(_MOST_PARTS)
        ]
        ptx += [f"@first mbarrier.init.shared.b64 {address}, {_THREADS};" for address in addresses]
        emit(ptx, mgpu.utils.memref_ptr(barriers))

    create(barriers_smem)


def wait_rows(barriers_smem, buffer: int, part: int, turn) -> None:
    """Wait until a part of a buffer has arrived for the ``turn``-th time (int32, from 0), so that wgmma may read it."""

    @plgpu.inline_mgpu(arg_types=(_RAW, _SCALAR))
    def wait(_, barriers, turn):
        ptx = [".reg .pred done;", ".reg .b32 parity;", "and.b32 parity, $1, 1;", "again:"]
        ptx += [f"mbarrier.try_wait.parity.shared.b64 done, {barrier_address('$0', buffer, part)}, parity;"]
        ptx += ["@!done bra again;"]
        # cp.async does not write through the proxy by which wgmma reads.
        ptx += ["fence.proxy.async.shared::cta;"]
        emit(ptx, mgpu.utils.memref_ptr(barriers), turn.registers.item())

    wait(barriers_smem, turn)


def fetch_row_numbers(rows_ref, numbers_smem) -> None:
    """Fetch the row numbers of a buffer's first tile: ``rows_ref`` ``int32[64]`` to ``numbers_smem`` ``int32[2, 64]``."""

    @plgpu.inline_mgpu(arg_types=(_RAW, _RAW))
    def fetch(_, rows, numbers):
        ptx = [".reg .pred first;", ".reg .b32 thread, to;", ".reg .b64 from;"]
        ptx += ["mov.u32 thread, %tid.x;", "and.b32 thread, thread, 127;", "setp.lt.u32 first, thread, 16;"]
        ptx += [*fetch_numbers("$0", "$1", "first"), "cp.async.commit_group;", "cp.async.wait_all;"]
        emit(ptx, mgpu.utils.memref_ptr(rows), mgpu.utils.memref_ptr(numbers))

    fetch(rows_ref, numbers_smem)


def copy_rows(
    key_refs, next_rows_ref, numbers_smem, latent_smem, rope_smem, barriers_smem, *,
    buffer: int, slot, has_next, layer_offset, row_limit, page_scale: int, prefetch: int = 128, ahead: int = 0,
) -> None:  # fmt: skip
    """Start the copy of one tile of rows into a buffer; `wait_rows` waits for its parts.

    The buffers take turns, buffer 0 first.

    Args:
        key_refs: one ref, bfloat16 ``[P, T, 576]`` in global memory, T a power of two.
        next_rows_ref: ``int32[64]`` in global memory, the row numbers of this buffer's next tile.
        numbers_smem: ``int32[2, 2, 64]``, of each buffer two sets of row numbers; the set ``slot`` of this buffer is this
            tile's, the other is for the next.
        latent_smem: bfloat16 ``[64, 512]``, tiled by (8, 64) and swizzled by 128 bytes.
        rope_smem: bfloat16 ``[64, 64]``, the same.
        barriers_smem: see `create_barriers`.
        buffer: 0 or 1.
        slot: int32 scalar, 0 or 1, the same for both buffers in a turn.
        has_next: int32 scalar, 0 where ``next_rows_ref`` may not be read.
        layer_offset: int32 scalar, the layer's first page.
        row_limit: int32 scalar; rows from here on are not read, like those of -1.
        page_scale: pages per slot of the pool.
        prefetch: bytes that the L2 cache fetches around each access, 64, 128 or 256.
        ahead: let the L2 cache fetch the rows of this buffer's next tile already now, so many bytes with an instruction;
            0 does not.
    """
    (pages_ref,) = key_refs
    page_size = pages_ref.shape[1]

    @plgpu.inline_mgpu(arg_types=(_RAW, _RAW, _RAW, _TILED, _TILED, _RAW, *[_SCALAR] * 4))
    def copy(_, *operands):
        refs, scalars = operands[:6], operands[6:]
        emit(["cp.async.wait_group 1;"])  # what was fetched with this buffer's last tile: the row numbers
        mgpu.warpgroup_barrier()
        ptx = _copy_ptx(page_size, page_scale, buffer, prefetch, ahead)
        emit(ptx, *map(mgpu.utils.memref_ptr, refs), *(x.registers.item() for x in scalars))

    copy(
        pages_ref, next_rows_ref, numbers_smem.at[buffer], latent_smem, rope_smem, barriers_smem,
        slot, has_next, layer_offset, row_limit,
    )  # fmt: skip


def _copy_ptx(page_size: int, page_scale: int, buffer: int, prefetch: int, ahead: int) -> list[str]:
    """Operands: pages, next rows, numbers, latent, rope, barriers, slot, has_next, layer offset, row limit."""
    row_bytes = (LATENT + ROPE) * 2
    ptx = [
        ".reg .pred first, valid;",
        ".reg .b32 thread, chunk, group, numbers, to, place, tile, page, offset, next;",
        ".reg .b32 row<4>, size<4>, latent<4>, rope<4>;",
        ".reg .b64 from, base, from<4>;",
        "mov.u32 thread, %tid.x;",
        "and.b32 thread, thread, 127;",
        "and.b32 chunk, thread, 7;",
        "shr.u32 group, thread, 3;",
        *(read_next_number("$1", "$7") if ahead else []),
        # row numbers 4 * group .. 4 * group + 3 of this tile
        f"mad.lo.u32 numbers, $6, {TILE * 4}, $2;",
        "shl.b32 to, group, 4;",
        "add.u32 numbers, numbers, to;",
        "ld.shared.v4.b32 {row0, row1, row2, row3}, [numbers];",
        "mul.wide.u32 base, chunk, 16;",
        "add.u64 base, base, $0;",
        "and.b32 group, group, 1;",
        "shl.b32 group, group, 2;",  # the thread's first row within its tile of 8 rows: 0 or 4
        "shr.u32 tile, thread, 4;",  # its tile of 8 rows
    ]
    for i in range(4):
        ptx += [
            *row_address(f"row{i}", page_size, page_scale, "$8", "$9"),
            f"selp.b32 size{i}, {_CHUNK}, 0, valid;",
            f"mad.wide.u32 from{i}, page, {row_bytes}, base;",
            f"add.u32 place, group, {i};",
            "xor.b32 to, chunk, place;",
            "shl.b32 to, to, 4;",
            f"mad.lo.u32 place, place, {_SEGMENT}, to;",
            f"mad.lo.u32 latent{i}, tile, {LATENT // 64 * _SMEM_TILE}, place;",
            f"add.u32 latent{i}, latent{i}, $3;",
            f"mad.lo.u32 rope{i}, tile, {_SMEM_TILE}, place;",
            f"add.u32 rope{i}, rope{i}, $4;",
        ]
    copy = f"cp.async.cg.shared.global.L2::{prefetch}B"
    for part, (begin, end) in enumerate(PARTS):
        for i in range(4):
            if part == 0:
                ptx += [f"{copy} [rope{i}], [from{i}+{LATENT * 2}], {_CHUNK}, size{i};"]
            ptx += [
                f"{copy} [latent{i}+{j * _SMEM_TILE}], [from{i}+{j * _SEGMENT}], {_CHUNK}, size{i};"
                for j in range(begin // 64, end // 64)
            ]
        ptx += [f"cp.async.mbarrier.arrive.noinc.shared.b64 {barrier_address('$5', buffer, part)};"]
    if ahead:
        ptx += row_address("next", page_size, page_scale, "$8", "$9")
        ptx += fetch_ahead("$0", row_bytes, ahead)
    return ptx + fetch_next("$1", "$2", "$6", "$7")


def fetch_next(next_rows: str, numbers: str, slot: str, has_next: str) -> list[str]:
    """PTX that starts the copy of the next tile's row numbers, if there is one, and closes a group of copies."""
    return [
        "setp.lt.u32 first, thread, 16;",
        f"setp.ne.and.b32 first, {has_next}, 0, first;",
        f"xor.b32 numbers, {slot}, 1;",
        f"mad.lo.u32 numbers, numbers, {TILE * 4}, {numbers};",
        *fetch_numbers(next_rows, "numbers", "first"),
        "cp.async.commit_group;",
    ]


def row_address(row: str, page_size: int, page_scale: int, layer_offset: str, limit: str) -> list[str]:
    """PTX that sets ``valid`` and ``page``, the number of the row in the pool (0 if not valid); uses ``offset``."""
    return [
        f"setp.lt.u32 valid, {row}, {limit};",  # -1 is the largest unsigned number
        f"shr.u32 page, {row}, {page_size.bit_length() - 1};",
        f"mad.lo.u32 page, page, {page_scale}, {layer_offset};",
        f"and.b32 offset, {row}, {page_size - 1};",
        f"mad.lo.u32 page, page, {page_size}, offset;",
        "selp.b32 page, page, 0, valid;",
    ]


def read_next_number(next_rows: str, has_next: str) -> list[str]:
    """PTX that reads one row number of the next tile into ``next`` of every thread, two threads a row; -1 without a tile."""
    return [
        "mov.b32 next, -1;",
        f"setp.ne.u32 first, {has_next}, 0;",
        "shr.u32 to, thread, 1;",
        "mul.wide.u32 from, to, 4;",
        f"add.u64 from, from, {next_rows};",
        "@first ld.global.nc.b32 next, [from];",
    ]


def fetch_ahead(array: str, row_bytes: int, step: int) -> list[str]:
    """PTX that lets the L2 cache fetch row ``page`` of an array, where ``valid``: two threads a row, nobody waits.

    A bulk prefetch would need one instruction a row, but the copy engine takes longer for so many than they save.
    """
    half = min(max(row_bytes // 2, step), row_bytes)
    return [
        "and.b32 to, thread, 1;",
        f"mul.wide.u32 from, page, {row_bytes};",
        f"add.u64 from, from, {array};",
        f"mad.wide.u32 from, to, {row_bytes - half}, from;",
        *[f"@valid prefetch.global.L2 [from+{i}];" for i in range(0, half, step)],
    ]


def barrier_address(base: str, buffer: int, part: int) -> str:
    """PTX address of the barrier of one buffer's part."""
    return f"[{base}+{(buffer * _MOST_PARTS + part) * _BARRIER_BYTES}]"


def fetch_numbers(source: str, target: str, predicate: str) -> list[str]:
    """Threads 0..15 copy 64 row numbers; uses the registers thread, to and from."""
    return [
        "mul.wide.u32 from, thread, 16;",
        f"add.u64 from, from, {source};",
        "shl.b32 to, thread, 4;",
        f"add.u32 to, to, {target};",
        f"@{predicate} cp.async.cg.shared.global [to], [from], {_CHUNK};",
    ]


def emit(ptx: list[str], *operands) -> None:
    """Put PTX lines into the kernel as one block with registers of its own."""
    mgpu.utils.inline_ptx("{\n" + "\n".join(ptx) + "\n}", *operands, has_side_effects=True)
