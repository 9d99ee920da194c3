"""Writing: the right bytes at the right place, and not one byte anywhere else."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from dsa_jax import ops
from dsa_jax.cache import Cache
from dsa_jax.layout import Role
from dsa_jax.metadata import Bucket
from dsa_jax.xla import append as xla_append
from numpy_model import quantize_fp8

RAGGED = dict(contexts=[(7, 3), (5, 5), (0, 0)], decodes=[(9, 1), (6, 3), (1, 1)], next_n=3, padding=2)
"""A prefix, a fresh context, an empty one; decode requests with one and three tokens; padding everywhere."""


def keys_of(facts, width: int, seed: int = 1) -> np.ndarray:
    """One random key per token place."""
    count = cases.bucket(facts).tokens
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


def check_index_k(implementation: str, layout, facts, byte: int = 0xFF) -> None:
    """Append to every owning layer of a poisoned cache; compare all bytes of all pools with the NumPy model's."""
    cache = expected = cases.poisoned(layout, byte=byte)
    step, rows = cases.step(facts, layout), facts.derive()["rows"].tolist()
    for layer in [i for i, owner in enumerate(layout.full) if owner]:
        keys = keys_of(facts, layout.index_head_dim, seed=layer)
        cache = cases.append_index_k(cache, layer, keys, step, implementation=implementation)
        expected = cases.write_keys(expected, layer, rows, keys)
    assert cases.pool_bytes(cache) == cases.pool_bytes(expected)


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["append_index_k"])
@pytest.mark.parametrize("manager", ["v1", "v2"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_index_keys_fp8(implementation, manager, page_size):
    facts = cases.batch(**RAGGED, page_size=page_size, slots=60, spare_requests=1)
    layout = cases.layout(manager, index="fp8", page_size=page_size)
    cache = expected = cases.poisoned(layout, slots=60)
    step, rows = cases.step(facts, layout), facts.derive()["rows"].tolist()
    for layer in (0, 2):
        keys = keys_of(facts, 128, seed=layer)
        cache = cases.append_index_k(cache, layer, keys, step, implementation=implementation)
        expected = cases.write_keys(expected, layer, rows, keys)
    assert cases.pool_bytes(cache) == cases.pool_bytes(expected)
    assert sum(row >= 0 for row in rows) == 13


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["append_index_k"])
@pytest.mark.parametrize("form", ["f32", "fp8"])
@pytest.mark.parametrize("scale_rule", ["ue8m0", "fp32"])
@pytest.mark.parametrize("full", [(True,), (True, True, False, False, True)])
def test_index_keys_by_form(implementation, form, scale_rule, full):
    layout = cases.layout("v2", index=form, scale_rule=scale_rule, full=full)
    check_index_k(implementation, layout, cases.batch(**RAGGED), byte=0x7F)


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["append_latent"])
@pytest.mark.parametrize("manager", ["v1", "v2"])
@pytest.mark.parametrize(("form", "page_size"), [("bf16", 1), ("f32", 4), ("bf16", 64)])
def test_latents(implementation, manager, form, page_size):
    layout = cases.layout(manager, key=form, page_size=page_size)
    facts = cases.batch(**RAGGED, page_size=page_size, slots=60)
    step, rows = cases.step(facts, layout), facts.derive()["rows"].tolist()
    cache = expected = cases.poisoned(layout, slots=60)
    for layer in range(3):  # a layer without an indexer has a latent all the same
        values = keys_of(facts, cases.LATENT + cases.ROPE, seed=layer)
        latent, rope = values[:, : cases.LATENT], values[:, cases.LATENT :]
        cache = cases.append_latent(cache, layer, latent, rope, step, implementation=implementation)
        stored = np.asarray(jnp.asarray(values).astype(cache.key.dtype))
        expected = cases.write(expected, "key", layer, rows, stored)
    assert cases.pool_bytes(cache) == cases.pool_bytes(expected)


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["append_index_k"])
@pytest.mark.parametrize("manager", ["v1", "v2"])
def test_traced_layer_in_a_scan(implementation, manager):
    """A traced layer writes where the Python number writes; a traced layer without an indexer writes nothing."""
    layout = cases.layout(manager, index="fp8")
    facts = cases.batch(**RAGGED)
    step = cases.step(facts, layout)
    keys = np.stack([keys_of(facts, 128, seed=layer) for layer in range(3)])
    cache = cases.poisoned(layout)

    @jax.jit
    def all_layers(cache, keys):
        def body(cache, layer_and_keys):
            layer, k = layer_and_keys
            return ops.append_index_k(cache, layer, k, step, implementation=implementation), None

        return jax.lax.scan(body, cache, (jnp.arange(3, dtype=jnp.int32), keys))[0]

    scanned = all_layers(cache, keys)
    expected = cache
    for layer in (0, 2):
        expected = ops.append_index_k(
            expected, layer, jnp.asarray(keys[layer]), step, implementation=implementation
        )
    assert cases.pool_bytes(scanned) == cases.pool_bytes(expected)
    assert cases.pool_bytes(scanned) != cases.pool_bytes(cache)


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["append_index_k"])
@pytest.mark.parametrize("layer", [-1, 3, 1000])
def test_traced_layer_out_of_range_writes_nothing(implementation, layer):
    layout = cases.layout()
    step = cases.step(facts := cases.batch(decodes=[(5, 1), (2, 1)]), layout)
    cache = cases.poisoned(layout)
    keys = keys_of(facts, 8)
    after = cases.append_index_k(cache, jnp.int32(layer), keys, step, implementation=implementation)
    assert cases.pool_bytes(after) == cases.pool_bytes(cache)


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["append_index_k"])
def test_slots_past_the_pool_are_dropped(implementation):
    """A slot that the pool does not have writes nothing; it neither wraps nor lands in the last page."""
    layout = cases.layout(index="fp8")
    facts = cases.batch(decodes=[(5, 1), (2, 1), (3, 1)])
    facts.tables[0][1] = cases.SLOTS  # the first that does not exist
    facts.tables[1][0] = 10_000
    step, cache = cases.step(facts, layout), cases.poisoned(layout)
    keys = keys_of(facts, 128)
    after = cases.append_index_k(cache, 2, keys, step, implementation=implementation)
    row = facts.derive()["rows"].tolist()[2]
    assert cases.pool_bytes(after) == cases.pool_bytes(cases.write_keys(cache, 2, [-1, -1, row], keys))


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["append_index_k"])
def test_the_old_cache_stays(implementation):
    layout = cases.layout(index="fp8")
    facts = cases.batch(**RAGGED)
    cache = cases.poisoned(layout)
    before = cases.pool_bytes(cache)
    after = cases.append_index_k(
        cache, 0, keys_of(facts, 128), cases.step(facts, layout), implementation=implementation
    )
    assert cases.pool_bytes(cache) == before
    assert cases.pool_bytes(after) != before


