"""The steps of the FP4 scoring kernel that Pallas has no words for, on the card and in the interpreter.

A `Steps` says how a warpgroup takes a tile's words from shared memory into registers, how it expands them to e4m3, how it
multiplies them with queries, and whether one of its threads met an exception. On the card the words never go back to shared
memory: each thread loads 16 bytes of two keys, which are all codes of one group, and what it expands them to is its share of
the product's first factor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from dsa_jax import quant
from dsa_jax.pallas.paged_logits_fp4_codes import WORDS, expand, tables
from dsa_jax.pallas.paged_logits_plan import TILE
from dsa_jax.quant.fp4 import GROUPS

HEAD_DIM = 128
PER_KEY = plgpu.Layout.WGMMA.reduce(1)
WORD_LAYOUT = plgpu.Layout.WGMMA_8BIT
"""Layout of words ``[64, 16]`` and of codes ``[64, 128]``: lane l has places ``4 (l % 4)`` and on of every 16."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """See the module.

    Attributes:
        load: ``(ref of a tile's words) -> int32[64, 16]``.
        expand: ``(words, drop int32[64] or None for zeros) -> codes``, the first factor of a product.
        multiply: ``(functions that expand, ref of queries [columns, 128]) -> float32[64, columns]`` of each; one expands
            while the product of the one before runs.
        any_of: ``int32[64] -> int32``, 1 if one of them is not 0, the same for all threads.
    """

    load: Callable[[Any], Any]
    expand: Callable[[Any, Any], Any]
    multiply: Callable[[Any, Any], Any]
    any_of: Callable[[Any], Any]


def on_card() -> Steps:
    """The steps as instructions of Hopper."""
    load: Any = _load  # inline code takes the launch context as one argument more than its callers give
    any_of: Any = _any_of
    return Steps(load, _expand, _multiply, any_of)


def interpreted() -> Steps:
    """The same arithmetic for Pallas' interpreter."""

    def load(ref):
        return ref[...].reshape(TILE, WORDS)

    def expand_words(words, drop):
        word = lax.bitcast_convert_type(words, jnp.uint32).reshape(TILE, GROUPS, GROUPS)
        drop = 0 if drop is None else lax.bitcast_convert_type(drop, jnp.uint32)[:, None]
        group = jnp.arange(GROUPS, dtype=jnp.uint32)[None, :]
        table = tables(drop, group, _permute_arrays)
        halves = [jnp.stack(expand(word[:, :, t], table, _permute_arrays), axis=1) for t in range(GROUPS)]
        codes = lax.bitcast_convert_type(jnp.stack(halves, axis=1), jnp.uint8)
        return quant.decode_e4m3(codes.reshape(TILE, HEAD_DIM))

    def multiply(expand, queries):
        second = queries[...].astype(jnp.float32).T
        return [jnp.dot(codes(), second, precision=lax.Precision.HIGHEST) for codes in expand]

    return Steps(load, expand_words, multiply, lambda x: jnp.any(x != 0).astype(jnp.int32))


def _permute_arrays(a, b, selector) -> Array:
    """PRMT on ``uint32`` arrays, for selectors whose nibbles are 0 to 7."""
    a, b, selector = (jnp.asarray(x, jnp.uint32) for x in (a, b, selector))
    result = jnp.zeros((), jnp.uint32)
    for i in range(4):
        nibble = (selector >> (4 * i)) & 0xF
        source = jnp.where(nibble < 4, *jnp.broadcast_arrays(a, b))
        result = result | (((source >> (8 * (nibble & 3))) & 0xFF) << (8 * i))
    return result


@plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(),),
    return_type=plgpu.ShapeDtypeStruct((TILE, WORDS), jnp.int32, layout=WORD_LAYOUT),
)
def _load(_, ref):
    """Eight lanes in a row read 128 bytes in a row, so no two of them meet in a bank."""
    layout = WORD_LAYOUT.to_mgpu()
    i32 = ir.IntegerType.get_signless(32)
    line = ir.VectorType.get((4,), i32)
    thread = _Word(mgpu.utils.thread_idx()) & 127
    # A warp has 16 keys: lane l the 16 bytes l % 4 of keys l // 4 and l // 4 + 8.
    place = ((thread >> 5) * 16 + ((thread >> 2) & 7)) * 4 + (thread & 3)
    start = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [place.value], line)
    later = mgpu.utils.getelementptr(start, [8 * 4], line)
    lines = [llvm.load(line, pointer, alignment=16) for pointer in (start, later)]
    registers = np.array(lines, dtype=object).reshape(layout.registers_shape((TILE, WORDS)))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)


