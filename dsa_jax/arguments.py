"""What several checks of arguments share: is it a whole number, is it of the right class, and what came in words."""

from __future__ import annotations

from typing import Any

import numpy as np

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
