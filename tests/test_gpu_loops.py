"""Draft passes, rewinding and whole loops of the shipped model on a CUDA card (``pytest -m gpu``).

Every program is compiled ahead from shapes alone and then run, so one compilation serves all lengths and all tests of it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from benchmarks.host_check import Host, measure, several
from dsa_jax.cache import Cache
from dsa_jax.draft import draft_metadata, rewind
from dsa_jax.layout import CacheLayout
from dsa_jax.loops import Batch, DraftBatch, Sampling, decode_loop, speculative_loop
from dsa_jax.metadata import Bucket, StepMetadata
from dsa_jax.models import checkpoint
from dsa_jax.models.step import make_speculative
from paged_driver import poisoned
from test_loops import target_step

pytestmark = pytest.mark.gpu

LENGTHS = (
    32,
    3,
    17,
    70,
    24,
    9,
    64,
    65,
)  # fewer and more tokens than the 64 that are attended, and than a page
COUNT, WIDTH, PLACES = 48, 3, 1024
SLOTS = len(LENGTHS) * WIDTH
SLACK = 4096
MARGIN = 0.125
"""Where two roundings of the same text may part: the best two logits are closer than bfloat16's spacing from 16 to 32."""


@cache
def parts():
    """Step, draft and weights of the shipped model, and the layouts of both caches."""
    model = checkpoint.load_pretrained("docs-8m")
    dsa = model.config.dsa
    own = CacheLayout.create(dsa, layers=(dsa.num_layers,))
    return *make_speculative(model), (CacheLayout.create(dsa), own)


@cache
def prompts() -> list[list[int]]:
    """Held-out text of eight different lengths."""
    texts = json.loads((checkpoint.find("docs-8m") / "text.json").read_text())["texts"]
    tokenizer = checkpoint.load_tokenizer("docs-8m")
    ids = [tokenizer.encode(text["prompt"] + text["continuation"]).ids for text in texts]
    return [ids[i][:n] for i, n in enumerate(LENGTHS)]


TABLES = np.random.default_rng(0).permutation(SLOTS).reshape(len(LENGTHS), WIDTH).astype(np.int32)
OWN_TABLES = np.random.default_rng(1).permutation(SLOTS).reshape(len(LENGTHS), WIDTH).astype(np.int32)


def packed(pieces) -> jax.Array:
    flat = [token for piece in pieces for token in piece]
    return jnp.array(flat + [0] * (PLACES - len(flat)), jnp.int32)


def context(lens) -> StepMetadata:
    bucket = Bucket(context_requests=len(LENGTHS), context_tokens=PLACES, table_width=WIDTH)
    return StepMetadata.create(parts()[3][0], bucket, TABLES, lens, lens)


@jax.jit
def _prefill(params, caches, meta, table, tokens, following, ends):
    step, draft, _, layouts = parts()
    cache, logits, hidden = step(params, caches[0], meta, tokens)
    own, *_ = draft(params, caches[1], draft_metadata(meta, layouts[1], table), following, hidden)
    return (cache, own), logits[ends], hidden[ends]


def feed(texts):
    """Both caches after the texts, the metadata, and logits and states at their last tokens."""
    _, _, params, layouts = parts()
    meta = context([len(text) for text in texts])
    ends = jnp.array(np.cumsum([len(text) for text in texts]) - 1, jnp.int32)
    following = packed([[*text[1:], 0] for text in texts])
    caches = tuple(poisoned(layout, SLOTS) for layout in layouts)
    out = _prefill(params, caches, meta, jnp.array(OWN_TABLES), packed(texts), following, ends)
    return out[0], meta, *out[1:]


@cache
def prefilled():
    return feed(prompts())


def fresh():
    """Copies of the caches that a program may overwrite."""
    return jax.tree.map(jnp.copy, prefilled()[0])


