"""What the top-k program of topk_cluster.py is written for: threads with 32-bit numbers, flags and shared memory.

`topk_ptx` writes such a program as PTX, `topk_lockstep` runs it in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Number:
    """An unsigned 32-bit number of each thread; the other operand may be an int."""

    __hash__ = None  # type: ignore[assignment]

    def operate(self, symbol: str, a: Any, b: Any) -> Any:
        """The result of an operator, a number or for comparisons a flag."""
        raise NotImplementedError

    def __add__(self, other):
        return self.operate("+", self, other)

    def __sub__(self, other):
        return self.operate("-", self, other)

    def __rsub__(self, other):
        return self.operate("-", other, self)

    def __mul__(self, other):
        return self.operate("*", self, other)

    def __floordiv__(self, other):
        return self.operate("//", self, other)

    def __rfloordiv__(self, other):
        return self.operate("//", other, self)

    def __and__(self, other):
        return self.operate("&", self, other)

    def __or__(self, other):
        return self.operate("|", self, other)

    def __xor__(self, other):
        return self.operate("^", self, other)

    def __lshift__(self, other):
        return self.operate("<<", self, other)

    def __rlshift__(self, other):
        return self.operate("<<", other, self)

    def __rshift__(self, other):
        return self.operate(">>", self, other)

    def __lt__(self, other):
        return self.operate("<", self, other)

    def __le__(self, other):
        return self.operate("<=", self, other)

    def __gt__(self, other):
        return self.operate(">", self, other)

    def __ge__(self, other):
        return self.operate(">=", self, other)

    def __eq__(self, other):
        return self.operate("==", self, other)

    def __ne__(self, other):
        return self.operate("!=", self, other)

    __radd__, __rmul__ = __add__, __mul__


class Flag:
    """A bool of each thread."""

    def operate(self, symbol: str, *others: Any) -> Any:
        """The result of `&`, `|` or `~`."""
        raise NotImplementedError

    def __and__(self, other):
        return self.operate("&", other)

    def __or__(self, other):
        return self.operate("|", other)

    def __invert__(self):
        return self.operate("~")


class Variable(Protocol):
    """A number that is written more than once."""

    def get(self) -> Any:
        """What it holds now."""
        ...

    def set(self, value: Any, where: Any = None) -> None:
        """Overwrite it, in the threads of `where`."""
        ...

    def increment(self, where: Any) -> None:
        """Add one in the threads of `where`."""
        ...


class Machine(Protocol):
    """Operations of a program.

    `where` limits an effect to the threads of a flag; what a masked load or read leaves out is 0. Collective operations
    need all threads of a warp, barriers all of a block.
    """

    thread: Any
    """Number of the thread in its block; `lane` in its warp, `warp` of the warp."""
    lane: Any
    warp: Any
    rank: Any
    """Number of the block in its cluster."""
    program: Any
    """Number of the cluster."""

    def select(self, flag: Any, a: Any, b: Any) -> Any:
        """`a` where the flag is set, else `b`."""
        ...

    def minimum(self, a: Any, b: Any) -> Any:
        """The lesser."""
        ...

    def maximum(self, a: Any, b: Any) -> Any:
        """The greater."""
        ...

    def sign(self, a: Any) -> Any:
        """All bits set where the highest is, else 0."""
        ...

    def canonical(self, a: Any) -> Any:
        """Bits of an f32, with +0.0 for both zeros and 0x7FFFFFFF for every NaN."""
        ...

    def bits(self, a: Any) -> Any:
        """How many bits are set."""
        ...

    def leading_zeros(self, a: Any) -> Any:
        """Zeros above the highest bit set, 32 for 0."""
        ...

    def lowest_bit(self, a: Any) -> Any:
        """Place of the lowest bit set."""
        ...

    def variable(self, value: Any) -> Any:
        """A new `Variable`."""
        ...

    def when(self, flag: Any, body: Callable[[], None]) -> None:
        """A branch."""
        ...

    def loop(self, condition: Callable[[], Any], body: Callable[[], None]) -> None:
        """Repeat while a condition holds."""
        ...

    def barrier(self, threads: int) -> None:
        """Wait for the first threads of the block, the only ones that may be here."""
        ...

    def cluster_barrier(self, several: Any) -> None:
        """Wait for the cluster's blocks that have not ended; for the own one alone unless there are several."""
        ...

    def any(self, flag: Any) -> Any:
        """Whether a flag is set anywhere in the warp."""
        ...

    def ballot(self, flag: Any) -> Any:
        """One bit for each lane of the warp."""
        ...

    def plus_lower_lane(self, a: Any, distance: int) -> Any:
        """The own number plus that of the lane that lies lower by a distance, if there is one."""
        ...

    def warp_sum(self, a: Any) -> Any:
        """Sum over the warp."""
        ...

    def row_of(self, array: str, row: Any, width: int) -> Any:
        """Pointer to a row of an array in global memory."""
        ...

    def at(self, pointer: Any, index: Any) -> Any:
        """Pointer to an entry behind another."""
        ...

    def load(self, pointer: Any, offset: int = 0, where: Any = None, into: Any = None) -> Any:
        """What lies at a pointer plus an offset; a variable, if given, keeps what it held where nothing is loaded."""
        ...

    def store(self, pointer: Any, value: Any, where: Any = None) -> None:
        """Write to global memory."""
        ...

    def read(self, array: str, index: Any, count: int = 1, where: Any = None) -> list[Any]:
        """Consecutive words of shared memory."""
        ...

    def read_at(self, array: str, index: Any, rank: int, count: int = 1, where: Any = None) -> list[Any]:
        """The same of another block of the cluster."""
        ...

    def write(self, array: str, index: Any, values: Sequence[Any], where: Any = None) -> None:
        """Write consecutive words of shared memory."""
        ...

    def write_at(self, array: str, index: Any, rank: Any, value: Any, where: Any) -> None:
        """Write one word of another block's."""
        ...

    def clear(self, array: str, index: Any, count: int, stride: int) -> None:
        """Write zeros, a stride apart."""
        ...

    def increase(self, array: str, index: Any, by: Any, where: Any = None, offset: int = 0) -> None:
        """Add to a word at `index + offset` of shared memory, which other threads may do at the same time."""
        ...
