"""Whole decode loops with the shipped model: ``python -m benchmarks.loops_check --json FILE``.

Compares one program for all tokens with a step loop (donated cache, tokens stay on the device) and with speculation, counts
launches, and times the predicate of the speculative ``while`` against the same turns in a loop of fixed length. The same
comparison runs on a CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import device_times, kernel_times
from dsa_jax.cache import Cache
from dsa_jax.draft import draft_metadata
from dsa_jax.layout import CacheLayout
from dsa_jax.loops import Batch, DraftBatch, Sampling, decode_loop, speculative_loop
from dsa_jax.metadata import Bucket, StepMetadata
from dsa_jax.models import checkpoint
from dsa_jax.models.step import make_speculative

Row = dict[str, Any]
PROMPT_TOKENS = 32


class Loops:
    """A model's loops over one batch size."""

    def __init__(self, name: str, requests: int, tokens: int, **forms: Any):
        """Load the model and make the programs; they compile at their first call."""
        dtype = jnp.float32 if jax.default_backend() == "cpu" else None
        model = checkpoint.load_pretrained(name, dtype=dtype)
        dsa = model.config.dsa
        self.step, self.draft, self.params = make_speculative(model)
        stacked, _, self.params_stacked = make_speculative(model, stacked=None)
        self.layouts = tuple(
            CacheLayout.create(dsa, layers=layers, **forms)
            for layers in (tuple(range(dsa.num_layers)), (dsa.num_layers,))
        )
        self.requests, self.tokens = requests, tokens
        self.width = -(-(PROMPT_TOKENS + tokens + 4) // self.layouts[0].page_size)
        slots = requests * self.width
        self.table = jnp.arange(slots, dtype=jnp.int32).reshape(requests, self.width)
        self.caches = tuple(Cache.create(layout, slots) for layout in self.layouts)
        self.prefill = jax.jit(self._prefill, donate_argnums=1)
        self.plain = jax.jit(partial(decode_loop, self.step, count=tokens), donate_argnames="cache")
        self.single, self.single_apart = (
            jax.jit(partial(decode_loop, step, count=1), donate_argnames="cache")
            for step in (stacked, self.step)
        )
        self.speculative = jax.jit(
            partial(speculative_loop, self.step, self.draft, count=tokens),
            donate_argnames="caches",
            static_argnames="turns",
        )
        self.sampling = Sampling.create()

    def _prefill(self, params, caches, meta, tokens, following, ends):
        cache, logits, hidden = self.step(params, caches[0], meta, tokens)
        own = draft_metadata(meta, self.layouts[1], self.table)
        draft_cache, *_ = self.draft(params, caches[1], own, following, hidden)
        return (cache, draft_cache), jnp.argmax(logits[ends], axis=-1).astype(jnp.int32), hidden[ends]

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Feed the prompts; ``batch`` and ``draft_batch`` stand behind them afterwards."""
        count = self.requests
        places = count * PROMPT_TOKENS
        tokens, following = np.zeros((2, places), np.int32)
        flat = [t for p in prompts for t in p]
        shifted = [t for p in prompts for t in [*p[1:], 0]]
        tokens[: len(flat)], following[: len(flat)] = flat, shifted
        lens = [len(p) for p in prompts]
        bucket = Bucket(context_requests=count, context_tokens=places, table_width=self.width)
        meta = StepMetadata.create(self.layouts[0], bucket, np.asarray(self.table).tolist(), lens, lens)
        self.caches, last, hidden = self.prefill(
            self.params, self.caches, meta, jnp.array(tokens), jnp.array(following),
            jnp.array(np.cumsum(lens) - 1, jnp.int32),
        )  # fmt: skip
        live, one = jnp.ones(count, bool), jnp.ones(count, jnp.int32)
        decode = [Bucket(decode_requests=count, next_n=n, table_width=self.width) for n in (1, 2)]
        self.batch = Batch(last=last, meta=replace(meta, new_lens=one, bucket=decode[0]), live=live)
        after = replace(meta, new_lens=one, bucket=decode[1])
        self.draft_batch = DraftBatch.create(after, last, hidden, live)

    def one_program(self):
        """All tokens in one program."""
        cache, _, written = self.plain(
            params=self.params, cache=self.caches[0], batch=self.batch, sampling=self.sampling
        )
        self.caches = (cache, self.caches[1])
        return written

    def step_loop(self, steps: int | None = None, *, apart: bool = False):
        """One program a token; nothing is read back in between. The host pays for every array: see `weights.take_apart`."""
        cache, batch, written = self.caches[0], self.batch, None
        single, params = (self.single_apart, self.params) if apart else (self.single, self.params_stacked)
        for _ in range(steps or self.tokens):
            cache, batch, written = single(params=params, cache=cache, batch=batch, sampling=self.sampling)
        self.caches = (cache, self.caches[1])
        return written

    def speculate(self, turns: int | None = None):
        """One draft token a turn, all turns in one program; with their number given there is no predicate."""
        self.caches, _, written = self.speculative(
            params=self.params, caches=self.caches, batch=self.draft_batch, draft_table=self.table,
            sampling=self.sampling, turns=turns,
        )  # fmt: skip
        return written


def seconds(call: Callable[[], Any], repeats: int = 5) -> float:
    """Best wall time of a call after one unmeasured turn."""
    jax.block_until_ready(call())
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        best = min(best, time.perf_counter() - begin)
    return best


def launches(call: Callable[[], Any]) -> int | None:
    """Everything that one call puts on the device's streams; None where there is no such profile."""
    return len(kernel_times([call], "")[0]) or None


def compare(loops: Loops, prompts: Sequence[Sequence[int]]) -> Row:
    """The three ways on one batch."""
    loops.start(prompts)
    turns = int(loops.speculate().turns)
    calls = {
        "program": loops.one_program,
        "steps": loops.step_loop,
        "steps, weights apart": partial(loops.step_loop, apart=True),
        "drafts": loops.speculate,
        "drafts, fixed": partial(loops.speculate, turns),
    }
    times = {name: seconds(call) for name, call in calls.items()}
    plain, drafted = loops.one_program(), loops.speculate()
    equal = np.asarray(plain.tokens) == np.asarray(drafted.tokens)
    launched = launches(loops.speculate)
    return {
        "batch": loops.requests,
        "tokens": loops.tokens,
        "ms": {name: 1e3 * t for name, t in times.items()},
        "program over steps": times["steps"] / times["program"],
        "program over steps, weights apart": times["steps, weights apart"] / times["program"],
        "drafts over program": times["program"] / times["drafts"],
        "accepted": int(drafted.accepted.sum()) / max(int(drafted.drafted.sum()), 1),
        "turns": turns,
        "predicate_us_a_turn": 1e6 * (times["drafts"] - times["drafts, fixed"]) / turns,
        "equal up to": [int(row.argmin()) if not row.all() else len(row) for row in equal],
        "launches a token": {
            "program": _per(launches(loops.one_program), loops.tokens),
            "drafts": _per(launched, loops.tokens),
        },
        "launches a turn": _per(launched, turns),
    }


def _per(count: int | None, tokens: int) -> float | None:
    return None if count is None else count / tokens


def derive_time(layout: CacheLayout, requests: int = 256, next_n: int = 8) -> dict[str, float]:
    """Microseconds of ``derive()`` with everything kept."""
    bucket = Bucket(decode_requests=requests, next_n=next_n, table_width=512)
    table = np.arange(requests * 512).reshape(requests, 512).tolist()
    meta = StepMetadata.create(layout, bucket, table, [32000] * requests, [next_n] * requests)
    times = device_times(jax.jit(StepMetadata.derive), [(meta,)] * 10)
    return {name: times[name] for name in ("total", "queued") if name in times}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="docs-8m")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--prompts", type=Path, help="JSON list of texts; the samples of the checkpoint, repeated, by default"
    )
    parser.add_argument("--derive-requests", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.prompts:
        texts = json.loads(options.prompts.read_text())
    else:
        found = json.loads((checkpoint.find("docs-8m") / "text.json").read_text())
        texts = [sample["prompt"] for sample in found["texts"]]
    tokenizer = checkpoint.load_tokenizer(options.model)
    prompts = [tokenizer.encode(text).ids[:PROMPT_TOKENS] for text in texts]
    rows: list[Row] = []
    loops: Loops | None = None
    for size in options.batches:
        loops = Loops(options.model, size, options.tokens)
        rows.append(compare(loops, [prompts[i % len(prompts)] for i in range(size)]))
        print(json.dumps(rows[-1]), flush=True)
    assert loops is not None
    rows.append({"derive_us": derive_time(loops.layouts[0], options.derive_requests)})
    print(json.dumps(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"device": str(jax.devices()[0]), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
