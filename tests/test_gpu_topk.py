"""Top-k on a CUDA card (``pytest -m gpu``): cache rows of wide shapes, of 65,536 rows (B03) and of requests out of the table
(B24), lengths around k (B22), scores of 16 bits, and the same bits 20 times. Both kernels by name.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from card_scores import no_case
from contracts.test_limits_on_the_card import MANY, call, keys_that_count, layout_of, unit_queries
from contracts.test_topk_kernels import MODULES, check_outside_of_the_table, scores_of
from dsa_jax import ops, xla
from dsa_jax.cache import Cache
from dsa_jax.compat import target_device
from dsa_jax.metadata import Bucket, StepMetadata

pytestmark = pytest.mark.gpu
KERNELS = ("mosaic", "triton")
K, TWENTY, SLOTS = 2_048, 20, MANY // 64
LENGTHS = (2_049, 0, 2_047, 2_048, 8_192, 8_193, 16_384, 16_385, 1, 63, 64, 65)
"""Around k, and around the tiles and blocks that a row fills."""
SHAPES = [(64, 32_768), (4, 131_072), (1, 1 << 20)]
"""Rows and columns: two blocks a row, eight, and spans that a second launch merges (with Triton further ones)."""


def kernel(name: str):
    """A kernel's own function, as the ops call it; skipped where the card has none."""
    try:
        MODULES[name].supported_on(target_device(), k=K)
    except NotImplementedError as reason:
        no_case(reason)
    return MODULES[name].topk


