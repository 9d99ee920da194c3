"""Compile programs for GPUs that are not there, ptxas included, each in a process of its own.

JAX compiles for a card described by its numbers when the wheels of its CUDA plugin are importable. A bad kernel may abort
the process, and what ptxas says of a kernel it says once a process, so each case has its own: a child of a server that
has imported what cases need, seconds that a new interpreter would spend each time. A case is a function
``case(**options) -> (function, shapes)`` named ``"module:case"``, where the shapes are ``jax.ShapeDtypeStruct`` s of the
function's arguments; the numbers of donated arguments may follow.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

_DESCRIPTION = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: %(core_memory)d threads_per_core_limit: 2048 core_count: %(cores)d fpus_per_core: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: %(bandwidth)d l2_cache_size: %(l2)d clock_rate_ghz: 1.41 device_memory_size: %(memory)d
  shared_memory_per_block_optin: %(block_memory)d cuda_compute_capability { major: %(major)d minor: %(minor)d }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 1 }
device_description_str: "%(name)s"
"""


def _card(
    name: str,
    major: int,
    cores: int,
    block_memory: int,
    l2_mib: int,
    bandwidth: int,
    memory_gib: int,
    minor: int = 0,
) -> str:
    return _DESCRIPTION % {
        "name": name,
        "major": major,
        "minor": minor,
        "cores": cores,
        "block_memory": block_memory,
        "core_memory": block_memory + 1024,
        "l2": l2_mib << 20,
        "bandwidth": bandwidth * 10**9,
        "memory": memory_gib << 30,
    }


CARDS = {
    "sm80": _card("NVIDIA A100-SXM4-80GB", 8, 108, 166912, 40, 2039, 80),
    "sm90": _card("NVIDIA H100 80GB HBM3", 9, 132, 232448, 50, 3352, 80),
    "sm100": _card("NVIDIA B200", 10, 148, 232448, 126, 8000, 180),
}

OTHER_CARDS = {
    "sm86": _card("NVIDIA A10", 8, 72, 101376, 6, 600, 24, minor=6),
    "sm89": _card("NVIDIA L40", 8, 142, 101376, 96, 864, 48, minor=9),
    "sm103": _card("NVIDIA B300", 10, 148, 232448, 126, 8000, 288, minor=3),
    "sm120": _card("NVIDIA RTX PRO 6000", 12, 188, 101376, 128, 1792, 96),
}
"""Cards that kernels claim by their capability, without a column of the support matrix. All but the B300 have three fifths
of an A100's shared memory."""


def compile_for(card: str, function: Callable[..., Any], *shapes: Any, donate: tuple[int, ...] = ()) -> Any:
    """Compile a function for one GPU of the given architecture; returns JAX's compiled program."""
    import jax
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        "", "cuda", topology="1x1x1", target_config=(CARDS | OTHER_CARDS)[card]
    )
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes)
    # The mesh in scope tells the library, and Pallas, which card is meant.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function, donate_argnums=donate).trace(*shapes).lower().compile()


def compile_case(environment: dict[str, str], card: str, case: str, **options: Any) -> dict[str, Any]:
    """Compile a case in a process of its own.

    Args:
        environment: what `conftest.compile_environment` gives; the log level is raised, to see warnings of ptxas.
        card: ``"sm80"``, ``"sm90"``, ``"sm100"`` or one of `OTHER_CARDS`.
        case: ``"module:function"``; modules of `tests` are importable.
        options: keyword arguments of the case, as JSON carries them.

    Returns:
        ``{"temp": bytes, "alias": bytes, "calls": [custom call targets], "fusions": count, "spilled": bool}``, or
        ``{"refused": class and message}`` when tracing or compiling raised, or ``{"died": ...}`` when the process did.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder, "answer"), Path(folder, "log")
        code = _server(tuple(environment.items()))(card, case, json.dumps(options), str(answer), str(log))
        said = log.read_text(errors="replace")
        if not answer.exists():
            return {"died": f"exit code {code}: {said[-2000:]}"}
        return {**json.loads(answer.read_text()), "spilled": "spilled to local memory" in said}


@functools.cache
def _server(environment: tuple[tuple[str, str], ...]) -> Callable[..., int]:
    """Start the server; what is returned has it compile a case, and gives the exit code of the case's process."""
    server = subprocess.Popen(
        [sys.executable, __file__],
        env=dict(environment) | {"TF_CPP_MIN_LOG_LEVEL": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # each case has its own log
        text=True,
    )
    assert server.stdin is not None and server.stdout is not None
    lines, answers = server.stdin, server.stdout

    def ask(*case: str) -> int:
        lines.write(json.dumps(case) + "\n")
        lines.flush()
        return int(answers.readline())

    def stop() -> None:
        lines.close()
        server.wait()
        answers.close()

    atexit.register(stop)
    return ask


def _serve() -> None:
    """Compile the cases that come in, one line each, in children of this process, until the input ends."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    for module in ("jax.experimental.pallas.mosaic_gpu", "jax.experimental.pallas.triton", "compile_cases"):
        importlib.import_module(module)
    for line in sys.stdin:
        *case, log = json.loads(line)
        # No backend has started here, so a child has all of JAX and none of its threads is missing there.
        child = os.fork()
        if not child:
            file = os.open(log, os.O_WRONLY | os.O_CREAT)
            for stream in (1, 2):
                os.dup2(file, stream)
            _main(*case)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _main(card: str, case: str, options: str, answer: str) -> None:
    module, name = case.split(":")
    try:
        function, shapes, *donate = getattr(importlib.import_module(module), name)(**json.loads(options))
        program = compile_for(card, function, *shapes, donate=tuple(donate))
    except Exception as error:
        Path(answer).write_text(json.dumps({"refused": f"{type(error).__name__}: {error}"}))
        return
    memory = program.memory_analysis()
    text = program.as_text()
    result = {
        "temp": memory.temp_size_in_bytes,
        "alias": memory.alias_size_in_bytes,
        "calls": [part.split('"')[0] for part in text.split('custom_call_target="')[1:]],
        "fusions": text.count(" fusion("),
    }
    Path(answer).write_text(json.dumps(result))


if __name__ == "__main__":
    _serve()
