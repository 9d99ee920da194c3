"""``config=`` of the ops: it reaches the kernel that is named, and is refused wherever it would mean nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import form_cases
from dsa_jax import ops
from dsa_jax.cache import Cache
from dsa_jax.ops import dispatch
from dsa_jax.pallas import (
    append_triton,
    gather_triton,
    paged_logits_fp4_mosaic,
    paged_logits_mosaic,
    paged_logits_triton,
    sparse_mla_mosaic,
    sparse_mla_triton,
    topk_mosaic,
    topk_triton,
    window_logits_mosaic,
    window_logits_triton,
)

HEADS, K, WIDTH = 32, 4, 128
TOPK = {"mosaic": topk_mosaic.Config(128, 4, 2, least=1), "triton": topk_triton.Config((256,), 2)}
SCORES = {"mosaic": paged_logits_mosaic.PagedLogitsConfig(stages=2), "triton": paged_logits_triton.Config(2)}
ATTENTION = {"mosaic": sparse_mla_mosaic.Config(prefetch=256), "triton": sparse_mla_triton.Config(splits=2)}
APPEND, GATHER = {"triton": append_triton.Config(2, 2)}, {"triton": gather_triton.Config(8, 2)}


@pytest.fixture
def card(monkeypatch):
    """Dispatch takes an H200 for granted."""
    monkeypatch.setattr(dispatch, "target_device", lambda: cases.CARD)


@pytest.fixture
def kernels(card, monkeypatch):
    """Kernels that only note which schedule they were given: ``(name, config)``."""
    seen: list = []

    def noting(module, function, result):
        def kernel(*arguments, config=None, **options):
            seen.append((module.__name__.rpartition(".")[2], config))
            return result(*arguments)

        monkeypatch.setattr(module, function, kernel)

    for module in (topk_mosaic, topk_triton):
        noting(module, "topk", lambda logits, limits, k: jnp.full((logits.shape[0], k), -1, jnp.int32))
    for module in (paged_logits_mosaic, paged_logits_triton):
        scores = lambda q, weights, keys, scales, table, limits: jnp.zeros((limits.size, table.shape[1] * 64))
        noting(module, "paged_logits_decode", scores)
    noting(
        paged_logits_mosaic,
        "paged_logits_prefill",
        lambda q, weights, keys, scales, table, owners, limits: jnp.zeros((limits.size, table.shape[1] * 64)),
    )
    for module in (window_logits_mosaic, window_logits_triton):
        noting(module, "window_logits", lambda q, weights, keys, *_: jnp.zeros((len(q), len(keys))))
    for module in (sparse_mla_mosaic, sparse_mla_triton):
        attention = lambda q, keys, rows: (jnp.zeros(q.shape[:2] + (512,)), jnp.zeros(q.shape[:2]))
        noting(module, "sparse_mla", attention)
        monkeypatch.setattr(module, "supported_on", lambda device, **_: None)
    noting(append_triton, "append_index_k", lambda k, rows, *pools: pools)
    for function in ("append_latent", "append_latent_codes"):
        noting(append_triton, function, lambda latent, k_rope, rows, pools: pools)
    noting(gather_triton, "gather_index_k", lambda rows, keys, scales: (rows, None))
    return seen


def problem(index="fp8", contexts=()):
    """Decode requests, and contexts where asked for, on pages of 64."""
    layout = cases.layout(index=index, page_size=64)
    facts = cases.batch(contexts, [(70, 1), (5, 1)], page_size=64)
    tokens = 2 + sum(new for _, new in contexts)
    width = layout.index_head_dim
    q = jnp.zeros((tokens, HEADS, width), jnp.uint8 if index == "fp8" else jnp.float32)
    cache = Cache.create(layout, cases.SLOTS)
    return q, jnp.zeros((tokens, HEADS)), cache, 0, cases.step(facts, layout)


def windows(**options):
    """One query against 64 contiguous FP8 keys."""
    q, k = jnp.zeros((1, HEADS, WIDTH), jnp.uint8), (jnp.zeros((64, WIDTH), jnp.uint8), jnp.ones(64))
    edge = jnp.array([3], jnp.int32)
    return ops.mqa_logits(q, k, jnp.zeros((1, HEADS)), edge, edge + 9, **options)


def append_keys(index="fp8", **options):
    """Five tokens of two contexts."""
    layout = cases.layout(index=index)
    step = cases.step(cases.batch([(3, 3), (9, 2)]), layout)
    k = jnp.asarray(np.random.default_rng(0).normal(size=(5, layout.index_head_dim)), jnp.float32)
    return ops.append_index_k(Cache.create(layout, cases.SLOTS), 0, k, step, **options)


def append_latents(key="bf16", **options):
    layout = form_cases.layout(key=key, page_size=64) if key == "fp8_ds_mla" else cases.layout(key=key)
    step = cases.step(cases.batch([(5, 5)], page_size=layout.page_size), layout)
    values = (jnp.asarray(x) for x in form_cases.latents(layout, 5))
    return ops.append_latent(Cache.create(layout, cases.SLOTS), 0, *values, step, **options)


def gather(index="fp8", **options):
    layout = cases.layout(index=index)
    step, cache = cases.step(cases.batch([(15, 3), (9, 2)]), layout), Cache.create(layout, cases.SLOTS)
    pages = cache.pages("index_key")
    keys = jnp.arange(pages.size, dtype=jnp.int32).reshape(pages.shape).astype(pages.dtype)
    return ops.gather_index_k(cache.replace_pages(index_key=keys), 0, step, **options)


@pytest.mark.parametrize("name", ["mosaic", "triton"])
def test_top_k(kernels, name):
    ops.topk_indices(jnp.zeros((1, 9)), jnp.ones(1, jnp.int32), K, implementation=name, config=TOPK[name])
    assert kernels == [(f"topk_{name}", TOPK[name])]


@pytest.mark.parametrize("name", ["mosaic", "triton"])
def test_scores(kernels, name):
    ops.paged_mqa_logits(*problem(), implementation=name, config=SCORES[name])
    assert kernels == [(f"paged_logits_{name}", SCORES[name])]


def test_scores_of_both_parts(kernels):
    ops.paged_mqa_logits(*problem(contexts=[(9, 3)]), implementation="mosaic", config=SCORES["mosaic"])
    assert kernels == [("paged_logits_mosaic", SCORES["mosaic"])] * 2


@pytest.mark.parametrize("name", ["mosaic", "triton"])
def test_scores_inside_windows(kernels, name):
    windows(implementation=name, config=SCORES[name])
    assert kernels == [(f"window_logits_{name}", SCORES[name])]


@pytest.mark.parametrize("op", [ops.select_tokens, ops.select_rows])
@pytest.mark.parametrize("name", ["mosaic", "triton"])
@pytest.mark.parametrize("budget", [1 << 20, 1])
def test_selection_has_one_for_each_kernel(kernels, op, name, budget):
    """Also where the rows are taken in chunks, one at a time."""
    chosen = dict(config=TOPK[name], score_config=SCORES[name], score_budget=budget)
    op(*problem(), K, implementation=name, **chosen)
    assert kernels == [(f"paged_logits_{name}", SCORES[name]), (f"topk_{name}", TOPK[name])]
    kernels.clear()
    op(*problem(), K, implementation=name, score_config=SCORES[name])
    assert [config for _, config in kernels if config] == [SCORES[name]]


@pytest.mark.parametrize("name", ["mosaic", "triton"])
def test_attention(kernels, name):
    cache = Cache.create(cases.layout(key="bf16", page_size=64), cases.SLOTS)
    q = jnp.zeros((2, 16, cases.LATENT + cases.ROPE), jnp.bfloat16)
    rows = jnp.zeros((2, 5), jnp.int32)
    ops.sparse_mla(q, cache, 0, rows, 0.5, implementation=name, config=ATTENTION[name])
    assert kernels == [(f"sparse_mla_{name}", ATTENTION[name])]


@pytest.mark.parametrize("key", ["f32", "fp8_ds_mla"])
def test_appends_and_gathers(kernels, key):
    """Through either kernel of latents, of floats and of codes."""
    append_keys(implementation="triton", config=APPEND["triton"])
    append_latents(key, implementation="triton", config=APPEND["triton"])
    gather(implementation="triton", config=GATHER["triton"])
    append = ("append_triton", APPEND["triton"])
    assert kernels == [append, append, ("gather_triton", GATHER["triton"])]


@pytest.mark.parametrize(
    ("call", "config", "grid"),
    [(append_keys, APPEND, (3, 1)), (append_latents, APPEND, (3, 1)), (gather, GATHER, (4,))],
)
def test_blocks_of_appends_and_gathers(card, call, config, grid):
    """Five tokens in blocks of two are three programs, 26 rows in blocks of eight are four; the results stay."""
    own = lambda: call("f32", implementation="triton", config=config["triton"])
    text = str(jax.make_jaxpr(own)())
    assert text.count(f"GridMapping(grid={grid}") == 1, text
    assert text.count("num_warps=2,") == 1, text
    results = (jax.tree.leaves(jax.jit(f)()) for f in (own, lambda: call("f32", implementation="xla")))
    for got, want in zip(*results, strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_the_kernel_itself_follows(card):
    """Spans of 256 columns instead of one tile: the same choice from two launches, in the interpreter."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 600)), jnp.float32)
    limits = jnp.array([600, 300], jnp.int32)
    config = topk_triton.Config((256,), 1, 256)
    got = ops.topk_indices(logits, limits, K, implementation="triton", config=config)
    want = [np.sort(np.argsort(-np.asarray(row)[:n])[:K]).tolist() for row, n in zip(logits, (600, 300))]
    assert got.tolist() == want


