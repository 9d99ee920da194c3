"""Writing and gathering in every storage form, through the ops: all bytes of all pools, under each implementation.

Every slot of the pool belongs to a request, so that the first and the last page of each layer are written; all other
bytes are NaN in every form, and must still be afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import form_cases
import numpy_forms
from compile_without_gpu import compile_case
from dsa_jax import ops
from dsa_jax.forms import INDEX_FORMS, KEY_FORMS
from dsa_jax.layout import CacheLayout
from dsa_jax.ops import dispatch, gpu
from numpy_model import row_of

CASES = [
    # manager, key form, index form, page size, tie rule, key_scale, dtype, poison
    ("v2", "fp8", "fp4", 4, "deepgemm", 0.37, jnp.float32, 0xFF),
    ("v1", "nvfp4", "fp4", 16, "even", 0.0123, jnp.bfloat16, 0x7F),
    ("v2", "fp8_ds_mla", "fp4", 64, "even", None, jnp.bfloat16, 0xFF),
    ("v1", "fp8_ds_mla", "fp8", 64, "deepgemm", None, jnp.float32, 0x7F),
    ("v2", "nvfp4", "fp8", 1, "even", None, jnp.float16, 0xFF),
    ("v1", "fp8", "f32", 128, "deepgemm", None, jnp.bfloat16, 0xFF),
    ("v2", "bf16", "f32", 32, "even", None, jnp.float32, 0x7F),
    ("v1", "f32", "fp8", 2, "even", None, jnp.float16, 0xFF),
]
"""Pairs of forms, managers, page sizes, rules and dtypes. The layers are (full, shared, full)."""


def layout_of(manager, key, index, page_size, tie_rule, full=cases.FULL) -> CacheLayout:
    """Latents of powers of two, as kernels want them."""
    latent = 512 if key == "fp8_ds_mla" else 64
    model = dataclasses.replace(cases.config(full, 128), kv_lora_rank=latent, qk_rope_head_dim=64)
    forms = dict(key_form=key, index_form=index, tie_rule=tie_rule)
    return CacheLayout.create(model, manager=manager, page_size=page_size, **forms)


def batch_of(page_size: int):
    """A prefix, a fresh context, an empty one; decode requests with three tokens and with one; padding; R = 7."""
    requests = dict(contexts=[(7, 3), (5, 5), (0, 0)], decodes=[(9, 1), (6, 3), (1, 1)])
    lengths = [length for kind in requests.values() for length, _ in kind]
    slots = sum(-(-length // page_size) for length in lengths)
    return cases.batch(
        **requests, next_n=3, padding=2, spare_requests=1, spare_columns=1, page_size=page_size, slots=slots,
        gathered=15,
    ), slots  # fmt: skip


def check_bytes(implementation, manager, key, index, page_size, tie_rule, key_scale, dtype, poison) -> None:
    """Append to all layers, then compare every byte of every pool with the NumPy model's."""
    layout = layout_of(manager, key, index, page_size, tie_rule)
    facts, slots = batch_of(page_size)
    step, rows = cases.step(facts, layout), facts.derive()["rows"].tolist()
    cache = expected = cases.poisoned(layout, slots, poison)
    rng = np.random.default_rng(page_size)
    for layer, full in enumerate(cases.FULL):
        values = jnp.asarray(rng.normal(size=(len(rows), layout.latent_dim + 64)) * 4, dtype)
        latent, rope = values[:, :-64], values[:, -64:]
        cache = form_cases.append_latent(
            cache, layer, latent, rope, step, key_scale=key_scale, implementation=implementation
        )
        floats = (np.asarray(x.astype(jnp.float32)) for x in (latent, rope))
        entry = numpy_forms.latent_entries(*floats, key, key_scale or 1.0)
        expected = form_cases.write_entry(expected, layer, rows, entry)
        if full:
            keys = jnp.asarray(np.round(rng.normal(size=(len(rows), 128)) * 4) / 8, dtype)
            cache = cases.append_index_k(cache, layer, keys, step, implementation=implementation)
            expected = form_cases.write_keys(expected, layer, rows, np.asarray(keys.astype(jnp.float32)))
    assert cases.pool_bytes(cache) == cases.pool_bytes(expected)
    pages = np.asarray(cache.pages("key"))
    held = {row // page_size for row in rows if row >= 0}
    for slot in range(slots):  # each slot's first and last layer, the pool's first and last page among them
        for layer in (0, len(cases.FULL) - 1):
            page = slot * 3 + layout.page_index(layer, "key").layer_offset
            assert (pages[page].tobytes() == bytes([poison]) * pages[page].nbytes) == (slot not in held)


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["append_latent"])
@pytest.mark.parametrize(
    ("manager", "key", "index", "page_size", "tie_rule", "key_scale", "dtype", "poison"), CASES
)
def test_bytes(implementation, manager, key, index, page_size, tie_rule, key_scale, dtype, poison):
    check_bytes(implementation, manager, key, index, page_size, tie_rule, key_scale, dtype, poison)


