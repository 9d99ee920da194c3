"""Arguments of the wrong kind: an error names the operation, the argument, what came, what is wanted and the fix."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from dsa_jax import cache as cache_module
from dsa_jax import codec, ops, sizing
from dsa_jax.cache import Cache, PoolTooLarge
from dsa_jax.config import preset
from dsa_jax.draft import advance, draft_metadata, rewind
from dsa_jax.layout import CacheLayout, Role
from dsa_jax.metadata import Bucket, StepMetadata
from dsa_jax.pages import PagePoolState, fork, free, grow, shrink
from dsa_jax.planning import plan
from dsa_jax.transfer import copy_pages, copy_tokens
from layout_cases import small_config

INDEXED = ("append_index_k", "gather_index_k", "paged_mqa_logits", "select_tokens", "select_rows")
STEPPED = (*INDEXED, "append_latent", "to_rows")
CACHED = (*INDEXED, "append_latent", "sparse_mla")
GLM = preset("glm-5.2")


@functools.cache
def setting():
    """A tiny cache whose layer 1 shares, and the metadata of two decode requests."""
    layout = cases.layout()
    facts = cases.batch(decodes=[(6, 1), (3, 1)], gathered=0)
    return Cache.create(layout, cases.SLOTS), cases.metadata(facts, layout)


def call(name: str, cache, layer, step, k=2):
    """An op with right arguments of all other kinds; their values are of no importance."""
    keys, q, weights = jnp.zeros((2, 8)), jnp.zeros((2, 4, 8)), jnp.zeros((2, 4))
    rows = jnp.zeros((2, 3), jnp.int32)
    arguments = {
        "append_index_k": (cache, layer, keys, step),
        "append_latent": (cache, layer, jnp.zeros((2, cases.LATENT)), jnp.zeros((2, cases.ROPE)), step),
        "gather_index_k": (cache, layer, step),
        "paged_mqa_logits": (q, weights, cache, layer, step),
        "select_tokens": (q, weights, cache, layer, step, k),
        "select_rows": (q, weights, cache, layer, step, k),
        "to_rows": (rows, step),
        "sparse_mla": (jnp.zeros((2, 2, cases.LATENT + cases.ROPE)), cache, layer, rows, 1.0),
    }
    return getattr(ops, name)(*arguments[name])


def refused(*words: str):
    """A ValueError whose message has these words in this order."""
    return pytest.raises(ValueError, match=".*".join(map(re.escape, words)))


@pytest.mark.parametrize("name", STEPPED)
def test_the_metadata_is_not_the_step(name):
    cache, meta = setting()
    with refused(f"{name}: step is the StepMetadata itself, wanted the Step", "Pass meta.derive()"):
        call(name, cache, 0, meta)
    with refused(f"{name}: step is None, wanted a Step. Pass meta.derive()"):
        call(name, cache, 0, None)


@pytest.mark.parametrize("name", CACHED)
def test_what_is_no_cache(name):
    cache, meta = setting()
    for wrong, words in ((cache.layout, "a CacheLayout"), (None, "None"), (cache.key, "float32[69, 4, 12]")):
        with refused(f"{name}: cache is {words}, wanted a Cache. Pass what Cache.create"):
            call(name, wrong, 0, cases.derive(meta))


LAYERS = [3, -1, jnp.int32(3), jnp.int32(-1), np.int64(3), np.array(3), np.array(-1, np.int8)]


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("layer", LAYERS, ids=map(repr, LAYERS))
def test_known_layers_out_of_range(name, layer):
    """Of an array, too, when it has a value: it must not read as if that layer owned nothing."""
    cache, meta = setting()
    with refused(
        f"{name}: layer {int(layer)} is out of range, this rank has the local layers 0 .. 2", "pass"
    ):
        call(name, cache, layer, cases.derive(meta))


@pytest.mark.parametrize("name", INDEXED)
@pytest.mark.parametrize("layer", [1, np.int32(1), jnp.int32(1)], ids=["int", "numpy", "jax"])
def test_shared_layers_are_refused_in_the_name_of_the_op(name, layer):
    cache, meta = setting()
    with refused(f"{name}: local layer 1 (global 1) is a shared-indexer layer", "use the selection of the"):
        call(name, cache, layer, cases.derive(meta))


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("layer", [True, 1.0, "0", None, jnp.float32(0), jnp.zeros(2, jnp.int32)], ids=repr)
def test_what_is_no_layer_number(name, layer):
    cache, meta = setting()
    with refused(f"{name}: layer is ", "int32"):
        call(name, cache, layer, cases.derive(meta))


def test_traced_layers_are_not_known():
    """Traced, a layer that does not exist still reads nothing; an array with a value of an existing one works."""
    cache, meta = setting()
    slots, step = jnp.array([2], jnp.int32), cases.derive(meta)
    assert jax.jit(lambda layer: cache.page_of(Role.KEY, layer, slots))(jnp.int32(7)).tolist() == [-1]
    assert cache.page_of(Role.KEY, jnp.int32(1), slots).tolist() == [2 * 3 + 1]
    with refused("Cache.page_of: layer 7 is out of range"):
        cache.page_of(Role.KEY, jnp.int32(7), slots)
    with refused("Cache.layer_offset: local layer 1", "shared-indexer layer"):
        cache.layer_offset(Role.INDEX_KEY, np.int32(1))
    with refused("Cache.page_of: role is 'keys', wanted one of key, "):
        cache.page_of("keys", 0, slots)
    after = ops.append_index_k(cache, jnp.int32(2), jnp.ones((2, 8)), step)
    same = ops.append_index_k(cache, 2, jnp.ones((2, 8)), step)
    assert cases.pool_bytes(after) == cases.pool_bytes(same) != cases.pool_bytes(cache)


@pytest.mark.parametrize("k", [True, 2.0, 0, None, "2"])
def test_k(k):
    cache, meta = setting()
    for name in ("select_tokens", "select_rows"):
        with refused(f"{name}: k is {k!r}, wanted a Python int of at least 1"):
            call(name, cache, 0, cases.derive(meta), k)
    with refused(f"topk_indices: k is {k!r}, wanted a Python int"):
        ops.topk_indices(jnp.zeros((1, 4)), jnp.ones(1, jnp.int32), k)


def test_lists_are_no_arrays():
    cache, meta = setting()
    step = cases.derive(meta)
    with refused("append_index_k: k is [[0.0]], wanted an array [N, D]. Pass one float key"):
        ops.append_index_k(cache, 0, [[0.0]], step)
    with refused("topk_indices: logits is [[1.0]], wanted an array", "limits is [1], wanted an array [N]"):
        ops.topk_indices([[1.0]], [1], 1)
    with refused("paged_mqa_logits: ", "q is [1], wanted an array [N, H, D]", "weights is 'a'"):
        ops.paged_mqa_logits([1], "a", cache, 0, step)
    with refused("sparse_mla: q is None, wanted an array", "rows is -1, wanted an array [N, K]"):
        ops.sparse_mla(None, cache, 0, -1, 1.0)
    with refused("mqa_logits: k is a tuple of 3, wanted floats or the pair"):
        ops.mqa_logits(jnp.zeros((1, 2, 8)), (1, 2, 3), jnp.zeros((1, 2)), [0], [1])
    with refused("to_rows: local is [[0]], wanted an array [N, K]"):
        ops.to_rows([[0]], step)
    for scale in ("1", True, math.nan, [1.0]):
        with refused(f"sparse_mla: softmax_scale is {scale!r}, wanted a positive finite number"):
            ops.sparse_mla(jnp.zeros((2, 2, 12)), cache, 0, jnp.zeros((2, 3), jnp.int32), scale)


def test_descriptions_are_no_arrays():
    """Nor are objects that look like an array."""
    cache, meta = setting()
    step = cases.derive(meta)
    with refused(
        "append_index_k: k is a ShapeDtypeStruct, which is no JAX or NumPy array, wanted an array [N, D]"
    ):
        ops.append_index_k(cache, 0, jax.ShapeDtypeStruct((2, 8), jnp.float32), step)
    with refused("append_index_k: k is a _Foreign, which is no JAX or NumPy array, wanted an array [N, D]"):
        ops.append_index_k(cache, 0, _Foreign(), step)
    with refused("append_index_k: cache is abstract, it has shapes and no arrays"):
        ops.append_index_k(Cache.abstract(cache.layout, 4), 0, jnp.zeros((2, 8)), step)
    with refused("sparse_mla: softmax_scale has shape [2], wanted a scalar"):
        rows = jnp.zeros((2, 3), jnp.int32)
        ops.sparse_mla(jnp.zeros((2, 2, cases.LATENT + cases.ROPE)), cache, 0, rows, jnp.ones(2))


class _Foreign:
    """As another library's array of the right shape."""

    shape, dtype = (2, 8), "torch.float32"


