"""P13 with every kernel, compiled for Hopper without a GPU: four times the slots leave a step's temporaries as they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from compile_without_gpu import compile_case
from contracts.test_layer_without_copies import compiled_case, layer
from dsa_jax import Bucket, Cache, StepMetadata, ops

SLOTS = 1 << 14, 1 << 16
SLACK = 4_096


def decode(*, index, key, slots):
    """For `compile_without_gpu`: a decode step of two layers, selection and attention included."""
    return compiled_case(index=index, key=key, slots=slots)


def prefill(*, index, key, slots, tokens=1_024):
    """For `compile_without_gpu`: what a prefill step appends to two layers, one of them traced; the cache is donated."""
    layout = layer(index, key)[0]
    bucket = Bucket(context_requests=2, context_tokens=tokens, table_width=32)
    meta = StepMetadata.create(layout, bucket, [[0], [1]], [9, 9], [9, 9])

    def run(cache, meta, traced, k, latent, rope):
        step = meta.derive()
        for number in (0, traced):
            cache = ops.append_index_k(cache, number, k, step, implementation="triton")
            cache = ops.append_latent(cache, number, latent, rope, step, implementation="triton")
        return cache

    vectors = [jax.ShapeDtypeStruct((tokens, n), jnp.bfloat16) for n in (128, 512, 64)]
    return run, [Cache.abstract(layout, slots), meta, jax.ShapeDtypeStruct((), jnp.int32), *vectors], 0


@pytest.mark.compile
@pytest.mark.parametrize(
    ("case", "index", "key"),
    [
        ("prefill", "fp8", "bf16"),
        ("prefill", "fp4", "nvfp4"),
        ("prefill", "f32", "fp8_ds_mla"),
        pytest.param("prefill", "fp8", "fp8", marks=pytest.mark.full),
        pytest.param("prefill", "f32", "f32", marks=pytest.mark.full),
        pytest.param("decode", "fp8", "bf16", marks=pytest.mark.full),
        pytest.param("decode", "fp4", "fp8_ds_mla", marks=pytest.mark.full),
    ],
)
def test_p13_temporaries_do_not_grow_with_the_pool(compile_environment, case, index, key):
    """A copy of the smallest pool here would take 24 MiB more; the pools are aliased at either size."""
    temporary = []
    for slots in SLOTS:
        name, forms = f"contracts.test_temporaries_compiled:{case}", dict(index=index, key=key, slots=slots)
        result = compile_case(compile_environment, "sm90", name, **forms)
        assert result.get("alias", 0) >= Cache.abstract(layer(index, key)[0], slots).nbytes, result
        assert result["calls"], result
        temporary.append(result["temp"])
    assert abs(temporary[1] - temporary[0]) <= SLACK, temporary
