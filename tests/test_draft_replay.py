"""What a replay of draft layers swaps and restores elsewhere, as values: rows 32 to 35, B44, random histories."""

from __future__ import annotations

import re
from dataclasses import fields
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cases
import test_loops as toy
import toy_layer
from dsa_jax import ops
from dsa_jax.cache import Cache
from dsa_jax.draft import accept_greedy, advance, draft_metadata, rewind
from dsa_jax.loops import Batch, Sampling, decode_loop
from dsa_jax.metadata import Bucket, StepMetadata
from numpy_model import attention

ROOT = Path(__file__).resolve().parents[1]
MIXED = Bucket(
    context_requests=1, context_tokens=4, decode_requests=2, next_n=2, table_width=3, gathered_keys=9
)


def mixed_target() -> StepMetadata:
    """A context with a cached prefix and two decode requests, pages of 4."""
    return StepMetadata.create(cases.layout(), MIXED, [[3, 1], [0, 2, 6], [7]], [7, 9, 3], [3, 2, 1])


def mixed_draft(layout=None) -> tuple[StepMetadata, StepMetadata]:
    """Target and draft metadata; the draft has pages of 2 and one layer."""
    target = mixed_target()
    layout = layout or cases.layout(page_size=2, full=(True,))
    table = jnp.array([[10, 11, 12, 13, -1], [20, 21, 22, 0, 1], [5, 6, -1, -1, -1]], jnp.int32)
    return target, draft_metadata(target, layout, table)


def same(a, b) -> None:
    jax.tree.map(partial(np.testing.assert_array_equal, strict=True), a, b)


# --- rows 32 to 35 of the catalogue --------------------------------------------------------------------------------


def test_row_32_a_draft_without_an_indexer():
    """Its metadata is the same kind of value; it has KEY pages only, and indexer ops refuse its cache by name."""
    target, meta = mixed_draft(cases.layout(page_size=2, full=(False,)))
    before = jax.tree.map(np.array, target)
    own = cases.poisoned(meta.layout, 30)
    assert set(own.pools()) == {"key"}
    step = cases.derive(meta)
    n = step.bucket.tokens
    latent, rope = np.ones((n, cases.LATENT), np.float32), np.ones((n, cases.ROPE), np.float32)
    own = cases.append_latent(own, 0, latent, rope, step)
    written = np.argwhere((np.asarray(own.key) == 1).all(axis=-1))
    assert sorted((written[:, 0] * 2 + written[:, 1]).tolist()) == sorted(
        row for row in step.rows.tolist() if row >= 0
    )
    with pytest.raises(ValueError, match="shared-indexer layer"):
        ops.append_index_k(own, 0, jnp.ones((n, 8), jnp.float32), step)
    same(before, target)


def test_row_32_a_look_alike_is_not_taken_for_the_real_one():
    """A cache that has every array of the right name and shape, but another layout, is refused."""
    target, _ = mixed_draft()
    other = cases.layout(scale_rule="fp32")
    assert other != target.layout
    cache = Cache.create(other, cases.SLOTS)
    with pytest.raises(ValueError, match="layout"):
        ops.append_index_k(cache, 0, jnp.ones((8, 8), jnp.float32), target.derive())


def test_row_33_everything_derived_is_the_drafts():
    """Rows, tables and gathered rows follow the draft's pages, and all that comes from lengths is the target's."""
    target, meta = mixed_draft()
    before = jax.tree.map(np.array, (target, cases.derive(target)))
    got, mine = cases.derive(meta), cases.derive(target)
    assert got.page_table.tolist() == [[10, 11, 12, 13, -1], [20, 21, 22, 0, 1], [5, 6, -1, -1, -1]]
    # Positions 4, 5, 6 of the context; 7, 8 of the first decode request; 2 of the second.
    assert got.rows.tolist() == [24, 25, 26, -1, 1, 2, 12, -1]
    for name in ("kv_lens", "new_lens", "requests", "positions", "limits", "key_starts", "key_ends"):
        np.testing.assert_array_equal(getattr(got, name), getattr(mine, name), err_msg=name)
    same(before, (target, cases.derive(target)))


