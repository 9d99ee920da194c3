"""Builders for tests of the cache and its ops: tiny layouts, ragged batches, poisoned pools."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_jax import ops
from dsa_jax.cache import Cache
from dsa_jax.compat import describe
from dsa_jax.config import DSAConfig, RopeParameters
from dsa_jax.layout import CacheLayout
from dsa_jax.metadata import Bucket, Step, StepMetadata
from numpy_model import Facts, encode_e4m3, page_number, quantize_fp8

IMPLEMENTATIONS: dict[str, tuple[Any, ...]] = {
    "quantize_index_k": ("xla",),
    "append_index_k": ("xla", "triton"),
    "append_latent": ("xla", "triton"),
    "gather_index_k": ("xla", "triton"),
    "paged_mqa_logits": ("xla",),
    "mqa_logits": ("xla",),
    "topk_indices": ("xla", pytest.param("triton", marks=pytest.mark.full)),
    "select_tokens": ("xla",),
    "select_rows": ("xla", ("triton", "xla")),
    "to_rows": ("xla",),
    "sparse_mla": ("xla",),
}
"""Implementations that every contract test of an op runs under: names, or sequences of names in order of preference.

Triton kernels run in the interpreter (``contracts/conftest.py``); that of top-k in the full run. Kernels that take
bfloat16 queries or one form only, and those of Mosaic, have contracts of their own: ``contracts/*_kernels.py`` and
``*_pairs.py`` interpret each of them.
"""
CARD = describe("gpu", "NVIDIA H200")
"""The card that contracts of kernels stand for."""

FULL = (True, False, True)
"""Layers of the usual tiny layout: the middle one shares its neighbour's selection."""
LATENT, ROPE = 8, 4
SLOTS = 23
"""Slots of the usual tiny pool: not a multiple of anything."""


@functools.cache
def config(full: tuple[bool, ...] = FULL, index_head_dim: int = 128, mtp: int = 0) -> DSAConfig:
    """A model with tiny widths; the FP8 form of indexer keys is defined for 128 elements only."""
    return DSAConfig(
        architecture="GlmMoeDsaForCausalLM",
        num_layers=len(full) - mtp,
        num_mtp_layers=mtp,
        num_heads=2,
        q_lora_rank=8,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=4,
        qk_rope_head_dim=ROPE,
        v_head_dim=4,
        index_n_heads=4 if any(full) else 0,
        index_head_dim=index_head_dim,
        index_topk=4,
        full_layers=full,
        index_share_for_mtp_iteration=False,
        indexer_rope_interleave=False,
        index_hadamard=False,
        rope=RopeParameters(theta=10000.0),
        max_position_embeddings=4096,
    )


@functools.cache
def layout(
    manager="v2", *, index="f32", key="f32", page_size=4, full=FULL, scale_rule="ue8m0", hadamard=False
):
    """A tiny layout; indexer keys have 8 elements in the f32 form and 128 in the fp8 form."""
    model = config(full, 128 if index == "fp8" else 8)
    return CacheLayout.create(
        model,
        manager=manager,
        index_form=index,
        key_form=key,
        page_size=page_size,
        scale_rule=scale_rule,
        hadamard=hadamard,
    )


def owners(layout: CacheLayout, name: str) -> tuple[bool, ...]:
    """Per layer, whether it has pages in the pool of this name."""
    return layout.full if name.startswith("index") else (True,) * len(layout.full)


# --- batches -------------------------------------------------------------------------------------------------------


def batch(
    contexts: Sequence[tuple[int, int]] = (),
    decodes: Sequence[tuple[int, int]] = (),
    *,
    page_size: int = 4,
    next_n: int = 1,
    padding: int = 0,
    spare_requests: int = 0,
    spare_columns: int = 0,
    gathered: int | None = None,
    slots: int = SLOTS,
    seed: int = 0,
) -> Facts:
    """A ragged batch of (length after the step, new tokens) with a shuffled page table.

    Columns past a sequence's length hold what a stale table would hold: -5, 99, another request's slots.

    Args:
        contexts, decodes: the requests.
        page_size: tokens per page.
        next_n: token places of each decode request.
        padding: unused token places after the contexts.
        spare_requests: unused request places after the decode requests (after the contexts without any).
        spare_columns: table columns beyond the longest sequence.
        gathered: room for the contexts' keys; by default two more than they hold.
        slots: slots to draw from.
        seed: of the shuffle.
    """
    rng = np.random.default_rng(seed)
    requests = [*contexts, *decodes]
    pages = [-(-length // page_size) for length, _ in requests]
    width = max([*pages, 1]) + spare_columns
    free = rng.permutation(slots).tolist()
    assert sum(pages) <= slots, "the case needs more slots"
    tables = []
    for count in pages:
        own, free = free[:count], free[count:]
        stale = [[-5, 99, 0, slots - 1][i % 4] for i in range(width - count)]
        tables.append(own + stale)
    spare = [(0, 0)] * spare_requests
    lens = [*requests, *spare]
    held = sum(length for length, _ in contexts)
    in_contexts = bool(contexts) and not decodes
    return Facts(
        tables=tables + [[99] * width] * spare_requests,
        kv_lens=[length for length, _ in lens],
        new_lens=[new for _, new in lens],
        page_size=page_size,
        contexts=len(contexts) + (spare_requests if in_contexts else 0),
        context_tokens=sum(new for _, new in contexts) + (padding if contexts else 0),
        decodes=len(decodes) + (0 if in_contexts else spare_requests),
        next_n=next_n,
        width=width,
        gathered_keys=(held + 2 if contexts else 0) if gathered is None else gathered,
    )


def metadata(facts: Facts, layout: CacheLayout) -> StepMetadata:
    """The library's metadata of a batch."""
    return StepMetadata.create(layout, bucket(facts), facts.tables, facts.kv_lens, facts.new_lens)


def bucket(facts: Facts) -> Bucket:
    """The bucket that a batch fills exactly."""
    return Bucket(
        context_requests=facts.contexts,
        context_tokens=facts.context_tokens,
        decode_requests=facts.decodes,
        next_n=facts.next_n,
        table_width=facts.width,
        gathered_keys=facts.gathered_keys,
    )


@jax.jit
def derive(meta: StepMetadata) -> Step:
    """``meta.derive()``, compiled."""
    return meta.derive()


def step(facts: Facts, layout: CacheLayout) -> Step:
    """The step of a batch as the NumPy model derives it, so that a contract of an op tests that op alone."""
    lens = {"kv_lens": np.array(facts.kv_lens, np.int32), "new_lens": np.array(facts.new_lens, np.int32)}
    arrays = {name: jnp.asarray(array) for name, array in (facts.derive() | lens).items()}
    return Step(**arrays, layout=layout, bucket=bucket(facts))


# --- pools ---------------------------------------------------------------------------------------------------------


def poisoned(layout: CacheLayout, slots: int = SLOTS, byte: int = 0xFF) -> Cache:
    """A cache whose every byte is ``byte``: 0x7F and 0xFF are NaN in e4m3, 0xFF also in bfloat16 and float32."""
    fill = lambda a: jnp.asarray(np.full(a.shape + (a.dtype.itemsize,), byte, np.uint8).view(a.dtype)[..., 0])
    cache = Cache.create(layout, slots)
    return replace(cache, **{name: fill(np.asarray(pool)) for name, pool in cache.pools().items()})


def write(cache: Cache, name: str, layer: int, rows: Sequence[int], values: np.ndarray) -> Cache:
    """Put values at cache rows of one layer by plain NumPy assignment, without any op of the library."""
    pages = np.array(cache.pages(name))
    size = cache.layout.page_size
    for row, value in zip(rows, values, strict=True):
        if row >= 0:
            pages[page_number(owners(cache.layout, name), layer, row // size), row % size] = value
    return cache.replace_pages(**{name: jnp.asarray(pages)})


def write_keys(cache: Cache, layer: int, rows: Sequence[int], keys: np.ndarray) -> Cache:
    """Put indexer keys at rows, quantised by the NumPy model where the form is FP8."""
    if cache.layout.index_form == "f32":
        return write(cache, "index_key", layer, rows, keys)
    codes, scale = quantize_fp8(keys, cache.layout.scale_rule)
    return write(write(cache, "index_key", layer, rows, codes), "index_scale", layer, rows, scale)


def stored_keys(layout: CacheLayout, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """What the cache keeps of indexer keys: values and scale, as the NumPy model sees them."""
    if layout.index_form == "f32":
        return np.asarray(keys, np.float32), None
    return quantize_fp8(keys, layout.scale_rule)


def query(layout: CacheLayout, values: np.ndarray) -> np.ndarray:
    """A query in the form that the layout's keys ask for (FP8 without a scale of its own)."""
    return values.astype(np.float32) if layout.index_form == "f32" else encode_e4m3(values)


def pool_bytes(cache: Cache) -> dict[str, bytes]:
    """The raw bytes of every pool, for bitwise comparison."""
    return {name: np.asarray(pool).tobytes() for name, pool in cache.pools().items()}


# --- compiled ops --------------------------------------------------------------------------------------------------

append_index_k = jax.jit(ops.append_index_k, static_argnames="implementation")
append_latent = jax.jit(ops.append_latent, static_argnames=("implementation", "key_scale"))
gather_index_k = jax.jit(ops.gather_index_k, static_argnames="implementation")
paged_mqa_logits = jax.jit(ops.paged_mqa_logits, static_argnames="implementation")
mqa_logits = jax.jit(ops.mqa_logits, static_argnames="implementation")
topk_indices = jax.jit(ops.topk_indices, static_argnums=2, static_argnames="implementation")
select_tokens = jax.jit(
    ops.select_tokens, static_argnums=5, static_argnames=("score_budget", "implementation")
)
select_rows = jax.jit(ops.select_rows, static_argnums=5, static_argnames=("score_budget", "implementation"))
to_rows = jax.jit(ops.to_rows, static_argnames="implementation")
sparse_mla = jax.jit(ops.sparse_mla, static_argnames=("implementation", "key_scale"))
