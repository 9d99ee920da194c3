"""The host loop with a toy model whose next token depends on every token of its own sequence, through the paged cache."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from dsa_jax import ops
from dsa_jax.engine import Engine
from dsa_jax.sampling import sample
from dsa_jax.xla.gather import read_rows

VOCABULARY = 101
PROMPTS = [[7, 3, 99, 4, 12], [50], [1, 2, 3, 4, 5, 6, 7, 8, 9]]


def toy_step(params, cache, meta, tokens):
    """Write each token into the cache, read the whole sequence back, hash it into the next token."""
    step = meta.derive()
    latent = jnp.broadcast_to(tokens.astype(jnp.float32)[:, None], (tokens.shape[0], cases.LATENT))
    cache = ops.append_latent(cache, 1, latent, latent[:, : cases.ROPE], step)
    columns = step.bucket.table_width * step.layout.page_size
    local = jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32)[None, :], (tokens.shape[0], columns))
    rows = ops.to_rows(jnp.where(local < step.limits[:, None], local, -1), step)
    values = read_rows(cache, "key", "key", 1, rows)[..., 0].astype(jnp.int32)  # pyright: ignore[reportArgumentType]
    state = jnp.sum(jnp.where(rows >= 0, (values + 1) * (local + params), 0), axis=1) % VOCABULARY
    distance = (jnp.arange(VOCABULARY, dtype=jnp.int32)[None, :] - state[:, None]) % VOCABULARY
    return cache, -distance.astype(jnp.float32)


def reference(prompt: list[int], tokens: int) -> list[int]:
    """The same without any cache."""
    sequence = list(prompt)
    for _ in range(tokens):
        sequence.append(sum((t + 1) * (i + 1) for i, t in enumerate(sequence)) % VOCABULARY)
    return sequence[len(prompt) :]


def engine(manager: str = "v2", step=toy_step, page_size: int = 4, **sizes) -> Engine:
    """A small engine; pools as small as the tests need."""
    layout = cases.layout(manager, page_size=page_size)
    defaults = dict(slots=16, max_requests=3, max_length=24, prefill_chunk=6)
    return Engine(step, jnp.int32(1), layout, **(defaults | sizes))


def texts(run, count: int) -> list[list[int]]:
    """New tokens by request."""
    out: list[list[int]] = [[] for _ in range(count)]
    for new in run:
        out[new.request].append(new.token)
    return out


@pytest.mark.sample(0, 1, 3)
@pytest.mark.parametrize(
    ("manager", "page_size", "chunk"),
    [("v2", 4, 6), ("v1", 4, 6), ("v2", 1, 1), ("v2", 16, 64), ("v1", 4, 7)],
)
def test_ragged_prompts(manager, page_size, chunk):
    """Three prompts as one batch equal three runs without a cache, whatever the chunks and pages."""
    run = engine(manager, page_size=page_size, prefill_chunk=chunk, slots=60)
    assert texts(run.generate(PROMPTS, 8), 3) == [reference(p, 8) for p in PROMPTS]
    assert run.pool.free_slots == 60


def test_one_engine_serves_many():
    """Pages are reused with old keys in them; positions come with the tokens; every bucket is traced once."""
    traces = []

    def counted(params, cache, meta, tokens):
        traces.append(meta.bucket)
        return toy_step(params, cache, meta, tokens)

    run = engine(step=counted)
    before = cases.pool_bytes(run.cache)
    assert run.warmup() > 0
    assert cases.pool_bytes(run.cache) == before  # empty batches write nothing
    for prompts in (PROMPTS, PROMPTS[:1], PROMPTS[::-1], [[5] * 16]):
        new = list(run.generate(prompts, 8))
        assert texts(new, len(prompts)) == [reference(p, 8) for p in prompts]
        for request, prompt in enumerate(prompts):
            assert [n.position for n in new if n.request == request] == list(
                range(len(prompt), len(prompt) + 8)
            )
    assert len(traces) == 2
    assert run.timing.prefill_tokens == sum(map(len, PROMPTS)) * 2 + 5 + 16
    assert run.timing.decode_tokens == 7 * (3 + 1 + 3 + 1)
    assert run.timing.decode_steps == 7 * 4
    assert run.timing.decode_tokens_per_second > 0


def test_stop_tokens_end_one_sequence():
    run = engine()
    whole = [reference(p, 8) for p in PROMPTS]
    stop = whole[0][2]
    expected = [text[: text.index(stop) + 1] if stop in text else text for text in whole]
    assert texts(run.generate(PROMPTS, 8, stop=[stop]), 3) == expected
    assert len(expected[0]) <= 3
    first = whole[1][0]
    assert [n.token for n in run.generate([PROMPTS[1]], 8, stop=[first])] == [first]


def test_sampling_depends_on_seed_request_and_position_only():
    run = engine()
    draw = lambda prompts, seed, temperature=30.0: texts(
        run.generate(prompts, 8, temperature=temperature, seed=seed), len(prompts)
    )
    alone, together = draw(PROMPTS[:1], 3), draw(PROMPTS, 3)
    assert alone[0] == together[0]
    assert draw(PROMPTS, 3) == together
    assert draw(PROMPTS, 4) != together
    assert together[0] != reference(PROMPTS[0], 8)
    assert (
        draw([[9, 9], [9, 9]], 3)[0] != draw([[9, 9], [9, 9]], 3)[1]
    )  # equal prompts get streams of their own
    assert draw(PROMPTS, 3, temperature=1e-6) == [reference(p, 8) for p in PROMPTS]


def test_sample_by_hand():
    logits = jnp.array([[0.0, 5.0, 5.0], [3.0, 2.0, 1.0]])
    rows, stream = jnp.array([0, 1, 1], jnp.int32), jnp.zeros((3, 2), jnp.int32)
    assert sample(logits, rows, jax.random.key(0), stream, jnp.float32(0)).tolist() == [1, 0, 0]
    many = jnp.stack([jnp.zeros(4000, jnp.int32), jnp.arange(4000, dtype=jnp.int32)], axis=1)
    drawn = np.asarray(sample(logits, jnp.ones(4000, jnp.int32), jax.random.key(0), many, jnp.float32(2.0)))
    wanted = np.exp([1.5, 1.0, 0.5]) / np.exp([1.5, 1.0, 0.5]).sum()
    np.testing.assert_allclose(np.bincount(drawn, minlength=3) / 4000, wanted, atol=0.03)


# --- pages ---------------------------------------------------------------------------------------------------------


def test_exactly_enough_pages():
    """5 + 8 - 1 = 12 positions are three pages of 4: three slots do, two do not, and nothing is held after a refusal."""
    assert texts(engine(slots=3, max_requests=1).generate(PROMPTS[:1], 8), 1) == [reference(PROMPTS[0], 8)]
    small = engine(slots=2, max_requests=1)
    with pytest.raises(
        ValueError, match=r"need 3 pages of 4 tokens, the pool has 2 free: build the engine with more slots"
    ):
        list(small.generate(PROMPTS[:1], 8))
    assert small.pool.free_slots == 2


def test_an_abandoned_run_gives_its_pages_back():
    run = engine()
    started = run.generate(PROMPTS, 8)
    next(started)
    assert run.pool.free_slots < 16
    started.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert run.pool.free_slots == 16
    assert texts(run.generate(PROMPTS, 8), 3) == [reference(p, 8) for p in PROMPTS]


def test_a_failing_step_gives_its_pages_back():
    def failing(params, cache, meta, tokens):
        raise RuntimeError("the model is broken")

    run = engine(step=failing)
    with pytest.raises(RuntimeError, match="the model is broken"):
        list(run.generate(PROMPTS, 8))
    assert run.pool.free_slots == 16


def test_two_runs_may_interleave():
    """Each has pages of its own, so both get their own text."""
    run = engine()
    first, second = run.generate(PROMPTS[:2], 6), run.generate(PROMPTS[1:], 6)
    got: list[list] = [[], []]
    for a, b in itertools.zip_longest(first, second):
        got[0] += [a] if a else []
        got[1] += [b] if b else []
    assert texts(got[0], 2) == [reference(p, 6) for p in PROMPTS[:2]]
    assert texts(got[1], 2) == [reference(p, 6) for p in PROMPTS[1:]]
    assert run.pool.free_slots == 16


def test_prompts_may_be_reused_at_once():
    """The caller may change its lists while the text is still coming."""
    run, prompt = engine(prefill_chunk=2), [7, 3, 99, 4, 12]
    started = run.generate([prompt], 4)
    prompt[:] = [0, 0]
    assert [n.token for n in started] == reference([7, 3, 99, 4, 12], 4)


def test_planted_shared_table_is_seen():
    """If every request got the pages of the first, the reference would differ."""
    run = engine()
    run_step = run._run
    run._run = lambda bucket, tables, *rest: run_step(bucket, [tables[0]] * len(tables), *rest)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        got = texts(run.generate(PROMPTS[1:], 4), 2)
    except ValueError:
        return  # the shorter table was refused, which is as good
    assert got != [reference(p, 4) for p in PROMPTS[1:]]


# --- errors --------------------------------------------------------------------------------------------------------


def test_everything_wrong_is_said_at_once_before_anything_runs():
    ran = []

    def step(params, cache, meta, tokens):
        ran.append(1)
        return toy_step(params, cache, meta, tokens)

    run = engine(step=step)
    with pytest.raises(ValueError, match="generate: ") as error:
        run.generate([[], [1] * 20, [1], [2]], 5, temperature=-1)
    message = str(error.value)
    for part in (
        "temperature is -1, wanted at least 0",
        "4 prompts, wanted 1 to 3 (max_requests)",
        "prompt 0 is empty, wanted at least one token",
        "prompt 1 has 20 tokens; with 5 new ones that is more than the context of 24",
    ):
        assert part in message
    with pytest.raises(ValueError, match="tokens is 0, wanted at least 1"):
        run.generate([[1]], 0)
    with pytest.raises(ValueError, match="0 prompts, wanted 1 to 3"):
        run.generate([], 1)
    with pytest.raises(ValueError, match="temperature is nan"):
        run.generate([[1]], 1, temperature=float("nan"))
    assert not ran
    assert run.pool.free_slots == 16


def test_sizes_are_checked():
    with pytest.raises(
        ValueError, match="Engine: slots is 0; wanted at least 1; prefill_chunk is -2.*Pass positive sizes"
    ):
        engine(slots=0, prefill_chunk=-2)


# --- steps that fail -----------------------------------------------------------------------------------------------


class Failing:
    """The toy step, which raises inside of the program when it is told to."""

    def __init__(self):
        self.fails = False

    def __call__(self, params, cache, meta, tokens):
        def look(value):
            if self.fails:
                raise RuntimeError("planted")
            return value

        cache, logits = toy_step(params, cache, meta, tokens)
        return cache, jax.pure_callback(look, jax.ShapeDtypeStruct(logits.shape, logits.dtype), logits)


def test_an_engine_outlives_a_step_that_failed():
    """The cache was donated to the step and is gone with it; pages and text of later runs are right all the same."""
    step = Failing()
    run = engine(step=step)
    assert texts(run.generate(PROMPTS[:1], 4), 1) == [reference(PROMPTS[0], 4)]
    step.fails = True
    with pytest.raises(Exception, match="planted"):
        list(run.generate(PROMPTS[:1], 4))
    step.fails = False
    assert run.pool.free_slots == 16
    assert texts(run.generate(PROMPTS, 4), 3) == [reference(p, 4) for p in PROMPTS]


def test_a_run_whose_text_was_lost_says_so():
    """Another run's step failed and took the cache along: to go on would write from empty pages."""
    step = Failing()
    run = engine(step=step)
    first = run.generate(PROMPTS[:1], 4)
    next(first)
    step.fails = True
    with pytest.raises(Exception, match="planted"):
        list(run.generate(PROMPTS[1:2], 4))
    step.fails = False
    with pytest.raises(RuntimeError, match="the cache with this run's text was lost"):
        next(first)
    assert run.pool.free_slots == 16


