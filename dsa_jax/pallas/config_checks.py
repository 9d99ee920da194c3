"""Checks of the kernels' configurations: what a field may be, said by name when it is something else."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

Limit = tuple[Callable[[Any], bool], str]
"""Whether a value is good, and what it should be."""


def power_of_two(least: int = 1, most: int = 1 << 30) -> Limit:
    """Powers of two within bounds."""
    text = f"a power of two from {least}" + (f" to {most:,}" if most < 1 << 30 else "")
    return lambda x: least <= x <= most and not x & (x - 1), text


def multiple_of(step: int, least: int = 0, most: int = 1 << 30) -> Limit:
    """Multiples of a step within bounds."""
    text = f"a multiple of {step} from {least}" + (f" to {most:,}" if most < 1 << 30 else "")
    return lambda x: least <= x <= most and x % step == 0, text


def one_of(*values: Any) -> Limit:
    """One of some values."""
    return lambda x: x in values, " or ".join(map(str, values))


def check_fields(config: Any, **limits: Limit) -> None:
    """Refuse a configuration's values, for a ``__post_init__``: the types of all fields first, then their limits.

    Raises:
        ValueError: with all problems, named by module and class.
    """
    name = f"{type(config).__module__.rpartition('.')[2]}.{type(config).__name__}"
    check_types(type(config), vars(config), name)
    bad = [
        f"{field} is {getattr(config, field)!r}, wanted {text}"
        for field, (good, text) in limits.items()
        if not good(getattr(config, field))
    ]
    if bad:
        raise ValueError(f"{name}: {'; '.join(bad)}. Change these fields.")


def check_types(make: type, fields: Mapping[str, Any], name: str | None = None) -> None:
    """Refuse fields that a configuration's class does not have or lacks, and values of another type.

    Args:
        make: the class, a dataclass.
        fields: values by the names of fields.
        name: the class's name in messages.

    Raises:
        ValueError: with all problems.
    """
    hints, problems = typing.get_type_hints(make), []
    known = {field.name: field for field in dataclasses.fields(make)}
    for field, value in fields.items():
        if field not in known:
            problems.append(f"unknown field {field!r}, wanted one of {', '.join(known)}")
        elif not _fits(value, hints[field]):
            problems.append(f"{field} is {value!r}, wanted {_text(hints[field])}")
    for field, given in known.items():
        if field not in fields and given.default is given.default_factory is dataclasses.MISSING:
            problems.append(f"{field} is missing")
    if problems:
        raise ValueError(f"{name or make.__name__}: {'; '.join(problems)}")


def _text(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has the type of a field."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        each = [arguments[0]] * len(value) if arguments[1:] == (Ellipsis,) else arguments
        return len(value) == len(each) and all(map(_fits, value, each))
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
