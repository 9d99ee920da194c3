"""What every test runs under: the CPU as four devices, strict dtypes and ranks, a clean Mosaic GPU interpreter."""

from __future__ import annotations

import collections
import importlib.metadata
import importlib.util
import os
import sys
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the sample that was asked for; skip what needs a card where there is none, and say so."""
    every: int = config.option.one_in
    cases = collections.Counter()
    left_out = []
    for item in items:
        function = item.nodeid.split("[")[0]
        if cases[function] % every:
            left_out.append(item)
        cases[function] += 1
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
def clean_mosaic_interpreter():
    """Clear the Mosaic GPU interpreter's global state after each test: a kernel that raised leaves it behind."""
    yield
    interpreter = sys.modules.get(INTERPRETER)
    if interpreter is not None:
        interpreter.reset_gpu_interpret_mode_state()


@pytest.fixture(scope="session")
def compile_environment() -> dict[str, str]:
    """The environment of a subprocess that compiles GPU programs without a GPU.

    A bad kernel may abort its process, so each compilation belongs in a subprocess:
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
