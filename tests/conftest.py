"""What every test runs under: the CPU as four devices, strict dtypes and ranks, a clean Mosaic GPU interpreter."""

from __future__ import annotations

import collections
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# What `make test` fetches, so that GPU kernels can be compiled without a GPU; not on the path of ordinary runs,
# because JAX complains about a CUDA plugin that finds no card.
COMPILE_WHEELS = ROOT / ".cuda-wheels"
INTERPRETER = "jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks"


def wants_gpu(config: pytest.Config) -> bool:
    """Whether ``-m gpu`` was asked for: then JAX may choose the card, and there is one device of each kind."""
    expression = config.option.markexpr or ""
    return "gpu" in expression and "not gpu" not in expression


def pytest_addoption(parser: pytest.Parser) -> None:
    """A sample of many alike cases, for a second version of JAX."""
    parser.addoption(
        "--one-in",
        type=int,
        default=1,
        metavar="N",
        help="run the first and then each N-th case of every test",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Set JAX up before any test module imports it."""
    if not wants_gpu(config):
        os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    if not wants_gpu(config):
        jax.config.update("jax_num_cpu_devices", 4)


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the samples that tests and the command line ask for; skip what needs a card where there is none, and say so."""
    every: int = config.option.one_in
    cases, alike = collections.Counter(), collections.Counter()
    left_out = []
    for item in items:
        function = item.nodeid.split("[")[0]
        sample = item.get_closest_marker("sample")
        if sample and not item.get_closest_marker("full"):
            # Who names a single case gets it.
            if alike[function] not in sample.args and item.nodeid not in config.args:
                item.add_marker(pytest.mark.full)
            alike[function] += 1
        if cases[function] % every:
            left_out.append(item)
        cases[function] += 1
    for item in items:
        function = item.nodeid.split("[")[0]
        sample, number = item.get_closest_marker("sample"), alike[function]
        # Named cases are not all that there are.
        if sample and max(sample.args) >= number and not any("::" in name for name in config.args):
            raise pytest.UsageError(
                f"{function} has {number} cases, numbered from 0; its sample asks for {sample.args}"
            )
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    if not wants_gpu(config):
        return
    import jax

    if jax.default_backend() != "gpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=f"JAX found no CUDA card, only {jax.devices()}"))


@pytest.fixture(autouse=True)
def clean_mosaic_interpreter(request: pytest.FixtureRequest):
    """After each test no interpreted Mosaic kernel has shown a race, unless one is `planted`; clear the interpreter.

    A kernel that raised leaves its state behind.
    """
    # It is imported with the first kernel, which is too late to watch it from the start.
    if any(hasattr(request.module, name) for name in ("plgpu", "INTERPRETED")):
        importlib.import_module(INTERPRETER)
    interpreter, earlier = sys.modules.get(INTERPRETER), []
    with pytest.MonkeyPatch.context() as patch:
        if interpreter is not None:
            new_state = interpreter.GPURaceDetectionState

            # Each kernel's state takes the place of the one before, which is asked first.
            def next_state(*arguments, **options):
                earlier.append(races_of(interpreter))
                return new_state(*arguments, **options)

            patch.setattr(interpreter, "GPURaceDetectionState", next_state)
        yield
    interpreter = sys.modules.get(INTERPRETER)
    if interpreter is None:
        return
    found = any((*earlier, races_of(interpreter)))
    interpreter.reset_gpu_interpret_mode_state()
    if not request.node.get_closest_marker("planted"):
        assert not found, "the Mosaic GPU interpreter found a race; its output says where"


def races_of(interpreter: types.ModuleType) -> bool:
    """Whether the kernel that ran last showed a race; False if none has run."""
    return interpreter._races is not None and interpreter._races.races_found


@pytest.fixture(scope="session")
def compile_environment() -> dict[str, str]:
    """The environment of a subprocess that compiles GPU programs without a GPU.

    A bad kernel may abort its process, so each compilation belongs in a subprocess, as `compile_case` does it:
    ``subprocess.run([sys.executable, script], env=compile_environment)``. Skips where the wheels are missing.
    """
    environment = dict(os.environ, JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="3")
    if importlib.util.find_spec("jax_cuda12_plugin"):
        return environment
    plugins = list(importlib.metadata.distributions(name="jax-cuda12-plugin", path=[str(COMPILE_WHEELS)]))
    if not plugins:
        pytest.skip("the CUDA compile wheels are not here; `scripts/setup.sh compile` fetches them")
    wanted = importlib.metadata.version("jax")
    if plugins[0].version != wanted:
        pytest.fail(f"{COMPILE_WHEELS.name} holds the plugin {plugins[0].version}, but jax is {wanted}")
    paths = [str(COMPILE_WHEELS), *filter(None, [environment.get("PYTHONPATH")])]
    return environment | {"PYTHONPATH": os.pathsep.join(paths)}
