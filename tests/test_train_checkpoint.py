"""The shipped checkpoint keeps its promises, and its card says what its figures say."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from dsa_jax.models import checkpoint
from dsa_jax.models.train import card, evaluate, text
from dsa_jax.models.train.__main__ import main

MOST_BYTES = 16_000_000


@pytest.fixture(params=checkpoint.available())
def folder(request) -> Path:
    return checkpoint.find(request.param)


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def test_it_is_small_enough_to_ship(folder: Path):
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MOST_BYTES


def test_its_figures_are_of_these_weights_and_pass_every_gate(folder: Path):
    found = read(folder / "evaluation.json")
    weights = (folder / checkpoint.WEIGHTS).read_bytes()
    assert found["weights_sha256"] == hashlib.sha256(weights).hexdigest()
    assert found["gates"] == evaluate.gates(found)
    assert all(found["gates"].values()), found["gates"]
    assert found["mtp_agreement"] >= 0.6
    assert found["first_position"] == 256
    assert min(map(int, found["contexts"])) >= 512


def test_most_words_that_it_writes_are_known(folder: Path):
    found = read(folder / "text.json")
    assert (found["samples"], found["tokens"]) == (20, 100)
    assert found["known"] >= text.WANTED_SHARE * found["words"]
    assert len(found["texts"]) == 20


def test_its_card_is_what_the_figures_give(folder: Path, tmp_path: Path):
    copy = tmp_path / folder.name
    copy.mkdir()
    for path in folder.glob("*.json"):
        shutil.copy(path, copy)
    card.write(copy)
    assert (copy / "CARD.md").read_text() == (folder / "CARD.md").read_text()


def test_a_checkpoint_ships():
    assert "docs-8m" in checkpoint.available()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--data", "FOLDER", "--out", "FOLDER"], r"lacks tokens.npz, tokenizer.json"),
        (["text", "--data", "FOLDER"], "text: --out is missing"),
        (["corpus"], "corpus: --data is missing"),
        (["card", "--out", "FOLDER"], "lacks config.json, corpus.json"),
    ],
)
def test_bad_input_is_an_error_with_the_fix_and_exit_code_2(arguments, message, tmp_path: Path, capsys):
    assert main([str(tmp_path) if argument == "FOLDER" else argument for argument in arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
