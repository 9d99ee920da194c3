"""Mosaic GPU kernels in their interpreter, with everything asked for that it can find."""

from __future__ import annotations

import importlib

from jax.experimental.pallas import mosaic_gpu as plgpu

INTERPRETED = plgpu.InterpretGPUParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
)


def races_found() -> bool:
    """Whether the interpreter saw two accesses in no order since it was last reset."""
    return (
        importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks").get_races().races_found
    )
