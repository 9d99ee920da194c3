"""``dsa-jax support``: which implementation runs where."""

from __future__ import annotations

import argparse


def add_parser(commands) -> None:
    """Add the command to the parser of ``dsa-jax``."""
    parser = commands.add_parser(
        "support", help="print which implementation runs where", description="The support matrix, op by op."
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    from dsa_jax import support

    print(support.document(), end="")
