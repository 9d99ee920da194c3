"""The Hadamard rotation that spreads outliers before quantisation."""

from __future__ import annotations

from functools import cache

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from dsa_jax.arguments import described


def hadamard(x: Array) -> Array:
    """Multiply by the Sylvester Hadamard matrix times ``D**-0.5``: orthonormal, symmetric, its own inverse.

    Applied to query and key together it leaves their dot product unchanged and spreads outliers before quantisation
    (DeepSeek-V3.2's indexer). Sums are float32. Numbers of 16 bits are multiplied as they are by ones of either sign, which
    is exact, and scaled at the end: D of them must not add up to more than float32 holds (3e38).

    Args:
        x: floats ``[..., D]``, D a power of two; float64 is rounded to float32 first.

    Returns:
        The rotated vectors, in the dtype of ``x``.

    Raises:
        ValueError: if ``x`` is no array of floats, or D is not a power of two.

    >>> hadamard(jnp.array([2.0, 0.0, 0.0, 0.0], jnp.float32)).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    if not (getattr(x, "ndim", 0) and jnp.issubdtype(x.dtype, jnp.floating)):
        raise ValueError(
            f"hadamard: x is {described(x)}; wanted floats [..., D]. Pass an array of vectors in a float dtype."
        )
    width = x.shape[-1]
    if width < 1 or width & (width - 1):
        raise ValueError(
            f"hadamard: x has last dimension {width}; wanted a power of two. Pad the head dimension, or switch the "
            "Hadamard rotation off in the layout and the model."
        )
    if x.dtype.itemsize == 2:
        signs = _constant(_signs(width), x.dtype)
        # The precision is named, so that a setting of the caller's for all products does not round these.
        sums = jnp.matmul(x, signs, precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32)
        return (sums * width**-0.5).astype(x.dtype)
    matrix = _constant(_signs(width) * np.float32(width**-0.5), jnp.float32)
    return jnp.matmul(x.astype(jnp.float32), matrix, precision=lax.Precision.HIGHEST).astype(x.dtype)


def _constant(matrix: np.ndarray, dtype: DTypeLike) -> Array:
    """Behind a barrier, because XLA takes a product of joined parts and a constant apart into a product for each part."""
    return lax.optimization_barrier(jnp.asarray(matrix, dtype))


@cache
def _signs(width: int) -> np.ndarray:
    """Sylvester's matrix, entry (i, j) = (-1)**popcount(i & j), float32."""
    index = np.arange(width)
    odd = np.bitwise_count(index[:, None] & index[None, :]) & 1
    return 1 - 2 * odd.astype(np.float32)
