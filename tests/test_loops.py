"""Whole loops in one program, on a toy model whose next token depends on the last three tokens read back from its cache.

The toy keeps each token in its KEY pool and hashes the tokens at positions p-2, p-1, p of the sequence, so that a row that
was not rewound, not rewritten or taken from another request changes the text.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from dsa_jax import ops
from dsa_jax.cache import Cache
from dsa_jax.draft import draft_metadata
from dsa_jax.layout import Role
from dsa_jax.loops import Batch, DraftBatch, Sampling, decode_loop, speculative_loop
from dsa_jax.metadata import Bucket, StepMetadata
from dsa_jax.xla.gather import read_rows

VOCABULARY, COUNT = 13, 8
PROMPTS = ([3, 1, 4, 1, 5], [2, 7], [9, 9, 8])
TABLES = ([5, 0, 11, 2, 9, 14, 3], [1, 8, 4, 6, 22, 21, 20], [10, 7, 12, 13, 15, 16, 17])


def run_tokens(cache: Cache, meta: StepMetadata, tokens: jax.Array, salt: int):
    """Write tokens, then give each place's hash of its last three tokens as logits, and its hash as state."""
    step = meta.derive()
    latent = jnp.broadcast_to(tokens[:, None].astype(jnp.float32), (tokens.shape[0], cases.LATENT))
    cache = ops.append_latent(cache, 0, latent, jnp.zeros((tokens.shape[0], cases.ROPE), jnp.float32), step)
    back = step.positions[:, None] - jnp.arange(3, dtype=jnp.int32)[None, :]
    rows = ops.to_rows(jnp.where(back >= 0, back, -1), step)
    seen = read_rows(cache, "key", Role.KEY, 0, rows)[:, :, 0].astype(jnp.int32)
    hashed = seen @ jnp.array([5, 11, 17], jnp.int32) + step.positions
    noise = salt * (hashed % 3 == 0).astype(jnp.int32)  # a draft that errs one time in three
    token = (hashed + noise) % VOCABULARY
    return (
        cache,
        9.0 * jax.nn.one_hot(token, VOCABULARY, dtype=jnp.float32),
        hashed[:, None].astype(jnp.float32),
    )


def target_step(params, cache, meta, tokens):
    return run_tokens(cache, meta, tokens, 0)


def draft_step(salt, params, cache, meta, tokens, hidden, rows=None):
    """The draft sees the token after each place, so its position p holds token p + 1: shift the hash to match."""
    step = meta.derive()
    latent = jnp.broadcast_to(tokens[:, None].astype(jnp.float32), (tokens.shape[0], cases.LATENT))
    cache = ops.append_latent(cache, 0, latent, jnp.zeros((tokens.shape[0], cases.ROPE), jnp.float32), step)
    back = step.positions[:, None] - jnp.arange(3, dtype=jnp.int32)[None, :]
    seen = read_rows(cache, "key", Role.KEY, 0, ops.to_rows(jnp.where(back >= 0, back, -1), step))[
        :, :, 0
    ].astype(jnp.int32)
    hashed = seen @ jnp.array([5, 11, 17], jnp.int32) + step.positions + 1
    token = (hashed + salt * (hashed % 3 == 0).astype(jnp.int32)) % VOCABULARY
    return (
        cache,
        9.0 * jax.nn.one_hot(token, VOCABULARY, dtype=jnp.float32),
        hashed[:, None].astype(jnp.float32),
        rows_of(meta),
    )


def rows_of(meta: StepMetadata) -> jax.Array:
    return jnp.zeros((meta.bucket.tokens, 2), jnp.int32)


def expected(prompt: list[int], count: int) -> list[int]:
    """The same text from a Python list."""
    text = list(prompt)
    for _ in range(count):
        position = len(text) - 1
        last = [text[position - i] if position - i >= 0 else 0 for i in range(3)]
        text.append((5 * last[0] + 11 * last[1] + 17 * last[2] + position) % VOCABULARY)
    return text[len(prompt) :]