@pytest.mark.parametrize("name", CACHED)
def test_a_cache_that_was_donated(name):
    _, meta = setting()
    gone = Cache.create(cases.layout(), cases.SLOTS)
    next(iter(gone.pools().values())).delete()
    with refused(
        f"{name}: cache has deleted arrays: it was donated to an earlier call. Go on with the cache that"
    ):
        call(name, gone, 0, cases.derive(meta))


def test_names_of_forms_rules_and_implementations():
    keys = jnp.ones((2, 64))
    with refused("quantize_index_k: k has D = 64, wanted 128. Pass"):
        ops.quantize_index_k(keys, "fp4")
    with refused(
        "quantize_index_k: k has D = 0, wanted at least 1; scale_rule is ['fp32'], wanted 'ue8m0' or"
    ):
        ops.quantize_index_k(keys[:, :0], "fp8", scale_rule=["fp32"])
    with refused("quantize_index_k: form is float32[3], wanted 'fp8' or"):
        ops.quantize_index_k(keys, jnp.ones(3))
    with refused("quantize_index_k: implementation is array(['xla']", "wanted None, one of"):
        ops.quantize_index_k(keys, "fp8", implementation=np.array(["xla"]))


def test_a_query_of_fp4_has_its_scales():
    codes, weights, window = jnp.zeros((1, 2, 64), jnp.uint8), jnp.ones((1, 2)), jnp.zeros(1, jnp.int32)
    keys = jnp.zeros((3, 64), jnp.uint8), jnp.zeros(3, jnp.int32)
    with refused("mqa_logits: scales of q is None, wanted an array [N, H]"):
        ops.mqa_logits((codes, None), keys, weights, window, window + 3)


