"""The command ``dsa-jax``.

Bad input ends with one line that says what is wrong and how to mend it, exit code 2, and nothing written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dsa_jax import __version__
from dsa_jax.cli import generate, layout, plan, support


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Returns:
        The exit code: 0, or 2 for bad input.
    """
    parser = argparse.ArgumentParser(
        prog="dsa-jax",
        description="DeepSeek Sparse Attention in JAX: run the shipped model through its paged cache, inspect layouts.",
    )
    parser.add_argument("--version", action="version", version=f"dsa-jax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (generate, layout, plan, support):
        command.add_parser(commands)
    arguments = parser.parse_args(argv)
    try:
        arguments.run(arguments)
    except (ValueError, NotImplementedError, ExceptionGroup) as error:
        # What the library refuses, it explains; a traceback would only hide the explanation.
        print(f"dsa-jax: error: {_explain(error)}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has left; Python would complain at exit
        return 0
    return 0


def _explain(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return f"{error.message}: " + "; ".join(_explain(e) for e in error.exceptions)
    return str(error)
