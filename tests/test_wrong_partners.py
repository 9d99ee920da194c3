"""Steps, loops and engines that are handed what belongs to another model, cache or engine: the error says which and why."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from dsa_jax.cache import Cache
from dsa_jax.draft import advance, draft_metadata, probabilities
from dsa_jax.draft_engine import DraftEngine
from dsa_jax.engine import Engine
from dsa_jax.layout import CacheLayout
from dsa_jax.loops import Batch, DraftBatch, Sampling, decode_loop, speculative_loop
from dsa_jax.metadata import Bucket, StepMetadata
from dsa_jax.models.step import make_speculative, make_step
from random_models import random_model
from test_wrong_arguments import refused

POOL = Cache.create(cases.layout(), 6)
OTHER = Cache.create(cases.layout(page_size=2), 6)


def metadata(next_n: int = 1) -> StepMetadata:
    """Two decode requests of a table that holds 3 pages of 4 tokens each."""
    bucket = Bucket(decode_requests=2, next_n=next_n, table_width=3)
    return StepMetadata.create(cases.layout(), bucket, [[0, 1, 2], [3, 4, 5]], [5, 2], [1, 1])


# --- a model's step ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return random_model("tiny")


@pytest.fixture(scope="module")
def one_token(model):
    """A cache, and the metadata of one decode request."""
    layout = CacheLayout.create(model.config.dsa, index_form="f32", key_form="f32", page_size=8)
    meta = StepMetadata.create(layout, Bucket(decode_requests=1, table_width=1), [[0]], [1], [1])
    return Cache.create(layout, 2), meta


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p[:-1], ("params is 70 arrays, wanted a list of 71. Pass the params that came with",)),
        (lambda p: None, ("params is None, wanted a list of 71.",)),
        (lambda p: p[::-1], ("params[", "] is float32[", "], wanted float32[", " more. Pass")),
        (
            lambda p: [p[0].astype(jnp.int32), *p[1:]],
            ("params[0] is int32[96, 48], wanted float32[96, 48]. Pass",),
        ),
        (lambda p: [p[0].tolist(), *p[1:]], ("params[0] is [[", "wanted float32[96, 48]. Pass")),
    ],
)
def test_weights_of_another_order_or_model(model, one_token, change, words):
    cache, meta = one_token
    step, params = make_step(model, stacked=False)
    with refused("paged step: ", *words):
        step(change(params), cache, meta, jnp.zeros(1, jnp.int32))


def test_floats_of_another_width_are_weights(model, one_token):
    cache, meta = one_token
    step, params = make_step(model)
    half = [weight.astype(jnp.bfloat16) for weight in params]
    assert step(half, cache, meta, jnp.zeros(1, jnp.int32))[1].shape == (1, model.config.vocab_size)


def test_stacked_weights_are_not_those_of_an_unstacked_step(model, one_token):
    cache, meta = one_token
    (apart, single), (together, stacks) = (make_step(model, stacked=stacked) for stacked in (False, True))
    assert len(stacks) < len(single)
    for step, params in ((apart, stacks), (together, single)):
        with refused("paged step: params is ", "or with another choice of `stacked`, are not the same"):
            step(params, cache, meta, jnp.zeros(1, jnp.int32))
    with refused("stacked is 'yes', wanted True, False or None"):
        make_step(model, stacked="yes")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("make", [make_step, make_speculative])
def test_no_model(make):
    with refused(f"{make.__name__}: model is None, wanted a Decoder. Pass what checkpoint.load_pretrained"):
        make(None)


def test_facts_of_another_kind(model, one_token):
    cache, meta = one_token
    step, params = make_step(model)
    token = jnp.zeros(1, jnp.int32)
    for given, words in (
        ((cache, meta.derive(), token), "metadata is a Step, wanted a StepMetadata. Pass what StepMetadata.create"),
        ((None, meta, token), "cache is None, wanted a Cache. Pass what Cache.create"),
        ((cache, meta, [0]), "tokens is [0]; wanted int32[1]. Pass one entry for each token place"),
    ):  # fmt: skip
        with refused("paged step: ", words):
            step(params, *given)
    for topk in (0, 1.5, "8", True):
        step, params = make_step(model, index_topk=topk)  # pyright: ignore[reportArgumentType]
        with refused(
            f"paged step: index_topk is {topk!r}; wanted a whole number of at least 1. Leave index_topk out"
        ):
            step(params, cache, meta, token)


def test_states_and_metadata_that_are_not_the_drafts(model, one_token):
    _, meta = one_token
    _, draft, params = make_speculative(model)
    dsa, token = model.config.dsa, jnp.zeros(1, jnp.int32)
    layout = CacheLayout.create(dsa, layers=(2,), index_form="f32", key_form="f32", page_size=8)
    own, right = Cache.create(layout, 2), jnp.ones((1, 48))
    for hidden in (jnp.ones((1, 5)), jnp.ones(48), jnp.ones((2, 48)), jnp.ones((1, 48), jnp.int32), None):
        with refused("paged step: hidden is ", "wanted float[1, 48]. Pass one entry for each token place"):
            draft(params, own, draft_metadata(meta, layout, meta.page_table), token, hidden)
    # The target's metadata on the draft's cache: what differs is said, and nothing else.
    words = (
        "the step's layout is not the cache's (layers (0, 1) and (2,), full (True, True) and (True,)); build"
    )
    with refused(words):
        draft(params, own, meta, token, right)


# --- loops ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cache", "words"), [(None, "step returned None, wanted the cache"), (OTHER, "a Cache of another layout")]
)
def test_a_step_that_returns_another_cache(cache, words):
    step = lambda *_: (cache, jnp.ones((2, 4)), jnp.ones((2, 8)))
    batch = Batch(last=jnp.zeros(2, jnp.int32), meta=metadata(), live=jnp.ones(2, bool))
    with refused("decode_loop: ", words, "Pass what make_speculative returned"):
        decode_loop(step, None, POOL, batch, 1, Sampling.create())
    batch = replace(batch, meta=replace(metadata(), kv_lens=jnp.ones(2, jnp.int16)))
    with refused("StepMetadata: kv_lens is int16[2], wanted int32[2]", "with StepMetadata.create"):
        decode_loop(step, None, POOL, batch, 1, Sampling.create())


@pytest.mark.parametrize(
    ("dtype", "width", "share", "words"),
    [
        (jnp.float32, 7, False, "batch.hidden is float32[2, 2, 8], and step returned hidden float32[4, 7], wanted s"),
        (jnp.bfloat16, 8, False, "batch.hidden is bfloat16[2, 2, 8], and step returned hidden float32[4, 8]"),
        (jnp.float32, 8, "no", "share_selection is 'no', wanted True or False"),
    ],
)  # fmt: skip
def test_states_of_another_kind(dtype, width, share, words):
    """The states that a batch begins with are replaced by the step's, turn after turn."""
    batch = DraftBatch.create(
        metadata(2), jnp.zeros(2, jnp.int32), jnp.ones((2, 8), dtype), jnp.ones(2, bool)
    )
    step = lambda params, cache, meta, tokens: (cache, jnp.ones((4, 4)), jnp.ones((4, width)))
    draft = lambda params, cache, meta, tokens, hidden, rows: (cache, jnp.ones((4, 4)), hidden, hidden)
    table = jnp.zeros((2, 2), jnp.int32)
    with refused("speculative_loop: ", words):
        speculative_loop(
            step, draft, None, (POOL, POOL), batch, table, 2, Sampling.create(), share_selection=share
        )


