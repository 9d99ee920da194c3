"""Contract of memory: a donated step updates the pools in place, however large they are, and is traced once."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from dsa_jax import ops, quant
from dsa_jax.cache import Cache
from dsa_jax.draft import draft_metadata, rewind
from dsa_jax.metadata import Bucket, StepMetadata

HEADS, K = 4, 8
SLACK = 4096
DECODE = Bucket(decode_requests=3, next_n=2, table_width=4)
PREFILL = Bucket(context_requests=2, context_tokens=24, table_width=4, gathered_keys=128)


def spread(x, *shape):
    """Values of the right shape that depend on the activations ``[N]``, so that each layer waits for the one before."""
    size = math.prod(shape)
    scale = 1.0 + jnp.arange(size, dtype=jnp.float32).reshape(shape) / size
    return jnp.reshape(x, (-1,) + (1,) * len(shape)) * scale[None]


def layer_of(cache, layer, full: bool, x, step, rows, score_budget=512 << 20):
    """One layer in a straight line, as a model has it."""
    if full:
        width = cache.layout.index_head_dim
        cache = ops.append_index_k(cache, layer, spread(x, width), step)
        q, weights = spread(x, HEADS, width), spread(x, HEADS)
        if cache.layout.index_form == "fp8":
            q, scale = quant.quantize_fp8(q)
            weights = weights * scale
        rows = ops.to_rows(
            ops.select_tokens(q, weights, cache, layer, step, K, score_budget=score_budget), step
        )
    cache = ops.append_latent(cache, layer, spread(x, cases.LATENT), spread(x, cases.ROPE), step)
    out, _ = ops.sparse_mla(spread(x, 2, cases.LATENT + cases.ROPE), cache, layer, rows, 0.3)
    return cache, x + jnp.tanh(out.sum(axis=(1, 2))), rows


def model(cache, meta, x):
    """Three layers, the middle one sharing the first one's selection."""
    step, rows = meta.derive(), None
    for layer, full in enumerate(cases.FULL):
        cache, x, rows = layer_of(cache, layer, full, x, step, rows)
    return cache, x


def chunked_model(cache, meta, x):
    """The same with a score budget of three rows, so that selection loops over chunks."""
    step, rows = meta.derive(), None
    budget = 3 * 4 * meta.bucket.table_width * meta.layout.page_size
    for layer, full in enumerate(cases.FULL):
        cache, x, rows = layer_of(cache, layer, full, x, step, rows, budget)
    return cache, x


def scanned_model(cache, meta, x):
    """The full layers in a loop: the cache in the carry, the layer number traced."""
    step = meta.derive()

    def body(carry, layer):
        cache, x = carry
        cache, x, _ = layer_of(cache, layer, True, x, step, None)
        return (cache, x), None

    return jax.lax.scan(body, (cache, x), jnp.array([0, 2], jnp.int32))[0]


def append(cache, meta, x):
    """Both writes alone."""
    step = meta.derive()
    cache = ops.append_index_k(cache, 2, spread(x, cache.layout.index_head_dim), step)
    return ops.append_latent(cache, 1, spread(x, cases.LATENT), spread(x, cases.ROPE), step), x


def append_first(cache, meta, x):
    """Both writes, to the first layer."""
    step = meta.derive()
    cache = ops.append_index_k(cache, 0, spread(x, cache.layout.index_head_dim), step)
    return ops.append_latent(cache, 0, spread(x, cases.LATENT), spread(x, cases.ROPE), step), x


def gather_and_append(cache, meta, x):
    """A read of the whole history between two writes."""
    step = meta.derive()
    cache, x = append(cache, meta, x)
    data, _ = ops.gather_index_k(cache, 0, step)
    x = x + jnp.sum(data.astype(jnp.float32))
    return append(cache, meta, x)


def draft_pass(cache, meta, x):
    """What a verification leaves is rewound, and the model runs over it with pages of its own."""
    table = jnp.arange(meta.page_table.size, dtype=jnp.int32).reshape(meta.page_table.shape)
    kept = jnp.minimum(meta.new_lens, 1)
    return model(cache, draft_metadata(rewind(meta, kept), cache.layout, table), x)


def memory(f, layout, bucket, slots: int):
    """Memory of the compiled, donated function on a pool of so many slots, without allocating it."""
    abstract = Cache.abstract(layout, slots)
    meta = StepMetadata.create(layout, bucket, [], [], [])
    compiled = (
        jax.jit(f, donate_argnums=0).lower(abstract, meta, jnp.ones(bucket.tokens, jnp.float32)).compile()
    )
    analysis = compiled.memory_analysis()
    assert analysis is not None
    maps = abstract.key_offsets.size * 4 + abstract.index_offsets.size * 4
    return analysis.temp_size_in_bytes, analysis.alias_size_in_bytes, abstract.nbytes + maps


