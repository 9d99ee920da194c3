"""Choice of implementation: one rule for all ops.

``implementation=None`` lets the library choose and never fails, because the exact XLA reference is last. A named
implementation is used or raises; a sequence is tried in its order. Only ``NotImplementedError`` ("this implementation
cannot do that here") lets the next candidate try; every other exception is the caller's to see at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dsa_jax.compat import Device, target_device

Implementation = Literal["mosaic", "triton", "xla"]
Choice = Implementation | Sequence[Implementation] | None

NAMES = ("mosaic", "triton", "xla")


@dataclass(frozen=True)
class Candidate:
    """One implementation of an op.

    Attributes:
        name: ``"mosaic"``, ``"triton"`` or ``"xla"``.
        run: takes the op's checked arguments.
        supported: raises ``NotImplementedError(reason)`` if it cannot run on the device; None for everywhere.
    """

    name: Implementation
    run: Callable[..., Any]
    supported: Callable[[Device], None] | None = None


def select(
    operation: str, implementation: Choice, candidates: Sequence[Candidate], device: Device | None = None
):
    """The first candidate that may run, with the reasons of those passed over.

    Args:
        operation: name of the op, for messages.
        implementation: None, one name, or names in order of preference.
        candidates: the op's implementations, in the library's order of preference.
        device: the device asked about; the target device of the trace by default.

    Returns:
        The wanted candidates in order, each with its refusal or None; a name that the op lacks has no candidate.
    """
    device = device or target_device()
    wanted = _names(operation, implementation, candidates)
    by_name = {c.name: c for c in candidates}
    result = []
    for name in wanted:
        candidate, refusal = by_name.get(name), None
        if candidate is None:
            refusal = NotImplementedError(
                f"{operation}: has no {name} implementation, only {', '.join(by_name)}. "
                "Pass implementation=None or one of these."
            )
        elif candidate.supported is not None:
            try:
                candidate.supported(device)
            except NotImplementedError as error:
                refusal = NotImplementedError(f"{operation}: {name} on {device}: {error}")
        result.append((candidate, refusal))
    return result


def dispatch(operation: str, implementation: Choice, candidates: Sequence[Candidate], *args, **kwargs):
    """Run the first candidate that can.

    Raises:
        ValueError: for an unknown implementation name.
        NotImplementedError: when the one named implementation cannot run here.
        ExceptionGroup: of all reasons, when several were tried and none can.
    """
    reasons: list[NotImplementedError] = []
    for candidate, refusal in select(operation, implementation, candidates):
        if refusal is None and candidate is not None:
            try:
                return candidate.run(*args, **kwargs)
            except NotImplementedError as error:
                refusal = NotImplementedError(f"{operation}: {candidate.name}: {error}")
        if refusal is not None:
            reasons.append(refusal)
    if len(reasons) == 1:
        raise reasons[0]
    raise ExceptionGroup(
        f"{operation}: no implementation can run here; pass implementation=None or 'xla'", reasons
    )


def _names(operation: str, implementation: Choice, candidates: Sequence[Candidate]) -> Sequence[str]:
    have = [c.name for c in candidates]
    if implementation is None:
        return have
    if isinstance(implementation, Sequence) and not isinstance(implementation, str):
        wanted: list[str] = [*implementation]
    else:
        wanted = [implementation]
    unknown = [name for name in wanted if name not in NAMES]
    if unknown or not wanted:
        raise ValueError(
            f"{operation}: implementation is {implementation!r}; wanted None, one of {', '.join(map(repr, NAMES))}, or a "
            "sequence of them. Pass None to let the library choose."
        )
    return wanted
