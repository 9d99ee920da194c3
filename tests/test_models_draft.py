"""Drafting with whole models: shared-indexer layers, the prediction layer's own cache, selections that are passed on."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_jax.draft import draft_metadata
from dsa_jax.layout import CacheLayout
from dsa_jax.loops import Batch, DraftBatch, Sampling, decode_loop, speculative_loop
from dsa_jax.metadata import Bucket, StepMetadata
from dsa_jax.models.batch import forward_batch
from dsa_jax.models.decoder import Decoder
from dsa_jax.models.step import make_speculative
from paged_driver import Driver, poisoned
from random_models import QUICK_COMPILE, random_model, random_tokens

COUNT, LENGTHS = 12, (21, 3, 12)  # more and fewer tokens than index_topk = 8
TABLES = ([9, 2, 14, 5, 0, 7], [1, 12, 3, 10, 4, 6], [17, 8, 13, 11, 16, 15])
FORMS = {"key_form": "f32", "index_form": "f32"}


@cache
def model_of(share: bool) -> Decoder:
    """Layers full, full, shared, shared and a prediction layer; a head of few strong tokens, so that drafts often agree."""
    model = random_model("tiny-glm", seed=6, index_share_for_mtp_iteration=share)
    weight = np.array(model.lm_head.weight[...])
    weight[4:] *= 0.05
    model.lm_head.weight.set_value(jnp.asarray(weight))
    return model


def test_the_model_has_shared_layers():
    assert model_of(True).config.dsa.full_layers == (True, True, False, False, True)


@cache
def prompts() -> list[list[int]]:
    return [np.asarray(random_tokens(model_of(True), n, seed=n)).tolist() for n in LENGTHS]


def layouts(manager: str) -> tuple[CacheLayout, CacheLayout]:
    """Of the target with pages of 8, of the prediction layer alone with pages of 4."""
    dsa = model_of(True).config.dsa
    options = FORMS | {"manager": manager}
    return (
        CacheLayout.create(dsa, page_size=8, **options),
        CacheLayout.create(dsa, page_size=4, layers=(dsa.num_layers,), **options),
    )


DRAFT_TABLE = np.random.default_rng(5).permutation(3 * 13)[: 3 * 12].reshape(3, 12).astype(np.int32)


def compiled(f, **options):
    return jax.jit(f, compiler_options=QUICK_COMPILE, **options)


def packed(pieces, places: int = 40) -> jax.Array:
    flat = [t for piece in pieces for t in piece]
    return jnp.array(flat + [0] * (places - len(flat)), jnp.int32)


@cache
def prefilled(manager: str, share: bool):
    """Both caches with the prompts in them, the metadata, the newest token and the state before it."""
    step, draft, params = make_speculative(model_of(share))
    layout, own = layouts(manager)
    bucket = Bucket(context_requests=3, context_tokens=40, table_width=6)
    meta = StepMetadata.create(layout, bucket, TABLES, LENGTHS, LENGTHS)
    ends = np.cumsum(LENGTHS) - 1

    def both(params, caches, meta, tokens, following):
        cache, logits, hidden = step(params, caches[0], meta, tokens)
        own_meta = draft_metadata(meta, own, jnp.asarray(DRAFT_TABLE))
        draft_cache, *_ = draft(params, caches[1], own_meta, following, hidden)
        return (cache, draft_cache), jnp.argmax(logits[ends], axis=-1).astype(jnp.int32), hidden[ends]

    caches = poisoned(layout, 18), poisoned(own, 39)
    following = packed([[*p[1:], 0] for p in prompts()])
    caches, last, hidden = compiled(both)(params, caches, meta, packed(prompts()), following)
    return caches, meta, last, hidden


def decoding(meta: StepMetadata, next_n: int) -> StepMetadata:
    bucket = Bucket(decode_requests=3, next_n=next_n, table_width=6)
    return replace(meta, bucket=bucket, new_lens=jnp.ones(3, jnp.int32))


@cache
def plain() -> list[list[int]]:
    """Greedy text without drafts."""
    step, _, params = make_speculative(model_of(True))
    caches, meta, last, _ = prefilled("v2", True)
    batch = Batch(last=last, meta=decoding(meta, 1), live=jnp.ones(3, bool))
    run = compiled(partial(decode_loop, step, count=COUNT))
    return np.asarray(run(params, caches[0], batch, sampling=Sampling.create())[2].tokens).tolist()


def speculate(manager: str, drafts: int, share: bool, spy=None):
    """Tokens and what was accepted, with a look at every call of the prediction layer."""
    step, draft, params = make_speculative(model_of(share))
    caches, meta, last, hidden = prefilled(manager, share)
    batch = DraftBatch.create(decoding(meta, drafts + 1), last, hidden, jnp.ones(3, bool))
    loop = partial(speculative_loop, step, spy(draft) if spy else draft, count=COUNT, share_selection=share)
    run = compiled(loop)
    _, _, written = run(params, caches, batch, jnp.asarray(DRAFT_TABLE), sampling=Sampling.create())
    return written


# The selection of the first draft token is only reused from the second on, so sharing is tried with two and more.
FEW = [("v1", 1, False)]  # and V2 with three drafts and sharing in the next test
ALL = [(m, n, share) for m in ("v1", "v2") for n in range(1, 8) for share in (False, True)]


@pytest.mark.parametrize(
    ("manager", "drafts", "share"),
    [*FEW, *[pytest.param(*case, marks=pytest.mark.full) for case in ALL if case not in FEW]],
)
def test_greedy_text_does_not_depend_on_drafts(manager, drafts, share):
    """Ragged requests, shared-indexer layers, drafts that are kept and drafts that are not."""
    written = speculate(manager, drafts, share)
    assert np.asarray(written.tokens).tolist() == plain()
    accepted, drafted = int(written.accepted.sum()), int(written.drafted.sum())
    assert 0 < accepted < drafted


def watched_calls(drafts: int, share: bool):
    """What the loop wrote; for every call of the prediction layer its lengths, the rows it was given and those it chose."""
    calls = []

    def record(kv_lens, new_lens, given, chosen):
        calls.append([np.array(x) for x in (kv_lens, new_lens, given, chosen)])

    def spy(draft):
        def watched(params, cache, meta, tokens, hidden, rows=None):
            out = draft(params, cache, meta, tokens, hidden, rows)
            given = jnp.zeros((0, 0), jnp.int32) if rows is None else rows
            jax.debug.callback(record, meta.kv_lens, meta.new_lens, given, out[3], ordered=True)
            return out

        return watched

    written = speculate("v2", drafts, share, spy)
    jax.effects_barrier()
    assert np.asarray(written.tokens).tolist() == plain()
    assert len(calls) == drafts * int(written.turns)
    return written, calls


@pytest.mark.full
def test_a_draft_that_shares_nothing_is_given_nothing():
    """Row 37 the other way round: a prediction layer that chooses for itself never gets an older selection."""
    _, calls = watched_calls(2, False)
    assert all(given.size == 0 for _, _, given, _ in calls)


def test_selection_of_the_last_accepted_token_is_passed_on():
    """Row 37: later draft steps get, bit for bit, the rows that the first one chose at each request's newest token."""
    _, calls = watched_calls(3, True)
    several = set()
    for first, *later in zip(calls[::3], calls[1::3], calls[2::3], strict=True):
        kv_lens, new_lens, given, chosen = first
        assert given.size == 0
        live = new_lens > 0
        newest = chosen.reshape(3, 4, -1)[np.arange(3), np.maximum(new_lens - 1, 0)]
        several |= set(new_lens.tolist())
        for number, (longer, one, given, used) in enumerate(later, start=1):
            np.testing.assert_array_equal(longer[live], kv_lens[live] + number)
            assert set(one.tolist()) <= {0, 1}
            np.testing.assert_array_equal(given[live], newest[live])
            np.testing.assert_array_equal(used[live], newest[live])
        # What is passed on are rows of the draft's own cache, of tokens that it holds.
        for request in np.flatnonzero(live):
            rows = newest[request][newest[request] >= 0]
            assert len(rows) == min(8, kv_lens[request])
            assert set(rows // 4) <= set(DRAFT_TABLE[request, : -(-kv_lens[request] // 4)])
    assert len(several - {0, 1}) > 0  # turns after which the newest token was not the first of its places


def test_the_selection_of_a_context_serves_later_draft_steps():
    """Row 37 from a prefill: its row at each newest token, given to two steps more, is what they attend to, bit for bit."""
    step, draft, params = make_speculative(model_of(True))
    (target, own), meta, *_ = prefilled("v2", True)
    _, _, states = compiled(step)(params, target, meta, packed(prompts()))
    table = jnp.asarray(DRAFT_TABLE)
    following = packed([[*p[1:], 0] for p in prompts()])
    run = compiled(draft)
    context = draft_metadata(meta, own.layout, table)
    cache, logits, made, rows = run(params, own, context, following, states, None)
    ends = np.cumsum(LENGTHS) - 1
    given, state = np.asarray(rows)[ends], made[ends]
    assert [int((row >= 0).sum()) for row in given] == [min(8, n) for n in LENGTHS]
    later = draft_metadata(decoding(meta, 1), own.layout, table)
    for number in range(2):
        later = replace(later, kv_lens=later.kv_lens + 1)
        token = jnp.argmax(logits[ends] if number == 0 else logits, axis=-1).astype(jnp.int32)
        cache, logits, state, used = run(params, cache, later, token, state, jnp.asarray(given))
        np.testing.assert_array_equal(used, given)
    assert np.isfinite(np.asarray(logits)).all()


def test_given_rows_replace_the_selection_and_keys_are_written_all_the_same():
    """A draft without use of its indexer: other rows give other logits, the same pools; its own rows give its own logits."""
    _, draft, params = make_speculative(model_of(True))
    caches, meta, last, hidden = prefilled("v2", True)
    own_meta = draft_metadata(decoding(meta, 1), caches[1].layout, jnp.asarray(DRAFT_TABLE))
    run = compiled(draft)
    chosen, logits, _, rows = run(params, caches[1], own_meta, last, hidden, None)
    first = jnp.where(jnp.arange(8) == 0, rows, -1)
    again, same, _, used = run(params, caches[1], own_meta, last, hidden, rows)
    other, different, _, _ = run(params, caches[1], own_meta, last, hidden, first)
    np.testing.assert_allclose(same, logits, atol=1e-5)
    np.testing.assert_array_equal(used, rows)
    assert np.abs(np.asarray(different - logits))[0].max() > 1e-3
    for made in (again, other):
        for name, pool in chosen.pools().items():
            np.testing.assert_array_equal(made.pools()[name], pool, err_msg=name)


def test_a_draft_that_is_the_target_accepts_every_token():
    """B44: the main model drafts for itself from a cache of its own, with other pages and another page size.

    At the places that a prediction layer fills with the following tokens it reads these tokens one position later.
    """
    model = model_of(True)
    step, _, params = make_speculative(model)
    caches, meta, last, hidden = prefilled("v2", True)
    own = CacheLayout.create(model.config.dsa, page_size=4, **FORMS)
    width = DRAFT_TABLE.shape[1]
    bucket = Bucket(context_requests=3, context_tokens=40, table_width=width)
    prompt = StepMetadata.create(own, bucket, DRAFT_TABLE.tolist(), LENGTHS, LENGTHS)
    draft_cache, _, _ = compiled(step)(params, poisoned(own, 39), prompt, packed(prompts()))

    def draft(params, cache, meta, tokens, hidden, rows=None):
        meta = replace(meta, kv_lens=meta.kv_lens + (meta.new_lens > 0).astype(jnp.int32))
        cache, logits, hidden = step(params, cache, meta, tokens)
        return cache, logits, hidden, jnp.zeros((tokens.shape[0], 1), jnp.int32)

    run = compiled(partial(speculative_loop, step, draft, count=COUNT))
    batch = DraftBatch.create(decoding(meta, 4), last, hidden, jnp.ones(3, bool))
    before = jax.tree.map(np.array, caches[0])
    _, _, written = run(
        params, (caches[0], draft_cache), batch, jnp.asarray(DRAFT_TABLE), sampling=Sampling.create()
    )
    assert np.asarray(written.tokens).tolist() == plain()
    assert int(written.turns) == COUNT // 4
    assert written.accepted.tolist() == written.drafted.tolist() == [COUNT // 4 * 3] * 3
    jax.tree.map(np.testing.assert_array_equal, before, caches[0])  # nothing was donated


def test_target_is_untouched_by_draft_steps_under_scan():
    """The draft cache alone is donated; metadata and pools of the target are the same bits, and verification still works."""
    step, draft, params = make_speculative(model_of(True))
    (target, own), meta, last, hidden = prefilled("v2", True)
    meta = decoding(meta, 1)
    before = jax.tree.map(np.array, (target, meta))
    verify = compiled(step)
    wanted = verify(params, target, replace(meta, kv_lens=meta.kv_lens + 1), last)[1]

    def several(params, cache, meta, token, hidden):
        def one(carry, _):
            cache, own_meta, token, hidden = carry
            cache, logits, hidden, _ = draft(params, cache, own_meta, token, hidden)
            longer = replace(own_meta, kv_lens=own_meta.kv_lens + 1)
            return (cache, longer, jnp.argmax(logits, axis=-1).astype(jnp.int32), hidden), logits

        own_meta = draft_metadata(meta, cache.layout, jnp.asarray(DRAFT_TABLE))
        (cache, *_), logits = jax.lax.scan(one, (cache, own_meta, token, hidden), length=3)
        return cache, logits

    donated = jax.tree.map(jnp.copy, own)
    after, logits = compiled(several, donate_argnums=1)(params, donated, meta, last, hidden)
    assert donated.key.is_deleted()
    assert np.isfinite(np.asarray(logits)).all()
    assert not np.array_equal(after.key, own.key, equal_nan=True)
    jax.tree.map(np.testing.assert_array_equal, before, (target, meta))
    np.testing.assert_array_equal(
        verify(params, target, replace(meta, kv_lens=meta.kv_lens + 1), last)[1], wanted
    )


# --- several tokens and chunks in models with shared layers --------------------------------------------------------


@pytest.mark.full
def test_several_tokens_beside_chunks_of_a_prompt():
    """B38, B39: a prompt in chunks beside a request that verifies 3, 1 and 2 tokens, through full and shared layers."""
    model = model_of(True)
    long, short = (np.asarray(random_tokens(model, n, seed=n)) for n in (22, 16))
    run = compiled(lambda m, t: forward_batch(m, t, mtp=False).logits)
    batch = np.stack([long, np.pad(short, (0, 6))])
    wanted = np.asarray(run(model, jnp.asarray(batch)))
    driver = Driver(model, requests=2, longest=24)
    mixed = Bucket(
        context_requests=1, context_tokens=9, decode_requests=1, next_n=3, table_width=driver.width
    )
    got: dict[int, list[np.ndarray]] = {0: [], 1: []}
    # The second request's prompt is a context of its own before it decodes.
    got[1].append(driver.feed(mixed, {1: short[:9]})[1])
    done = [0, 9]
    for chunk, tokens in ((9, 3), (4, 1), (9, 2), (0, 1)):
        pieces = {0: long[done[0] : done[0] + chunk], 1: short[done[1] : done[1] + tokens]}
        for request, logits in driver.feed(mixed, pieces).items():
            got[request].append(logits)
        done = [done[0] + chunk, done[1] + tokens]
    assert (done, driver.traces) == ([22, 16], 1)
    np.testing.assert_allclose(np.concatenate(got[0]), wanted[0], atol=1e-4)
    np.testing.assert_allclose(np.concatenate(got[1]), wanted[1, :16], atol=1e-4)
