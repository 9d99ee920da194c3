"""The host loop with a prediction layer: two caches, and blocks of tokens written by one program each.

Prefill feeds both caches with the same token places. Then ``speculative_loop`` writes a block of tokens a call, so that text
still comes out while it is made; within a block nothing is asked of the host.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dsa_jax import loops
from dsa_jax.arguments import described, is_whole, returned
from dsa_jax.cache import Cache
from dsa_jax.draft import draft_metadata
from dsa_jax.engine import Engine, Generated, alive, padded, reserve, table_array, token_ids
from dsa_jax.layout import CacheLayout
from dsa_jax.loops import DraftBatch, Sampling, speculative_loop
from dsa_jax.metadata import StepMetadata
from dsa_jax.pages import PagePoolState, free

MOST_DRAFTS = 7
"""Draft tokens of one turn at most; verification has one token place more."""


class _Pages(NamedTuple):
    """What one run holds: its slots in both caches, and the main model's state at the last token of each prompt."""

    target: list[tuple[int, ...]]
    draft: list[tuple[int, ...]]
    states: dict[int, np.ndarray]


@dataclass(kw_only=True)
class DraftEngine(Engine):
    """Runs prompts through a paged model with a prediction layer that drafts tokens ahead.

    The text is distributed as that of ``Engine``; at temperature 0 it is the same text, up to the rounding of differently
    shaped products.

    Attributes:
        step: the main model's step, which also gives the hidden states: ``(cache, logits, hidden)``.
        draft: the prediction layer, as ``speculative_loop`` takes it.
        draft_layout: layout of the draft cache; page size and manager may differ from the target's.
        draft_slots: page slots of the draft cache, which has an allocator of its own.
        drafts: draft tokens of a turn, 1 to 7.
        share_selection: later draft tokens attend to the selection of the first.
        block: tokens that one program writes at most before any are shown.
    """

    draft: loops.Draft
    draft_layout: CacheLayout
    draft_slots: int
    drafts: int = 1
    share_selection: bool = False
    block: int = 16

    def __post_init__(self) -> None:
        """Check the sizes, allocate both caches and wrap the programs."""
        super().__post_init__()
        self.draft_width = -(-self._longest() // self.draft_layout.page_size)
        self.verify_bucket = replace(self.decode_bucket, next_n=self.drafts + 1)
        self.draft_cache = Cache.create(self.draft_layout, self.draft_slots)
        self.draft_pool = PagePoolState.create(self.draft_slots, self.draft_layout.page_size)
        self._prefill_both = jax.jit(self._prefill_step, donate_argnums=(1,))
        main: Any = self.step  # this engine's step gives hidden states, too
        loop = partial(speculative_loop, main, self.draft, share_selection=self.share_selection)
        self._loop = jax.jit(loop, static_argnums=(4,), donate_argnums=(1,))

    def warmup(
        self, tokens: int | None = None, *, temperature: float = 0.0, stop: Sequence[int] = ()
    ) -> float:
        """Compile the programs by running them on empty batches, which change nothing.

        Args:
            tokens: new tokens that ``generate`` will be asked for, which sets the length of a block; None for many.
            temperature: that it will be asked for; programs for 0 and for more are not the same.
            stop: tokens that it will be given; their number is part of a program.

        Returns:
            Seconds it took.

        Raises:
            ValueError: ``tokens`` is no positive whole number, or ``Sampling.create`` refuses the others.
        """
        if tokens is not None and not (is_whole(tokens) and tokens >= 1):
            raise ValueError(
                f"warmup: tokens is {described(tokens)}, wanted a whole number of at least 1. Leave it out for many."
            )
        sampling = self._sampling(temperature, stop)
        begin = time.perf_counter()
        logits, states = self._run_both([], [], [], [], [], [], [])
        self._draw(logits, [], [], [], 0.0, jax.random.key(0))
        count = self.block if tokens is None else self._block(int(tokens))[0]
        if count:
            batch = self._batch([], [], [], np.asarray(states), [])
            self._write(batch, self._draft_table([]), count, sampling)
        self.timing.compile_seconds = time.perf_counter() - begin
        return self.timing.compile_seconds

    def _size_problems(self) -> list[str]:
        problems = super()._size_problems()
        if not is_whole(self.drafts) or not 1 <= self.drafts <= MOST_DRAFTS:
            problems.append(f"drafts is {described(self.drafts)}; wanted 1 to {MOST_DRAFTS}")
        sizes = self._too_small("draft_slots", "block")
        if not isinstance(self.share_selection, bool):
            sizes.append(f"share_selection is {described(self.share_selection)}; wanted True or False")
        return problems + sizes + self._of_another_kind("draft", "draft_layout")

    @property
    def _whole(self) -> tuple[str, ...]:
        return *super()._whole, "draft_slots", "block", "drafts"

    def _longest(self) -> int:
        # A block may be longer than what is left to write, and its last turn verifies drafts that are then dropped.
        return self.max_length + self.block + self.drafts

    def _positions(self, prompt: Sequence[int], tokens: int) -> int:
        count, blocks = self._block(tokens)
        return len(prompt) + count * blocks + (self.drafts if blocks else 0)

    def _block(self, tokens: int) -> tuple[int, int]:
        """Tokens of a block and number of blocks for ``tokens``, the first of which comes from the prefill."""
        left = tokens - 1
        if left <= self.block:
            return left, int(left > 0)
        # Of the longer blocks the one with the fewest tokens too many.
        count = min(range(self.block, self.block // 2, -1), key=lambda size: -left % size)
        return count, -(-left // count)

    def _reserve(self, names: Sequence[object], lengths: Sequence[int]) -> _Pages:
        target, tables = reserve(self.pool, names, lengths)
        draft, draft_tables = reserve(self.draft_pool, names, lengths)
        self.pool, self.draft_pool = target, draft  # both or neither
        return _Pages(tables, draft_tables, {})

    def _release(self, names: Sequence[object]) -> None:
        super()._release(names)
        for name in names:
            self.draft_pool, _ = free(self.draft_pool, name)

    def _page_problems(
        self, pool: PagePoolState, name: str, lengths: Sequence[int], tokens: int
    ) -> list[str]:
        problems = super()._page_problems(pool, name, lengths, tokens)
        return problems + super()._page_problems(self.draft_pool, "draft pool", lengths, tokens)

    def _run_prompts(self, prompts, tables: _Pages, tokens, temperature, key, stop) -> Iterator[Generated]:
        last: dict[int, int] = {}
        for request, token in self._prefill(prompts, tables, temperature, key):
            last[request] = token
            yield Generated(request, token, len(prompts[request]))
        count, blocks = self._block(tokens)
        requests = range(len(prompts))
        live = [last[r] not in stop for r in requests]
        made = [1] * len(prompts)
        sampling = replace(self._sampling(temperature, stop), key=key)
        table = self._draft_table(tables.draft)
        states = np.stack([tables.states[r] for r in requests])
        batch = self._batch(
            tables.target, [len(p) for p in prompts], [last[r] for r in requests], states, live
        )
        for _ in range(blocks):
            if not any(live):
                return
            begin = time.perf_counter()
            batch, written = self._write(replace(batch, live=self._mask(live)), table, count, sampling)
            new = np.asarray(written.tokens)
            self.timing.decode_seconds += time.perf_counter() - begin
            self.timing.decode_steps += int(written.turns)
            self.timing.verifications += int(written.drafted.sum()) // self.drafts
            self.timing.accepted_drafts += int(written.accepted.sum())
            for column in new.T:
                for request in requests:
                    token = int(column[request])
                    if not live[request] or made[request] == tokens:
                        continue
                    position = len(prompts[request]) + made[request]
                    made[request] += 1
                    live[request] = token not in stop
                    self.timing.decode_tokens += 1
                    yield Generated(request, token, position)

    def _feed(self, prompts, tables: _Pages, batch, done) -> Array:
        following: list[int] = []
        for request, piece in batch:
            end = done[request]
            following += prompts[request][end - len(piece) + 1 : end + 1]
            if end == len(prompts[request]):
                # Not drawn yet. The loop's first turn runs the prediction layer over this place, and writes its row, again.
                following.append(0)
        ends = (np.cumsum([len(piece) for _, piece in batch]) - 1).tolist()
        logits, states = self._run_both(
            [tables.target[r] for r, _ in batch],
            [tables.draft[r] for r, _ in batch],
            [done[r] for r, _ in batch],
            [len(piece) for _, piece in batch],
            [token for _, piece in batch for token in piece],
            following,
            ends,
        )
        kept = np.asarray(states)
        for number, (request, _) in enumerate(batch):
            tables.states[request] = kept[number]
        return logits

    def _run_both(self, tables, draft_tables, kv_lens, new_lens, tokens, following, ends):
        """Logits of a prefill step, and the main model's state at the last token of each piece."""
        bucket = self.prefill_bucket
        meta = StepMetadata.create(self.layout, bucket, tables, kv_lens, new_lens)
        with self._kept():
            (self.cache, self.draft_cache), logits, states = self._prefill_both(
                self.params,
                (self.cache, self.draft_cache),
                meta,
                self._draft_table(draft_tables),
                padded(tokens, bucket.tokens),
                padded(following, bucket.tokens),
                padded(ends, self.max_requests),
            )
        self._check_logits(logits, bucket, tokens)
        return logits, states

    def _prefill_step(
        self, params: Any, caches: tuple[Cache, Cache], meta: StepMetadata, table, tokens, following, ends
    ):
        main: Any = self.step
        fix = "Pass make_speculative's; that of make_step is for Engine."
        parts = returned(
            "DraftEngine", "step", main(params, caches[0], meta, tokens), ("cache", "logits", "hidden"), fix
        )
        cache, logits, hidden = parts
        draft_meta = draft_metadata(meta, self.draft_layout, table)
        draft_cache, *_ = self.draft(params, caches[1], draft_meta, following, hidden, None)
        return (cache, draft_cache), logits, hidden[ends]

    def _batch(self, tables, kv_lens, last, states: np.ndarray, live) -> DraftBatch:
        meta = StepMetadata.create(self.layout, self.verify_bucket, tables, kv_lens, [0] * len(kv_lens))
        hidden = np.zeros((self.max_requests, states.shape[1]), states.dtype)
        hidden[: len(kv_lens)] = states[: len(kv_lens)]
        return DraftBatch.create(meta, padded(last, self.max_requests), jnp.asarray(hidden), self._mask(live))

    def _draft_table(self, tables: Sequence[Sequence[int]]) -> Array:
        table = np.full((self.max_requests, self.draft_width), -1, np.int32)
        table[: len(tables)] = table_array(tables, self.draft_width)
        return jnp.array(table)

    @staticmethod
    def _sampling(temperature: float, stop: Any) -> Sampling:
        ids = token_ids(stop)  # what is none of a vocabulary is refused by the sampling
        return Sampling.create(0, temperature, stop=stop if isinstance(ids, str) else tuple(sorted(set(ids))))

    def _mask(self, live: Sequence[bool]) -> Array:
        return jnp.array([*live] + [False] * (self.max_requests - len(live)))

    def _write(self, batch: DraftBatch, table: Array, count: int, sampling: Sampling):
        """Run the loop; the batch after it, and what it wrote."""
        with self._kept():
            caches, batch, written = self._loop(
                self.params, (self.cache, self.draft_cache), batch, table, count, sampling
            )
            self.cache, self.draft_cache = caches
        return batch, written

    def _restore(self) -> None:
        super()._restore()
        self.draft_cache = alive(self.draft_cache, self.draft_slots)
