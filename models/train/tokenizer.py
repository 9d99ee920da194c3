"""Byte-level BPE for technical English and Python: lossless, one token a digit, indentation in one piece."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS = "<|bos|>"
EOS = "<|eos|>"
VOCABULARY = 2048

_PIECES = "|".join(
    (
        r"[\r\n]+ *(?= )",  # line ends with the indentation, less the space that belongs to the next word
        r"[\r\n]+",
        r" ?\p{L}+",
        r" ?\p{N}",  # single digits: numbers are spelled alike wherever they stand
        r" ?[^\s\p{L}\p{N}]+",
        r"\s+(?=\s)",
        r"\s+",
    )
)


def train(texts: Iterable[str], *, vocabulary: int = VOCABULARY) -> Tokenizer:
    """Learns the merges from text.

    Args:
        texts: training documents only; held-out text must not shape the vocabulary.
        vocabulary: number of tokens, two special ones and 256 bytes included.

    Returns:
        A tokenizer whose ``decode`` gives back exactly what ``encode`` took. ``BOS`` has id 0, ``EOS`` id 1.

    Raises:
        ValueError: the vocabulary has no room for all bytes, or the text is too short for that many merges.
    """
    if vocabulary < 258:
        raise ValueError(
            f"train tokenizer: vocabulary={vocabulary}; want at least 258 (256 bytes and two special tokens): raise it"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise ValueError(
            f"train tokenizer: the texts give {tokenizer.get_vocab_size()} tokens; want {vocabulary}: "
            "pass more text or a smaller vocabulary"
        )
    return tokenizer


def load(path: Path) -> Tokenizer:
    """Reads ``tokenizer.json``."""
    return Tokenizer.from_file(str(path))


def save(tokenizer: Tokenizer, path: Path) -> None:
    """Writes ``tokenizer.json``, the file that Hugging Face's loaders read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))


def specials(tokenizer: Tokenizer) -> tuple[int, int]:
    """Ids of ``BOS`` and ``EOS``.

    Raises:
        ValueError: the tokenizer lacks one of them.
    """
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    if bos is None or eos is None:
        raise ValueError(
            f"specials: the tokenizer lacks {BOS} or {EOS}; want one that this module trained: train it anew"
        )
    return bos, eos
