"""Scores of contiguous keys inside windows: ``python -m benchmarks.windows_check --json FILE``.

The prefill of one request: its last tokens score all keys up to themselves. `ops.mqa_logits` is compared with a float32
reference on some rows, for FP8 keys with DeepGEMM's `fp8_mqa_logits` where its wheel is installed (see `deepgemm`), and on
every shape whose reference fits into memory with the XLA reference, all its scores. FP4 keys have the smaller shapes.
Operations are counted inside the windows; bytes are queries, keys and all scores; each line has its share of the nearer
ceiling, copying or FP8 products, both measured at the start (see `rates`). Ours writes -inf outside of the windows, the peer
leaves those scores as they are. Inputs stay the same: each call on the usual shapes writes several times the L2 cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from benchmarks import rates, verdicts, xla
from benchmarks.paged_logits import HEAD_DIM, ContextProblem, difference
from benchmarks.timing import device_times
from benchmarks.verdicts import scores_agree
from dsa_jax import ops, quant

PROBLEMS = ((2048, 32768), (8192, 8192), (8192, 65536))
"""New tokens and keys, the new ones included."""
WANTED, WANTED_ON = 1000.0, (8192, 8192)
"""TFLOP/s, and where."""
SAMPLE, ROUNDS = 64, 8


def arrays(problem: ContextProblem, form: str = "fp8") -> tuple[Any, ...]:
    """``(q, keys, scales, weights, starts, ends)`` as `mqa_logits` takes them, keys and scales apart; FP4's q is a pair."""

    @jax.jit
    def make():
        own = [jax.random.key(i) for i in range(4)]
        shape = (problem.tokens, problem.heads)
        weights = jax.random.normal(own[3], shape, jnp.float32)
        if form == "fp4":
            q = quant.quantize_fp4(jax.random.normal(own[0], (*shape, HEAD_DIM)))
            return q, *quant.quantize_fp4(jax.random.normal(own[1], (problem.keys, HEAD_DIM))), weights
        codes = [
            jax.random.normal(key, shape, jnp.bfloat16).astype(jnp.float8_e4m3fn)
            for key, shape in ((own[0], (*shape, HEAD_DIM)), (own[1], (problem.keys, HEAD_DIM)))
        ]
        q, keys = (lax.bitcast_convert_type(x, jnp.uint8) for x in codes)
        scales = jax.random.uniform(own[2], (problem.keys,), jnp.float32) + 0.5
        return q, keys, scales, weights

    ends = jnp.asarray(problem.limits)
    return *make(), jnp.zeros_like(ends), ends


def scores(q, keys, scales, weights, starts, ends, *, implementation: Any = None) -> Array:
    """The op with flat arguments."""
    return ops.mqa_logits(q, (keys, scales), weights, starts, ends, implementation=implementation)


@jax.jit
def reference(q, keys, scales, weights, starts, ends) -> Array:
    """The same in float32, a row at a time."""
    form = "fp4" if isinstance(q, tuple) else "fp8"
    k, left = quant.decode_keys(keys, scales, form)
    column = jnp.arange(keys.shape[0], dtype=jnp.int32)

    def of_row(row):
        q, weights, start, end = row
        dots = jnp.einsum("hd,sd->hs", quant.decode_query(q, form), k, precision="highest")
        total = jnp.einsum("hs,h->s", jnp.maximum(dots, 0), weights, precision="highest")
        total = total if left is None else total * left
        return jnp.where((column >= start) & (column < end), total, -jnp.inf)

    return lax.map(of_row, (q, weights, starts, ends))


