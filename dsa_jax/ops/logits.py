"""Scores of the lightning indexer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from dsa_jax import xla
from dsa_jax.cache import Cache
from dsa_jax.forms import QUANT_BLOCK_SIZE
from dsa_jax.layout import Role
from dsa_jax.metadata import Step
from dsa_jax.ops import gpu
from dsa_jax.ops.checks import Problems, check_cache, check_layer, check_step
from dsa_jax.ops.dispatch import Candidate, Choice, dispatch
from dsa_jax.quant import Query


def paged_mqa_logits(
    q: Query,
    weights: Array,
    cache: Cache,
    layer: int | Array,
    step: Step,
    *,
    dtype: Any = jnp.float32,
    implementation: Choice = None,
    config: Any = None,
) -> Array:
    """Score every cached key of a token's own request: ``scale[s] * sum_h weights[t,h] * relu(q[t,h] . k[s])``.

    Args:
        q: queries in the cache's form. ``fp8`` keys: e4m3 codes ``[N, H, D]`` (``uint8`` or ``float8_e4m3fn``), with the
            query's scale folded into ``weights``. ``fp4`` keys: the pair ``(uint8[N, H, D/2], int32[N, H])`` of packed codes
            and block scales, as ``quantize_index_k`` makes them; nothing is folded. ``f32`` keys: floats ``[N, H, D]``.
        weights: ``float32[N, H]`` head weights, ``H**-0.5 * D**-0.5`` folded in. May be negative.
        cache: the cache, with this step's keys already appended.
        layer: local layer number, a Python int or a traced ``int32`` scalar.
        step: ``StepMetadata.derive()``.
        dtype: of the result, ``float32`` or ``bfloat16``. Scores are computed in float32 and rounded once; ``topk_indices``
            takes either, but rounded scores have ties that the exact ones do not.
        implementation, config: see ``dsa_jax.ops``; the schedules are ``PagedLogitsConfig`` and ``PagedLogitsFp4Config`` of
            ``paged_logits_mosaic`` and ``paged_logits_fp4_mosaic``, and ``paged_logits_triton.Config``. In a step of
            contexts and decode requests both parts get it; contexts of FP4 keys leave its ``together`` out.

    Returns:
        ``dtype[N, W * T]``; column s is position s of the token's request, -inf at and beyond ``step.limits``.

    Raises:
        ValueError: for wrong shapes or dtypes, another ``dtype``, a query whose form is not the cache's, another cache's
            step, a shared-indexer layer, or a ``config`` that is not the named kernel's.
    """
    dtype = _check_dtype("paged_mqa_logits", dtype)
    q = check_query("paged_mqa_logits", q, weights, cache, layer, step)
    contexts, parts = step.bucket.context_tokens, []
    if contexts or not step.bucket.decode_requests:
        parts.append((slice(0, contexts), step.context_part()))
    if step.bucket.decode_requests:
        parts.append((slice(contexts, None), step.decode_part()))
    scored = []
    for rows, part in parts:
        candidates = (
            *gpu.paged_mqa_logits(cache, weights.shape[1], part),
            Candidate("xla", xla.paged_mqa_logits),
        )
        arguments = (cut(q, rows), weights[rows], cache, layer, part, dtype)
        scored.append(dispatch("paged_mqa_logits", implementation, candidates, *arguments, config=config))
    return scored[0] if len(scored) == 1 else jnp.concatenate(scored, axis=0)


def mqa_logits(
    q: Query,
    k: Array | tuple[Array, Array | None],
    weights: Array,
    starts: Array,
    ends: Array,
    *,
    dtype: Any = jnp.float32,
    implementation: Choice = None,
    config: Any = None,
) -> Array:
    """Scores against contiguous keys, for training, interchange and gathered contexts.

    Floats are scored by the reference, which can be differentiated; the kernels for codes have no gradient, where
    ``implementation="xla"`` has one.

    Args:
        q: ``[S, H, D]`` e4m3 codes or floats, or an FP4 pair ``(uint8[S, H, D/2], int32[S, H])``.
        k: ``[keys, D]`` floats, or ``(codes, scale)`` as ``gather_index_k`` returns them. Query and key share one form.
        weights: ``float32[S, H]``.
        starts: ``int32[S]``, first key of each row's window.
        ends: ``int32[S]``, one past the last key.
        dtype: of the result, as in ``paged_mqa_logits``.
        implementation, config: see ``dsa_jax.ops``; the schedules are ``paged_logits_mosaic.PagedLogitsConfig`` and
            ``paged_logits_triton.Config``.

    Returns:
        ``dtype[S, keys]``, -inf outside the windows. The kernels group neighbouring rows, so windows of neighbours should
        lie near each other; a number of keys that 64 does not divide costs them a copy of the scores.

    Raises:
        ValueError: for shapes or dtypes that do not belong together, or a ``config`` that is not the named kernel's.
    """
    dtype = _check_dtype("mqa_logits", dtype)
    problems = Problems("mqa_logits")
    if isinstance(k, tuple) and len(k) != 2:
        problems.note(f"k is a tuple of {len(k)}, wanted floats or the pair (codes, scale)")
        problems.raise_if_any("Pass the keys as gather_index_k returns them.")
    keys, scale = k if isinstance(k, tuple) else (k, None)
    form = "f32" if scale is None else "fp4" if getattr(scale, "dtype", None) == jnp.int32 else "fp8"
    rows, heads, width = _check_form(problems, q, form, None, QUANT_BLOCK_SIZE if form == "fp4" else None)
    problems.shape("k", keys, (None, width), "keys, D/2" if form == "fp4" else "keys, D")
    problems.dtype("k", keys, ("float",) if form == "f32" else _CODES[form])
    if scale is not None:
        problems.shape("scale of k", scale, (keys.shape[0] if getattr(keys, "ndim", 0) else None,), "keys")
        problems.dtype("scale of k", scale, ("float32", "int32"))
    problems.shape("weights", weights, (rows, heads), "S, H")
    problems.dtype("weights", weights, ("float",))
    for name, array in (("starts", starts), ("ends", ends)):
        problems.shape(name, array, (rows,), "S")
        problems.dtype(name, array, ("int32",))
    problems.raise_if_any(
        "Give one window and one weight per head for every query row; query and key are both floats, both FP8 codes with "
        "k = (codes, scale), or both FP4 pairs of packed codes and int32 scales."
    )
    candidates = (
        *gpu.mqa_logits(
            form,
            weights.shape[1],
            QUANT_BLOCK_SIZE if form == "fp4" else keys.shape[1],
            weights.shape[0],
            keys.shape[0],
        ),
        Candidate("xla", xla.mqa_logits),
    )
    return dispatch(
        "mqa_logits",
        implementation,
        candidates,
        as_codes(q),
        as_codes(keys),
        scale,
        weights,
        starts,
        ends,
        dtype,
        config=config,
    )


def check_query(operation: str, q: Query, weights: Array, cache: Cache, layer, step: Step) -> Query:
    """Check the arguments of a paged scoring op; returns the query with float8 viewed as codes."""
    check_cache(operation, cache)
    check_step(operation, step)
    problems = Problems(operation)
    tokens, layout = step.bucket.tokens, cache.layout
    _, heads, _ = _check_form(problems, q, layout.index_form, tokens, layout.index_head_dim)
    problems.shape("weights", weights, (tokens, heads), "N, H")
    problems.dtype("weights", weights, ("float",))
    problems.same_layout(cache, step)
    problems.raise_if_any(
        "Query and key share one form: quantise the query as the cache's index_form says, with one weight per head."
    )
    check_layer(operation, cache, layer, Role.INDEX_KEY)
    return as_codes(q)


def _check_dtype(operation: str, dtype: Any) -> Any:
    """The dtype of the scores, if it is one that they may have."""
    try:
        known = jnp.dtype(dtype)
    except TypeError:
        known = None
    if known not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        raise ValueError(
            f"{operation}: dtype is {dtype!r}, wanted float32 or bfloat16. Pass jnp.float32, or jnp.bfloat16 for half the "
            "bytes."
        )
    return known


def cut(q: Query, rows: slice) -> Query:
    """Some rows of a query in any form."""
    return jax.tree.map(lambda x: x[rows], q)


def as_codes(q):
    """View float8_e4m3fn as its codes; everything else, pairs too, as it is."""
    if isinstance(q, tuple):
        return q
    return lax.bitcast_convert_type(q, jnp.uint8) if q.dtype == jnp.float8_e4m3fn else q


_CODES = {"fp8": ("uint8", "float8_e4m3fn"), "fp4": ("uint8",)}


def _check_form(problems: Problems, q: Query, form: str, tokens: int | None, width: int | None):
    """Note a query that is not in the keys' form; returns its rows, heads and width of the data, None where unknown."""
    pair = isinstance(q, tuple) and len(q) == 2
    data, scale = q if pair else (q[0] if isinstance(q, tuple) and q else q, None)
    if pair != (form == "fp4") or isinstance(q, tuple) != pair:
        came = f"a tuple of {len(q)}" if isinstance(q, tuple) else "one array"
        wanted = "the pair (packed codes, int32 scales)" if form == "fp4" else "one array"
        problems.note(f"q (keys are {form}) is {came}, wanted {wanted}")
    letters, wanted = "N, H, D", width
    if form == "fp4":
        letters, wanted = "N, H, D/2", None if width is None else width // 2
    problems.shape("q", data, (tokens, None, wanted), letters)
    problems.dtype(f"q (keys are {form})", data, ("float",) if form == "f32" else _CODES[form])
    rows, heads, width = data.shape if getattr(data, "ndim", None) == 3 else (tokens, None, width)
    if form == "fp4" and pair:
        problems.shape("scales of q", scale, (rows, heads), "N, H")
        problems.dtype("scales of q", scale, ("int32",))
    return rows, heads, width
