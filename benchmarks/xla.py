"""Device times of the library's reference (``implementation="xla"``) on the inputs of the other checks: their ``--xla``.

Everything is compiled from shapes first, so that what the reference would allocate is known before anything runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.paged_logits import ContextProblem, Problem
from benchmarks.timing import device_times
from dsa_jax import Cache, CacheLayout, ops
from dsa_jax.config import preset
from dsa_jax.metadata import Bucket, Step, StepMetadata

MOST_BYTES = 20e9
"""What a reference may allocate beside its inputs; less where the card has less left."""
MOST_CALLS = 8
"""Sets of inputs that it is timed on."""


def layout_of(layers: int, page_size: int, index_form: str = "fp8") -> CacheLayout:
    """Some layers of DeepSeek-V3.2, each with an indexer."""
    return CacheLayout.create(
        preset("deepseek-v3.2"), layers=range(layers), page_size=page_size, index_form=index_form
    )


def cache_of(layout: CacheLayout, **pages: Array) -> Cache:
    """A cache with the given pages, inside a jit: the other pools are zeros that nothing reads, so XLA drops them."""
    name, array = next(iter(pages.items()))
    return Cache.create(
        layout, array.shape[0] // Cache.abstract(layout, 1).pages(name).shape[0]
    ).replace_pages(**pages)


def scores(layout: CacheLayout, q: Any, weights: Array, keys: Array, scales: Array, step: Step) -> Array:
    """The op on arrays as the checks hold them: queries ``[..., H, D]`` (FP4: a pair), weights ``[..., H]``, page pools."""
    rows = step.bucket.tokens
    q, weights = jax.tree.map(lambda x: x.reshape(rows, *x.shape[weights.ndim - 1 :]), (q, weights))
    cache = cache_of(layout, index_key=keys, index_scale=scales)
    return ops.paged_mqa_logits(q, weights, cache, 0, step, implementation="xla")


def step_of(layout: CacheLayout, problem: Problem | ContextProblem, table: Array) -> Step:
    """What the library derives for a step of a problem whose requests all have the full context, in a page table."""
    if isinstance(problem, ContextProblem):
        requests, context, new = 1, problem.keys, problem.tokens
        bucket = Bucket(context_requests=1, context_tokens=new, table_width=problem.width)
    else:
        requests, context, new = problem.requests, problem.context, problem.new_tokens
        bucket = Bucket(decode_requests=requests, next_n=new, table_width=problem.width)
    lengths = [jnp.full((requests,), n, jnp.int32) for n in (context, new)]
    meta = StepMetadata(
        page_table=table, kv_lens=lengths[0], new_lens=lengths[1], layout=layout, bucket=bucket
    )
    return meta.derive()


def time_scores(
    problem: Problem | ContextProblem, form: str, arrays: Sequence[Any], tables: list[Array]
) -> dict[str, Any]:
    """See `timed`; ``arrays`` are ``(q, weights, keys, scales)``. Steps are derived beforehand, as plans are."""
    layout = layout_of(1, problem.page_size, form)
    derive = jax.jit(functools.partial(step_of, layout, problem))
    call = functools.partial(scores, layout)
    return timed(problem.name, call, [(*arrays, derive(table)) for table in tables[:MOST_CALLS]])


def timed(name: str, call: Callable[..., Any], arguments: Sequence[tuple]) -> dict[str, Any]:
    """Time a reference, unless it would need too much memory.

    Args:
        name: of the problem, for what is printed.
        call: what to compile.
        arguments: its arguments, one tuple per call.

    Returns:
        ``{"xla": microseconds of device time}``, or ``{"xla_left_out": reason}``, which is printed as well.
    """
    arguments = arguments[:MOST_CALLS]
    try:
        program = jax.jit(call).lower(*arguments[0]).compile()
        if reason := too_large(program):
            return left_out(name, reason)
        return {"xla": total(device_times(program, arguments, rounds=1))}
    except Exception as error:  # the reference must not cost the kernels their turn
        return left_out(name, f"{type(error).__name__}: {str(error)[:200]}")


def too_large(program: Any) -> str:
    """Why a compiled program must not run: its temporaries and two results. Empty if it may."""
    memory = program.memory_analysis()
    if memory is None:
        return "the compiler does not say how much memory it needs"
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    needed, allowed = memory.temp_size_in_bytes + 2 * results, MOST_BYTES
    if card := jax.devices()[0].memory_stats():
        allowed = min(allowed, card.get("bytes_limit", allowed) - card.get("bytes_in_use", 0))
    return f"it needs {needed / 1e9:.1f} GB, at most {allowed / 1e9:.1f} allowed" if needed > allowed else ""


def left_out(name: str, reason: str) -> dict[str, Any]:
    """Print why there is no time, and keep it."""
    print(f"{name}: xla left out: {reason}", flush=True)
    return {"xla_left_out": reason}


def total(times: dict[str, float]) -> float:
    """Device time of a call, all its kernels; without a profiler its time in the queue."""
    return times.get("total", times["queued"])


def text(us: float, row: dict[str, Any]) -> str:
    """For the end of a line of a table: the kernel's share of the reference's time, and a word where it is slower."""
    if "xla" not in row:
        return ""
    ratio = us / row["xla"]
    return f" {ratio:.3f} x xla ({row['xla']:.0f} us)" + (" SLOWER" if ratio > 1 else "")
