"""Does the model write English? Samples continuations and counts the words that the corpus knows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from tokenizers import Tokenizer

from dsa_jax.models.batch import forward_batch
from dsa_jax.models.decoder import Decoder
from dsa_jax.models.train.corpus import split_of
from dsa_jax.models.train.documents import Document

PROMPT_TOKENS = 32
WANTED_SHARE = 0.95
"""Least share of the words in sampled text that occur in the corpus."""

_WORD = re.compile(r"[^\W\d_]+")


def vocabulary(texts: Iterable[str]) -> set[str]:
    """All words of some texts: runs of letters, in lower case."""
    return {word.lower() for text in texts for word in _WORD.findall(text)}


def known_words(prompt: str, continuation: str, known: set[str]) -> tuple[int, int]:
    """Counts the words of a continuation.

    A word begun by the prompt belongs to the continuation; a last word that the end may have cut off is not counted.

    Args:
        prompt: text before.
        continuation: text to judge.
        known: words in lower case.

    Returns:
        Words that are known, and all words.
    """
    whole = prompt + continuation
    words = [
        match.group().lower()
        for match in _WORD.finditer(whole)
        if match.end() > len(prompt) and match.end() < len(whole)
    ]
    return sum(word in known for word in words), len(words)


def sample(
    model: Decoder,
    prompts: np.ndarray,
    *,
    tokens: int,
    temperature: float,
    seed: int,
    dtype: Any = jnp.float32,
) -> np.ndarray:
    """Continues prompts of equal length with the whole-sequence forward pass, as generation would: sparse, FP8 keys.

    Args:
        model: the weights.
        prompts: ``int32[B, P]``.
        tokens: number to add.
        temperature: of the softmax.
        seed: of the draws.
        dtype: of the activations.

    Returns:
        ``int32[B, tokens]``.
    """
    graph, weights = nnx.split(model)
    prefix = prompts.shape[1]

    @jax.jit
    def run(weights: Any, text: Array, key: Array) -> Array:
        def step(place: Array, text: Array) -> Array:
            outputs = forward_batch(nnx.merge(graph, weights), text, index_keys="fp8", mtp=False, dtype=dtype)
            logits = jax.lax.dynamic_index_in_dim(outputs.logits, place - 1, axis=1, keepdims=False)
            drawn = jax.random.categorical(jax.random.fold_in(key, place), logits / temperature)
            return jax.lax.dynamic_update_index_in_dim(text, drawn.astype(text.dtype), place, axis=1)

        return jax.lax.fori_loop(prefix, text.shape[1], step, text)

    # Causal attention: what stands after the present token cannot matter, so the buffer has its full length at once.
    buffer = jnp.pad(jnp.asarray(prompts, jnp.int32), ((0, 0), (0, tokens)))
    return np.asarray(run(weights, buffer, jax.random.key(seed)))[:, prefix:]


def check(
    model: Decoder,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    *,
    bos: int,
    samples: int = 20,
    tokens: int = 100,
    temperature: float = 0.8,
    seed: int = 0,
    dtype: Any = jnp.float32,
) -> dict[str, Any]:
    """Samples continuations of held-out documents and counts their words.

    Args:
        model: the weights.
        tokenizer: of the model.
        documents: the corpus: prompts come from its held-out modules, known words from all of it.
        bos: token that starts each prompt.
        samples: continuations.
        tokens: length of each.
        temperature: of the softmax.
        seed: of the choice of prompts and of the draws.
        dtype: of the activations.

    Returns:
        The parameters, ``words``, ``known`` and ``share``, the unknown words, and the texts.

    Raises:
        ValueError: too few held-out documents are long enough for a prompt.
    """
    known = vocabulary(document.text for document in documents)
    encoded = [
        ids
        for document in documents
        if split_of(document.module) == "heldout"
        and len(ids := tokenizer.encode(document.text).ids) >= PROMPT_TOKENS
    ]
    if len(encoded) < samples:
        raise ValueError(
            f"check text: {len(encoded)} held-out documents of {PROMPT_TOKENS} tokens; want samples={samples}: "
            "ask for fewer samples"
        )
    chosen = np.random.default_rng(seed).choice(len(encoded), samples, replace=False)
    prompts = np.asarray([[bos, *encoded[number][: PROMPT_TOKENS - 1]] for number in chosen], np.int32)
    drawn = sample(model, prompts, tokens=tokens, temperature=temperature, seed=seed, dtype=dtype)
    right = total = 0
    texts, unknown = [], set()
    for prompt, continuation in zip(prompts, drawn, strict=True):
        before, after = tokenizer.decode(prompt.tolist()), tokenizer.decode(continuation.tolist())
        found, words = known_words(before, after, known)
        right, total = right + found, total + words
        texts.append({"prompt": before, "continuation": after})
        unknown |= vocabulary([before + after]) - known
    return {
        "samples": samples,
        "tokens": tokens,
        "temperature": temperature,
        "seed": seed,
        "words": total,
        "known": right,
        "share": right / total,
        "unknown": sorted(unknown),
        "texts": texts,
    }
