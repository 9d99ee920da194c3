"""Reading of single fields of a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsa_jax.arguments import described

LARGEST = 2**31 - 1
"""Positions, widths and ids are int32 in every program."""


class FieldReader:
    """Reads fields and collects what is wrong with them, so that one error can name everything.

    Attributes:
        mapping: the configuration.
        problems: what was found wrong so far.
    """

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        """Starts without problems."""
        self.mapping = mapping
        self.problems: list[str] = []

    def integer(self, name: str, default: int | None = None, *, most: int = LARGEST) -> int:
        """A field that is a whole number from 0 to `most`; missing or null gives `default`, or a problem
        without one.
        """
        value = self.mapping.get(name)
        if value is None:
            if default is None:
                self.problems.append(f"{name} is missing")
            return default or 0
        if isinstance(value, bool) or not isinstance(value, int):
            self.problems.append(f"{name}={described(value)} is not an integer")
            return 0
        if value < 0:
            self.problems.append(f"{name}={described(value)} is negative")
        if value > most:
            self.problems.append(f"{name}={described(value)} is too large, wanted at most {most:,}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A field that is true or false; missing or null gives `default`."""
        value = self.mapping.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problems.append(f"{name}={described(value)} is not true or false")
        return bool(value)

    def finish(self, architecture: str) -> None:
        """Ends the reading.

        Raises:
            ValueError: there are problems; the message lists them all.
        """
        if self.problems:
            raise ValueError(f"DSAConfig.from_hf({architecture}): " + "; ".join(self.problems))