@pytest.mark.parametrize("rows", [1, 3])
def test_logits_of_other_rows_are_refused(rows):
    """A row for each request instead of each token place gave requests each other's tokens."""

    def last_only(params, cache, meta, tokens):
        cache, logits = toy_step(params, cache, meta, tokens)
        return cache, logits[:rows]

    with pytest.raises(
        ValueError, match=rf"step returned logits float32\[{rows}, 101\], wanted float32\[6, V\]"
    ):
        list(engine(step=last_only).generate(PROMPTS, 4))


def test_sizes_of_numpy_do_not_overflow():
    run = engine(max_length=np.uint32(24), slots=np.int8(100), max_requests=np.int8(3))
    assert run.decode_bucket.table_width == 6
    assert texts(run.generate(PROMPTS, np.int8(8)), 3) == [reference(p, 8) for p in PROMPTS]


def test_a_token_beyond_the_vocabulary_is_refused():
    """An embedding's look-up would take its last row for it, and write a text."""
    run = engine()
    for prompt in ([5, 101], [2**31 - 1]):
        with pytest.raises(
            ValueError, match=f"the prompts hold token {prompt[-1]}, the model's vocabulary has 101"
        ):
            list(run.generate([prompt], 2))
    assert run.pool.free_slots == 16
    assert texts(run.generate([[5, 100]], 4), 1) == [reference([5, 100], 4)]
