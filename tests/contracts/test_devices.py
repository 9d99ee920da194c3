"""Devices of a mesh that work for themselves: halves of a context, and one that has nothing to do."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import cases
import toy_layer
from dsa_jax import StepMetadata, ops
from dsa_jax.metadata import Bucket
from numpy_model import topk

IMPLEMENTATIONS = ("xla", "triton")


def candidates(scores, limits, first, k, implementation):
    """The best of a stretch of columns that begins at ``first``: positions in the whole row, or -1, and scores."""
    own = jnp.clip(limits - first, 0, scores.shape[1])
    chosen = ops.topk_indices(scores, own, k, implementation=implementation)
    found = jnp.take_along_axis(scores, jnp.maximum(chosen, 0), axis=1)
    return jnp.where(chosen >= 0, chosen + first, -1), jnp.where(chosen >= 0, found, -jnp.inf)


def merge(positions, values, k, implementation):
    """The best of all stretches, which come in the order of their columns."""
    every = jnp.full(len(values), values.shape[1], jnp.int32)
    best = ops.topk_indices(values, every, k, implementation=implementation)
    chosen = jnp.take_along_axis(positions, best, axis=1)
    # What is not there stands between the stretches, and belongs behind them.
    return jnp.sort(chosen.view(jnp.uint32), axis=1).view(jnp.int32)


def ties(rows: int, columns: int) -> np.ndarray:
    """Scores of four values, so that the edge of every choice is a tie."""
    scores = np.random.default_rng(columns).integers(0, 4, (rows, columns)).astype(np.float32)
    scores[0, :5] = [2, 5, 5, 5, 1]
    return scores


def wanted(scores: np.ndarray, limits: np.ndarray, k: int) -> list[list[int]]:
    """The NumPy model's choice of whole rows."""
    return [topk(row, limit, k) for row, limit in zip(scores, limits, strict=True)]


@pytest.mark.parametrize(
    ("implementation", "split"),
    [*(("xla", split) for split in (1, 3, 64, 127)), ("triton", 3), ("triton", 64)],
)
def test_b19_chunks_merge_to_the_whole(implementation, split):
    """[2, 5, 5] and [5, 1] give what [2, 5, 5, 5, 1] gives, 1 and 2; so do the chunks of longer rows."""
    scores, k = ties(4, 128), 6
    limits = np.array([5, 128, 70, 2], np.int32)
    parts = [
        candidates(jnp.asarray(part), jnp.asarray(limits), first, k, implementation)
        for part, first in ((scores[:, :split], 0), (scores[:, split:], split))
    ]
    positions, values = (jnp.concatenate(each, axis=1) for each in zip(*parts, strict=True))
    assert merge(positions, values, k, implementation).tolist() == wanted(scores, limits, k)
    assert merge(positions, values, 2, implementation)[0].tolist() == [1, 2]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_b19_two_devices_select_the_same(implementation):
    """Each has half of the columns and sees the other's candidates: both choose what one device with all columns does."""
    scores, k = ties(3, 128), 7
    limits = np.array([5, 128, 66], np.int32)
    mesh, split = Mesh(np.array(jax.devices()[:2]), ("context",)), PartitionSpec(None, "context")

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(split, PartitionSpec()),
        out_specs=PartitionSpec("context"),
        check_vma=False,
    )
    def select(part, limits):
        first = lax.axis_index("context").astype(jnp.int32) * part.shape[1]
        found = candidates(part, limits, first, k, implementation)
        positions, values = (lax.all_gather(x, "context", axis=1, tiled=True) for x in found)
        return merge(positions, values, k, implementation)[None]

    first, second = jax.jit(select)(scores, limits).tolist()
    assert first == second == wanted(scores, limits, k)


def test_b34_a_device_without_tokens():
    """(e): of two data-parallel devices the second has no token: it writes and chooses nothing, and the first works on."""
    layout, sequence = cases.layout(), [3, 1, 4, 1, 5]
    bucket = Bucket(decode_requests=2, table_width=2)
    busy = StepMetadata.create(layout, bucket, [[6, 2], []], [5, 0], [1, 0])
    idle = StepMetadata.create(layout, bucket, [], [], [])
    cache, _, _ = toy_layer.prefill(cases.poisoned(layout), [6, 2], sequence, 0, 4)
    stack = lambda *trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    mesh, own = Mesh(np.array(jax.devices()[:2]), ("data",)), PartitionSpec("data")

    @partial(jax.shard_map, mesh=mesh, in_specs=own, out_specs=own, check_vma=False)
    def step(*state):
        mine = jax.tree.map(lambda leaf: leaf[0], state)
        return jax.tree.map(lambda leaf: leaf[None], toy_layer.forward(*mine))

    tokens = jnp.array([[5, 9], [9, 9]], jnp.int32)
    caches, chosen, out = jax.jit(step)(stack(cache, cache), stack(busy, idle), tokens)
    toy_layer.check(chosen[0, :1], out[0, :1], sequence, [4])
    assert chosen[1].tolist() == [[-1] * toy_layer.K] * 2
    assert not np.asarray(out[1]).any()
    first, second = (jax.tree.map(lambda leaf, i=i: leaf[i], caches) for i in range(2))
    assert cases.pool_bytes(second) == cases.pool_bytes(cache)
    alone, _, _ = toy_layer.forward(cache, busy, tokens[0])
    assert cases.pool_bytes(first) == cases.pool_bytes(alone) != cases.pool_bytes(cache)
