"""A machine for `topk_cluster` in NumPy: all threads of all clusters in lockstep, so that a program runs without a card.

Every number is a uint32`[blocks, threads]`, over the blocks of all clusters. A branch runs for all threads and takes effect
in those that it is for; a loop runs until the last thread leaves it. A missing barrier changes no result of lockstep, so
accesses to shared memory are logged (topk_races.py), and a program in which two of them race is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dsa_jax.pallas import topk_machine, topk_races

_OPERATORS = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "&": operator.and_,
    "|": operator.or_, "^": operator.xor, "<<": operator.lshift, ">>": operator.rshift, "<": operator.lt,
    "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
UNWRITTEN = -7
"""What stands in a result where the program wrote nothing."""
_POISON = 0xDEADBEEF  # in shared memory: a word must be written before it counts


class Number(topk_machine.Number):
    """A number as an array."""

    def __init__(self, value: np.ndarray):
        self.value = value

    def operate(self, symbol: str, a: Number | int, b: Number | int) -> Number | Flag:
        """The result of an operator, a number or for comparisons a flag."""
        value = _OPERATORS[symbol](_value(a), _value(b))
        return Flag(value) if value.dtype == bool else Number(value)


class Flag(topk_machine.Flag):
    """A flag as an array."""

    def __init__(self, value: np.ndarray):
        self.value = value

    def operate(self, symbol: str, *others: Flag) -> Flag:
        """The result of `&`, `|` or `~`."""
        if symbol == "~":
            return Flag(~self.value)
        return Flag(_OPERATORS[symbol](self.value, others[0].value))


def _value(x: Number | int) -> np.ndarray:
    """The array of a number; an array of one, which wraps around in silence, of an int."""
    return x.value if isinstance(x, Number) else np.full((1, 1), x, np.uint32)


class Variable:
    """A number that is written more than once."""

    def __init__(self, machine: LockstepMachine, value: np.ndarray):
        self._machine, self._held = machine, value

    def get(self) -> Number:
        """What it holds now."""
        return Number(self._held)

    def set(self, value: Number | int, where: Flag | None = None) -> None:
        """Overwrite it, in the threads of `where`."""
        self._held = np.where(self._machine.active(where), _value(value), self._held)

    def increment(self, where: Flag) -> None:
        """Add one in the threads of `where`."""
        self.set(self.get() + 1, where)


class Pointer:
    """An index into a flat array."""

    def __init__(self, array: str, index: np.ndarray):
        self.array, self.index = array, index


class LockstepMachine:
    """Runs a program for all clusters; see `topk_cluster.Machine`.

    Args:
        threads: threads of a block.
        cluster: blocks of a cluster.
        programs: clusters.
        arrays: flat arrays by name.
        sizes: words of shared memory by name.
    """

    def __init__(
        self,
        *,
        threads: int,
        cluster: int,
        programs: int,
        arrays: dict[str, np.ndarray],
        sizes: dict[str, int],
    ):
        self._shape, self._cluster = (programs * cluster, threads), cluster
        block, thread = np.indices(self._shape, np.uint32)
        self._block = block
        self.thread, self.lane, self.warp = Number(thread), Number(thread & 31), Number(thread >> 5)
        self.rank, self.program = Number(block % np.uint32(cluster)), Number(block // np.uint32(cluster))
        self._arrays, self._mask = arrays, np.ones(self._shape, bool)
        self._shared = {name: np.full((len(block), size), _POISON, np.uint32) for name, size in sizes.items()}
        self._number = (block * np.uint32(threads) + thread).astype(np.int64)
        self._log = topk_races.SharedMemoryLog(
            threads=threads, cluster=cluster, blocks=len(block), sizes=sizes
        )

    def active(self, where: Flag | None = None) -> np.ndarray:
        """Threads that a side effect is for."""
        return self._mask if where is None else self._mask & where.value

    def _full(self, x: Number | int) -> np.ndarray:
        return np.broadcast_to(_value(x), self._shape)

    def select(self, flag: Flag, a: Number | int, b: Number | int) -> Number:
        """`a` where the flag is set, else `b`."""
        return Number(np.where(flag.value, _value(a), _value(b)))

    def minimum(self, a: Number | int, b: Number | int) -> Number:
        """The lesser."""
        return Number(np.minimum(_value(a), _value(b)))

    def maximum(self, a: Number | int, b: Number | int) -> Number:
        """The greater."""
        return Number(np.maximum(_value(a), _value(b)))

    def sign(self, a: Number) -> Number:
        """All bits set where the highest is, else 0."""
        return Number((a.value.view(np.int32) >> 31).view(np.uint32))

    def canonical(self, a: Number) -> Number:
        """Bits of an f32, with +0.0 for both zeros and 0x7FFFFFFF for every NaN."""
        zero, nan = a.value == 0x80000000, (a.value & 0x7FFFFFFF) > 0x7F800000
        return Number(np.where(zero, np.uint32(0), np.where(nan, np.uint32(0x7FFFFFFF), a.value)))

    def bits(self, a: Number) -> Number:
        """How many bits are set."""
        return Number(np.bitwise_count(a.value).astype(np.uint32))

    def leading_zeros(self, a: Number) -> Number:
        """Zeros above the highest bit set, 32 for 0."""
        spread = a.value
        for shift in (1, 2, 4, 8, 16):
            spread = spread | spread >> np.uint32(shift)
        return self.bits(Number(~spread))

    def lowest_bit(self, a: Number) -> Number:
        """Place of the lowest bit set."""
        return self.bits(Number(~a.value & (a.value - np.uint32(1))))

    def variable(self, value: Number | int) -> Variable:
        """A new `Variable`."""
        return Variable(self, self._full(value))

    def when(self, flag: Flag, body: Callable[[], None]) -> None:
        """A branch."""
        mask, self._mask = self._mask, self._mask & flag.value
        body()
        self._mask = mask

    def loop(self, condition: Callable[[], Flag], body: Callable[[], None]) -> None:
        """Repeat while a condition holds."""
        mask = self._mask
        while (active := mask & condition().value).any():
            self._mask = active
            body()
        self._mask = mask

    def barrier(self, threads: int) -> None:
        """Nothing but an entry in the log: lockstep."""
        self._log.barrier(self._mask, threads)

    def cluster_barrier(self, several: Flag) -> None:
        """The same: of all blocks of a cluster where there are several, else of a block."""
        self._log.cluster_barrier(self._mask & several.value)
        self._log.barrier(self._mask & ~several.value, self._shape[1])

    def races(self) -> list[str]:
        """What races in the program that has run to its end, in words."""
        return self._log.finish()

    def _by_warp(self, x: np.ndarray) -> np.ndarray:
        return np.broadcast_to(x, self._shape).reshape(self._shape[0], -1, 32)

    def any(self, flag: Flag) -> Flag:
        """Whether a flag is set anywhere in the warp."""
        return Flag(np.repeat(self._by_warp(flag.value).any(axis=2), 32, axis=1))

    def ballot(self, flag: Flag) -> Number:
        """One bit for each lane of the warp."""
        weights = np.uint32(1) << np.arange(32, dtype=np.uint32)
        words = np.where(self._by_warp(flag.value), weights, np.uint32(0)).sum(axis=2, dtype=np.uint32)
        return Number(np.repeat(words, 32, axis=1))

    def plus_lower_lane(self, a: Number, distance: int) -> Number:
        """The own number plus that of the lane that lies lower by a distance, if there is one."""
        lanes = self._by_warp(a.value)
        lower = np.pad(lanes[..., :-distance], ((0, 0), (0, 0), (distance, 0)))
        return Number((lanes + lower).reshape(self._shape))

    def warp_sum(self, a: Number) -> Number:
        """Sum over the warp."""
        return Number(np.repeat(self._by_warp(a.value).sum(axis=2, dtype=np.uint32), 32, axis=1))

    def row_of(self, array: str, row: Number, width: int) -> Pointer:
        """Pointer to a row of an array in global memory."""
        return Pointer(array, row.value.astype(np.int64) * width)

    def at(self, pointer: Pointer, index: Number | int) -> Pointer:
        """Pointer to an entry behind another."""
        return Pointer(pointer.array, pointer.index + _value(index))

    def load(
        self, pointer: Pointer, offset: int = 0, where: Flag | None = None, into: Variable | None = None
    ) -> Number:
        """What lies at a pointer plus an offset; a variable, if given, keeps what it held where nothing is loaded."""
        array, active = self._arrays[pointer.array], self.active(where)
        place = np.broadcast_to(pointer.index + offset, self._shape)[active]
        value = np.zeros(self._shape, np.uint32)
        # An index outside of the array raises here.
        found = array[place]
        value[active] = (found if array.dtype == np.int32 else found.astype(np.float32)).view(np.uint32)
        if into is None:
            return Number(value)
        into.set(Number(value), where)
        return into.get()

    def store(self, pointer: Pointer, value: Number | int, where: Flag | None = None) -> None:
        """Write to global memory."""
        active = self.active(where)
        place = np.broadcast_to(pointer.index, self._shape)[active]
        self._arrays[pointer.array][place] = self._full(value)[active].view(np.int32)

    def read(
        self, array: str, index: Number | int, count: int = 1, where: Flag | None = None
    ) -> list[Number]:
        """Consecutive words of shared memory."""
        return self._read(array, self._block, index, count, where)

    def read_at(
        self, array: str, index: Number | int, rank: int, count: int = 1, where: Flag | None = None
    ) -> list[Number]:
        """The same of another block of the cluster."""
        return self._read(array, self._block_of(rank), index, count, where)

    def _block_of(self, rank: Number | int) -> np.ndarray:
        return self.program.value * np.uint32(self._cluster) + self._full(rank)

    def _read(
        self, array: str, block: np.ndarray, index: Any, count: int, where: Flag | None
    ) -> list[Number]:
        numbers = []
        for i in range(count):
            active, place = self._access(topk_races.READ, array, block, index, i, where)
            value = np.zeros(self._shape, np.uint32)
            value[active] = self._shared[array][place]
            numbers.append(Number(value))
        return numbers

    def _access(
        self, kind: int, array: str, block: np.ndarray, index: Any, offset: int, where: Flag | None
    ) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """Log an access to one word a thread; the threads, and the words' places in the array."""
        active = self.active(where)
        place = block[active], self._full(index + offset)[active]
        self._log.access(kind, array, *place, self._number[active])
        return active, place

    def write(
        self, array: str, index: Number | int, values: Sequence[Number | int], where: Flag | None = None
    ) -> None:
        """Write consecutive words of shared memory."""
        for i, value in enumerate(values):
            active, place = self._access(topk_races.WRITE, array, self._block, index, i, where)
            self._shared[array][place] = self._full(value)[active]

    def clear(self, array: str, index: Number, count: int, stride: int) -> None:
        """Write zeros, a stride apart."""
        for i in range(count):
            self.write(array, index + i * stride, [0])

    def write_at(self, array: str, index: Number | int, rank: Number, value: Number, where: Flag) -> None:
        """Write one word of another block's."""
        block = self._block_of(rank)
        active, place = self._access(topk_races.WRITE, array, block, index, 0, where)
        self._shared[array][place] = self._full(value)[active]

    def increase(
        self, array: str, index: Number | int, by: Number | int, where: Flag | None = None, offset: int = 0
    ) -> None:
        """Add to a word at `index + offset` of shared memory, which other threads may do at the same time."""
        active, place = self._access(topk_races.ADD, array, self._block, index, offset, where)
        np.add.at(self._shared[array], place, self._full(by)[active])


def run(
    build: Callable[[LockstepMachine], None],
    arrays: dict[str, Array],
    *,
    programs: int,
    k: int,
    **machine: Any,
) -> Array:
    """Result of all programs, int32`[programs, k]`, from a callback; `machine` are arguments of `LockstepMachine`.

    Raises:
        RuntimeError: when the callback runs, if threads race for a word of shared memory.
    """
    names = list(arrays)

    def call(*values: Any) -> np.ndarray:
        flat = {name: np.asarray(value).reshape(-1) for name, value in zip(names, values, strict=True)}
        flat["result"] = np.full(programs * k, UNWRITTEN, np.int32)
        lockstep = LockstepMachine(arrays=flat, programs=programs, **machine)
        with np.errstate(all="ignore"):
            build(lockstep)
        if races := lockstep.races():
            raise RuntimeError("topk (Mosaic), in lockstep: threads race. " + "; ".join(races))
        return flat["result"].reshape(programs, k)

    shape = jax.ShapeDtypeStruct((programs, k), jnp.int32)
    return jax.pure_callback(call, shape, *arrays.values(), vmap_method="sequential")
