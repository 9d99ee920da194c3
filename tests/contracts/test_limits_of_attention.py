"""Sizes at which 32 bits end, on a CUDA card, for every implementation of attention by name: 65,536 queries (B03), pools
around 2 and 4 GiB (B01); and the schedules of another card.

``pytest -m gpu``. What the right answer is does not come from another kernel: values are planted, or come from NumPy.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpy_forms
from contracts.test_limits_on_the_card import A100, MANY, call, layout_of
from contracts.test_sparse_mla_kernels import close, nowhere
from dsa_jax import ops
from dsa_jax.cache import Cache
from dsa_jax.metadata import Bucket, StepMetadata
from dsa_jax.pallas import sparse_mla_triton
from numpy_model import attention

pytestmark = pytest.mark.gpu
FORMS = ("bf16", "fp8", "nvfp4", "fp8_ds_mla")
WITH_KERNEL = [("bf16", "mosaic"), ("fp8_ds_mla", "mosaic"), *((form, "triton") for form in FORMS)]


@pytest.mark.parametrize(
    ("queries", "heads", "key", "implementation"),
    [
        *((*size, *one) for size in ((MANY - 1, 8), (MANY, 8), (MANY, 64)) for one in WITH_KERNEL),
        *((MANY, 8, form, "xla") for form in (*FORMS, "f32")),
    ],
)
def test_b03_attention(queries, heads, key, implementation):
    """Query i attends one row, whose latent is the bits of i, 16 elements each, and whose rotary part is the same, 4 each:
    0 or 6, which every form holds exactly. A query has powers of two for the bits, so that its score counts the rows; odd
    heads have twice as much.
    """
    layout = layout_of(key=key)
    bits = np.arange(MANY)[:, None] >> np.arange(16) & 1
    latent = jnp.asarray(np.pad(np.repeat(6 * bits, 16, axis=1), ((0, 0), (0, 256))), jnp.bfloat16)
    rope = jnp.asarray(np.repeat(6 * bits, 4, axis=1), jnp.bfloat16)
    bucket = Bucket(context_requests=1, context_tokens=MANY, table_width=MANY // 64)
    step = StepMetadata.create(layout, bucket, [range(MANY // 64)], [MANY], [MANY]).derive()
    append = jax.jit(partial(ops.append_latent, implementation="xla"), donate_argnums=0, static_argnums=1)
    cache = append(Cache.create(layout, MANY // 64), 0, latent, rope, step)
    rows = jnp.arange(queries, dtype=jnp.int32)[:, None]
    factors = 1 + np.arange(heads) % 2
    one = np.zeros((heads, 576))
    one[:, 0:256:16] = one[:, 512:576:4] = 2.0 ** (np.arange(16) - 10) * factors[:, None]
    q = jnp.broadcast_to(jnp.asarray(one, jnp.bfloat16), (queries, heads, 576))
    attend = lambda q, c, r: ops.sparse_mla(q, c, 0, r, 0.1, implementation=implementation)
    out, lse = call(attend, q, cache, rows)
    for head in (0, heads - 1):
        np.testing.assert_array_equal(np.asarray(out[:, head, 3:256:16], np.float32), 6 * bits[:queries])
    assert not bool(jax.jit(lambda x: jnp.any(x[:, :, 256:] != 0))(out))
    want = 0.1 * 12 * 2.0**-10 * np.arange(queries)[:, None] * factors
    np.testing.assert_allclose(lse, want, rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("gibibytes", [2, 4])
@pytest.mark.parametrize(("key", "implementation"), [*WITH_KERNEL, *((form, "xla") for form in FORMS)])
def test_b01_attention_to_far_pages(gibibytes, key, implementation):
    """Rows before, at and past the limit, three in each query: their scores tell latents and rotary parts."""
    page_bytes = {"bf16": 73_728, "fp8": 36_864, "nvfp4": 18_432, "fp8_ds_mla": 32_768}[key]
    layout, at = layout_of(key=key), (gibibytes << 30) // page_bytes
    pages = np.array([0, at - 1, at, at + 1, at + 40])
    rows = (pages * 64 + [0, 63, 1, 0, 63]).astype(np.int32)
    bucket = Bucket(context_requests=1, context_tokens=5, table_width=1)
    step = StepMetadata.create(layout, bucket, [[0]], [5], [5]).derive()
    step = dataclasses.replace(step, rows=jnp.asarray(rows))
    rng = np.random.default_rng(0)
    latent, rope = (rng.normal(size=(5, n)).astype(np.float32) for n in (512, 64))
    append = jax.jit(partial(ops.append_latent, implementation="xla"), donate_argnums=0, static_argnums=1)
    cache = append(Cache.create(layout, int(at) + 41), 0, jnp.asarray(latent), jnp.asarray(rope), step)
    values = numpy_forms.latent_values(numpy_forms.latent_entries(latent, rope, key), key)
    check_attention(cache, rows, values, partial(ops.sparse_mla, implementation=implementation))


def check_attention(cache: Cache, rows: np.ndarray, values: np.ndarray, op) -> None:
    """Attention of as many queries as rows, each to three of them and a number that is no row; both results by NumPy.

    Args:
        cache: one layer of 512 + 64 elements.
        rows: ``int32[n]``.
        values: ``float64[n, 576]``, what they hold.
        op: as ``ops.sparse_mla``.
    """
    count, rng = len(rows), np.random.default_rng(1)
    chosen = (np.arange(count)[:, None] + [0, 1, 3]) % count
    selected = nowhere(np.insert(rows[chosen], 1, -1, axis=1), cache.slots * cache.layout.page_size)
    q = jnp.asarray(rng.uniform(-1, 1, (count, 16, 576)), jnp.bfloat16)
    exact = np.asarray(q, np.float64)
    # Four times as much for the rotary part, or the latents alone would make the score.
    q, exact = q.at[:, :, 512:].multiply(4), exact * np.repeat([1, 4], [512, 64])
    out, lse = call(lambda q, c, r: op(q, c, 0, r, 0.1), q, cache, jnp.asarray(selected))
    expected = [attention(x, values[line], 512, 0.1) for x, line in zip(exact, chosen, strict=True)]
    want, want_lse = (np.stack(arrays) for arrays in zip(*expected, strict=True))
    np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=2**-6, atol=2**-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-4, atol=1e-4)


# --- Ampere's schedules --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", FORMS)
@pytest.mark.parametrize("heads", [16, 128])
def test_attention_as_an_a100_would_run_it(key, heads):
    """The schedule that the rules give that card, here: the same attention as the reference."""
    rng, layout = np.random.default_rng(0), layout_of(key=key)
    bucket = Bucket(context_requests=1, context_tokens=640, table_width=10)
    step = StepMetadata.create(layout, bucket, [range(10)], [640], [640]).derive()
    latent, rope = (jnp.asarray(rng.normal(size=(640, n)) / 10, jnp.float32) for n in (512, 64))
    append = jax.jit(partial(ops.append_latent, implementation="xla"), static_argnums=1)
    cache = append(Cache.create(layout, 10), 0, latent, rope, step)
    rows = jnp.asarray(np.stack([rng.permutation(640)[:300] for _ in range(4)]), jnp.int32)
    q = jnp.asarray(rng.normal(size=(4, heads, 576)), jnp.bfloat16)
    config = sparse_mla_triton.default_config(A100, key, tokens=4, heads=heads, keys=300)
    attend = lambda q, c, r, **how: ops.sparse_mla(q, c, 0, r, 0.135, **how)
    out, lse = call(attend, q, cache, rows, implementation="triton", config=config)
    want, want_lse = call(attend, q.astype(jnp.float32), cache, rows, implementation="xla")
    close(np.asarray(out, np.float64), np.asarray(want, np.float64), 1e-3, 2.01 / 128)
    close(np.asarray(lse, np.float64), np.asarray(want_lse, np.float64), 1e-6, 8.01 / 65536)