def test_v1_and_v2_hold_the_same_bytes():
    """Both managers put each page at the same flat place, though each derives it alone."""
    facts, caches = cases.batch(**RAGGED), []
    for manager in ("v1", "v2"):
        layout = cases.layout(manager, index="fp8", key="bf16")
        step, cache = cases.step(facts, layout), cases.poisoned(layout)
        for layer in (0, 2):
            cache = cases.append_index_k(cache, layer, keys_of(facts, 128, seed=layer), step)
        caches.append(cases.pool_bytes(cache))
    assert caches[0] == caches[1]


@pytest.mark.parametrize("broken", ["v1", "v2"])
def test_a_broken_derivation_breaks_one_manager_only(broken, monkeypatch):
    """Swap the first two rows (V1) or the order of the layers (V2): only that manager's bytes change."""
    from dsa_jax import layout as layout_module

    facts = cases.batch(**RAGGED)
    if broken == "v1":
        original = layout_module.v1_pools
        monkeypatch.setattr(
            layout_module, "v1_pools", lambda layers, full, sizes: _swapped(original(layers, full, sizes))
        )
    else:
        original = layout_module.coalesce
        monkeypatch.setattr(layout_module, "coalesce", lambda *a, **k: _swapped(original(*a, **k)))
    for manager in ("v1", "v2"):
        layout = cases.layout.__wrapped__(manager, index="f32")
        if manager == broken:
            with pytest.raises(AssertionError):
                check_index_k("xla", layout, facts)
        else:
            check_index_k("xla", layout, facts)


def _swapped(pools):
    """The pools with the layer offsets of each pool reversed."""
    out = []
    for pool in pools:
        indices = [buffer.index for buffer in pool.buffers]
        buffers = tuple(replace(b, index=i) for b, i in zip(pool.buffers, reversed(indices), strict=True))
        out.append(replace(pool, buffers=buffers))
    return tuple(out)


