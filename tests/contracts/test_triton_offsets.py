"""Triton addresses elements by int32 until an array has more than 4 GiB: up to there it may have 2^31 elements, no more.

JAX takes 64-bit offsets for larger arrays only. A pool of bytes between 2 and 4 GiB that a kernel sees as bytes is addressed
past 2^31 in 32 bits, which is in front of the pool; one that is seen as words is not (B01). The interpreter cannot show it.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

import cases
from dsa_jax.cache import Cache
from dsa_jax.forms import INDEX_FORMS, KEY_FORMS
from dsa_jax.layout import CacheLayout
from dsa_jax.metadata import Bucket, StepMetadata
from dsa_jax.ops import gpu
from dsa_jax.pallas import topk_triton, window_logits_triton

GIB = 1 << 30
S = jax.ShapeDtypeStruct
INT = lambda *shape: S(shape, jnp.int32)


def operands(f, *arguments) -> list[jax.ShapeDtypeStruct]:
    """Arrays that the Triton kernels of a traced function read and write."""
    found = []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_triton":
                found.extend(v.aval for v in (*equation.invars, *equation.outvars))
                continue
            for inner in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(jax.make_jaxpr(f)(*arguments).jaxpr)
    return found


def check(f, *arguments) -> None:
    """No array of up to 4 GiB has elements that an int32 cannot count, and the case has arrays beyond 2 GiB."""
    seen = operands(f, *arguments)
    size = lambda a: math.prod(a.shape) * a.dtype.itemsize
    assert any(2 * GIB < size(a) <= 4 * GIB for a in seen), "nothing here is between 2 and 4 GiB"
    wrong = [a for a in seen if size(a) <= 4 * GIB and math.prod(a.shape) > 2**31]
    assert not wrong, f"addressed by 32-bit element numbers: {wrong}"


def layout_of(key: str = "bf16", index: str = "fp8") -> CacheLayout:
    """One layer of the released widths, pages of 64."""
    model = dataclasses.replace(cases.config((True,), 128), kv_lora_rank=512, qk_rope_head_dim=64)
    return CacheLayout.create(model, key_form=key, index_form=index, page_size=64)


def cache_of(layout: CacheLayout, name: str) -> Cache:
    """A cache whose pool of this name has a little less than 4 GiB."""
    one = getattr(Cache.abstract(layout, 1), name)
    return Cache.abstract(layout, (4 * GIB - 1) // (math.prod(one.shape) * one.dtype.itemsize))


def triton(candidates):
    [kernel] = [c for c in candidates if c.name == "triton"]
    return kernel.run


def step_of(layout: CacheLayout):
    meta = StepMetadata.create(layout, Bucket(decode_requests=4, table_width=2), [[0]] * 4, [1] * 4, [0] * 4)
    return jax.eval_shape(meta.derive)


@pytest.mark.parametrize("form", INDEX_FORMS)
def test_index_keys(form):
    """Append and gather of every form, and the scores of the forms that have a kernel."""
    cache, floats = cache_of(layout_of(index=form), "index_key"), S((4, 128), jnp.float32)
    check(lambda c, k, rows: triton(gpu.append_index_k(cache))(c, 0, k, rows), cache, floats, INT(4))
    check(lambda c, rows: triton(gpu.gather_index_k(cache))(c, 0, rows), cache, INT(4))
    if form == "f32":
        return
    step = step_of(cache.layout)
    codes = S((4, 64, 128 if form == "fp8" else 64), jnp.uint8)
    q = codes if form == "fp8" else (codes, INT(4, 64))
    score = triton(gpu.paged_mqa_logits(cache, 64, step))
    check(lambda q, w, c, s: score(q, w, c, 0, s, jnp.float32), q, S((4, 64), jnp.float32), cache, step)


@pytest.mark.parametrize("form", KEY_FORMS)
def test_appended_latents(form):
    cache = cache_of(layout_of(key=form), "key")
    write = triton(gpu.append_latent(cache))
    vectors = S((4, 512), jnp.bfloat16), S((4, 64), jnp.bfloat16)
    check(lambda c, latent, rope, rows: write(c, 0, latent, rope, rows, None), cache, *vectors, INT(4))


@pytest.mark.parametrize("form", [form for form in KEY_FORMS if form != "f32"])
def test_attention(form):
    cache = cache_of(layout_of(key=form), "key")
    q = S((4, 16, 576), jnp.bfloat16)
    attend = triton(gpu.sparse_mla(cache, 4, 16, q.dtype, 0.1))
    check(lambda q, c, rows: attend(q, c, 0, rows, 0.1, None), q, cache, INT(4, 64))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scores(dtype):
    """Scores of many rows are the largest arrays that there are: what top-k reads, and what windows are written to."""
    columns = 131_072
    rows = 4 * GIB // (columns * jnp.dtype(dtype).itemsize)
    check(lambda x, n: topk_triton.topk(x, n, 2_048, interpret=False), S((rows, columns), dtype), INT(rows))
    q, weights = S((rows, 16, 128), jnp.uint8), S((rows, 16), jnp.float32)
    keys, scale = S((columns, 128), jnp.uint8), S((columns,), jnp.float32)
    score = lambda *a: window_logits_triton.window_logits(*a, dtype=dtype, interpret=False)
    check(score, q, weights, keys, scale, INT(rows), INT(rows))
