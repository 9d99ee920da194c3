"""Device times of jitted calls, from the profiler."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax


def device_times(
    call: Callable[..., Any], arguments: Sequence[tuple], *, rounds: int = 3
) -> dict[str, float]:
    """Median device time of every kernel that a call launches.

    The calls are queued without waiting in between. Rotate more arguments than the L2 cache holds: what a call reads
    must not have stayed there since its last turn.

    Args:
        call: a compiled function.
        arguments: its arguments, one tuple per call of a round.
        rounds: how often to go through all arguments, after one unmeasured round.

    Returns:
        Kernel name -> median microseconds, ``"total"`` for the sum over a call, ``"queued"`` for the wall time of a call
        in the queue. Without a working profiler only ``"queued"``.
    """
    for args in arguments:
        out = call(*args)
    jax.block_until_ready(out)
    start = time.perf_counter()
    for _ in range(rounds):
        for args in arguments:
            out = call(*args)
    jax.block_until_ready(out)
    calls = rounds * len(arguments)
    result = {"queued": (time.perf_counter() - start) / calls * 1e6}
    durations = _trace(call, arguments, rounds)
    for name, times in durations.items():
        result[name] = statistics.median(times)
    if durations:
        result["total"] = sum(sum(times) for times in durations.values()) / calls
    return result


def kernel_times(calls: Sequence[Callable[[], Any]], kernel: str) -> list[list[float]]:
    """Device time of one kernel in calls that are queued one after another, from a single profile.

    Args:
        calls: functions that launch the kernel equally often each.
        kernel: part of its name.

    Returns:
        The microseconds of every launch, for each call.
    """
    events = _profile(calls)
    times = [us for _, name, us in sorted(events) if kernel in name]
    if len(times) % len(calls):
        raise RuntimeError(f"{len(times)} launches of {kernel} in {len(calls)} calls")
    launches = len(times) // len(calls)
    return [times[i * launches : (i + 1) * launches] for i in range(len(calls))]


def _trace(call, arguments, rounds) -> dict[str, list[float]]:
    """Durations in microseconds of every kernel on the device while the calls run."""
    durations: dict[str, list[float]] = defaultdict(list)
    repeated = [lambda args=args: call(*args) for _ in range(rounds) for args in arguments]
    for _, name, us in _profile(repeated):
        durations[name].append(us)
    return durations


def _profile(calls: Sequence[Callable[[], Any]]) -> list[tuple[float, str, float]]:
    """``(start, name, microseconds)`` of everything on the device's streams while the calls run."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 0
    events = []
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready([call() for call in calls][-1])
        for path in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                if not plane.name.startswith("/device:GPU"):
                    continue
                for line in plane.lines:
                    if line.name.startswith("Stream"):
                        events += [(e.start_ns, e.name, e.duration_ns / 1e3) for e in line.events]
    return events


def copy_rate(gigabytes: float = 4.0) -> float:
    """Device-to-device copy rate in TB/s, bytes read plus bytes written: the practical ceiling."""
    import jax.numpy as jnp

    elements = int(gigabytes * 1e9 / 4)
    source = jnp.arange(elements, dtype=jnp.int32)
    copy = jax.jit(lambda x: x ^ 1)
    jax.block_until_ready(copy(source))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(copy(source))
        times.append(time.perf_counter() - start)
    return 2 * elements * 4 / min(times) / 1e12
