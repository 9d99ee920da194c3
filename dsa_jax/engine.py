"""The host loop over jitted steps: pages are handed out here, tokens go in and come out, nothing is computed.

The engine knows no model. It is given ``step(params, cache, metadata, tokens) -> (cache, logits)`` and runs it in two
buckets, one for prefill chunks and one for decoding, so that each is traced once.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dsa_jax.arguments import described, is_seed, is_temperature, is_whole, plain, returned
from dsa_jax.cache import Cache
from dsa_jax.layout import CacheLayout
from dsa_jax.metadata import Bucket, StepMetadata
from dsa_jax.pages import OutOfPages, PagePoolState, free, grow
from dsa_jax.sampling import sample

StepFunction = Callable[[Any, Cache, StepMetadata, Array], tuple[Cache, Array]]


@dataclass(frozen=True)
class Generated:
    """One new token.

    Attributes:
        request: number of the prompt that it continues.
        token: its id.
        position: its position in the sequence.
    """

    request: int
    token: int
    position: int


@dataclass(kw_only=True)
class Timing:
    """Seconds and counts of a run, compilation apart."""

    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    decode_steps: int = 0
    verifications: int = 0
    accepted_drafts: int = 0

    @property
    def decode_tokens_per_second(self) -> float:
        """Decoded tokens a second over all requests; 0 before the first."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def accepted_per_step(self) -> float:
        """Draft tokens that one verification of one request keeps on average; 0 without drafts."""
        return self.accepted_drafts / self.verifications if self.verifications else 0.0


