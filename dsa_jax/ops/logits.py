"""Scores of the lightning indexer."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from dsa_jax import xla
from dsa_jax.cache import Cache
from dsa_jax.layout import Role
from dsa_jax.metadata import Step
from dsa_jax.ops.append import check_layer
from dsa_jax.ops.checks import Problems
from dsa_jax.ops.dispatch import Candidate, Choice, dispatch


def paged_mqa_logits(
    q: Array,
    weights: Array,
    cache: Cache,
    layer: int | Array,
    step: Step,
    *,
    implementation: Choice = None,
) -> Array:
    """Score every cached key of a token's own request: ``scale[s] * sum_h weights[t,h] * relu(q[t,h] . k[s])``.

    Args:
        q: queries ``[N, H, D]`` in the cache's form: e4m3 codes (``uint8`` or ``float8_e4m3fn``) for ``fp8`` keys, with
            the query's scale folded into ``weights``; floats for ``f32`` keys.
        weights: ``float32[N, H]`` head weights, ``H**-0.5 * D**-0.5`` folded in. May be negative.
        cache: the cache, with this step's keys already appended.
        layer: local layer number, a Python int or a traced ``int32`` scalar.
        step: ``StepMetadata.derive()``.
        implementation: see ``dsa_jax.ops``.

    Returns:
        ``float32[N, W * T]``; column s is position s of the token's request, -inf at and beyond ``step.limits``.

    Raises:
        ValueError: for wrong shapes or dtypes, a query whose form is not the cache's, another cache's step, or a
            shared-indexer layer.
    """
    q = check_query("paged_mqa_logits", q, weights, cache, layer, step)
    parts = []
    if step.bucket.context_tokens or not step.bucket.decode_requests:
        part = step.context_part()
        rows = slice(0, part.bucket.tokens)
        candidates = (Candidate("xla", xla.paged_mqa_logits),)
        parts.append(
            dispatch(
                "paged_mqa_logits", implementation, candidates, q[rows], weights[rows], cache, layer, part
            )
        )
    if step.bucket.decode_requests:
        part = step.decode_part()
        rows = slice(step.bucket.context_tokens, None)
        candidates = (Candidate("xla", xla.paged_mqa_logits),)
        parts.append(
            dispatch(
                "paged_mqa_logits", implementation, candidates, q[rows], weights[rows], cache, layer, part
            )
        )
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=0)


def mqa_logits(
    q: Array,
    k: Array | tuple[Array, Array | None],
    weights: Array,
    starts: Array,
    ends: Array,
    *,
    implementation: Choice = None,
) -> Array:
    """Scores against contiguous keys, for training, interchange and gathered contexts.

    Args:
        q: ``[S, H, D]`` e4m3 codes or floats.
        k: ``[keys, D]`` floats, or ``(codes, scale)`` as ``gather_index_k`` returns them.
        weights: ``float32[S, H]``.
        starts: ``int32[S]``, first key of each row's window.
        ends: ``int32[S]``, one past the last key.
        implementation: see ``dsa_jax.ops``.

    Returns:
        ``float32[S, keys]``, -inf outside the windows.

    Raises:
        ValueError: for shapes or dtypes that do not belong together.
    """
    keys, scale = k if isinstance(k, tuple) else (k, None)
    problems = Problems("mqa_logits")
    rows, heads, width = q.shape if q.ndim == 3 else (None, None, None)
    problems.shape("q", q, (None, None, None), "S, H, D")
    problems.shape("k", keys, (None, width), "keys, D")
    problems.shape("weights", weights, (rows, heads), "S, H")
    problems.shape("starts", starts, (rows,), "S")
    problems.shape("ends", ends, (rows,), "S")
    problems.dtype("weights", weights, ("float",))
    for name, array in (("starts", starts), ("ends", ends)):
        problems.dtype(name, array, ("int32",))
    codes = ("uint8", "float8_e4m3fn")
    wanted = ("float",) if scale is None else codes
    problems.dtype("q", q, wanted)
    problems.dtype("k", keys, wanted)
    if scale is not None:
        problems.shape("scale of k", scale, (keys.shape[0],), "keys")
        problems.dtype("scale of k", scale, ("float32",))
    problems.raise_if_any(
        "Give one window and one weight per head for every query row; query and key are both floats, or both codes with "
        "k = (codes, scale)."
    )
    candidates = (Candidate("xla", xla.mqa_logits),)
    return dispatch(
        "mqa_logits", implementation, candidates, as_codes(q), as_codes(keys), scale, weights, starts, ends
    )


def check_query(operation: str, q: Array, weights: Array, cache: Cache, layer, step: Step) -> Array:
    """Check the arguments of a paged scoring op; returns the query with float8 viewed as codes."""
    problems = Problems(operation)
    tokens, width = step.bucket.tokens, cache.layout.index_head_dim
    heads = q.shape[1] if q.ndim == 3 else None
    problems.shape("q", q, (tokens, None, width), "N, H, D")
    problems.shape("weights", weights, (tokens, heads), "N, H")
    problems.dtype("weights", weights, ("float",))
    if cache.layout.index_form == "f32":
        problems.dtype("q (keys are f32)", q, ("float",))
    else:
        problems.dtype("q (keys are fp8)", q, ("uint8", "float8_e4m3fn"))
    problems.same_layout(cache, step)
    problems.raise_if_any("Query and key share one form: quantise the query as the cache's index_form says.")
    check_layer(cache, layer, Role.INDEX_KEY)
    return as_codes(q)


def as_codes(q: Array) -> Array:
    """View float8_e4m3fn as its codes; everything else as it is."""
    return lax.bitcast_convert_type(q, jnp.uint8) if q.dtype == jnp.float8_e4m3fn else q