# --- layouts and caches --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"page_size": 64.0}, "page_size=64.0: a page holds a power of two from 1 to 256 tokens; use 64"),
        ({"page_size": True}, "page_size=True: a page holds"),
        ({"page_size": "64"}, "page_size='64': a page holds"),
        ({"hadamard": "no"}, "hadamard='no' is neither True, False nor None"),
        ({"hadamard": 1}, "hadamard=1 is neither True, False nor None"),
        ({"manager": ["v2"]}, "manager=['v2'] is unknown, choose one of v1, v2"),
        ({"key_form": None}, "key_form=None is unknown"),
        ({"layers": 1}, "layers is 1, a rank needs at least one layer; pass global ids"),
        ({"layers": "01"}, "layers is '01', a rank needs"),
        ({"layers": ()}, "layers is empty, a rank needs at least one layer"),
        ({"layers": (0, 1.0, True)}, "layers holds 1.0, True, wanted whole numbers"),
    ],
)
def test_layouts(changes, words):
    with refused("CacheLayout.create: ", words):
        CacheLayout.create(small_config(), **changes)


def test_hadamard_needs_a_power_of_two():
    config = small_config(index_head_dim=96, index_hadamard=False)
    with refused("hadamard=True needs a power of two as index_head_dim, got 96; set hadamard=False"):
        CacheLayout.create(config, index_form="f32", hadamard=True)
    assert not CacheLayout.create(config, index_form="f32").hadamard
    # Layers that share have no keys to rotate.
    assert CacheLayout.create(config, index_form="f32", hadamard=True, layers=(1,)).hadamard


