"""``dsa-jax plan``: how many tokens of a model's caches fit into a GPU's memory."""

from __future__ import annotations

import argparse
import json

from dsa_jax.cli.options import count, find_config
from dsa_jax.forms import INDEX_FORMS, KEY_FORMS
from dsa_jax.planning import plan
from dsa_jax.sizing import parse_bytes


def size(text: str) -> int:
    """An option's value as a number of bytes."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("parse_bytes: ")) from error


def add_parser(commands) -> None:
    """Add the command to the parser of ``dsa-jax``."""
    parser = commands.add_parser(
        "plan",
        help="plan a model's caches for a GPU",
        description="Tokens, slots and bytes of a model's caches on one device, and whether a batch fits.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=None,
        metavar="MODEL",
        help="preset or checkpoint folder (default: the shipped model)",
    )
    parser.add_argument(
        "--gpu-memory",
        type=size,
        required=True,
        metavar="SIZE",
        help="memory of the device: 80GB, 80GiB or bytes",
    )
    parser.add_argument(
        "--weights", type=size, default=0, metavar="SIZE", help="weights on this device (default 0)"
    )
    parser.add_argument(
        "--kv-dtype", choices=KEY_FORMS, default="bf16", help="form of the latents (default bf16)"
    )
    parser.add_argument(
        "--index-dtype", choices=INDEX_FORMS, default="fp8", help="form of the index keys (default fp8)"
    )
    parser.add_argument("--page-size", type=count, default=64, help="tokens per page (default 64)")
    parser.add_argument("--batch", type=count, default=1, help="requests at the same time (default 1)")
    parser.add_argument(
        "--context", type=count, default=None, help="tokens of each request (default: the model's longest)"
    )
    parser.add_argument("--manager", choices=("v1", "v2"), default="v2", help="cache manager (default v2)")
    parser.add_argument("--draft", action="store_true", help="count a cache for the prediction layers too")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        ValueError: for an unknown model, a layout that cannot be, or memory that holds no slot.
    """
    name, config = find_config(arguments.model)
    planned = plan(
        config,
        gpu_memory=arguments.gpu_memory,
        weight_bytes=arguments.weights,
        manager=arguments.manager,
        key_form=arguments.kv_dtype,
        index_form=arguments.index_dtype,
        page_size=arguments.page_size,
        draft=arguments.draft,
        batch=arguments.batch,
        context=arguments.context,
    )
    if arguments.json:
        print(json.dumps({"model": name} | planned.to_dict(), indent=2))
    else:
        print(f"{name}\n{planned.table()}")
