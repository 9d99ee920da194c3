"""Attention over the selected rows."""

from __future__ import annotations

from typing import Any

from jax import Array

from dsa_jax import xla
from dsa_jax.cache import Cache
from dsa_jax.layout import Role
from dsa_jax.ops import gpu
from dsa_jax.ops.append import check_key_scale
from dsa_jax.ops.checks import Problems, check_cache, check_layer
from dsa_jax.ops.dispatch import Candidate, Choice, dispatch


def sparse_mla(
    q: Array,
    cache: Cache,
    layer: int | Array,
    rows: Array,
    softmax_scale: float,
    *,
    key_scale: float | Array | None = None,
    implementation: Choice = None,
    config: Any = None,
) -> tuple[Array, Array]:
    """Absorbed multi-head latent attention over chosen rows of the cache.

    Scores are ``q . [latent | rope] * softmax_scale``; the values are the latent part of the same rows.

    Args:
        q: floats ``[N, h, latent_dim + rope_dim]``: ``[q_nope W_UK | q_rope]``.
        cache: the cache, with this step's latents already appended.
        layer: local layer number, a Python int or a traced ``int32`` scalar.
        rows: ``int32[N, K]`` rows ``slot * T + offset``; -1 is skipped wherever it stands. Rows must be unique: a row
            given twice counts twice.
        softmax_scale: factor on the scores. There is no default: the model's scale (with YaRN's factor) is not
            ``576**-0.5``.
        key_scale: the scale that the cached latents were appended with (``fp8`` and ``nvfp4``), 1 by default; the other
            forms have none.
        implementation, config: see ``dsa_jax.ops``; the schedules are ``sparse_mla_mosaic.Config`` and
            ``sparse_mla_triton.Config``.

    Returns:
        ``out`` ``[N, h, latent_dim]`` in the dtype of ``q``, and ``lse`` ``float32[N, h]``, the natural logarithm of the
        sum of exponentials. A token without a valid row gives 0 and -inf.

    Raises:
        ValueError: for wrong shapes or dtypes, an unknown layer, or a ``config`` that is not the named kernel's.
    """
    check_cache("sparse_mla", cache)
    layout = cache.layout
    problems = Problems("sparse_mla")
    tokens = q.shape[0] if getattr(q, "ndim", None) == 3 else None
    problems.shape("q", q, (None, None, layout.latent_dim + layout.rope_dim), "N, h, latent_dim + rope_dim")
    problems.shape("rows", rows, (tokens, None), "N, K")
    problems.dtype("q", q, ("float",))
    problems.dtype("rows", rows, ("int32",))
    check_key_scale(problems, cache, key_scale)
    problems.scale("softmax_scale", softmax_scale)
    problems.raise_if_any(
        "Pass absorbed queries, one row of int32 cache rows per query and the model's softmax_scale."
    )
    check_layer("sparse_mla", cache, layer, Role.KEY)
    candidates = (
        *gpu.sparse_mla(cache, q.shape[0], q.shape[1], q.dtype, softmax_scale),
        Candidate("xla", xla.sparse_mla),
    )
    arguments = (q, cache, layer, rows, softmax_scale, key_scale)
    return dispatch("sparse_mla", implementation, candidates, *arguments, config=config)
