"""Token streams: every module becomes one run of tokens, documents bracketed by BOS and EOS."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from dsa_jax.models.train import corpus as corpus_
from dsa_jax.models.train import tokenizer as tokenizer_
from dsa_jax.models.train.documents import Document

_TOKENS_NAME = "tokens.npz"
_TOKENIZER_NAME = "tokenizer.json"


@dataclass(frozen=True, kw_only=True)
class Streams:
    """The tokens of the corpus by split.

    Attributes:
        tokens: per split, ``uint16[n]``: the modules one after another.
        starts: per split, ``int64[modules + 1]``: where each module starts, and the end.
    """

    tokens: Mapping[str, np.ndarray]
    starts: Mapping[str, np.ndarray]

    def modules(self, split: str) -> list[np.ndarray]:
        """The token runs of a split's modules."""
        bounds = self.starts[split]
        return [self.tokens[split][a:b] for a, b in itertools.pairwise(bounds)]


def encode(documents: Iterable[Document], tokenizer: Tokenizer) -> Streams:
    """Encodes a corpus.

    Args:
        documents: ordered by module.
        tokenizer: what `dsa_jax.models.train.tokenizer.train` made.

    Returns:
        The streams of all splits.
    """
    bos, eos = tokenizer_.specials(tokenizer)
    tokens: dict[str, list[int]] = {split: [] for split in corpus_.SPLITS}
    starts: dict[str, list[int]] = {split: [0] for split in corpus_.SPLITS}
    for module, members in corpus_.by_module(documents).items():
        split = corpus_.split_of(module)
        for encoding in tokenizer.encode_batch([document.text for document in members]):
            tokens[split] += [bos, *encoding.ids, eos]
        starts[split].append(len(tokens[split]))
    return Streams(
        tokens={split: np.asarray(ids, np.uint16) for split, ids in tokens.items()},
        starts={split: np.asarray(bounds, np.int64) for split, bounds in starts.items()},
    )


def save(streams: Streams, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes streams and tokenizer into the data folder: with them, training needs no other package installed."""
    arrays = {
        f"{kind}_{split}": getattr(streams, kind)[split]
        for kind in ("tokens", "starts")
        for split in corpus_.SPLITS
    }
    np.savez_compressed(folder / _TOKENS_NAME, **arrays)
    tokenizer_.save(tokenizer, folder / _TOKENIZER_NAME)


def load(folder: Path) -> tuple[Streams, Tokenizer]:
    """Reads what `save` wrote.

    Raises:
        ValueError: the folder lacks the files.
    """
    missing = [name for name in (_TOKENS_NAME, _TOKENIZER_NAME) if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"load token streams: folder {str(folder)!r} lacks {', '.join(missing)}; "
            "want a prepared folder: run `python -m dsa_jax.models.train corpus --data FOLDER` first"
        )
    with np.load(folder / _TOKENS_NAME) as arrays:
        parts = {
            kind: {split: arrays[f"{kind}_{split}"] for split in corpus_.SPLITS}
            for kind in ("tokens", "starts")
        }
    return Streams(**parts), tokenizer_.load(folder / _TOKENIZER_NAME)


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """Bytes of text behind each token, ``int32[vocabulary]``; special tokens count none."""
    names = [tokenizer.id_to_token(number) or "" for number in range(tokenizer.get_vocab_size())]
    # In the byte-level alphabet one character stands for one byte.
    return np.asarray(
        [0 if name in (tokenizer_.BOS, tokenizer_.EOS) else len(name) for name in names], np.int32
    )


def windows(runs: Iterable[np.ndarray], lengths: Iterable[int]) -> dict[int, np.ndarray]:
    """Cuts runs into contexts without padding, each as long as the run still allows.

    Args:
        runs: token runs, one a module; no context crosses from one to the next.
        lengths: lengths to choose from; what is left of a run below the shortest is dropped.

    Returns:
        For each length that occurs, longest first, ``int32[contexts, length]``. No token is in two contexts.
    """
    ordered = sorted(lengths, reverse=True)
    rows: dict[int, list[np.ndarray]] = {length: [] for length in ordered}
    for run in runs:
        start = 0
        for length in ordered:
            while len(run) - start >= length:
                rows[length].append(run[start : start + length].astype(np.int32))
                start += length
    return {length: np.stack(found) for length, found in rows.items() if found}


class Sampler:
    """Which windows of the training tokens each step sees: every epoch all of them once, shifted and in new order.

    A pure function of the step, so that a resumed run sees what an uninterrupted one would have.
    """

    def __init__(self, count: int, *, length: int, batch: int, seed: int):
        """Prepare for ``count`` tokens in contexts of ``length``.

        Raises:
            ValueError: there are too few tokens for one batch.
        """
        self.windows = (count - length) // length
        if self.windows < batch:
            raise ValueError(
                f"Sampler: {count} tokens give {self.windows} contexts of {length}; want at least batch={batch}: "
                "use shorter contexts, a smaller batch or more text"
            )
        self._length, self._batch, self._seed = length, batch, seed
        self._epoch: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int32))

    def starts(self, step: int, steps: int) -> np.ndarray:
        """Start positions for ``steps`` steps from ``step`` on, ``int32[steps, batch]``."""
        numbers = range(step * self._batch, (step + steps) * self._batch)
        found = [self._in_epoch(number // self.windows)[number % self.windows] for number in numbers]
        return np.asarray(found, np.int32).reshape(steps, self._batch)

    def _in_epoch(self, epoch: int) -> np.ndarray:
        if self._epoch[0] != epoch:
            random = np.random.default_rng((self._seed, epoch))
            order = random.permutation(self.windows) * self._length + random.integers(self._length)
            self._epoch = (epoch, order.astype(np.int32))
        return self._epoch[1]