@pytest.mark.full
@pytest.mark.parametrize("implementation", ["triton"])
@pytest.mark.parametrize("manager", ["v1", "v2"])
@pytest.mark.parametrize("key", KEY_FORMS)
@pytest.mark.parametrize("index", INDEX_FORMS)
@pytest.mark.parametrize("page_size", [1, 8, 256])
def test_every_combination(implementation, manager, key, index, page_size):
    page_size = 64 if key == "fp8_ds_mla" else page_size
    key_scale = form_cases.KEY_SCALE.get(key)
    # The model's float32 latents are as wide as float32 index keys, so that V2 makes one pool of both: no typed array.
    refused = pytest.raises(ValueError, match="coalesced into pool 0")
    with refused if (manager, key, index) == ("v2", "f32", "f32") else contextlib.nullcontext():
        check_bytes(implementation, manager, key, index, page_size, "even", key_scale, jnp.bfloat16, 0xFF)


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["append_latent"])
@pytest.mark.parametrize("key", ["fp8", "nvfp4", "fp8_ds_mla"])
def test_traced_layers(implementation, key):
    """Inside a scan over layers, one of which does not exist: what Python numbers write, and nothing else."""
    layout = layout_of("v2", key, "fp4", 64, "deepgemm")
    facts, slots = batch_of(64)
    step, tokens = cases.step(facts, layout), cases.bucket(facts).tokens
    latent, rope = (jnp.asarray(x) for x in form_cases.latents(layout, tokens))
    keys = jnp.asarray(np.random.default_rng(0).normal(size=(tokens, 128)), jnp.float32)

    @jax.jit
    def scanned(cache, key_scale):
        def body(cache, layer):
            cache = ops.append_index_k(cache, layer, keys, step, implementation=implementation)
            options = {} if key == "fp8_ds_mla" else {"key_scale": key_scale}
            options["implementation"] = implementation
            return ops.append_latent(cache, layer, latent, rope, step, **options), None

        return jax.lax.scan(body, cache, jnp.arange(-1, 4, dtype=jnp.int32))[0]

    cache = expected = cases.poisoned(layout, slots)
    for layer in range(3):
        scale = None if key == "fp8_ds_mla" else 0.37
        expected = form_cases.append_latent(
            expected, layer, latent, rope, step, key_scale=scale, implementation="xla"
        )
        if cases.FULL[layer]:
            expected = cases.append_index_k(expected, layer, keys, step, implementation="xla")
    assert cases.pool_bytes(scanned(cache, jnp.float32(0.37))) == cases.pool_bytes(expected)


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS["gather_index_k"])
@pytest.mark.parametrize(
    ("manager", "index", "page_size"),
    [("v1", "fp4", 1), ("v2", "fp4", 16), ("v2", "fp8", 128), ("v1", "f32", 32), ("v2", "fp4", 64)],
)
def test_gathered(implementation, manager, index, page_size):
    """The whole history of each context, bit for bit, from a pool of NaN bytes; zeros for rows past the pool and padding."""
    layout = layout_of(manager, "bf16", index, page_size, "even")
    facts, slots = batch_of(page_size)
    rng, cache = np.random.default_rng(1), cases.poisoned(layout, slots)
    table, contexts = facts.held_table(), range(3)
    rows = [row_of(table, r, p, page_size) for r in contexts for p in range(facts.kv_lens[r])]
    wanted = {}
    for layer in (0, 2):
        keys = rng.normal(size=(len(rows), 128)).astype(np.float32)
        cache = form_cases.write_keys(cache, layer, rows, keys)
        wanted[layer] = numpy_forms.index_entries(keys, index, tie_rule="even")
    step = cases.step(facts, layout)
    step = dataclasses.replace(step, gather_rows=step.gather_rows.at[13].set(slots * page_size))
    for layer, entry in wanted.items():
        data, scale = cases.gather_index_k(cache, layer, step, implementation=implementation)
        assert data.shape[0] == 15
        np.testing.assert_array_equal(data[:12], entry["index_key"])
        assert not np.asarray(data[12:]).any()
        if index != "f32":
            assert scale.dtype == entry["index_scale"].dtype
            np.testing.assert_array_equal(scale[:12], entry["index_scale"])
            assert not np.asarray(scale[12:]).any()