def prefilled(manager: str, next_n: int, *, draft_page: int = 2):
    """Caches that hold the prompts less their last token (the draft less one more), and where the requests stand."""
    layout = cases.layout(manager, page_size=4)
    own = cases.layout(manager, page_size=draft_page, full=(True,))
    held = [len(prompt) - 1 for prompt in PROMPTS]
    bucket = Bucket(context_requests=3, context_tokens=16, table_width=7)
    meta = StepMetadata.create(layout, bucket, TABLES, held, held)
    tokens = np.zeros(16, np.int32)
    flat = [t for prompt in PROMPTS for t in prompt[:-1]]
    tokens[: len(flat)] = flat
    cache, _, hidden = target_step(None, Cache.create(layout, cases.SLOTS), meta, jnp.array(tokens))
    table = jnp.arange(3 * 16, dtype=jnp.int32).reshape(3, 16)
    following = np.zeros(16, np.int32)
    flat = [t for prompt in PROMPTS for t in prompt[1:]]
    following[: len(flat)] = flat
    draft_cache, *_ = draft_step(
        0, None, Cache.create(own, 48), draft_metadata(meta, own, table), jnp.array(following), hidden
    )
    decode = StepMetadata(
        page_table=meta.page_table,
        kv_lens=meta.kv_lens,
        new_lens=jnp.ones(3, jnp.int32),
        layout=layout,
        bucket=Bucket(decode_requests=3, next_n=next_n, table_width=7),
    )
    last = jnp.array([prompt[-1] for prompt in PROMPTS], jnp.int32)
    ends = np.cumsum(held) - 1
    return (cache, draft_cache), decode, last, hidden[ends], table


@pytest.mark.parametrize("manager", ["v1", "v2"])
def test_decode_loop(manager):
    (cache, _), meta, last, _, _ = prefilled(manager, 1)
    batch = Batch(last=last, meta=meta, live=jnp.array([True, True, False]))
    loop = jax.jit(partial(decode_loop, target_step, None, count=COUNT))
    cache, batch, written = loop(cache=cache, batch=batch, sampling=Sampling.create())
    assert np.asarray(written.tokens)[:2].tolist() == [expected(p, COUNT) for p in PROMPTS[:2]]
    assert (np.asarray(written.tokens)[2] == -1).all()
    assert (int(written.turns), np.asarray(written.counts).tolist()) == (COUNT, [COUNT, COUNT, 0])
    # It goes on where it stopped, and the request that was left out can join.
    batch = replace(batch, live=jnp.array([True, False, True]))
    _, _, more = loop(cache=cache, batch=batch, sampling=Sampling.create())
    assert np.asarray(more.tokens)[0].tolist() == expected(PROMPTS[0], 2 * COUNT)[COUNT:]
    assert np.asarray(more.tokens)[2].tolist() == expected(PROMPTS[2], COUNT)


@pytest.mark.parametrize(
    ("drafts", "salt", "manager"),
    [
        (1, 1, "v2"),
        (3, 0, "v2"),
        (5, 1, "v1"),
        pytest.param(2, 1, "v1", marks=pytest.mark.full),
        pytest.param(4, 1, "v2", marks=pytest.mark.full),
        pytest.param(6, 1, "v2", marks=pytest.mark.full),
        pytest.param(7, 1, "v1", marks=pytest.mark.full),
    ],
)
def test_speculation_writes_the_same_text(drafts, salt, manager):
    """Ragged requests, drafts that err (salt 1) or never do (salt 0): the text is that of plain decoding."""
    caches, meta, last, hidden, table = prefilled(manager, drafts + 1)
    batch = DraftBatch.create(meta, last, hidden, jnp.ones(3, bool))
    loop = jax.jit(partial(speculative_loop, target_step, partial(draft_step, salt), None, count=COUNT))
    run = partial(loop, draft_table=table, sampling=Sampling.create())
    caches, batch, written = run(caches=caches, batch=batch)
    assert np.asarray(written.tokens).tolist() == [expected(p, COUNT) for p in PROMPTS]
    accepted, drafted = np.asarray(written.accepted), np.asarray(written.drafted)
    if salt == 0:
        # The draft's cache lacks the very first token, which the shorter prompts still see.
        assert (accepted[0], drafted[0]) == (6, 6)
    else:
        assert ((accepted > 0) & (accepted < drafted)).all()  # the case has both
    # Both caches and the pending tokens are good for going on.
    _, _, more = run(caches=caches, batch=replace(batch, live=jnp.ones(3, bool)))
    assert np.asarray(more.tokens).tolist() == [expected(p, 2 * COUNT)[COUNT:] for p in PROMPTS]


