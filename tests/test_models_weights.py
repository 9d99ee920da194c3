"""Weights as a flat list of arrays, some of them in stacks, and the model that is made of them again."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsa_jax.compat import Device
from dsa_jax.models import weights
from dsa_jax.models.step import make_speculative, make_step
from dsa_jax.models.weights import _stack, take_apart
from random_models import random_model


def test_weights_travel_in_stacks():
    """By hand: of one shape and dtype and no more than six elements; all come back in their places as they were."""
    one, two = jnp.arange(6.0).reshape(2, 3), jnp.arange(6.0, 12.0).reshape(2, 3)
    pieces = [one, one.astype(jnp.bfloat16), jnp.zeros(7), two, one.T, jnp.ones(7), two + 1]
    params, unstack = _stack(pieces, most=6)
    assert [p.shape for p in params] == [(3, 2, 3), (2, 3), (7,), (3, 2), (7,)]
    assert params[0].tolist() == [one.tolist(), two.tolist(), (two + 1).tolist()]
    assert params[1].dtype == jnp.bfloat16
    jax.tree.map(partial(np.testing.assert_array_equal, strict=True), unstack(params), pieces)
    assert [p is q for p, q in zip(_stack(pieces, most=0)[0], pieces, strict=True)] == [True] * 7


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_gpu_gets_stacks(platform, monkeypatch):
    """A model taken apart and put together again has its weights; on a GPU they come as fewer arrays, or where wanted."""
    model = random_model("tiny-glm", seed=6)
    count = len(take_apart(model, model.config.dsa, stacked=False)[0])
    monkeypatch.setattr(weights, "target_device", lambda: Device(platform, "a device", None, 0))
    for stacked, fewer in ((None, platform == "gpu"), (True, True), (False, False)):
        params, rebuild = take_apart(model, model.config.dsa, stacked=stacked)
        assert (len(params) < count / 2) == fewer
        again = jax.jit(lambda params: nnx.state(rebuild(params)))(params)  # noqa: B023
        jax.tree.map(partial(np.testing.assert_array_equal, strict=True), again, nnx.state(model))
    # A step is called for every token, a loop once for many; in its body XLA would copy the weights out of their stacks.
    assert (len(make_step(model)[1]) < count / 2) == (platform == "gpu")
    assert len(make_speculative(model)[2]) == count
