"""Checks that several ops share. They run at trace time, before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from dsa_jax.cache import Cache
from dsa_jax.metadata import Step


class Problems:
    """Collects everything that is wrong with a call, so that one error names it all."""

    def __init__(self, operation: str):
        self.operation = operation
        self.found: list[str] = []

    def shape(self, name: str, array, wanted: Sequence[int | None], letters: str) -> None:
        """Note a shape that differs; None in ``wanted`` matches any size."""
        shape = tuple(array.shape)
        if len(shape) != len(wanted) or any(
            w is not None and s != w for s, w in zip(shape, wanted, strict=False)
        ):
            sizes = ", ".join("any" if w is None else str(w) for w in wanted)
            self.found.append(f"{name} has shape {list(shape)}, wanted [{letters}] = [{sizes}]")

    def dtype(self, name: str, array, wanted: Sequence[str]) -> None:
        """Note a dtype that is not one of ``wanted``; ``"float"`` stands for every float of 16 bits or more."""
        name_of = np.dtype(array.dtype).name
        is_float = jnp.issubdtype(array.dtype, jnp.floating) and np.dtype(array.dtype).itemsize >= 2
        if name_of not in wanted and not ("float" in wanted and is_float):
            self.found.append(f"{name} has dtype {name_of}, wanted {' or '.join(wanted)}")

    def same_layout(self, cache: Cache, step: Step) -> None:
        """Note a step that was derived for another cache geometry."""
        if cache.layout != step.layout:
            self.found.append(
                "the step's layout is not the cache's "
                f"(page_size {step.layout.page_size} and {cache.layout.page_size}, manager {step.layout.manager} and "
                f"{cache.layout.manager}, forms {step.layout.key_form}/{step.layout.index_form} and "
                f"{cache.layout.key_form}/{cache.layout.index_form}); build the metadata with layout=cache.layout"
            )

    def note(self, problem: str) -> None:
        """Note any other problem."""
        self.found.append(problem)

    def raise_if_any(self, fix: str) -> None:
        """Raise one ValueError with all problems and the fix, if there are any."""
        if self.found:
            raise ValueError(f"{self.operation}: " + "; ".join(self.found) + f". {fix}")
