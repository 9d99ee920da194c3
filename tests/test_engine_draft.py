"""The host loop with drafts, on the toy model of ``test_loops``, and ``dsa-jax generate --draft`` on random models."""

from __future__ import annotations

import dataclasses
import json
from functools import cache, partial

import jax.numpy as jnp
import pytest
from flax import nnx

import cases
from benchmarks import loops_check
from dsa_jax.cli import generate, main
from dsa_jax.draft_engine import DraftEngine
from dsa_jax.engine import Timing
from dsa_jax.models import checkpoint
from dsa_jax.models.decoder import Decoder
from dsa_jax.models.presets import preset
from dsa_jax.pages import OutOfPages, grow
from test_loops import PROMPTS, draft_step, expected, target_step

TOKENS = 21


def engine(salt: int = 1, drafts: int = 2, manager: str = "v2", **sizes) -> DraftEngine:
    """Pages of 4 tokens in the target's cache and of 2 in the draft's; slots are numbered apart."""
    defaults = dict(
        slots=40, draft_slots=70, max_requests=3, max_length=40, prefill_chunk=4, drafts=drafts, block=8
    )
    return DraftEngine(
        step=target_step,
        params=None,
        layout=cases.layout(manager, page_size=4),
        draft=partial(draft_step, salt),
        draft_layout=cases.layout(manager, page_size=2, full=(True,)),
        **(defaults | sizes),
    )


@cache
def shared(salt: int, drafts: int, manager: str) -> DraftEngine:
    """One engine for many tests, so that its programs are compiled once."""
    return engine(salt, drafts, manager)


def texts(run, prompts) -> list[list[int]]:
    """New tokens by request; positions must count on from the prompt."""
    out: list[list[int]] = [[] for _ in prompts]
    for new in run:
        assert new.position == len(prompts[new.request]) + len(out[new.request])
        out[new.request].append(new.token)
    return out


@pytest.mark.parametrize(
    ("salt", "drafts", "manager"),
    [
        (0, 3, "v1"),
        (1, 2, "v2"),
        pytest.param(1, 1, "v1", marks=pytest.mark.full),
        pytest.param(1, 7, "v2", marks=pytest.mark.full),
    ],
)
def test_the_text_is_that_of_plain_decoding(salt, drafts, manager):
    """Prompts cut by prefill chunks of 4, drafts that err or never do, requests of one batch and alone."""
    run = shared(salt, drafts, manager)
    run.timing = Timing()
    assert run.warmup(TOKENS) > 0
    for prompts in (PROMPTS, PROMPTS[1:2], PROMPTS[::-1]):
        assert texts(run.generate(prompts, TOKENS), prompts) == [expected(p, TOKENS) for p in prompts]
    assert (run.pool.free_slots, run.draft_pool.free_slots) == (40, 70)
    assert run.timing.decode_tokens == 7 * (TOKENS - 1)
    assert run.timing.prefill_tokens == 2 * sum(map(len, PROMPTS)) + len(PROMPTS[1])
    if salt == 0:
        # Blocks of 5 tokens: 3 drafts kept and 1. The toy's draft does not see token 0, so it errs once after [2, 7].
        assert run.timing.accepted_drafts == 2 * run.timing.verifications - 3
    else:
        assert 0 < run.timing.accepted_per_step < drafts


@pytest.mark.parametrize(
    ("temperature", "stop"), [(0.0, []), pytest.param(20.0, [1, 1], marks=pytest.mark.full)]
)
def test_programs_are_traced_once(temperature, stop):
    """Warm-up included, which writes nothing; prompts and numbers of requests change."""
    run = engine(slots=20, draft_slots=36, max_length=16, drafts=1)
    traces = []

    def counted(params, cache, meta, tokens):
        traces.append(meta.bucket)
        return target_step(params, cache, meta, tokens)

    run.step = counted
    run.__post_init__()
    before = [cases.pool_bytes(c) for c in (run.cache, run.draft_cache)]
    run.warmup(7, temperature=temperature, stop=stop)
    assert [cases.pool_bytes(c) for c in (run.cache, run.draft_cache)] == before
    for prompts in (PROMPTS, PROMPTS[1:2]):
        got = texts(run.generate(prompts, 7, temperature=temperature, stop=stop), prompts)
        assert (got == [expected(p, 7) for p in prompts]) == (temperature == 0)
    assert traces == [run.prefill_bucket, run.verify_bucket]


