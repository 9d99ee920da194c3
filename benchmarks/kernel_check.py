"""Check and time the paged logits kernel: ``python -m benchmarks.kernel_check [--sweep] [--xla] [--triton] [--json FILE]``.

Without ``--sweep`` the library's own schedule is timed for every problem, with it several are compared. Every schedule is
compared with the float32 reference (of long contexts 512 rows), then all schedules of a problem are timed in one profile.
Programs are compiled in threads while others are timed; the work plan is computed beforehand, as it is once per step in
use. Bytes are those of keys and scales read and scores written (of contexts the scores alone), operations those of visible
keys; each line has its share of the nearer ceiling, both measured at the start of the run (see `rates`). Pages of decode
problems rotate through more than the L2 cache, contexts take turns in two page tables. With ``--xla`` the reference is timed
on every problem as well, after the kernels, with ``--triton`` the kernel for all cards.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import rates, verdicts, xla
from benchmarks.deepgemm import measure_all
from benchmarks.paged_logits import ContextProblem, Problem, context_inputs, difference, inputs, reference
from benchmarks.timing import kernel_times, queue, require_card, require_match
from benchmarks.verdicts import scores_agree
from dsa_jax.compat import target_device
from dsa_jax.pallas import paged_logits_mosaic as mosaic
from dsa_jax.pallas import paged_logits_triton as triton
from dsa_jax.pallas.paged_logits_config import PagedLogitsConfig as Config
from dsa_jax.pallas.paged_logits_config import default_config, prefill_config

KERNEL = "paged_mqa_logits"

BIG, WIDE, LONG, ONE = (64, 32768), (128, 4096), (4, 131072), (1, 65536)


def many(*settings: tuple[int, int, int], **fields) -> list[Config]:
    """Schedules from ``(blocks per multiprocessor, stages, compute warpgroups)``."""
    return [Config(blocks_per_core=b, stages=s, compute_warpgroups=w, **fields) for b, s, w in settings]


NARROW = many((2, 4, 2), (3, 3, 1), (2, 6, 2))
SHORT = many((2, 2, 1), (2, 2, 2), (2, 4, 2))
DOUBLE = [
    *many((1, 9, 3), (2, 4, 1), (1, 6, 3)),
    *many((1, 8, 4), registers=(112, 24)),
]
STACKED = [
    *many((1, 8, 2), registers=(216, 72)),
    *many((1, 12, 3), registers=(144, 72), product_columns=128, kept_weights=128),
]
CONTEXTS = [
    *many((1, 8, 2), registers=(216, 72), group_columns=256),
    *many(
        (1, 6, 3), (1, 12, 3), registers=(144, 72), group_columns=256, product_columns=128, kept_weights=128
    ),
    *many((1, 6, 3), registers=(136, 96), group_columns=128),
]
SWEEP: list[tuple[Problem | ContextProblem, list[Config]]] = [
    (Problem(*BIG), NARROW),
    (Problem(*WIDE), NARROW),
    (Problem(*LONG), NARROW),
    (Problem(*ONE), SHORT),
    (Problem(*BIG, new_tokens=2), DOUBLE),
    (Problem(*WIDE, new_tokens=2), DOUBLE),
    (Problem(*LONG, new_tokens=2), DOUBLE),
    (Problem(*ONE, new_tokens=2), SHORT),
    (Problem(1, 2048), SHORT),
    (Problem(*BIG, heads=32), NARROW[:1]),
    (Problem(*BIG, new_tokens=4), STACKED),
    (Problem(*BIG, new_tokens=6), STACKED),
    (Problem(*BIG, heads=32, new_tokens=4), DOUBLE),
    (Problem(*BIG, heads=32, new_tokens=6), STACKED),
    (ContextProblem(512, 2048), CONTEXTS),
    (ContextProblem(8192, 8192), CONTEXTS),
]
"""Problems in order of importance, with the schedules that `--sweep` compares."""
CHECKED = [
    Problem(16, 4096, ragged=True),
    Problem(16, 4096, new_tokens=2, heads=32, page_size=32, ragged=True),
    Problem(16, 4096, new_tokens=3, page_size=128, ragged=True),
    Problem(16, 4096, new_tokens=8, ragged=True),
    Problem(300, 2112, new_tokens=1, heads=32, ragged=True),
]


def default_for(problem: Problem | ContextProblem) -> Config:
    """The schedule the library picks."""
    if isinstance(problem, ContextProblem):
        return prefill_config(heads=problem.heads)
    keys = problem.width * problem.page_size
    return default_config(
        heads=problem.heads,
        new_tokens=problem.new_tokens,
        requests=problem.requests,
        keys=keys,
        cores=target_device().cores or 132,
    )


def build(problem: Problem | ContextProblem, config: Config | None) -> dict[str, Any]:
    """Compile the kernel with a given plan, and the plan."""
    page = dict(page_size=problem.page_size, heads=problem.heads, config=config)
    options = dict(page_scale=1, layer_offset=0, config=config)
    shape = jax.ShapeDtypeStruct
    pages = [shape((problem.pages, problem.page_size, 128), "uint8")]
    pages += [shape((problem.pages, problem.page_size), "float32")]
    if isinstance(problem, ContextProblem):
        plan = functools.partial(mosaic.prefill_plan, **page)
        run = functools.partial(mosaic.paged_logits_prefill, **options)
        tokens = shape((problem.tokens,), "int32")
        facts = [shape((1, problem.width), "int32"), tokens, tokens]
        rows = (problem.tokens, problem.heads)
    else:
        plan = functools.partial(mosaic.decode_plan, **page)
        run = functools.partial(mosaic.paged_logits_decode, **options)
        rows = (problem.requests, problem.new_tokens, problem.heads)
        facts = [shape((problem.requests, problem.width), "int32"), shape(rows[:2], "int32")]
    query = [shape((*rows, 128), "uint8"), shape(rows, "float32")]
    return {
        "plan": jax.jit(plan).lower(*facts).compile(),
        "run": jax.jit(run).lower(*query, *pages, *facts, plan=jax.eval_shape(plan, *facts)).compile(),
    }


def check(problem: Problem, built: dict[str, Any]) -> dict:
    """Compare one call with the reference."""
    (q, weights, keys, scales, limits), tables = inputs(problem)
    plan = built["plan"](tables[0], limits)
    got = built["run"](q, weights, keys, scales, tables[0], limits, plan=plan)
    diff, misplaced = difference(got, reference(q, weights, keys, scales, tables[0], limits))
    return {"diff": float(diff), "misplaced": int(misplaced)}


def build_reference(problem: Problem | ContextProblem) -> Any:
    """Compile the float32 reference for what `time_problem` compares."""
    shape = jax.ShapeDtypeStruct
    if isinstance(problem, ContextProblem):
        rows = (len(rows_compared(problem.tokens)), 1)
    else:
        rows = (problem.requests, problem.new_tokens)
    stored = (problem.pages, problem.page_size)
    arrays = [shape((*rows, problem.heads, 128), "uint8"), shape((*rows, problem.heads), "float32")]
    arrays += [shape((*stored, 128), "uint8"), shape(stored, "float32")]
    return reference.lower(*arrays, shape((rows[0], problem.width), "int32"), shape(rows, "int32")).compile()


def made(problem: Problem | ContextProblem) -> tuple[list[Any], list[Any]]:
    """``(q, weights, keys, scales)`` and page tables."""
    of_kind = context_inputs if isinstance(problem, ContextProblem) else inputs
    (*arrays, _), tables = of_kind(problem)  # pyright: ignore[reportArgumentType]
    return arrays, tables


def rows_compared(tokens: int) -> np.ndarray:
    """Rows of a context that are compared with the reference, which takes one at a time: all of a few, 512 of many."""
    return np.unique(np.linspace(0, tokens - 1, min(tokens, 512)).astype(np.int32))


def time_problem(
    problem: Problem | ContextProblem,
    configs: list[Config],
    built: list[Future],
    checker: Future,
    peer: dict[str, float],
    rounds: int,
    ceilings: rates.Ceilings,
    with_triton: bool = False,
) -> list[dict]:
    """Check and time the schedules of one problem; ``checker`` is the compiled reference that they are compared with."""
    if isinstance(problem, ContextProblem):
        (*arrays, limits), tables = context_inputs(problem)
        facts = (jnp.zeros_like(limits), limits)
        compared = jnp.asarray(rows_compared(problem.tokens))
        some = [x[compared][:, None] for x in arrays[:2]]
        own = jnp.broadcast_to(tables[0], (len(compared), problem.width))
        want = checker.result()(*some, *arrays[2:], own, limits[compared][:, None])
    else:
        (*arrays, limits), tables = inputs(problem)
        facts, compared = (limits,), slice(None)
        want = checker.result()(*arrays, tables[0], limits)
    repeats = max(1, rounds // len(tables))
    rows, calls = [], []
    for config, future in zip(configs, built, strict=True):
        row: dict = {"problem": problem.name, "config": vars(config)}
        rows.append(row)
        try:
            programs = future.result()
            plans = [programs["plan"](table, *facts) for table in tables]
            run = functools.partial(_run, programs["run"], arrays, tables, facts, plans)
            diff, misplaced = difference(run(1)[compared], want)
            row |= {"diff": float(diff), "misplaced": int(misplaced)}
            calls.append((row, run))
        except Exception as error:  # one bad schedule must not cost the others their turn
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    launches = [functools.partial(run, repeats * len(tables)) for _, run in calls]
    timed = list(zip(calls, kernel_times(launches, KERNEL) if calls else [], strict=True))
    if with_triton:
        timed.append(_time_triton(problem, arrays, tables, facts, (compared, want), repeats))
        rows.append(timed[-1][0][0])
    for (row, _), times in timed:
        if "error" in row:
            continue
        row["kernel"] = statistics.median(times)
        row |= ceilings.rates(row["kernel"], problem.bytes, problem.flops, "fp8")
        if "kernel" in peer:
            row["ratio"] = row["kernel"] / peer["kernel"]
    for row in rows:
        print(line(row), flush=True)
    return rows


def _time_triton(
    problem, arrays, tables, facts, known, repeats: int
) -> tuple[tuple[dict, None], list[float]]:
    """A row for the kernel for all cards, and its times; ``known`` are some rows and their scores."""
    row: dict = {"problem": problem.name, "config": None}
    compared, want = known
    try:
        kernel = triton.paged_logits_prefill if len(facts) == 2 else triton.paged_logits_decode
        call = jax.jit(functools.partial(kernel, page_scale=1, layer_offset=0))
        diff, misplaced = difference(call(*arrays, tables[0], *facts)[compared], want)
        row |= {"diff": float(diff), "misplaced": int(misplaced)}

        def launch() -> None:
            queue([functools.partial(call, *arrays, table, *facts) for table in tables] * repeats)

        return (row, None), kernel_times([launch], KERNEL + "_triton")[0]
    except Exception as error:  # the other kernel's times are worth keeping
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        return (row, None), []


def _run(program, arrays, tables, facts, plans, count: int):
    """Queue some calls, going through the page tables; returns the last result."""
    sets = [(table, *facts) for table in tables]
    turns = (i % len(tables) for i in range(count))
    return queue(functools.partial(program, *arrays, *sets[i], plan=plans[i]) for i in turns)


def title(row: dict) -> str:
    """A schedule, or the other kernel."""
    c = row["config"]
    if c is None:
        return "triton"
    name = f"wg{c['compute_warpgroups']} st{c['stages'] or '-':>2} b{c['blocks_per_core']}"
    return name + f" c{c['product_columns']} g{c['group_columns']} {'f' if c['fence'] else '-'}"


def line(row: dict) -> str:
    """One line of the table."""
    name = f"{row['problem']:21} {title(row):24}"
    if "error" in row:
        return f"{name} {row['error']}"
    good = "ok " if scores_agree(row) else f"BAD {row['diff']:.1e} {row['misplaced']}"
    peer = f" {row['ratio']:.3f} x DeepGEMM" if "ratio" in row else ""
    return f"{name} {good} {row['kernel']:7.2f} us{rates.text(row)}{peer}"


def main() -> None:
    """Run the checks and the sweep; one that fails or is wrong does not cost the others their turn: the exit code is 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the full results")
    parser.add_argument("--seconds", type=float, default=150, help="start no problem after this time")
    parser.add_argument("--no-peer", action="store_true", help="leave DeepGEMM out")
    parser.add_argument("--only", default="", help="only problems whose name contains this")
    parser.add_argument("--sweep", action="store_true", help="compare schedules and check ragged requests")
    parser.add_argument("--rounds", type=int, default=24, help="timed calls of every schedule")
    parser.add_argument("--xla", action="store_true", help="time the reference as well (slow)")
    parser.add_argument("--triton", action="store_true", help="time the kernel for all cards as well")
    options = parser.parse_args()
    require_match(options.only, (p.name for p, _ in SWEEP))
    start = time.perf_counter()
    timed = [(p, c if options.sweep else [default_for(p)]) for p, c in SWEEP if options.only in p.name]
    peers = (
        {}
        if options.no_peer
        else measure_all([p for p, _ in timed if isinstance(p, Problem) and p.new_tokens <= 2])
    )
    for name, times in peers.items():
        print(f"DeepGEMM {name:18} " + " ".join(f"{k} {v:.2f} us" for k, v in times.items()), flush=True)
    require_card("kernel_check")
    ceilings = rates.measure("fp8")  # before anything compiles: the threads would take part of the time
    result: dict = {"device": str(jax.devices()[0].device_kind), "jax": jax.__version__, "peer": peers}
    result |= {"ceilings": dataclasses.asdict(ceilings), "checks": [], "timed": []}
    late, failed = lambda: time.perf_counter() - start > options.seconds, []

    def keep() -> None:
        if options.json:
            options.json.write_text(json.dumps(result, indent=1))
        print(f"{time.perf_counter() - start:.0f} s", flush=True)

    with ThreadPoolExecutor(12) as pool:
        checks = [(p, pool.submit(build, p, None)) for p in CHECKED if options.sweep and not options.only]
        built = [
            ([pool.submit(build, p, c) for c in configs], pool.submit(build_reference, p))
            for p, configs in timed
        ]
        references = {
            p.name: xla.Job(p, pool.submit(xla.lower_scores, p, "fp8", p.pages), functools.partial(made, p))
            for p, _ in timed
            if options.xla
        }
        for problem, future in checks:
            try:
                found = check(problem, future.result())
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            result["checks"].append({"problem": vars(problem), **found})
            if not scores_agree(found):
                failed.append(f"check {problem.name}")
            print(f"check {problem.name} T{problem.page_size}: {found}", flush=True)
        for (problem, configs), (futures, checker) in zip(timed, built, strict=True):
            if late():
                print(f"{problem.name}: out of time", flush=True)
                [future.cancel() for future in (*futures, checker)]
                continue
            peer = peers.get(problem.name, {})
            try:
                result["timed"] += time_problem(
                    problem, configs, futures, checker, peer, options.rounds, ceilings, options.triton
                )
            except Exception as error:
                failed.append(problem.name)
                print(f"{problem.name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            keep()
        done = {row["problem"] for row in result["timed"]}
        for name, found in xla.time_all([references[n] for n in references if n in done], pool, late):
            rows = [row for row in result["timed"] if row["problem"] == name]
            for row in rows:
                row |= found
            xla.lines(name, rows, "kernel", title)
            keep()
    wrong = [f"{row['problem']} {title(row)}" for row in result["timed"] if not scores_agree(row)]
    verdicts.end(failed + wrong)


if __name__ == "__main__":
    main()
