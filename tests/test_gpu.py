"""The ops on a CUDA card, through their public signatures: every kernel against the exact reference, and who is chosen.

Run with ``pytest -m gpu`` on the card.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_jax import Bucket, Cache, CacheLayout, StepMetadata, ops, quant, support
from dsa_jax.compat import target_device
from dsa_jax.config import preset
from dsa_jax.ops import gpu

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


def poisoned(layout: CacheLayout, slots: int) -> Cache:
    """A cache whose every byte is NaN in any form."""
    cache = Cache.create(layout, slots)
    fill = {
        n: jnp.full(p.shape, 0x7F if p.dtype == jnp.uint8 else jnp.nan, p.dtype)
        for n, p in cache.pools().items()
    }
    return cache.replace_pages(**{n: p.reshape(cache.pages(n).shape) for n, p in fill.items()})


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
        poisoned(layout, slots),
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


def calc_diff(a, b) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return 1 - 2 * (a * b).sum() / ((a * a).sum() + (b * b).sum())


@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
@pytest.mark.parametrize(
    ("manager", "page_size", "next_n", "heads"),
    [("v2", 64, 1, 64), ("v1", 64, 2, 64), ("v2", 32, 3, 32), ("v2", 128, 6, 64), ("v2", 64, 8, 32)],
)
def test_paged_logits(implementation, manager, page_size, next_n, heads):
    cache, meta, q, weights = decode_case(manager, page_size, next_n, heads)

    def run(cache, meta, q, weights, implementation):
        return ops.paged_mqa_logits(q, weights, cache, LAYER, meta.derive(), implementation=implementation)

    kernel = jax.jit(partial(run, implementation=implementation))
    got = kernel(cache, meta, q, weights)
    want = on_card(run, cache, meta, q, weights, implementation="xla")
    limits = np.asarray(limits_of(meta))[:, None]
    visible = np.arange(got.shape[1])[None] < limits
    assert np.isneginf(np.asarray(got)[~visible]).all()
    assert np.isfinite(np.asarray(got)[visible]).all()
    assert calc_diff(np.where(visible, got, 0), np.where(visible, want, 0)) < 5e-6
    for _ in range(20):
        np.testing.assert_array_equal(
            got, on_card(run, cache, meta, q, weights, implementation=implementation)
        )


@pytest.mark.parametrize(("manager", "page_size", "heads"), [("v2", 64, 64), ("v1", 32, 32)])
def test_context_logits(manager, page_size, heads):
    """Ragged contexts with a cached prefix, a fresh one, an empty one, and padding."""
    layout = layout_of(manager, page_size)
    lens, new = [700, 0, 65, 300], [130, 0, 65, 7]
    tables = [list(range(40, 63)), [], [3, 1, 9], [5, 7, 2, 11, 12, 13, 14, 15, 16, 17]]
    fill = StepMetadata.create(
        layout, Bucket(context_requests=4, context_tokens=sum(lens), table_width=24), tables, lens, lens
    )
    keys = jax.random.normal(jax.random.key(0), (sum(lens), 128), jnp.bfloat16)
    append = lambda c, m, k: ops.append_index_k(c, LAYER, k, m.derive(), implementation="xla")
    cache = on_card(append, poisoned(layout, 70), fill, keys)
    bucket = Bucket(context_requests=4, context_tokens=220, table_width=24)
    meta = StepMetadata.create(layout, bucket, tables, lens, new)
    q, scale = quant.quantize_fp8(jax.random.normal(jax.random.key(1), (220, heads, 128)))
    weights = jax.random.normal(jax.random.key(2), (220, heads)) * scale

    def run(cache, meta, q, weights, implementation):
        return ops.paged_mqa_logits(q, weights, cache, LAYER, meta.derive(), implementation=implementation)

    got, want = (
        np.asarray(on_card(run, cache, meta, q, weights, implementation=i)) for i in ("mosaic", "xla")
    )
    visible = np.arange(got.shape[1])[None] < np.asarray(limits_of(meta))[:, None]
    assert np.isneginf(got[~visible]).all()
    assert np.isfinite(got[visible]).all()
    assert calc_diff(np.where(visible, got, 0), np.where(visible, want, 0)) < 5e-6


@pytest.mark.parametrize(
    ("rows", "columns", "k"), [(64, 32768, 2048), (5, 131072, 2048), (300, 700, 64), (3, 7, 16)]
)
def test_topk(rows, columns, k):
    rng = np.random.default_rng(0)
    scores = np.round(rng.standard_normal((rows, columns)), 2).astype(np.float32)  # many ties
    scores[0, ::7] = np.nan
    limits = rng.integers(0, columns + 1, rows).astype(np.int32)
    limits[0] = columns
    run = partial(ops.topk_indices, k=k)
    got = on_card(run, jnp.array(scores), jnp.array(limits), implementation="triton")
    want = on_card(run, jnp.array(scores), jnp.array(limits), implementation="xla")
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("manager", ["v1", "v2"])
def test_append_and_gather(manager):
    """Bytes of the kernels equal those of the reference, and nothing else changes."""
    layout = layout_of(manager)
    lens = [130, 1, 64]
    bucket = Bucket(context_requests=3, context_tokens=256, table_width=3, gathered_keys=256)
    meta = StepMetadata.create(layout, bucket, [[4, 0, 7], [2], [5]], lens, [100, 1, 64])
    k = jax.random.normal(jax.random.key(0), (256, 128), jnp.bfloat16)
    latent = jax.random.normal(jax.random.key(1), (256, 512), jnp.bfloat16)
    rope = jax.random.normal(jax.random.key(2), (256, 64), jnp.bfloat16)

    def run(cache, meta, implementation):
        step = meta.derive()
        cache = ops.append_index_k(cache, LAYER, k, step, implementation=implementation)
        cache = ops.append_latent(cache, LAYER, latent, rope, step, implementation=implementation)
        return cache, ops.gather_index_k(cache, LAYER, step, implementation=implementation)

    got = on_card(run, poisoned(layout, 9), meta, implementation="triton")
    want = on_card(run, poisoned(layout, 9), meta, implementation="xla")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def test_append_copies_no_pool():
    """P13: temporaries do not grow with the pool, and the pools are aliased."""
    layout, temporary = layout_of(), []
    bucket = Bucket(decode_requests=64, next_n=1, table_width=4)
    meta = StepMetadata.create(layout, bucket, [[i] for i in range(64)], [1] * 64, [1] * 64)
    for slots in (128, 512):

        def run(cache, meta, k):
            return ops.append_index_k(cache, LAYER, k, meta.derive())

        cache = Cache.abstract(layout, slots)
        k = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
        memory = jax.jit(run, donate_argnums=0).lower(cache, meta, k).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= cache.nbytes
        temporary.append(memory.temp_size_in_bytes)
    assert abs(temporary[1] - temporary[0]) <= 4096


@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
@pytest.mark.parametrize("heads", [8, 16, 64, 128])
def test_sparse_mla(implementation, heads):
    layout, slots = layout_of(), 40
    values = jax.random.normal(jax.random.key(0), (slots * 3, 64, 576), jnp.bfloat16) / 10
    cache = Cache.create(layout, slots).replace_pages(key=values)
    rng = np.random.default_rng(0)
    rows = np.stack([rng.permutation(slots * 64)[:512] for _ in range(7)]).astype(np.int32)
    rows[1, ::3] = -1
    rows[2] = -1
    rows[3, 100:] = -1
    used = np.unique(rows[rows >= 0])
    holes = np.setdiff1d(np.arange(slots * 64), used)
    pages = cache.pages("key").at[(holes // 64) * 3 + LAYER, holes % 64].set(jnp.nan)
    cache = cache.replace_pages(key=pages)
    q = jnp.clip(jax.random.normal(jax.random.key(1), (7, heads, 576), jnp.bfloat16), -1, 1)

    def run(q, cache, rows, implementation):
        return ops.sparse_mla(q, cache, LAYER, rows, 0.1352338, implementation=implementation)

    out, lse = on_card(run, q, cache, jnp.array(rows), implementation=implementation)
    want, want_lse = on_card(run, q.astype(jnp.float32), cache, jnp.array(rows), implementation="xla")
    assert (np.asarray(out)[2] == 0).all() and np.isneginf(np.asarray(lse)[2]).all()
    error = np.abs(np.asarray(out, np.float32) - np.asarray(want))
    close = (error < 1e-3) | (error < 2.01 / 128 * (np.abs(want) + 1e-6))
    assert close.mean() > 0.9999 and calc_diff(out, want) < 5e-6
    kept = np.isfinite(np.asarray(want_lse))
    np.testing.assert_allclose(np.asarray(lse)[kept], np.asarray(want_lse)[kept], atol=1e-4, rtol=1e-4)


def test_sparse_mla_of_656_byte_tokens():
    layout = layout_of(key="fp8_ds_mla")
    bucket = Bucket(context_requests=1, context_tokens=1024, table_width=16)
    meta = StepMetadata.create(layout, bucket, [list(range(3, 19))], [1024], [1024])
    latent, rope = (
        jax.random.normal(jax.random.key(i), (1024, n), jnp.bfloat16) for i, n in ((0, 512), (1, 64))
    )
    append = lambda c: ops.append_latent(c, LAYER, latent, rope, meta.derive(), implementation="xla")
    cache = on_card(append, poisoned(layout, 20))
    rng = np.random.default_rng(0)
    rows = np.stack([192 + rng.permutation(1024)[:256] for _ in range(5)]).astype(np.int32)
    rows[1, ::3], rows[2] = -1, -1
    q = jnp.clip(jax.random.normal(jax.random.key(2), (5, 128, 576), jnp.bfloat16), -1, 1)

    def run(q, cache, rows, implementation):
        return ops.sparse_mla(q, cache, LAYER, rows, 0.05, implementation=implementation)

    out, lse = on_card(run, q, cache, jnp.array(rows), implementation="mosaic")
    want, want_lse = on_card(run, q.astype(jnp.float32), cache, jnp.array(rows), implementation="xla")
    assert np.isneginf(np.asarray(lse)[2]).all()
    assert calc_diff(out, want) < 1e-5
    kept = np.isfinite(np.asarray(want_lse))
    np.testing.assert_allclose(np.asarray(lse)[kept], np.asarray(want_lse)[kept], atol=2e-3, rtol=2e-3)


def test_the_library_chooses_kernels_here():
    """None must not quietly mean the reference where a kernel is claimed."""
    device = target_device()
    assert device.capability is not None and device.capability >= (8, 0)
    cache = Cache.abstract(layout_of(), 8)
    bucket = Bucket(decode_requests=4, next_n=2, table_width=2)
    step = StepMetadata.create(cache.layout, bucket, [[0]] * 4, [2] * 4, [2] * 4).derive()
    hopper = device.capability[0] == 9
    assert support.chosen("paged_mqa_logits", gpu.paged_mqa_logits(cache, 64, step), device) == (
        "mosaic" if hopper else "triton"
    )
    for operation, candidates in (
        ("append_index_k", gpu.append_index_k(cache)),
        ("append_latent", gpu.append_latent(cache)),
        ("gather_index_k", gpu.gather_index_k(cache)),
        ("topk_indices", gpu.topk_indices(2048)),
    ):
        assert support.chosen(operation, candidates, device) == "triton"
    for heads in (8, 128):
        assert support.chosen("sparse_mla", gpu.sparse_mla(cache, heads, jnp.bfloat16, 0.1), device) != "xla"


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