@pytest.mark.parametrize("places", [2, 5])
def test_plain_decoding_in_steps_as_wide_as_a_verification(places):
    """All token places of a request but the first stay empty: same text, and nothing is written for them."""
    (cache, _), meta, last, _, _ = prefilled("v2", places)
    batch = Batch(last=last, meta=meta, live=jnp.array([True, False, True]))
    loop = jax.jit(partial(decode_loop, target_step, None, count=COUNT))
    after, batch, written = loop(cache=cache, batch=batch, sampling=Sampling.create())
    assert np.asarray(written.tokens)[[0, 2]].tolist() == [expected(PROMPTS[r], COUNT) for r in (0, 2)]
    narrow = replace(meta, bucket=replace(meta.bucket, next_n=1))
    start = Batch(last=last, meta=narrow, live=jnp.array([True, False, True]))
    wanted, stands, _ = loop(cache=cache, batch=start, sampling=Sampling.create())
    assert cases.pool_bytes(after) == cases.pool_bytes(wanted)
    np.testing.assert_array_equal(batch.meta.kv_lens, stands.meta.kv_lens)


def speculative(salt: int = 1, drafts: int = 2, count: int = COUNT, **options):
    """The toy's loop with drafts that err, and its arguments."""
    caches, meta, last, hidden, table = prefilled("v2", drafts + 1)
    batch = DraftBatch.create(meta, last, hidden, jnp.ones(3, bool))
    loop = partial(speculative_loop, target_step, partial(draft_step, salt), None, count=count, **options)
    return loop, {"caches": caches, "batch": batch, "draft_table": table, "sampling": Sampling.create()}


def without_pages(meta: StepMetadata, pages: tuple[int, ...]) -> StepMetadata:
    """Each request has so many pages of 4 tokens and no more."""
    column = np.arange(meta.page_table.shape[1])[None, :]
    return replace(meta, page_table=jnp.where(column < np.array(pages)[:, None], meta.page_table, -1))


@pytest.mark.sample(0, 3, 5)
@pytest.mark.parametrize("pages", [(2, 1, 7), (1, 3, 2)])
@pytest.mark.parametrize("drafts", [None, 1, 4])
def test_a_request_pauses_where_its_pages_end(drafts, pages):
    """Right text as far as pages reach, the others go on, and so does it once it has more; no page, no token at all."""
    held = np.array([len(prompt) - 1 for prompt in PROMPTS])
    counts = np.minimum(COUNT, 4 * np.array(pages) - held)
    if drafts is None:
        (cache, _), meta, last, _, _ = prefilled("v2", 1)
        batch = Batch(last=last, meta=meta, live=jnp.ones(3, bool))
        loop = jax.jit(partial(decode_loop, target_step, None, count=COUNT))
        given = {"cache": cache, "sampling": Sampling.create()}
    else:
        loop, given = speculative(drafts=drafts)
        loop, batch = jax.jit(loop), given.pop("batch")
    few = replace(batch, meta=without_pages(batch.meta, pages))
    kept, stands, written = loop(batch=few, **given)
    assert written.counts.tolist() == counts.tolist()
    text = [expected(p, int(n)) + [-1] * (COUNT - int(n)) for p, n in zip(PROMPTS, counts, strict=True)]
    assert written.tokens.tolist() == text
    assert stands.meta.kv_lens.tolist() == (held + counts).tolist()
    paused = counts < COUNT
    assert (np.asarray(stands.live)[paused]).all()
    given |= {"cache" if drafts is None else "caches": kept}
    more = replace(stands.meta, page_table=batch.meta.page_table)
    *_, written = loop(batch=replace(stands, meta=more, live=jnp.asarray(paused)), **given)
    for row in np.flatnonzero(paused):
        assert written.tokens[row].tolist() == expected(PROMPTS[row], int(counts[row]) + COUNT)[counts[row] :]