def test_row_34_gathered_rows_come_from_the_drafts_table():
    """The context has a cached prefix of 4: all 7 of its keys, from the draft's slots, then nothing."""
    target, meta = mixed_draft()
    assert cases.derive(meta).gather_rows.tolist() == [20, 21, 22, 23, 24, 25, 26, -1, -1]
    assert cases.derive(target).gather_rows.tolist() == [12, 13, 14, 15, 4, 5, 6, -1, -1]


def test_row_35_a_missing_table_is_refused():
    """Nothing is half swapped: the error comes before there is any draft metadata, and no plan is kept to invalidate."""
    target = mixed_target()
    before = jax.tree.map(np.array, target)
    for wrong in (
        jnp.zeros((0, 3), jnp.int32),
        jnp.zeros(3, jnp.int32),
        jnp.zeros((3, 2), jnp.float32),
    ):
        with pytest.raises(
            ValueError, match=r"draft_metadata: draft_page_table is .*wanted int32\[3, W_draft\]"
        ):
            draft_metadata(target, cases.layout(page_size=2), wrong)
    same(before, target)
    assert {f.name for f in fields(StepMetadata)} == {"page_table", "kv_lens", "new_lens", "layout", "bucket"}


# --- whose selection a draft uses ----------------------------------------------------------------------------------

SEQUENCE = [3, 14, 15, 9, 26, 5]
VERIFY = Bucket(decode_requests=1, next_n=2, table_width=2)


def verified(fail: bool = False, draft=None):
    """Target on slots 3, 1: prompt of 4, a draft pass in between, then two tokens verified at once."""
    layout = cases.layout()
    cache, _, _ = toy_layer.prefill(cases.poisoned(layout), [3, 1], SEQUENCE, 0, 4)
    meta = StepMetadata.create(layout, VERIFY, [[3, 1]], [6], [2])
    before = cases.pool_bytes(cache), jax.tree.map(np.array, meta)
    if draft is not None:
        if fail:
            with pytest.raises(RuntimeError, match="half-way"):
                draft(meta)
        else:
            draft(meta)
    assert cases.pool_bytes(cache) == before[0]
    same(before[1], meta)
    cache, chosen, out = toy_layer.forward(cache, meta, np.array(SEQUENCE[4:], np.int32))
    toy_layer.check(chosen, out, SEQUENCE, [4, 5])
    return cache, chosen, out


def draft_attention(own: Cache, meta: StepMetadata, tokens: list[int], choose):
    """A draft layer over the newest token: ``choose`` gives the positions that it attends to."""
    step = cases.derive(meta)
    ids = np.array(tokens)
    latent = toy_layer.LATENTS[ids]
    local, own = choose(own, step, ids)
    own = cases.append_latent(own, 0, latent[:, : cases.LATENT], latent[:, cases.LATENT :], step)
    rows = cases.to_rows(local, step)
    out, _ = cases.sparse_mla(toy_layer.ATTENTION[ids], own, 0, rows, toy_layer.SCALE)
    return own, np.asarray(out)


def own_prefill(layout) -> Cache:
    """A draft cache on slots 0, 2 with the latents (and the index keys, where there are any) of the first five tokens."""
    bucket = Bucket(context_requests=1, context_tokens=5, table_width=2)
    step = cases.derive(StepMetadata.create(layout, bucket, [[0, 2]], [5], [5]))
    latent = toy_layer.LATENTS[SEQUENCE[:5]]
    own = cases.append_latent(
        cases.poisoned(layout, 3), 0, latent[:, : cases.LATENT], latent[:, cases.LATENT :], step
    )
    if layout.full[0]:
        own = cases.append_index_k(own, 0, toy_layer.KEYS[SEQUENCE[:5]], step)
    return own


def own_indexer(own, step, ids):
    own = cases.append_index_k(own, 0, toy_layer.KEYS[ids], step)
    return cases.select_tokens(toy_layer.QUERIES[ids], toy_layer.WEIGHTS[ids], own, 0, step, toy_layer.K), own


def everything(own, step, ids):
    local = np.arange(8, dtype=np.int32)[None, :]
    return jnp.where(local < np.asarray(step.limits)[:, None], local, -1), own


