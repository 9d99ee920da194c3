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
        config_type: gives the class of its schedules, which ``run`` then takes as ``config``; None where it has none. A
            function, because that class's module need not be imported otherwise.
    """

    name: Implementation
    run: Callable[..., Any]
    supported: Callable[[Device], None] | None = None
    config_type: Callable[[], type] | None = None


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


def dispatch(
    operation: str,
    implementation: Choice,
    candidates: Sequence[Candidate],
    *args: Any,
    config: Any = None,
    **kwargs: Any,
):
    """Run the first candidate that can.

    Args:
        operation: name of the op, for messages.
        implementation: None, one name, or names in order of preference.
        candidates: the op's implementations, in the library's order of preference.
        *args: the op's checked arguments.
        config: a schedule for the one named implementation; None lets it choose.
        **kwargs: more of the op's arguments.

    Raises:
        ValueError: for an unknown implementation name, or a ``config`` as `check_config` refuses it.
        NotImplementedError: when the one named implementation cannot run here.
        ExceptionGroup: of all reasons, when several were tried and none can.
    """
    check_config(operation, implementation, candidates, config)
    if config is not None:
        kwargs["config"] = config
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


def check_config(
    operation: str, implementation: Choice, candidates: Sequence[Candidate], config: Any, name: str = "config"
) -> None:
    """Refuse a schedule that would not be used: it belongs to one kernel, which must be named with it.

    Args:
        operation, implementation, candidates, config: as in `dispatch`.
        name: what the op calls ``config``.

    Raises:
        ValueError: where no implementation or several are named, or the one named has no schedules or others.
    """
    if config is None:
        return
    have = " or ".join(repr(c.name) for c in candidates if c.config_type is not None)
    fix = f"Pass implementation={have} with {name}, or leave {name} out."
    if not have:
        have, fix = "none", f"Leave {name} out."
    given, names = f"{name} is a {_title(type(config))}", _names(operation, implementation, candidates)
    if implementation is None or len(names) != 1:
        raise ValueError(
            f"{operation}: {given}, but implementation is {implementation!r}; a schedule is for one named kernel. {fix}"
        )
    for candidate in candidates:
        if candidate.name != names[0]:
            continue
        if candidate.config_type is None:
            raise ValueError(f"{operation}: {given}, but {candidate.name!r} has no schedules. {fix}")
        if type(config) is not (wanted := candidate.config_type()):
            raise ValueError(
                f"{operation}: {given}; {candidate.name!r} wants a {_title(wanted)}. Make one, or leave {name} out."
            )


def _title(config: type) -> str:
    """``module.Class``, because several kernels call theirs Config."""
    return f"{config.__module__.rpartition('.')[2]}.{config.__name__}"


def _names(operation: str, implementation: Choice, candidates: Sequence[Candidate]) -> Sequence[str]:
    have = [c.name for c in candidates]
    if implementation is None:
        return have
    if isinstance(implementation, Sequence) and not isinstance(implementation, str):
        wanted: list[str] = [*implementation]
    else:
        wanted = [implementation]
    unknown = [name for name in wanted if not isinstance(name, str) or name not in NAMES]
    if unknown or not wanted:
        raise ValueError(
            f"{operation}: implementation is {implementation!r}; wanted None, one of {', '.join(map(repr, NAMES))}, or a "
            "sequence of them. Pass None to let the library choose."
        )
    return wanted