def test_missing_draft_pages_change_no_text():
    """Drafts of tokens that the draft cache has no page for are guesses, and verified like all others."""
    loop, given = speculative(salt=0, drafts=3)
    loop = jax.jit(loop)
    *_, whole = loop(**given)
    column = jnp.arange(given["draft_table"].shape[1], dtype=jnp.int32)[None, :]
    given["draft_table"] = jnp.where(column < 3, given["draft_table"], -1)
    *_, few = loop(**given)
    assert few.tokens.tolist() == whole.tokens.tolist() == [expected(p, COUNT) for p in PROMPTS]
    assert int(few.turns) > int(whole.turns)


def primitives(jaxpr) -> list[tuple[str, dict]]:
    """Name and parameters of every operation, inner programs included."""
    found = []
    for equation in jaxpr.eqns:
        found.append((equation.primitive.name, equation.params))
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            found += primitives(inner) if hasattr(inner, "eqns") else []
    return found


def test_plain_loops_have_a_fixed_trip_count():
    """A loop of known length; the speculative one is a ``while``, or has a length if the turns are given."""
    (cache, _), meta, last, _, _ = prefilled("v2", 1)
    batch = Batch(last=last, meta=meta, live=jnp.ones(3, bool))
    plain = partial(decode_loop, target_step, None, count=COUNT)
    fixed, arguments = speculative(turns=5)
    programs = {
        "plain": jax.make_jaxpr(plain)(cache=cache, batch=batch, sampling=Sampling.create()),
        "fixed": jax.make_jaxpr(fixed)(**arguments),
        "while": jax.make_jaxpr(speculative()[0])(**arguments),
    }
    found = {name: primitives(program.jaxpr) for name, program in programs.items()}
    lengths = {n: [p["length"] for name, p in f if name == "scan"] for n, f in found.items()}
    assert COUNT in lengths["plain"] and 5 in lengths["fixed"]
    assert {n: sum(name == "while" for name, _ in f) for n, f in found.items()} == {
        "plain": 0,
        "fixed": 0,
        "while": 1,
    }


def test_a_fixed_number_of_turns():
    """Enough turns give what the ``while`` gives, bit for bit, however many more there are; too few leave requests live."""
    loop, arguments = speculative()
    wanted = jax.jit(loop)(**arguments)
    needed = int(wanted[2].turns)
    assert COUNT / 3 < needed < COUNT
    for turns in (needed, needed + 3):
        got = jax.jit(partial(loop, turns=turns))(**arguments)
        assert int(got[2].turns) == turns
        got = (*got[:2], replace(got[2], turns=wanted[2].turns))
        jax.tree.map(partial(np.testing.assert_array_equal, strict=True), got, wanted)
    _, batch, written = jax.jit(partial(loop, turns=2))(**arguments)
    assert np.asarray(batch.live).any()
    for tokens, number, prompt in zip(written.tokens, written.counts, PROMPTS, strict=True):
        assert 2 <= number < COUNT
        assert tokens.tolist() == expected(prompt, int(number)) + [-1] * (COUNT - int(number))
    with pytest.raises(ValueError, match="turns is 0, wanted at least 1, or None"):
        loop(turns=0, **arguments)


@pytest.mark.parametrize("watched", [False, True])
def test_programs_ask_for_no_transfer(watched):
    """Nothing in the compiled loops calls the host or sends to it; a step that reports to the host is seen."""

    def step(params, cache, meta, tokens):
        out = target_step(params, cache, meta, tokens)
        if watched:
            jax.debug.callback(lambda x: None, out[1])
        return out

    (cache, _), meta, last, _, _ = prefilled("v2", 1)
    batch = Batch(last=last, meta=meta, live=jnp.ones(3, bool))
    _, arguments = speculative()
    loops = (
        (partial(decode_loop, step, None, count=COUNT), {"cache": cache, "batch": batch, "sampling": Sampling.create()}),
        (partial(speculative_loop, step, partial(draft_step, 1), None, count=COUNT), arguments),
    )  # fmt: skip
    for loop, given in loops:
        text = jax.jit(lambda given, loop=loop: loop(**given)).lower(given).compile().as_text()
        calls = [word for word in ("callback", "outfeed", "infeed", " send", " recv") if word in text]
        assert bool(calls) == watched, calls


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, pytest.param(9.0, marks=pytest.mark.full)])
def test_what_is_none_is_the_same_as_a_number(temperature):
    """A program of any temperature and top_p, given 0 and 1, writes the text of the program made for them."""
    loop, arguments = speculative(drafts=3)
    sampling = Sampling.create(5, temperature)
    assert (sampling.temperature is None) == (temperature == 0) and sampling.top_p is None
    numbers = replace(sampling, temperature=jnp.float32(temperature), top_p=jnp.float32(1.0))
    texts = [jax.jit(loop)(**(arguments | {"sampling": s}))[2].tokens.tolist() for s in (sampling, numbers)]
    assert texts[0] == texts[1]
    assert (texts[0] == [expected(p, COUNT) for p in PROMPTS]) == (temperature == 0)


