"""The ops on a CUDA card, through their public signatures: every kernel against the exact reference, and who is chosen.

Run with ``pytest -m gpu`` on the card.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import form_cases
from card_scores import check_scores
from dsa_jax import Bucket, Cache, CacheLayout, StepMetadata, ops, quant, xla
from dsa_jax.config import preset
from dsa_jax.pallas import paged_logits_triton
from dsa_jax.quant.fp8 import exact_divide
from numpy_model import calc_diff

pytestmark = pytest.mark.gpu

LENGTHS = (0, 1, 63, 64, 65, 255, 256, 257, 2047, 2048, 2049)
LAYER = 1


def on_card(f, *args, **kwargs):
    return jax.jit(partial(f, **kwargs))(*args)


def layout_of(manager="v2", page_size=64, index="fp8", key="bf16") -> CacheLayout:
    return CacheLayout.create(
        preset("deepseek-v3.2"),
        layers=(0, 1, 2),
        manager=manager,
        page_size=page_size,
        index_form=index,
        key_form=key,
    )


def decode_case(manager, page_size, next_n, heads, seed=0):
    """Ragged decode requests with shuffled pages, all keys written by the reference."""
    rng = np.random.default_rng(seed)
    layout = layout_of(manager, page_size)
    lens = [n for n in LENGTHS if n == 0 or n >= next_n]
    width = -(-max(lens) // page_size) + 1
    slots = sum(-(-n // page_size) for n in lens) + 5
    free = rng.permutation(slots).tolist()
    tables = [[free.pop() for _ in range(-(-n // page_size))] for n in lens]
    fill = StepMetadata.create(
        layout,
        Bucket(context_requests=len(lens), context_tokens=sum(lens), table_width=width),
        tables,
        lens,
        lens,
    )
    keys = jax.random.normal(jax.random.key(seed), (sum(lens), 128), jnp.bfloat16)
    cache = on_card(
        lambda c, m, k: ops.append_index_k(c, LAYER, k, m.derive(), implementation="xla"),
        cases.poisoned(layout, slots),
        fill,
        keys,
    )
    new = [min(next_n, n) for n in lens]
    bucket = Bucket(decode_requests=len(lens), next_n=next_n, table_width=width)
    meta = StepMetadata.create(layout, bucket, tables, lens, new)
    q = jax.random.normal(jax.random.key(seed + 1), (bucket.tokens, heads, 128), jnp.float32)
    weights = jax.random.normal(jax.random.key(seed + 2), (bucket.tokens, heads), jnp.float32)
    codes, scale = quant.quantize_fp8(q)
    return cache, meta, codes, weights * scale


limits_of = jax.jit(lambda meta: meta.derive().limits)


def query(form, values, weights):
    """Codes of queries and their weights as the scoring ops take them: FP8's scale is the weights', FP4 keeps its own."""
    if form == "fp4":
        return quant.quantize_fp4(values), weights
    codes, scale = quant.quantize_fp8(values)
    return codes, weights * scale


PAGED = [("v2", 64, 1, 64), ("v1", 64, 2, 64), ("v2", 32, 3, 32), ("v2", 128, 6, 64), ("v2", 64, 8, 32)]
ONLY_TRITON = [("v1", 256, 4, 128), ("v2", 16, 8, 16), ("v2", 256, 1, 16), ("v1", 16, 3, 128)]
"""Pages and heads that None leaves to Triton on every card."""


@pytest.mark.parametrize(
    ("implementation", "manager", "page_size", "next_n", "heads"),
    [
        *((kernel, *shape) for kernel in ("mosaic", "triton") for shape in PAGED),
        *((kernel, *shape) for kernel in ("triton", None) for shape in ONLY_TRITON),
    ],
)
def test_paged_logits(implementation, manager, page_size, next_n, heads):
    cache, meta, q, weights = decode_case(manager, page_size, next_n, heads)

    def run(cache, meta, q, weights, implementation):
        return ops.paged_mqa_logits(q, weights, cache, LAYER, meta.derive(), implementation=implementation)

    kernel = jax.jit(partial(run, implementation=implementation))
    got = kernel(cache, meta, q, weights)
    want = on_card(run, cache, meta, q, weights, implementation="xla")
    limits = np.asarray(limits_of(meta))[:, None]
    check_scores(got, want, np.arange(got.shape[1])[None] < limits)
    for _ in range(20):
        np.testing.assert_array_equal(
            got, on_card(run, cache, meta, q, weights, implementation=implementation)
        )


WINDOWS = {
    "mosaic": ("fp8", dict(implementation="mosaic")),
    "triton": ("fp8", dict(implementation="triton")),
    # Codes become float16, as on cards whose tensor cores take no FP8.
    "triton for Ampere": (
        "fp8",
        dict(implementation="triton", config=paged_logits_triton.Config(fp8_products=False)),
    ),
    "mosaic, fp4": ("fp4", dict(implementation="mosaic")),
    "triton, fp4": ("fp4", dict(implementation="triton")),
}
"""Kernels for contiguous keys: the keys' form, and how the op is asked for one."""


