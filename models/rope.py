"""Rotary position embedding: YaRN frequencies and the two layouts of the pairs.

MLA rotates neighbouring elements (2i, 2i + 1) in both model families. The indexer of DeepSeek-V3.2 rotates (i, i + half);
that of GLM-5 rotates neighbours, like MLA. With the wrong rule everything still looks right until a context grows past
``index_topk``, so the rule is always named by the caller.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from dsa_jax.config import RopeParameters


class Rotation(NamedTuple):
    """Cosine and sine of each position and frequency, ``float32[..., rope_dim / 2]``."""

    cos: Array
    sin: Array


def inverse_frequencies(rope: RopeParameters, dim: int) -> np.ndarray:
    """Angle per position of each of the ``dim / 2`` pairs.

    Plain: ``theta ** (-2i / dim)``. YaRN (arXiv 2309.00071): pairs that turn more than ``beta_fast`` times within the
    original context keep their frequency, pairs that turn fewer than ``beta_slow`` times are slowed by ``factor``, a linear
    ramp joins them. The two pair numbers are rounded outwards, as DeepSeek does.

    Args:
        rope: parameters of the model.
        dim: rotated width, 64 in every released model.

    Returns:
        ``float64[dim / 2]``.

    Raises:
        ValueError: for an odd ``dim`` or an unknown ``rope.type``.
    """
    if dim % 2 or dim < 2:
        raise ValueError(
            f"inverse_frequencies: dim is {dim}; wanted a positive even width. Check qk_rope_head_dim."
        )
    plain = rope.theta ** (-2.0 * np.arange(dim // 2) / dim)
    if rope.type == "default":
        return plain
    if rope.type != "yarn":
        raise ValueError(
            f"inverse_frequencies: rope type is {rope.type!r}; wanted 'default' or 'yarn'. Change the config."
        )

    def pair_turning(turns: float) -> float:
        context = rope.original_max_position_embeddings
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_turning(rope.beta_fast)), 0)
    high = min(math.ceil(pair_turning(rope.beta_slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return plain * (1.0 - ramp) + plain / rope.factor * ramp


def rotation(rope: RopeParameters, dim: int, positions: Array) -> Rotation:
    """Cosine and sine for integer positions.

    YaRN's magnitude correction is not in here: with equal ``mscale`` and ``mscale_all_dim`` (the only kind that the
    configuration accepts) it belongs to the softmax scale alone.

    Args:
        rope: parameters of the model.
        dim: rotated width.
        positions: ``int32[...]``. Padding may hold -1; its rotation is finite and unused.

    Returns:
        ``float32[..., dim / 2]`` cosine and sine.
    """
    frequencies = jnp.asarray(inverse_frequencies(rope, dim), jnp.float32)
    angles = positions.astype(jnp.float32)[..., None] * jnp.expand_dims(frequencies, range(positions.ndim))
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(x: Array, rotation: Rotation, *, interleaved: bool) -> Array:
    """Rotate the pairs of the last axis in place, in float32.

    Args:
        x: ``[..., dim]``. Leading axes broadcast against those of ``rotation``.
        rotation: cosine and sine ``[..., dim / 2]``.
        interleaved: True for pairs (2i, 2i + 1), False for pairs (i, i + dim / 2). Either way a pair stays where it was.

    Returns:
        The rotated vectors, in the dtype of ``x``.

    >>> quarter = Rotation(jnp.array([0.0, 1.0]), jnp.array([1.0, 0.0]))
    >>> x = jnp.array([1.0, 2.0, 3.0, 4.0])
    >>> rotate(x, quarter, interleaved=True).tolist()
    [-2.0, 1.0, 3.0, 4.0]
    >>> rotate(x, quarter, interleaved=False).tolist()
    [-3.0, 2.0, 1.0, 4.0]
    """
    cos, sin = rotation
    y = x.astype(jnp.float32)
    if interleaved:
        pairs = y.reshape(*y.shape[:-1], y.shape[-1] // 2, 2)
        first, second = pairs[..., 0], pairs[..., 1]
    else:
        first, second = jnp.split(y, 2, axis=-1)
    turned = first * cos - second * sin, first * sin + second * cos
    if interleaved:
        result = jnp.stack(turned, axis=-1).reshape(x.shape)
    else:
        result = jnp.concatenate(turned, axis=-1)
    return result.astype(x.dtype)
