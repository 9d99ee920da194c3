"""The one place that calls Pallas-Triton.

Pallas-Triton is deprecated in JAX since 0.11 and warns whenever a kernel is *lowered*, which under `jit` happens long
after the kernel's function has returned. So a kernel is bound to a primitive of its own here, whose lowering rule lowers
the Pallas call with exactly that warning filtered: callers may run with warnings as errors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.extend import core
from jax.interpreters import batching, mlir

from dsa_jax.compat import target_device

_DEPRECATION = "The Pallas Triton backend is deprecated"

_quiet_p = core.Primitive("pallas_triton")
_quiet_p.multiple_results = True


def interpret_here() -> bool:
    """Whether a Triton kernel traced now must be interpreted, because the target device is no GPU."""
    return target_device().platform != "gpu"


def triton_call(
    body: Callable[..., None],
    *,
    grid: int | tuple[int, ...],
    out_shape: Any,
    name: str,
    num_warps: int = 4,
    num_stages: int = 1,
    input_output_aliases: dict[int, int] | None = None,
    in_specs: Sequence[pl.BlockSpec] | None = None,
    out_specs: Any = None,
    interpret: bool | None = None,
) -> Callable[..., Any]:
    """Wrap `pl.pallas_call` with Triton parameters.

    Args:
        body: the kernel; its refs are whole arrays where no block specs are given. Use a fresh function or
            `functools.partial` per call: JAX 0.11 caches a module-level body's grid.
        grid: at most three dimensions, only the first of which may reach 65,536 programs.
        out_shape: pytree of `jax.ShapeDtypeStruct`.
        name: the kernel's name in profiles.
        num_warps: warps of one program, a power of two up to 32.
        num_stages: depth of Triton's software pipelining.
        input_output_aliases: operand number -> output number written in place.
        in_specs: block specs of the operands, None for whole arrays.
        out_specs: block specs of the outputs, None for whole arrays.
        interpret: run the body as XLA operations; None does so where the target device is no GPU.

    Returns:
        A function of the operands (arrays) that returns what `out_shape` says.
    """
    options: dict[str, Any] = {}
    if in_specs is not None:
        options["in_specs"] = in_specs
    if out_specs is not None:
        options["out_specs"] = out_specs

    def named(*refs: Any) -> None:
        body(*refs)

    named.__name__ = named.__qualname__ = name  # Triton takes the kernel's name from the function
    call = pl.pallas_call(
        named,
        grid=(grid,) if isinstance(grid, int) else grid,
        out_shape=out_shape,
        input_output_aliases=input_output_aliases or {},
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret_here() if interpret is None else interpret,
        name=name,
        **options,
    )

    def run(*operands: Any) -> Any:
        jaxpr, shape = jax.make_jaxpr(call, return_shape=True)(*operands)
        flat = _quiet_p.bind(*jax.tree.leaves(operands), jaxpr=jaxpr)
        return jax.tree.unflatten(jax.tree.structure(shape), flat)

    return run


def _lower(context: mlir.LoweringRuleContext, *operands: Any, jaxpr: core.ClosedJaxpr) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_DEPRECATION, category=DeprecationWarning)
        return mlir.lower_fun(core.jaxpr_as_fun(jaxpr), multiple_results=True)(context, *operands)


def _batch(
    operands: Sequence[Any], dims: Sequence[Any], *, jaxpr: core.ClosedJaxpr
) -> tuple[list[Any], list[int]]:
    batched = jax.make_jaxpr(jax.vmap(core.jaxpr_as_fun(jaxpr), in_axes=tuple(dims)))(*operands)
    outputs = _quiet_p.bind(*operands, jaxpr=batched)
    return outputs, [0] * len(outputs)


_quiet_p.def_impl(lambda *operands, jaxpr: jax.jit(lambda *x: _quiet_p.bind(*x, jaxpr=jaxpr))(*operands))
_quiet_p.def_abstract_eval(lambda *_, jaxpr: list(jaxpr.out_avals))
mlir.register_lowering(_quiet_p, _lower)
batching.primitive_batchers[_quiet_p] = _batch