def test_pages_for_a_loop_can_be_asked_for_ahead():
    """What the module tells a host to ask: 5 and 2 tokens in pages of 4, and of 3 pages the second request has one."""
    bucket = Bucket(decode_requests=2, table_width=3)
    meta = StepMetadata.create(cases.layout(), bucket, [[0, 1, 2], [3]], [5, 2], [0, 0])
    after = lambda count: replace(meta, kv_lens=meta.kv_lens + count)
    after(2).validate()
    with refused("request 1 of 5 tokens needs 2 pages, its table has a gap"):
        after(3).validate()
    with refused(
        "request 0 of 13 tokens needs 4 pages, the table is 3 wide; request 1 of 10 tokens needs 3 pages"
    ):
        after(8).validate()


def test_drawn_drafts_need_what_they_were_drawn_from():
    """Without it they would be kept as the best tokens are, and the text would not be the target's."""
    logits, drafts = jnp.zeros((2, 3, 4)), jnp.zeros((2, 2), jnp.int32)
    with refused("Sampling.accept: given is None, wanted float32[R, m, V]", "Pass what draw returned"):
        Sampling.create(temperature=1.0).accept(logits, jnp.zeros(2, jnp.int32), drafts, None)


def test_stop_tokens_have_values():
    """They are part of a program; an iterator of them is read once."""
    with refused("Sampling: stop is int32[1], wanted token ids such as (2, 5)"):
        jax.jit(lambda stop: Sampling.create(stop=stop).stop)(jnp.array([1]))
    assert Sampling.create(stop=iter([4, 2])).stop.tolist() == [4, 2]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_numbers_for_more_rows_than_there_are(name):
    with refused(f"probabilities: {name} is float32[3, 1], wanted a number or [..., 1]"):
        probabilities(jnp.zeros((2, 4)), **({"temperature": 1.0} | {name: jnp.ones((3, 1))}))
    one_each = probabilities(jnp.zeros((3, 2, 4)), **({"temperature": 1.0} | {name: jnp.ones((1, 2, 1))}))
    np.testing.assert_array_equal(one_each, np.full((3, 2, 4), 0.25))