@pytest.mark.parametrize("kind", ["own indexer", "the target's selection", "no indexer"])
def test_b44_draft_and_target_keep_to_their_caches(kind):
    """Target on slots [3, 1], draft on [0, 2]: neither sees the other, whatever the draft attends to."""
    layout = cases.layout(full=(kind == "own indexer",))
    chosen = np.asarray(toy_layer.reference(SEQUENCE)[0][5], np.int32)
    outs = []

    def draft(meta):
        table, one = jnp.array([[0, 2]], jnp.int32), jnp.ones(1, jnp.int32)
        own_meta = draft_metadata(meta, layout, table, one, next_n=1)
        choose = {
            "own indexer": own_indexer,
            "the target's selection": lambda own, step, ids: (jnp.asarray(chosen[None]), own),
            "no indexer": everything,
        }[kind]
        own, out = draft_attention(own_prefill(layout), own_meta, SEQUENCE[5:], choose)
        assert np.isnan(np.asarray(own.key)[1]).all()  # slot 1 is the target's, here it was never written
        outs.append(out[0])

    verified(draft=draft)
    if kind == "no indexer":
        wanted = attention(
            toy_layer.ATTENTION[SEQUENCE[5]], toy_layer.LATENTS[SEQUENCE], cases.LATENT, toy_layer.SCALE
        )
        wanted = wanted[0]
    else:  # positions are the same in both caches, so a selection can be passed from one to the other
        wanted = toy_layer.reference(SEQUENCE)[1][5]
    np.testing.assert_allclose(outs[0], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_b44_a_draft_that_raises_half_way(mode):
    """After its first write, in Python or inside a running program: the target's next step is as if it had not been."""
    layout = cases.layout(full=(True,))

    def explode(_):
        raise RuntimeError("half-way")

    def draft(meta):
        own_meta = draft_metadata(
            meta, layout, jnp.array([[0, 2]], jnp.int32), jnp.ones(1, jnp.int32), next_n=1
        )

        def run(own, own_meta):
            step = own_meta.derive()
            own = ops.append_index_k(own, 0, jnp.asarray(toy_layer.KEYS[SEQUENCE[5:]]), step)
            if mode == "eager":
                explode(own)
            return own, jax.pure_callback(explode, jax.ShapeDtypeStruct((), jnp.float32), own.index_key.sum())

        out = (jax.jit(run, donate_argnums=0) if mode == "compiled" else run)(own_prefill(layout), own_meta)
        jax.block_until_ready(out)

    good, bad = verified(), verified(fail=True, draft=draft)
    assert cases.pool_bytes(good[0]) == cases.pool_bytes(bad[0])
    same(good[1:], bad[1:])


# --- random histories ----------------------------------------------------------------------------------------------

PLACES = 4
TRACES = []


@jax.jit
def turn(cache: Cache, meta: StepMetadata, tokens, added, forced):
    """Write up to four tokens for each request; keep all (forced) or the drafts that the target agrees with."""
    TRACES.append(1)
    meta = advance(meta, added)
    cache, logits, _ = toy.target_step(None, cache, meta, tokens.reshape(-1))
    accepted, token = accept_greedy(logits.reshape(3, PLACES, -1), tokens[:, 1:], jnp.maximum(added - 1, 0))
    last = jnp.argmax(logits.reshape(3, PLACES, -1), axis=-1).astype(jnp.int32)
    last = jnp.take_along_axis(last, jnp.maximum(added - 1, 0)[:, None], axis=1)[:, 0]
    kept = jnp.where(forced, added, jnp.minimum(accepted + 1, added))
    return cache, rewind(meta, kept), kept, jnp.where(forced, last, token)


actions = st.tuples(
    st.sampled_from(["rest", "propose", "extend"]),
    st.integers(0, 3),
    st.lists(st.booleans(), min_size=3, max_size=3),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(actions, actions, actions), min_size=1, max_size=6))
