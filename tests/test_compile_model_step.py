"""A whole decode step of the shipped model, and a loop of steps, compile for Hopper and copy no weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from compile_without_gpu import compile_case

pytestmark = pytest.mark.compile


def step_case(*, apart: bool, stacked: bool = False):
    """For `compile_without_gpu`: the step of 64 requests; or with the weights as the module holds them."""
    from flax import nnx

    from dsa_jax.cache import Cache
    from dsa_jax.layout import CacheLayout
    from dsa_jax.metadata import Bucket, StepMetadata
    from dsa_jax.models import checkpoint
    from dsa_jax.models.step import decode_tokens, make_step

    model = checkpoint.load_pretrained("docs-8m", dtype=jnp.bfloat16)
    if apart:
        step, params = make_step(model, stacked=stacked)
    else:
        graph, params = nnx.split(model)

        def step(params, cache, meta, tokens):
            return decode_tokens(nnx.merge(graph, params), tokens, cache, meta.derive())[:2]

    layout = CacheLayout.create(model.config.dsa)
    meta = StepMetadata.create(layout, Bucket(decode_requests=64, table_width=16), [], [], [])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, meta))
    tokens = jax.ShapeDtypeStruct((64,), jnp.int32)
    return step, [shapes[0], Cache.abstract(layout, 1024), shapes[1], tokens]


@pytest.mark.full
def test_up_projections_are_not_copied(compile_environment):
    """The halves of `kv_b_proj`, one fusion a layer: gone where they come as two arrays, there where they come as one."""
    names = {
        apart: compile_case(compile_environment, "sm90", "test_compile_model_step:step_case", apart=apart)
        for apart in (True, False)
    }
    assert names[False]["fusions"] - names[True]["fusions"] == 4, names


def test_stacked_weights_are_not_copied(compile_environment):
    """No launch more than with an array for each weight, and no more memory."""
    case = "test_compile_model_step:step_case"
    apart, stacked = (
        compile_case(compile_environment, "sm90", case, apart=True, stacked=stacked)
        for stacked in (False, True)
    )
    assert stacked == apart


def loop_case(*, count: int):
    """For `compile_without_gpu`: so many tokens of eight requests in one program, with the weights as loops get them."""
    from dsa_jax.cache import Cache
    from dsa_jax.layout import CacheLayout
    from dsa_jax.loops import Batch, Sampling, decode_loop
    from dsa_jax.metadata import Bucket, StepMetadata
    from dsa_jax.models import checkpoint
    from dsa_jax.models.step import make_speculative

    model = checkpoint.load_pretrained("docs-8m", dtype=jnp.bfloat16)
    step, _, params = make_speculative(model)
    layout = CacheLayout.create(model.config.dsa)
    meta = StepMetadata.create(layout, Bucket(decode_requests=8, table_width=16), [], [], [])
    batch = Batch(last=jnp.zeros(8, jnp.int32), meta=meta, live=jnp.ones(8, bool))
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, batch, Sampling.create())
    )

    def loop(params, cache, batch, sampling):
        return decode_loop(step, params, cache, batch, count, sampling)

    return loop, [shapes[0], Cache.abstract(layout, 1024), *shapes[1:]]


def test_a_turn_of_a_loop_is_a_step(compile_environment):
    """Counters and the buffer of tokens, but no weight cut out of a stack in every turn (52 fusions, were they stacked)."""
    case = "test_compile_model_step:loop_case"
    step, loop = (compile_case(compile_environment, "sm90", case, count=count) for count in (1, 4))
    assert 0 <= loop["fusions"] - step["fusions"] < 12, (step, loop)
