"""All benchmarks, one after another: ``python -m benchmarks [folder]`` prints their tables and writes their JSON files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SUITES = ("kernel_check", "topk_append_check", "sparse_mla_check")


def main() -> None:
    """Run every suite in a process of its own; the exit code is that of the first that failed."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results")
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for suite in SUITES:
        print(f"--- {suite}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{suite}", "--json", str(folder / f"{suite}.json")]
        failed = failed or subprocess.run(command, check=False).returncode
    sys.exit(failed)


if __name__ == "__main__":
    main()
