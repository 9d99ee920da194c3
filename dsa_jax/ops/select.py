"""From scores to the selected tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from dsa_jax import xla
from dsa_jax.arguments import described, is_number
from dsa_jax.cache import Cache
from dsa_jax.metadata import Step
from dsa_jax.ops import gpu
from dsa_jax.ops.checks import Problems, check_cache, check_step
from dsa_jax.ops.dispatch import Candidate, Choice, check_config, dispatch
from dsa_jax.ops.logits import check_query, cut, paged_mqa_logits
from dsa_jax.quant import Query
from dsa_jax.sizing import SCORE_BUDGET, rows_per_chunk


def topk_indices(
    logits: Array, limits: Array, k: int, *, implementation: Choice = None, config: Any = None
) -> Array:
    """Positions of the k best scores of each row: the exact set, ascending by position, then -1.

    +0.0 equals -0.0; among equal scores the lowest position wins; a NaN inside the valid range ranks last, behind -inf;
    columns at and beyond the limit are never chosen, whatever they hold.

    Args:
        logits: floats ``[N, columns]`` of up to 32 bits, so that their order is exact.
        limits: ``int32[N]``, valid columns of each row. Limits beyond the width mean the width, negative ones 0.
        k: entries per row, at least 1; more than the width pads with -1.
        implementation, config: see ``dsa_jax.ops``; the schedules are ``topk_mosaic.Config`` and ``topk_triton.Config``.

    Returns:
        ``int32[N, k]``.

    Raises:
        ValueError: for wrong shapes, dtypes or k, or a ``config`` that is not the named kernel's.

    >>> topk_indices(jnp.array([[2.0, 5.0, 5.0, 5.0, 1.0]]), jnp.array([5], jnp.int32), 2).tolist()
    [[1, 2]]
    """
    problems = Problems("topk_indices")
    problems.shape("logits", logits, (None, None), "N, columns")
    problems.dtype("logits", logits, ("float32", "bfloat16", "float16"))
    problems.shape("limits", limits, (logits.shape[0] if getattr(logits, "ndim", None) == 2 else None,), "N")
    problems.dtype("limits", limits, ("int32",))
    check_k(problems, k)
    problems.raise_if_any("Pass one limit per row and a positive k.")
    candidates = (*gpu.topk_indices(k), Candidate("xla", xla.topk_indices))
    return dispatch("topk_indices", implementation, candidates, logits, limits, k, config=config)


def select_tokens(
    q: Query,
    weights: Array,
    cache: Cache,
    layer: int | Array,
    step: Step,
    k: int,
    *,
    score_budget: int = SCORE_BUDGET,
    implementation: Choice = None,
    config: Any = None,
    score_config: Any = None,
) -> Array:
    """Score and select in one go, in row chunks, so that a chunk's scores stay below ``score_budget`` bytes.

    Args:
        q, weights, cache, layer, step: as in ``paged_mqa_logits``.
        k: index_topk, entries per row.
        score_budget: bytes of float32 scores held at once; at least one row is processed at a time.
        implementation: see ``dsa_jax.ops``.
        config: schedule of the top-k, as ``topk_indices`` takes it.
        score_config: schedule of the scores, as ``paged_mqa_logits`` takes it.

    Returns:
        ``int32[N, k]`` positions in each token's own request, ascending, then -1. Budgets change nothing but the last
        bits of scores, and so at most the choice between scores that close.

    Raises:
        ValueError: as ``paged_mqa_logits`` and ``topk_indices`` raise.
    """
    options: dict = dict(implementation=implementation, config=config)
    choose = lambda logits, part: topk_indices(logits, part.limits, k, **options)
    scoring: dict = dict(score_budget=score_budget, score_config=score_config)
    return _select("select_tokens", q, weights, cache, layer, step, k, choose, **options, **scoring)


def select_rows(
    q: Query,
    weights: Array,
    cache: Cache,
    layer: int | Array,
    step: Step,
    k: int,
    *,
    score_budget: int = SCORE_BUDGET,
    implementation: Choice = None,
    config: Any = None,
    score_config: Any = None,
) -> Array:
    """``to_rows(select_tokens(...))`` in one go: a kernel of top-k writes rows, which saves the launches of the conversion.

    For layers that need rows only. Positions mean the same in every cache that holds the sequence; rows do not.

    Args:
        q, weights, cache, layer, step, k, score_budget, implementation, config, score_config: as in ``select_tokens``.

    Returns:
        ``int32[N, k]`` rows ``slot * T + offset`` without a layer, in ascending order of position, then -1. A page that
        the table lacks below a token's limit (which ``StepMetadata.create`` refuses) gives -1, in place or at the end.

    Raises:
        ValueError: as ``select_tokens`` raises.
    """

    def choose(logits: Array, part: Step) -> Array:
        reference = Candidate(
            "xla", lambda logits, limits, k, **_: xla.to_rows(xla.topk_indices(logits, limits, k), part)
        )
        paging = dict(page_table=part.page_table, requests=part.requests, page_size=part.layout.page_size)
        candidates = (*gpu.topk_indices(k), reference)
        return dispatch(
            "select_rows", implementation, candidates, logits, part.limits, k, config=config, **paging
        )

    options: dict = dict(implementation=implementation, config=config)
    scoring: dict = dict(score_budget=score_budget, score_config=score_config)
    return _select("select_rows", q, weights, cache, layer, step, k, choose, **options, **scoring)


def _select(
    operation: str,
    q: Query,
    weights: Array,
    cache: Cache,
    layer: int | Array,
    step: Step,
    k: int,
    choose: Callable[[Array, Step], Array],
    *,
    score_budget: int,
    implementation: Choice,
    config: Any,
    score_config: Any,
) -> Array:
    """Score and ``choose(logits, part)``, in row chunks."""
    check_cache(operation, cache)
    check_step(operation, step)
    problems = Problems(operation)
    check_k(problems, k)
    if not is_number(score_budget) or not 1 <= score_budget < math.inf:
        problems.note(f"score_budget is {described(score_budget)}, wanted at least 1 byte")
    problems.raise_if_any("Pass the model's index_topk and a positive budget.")
    q = check_query(operation, q, weights, cache, layer, step)
    reference = (Candidate("xla", xla.topk_indices),)
    check_config(operation, implementation, (*gpu.topk_indices(k), *reference), config)
    scoring = (*gpu.paged_mqa_logits(cache, weights.shape[1], step), *reference)
    check_config(operation, implementation, scoring, score_config, "score_config")
    bucket = step.bucket
    rows = rows_per_chunk(int(score_budget), bucket.table_width * step.layout.page_size)

    def chunk(part: Step, q: Query, weights: Array) -> Array:
        scores = paged_mqa_logits(
            q, weights, cache, layer, part, implementation=implementation, config=score_config
        )
        return choose(scores, part)

    if bucket.tokens <= rows:
        return chunk(step, q, weights)
    contexts, split = bucket.context_tokens, []
    if contexts:
        parts = slice(contexts), step.context_part(), Step.context_chunk, contexts, 1
        split.append(_in_chunks(chunk, q, weights, *parts, rows))
    if bucket.decode_requests:
        units = bucket.decode_requests, bucket.next_n
        parts = slice(contexts, None), step.decode_part(), Step.decode_chunk, *units
        split.append(_in_chunks(chunk, q, weights, *parts, rows))
    return jnp.concatenate(split, axis=0)


def _in_chunks(f, q, weights, own: slice, part: Step, part_of, count: int, width: int, rows: int) -> Array:
    """``f`` over equal chunks of ``count`` units of ``width`` rows each. The last chunk may overlap the one before."""
    q, weights = cut(q, own), weights[own]
    size = max(1, min(count, rows // width))
    chunks = math.ceil(count / size)
    size = math.ceil(count / chunks)

    def one(index):
        start = jnp.minimum(index * size, count - size)
        take = lambda x: lax.dynamic_slice_in_dim(x, start * width, size * width)
        return start, f(part_of(part, start, size), jax.tree.map(take, q), take(weights))

    if chunks == 1:
        return one(jnp.int32(0))[1]
    starts, selected = lax.map(one, jnp.arange(chunks, dtype=jnp.int32))
    place = starts[:, None] * width + jnp.arange(size * width, dtype=jnp.int32)[None, :]
    out = jnp.zeros((count * width, selected.shape[-1]), jnp.int32)
    return out.at[place.reshape(-1)].set(selected.reshape(-1, selected.shape[-1]))


def to_rows(local: Array, step: Step, *, implementation: Choice = None) -> Array:
    """Turn positions of a request into rows of the cache, without a layer: ``slot * T + position % T``.

    The layer enters at the last moment, inside the op that reads the row (``PageIndex.rows``), so one result serves a
    full layer and all layers that share its selection.

    Args:
        local: ``int32[N, K]`` positions, -1 for none.
        step: ``StepMetadata.derive()``.
        implementation: see ``dsa_jax.ops``.

    Returns:
        ``int32[N, K]``: valid rows in order at the front, then -1. Positions that are negative, lie beyond the sequence's
        pages or belong to a padding token are invalid.

    Raises:
        ValueError: for a wrong shape or dtype.
    """
    check_step("to_rows", step)
    problems = Problems("to_rows")
    problems.shape("local", local, (step.bucket.tokens, None), "N, K")
    problems.dtype("local", local, ("int32",))
    problems.raise_if_any("Pass one row of int32 positions per token place, as topk_indices returns them.")
    return dispatch("to_rows", implementation, (Candidate("xla", xla.to_rows),), local, step)


def check_k(problems: Problems, k: int) -> None:
    """Note a k that is not a positive Python int."""
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        problems.note(f"k is {described(k)}, wanted a Python int of at least 1")
