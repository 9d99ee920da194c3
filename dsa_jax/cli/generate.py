"""``dsa-jax generate``: the shipped model writes text through the paged cache, then shows what the cache did."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dsa_jax.cache import PoolTooLarge
from dsa_jax.cli.options import DEFAULT_MODEL, count, drafts, implementations, seed, temperature
from dsa_jax.draft_engine import MOST_DRAFTS, DraftEngine
from dsa_jax.engine import Engine
from dsa_jax.layout import CacheLayout
from dsa_jax.layout_text import text_table
from dsa_jax.pages import OutOfPages

POOL_TOKENS = 8192
"""Tokens that the page pool holds unless ``--pool-tokens`` says otherwise."""


def add_parser(commands) -> None:
    """Add the command to the parser of ``dsa-jax``."""
    parser = commands.add_parser(
        "generate",
        help="write text with the shipped model",
        description="Continue prompts through the paged DSA cache; several prompts run as one ragged batch.",
    )
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="text to continue")
    parser.add_argument(
        "--model", default=None, metavar="DIR", help="checkpoint folder (default: the shipped model)"
    )
    parser.add_argument("--tokens", type=count, default=100, help="new tokens for each prompt (default 100)")
    parser.add_argument(
        "--temperature", type=temperature, default=0.7, help="0 takes the best token (default 0.7)"
    )
    parser.add_argument(
        "--draft",
        type=drafts,
        default=0,
        metavar="N",
        help=f"tokens that the prediction layer drafts a step, 0 to {MOST_DRAFTS} (default 0: none)",
    )
    parser.add_argument("--seed", type=seed, default=0, help="of the sampling (default 0)")
    parser.add_argument("--manager", choices=("v1", "v2"), default="v2", help="cache manager (default v2)")
    parser.add_argument("--page-size", type=count, default=64, help="tokens per page (default 64)")
    parser.add_argument(
        "--pool-tokens", type=count, default=POOL_TOKENS, help=f"size of the pool (default {POOL_TOKENS})"
    )
    parser.add_argument(
        "--index-topk", type=count, default=None, help="tokens that a query attends (default: the model's)"
    )
    parser.add_argument(
        "--kv-dtype", choices=("bf16", "f32"), default="bf16", help="form of the latents (default bf16)"
    )
    parser.add_argument(
        "--index-dtype", choices=("fp8", "f32"), default="fp8", help="form of the index keys (default fp8)"
    )
    parser.add_argument(
        "--implementation",
        type=implementations,
        default=None,
        metavar="NAME[,NAME...]",
        help="of the ops: mosaic, triton or xla; several are tried in order (default: the library chooses)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print token ids and figures as JSON instead of text"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        ValueError: for anything that the arguments get wrong.
    """
    for number, prompt in enumerate(arguments.prompts):
        if not prompt.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in prompt):
            raise ValueError(f"generate: prompt {number} is not valid UTF-8; pass text in that encoding")
    empty = [str(i) for i, prompt in enumerate(arguments.prompts) if not prompt]
    if empty:
        raise ValueError(f"generate: prompt {', '.join(empty)} is empty; pass text to continue")
    _persist_compilations()
    engine, tokenizer, config = _build(arguments)
    begin = [] if config.bos_token_id is None else [config.bos_token_id]
    prompts = [begin + tokenizer.encode(prompt).ids for prompt in arguments.prompts]
    try:
        engine.check(prompts, arguments.tokens, arguments.temperature)  # before the wait for compilation
    except OutOfPages as error:
        wanted = engine.pages_needed(prompts, arguments.tokens) * arguments.page_size
        raise ValueError(
            f"generate: --pool-tokens is {arguments.pool_tokens}, the prompts and {arguments.tokens} new tokens each need "
            f"{wanted} in pages of {arguments.page_size}; pass --pool-tokens {wanted}, or ask for fewer --tokens"
        ) from error
    engine.warmup(arguments.tokens, temperature=arguments.temperature, stop=config.eos_token_ids)
    made: list[list[int]] = [[] for _ in prompts]
    stream = _Stream(tokenizer, arguments.prompts, quiet=arguments.json)
    for new in engine.generate(
        prompts,
        arguments.tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
        stop=config.eos_token_ids,
    ):
        made[new.request].append(new.token)
        stream.show(made)
    stream.finish(made)
    figures = _figures(engine, arguments.index_topk or config.dsa.index_topk, prompts, made)
    if arguments.json:
        texts = [tokenizer.decode(tokens) for tokens in made]
        print(json.dumps({"prompts": prompts, "tokens": made, "text": texts, "figures": figures}))
    else:
        print("\n" + _tables(figures))