def test_numpy_integers_are_whole_numbers():
    layout = CacheLayout.create(
        small_config(), page_size=np.int32(64), layers=np.arange(2), hadamard=np.False_
    )
    assert layout == CacheLayout.create(small_config(), layers=(0, 1), hadamard=False)
    assert layout.to_json(np.int64(3)) == layout.to_json(3)


@pytest.mark.parametrize("slots", [0, 1.5, True, "3", None])
def test_slots_of_a_description(slots):
    layout = cases.layout()
    with refused(f"CacheLayout.to_dict: slots={slots!r} must be a whole number of at least 1"):
        layout.to_dict(slots)
    with refused(f"typed_arrays: slots={slots!r} must be a whole number"):
        layout.arrays(slots)


def test_places():
    layout = cases.layout()
    for layer in (1.0, True, "0", None):
        with refused(f"CacheLayout.buffer: layer is {layer!r}, wanted the local number of a layer"):
            layout.buffer(layer, Role.KEY)
    with refused("CacheLayout.page_index: role is 'latent', wanted one of key, "):
        layout.page_index(0, "latent")
    with refused("CacheLayout.page_index: local layer 1 (global 1) is a shared-indexer layer"):
        layout.page_index(1, Role.INDEX_KEY)


@pytest.mark.parametrize("config", ["glm-5.2", None, {"num_hidden_layers": 2}, CacheLayout])
def test_what_is_no_configuration(config):
    for operation, run in (
        ("CacheLayout.create", lambda: CacheLayout.create(config)),
        ("static_cost", lambda: sizing.static_cost(config)),
        ("plan", lambda: plan(config, gpu_memory=10**9)),
    ):
        with refused(f"{operation}: config is ", "wanted a DSAConfig. Pass config.preset("):
            run()


def test_what_is_no_layout():
    for make in (Cache.create, Cache.abstract):
        with refused(
            f"{make.__qualname__}: layout is a DSAConfig, wanted a CacheLayout. Pass CacheLayout.create"
        ):
            make(GLM, 4)
    with refused("layout_cost: layout is a DSAConfig, wanted a CacheLayout"):
        sizing.layout_cost(GLM)
    for wrong, came in ((GLM, "a DSAConfig"), ([GLM, None], "[a DSAConfig, None]"), ([], "[]"), (3, "3")):
        with refused(f"quota_for_tokens: layouts is {came}, wanted a CacheLayout or a list of them"):
            sizing.quota_for_tokens(wrong, 5)