def check(f, layout, bucket) -> None:
    """Four times the slots: the same temporaries, and every byte of the pools aliased."""
    temporary, aliased, pools = memory(f, layout, bucket, 200)
    assert aliased == pools
    more_temporary, more_aliased, more_pools = memory(f, layout, bucket, 800)
    assert more_pools > 4 * pools - 100
    assert more_pools - pools > 100 * SLACK  # a copy of any pool would show
    assert more_aliased == more_pools
    assert abs(more_temporary - temporary) <= SLACK


@pytest.mark.sample(0, 2, 3, 5, 7)
@pytest.mark.parametrize(
    ("f", "bucket"),
    [
        (append, DECODE),
        (append, PREFILL),
        (gather_and_append, PREFILL),
        (model, DECODE),
        (model, PREFILL),
        (chunked_model, PREFILL),
        (scanned_model, DECODE),
        (draft_pass, DECODE),
        (draft_pass, PREFILL),
    ],
)
def test_pools_are_updated_in_place(f, bucket):
    check(f, cases.layout(index="fp8", key="bf16", page_size=16), bucket)


ONE = Bucket(decode_requests=1, table_width=4)
"""A single token: XLA makes a slice update of its scatter, which used to copy V1's pools."""


@pytest.mark.sample(0, 3)
@pytest.mark.parametrize(("f", "bucket"), [(append, PREFILL), (model, DECODE), (append, ONE), (model, ONE)])
def test_v1_pools(f, bucket):
    check(f, cases.layout("v1", index="fp8", key="bf16", page_size=16), bucket)


@pytest.mark.parametrize("bucket", [DECODE, ONE])
@pytest.mark.parametrize("manager", ["v1", "v2"])
def test_pools_of_one_layer(manager, bucket):
    """As every draft cache has."""
    layout = cases.layout(manager, index="fp8", key="bf16", page_size=16, full=(True,))
    check(append_first, layout, bucket)


def test_float_pools():
    check(append, cases.layout(index="f32", key="f32", page_size=16), DECODE)


def test_planted_copy_is_seen():
    """A function that reads the pool after it was overwritten, without an order between the two, makes XLA copy."""

    def copies(cache, meta, x):
        old = cache.key.astype(jnp.float32).sum(axis=(1, 2))
        cache, x = append(cache, meta, x)
        return cache, x, jnp.sort(old) + cache.key.astype(jnp.float32).sum(axis=(1, 2))

    with pytest.raises(AssertionError):
        check(copies, cases.layout(index="fp8", key="bf16", page_size=16), DECODE)


def test_without_donation_the_old_cache_stays():
    layout = cases.layout(index="fp8", key="bf16", page_size=16)
    cache = cases.poisoned(layout)
    before = cases.pool_bytes(cache)
    meta = StepMetadata.create(layout, DECODE, [[3], [5], [7]], [2, 2, 2], [2, 2, 2])
    after, _ = jax.jit(model)(cache, meta, jnp.ones(6, jnp.float32))
    assert cases.pool_bytes(cache) == before
    assert cases.pool_bytes(after) != before


def test_one_trace_per_bucket():
    """Batches of all shapes that a bucket holds run without tracing again, and donation leaves nothing behind."""
    layout, traces = cases.layout(index="fp8", key="bf16", page_size=16), []

    def counted(cache, meta, x):
        traces.append(meta.bucket)
        return model(cache, meta, x)

    step, cache = jax.jit(counted, donate_argnums=0), Cache.create(layout, 12)
    batches = {
        DECODE: [([], [], []), ([[1]], [1], [1]), ([[1, 2], [3], [4]], [30, 9, 2], [2, 1, 2])],
        PREFILL: [([[5]], [16], [16]), ([[1, 2], [3]], [20, 4], [20, 4]), ([[1, 2]], [25], [5])],
    }
    for bucket, facts in batches.items():
        for tables, kv, new in facts:
            old = cache
            cache, out = step(
                cache, StepMetadata.create(layout, bucket, tables, kv, new), jnp.ones(bucket.tokens)
            )
            assert old.key.is_deleted()
            assert np.isfinite(out).all()
    assert traces == [DECODE, PREFILL]
