"""The command ``dsa-jax``.

Bad input ends with one line that says what is wrong and how to mend it, exit code 2, and nothing written.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

import jax

from dsa_jax import __version__
from dsa_jax.cli import generate, layout, plan, support
from dsa_jax.cli.wording import in_options

BAD_INPUT = 2
NOT_WRITTEN = 1
INTERRUPTED = 128 + 2  # the shell's number for SIGINT
NO_READER = 128 + 13  # and for SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Returns:
        The exit code: 0; 2 for bad input; 1 where the output cannot be written; 130 for Ctrl-C, 141 where the reader of the
        output has left, both without a word, as shells expect.
    """
    try:
        if sys.stdout is None:
            raise OSError("it is closed")
        try:
            return _command(argv)
        finally:
            sys.stdout.flush()  # here, where a failure can be told; Python would print a traceback at exit
    except BrokenPipeError:
        _drop_output()
        return NO_READER
    except KeyboardInterrupt:
        _drop_output()
        return INTERRUPTED
    except OSError as error:
        if error.filename is not None:  # some other file
            return _refuse(f"{error.filename}: {error.strerror}", BAD_INPUT)
        _drop_output()
        return _refuse(f"standard output cannot be written ({error.strerror or error})", NOT_WRITTEN)


def _command(argv: Sequence[str] | None) -> int:
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
        return _refuse(in_options(_explain(error)), BAD_INPUT)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise  # a fault of ours, which needs its traceback
        why = str(error).partition("\n")[0] or "MemoryError"
        return _refuse(f"{arguments.command}: there is too little memory ({why}); ask for less", BAD_INPUT)
    return 0


def _refuse(message: str, code: int) -> int:
    with contextlib.suppress(AttributeError, OSError):  # nowhere to complain; the exit code says it all
        sys.stderr.write(f"dsa-jax: error: {message}\n")
        sys.stderr.flush()
    return code


def _drop_output() -> None:
    """Send what is still buffered nowhere: Python writes it at exit, and would complain there once more."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (AttributeError, OSError, ValueError):
        pass  # no output, or none of the operating system's


def _explain(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return f"{error.message}: " + "; ".join(_explain(e) for e in error.exceptions)
    return str(error)
