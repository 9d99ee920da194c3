"""Find schedules for the present card: ``python -m benchmarks.tune KERNEL SHAPE... [--write FILE]``.

A shape is ``name=number`` pairs joined by commas, as in ``rows=64,columns=32768``; ``python -m benchmarks.tune --list`` says
which numbers a kernel takes. Every candidate schedule is compared with the reference before it is timed; the table gives
device times of one call and the ratio to the schedule that the library chooses today. ``--write`` puts the fastest schedule
of each shape that is faster than today's into a JSON file of rules, beside the rules that it holds, for cards of this name
and exactly that shape. Widen the intervals by hand where it is known to hold; ``dsa_jax.pallas.tuning.load(FILE)`` uses it.

The exit code is 0 if every shape has a schedule that is right, 1 if not, and 2 for wrong arguments or without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from benchmarks.timing import device_times
from benchmarks.tune_kernels import KERNELS, Problem, Shape
from dsa_jax.compat import target_device
from dsa_jax.pallas import tuning

PASSES = 2
"""How often all schedules are timed, one after another; the shortest time counts, so that no drift favours one."""


@dataclasses.dataclass
class Timed:
    """A schedule of a shape: what its check said and, where that was good, microseconds of a call."""

    config: Any
    check: str
    us: float | None = None


def measure(
    problem: Problem,
    configs: Sequence[Any],
    times: Callable[[Callable, Sequence[tuple]], dict[str, float]] = device_times,
) -> list[Timed]:
    """Check and time schedules of a problem; one that does not compile, run or agree gets no time.

    Args:
        problem: what to call, with which arguments, and how to check it.
        configs: schedules.
        times: as `device_times`.
    """
    results, programs = [], []

    def build(config: Any):
        return jax.jit(problem.call(config)).lower(*problem.arguments[0]).compile()

    with ThreadPoolExecutor(4) as threads:
        for config, future in [(config, threads.submit(build, config)) for config in configs]:
            program = None
            try:
                program = future.result()
                check = problem.check(program)
            except Exception as error:  # one bad schedule must not cost the others their turn
                check = f"{type(error).__name__}: {str(error)[:200]}"
            results.append(Timed(config, check))
            programs.append(program)
    for _ in range(PASSES):
        for result, program in zip(results, programs, strict=True):
            if result.check == "ok":
                us = counted(times(program, problem.arguments), problem.kernel)
                result.us = us if result.us is None else min(us, result.us)
    return results


def counted(times: dict[str, float], kernel: str) -> float:
    """Microseconds of a call: of the kernels whose names contain `kernel`, of all if it is empty."""
    own = [us for name, us in times.items() if kernel in name and name not in ("total", "queued")]
    return (
        sum(own) if kernel and own else times.get("total", times["queued"])
    )  # the queue's where there is no profiler


def fields_of(config: Any) -> dict[str, Any]:
    """The fields of a configuration that a rule must name: those that its class does not set, or sets otherwise."""
    return {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.default is dataclasses.MISSING or getattr(config, field.name) != field.default
    }


def add_rule(path: Path, kernel: str, kind: str, rule: dict[str, Any]) -> None:
    """Put a rule first in a file's list for a kernel and kind of device, in place of one with the same conditions.

    Raises:
        ValueError: if the file holds no rules; it stays as it is.
    """
    content: dict[str, Any] = {}
    if path.exists():
        text = path.read_text(encoding="utf-8")
        tuning.read(text, str(path))
        content = json.loads(text)
    kinds = content.setdefault(kernel, {})
    others = [other for other in kinds.get(kind, []) if other.get("when", {}) != rule["when"]]
    kinds[kind] = [rule, *others]
    text = json.dumps(content, indent=1) + "\n"
    tuning.read(text, str(path))
    path.write_text(text, encoding="utf-8")


def shape_of(kernel: str, text: str) -> Shape:
    """A kernel's shape from ``name=number`` pairs.

    Raises:
        ValueError: for a name that the kernel does not have or lacks, or a value that it does not take.
    """
    known, shape = KERNELS[kernel].numbers, {}
    for pair in text.split(","):
        name, _, value = pair.partition("=")
        if name not in known:
            raise ValueError(f"{text!r}: {kernel} has no {name!r}; it takes {', '.join(known)}")
        if name == "form":
            shape[name] = value
        elif value.isdecimal() and int(value) > 0:
            shape[name] = int(value)
        else:
            raise ValueError(f"{text!r}: {name} is {value!r}, wanted a positive number")
    shape = {name: shape.get(name, default) for name, default in known.items()}
    if missing := [name for name, value in shape.items() if value is None]:
        raise ValueError(f"{text!r}: {kernel} needs {', '.join(missing)} as well, such as {missing[0]}=64")
    if refusal := KERNELS[kernel].refuses(shape):
        raise ValueError(f"{text!r}: {refusal}")
    return shape


def best_of(results: Sequence[Timed]) -> Timed | None:
    """The fastest of the schedules that are right."""
    return min((r for r in results if r.us is not None), key=lambda r: r.us or 0, default=None)


def table(results: Sequence[Timed]) -> list[str]:
    """One line for each schedule, today's first and then by time."""
    first, *others = results
    others.sort(key=lambda r: (r.us is None, r.us))
    lines = []
    for result in (first, *others):
        name = " ".join(f"{k}={v}" for k, v in fields_of(result.config).items()) or "the class's defaults"
        us = "        -" if result.us is None else f"{result.us:9.2f}"
        ratio = f"{result.us / first.us:6.3f}" if result.us and first.us else "     -"
        lines.append(f"{us} us {ratio}  {result.check:4} {'(today) ' if result is first else ''}{name}")
    return lines


