"""The training loop on a model of a few thousand weights: it learns, freezes what it should, and resumes exactly."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from dsa_jax.models.decoder import Decoder
from dsa_jax.models.train import loop, stages, state, updates
from dsa_jax.models.train.streams import Streams
from train_models import one_layer

pytestmark = pytest.mark.full  # half a minute of compilation a stage

WORDS = 16


def cycle(count: int, seed: int) -> np.ndarray:
    """Text in which each token has one of two successors: its entropy is ln 2 a token."""
    random = np.random.default_rng(seed)
    text = [0]
    for step in random.integers(0, 2, count - 1):
        text.append((3 * text[-1] + 1 + 5 * int(step)) % WORDS)
    return np.asarray(text, np.uint16)


@pytest.fixture(scope="module")
def streams() -> Streams:
    tokens = {"train": cycle(3000, 0), "validation": cycle(300, 1), "heldout": cycle(300, 2)}
    return Streams(
        tokens=tokens, starts={split: np.asarray([0, len(text)]) for split, text in tokens.items()}
    )


@pytest.fixture(scope="module")
def model() -> Decoder:
    return one_layer(vocabulary=WORDS)


@pytest.fixture(scope="module")
def settings() -> updates.Settings:
    recipe = stages.recipe(steps=(60, 20, 20), rate=1e-2, warmup=4)
    return updates.Settings(
        stages=recipe, batch=4, length=24, chunk=10, validate_every=20, decay=0.1, bfloat16=False
    )


def weights(model: Decoder) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(nnx.split(model)[1])
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}


@pytest.fixture(scope="module")
def stations(model, streams, settings, tmp_path_factory) -> tuple[list[dict[str, np.ndarray]], list[dict]]:
    """Weights before the run and after each stage, interrupted at every stage's end and once within; and the log."""
    path = tmp_path_factory.mktemp("run") / "state.npz"
    trainer = loop.Trainer(model, streams, settings, state_path=path)
    found = [weights(model)]
    for steps in (60, 20, 10):
        assert trainer.run(stop_after=steps) is None
        found.append(weights(nnx.merge(trainer.graph, trainer.arrays["params"], trainer.arrays["buffers"])))
    # The last ten steps are those of another process.
    resumed = loop.Trainer(model, streams, settings, state_path=path)
    resumed.resume()
    finished = resumed.run()
    assert finished is not None
    found[-1] = weights(finished)
    return found, resumed.progress.log


def test_loss_falls_well_below_that_of_uniform_guessing(stations):
    dense = [record["validation"]["loss"] for record in stations[1] if record["stage"] == "dense"]
    assert np.log(2) < dense[-1] < dense[0]
    assert dense[-1] < 0.75 * np.log(WORDS)


def test_indexer_stage_lowers_the_divergence_and_touches_nothing_else(stations):
    (_, dense, indexer, _), log = stations
    for path, before in dense.items():
        assert np.array_equal(before, indexer[path]) == ("indexer" not in path), path
    divergence = [record["validation"]["index_kl"] for record in log if record["stage"] == "indexer"]
    assert divergence[-1] > 0.0
    untrained = next(record["training"]["index_kl"] for record in log if record["stage"] == "indexer")
    assert divergence[-1] < untrained


def test_dense_stage_leaves_the_indexers_alone_and_sparse_stage_moves_all(stations):
    start, dense, indexer, sparse = stations[0]
    for path in start:
        assert np.array_equal(start[path], dense[path]) == ("indexer" in path), path
        assert not np.array_equal(indexer[path], sparse[path]), path


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(
    stations, model, streams, settings, tmp_path: Path
):
    finished = loop.Trainer(model, streams, settings, state_path=tmp_path / "state.npz").run()
    assert finished is not None
    whole = weights(finished)
    for path, value in stations[0][-1].items():
        np.testing.assert_array_equal(value, whole[path], err_msg=path)


def test_resume_refuses_a_missing_state_and_the_state_of_another_run(
    model, streams, settings, tmp_path: Path
):
    path = tmp_path / "state.npz"
    with pytest.raises(ValueError, match="no state at"):
        loop.Trainer(model, streams, settings, state_path=path).resume()
    loop.Trainer(model, streams, settings, state_path=path).save()
    other = dataclasses.replace(settings, decay=0.2)
    with pytest.raises(ValueError, match=r"decay=0\.2 \(stored 0\.1\)"):
        loop.Trainer(model, streams, other, state_path=path).resume()


def test_time_budget_cuts_the_steps_of_the_stages(model, streams, settings, tmp_path: Path):
    trainer = loop.Trainer(model, streams, settings, state_path=tmp_path / "state.npz", minutes=1.0)
    trainer.progress.seconds = 10.0
    # The dense stage has half a minute, of which 20 s are left: 40 steps of half a second.
    assert trainer.plan(settings.stages[0], 0.5) in (39, 40)
    assert trainer.plan(settings.stages[0], 0.001) == 60
    # However slow: enough to have been timed.
    assert trainer.plan(settings.stages[0], 1e6) == 20


def test_writing_is_all_or_nothing(tmp_path: Path):
    path = tmp_path / "folder" / "log.json"
    state.write_atomically(path, b"old")
    state.write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in path.parent.iterdir()] == ["log.json"]