@pytest.mark.parametrize("kernel", WINDOWS)
def test_a_nan_key_scores_nan(kernel):
    """Whatever rows see it, as in the reference: it must not pass for a poor key. The others keep their scores."""
    (form, how), rows, keys, bad = WINDOWS[kernel], 5, 130, 70
    data = jax.random.normal(jax.random.key(2), (keys, 128)).at[bad, 3].set(jnp.nan)
    values, weights = (
        jax.random.normal(jax.random.key(i), (rows, 64, *n)) for i, n in ((1, (128,)), (3, ()))
    )
    codes, weights = query(form, values, weights)
    ends = jnp.array([bad, bad + 1, keys, keys, 3], jnp.int32)
    key_codes = (quant.quantize_fp8 if form == "fp8" else quant.quantize_fp4)(data)
    arguments = (codes, key_codes, weights, jnp.zeros(rows, jnp.int32), ends)
    got, want = (
        np.asarray(on_card(ops.mqa_logits, *arguments, **h)) for h in (how, dict(implementation="xla"))
    )
    assert np.isnan(want[1:4, bad]).all()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert np.isnan(want).sum() == 3
    check_scores(np.where(np.isnan(want), -np.inf, got), want, np.isfinite(want))


@pytest.mark.parametrize("kernel", WINDOWS)
@pytest.mark.parametrize(("rows", "keys", "heads"), [(515, 4096, 64), (130, 1999, 32), (1, 5, 64)])
def test_window_logits(kernel, rows, keys, heads):
    """Windows of ascending starts, some empty or reversed, some longer than the keys; keys in none of them are NaN."""
    (form, how), rng = WINDOWS[kernel], np.random.default_rng(keys)
    starts = np.sort(rng.integers(keys // 8, keys, rows)).astype(np.int32)
    ends = (starts + rng.integers(-20, 900, rows)).astype(np.int32)
    if rows == 1:
        starts[0], ends[0] = -3, keys + 2
    column = np.arange(keys)[None]
    visible = (column >= starts[:, None]) & (column < ends[:, None])
    values = jax.random.normal(jax.random.key(1), (rows, heads, 128))
    q, weights = query(form, values, jax.random.normal(jax.random.key(3), (rows, heads)))
    quantize = quant.quantize_fp8 if form == "fp8" else quant.quantize_fp4
    codes, scale = quantize(jax.random.normal(jax.random.key(2), (keys, 128)))
    nothing = jnp.nan if form == "fp8" else -1
    scale = jnp.where(visible.any(axis=0), scale, jnp.asarray(nothing, scale.dtype))
    arguments = (q, (codes, scale), weights, jnp.asarray(starts), jnp.asarray(ends))
    score = jax.jit(partial(ops.mqa_logits, **how))
    got = np.asarray(score(*arguments))
    assert visible.any()
    check_scores(got, on_card(ops.mqa_logits, *arguments, implementation="xla"), visible)
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(score(*arguments)), got)


@pytest.mark.parametrize("implementation", [None, "triton"])
@pytest.mark.parametrize(
    ("rows", "columns", "k"), [(64, 32768, 2048), (5, 131072, 2048), (300, 700, 64), (3, 7, 16)]
)
def test_topk(rows, columns, k, implementation):
    rng = np.random.default_rng(0)
    scores = np.round(rng.standard_normal((rows, columns)), 2).astype(np.float32)  # many ties
    scores[0, ::7] = np.nan
    limits = rng.integers(0, columns + 1, rows).astype(np.int32)
    limits[0] = columns
    run = partial(ops.topk_indices, k=k)
    got = on_card(run, jnp.array(scores), jnp.array(limits), implementation=implementation)
    want = on_card(run, jnp.array(scores), jnp.array(limits), implementation="xla")
    np.testing.assert_array_equal(got, want)


APPENDS = [
    # manager, index form, key form, page size, key_scale, context lengths, dtype
    ("v1", "fp8", "bf16", 64, None, (130, 1, 64), jnp.bfloat16),
    ("v2", "fp8", "bf16", 64, None, (1300, 1, 64), jnp.float32),
    ("v2", "fp4", "nvfp4", 64, 0.0123, (130, 1, 64), jnp.bfloat16),
    ("v1", "fp4", "nvfp4", 32, None, (1300, 1, 64), jnp.float32),
    ("v2", "f32", "fp8", 128, 0.37, (1300, 1, 64), jnp.float32),
    ("v1", "fp8", "fp8", 16, None, (3, 1, 2), jnp.float16),
    ("v1", "fp4", "fp8_ds_mla", 64, None, (130, 1, 64), jnp.float32),
    ("v2", "fp8", "fp8_ds_mla", 64, None, (1300, 1, 64), jnp.bfloat16),
    ("v1", "f32", "f32", 64, None, (130, 1, 64), jnp.bfloat16),
    ("v2", "fp4", "nvfp4", 64, 0.3, (70_000, 1, 64), jnp.bfloat16),
    ("v2", "fp8", "bf16", 64, None, (70_000, 1, 64), jnp.bfloat16),
    ("v1", "f32", "fp8", 64, 0.37, (70_000, 1, 64), jnp.float32),
    ("v2", "fp8", "fp8_ds_mla", 64, None, (70_000, 1, 64), jnp.bfloat16),
    ("v1", "fp8", "f32", 64, None, (70_000, 1, 64), jnp.float32),
]
"""Few tokens and many (programs of one token and of several), and in every form more of them than 65,536 (B03)."""


@pytest.mark.parametrize(("manager", "index", "key", "page_size", "key_scale", "lens", "dtype"), APPENDS)
def test_append_and_gather(manager, index, key, page_size, key_scale, lens, dtype):
    """Bytes of the kernels equal those of the reference, nothing else changes, and 20 runs give the same."""
    layout, tokens = layout_of(manager, page_size, index, key), sum(lens) + 9
    pages = [-(-n // page_size) for n in lens]
    free = np.random.default_rng(0).permutation(sum(pages) + 2).tolist()
    tables = [[free.pop() for _ in range(count)] for count in pages]
    bucket = Bucket(
        context_requests=3, context_tokens=tokens, table_width=max(pages) + 1, gathered_keys=tokens
    )
    meta = StepMetadata.create(layout, bucket, tables, lens, [max(1, lens[0] - 30), *lens[1:]])
    sizes = jnp.exp2(jax.random.randint(jax.random.key(3), (tokens, 1), -12, 8).astype(jnp.float32))
    k, latent, rope = (
        (jax.random.normal(jax.random.key(i), (tokens, n)) * sizes).astype(dtype)
        for i, n in enumerate((128, 512, 64))
    )
    k = k.at[1, 5].set(jnp.inf).at[2, 7].set(jnp.nan).at[3].set(0)
    if key == "fp8":  # quotients that a division off by a bit rounds to other codes
        latent = latent.at[4, :320].set(form_cases.near_middles(key_scale or 1.0).astype(dtype))
    if key != "bf16":  # which NaN a conversion to bfloat16 gives is nobody's promise
        latent = latent.at[1, 5].set(-jnp.inf).at[2, 7].set(jnp.nan).at[3].set(0)

    def run(cache, meta, k, latent, rope, implementation):
        step = meta.derive()
        cache = ops.append_index_k(cache, LAYER, k, step, implementation=implementation)
        cache = ops.append_latent(
            cache, LAYER, latent, rope, step, key_scale=key_scale, implementation=implementation
        )
        return cache, ops.gather_index_k(cache, LAYER, step, implementation=implementation)

    bytes_of = lambda tree: [np.asarray(x).view(np.uint8) for x in jax.tree.leaves(tree)]
    poison = cases.poisoned(layout, sum(pages) + 2)
    kernel, reference = (jax.jit(partial(run, implementation=name)) for name in ("triton", "xla"))
    want = bytes_of(reference(poison, meta, k, latent, rope))
    for _ in range(20 if tokens < 5_000 else 2):
        for a, b in zip(bytes_of(kernel(poison, meta, k, latent, rope)), want, strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_references_division_is_correctly_rounded():
    """Against NumPy, bit for bit; the card's own division is not."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 1 << 32, (2, 1 << 20), np.uint32).view(np.float32)
    near = form_cases.near_middles(0.37)
    for a, b in ((x, y), (np.abs(x), np.float32(0.37)), (near, np.float32(0.37))):
        with np.errstate(all="ignore"):
            want = a / b
        usual = (np.abs(want) >= 2.0**-126) & (np.abs(want) < np.inf)
        np.testing.assert_array_equal(np.asarray(on_card(exact_divide, a, b))[usual], want[usual])


@pytest.mark.parametrize(("index", "key"), [("fp8", "bf16"), ("fp4", "nvfp4"), ("f32", "fp8_ds_mla")])
def test_append_copies_no_pool(index, key):
    """P13: temporaries do not grow with the pool, and the pools are aliased."""
    layout, temporary = layout_of(index=index, key=key), []
    bucket = Bucket(decode_requests=64, next_n=1, table_width=4)
    meta = StepMetadata.create(layout, bucket, [[i] for i in range(64)], [1] * 64, [1] * 64)
    for slots in (128, 512):

        def run(cache, meta, k, latent, rope):
            cache = ops.append_index_k(cache, LAYER, k, meta.derive())
            return ops.append_latent(cache, LAYER, latent, rope, meta.derive())

        cache = Cache.abstract(layout, slots)
        vectors = [jax.ShapeDtypeStruct((64, n), jnp.bfloat16) for n in (128, 512, 64)]
        memory = jax.jit(run, donate_argnums=0).lower(cache, meta, *vectors).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= cache.nbytes
        temporary.append(memory.temp_size_in_bytes)
    assert abs(temporary[1] - temporary[0]) <= 4096


@pytest.mark.parametrize(("page_size", "next_n", "k", "rows"), [(64, 1, 2048, 1000), (32, 2, 64, 5)])
def test_rows_of_a_selection(page_size, next_n, k, rows):
    """Rows in one go, whole and in chunks of so many rows, are those of the reference, and those of the positions.

    Queries, keys and weights are small whole numbers, so that scores are exact however they are summed, and full of ties.
    """
    cache, meta, q, weights = decode_case("v2", page_size, next_n, 64, seed=3)
    rng, whole = np.random.default_rng(3), np.array([0xB8, 0x00, 0x38], np.uint8)  # -1, 0, 1
    keys = jnp.asarray(rng.choice(whole, cache.pages("index_key").shape))
    cache = cache.replace_pages(index_key=keys, index_scale=jnp.ones_like(cache.pages("index_scale")))
    q, weights = rng.choice(whole, q.shape), rng.integers(-2, 3, weights.shape).astype(np.float32)
    budget = rows * meta.bucket.table_width * page_size * 4

    def select(cache, meta, q, weights, **how):
        step, arguments = meta.derive(), (jnp.asarray(q), jnp.asarray(weights), cache, LAYER)
        local = ops.select_tokens(*arguments, step, k, **how)
        return ops.select_rows(*arguments, step, k, **how), xla.to_rows(local, step), local

    got, of_positions, local = on_card(select, cache, meta, q, weights, score_budget=budget)
    want, *_ = on_card(select, cache, meta, q, weights, implementation="xla")
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(of_positions, want)
    assert (np.asarray(got) != np.asarray(local)).any()
    assert ((np.asarray(got) >= 0).sum(axis=1) == np.minimum(np.asarray(limits_of(meta)), k)).all()


def test_a_model_step_agrees_with_the_reference():
    """The shipped model in bf16 and FP8 forms: the kernels' logits are those of the reference up to rounding."""
    from dsa_jax.models.checkpoint import load_pretrained
    from dsa_jax.models.step import make_step

    model = load_pretrained("docs-8m")
    layout = CacheLayout.create(model.config.dsa)
    bucket = Bucket(context_requests=2, context_tokens=200, table_width=4)
    meta = StepMetadata.create(layout, bucket, [[3, 1, 5], [0]], [140, 60], [140, 60])
    tokens = jax.random.randint(jax.random.key(0), (200,), 0, 2048)
    after = StepMetadata.create(
        layout, Bucket(decode_requests=2, next_n=1, table_width=4), [[3, 1, 5], [0]], [141, 61], [1, 1]
    )
    logits = []
    for implementation in (None, "xla"):
        step, params = make_step(model, implementation=implementation)
        cache, _ = jax.jit(step)(params, Cache.create(layout, 8), meta, tokens)
        logits.append(np.asarray(jax.jit(step)(params, cache, after, jnp.array([5, 6], jnp.int32))[1]))
    assert np.isfinite(logits[0]).all()
    assert calc_diff(*logits) < 5e-3
