"""How a Triton kernel reads selected rows of every KEY form: packed bytes into registers, decoded by integer operations.

A key is cut into matrices of columns (`Part`) that the tensor cores multiply one after another, so that no layout has to
be changed in registers: the two nibbles of NVFP4 give the even and the odd columns. Scales that a whole cache has in common
(``key_scale``) are left out here; the kernel applies them to scores and outputs. What remains is exact in bfloat16, except
for tile scales of the 656-byte token that are no powers of two: those products are rounded once.

Ampere has no conversion from e4m3, and a float8 conversion could be cancelled by the compiler; bits cannot.

Pools of bytes are viewed as 16-bit words (`viewed`) and taken apart in registers: Triton counts elements in 32 bits up to
4 GiB, where a pool has more bytes than that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import triton as pltriton

from dsa_jax.forms import FP4_GROUP, FP8_TILE

_LEAST = 16
"""Least width of an operand of Triton's matrix product."""
_E4M3 = 2.0**8
"""e4m3 bits moved into a float16 are smaller by this factor: its exponent bias is 15, not 7."""
_E2M1 = 2.0**14
"""The same for e2m1, whose bias is 1."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Columns ``first, first + step, ...`` of a key, ``width`` of them."""

    first: int
    step: int
    width: int

    def columns(self) -> Array:
        """``int32[1, width]``."""
        return (self.first + self.step * jnp.arange(self.width, dtype=jnp.int32))[None, :]


Read = Callable[[Sequence, Array, Array, Array], tuple[Array, ...]]
"""``(refs, page, offset, valid) -> matrices [keys, width]``; ``page`` and ``offset`` are ``int32[keys, 1]``."""


@dataclasses.dataclass(frozen=True)
class Block:
    """What one load of a tile of keys gives.

    Attributes:
        parts: the columns of the matrices that ``read`` returns.
        read: loads and decodes; rows that are not valid are not read and give zeros.
    """

    parts: tuple[Part, ...]
    read: Read


def blocks(
    form: str, latent: int, rope: int, piece: int = 512
) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """How to read keys of a form: the blocks of the latent, which are values as well, and those of the rotary part.

    Args:
        form: KEY form.
        latent, rope: columns of either part.
        piece: columns of a block, a power of two. Small ones leave registers: a block's codes are dead once decoded.

    Raises:
        NotImplementedError: for widths that Triton's matrix product cannot take, and for float32 keys: with three products
            of the tensor cores for each, so that no digits are lost, a kernel took three times as long as the reference.
    """
    least = 2 * _LEAST if form == "nvfp4" else _LEAST
    for name, width in (("latent_dim", latent), ("rope_dim", rope)):
        if width < least or width & (width - 1):
            raise NotImplementedError(
                f"{name} is {width}; Triton's matrix product takes powers of two from {least} with {form} keys"
            )
    piece = max(piece, least)
    if form == "fp8_ds_mla":
        piece = min(piece, FP8_TILE)
        rotary = Block((Part(latent, 1, rope),), partial(_read_floats, Part(0, 1, rope), 2))
        return _cut(0, latent, piece, _tile), (rotary,)
    if form == "f32":
        raise NotImplementedError(
            "float32 keys are read faster by the reference: three products of the tensor cores for each"
        )
    block = {"bf16": _floats, "fp8": _codes, "nvfp4": _nibbles}.get(form)
    if block is None:
        raise NotImplementedError(f"reads no KEY form {form}")
    return _cut(0, latent, piece, block), _cut(latent, rope, piece, block)


def _cut(first: int, width: int, piece: int, block: Callable[[Part], Block]) -> tuple[Block, ...]:
    size = min(width, piece)
    return tuple(block(Part(first + at, 1, size)) for at in range(0, width, size))


def _floats(part: Part) -> Block:
    return Block((part,), partial(_read_floats, part, 0))


def _codes(part: Part) -> Block:
    return Block((part,), partial(_read_e4m3, part))


def _tile(part: Part) -> Block:
    return Block((part,), partial(_read_tile, part))