# --- refusals ------------------------------------------------------------------------------------------------------


def attention(**options):
    cache = Cache.create(cases.layout(key="bf16", page_size=64), cases.SLOTS)
    q = jnp.zeros((1, 16, cases.LATENT + cases.ROPE), jnp.bfloat16)
    return ops.sparse_mla(q, cache, 0, jnp.zeros((1, 5), jnp.int32), 0.5, **options)


CALLS = {
    "topk_indices": (lambda **o: ops.topk_indices(jnp.zeros((1, 9)), jnp.ones(1, jnp.int32), K, **o), TOPK),
    "paged_mqa_logits": (lambda **o: ops.paged_mqa_logits(*problem(), **o), SCORES),
    "mqa_logits": (windows, SCORES),
    "select_tokens": (lambda **o: ops.select_tokens(*problem(), K, **o), TOPK),
    "select_rows": (lambda **o: ops.select_rows(*problem(), K, **o), TOPK),
    "sparse_mla": (attention, ATTENTION),
    "append_index_k": (append_keys, APPEND),
    "append_latent": (append_latents, APPEND),
    "gather_index_k": (gather, GATHER),
}


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("implementation", [None, ("mosaic", "triton"), ("triton", "xla")])
def test_no_schedule_without_a_named_kernel(card, op, implementation):
    call, configs = CALLS[op]
    names = "('mosaic' or )?'triton'( or 'mosaic')?"
    message = (
        rf"{op}: config is a .*Config, but implementation is .*Pass implementation={names} with config, or "
    )
    with pytest.raises(ValueError, match=message):
        call(implementation=implementation, config=configs["triton"])


