"""Numbers that used to pass and give nonsense: the right answer, or an error that names them, and nothing in between."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from dsa_jax import codec, ops, sizing
from dsa_jax.cache import Cache
from dsa_jax.chunking import split_prefill_chunks
from dsa_jax.config import preset
from dsa_jax.draft import accept_sampled, advance, draft_metadata, probabilities, rewind
from dsa_jax.layout import CacheLayout, Role
from dsa_jax.metadata import Bucket, StepMetadata
from dsa_jax.pages import PagePoolState, fork, grow, shrink
from dsa_jax.planning import plan
from dsa_jax.sampling import Sampling, sample


def metadata() -> StepMetadata:
    """Two decode requests of 5 and 2 tokens, one of them new, with three pages of four tokens each."""
    bucket = Bucket(decode_requests=2, table_width=3)
    return StepMetadata.create(cases.layout(), bucket, [[0, 1, 2], [3, 4, 5]], [5, 2], [1, 1])


# --- temperatures --------------------------------------------------------------------------------------------------

LOGITS = jnp.array([[400.0, 401.0, -3.0, 401.0], [-1e30, 5.0, 4.9, 0.0]])


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-36, 1.2e-38])
def test_a_small_temperature_takes_the_best_token(temperature):
    """Equals share the mass: the two best of the first row are equal."""
    wanted = [[0, 0.5, 0, 0.5], [0, 1, 0, 0]]
    for value in (temperature, jnp.float32(temperature), np.float64(temperature)):
        np.testing.assert_array_equal(probabilities(LOGITS, value), wanted)
    drawn = Sampling.create(0, temperature).draw(LOGITS[1:], jnp.zeros(1, jnp.int32))[0]
    assert drawn.tolist() == [1]
    rows, stream = jnp.arange(2, dtype=jnp.int32), jnp.zeros((2, 2), jnp.int32)
    token = sample(LOGITS, rows, jax.random.key(0), stream, jnp.float32(temperature))
    assert token[0] in (1, 3)
    assert token[1] == 1


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1e-45, 1e-50])
def test_a_temperature_that_float32_flushes_is_0(temperature):
    """The lowest id among equals, not a share for each."""
    wanted = [[0, 1, 0, 0], [0, 1, 0, 0]]
    for run in (probabilities, jax.jit(probabilities)):
        np.testing.assert_array_equal(run(LOGITS, temperature), wanted)
        np.testing.assert_array_equal(run(LOGITS, jnp.float32(temperature)), wanted)


def test_ordinary_temperatures_are_what_they_were():
    logits = np.random.default_rng(0).normal(size=(5, 9)).astype(np.float32) * 4
    for temperature in (0.3, 1.0, 7.5):
        weight = np.exp(logits.astype(np.float64) / temperature)
        wanted = weight / weight.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(probabilities(jnp.asarray(logits), temperature), wanted, rtol=1e-5)


def test_a_draft_outside_the_vocabulary_is_never_kept():
    """-1 would be read as the last token, which both distributions are sure of here."""
    sure = jnp.zeros((3, 3, 4)).at[:, :, 3].set(1.0)
    drafts = jnp.array([[3, 3], [-1, 3], [3, 4]], jnp.int32)
    keys = jax.random.split(jax.random.key(0), 3)
    kept, token = accept_sampled(keys, sure, sure[:, :2], drafts, jnp.full(3, 2, jnp.int32))
    assert kept.tolist() == [2, 0, 1]
    assert token.tolist() == [3, 3, 3]


def test_seeds_of_more_than_32_bits_are_refused():
    """JAX's keys would drop the upper half: 2**32 gave the text of 0."""
    for seed in (2**32, -1, np.int64(2**40)):
        with pytest.raises(ValueError, match=r"seed is .*, wanted a whole number from 0 to 2\*\*32 - 1"):
            Sampling.create(seed)  # pyright: ignore[reportArgumentType]
    assert Sampling.create(2**32 - 1).key != Sampling.create(0).key


def test_stops_that_no_token_can_be_are_refused():
    with pytest.raises(ValueError, match=r"stop is \(-1,\), wanted token ids"):
        Sampling.create(stop=(-1,))


