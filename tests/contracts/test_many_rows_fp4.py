"""Scores of FP4 keys for many rows on Hopper, interpreted on the CPU, against the NumPy model: as FP8 where that is exact.

The other way is the kernel for all cards, which has tests of its own; here it says which way was taken.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_jax import Bucket, Cache, CacheLayout, StepMetadata, ops
from dsa_jax.compat import Device
from dsa_jax.config import preset
from dsa_jax.ops import dispatch, gpu
from dsa_jax.pallas import many_rows_fp4_mosaic as many_rows
from dsa_jax.pallas import paged_logits_fp4_codes as fp4_codes
from dsa_jax.pallas.paged_logits_config import PagedLogitsConfig
from fp4_scores import FAR, LAYER_OFFSET, NEAR, SCALE, check, context_scenario, draw, packed, values, words
from interpreted import INTERPRETED, races_found
from numpy_model import E4M3
from window_problems import CASES, PACKED, fp4_scenario

MODULES = {
    "as FP8": (many_rows.paged_logits_mosaic, many_rows.window_logits_mosaic),
    "as they are": (many_rows.paged_logits_triton, many_rows.window_logits_triton),
}


@pytest.fixture
def answers(monkeypatch):
    """Lets one way answer with a number for all scores."""

    def set_answer(way: str, value: float) -> None:
        paged, windows = MODULES[way]
        of_table, of_keys = (
            (lambda q, w, k, s, table, *_: table.shape[1] * k.shape[1]),
            (lambda q, w, k, *_: len(k)),
        )
        for module, name, width in (
            (paged, "paged_logits_prefill", of_table),
            (windows, "window_logits", of_keys),
        ):
            answer = lambda *a, dtype, width=width, **_: jnp.full((len(a[1]), width(*a)), value, dtype)
            monkeypatch.setattr(module, name, answer)

    return set_answer


@pytest.fixture
def as_fp8_only(answers):
    answers("as they are", np.nan)


@pytest.fixture
def as_they_are_only(answers):
    answers("as FP8", np.nan)


@pytest.fixture
def which_way(answers):
    """0 for scores as FP8, 1 for scores as they are."""
    answers("as FP8", 0)
    answers("as they are", 1)


def contexts(arguments, *, offset=LAYER_OFFSET, dtype=jnp.float32, **config):
    call = functools.partial(
        many_rows.paged_logits_prefill, page_scale=SCALE, config=PagedLogitsConfig(**config), blocks=3,
        dtype=dtype, interpret=INTERPRETED,
    )  # fmt: skip
    return np.asarray(jax.jit(call)(*jax.tree.map(jnp.asarray, arguments), layer_offset=offset))


def windows(arguments, *, dtype=jnp.float32, **config):
    call = functools.partial(
        many_rows.window_logits,
        config=PagedLogitsConfig(**config),
        blocks=3,
        dtype=dtype,
        interpret=INTERPRETED,
    )
    return np.asarray(jax.jit(call)(*jax.tree.map(jnp.asarray, arguments)))


@pytest.mark.parametrize(
    ("page_size", "heads", "config"),
    [
        (64, 32, dict(group_columns=256, stages=2)),
        (32, 64, dict(group_columns=128, stages=4, product_columns=64)),
        pytest.param(
            128,
            32,
            dict(group_columns=512, compute_warpgroups=1, stages=1, query_buffers=1),
            marks=pytest.mark.full,
        ),
    ],
)
@pytest.mark.usefixtures("as_fp8_only")
def test_contexts_as_fp8(page_size, heads, config):
    """Pages that no token sees hold NaN, their slots are -1 or do not exist; so do padding and its weights."""
    arguments, expected = context_scenario(page_size, heads=heads)
    got = contexts(arguments, **config)
    check(got, expected)
    assert not races_found()
    if page_size == 64:
        rounded = contexts(arguments, offset=jnp.int32(LAYER_OFFSET), dtype=jnp.bfloat16, **config)
        np.testing.assert_array_equal(rounded, got.astype(jnp.bfloat16))


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize(
    "name", ["texts", pytest.param("far apart", marks=pytest.mark.full), "odd", "fewer keys than a tile"]
)
@pytest.mark.usefixtures("as_fp8_only")
def test_windows_as_fp8(name):
    """Keys in no window and rows with an empty one hold NaN, and do not count."""
    rows, keys, config = CASES[name]
    arguments, expected = fp4_scenario(rows, keys=keys, key_bytes=NEAR)
    got = windows(arguments, **config)
    check(got, expected)
    assert not races_found()
    if name == "far apart":
        rounded = windows(arguments, dtype=jnp.bfloat16, **config)
        np.testing.assert_array_equal(rounded, got.astype(jnp.bfloat16))


@pytest.mark.parametrize("byte", [7, 8])
def test_keys_of_the_least_scales(byte):
    """8 is the least that goes as FP8, whose kernel halves the scale; 7 goes as it is. Neither may come out as 0.

    A CPU that flushes subnormal products to 0 loses less than 2**-126 of each: 2e-5 of these scores.
    """
    arguments, expected = fp4_scenario(((0, 7), (3, 5)), keys=7, key_bytes=(byte,))
    check(windows(arguments, stages=2), expected, relative=1e-4)


@pytest.mark.parametrize(("key_bytes", "query_bytes"), [(FAR, NEAR), (NEAR, FAR)])
@pytest.mark.usefixtures("as_they_are_only")
def test_exceptions_are_scored_as_they_are(key_bytes, query_bytes):
    arguments, expected = context_scenario(64, key_bytes=key_bytes, query_bytes=query_bytes)
    check(contexts(arguments), expected)
    if query_bytes == NEAR:
        arguments, expected = fp4_scenario(PACKED, keys=193, key_bytes=key_bytes)
        check(windows(arguments), expected)


def with_bytes(x: np.ndarray, place, value: int) -> np.ndarray:
    """Scale words with the first byte of one of them changed."""
    x = x.copy()
    x.view(np.uint8).reshape(*x.shape, 4)[(*place, 0)] = value
    return x


@pytest.mark.usefixtures("which_way")
def test_one_visible_key_or_query_decides():
    """Windows [0, 7) and [10, 12), the second of them of a row that sees two keys; 255 is NaN, 100 is far from NEAR."""
    rows = ((0, 7), (5, 5), (10, 12))
    (query, weights, keys, key_words, starts, ends), _ = fp4_scenario(rows, keys=64, key_bytes=NEAR)
    way = lambda words, powers: windows(((query[0], powers), weights, keys, words, starts, ends)).max()
    for place, value in ((6, 100), (11, 255), (10, 0)):
        assert way(with_bytes(key_words, (place,), value), query[1]) == 1
    for place, value in ((7, 100), (9, 255), (12, 0), (63, 100)):
        assert way(with_bytes(key_words, (place,), value), query[1]) == 0
    assert way(key_words, with_bytes(query[1], (2, 31), 100)) == 1
    assert way(key_words, with_bytes(query[1], (1, 31), 100)) == 0
    # A query without differences, whose scale alone is too small for a weight, or just not.
    for byte, wanted in ((fp4_codes.LEAST_QUERY - 1, 1), (fp4_codes.LEAST_QUERY, 0)):
        powers = query[1].copy()
        powers[2, 31] = byte * 0x01010101
        assert way(key_words, powers) == wanted


@pytest.mark.usefixtures("which_way")
def test_the_last_key_that_a_request_sees_decides():
    (query, weights, keys, key_words, table, requests, limits), _ = context_scenario(64)
    page, next_page = (slot * SCALE + LAYER_OFFSET for slot in table[0, 2:4])
    second = table[1, 1] * SCALE + LAYER_OFFSET
    of_first = (((next_page, 7), 1), ((next_page, 8), 0), ((page, 63), 1), ((page - 1, 0), 0))
    for place, way in (*of_first, ((second, 5), 1), ((second, 6), 0)):
        words = with_bytes(key_words, place, 100)
        # In either order of the tokens: the last of a request need not be the one that sees most.
        for order in (slice(None), slice(None, None, -1)):
            rows = jax.tree.map(lambda x, order=order: x[order], (query, weights, requests, limits))
            assert contexts((*rows[:2], keys, words, table, *rows[2:])).max() == way, place


def test_what_fits_is_exact():
    """Bytes around every bound, and each vector that is said to fit, value for value."""
    rng = np.random.default_rng(0)
    tops = np.array([6, 7, 8, 63, 64, 65, 127, 189, 190, 191, 253, 254, 255])
    drops = np.array(
        [[0, 0, 0, 0], [0, 11, 3, 1], [11, 0, 11, 0], [0, 12, 0, 0], [5, 6, 0, 12], [0, 255, 1, 1]]
    )
    bytes_ = np.maximum(tops[:, None, None] - drops, 1)
    codes, _ = draw(rng, bytes_.shape[:2])
    got, scale = fp4_codes.as_fp8(jnp.asarray(packed(codes)), jnp.asarray(words(bytes_)))
    fits = np.asarray(fp4_codes.key_fits(jnp.asarray(words(bytes_))))
    spread = bytes_.max(axis=-1) - bytes_.min(axis=-1)
    near = (tops >= 8) & (tops <= 254)
    np.testing.assert_array_equal(fits, near[:, None] & (spread <= 11))
    query = np.asarray(fp4_codes.query_fits(jnp.asarray(words(bytes_))))
    np.testing.assert_array_equal(query, fits & ((tops >= 64) & (tops <= 190))[:, None])
    assert fits.any() and query.any() and not fits.all()
    with np.errstate(invalid="ignore"):
        expressed = E4M3[np.asarray(got)] * np.asarray(scale, np.float64)[..., None]
    np.testing.assert_array_equal(expressed[fits], values(codes, bytes_)[fits])


@pytest.mark.usefixtures("which_way")
def test_x64_changes_no_way():
    """Without the kernel: its interpreter's threads do not see a context manager's setting."""
    of_contexts, _ = context_scenario(64)
    of_windows, _ = fp4_scenario(PACKED, keys=193, key_bytes=NEAR)
    with jax.enable_x64(True):
        scored = contexts(of_contexts), windows(of_windows)
    assert all((x.max(), x.dtype) == (0, np.float32) for x in scored)


def test_without_rows_or_keys():
    (query, weights, keys, key_words, starts, ends), _ = fp4_scenario(PACKED, keys=193, key_bytes=NEAR)
    none = jax.tree.map(lambda x: x[:0], (query, weights))
    assert windows((*none, keys, key_words, starts[:0], ends[:0])).shape == (0, 193)
    assert windows((query, weights, keys[:0], key_words[:0], starts, ends)).shape == (len(PACKED), 0)
    (query, weights, *pools, requests, limits), _ = context_scenario(64)
    none = jax.tree.map(lambda x: x[:0], (query, weights))
    assert contexts((*none, *pools, requests[:0], limits[:0])).shape == (0, 256)


@pytest.mark.parametrize(
    ("tokens", "width", "first"),
    [(65, 4096, "triton"), (66, 4096, "mosaic"), (128, 255, "triton"), (128, 256, "mosaic")],
)
def test_few_rows_are_not_worth_a_copy(tokens, width, first):
    """Two requests with 33 tokens or more each, and 2**27 products with 64 heads. Named kernels take any number."""
    layout = CacheLayout.create(preset("deepseek-v3.2"), layers=(0,), index_form="fp4")
    bucket = Bucket(context_requests=2, context_tokens=tokens, table_width=width)
    step = StepMetadata.create(layout, bucket, [[0, 1], [2]], [70, 9], [5, 1]).derive()
    candidates = gpu.paged_mqa_logits(Cache.abstract(layout, 4), 64, step)
    windows = gpu.mqa_logits("fp4", 64, 128, tokens // 2, 2 * width * 64)
    assert candidates[0].name == windows[0].name == first
    assert gpu.mqa_logits("fp8", 64, 128, tokens // 2, 2 * width * 64)[0].name == "mosaic"
    for candidate in (*candidates, *windows):
        assert candidate.supported is not None
        candidate.supported(HOPPER)


def test_few_rows_of_fp8_need_no_copy():
    """And so they stay with the kernel that is Hopper's own."""
    layout = CacheLayout.create(preset("deepseek-v3.2"), layers=(0,))
    bucket = Bucket(context_requests=2, context_tokens=65, table_width=2)
    step = StepMetadata.create(layout, bucket, [[0, 1], [2]], [70, 9], [5, 1]).derive()
    candidates = (
        gpu.paged_mqa_logits(Cache.abstract(layout, 4), 64, step),
        gpu.mqa_logits("fp8", 64, 128, 1, 9),
    )
    assert [first.name for first, _ in candidates] == ["mosaic"] * 2


