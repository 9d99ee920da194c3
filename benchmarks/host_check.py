"""Host work of a decode step: ``python -m benchmarks.host_check --json FILE``.

What the host does between two steps of 64 requests: hand out pages, bring the metadata up to date, and dispatch the jitted
step, whose tokens stay on the device. Facts stay there, too: the step advances the lengths itself and is sent the new pages
alone. The device is waited for outside of the clock, after every step or after several. Other rows build and check all
metadata anew, or run several steps in one program. Steps run on the shipped model; one case dispatches a trivial step over
as many weights as a model of 61 layers has, because only their number matters.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import require_match
from dsa_jax import loops
from dsa_jax.cache import Cache
from dsa_jax.draft import advance, rewind
from dsa_jax.layout import CacheLayout
from dsa_jax.loops import Batch, Sampling, decode_loop
from dsa_jax.metadata import Bucket, StepMetadata
from dsa_jax.models import checkpoint
from dsa_jax.models.step import make_speculative
from dsa_jax.pages import PagePoolState, grow

BOUND = 300.0
"""Most microseconds of host work that a decode step of 64 requests may take."""

Run = Callable[[Any, Cache, StepMetadata, jax.Array], tuple[Cache, StepMetadata, jax.Array]]
"""``(params, cache, metadata of the last step, tokens) -> (cache, metadata, next tokens)``."""


class Host:
    """A host loop over decode steps. It keeps lengths and page table as arrays, and the metadata on the device."""

    def __init__(
        self,
        run: Run,
        params: Any,
        layout: CacheLayout,
        lengths: np.ndarray,
        width: int,
        steps: int = 1,
        ahead: int = 1,
    ):
        """Give every request the pages of its length; the cache's contents do not matter here.

        Args:
            run: one program, which adds ``steps`` tokens, at most a page, to each request.
            params: its weights.
            layout: of the cache.
            lengths: ``int[R]``, of the requests at the start.
            width: pages that a request can have.
            steps: decode steps of a program.
            ahead: programs for which pages are granted together, so that only every so many are sent any.
        """
        count, self.steps, self.ahead = len(lengths), steps, ahead
        self.layout, self.params = layout, params
        self.bucket = Bucket(decode_requests=count, table_width=width)
        self.lengths, self.ones = lengths.astype(np.int32), np.ones(count, np.int32)
        self.none = np.full((count, 3), -1, np.int32)
        self.none_there = jnp.asarray(self.none)
        self.table = np.full((count, width), -1, np.int32)
        self.pool = PagePoolState.create(count * width, layout.page_size)
        for request, length in enumerate(lengths.tolist()):
            self.pool, slots = grow(self.pool, request, length)
            self.table[request, : len(slots)] = slots
        self.start = self.lengths.copy(), self.pool
        self.cache = Cache.create(layout, self.pool.slots)
        self.tokens = jnp.zeros(count, jnp.int32)
        self.traces = 0
        self.restart()

        def counted(params, cache, meta, pages, tokens):
            self.traces += 1
            if pages is not None:
                meta = advance(meta, jnp.zeros_like(meta.kv_lens), pages=pages)
            else:  # the facts are those of the step itself
                meta = rewind(meta, jnp.zeros_like(meta.kv_lens))
            return run(params, cache, meta, tokens)

        # A program whose buffers stay where they are is launched as the graph of the step before. An argument that is
        # not read would be dropped, and the output in its place be somewhere else every time.
        self.step = jax.jit(counted, donate_argnums=(1, 2, 4), keep_unused=True)

    def restart(self) -> None:
        """Back to the first lengths and pages: the pool is a value, and the table's newer entries are never read."""
        self.lengths[:], self.pool = self.start
        self.turns = 0
        self.meta = StepMetadata.create(self.layout, self.bucket, self.table, self.lengths, self.ones)

    def turn(self, *, anew: bool = False) -> list[float]:
        """One step; the times at its start, after allocation, after metadata and after dispatch."""
        clock = [time.perf_counter()]
        size, pages, starting = self.layout.page_size, self.none_there, []
        if self.turns % self.ahead == 0:
            columns = (self.lengths + (self.steps * self.ahead - 1)) // size
            starting = np.flatnonzero(columns * size >= self.lengths).tolist()  # a new token starts a page
            pages = self.none.copy()
        self.turns += 1
        for place, request in enumerate(starting):
            column = int(columns[request])
            self.pool, slots = grow(self.pool, request, (column + 1) * size)
            self.table[request, column] = slots[-1]
            pages[place] = request, column, slots[-1]
        clock.append(time.perf_counter())
        self.lengths += self.steps
        meta = self.meta
        if anew:
            meta = StepMetadata.create(self.layout, self.bucket, self.table, self.lengths, self.ones)
        clock.append(time.perf_counter())
        arguments = self.params, self.cache, meta, None if anew else pages, self.tokens
        self.cache, self.meta, self.tokens = self.step(*arguments)
        clock.append(time.perf_counter())
        return clock


