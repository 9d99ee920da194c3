"""Device times of the library's reference (``implementation="xla"``) on the inputs of the other checks: their ``--xla``.

Everything is compiled from shapes first, so that what the reference would allocate is known before anything runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.paged_logits import HEAD_DIM, ContextProblem, Problem
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


class Job(NamedTuple):
    """A problem whose reference is to be timed."""

    problem: Problem | ContextProblem
    lowered: Future
    """Of `lower_scores`."""
    inputs: Callable[[], tuple[Sequence[Any], list[Array]]]
    """Makes ``(q, weights, keys, scales)`` and page tables."""


def lower_scores(problem: Problem | ContextProblem, form: str, pages: int) -> tuple[Any, Any]:
    """Trace and lower the derivation of a step and the scores, from the shapes of the checks' inputs alone."""
    shape, requests = jax.ShapeDtypeStruct, 1
    if isinstance(problem, ContextProblem):
        heads = (problem.tokens, problem.heads)
    else:
        requests = problem.requests
        heads = (requests, problem.new_tokens, problem.heads)
    stored, size = (pages, problem.page_size), HEAD_DIM // 2 if form == "fp4" else HEAD_DIM
    q: Any = shape((*heads, size), "uint8")
    if form == "fp4":
        q = (q, shape(heads, "int32"))
    scales = shape(stored, "int32" if form == "fp4" else "float32")
    layout = layout_of(1, problem.page_size, form)
    derive = functools.partial(step_of, layout, problem)
    table = shape((requests, problem.width), "int32")
    step = jax.eval_shape(derive, table)
    arrays = (q, shape(heads, "float32"), shape((*stored, size), "uint8"), scales)
    call = functools.partial(scores, layout)
    return jax.jit(derive).lower(table), jax.jit(call).lower(*arrays, step)


def time_all(
    jobs: Sequence[Job], threads: Executor, late: Callable[[], bool]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Compile the references of all problems side by side, then time one after another.

    Compiling tries out products on the card, so no kernel may be timed meanwhile, and nothing is timed until all are done.

    Args:
        jobs: in the order of timing.
        threads: where to compile.
        late: whether it is too late to begin another one.

    Returns:
        Pairs of a problem's name and what `timed` says of it. Steps are derived beforehand, as plans are.
    """
    if late():
        for job in jobs:
            yield job.problem.name, left_out(job.problem.name, "out of time")
        return
    compiled = [threads.submit(_compile, job.lowered) for job in jobs]
    wait(compiled)
    for job, future in zip(jobs, compiled, strict=True):
        name = job.problem.name
        if late():
            yield name, left_out(name, "out of time")
            continue
        try:
            derive, program = future.result()
            arrays, tables = job.inputs()
            arguments = [(*arrays, derive(table)) for table in tables[:MOST_CALLS]]
            yield name, time_program(name, program, arguments)
        except Exception as error:  # one reference must not cost the others their turn
            yield name, left_out(name, f"{type(error).__name__}: {str(error)[:200]}")


def _compile(lowered: Future) -> tuple[Any, Any]:
    derive, scores = lowered.result()
    return derive.compile(), scores.compile()


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
        return time_program(name, jax.jit(call).lower(*arguments[0]).compile(), arguments)
    except Exception as error:  # the reference must not cost the kernels their turn
        return left_out(name, f"{type(error).__name__}: {str(error)[:200]}")


def time_program(name: str, program: Any, arguments: Sequence[tuple]) -> dict[str, Any]:
    """The same of a compiled program; errors are the caller's."""
    if reason := too_large(program):
        return left_out(name, reason)
    return {"xla": total(device_times(program, arguments, rounds=1))}


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
    ratio, digits = us / row["xla"], 0 if row["xla"] >= 100 else 1
    return f" {ratio:.3f} x xla ({row['xla']:.{digits}f} us)" + (" SLOWER" if ratio > 1 else "")


def lines(name: str, rows: Sequence[dict[str, Any]], us: str, title: Callable[[dict[str, Any]], str]) -> None:
    """Print the reference's time of a problem, and each kernel's share of it.

    Args:
        name: of the problem.
        rows: its rows, which have the reference's time.
        us: field of the kernel's time.
        title: names the kernel of a row.
    """
    shares = [f"{title(row)}{text(row[us], row)}" for row in rows if us in row and "xla" in row]
    [print(f"{name:21} {share}", flush=True) for share in shares]
