"""A donated layer on every card: what a step appends to is not copied for what it then reads (B66), compiled without a GPU.

Some kernels view pools of codes as words, in front of the call and behind an append that aliases the same bytes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from compile_without_gpu import CARDS, compile_case
from dsa_jax import Bucket, Cache, CacheLayout, StepMetadata, ops
from dsa_jax.config import preset

SLOTS = 1 << 14
"""Pages of 64 tokens for each of two layers: 256 MiB of FP8 keys or 128 of FP4, and more of latents."""
MOST = 64 << 20
"""Bytes of scores, work plans and the shares of attention, of which the largest program here takes a fifth."""


def layer(index: str, key: str) -> tuple[CacheLayout, Bucket]:
    layout = CacheLayout.create(preset("deepseek-v3.2"), layers=(0, 1), index_form=index, key_form=key)
    return layout, Bucket(decode_requests=4, next_n=2, table_width=16)


def compiled_case(*, index, key, slots=SLOTS):
    """For `compile_without_gpu`: two layers of appends, selection and attention; the cache is donated."""
    layout, bucket = layer(index, key)
    meta = StepMetadata.create(layout, bucket, [[i] for i in range(4)], [9] * 4, [2] * 4)

    def run(cache, meta, k, latent, rope, q_index, weights, q):
        step, outs = meta.derive(), []
        for number in range(2):
            cache = ops.append_index_k(cache, number, k, step)
            rows = ops.select_rows(q_index, weights, cache, number, step, 2048)
            cache = ops.append_latent(cache, number, latent, rope, step)
            outs.append(ops.sparse_mla(q, cache, number, rows, 0.1))
        return cache, outs

    tokens, shape = bucket.tokens, jax.ShapeDtypeStruct
    q_index = shape((tokens, 64, 128 if index == "fp8" else 64), jnp.uint8)
    q_index = q_index if index == "fp8" else (q_index, shape((tokens, 64), jnp.int32))
    vectors = [shape((tokens, n), jnp.bfloat16) for n in (128, 512, 64)]
    more = [q_index, shape((tokens, 64), jnp.float32), shape((tokens, 128, 576), jnp.bfloat16)]
    return run, [Cache.abstract(layout, slots), meta, *vectors, *more], 0


@pytest.mark.compile
@pytest.mark.full
@pytest.mark.parametrize(
    ("card", "index", "key"),
    [
        *((card, "fp8", "bf16") for card in CARDS),
        ("sm80", "fp4", "nvfp4"),
        ("sm90", "fp4", "fp8_ds_mla"),
        ("sm100", "fp4", "fp8"),
    ],
)
def test_pools_are_aliased_and_not_copied(compile_environment, card, index, key):
    case = "contracts.test_layer_without_copies:compiled_case"
    result = compile_case(compile_environment, card, case, index=index, key=key)
    assert result.get("alias", 0) >= Cache.abstract(layer(index, key)[0], SLOTS).nbytes, result
    assert result["temp"] < MOST, result