def decoding(places: int) -> StepMetadata:
    bucket = Bucket(decode_requests=len(LENGTHS), next_n=places, table_width=WIDTH)
    return replace(prefilled()[1], bucket=bucket, new_lens=jnp.ones(len(LENGTHS), jnp.int32))


def last() -> jax.Array:
    return jnp.argmax(prefilled()[2], axis=-1).astype(jnp.int32)


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def draft_batch(places: int) -> DraftBatch:
    return DraftBatch.create(decoding(places), last(), prefilled()[3], jnp.ones(len(LENGTHS), bool))


@cache
def speculation(places: int, slots: int = SLOTS):
    """The compiled loop with ``places - 1`` drafts over pools of so many slots, both donated."""
    step, draft, params, layouts = parts()
    pools = tuple(Cache.abstract(layout, slots) for layout in layouts)
    loop = partial(speculative_loop, step, draft, count=COUNT)
    run = jax.jit(
        lambda params, caches, *rest: loop(params, caches, *rest[:2], sampling=rest[2]), donate_argnums=1
    )
    table = jax.ShapeDtypeStruct(OWN_TABLES.shape, jnp.int32)
    return run.lower(
        shapes(params), pools, *shapes((draft_batch(places), table, Sampling.create()))
    ).compile()


@cache
def plain(places: int) -> np.ndarray:
    """Greedy text without drafts, in steps as wide as a verification."""
    step, _, params, _ = parts()
    batch = Batch(last=last(), meta=decoding(places), live=jnp.ones(len(LENGTHS), bool))
    loop = partial(decode_loop, step, count=COUNT)
    run = jax.jit(
        lambda params, cache, batch, sampling: loop(params, cache, batch, sampling=sampling), donate_argnums=1
    )
    arguments = params, fresh()[0], batch, Sampling.create()
    compiled = run.lower(*arguments).compile()
    with jax.transfer_guard_device_to_host("disallow_explicit"):
        written = jax.block_until_ready(compiled(*arguments))[2]
    return np.asarray(written.tokens)


@pytest.mark.parametrize("drafts", [1, 3])
def test_greedy_text_does_not_depend_on_drafts(drafts):
    """Token for token, or parted where the two best tokens are as good as equal. No copy to the host before the end."""
    arguments = parts()[2], fresh(), draft_batch(drafts + 1), jnp.array(OWN_TABLES), Sampling.create()
    compiled = speculation(drafts + 1)
    with jax.transfer_guard_device_to_host("disallow_explicit"):
        written = jax.block_until_ready(compiled(*arguments))[2]
    got, wanted = np.asarray(written.tokens), plain(drafts + 1)
    assert ((got >= 0) & (got < 2048)).all()
    accepted, drafted = np.asarray(written.accepted), np.asarray(written.drafted)
    assert ((accepted > 0) & (accepted <= drafted)).all()
    parted = np.flatnonzero((got != wanted).any(axis=1)).tolist()
    firsts = {row: int((got[row] != wanted[row]).argmax()) for row in parted}
    print(f"{drafts} drafts: kept {accepted.sum() / drafted.sum():.3f}, parted at {firsts}")
    if firsts:
        logits = feed(
            [
                [*text, int(last()[row]), *wanted[row, : firsts.get(row, 0)].tolist()]
                for row, text in enumerate(prompts())
            ]
        )[2]
        for row, first in firsts.items():
            best = np.argsort(-np.asarray(logits[row]))[:2]
            assert {got[row, first], wanted[row, first]} == set(best.tolist())
            assert logits[row, best[0]] - logits[row, best[1]] < MARGIN


def test_memory_of_drafting_and_rewinding():
    """Contract 4: four times the slots, the same temporaries; every byte of both pools is aliased."""
    temporary = []
    for slots in (SLOTS, 4 * SLOTS):
        memory = speculation(2, slots).memory_analysis()
        pools = sum(Cache.abstract(layout, slots).nbytes for layout in parts()[3])
        assert pools <= memory.alias_size_in_bytes <= pools + SLACK
        temporary.append(memory.temp_size_in_bytes)
    assert pools > 100 * SLACK  # a copy would show
    print("temporary bytes", temporary)
    assert abs(temporary[1] - temporary[0]) <= SLACK


