"""The Hadamard rotation that spreads outliers before quantisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax


def hadamard(x: Array) -> Array:
    """Multiply by the Sylvester Hadamard matrix times ``D**-0.5``: orthonormal, symmetric, its own inverse.

    Applied to query and key together it leaves their dot product unchanged and spreads outliers before quantisation
    (DeepSeek-V3.2's indexer). Computed in float32.

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
    return jnp.matmul(x.astype(jnp.float32), _hadamard_matrix(width), precision=lax.Precision.HIGHEST).astype(
        x.dtype
    )


def _hadamard_matrix(width: int) -> Array:
    """Sylvester's matrix, entry (i, j) = (-1)**popcount(i & j), times ``width**-0.5``."""
    index = jnp.arange(width, dtype=jnp.int32)
    odd = lax.population_count(index[:, None] & index[None, :]) & 1
    with jax.numpy_dtype_promotion("standard"):
        return (1 - 2 * odd).astype(jnp.float32) * (width**-0.5)