# --- slots and lengths ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_a_slot_whose_rows_int32_cannot_count_is_refused(page_size):
    """Its row wrapped round into another request's page."""
    layout, bucket = cases.layout(page_size=page_size), Bucket(decode_requests=2, table_width=1)
    most = (2**31 - 1) // page_size
    if page_size > 1:
        with pytest.raises(ValueError, match=f"request 0 has slot {most + 1}.* wanted at most {most}"):
            StepMetadata.create(layout, bucket, [[most + 1], [1]], [1, 1], [1, 0])
    step = StepMetadata.create(layout, bucket, [[most], [1]], [1, 1], [1, 0]).derive()
    assert step.rows.tolist() == [most * page_size, -1]
    unused = StepMetadata.create(layout, bucket, [[2**31 - 1], [1]], [0, 1], [0, 1])  # no token stands there
    assert unused.derive().rows.tolist() == [-1, page_size]


def test_a_table_of_2_to_the_31_tokens_has_no_gap():
    layout, width = cases.layout(page_size=64), 2**25 + 1
    bucket = Bucket(decode_requests=1, table_width=width)
    bucket.validate()
    table = np.full((1, width), -1, np.int32)
    table[0, :2] = 3, 4
    meta = StepMetadata.create(layout, bucket, table, [65], [1])
    assert meta.derive().rows.tolist() == [4 * 64]


@pytest.mark.parametrize("name", ["decode_requests", "context_tokens", "table_width", "gathered_keys"])
def test_sizes_that_int32_cannot_count_are_refused(name):
    sizes = {"context_requests": 1, "context_tokens": 1, "table_width": 1} | {name: 2**31}
    with pytest.raises(ValueError, match=f"{name} is 2147483648; wanted less than 2\\*\\*31"):
        Bucket(**sizes).validate()


@pytest.mark.parametrize(
    "lens",
    [
        np.int64(2**40),
        np.array([2**32 + 1, 1]),
        np.array([2**31 + 5, 1], np.uint32),
        np.array([-1, 1], np.int32),
        jnp.array([1, 1], jnp.uint32),
        -7,
        2**31,
    ],
    ids=str,
)
def test_lengths_that_would_wrap_are_refused(lens):
    for run in (advance, rewind):
        with pytest.raises(ValueError, match=r"is .*, wanted int32\[2\], none negative"):
            run(metadata(), lens)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64, np.uint64])
def test_lengths_that_fit_are_taken_in_any_dtype(dtype):
    assert advance(metadata(), np.array([1, 0], dtype)).kv_lens.tolist() == [6, 2]  # pyright: ignore[reportArgumentType]
    assert rewind(metadata(), np.array([0, 9], dtype)).new_lens.tolist() == [0, 1]  # pyright: ignore[reportArgumentType]


# --- NumPy's integers overflow where Python's do not ---------------------------------------------------------------


def test_sizes_do_not_overflow():
    layout = CacheLayout.create(preset("deepseek-v3.2"))
    for kind in (np.int32, np.int64, np.uint32):
        assert sizing.quota_for_tokens(layout, kind(40_000)) == 40_000 * 78_324
        assert sizing.cache_quota(layout, max_tokens=kind(40_000), max_bytes=10**9) == 10**9
        assert sizing.cache_quota(layout, max_bytes=kind(10**9)) == 10**9
        assert sizing.quota_for_slots(layout, kind(10_000)) == 10_000 * 5_012_736
        assert sizing.pages_per_seq(kind(100), 64) == 2
        assert sizing.rows_per_chunk(kind(2**30), kind(2**20), kind(4)) == 256
    assert sizing.quota_for_tokens(layout, np.int8(100)) == 7_832_400


def test_plans_do_not_overflow():
    config = preset("deepseek-v3.2")
    numbers = dict(batch=32, context=32_768, chunk_tokens=8_192)
    wanted = plan(config, gpu_memory=2**40, **numbers)
    assert plan(config, gpu_memory=2**40, **{k: np.int32(v) for k, v in numbers.items()}) == wanted  # pyright: ignore[reportArgumentType]


def test_pages_do_not_overflow():
    pool = PagePoolState.create(np.uint32(1000), np.uint32(64))  # pyright: ignore[reportArgumentType]
    for kind in (np.uint8, np.int8, np.uint32):
        grown, slots = grow(pool, "a", kind(100))  # pyright: ignore[reportArgumentType]
        assert slots == (0, 1)
        assert pool.pages_for(kind(100)) == 2  # pyright: ignore[reportArgumentType]
        shrunk, released = shrink(grown, "a", kind(60))  # pyright: ignore[reportArgumentType]
        assert released == (1,)
        assert shrunk.free_slots == 999
        assert fork(grown, "a", "b", kind(64))[1] == (0,)  # pyright: ignore[reportArgumentType]