def moved(given: tuple[Any, ...], problem: ContextProblem) -> int:
    """Bytes of a call: each argument once, and the scores."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(given)) + 4 * problem.tokens * problem.keys


def measure(
    problem: ContextProblem,
    form: str,
    given: tuple[Any, ...],
    program: Any,
    peer: dict[str, float],
    ceilings: rates.Ceilings,
) -> dict:
    """Check some rows, the first and the last among them, and time the program."""
    chosen = jnp.asarray(np.linspace(0, problem.tokens - 1, min(SAMPLE, problem.tokens)).astype(np.int32))
    q, keys, scales, weights, starts, ends = given
    some = jax.tree.map(lambda x: x[chosen], q)
    want = reference(some, keys, scales, weights[chosen], starts[chosen], ends[chosen])
    diff, misplaced = difference(program(*given)[chosen], want)
    name = problem.name + ("" if form == "fp8" else f" {form}")
    row: dict[str, Any] = {"problem": name, "diff": float(diff), "misplaced": int(misplaced)}
    row |= timed(program, given)
    time_us = row.get("kernel", row["queued"])
    row |= ceilings.rates(time_us, moved(given, problem), problem.flops, "fp8")
    good = scores_agree(row)
    text = f"{name:25} {'ok' if good else f'BAD {row["misplaced"]}'} {row['diff']:.0e} {time_us:.1f} us"
    text += f" (call {row.get('total', row['queued']):.1f}, queued {row['queued']:.1f}){rates.text(row)}"
    if (problem.tokens, problem.keys) == WANTED_ON and form == "fp8":
        text += f" (wanted {WANTED:.0f}: {'met' if row['tflop_s'] >= WANTED else 'MISSED'})"
    if peer:
        row["peer"] = peer
        row["ratio"] = time_us / peer.get("kernel", peer["queued"])
        text += f" {row['ratio']:.3f} x DeepGEMM"
    print(text, flush=True)
    return row


def timed(program: Any, given: tuple[Any, ...], rounds: int = ROUNDS) -> dict[str, float]:
    """Median microseconds of the longest kernel, the sum of all, and wall time in the queue."""
    times = device_times(program, [given], rounds=rounds)
    kernels = {name: us for name, us in times.items() if name not in ("total", "queued")}
    found = {name: times[name] for name in ("total", "queued") if name in times}
    return found | ({"kernel": max(kernels.values())} if kernels else {})


def against_xla(given: tuple[Any, ...], program: Any, reference: Any, row: dict) -> None:
    """Add the compiled reference's time on the same shape, and how far all scores differ from it."""
    if reason := xla.too_large(reference):
        row |= xla.left_out(row["problem"], reason)
        return
    diff, misplaced = difference(program(*given), reference(*given))
    times = timed(reference, given, 1)
    row["xla"] = times | {"diff": float(diff), "misplaced": int(misplaced)}
    mine, whole = row.get("total", row["queued"]), {"xla": xla.total(times)}
    print(
        f"{row['problem']:25} call{xla.text(mine, whole)}; all scores differ by {float(diff):.0e}, "
        f"misplaced {int(misplaced)}",
        flush=True,
    )


def measure_peers(problems: Sequence[ContextProblem]) -> dict[str, dict[str, float]]:
    """The peer's times from a process of its own, as in `deepgemm`; empty if it cannot run."""
    shapes = json.dumps([(p.tokens, p.keys, p.heads) for p in problems])
    command = [sys.executable, "-m", "benchmarks.windows_check", "--peer", shapes]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        print("DeepGEMM left out: it took more than a minute")
        return {}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    print("DeepGEMM left out:", (done.stderr.strip().splitlines() or ["no output"])[-1], flush=True)
    return {}


