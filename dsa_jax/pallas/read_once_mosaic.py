"""A cache hint for arrays that a Mosaic GPU kernel copies to shared memory once and nobody reads again.

Keys stream through the L2 cache and push out the scores written beside them, which then cost a trip to memory each way.
TMA takes a hint with every copy, but Pallas has no word for it. The launch context, which writes a kernel's copies, is an
object of that kernel alone: its method is wrapped there, and the hint added to the instruction that it has just written.

A hint cannot change a result. Under a version of JAX that writes its copies in another way there is none, and
``tests/test_compile_read_once.py`` fails.
"""

from __future__ import annotations

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jaxlib.mlir import ir

FIRST_OUT = 0x12F << 52
"""What ``createpolicy.fractional.L2::evict_first`` gives for the fraction 1."""
_COPY, _ASSEMBLY = "nvvm.cp.async.bulk.tensor.shared.cluster.global", "llvm.inline_asm"
"""The operation of a copy under JAX 0.11, and the one that holds its PTX since 0.12."""
_ARRIVES = "mbarrier::complete_tx::bytes"


def read_once(*refs) -> None:
    """Ask the L2 cache to give up first what this kernel copies from some arrays in global memory.

    Call it once, anywhere in the body. Arrays are told apart by shape and type: of two alike, both get the hint.

    Args:
        refs: of the arrays.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
    def hint(context, *arrays):
        types, copy = [array.type for array in arrays], context.async_copy

        def copy_with_hint(*, src_ref, **options):
            copy(src_ref=src_ref, **options)
            if src_ref.type in types:
                _hint_last_copy()

        context.async_copy = copy_with_hint

    hint(*refs)


def _hint_last_copy() -> None:
    """Give the last copy of the current block the hint."""
    for found in reversed(list(ir.InsertionPoint.current.block.operations)):
        if found.operation.name == _COPY:
            _write_again(found)
            return
        if found.operation.name == _ASSEMBLY and _ARRIVES in (ptx := _ptx(found)):
            call = ptx.replace(_ARRIVES, _ARRIVES + ".L2::cache_hint").removesuffix(";")
            ptx = f"{{ .reg .b64 policy; mov.b64 policy, {FIRST_OUT}; {call}, policy; }}"
            found.attributes["asm_string"] = ir.StringAttr.get(ptx)
            return


def _ptx(assembly: Any) -> str:
    return ir.StringAttr(assembly.attributes["asm_string"]).value


def _write_again(found: Any) -> None:
    """An operation cannot be given an operand: a new one takes its place."""
    copy = found.opview
    with ir.InsertionPoint(found):
        i64 = mgpu.utils.dtype_to_ir_type(np.dtype(np.int64))
        type(copy)(
            copy.dstMem,
            copy.tmaDescriptor,
            list(copy.coordinates),
            copy.mbar,
            list(copy.im2colOffsets),
            multicastMask=copy.multicastMask,
            l2CacheHint=mgpu.utils.c(FIRST_OUT, i64),
            predicate=copy.predicate,
        )
    found.operation.erase()
