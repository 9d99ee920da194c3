"""Check and time paged scores of FP4 keys: ``python -m benchmarks.fp4_check [--sweep] [--xla] [--json FILE]``.

Every schedule is compared with a float32 reference on decoded values, ragged requests, exceptional scales and all, then
timed in one profile; the kernel of FP8 keys is compared and timed on the same shape in the same run. A kernel's time is
without the work plan, which is made once per step, and without the re-expression of the queries, which `total` has. Contexts
are scored by the kernel of FP8 keys, with the expansion of queries and keys in `total`, and by the kernel for all cards.
Bytes are those of keys and scales read and scores written (of contexts the scores alone), operations those of visible keys;
each line has its share of the nearer ceiling, both measured at the start of the run (see `rates`; FP4 values are multiplied
as FP8). Pages of decode problems rotate through more than the L2 cache, contexts take turns in two page tables. With
``--xla`` the reference is timed on every problem as well, after the kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from benchmarks import paged_logits, rates, verdicts, xla
from benchmarks.paged_logits import HEAD_DIM, UNTUNED, ContextProblem, Problem, context_inputs, difference
from benchmarks.timing import device_times, kernel_times, queue, require_card, require_match
from benchmarks.verdicts import scores_agree
from dsa_jax import quant
from dsa_jax.pallas import many_rows_fp4_mosaic as many_rows
from dsa_jax.pallas import paged_logits_fp4_mosaic as mosaic
from dsa_jax.pallas import paged_logits_mosaic as fp8
from dsa_jax.pallas import paged_logits_triton as triton
from dsa_jax.pallas.paged_logits_fp4_mosaic import PagedLogitsFp4Config as Config

KEY_BYTES = {"fp8": HEAD_DIM + 4, "mosaic": HEAD_DIM // 2 + 4, "triton": HEAD_DIM // 2 + 4}
"""Of a key with its scales, as each kernel reads it."""
KERNEL, FP8_KERNEL, TRITON_KERNEL = "paged_mqa_logits_fp4", "paged_mqa_logits", "paged_mqa_logits_triton"

BIG, WIDE, LONG, ONE = (64, 32768), (128, 4096), (4, 131072), (1, 65536)
TIMED = [
    Problem(*BIG, heads=64),
    Problem(*BIG, heads=32),
    Problem(*WIDE),
    Problem(*LONG),
    Problem(*ONE),
    Problem(1, 2048),
    Problem(*BIG, heads=32, new_tokens=2),
    Problem(*BIG, new_tokens=2),
    Problem(*BIG, new_tokens=4),
]
"""Problems in order of importance."""
CONTEXTS = [ContextProblem(512, 2048), ContextProblem(512, 32768), ContextProblem(8192, 8192)]
SWEEP = [
    Config(compute_warpgroups=4, registers=(112, 32)),
    Config(compute_warpgroups=3),
    Config(compute_warpgroups=3, registers=(152, 40), together=2),
    Config(compute_warpgroups=2, together=2),
]
CHECKED = [
    Problem(16, 4096, ragged=True),
    Problem(16, 4096, new_tokens=2, heads=32, page_size=32, ragged=True),
    Problem(16, 4096, new_tokens=3, page_size=128, ragged=True),
    Problem(16, 2048, new_tokens=8, ragged=True),
]
"""Ragged requests; some of their keys and one request's queries are beyond what e4m3 codes can carry."""


