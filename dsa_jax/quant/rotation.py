"""The Hadamard rotation that spreads outliers before quantisation."""

from __future__ import annotations

from functools import cache

import jax.numpy as jnp
import numpy as np
from jax import Array, lax


def hadamard(x: Array) -> Array:
    """Multiply by the Sylvester Hadamard matrix times ``D**-0.5``: orthonormal, symmetric, its own inverse.

    Applied to query and key together it leaves their dot product unchanged and spreads outliers before quantisation
    (DeepSeek-V3.2's indexer). Summed in float32; the entries of the matrix are 1 and -1 until then, so that the products are
    exact in every dtype.

    Args:
        x: floats ``[..., D]``, D a power of two.

    Returns:
        The rotated vectors, in the dtype of ``x``.

    Raises:
        ValueError: if D is not a power of two.

    >>> hadamard(jnp.array([2.0, 0.0, 0.0, 0.0], jnp.float32)).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    width = x.shape[-1]
    if width < 1 or width & (width - 1):
        raise ValueError(
            f"hadamard: x has last dimension {width}; wanted a power of two. Pad the head dimension, or switch the "
            "Hadamard rotation off in the layout and the model."
        )
    if x.dtype.itemsize == 2:
        factor, precision = x, None
    else:
        factor, precision = x.astype(jnp.float32), lax.Precision.HIGHEST
    # Behind the barrier, because XLA takes a product of joined parts and a constant apart into a product for each part.
    signs = lax.optimization_barrier(jnp.asarray(_signs(width), factor.dtype))
    sums = jnp.matmul(factor, signs, precision=precision, preferred_element_type=jnp.float32)
    return (sums * width**-0.5).astype(x.dtype)


@cache
def _signs(width: int) -> np.ndarray:
    """Sylvester's matrix, entry (i, j) = (-1)**popcount(i & j)."""
    index = np.arange(width)
    return 1 - 2 * (np.bitwise_count(index[:, None] & index[None, :]).astype(np.int32) & 1)