def _nibbles(part: Part) -> Block:
    halves = tuple(Part(part.first + odd, 2, part.width // 2) for odd in range(2))
    return Block(halves, partial(_read_e2m1, part))


def viewed(pool: Array) -> Array:
    """A pool as the kernel reads it: uint8``[P, T, D]`` as uint16``[P, T, D / 2]``, which costs nothing, others as they are.

    The widths that `blocks` takes are even.
    """
    if pool.dtype != jnp.uint8:
        return pool
    return lax.bitcast_convert_type(pool.reshape(*pool.shape[:-1], pool.shape[-1] // 2, 2), jnp.uint16)


def _load_words(ref, page: Array, offset: Array, first: int, width: int, valid: Array) -> Array:
    """The words of ``width`` bytes of a viewed pool from byte ``first`` on, ``int32[keys, width / 2]``."""
    column = first // 2 + jnp.arange(width // 2, dtype=jnp.int32)[None, :]
    return _load(ref, page, offset, column, valid).astype(jnp.int32)


def _side_by_side(left: Array, right: Array) -> Array:
    """Columns of two matrices in turn, which Triton does within a thread's registers."""
    return jnp.stack([left, right], axis=-1).reshape(left.shape[0], 2 * left.shape[1])


def _load(ref, page: Array, offset: Array, column: Array, valid: Array) -> Array:
    mask = jnp.broadcast_to(valid[:, None], (valid.shape[0], column.shape[1]))
    zero = jnp.zeros((), ref.dtype)
    return pltriton.load(ref.at[page, offset, column], mask=mask, other=zero)


def _read_floats(part: Part, array: int, refs, page, offset, valid) -> tuple[Array, ...]:
    return (_load(refs[array], page, offset, part.columns(), valid),)


def _read_e4m3(part: Part, refs, page, offset, valid) -> tuple[Array, ...]:
    word = _load_words(refs[0], page, offset, part.first, part.width, valid)
    left, right = (_e4m3(code).astype(jnp.bfloat16) for code in (word & 0xFF, word >> 8))
    return (_side_by_side(left, right),)


def _read_tile(part: Part, refs, page, offset, valid) -> tuple[Array, ...]:
    """A tile of the 656-byte token under its float32 scale."""
    word = _load_words(refs[0], page, offset, part.first, part.width, valid)
    tile = jnp.full((1, 1), part.first // FP8_TILE, jnp.int32)
    scale = _load(refs[1], page, offset, tile, valid)
    left, right = ((_e4m3(code) * scale).astype(jnp.bfloat16) for code in (word & 0xFF, word >> 8))
    return (_side_by_side(left, right),)


def _read_e2m1(part: Part, refs, page, offset, valid) -> tuple[Array, ...]:
    """Even and odd columns of NVFP4. Code times scale has at most six significant bits, so bfloat16 holds it."""
    word = _load_words(refs[0], page, offset, part.first // 2, part.width // 2, valid)
    # Four codes of a word share a scale, and so do the words of a group.
    group = (part.first + 4 * jnp.arange(part.width // 4, dtype=jnp.int32)[None, :]) // FP4_GROUP
    scales = _load(refs[1], page, offset, group // 2, valid).astype(jnp.int32)
    scale = _e4m3((scales >> (group % 2 * 8)) & 0xFF) * _E2M1

    def values(nibble: Array) -> Array:
        bits = ((nibble & 8) << 12) | ((nibble & 7) << 9)
        small = lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16)
        return (small.astype(jnp.float32) * scale).astype(jnp.bfloat16)

    first, second, third, fourth = (values(word >> shift) for shift in (0, 4, 8, 12))
    return _side_by_side(first, third), _side_by_side(second, fourth)


def _e4m3(code: Array) -> Array:
    """``float32`` values of e4m3 codes (int32), NaN codes as NaN; float16 keeps their subnormals on every device."""
    size = code & 0x7F
    bits = ((code & 0x80) << 8) | jnp.where(size == 0x7F, 0x7FFF, size << 7)
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16).astype(jnp.float32) * _E4M3