def decode_step(rows: int, columns: int) -> StepMetadata:
    """A request a row, the first as long as the table is wide, the others shorter; 64 tokens a page, shuffled."""
    rng, width = np.random.default_rng(rows), columns // 64
    lens = rng.integers(0, columns + 1, rows)
    lens[0] = columns
    lens[1 : 1 + len(LENGTHS)] = np.minimum(LENGTHS, columns)[: rows - 1]
    free = rng.permutation(rows * width)
    tables = [free[r * width :][: -(-n // 64)].tolist() for r, n in enumerate(lens)]
    bucket = Bucket(decode_requests=rows, table_width=width)
    return StepMetadata.create(layout_of(), bucket, tables, lens.tolist(), np.minimum(lens, 1).tolist())


def scores(rows: int, columns: int) -> np.ndarray:
    """Many ties, some NaN."""
    found = np.round(scores_of("normal", np.random.default_rng(columns), (rows, columns)), 2)
    found[0, ::7] = np.nan
    return found


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("rows", "columns", "paged"), [*((*shape, True) for shape in SHAPES), (*SHAPES[0], False)]
)
def test_wide_rows(rows, columns, paged, name):
    """Cache rows or positions, those of the reference in each of 20 runs."""
    topk, meta, logits = kernel(name), decode_step(rows, columns), jnp.asarray(scores(rows, columns))

    def select(logits, meta):
        step = meta.derive()
        paging = dict(page_table=step.page_table, requests=step.requests, page_size=64) if paged else {}
        return topk(logits, step.limits, K, **paging)

    def reference(logits, meta):
        step = meta.derive()
        positions = xla.topk_indices(logits, step.limits, K)
        return xla.to_rows(positions, step) if paged else positions, positions, step.limits

    want, positions, limits = map(np.asarray, jax.jit(reference)(logits, meta))
    np.testing.assert_array_equal(limits, meta.kv_lens)
    np.testing.assert_array_equal((want >= 0).sum(axis=1), np.minimum(limits, K))
    assert (want != positions).any() == paged
    run = jax.jit(select)
    for _ in range(TWENTY):
        np.testing.assert_array_equal(run(logits, meta), want)


@pytest.mark.parametrize(
    ("columns", "limit", "times", "name"),
    [
        *((columns, limit, 1, name) for columns, limit in ((128, 128), (32_768, 20_000)) for name in KERNELS),
        (70_000, 5_000, 4, "mosaic"),  # 32 rows so wide have a program for short ones
        (70_000, 70_000, 1, "triton"),  # spans, and launches that merge them
        (300_000, 300_000, 1, "mosaic"),
    ],
)
def test_b24_outside_of_the_table(columns, limit, times, name):
    """A request that does not exist, or a column beyond the table, gives -1 in every program of the kernels."""
    check_outside_of_the_table(kernel(name), columns, limit, times)


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        *((columns, name) for columns in (2_049, 4_096, 32_768, 70_000) for name in KERNELS),
        (300_000, "mosaic"),
    ],
)
def test_b22_lengths_around_k(columns, name):
    """A row of k - 1 or k has all its positions, and one of k + 1 drops the last of its poorest; the reference agrees.

    Of 70,000 columns, 36 rows have a program for short ones (Mosaic) or spans that a second launch merges (Triton).
    """
    kinds, rng = ("rounded", "equal", "mostly NaN"), np.random.default_rng(22)
    logits = np.concatenate([scores_of(kind, rng, (12, columns)) for kind in kinds])
    limits = np.resize([K - 1, K, K + 1, 0], len(logits)).astype(np.int32)
    want = np.full((len(limits), K), -1)
    for row, limit, line in zip(logits, limits.tolist(), want, strict=True):
        row, kept = row[:limit], np.arange(limit)
        if limit > K:
            poorest = np.isnan(row) if np.isnan(row).any() else row == row.min()
            kept = np.delete(kept, np.flatnonzero(poorest)[-1])
        line[: len(kept)] = kept
    arguments = jnp.asarray(logits), jnp.asarray(limits)
    got = call(ops.topk_indices, *arguments, k=K, implementation=name)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got, jax.jit(partial(xla.topk_indices, k=K))(*arguments))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [
        (5, 1_001, jnp.float16),
        (5, 1_001, jnp.bfloat16),
        (64, 32_768, jnp.bfloat16),
        (4, 131_072, jnp.bfloat16),
    ],
)
def test_scores_of_16_bits(rows, columns, dtype, name):
    """The selection from the same scores in float32: few distinct ones, NaN and infinities among them."""
    found = scores_of("normal", np.random.default_rng(16), (rows, columns))
    found[0, ::7], found[-1, ::11], found[-1, ::13] = np.nan, np.inf, -np.inf
    logits = jnp.asarray(found).astype(dtype)
    limits = np.resize([columns, columns - 77, 900], rows).astype(np.int32)
    got = call(ops.topk_indices, logits, jnp.asarray(limits), k=K, implementation=name)
    reference = jax.jit(partial(xla.topk_indices, k=K))
    np.testing.assert_array_equal(got, reference(logits, jnp.asarray(limits)))
    last = np.asarray(logits[-1].astype(jnp.float32))[: limits[-1]]
    chosen = np.sort(np.argsort(-last, kind="stable")[:K])
    np.testing.assert_array_equal(got[-1, : len(chosen)], chosen)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("rows", [MANY - 1, MANY])
def test_b03_rows_of_a_selection(rows, name):
    """As many requests of up to 64 tokens, each in a page of its own number: the three best of keys that score 0 to 15."""
    layout, codes, scale = layout_of(), *keys_that_count(64)
    cache = Cache.create(layout, SLOTS)
    count = cache.pages("index_key").shape[0]
    cache = cache.replace_pages(
        index_key=jnp.tile(codes[None], (count, 1, 1)), index_scale=jnp.tile(scale[None], (count, 1))
    )
    number = np.arange(rows, dtype=np.int32)
    lens, slots = number % 65, number * 7 % SLOTS
    meta = StepMetadata.create(layout, Bucket(decode_requests=rows, table_width=1), [], [], [])
    meta = dataclasses.replace(
        meta,
        page_table=jnp.asarray(slots[:, None]),
        kv_lens=jnp.asarray(lens),
        new_lens=jnp.asarray(np.minimum(lens, 1)),
    )
    select = lambda q, w, c, m: ops.select_rows(q, w, c, 0, m.derive(), 3, implementation=name)
    got = call(select, *unit_queries(rows), cache, meta)
    best = np.full((65, 3), -1)
    for length in range(65):
        chosen = np.sort(np.argsort(-(np.arange(length) % 16), kind="stable")[:3])
        best[length, : len(chosen)] = chosen
    want = np.where(best[lens] >= 0, slots[:, None] * 64 + best[lens], -1)
    np.testing.assert_array_equal(got, want)
