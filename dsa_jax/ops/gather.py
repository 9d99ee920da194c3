"""Reading indexer keys back as one contiguous array."""

from __future__ import annotations

from typing import Any

from jax import Array

from dsa_jax import xla
from dsa_jax.cache import Cache
from dsa_jax.layout import Role
from dsa_jax.metadata import Step
from dsa_jax.ops import gpu
from dsa_jax.ops.checks import Problems, check_cache, check_layer, check_step
from dsa_jax.ops.dispatch import Candidate, Choice, dispatch


def gather_index_k(
    cache: Cache, layer: int | Array, step: Step, *, implementation: Choice = None, config: Any = None
) -> tuple[Array, Array | None]:
    """Indexer keys of the contexts' whole history, this step's tokens included, request after request.

    ``step.key_starts`` and ``step.key_ends`` are each token's window in the result.

    Args:
        cache: the cache.
        layer: local layer number, a Python int or a traced ``int32`` scalar.
        step: ``StepMetadata.derive()``; its bucket's ``gathered_keys`` is the number of rows.
        implementation, config: see ``dsa_jax.ops``; the schedule is ``gather_triton.Config``.

    Returns:
        Codes ``uint8[gathered_keys, D]`` and scales ``float32[gathered_keys]`` (FP8), codes ``uint8[gathered_keys, D/2]``
        and scales ``int32[gathered_keys]`` (FP4), or ``float32`` values and None.
        Rows beyond the contexts' keys are zeros.

    Raises:
        ValueError: for another cache's step, a shared-indexer layer, or a ``config`` that is not the named kernel's.
    """
    check_cache("gather_index_k", cache)
    check_step("gather_index_k", step)
    problems = Problems("gather_index_k")
    problems.same_layout(cache, step)
    if step.bucket.context_requests and not step.bucket.gathered_keys:
        problems.note("the bucket's gathered_keys is 0, wanted the most keys that the contexts can hold")
    problems.raise_if_any(
        "Derive the step from metadata of this cache, with gathered_keys set in its bucket."
    )
    check_layer("gather_index_k", cache, layer, Role.INDEX_KEY)
    candidates = (*gpu.gather_index_k(cache), Candidate("xla", xla.gather_index_k))
    arguments = (cache, layer, step.gather_rows)
    return dispatch("gather_index_k", implementation, candidates, *arguments, config=config)