def test_buckets_do_not_overflow():
    bucket = Bucket(decode_requests=np.int8(100), next_n=np.int8(4), table_width=np.int8(1))  # pyright: ignore[reportArgumentType]
    assert bucket.tokens == 400
    assert bucket == Bucket(decode_requests=100, next_n=4, table_width=1)
    assert hash(bucket) == hash(Bucket(decode_requests=100, next_n=4, table_width=1))


def test_chunks_do_not_overflow():
    parts = split_prefill_chunks(np.array([200, 200], np.uint8), 255)  # pyright: ignore[reportArgumentType]
    assert [len(chunk) for chunk in parts] == [1, 1]
    parts = split_prefill_chunks(np.array([100] * 3, np.int8), 127)  # pyright: ignore[reportArgumentType]
    assert [part.offset for chunk in parts for part in chunk] == [0, 100, 200]


@pytest.mark.parametrize(
    ("lens", "limit", "first", "words"),
    [
        ([3.0], 7, 0, "request 0 has 3.0 new tokens"),
        ([float("nan")], 7, 0, "request 0 has nan new tokens"),
        (None, 7, 0, "new_lens is None"),
        ("ab", 7, 0, "new_lens is 'ab'"),
        ([3], float("nan"), 0, "limit is nan, wanted at least 1 token"),
        ([3], "7", 0, "limit is '7'"),
        ([3], 7, 1.0, "first is 1.0, wanted 0 to 1"),
    ],
)
def test_chunks_of_anything_else_are_refused(lens, limit, first, words):
    with pytest.raises(ValueError, match=f"split_prefill_chunks: .*{words}"):
        split_prefill_chunks(lens, limit, first)


# --- memory of the caller's ----------------------------------------------------------------------------------------


def test_bytes_that_arrived_may_be_overwritten():
    """A receive buffer is used again: the cache made from it keeps what it held, and works."""
    layout = CacheLayout.create(preset("deepseek-v3.2"), layers=(0,), page_size=64)
    cache = Cache.create(layout, 2)
    buffer = np.array(codec.pack_pages(cache, Role.INDEX_KEY))
    buffer[:] = 7
    received = codec.unpack_pages(cache, Role.INDEX_KEY, buffer)
    buffer[:] = 5
    assert all(isinstance(pool, jax.Array) for pool in jax.tree.leaves(received))
    assert (np.asarray(received.index_key) == 7).all()


def test_a_draft_table_may_be_overwritten():
    table = np.array([[0, 1], [2, 3]], np.int32)
    lens = np.array([1, 0], np.int32)
    meta = draft_metadata(metadata(), cases.layout(), table, lens)  # pyright: ignore[reportArgumentType]
    table[:], lens[:] = 9, 9
    assert meta.page_table.tolist() == [[0, 1], [2, 3]]
    assert meta.new_lens.tolist() == [1, 0]
    assert advance(meta, 1, pages=jnp.array([[1, 0, 7]], jnp.int32)).page_table.tolist() == [[0, 1], [7, 3]]  # pyright: ignore[reportArgumentType]


def test_a_cache_restored_from_the_host_is_written_to():
    """`jax.device_get` gives NumPy's arrays, as checkpoints do."""
    layout = cases.layout()
    step = metadata().derive()
    cache = Cache.create(layout, 8)
    keys = jnp.arange(2 * layout.index_head_dim, dtype=jnp.float32).reshape(2, -1)
    restored = ops.append_index_k(jax.device_get(cache), 0, keys, step)
    for got, want in zip(
        jax.tree.leaves(restored), jax.tree.leaves(ops.append_index_k(cache, 0, keys, step)), strict=True
    ):
        np.testing.assert_array_equal(got, want)


# --- precision -----------------------------------------------------------------------------------------------------