def tune(kernel: str, shape: Shape, write: Path | None, times=device_times) -> bool:
    """Time one shape, print its table and write its rule; whether a schedule is right."""
    own = KERNELS[kernel]
    today = own.default(shape)
    configs = [today, *(c for c in own.candidates(shape) if c != today)]
    results = measure(own.problem(shape), list(dict.fromkeys(configs)), times)
    title = ",".join(f"{name}={value}" for name, value in shape.items())
    print(f"{kernel} {title}", *table(results), sep="\n", flush=True)
    best = best_of(results)
    if best is None:
        print("no schedule is right", flush=True)
        return False
    if best.config == today:
        print("today's schedule is the fastest", flush=True)
    elif write:
        before = f", {results[0].us:.2f} us before" if results[0].us else ""
        when = {
            name: [value] if name == "form" else [value, value] for name, value in own.when(shape).items()
        }
        why = f"{best.us:.2f} us{before}, jax {jax.__version__}"
        rule = {"when": when, "config": fields_of(best.config), "why": why}
        add_rule(write, kernel, target_device().kind, rule)
        print(f"written to {write}", flush=True)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; gives its exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks.tune", description=__doc__)
    parser.add_argument("kernel", nargs="?", choices=[*KERNELS], metavar="KERNEL", help=", ".join(KERNELS))
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help="such as rows=64,columns=32768")
    parser.add_argument("--write", type=Path, metavar="FILE", help="JSON file of rules to write to")
    parser.add_argument(
        "--list", action="store_true", help="list the kernels and the numbers of their shapes"
    )
    options = parser.parse_args(arguments)
    if options.list:
        for name, own in KERNELS.items():
            numbers = ",".join(f"{k}={'N' if v is None else v}" for k, v in own.numbers.items())
            print(f"{name:28} {numbers}")
        return 0
    if not options.kernel or not options.shapes:
        parser.error("wanted a KERNEL and at least one SHAPE; --list names them")
    try:
        shapes = [shape_of(options.kernel, text) for text in options.shapes]
        if options.write and options.write.exists():
            tuning.read(options.write.read_text(encoding="utf-8"), str(options.write))
    except ValueError as error:
        parser.error(str(error))
    device = target_device()
    if device.platform != "gpu":
        print(
            f"tune: JAX found no NVIDIA GPU, only {device}; run this on the card to tune for.",
            file=sys.stderr,
        )
        return 2
    try:
        for shape in shapes:
            KERNELS[options.kernel].supported(device, shape)
    except NotImplementedError as error:
        print(f"tune: {options.kernel} on {device}: {error}", file=sys.stderr)
        return 2
    print(device, "jax", jax.__version__, flush=True)
    right = [tune(options.kernel, shape, options.write) for shape in shapes]
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
