"""Checks that several ops share. They run at trace time, before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dsa_jax.arguments import described, expect, is_scale
from dsa_jax.cache import Cache
from dsa_jax.compat import is_traced
from dsa_jax.layout import CacheLayout, Role
from dsa_jax.metadata import Step, StepMetadata

FIX_CACHE = "Pass what Cache.create(layout, slots) or another op returned."
FIX_STEP = "Pass meta.derive(), called at the top of the jitted step."


def check_cache(operation: str, cache: Any) -> None:
    """Raise ValueError for anything but a cache with arrays that are there, before anything looks into it."""
    expect(operation, "cache", cache, Cache, FIX_CACHE)
    for leaf in jax.tree.leaves(cache):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"{operation}: cache is abstract, it has shapes and no arrays; wanted one with arrays. {FIX_CACHE}"
            )
        if isinstance(leaf, Array) and not is_traced(leaf) and leaf.is_deleted():
            raise ValueError(
                f"{operation}: cache has deleted arrays: it was donated to an earlier call. Go on with the cache that this "
                "call returned, or do not donate."
            )


def check_step(operation: str, step: Any) -> None:
    """Raise ValueError for anything but a derived step; the metadata that it is derived from is the usual mistake."""
    if isinstance(step, StepMetadata):
        raise ValueError(
            f"{operation}: step is the StepMetadata itself, wanted the Step derived from it. {FIX_STEP}"
        )
    expect(operation, "step", step, Step, FIX_STEP)


def check_layer(operation: str, cache: Cache, layer: int | Array, role: Role) -> None:
    """Raise ValueError for a layer that has no pages of ``role``, before anything is computed.

    A value is checked itself; a traced one cannot be, but where no layer has such pages it cannot be right either.
    """
    if getattr(layer, "shape", ()) != ():
        raise ValueError(
            f"{operation}: layer is {described(layer)}, wanted one local layer number, a Python int or an int32 scalar. "
            "Call the op once per layer."
        )
    cache.check_layer(operation, role, layer)
    if is_traced(layer) and not cache.layout.scale(role):
        cache.check_layer(operation, role, 0)


class Problems:
    """Collects everything that is wrong with a call, so that one error names it all."""

    def __init__(self, operation: str):
        self.operation = operation
        self.found: list[str] = []

    def shape(self, name: str, array, wanted: Sequence[int | None], letters: str) -> None:
        """Note a shape that differs; None in ``wanted`` matches any size."""
        if not _is_array(array):
            looks_like_one = hasattr(array, "shape") and not isinstance(array, type)
            came = (
                f"a {type(array).__name__}, which is no JAX or NumPy array"
                if looks_like_one
                else described(array)
            )
            self.found.append(f"{name} is {came}, wanted {f'an array [{letters}]' if wanted else 'a scalar'}")
            return
        shape = tuple(array.shape)
        if len(shape) != len(wanted) or any(
            w is not None and s != w for s, w in zip(shape, wanted, strict=False)
        ):
            sizes = ", ".join("any" if w is None else str(w) for w in wanted)
            text = f"[{letters}] = [{sizes}]" if wanted else "a scalar"
            self.found.append(f"{name} has shape {list(shape)}, wanted {text}")

    def dtype(self, name: str, array, wanted: Sequence[str]) -> None:
        """Note a dtype that is not one of ``wanted``; ``"float"`` stands for every float of 16 bits or more."""
        if not _is_array(array):
            return  # ``shape`` says so
        name_of = str(array.dtype)
        is_float = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize >= 2
        if name_of not in wanted and not ("float" in wanted and is_float):
            self.found.append(f"{name} has dtype {name_of}, wanted {' or '.join(wanted)}")

    def scale(self, name: str, value: Any) -> None:
        """Note what is no positive scalar. An array on a device keeps its value to itself: reading it would make us wait."""
        if isinstance(value, (Array, np.ndarray)):
            self.shape(name, value, (), "")
            self.dtype(name, value, ("float",))
            if isinstance(value, Array) or value.shape or not jnp.issubdtype(value.dtype, jnp.floating):
                return
            value = value.item()
        if not is_scale(value):
            self.found.append(
                f"{name} is {described(value)}, wanted a positive finite number, in float32 too"
            )

    def same_layout(self, cache: Cache, step: Step) -> None:
        """Note a step that was derived for another cache geometry."""
        if cache.layout != step.layout:
            # Pools follow from the rest, and are long.
            pairs = (
                (field.name, getattr(step.layout, field.name), getattr(cache.layout, field.name))
                for field in fields(CacheLayout)
                if field.name != "pools"
            )
            differ = [
                f"{name} {described(came)} and {described(held)}"
                for name, came, held in pairs
                if came != held
            ]
            self.found.append(
                f"the step's layout is not the cache's ({', '.join(differ or ['their pools differ'])}); "
                "build the metadata with layout=cache.layout"
            )

    def note(self, problem: str) -> None:
        """Note any other problem."""
        self.found.append(problem)

    def raise_if_any(self, fix: str) -> None:
        """Raise one ValueError with all problems and the fix, if there are any."""
        if self.found:
            raise ValueError(f"{self.operation}: " + "; ".join(self.found) + f". {fix}")


def _is_array(value: Any) -> bool:
    """Whether JAX takes a value as an array: a description of one, or another library's, has a shape and a dtype, too."""
    return isinstance(value, (Array, np.ndarray, np.generic)) or hasattr(value, "__jax_array__")