def peer(problem: ContextProblem) -> dict[str, float]:
    """Kernel time from the profiler, and time of queued calls between two events, in microseconds."""
    torch: Any = importlib.import_module("torch")
    deep_gemm: Any = importlib.import_module("deep_gemm")
    rows, keys, heads, device = problem.tokens, problem.keys, problem.heads, "cuda"
    q = torch.randn(rows, heads, HEAD_DIM, device=device).to(torch.float8_e4m3fn)
    k = torch.randn(keys, HEAD_DIM, device=device).to(torch.float8_e4m3fn)
    scale, weights = torch.rand(keys, device=device) + 0.5, torch.randn(rows, heads, device=device)
    ends = torch.from_numpy(problem.limits).to(device)
    starts = torch.zeros_like(ends)

    def run():
        return deep_gemm.fp8_mqa_logits(q, (k, scale), weights, starts, ends, False)

    for _ in range(2):
        run()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(ROUNDS):
        run()
    end.record()
    torch.cuda.synchronize()
    result = {"queued": begin.elapsed_time(end) * 1e3 / ROUNDS}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(ROUNDS):
            run()
        torch.cuda.synchronize()
    times = [
        e.device_time if hasattr(e, "device_time") else e.cuda_time
        for e in profile.events()
        if "mqa_logits" in e.name
    ]
    kernel = [time for time in times if time > 0]
    return result | ({"kernel": statistics.median(kernel)} if kernel else {})


def print_peers(shapes: str) -> None:
    """What `measure_peers` runs: one JSON object, problem name -> times."""
    found = {}
    for tokens, keys, heads in json.loads(shapes):
        problem = ContextProblem(tokens, keys, heads)
        try:
            found[problem.name] = peer(problem)
        except (RuntimeError, AssertionError) as error:
            print(f"{problem.name}: {error}", file=sys.stderr)
    print(json.dumps(found))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=90, help="start no shape after this time")
    parser.add_argument("--no-peer", action="store_true", help="leave DeepGEMM out")
    parser.add_argument(
        "--shapes",
        type=int,
        nargs=2,
        action="append",
        metavar=("TOKENS", "KEYS"),
        help="instead of the usual",
    )
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.peer:
        print_peers(options.peer)
        return
    begin = time.perf_counter()
    problems = [ContextProblem(tokens, keys, options.heads) for tokens, keys in options.shapes or PROBLEMS]
    peers = {} if options.no_peer else measure_peers(problems)  # before JAX takes the card's memory
    for name, times in peers.items():
        print(f"DeepGEMM {name:21} " + " ".join(f"{k} {v:.1f} us" for k, v in times.items()), flush=True)
    ceilings = rates.measure("fp8")  # before anything compiles
    report: dict[str, Any] = {"device": str(jax.devices()[0].device_kind), "jax": jax.__version__, "rows": []}
    report["ceilings"] = dataclasses.asdict(ceilings)
    late = lambda: time.perf_counter() - begin > options.seconds

    def write() -> None:
        print(f"{time.perf_counter() - begin:.0f} s", flush=True)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1))

    timed_forms = [("fp8", problem) for problem in problems] + [("fp4", problem) for problem in problems[:2]]
    done = []
    with ThreadPoolExecutor(len(timed_forms)) as pool:
        given = [arrays(problem, form) for form, problem in timed_forms]
        programs = [pool.submit(jax.jit(scores).lower(*each).compile) for each in given]
        for (form, problem), each, program in zip(timed_forms, given, programs, strict=True):
            if late():
                print(f"{problem.name} {form}: out of time", flush=True)
                continue
            theirs = peers.get(problem.name, {}) if form == "fp8" else {}
            row = measure(problem, form, each, program.result(), theirs, ceilings)
            report["rows"].append(row)
            done.append((each, program.result(), row))
            write()
        # Compiling the references tries out products on the card: after the kernels, and before any of them is timed.
        plain = jax.jit(partial(scores, implementation="xla"))
        references = [pool.submit(plain.lower(*each).compile) for each, _, _ in done if not late()]
        wait(references)
        for (each, program, row), compiled in zip(done, references, strict=False):
            if late():
                xla.left_out(row["problem"], "out of time")
                continue
            try:
                against_xla(each, program, compiled.result(), row)
            except Exception as error:  # the others are worth their turn
                row |= xla.left_out(row["problem"], f"{type(error).__name__}: {str(error)[:200]}")
            write()
    compared = [(row["problem"], found) for row in report["rows"] for found in (row, row.get("xla")) if found]
    verdicts.end(name for name, found in compared if not scores_agree(found))


if __name__ == "__main__":
    main()
