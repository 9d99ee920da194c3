"""What a program of the append kernels does with its tokens: one class per storage form (append_triton.py launches them).

A part names its input arrays and, for each pool it writes, the pool and the place of the layer's pages in it. Pools of
one-byte elements are viewed as int32 words, which costs nothing and keeps element offsets within int32 for pools between
2 and 4 GiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import triton as pltriton

from dsa_jax.forms import FP4_GROUP, FP8_TILE
from dsa_jax.pallas import append_encode
from dsa_jax.pallas.append_encode import Arithmetic, pack_words
from dsa_jax.quant import ScaleRule, TieRule
from dsa_jax.quant.fp4 import GROUP, GROUPS


class Place(NamedTuple):
    """Where a layer's pages are in a pool: page `slot * page_scale + layer_offset`."""

    page_scale: int
    layer_offset: int | Array


class Spot(NamedTuple):
    """Where the tokens of a program go in one pool."""

    page: Array
    offset: Array
    mask: Array


class Part:
    """A storage form, ready to be written.

    Attributes:
        inputs: arrays that the kernel reads, tokens first unless they are scalars `[1]`.
        pools: arrays that the kernel writes, `[P, T, ...]`, words where the pool has bytes.
        places: one for each pool.
    """

    def __init__(self, inputs: Sequence[Array], pools: Sequence[Array], places: Sequence[Place]):
        self._dtypes = [pool.dtype for pool in pools]
        self.inputs, self.places = list(inputs), list(places)
        self.pools = [as_words(pool) if pool.dtype == jnp.uint8 else pool for pool in pools]

    def read(self, inputs: Sequence[Any], token: Array, exists: Array) -> list[Array]:
        """What the tokens of a program have in the inputs' refs; zeros behind the last token.

        Apart from `write`, and blind to where the tokens go, because then all reads of a program wait for memory at the
        same time: a step of few tokens takes as long as its longest chain of waits.
        """
        raise NotImplementedError

    def write(self, values: Sequence[Array], pools: Sequence[Any], spots: Sequence[Spot]) -> None:
        """Store what was read into the pools' refs."""
        raise NotImplementedError

    def result(self, written: Sequence[Array]) -> tuple[Array, ...]:
        """Written pools in the dtypes that they came in."""
        pools = zip(written, self._dtypes, strict=True)
        return tuple(as_bytes(pool) if dtype == jnp.uint8 else pool for pool, dtype in pools)


class FloatPart(Part):
    """Vectors as they are, side by side in wide rows, in the dtype of the pages."""

    def read(self, inputs, token, exists):
        """Every input as it is."""
        return [_load(source, token, exists, (source.shape[1],)) for source in inputs]

    def write(self, values, pools, spots) -> None:
        """One input behind the other."""
        _store_side_by_side(values, pools[0], spots[0])


class CodedPart(Part):
    """A form whose codes are computed as the card, or the interpreter, can."""

    def __init__(self, inputs, pools, places, arithmetic: Arithmetic):
        super().__init__(inputs, pools, places)
        self._arithmetic = arithmetic


class Fp8IndexPart(CodedPart):
    """Indexer keys in FP8: one scale a vector."""

    def __init__(self, inputs, pools, places, arithmetic: Arithmetic, rule: ScaleRule):
        super().__init__(inputs, pools, places, arithmetic)
        self._rule: ScaleRule = rule

    def read(self, inputs, token, exists):
        """Vectors as they are."""
        return [_load(k, token, exists, (k.shape[1],)) for k in inputs]

    def write(self, values, pools, spots) -> None:
        """Codes in one pool, scales in the other."""
        [x], [at, scale_at] = values, spots
        words, scale = append_encode.quantize(x, self._rule, self._arithmetic)
        _store_words(pools[0], at, 0, words)
        pltriton.store(pools[1].at[scale_at.page, scale_at.offset], scale, mask=scale_at.mask)


