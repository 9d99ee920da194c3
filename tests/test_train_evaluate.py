"""The card's numbers: positions that count, masses, bits per byte, gates, words, and the card itself."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsa_jax.models.batch import forward_batch
from dsa_jax.models.train import card, evaluate, ngram, text
from train_models import one_layer

pytestmark = pytest.mark.full  # half a minute of compilation a stage

FIRST = 10
forward = nnx.jit(forward_batch, static_argnames=("attention", "index_keys"))


@pytest.fixture(scope="module")
def judged() -> tuple[dict, dict, dict]:
    """Result of ``losses``, the contexts, and the plain outputs of dense and sparse attention."""
    model = one_layer()
    contexts = {24: np.random.default_rng(0).integers(0, 96, (3, 24)).astype(np.int32)}
    outputs = {
        "dense": forward(model, jnp.asarray(contexts[24]), attention="dense"),
        "sparse_fp8": forward(model, jnp.asarray(contexts[24]), index_keys="fp8"),
    }
    return evaluate.losses(model, contexts, first=FIRST, batch=2), contexts, outputs


def test_losses_are_means_over_the_positions_that_count(judged):
    found, contexts, outputs = judged
    tokens = contexts[24]
    for mode, output in outputs.items():
        logits = np.asarray(output.logits, np.float64)[:, FIRST:-1]
        right = np.take_along_axis(logits, tokens[:, FIRST + 1 :, None], axis=-1)[..., 0]
        expected = np.mean(np.log(np.sum(np.exp(logits), axis=-1)) - right)
        assert found["loss"][mode] == pytest.approx(expected, rel=1e-4)
    assert found["tokens"] == 3 * (24 - 1 - FIRST)


def test_mtp_figures_compare_with_the_text_and_with_the_models_own_choice(judged):
    found, contexts, outputs = judged
    tokens = contexts[24]
    guesses = np.argmax(outputs["sparse_fp8"].logits, axis=-1)
    ahead = np.argmax(outputs["sparse_fp8"].mtp_logits, axis=-1)
    pairs = [(row, i) for row in range(3) for i in range(FIRST, 22)]
    assert found["mtp_accuracy"] == pytest.approx(
        np.mean([ahead[r, i] == tokens[r, i + 2] for r, i in pairs])
    )
    assert found["mtp_agreement"] == pytest.approx(
        np.mean([ahead[r, i] == guesses[r, i + 1] for r, i in pairs])
    )


def test_masses_are_shares_and_selections_differ(judged):
    found, _, _ = judged
    assert len({round(mass, 6) for mass in found["mass"].values()}) == 3
    assert all(0.0 < mass < 1.0 for mass in found["mass"].values())
    assert len({round(loss, 6) for loss in found["loss"].values()}) == 5


def test_losses_refuse_contexts_without_a_position_that_counts():
    model = one_layer()
    with pytest.raises(ValueError, match=r"contexts of \[12\] tokens.*longer than 12"):
        evaluate.losses(model, {12: np.zeros((1, 12), np.int32)}, first=FIRST)


def test_bits_per_byte_counts_the_bytes_of_the_predicted_tokens():
    # Untrained on anything but token 0, order 1: the probabilities are known.
    model = ngram.train([np.zeros(8, np.int64)], vocabulary=4, start=3, order=1)
    row = np.asarray([0, 1, 0, 2, 0])
    nats = -np.sum(model.log_probabilities(row, start=3)[2:])
    sizes = np.asarray([1, 10, 5, 0])
    found = evaluate.bits_per_byte(model, {5: row[None]}, 2.0, sizes, start=3, first=1)
    # Tokens 0, 2, 0 are predicted: 7 bytes.
    assert found["model"] == pytest.approx(2.0 * 3 / np.log(2) / 7)
    assert found["ngram"] == pytest.approx(nats / np.log(2) / 7)
    assert found["ngram_loss"] == pytest.approx(nats / 3)


EVALUATION = {
    "tokens": 1234,
    "loss": {
        "dense": 2.0,
        "sparse_f32": 2.05,
        "sparse_fp8": 2.06,
        "sparse_recent": 2.1,
        "sparse_random": 3.0,
    },
    "mass": {"indexer": 0.6, "recent": 0.5, "random": 0.1},
    "accuracy": 0.51,
    "mtp_accuracy": 0.41,
    "mtp_agreement": 0.61,
    "bits_per_byte": {"model": 1.1, "ngram": 1.5, "ngram_loss": 3.0},
    "contexts": {"2048": 7, "512": 3},
    "first_position": 256,
}


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({}, set()),
        ({"sparse_f32": 2.061}, {"sparse loss (f32 keys) within 3 % of dense"}),
        ({"sparse_fp8": 2.099}, {"sparse loss (FP8 keys) within 3 % of dense"}),
        ({"sparse_recent": 2.06}, {"indexer ahead of the most recent tokens in loss"}),
        ({"sparse_random": 2.0}, {"indexer ahead of random tokens in loss"}),
        ({"recent": 0.6}, {"indexer ahead of the most recent tokens in mass"}),
        ({"random": 0.7}, {"indexer ahead of random tokens in mass"}),
        ({"model": 1.5}, {"ahead of the 5-gram model"}),
    ],
)
def test_each_gate_fails_for_its_own_reason(change: dict[str, float], broken: set[str]):
    evaluation = {
        name: {k: change.get(k, v) for k, v in value.items()} if isinstance(value, dict) else value
        for name, value in EVALUATION.items()
    }
    assert {name for name, holds in evaluate.gates(evaluation).items() if not holds} == broken


def test_known_words_joins_the_first_word_and_leaves_out_a_last_one_that_is_cut():
    known = text.vocabulary(["The array of Values, x_range"])
    assert known == {"the", "array", "of", "values", "x", "range"}
    # "ar" + "ray" is one word; "zzz" is unknown; "val" may have been cut off.
    assert text.known_words("the ar", "ray of 12 zzz val", known) == (2, 3)
    assert text.known_words("the array", " of zzz.", known) == (1, 2)


def test_sample_at_temperature_zero_takes_the_most_likely_tokens():
    model = one_layer()
    prompts = np.random.default_rng(0).integers(0, 96, (2, 12)).astype(np.int32)
    drawn = text.sample(model, prompts, tokens=3, temperature=1e-6, seed=0)
    # At temperature zero, sampling is the most likely token of the plain forward pass, token by token.
    whole = np.pad(prompts, ((0, 0), (0, 3)))
    for place in (12, 13, 14):
        logits = forward(model, jnp.asarray(whole), index_keys="fp8").logits
        whole[:, place] = np.argmax(logits[:, place - 1], axis=-1)
    np.testing.assert_array_equal(drawn, whole[:, 12:])
    assert len(np.unique(drawn)) > 1


MANIFEST = {
    "characters": 11_222_333,
    "sources": {
        "jax": {
            "version": "0.0",
            "licence": "Apache-2.0",
            "modules": 3,
            "documents": 4,
            "characters": 11_222_333,
        }
    },
    "splits": {"train": {"modules": 3, "documents": 4, "characters": 11_222_333}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    stage = {"attention": "dense", "main_rate": 0.002, "index_rate": 0.0, "noise": 0.05, "language": True}
    training = {
        "device": "Some Device",
        "parameters": 7_650_000,
        "settings": {
            "stages": [stage | {"name": "dense"}, stage | {"name": "sparse", "attention": "sparse"}],
            "mtp_weight": 0.3,
            "decay": 0.5,
            "batch": 8,
            "length": 2048,
        },
        "records": [
            {"stage": name, "step": step, "seconds": 90.0, "training": part, "validation": part}
            for name, step, part in (
                ("dense", 100, {"loss": 3.125, "index_kl": 0.0}),
                ("dense", 200, {"loss": 2.125, "index_kl": 0.0}),
                ("sparse", 50, {"loss": 2.375, "index_kl": 0.25}),
            )
        ],
    }
    sampled = {"samples": 20, "tokens": 100, "temperature": 0.8, "words": 200, "known": 188, "share": 0.94}
    sampled["texts"] = [{"prompt": "numpy.f", "continuation": "oo(x)\n\n```\nDoes."}]
    config = {"vocab_size": 2048, "max_position_embeddings": 2048, "num_hidden_layers": 4, "index_topk": 64}
    evaluation = EVALUATION | {"gates": evaluate.gates(EVALUATION)}
    parts = {
        "config": config,
        "corpus": MANIFEST,
        "training": training,
        "evaluation": evaluation,
        "text": sampled,
    }
    for name, content in parts.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


def test_card_states_what_was_measured(folder: Path):
    card.write(folder)
    written = (folder / "CARD.md").read_text()
    for fact in (
        "7.65 M parameters",
        "| sparse, indexer with FP8 keys | 2.0600 | +3.00% |",
        "| sparse, random tokens (control) | 3.0000 | +50.00% |",
        "indexer 0.600",
        "1.100 (sparse, FP8 keys)",
        "94.0%, **less than** 95%",
        "| jax 0.0 | Apache-2.0 | 3 | 4 | 11,222,333 |",
        "| dense | dense | 200 | 0.002 | 0 | 5.0% | loss 2.125 |",
        "was 2.1250",
        "1.5 minutes",
    ):
        assert fact in " ".join(written.split()), fact
    assert "Speed" not in written
    assert written.count("```") == 2
    assert (folder / card.PLOT).read_bytes().startswith(b"\x89PNG")


def test_card_shows_speed_if_it_was_measured(folder: Path):
    speed = [{"device": "Some Device", "what": "decode, batch 1", "tokens_per_second": 123.4}]
    (folder / "speed.json").write_text(json.dumps(speed))
    card.write(folder)
    assert "| Some Device | decode, batch 1 | 123 |" in (folder / "CARD.md").read_text()


def test_card_shows_kept_drafts_if_they_were_counted(folder: Path):
    found = {
        "prompts": 64,
        "prompt_tokens": 32,
        "tokens": 64,
        "drafted": 2500,
        "accepted": 1450,
        "share": 0.58,
    }
    found |= {"least_share_of_a_prompt": 0.25, "activations": "bfloat16"}
    (folder / "drafts.json").write_text(json.dumps(found))
    card.write(folder)
    written = " ".join((folder / "CARD.md").read_text().split())
    assert "1,450 of 2,500 drafts were kept (58.0%, **less than** 60%; 25% for the worst prompt)" in written


def test_card_names_what_is_missing(folder: Path):
    (folder / "text.json").unlink()
    with pytest.raises(ValueError, match=r"lacks text\.json"):
        card.write(folder)
