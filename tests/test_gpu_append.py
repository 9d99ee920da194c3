"""Appends on a CUDA card (``pytest -m gpu``): a cache that is not donated stays as it was (B66), and the new one has the
NumPy model's bytes, in steps of 64 tokens and of 8,192.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import cases
import form_cases
import numpy_forms
from dsa_jax import Cache, CacheLayout, ops
from dsa_jax.config import preset
from dsa_jax.pallas import append_triton
from numpy_model import Facts

pytestmark = pytest.mark.gpu

POISON = 0xFF
"""What every byte of the old cache is: NaN in e4m3, bfloat16 and float32."""
KEY_LAYERS, LATENT_LAYERS = (0, 2), (1, 2)
"""Layers that a step appends to; the cache has three."""
CASES = [
    # manager, index form, key form, page size, dtype of what is appended
    ("v1", "fp8", "bf16", 32, jnp.bfloat16),
    ("v2", "fp8", "bf16", 64, jnp.float32),
    ("v1", "f32", "f32", 128, jnp.bfloat16),
    ("v2", "f32", "f32", 32, jnp.float32),
    ("v1", "fp4", "fp8", 64, jnp.float32),
    ("v2", "f32", "fp8", 128, jnp.bfloat16),
    ("v1", "fp4", "nvfp4", 128, jnp.bfloat16),
    ("v2", "fp4", "nvfp4", 32, jnp.float32),
    ("v1", "fp8", "fp8_ds_mla", 64, jnp.float32),
    ("v2", "fp4", "fp8_ds_mla", 64, jnp.bfloat16),
]
"""Every form under both managers, and every page size under both."""
FORMS = "manager", "index", "key", "page_size", "dtype"


def layout_of(manager: str, index: str, key: str, page_size: int) -> CacheLayout:
    """Three layers of DeepSeek-V3.2, each with an indexer."""
    forms: dict = dict(index_form=index, key_form=key, page_size=page_size)
    return CacheLayout.create(preset("deepseek-v3.2"), layers=(0, 1, 2), manager=manager, **forms)


def batch(tokens: int, page_size: int, seed: int) -> tuple[Facts, int]:
    """A step of so many token places, some of them without a row, and the slots of its pool.

    Few tokens: decode requests, three without a token and one with a token on a page that it does not have. Many: three
    contexts, one of them with a cached prefix, and padding. No table names the first slot or the last one.
    """
    rng = np.random.default_rng(5)
    contexts, decodes, rest = [], [], {}
    if tokens <= 64:
        decodes = [(int(n), 1) for n in rng.integers(1, 2 * page_size, tokens - 3)]
        rest = dict(spare_requests=3)
    else:
        first, second = tokens // 2, tokens // 2 - 90
        contexts, rest = [(first + 900, first), (second, second), (85, 83)], dict(padding=7)
    slots = sum(-(-length // page_size) for length, _ in contexts + decodes) + 3
    facts = cases.batch(contexts, decodes, page_size=page_size, slots=slots, seed=seed, **rest)
    facts.tables = [[slot + 1 for slot in table] for table in facts.tables]
    if decodes:
        facts.tables[1][(decodes[1][0] - 1) // page_size] = -1
    rows = facts.derive()["rows"]
    assert len(rows) == tokens
    assert (rows < 0).sum() == (4 if decodes else 7)
    return facts, slots + 2


def old_cache(layout: CacheLayout, slots: int) -> Cache:
    """A poisoned cache that the device made.

    NumPy keeps what it once read of an array, and would show the old bytes whatever a kernel did to them; of this one it
    has read nothing yet.
    """
    return jax.jit(lambda cache: jax.tree.map(jnp.copy, cache))(cases.poisoned(layout, slots, POISON))


def vectors(tokens: int, seed: int, dtype) -> tuple[list[jax.Array], list[np.ndarray], list[np.ndarray]]:
    """Keys, latents and rotary keys of a step: 61 of many sizes, over and over, no two neighbours the same.

    Returns:
        ``dtype[2, tokens, width]`` of each kind, for its two layers; the 61 in float32; which of them a place has, by layer.
    """
    rng = np.random.default_rng(seed)
    sizes = 2.0 ** rng.integers(-12, 8, (61, 1))
    few = [jnp.asarray(rng.normal(size=(61, n)) * sizes, jnp.float32).astype(dtype) for n in (128, 512, 64)]
    picks = [(np.arange(tokens) + shift) % 61 for shift in (0, 30)]
    given = [jnp.stack([x[pick] for pick in picks]) for x in few]
    return given, [np.asarray(x.astype(jnp.float32)) for x in few], picks


def append(cache: Cache, step, k, latent, rope, *, key_scale=None) -> Cache:
    """The step's keys and latents, each to two layers, with the kernels."""
    for i, layer in enumerate(KEY_LAYERS):
        cache = ops.append_index_k(cache, layer, k[i], step, implementation="triton")
    for i, layer in enumerate(LATENT_LAYERS):
        options: dict = dict(key_scale=key_scale, implementation="triton")
        cache = ops.append_latent(cache, layer, latent[i], rope[i], step, **options)
    return cache


