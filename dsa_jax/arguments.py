"""What several checks of arguments share: is it a whole number, is it of the right class, and what came in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""Names of the dtypes that count as floats where an argument may be any."""
_SHOWN = 40
_PLAIN = (bool, int, float, complex, str, bytes, list, tuple, dict, set, type(None), np.generic)


def is_whole(value: Any) -> bool:
    """Whether a value is a Python or NumPy integer; a bool is none, although Python thinks so.

    >>> [is_whole(value) for value in (3, np.int32(3), True, 3.0, "3", None)]
    [True, True, False, False, False, False]
    """
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a real Python or NumPy number, and no bool."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def described(value: Any) -> str:
    """What came, in a few words: an array by its dtype and shape, a plain value by itself, anything else by its class.

    >>> described(np.zeros((2, 3), np.int32)), described("auto"), described(None), described(range(3))
    ('int32[2, 3]', "'auto'", 'None', 'a range')
    """
    if isinstance(value, _PLAIN):
        try:
            text = repr(value)
        except ValueError:  # an integer of more digits than Python prints
            return f"a {type(value).__name__} too long to print"
        return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return f"a {type(value).__name__}"


def expect(operation: str, name: str, value: Any, wanted: type, fix: str) -> None:
    """Refuse a value of another class before anything looks into it.

    Raises:
        ValueError: naming the operation, the argument, what came, the class that is wanted and the fix.
    """
    if not isinstance(value, wanted):
        raise ValueError(f"{operation}: {name} is {described(value)}, wanted a {wanted.__name__}. {fix}")


def returned(operation: str, name: str, result: Any, parts: Sequence[str], fix: str) -> Any:
    """What a caller's function returned, if it has as many values as ``parts``.

    Raises:
        ValueError: naming the function, what it returned, what is wanted and the fix.
    """
    if isinstance(result, tuple | list) and len(result) == len(parts):
        return result
    came = f"{len(result)} values" if isinstance(result, tuple | list) else described(result)
    raise ValueError(f"{operation}: {name} returned {came}, wanted ({', '.join(parts)}). {fix}")


def is_temperature(value: Any) -> bool:
    """Whether a value is a number of at least 0 that is finite in float32, too."""
    return is_number(value) and bool(0 <= _python(value) <= float(np.finfo(np.float32).max))


def is_scale(value: Any) -> bool:
    """Whether a value is a positive number that float32 holds as a normal one."""
    limits = np.finfo(np.float32)
    return is_number(value) and bool(float(limits.tiny) <= _python(value) <= float(limits.max))


def is_mass(value: Any) -> bool:
    """Whether a value is a probability of more than 0, in float32, too: the smallest normal number up to 1."""
    return is_number(value) and bool(float(np.finfo(np.float32).tiny) <= _python(value) <= 1)


def _python(value: Any) -> Any:
    """A NumPy number as Python's: beside float16, bounds of float32 would be rounded to 0 and infinity."""
    return value.item() if isinstance(value, np.generic) else value


def is_seed(value: Any) -> bool:
    """Whether a value is a whole number of 32 bits: of more, JAX's random keys drop the rest unless it counts in 64."""
    return is_whole(value) and 0 <= value < 2**32


def plain(value: Any) -> Any:
    """The number that an array of no dimension holds; anything else as it came. No array may be traced.

    >>> plain(np.array(3)), plain(3), plain("3")
    (3, 3, '3')
    """
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def misfit(
    name: str, value: Any, shape: Sequence[int | None], dtypes: Sequence[str], wanted: str
) -> list[str]:
    """What is wrong with an argument that must be an array, in words; empty if nothing is.

    Args:
        name: of the argument.
        value: what came.
        shape: the sizes; None matches any.
        dtypes: names of the dtypes that will do.
        wanted: the same for the message, such as ``"int32[2, m]"``.
    """
    fits = (
        hasattr(value, "shape")
        and str(getattr(value, "dtype", "")) in dtypes
        and len(value.shape) == len(shape)
        and all(size in (None, came) for size, came in zip(shape, value.shape, strict=True))
    )
    return [] if fits else [f"{name} is {described(value)}, wanted {wanted}"]
