"""``dsa-jax layout``: where each byte of a model's caches lives."""

from __future__ import annotations

import argparse

from dsa_jax.cli.options import count, find_config
from dsa_jax.forms import INDEX_FORMS, KEY_FORMS
from dsa_jax.layout import CacheLayout


def add_parser(commands) -> None:
    """Add the command to the parser of ``dsa-jax``."""
    parser = commands.add_parser(
        "layout",
        help="print the layout of a model's caches",
        description="Bytes, pools and pages of a model's caches.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=None,
        metavar="MODEL",
        help="preset or checkpoint folder (default: the shipped model)",
    )
    parser.add_argument("--manager", choices=("v1", "v2"), default="v2", help="cache manager (default v2)")
    parser.add_argument("--page-size", type=count, default=64, help="tokens per page (default 64)")
    parser.add_argument(
        "--kv-dtype", choices=KEY_FORMS, default="bf16", help="form of the latents (default bf16)"
    )
    parser.add_argument(
        "--index-dtype", choices=INDEX_FORMS, default="fp8", help="form of the index keys (default fp8)"
    )
    parser.add_argument("--slots", type=count, default=1, help="slots of the typed arrays (default 1)")
    parser.add_argument("--json", action="store_true", help="print the whole description as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        ValueError: for an unknown model or a layout that cannot be.
    """
    name, config = find_config(arguments.model)
    layout = CacheLayout.create(
        config,
        manager=arguments.manager,
        key_form=arguments.kv_dtype,
        index_form=arguments.index_dtype,
        page_size=arguments.page_size,
    )
    if arguments.json:
        print(layout.to_json(arguments.slots))
    else:
        print(f"{name}\n{layout.table(arguments.slots)}")