def _build(arguments: argparse.Namespace) -> tuple[Engine, Any, Any]:
    try:
        from dsa_jax.models import checkpoint
        from dsa_jax.models.step import make_speculative, make_step
    except ImportError as error:
        raise ValueError(
            f"generate: the model needs the package {error.name!r}, which is not installed; "
            "install it with: pip install 'dsa-jax[models]'"
        ) from error
    import jax
    import jax.numpy as jnp

    if arguments.model == "":
        raise ValueError(
            "generate: --model is empty; give a checkpoint folder, or leave it out for the shipped model"
        )
    name = DEFAULT_MODEL if arguments.model is None else arguments.model
    config = checkpoint.load_config(name)
    longest = config.dsa.max_position_embeddings
    if (arguments.index_topk or 1) > longest:
        raise ValueError(
            f"generate: --index-topk is {arguments.index_topk}, the model's context is {longest} tokens; "
            f"give at most {longest}"
        )
    if arguments.draft and not config.dsa.num_mtp_layers:
        raise ValueError(
            f"generate: --draft is {arguments.draft}, but {name} has no prediction layer (num_nextn_predict_layers is 0); "
            "leave --draft out, or pass a checkpoint with one"
        )
    forms: dict[str, Any] = {
        "manager": arguments.manager,
        "page_size": arguments.page_size,
        "key_form": arguments.kv_dtype,
        "index_form": arguments.index_dtype,
    }
    tokenizer = checkpoint.load_tokenizer(name)
    # CPUs have no fast bfloat16 product; widening the weights is exact.
    dtype = jnp.float32 if jax.default_backend() == "cpu" else None
    model = checkpoint.load_pretrained(name, dtype=dtype)
    options: Any = {"index_topk": arguments.index_topk, "implementation": arguments.implementation}
    slots = -(-arguments.pool_tokens // arguments.page_size)
    sizes: dict[str, Any] = {
        "layout": CacheLayout.create(config.dsa, **forms),
        "slots": slots,
        "max_requests": len(arguments.prompts),
        "max_length": config.dsa.max_position_embeddings,
    }
    try:
        if not arguments.draft:
            step, params = make_step(model, **options)
            return Engine(step=step, params=params, **sizes), tokenizer, config
        step, draft, params = make_speculative(model, **options)
        engine = DraftEngine(
            step=step,
            params=params,
            draft=draft,
            draft_layout=CacheLayout.create(config.dsa, layers=(config.dsa.num_layers,), **forms),
            draft_slots=slots,
            drafts=arguments.draft,
            share_selection=config.dsa.index_share_for_mtp_iteration,
            **sizes,
        )
        return engine, tokenizer, config
    except PoolTooLarge as error:
        raise ValueError(
            f"generate: --pool-tokens is {arguments.pool_tokens}, which takes {error.nbytes:,} bytes: {error.reason}; pass "
            f"fewer --pool-tokens (the default is {POOL_TOKENS})"
        ) from error


class _Stream:
    """Prints continuations in the order of their prompts, the first unfinished one as it grows."""

    def __init__(self, tokenizer, prompts: list[str], quiet: bool):
        self.tokenizer, self.prompts, self.quiet = tokenizer, prompts, quiet
        self.printed = ""
        if not quiet:
            self._write(prompts[0])

    def show(self, made: list[list[int]]) -> None:
        """Print what is new in the first continuation; the others wait for their turn."""
        if not self.quiet:
            text = self.tokenizer.decode(made[0])
            if text.endswith("\ufffd"):  # half a character; the next token may complete it
                return
            self._write(text[len(self.printed) :])
            self.printed = text

    def finish(self, made: list[list[int]]) -> None:
        """Print what is left of the first continuation and all of the others."""
        if self.quiet:
            return
        self._write(self.tokenizer.decode(made[0])[len(self.printed) :] + "\n")
        for prompt, tokens in zip(self.prompts[1:], made[1:], strict=True):
            self._write("\n" + prompt + self.tokenizer.decode(tokens) + "\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _figures(engine: Engine, topk: int, prompts: list[list[int]], made: list[list[int]]) -> dict:
    """What the cache did, as plain data."""
    layout = engine.layout
    lengths = [
        len(p) + len(m) - 1 for p, m in zip(prompts, made, strict=True)
    ]  # the last token was never written
    pages = sum(-(-n // layout.page_size) for n in lengths)
    per_role = {str(role): size for role, size in layout.bytes_per_token_by_role.items()}
    timing = engine.timing
    drafting = {}
    if isinstance(engine, DraftEngine):
        drafting = {
            "drafts": engine.drafts,
            "draft_pool_bytes": engine.draft_cache.nbytes,
            "decode_steps": timing.decode_steps,
            "accepted_draft_tokens": timing.accepted_drafts,
            "accepted_draft_tokens_per_step": round(timing.accepted_per_step, 3),
        }
    return {
        "manager": layout.manager,
        "key_form": layout.key_form,
        "index_form": layout.index_form,
        "page_size": layout.page_size,
        "pages_used": pages,
        "pages_in_pool": engine.slots,
        "bytes_per_token": per_role,
        "bytes_used": {role: size * pages * layout.page_size for role, size in per_role.items()},
        "pool_bytes": engine.cache.nbytes,
        "context_lengths": lengths,
        "index_topk": topk,
        "tokens_attended": [min(n, topk) for n in lengths],
        "compile_seconds": round(timing.compile_seconds, 3),
        "prefill_tokens": timing.prefill_tokens,
        "prefill_seconds": round(timing.prefill_seconds, 4),
        "decode_tokens": timing.decode_tokens,
        "decode_seconds": round(timing.decode_seconds, 4),
        "decode_tokens_per_second": round(timing.decode_tokens_per_second, 1),
        **drafting,
    }


def _tables(figures: dict) -> str:
    roles = [
        [role, figures["pages_used"], figures["bytes_per_token"][role], figures["bytes_used"][role]]
        for role in figures["bytes_per_token"]
    ]
    form = f"{figures['key_form']} latents, {figures['index_form']} index keys"
    facts = [
        ["cache", f"{figures['manager']}, {form}, pages of {figures['page_size']} tokens"],
        ["pages in use / in the pool", f"{figures['pages_used']} / {figures['pages_in_pool']}"],
        ["context length", ", ".join(map(str, figures["context_lengths"]))],
        ["tokens attended per query", ", ".join(map(str, figures["tokens_attended"]))],
        ["prefill", f"{figures['prefill_tokens']} tokens in {figures['prefill_seconds']:.2f} s"],
        ["decode", f"{figures['decode_tokens_per_second']:.1f} tokens a second"],
        ["compilation (apart)", f"{figures['compile_seconds']:.1f} s"],
    ]
    if "drafts" in figures:
        accepted = f"{figures['accepted_draft_tokens_per_step']:.2f} of {figures['drafts']}"
        facts.insert(-1, ["accepted draft tokens per step", accepted])
    width = max(len(name) for name, _ in facts)
    lines = [f"{name.ljust(width)}  {value}" for name, value in facts]
    table = text_table(["role", "pages", "bytes/token", "bytes in use"], roles)
    return "\n".join([*table, "", *lines])


def _persist_compilations() -> None:
    """Keep compiled programs in the user's cache folder, so that later starts are short."""
    import jax

    try:
        folder = Path.home() / ".cache" / "dsa_jax" / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return  # no home, or one that is read-only, costs time only
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