@dataclass
class Engine:
    """Runs prompts through a paged model.

    Attributes:
        step: the model's step; jitted here, with the cache donated.
        params: its weights.
        layout: layout of the cache.
        slots: page slots to allocate.
        max_requests: prompts in flight at once, the R of both buckets.
        max_length: longest sequence, prompt and new tokens together.
        prefill_chunk: prompt tokens of one prefill step, over all prompts.

    Raises:
        ValueError: naming every size, layout and step that is none.
    """

    step: StepFunction
    params: Any
    layout: CacheLayout
    slots: int
    max_requests: int = 1
    max_length: int = 2048
    prefill_chunk: int = 64
    timing: Timing = field(default_factory=Timing, init=False)

    def __post_init__(self) -> None:
        """Check the sizes, allocate the cache and wrap the step."""
        problems = self._size_problems()
        if problems:
            raise ValueError(
                f"{type(self).__name__}: " + "; ".join(problems) + ". Pass positive sizes, layouts from "
                "CacheLayout.create(...) and functions for a step and a draft."
            )
        for name in self._whole:
            setattr(self, name, int(getattr(self, name)))
        width = -(-self._longest() // self.layout.page_size)
        self.prefill_bucket = Bucket(
            context_requests=self.max_requests, context_tokens=self.prefill_chunk, table_width=width
        )
        self.decode_bucket = Bucket(decode_requests=self.max_requests, table_width=width)
        self.cache = Cache.create(self.layout, self.slots)
        self.pool = PagePoolState.create(self.slots, self.layout.page_size)
        self._step = jax.jit(_two_parts(self.step), donate_argnums=(1,))
        self._sample = jax.jit(sample)
        self._losses = 0

    @property
    def _whole(self) -> tuple[str, ...]:
        """Fields that are whole numbers, and become Python ints: NumPy's would overflow in what is made of them."""
        return "slots", "max_requests", "max_length", "prefill_chunk"

    def _size_problems(self) -> list[str]:
        sizes = self._too_small("slots", "max_requests", "max_length", "prefill_chunk")
        return sizes + self._of_another_kind("step", "layout")

    def _too_small(self, *names: str) -> list[str]:
        """What is wrong with fields that must be whole and positive."""
        values = {name: getattr(self, name) for name in names}
        return [
            f"{name} is {described(value)}; wanted {'' if is_whole(value) else 'a whole number of '}at least 1"
            for name, value in values.items()
            if not (is_whole(value) and value >= 1)
        ] + [
            f"{name} is {value}; wanted less than 2**31"
            for name, value in values.items()
            # What is wrong with slots, the cache says.
            if is_whole(value) and value >= 2**31 and not name.endswith("slots")
        ]

    def _of_another_kind(self, step: str, layout: str) -> list[str]:
        """What is wrong with two fields, a function and a layout."""
        problems = []
        if not callable(getattr(self, step)):
            problems.append(f"{step} is {described(getattr(self, step))}; wanted a function")
        if not isinstance(getattr(self, layout), CacheLayout):
            problems.append(f"{layout} is {described(getattr(self, layout))}; wanted a CacheLayout")
        return problems

    def _longest(self) -> int:
        """Positions that a page table must have room for."""
        return self.max_length

    def _positions(self, prompt: Sequence[int], tokens: int) -> int:
        """Positions that a run may write; the last token is never written."""
        return len(prompt) + tokens - 1

    def warmup(
        self, tokens: int | None = None, *, temperature: float = 0.0, stop: Sequence[int] = ()
    ) -> float:
        """Compile both buckets by running them on empty batches, which change nothing.

        Args:
            tokens, temperature, stop: what ``generate`` will be asked for; of no importance here.

        Returns:
            Seconds it took.
        """
        begin = time.perf_counter()
        for bucket in (self.prefill_bucket, self.decode_bucket):
            logits = self._run(bucket, [], [], [], [])
            self._draw(logits, [], [], [], 0.0, jax.random.key(0))
        self.timing.compile_seconds = time.perf_counter() - begin
        return self.timing.compile_seconds

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        stop: Sequence[int] = (),
    ) -> Iterator[Generated]:
        """Continue prompts as one ragged batch; tokens come out as they are made.

        A prompt's continuation does not depend on its companions: sampling draws from ``(seed, request, position)``.

        Args:
            prompts: token ids, each prompt not empty.
            tokens: new tokens for each.
            temperature: 0 takes the best token; otherwise softmax of ``logits / temperature``.
            seed: of the sampling.
            stop: token ids that end a sequence (they are yielded, too).

        Raises:
            ValueError: before anything runs, naming every prompt that is empty, holds anything but token ids or too many
                for the context or the pool, and every argument out of range or of another kind.
        """
        seed, ends = plain(seed), token_ids(stop)
        problems = []
        if not is_seed(seed):
            problems.append(
                f"seed is {described(seed)}, wanted a whole number from 0 to 2**32 - 1: pass 0, or one of yours"
            )
        if isinstance(ends, str):
            problems.append(f"stop is {described(stop)}, which {ends}: pass a list of ids, [] for none")
        copies = self._checked(prompts, tokens, temperature, problems)
        return self._reserve_and_run(copies, int(tokens), temperature, jax.random.key(seed), frozenset(ends))

    def _reserve_and_run(self, prompts, tokens, temperature, key, stop) -> Iterator[Generated]:
        names = [object() for _ in prompts]  # names of this run alone: runs may interleave
        tables = self._reserve(names, [self._positions(prompt, tokens) for prompt in prompts])
        losses = self._losses
        try:
            for made in self._run_prompts(prompts, tables, tokens, temperature, key, stop):
                yield made
                if self._losses != losses:
                    raise RuntimeError(
                        "generate: the cache with this run's text was lost when a step of another run failed. Try again."
                    )
        finally:
            self._release(names)

    def _reserve(self, names: Sequence[object], lengths: Sequence[int]) -> Any:
        """All pages that the sequences will need, so that none can run dry half-way: ``int32[prompts, W]``."""
        self.pool, tables = reserve(self.pool, names, lengths)
        return table_array(tables, self.decode_bucket.table_width)

    def _release(self, names: Sequence[object]) -> None:
        for name in names:
            self.pool, _ = free(self.pool, name)

    def _run_prompts(self, prompts, tables, tokens, temperature, key, stop) -> Iterator[Generated]:
        last: dict[int, int] = {}
        length = {request: len(prompt) for request, prompt in enumerate(prompts)}
        for request, token in self._prefill(prompts, tables, temperature, key):
            last[request] = token
            yield Generated(request, token, length[request])
        live = [r for r in range(len(prompts)) if last[r] not in stop]
        for _ in range(tokens - 1):
            if not live:
                return
            begin = time.perf_counter()
            for request in live:
                length[request] += 1
            logits = self._run(
                self.decode_bucket,
                tables[live],
                [length[r] for r in live],
                [1] * len(live),
                [last[r] for r in live],
            )
            drawn = self._draw(logits, range(len(live)), live, [length[r] for r in live], temperature, key)
            self.timing.decode_seconds += time.perf_counter() - begin
            self.timing.decode_tokens += len(live)
            self.timing.decode_steps += 1
            for request, token in zip(live, drawn, strict=True):
                last[request] = token
                yield Generated(request, token, length[request])
            live = [r for r in live if last[r] not in stop]

    def _prefill(self, prompts, tables, temperature, key) -> Iterator[tuple[int, int]]:
        """Feed the prompts in chunks, packed in order; yields each prompt's first new token when it is complete."""
        done = [0] * len(prompts)
        while any(d < len(p) for d, p in zip(done, prompts, strict=True)):
            begin = time.perf_counter()
            room, batch = self.prefill_chunk, []
            for request, prompt in enumerate(prompts):
                take = min(room, len(prompt) - done[request])
                if take:
                    batch.append((request, prompt[done[request] : done[request] + take]))
                    done[request] += take
                    room -= take
            logits = self._feed(prompts, tables, batch, done)
            ends = np.cumsum([len(piece) for _, piece in batch]) - 1
            finished = [
                (r, int(end)) for (r, _), end in zip(batch, ends, strict=True) if done[r] == len(prompts[r])
            ]
            drawn: list[int] = []
            if finished:
                requests = [r for r, _ in finished]
                drawn = self._draw(
                    logits,
                    [end for _, end in finished],
                    requests,
                    [done[r] for r in requests],
                    temperature,
                    key,
                )
            else:
                logits.block_until_ready()
            self.timing.prefill_seconds += time.perf_counter() - begin
            self.timing.prefill_tokens += sum(len(piece) for _, piece in batch)
            yield from zip((r for r, _ in finished), drawn, strict=True)

    def _feed(self, prompts, tables, batch, done) -> Array:
        """Logits of one prefill step over ``batch``, pieces of prompts of which ``done`` tokens are fed with it."""
        return self._run(
            self.prefill_bucket,
            tables[[r for r, _ in batch]],
            [done[r] for r, _ in batch],
            [len(piece) for _, piece in batch],
            [token for _, piece in batch for token in piece],
        )

    def _run(self, bucket: Bucket, tables, kv_lens, new_lens, tokens) -> Array:
        meta = StepMetadata.create(self.layout, bucket, tables, kv_lens, new_lens, slots=self.cache.slots)
        with self._kept():
            self.cache, logits = self._step(self.params, self.cache, meta, padded(tokens, bucket.tokens))
        self._check_logits(logits, bucket, tokens)
        return logits

    def _check_logits(self, logits: Array, bucket: Bucket, tokens: Sequence[int]) -> None:
        """What could not be known before the step ran: is there a row for each token, and is each token one of its own?"""
        if logits.ndim != 2 or logits.shape[0] != bucket.tokens:
            raise ValueError(
                f"{type(self).__name__}: step returned logits {described(logits)}, wanted float32[{bucket.tokens}, V]. "
                "Return a row for each token place of the bucket."
            )
        if max(tokens, default=0) >= logits.shape[1]:
            raise ValueError(
                f"generate: the prompts hold token {max(tokens)}, the model's vocabulary has {logits.shape[1]}. Pass what "
                "its own tokenizer gave."
            )

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """A step that fails takes the cache that was donated to it along: the engine goes on with an empty one."""
        try:
            yield
        except BaseException:
            self._restore()
            raise

    def _restore(self) -> None:
        """Make what a failed step has taken along anew; other runs that were in the middle of their text are told."""
        cache = alive(self.cache, self.slots)
        self._losses += cache is not self.cache
        self.cache = cache

    def _draw(self, logits, rows, requests, positions, temperature, key) -> list[int]:
        count = len(requests)
        row = np.zeros(self.max_requests, np.int32)
        stream = np.zeros((self.max_requests, 2), np.int32)
        row[:count] = list(rows)
        stream[:count, 0], stream[:count, 1] = requests, positions
        drawn = self._sample(logits, jnp.array(row), key, jnp.array(stream), jnp.float32(temperature))
        return np.asarray(drawn)[:count].tolist()

    def check(self, prompts: Sequence[Sequence[int]], tokens: int, temperature: float) -> None:
        """Raise ValueError naming everything that ``generate`` would refuse (OutOfPages: the pages alone); runs nothing."""
        self._checked(prompts, tokens, temperature, [])

    def _checked(
        self, prompts: Sequence[Sequence[int]], tokens: int, temperature: float, problems: list[str]
    ) -> list[tuple[int, ...]]:
        """Copies of the prompts, which are read again later, when the caller may reuse its lists.

        Raises:
            ValueError: naming ``problems`` and those that are found here.
        """
        whole = is_whole(tokens)
        tokens = int(tokens) if whole else tokens
        if not whole or tokens < 1:
            problems.append(
                f"tokens is {described(tokens)}, wanted {'' if whole else 'a whole number of '}at least 1"
            )
        if not is_temperature(plain(temperature)):
            problems.append(
                f"temperature is {described(temperature)}, wanted at least 0 and finite (0 takes the best token)"
            )
        copies: list[tuple[int, ...]] = []
        if (
            isinstance(prompts, str | bytes)
            or not hasattr(prompts, "__iter__")
            or getattr(prompts, "shape", None) == ()
        ):
            problems.append(
                f"prompts is {described(prompts)}, wanted a list of prompts, each a list of token ids"
            )
            prompts = ()
        else:
            prompts = list(prompts)
            if not 1 <= len(prompts) <= self.max_requests:
                problems.append(f"{len(prompts)} prompts, wanted 1 to {self.max_requests} (max_requests)")
        if prompts and all(map(is_whole, prompts)):
            problems.append(
                f"prompts is {described(prompts)}, wanted a list of prompts, each a list of token ids: put one prompt in a "
                "list of its own"
            )
            prompts = ()
        for number, prompt in enumerate(prompts):
            ids = token_ids(prompt)
            if isinstance(ids, str):
                problems.append(
                    f"prompt {number} is {described(prompt)}, which {ids}: pass what the tokenizer gave"
                )
                continue
            prompt = tuple(ids)
            copies.append(prompt)
            if not prompt:
                problems.append(f"prompt {number} is empty, wanted at least one token")
            elif whole and len(prompt) + tokens > self.max_length:
                problems.append(
                    f"prompt {number} has {len(prompt)} tokens; with {tokens} new ones that is more than the context of "
                    f"{self.max_length}: shorten the prompt or ask for fewer tokens"
                )
        if problems:
            raise ValueError("generate: " + "; ".join(problems) + ".")
        lengths = [self._positions(prompt, tokens) for prompt in copies]
        problems = self._page_problems(self.pool, "pool", lengths, tokens)
        if problems:
            raise OutOfPages("generate: " + "; ".join(problems) + ".")
        return copies

    def pages_needed(self, prompts: Sequence[Sequence[int]], tokens: int) -> int:
        """Pages of the cache that ``generate`` reserves for these prompts and so many new tokens each."""
        return sum(self.pool.pages_for(self._positions(prompt, tokens)) for prompt in prompts)

    @staticmethod
    def _page_problems(pool: PagePoolState, name: str, lengths: Sequence[int], tokens: int) -> list[str]:
        pages = sum(map(pool.pages_for, lengths))
        if pages <= pool.free_slots:
            return []
        return [
            f"the prompts and {tokens} new tokens each need {pages} pages of {pool.page_size} tokens, "
            f"the {name} has {pool.free_slots} free: build the engine with more slots, or ask for less"
        ]


