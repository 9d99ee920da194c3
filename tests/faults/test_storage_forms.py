"""Faults of page bytes, in every storage form: partial copies, FP4 bytes, widths, scales, and what is not a number."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import cases
import form_cases
import numpy_forms
from dsa_jax import ops, quant
from dsa_jax.cache import Cache
from dsa_jax.codec import pack_pages
from dsa_jax.config import preset
from dsa_jax.layout import CacheLayout, Role
from dsa_jax.sizing import static_cost
from dsa_jax.transfer import copy_pages, copy_tokens
from numpy_model import calc_diff


def appended(layout, keys: np.ndarray, layers=(0,), slots: int = cases.SLOTS, table=None):
    """A poisoned cache with one context of these index keys in each of the layers (scaled by layer + 1), and its step."""
    count = len(keys)
    facts = cases.batch([(count, count)], page_size=layout.page_size, gathered=count, slots=slots)
    if table is not None:
        facts.tables[0][:] = table
    cache, step = cases.poisoned(layout, slots=slots), cases.step(facts, layout)
    for layer in layers:
        cache = cases.append_index_k(cache, layer, (keys * (layer + 1)).astype(np.float32), step)
    return cache, step, facts


@pytest.mark.sample(0, 2, 4)
@pytest.mark.parametrize("page_size", [1, 4, 32, 64, 128])
def test_b04_fp4_pages_are_planar(page_size):
    """Token t holds ones times 2^(t mod 8): its four scale bytes lie at T*64 + 4t, behind all codes, and read back."""
    layout = form_cases.layout(index="fp4", page_size=page_size)
    keys = np.repeat(2.0 ** (np.arange(page_size)[:, None] % 8), 128, axis=1)
    cache, step, facts = appended(layout, keys)
    packed = np.asarray(pack_pages(cache, Role.INDEX_KEY))[2 * facts.tables[0][0]]
    assert packed.size == page_size * 68
    for t in range(page_size):
        scales = packed[page_size * 64 + 4 * t : page_size * 64 + 4 * t + 4]
        assert scales.tolist() == [127 - 2 + t % 8] * 4  # 1 is 4 under a scale of 1/4
        assert packed[t * 64 : (t + 1) * 64].tolist() == [0x66] * 64
    data, scale = cases.gather_index_k(cache, 0, step)
    np.testing.assert_array_equal(quant.dequantize_fp4(data, scale), keys)


@pytest.mark.parametrize("manager", ["v1", "v2"])
@pytest.mark.parametrize("key", ["nvfp4", "fp8_ds_mla"])
def test_b05_scales_of_a_layer_are_its_own(manager, key):
    """Other scales in each layer: every layer reads its own; writing layer 1 leaves layers 0 and 2 alone, byte for byte."""
    layout = form_cases.layout(
        manager, key=key, index="fp4", page_size=form_cases.page_size_of(key), full=(True, True, True)
    )
    facts = cases.batch(decodes=[(3, 1), (2, 1)], page_size=layout.page_size)
    step, rows = cases.step(facts, layout), facts.derive()["rows"]
    latent, rope = form_cases.latents(layout, 2)
    cache, snapshots = cases.poisoned(layout), []
    for layer, factor in ((0, 1.0), (2, 16.0), (1, 256.0)):
        cache = form_cases.append_latent(cache, layer, latent * factor, rope, step)
        cache = cases.append_index_k(cache, layer, np.full((2, 128), factor, np.float32), step)
        snapshots.append(cache)
    for name in cache.pools():
        before, after = (
            np.asarray(c.pages(name)).reshape(cases.SLOTS, 3, -1).view(np.uint8) for c in snapshots[1:]
        )
        np.testing.assert_array_equal(before[:, [0, 2]], after[:, [0, 2]])
        assert (before[:, 1] != after[:, 1]).any()
    one_row = jnp.asarray(rows[:, None])
    q = np.zeros((2, 1, layout.latent_dim + layout.rope_dim), np.float32)
    for layer, factor in ((0, 1.0), (2, 16.0), (1, 256.0)):
        out, _ = form_cases.sparse_mla(
            q, cache, layer, one_row, 1.0
        )  # one row: the output is the cached latent
        entry = numpy_forms.latent_entries(latent * np.float32(factor), rope, key)
        values = numpy_forms.latent_values(entry, key)[:, : layout.latent_dim]
        np.testing.assert_allclose(out[:, 0], values, rtol=1e-6)


@pytest.mark.parametrize("index", ["fp8", "fp4"])
def test_b07_part_of_a_page(index):
    """63 of 64 tokens of slot 3 to slot 5: their data and their scales, and nothing of the 64th row."""
    layout = form_cases.layout(index=index, page_size=64, full=(True,))
    keys = np.random.default_rng(0).normal(size=(64, 128)) * 2.0 ** np.arange(-32, 32)[:, None]
    cache, _, _ = appended(layout, keys, slots=6, table=[3])
    token = jnp.arange(63, dtype=jnp.int32)
    after = copy_tokens(cache, 3 * 64 + token, 5 * 64 + token)
    data = {"fp8": 128, "fp4": 64}[index]
    before, source = (np.asarray(pack_pages(cache, Role.INDEX_KEY))[page] for page in (5, 3))
    target = np.asarray(pack_pages(after, Role.INDEX_KEY))[5]
    assert len(target) == 64 * (data + 4)
    copied = np.zeros(len(target), bool)
    copied[: 63 * data] = copied[64 * data : 64 * data + 63 * 4] = True
    np.testing.assert_array_equal(target[copied], source[copied])
    np.testing.assert_array_equal(target[~copied], before[~copied])
    wrong = 63 * (data + 4)  # tokens times row bytes from the start of the page would take other bytes
    assert (source[:wrong] != target[:wrong]).any()


def test_b07_every_pool_takes_part():
    """Latents, their block scales and the index keys of all layers go along, for the next token to differ alone."""
    layout = form_cases.layout(key="nvfp4", index="fp4", page_size=16)
    cache = cases.poisoned(layout, byte=0x11)
    filled = cache.replace_pages(**{name: cache.pages(name).at[:].add(1) for name in cache.pools()})
    cache = filled.replace_pages(
        **{name: filled.pages(name).at[: filled.pages(name).shape[0] // 2].set(0) for name in filled.pools()}
    )
    source = (cases.SLOTS - 1) * 16 + jnp.arange(5, dtype=jnp.int32)
    after = copy_tokens(cache, source, jnp.arange(5, dtype=jnp.int32))
    for name in cache.pools():
        owners = sum(cases.owners(layout, name))
        pages = np.asarray(after.pages(name))[:owners]
        assert (
            pages[:, :5].any(axis=tuple(range(2, pages.ndim))).all() if pages.ndim > 2 else pages[:, :5].all()
        )
        assert not pages[:, 5:].any()


def test_b08_nibbles_ties_and_byte_counts():
    """[1, -6, 0, ...]: scale byte 0x7F, byte 0 = 0xF2; 0.75 gives 0.5 by default and 1 under "even"; 68 bytes a token."""
    layout = form_cases.layout(index="fp4", page_size=64)
    key = np.zeros((1, 128), np.float32)
    key[0, :2] = [1.0, -6.0]
    cache, _, facts = appended(layout, key)
    packed = np.asarray(pack_pages(cache, Role.INDEX_KEY))[2 * facts.tables[0][0]]
    assert len(packed) == 64 * 68
    assert packed[0] == 0xF2
    assert not packed[1:64].any()
    assert packed[64 * 64 : 64 * 64 + 4].tolist() == [0x7F, 112, 112, 112]
    tie = np.tile([6.0, 0.75, 0.1, -0.1], 32).astype(np.float32)[None]
    for rule, codes in (("deepgemm", [7, 1, 0, 0]), ("even", [7, 2, 0, 8])):
        layout = form_cases.layout(index="fp4", tie_rule=rule)
        cache, step, _ = appended(layout, tie)
        data, _ = cases.gather_index_k(cache, 0, step)
        assert numpy_forms.unpack(np.asarray(data)[0, :2]).tolist() == codes
    for manager in ("v1", "v2"):
        layout = CacheLayout.create(preset("deepseek-v3.2"), manager=manager, index_form="fp4")
        assert layout.bytes_per_token_by_role[Role.INDEX_KEY] == 61 * 68


def test_b08_other_bytes_of_a_copy_stay():
    """Moving an FP4 page moves 68 bytes a token and does not run into the next page."""
    layout = form_cases.layout(index="fp4", page_size=64, full=(True,))
    keys = np.random.default_rng(1).normal(size=(64, 128))
    source, _, _ = appended(layout, keys, slots=4, table=[1])
    target = cases.poisoned(layout, slots=4, byte=0x5A)
    after = copy_pages(source, target, jnp.array([1], jnp.int32), jnp.array([2], jnp.int32))
    packed = np.asarray(pack_pages(after, Role.INDEX_KEY))
    np.testing.assert_array_equal(packed[2], np.asarray(pack_pages(source, Role.INDEX_KEY))[1])
    assert (packed[[0, 1, 3]] == 0x5A).all()


@pytest.mark.parametrize("slots", [4, 9])
def test_b09_656_bytes_everywhere(slots):
    """One width in layout, sizing, cache and codec; a draft's pool too; values are values and not the bytes' numbers."""
    main = form_cases.layout(key="fp8_ds_mla", index="fp4", page_size=64)
    draft = dataclasses.replace(preset("deepseek-v3.2"), num_layers=60, num_mtp_layers=2)
    draft = CacheLayout.create(draft, key_form="fp8_ds_mla", layers=(60,))
    assert static_cost(preset("deepseek-v3.2"), key_form="fp8_ds_mla").bytes_per_token == 61 * (656 + 132)
    for layout in (main, draft):
        assert layout.bytes_per_token_by_role[Role.KEY] == 656 * len(layout.layers)
        cache = Cache.create(layout, slots)
        assert pack_pages(cache, Role.KEY).shape == (slots * len(layout.layers), 64 * 656)
    cache, facts = Cache.create(main, cases.SLOTS), cases.batch(decodes=[(1, 1)], page_size=64)
    latent, rope = np.arange(1, 513, dtype=np.float32)[None], np.full((1, 64), -3.0, np.float32)
    cache = form_cases.append_latent(cache, 1, latent, rope, cases.step(facts, main))
    rows = jnp.asarray(facts.derive()["rows"])[:, None]
    out, lse = form_cases.sparse_mla(
        np.concatenate([0 * latent, 0 * rope + 1], axis=1)[:, None], cache, 1, rows, 1.0
    )
    np.testing.assert_allclose(out[0, 0], latent[0], rtol=1 / 16)
    np.testing.assert_allclose(lse, [[-192.0]])  # 64 times -3, not quantised


def test_b09_pools_of_another_width_or_dtype():
    cache = Cache.create(form_cases.layout(key="fp8_ds_mla", index="fp4", page_size=64), 2)
    for wrong, words in (
        (
            {"key": jnp.zeros((6, 64, 592), jnp.uint8)},
            r"key is uint8\[6, 64, 592\], wanted uint8\[6, 64, 512\]",
        ),
        ({"index_scale": jnp.zeros((4, 64))}, r"index_scale is float32\[4, 64\], wanted int32\[4, 64\]"),
        ({"key_rope": None}, r"key_rope is nothing, wanted bfloat16\[6, 64, 64\]"),
        (
            {"block_scale_offsets": jnp.zeros(3, jnp.int32)},
            "block_scale_offsets differs from the layout's None",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(cache, **wrong).validate()


def test_b10_fp4_and_tile_scales_come_before_the_division():
    """The largest element of a group just above six times a power of two: the next power, half the code, the same value."""
    keys = np.zeros((1, 128), np.float32)
    keys[0, [0, 1]] = [6.1, 3.05]
    data, scale = ops.quantize_index_k(jnp.asarray(keys), "fp4")
    assert np.asarray(scale).view(np.uint8)[0] == 128
    np.testing.assert_array_equal(quant.dequantize_fp4(data, scale)[0, :2], [6.0, 3.0])
    latent = np.zeros((1, 512), np.float32)
    latent[0, :2], latent[0, 128] = [449.0, 224.5], 448.0
    entry = quant.encode_latent(jnp.asarray(latent), jnp.zeros((1, 64)), "fp8_ds_mla")
    assert entry["key_scale"][0, :2].tolist() == [2.0, 1.0]
    np.testing.assert_array_equal(
        quant.decode_latent(entry, "fp8_ds_mla")[0, [0, 1, 128]], [448.0, 224.0, 448.0]
    )


@pytest.mark.parametrize("key", ["fp8", "nvfp4", "fp8_ds_mla"])
def test_b11_zero_tokens(key):
    """Zero, one-hot and zero: zero bytes under finite scales, scores exactly 0, no NaN in the attention."""
    layout = form_cases.layout(key=key, index="fp4", page_size=form_cases.page_size_of(key))
    keys = np.zeros((3, 128), np.float32)
    keys[1, 7] = 5.0
    cache, step, facts = appended(layout, keys)
    data, scale = cases.gather_index_k(cache, 0, step)
    assert not np.asarray(data)[[0, 2]].any()
    assert np.asarray(scale)[[0, 2]].tobytes() == bytes([112] * 8)
    q, _, _ = form_cases.query(layout, np.ones((3, 2, 128), np.float32))
    got = np.asarray(cases.paged_mqa_logits(q, np.ones((3, 2), np.float32), cache, 0, step))[2, :3]
    assert got.tolist() == [0.0, 2 * 6.0, 0.0] or got.tolist() == [
        0.0,
        2 * 4.0,
        0.0,
    ]  # 5 is a tie: towards zero
    latent, rope = np.zeros((3, layout.latent_dim), np.float32), np.zeros((3, layout.rope_dim), np.float32)
    cache = form_cases.append_latent(cache, 1, latent, rope, step)
    rows = np.tile(facts.derive()["rows"], (3, 1))
    out, lse = form_cases.sparse_mla(
        np.ones((3, 2, sum(form_cases.widths(key))), np.float32), cache, 1, rows, 1.0
    )
    assert not np.asarray(out).any()
    np.testing.assert_allclose(lse, np.log(3.0), rtol=1e-6)


@pytest.mark.parametrize("index", ["fp8", "fp4"])
def test_b12_extreme_keys(index):
    """500, 1e30 and infinity saturate; a NaN key scores NaN or nothing, and is never chosen over a real one."""
    layout = form_cases.layout(index=index)
    keys = np.ones((4, 128), np.float32)
    keys[1, 0], keys[2, 0], keys[3, 0] = 1e30, np.inf, np.nan
    cache, step, _ = appended(layout, keys)
    data, scale = cases.gather_index_k(cache, 0, step)
    values = np.asarray(quant.decode_index({"index_key": data, "index_scale": scale}, index))
    assert np.isfinite(values[:3]).all()
    assert values[1, 0] > 5e29
    assert values[2, 0] >= values[2, 1] == 1.0
    assert np.isnan(values[3, 0])
    q, _, factor = form_cases.query(layout, np.ones((4, 2, 128), np.float32))
    weights = factor.astype(np.float32)
    assert cases.select_tokens(q, weights, cache, 0, step, 3)[3].tolist() == [0, 1, 2]


def test_b13_rotation_before_fp4():
    """Four channels of the keys twenty times the others: with the rotation on both sides the scores err less."""
    rng = np.random.default_rng(2)
    q, k = rng.normal(size=(16, 128)), rng.normal(size=(64, 128))
    for channel in (3, 40, 77, 100):
        k[:, channel] *= 20
    exact = q @ k.T

    def error(rotate: bool) -> float:
        values = [np.asarray(quant.hadamard(jnp.asarray(x, jnp.float32))) if rotate else x for x in (q, k)]
        decoded = [numpy_forms.dequantize_fp4(*numpy_forms.quantize_fp4(x)) for x in values]
        return calc_diff(decoded[0] @ decoded[1].T, exact)

    assert error(True) < 0.7 * error(False)


@pytest.mark.sample(0, 2, 5)
@pytest.mark.parametrize(("key", "index", "page_size"), form_cases.PAIRS)
def test_b63_handed_over_pages_select_and_attend_alike(key, index, page_size):
    """Pages [3, 5] of one cache as [0, 1] of another: the same selection below k tokens and the same output, bit for bit."""
    layout = form_cases.layout(key=key, index=index, page_size=page_size)
    facts = cases.batch(decodes=[(2 * page_size, 1)], page_size=page_size)
    facts.tables[0][:2] = [3, 5]
    rng, rows = np.random.default_rng(3), [3 * page_size + p for p in range(page_size)]
    rows += [5 * page_size + p for p in range(page_size)]
    source = form_cases.write_keys(cases.poisoned(layout), 0, rows, rng.normal(size=(len(rows), 128)))
    latent, rope = form_cases.latents(layout, len(rows))
    scale = form_cases.KEY_SCALE.get(key)
    entry = numpy_forms.latent_entries(latent, rope, key, scale or 1.0)
    source = form_cases.write_entry(source, 0, rows, entry)
    pages = jnp.array([3, 5], jnp.int32), jnp.array([0, 1], jnp.int32)
    target = copy_pages(source, cases.poisoned(layout, slots=4), *pages)
    assert (target.key_rope is None) == (key != "fp8_ds_mla")
    q, _, factor = form_cases.query(layout, rng.normal(size=(1, 4, 128)))
    attention_q = rng.normal(size=(1, 2, layout.latent_dim + layout.rope_dim)).astype(np.float32)
    results = []
    for cache, table in ((source, [3, 5]), (target, [0, 1])):
        facts.tables[0][:2] = table
        step = cases.step(facts, layout)
        chosen = cases.select_tokens(q, factor.astype(np.float32), cache, 0, step, 2 if page_size > 1 else 1)
        out, _ = form_cases.sparse_mla(
            attention_q, cache, 0, cases.to_rows(chosen, step), 0.2, key_scale=scale
        )
        results.append((np.asarray(chosen), np.asarray(out)))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])
    assert np.isfinite(results[0][1]).all()
