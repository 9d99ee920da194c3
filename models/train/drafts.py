"""How many drafts of the prediction layer are kept: greedy text after held-out prompts, drafted in one program."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from dsa_jax.cache import Cache
from dsa_jax.draft import draft_metadata
from dsa_jax.layout import CacheLayout
from dsa_jax.loops import DraftBatch, Sampling, speculative_loop
from dsa_jax.metadata import Bucket, StepMetadata
from dsa_jax.models.decoder import Decoder
from dsa_jax.models.step import make_speculative
from dsa_jax.models.train.corpus import by_module, split_of
from dsa_jax.models.train.documents import Document
from dsa_jax.models.train.text import PROMPT_TOKENS

WANTED_SHARE = 0.6
"""Least share of draft tokens that the main model keeps."""
DRAFTS = 1


def heldout_prompts(
    documents: Iterable[Document], tokenizer: Tokenizer, *, bos: int, count: int = 64
) -> dict[str, list[int]]:
    """The first tokens of held-out modules, chosen by a hash of the name: other documents do not change the choice.

    Args:
        documents: the corpus.
        tokenizer: of the model.
        bos: token that starts each prompt.
        count: modules.

    Returns:
        Module name -> ``PROMPT_TOKENS`` tokens of its first document that is long enough.

    Raises:
        ValueError: too few held-out modules have such a document.
    """
    modules = by_module(document for document in documents if split_of(document.module) == "heldout")
    found: dict[str, list[int]] = {}
    for module in sorted(modules, key=lambda name: hashlib.sha256(name.encode()).digest()):
        encoded = (tokenizer.encode(document.text).ids for document in modules[module])
        ids = next((ids for ids in encoded if len(ids) >= PROMPT_TOKENS - 1), None)
        if ids is not None and len(found) < count:
            found[module] = [bos, *ids[: PROMPT_TOKENS - 1]]
    if len(found) < count:
        raise ValueError(
            f"held-out prompts: {len(found)} modules have a document of {PROMPT_TOKENS - 1} tokens; want count={count}: "
            "ask for fewer"
        )
    return found


def check(
    model: Decoder,
    prompts: dict[str, list[int]],
    *,
    tokens: int = 64,
    batch: int = 16,
) -> dict[str, Any]:
    """Continues prompts at temperature 0 with one draft token a turn and counts what is kept.

    Args:
        model: the weights, with a prediction layer; activations have the dtype of its embedding.
        prompts: from ``heldout_prompts``; their number is a multiple of ``batch``.
        tokens: new tokens of each.
        batch: prompts of one program.

    Returns:
        ``prompts``, ``tokens``, ``drafted`` and ``accepted`` draft tokens, their ``share``, the least share of a prompt, the
        device, and the digest of all prompts.

    Raises:
        ValueError: the prompts do not fill their batches.
    """
    if not prompts or len(prompts) % batch:
        raise ValueError(
            f"check drafts: {len(prompts)} prompts in batches of {batch}; want full batches: choose another batch"
        )
    run = _program(model, batch, tokens)
    ids = list(prompts.values())
    accepted, drafted = (
        np.concatenate(column)
        for column in zip(*(run(ids[i : i + batch]) for i in range(0, len(ids), batch)), strict=True)
    )
    return {
        "prompts": len(ids),
        "prompt_tokens": PROMPT_TOKENS,
        "tokens": tokens,
        "drafted": int(drafted.sum()),
        "accepted": int(accepted.sum()),
        "share": int(accepted.sum()) / int(drafted.sum()),
        "least_share_of_a_prompt": float((accepted / drafted).min()),
        "device": jax.devices()[0].device_kind,
        "activations": str(model.model.embed_tokens.weight[...].dtype),
        "prompts_sha256": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
    }


def _program(model: Decoder, batch: int, tokens: int):
    """``prompts -> (accepted, drafted)`` of each prompt; compiled once for all batches."""
    step, draft, params = make_speculative(model)
    dsa = model.config.dsa
    layout = CacheLayout.create(dsa)
    own = CacheLayout.create(dsa, layers=(dsa.num_layers,))
    width = -(-(PROMPT_TOKENS + tokens + DRAFTS) // layout.page_size)
    tables = np.arange(batch * width, dtype=np.int32).reshape(batch, width)
    lens = [PROMPT_TOKENS] * batch
    prefill_bucket = Bucket(context_requests=batch, context_tokens=batch * PROMPT_TOKENS, table_width=width)
    meta = StepMetadata.create(layout, prefill_bucket, tables, lens, lens)
    verify = Bucket(decode_requests=batch, next_n=DRAFTS + 1, table_width=width)
    decode_meta = StepMetadata.create(layout, verify, tables, lens, [0] * batch)
    ends = jnp.arange(1, batch + 1, dtype=jnp.int32) * PROMPT_TOKENS - 1
    table = jnp.array(tables)

    @partial(jax.jit, donate_argnums=1)
    def run(params, caches, prompts, following):
        cache, logits, hidden = step(params, caches[0], meta, prompts)
        own_meta = draft_metadata(meta, own, table)
        draft_cache, *_ = draft(params, caches[1], own_meta, following, hidden)
        last = jnp.argmax(logits[ends], axis=-1).astype(jnp.int32)
        state = DraftBatch.create(decode_meta, last, hidden[ends], jnp.ones(batch, bool))
        caches, _, written = speculative_loop(
            step, draft, params, (cache, draft_cache), state, table, tokens, Sampling.create()
        )
        return caches, written.accepted, written.drafted

    caches: tuple[Cache, Cache] = Cache.create(layout, batch * width), Cache.create(own, batch * width)

    def call(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        nonlocal caches
        ids = np.asarray(prompts, np.int32)
        following = np.roll(ids, -1, axis=1)  # the loop runs the layer over the last place again
        caches, accepted, drafted = run(
            params, caches, jnp.array(ids.reshape(-1)), jnp.array(following.reshape(-1))
        )
        return np.asarray(accepted), np.asarray(drafted)

    return call