def test_more_tokens_than_places():
    """What has no place is never written, but the length would count it."""
    meta = metadata()
    for lens in (2, np.array([0, 2])):
        with refused(
            "advance: new_lens is ", "2", "wanted at most 1 for a decode request. Pass a larger next_n"
        ):
            advance(meta, lens)  # pyright: ignore[reportArgumentType]
    assert advance(meta, 2, next_n=2).new_lens.tolist() == [2, 2]  # pyright: ignore[reportArgumentType]
    with refused(f"advance: next_n is {2**40}, wanted less than 2**31"):
        advance(meta, 1, next_n=2**40)  # pyright: ignore[reportArgumentType]
    # A context has as many places as its bucket; the decode request beside it has one.
    bucket = Bucket(context_requests=1, context_tokens=4, decode_requests=1, table_width=3)
    mixed = StepMetadata.create(cases.layout(), bucket, [[0, 1, 2], [3, 4, 5]], [0, 2], [0, 1])
    assert advance(mixed, np.array([4, 1])).kv_lens.tolist() == [4, 3]  # pyright: ignore[reportArgumentType]
    with refused("advance: new_lens is 2, wanted at most 1 for a decode request"):
        advance(mixed, 2)  # pyright: ignore[reportArgumentType]


# --- engines -------------------------------------------------------------------------------------------------------


def engine(kind, **changes):
    given = {"step": None, "params": None, "layout": cases.layout(), "slots": 8, "max_length": 16}
    if kind is DraftEngine:
        given |= {"draft": lambda *_: None, "draft_layout": cases.layout(), "draft_slots": 8}
    return kind(**(given | changes))


@pytest.mark.parametrize(
    ("kind", "count", "words"),
    [
        (Engine, 3, "Engine: step returned 3 values, wanted (cache, logits). Pass make_step's"),
        (
            DraftEngine,
            2,
            "DraftEngine: step returned 2 values, wanted (cache, logits, hidden). Pass make_spec",
        ),
    ],
)
def test_the_step_of_the_other_engine(kind, count, words):
    """The likeliest mix-up; pages and cache are kept."""
    parts = (jnp.ones((64, 4)), jnp.ones((64, 8)))
    run = engine(kind, step=lambda params, cache, meta, tokens: (cache, *parts)[:count])
    with refused(words):
        list(run.generate([[1]], 2))
    assert run.pool.free_slots == 8
    assert not any(pool.is_deleted() for pool in jax.tree.leaves(run.cache))


def test_sizes_that_int32_cannot_count():
    for name in ("max_length", "max_requests", "prefill_chunk"):
        with refused(f"Engine: {name} is {2**40}; wanted less than 2**31. Pass positive sizes"):
            engine(Engine, step=lambda *_: None, **{name: 2**40})
    with refused("DraftEngine: share_selection is 'no'; wanted True or False"):
        engine(DraftEngine, step=lambda *_: None, share_selection="no")
