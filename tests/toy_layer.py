"""One DSA layer whose projections are look-ups: token id in, selection and attention out. With a NumPy twin.

All indexer values are small whole numbers, so scores are exact and ties are frequent; the NumPy twin knows no pages.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import cases
from dsa_jax import ops
from dsa_jax.cache import Cache
from dsa_jax.metadata import Bucket, StepMetadata
from numpy_model import attention, scores, topk

VOCABULARY, HEADS, INDEX_HEADS, K, SCALE = 40, 2, 3, 3, 0.4
_RNG = np.random.default_rng(11)
KEYS = _RNG.integers(-2, 3, (VOCABULARY, 8)).astype(np.float32)
QUERIES = _RNG.integers(-2, 3, (VOCABULARY, INDEX_HEADS, 8)).astype(np.float32)
WEIGHTS = _RNG.integers(-2, 3, (VOCABULARY, INDEX_HEADS)).astype(np.float32)
LATENTS = _RNG.normal(size=(VOCABULARY, cases.LATENT + cases.ROPE)).astype(np.float32)
ATTENTION = _RNG.normal(size=(VOCABULARY, HEADS, cases.LATENT + cases.ROPE)).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("k", "layer"))
def forward(cache: Cache, meta: StepMetadata, tokens, k: int = K, layer: int = 0):
    """Run the layer: ``(cache, positions chosen [N, k], out [N, HEADS, LATENT])``."""
    step, ids = meta.derive(), jnp.asarray(tokens)
    look = lambda table: jnp.asarray(table)[ids]
    cache = ops.append_index_k(cache, layer, look(KEYS), step)
    local = ops.select_tokens(look(QUERIES), look(WEIGHTS), cache, layer, step, k)
    latent = look(LATENTS)
    cache = ops.append_latent(cache, layer, latent[:, : cases.LATENT], latent[:, cases.LATENT :], step)
    out, _ = ops.sparse_mla(look(ATTENTION), cache, layer, ops.to_rows(local, step), SCALE)
    return cache, local, out


def reference(sequence: list[int], k: int = K) -> tuple[list[list[int]], np.ndarray]:
    """Selection and output at every position of a sequence, without pages."""
    chosen, outputs = [], []
    for position, token in enumerate(sequence):
        seen = sequence[: position + 1]
        chosen.append(topk(scores(QUERIES[token], WEIGHTS[token], KEYS[seen]), position + 1, k))
        rows = LATENTS[[seen[p] for p in chosen[-1] if p >= 0]]
        outputs.append(attention(ATTENTION[token], rows, cases.LATENT, SCALE)[0])
    return chosen, np.array(outputs)


def pad(tokens: list[int], places: int) -> np.ndarray:
    """Tokens in the first places, 0 behind."""
    return np.array(tokens + [0] * (places - len(tokens)), np.int32)


def prefill(cache: Cache, table: list[int], sequence: list[int], done: int, take: int):
    """Feed ``take`` tokens of a sequence after the first ``done``, in a bucket that all tests share to save traces."""
    places = 16 if take <= 16 else 64
    bucket = Bucket(context_requests=1, context_tokens=places, table_width=4)
    meta = StepMetadata.create(cache.layout, bucket, [table], [done + take], [take])
    cache, chosen, out = forward(cache, meta, pad(sequence[done : done + take], places))
    return cache, np.asarray(chosen)[:take], np.asarray(out)[:take]


def check(chosen, out, sequence: list[int], positions) -> None:
    """Rows of a step against the reference at the given positions."""
    wanted, outputs = reference(sequence)
    assert np.asarray(chosen).tolist() == [wanted[p] for p in positions]
    np.testing.assert_allclose(out, outputs[list(positions)], rtol=1e-4, atol=1e-5)
