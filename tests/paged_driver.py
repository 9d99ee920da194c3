"""Feeds token sequences through the paged step in pieces of any size and collects their logits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dsa_jax.cache import Cache
from dsa_jax.layout import CacheLayout
from dsa_jax.metadata import Bucket, StepMetadata
from dsa_jax.models.decoder import Decoder
from dsa_jax.models.step import make_step
from random_models import QUICK_COMPILE

WIDEST = 96


def poisoned(layout: CacheLayout, slots: int) -> Cache:
    """A cache of which every byte that was never written is part of a NaN."""
    cache = Cache.create(layout, slots)
    bad = {
        name: jnp.full_like(leaf, 0x7F if leaf.dtype == jnp.uint8 else jnp.nan)
        for name, leaf in cache.pools().items()
    }
    return dataclasses.replace(cache, **bad)


class Driver:
    """One model on one layout. Requests own shuffled, disjoint slots."""

    def __init__(self, model: Decoder, requests: int, *, longest: int = WIDEST, **layout):
        options = {"key_form": "f32", "index_form": "f32", "page_size": 8} | layout
        self.layout = CacheLayout.create(model.config.dsa, **options)
        self.width = -(-longest // self.layout.page_size)
        slots = np.random.default_rng(0).permutation(requests * self.width + 1)
        self.tables = slots[: requests * self.width].reshape(requests, self.width).tolist()
        self.traces = 0
        step, self.params = make_step(model)

        def counted(*args):
            self.traces += 1
            return step(*args)

        self.step = jax.jit(counted, donate_argnums=1, compiler_options=QUICK_COMPILE)
        self.start()

    def start(self) -> None:
        """Empty the cache."""
        self.cache = poisoned(self.layout, len(self.tables) * self.width + 1)
        self.lengths = [0] * len(self.tables)

    def feed(self, bucket: Bucket, pieces: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Run one step in which each named request gets its piece; logits of each piece."""
        places, tokens, used = [], np.zeros(bucket.tokens, np.int32), 0
        for number, (request, piece) in enumerate(pieces.items()):
            if number < bucket.context_requests:
                start, used = used, used + len(piece)
            else:
                start = bucket.context_tokens + (number - bucket.context_requests) * bucket.next_n
            places.append(slice(start, start + len(piece)))
            tokens[places[-1]] = piece
            self.lengths[request] += len(piece)
        meta = StepMetadata.create(
            self.layout,
            bucket,
            [self.tables[r] for r in pieces],
            [self.lengths[r] for r in pieces],
            [len(p) for p in pieces.values()],
        )
        self.cache, logits = self.step(self.params, self.cache, meta, jnp.asarray(tokens))
        return {r: np.asarray(logits[place]) for r, place in zip(pieces, places, strict=True)}

    def prefill(self, sequences, chunk: int) -> list[np.ndarray]:
        """Logits of whole sequences, fed together in packed steps of ``chunk`` tokens, first come first served."""
        bucket = Bucket(context_requests=len(sequences), context_tokens=chunk, table_width=self.width)
        collected: list[list[np.ndarray]] = [[] for _ in sequences]
        done = [0] * len(sequences)
        while any(d < len(s) for d, s in zip(done, sequences, strict=True)):
            room, pieces = chunk, {}
            for r, sequence in enumerate(sequences):
                take = min(room, len(sequence) - done[r])
                if take:
                    pieces[r] = np.asarray(sequence[done[r] : done[r] + take])
                    done[r], room = done[r] + take, room - take
            for r, logits in self.feed(bucket, pieces).items():
                collected[r].append(logits)
        return [np.concatenate(c) for c in collected]

    def decode(self, sequences, next_n: int = 1) -> list[np.ndarray]:
        """Logits of whole sequences, fed as decode requests ``next_n`` tokens at a time."""
        bucket = Bucket(decode_requests=len(sequences), next_n=next_n, table_width=self.width)
        collected: list[list[np.ndarray]] = [[] for _ in sequences]
        for begin in range(0, max(map(len, sequences)), next_n):
            live = {
                r: np.asarray(s[begin : begin + next_n]) for r, s in enumerate(sequences) if begin < len(s)
            }
            for r, logits in self.feed(bucket, live).items():
                collected[r].append(logits)
        return [np.concatenate(c) for c in collected]
