"""One figure of what the checks measured: ``python -m benchmarks.plot FOLDER [--out FILE.svg|.png]``.

Reads the JSON files that ``python -m benchmarks --json FOLDER`` writes. Needs matplotlib, and no card.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bars import READERS, Bar

MARKS = {
    "peer": ("DeepGEMM", {"marker": "D", "color": "tab:orange", "markersize": 4}),
    "xla": ("xla, the reference", {"marker": "s", "color": "tab:gray", "markersize": 4}),
    "target": ("target", {"marker": "|", "color": "black", "markersize": 10, "markeredgewidth": 2}),
}
"""What is marked beside a bar: field of `Bar`, name, looks."""
FILLS = {False: ("this library", "tab:blue"), True: ("this library, WRONG result", "tab:red")}


def figure_class() -> Any:
    """matplotlib's figure; its plain class needs no display and leaves no state behind.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        message = f"the plot needs matplotlib ({error}): install it, or the package's extra `viz` or `bench`"
        raise SystemExit(message) from error
    return Figure


def read(folder: Path) -> tuple[dict[str, list[Bar]], str]:
    """``({title: bars}, what the runs say of themselves)`` of the files that are there, in the checks' order.

    Raises:
        SystemExit: no file is there, or one is not what its check writes.
    """
    panels, machines = {}, set()
    for suite, (title, bars_of) in READERS.items():
        file = folder / f"{suite}.json"
        if not file.is_file():
            continue
        try:
            data = json.loads(file.read_text())
            bars = bars_of(data)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            message = f"{file} is not what benchmarks.{suite} writes: {type(error).__name__}: {error}"
            raise SystemExit(message) from error
        if isinstance(data, dict) and "device" in data:
            machines.add(f"{data['device']}, jax {data.get('jax')}")
        if bars:
            panels[title] = bars
    if not panels:
        raise SystemExit(
            f"{folder} has no times: wanted some of {', '.join(f'{name}.json' for name in READERS)}"
        )
    return panels, "; ".join(sorted(machines))


def draw(panels: dict[str, list[Bar]], machine: str = "") -> Any:
    """A figure with a panel for each check, all on one logarithmic axis of microseconds.

    Args:
        panels: title -> at least one bar, first one on top.
        machine: for the head of the figure.
    """
    sizes = [len(bars) for bars in panels.values()]
    figure = figure_class()(figsize=(11, 0.2 * sum(sizes) + 0.35 * len(sizes) + 1.2), layout="constrained")
    ratios = [size + 1 for size in sizes]
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    handles: dict[str, Any] = {}
    for axis, (title, bars) in zip(axes, panels.items(), strict=True):
        for wrong, (name, colour) in FILLS.items():
            mine = [(place, bar.us) for place, bar in enumerate(bars) if bar.wrong == wrong]
            if mine:
                handles[name] = axis.barh(*zip(*mine, strict=True), height=0.7, color=colour, alpha=0.7)
        for field, (name, looks) in MARKS.items():
            mine = [(us, place) for place, bar in enumerate(bars) if (us := getattr(bar, field))]
            if mine:
                (handles[name],) = axis.plot(*zip(*mine, strict=True), linestyle="", **looks)
        axis.set_yticks(range(len(bars)), [describe(bar) for bar in bars], fontsize=7)
        axis.set_ylim(len(bars) - 0.4, -0.6)
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_xscale("log")
        axis.grid(axis="x", alpha=0.4)
        axis.set_axisbelow(True)
    axes[-1].set_xlabel(
        "microseconds: kernels' device time; of layers and steps, of windows without a profiler, queued"
    )
    figure.suptitle(machine, fontsize=10)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), fontsize=8
    )
    return figure


def describe(bar: Bar) -> str:
    """The label of a bar: name and time, so that the figure can be read without the axis."""
    return f"{bar.label}   {bar.us:,.{2 if bar.us < 10 else 1 if bar.us < 1000 else 0}f} us"


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the folder's figure, and say where it is."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the JSON files are")
    parser.add_argument("--out", type=Path, help="SVG or PNG file; FOLDER/benchmarks.svg by default")
    options = parser.parse_args(arguments)
    file = options.out or options.folder / "benchmarks.svg"
    if file.suffix not in (".svg", ".png"):
        raise SystemExit(f"{file}: the plot is written as .svg or .png")
    draw(*read(options.folder)).savefig(file, dpi=150)
    print(f"plot: {file}")


if __name__ == "__main__":
    main()