def test_greedy_programs_sort_nothing():
    """Nor do they draw random numbers: each of both would be launches in every turn."""
    loop, arguments = speculative()
    costly = {"sort", "random_bits", "random_fold_in", "top_k", "exp"}
    greedy = {name for name, _ in primitives(jax.make_jaxpr(loop)(**arguments).jaxpr)}
    assert not greedy & costly
    arguments["sampling"] = Sampling.create(0, 0.7, 0.9)
    drawn = {name for name, _ in primitives(jax.make_jaxpr(loop)(**arguments).jaxpr)}
    assert {"sort", "random_bits", "exp"} <= drawn


def test_one_trace_for_any_history():
    """Accepts, rejects, stops and continuations: the loop is traced once."""
    traces = []

    def counted(params, cache, meta, tokens):
        traces.append(1)
        return target_step(params, cache, meta, tokens)

    caches, meta, last, hidden, table = prefilled("v2", 3)
    loop = jax.jit(partial(speculative_loop, counted, partial(draft_step, 1), None, count=4))
    batch = DraftBatch.create(meta, last, hidden, jnp.ones(3, bool))
    text: list[list[int]] = [[], [], []]
    for turn in range(3):
        live = jnp.array([True, turn != 1, True])
        caches, batch, written = loop(
            caches=caches, batch=replace(batch, live=live), draft_table=table, sampling=Sampling.create()
        )
        for request, tokens in enumerate(np.asarray(written.tokens).tolist()):
            text[request] += [t for t in tokens if t >= 0]
    assert text == [expected(PROMPTS[0], 12), expected(PROMPTS[1], 8), expected(PROMPTS[2], 12)]
    assert len(traces) == 1


def test_stop_tokens_end_a_request_inside_a_turn():
    text = [expected(p, COUNT) for p in PROMPTS]
    stop = text[0][4]
    wanted = [t[: t.index(stop) + 1] if stop in t else t for t in text]
    caches, meta, last, hidden, table = prefilled("v2", 4)
    batch = DraftBatch.create(meta, last, hidden, jnp.ones(3, bool))
    loop = jax.jit(partial(speculative_loop, target_step, partial(draft_step, 0), None, count=COUNT))
    _, _, written = loop(
        caches=caches, batch=batch, draft_table=table, sampling=Sampling.create(stop=(stop,))
    )
    got = [[t for t in row if t >= 0] for row in np.asarray(written.tokens).tolist()]
    assert got == wanted
    assert np.asarray(written.counts).tolist() == [len(t) for t in wanted]


def test_stop_tokens_end_a_request_of_the_plain_loop():
    """It stands where it ended, the stop token not yet in the cache; others go on."""
    text = [expected(p, COUNT) for p in PROMPTS]
    stop = text[0][4]
    wanted = [t[: t.index(stop) + 1] if stop in t else t for t in text]
    assert len(wanted[0]) < COUNT
    (cache, _), meta, last, _, _ = prefilled("v2", 1)
    batch = Batch(last=last, meta=meta, live=jnp.ones(3, bool))
    loop = jax.jit(partial(decode_loop, target_step, None, count=COUNT))
    _, after, written = loop(cache=cache, batch=batch, sampling=Sampling.create(stop=(stop,)))
    assert [[t for t in row if t >= 0] for row in np.asarray(written.tokens).tolist()] == wanted
    counts = [len(t) for t in wanted]
    assert np.asarray(written.counts).tolist() == counts
    assert np.asarray(after.live).tolist() == [stop not in t for t in wanted]
    assert np.asarray(after.last).tolist() == [t[-1] for t in wanted]
    held = [len(p) - 1 + count for p, count in zip(PROMPTS, counts, strict=True)]
    assert np.asarray(after.meta.kv_lens).tolist() == held


