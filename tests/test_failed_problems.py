"""A problem that a benchmark cannot measure, or measures as wrong, leaves the others their turn and ends the run with 1."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import (
    fp4_check,
    kernel_check,
    layer_check,
    rates,
    sparse_mla_check,
    topk_append_check,
    verdicts,
    windows_check,
)
from benchmarks.paged_logits import ContextProblem

RIGHT, WRONG = {"diff": 1e-9, "misplaced": 0}, {"diff": 1.0, "misplaced": 7}


@pytest.fixture(autouse=True)
def no_card(monkeypatch):
    """Nothing is measured, nothing compiled."""
    monkeypatch.setattr(rates, "measure", lambda *_: rates.Ceilings(1e3))
    for suite in (kernel_check, fp4_check, topk_append_check):
        monkeypatch.setattr(suite, "require_card", lambda _: None)
    for suite, name in ((kernel_check, "build"), (kernel_check, "build_reference"), (fp4_check, "build"),
                        (fp4_check, "build_references")):  # fmt: skip
        monkeypatch.setattr(suite, name, lambda *_: {})


def exit_code(main, *arguments) -> int:
    try:
        main(*arguments)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else -1
    return 0


def scores(monkeypatch, suite, second):
    """Run a suite of paged scores whose second problem is measured by ``second``; its exit code and problems."""
    seen = []

    def measure(problem, *_):
        seen.append(problem.name)
        found = second() if len(seen) == 2 else RIGHT
        return [{"problem": problem.name, "config": None, "kernel": "mosaic", **found}]

    monkeypatch.setattr(suite, "time_problem", measure)
    peer = ["--no-peer"] if suite is kernel_check else []
    monkeypatch.setattr(sys, "argv", ["check", "--only", "64x32768", *peer])
    return exit_code(suite.main), seen


def no_schedule():
    raise ValueError("no such schedule")


@pytest.mark.parametrize("suite", [kernel_check, fp4_check])
@pytest.mark.parametrize(
    ("second", "code"), [(lambda: RIGHT, 0), (lambda: WRONG, 1), (no_schedule, 1), (lambda: {"error": "spilled"}, 1)]
)  # fmt: skip
def test_scores(suite, second, code, monkeypatch, capsys):
    found, seen = scores(monkeypatch, suite, second)
    printed = capsys.readouterr().out
    assert found == code
    assert len(seen) > 2
    assert (f"wrong or failed: {seen[1]}" in printed) == (code == 1)
    assert (f"{seen[1]}: ValueError: no such schedule" in printed) == (second is no_schedule)


@pytest.mark.parametrize(("check", "code"), [("ok", 0), ("WRONG index_key", 1), ("ValueError: none", 1)])
def test_appends(check, code, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["check", "--only", "append index"])
    monkeypatch.setattr(topk_append_check, "measure_append", lambda *_: {"check": check})
    monkeypatch.setattr(topk_append_check, "run_forms", lambda *_: None)
    assert exit_code(topk_append_check.main) == code
    assert ("wrong or failed: append n=64 index, append n=8192 index" in capsys.readouterr().out) == (
        code == 1
    )


@pytest.mark.parametrize(("found", "code"), [({"wrong": 0}, 0), ({"wrong": 3}, 1), ({"error": "hangs"}, 1)])
def test_attention(found, code, monkeypatch, capsys):
    """The process of the first shape is told apart by what it leaves, the one that reads it ends with 1."""

    def process(command, **_):
        file = command[command.index("--json") + 1]
        with open(file, "w") as out:
            json.dump([{"shape": "decode", "variant": "mosaic", **found}], out)

    monkeypatch.setattr(sparse_mla_check.subprocess, "run", process)
    monkeypatch.setattr(sys, "argv", ["check", "--shapes", "decode 64x128"])
    assert exit_code(sparse_mla_check.main) == code
    assert ("wrong or failed: decode mosaic" in capsys.readouterr().out) == (code == 1)


@pytest.mark.parametrize(
    ("row", "code"), [(RIGHT, 0), (WRONG, 1), (RIGHT | {"xla": WRONG}, 1), (RIGHT | {"xla": RIGHT}, 0)]
)
def test_windows(row, code, monkeypatch, capsys):
    monkeypatch.setattr(windows_check, "PROBLEMS", [(2, 4)])
    monkeypatch.setattr(windows_check, "measure", lambda problem, *_: {"problem": problem.name, **row})
    monkeypatch.setattr(windows_check, "against_xla", lambda *_: None)
    assert exit_code(windows_check.main, ["--no-peer"]) == code
    name = ContextProblem(2, 4, 64).name
    assert (f"wrong or failed: {name}, {name}" in capsys.readouterr().out) == (code == 1)


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_layers(ok, code, monkeypatch):
    def layer(_, report):
        report["agreement"] = {"ok": layer_check.verdict(ok)}

    monkeypatch.setattr(layer_check, "check_layer", layer)
    assert exit_code(layer_check.main, ["--only", "attention"]) == code


def test_a_bound_that_is_met_is_no_agreement():
    """NaN, and a difference of the bound itself, are wrong."""
    for diff in (verdicts.BOUND, float("nan")):
        assert not verdicts.scores_agree({"diff": diff, "misplaced": 0})
    assert verdicts.scores_agree({"diff": verdicts.BOUND / 2, "misplaced": 0})