def _two_parts(step: StepFunction) -> StepFunction:
    """The step, refused where it returns something else: by the time that it is unpacked, its cache is lost."""

    # The program keeps the step's name.
    @functools.wraps(step)
    def checked(*arguments: Any) -> tuple[Cache, Array]:
        fix = "Pass make_step's; that of make_speculative, which returns hidden states, too, is for DraftEngine."
        return returned("Engine", "step", step(*arguments), ("cache", "logits"), fix)

    return checked


def alive(cache: Cache, slots: int) -> Cache:
    """The cache, or an empty one like it if its pools are gone. Nothing in it outlives the run that failed."""
    gone = any(pool.is_deleted() for pool in jax.tree.leaves(cache))
    return Cache.create(cache.layout, slots) if gone else cache


def token_ids(values: Any) -> list[int] | str:
    """Token ids as Python integers, or what is wrong with them, in words that follow "which"."""
    if isinstance(values, str | bytes):
        return "is text, not token ids"
    if not hasattr(values, "__iter__") or getattr(values, "shape", None) == ():
        return "is no list of token ids"
    ids = list(values if not hasattr(values, "dtype") else np.asarray(values))
    for place, value in enumerate(ids):
        if type(value) is not int:
            value = ids[place] = plain(value)
        if not is_whole(value) or not 0 <= value < 2**31:
            return f"holds {described(value)} at place {place}, wanted ids from 0 to {2**31 - 1}"
    return ids


def reserve(
    pool: PagePoolState, names: Sequence[object], lengths: Sequence[int]
) -> tuple[PagePoolState, list[tuple[int, ...]]]:
    """Give each name the pages for its length.

    Returns:
        The new state, and the slots of each name.

    Raises:
        OutOfPages: if the pool has too few for all of them; the state that was passed in is still good.
    """
    tables = []
    for name, length in zip(names, lengths, strict=True):
        pool, slots = grow(pool, name, length)
        tables.append(slots)
    return pool, tables


def table_array(tables: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """Slots of each request as rows of ``int32[requests, width]``, -1 behind them."""
    array = np.full((len(tables), width), -1, np.int32)
    for row, slots in zip(array, tables, strict=True):
        row[: len(slots)] = slots
    return array


def padded(tokens: Sequence[int], places: int) -> Array:
    """Tokens in the first of so many places, 0 behind them: ``int32[places]``."""
    out = np.zeros(places, np.int32)
    out[: len(tokens)] = tokens
    return jnp.array(out)