def test_scores_of_64_bits_are_refused():
    """Top-k is exact; rounded to float32 these two would be equal."""
    logits = np.array([[1, 1 + 1e-12, 0.0]])
    with pytest.raises(ValueError, match="logits has dtype float64, wanted float32 or bfloat16 or float16"):
        ops.topk_indices(logits, jnp.array([3], jnp.int32), 1)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "scale",
    [
        1e300, 1e-300, 1e-45, 0.0, -1.0, float("nan"), float("inf"),
        np.float16(0), np.array(1e300), np.array(-1.0), np.array(np.nan, np.float32),
    ],
)  # fmt: skip
def test_scales_that_float32_does_not_hold_are_refused(scale):
    layout = CacheLayout.create(preset("deepseek-v3.2"), layers=(0,), key_form="fp8")
    step = StepMetadata.create(layout, Bucket(decode_requests=1, table_width=1), [[0]], [1], [1]).derive()
    cache, latent, rope = Cache.create(layout, 1), jnp.ones((1, 512)), jnp.ones((1, 64))
    with pytest.raises(ValueError, match="key_scale is .*, wanted a positive finite number, in float32 too"):
        ops.append_latent(cache, 0, latent, rope, step, key_scale=scale)
    with pytest.raises(
        ValueError, match="softmax_scale is .*, wanted a positive finite number, in float32 too"
    ):
        ops.sparse_mla(jnp.ones((1, 8, 576)), cache, 0, jnp.zeros((1, 4), jnp.int32), scale)


# --- names, places and shapes --------------------------------------------------------------------------------------


def test_a_temperature_for_each_row_is_not_one_for_each_token():
    """Four rows of four tokens: the numbers would fit the wrong axis."""
    logits, each = jnp.arange(16, dtype=jnp.float32).reshape(4, 4), jnp.array([1.0, 1e-3, 1.0, 2.0])
    for name in ("temperature", "top_p"):
        with pytest.raises(ValueError, match=rf"{name} is float32\[4\], wanted a number or \[..., 1\]"):
            probabilities(logits, **({"temperature": 1.0} | {name: jnp.minimum(each, 1.0)}))
    got = probabilities(logits, each[:, None])
    for row in range(4):
        np.testing.assert_allclose(got[row], probabilities(logits[row], each[row]), rtol=1e-6)


@pytest.mark.parametrize(("start", "size"), [(5, 1), (-1, 1), (1, 2), (0, 3), (0, -1), (0, 1.0)])
def test_chunks_outside_the_step_are_refused(start, size):
    step = metadata().derive()
    with pytest.raises(ValueError, match=r"decode_chunk: start is .*; the step has 2 requests"):
        step.decode_chunk(start, size)


def test_lists_of_another_depth_are_refused():
    layout, bucket = cases.layout(), Bucket(decode_requests=1, table_width=3)
    for tables, lens in (([[0, 1]], [[5]]), ([[[0], [1]]], [5]), ([{0, 1}], [5])):
        with pytest.raises(ValueError, match=r"StepMetadata.create: .*; wanted "):
            StepMetadata.create(layout, bucket, tables, lens, [1])  # pyright: ignore[reportArgumentType]


def test_pools_are_called_by_their_names():
    cache = Cache.create(cases.layout(), 2)
    for call in (cache.pages, cache.role):
        with pytest.raises(ValueError, match="name is 'layout'; wanted one of"):
            call("layout")
    with pytest.raises(
        ValueError, match="name is 'key_scale'; wanted one of this cache's pools: key, index_key"
    ):
        cache.pages("key_scale")
    with pytest.raises(ValueError, match="replace_pages: name is 'kee'; wanted one of"):
        cache.replace_pages(kee=cache.key)
    with pytest.raises(
        ValueError, match=r"replace_pages: key is bfloat16\[.*, wanted the dtype and size of float32"
    ):
        cache.replace_pages(key=cache.key.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"replace_pages: key is float32\[2"):
        cache.replace_pages(key=cache.key[:2])


# --- slots that no pool has ----------------------------------------------------------------------------------------


def test_a_slot_beyond_the_pools_is_refused_where_their_size_is_known():
    """A step would drop what is written there; and slots past a request's length are nobody's business."""
    bucket, tables = Bucket(decode_requests=2, table_width=3), [[0, 1, 99], [3, 4, 5]]
    create = lambda tables, slots: StepMetadata.create(
        cases.layout(), bucket, tables, [5, 2], [1, 1], slots=slots
    )
    assert create(tables, 5).kv_lens.tolist() == create(tables, None).kv_lens.tolist() == [5, 2]
    message = "request 1 has slot 3, beyond the pools; wanted at most 2 with pages of 4 tokens"
    for made in (tables, np.array(tables)):
        with pytest.raises(ValueError, match=message):
            create(made, 3)
    with pytest.raises(ValueError, match=message):
        create(tables, None).validate(np.int64(3))
    for slots in (0, 2.0, True):
        with pytest.raises(
            ValueError, match="slots is .*; wanted the cache's number of slots.*Pass cache.slots"
        ):
            create(tables, slots)
