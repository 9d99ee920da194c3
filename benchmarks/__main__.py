"""All benchmarks, one after another: ``python -m benchmarks [--json FOLDER] [--xla]``.

Prints every suite's table and writes its JSON file into the folder, and beside them one plot of all times.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import plot

SUITES = (
    "kernel_check",
    "fp4_check",
    "topk_append_check",
    "sparse_mla_check",
    "layer_check",
    "windows_check",
)
WITH_XLA = SUITES[:3]
"""Those that time the reference only when asked; the others always do."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every suite in a process of its own; the exit code is that of the first that failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results"), metavar="FOLDER")
    parser.add_argument("--xla", action="store_true", help="time the reference on every shape as well (slow)")
    options = parser.parse_args(arguments)
    # In a process of its own: here, JAX would take the card's memory from the suites.
    look = "from benchmarks.timing import require_card; require_card('python -m benchmarks')"
    if code := subprocess.run([sys.executable, "-c", look], check=False).returncode:
        sys.exit(code)
    plot.figure_class()  # without matplotlib there is no plot: better said now than in ten minutes
    options.json.mkdir(parents=True, exist_ok=True)
    failed = 0
    for suite in SUITES:
        print(f"--- {suite}", flush=True)
        file = options.json / f"{suite}.json"
        file.unlink(missing_ok=True)  # the plot must not show an earlier run beside this one
        command = [sys.executable, "-m", f"benchmarks.{suite}", "--json", str(file)]
        command += ["--seconds", "600"]  # a suite's own limit may leave shapes out
        if options.xla and suite in WITH_XLA:
            command += ["--xla"]
        code = subprocess.run(command, check=False).returncode
        failed = failed or code
    plot.main([str(options.json)])
    sys.exit(failed)


if __name__ == "__main__":
    main()