def test_planted_wrapping_is_seen(monkeypatch):
    """With JAX's default, -1 wraps to the last page before "drop" can apply: these tests must see it."""

    def wrapping(cache, name, role, layer, rows, values):
        pages, size = cache.pages(name), cache.layout.page_size
        page = cache.page_of(role, layer, jnp.where(rows >= 0, rows // size, -1))
        return pages.at[page, rows % size].set(values, mode="drop")

    monkeypatch.setattr(xla_append, "_write", wrapping)
    monkeypatch.setattr(cases, "append_index_k", lambda *a, **k: ops.append_index_k(*map(_array, a), **k))
    with pytest.raises(AssertionError):
        check_index_k("xla", cases.layout(), cases.batch(**RAGGED))


def test_planted_wrong_layer_is_seen(monkeypatch):
    """An index map that forgets the layer's offset writes into another layer's pages."""
    monkeypatch.setattr(
        Cache,
        "page_of",
        lambda self, role, layer, slot: jnp.where(slot >= 0, slot * self.layout.scale(role), -1),
    )
    monkeypatch.setattr(cases, "append_index_k", lambda *a, **k: ops.append_index_k(*map(_array, a), **k))
    with pytest.raises(AssertionError):
        check_index_k("xla", cases.layout(), cases.batch(**RAGGED))


def _array(value):
    return jnp.asarray(value) if isinstance(value, np.ndarray) else value


# --- quantize_index_k ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["quantize_index_k"])
@pytest.mark.parametrize("rule", ["ue8m0", "fp32"])
def test_quantize_fp8_bytes(implementation, rule):
    keys = keys_of(cases.batch(decodes=[(1, 1)] * 9), 128) * np.float32(10.0) ** np.arange(-6, 3)[
        :, None
    ].astype(np.float32)
    codes, scale = ops.quantize_index_k(
        jnp.asarray(keys), "fp8", scale_rule=rule, implementation=implementation
    )
    expected_codes, expected_scale = quantize_fp8(keys, rule)
    assert codes.dtype == jnp.uint8
    assert scale is not None
    np.testing.assert_array_equal(scale, expected_scale)
    np.testing.assert_array_equal(codes, expected_codes)


def test_quantize_f32_keeps_the_values():
    keys = jnp.asarray([[1.5, -2.0]], jnp.bfloat16)
    data, scale = ops.quantize_index_k(keys, "f32")
    assert data.dtype == jnp.float32
    assert data.tolist() == [[1.5, -2.0]]
    assert scale is None


# --- errors --------------------------------------------------------------------------------------------------------


def test_shared_layer_is_refused_by_number():
    layout = cases.layout()
    facts = cases.batch(decodes=[(1, 1)])
    with pytest.raises(
        ValueError, match=r"layer 1 .*shared-indexer layer.*use the selection of the nearest full layer"
    ):
        ops.append_index_k(Cache.create(layout, 2), 1, jnp.zeros((1, 8)), cases.step(facts, layout))
    with pytest.raises(ValueError, match=r"layer 3 is out of range.*pass the local number"):
        ops.append_latent(
            Cache.create(layout, 2),
            3,
            jnp.zeros((1, cases.LATENT)),
            jnp.zeros((1, cases.ROPE)),
            cases.step(facts, layout),
        )


def test_all_problems_in_one_error():
    layout, other = cases.layout(), cases.layout("v1", page_size=16)
    step = cases.step(cases.batch(decodes=[(1, 1), (1, 1)]), layout)
    with pytest.raises(
        ValueError, match=r"(?s)append_latent: latent has shape \[3, 9\].*k_rope has dtype int32.*layout"
    ):
        ops.append_latent(
            Cache.create(other, 2), 0, jnp.zeros((3, 9)), jnp.zeros((2, cases.ROPE), jnp.int32), step
        )
    with pytest.raises(
        ValueError, match=r"key_scale is given, but key_form 'f32' has no per-tensor scale: leave it out"
    ):
        ops.append_latent(
            Cache.create(layout, 2),
            0,
            jnp.zeros((2, cases.LATENT)),
            jnp.zeros((2, cases.ROPE)),
            step,
            key_scale=1.0,
        )
    with pytest.raises(
        ValueError, match=r"k has shape \[2, 128\], wanted \[N, D\] = \[2, 8\].*Pass one float key per token"
    ):
        ops.append_index_k(Cache.create(layout, 2), 0, jnp.zeros((2, 128)), step)
    with pytest.raises(ValueError, match=r"k has dtype int32, wanted float"):
        ops.append_index_k(Cache.create(layout, 2), 0, jnp.zeros((2, 8), jnp.int32), step)


def test_quantize_errors():
    with pytest.raises(ValueError, match=r"form is 'fp9', wanted 'fp8' or 'f32'.*Pass float keys"):
        ops.quantize_index_k(jnp.zeros((1, 128)), "fp9")
    with pytest.raises(ValueError, match=r"scale_rule is 'up', wanted 'ue8m0' or 'fp32'.*known rules"):
        ops.quantize_index_k(jnp.zeros((1, 128)), "fp8", scale_rule="up")  # pyright: ignore[reportArgumentType]


def test_no_indexer_at_all():
    """A rank of shared layers has no index pool, and says so."""
    layout = cases.layout(full=(False, False))
    cache = Cache.create(layout, 2)
    assert cache.index_key is None
    assert layout.scale(Role.INDEX_KEY) == 0
    step = cases.derive(
        cases.StepMetadata.create(layout, Bucket(decode_requests=1, table_width=1), [[0]], [1], [1])
    )
    with pytest.raises(ValueError, match="shared-indexer layer"):
        ops.append_index_k(cache, 0, jnp.zeros((1, 8)), step)