class Fp4IndexPart(Part):
    """Indexer keys in FP4: four scale bytes a vector, in one word."""

    def __init__(self, inputs, pools, places, rule: TieRule):
        super().__init__(inputs, pools, places)
        self._rule: TieRule = rule

    def read(self, inputs, token, exists):
        """Groups of eight elements a word."""
        return [_load(k, token, exists, (GROUPS, GROUP // 8, 8)) for k in inputs]

    def write(self, values, pools, spots) -> None:
        """Packed codes in one pool, words of scales in the other."""
        [x], [at, scale_at] = values, spots
        codes, scales = append_encode.quantize_fp4(x, self._rule)
        _store_words(pools[0], at, 0, pack_words(codes, 4))
        pltriton.store(pools[1].at[scale_at.page, scale_at.offset], pack_words(scales), mask=scale_at.mask)


class Fp8LatentPart(CodedPart):
    """Latent and rotary key in FP8; a third input is the scale of all tokens, 1 without it."""

    def read(self, inputs, token, exists):
        """Vectors as they are, and the scale if there is one."""
        vectors = [_load(x, token, exists, (x.shape[1],)) for x in inputs[:2]]
        return [*vectors, *(scale[0] for scale in inputs[2:])]

    def write(self, values, pools, spots) -> None:
        """Codes of both, side by side."""
        vectors, first = values[:2], 0
        if len(values) == 3:
            vectors = [self._arithmetic.divide(x, jnp.broadcast_to(values[2], x.shape)) for x in vectors]
        for x in vectors:
            _store_words(pools[0], spots[0], first, self._arithmetic.e4m3_words(x))
            first += x.shape[1] // 4


class NvFp4LatentPart(CodedPart):
    """Latent and rotary key in NVFP4: an e4m3 scale for 16 elements, in a pool of its own, and one scale for all tokens."""

    def read(self, inputs, token, exists):
        """Four groups under the scales of a word, of eight elements a word, and the scale of all."""
        *sources, factor = inputs
        shape = (4, FP4_GROUP // 8, 8)
        return [
            *(_load(x, token, exists, (x.shape[1] // (4 * FP4_GROUP), *shape)) for x in sources),
            factor[0],
        ]

    def write(self, values, pools, spots) -> None:
        """Packed codes of both side by side in one pool, four scales a word in the other."""
        *sources, factor = values
        scale_words = 0
        for x in sources:
            codes, scale_codes = append_encode.quantize_nvfp4(x, factor, self._arithmetic)
            _store_words(pools[0], spots[0], scale_words * FP4_GROUP // 2, pack_words(codes, 4))
            _store_words(pools[1], spots[1], scale_words, pack_words(scale_codes))
            scale_words += x.shape[1]


class DsMlaLatentPart(CodedPart):
    """The 656-byte token: FP8 latents with a scale for 128 elements, the rotary key in bfloat16."""

    def read(self, inputs, token, exists):
        """Tiles, and the rotary key as it is."""
        latent, k_rope = inputs
        tiles = (latent.shape[1] // FP8_TILE, FP8_TILE)
        return [_load(latent, token, exists, tiles), _load(k_rope, token, exists, (k_rope.shape[1],))]

    def write(self, values, pools, spots) -> None:
        """Codes, scales and rotary keys, each in its pool."""
        latent, k_rope = values
        words, scale = append_encode.quantize_tiles(latent, self._arithmetic)
        _store_words(pools[0], spots[0], 0, words)
        _store_words(pools[1], spots[1], 0, scale)
        _store_side_by_side([k_rope], pools[2], spots[2])


def as_words(pages: Array) -> Array:
    """uint8`[P, T, D]` as int32`[P, T, D / 4]`."""
    return lax.bitcast_convert_type(pages.reshape(*pages.shape[:-1], pages.shape[-1] // 4, 4), jnp.int32)


def as_bytes(words: Array) -> Array:
    """The reverse of `as_words`."""
    return lax.bitcast_convert_type(words, jnp.uint8).reshape(*words.shape[:-1], words.shape[-1] * 4)


def _store_side_by_side(values: Sequence[Array], pages: Any, spot: Spot) -> None:
    """Store rows `[tokens, width]` one behind the other, in the pages' dtype."""
    first = 0
    for value in values:
        column = first + jnp.arange(value.shape[1], dtype=jnp.int32)[None, :]
        at = pages.at[spot.page[:, None], spot.offset[:, None], column]
        pltriton.store(at, value.astype(pages.dtype), mask=spot.mask[:, None])
        first += value.shape[1]


def _load(source: Any, token: Array, mask: Array, shape: tuple[int, ...]) -> Array:
    """Rows of a source as f32`[tokens, *shape]`, in row-major order; zeros where masked."""
    rank = len(shape) + 1
    column, stride = jnp.zeros((1,) * rank, jnp.int32), 1
    for axis in range(rank - 1, 0, -1):
        column = column + lax.broadcasted_iota(jnp.int32, (1, *shape), axis) * stride
        stride *= shape[axis - 1]
    up = (slice(None), *(None,) * (rank - 1))
    return pltriton.load(source.at[token[up], column], mask=mask[up], other=0.0).astype(jnp.float32)


def _store_words(pool: Any, spot: Spot, first: int, words: Array) -> None:
    """Store a row of words `[tokens, ...]` from the column `first` on."""
    width = 1
    for size in words.shape[1:]:
        width *= size
    column = first + jnp.arange(width, dtype=jnp.int32)[None, :]
    at = pool.at[spot.page[:, None], spot.offset[:, None], column]
    pltriton.store(at, words.reshape(words.shape[0], width), mask=spot.mask[:, None])