def test_a_pool_that_has_no_room(monkeypatch):
    """The error says how many bytes were asked for; nothing is tried where the machine has less."""
    layout = cases.layout()
    with refused("slots is 100000000, which takes 83,200,000,000 bytes (832 a slot): this machine has less"):
        monkeypatch.setattr(cache_module, "_host_memory", lambda: 10**10)
        Cache.create(layout, 10**8)
    assert jax.eval_shape(lambda: Cache.create(layout, 10**8)).slots == 10**8  # a trace allocates nothing

    def exhausted(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

    monkeypatch.setattr(cache_module.jnp, "zeros", exhausted)
    with pytest.raises(
        PoolTooLarge, match=r"2,496 bytes \(832 a slot\): the device has no room.*fewer slots"
    ):
        Cache.create(layout, 3)


@pytest.mark.parametrize("layers", [[-1], [0, 0], [78.0], [200], "01", 3, ()])
def test_static_cost_takes_the_layers_that_layouts_take(layers):
    """No layer is counted from the end, which would be the prediction layer."""
    with refused("static_cost: layers "):
        sizing.static_cost(GLM, layers=layers)
    with refused("CacheLayout.create: layers "):
        CacheLayout.create(GLM, layers=layers)


@pytest.mark.parametrize("number", [-1, 1.5, True, math.nan, "2"])
def test_static_cost_takes_numbers_of_layers(number):
    with refused(f"static_cost: num_layers={number!r} must "):
        sizing.static_cost(GLM, num_layers=number)


@pytest.mark.parametrize("number", [1.5, True, math.nan, math.inf, "2", None])
def test_sizes_are_whole_numbers(number):
    layout = cases.layout()
    for name, run in (
        ("tokens", lambda: sizing.quota_for_tokens(layout, number)),
        ("quota_bytes", lambda: sizing.tokens_for_quota(layout, number)),
        ("quota_bytes", lambda: sizing.slots_for_quota(layout, number)),
        ("slots", lambda: sizing.quota_for_slots(layout, number)),
        ("grain_bytes", lambda: sizing.quota_for_slots(layout, 1, grain_bytes=number)),
        ("max_len", lambda: sizing.pages_per_seq(number, 4)),
        ("keys", lambda: sizing.rows_per_chunk(4, number)),
        ("gpu_memory", lambda: plan(GLM, gpu_memory=number)),
        ("batch", lambda: plan(GLM, gpu_memory=10**12, batch=number)),
    ):
        with refused(f"{name}={number!r}", "must be a whole number"):
            run()


def test_plans_take_bytes_as_floats():
    assert plan(GLM, gpu_memory=1e12, context=64) == plan(GLM, gpu_memory=10**12, context=64)
    with refused("gpu_memory=1e+300 must be a whole number of bytes, at most 9,223,372,036,854,775,807"):
        plan(GLM, gpu_memory=1e300)


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 400 + ".5GB", "9223372036854775808", "8388608TiB"])
def test_absurd_sizes(text):
    with refused("parse_bytes: '", "is more than 9,223,372,036,854,775,807 bytes"):
        sizing.parse_bytes(text)


def test_sizes_of_any_other_kind():
    for wrong in (5, None, b"5GB"):
        with refused(f"parse_bytes: {wrong!r} is no size; write for example 80GB"):
            sizing.parse_bytes(wrong)
    assert sizing.parse_bytes("8388607TiB") == 8388607 * 2**40


def test_tables_of_v1():
    from dsa_jax.layout_v1 import decode_v1_table, encode_v1_table

    for table in ([1.5], [[1], [2, 3]], None, "table"):
        with refused("encode_v1_table: table is ", "wanted integers, -1 for none"):
            encode_v1_table(table, 2)
        with refused("decode_v1_table: encoded is ", "wanted integers"):
            decode_v1_table(table, 2, 4)
    with refused("num_layers=2.0 must be at least 1 and whole"):
        encode_v1_table([1], 2.0)
    with refused("slots=nan must be at least 1 and whole"):
        decode_v1_table([1], 2, math.nan)


# --- transfer, codec, pages, metadata --------------------------------------------------------------------------------


def test_copies():
    cache, one = setting()[0], jnp.zeros(1, jnp.int32)
    with refused("copy_tokens: cache is None, wanted a Cache. Pass what Cache.create"):
        copy_tokens(None, one, one)
    with refused("copy_pages: source is a CacheLayout, wanted a Cache"):
        copy_pages(cache.layout, cache, one, one)
    with refused("copy_pages: target is float32[3], wanted a Cache"):
        copy_pages(cache, jnp.zeros(3), one, one)
    with refused("copy_tokens: source_rows is [0] and target_rows int32[1]; wanted int32[n] both"):
        copy_tokens(cache, [0], one)


def test_packed_pages():
    cache = setting()[0]
    with refused("pack_pages: cache is a CacheLayout, wanted a Cache"):
        codec.pack_pages(cache.layout, Role.KEY)
    with refused("pack_pages: role is 'latent', wanted one of key, "):
        codec.pack_pages(cache, "latent")
    with refused("unpack_pages: packed is b''; wanted uint8["):
        codec.unpack_pages(cache, Role.KEY, b"")
    with refused("pack_index_pages: got data [1] and scale None; wanted"):
        codec.pack_index_pages([1], None)
    with refused("unpack_index_pages: packed is uint8[1, 528] with page_size 4.0; wanted"):
        codec.unpack_index_pages(jnp.zeros((1, 528), jnp.uint8), 4.0)