@pytest.mark.parametrize("op", CALLS)
def test_no_schedule_for_the_reference(op):
    call, configs = CALLS[op]
    with pytest.raises(
        ValueError, match=rf"{op}: config is a .*, but 'xla' has no schedules.*leave config out"
    ):
        call(implementation="xla", config=configs["triton"])


PAIRS = [("mosaic", "triton"), ("triton", "mosaic")]


@pytest.mark.parametrize(
    ("op", "name", "other"), [(op, *pair) for op in CALLS for pair in PAIRS if pair[0] in CALLS[op][1]]
)
def test_no_schedule_of_another_kernel(card, op, name, other):
    call, configs = CALLS[op]
    configs = TOPK | configs  # some ops have one kernel
    wanted = type(configs[name])
    title = rf"{wanted.__module__.rpartition('.')[2]}\.{wanted.__name__}"
    with pytest.raises(ValueError, match=rf"{op}: config is a .*; '{name}' wants a {title}\. Make one"):
        call(implementation=name, config=configs[other])
    with pytest.raises(ValueError, match=rf"{op}: config is a builtins.dict; '{name}' wants"):
        call(implementation=name, config={"threads": 8})


@pytest.mark.parametrize("op", ["select_tokens", "select_rows"])
def test_the_scores_schedule_is_named_in_its_message(card, op):
    call, _ = CALLS[op]
    with pytest.raises(
        ValueError, match=f"{op}: score_config is a topk_triton.Config; 'triton' wants a paged"
    ):
        call(implementation="triton", score_config=TOPK["triton"])
    with pytest.raises(
        ValueError, match=f"{op}: score_config is a .*implementation is None.*leave score_config"
    ):
        call(score_config=SCORES["triton"])


def test_schedules_of_the_keys_form(card):
    """FP4 keys have a class of their own, a subclass of that of FP8 keys; neither passes for the other."""
    fp4 = paged_logits_fp4_mosaic.PagedLogitsFp4Config()
    with pytest.raises(ValueError, match="is a paged_logits_fp4_mosaic.PagedLogitsFp4Config; 'mosaic' wants"):
        ops.paged_mqa_logits(*problem(), implementation="mosaic", config=fp4)


def test_one_name_in_a_sequence_is_a_name(kernels):
    call, configs = CALLS["topk_indices"]
    call(implementation=("triton",), config=configs["triton"])
    assert kernels == [("topk_triton", configs["triton"])]


def test_a_schedule_does_not_excuse_the_device():
    """On this CPU the named kernel is refused as ever."""
    with pytest.raises(NotImplementedError, match="topk_indices: triton on cpu: needs an NVIDIA GPU"):
        CALLS["topk_indices"][0](implementation="triton", config=TOPK["triton"])


def test_an_op_without_schedules_says_so():
    candidates = (dispatch.Candidate("xla", lambda x: x),)
    with pytest.raises(ValueError, match="op: config is a builtins.int.*Leave config out"):
        dispatch.dispatch("op", "xla", candidates, 1, config=3)
    assert dispatch.dispatch("op", "xla", candidates, 1) == 1