def measure(
    host: Host, turns: int, *, together: int = 1, again: bool = False, anew: bool = False
) -> dict[str, Any]:
    """Microseconds of a turn and of its parts, under a guard against copies back to the host.

    Args:
        host: what to run.
        turns: how many programs to time, after one that compiles.
        together: turns between two waits for the device.
        again: start every turn at the first lengths.
        anew: build and check all metadata in every turn.

    Returns:
        Median, mean, fastest and slowest turn and medians of the parts, all for a step; how often the program was traced
        again; and all turns in their order.
    """
    host.turn(anew=anew)
    jax.block_until_ready(host.tokens)
    parts, traces = [], host.traces
    for number in range(turns):
        if again:
            host.restart()
        with jax.transfer_guard_device_to_host("disallow_explicit"):
            clock = host.turn(anew=anew)
        if number % together == together - 1:
            jax.block_until_ready(host.tokens)  # outside of the clock
        parts.append([1e6 * (b - a) / host.steps for a, b in itertools.pairwise(clock)])
    jax.block_until_ready(host.tokens)
    whole = [sum(part) for part in parts]
    names = ("allocation", "metadata", "dispatch")
    return {
        "median_us": statistics.median(whole),
        "mean_us": statistics.mean(whole),
        "fastest_us": min(whole),
        "slowest_us": max(whole),
        **{f"{n}_us": statistics.median(p) for n, p in zip(names, zip(*parts, strict=True), strict=True)},
        "turns": turns,
        "traced_again": host.traces - traces,
        "each_us": whole,
    }


def several(step: loops.Step, steps: int = 1) -> Run:
    """So many steps with the best token, each of which is the next one's input."""

    def run(params, cache, meta, tokens):
        batch = Batch(last=tokens, meta=meta, live=jnp.ones(tokens.shape, bool))
        cache, batch, _ = decode_loop(step, params, cache, batch, steps, Sampling.create())
        return cache, batch.meta, batch.last

    return run


def trivial(params, cache, meta, tokens):
    """Reads its arguments and hardly computes."""
    meta = advance(meta, jnp.ones_like(meta.kv_lens))
    return cache, meta, (tokens + meta.kv_lens + sum(x.astype(jnp.int32)[0] for x in params)) % 7


def rows(options: argparse.Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    """The shipped model in the middle of pages of different age, and at a page boundary for all; many weights."""
    dtype = jnp.float32 if jax.default_backend() == "cpu" else None
    model = checkpoint.load_pretrained(options.model, dtype=dtype)
    step, _, params = make_speculative(model, stacked=None)
    apart, _, params_apart = make_speculative(model)
    layout, count, turns = CacheLayout.create(model.config.dsa), options.requests, options.turns
    width = -(-options.context // layout.page_size)
    ragged = np.random.default_rng(0).integers(1, options.context - 18 * turns - 64, count)
    aligned = np.maximum(ragged // layout.page_size, 1) * layout.page_size
    many = [jnp.full(1, i, jnp.bfloat16) for i in range(options.weights)]
    one, sixteen = several(step), several(apart, 16)

    def host(run: Run, weights: Any = params, lengths: np.ndarray = ragged, **options: int) -> Host:
        return Host(run, weights, layout, lengths, width, **options)

    return {
        "16 steps a program": lambda: measure(host(sixteen, params_apart, steps=16), turns),
        "queued": lambda: measure(host(one), turns, together=8),
        "queued, pages for 16 steps at a time": lambda: measure(host(one, ahead=16), 2 * turns, together=8),
        "each awaited": lambda: measure(host(one, ahead=16), turns),
        "queued, metadata anew": lambda: measure(host(one), turns, together=8, anew=True),
        "a new page for every request": lambda: measure(host(one, lengths=aligned), turns, again=True),
        f"queued, {options.weights} weights": lambda: measure(host(trivial, many), turns, together=8),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="docs-8m")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--context", type=int, default=32768, help="tokens that a page table has room for")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--weights", type=int, default=1500, help="of the case with many of them")
    parser.add_argument("--only", default="", help="only rows whose name contains this")
    parser.add_argument("--repeat", type=int, default=1, help="how often to measure a row")
    parser.add_argument(
        "--core", type=int, help="keep the dispatching thread on this CPU core, as servers do"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})  # of this thread alone
    found: dict[str, list[dict[str, Any]]] = {}
    choice = rows(options)
    require_match(options.only, choice)
    for name, run in choice.items():
        for _ in range(options.repeat if options.only in name else 0):
            row = run()
            found.setdefault(name, []).append(row)
            verdict = "ok" if row["median_us"] <= BOUND else "TOO LONG"
            shown = {key: value for key, value in row.items() if key != "each_us"}
            print(f"{name}: {json.dumps(shown)} bound {BOUND:.0f} us: {verdict}", flush=True)
    if options.json:
        report = {"device": str(jax.devices()[0]), "requests": options.requests, "context": options.context}
        options.json.write_text(json.dumps(report | {"rows": found}, indent=1))


if __name__ == "__main__":
    main()