def pages_of(problem: Problem) -> int:
    """Pages of the pool: always 4 Mi tokens or more, several times the L2 cache."""
    return max((4 << 20) // problem.page_size, problem.requests * problem.width)


@functools.cache
def pool(pages: int, page_size: int) -> tuple[Array, Array]:
    """Packed codes ``uint8[P, T, 64]`` and scales ``int32[P, T]`` of quantised normal keys."""

    @jax.jit
    def make():
        def part(i):
            return quant.quantize_fp4(
                jax.random.normal(jax.random.key(i), (pages // 64, page_size, HEAD_DIM))
            )

        codes, scales = lax.map(part, jnp.arange(64))
        return codes.reshape(pages, page_size, -1), scales.reshape(pages, page_size)

    return make()


def inputs(problem: Problem, seed: int = 0) -> tuple[tuple[Array, ...], list[Array]]:
    """``(codes, powers, weights, keys, scales, limits)`` and one page table per set; ragged ones as in `paged_logits`."""
    rng = np.random.default_rng(seed)
    r, n, h, t, pages = (
        problem.requests,
        problem.new_tokens,
        problem.heads,
        problem.page_size,
        pages_of(problem),
    )
    codes, powers = quant.quantize_fp4(jnp.asarray(rng.normal(size=(r, n, h, HEAD_DIM)), jnp.float32))
    weights = rng.normal(size=(r, n, h)).astype(np.float32)
    keys, scales = pool(pages, t)
    lengths = np.full(r, problem.context)
    if problem.ragged:
        special = [0, 1, 63, 64, 65, 255, 256, 257, 2047, 2048, 2049, problem.context]
        lengths = rng.integers(0, problem.context + 1, r)
        lengths[: len(special)] = np.minimum(special, problem.context)[:r]
    limits = np.maximum(lengths[:, None] - np.arange(n)[::-1], 0).astype(np.int32)
    sets = pages // (r * problem.width)
    tables = rng.permutation(pages)[: sets * r * problem.width].reshape(sets, r, -1).astype(np.int32)
    if problem.ragged:
        used = np.arange(problem.width)[None, :] * t < lengths[:, None]
        tables = np.where(used, tables[:1], np.where(rng.random(used.shape) < 0.5, -1, 1 << 28))
        visible = np.zeros((pages, t), bool)
        place = np.arange(problem.context).reshape(1, problem.width, t) < lengths[:, None, None]
        visible[tables[0][used]] = place[used]
        far = jnp.asarray(rng.random((pages, t)) < 0.003)
        wild = jnp.asarray(rng.integers(0x60, 0xA0, (pages, t, 4)), jnp.uint8)
        scales = jnp.where(far, lax.bitcast_convert_type(wild, jnp.int32), scales)
        scales = jnp.where(jnp.asarray(visible), scales, -1)
        keys = jnp.where(jnp.asarray(visible)[:, :, None], keys, jnp.uint8(0x77))
        powers = powers.at[11, 0, 3].set(0x7F7F7F50)
    arrays = (codes, powers, jnp.asarray(weights), keys, scales, jnp.asarray(limits))
    return arrays, [jnp.asarray(table) for table in tables]


@functools.partial(jax.jit, compiler_options=UNTUNED)
def reference(codes, powers, weights, keys, scales, table, limits) -> Array:
    """Scores in float32, one request at a time: ``float32[R, n, W * T]``, -inf at and beyond the limits."""

    def of_request(args):
        codes, powers, weights, pages, limits = args
        columns = jnp.arange(pages.shape[0] * keys.shape[1])
        used = jnp.arange(pages.shape[0]) * keys.shape[1] < jnp.max(limits)
        safe = jnp.where(used, pages, 0)
        k = quant.dequantize_fp4(keys[safe], scales[safe]).reshape(-1, HEAD_DIM)
        dots = jnp.einsum("nhd,sd->nhs", quant.dequantize_fp4(codes, powers), k, precision="highest")
        total = jnp.einsum("nhs,nh->ns", jnp.maximum(dots, 0), weights, precision="highest")
        return jnp.where(columns[None] < limits[:, None], total, -jnp.inf)

    return lax.map(of_request, (codes, powers, weights, table, limits))


def build(problem: Problem, config: Config | None, kernel: str = "mosaic") -> dict[str, Any]:
    """Compile a kernel with a given plan, and the plan."""
    shape, page_size, pages = jax.ShapeDtypeStruct, problem.page_size, pages_of(problem)
    rows = (problem.requests, problem.new_tokens, problem.heads)
    facts = [shape((problem.requests, problem.width), "int32"), shape(rows[:2], "int32")]
    module: Any = {"fp8": fp8, "mosaic": mosaic, "triton": triton}[kernel]
    if kernel == "fp8":
        pages = problem.pages
        q, stored = shape((*rows, HEAD_DIM), "uint8"), [shape((pages, page_size, HEAD_DIM), "uint8")]
        stored.append(shape((pages, page_size), "float32"))
    else:
        q = (shape((*rows, HEAD_DIM // 2), "uint8"), shape(rows, "int32"))
        stored = [shape((pages, page_size, HEAD_DIM // 2), "uint8"), shape((pages, page_size), "int32")]
    run = functools.partial(module.paged_logits_decode, page_scale=1, layer_offset=0, config=config)
    arguments = [q, shape(rows, "float32"), *stored, *facts]
    if kernel == "triton":
        return {"run": jax.jit(run).lower(*arguments).compile()}
    plan = functools.partial(module.decode_plan, page_size=page_size, heads=problem.heads, config=config)
    return {
        "plan": jax.jit(plan).lower(*facts).compile(),
        "run": jax.jit(run).lower(*arguments, plan=jax.eval_shape(plan, *facts)).compile(),
    }


def build_references(problem: Problem) -> dict[str, Any]:
    """Compile the float32 references of both forms of keys."""
    shape, r, n, h = jax.ShapeDtypeStruct, problem.requests, problem.new_tokens, problem.heads
    weights, facts = shape((r, n, h), "float32"), [shape((r, problem.width), "int32"), shape((r, n), "int32")]
    many, few = (pages_of(problem), problem.page_size), (problem.pages, problem.page_size)
    fp4 = [shape((r, n, h, HEAD_DIM // 2), "uint8"), shape((r, n, h), "int32"), weights]
    fp4 += [shape((*many, HEAD_DIM // 2), "uint8"), shape(many, "int32"), *facts]
    fp8 = [shape((r, n, h, HEAD_DIM), "uint8"), weights]
    fp8 += [shape((*few, HEAD_DIM), "uint8"), shape(few, "float32"), *facts]
    return {
        "fp4": reference.lower(*fp4).compile(),
        "fp8": paged_logits.reference.lower(*fp8).compile(),
    }


def check(problem: Problem, built: dict[str, Any]) -> dict:
    """Compare one call with the reference."""
    (codes, powers, weights, keys, scales, limits), tables = inputs(problem)
    options = {"plan": built["plan"](tables[0], limits)} if "plan" in built else {}
    got = built["run"]((codes, powers), weights, keys, scales, tables[0], limits, **options)
    # Where scales are far apart a score can be huge: each row counts for itself.
    want = reference(codes, powers, weights, keys, scales, tables[0], limits).reshape(got.shape)
    size = jnp.max(jnp.where(jnp.isfinite(want), jnp.abs(want), 0), axis=1, keepdims=True)
    diff, misplaced = difference(got / jnp.maximum(size, 1e-30), want / jnp.maximum(size, 1e-30))
    return {"diff": float(diff), "misplaced": int(misplaced), "nan": int(jnp.isnan(got).sum())}


def time_problem(
    problem: Problem,
    runs: list[tuple[str, Config | None, Future]],
    checkers: Future,
    rounds: int,
    ceilings: rates.Ceilings,
) -> list[dict]:
    """Check and time the kernels of one problem; ``checkers`` are the compiled references that they are compared with."""
    (codes, powers, weights, keys, scales, limits), tables = inputs(problem)
    want = checkers.result()["fp4"](codes, powers, weights, keys, scales, tables[0], limits)
    rows, calls = [], []
    for kernel, config, future in runs:
        row: dict = {
            "problem": problem.name,
            "kernel": kernel,
            "config": config and dataclasses.asdict(config),
        }
        rows.append(row)
        try:
            programs = future.result()
            arrays, places, wanted = ((codes, powers), weights, keys, scales), tables, want
            if kernel == "fp8":
                (*arrays, _), places = paged_logits.inputs(problem)
                wanted = checkers.result()["fp8"](*arrays, places[0], limits)
            plans = [programs["plan"](table, limits) for table in places] if "plan" in programs else None
            run = functools.partial(_run, programs["run"], tuple(arrays), places, limits, plans)
            diff, misplaced = difference(run(1), wanted)
            row |= {"diff": float(diff), "misplaced": int(misplaced)}
            calls.append((row, run, len(places)))
        except Exception as error:  # one bad schedule must not cost the others their turn
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    for name, kernels in ((FP8_KERNEL, ("fp8",)), (TRITON_KERNEL, ("triton",)), (KERNEL, ("mosaic",))):
        mine = [call for call in calls if call[0]["kernel"] in kernels]
        launches = [functools.partial(run, max(1, rounds // sets) * sets) for _, run, sets in mine]
        for (row, _, _), times in zip(mine, kernel_times(launches, name) if mine else [], strict=True):
            row["us"] = statistics.median(times)
            moved = problem.moved(KEY_BYTES[row["kernel"]])
            row |= ceilings.rates(row["us"], moved, problem.flops, "fp8")
    base = next((row["us"] for row in rows if row["kernel"] == "fp8" and "us" in row), None)
    for row in rows:
        if "us" in row and base:
            row["ratio"] = row["us"] / base
    for row, run, _ in calls:
        if row["kernel"] == "mosaic":
            row["total"] = device_times(lambda run=run: run(1), [()] * 4).get("total")
            break
    for row in rows:
        print(line(row), flush=True)
    return rows


def context_arrays(problem: ContextProblem) -> tuple[tuple[Any, Array, Array, Array], list[Array], Array]:
    """``(q, weights, keys, scales)``, two page tables and the limits, as in `paged_logits`; q is a pair."""
    (_, weights, _, _, limits), tables = context_inputs(problem)
    q = quant.quantize_fp4(jax.random.normal(jax.random.key(1), (*weights.shape, HEAD_DIM)))
    return (q, weights, *pool(problem.pages, problem.page_size)), tables, limits


def made(problem: Problem | ContextProblem) -> tuple[tuple[Any, ...], list[Array]]:
    """``(q, weights, keys, scales)`` and page tables."""
    if isinstance(problem, ContextProblem):
        return context_arrays(problem)[:2]
    (codes, powers, *rest, _), tables = inputs(problem)
    return ((codes, powers), *rest), tables


def time_contexts(problem: ContextProblem, rounds: int, ceilings: rates.Ceilings) -> list[dict]:
    """The same for the prefill of one request; 64 of its rows are compared."""
    (q, weights, keys, scales), tables, limits = context_arrays(problem)
    chosen = jnp.asarray(np.linspace(0, problem.tokens - 1, 64).astype(np.int32))
    some = [x[chosen][:, None] for x in (*q, weights)]
    own = jnp.broadcast_to(tables[0], (64, problem.width))
    want = reference(*some, keys, scales, own, limits[chosen][:, None])
    rows = []
    for kernel, module, name in (("mosaic", many_rows, FP8_KERNEL), ("triton", triton, TRITON_KERNEL)):
        row: dict = {"problem": problem.name, "kernel": kernel, "config": None}
        rows.append(row)
        try:
            score = jax.jit(functools.partial(module.paged_logits_prefill, page_scale=1, layer_offset=0))
            call = lambda table, score=score: score(
                q, weights, keys, scales, table, jnp.zeros_like(limits), limits
            )
            diff, misplaced = difference(call(tables[0])[chosen], want)
            row |= {"diff": float(diff), "misplaced": int(misplaced)}
            times = device_times(call, [(table,) for table in tables], rounds=max(1, rounds // len(tables)))
            row |= {"us": max(us for kernel, us in times.items() if name in kernel)}
            row |= {"total": times["total"], "queued": times["queued"]}
            row |= ceilings.rates(row["us"], problem.bytes, problem.flops, "fp8")
        except Exception as error:  # the other kernel's times are worth keeping
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        print(line(row), flush=True)
    return rows


def _run(program, arrays, tables, limits, plans, count: int):
    """Queue some calls, going through the page tables; returns the last result."""
    options = [{"plan": plan} for plan in plans] if plans else [{}] * len(tables)
    turns = (i % len(tables) for i in range(count))
    return queue(functools.partial(program, *arrays, tables[i], limits, **options[i]) for i in turns)


def title(row: dict) -> str:
    """A kernel and its schedule."""
    c, name = row["config"] or {}, f"{row['kernel']:7}"
    if c:
        name += f" wg{c['compute_warpgroups']} st{c['stages'] or '-'} b{c['blocks_per_core']} {c['registers'] or '-'}"
        name += f" x{c['together']}" + (" f" if c["fence"] else " -")
    return name


def line(row: dict) -> str:
    """One line of the table."""
    name = f"{row['problem']:21} {title(row)}"
    if "error" in row:
        return f"{name} {row['error']}"
    good = "ok" if scores_agree(row) else f"BAD {row['misplaced']}"
    result = f"{name} {good} {row['diff']:.1e} {row.get('us', float('nan')):7.2f} us{rates.text(row)}"
    result += f" {row['ratio']:.3f} x FP8" if "ratio" in row else ""
    result += f" total {row['total']:.2f}" if row.get("total") else ""
    return result + (f" queued {row['queued']:.2f}" if row.get("queued") else "")


def main() -> None:
    """Run the checks and the timings; one that fails or is wrong does not cost the others their turn: the exit code is 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the full results")
    parser.add_argument("--seconds", type=float, default=100, help="start no problem after this time")
    parser.add_argument("--only", default="", help="only problems whose name contains this")
    parser.add_argument("--sweep", action="store_true", help="compare schedules and check ragged requests")
    parser.add_argument("--triton", action="store_true", help="time the kernel for all cards, too")
    parser.add_argument("--rounds", type=int, default=20, help="timed calls of every schedule")
    parser.add_argument("--xla", action="store_true", help="time the reference as well (slow)")
    options = parser.parse_args()
    require_match(options.only, (problem.name for problem in [*TIMED, *CONTEXTS]))
    require_card("fp4_check")
    start = time.perf_counter()
    late = lambda: time.perf_counter() - start > options.seconds
    ceilings = rates.measure("fp8")  # before anything compiles
    timed = [problem for problem in TIMED if options.only in problem.name]
    result: dict = {
        "device": str(jax.devices()[0].device_kind),
        "jax": jax.__version__,
        "ceilings": dataclasses.asdict(ceilings),
        "checks": [],
        "timed": [],
    }

    failed = []

    def keep(problem: Problem | ContextProblem, measure: Callable[[], list[dict]]) -> None:
        if late():
            print(f"{problem.name}: out of time", flush=True)
            return
        try:
            result["timed"] += measure()
        except Exception as error:
            failed.append(problem.name)
            print(f"{problem.name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        write()

    def write() -> None:
        if options.json:
            options.json.write_text(json.dumps(result, indent=1))
        print(f"{time.perf_counter() - start:.0f} s", flush=True)

    # Lowering holds the interpreter's lock: few threads, so that the first programs are ready first.
    with ThreadPoolExecutor(3) as threads:
        checks = [
            (p, kernel, threads.submit(build, p, None, kernel))
            for p in CHECKED
            for kernel in ("mosaic", "triton")
            if options.sweep
        ]
        runs = []
        for problem in timed:
            kernels = [("fp8", None), ("mosaic", None)]
            kernels += [("triton", None)] if options.triton else []
            narrow = options.sweep and problem.heads * problem.new_tokens <= 64
            kernels += [("mosaic", config) for config in SWEEP] if narrow else []
            programs = [(name, c, threads.submit(build, problem, c, name)) for name, c in kernels]
            runs.append((problem, programs, threads.submit(build_references, problem)))
        contexts = [problem for problem in CONTEXTS if options.only in problem.name]
        jobs = [
            xla.Job(
                problem,
                threads.submit(
                    xla.lower_scores,
                    problem,
                    "fp4",
                    problem.pages if isinstance(problem, ContextProblem) else pages_of(problem),
                ),
                functools.partial(made, problem),
            )
            for problem in [*timed, *contexts]
            if options.xla
        ]
        for problem, kernel, future in checks:
            try:
                found = check(problem, future.result())
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            result["checks"].append({"problem": vars(problem), "kernel": kernel, **found})
            if not scores_agree(found):
                failed.append(f"check {problem.name} {kernel}")
            print(f"check {problem.name} T{problem.page_size} {kernel}: {found}", flush=True)
        for problem, programs, checkers in runs:
            measure = functools.partial(time_problem, problem, programs, checkers, options.rounds, ceilings)
            keep(problem, measure)
            # What was not waited for, out of time.
            [future.cancel() for future in (*(future for _, _, future in programs), checkers)]
        for problem in contexts:
            keep(problem, functools.partial(time_contexts, problem, options.rounds, ceilings))
    done = {row["problem"] for row in result["timed"]}
    with ThreadPoolExecutor(12) as threads:  # compiling alone does not hold the lock
        for name, found in xla.time_all([job for job in jobs if job.problem.name in done], threads, late):
            rows = [row for row in result["timed"] if row["problem"] == name and row["kernel"] != "fp8"]
            for row in rows:
                row |= found
            xla.lines(name, rows, "us", title)
            write()
    wrong = [f"{row['problem']} {title(row)}" for row in result["timed"] if not scores_agree(row)]
    verdicts.end(failed + wrong)


if __name__ == "__main__":
    main()
