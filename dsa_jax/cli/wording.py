"""What the library says of its arguments, in the words of the command line."""

from __future__ import annotations

import re

_OPTIONS = {
    "manager": "--manager",
    "page_size": "--page-size",
    "key_form": "--kv-dtype",
    "index_form": "--index-dtype",
    "gpu_memory": "--gpu-memory",
    "weight_bytes": "--weights",
    "batch": "--batch",
    "context": "--context",
    "implementation": "--implementation",
}
"""Arguments of the library that options set. Fields of a config.json keep their names: they are mended there."""

_REPLACED = (
    ("implementation=None", "no --implementation"),
    ("draft=True", "--draft is given"),
    ("use draft=False", "leave --draft out"),
)


def in_options(message: str) -> str:
    """A message of the library with options in the place of arguments.

    >>> in_options("page_size=48: use page_size=64 or another key_form")
    '--page-size 48: use --page-size 64 or another --kv-dtype'
    >>> in_options("use index_form='f32' for this model, or manager='v1'")
    'use --index-dtype f32 for this model, or --manager v1'
    """
    for words, instead in _REPLACED:
        message = message.replace(words, instead)
    for name, option in _OPTIONS.items():
        message = re.sub(rf"(?<![\w.'-]){name}='?([\w.,]*\w)'?", rf"{option} \1", message)
    # A bare name is an argument only where it cannot be an English word.
    return re.sub(
        r"(?<![\w.'-])(page_size|key_form|index_form|gpu_memory|weight_bytes)(?![\w'])", _option, message
    )


def _option(match: re.Match[str]) -> str:
    return _OPTIONS[match[1]]
