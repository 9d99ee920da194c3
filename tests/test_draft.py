"""Draft metadata, acceptance and rewinding, with values worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

import cases
from dsa_jax import draft, ops
from dsa_jax.cache import Cache
from dsa_jax.metadata import Bucket, StepMetadata

VERIFY = Bucket(decode_requests=3, next_n=4, table_width=4)


def target_meta(layout=None) -> StepMetadata:
    """Three requests in the middle of verifying 4 tokens each, pages of 4 tokens."""
    layout = layout or cases.layout()
    return StepMetadata.create(layout, VERIFY, [[3, 1, 9], [0, 2], [7, 8, 4, 5]], [10, 7, 13], [4, 4, 4])


def draft_layout(page_size: int = 2, full=(True,)):
    return cases.layout(page_size=page_size, full=full)


def same(a, b) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


# --- metadata ------------------------------------------------------------------------------------------------------


def test_lengths_of_the_target_pages_of_the_draft():
    meta, layout = target_meta(), draft_layout()
    table = jnp.arange(21, dtype=jnp.int32).reshape(3, 7)
    got = draft.draft_metadata(meta, layout, table)
    assert (got.layout, got.bucket) == (layout, replace(VERIFY, table_width=7))
    step = got.derive()
    # Request 1 is at positions 3..6; pages of 2 tokens, its slots are 7..13.
    np.testing.assert_array_equal(step.positions[4:8], [3, 4, 5, 6])
    np.testing.assert_array_equal(step.rows[4:8], [8 * 2 + 1, 9 * 2, 9 * 2 + 1, 10 * 2])
    np.testing.assert_array_equal(step.limits, meta.derive().limits)


def test_token_to_request_map_is_rebuilt_for_one_token_a_request():
    """B41: after a verify step of 4 tokens each, a draft step of 1 token belongs to requests 0, 1, 2, not 0, 0, 0."""
    table = jnp.arange(21, dtype=jnp.int32).reshape(3, 7)
    one = jnp.ones(3, jnp.int32)
    got = draft.draft_metadata(target_meta(), draft_layout(), table, one, next_n=1).derive()
    np.testing.assert_array_equal(got.requests, [0, 1, 2])
    np.testing.assert_array_equal(got.positions, [9, 6, 12])  # the last token of each
    assert len(set(np.asarray(got.rows).tolist())) == 3  # row 17 of the catalogue: distinct places


def test_ragged_new_tokens_map_to_their_requests():
    """B41: lengths 3, 1, 4 on a grid of 4."""
    got = replace(target_meta(), new_lens=jnp.array([3, 1, 4], jnp.int32)).derive()
    np.testing.assert_array_equal(got.requests, [0, 0, 0, -1, 1, -1, -1, -1, 2, 2, 2, 2])


@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_target_is_untouched(mode):
    """Metadata and pools of the target are the same bits after a draft pass, whose own pool changed."""
    meta, layout = target_meta(), draft_layout()
    cache, own = Cache.create(meta.layout, 23), Cache.create(layout, 40)
    before = jax.tree.map(np.array, (meta, cache))
    table = jnp.arange(21, dtype=jnp.int32).reshape(3, 7)

    def run(meta, own):
        step = draft.draft_metadata(meta, layout, table).derive()
        return ops.append_index_k(own, 0, jnp.ones((12, 8), jnp.float32), step)

    after = (jax.jit(run, donate_argnums=1) if mode == "jit" else run)(meta, own)
    same(before, (meta, cache))
    assert np.asarray(after.index_key).any()


def test_target_is_untouched_when_the_draft_raises():
    """B44: nothing was swapped, so nothing can stay swapped."""
    meta, layout = target_meta(), draft_layout()
    cache = Cache.create(meta.layout, 23)
    before = jax.tree.map(np.array, (meta, cache))
    table = jnp.arange(21, dtype=jnp.int32).reshape(3, 7)
    step = draft.draft_metadata(meta, layout, table).derive()
    with pytest.raises(ValueError, match="build the metadata with layout=cache.layout"):
        ops.append_index_k(
            cache, 0, jnp.ones((12, 8), jnp.float32), step
        )  # the draft's step on the target's cache
    same(before, (meta, cache))
    verified = ops.append_index_k(cache, 0, jnp.ones((12, 8), jnp.float32), meta.derive())
    rows = np.asarray(verified.index_key)[:: cases.layout().scale("index_key")]
    assert sorted(np.nonzero(rows.any(axis=(1, 2)))[0].tolist()) == [
        0,
        1,
        2,
        4,
        5,
        9,
    ]  # slots of the target's table


def test_errors_name_the_fix():
    table = jnp.zeros((2, 3), jnp.int32)
    with pytest.raises(
        ValueError, match=r"draft_page_table is int32\[2, 3\], wanted int32\[3, W_draft\].*one table row"
    ):
        draft.draft_metadata(target_meta(), draft_layout(), table)
    with pytest.raises(ValueError, match="target is 'metadata', wanted a StepMetadata"):
        draft.draft_metadata("metadata", draft_layout(), table)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"new_lens is float32\[3\].*next_n is 0"):
        draft.draft_metadata(
            target_meta(), draft_layout(), jnp.zeros((3, 3), jnp.int32), jnp.ones(3, jnp.float32), next_n=0
        )


def test_rewind_keeps_the_first_tokens_and_never_goes_below_what_was_there():
    meta = target_meta()
    got = draft.rewind(meta, jnp.array([2, 0, 9], jnp.int32))
    np.testing.assert_array_equal(got.kv_lens, [8, 3, 13])
    np.testing.assert_array_equal(got.new_lens, [2, 0, 4])
    np.testing.assert_array_equal(draft.rewind(meta, jnp.full(3, -5, jnp.int32)).kv_lens, [6, 3, 9])


def test_any_chain_of_length_changes_gives_the_same_metadata_as_building_it_at_once():
    meta = target_meta()
    chained = draft.advance(
        draft.rewind(meta, jnp.array([1, 4, 2], jnp.int32)), jnp.array([1, 1, 1], jnp.int32), next_n=1
    )
    at_once = StepMetadata.create(
        meta.layout, replace(VERIFY, next_n=1), [[3, 1, 9], [0, 2], [7, 8, 4, 5]], [8, 8, 12], [1, 1, 1]
    )
    same(chained.derive(), at_once.derive())


def test_row_limits_of_verified_tokens():
    """B42: lengths 10 and 7 with 4 new tokens: 7, 8, 9, 10 and 4, 5, 6, 7."""
    np.testing.assert_array_equal(target_meta().derive().limits[:8], [7, 8, 9, 10, 4, 5, 6, 7])


# --- acceptance ----------------------------------------------------------------------------------------------------


def test_greedy_acceptance():
    best = jnp.array([[1, 2, 3], [1, 2, 3], [5, 2, 3], [1, 4, 3]], jnp.int32)
    logits = jax.nn.one_hot(best, 8, dtype=jnp.float32)
    drafts = jnp.array([[1, 2], [1, 7], [1, 2], [1, 4]], jnp.int32)
    lens = jnp.array([2, 2, 2, 1], jnp.int32)
    accepted, token = draft.accept_greedy(logits, drafts, lens)
    np.testing.assert_array_equal(accepted, [2, 1, 0, 1])
    np.testing.assert_array_equal(token, [3, 2, 5, 4])


def test_probabilities_cut_by_mass():
    logits = jnp.log(jnp.array([0.5, 0.2, 0.2, 0.1], jnp.float32))
    np.testing.assert_allclose(
        draft.probabilities(logits, 1.0, 0.6), [5 / 7, 2 / 7, 0, 0], rtol=1e-6
    )  # lower id first
    np.testing.assert_allclose(draft.probabilities(logits, 1.0, 1.0), [0.5, 0.2, 0.2, 0.1], rtol=1e-6)
    np.testing.assert_allclose(draft.probabilities(logits, 0.5, 1.0), np.array([25, 4, 4, 1]) / 34, rtol=1e-5)
    np.testing.assert_array_equal(draft.probabilities(logits, 0.0), [1, 0, 0, 0])


def _outputs(accept, count=20_000):
    """First and second token of the output over many draws, where the draft's distribution is far from the target's."""
    vocabulary, drafts = 8, 2
    target = draft.probabilities(
        2 * jax.random.normal(jax.random.key(1), (drafts + 1, vocabulary)), 0.8, 0.95
    )
    given = draft.probabilities(2 * jax.random.normal(jax.random.key(2), (drafts, vocabulary)), 0.8)
    draws = jax.random.split(jax.random.key(3), count)
    proposed = jax.vmap(lambda key: jax.random.categorical(key, jnp.log(given)))(draws).astype(jnp.int32)
    every = (count,)
    accepted, token = accept(
        jax.random.split(jax.random.key(4), count),
        jnp.broadcast_to(target, every + target.shape),
        jnp.broadcast_to(given, every + given.shape),
        proposed,
        jnp.full(every, drafts, jnp.int32),
    )
    first = jnp.where(accepted >= 1, proposed[:, 0], token)
    second = jnp.where(accepted >= 2, proposed[:, 1], token)[np.asarray(accepted) >= 1]
    return np.asarray(target, np.float64), np.asarray(first), np.asarray(second)


def test_sampled_acceptance_is_lossless():
    target, first, second = _outputs(draft.accept_sampled)
    for tokens, wanted in ((first, target[0]), (second, target[1])):
        seen = np.bincount(tokens, minlength=8)
        assert not seen[wanted == 0].any()
        kept = wanted > 0
        assert chisquare(seen[kept], wanted[kept] / wanted[kept].sum() * seen.sum()).pvalue > 0.001


def test_always_accepting_fails_the_same_test():
    def always(keys, target, given, proposed, lens):
        return lens, jnp.zeros_like(lens)

    target, first, _ = _outputs(always)
    seen, kept = np.bincount(first, minlength=8), target[0] > 0
    outside = seen[~kept].any()
    assert (
        outside or chisquare(seen[kept], target[0][kept] / target[0][kept].sum() * seen.sum()).pvalue < 1e-6
    )


@pytest.mark.full
def test_a_draft_that_is_the_target_is_always_kept():
    """B44: identical distributions accept every token."""
    p = draft.probabilities(jax.random.normal(jax.random.key(0), (500, 4, 16)), 1.0)
    drafts = jax.random.categorical(jax.random.key(1), jnp.log(p[:, :3])).astype(jnp.int32)
    accepted, _ = draft.accept_sampled(
        jax.random.split(jax.random.key(2), 500), p, p[:, :3], drafts, jnp.full((500,), 3, jnp.int32)
    )
    np.testing.assert_array_equal(accepted, 3)


def test_behind_the_drafts_that_count_the_target_alone_is_drawn_from():
    """Nothing was proposed at that place, so nothing may be taken off the target for it: it is sure of token 2 there."""
    target = jnp.tile(jax.nn.one_hot(jnp.array([0, 2, 1]), 4), (300, 1, 1))
    given = jnp.tile(jnp.array([[1, 0, 0, 0], [0.0, 0.5, 0.5, 0]]), (300, 1, 1))
    target = target.at[:, 1].set(jnp.array([0.0, 0.25, 0.75, 0]))
    drafts, keys = (
        jnp.tile(jnp.array([[0, 2]], jnp.int32), (300, 1)),
        jax.random.split(jax.random.key(1), 300),
    )
    accepted, token = draft.accept_sampled(keys, target, given, drafts, jnp.ones(300, jnp.int32))
    assert (accepted == 1).all()
    # The residual of the draft that does not count would be token 2 alone.
    assert 40 < int((token == 1).sum()) < 115
    assert ((token == 1) | (token == 2)).all()


def test_drafts_that_do_not_count_are_not_kept():
    p = jnp.full((2, 3, 4), 0.25, jnp.float32)
    accepted, token = draft.accept_sampled(
        jax.random.split(jax.random.key(0), 2),
        p,
        p[:, :2],
        jnp.zeros((2, 2), jnp.int32),
        jnp.array([0, 1], jnp.int32),
    )
    np.testing.assert_array_equal(accepted, [0, 1])
    assert ((token >= 0) & (token < 4)).all()
