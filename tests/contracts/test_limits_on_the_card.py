"""Sizes at which 32 bits end, on a CUDA card, for every kernel by name: 65,536 rows (B03), arrays around 2 and 4 GiB (B01),
rows of a million scores (B18), and the catalogue's rows 22, 23, 24 and 29 at their full size. Attention has a file of its
own, ``test_limits_of_attention.py``.

``pytest -m gpu``. What the right answer is does not come from another kernel: values are planted, or come from NumPy.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from card_scores import check_scores, no_case
from dsa_jax import ops, quant
from dsa_jax.cache import Cache
from dsa_jax.compat import describe
from dsa_jax.layout import CacheLayout
from dsa_jax.metadata import Bucket, StepMetadata
from dsa_jax.pallas import paged_logits_triton
from numpy_forms import E2M1
from numpy_model import calc_diff, topk

pytestmark = pytest.mark.gpu
KERNELS = ("mosaic", "triton")
SCORES = [(name, form) for name in KERNELS for form in ("fp8", "fp4")]
"""Kernels for contexts and for contiguous keys, with the forms of keys that they take."""
WITH_REFERENCE = [*SCORES, ("xla", "fp8"), ("xla", "fp4")]
GIB, MANY = 1 << 30, 65_536


def layout_of(page_size: int = 64, key: str = "bf16", index: str = "fp8") -> CacheLayout:
    """One layer with the released widths."""
    model = dataclasses.replace(cases.config((True,), 128), kv_lora_rank=512, qk_rope_head_dim=64)
    return CacheLayout.create(model, key_form=key, index_form=index, page_size=page_size)


def call(op, *arguments, **options):
    """The op under jit; skipped where the kernel does not exist for this card or form."""
    try:
        return jax.jit(partial(op, **options))(*arguments)
    except (NotImplementedError, ExceptionGroup) as reason:
        no_case(reason)


# --- 65,535 and 65,536 rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", [*KERNELS, "xla"])
@pytest.mark.parametrize("rows", [MANY - 1, MANY, MANY + 1])
def test_b03_topk(rows, implementation):
    """Row i has its two best at i mod 96 and the next."""
    at, column = jnp.arange(rows)[:, None] % 96, jnp.arange(100)[None]
    logits = jnp.where((column == at) | (column == at + 1), 1.0, 0.0).astype(jnp.float32)
    got = call(ops.topk_indices, logits, jnp.full(rows, 100, jnp.int32), k=2, implementation=implementation)
    want = np.arange(rows)[:, None] % 96 + np.arange(2)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize(
    ("index", "key"),
    [("fp8", "bf16"), ("fp4", "nvfp4"), ("f32", "fp8"), ("fp8", "fp8_ds_mla"), ("f32", "f32")],
)
def test_b03_append(index, key, implementation):
    """Token i is the bits of i, 6 for a zero and -6 for a one, which every form holds exactly and under one scale: each byte
    of the pools by hand, the same 20 times, and the keys read back.
    """
    layout, bits = layout_of(key=key, index=index), np.arange(MANY)[:, None] >> np.arange(16) & 1
    spread = lambda zero, one, times: np.repeat(np.where(bits, one, zero), times, axis=1)
    k, latent, rope = (jnp.asarray(spread(6, -6, times), jnp.float32) for times in (8, 32, 4))
    # In e4m3 6 is 0x4C; under a scale of 2**-6, the first power of two that is not below 6 / 448, it is 384, which is 0x7C.
    codes, halves = (0x7C, 0xFC), (0x77, 0xFF)
    pair = lambda zero, one, *times: np.concatenate([spread(zero, one, n) for n in times], axis=1)
    wanted: dict[str, np.ndarray] = {
        "fp8": dict(index_key=spread(*codes, 8), index_scale=np.full(MANY, 2.0**-6)),
        "fp4": dict(index_key=spread(*halves, 4), index_scale=np.full(MANY, ONES)),
        "f32": dict(index_key=spread(6, -6, 8)),
    }[index]
    of_index = list(wanted)
    wanted |= {
        "bf16": dict(key=pair(6, -6, 32, 4)),
        "f32": dict(key=pair(6, -6, 32, 4)),
        "fp8": dict(key=pair(0x4C, 0xCC, 32, 4)),
        "nvfp4": dict(key=pair(*halves, 16, 2), key_scale=np.full((MANY, 36), 0x38)),
        "fp8_ds_mla": dict(
            key=spread(*codes, 32), key_scale=np.full((MANY, 4), 2.0**-6), key_rope=spread(6, -6, 4)
        ),
    }[key]
    pages = MANY // 64
    bucket = Bucket(context_requests=1, context_tokens=MANY, table_width=pages, gathered_keys=MANY)
    step = StepMetadata.create(layout, bucket, [range(pages)[::-1]], [MANY], [MANY]).derive()

    @jax.jit
    def run(cache, k, latent, rope, step):
        how: dict = dict(implementation=implementation)
        cache = ops.append_index_k(cache, 0, k, step, **how)
        cache = ops.append_latent(cache, 0, latent, rope, step, **how)
        return cache, ops.gather_index_k(cache, 0, step, **how)

    arguments = Cache.create(layout, pages), k, latent, rope, step
    first = call(run, *arguments)
    cache, gathered = first
    assert sorted(cache.pools()) == sorted(wanted)
    for name, want in wanted.items():
        got = np.asarray(cache.pages(name)[::-1]).astype(np.float64)
        np.testing.assert_array_equal(got.reshape(want.shape), want)
    for name, got in zip(of_index, gathered, strict=False):
        np.testing.assert_array_equal(got, wanted[name])
    same = jax.jit(lambda a, b: jax.tree.map(lambda x, y: (x == y).all(), a, b))
    for _ in range(19):
        assert all(map(bool, jax.tree.leaves(same(run(*arguments), first))))


NUMBERS = {"fp8": np.arange(16.0), "fp4": E2M1[:8]}
"""What keys score in turn."""
ONES = 0x7F7F7F7F
"""Four scales of 1, as FP4 has them."""


def keys_that_count(count: int, form: str = "fp8") -> tuple[jax.Array, jax.Array]:
    """Keys of one number each, their scales 1: a query of one unit vector scores `NUMBERS` in turn."""
    if form == "fp4":
        codes, width, scale = jnp.arange(8, dtype=jnp.uint8) * jnp.uint8(17), 64, jnp.full(count, ONES)
    else:
        codes, width, scale = quant.encode_e4m3(jnp.arange(16, dtype=jnp.float32)), 128, jnp.ones(count)
    own = codes[jnp.arange(count, dtype=jnp.int32) % len(codes)]
    return jnp.broadcast_to(own[:, None], (count, width)), scale


def unit_queries(rows: int, form: str = "fp8", heads: int = 32) -> tuple[Any, jax.Array]:
    """Every head the first unit vector; head 0 counts alone."""
    weights = jnp.zeros((rows, heads)).at[:, 0].set(1.0)
    if form == "fp4":
        q = jnp.zeros((rows, heads, 64), jnp.uint8).at[:, :, 0].set(0x02)
        return (q, jnp.full((rows, heads), ONES)), weights
    return jnp.zeros((rows, heads, 128), jnp.uint8).at[:, :, 0].set(0x38), weights


@jax.jit
def wrong_scores(got: jax.Array, numbers: jax.Array, starts: jax.Array, ends: jax.Array) -> jax.Array:
    """How many scores of windows are not what `keys_that_count` score, counted on the card in one pass."""
    column = jnp.arange(got.shape[1], dtype=jnp.int32)[None]
    inside = (column >= starts[:, None]) & (column < ends[:, None])
    want = jnp.where(inside, numbers[column % len(numbers)], -jnp.inf)
    return jnp.sum(got != want, dtype=jnp.int32)


def check_windows(keys: int, starts: np.ndarray, ends: np.ndarray, implementation: str, form: str) -> None:
    """Every score of these windows over keys that count."""
    q, weights = unit_queries(len(starts), form)
    places = jnp.asarray(starts, jnp.int32), jnp.asarray(ends, jnp.int32)
    score = partial(call, ops.mqa_logits, implementation=implementation)
    got = score(q, keys_that_count(keys, form), weights, *places)
    assert got.shape == (len(starts), keys)
    assert int(wrong_scores(got, jnp.asarray(NUMBERS[form], jnp.float32), *places)) == 0


@pytest.mark.parametrize(("implementation", "form"), WITH_REFERENCE)
@pytest.mark.parametrize("rows", [MANY - 1, MANY])
def test_b03_windows(rows, implementation, form):
    """Row i sees key i mod 100 alone."""
    starts = np.arange(rows) % 100
    check_windows(128, starts, starts + 1, implementation, form)


@pytest.mark.parametrize(
    ("kind", "implementation", "form"),
    [(kind, *one) for kind in ("decode", "context") for one in WITH_REFERENCE],
)
def test_b03_paged_scores(kind, implementation, form):
    """65,536 requests of up to 64 tokens that share one page, and one context of as many new tokens; what is selected of
    them, in one go and in chunks.
    """
    layout, codes, scale = layout_of(index=form), *keys_that_count(64, form)
    cache = Cache.create(layout, MANY // 64)
    count = cache.pages("index_key").shape[0]
    cache = cache.replace_pages(
        index_key=jnp.tile(codes[None], (count, 1, 1)), index_scale=jnp.tile(scale[None], (count, 1))
    )
    q, weights = unit_queries(MANY, form)
    if kind == "decode":
        lens = np.arange(MANY, dtype=np.int32) % 65
        bucket = Bucket(decode_requests=MANY, table_width=1)
        meta = StepMetadata.create(layout, bucket, [], [], [])
        meta = dataclasses.replace(
            meta,
            page_table=jnp.zeros((MANY, 1), jnp.int32),
            kv_lens=jnp.asarray(lens),
            new_lens=jnp.asarray(np.minimum(lens, 1)),
        )
        step, limits, width = meta.derive(), lens, 64
    else:
        bucket = Bucket(context_requests=1, context_tokens=MANY, table_width=MANY // 64)
        step = StepMetadata.create(layout, bucket, [range(MANY // 64)], [MANY], [MANY]).derive()
        # Few keys a row, or the scores alone had 16 GiB.
        limits = np.arange(MANY, dtype=np.int32) % 65
        step = dataclasses.replace(
            step, limits=jnp.asarray(limits), page_table=step.page_table[:, :1],
            bucket=dataclasses.replace(bucket, table_width=1),
        )  # fmt: skip
        width = 64
    score = lambda q, w, c, s: ops.paged_mqa_logits(q, w, c, 0, s, implementation=implementation)
    got = call(score, q, weights, cache, step)
    numbers = np.resize(NUMBERS[form], width)
    want = np.where(np.arange(width) < limits[:, None], numbers, -np.inf)
    np.testing.assert_array_equal(got, want)
    best = np.array([topk(numbers, limit, 5) for limit in range(65)])[limits]
    how: dict = dict(k=5, implementation=implementation)
    for select in (ops.select_rows, partial(ops.select_tokens, score_budget=width * 4 * 30_000)):
        chosen = call(lambda q, w, c, s, select=select: select(q, w, c, 0, s, **how), q, weights, cache, step)
        np.testing.assert_array_equal(chosen, best)  # the page is the first: rows are positions


# --- arrays around 2 and 4 GiB -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "implementation", "index"), [(kind, *one) for kind in ("decode", "context") for one in SCORES]
)
@pytest.mark.parametrize("gibibytes", [2, 4])
def test_b01_scores_of_far_pages(gibibytes, kind, implementation, index):
    """Pages before, at and past the limit hold keys of their own; one request reads them all, another none."""
    # The latents of that many pages would fill the card in bfloat16.
    layout, at = layout_of(index=index, key="nvfp4"), gibibytes * GIB // (8_192 if index == "fp8" else 4_096)
    table = [1, at - 1, at, at + 1, at + 77]
    tokens = 64 * len(table) - 5
    keys = np.random.default_rng(0).integers(-1, 2, (tokens, 128)).astype(np.float32)
    bucket = Bucket(context_requests=1, context_tokens=tokens, table_width=len(table))
    fill = StepMetadata.create(layout, bucket, [table], [tokens], [tokens]).derive()
    cache = Cache.create(layout, at + 78)
    append = jax.jit(partial(ops.append_index_k, implementation="xla"), donate_argnums=0, static_argnums=1)
    cache = append(cache, 0, jnp.asarray(keys), fill)
    # Two new tokens, and behind them a request without any or a place that no context has.
    sizes: Any = (
        dict(decode_requests=2, next_n=2) if kind == "decode" else dict(context_requests=2, context_tokens=4)
    )
    bucket = Bucket(table_width=len(table), **sizes)
    step = StepMetadata.create(layout, bucket, [table, []], [tokens, 0], [2, 0]).derive()
    values = np.random.default_rng(1).integers(-1, 2, (4, 64, 128)).astype(np.float32)
    weights = np.random.default_rng(2).integers(-2, 3, (4, 64)).astype(np.float32)
    codes, scale = ops.quantize_index_k(jnp.asarray(values.reshape(-1, 128)), index)
    assert scale is not None
    codes, scale = codes.reshape(4, 64, -1), scale.reshape(4, 64)
    q = (codes, scale) if index == "fp4" else codes
    folded = jnp.asarray(weights) * (scale if index == "fp8" else 1)
    score = lambda q, w, c, s: ops.paged_mqa_logits(q, w, c, 0, s, implementation=implementation)
    got = np.asarray(call(score, q, folded, cache, step))
    for row, limit in enumerate((tokens - 1, tokens, 0, 0)):
        want = np.maximum(values[row] @ keys[:limit].T, 0).T @ weights[row]
        np.testing.assert_allclose(got[row, :limit], want, rtol=1e-4, atol=1e-2)
        assert np.isneginf(got[row, limit:]).all()


@pytest.mark.parametrize(("implementation", "form"), SCORES)
@pytest.mark.parametrize("gibibytes", [2, 4])
def test_b01_many_scores_of_windows(gibibytes, implementation, form):
    """Scores past the limit, every one of them compared: windows of 100 keys that wander over 65,536."""
    rows = gibibytes * GIB // (4 * MANY) + 40
    starts = np.arange(rows) * 37 % (MANY - 50)
    check_windows(MANY, starts, starts + 100, implementation, form)


@pytest.mark.parametrize(("implementation", "form"), SCORES)
@pytest.mark.parametrize("gibibytes", [2, 4])
def test_b01_windows_over_far_keys(gibibytes, implementation, form):
    """Keys past the limit: windows before, across and behind it, the last keys, and all."""
    at = gibibytes * GIB // (128 if form == "fp8" else 64)
    starts = np.array([5, at - 64, at - 3, at, at + 191, 0])
    check_windows(
        at + 256, starts, np.array([95, at, at + 9, at + 100, at + 256, at + 256]), implementation, form
    )


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("rows", [4_200, 8_300])
def test_b01_top_k_of_many_scores(rows, implementation):
    """2.2 and 4.4 GB of scores: the best of a row lie where its number says, and everything else is a tie."""
    columns, k = 131_072, 5
    at = (jnp.arange(rows) * 37 % (columns - 1_000))[:, None]
    column = jnp.arange(columns)[None]
    make = jax.jit(lambda: jnp.where((column >= at + 7) & (column < at + 11), 2.0, 1.0).astype(jnp.float32))
    got = call(
        ops.topk_indices, make(), jnp.full(rows, columns, jnp.int32), k=k, implementation=implementation
    )
    wanted = np.concatenate([np.zeros((rows, 1), int), np.asarray(at) + np.arange(7, 11)], axis=1)
    np.testing.assert_array_equal(got, wanted)


# --- long rows, and the catalogue at its full size -----------------------------------------------------------------


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("k", [8, 2_048])
def test_b18_a_million_columns(k, implementation):
    """Few distinct scores, so that the tied group at the threshold has hundreds of thousands of members; 20 equal runs."""
    rng = np.random.default_rng(0)
    scores = np.round(rng.standard_normal((3, 1 << 20)), 1).astype(np.float32)
    scores[1], scores[2, :5] = 0, [np.nan, np.inf, -np.inf, -0.0, 9]
    limits = np.array([1 << 20, 1 << 20, (1 << 20) - 77], np.int32)
    order = [
        np.argsort(-np.where(np.isnan(r[:n]), -np.inf, r[:n]), kind="stable") for r, n in zip(scores, limits)
    ]
    want = np.stack([np.sort(o[:k]) for o in order])
    run = jax.jit(partial(ops.topk_indices, k=k, implementation=implementation))
    arguments = jnp.asarray(scores), jnp.asarray(limits)
    np.testing.assert_array_equal(
        call(ops.topk_indices, *arguments, k=k, implementation=implementation), want
    )
    for _ in range(20):
        np.testing.assert_array_equal(run(*arguments), want)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("lengths", [(2_048, 8_192), (512, 1_024)])
@pytest.mark.parametrize("next_n", [1, 2, 4])
@pytest.mark.parametrize("requests", [1, 16, 64])
def test_row_29_top_2048(requests, next_n, lengths, implementation):
    """Exactly the set of a stable sort; short rows are dense. The same 20 times."""
    rng = np.random.default_rng(requests)
    rows = requests * next_n
    logits = rng.normal(size=(rows, lengths[1])).astype(np.float32)
    ends = np.repeat(rng.integers(lengths[0], lengths[1], requests), next_n)
    limits = (ends - next_n + np.tile(np.arange(next_n), requests) + 1).astype(np.int32)
    want = np.full((rows, 2_048), -1)
    for row, limit, line in zip(logits, limits.tolist(), want, strict=True):
        chosen = np.sort(np.argsort(-row[:limit], kind="stable")[:2_048])
        line[: len(chosen)] = chosen
    arguments = jnp.asarray(logits), jnp.asarray(limits)
    for _ in range(20):
        got = call(ops.topk_indices, *arguments, k=2_048, implementation=implementation)
        np.testing.assert_array_equal(got, want)


def exact(q, weights, keys) -> np.ndarray:
    """Unquantised scores of ``[M, H, D]`` against ``[S, D]``."""
    return np.stack([w @ np.maximum(x @ keys.T, 0) for x, w in zip(q, weights, strict=True)])


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize(("index", "heads", "bound"), [("fp8", 32, 1e-3), ("fp4", 64, 0.02)])
@pytest.mark.parametrize(("requests", "next_n"), [(4, 1), (2, 2), (4, 3), (4, 4)])
def test_rows_22_and_23_decode_scores(index, heads, bound, requests, next_n, implementation):
    """Contexts of 0.7 to 1.4 times 2,048, against the unquantised product."""
    rng, layout, width = np.random.default_rng(next_n), layout_of(index=index), 64
    lens = rng.integers(1_434, 2_868, requests).tolist()
    tables = rng.permutation(requests * width).reshape(requests, width).tolist()
    keys = [rng.normal(size=(n, 128)).astype(np.float32) for n in lens]
    bucket = Bucket(context_requests=requests, context_tokens=sum(lens), table_width=width)
    fill = StepMetadata.create(layout, bucket, tables, lens, lens).derive()
    append = jax.jit(partial(ops.append_index_k, implementation="xla"), static_argnums=1)
    cache = append(cases.poisoned(layout, requests * width), 0, jnp.asarray(np.concatenate(keys)), fill)
    tokens = requests * next_n
    values = rng.normal(size=(tokens, heads, 128)).astype(np.float32)
    weights = rng.normal(size=(tokens, heads)).astype(np.float32)
    codes, scale = ops.quantize_index_k(jnp.asarray(values.reshape(-1, 128)), index)
    assert scale is not None
    codes, scale = codes.reshape(tokens, heads, -1), scale.reshape(tokens, heads)
    q: Any = (codes, scale) if index == "fp4" else codes
    folded = jnp.asarray(weights) * (scale if index == "fp8" else 1)
    bucket = Bucket(decode_requests=requests, next_n=next_n, table_width=width)
    step = StepMetadata.create(layout, bucket, tables, lens, [next_n] * requests).derive()
    score = lambda q, w, c, s: ops.paged_mqa_logits(q, w, c, 0, s, implementation=implementation)
    got, seen, wanted = np.asarray(call(score, q, folded, cache, step)), [], []
    for t in range(tokens):
        r, limit = t // next_n, lens[t // next_n] - next_n + t % next_n + 1
        assert np.isneginf(got[t, limit:]).all()
        seen.append(got[t, :limit])
        wanted.append(exact(values[t : t + 1], weights[t : t + 1], keys[r][:limit])[0])
    assert calc_diff(np.concatenate(seen), np.concatenate(wanted)) < bound


@pytest.mark.parametrize("implementation", KERNELS)
def test_row_24_contiguous_scores(implementation):
    """64 heads, 2,048 queries after 512 cached keys of 4,096: the mask exactly, the scores to 1e-3."""
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=(2_048, 64, 128)).astype(np.float32), rng.normal(size=(2_048, 64))
    keys = rng.normal(size=(4_096, 128)).astype(np.float32)
    codes, scale = quant.quantize_fp8(jnp.asarray(values))
    ends = 513 + np.arange(2_048, dtype=np.int32)
    arguments = codes, quant.quantize_fp8(jnp.asarray(keys)), jnp.asarray(weights, jnp.float32) * scale
    windows = jnp.zeros(2_048, jnp.int32), jnp.asarray(ends)
    got = np.asarray(call(ops.mqa_logits, *arguments, *windows, implementation=implementation))
    inside = np.arange(4_096) < ends[:, None]
    np.testing.assert_array_equal(np.isneginf(got), ~inside)
    want = exact(values, weights, keys)
    assert 1e-6 < calc_diff(got[inside], want[inside]) < 1e-3


# --- Ampere's schedules --------------------------------------------------------------------------------------------

A100 = describe("gpu", "NVIDIA A100-SXM4-80GB")


@pytest.mark.parametrize("index", ["fp8", "fp4"])
@pytest.mark.parametrize(("heads", "next_n"), [(64, 1), (64, 8), (32, 4)])
def test_scores_as_an_a100_would_run_them(index, heads, next_n):
    rng, layout = np.random.default_rng(0), layout_of(index=index)
    lens = [700, 9, 64, 257]
    tables = rng.permutation(48).reshape(4, 12).tolist()
    bucket = Bucket(context_requests=4, context_tokens=sum(lens), table_width=12)
    fill = StepMetadata.create(layout, bucket, tables, lens, lens).derive()
    append = jax.jit(partial(ops.append_index_k, implementation="xla"), static_argnums=1)
    keys = jnp.asarray(rng.normal(size=(sum(lens), 128)), jnp.float32)
    cache = append(cases.poisoned(layout, 48), 0, keys, fill)
    bucket = Bucket(decode_requests=4, next_n=next_n, table_width=12)
    step = StepMetadata.create(layout, bucket, tables, lens, [next_n] * 4).derive()
    values = jnp.asarray(rng.normal(size=(4 * next_n * heads, 128)), jnp.float32)
    codes, scale = ops.quantize_index_k(values, index)
    assert scale is not None
    codes, scale = codes.reshape(4 * next_n, heads, -1), scale.reshape(4 * next_n, heads)
    q: Any = (codes, scale) if index == "fp4" else codes
    weights = jnp.asarray(rng.normal(size=(4 * next_n, heads)), jnp.float32)
    config = paged_logits_triton.default_config(
        A100, heads=heads, new_tokens=next_n, requests=4, keys=768, form=index
    )
    # This card would take FP8 codes as they are, where that one makes float16 of them.
    config = dataclasses.replace(config, fp8_products=False)
    score = lambda q, w, c, s, **how: ops.paged_mqa_logits(q, w, c, 0, s, **how)
    as_text = lambda c: str(
        jax.make_jaxpr(partial(score, implementation="triton", config=c))(q, weights, cache, step)
    )
    assert "f8_e4m3fn" not in as_text(config)
    assert ("f8_e4m3fn" in as_text(None)) == (index == "fp8")
    got = np.asarray(call(score, q, weights, cache, step, implementation="triton", config=config))
    want = np.asarray(call(score, q, weights, cache, step, implementation="xla"))
    limits = np.asarray(step.limits)[:, None]
    check_scores(got, want, np.arange(got.shape[1])[None] < limits)