def test_blocks_waste_little():
    run = shared(1, 2, "v2")
    assert [run._block(n) for n in (1, 2, 9, 10, 21, 22, 100)] == [
        (0, 0),
        (1, 1),
        (8, 1),
        (5, 2),  # 9 tokens: two blocks of 5
        (5, 4),
        (7, 3),
        (5, 20),  # 99 tokens: 8 x 13, 7 x 15, 6 x 17 and 5 x 20 are 5, 6, 3 and 1 too many
    ]


def test_one_token_needs_no_loop():
    run = shared(1, 2, "v2")
    steps = run.timing.decode_steps
    assert texts(run.generate(PROMPTS, 1), PROMPTS) == [expected(p, 1) for p in PROMPTS]
    assert run.timing.decode_steps == steps


def test_stop_tokens_end_one_sequence():
    whole = [expected(p, TOKENS) for p in PROMPTS]
    stop = whole[0][3]
    wanted = [text[: text.index(stop) + 1] if stop in text else text for text in whole]
    assert len({len(text) for text in wanted}) > 1
    assert texts(shared(1, 2, "v2").generate(PROMPTS, TOKENS, stop=[stop]), PROMPTS) == wanted


@pytest.mark.full
def test_sampling_depends_on_the_seed():
    """Also: a draft of the wrong model samples the right text when all mass is on one token."""
    run = shared(1, 2, "v2")
    draw = lambda seed, temperature: texts(
        run.generate(PROMPTS, TOKENS, temperature=temperature, seed=seed), PROMPTS
    )
    assert draw(3, 20.0) == draw(3, 20.0) != draw(4, 20.0)
    assert draw(3, 1e-6) == [expected(p, TOKENS) for p in PROMPTS]


def test_exactly_enough_pages_of_both_pools():
    """5 + 4 x 5 + 2 positions: 7 pages of 4 and 14 of 2."""
    run = shared(1, 2, "v2")
    whole = run.pool, run.draft_pool
    run.pool, _ = grow(run.pool, "another", 33 * 4)
    run.draft_pool, _ = grow(run.draft_pool, "another", 56 * 2)
    assert (run.pool.free_slots, run.draft_pool.free_slots) == (7, 14)
    assert texts(run.generate(PROMPTS[:1], TOKENS), PROMPTS[:1]) == [expected(PROMPTS[0], TOKENS)]
    run.pool, _ = grow(run.pool, "another", 34 * 4)
    run.draft_pool, _ = grow(run.draft_pool, "another", 57 * 2)
    with pytest.raises(ValueError) as error:
        run.generate(PROMPTS[:1], TOKENS)
    assert "need 7 pages of 4 tokens, the pool has 6 free" in str(error.value)
    assert "need 14 pages of 2 tokens, the draft pool has 13 free" in str(error.value)
    run.pool, run.draft_pool = whole


def test_an_abandoned_run_gives_the_pages_of_both_pools_back():
    run = shared(1, 2, "v2")
    started = run.generate(PROMPTS, TOKENS)
    for _ in range(5):
        next(started)
    assert run.pool.free_slots < 40 and run.draft_pool.free_slots < 70
    started.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert (run.pool.free_slots, run.draft_pool.free_slots) == (40, 70)
    assert texts(run.generate(PROMPTS, TOKENS), PROMPTS) == [expected(p, TOKENS) for p in PROMPTS]


def test_two_runs_may_interleave():
    run = shared(1, 2, "v2")
    first, second = run.generate(PROMPTS[:1], TOKENS), run.generate(PROMPTS[1:], TOKENS)
    got: list[list] = [[], []]
    while len(got[0]) < TOKENS:
        got[0].append(next(first))
        got[1] += [next(second), next(second)]
    assert texts(got[0], PROMPTS[:1]) == [expected(PROMPTS[0], TOKENS)]
    assert texts(got[1], PROMPTS[1:]) == [expected(p, TOKENS) for p in PROMPTS[1:]]


def test_a_draft_cache_of_another_request_is_seen(monkeypatch):
    """If every request drafted from the first one's pages, a draft that is the target would err; the text stays right."""
    run = shared(0, 3, "v1")
    run.timing, good = Timing(), run._draft_table
    monkeypatch.setattr(run, "_draft_table", lambda tables: jnp.tile(good(tables)[:1], (3, 1)))
    assert texts(run.generate(PROMPTS, TOKENS), PROMPTS) == [expected(p, TOKENS) for p in PROMPTS]
    assert run.timing.accepted_per_step < 1.4