def expected(layout: CacheLayout, slots: int, facts: Facts, few, picks, key_scale) -> dict[str, bytes]:
    """Bytes of a poisoned cache with the model's entries at their rows."""
    cache, rows = cases.poisoned(layout, slots, POISON), facts.derive()["rows"].tolist()
    rules = dict(scale_rule=layout.scale_rule, tie_rule=layout.tie_rule)
    keys = numpy_forms.index_entries(few[0], layout.index_form, **rules)
    latents = numpy_forms.latent_entries(*few[1:], layout.key_form, key_scale or 1.0)
    for layers, entry in ((KEY_LAYERS, keys), (LATENT_LAYERS, latents)):
        for layer, pick in zip(layers, picks, strict=True):
            own = {name: values[pick] for name, values in entry.items()}
            cache = form_cases.write_entry(cache, layer, rows, own)
    return cases.pool_bytes(cache)


def check_unchanged(cache: Cache) -> None:
    """All that was there is poison, down to the last byte."""
    for name, pool in cache.pools().items():
        assert (np.frombuffer(np.asarray(pool).tobytes(), np.uint8) == POISON).all(), name


def check_new(cache: Cache, want: dict[str, bytes], slots: int) -> None:
    """The model's bytes, and poison in the first and the last slot, whose pages no table names."""
    got = cases.pool_bytes(cache)
    for name, content in got.items():
        assert content == want[name], name
        size = len(content) // slots
        assert {*content[:size], *content[-size:]} == {POISON}, name
        assert content.count(POISON) < len(content), name


@pytest.mark.parametrize("tokens", [64, 8_192])
@pytest.mark.parametrize(FORMS, CASES)
def test_b66_without_donation_the_old_cache_is_unchanged(manager, index, key, page_size, dtype, tokens):
    """Two steps on other pages, both from the old cache: the second shows nothing of the first, and the old one nothing."""
    layout, key_scale = layout_of(manager, index, key, page_size), form_cases.KEY_SCALE.get(key)
    run = jax.jit(partial(append, key_scale=key_scale))
    old = old_cache(layout, batch(tokens, page_size, 0)[1])
    for seed in (0, 1):
        facts, slots = batch(tokens, page_size, seed)
        given, few, picks = vectors(tokens, seed, dtype)
        new = run(old, cases.step(facts, layout), *given)
        check_new(new, expected(layout, slots, facts, few, picks, key_scale), slots)
    check_unchanged(old)


@pytest.mark.parametrize(FORMS, [CASES[i] for i in (0, 3, 5, 7, 8)])
def test_b66_an_old_cache_is_read_behind_the_append(manager, index, key, page_size, dtype):
    """In one program, and from ops that no program holds together: both leave the old bytes to later readers."""
    layout, key_scale, tokens = layout_of(manager, index, key, page_size), form_cases.KEY_SCALE.get(key), 64
    facts, slots = batch(tokens, page_size, 0)
    given, few, picks = vectors(tokens, 0, dtype)
    step, old = cases.step(facts, layout), old_cache(layout, slots)
    want = expected(layout, slots, facts, few, picks, key_scale)

    @jax.jit
    def both(cache, step, *given):
        return append(cache, step, *given, key_scale=key_scale), jax.tree.map(jnp.copy, cache)

    new, read = both(old, step, *given)
    check_new(new, want, slots)
    check_unchanged(read)
    check_new(append(old, step, *given, key_scale=key_scale), want, slots)
    check_unchanged(old)


def edges() -> np.ndarray:
    """f32`[tokens, 576]`: every bfloat16 number, and each tie between codes of e4m3 with the floats beside it."""
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    codes = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = np.append((codes[1:] + codes[:-1]) / 2, np.float32(464))
    ties = np.concatenate([ties, np.nextafter(ties, 0), np.nextafter(ties, np.float32(1e9))])
    x = np.concatenate([every, ties, -ties])
    return np.resize(x, (-(-x.size // 576), 576))


@pytest.mark.parametrize("instruction", [True, False])
@pytest.mark.parametrize(("block", "warps"), [(1, 4), (4, 4), (16, 2)])
def test_codes_at_every_edge(block, warps, instruction):
    """FP8 latents under a scale of 1, by the card's instruction and with integers, in programs of several sizes."""
    x = edges()
    tokens, config = len(x), append_triton.Config(block, warps, fp8_instruction=instruction)
    [got] = append_triton.append_latent_codes(
        jnp.asarray(x[:, :512]), jnp.asarray(x[:, 512:]), jnp.arange(tokens), [jnp.zeros((1, 256, 576), jnp.uint8)],
        page_scales=(1,), layer_offsets=(0,), config=config,
    )  # fmt: skip
    with np.errstate(invalid="ignore"):
        want = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    lost = np.isnan(x)
    got = np.asarray(got)[0, :tokens]
    np.testing.assert_array_equal(got[~lost], want[~lost])
    np.testing.assert_array_equal(got[lost] & 0x7F, 0x7F)