def test_any_history_equals_plain_decoding(history):
    """Each request rests, proposes tokens (right or wrong) or is given text; the next token is always that of its text."""
    (cache, _), meta, _, _, _ = toy.prefilled("v2", PLACES)
    texts = [list(p) for p in toy.PROMPTS]
    for acts in history:
        tokens, added, forced = np.zeros((3, PLACES), np.int32), [0, 0, 0], [False] * 3
        for r, (kind, number, right) in enumerate(acts):
            room = 28 - len(texts[r])
            if kind == "rest" or room < 1:
                continue
            number = min(number, room - 1)
            true = toy.expected(texts[r], number)
            more = [(t + (not ok)) % toy.VOCABULARY for t, ok in zip(true, right)]
            tokens[r, : number + 1], added[r], forced[r] = [texts[r][-1], *more], number + 1, kind == "extend"
        cache, meta, kept, token = turn(
            cache, meta, jnp.asarray(tokens), jnp.array(added, jnp.int32), jnp.array(forced)
        )
        for r in range(3):
            if not added[r]:
                assert int(kept[r]) == 0
                continue
            drafts = tokens[r, 1 : added[r]].tolist()
            agreed = 0
            while (
                agreed < len(drafts) and drafts[agreed] == toy.expected([*texts[r], *drafts[:agreed]], 1)[0]
            ):
                agreed += 1
            texts[r] += drafts if forced[r] else drafts[:agreed]
            assert int(kept[r]) == (len(drafts) if forced[r] else agreed) + 1
            assert int(token[r]) == toy.expected(texts[r], 1)[0]
            texts[r].append(int(token[r]))
        assert np.asarray(meta.kv_lens).tolist() == [len(t) - 1 for t in texts]
    assert len(TRACES) == 1


# --- snapshots and the docs ----------------------------------------------------------------------------------------


def test_a_snapshot_costs_one_copy_of_the_pools():
    """Without donation the program makes new pools of the same size; with it there is nothing new. Metadata is small."""
    (cache, _), meta, last, _, _ = toy.prefilled("v2", 1)
    batch = Batch(last=last, meta=meta, live=jnp.ones(3, bool))
    loop = partial(decode_loop, toy.target_step, None, count=3)
    temporary = []
    for donated in ((), ("cache",)):
        lowered = jax.jit(loop, donate_argnames=donated).lower(
            cache=Cache.create(cache.layout, 400), batch=batch, sampling=Sampling.create()
        )
        memory = lowered.compile().memory_analysis()
        pools = Cache.abstract(cache.layout, 400).nbytes
        assert pools <= memory.output_size_in_bytes <= pools + 2048
        assert memory.alias_size_in_bytes == 0 if not donated else memory.alias_size_in_bytes >= pools
        temporary.append(memory.temp_size_in_bytes)
    assert max(temporary) < pools / 10  # no second copy
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(meta)) < 512


def test_every_test_that_the_docs_name_exists():
    text = (ROOT / "docs" / "draft_replay.md").read_text()
    named = set(re.findall(r"`(test_\w+)\.(test_\w+)`", text))
    assert len(named) > 15
    for file, name in named:
        found = [*(ROOT / "tests").rglob(f"{file}.py")]
        assert found, f"{file}.py does not exist"
        assert re.search(rf"^def {name}\(", found[0].read_text(), re.MULTILINE), (
            f"{file}.{name} does not exist"
        )
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(re.search(r"`test_\w+\.test_\w+`|Test \||---", row) for row in rows), "a row without a test"


ITEMS = {
    "Swapped": (
        "cache manager",
        "key-cache block offsets on the device",
        "the same on the host",
        "block ids per sequence, twice",
        "indexer block offsets, host and device",
        "slot mappings of data, host and device",
        "slot mappings of scales, host and device",
        "block table of the selection",
        "block tables expanded for several new tokens, host and device",
        "full-context mappings",
    ),
    "Recomputed": (
        "indexer tables",
        "expanded table",
        "slot mappings of the new tokens",
        "full-context mapping",
        "view of the pool",
        "schedule of the attention kernel",
    ),
    "Restored": ("manager's fields", "pool view and schedules", "full-context mappings"),
    "Left alone": (
        "token-to-request map",
        "sequence lengths and their sums",
        "schedules of the indexer's scores",
        "scratch of the top-k kernel",
        "local layer number",
    ),
    "No replay at all": (
        "no draft manager",
        "metadata of another class",
        "no block offsets",
        "nothing was saved",
    ),
}
"""What the replay of an engine that rebinds its metadata touches, or does not."""


@pytest.mark.parametrize("heading", ITEMS)
def test_every_item_of_a_replay_is_in_the_docs(heading):
    """In the table under its heading, as the first words of a row."""
    text = (ROOT / "docs" / "draft_replay.md").read_text()
    table = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    assert [item for item in ITEMS[heading] if not any(item in row for row in rows)] == []
