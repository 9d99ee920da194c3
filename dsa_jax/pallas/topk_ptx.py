"""A machine for `topk_cluster` that writes PTX: the kernel becomes one block of inline assembly.

Numbers live in 32-bit registers, flags in predicate registers. Every operation makes a register of its own, which ptxas
then allocates; only a `Variable` is written twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dsa_jax.pallas import topk_machine

_OPERATORS = {
    "+": "add.u32", "-": "sub.u32", "*": "mul.lo.u32", "//": "div.u32", "&": "and.b32", "|": "or.b32", "^": "xor.b32",
    "<<": "shl.b32", ">>": "shr.u32", "<": "setp.lt.u32", "<=": "setp.le.u32", ">": "setp.gt.u32", ">=": "setp.ge.u32",
    "==": "setp.eq.u32", "!=": "setp.ne.u32",
}  # fmt: skip
_LOGIC = {"&": "and.pred", "|": "or.pred", "~": "not.pred"}
_LETTERS = {"n": "b32", "p": "pred", "a": "b64"}
_ALL_LANES = "0xffffffff"


class Number(topk_machine.Number):
    """A number in a register."""

    def __init__(self, machine: PtxMachine, name: str):
        self.machine, self.name = machine, name

    def operate(self, symbol: str, a: Number | int, b: Number | int) -> Number | Flag:
        """The result of an operator, a number or for comparisons a flag."""
        if symbol == "//" and isinstance(b, int) and b & (b - 1) == 0:
            symbol, b = ">>", b.bit_length() - 1
        op = _OPERATORS[symbol]
        return (self.machine.flag if op.startswith("setp") else self.machine.number)(op, a, b)


class Flag(topk_machine.Flag):
    """A flag in a predicate register."""

    def __init__(self, machine: PtxMachine, name: str):
        self.machine, self.name = machine, name

    def operate(self, symbol: str, *others: Flag) -> Flag:
        """The result of `&`, `|` or `~`."""
        return self.machine.flag(_LOGIC[symbol], self, *others)


class Variable:
    """A register that is written more than once."""

    def __init__(self, machine: PtxMachine, name: str):
        self._machine, self.name = machine, name

    def get(self) -> Number:
        """A copy of what it holds now."""
        return self._machine.number("mov.b32", self.name)

    def set(self, value: Number | int, where: Flag | None = None) -> None:
        """Overwrite it, in the threads of `where`."""
        self._machine.line(f"mov.b32 {self.name}, {text(value)};", where)

    def increment(self, where: Flag) -> None:
        """Add one in the threads of `where`."""
        self._machine.line(f"add.u32 {self.name}, {self.name}, 1;", where)


class Pointer:
    """A 64-bit address in global memory of each thread; what lies there has four bytes."""

    def __init__(self, name: str):
        self.name = name


def text(operand: Number | Flag | int | str) -> str:
    """An operand as PTX writes it."""
    return operand.name if isinstance(operand, (Number, Flag)) else str(operand)


class PtxMachine:
    """Writes the PTX of a program; see `topk_cluster.Machine`."""

    def __init__(
        self, *, threads: int, cluster: int, arrays: dict[str, str], shared: str, sizes: dict[str, int]
    ):
        """Args: `arrays`: PTX operand of each array's address; `shared`: PTX operand; `sizes`: words by name."""
        self._lines: list[str] = []
        self._counts = dict.fromkeys((*_LETTERS, "l"), 0)
        self._threads = threads
        self._base, self._begins = shared, {}
        begin = 0
        for name, size in sizes.items():
            self._begins[name] = begin * 4
            begin += -(-size // 4) * 4
        self._arrays = arrays
        self.thread = self.number("mov.u32", "%tid.x")
        self.lane, self.warp = self.thread & 31, self.thread >> 5
        block = self.number("mov.u32", "%ctaid.x")
        if cluster > 1:
            self.rank, self.program = self.number("mov.u32", "%cluster_ctarank"), block // cluster
        else:
            self.rank, self.program = self.number("mov.u32", 0), block

    def ptx(self) -> str:
        """The whole block."""
        registers = [
            f".reg .{kind} %{letter}t<{max(self._counts[letter], 1)}>;" for letter, kind in _LETTERS.items()
        ]
        return "\n".join(["{", *registers, *self._lines, "}"])

    # Instructions

    def _name(self, letter: str) -> str:
        self._counts[letter] += 1
        return f"%{letter}t{self._counts[letter] - 1}" if letter != "l" else f"L{self._counts[letter] - 1}"

    def line(self, instruction: str, where: Flag | None = None) -> None:
        """Append an instruction, for the threads of `where`."""
        self._lines.append(f"@{where.name} {instruction}" if where is not None else instruction)

    def number(self, op: str, *operands, where: Flag | None = None) -> Number:
        """A new number."""
        name = self._name("n")
        self.line(f"{op} {', '.join([name, *map(text, operands)])};", where)
        return Number(self, name)

    def flag(self, op: str, *operands) -> Flag:
        """A new flag."""
        name = self._name("p")
        self.line(f"{op} {', '.join([name, *map(text, operands)])};")
        return Flag(self, name)

    def select(self, flag: Flag, a: Number | int, b: Number | int) -> Number:
        """`a` where the flag is set, else `b`."""
        return self.number("selp.b32", a, b, flag)

    def minimum(self, a, b) -> Number:
        """The lesser."""
        return self.number("min.u32", a, b)

    def maximum(self, a, b) -> Number:
        """The greater."""
        return self.number("max.u32", a, b)

    def sign(self, a: Number) -> Number:
        """All bits set where the highest is, else 0."""
        return self.number("shr.s32", a, 31)

    def canonical(self, a: Number) -> Number:
        """Bits of an f32, with +0.0 for both zeros and 0x7FFFFFFF for every NaN."""
        return self.number("add.f32", a, "0f00000000")

    def bits(self, a: Number) -> Number:
        """How many bits are set."""
        return self.number("popc.b32", a)

    def leading_zeros(self, a: Number) -> Number:
        """Zeros above the highest bit set, 32 for 0."""
        return self.number("clz.b32", a)

    def lowest_bit(self, a: Number) -> Number:
        """Place of the lowest bit set."""
        return self.number("clz.b32", self.number("brev.b32", a))

    def variable(self, value: Number | int) -> Variable:
        """A new `Variable`."""
        name = self._name("n")
        self.line(f"mov.b32 {name}, {text(value)};")
        return Variable(self, name)

    # Control

    def when(self, flag: Flag, body: Callable[[], None]) -> None:
        """A branch."""
        label = self._name("l")
        self.line(f"@!{flag.name} bra {label};")
        body()
        self.line(f"{label}:")

    def loop(self, condition: Callable[[], Flag], body: Callable[[], None]) -> None:
        """Repeat while a condition holds."""
        again, end = self._name("l"), self._name("l")
        self.line(f"{again}:")
        self.line(f"@!{condition().name} bra {end};")
        body()
        self.line(f"bra {again};")
        self.line(f"{end}:")

    def barrier(self, threads: int) -> None:
        """Wait for the first threads of the block, the only ones that may be here."""
        self.line("bar.sync 0;" if threads == self._threads else f"bar.sync 1, {threads};")

    def cluster_barrier(self, several: Flag) -> None:
        """Wait for the cluster's blocks that have not ended; for the own one alone unless there are several."""
        alone, end = self._name("l"), self._name("l")
        self.line(f"@!{several.name} bra {alone};")
        self.line("barrier.cluster.arrive.release.aligned;")
        self.line("barrier.cluster.wait.acquire.aligned;")
        self.line(f"bra {end};")
        self.line(f"{alone}:")
        self.barrier(self._threads)
        self.line(f"{end}:")

    # Warps

    def any(self, flag: Flag) -> Flag:
        """Whether a flag is set anywhere in the warp."""
        return self.flag("vote.sync.any.pred", flag, _ALL_LANES)

    def ballot(self, flag: Flag) -> Number:
        """One bit for each lane of the warp."""
        return self.number("vote.sync.ballot.b32", flag, _ALL_LANES)

    def plus_lower_lane(self, a: Number, distance: int) -> Number:
        """The own number plus that of the lane that lies lower by a distance, if there is one."""
        total, exists = Number(self, self._name("n")), Flag(self, self._name("p"))
        # The shuffle's own flag: a comparison of the lane would be kept for the next sum, and flags are few.
        self.line(f"shfl.sync.up.b32 {total.name}|{exists.name}, {a.name}, {distance}, 0, {_ALL_LANES};")
        self.line(f"add.u32 {total.name}, {total.name}, {a.name};", exists)
        return total

    def warp_sum(self, a: Number) -> Number:
        """Sum over the warp."""
        return self.number("redux.sync.add.u32", a, _ALL_LANES)

    # Global memory

    def row_of(self, array: str, row: Number, width: int) -> Pointer:
        """Pointer to a row of an array in global memory."""
        offset, address = self._name("a"), self._name("a")
        pointer = Pointer(address)
        self.line(f"mul.wide.u32 {offset}, {row.name}, {width};")
        self.line(f"mad.lo.u64 {address}, {offset}, 4, {self._arrays[array]};")
        return pointer

    def at(self, pointer: Pointer, index: Number | int) -> Pointer:
        """Pointer to an entry behind another."""
        address = self._name("a")
        if isinstance(index, int):
            self.line(f"add.u64 {address}, {pointer.name}, {4 * index};")
        else:
            self.line(f"mad.wide.u32 {address}, {index.name}, 4, {pointer.name};")
        return Pointer(address)

    def load(
        self, pointer: Pointer, offset: int = 0, where: Flag | None = None, into: Variable | None = None
    ) -> Number:
        """What lies at a pointer plus an offset; a variable, if given, keeps what it held where nothing is loaded."""
        name = into.name if into else self._name("n")
        place = f"[{pointer.name}+{4 * offset}]"
        if where is not None and into is None:
            self.line(f"mov.b32 {name}, 0;")
        self.line(f"ld.global.b32 {name}, {place};", where)
        return Number(self, name)

    def store(self, pointer: Pointer, value: Number, where: Flag | None = None) -> None:
        """Write to global memory."""
        self.line(f"st.global.b32 [{pointer.name}], {text(value)};", where)

    # Shared memory

    def _place(self, array: str, index: Number | int) -> tuple[str, int]:
        """Address register, or the base's operand, and a constant to add."""
        begin = self._begins[array]
        if isinstance(index, int):
            return self._base, begin + 4 * index
        return self.number("mad.lo.u32", index, 4, self._base).name, begin

    def read(
        self, array: str, index: Number | int, count: int = 1, where: Flag | None = None
    ) -> list[Number]:
        """Consecutive words of shared memory."""
        base, offset = self._place(array, index)
        return self._read("ld.shared", base, offset, count, where)

    def read_at(self, array: str, index: Number | int, rank: int, count: int = 1, where: Flag | None = None):
        """The same of another block of the cluster."""
        base, offset = self._place(array, index)
        remote = self.number("mapa.shared::cluster.u32", base, rank).name
        return self._read("ld.shared::cluster", remote, offset, count, where)

    def _read(self, op: str, base: str, offset: int, count: int, where: Flag | None) -> list[Number]:
        names = [self._name("n") for _ in range(count)]
        if where is not None:
            for name in names:
                self.line(f"mov.b32 {name}, 0;")
        for begin in range(0, count, 4):
            part = names[begin : begin + 4]
            vector = {1: "", 2: ".v2", 4: ".v4"}[len(part)]
            target = part[0] if len(part) == 1 else "{" + ", ".join(part) + "}"
            self.line(f"{op}{vector}.b32 {target}, [{base}+{offset + 4 * begin}];", where)
        return [Number(self, name) for name in names]

    def write(
        self, array: str, index: Number | int, values: Sequence[Number | int], where: Flag | None = None
    ) -> None:
        """Write consecutive words of shared memory."""
        base, offset = self._place(array, index)
        if len(values) == 4:
            self.line(f"st.shared.v4.b32 [{base}+{offset}], {{{', '.join(map(text, values))}}};", where)
            return
        for i, value in enumerate(values):
            self.line(f"st.shared.b32 [{base}+{offset + 4 * i}], {text(value)};", where)

    def clear(self, array: str, index: Number, count: int, stride: int) -> None:
        """Write zeros, a stride apart."""
        for i in range(count):
            self.write(array, index + i * stride, [0])

    def write_at(self, array: str, index: Number | int, rank: Number, value: Number, where: Flag) -> None:
        """Write one word of another block's."""
        base, offset = self._place(array, index)
        remote = self.number("mapa.shared::cluster.u32", base, rank).name
        self.line(f"st.shared::cluster.b32 [{remote}+{offset}], {value.name};", where)

    def increase(
        self, array: str, index: Number | int, by: Number | int, where: Flag | None = None, offset: int = 0
    ) -> None:
        """Add to a word at `index + offset` of shared memory, which other threads may do at the same time."""
        base, begin = self._place(array, index)
        self.line(f"red.shared.add.u32 [{base}+{begin + 4 * offset}], {text(by)};", where)
