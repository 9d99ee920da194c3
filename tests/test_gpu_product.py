"""The full product of what the kernels take, on a CUDA card: ``pytest -m "gpu and full"``, several hours.

The checks are those of the other card tests, which go through the same parameters pairwise.
"""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import pytest

import test_gpu
import test_gpu_fp4
import test_gpu_scores
import test_gpu_sparse_mla
from dsa_jax.forms import INDEX_FORMS, KEY_FORMS
from fp4_scores import FAR, NEAR

pytestmark = [pytest.mark.gpu, pytest.mark.full]

NEXT_N, PAGE_SIZES = range(1, 9), (32, 64, 128)
KERNELS, MANAGERS = ("mosaic", "triton"), ("v1", "v2")
SCORES = [
    *itertools.product(KERNELS, PAGE_SIZES, (32, 64)),
    *(("triton", *s) for s in itertools.product((16, 256), (16, 32, 64, 128))),
    *(("triton", *s) for s in itertools.product(PAGE_SIZES, (16, 128))),
]
"""Kernel, page size and heads; Triton takes more of both."""


@pytest.mark.parametrize(("implementation", "page_size", "heads"), SCORES)
@pytest.mark.parametrize("next_n", NEXT_N)
@pytest.mark.parametrize("manager", MANAGERS)
def test_scores_of_fp8_keys(implementation, manager, page_size, next_n, heads):
    test_gpu.test_paged_logits(implementation, manager, page_size, next_n, heads)


@pytest.mark.parametrize(("name", "page_size", "heads"), SCORES)
@pytest.mark.parametrize("next_n", NEXT_N)
@pytest.mark.parametrize("far", list(itertools.product((NEAR, FAR), repeat=2)), ids=str)
def test_scores_of_fp4_keys(name, heads, next_n, page_size, far):
    shape = dict(n=next_n, heads=heads, page_size=page_size, width=256 // page_size + 1)
    test_gpu_fp4.test_kernels(name, shape, far)


@pytest.mark.parametrize(("implementation", "page_size", "heads"), SCORES)
@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_scores_of_contexts(implementation, form, manager, page_size, heads):
    test_gpu_scores.test_contexts(implementation, form, page_size, heads, manager, len(test_gpu_scores.EVERY))


@pytest.mark.parametrize(("kernel", "heads"), list(itertools.product(test_gpu.WINDOWS, [16, 32, 64, 128])))
@pytest.mark.parametrize("rows", [1, 3, 130, 515])
@pytest.mark.parametrize("keys", [5, 64, 700, 1999, 4096])
def test_scores_of_windows(kernel, rows, keys, heads):
    if kernel.startswith("mosaic") and heads not in (32, 64):
        pytest.skip("wgmma scores 32 or 64 heads")
    test_gpu.test_window_logits(kernel, rows, keys, heads)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("k", [1, 8, 64, 500, 2048])
@pytest.mark.parametrize("columns", [1, 7, 700, 2049, 8192, 32768, 131072])
@pytest.mark.parametrize("rows", [1, 5, 64, 300])
def test_top_k(implementation, rows, columns, k):
    test_gpu.test_topk(rows, columns, k, implementation)


@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128, 256])
@pytest.mark.parametrize(("index", "key"), list(itertools.product(INDEX_FORMS, KEY_FORMS)))
@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_append_and_gather(manager, index, key, page_size, dtype):
    if key == "fp8_ds_mla" and page_size != 64:
        pytest.skip("the 656-byte form has pages of 64 tokens")
    scale = 0.37 if key in ("fp8", "nvfp4") else None
    test_gpu.test_append_and_gather(manager, index, key, page_size, scale, (1300, 1, 64), dtype)


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("form", [form for form in KEY_FORMS if form != "f32"])
@pytest.mark.parametrize("manager", MANAGERS)
def test_attention_on_triton(form, manager, page_size, heads):
    if form == "fp8_ds_mla" and page_size != 64:
        pytest.skip("the 656-byte form has pages of 64 tokens")
    test_gpu_sparse_mla.test_triton_reads_every_form(form, manager, page_size, heads)


@pytest.mark.parametrize("splits", [1, 2, 3, 5])
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("form", ["bf16", "fp8_ds_mla"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_of_both_kernels(kernel, form, heads, splits):
    test_gpu_sparse_mla.test_agrees_with_numpy_and_with_itself(kernel, form, heads, splits)