def draft_pass(params, own, target, token, hidden, kept):
    """Three draft steps from the target's rewound metadata, in a loop."""
    _, draft, _, layouts = parts()
    meta = draft_metadata(rewind(target, kept), layouts[1], jnp.array(OWN_TABLES))

    def one(carry, _):
        own, meta, token, hidden = carry
        own, logits, hidden, _ = draft(params, own, meta, token, hidden)
        longer = replace(meta, kv_lens=meta.kv_lens + 1)
        return (own, longer, jnp.argmax(logits, axis=-1).astype(jnp.int32), hidden), logits

    (own, *_), logits = jax.lax.scan(one, (own, meta, token, hidden), length=3)
    return own, logits


@cache
def compiled_draft_pass(slots: int = SLOTS):
    _, _, params, layouts = parts()
    arguments = shapes((decoding(1), last(), prefilled()[3], jnp.ones(len(LENGTHS), jnp.int32)))
    own = Cache.abstract(layouts[1], slots)
    return jax.jit(draft_pass, donate_argnums=1).lower(shapes(params), own, *arguments).compile()


def test_memory_of_a_draft_pass():
    temporary = []
    for slots in (SLOTS, 4 * SLOTS):
        memory = compiled_draft_pass(slots).memory_analysis()
        pools = Cache.abstract(parts()[3][1], slots).nbytes
        assert pools <= memory.alias_size_in_bytes <= pools + SLACK
        temporary.append(memory.temp_size_in_bytes)
    assert abs(temporary[1] - temporary[0]) <= SLACK


def test_target_is_untouched_by_a_draft_pass():
    """The draft cache alone is donated: metadata and pools of the target are the same bits, all of them."""
    _, _, params, _ = parts()
    (target, _), meta = prefilled()[0], decoding(1)
    before = cases.pool_bytes(target), jax.tree.map(np.array, meta)
    donated, untouched = fresh()[1], cases.pool_bytes(prefilled()[0][1])
    own, logits = compiled_draft_pass()(
        params, donated, meta, last(), prefilled()[3], jnp.ones(len(LENGTHS), jnp.int32)
    )
    assert donated.key.is_deleted()
    assert np.isfinite(np.asarray(logits)).all()
    assert cases.pool_bytes(own) != untouched
    assert cases.pool_bytes(target) == before[0]
    jax.tree.map(np.testing.assert_array_equal, before[1], meta)


def test_one_program_for_any_lengths():
    """The loop that served the prompts continues after other, shorter ones; nothing is compiled for them."""
    texts = [prompt[: max(len(prompt) // 2, 2)] for prompt in prompts()]
    caches, meta, logits, hidden = feed(texts)
    first = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    live = jnp.ones(len(LENGTHS), bool)
    batch = DraftBatch.create(replace(meta, bucket=decoding(2).bucket), first, hidden, live)
    _, after, written = speculation(2)(parts()[2], caches, batch, jnp.array(OWN_TABLES), Sampling.create())
    assert np.asarray(written.counts).tolist() == [COUNT] * len(LENGTHS)
    assert np.asarray(after.meta.kv_lens).tolist() == [len(text) + COUNT for text in texts]


def test_host_work_reads_nothing_back():
    """Lengths cross page boundaries under a guard against copies to the host; the step is traced once."""
    host = Host(several(target_step), None, cases.layout(page_size=4), np.array([5, 8, 3]), 7)
    assert measure(host, 9)["traced_again"] == 0
    with (
        pytest.raises(Exception, match="[Dd]isallowed"),
        jax.transfer_guard_device_to_host("disallow_explicit"),
    ):
        np.asarray(host.tokens)  # the guard is one that sees such a copy
