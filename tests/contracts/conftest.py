"""Contracts of an op run its Triton kernels too, in the interpreter, through the op's own signature and dispatch."""

from __future__ import annotations

import pytest

import cases
from dsa_jax.ops import dispatch


@pytest.fixture(autouse=True)
def interpreted_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a contract asks for ``"triton"``, dispatch takes a card for granted; the kernels see the CPU and interpret."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    choice = parameters.get("implementation", ())
    if "triton" in ((choice,) if isinstance(choice, str) else choice or ()):
        monkeypatch.setattr(dispatch, "target_device", lambda: cases.CARD)