def test_a_snapshot_can_be_continued_twice():
    """Without donation the old value stays good: two branches from one point do not see each other."""
    (cache, _), meta, last, _, _ = prefilled("v2", 1)
    start = Batch(last=last, meta=meta, live=jnp.ones(3, bool))
    loop = jax.jit(partial(decode_loop, target_step, None, count=5))
    other = replace(start, last=(last + 1) % VOCABULARY)
    first = loop(cache=cache, batch=start, sampling=Sampling.create())[2].tokens
    branch = loop(cache=cache, batch=other, sampling=Sampling.create())[2].tokens
    again = loop(cache=cache, batch=start, sampling=Sampling.create())[2].tokens
    np.testing.assert_array_equal(first, again)
    assert np.asarray(branch).tolist() == [expected([*p[:-1], (p[-1] + 1) % VOCABULARY], 5) for p in PROMPTS]


def test_memory_of_the_loops():
    """Contract 4: four times the slots, same temporaries; every pool is aliased."""
    sizes = []
    for slots in (48, 192):
        caches, meta, last, hidden, table = prefilled("v2", 2)
        grown = tuple(Cache.create(c.layout, slots) for c in caches)
        batch = DraftBatch.create(meta, last, hidden, jnp.ones(3, bool))
        loop = partial(speculative_loop, target_step, partial(draft_step, 1), None, count=COUNT)
        lowered = jax.jit(
            lambda caches, batch, table, sampling, loop=loop: loop(caches, batch, table, sampling=sampling),
            donate_argnums=0,
        ).lower(grown, batch, table, Sampling.create())
        memory = lowered.compile().memory_analysis()
        pools = sum(c.nbytes for c in grown)
        assert pools <= memory.alias_size_in_bytes <= pools + 4096
        sizes.append(memory.temp_size_in_bytes)
    assert abs(sizes[1] - sizes[0]) <= 4096


def test_errors_name_the_fix():
    caches, meta, last, hidden, table = prefilled("v2", 1)
    batch = DraftBatch.create(meta, last, hidden, jnp.ones(3, bool))
    with pytest.raises(ValueError, match="next_n is 1, wanted 2"):
        speculative_loop(
            target_step, partial(draft_step, 0), None, caches, batch, table, 4, Sampling.create()
        )
    plain = Batch(last=last, meta=meta, live=jnp.ones(3, bool))
    with pytest.raises(ValueError, match=r"count is 0, wanted at least 1.*Prefill first"):
        decode_loop(target_step, None, caches[0], plain, 0, Sampling.create())
    with pytest.raises(ValueError, match=r"temperature is -1.*Use temperature 0"):
        Sampling.create(temperature=-1.0)


# --- steps that return something else ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda out: (out[0], out[1][::2], out[2]), "step returned logits float32[3, 13], wanted 6 rows"),
        (lambda out: (out[0], out[1][:1], out[2]), "step returned logits float32[1, 13], wanted 6 rows"),
        (lambda out: out[:2], "step returned 2 values, wanted (cache, logits, hidden)"),
        (lambda out: out[1], "step returned float32[6, 13], wanted (cache, logits, hidden)"),
        (lambda out: (*out[:2], None), "step returned hidden None, wanted 6 rows"),
    ],
)
def test_a_step_of_another_kind_is_refused(change, words):
    """One row of logits a request would be cut in two by the loop, and halve the vocabulary in silence."""
    (cache, _), meta, last, _, _ = prefilled("v2", 2)
    batch = Batch(last=last, meta=meta, live=jnp.ones(3, bool))
    step = lambda *arguments: change(target_step(*arguments))
    with pytest.raises(ValueError, match=re.escape(f"decode_loop: {words}")):
        decode_loop(step, None, cache, batch, 2, Sampling.create())
