"""Faults of page tables and of local to global conversion."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import toy_layer
from dsa_jax import ops
from dsa_jax.cache import Cache
from dsa_jax.layout import decode_v1_table
from dsa_jax.metadata import Bucket, StepMetadata, rows_of
from dsa_jax.pages import PagePoolState, fork, free, grow
from dsa_jax.sizing import pages_per_seq


def test_b23_missing_stays_missing():
    """Pages of 4, table [7, 3]: positions [5, -1] are rows [13, -1], and attention ignores the -1 unasked."""
    layout = cases.layout()
    meta = StepMetadata.create(layout, Bucket(decode_requests=1, table_width=2), [[7, 3]], [8], [1])
    rows = cases.to_rows(np.array([[5, -1]], np.int32), cases.derive(meta))
    assert rows.tolist() == [[13, -1]]
    value = np.arange(12, dtype=np.float32)[None]
    cache = cases.write(cases.poisoned(layout), "key", 0, [13], value)  # row 0 and all others are NaN
    out, lse = cases.sparse_mla(np.ones((1, 2, 12), np.float32), cache, 0, rows, 0.1)
    np.testing.assert_allclose(out[0], np.repeat(value[:, : cases.LATENT], 2, axis=0), rtol=1e-6)
    np.testing.assert_allclose(lse[0], [6.6, 6.6], rtol=1e-5)


def test_b24_request_or_column_out_of_range():
    """One row of two pages: request 1 does not exist, position 9 is in column 2: both -1, and what is valid comes first."""
    layout = cases.layout()
    meta = StepMetadata.create(layout, Bucket(decode_requests=1, next_n=2, table_width=2), [[2, 5]], [8], [2])
    step = replace(cases.derive(meta), requests=jnp.array([0, 1], jnp.int32))
    assert cases.to_rows(np.array([[0, 9], [1, 3]], np.int32), step).tolist() == [[8, -1], [-1, -1]]
    assert cases.to_rows(np.array([[9, 0], [1, 3]], np.int32), step).tolist() == [[8, -1], [-1, -1]]


def test_b24_gather_past_the_row():
    """Four keys from position 6 of an eight-token table: two, then nothing."""
    table, positions = jnp.array([[2, 5]], jnp.int32), jnp.arange(6, 10, dtype=jnp.int32)
    assert rows_of(table, jnp.zeros(4, jnp.int32), positions, 4).tolist() == [22, 23, -1, -1]
    layout = cases.layout()
    meta = StepMetadata.create(
        layout,
        Bucket(context_requests=1, context_tokens=1, table_width=2, gathered_keys=10),
        [[2, 5]],
        [8],
        [1],
    )
    longer = replace(meta, kv_lens=jnp.array([10], jnp.int32)).derive()  # a length that the table cannot hold
    assert longer.gather_rows.tolist() == [8, 9, 10, 11, 20, 21, 22, 23, -1, -1]
    data, _ = ops.gather_index_k(cases.poisoned(layout, byte=0x11), 0, longer)
    assert not np.asarray(data)[8:].any()
    assert np.asarray(data)[:8].all()


def test_b25_widths_that_differ_by_one():
    """128 tokens and 3 draft tokens need three pages of 64 by the one formula; wider tables are cut, narrower refused."""
    width = pages_per_seq(128, 64, extra_tokens=3)
    assert width == 3
    layout = cases.layout(page_size=64)
    bucket = Bucket(decode_requests=1, next_n=3, table_width=width)
    meta = StepMetadata.create(layout, bucket, [[4, 9, 1, 77]], [131], [3])
    assert meta.page_table.tolist() == [[4, 9, 1]]
    assert meta.derive().rows.tolist() == [64, 65, 66]
    with pytest.raises(ValueError, match="131 tokens needs 3 pages, the table is 2 wide"):
        StepMetadata.create(layout, replace(bucket, table_width=2), [[4, 9, 1]], [131], [3])
    cut = StepMetadata.create(layout, replace(bucket, table_width=2), [[4, 9, 1]], [128], [3])
    assert cut.derive().rows.tolist() == [9 * 64 + 61, 9 * 64 + 62, 9 * 64 + 63]


def test_b26_metadata_of_another_geometry():
    """Metadata built for pages of 256 is refused by every op on a cache with pages of 64."""
    estimation, real = cases.layout(page_size=256), cases.layout(page_size=64)
    bucket = Bucket(context_requests=1, context_tokens=1, table_width=2, gathered_keys=4)
    step = StepMetadata.create(estimation, bucket, [[0]], [1], [1]).derive()
    cache = Cache.create(real, 4)
    ones = lambda *shape: jnp.ones(shape)
    for call in (
        lambda: ops.append_index_k(cache, 0, ones(1, 8), step),
        lambda: ops.append_latent(cache, 0, ones(1, cases.LATENT), ones(1, cases.ROPE), step),
        lambda: ops.gather_index_k(cache, 0, step),
        lambda: ops.paged_mqa_logits(ones(1, 2, 8), ones(1, 2), cache, 0, step),
        lambda: ops.select_tokens(ones(1, 2, 8), ones(1, 2), cache, 0, step, 2),
    ):
        with pytest.raises(
            ValueError, match=r"page_size 256 and 64.*build the metadata with layout=cache.layout"
        ):
            call()


@pytest.mark.parametrize(
    "other",
    [
        dict(manager="v1"),
        dict(index="fp8"),
        dict(key="bf16"),
        dict(hadamard=True),
        dict(scale_rule="fp32"),
        dict(full=(True, True, False)),
    ],
)
def test_b26_any_other_difference(other):
    """Not only the page size: manager, forms, rotation, scale rule and layer mask must agree, too."""
    step = cases.step(cases.batch(decodes=[(1, 1)]), cases.layout(**other))
    with pytest.raises(ValueError, match="the step's layout is not the cache's"):
        ops.append_latent(
            Cache.create(cases.layout(), 2), 0, jnp.ones((1, cases.LATENT)), jnp.ones((1, cases.ROPE)), step
        )


def test_b27_positions_not_ids():
    """After a swap block 6 lives at position 1: the encoded table says so, and stale columns cannot matter."""
    encoded = np.array([[0, 1 * 3, -5, 99 * 3]])
    slots = decode_v1_table(encoded, num_layers=3, slots=4)
    assert slots.tolist() == [[0, 1, -1, 3]]
    layout, sequence = cases.layout("v1"), [3, 1, 4, 1, 5, 9]
    outs = []
    for stale in ([-5, 99], [-1, -1], [2, 3]):
        table = slots[0, :2].tolist() + stale
        bucket = Bucket(context_requests=1, context_tokens=6, table_width=4)
        meta = StepMetadata.create(layout, bucket, [table], [6], [6])
        cache, chosen, out = toy_layer.forward(cases.poisoned(layout, 4), meta, np.array(sequence, np.int32))
        toy_layer.check(chosen, out, sequence, range(6))
        outs.append(cases.pool_bytes(cache))
    assert outs[0] == outs[1] == outs[2]


def test_b29_a_reused_host_table_changes_nothing():
    """Facts are copied when they are made: the next step's table may overwrite the builder's arrays at once."""
    layout, sequence = cases.layout(), [7, 7, 2, 30, 8]
    table, lengths, new = aligned((1, 4096)), aligned((1,)), aligned((1,))
    table[:], lengths[:], new[:] = -1, 5, 5
    table[0, :2] = [5, 2]
    bucket = Bucket(context_requests=1, context_tokens=5, table_width=4096)
    meta = StepMetadata.create(layout, bucket, table, lengths, new)
    table[:], lengths[:], new[:] = 9, 1, 0
    _, chosen, out = toy_layer.forward(
        cases.poisoned(layout), replace_width(meta), np.array(sequence, np.int32)
    )
    toy_layer.check(chosen, out, sequence, range(5))


def aligned(shape: tuple[int, ...]) -> np.ndarray:
    """An int32 array that begins at a multiple of 64 bytes, whose memory JAX can share."""
    raw = np.zeros(4 * int(np.prod(shape)) + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + raw.size - 64].view(np.int32).reshape(shape)


def replace_width(meta: StepMetadata) -> StepMetadata:
    """The same facts in a narrow table, so that the step stays small."""
    bucket = replace(meta.bucket, table_width=2)
    return replace(meta, page_table=meta.page_table[:, :2], bucket=bucket)


def test_b30_shared_prefixes():
    """4 requests of 96 tokens share 64: 12 of 16 pages hold 384 logical tokens. Each answers as if alone; later, pages
    of a finished request serve a shorter one, whose stale keys are never chosen.
    """
    layout, rng = cases.layout(page_size=16), np.random.default_rng(0)
    prefix = rng.integers(0, toy_layer.VOCABULARY, 64).tolist()
    sequences = [prefix + rng.integers(0, toy_layer.VOCABULARY, 32).tolist() for _ in range(4)]
    pool = PagePoolState.create(16, 16)
    pool, _ = grow(pool, 0, 96)
    for name in (1, 2, 3):
        pool, _ = fork(pool, 0, name, 64)
        pool, _ = grow(pool, name, 96)
    assert pool.free_slots == 4
    cache = cases.poisoned(layout, 16)
    cache, _, _ = toy_layer.prefill(cache, list(pool.pages(0)[:4]), prefix, 0, 64)
    shared = {slot: page_bytes(cache, slot) for slot in pool.pages(0)[:4]}
    bucket = Bucket(context_requests=4, context_tokens=128, table_width=6, gathered_keys=384)
    meta = StepMetadata.create(layout, bucket, [pool.pages(r) for r in range(4)], [96] * 4, [32] * 4)
    own = np.concatenate([s[64:] for s in sequences]).astype(np.int32)
    cache, chosen, out = toy_layer.forward(cache, meta, own)
    for r, sequence in enumerate(sequences):
        part = slice(32 * r, 32 * r + 32)
        toy_layer.check(chosen[part], out[part], sequence, range(64, 96))
    assert {slot: page_bytes(cache, slot) for slot in shared} == shared
    data, _ = ops.gather_index_k(cache, 0, cases.derive(meta))
    np.testing.assert_array_equal(data, toy_layer.KEYS[np.concatenate(sequences)])

    pool, released = free(pool, 1)
    assert len(released) == 2
    pool, slots = grow(pool, 5, 20)
    assert set(slots) == set(released)
    short = rng.integers(0, toy_layer.VOCABULARY, 20).tolist()
    cache, chosen, out = toy_layer.prefill(cache, list(slots), short, 0, 20)
    toy_layer.check(chosen, out, short, range(20))


def page_bytes(cache: Cache, slot: int) -> bytes:
    """All bytes of a slot in every pool of a V2 cache."""
    parts = []
    for name, pool in cache.pools().items():
        scale = sum(cases.owners(cache.layout, name))
        parts.append(np.asarray(pool)[slot * scale : (slot + 1) * scale].tobytes())
    return b"".join(parts)


def test_b63_every_pool_travels():
    """Copying pages [3, 5] of every leaf to [0, 1] of a second cache moves the whole state: the answers stay."""
    layout, sequence = cases.layout(index="f32"), [5, 6, 7, 8, 9, 1]
    cache, _, _ = toy_layer.prefill(cases.poisoned(layout), [3, 5], sequence, 0, 5)
    other = Cache.create(layout, 4)
    for name, pool in cache.pools().items():
        scale = sum(cases.owners(layout, name))
        slots = (-1, scale, *pool.shape[1:])
        pages = np.array(other.pages(name)).reshape(slots)
        pages[[0, 1]] = np.asarray(pool).reshape(slots)[[3, 5]]
        other = other.replace_pages(**{name: jnp.asarray(pages.reshape(-1, *pages.shape[2:]))})
    leaves, tree = jax.tree.flatten(other)
    other = jax.tree.unflatten(tree, leaves)
    assert other.index_scale is None
    for state, table in ((cache, [3, 5]), (other, [0, 1])):
        _, chosen, out = toy_layer.prefill(state, table, sequence, 5, 1)
        toy_layer.check(chosen, out, sequence, [5])
