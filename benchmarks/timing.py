"""Device times of jitted calls, from the profiler."""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax


class Launch(NamedTuple):
    """Something that ran on the device: a kernel, a copy or a fill.

    Attributes:
        start: nanoseconds.
        name: of the kernel.
        us: its duration.
        in_graph: whether a command buffer launched it.
    """

    start: float
    name: str
    us: float
    in_graph: bool


class LostLaunches(RuntimeError):
    """A profile shows more of one call than of another that launches the same."""


def require_card(suite: str) -> None:
    """Leave with a word where there is no card to time kernels on.

    Raises:
        SystemExit: JAX has no CUDA GPU.
    """
    if jax.default_backend() != "gpu":
        raise SystemExit(f"{suite} times kernels: it needs a CUDA GPU, and JAX found {jax.devices()[0]}")


def require_match(only: str, names: Iterable[str]) -> None:
    """Leave with a word where ``--only`` chooses nothing to measure.

    Raises:
        SystemExit: none of the names contains ``only``.
    """
    names = list(dict.fromkeys(names))
    if not any(only in name for name in names):
        raise SystemExit(f"--only {only!r} is in none of: " + ", ".join(names))


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
    once = [functools.partial(call, *args) for args in arguments]
    jax.block_until_ready(queue(once))
    start = time.perf_counter()
    jax.block_until_ready(queue(once * rounds))
    calls = rounds * len(arguments)
    result = {"queued": (time.perf_counter() - start) / calls * 1e6}
    durations: dict[str, list[float]] = defaultdict(list)
    for launch in _profile(once * rounds):
        durations[launch.name].append(launch.us)
    for name, times in durations.items():
        result[name] = statistics.median(times)
    if durations:
        result["total"] = sum(sum(times) for times in durations.values()) / calls
    return result


def queue(calls: Iterable[Callable[[], Any]]) -> Any:
    """Make calls one after another without waiting; returns the last one's result.

    Each result is dropped before the next call, so all write to the same memory, as the layers of a program do and as the
    peer's calls do. Scores kept for a call longer take turns in two places, and what is left of them in the L2 cache has to
    be written out during the next call: 64 x 2 x 32,768 of them cost 3.5 us of 78.5 (H200).
    """
    result = None
    for call in calls:
        del result
        result = call()
    return result


def kernel_times(calls: Sequence[Callable[[], Any]], kernel: str) -> list[list[float]]:
    """Device time of one kernel in calls that are queued one after another, from a single profile.

    Args:
        calls: functions that launch the kernel equally often each; all are called again if the profile lost launches.
        kernel: part of its name.

    Returns:
        The microseconds of every launch, for each call.

    Raises:
        LostLaunches: the launches do not divide into the calls, the second time neither.
    """

    def measure() -> list[list[float]]:
        times = [launch.us for launch in _profile(calls) if kernel in launch.name]
        if len(times) % len(calls):
            raise LostLaunches(f"{len(times)} launches of {kernel} in {len(calls)} calls")
        launches = len(times) // len(calls)
        return [times[i * launches : (i + 1) * launches] for i in range(len(calls))]

    return _twice(measure)


def launches(calls: Sequence[Callable[[], Any]]) -> list[list[Launch]]:
    """Everything that equal calls launch, in order of start, from a single profile in which they are queued.

    Args:
        calls: functions that launch the same kernels; all are called again if the profile lost launches.

    Returns:
        The launches of each call; nothing without a working profiler.

    Raises:
        LostLaunches: the profile does not divide into equal calls, the second one neither.
    """

    def measure() -> list[list[Launch]]:
        events = _profile(calls)
        total, size = len(events), len(events) // len(calls)
        events = events[total % len(calls) :]  # what was still running when the profile began
        found = [events[i * size : (i + 1) * size] for i in range(len(calls))]
        names = [sorted(launch.name for launch in part) for part in found]
        if any(part != names[0] for part in names):
            raise LostLaunches(f"{total} launches do not divide into {len(calls)} equal calls")
        return found if size else []

    return _twice(measure)


def _twice(measure: Callable[[], Any]) -> Any:
    """A measurement, repeated once if its calls differ: a profile of thousands of launches loses some now and then."""
    try:
        return measure()
    except LostLaunches:
        return measure()


def _profile(calls: Sequence[Callable[[], Any]]) -> list[Launch]:
    """Everything on the device's streams while the calls run, in order of start."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 0
    events = []
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(queue(calls))
        with warnings.catch_warnings():  # JAX's type of statistics lacks what Python 3.12 asks of types
            warnings.simplefilter("ignore", DeprecationWarning)
            for path in Path(folder).rglob("*.xplane.pb"):
                events += _launches_in(path)
    return sorted(events)


def _launches_in(path: Path) -> Iterator[Launch]:
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for e in line.events:
                    yield Launch(e.start_ns, e.name, e.duration_ns / 1e3, _in_graph(e))


def _in_graph(event: Any) -> bool:
    return any(name == "cuda_graph_id" and value for name, value in event.stats)


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