@pytest.mark.usefixtures("which_way")
def test_the_op_counts_its_rows_and_keys(monkeypatch):
    monkeypatch.setattr(dispatch, "target_device", lambda: HOPPER)
    asked = []

    def choose(kernel, make, facts):
        asked.append((kernel, facts))
        return make("mosaic" if facts["rows_per_request"] > 32 else "triton")

    monkeypatch.setattr(gpu, "choose", choose)
    for rows, way in ((32, 1), (33, 0)):
        (query, weights, keys, key_words, *bounds), _ = fp4_scenario(((0, 7),) * rows, keys=7, key_bytes=NEAR)
        scored = ops.mqa_logits(*jax.tree.map(jnp.asarray, (query, (keys, key_words), weights, *bounds)))
        assert scored.max() == way
        facts = {"form": "fp4", "rows_per_request": rows, "products": rows * 7 * 32}
        assert asked.pop() == ("many_row_scores", facts)


HOPPER = Device("gpu", "NVIDIA H200", (9, 0), 132)


def test_supported():
    many_rows.supported_on(HOPPER, heads=64)
    many_rows.supported_on(HOPPER, heads=32, page_size=128)


@pytest.mark.parametrize(
    ("device", "problem", "reason"),
    [
        (Device("gpu", "NVIDIA B200", (10, 0), 148), dict(heads=64), "9.0"),
        (HOPPER, dict(heads=16), "index heads is 16; the kernel takes 32, 64"),
        (HOPPER, dict(heads=64, page_size=16), "page_size is 16"),
        (HOPPER, dict(heads=64, head_dim=64), "index head dim is 64"),
    ],
)
def test_refusals_give_the_reason(device, problem, reason):
    with pytest.raises(NotImplementedError, match=reason):
        many_rows.supported_on(device, **problem)