@pytest.mark.parametrize("tokens", [math.nan, math.inf, 1.5, True, "3", None])
def test_pages_are_handed_out_for_whole_numbers(tokens):
    state, _ = grow(PagePoolState.create(4, 2), "a", 3)
    with refused(f"grow: tokens is {tokens!r}; wanted at least 0, a whole number"):
        grow(state, "a", tokens)
    with refused(f"fork: tokens is {tokens!r}; wanted a whole number"):
        fork(state, "a", "b", tokens)
    with refused(f"shrink: tokens is {tokens!r}; wanted a whole number"):
        shrink(state, "a", tokens)
    with refused(f"PagePoolState.create: slots is 4 and page_size {tokens!r}; wanted"):
        PagePoolState.create(4, tokens)
    with refused("free: state is None, wanted a PagePoolState"):
        free(None, "a")


def test_metadata():
    layout, bucket = cases.layout(), Bucket(decode_requests=1, table_width=2)
    create = StepMetadata.create
    with refused("StepMetadata.create: layout is a DSAConfig, wanted a CacheLayout. Pass CacheLayout.create"):
        create(GLM, bucket, [[0]], [1], [1])
    with refused("StepMetadata.create: bucket is None, wanted a Bucket. Pass Bucket("):
        create(layout, None, [[0]], [1], [1])
    for width in (2.0, True, math.nan, "2"):
        with refused(f"Bucket: table_width is {width!r}; wanted a whole number"):
            create(layout, Bucket(decode_requests=1, table_width=width), [[0]], [1], [1])
    for tables, came in ((None, "None"), (3, "3"), (np.zeros(2, np.int32), "int32[2]")):
        with refused(f"StepMetadata.create: page_tables is {came}; wanted one entry for each request"):
            create(layout, bucket, tables, [1], [1])
    with refused("StepMetadata.create: page table 0 is 7; wanted the raw slots of a request"):
        create(layout, bucket, [7], [1], [1])
    with refused("StepMetadata.create: kv_lens is 1; wanted one entry for each request"):
        create(layout, bucket, [[0]], 1, [1])
    facts = dict(page_table=[[0, 1]], kv_lens=[1], new_lens=jnp.ones(1, jnp.int32))
    with refused("StepMetadata: page_table is [[0, 1]], wanted int32[1, 2]; kv_lens is [1], wanted int32[1]"):
        StepMetadata(**facts, layout=layout, bucket=bucket).derive()


@pytest.mark.parametrize(
    "lens", [jnp.zeros(3, jnp.int32), jnp.zeros((2, 1), jnp.int32), jnp.zeros(2), [1, 1], None, True]
)
def test_lengths_of_each_request(lens):
    meta = setting()[1]
    for operation, name, run in (("rewind", "kept", rewind), ("advance", "new_lens", advance)):
        with refused(
            f"{operation}: {name} is ", "wanted int32[2], none negative. Give the tokens of each request"
        ):
            run(meta, lens)
        with refused(f"{operation}: meta is a Step, wanted a StepMetadata"):
            run(cases.derive(meta), jnp.zeros(2, jnp.int32))


def test_one_length_for_all_requests():
    meta = setting()[1]
    assert (
        rewind(meta, 0).kv_lens.tolist() == rewind(meta, jnp.zeros(2, jnp.int32)).kv_lens.tolist() == [5, 2]
    )


def test_draft_tables():
    cache, meta = setting()
    with refused("draft_metadata: target is a Cache, wanted a StepMetadata"):
        draft_metadata(cache, cache.layout, meta.page_table)
    with refused("draft_metadata: draft_layout is None, wanted a CacheLayout"):
        draft_metadata(meta, None, meta.page_table)
    with refused(
        "draft_metadata: draft_page_table is [[0], [1]], wanted int32[2, W_draft]; new_lens is [1, 1]"
    ):
        draft_metadata(meta, cache.layout, [[0], [1]], [1, 1])
