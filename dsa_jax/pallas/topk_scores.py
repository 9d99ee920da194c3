"""How a top-k program holds a tile of scores, compares it with thresholds and counts.

A tile is cut into leaves f32`[rows, warps, 32, 4]` of up to 16 scores a thread. The axes are laid out so that a thread
owns the first and the last, a warp the third: column = ((warp * leaves + leaf) * rows + row) * 128 + lane * 4 + i. Loads
are coalesced and four wide, each warp owns a contiguous range of columns, and what a thread selects from a leaf fits into
16 bits.

Thresholds are numbers in ascending order of the floats, `float_key`. `FloatScores` compares floats, with additions and
multiplications where it can, because a multiprocessor does twice as many of those as comparisons; where the hardware
flushes subnormals (XLA on CPU does) they all equal zero. `KeyScores` converts each score to an integer first and is exact
everywhere. In both, +0.0 equals -0.0 and a NaN reaches no threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import triton as pltriton

NEGATIVE_INFINITY = -2139095041
"""`float_key(-inf)`."""
NAN = NEGATIVE_INFINITY - 1
"""The level below -inf on which all NaN lie; every score counts as being at or above it."""
TOP = 2139095041
"""`float_key(inf) + 1`: no score reaches it."""

_LOWEST = -(2**31)
# Added to a key with wrap-around: +inf becomes the greatest int32 and both kinds of NaN fall below -inf.
_SHIFT = 2**31 - TOP
# (x - t) * 2**64 is at least 1 for neighbours x > t if |t| >= 2**-40, and t * 2**64 is finite if |t| <= 2**62.
_GAIN, _SMALL, _LARGE = 2.0**64, 2.0**-40, 2.0**62


class Geometry(NamedTuple):
    """How a tile is spread over a program's threads."""

    warps: int
    leaves: int
    rows: int

    @classmethod
    def of(cls, tile: int, warps: int) -> Geometry:
        """For a tile of a power-of-two size, at least 128 scores a warp."""
        rows = tile // (128 * warps)
        return cls(warps, max(rows // 4, 1), min(rows, 4))

    def columns(self, leaf: int) -> Array:
        """int32`[rows, warps, 32, 4]`, the columns of a leaf."""
        shape = (self.rows, self.warps, 32, 4)
        row, warp, lane, i = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(4))
        return ((warp * self.leaves + leaf) * self.rows + row) * 128 + lane * 4 + i

    def column(self, leaf: int, row: Array, i: int) -> Array:
        """int32`[warps, 32]`, one column of each thread."""
        warp, lane = (lax.broadcasted_iota(jnp.int32, (self.warps, 32), axis) for axis in range(2))
        return ((warp * self.leaves + leaf) * self.rows + row) * 128 + lane * 4 + i


def float_key(x: Array) -> Array:
    """Number of a float in ascending order, as int32; +0.0 is 0 and -0.0 is -1."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def key_float(key: Array) -> Array:
    """The float of a `float_key`."""
    return lax.bitcast_convert_type(jnp.where(key < 0, key ^ jnp.int32(0x7FFFFFFF), key), jnp.float32)


class Extremes(NamedTuple):
    """Keys of the least and the greatest score in a range, and whether there is any."""

    least: Array
    greatest: Array
    exist: Array


class Scores(Protocol):
    """A tile of scores."""

    def counts(self, a: Array, b: Array) -> tuple[Array, Array]:
        """How many scores reach each of two keys in `NEGATIVE_INFINITY` .. `TOP - 1`: int32 scalars."""
        ...

    def masks(self, key: Array) -> list[Array]:
        """Who reaches a key: for each leaf int32`[warps, 32]`, bit `4 * row + i`. The key may be `TOP`."""
        ...

    def compared(self, key: Array) -> list[Array]:
        """The same in less code and more time."""
        ...

    def extremes(self, low: Array, high: Array) -> Extremes:
        """Of the scores with low <= score < high; high may be `TOP`. Zeros count as `float_key(+0.0)`."""
        ...


def _thread_sum(x: Array) -> Array:
    """Sum of what each thread holds of a leaf: `[warps, 32]`."""
    return jnp.sum(jnp.sum(x, axis=3), axis=0)


def _all_sum(x: Array) -> Array:
    """Sum of `[warps, 32]`."""
    return jnp.sum(jnp.sum(x, axis=1), axis=0)


def _extreme(reduce, leaves: Sequence[Array]) -> Array:
    """Maximum or minimum of all leaves."""
    values = [reduce(reduce(leaf, axis=3), axis=0) for leaf in leaves]
    combine = jnp.maximum if reduce is jnp.max else jnp.minimum
    total = values[0]
    for value in values[1:]:
        total = combine(total, value)
    return reduce(reduce(total, axis=1), axis=0)


def _bits(shape: tuple[int, ...]) -> Array:
    """1 << (4 * row + i) over a leaf."""
    place = lax.broadcasted_iota(jnp.int32, shape, 0) * 4 + lax.broadcasted_iota(jnp.int32, shape, 3)
    return lax.shift_left(jnp.full(shape, 1, jnp.int32), place)


def present(flags: Sequence[Array]) -> list[Array]:
    """Masks of bool leaves."""
    return [_thread_sum(jnp.where(flag, _bits(flag.shape), 0)) for flag in flags]


class _Comparing:
    """Counts and masks from a comparison."""

    leaves: Sequence[Array]

    def reaches(self, leaf: Array, key: Array) -> Array:
        """Which scores of a leaf reach a key."""
        raise NotImplementedError

    def counts(self, a: Array, b: Array) -> tuple[Array, Array]:
        return _split(self._packed_counts(a, b))

    def compared(self, key: Array) -> list[Array]:
        return present([self.reaches(x, key) for x in self.leaves])

    def masks(self, key: Array) -> list[Array]:
        return self.compared(key)

    def _packed_counts(self, a: Array, b: Array) -> Array:
        # A tile has at most 2**15 scores, so two counts share an int32.
        both = [
            _thread_sum(jnp.where(self.reaches(x, a), 1, 0) + jnp.where(self.reaches(x, b), 1 << 16, 0))
            for x in self.leaves
        ]
        return sum(both[1:], both[0])


def _split(packed: Array) -> tuple[Array, Array]:
    total = _all_sum(packed)
    return total & 0xFFFF, lax.shift_right_logical(total, jnp.full_like(total, 16))


class FloatScores(_Comparing):
    """Scores as f32, NaN where there is none."""

    def __init__(self, leaves: Sequence[Array], *, hardware: bool):
        self.leaves, self._hardware = leaves, hardware

    def reaches(self, leaf: Array, key: Array) -> Array:
        """As floats: a NaN reaches nothing."""
        return leaf >= key_float(key)

    def counts(self, a: Array, b: Array) -> tuple[Array, Array]:
        """As in `Scores`, with saturating arithmetic where both keys allow it."""

        def fast():
            below = [key_float(key - 1) for key in (a, b)]
            first, second = ([_thread_sum(self._steps(x, t)) for x in self.leaves] for t in below)
            return sum(first[1:], first[0]).astype(jnp.int32) + (
                sum(second[1:], second[0]).astype(jnp.int32) << 16
            )

        usable = _usable(key_float(a - 1)) & _usable(key_float(b - 1))
        return _split(lax.cond(usable, fast, lambda: self._packed_counts(a, b)))

    def masks(self, key: Array) -> list[Array]:
        """As in `Scores`, with saturating arithmetic where the key allows it."""
        below = key_float(key - 1)

        def fast():
            return [
                _thread_sum(self._steps(x, below) * _bits(x.shape).astype(jnp.float32)).astype(jnp.int32)
                for x in self.leaves
            ]

        return lax.cond(_usable(below), fast, lambda: self.compared(key))

    def _steps(self, leaf: Array, below: Array) -> Array:
        """1.0 where a score exceeds a usable threshold, else 0.0."""
        if not self._hardware:
            return jnp.where(leaf > below, 1.0, 0.0)
        shape = jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
        factor = jnp.full(leaf.shape, _GAIN, jnp.float32)
        addend = jnp.broadcast_to(below * -_GAIN, leaf.shape)
        # Saturation clamps to 0 .. 1 and turns a NaN into 0.
        [step] = pltriton.elementwise_inline_asm(
            "fma.rn.sat.f32 $0, $1, $2, $3;",
            args=[leaf, factor, addend],
            constraints="=f,f,f,f",
            pack=1,
            result_shape_dtypes=[shape],
        )
        return step

    def extremes(self, low: Array, high: Array) -> Extremes:
        """As in `Scores`."""
        bottom, top = key_float(low), key_float(high)  # key_float(TOP) is a NaN: nothing reaches it
        inside = [(x >= bottom) & ~(x >= top) for x in self.leaves]
        greatest = _extreme(
            jnp.max, [jnp.where(i, x, -jnp.inf) for i, x in zip(inside, self.leaves, strict=True)]
        )
        least = _extreme(
            jnp.min, [jnp.where(i, x, jnp.inf) for i, x in zip(inside, self.leaves, strict=True)]
        )
        signless = lambda v: jnp.where(v == 0, jnp.float32(0), v)
        return Extremes(float_key(signless(least)), float_key(signless(greatest)), least <= greatest)


def _usable(below: Array) -> Array:
    """Whether a threshold lies where `(x - below) * 2**64` tells every score above it from those that are not."""
    return (jnp.abs(below) >= _SMALL) & (jnp.abs(below) <= _LARGE)


class KeyScores(_Comparing):
    """Scores as ordered int32."""

    def __init__(self, leaves: Sequence[Array]):
        """From f32, NaN where there is no score."""
        self.leaves = [self._ordered(lax.bitcast_convert_type(x, jnp.int32)) for x in leaves]

    @staticmethod
    def _ordered(bits: Array) -> Array:
        sign = lax.shift_right_arithmetic(bits, jnp.full_like(bits, 31))
        return (bits ^ (sign & 0x7FFFFFFF)) + _SHIFT

    def reaches(self, leaf: Array, key: Array) -> Array:
        """As integers: exact for subnormal scores, too."""
        # Both zeros reach the key of either. TOP would wrap around; nothing reaches it.
        return (leaf >= jnp.where(key == 0, -1, key) + _SHIFT) & (key < TOP)

    def extremes(self, low: Array, high: Array) -> Extremes:
        """As in `Scores`."""
        inside = [self.reaches(x, low) & ~self.reaches(x, high) for x in self.leaves]
        pairs = list(zip(inside, self.leaves, strict=True))
        greatest = _extreme(jnp.max, [jnp.where(i, x, _LOWEST) for i, x in pairs])
        least = _extreme(jnp.min, [jnp.where(i, x, 2**31 - 1) for i, x in pairs])
        signless = lambda key: jnp.where(key == -1, 0, key)
        return Extremes(signless(least - _SHIFT), signless(greatest - _SHIFT), least <= greatest)