def test_pages_come_from_both_pools_or_from_neither():
    """Two runs that each fit alone: when the draft's pages run out, the target's are not kept."""
    run = engine(slots=40, draft_slots=12, max_requests=1)
    first, second = run.generate(PROMPTS[:1], 9), run.generate(PROMPTS[1:2], 9)
    next(first)
    free = run.pool.free_slots, run.draft_pool.free_slots
    with pytest.raises(OutOfPages):
        next(second)
    assert (run.pool.free_slots, run.draft_pool.free_slots) == free
    first.close()
    assert (run.pool.free_slots, run.draft_pool.free_slots) == (40, 12)
    assert texts(run.generate(PROMPTS[1:2], 9), PROMPTS[1:2]) == [expected(PROMPTS[1], 9)]


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="slots is 0.*drafts is 9; wanted 1 to 7.*draft_slots is -1"):
        engine(slots=0, drafts=9, draft_slots=-1)
    with pytest.raises(ValueError, match="drafts is 0; wanted 1 to 7"):
        engine(drafts=0)


# --- command line --------------------------------------------------------------------------------------------------


def command(capsys, monkeypatch, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of ``dsa-jax generate``; compiled programs are not kept on disk."""
    monkeypatch.setattr(generate, "_persist_compilations", lambda: None)
    try:
        code = main(["generate", "The default is", *arguments])
    except SystemExit as error:
        code = error.code
    return code, *capsys.readouterr()


def saved(folder, layers: int = 1) -> str:
    """A random model with the shipped tokenizer and so many prediction layers, as a checkpoint."""
    config = preset("tiny")
    dsa = dataclasses.replace(config.dsa, num_mtp_layers=layers, full_layers=(True,) * (2 + layers))
    model = Decoder(dataclasses.replace(config, dsa=dsa, vocab_size=2048), rngs=nnx.Rngs(3))
    checkpoint.save_pretrained(model, folder, tokenizer=checkpoint.load_tokenizer("docs-8m"))
    return str(folder)


EXACT = (
    "--temperature",
    "0",
    "--kv-dtype",
    "f32",
    "--index-dtype",
    "f32",
    "--tokens",
    "12",
    "--page-size",
    "8",
)


@pytest.mark.full
def test_command_counts_accepted_drafts(tmp_path, capsys, monkeypatch):
    """Figures and table; that the text is the same is shown with the shipped model, below."""
    arguments = ("--model", saved(tmp_path), "--draft", "1", "--json", *EXACT)
    code, out, _ = command(capsys, monkeypatch, *arguments)
    assert code == 0
    figures = json.loads(out)["figures"]
    assert (figures["drafts"], figures["decode_tokens"]) == (1, 11)
    assert 0 <= figures["accepted_draft_tokens_per_step"] <= 1
    assert 11 / 2 <= figures["decode_steps"] <= 11
    lines = generate._tables(figures).splitlines()
    assert [line.split("  ")[-1] for line in lines if line.startswith("accepted draft tokens per step")] == [
        f"{figures['accepted_draft_tokens_per_step']:.2f} of 1"
    ]
    plain = {name: value for name, value in figures.items() if name != "drafts"}
    assert "accepted" not in generate._tables(plain)


def test_command_refuses_what_cannot_draft(tmp_path, capsys, monkeypatch):
    for wrong in ("9", "-1", "two"):
        code, out, errors = command(capsys, monkeypatch, "--draft", wrong)
        assert (code, out) == (2, "")
        assert f"'{wrong}' is no number of draft tokens; give 0 (none) to 7" in errors
    code, out, errors = command(capsys, monkeypatch, "--draft", "1", "--model", saved(tmp_path, layers=0))
    assert (code, out) == (2, "")
    assert "has no prediction layer" in errors
    assert "leave --draft out" in errors


@pytest.mark.full
@pytest.mark.parametrize("drafts", ["1", "3", "7"])
def test_shipped_model_writes_the_same_text_with_drafts(drafts, capsys, monkeypatch):
    runs = [
        command(capsys, monkeypatch, "--draft", n, "--json", *EXACT, "--tokens", "40") for n in ("0", drafts)
    ]
    plain, drafted = (json.loads(out) for _, out, _ in runs)
    assert plain["tokens"] == drafted["tokens"]
    assert drafted["figures"]["accepted_draft_tokens_per_step"] > 0.4


@pytest.mark.full
def test_loops_benchmark_runs_on_a_cpu(tmp_path):
    report = tmp_path / "loops.json"
    options = ["--tokens", "3", "--batches", "1", "--derive-requests", "4", "--json", str(report)]
    loops_check.main(options)
    compared, derive = json.loads(report.read_text())["rows"]
    assert compared["equal up to"] == [3]
    assert set(compared["ms"]) == {"program", "steps", "steps, weights apart", "drafts", "drafts, fixed"}
    assert derive["derive_us"]["queued"] > 0