def test_widths_that_the_kernels_refuse():
    """24 elements are no power of two, and groups of NVFP4 must fill words; None takes the reference there."""
    from dsa_jax import support

    for key, least in (("fp8", 4), ("nvfp4", 64)):
        cache = cases.Cache.abstract(form_cases.layout(key=key), 2)
        [kernel] = gpu.append_latent(cache)
        assert kernel.supported is not None
        with pytest.raises(NotImplementedError, match=f"latent_dim is 24; .* powers of two from {least}"):
            kernel.supported(cases.CARD)
        assert support.chosen("append_latent", (kernel,), cases.CARD) == "xla"
    cache = cases.Cache.abstract(layout_of("v2", "nvfp4", "fp4", 64, "even"), 2)
    assert support.chosen("append_latent", gpu.append_latent(cache), cases.CARD) == "triton"
    assert support.chosen("append_index_k", gpu.append_index_k(cache), cases.CARD) == "triton"


@pytest.mark.parametrize(
    ("index", "tokens", "kernel"), [("f32", 4095, True), ("f32", 4096, False), ("fp8", 4096, True)]
)
def test_many_float32_keys_are_the_references(monkeypatch, index, tokens, kernel):
    """Nothing is encoded there, and XLA copies as fast; whoever names the kernel gets it."""
    monkeypatch.setattr(dispatch, "target_device", lambda: cases.CARD)
    layout = layout_of("v2", "bf16", index, 64, "even")
    bucket = cases.Bucket(context_requests=1, context_tokens=tokens, table_width=1)
    step = cases.StepMetadata.create(layout, bucket, [[0]], [9], [9]).derive()
    arguments = cases.Cache.abstract(layout, 2), jax.ShapeDtypeStruct((tokens, 128), jnp.bfloat16)

    def calls_triton(choice):
        append = lambda cache, k: ops.append_index_k(cache, 0, k, step, implementation=choice)
        return "pallas_triton" in str(jax.make_jaxpr(append)(*arguments))

    assert calls_triton(None) == kernel
    assert calls_triton("triton")


def compiled_ops(*, key, index, gather=False):
    """For `compile_without_gpu`: what a layer writes, and its gather, through the ops; layer 1 of three."""
    layout = layout_of("v2", key, index, 64, "even")
    bucket = cases.Bucket(context_requests=2, context_tokens=64, table_width=4, gathered_keys=128)
    meta = cases.StepMetadata.create(layout, bucket, [[0], [1]], [9, 9], [9, 9])

    def run(cache, step, k, latent, rope):
        cache = ops.append_index_k(cache, 2, k, step)
        cache = ops.append_latent(cache, 2, latent, rope, step)
        return cache, ops.gather_index_k(cache, 2, step) if gather else None

    vectors = [jax.ShapeDtypeStruct((64, n), jnp.bfloat16) for n in (128, layout.latent_dim, 64)]
    return run, [cases.Cache.abstract(layout, 64), jax.eval_shape(meta.derive), *vectors]


@pytest.mark.compile
@pytest.mark.parametrize(
    ("card", "key", "index"),
    [("sm80", "nvfp4", "fp4"), ("sm90", "fp8_ds_mla", "fp8"), ("sm100", "fp8", "f32")],
)
def test_one_launch_each(compile_environment, card, key, index):
    """Nothing but the kernels is launched: no slice of an index map, no constant of a scale."""
    case = "contracts.test_append_forms:compiled_ops"
    result = compile_case(compile_environment, card, case, key=key, index=index, gather=True)
    assert len(result.get("calls", [])) == 3, result
    assert result["fusions"] == 0, result
