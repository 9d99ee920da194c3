"""DeepGEMM's paged logits on the same shapes: ``python -m benchmarks.deepgemm`` prints one JSON object.

Runs in a process of its own, because PyTorch and JAX would otherwise share the card's memory. Needs `deep_gemm` (the wheel
sgl-deep-gemm 0.1.5 with apache-tvm-ffi 0.1.11) beside a CUDA build of PyTorch, and nvcc.
"""

from __future__ import annotations

import importlib
import json
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.paged_logits import HEAD_DIM, Problem


def measure_all(problems: list[Problem]) -> dict[str, dict[str, float]]:
    """Times of the peer in a subprocess: problem name -> ``{"kernel": us, "queued": us}``; empty if it cannot run."""
    specification = json.dumps([vars(p) for p in problems])
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.deepgemm", specification],
        capture_output=True,
        text=True,
        check=False,
    )
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    print("DeepGEMM left out:", (done.stderr.strip().splitlines() or ["no output"])[-1])
    return {}


def measure(problem: Problem) -> dict[str, float]:
    """Kernel time from the profiler and time in a replayed CUDA graph, in microseconds."""
    torch: Any = importlib.import_module("torch")
    deep_gemm: Any = importlib.import_module("deep_gemm")
    device = "cuda"
    r, n, h, t = problem.requests, problem.new_tokens, problem.heads, problem.page_size
    q = torch.randn(r, n, h, HEAD_DIM, device=device).to(torch.float8_e4m3fn)
    weights = torch.randn(r * n, h, device=device)
    pool = torch.empty(problem.pages, t * (HEAD_DIM + 4), device=device, dtype=torch.uint8)
    step = 4096
    for start in range(0, problem.pages, step):
        part = pool[start : start + step]
        values = torch.randn(part.shape[0], t * HEAD_DIM, device=device).to(torch.float8_e4m3fn)
        part[:, : t * HEAD_DIM] = values.view(torch.uint8)
        part[:, t * HEAD_DIM :] = (torch.rand(part.shape[0], t, device=device) + 0.5).view(torch.uint8)
    pool = pool.view(problem.pages, t, 1, HEAD_DIM + 4)
    tables = torch.randperm(problem.pages, device=device).int().view(problem.sets, r, problem.width)
    lengths = torch.full((r, n), problem.context, device=device, dtype=torch.int32)
    cores = torch.cuda.get_device_properties(0).multi_processor_count
    metadata = deep_gemm.get_paged_mqa_logits_metadata(lengths, t, cores)

    def run(table):
        return deep_gemm.fp8_paged_mqa_logits(q, pool, weights, lengths, table, metadata, problem.context)

    for table in tables:
        run(table)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(max(3, 24 // problem.sets)):
            for table in tables:
                run(table)
        torch.cuda.synchronize()
    times = [
        e.device_time if hasattr(e, "device_time") else e.cuda_time
        for e in profile.events()
        if "mqa_logits" in e.name and "metadata" not in e.name
    ]
    result = {"queued": _graph_time(torch, run, tables)}
    kernel = [time for time in times if time > 0]
    if kernel:
        result["kernel"] = statistics.median(kernel)
    return result


def _graph_time(torch: Any, run, tables) -> float:
    """Microseconds of one call inside a replayed CUDA graph that goes through all tables."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for table in tables:
            run(table)
    graph.replay()
    times = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(tables))
    return statistics.median(times)


def main() -> None:
    """Measure the problems given as JSON on the command line."""
    importlib.import_module("deep_gemm")
    result = {}
    for fields in json.loads(sys.argv[1]):
        problem = Problem(**fields)
        try:
            result[problem.name] = measure(problem)
        except (RuntimeError, AssertionError) as error:
            print(f"{problem.name}: {error}", file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
