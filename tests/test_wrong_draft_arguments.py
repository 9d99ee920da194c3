"""Drafts, loops and engines given arguments of the wrong kind: the error names the argument, what came and the fix."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from dsa_jax.cache import Cache
from dsa_jax.draft import accept_greedy, accept_sampled, advance, draft_metadata, probabilities, rewind
from dsa_jax.draft_engine import DraftEngine
from dsa_jax.engine import Engine
from dsa_jax.loops import Batch, DraftBatch, Sampling, decode_loop, speculative_loop
from dsa_jax.metadata import Bucket, StepMetadata
from test_wrong_arguments import refused

ACCEPTED = {
    "target": jnp.full((2, 3, 4), 0.25),
    "draft": jnp.full((2, 2, 4), 0.25),
    "drafts": jnp.zeros((2, 2), jnp.int32),
    "draft_lens": jnp.full(2, 2, jnp.int32),
    "keys": jax.random.split(jax.random.key(0), 2),
}


def unused(*_):
    raise AssertionError("it ran")


def metadata(next_n: int = 1) -> StepMetadata:
    """Two decode requests of a table that holds 3 pages of 4 tokens each."""
    bucket = Bucket(decode_requests=2, next_n=next_n, table_width=3)
    return StepMetadata.create(cases.layout(), bucket, [[0, 1, 2], [3, 4, 5]], [5, 2], [1, 1])


def greedy(**changes):
    given = {"logits": ACCEPTED["target"], **ACCEPTED, **changes}
    return accept_greedy(*(given[name] for name in ("logits", "drafts", "draft_lens")))


def sampled(**changes):
    given = ACCEPTED | changes
    return accept_sampled(*(given[name] for name in ("keys", "target", "draft", "drafts", "draft_lens")))


# --- acceptance ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target": jnp.ones((2, 2, 4))}, "target is float32[2, 2, 4], wanted float32[2, 3, V]"),
        ({"target": jnp.ones((2, 3, 4), jnp.int32)}, "target is int32[2, 3, 4], wanted float32[2, 3, V]"),
        ({"draft": jnp.ones((1, 2, 4))}, "draft is float32[1, 2, 4], wanted float32[2, 2, 4]"),
        ({"draft": jnp.ones((2, 2, 5))}, "draft is float32[2, 2, 5], wanted float32[2, 2, 4]"),
        ({"drafts": jnp.zeros((2, 2))}, "drafts is float32[2, 2], wanted int32[R, m]"),
        ({"drafts": [[0, 0], [0, 0]]}, "drafts is [[0, 0], [0, 0]], wanted int32[R, m]"),
        ({"draft_lens": jnp.ones(1, jnp.int32)}, "draft_lens is int32[1], wanted int32[2]"),
        ({"draft_lens": [2, 2]}, "draft_lens is [2, 2], wanted int32[2]"),
        ({"keys": jax.random.split(jax.random.key(0), 1)}, "keys is key<fry>[1], wanted 2 random keys"),
        ({"keys": jax.random.key(0)}, "keys is key<fry>[], wanted 2 random keys"),
        ({"keys": jnp.zeros((2, 3), jnp.uint32)}, "keys is uint32[2, 3], wanted 2 random keys"),
        (
            {"target": jnp.ones((2, 3, 0)), "draft": jnp.ones((2, 2, 0))},
            "target is float32[2, 3, 0], wanted a v",
        ),
    ],
)
def test_sampled_acceptance(changes, words):
    with refused("accept_sampled: ", words, "Pass arrays for the same requests and vocabulary"):
        sampled(**changes)


def test_everything_wrong_with_an_acceptance_is_said_at_once():
    with refused("accept_sampled: draft_lens is ", "target is 'p'", "draft is None", "keys is 0, wanted 2"):
        sampled(draft_lens=jnp.ones(3, jnp.int32), target="p", draft=None, keys=0)
    with refused("target is float32[2, 2, 4], wanted"):  # also where nothing has a value
        jax.eval_shape(lambda target: sampled(target=target), jnp.ones((2, 2, 4)))


def test_raw_keys_draw_what_typed_ones_draw():
    raw = sampled(keys=jax.random.key_data(ACCEPTED["keys"]))
    jax.tree.map(np.testing.assert_array_equal, raw, sampled())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logits": [[[1.0]]]}, "logits is [[[1.0]]], wanted float32[2, 3, V]"),
        ({"logits": jnp.ones((2, 3))}, "logits is float32[2, 3], wanted float32[2, 3, V]"),
        ({"drafts": jnp.zeros(2, jnp.int32)}, "drafts is int32[2], wanted int32[R, m]"),
        ({"drafts": jnp.zeros((2, 2))}, "drafts is float32[2, 2], wanted int32[R, m]"),
    ],
)
def test_greedy_acceptance(changes, words):
    with refused("accept_greedy: ", words, "Pass arrays for the same requests"):
        greedy(**changes)


@pytest.mark.parametrize("wrap", [lambda x: x, jnp.float32])
def test_probabilities(wrap):
    logits = jnp.zeros(4)
    for top_p in (0, 1e-50, -0.5, 1.5, math.nan):
        with refused("probabilities: top_p is ", "wanted a number of more than 0 up to 1, or None"):
            probabilities(logits, 1.0, wrap(top_p))
    with refused("probabilities: temperature is -1", "wanted a number of at least 0"):
        probabilities(logits, wrap(-1.0))
    with refused("logits is int32[4], wanted float32[..., V]; temperature is '1'"):
        probabilities(jnp.zeros(4, jnp.int32), "1")  # pyright: ignore[reportArgumentType]
    # Traced numbers have no value to refuse.
    assert jax.jit(probabilities)(logits, wrap(1.0), wrap(1.0)).tolist() == [0.25] * 4


# --- metadata ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lens", [1, jnp.int32(1), jnp.ones(2, jnp.int8), np.ones(2, np.int64)], ids=repr)
def test_lengths_become_int32_of_each_request(lens):
    after = advance(metadata(), lens)
    assert (after.kv_lens.tolist(), after.new_lens.tolist()) == ([6, 3], [1, 1])
    for meta in (after, rewind(metadata(), lens)):
        assert meta.kv_lens.dtype == meta.new_lens.dtype == jnp.int32
        assert meta.derive().positions.shape == (2,)


def test_right_lengths_cost_nothing():
    program = jax.make_jaxpr(advance)(metadata(), jnp.ones(2, jnp.int32))
    assert [equation.primitive.name for equation in program.jaxpr.eqns] == ["add"]


def test_lengths_and_places_out_of_range():
    meta = metadata()
    for lens in (2**40, -(2**40)):
        with refused(f"advance: new_lens is {lens}, wanted int32[2]"):
            advance(meta, lens)  # pyright: ignore[reportArgumentType]
    for next_n in ("1", 1.5, True):
        with refused(f"advance: next_n is {next_n!r}, wanted a whole number of at least 1. Leave it out"):
            advance(meta, jnp.ones(2, jnp.int32), next_n=next_n)  # pyright: ignore[reportArgumentType]
        with refused(f"draft_metadata: next_n is {next_n!r}, wanted a whole number"):
            draft_metadata(meta, meta.layout, meta.page_table, next_n=next_n)  # pyright: ignore[reportArgumentType]
    with refused("draft_metadata: draft_page_table is int32[2, 0], wanted at least one page a request"):
        draft_metadata(meta, meta.layout, jnp.zeros((2, 0), jnp.int32))


# --- loops ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": "1"}, "temperature is '1', wanted a finite number of at least 0"),
        ({"temperature": math.inf}, "temperature is inf, wanted a finite number"),
        ({"temperature": 1e300}, "temperature is 1e+300, wanted a finite number"),
        ({"top_p": 1e-50}, "top_p is 1e-50, wanted a number of more than 0 up to 1"),
        ({"top_p": "1"}, "top_p is '1', wanted a number of more than 0 up to 1"),
        ({"stop": ("a",)}, "stop is ('a',), wanted token ids such as (2, 5)"),
        ({"stop": 5}, "stop is 5, wanted token ids"),
        ({"stop": (1.5,)}, "stop is (1.5,), wanted token ids"),
        ({"seed": None}, "seed is None, wanted a whole number from 0 to 2**32 - 1"),
        ({"seed": 2**70}, f"seed is {2**70}, wanted a whole number from 0 to 2**32 - 1"),
    ],
)
def test_samplings(changes, words):
    with refused("Sampling: ", words, "Use temperature 0 for the best token"):
        Sampling.create(**changes)


def test_numbers_in_arrays_make_a_sampling():
    got = Sampling.create(np.int64(3), jnp.float32(0.5), np.float32(0.5), stop=jnp.array([4, 2]))  # pyright: ignore[reportArgumentType]
    wanted = Sampling.create(3, 0.5, 0.5, stop=(4, 2))
    assert (got.temperature, got.top_p, got.stop.tolist()) == (wanted.temperature, wanted.top_p, [4, 2])
    traced = jax.jit(lambda seed: Sampling.create(seed).key)(3)
    assert traced == got.key == wanted.key


def plain_batch() -> Batch:
    return Batch(last=jnp.zeros(2, jnp.int32), meta=metadata(), live=jnp.ones(2, bool))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": None}, "batch is None, wanted a Batch. Pass Batch(last="),
        ({"sampling": None}, "sampling is None, wanted a Sampling. Pass Sampling.create()"),
        ({"cache": None}, "cache is None, wanted a Cache. Pass what Cache.create"),
        ({"step": None}, "step is None, wanted a function"),
        ({"count": 1.5}, "count is 1.5, wanted a Python int of at least 1"),
        ({"count": 13}, "count is 13, wanted at most 12: the page table has 3 pages of 4 tokens"),
        ({"batch": replace(plain_batch(), last=jnp.zeros(3, jnp.int32))}, "batch.last is int32[3], wanted int32[2]"),
        ({"batch": replace(plain_batch(), live=jnp.ones(1, bool))}, "batch.live is bool[1], wanted bool[2]"),
    ],
)  # fmt: skip
def test_plain_loops(changes, words):
    given = {"step": unused, "params": None, "cache": Cache.create(cases.layout(), 6), "batch": plain_batch()}
    with refused("decode_loop: ", words):
        decode_loop(**(given | {"count": 1, "sampling": Sampling.create()} | changes))


def test_a_full_page_table_is_not_too_much():
    with pytest.raises(AssertionError, match="it ran"):
        decode_loop(unused, None, Cache.create(cases.layout(), 6), plain_batch(), 12, Sampling.create())


def draft_batch() -> DraftBatch:
    return DraftBatch.create(metadata(2), jnp.zeros(2, jnp.int32), jnp.zeros((2, 8)), jnp.ones(2, bool))


POOL = Cache.create(cases.layout(), 6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"caches": POOL}, "caches is a Cache, wanted the pair (target cache, draft cache). Pass"),
        ({"caches": (POOL, None)}, "caches is (a Cache, None), wanted the pair"),
        ({"batch": plain_batch()}, "batch is a Batch, wanted a DraftBatch. Pass DraftBatch.create"),
        ({"draft": None}, "draft is None, wanted a function"),
        ({"turns": 1.5}, "turns is 1.5, wanted at least 1, or None"),
        ({"count": 9}, "count is 9, wanted at most 8: draft_table has 2 pages of 4 tokens"),
        ({"draft_table": jnp.zeros((1, 3), jnp.int32)}, "draft_table is int32[1, 3], wanted int32[2, W_draft]"),
        ({"batch": replace(draft_batch(), hidden=jnp.zeros((2, 8)))}, "batch.hidden is float32[2, 8], wanted float[2, 2"),
    ],
)  # fmt: skip
def test_loops_with_drafts(changes, words):
    given = {"step": unused, "draft": unused, "params": None, "caches": (POOL, POOL), "batch": draft_batch()}
    given |= {"draft_table": jnp.zeros((2, 2), jnp.int32), "count": 1, "sampling": Sampling.create()}
    with refused("speculative_loop: ", words):
        speculative_loop(**(given | changes))


def test_batches_with_drafts():
    meta, hidden, live = metadata(2), jnp.zeros((2, 8)), jnp.ones(2, bool)
    with refused("DraftBatch.create: last is int32[3], wanted int32[2]. Pass one entry for each request"):
        DraftBatch.create(meta, jnp.zeros(3, jnp.int32), hidden, live)
    with refused("hidden is float32[8], wanted float[2, width]; live is int32[2], wanted bool[2]"):
        DraftBatch.create(meta, jnp.zeros(2, jnp.int32), hidden[0], jnp.ones(2, jnp.int32))
    with refused("DraftBatch.create: meta is None, wanted a StepMetadata"):
        DraftBatch.create(None, jnp.zeros(2, jnp.int32), hidden, live)  # pyright: ignore[reportArgumentType]


# --- engines -------------------------------------------------------------------------------------------------------


def engine(kind=Engine, **changes):
    given = {"step": unused, "params": None, "layout": cases.layout(), "slots": 8, "max_requests": 2}
    if kind is DraftEngine:
        given |= {"draft": unused, "draft_layout": cases.layout(), "draft_slots": 8}
    return kind(**(given | {"max_length": 16} | changes))


@pytest.mark.parametrize("kind", [Engine, DraftEngine])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"slots": "4"}, "slots is '4'; wanted a whole number of at least 1"),
        ({"max_requests": None}, "max_requests is None; wanted a whole number"),
        ({"max_length": 100.5}, "max_length is 100.5; wanted a whole number"),
        ({"layout": None}, "layout is None; wanted a CacheLayout"),
        ({"step": None}, "step is None; wanted a function"),
    ],
)
def test_engines(kind, changes, words):
    with refused(f"{kind.__name__}: ", words, "Pass positive sizes, layouts from CacheLayout.create"):
        engine(kind, **changes)


def test_engines_with_drafts():
    with refused(
        "DraftEngine: drafts is 1.0; wanted 1 to 7; block is True; wanted a whole number of at least 1; draft is None; "
        "wanted a function; draft_layout is None; wanted a CacheLayout"
    ):
        engine(DraftEngine, drafts=1.0, block=True, draft=None, draft_layout=None)
    run = engine(DraftEngine)
    with refused("warmup: tokens is '3', wanted a whole number of at least 1. Leave it out"):
        run.warmup("3")
    with refused("Sampling: stop is 5, wanted token ids"):
        run.warmup(stop=5)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([[1], [1.9, 3.9]], "prompt 1 is [1.9, 3.9], which holds 1.9 at place 0, wanted ids from 0 to 2147483647"),
        ([["a"]], "prompt 0 is ['a'], which holds 'a' at place 0"),
        ([[3, -1]], "prompt 0 is [3, -1], which holds -1 at place 1"),
        ([[2**31]], "prompt 0 is [2147483648], which holds 2147483648 at place 0"),
        ([[True]], "prompt 0 is [True], which holds True"),
        (["text"], "prompt 0 is 'text', which is text, not token ids: pass what the tokenizer gave"),
        ([None], "prompt 0 is None, which is no list of token ids"),
        (np.array([[1.5, 2]]), "prompt 0 is float64[2], which holds 1.5 at place 0"),
        ("text", "prompts is 'text', wanted a list of prompts, each a list of token ids"),
        ([1, 2], "prompts is [1, 2], wanted a list of prompts, each a list of token ids: put one prompt in a list"),
        (np.array([1, 2]), "wanted a list of prompts, each a list of token ids: put one prompt in a list"),
        (5, "prompts is 5, wanted a list of prompts"),
    ],
)  # fmt: skip
def test_prompts(prompts, words):
    run = engine()
    with refused("generate: ", words):
        run.generate(prompts, 2)
    with refused("generate: ", words):
        run.check(prompts, 2, 0.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": "3"}, "tokens is '3', wanted a whole number of at least 1"),
        ({"tokens": 1.5}, "tokens is 1.5, wanted a whole number of at least 1"),
        ({"temperature": "1"}, "temperature is '1', wanted at least 0 and finite"),
        ({"temperature": math.inf}, "temperature is inf, wanted at least 0 and finite"),
        ({"stop": 5}, "stop is 5, which is no list of token ids: pass a list of ids, [] for none"),
        ({"stop": "5"}, "stop is '5', which is text, not token ids"),
        ({"seed": None}, "seed is None, wanted a whole number from 0 to 2**32 - 1: pass 0"),
        ({"seed": 1.5}, "seed is 1.5, wanted a whole number from 0 to 2**32 - 1"),
        ({"seed": 2**70}, f"seed is {2**70}, wanted a whole number from 0 to 2**32 - 1"),
    ],
)
def test_numbers_of_generate(changes, words):
    with refused("generate: ", words):
        engine().generate(**({"prompts": [[1]], "tokens": 2} | changes))


@pytest.mark.parametrize(
    "prompts",
    [np.array([[1, 2]]), jnp.array([[1, 2]]), [(np.int64(1), jnp.int32(2))], iter([np.array([1, 2])])],
    ids=["numpy", "jax", "scalars", "iterator"],
)
def test_arrays_and_iterators_are_prompts(monkeypatch, prompts):
    """They are copied as Python integers."""
    run = engine()
    monkeypatch.setattr(run, "_reserve_and_run", lambda copies, *_: copies)
    assert run.generate(prompts, 2) == [(1, 2)]
