"""The fixture of conftest.py that fails a test if an interpreted Mosaic kernel showed a race."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
CASES = '''
import importlib
import inspect

import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu


def kernels(*races):
    """What the interpreter does at the start of each kernel, and on a race; JAX 0.12 does not ask for the cores."""
    callbacks = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks")
    state = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.race_detection_state")
    asked = inspect.signature(state.GPURaceDetectionState).parameters
    for found in races:
        callbacks._races = callbacks.GPURaceDetectionState(**({"num_cores": 1} if "num_cores" in asked else {}))
        callbacks._races.races_found = found


def test_none_ran(): pass
def test_clean(): kernels(False, False)
def test_last(): kernels(False, True)
def test_first(): kernels(True, False)
@pytest.mark.planted
def test_planted(): kernels(True, False)
def test_clean_again(): kernels(False)
'''
NO_KERNELS = """
import sys


def test_costs_nothing():
    assert "jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks" not in sys.modules
"""


def test_a_race_of_any_kernel_fails_its_test(tmp_path):
    for name, text in {"test_a.py": NO_KERNELS, "test_b.py": CASES}.items():
        (tmp_path / name).write_text(text)
    for file in (TESTS / "conftest.py", TESTS.parent / "pyproject.toml"):
        shutil.copy(file, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rA", "--tb=line", "test_a.py", "test_b.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    errors = {
        line.split("::")[1].split()[0] for line in done.stdout.splitlines() if line.startswith("ERROR ")
    }
    assert errors == {"test_last", "test_first"}, done.stdout
    assert "7 passed, 2 errors" in done.stdout
