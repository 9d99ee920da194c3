"""A problem that a benchmark cannot measure leaves the others their turn, and the run does not end well."""

from __future__ import annotations

import sys

import pytest

from benchmarks import fp4_check, kernel_check, rates


@pytest.mark.parametrize("suite", [kernel_check, fp4_check])
def test_a_failed_problem_is_told_and_ends_with_1(suite, monkeypatch, capsys):
    seen = []

    def measure(problem, *_):
        seen.append(problem.name)
        if len(seen) == 2:
            raise ValueError("no such schedule")
        return [{"problem": problem.name}]

    for name in ("build", "build_reference", "build_references"):
        if hasattr(suite, name):
            monkeypatch.setattr(suite, name, lambda *_: {})
    monkeypatch.setattr(suite, "require_card", lambda _: None)
    monkeypatch.setattr(rates, "measure", lambda *_: rates.Ceilings(1e3))
    monkeypatch.setattr(suite, "time_problem", measure)
    peer = ["--no-peer"] if suite is kernel_check else []
    monkeypatch.setattr(sys, "argv", ["check", "--only", "64x32768", *peer])
    with pytest.raises(SystemExit) as ended:
        suite.main()
    assert ended.value.code == 1
    assert len(seen) > 2
    assert f"{seen[1]}: ValueError: no such schedule" in capsys.readouterr().out
