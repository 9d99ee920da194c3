"""One piece of text with its origin."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Document:
    """One piece of text with its origin.

    Attributes:
        source: key of `LICENCES`.
        module: dotted name of the module whose source holds the text; the unit of the split.
        name: qualified name of the documented object, or of the help topic.
        text: the text itself, without trailing space on any line.
    """

    source: str
    module: str
    name: str
    text: str


def normalise(text: str) -> str:
    """Expands tabs, unifies line ends, removes trailing space and more than two empty lines in a row."""
    lines = [line.rstrip() for line in text.expandtabs().replace("\r\n", "\n").split("\n")]
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip("\n")