def _expand(words, drop):
    distances = () if drop is None else (drop,)

    @plgpu.inline_mgpu(
        arg_types=(WORD_LAYOUT, *(PER_KEY for _ in distances)),
        return_type=plgpu.ShapeDtypeStruct((TILE, HEAD_DIM), jnp.float8_e4m3fn, layout=WORD_LAYOUT),
    )
    def run(_, words, *distances):
        layout = WORD_LAYOUT.to_mgpu()
        packed = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
        four = ir.VectorType.get((4,), ir.Float8E4M3FNType.get())
        group = _Word(mgpu.utils.thread_idx()) & 3
        # Sixteen columns after sixteen columns, in each the thread's first key and its second.
        registers = np.empty((HEAD_DIM // 16, 2), dtype=object)
        for key, line in enumerate(words.registers.flat):
            distance = _extract(distances[0].registers.flat[key], 0) if distances else _Word.of(0)
            table = tables(distance, group, _permute)
            for t in range(GROUPS):
                for half, codes in enumerate(expand(_extract(line, t), table, _permute)):
                    register = vector.bitcast(four, vector.broadcast(packed, codes.value))
                    registers[2 * t + half, key] = register
        registers = registers.reshape(layout.registers_shape((TILE, HEAD_DIM)))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return run(words, *distances)


def _multiply(expand, queries):
    def product(*accumulators):
        for accumulator, codes in zip(accumulators, expand, strict=True):
            plgpu.wgmma(accumulator, codes(), queries.transpose((1, 0)))
        later = range(len(accumulators) - 1, -1, -1)
        return [plgpu.wgmma_accumulator_load(a, wait_n=n) for a, n in zip(accumulators, later, strict=True)]

    return pl.run_scoped(product, *(plgpu.ACC((TILE, queries.shape[0]), jnp.float32) for _ in expand))


@plgpu.inline_mgpu(
    arg_types=(PER_KEY,),
    return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(())),
)
def _any_of(_, flags):
    first, second = (_extract(register, 0) for register in flags.registers.flat)
    i1, i32 = ir.IntegerType.get_signless(1), ir.IntegerType.get_signless(32)
    mine = arith.cmpi(arith.CmpIPredicate.ne, (first | second).value, _Word.of(0).value)
    # The barrier of the warpgroup's own that Mosaic uses as well.
    barrier = mgpu.utils.warpgroup_barrier_idx(sync=False)
    found = mgpu.utils.inline_ptx(
        "bar.red.or.pred $0, $1, 128, $2;",
        barrier,
        mine,
        result_types=i1,
        has_side_effects=True,
        convergent=True,
    )
    return mgpu.FragmentedArray.splat(arith.extui(i32, found), (), is_signed=True)


@dataclasses.dataclass(frozen=True)
class _Word:
    """A 32-bit register with Python's operators, unsigned."""

    value: ir.Value

    @classmethod
    def of(cls, x) -> _Word:
        if isinstance(x, _Word):
            return x
        i32, x = ir.IntegerType.get_signless(32), int(x)
        return cls(arith.constant(i32, ir.IntegerAttr.get(i32, x - (1 << 32) if x >= 1 << 31 else x)))

    def __and__(self, other) -> _Word:
        return _Word(arith.andi(self.value, _Word.of(other).value))

    def __or__(self, other) -> _Word:
        return _Word(arith.ori(self.value, _Word.of(other).value))

    def __lshift__(self, other) -> _Word:
        return _Word(arith.shli(self.value, _Word.of(other).value))

    def __rshift__(self, other) -> _Word:
        return _Word(arith.shrui(self.value, _Word.of(other).value))

    def __add__(self, other) -> _Word:
        return _Word(arith.addi(self.value, _Word.of(other).value))

    def __rsub__(self, other) -> _Word:
        return _Word(arith.subi(_Word.of(other).value, self.value))

    def __mul__(self, other) -> _Word:
        return _Word(arith.muli(self.value, _Word.of(other).value))


def _extract(register: ir.Value, i: int) -> _Word:
    return _Word(vector.extract(register, dynamic_position=[], static_position=[i]))


def _permute(a, b, selector) -> _Word:
    operands = [_Word.of(x).value for x in (a, b, selector)]
    i32 = ir.IntegerType.get_signless(32)
    return _Word(mgpu.utils.inline_ptx("prmt.b32 $0, $1, $2, $3;", *operands, result_types=i32))
