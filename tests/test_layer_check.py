"""The benchmarks of a layer, of whole steps and of windows run, on any device; their figures are not looked at."""

from __future__ import annotations

import json

import pytest

from benchmarks import layer_check, timing, windows_check
from benchmarks.timing import Launch
from random_models import random_model


def profile_of(*durations: float, start: float = 0.0) -> list[Launch]:
    """Launches one after another with a gap of a microsecond, all of one name but the last."""
    found = []
    for number, us in enumerate(durations):
        found.append(Launch(start, "last" if number == len(durations) - 1 else "kernel", us, number == 0))
        start += 1e3 * (us + 1)
    return found


def test_a_profile_divides_into_calls(monkeypatch):
    """Span, sum and medians of two calls that took the second kernel twice as long once."""
    calls = profile_of(2, 3, 5) + profile_of(2, 6, 5, start=1e6)
    monkeypatch.setattr(timing, "_profile", lambda _: calls)
    row = layer_check.from_profile(lambda: None, 2)
    assert row["kernels"] == [("kernel", 2), ("kernel", 4.5), ("last", 5)]
    assert (row["launches"], row["in_graphs"]) == (3, 1)
    assert row["kernels_us"] == 11.5
    assert row["span_us"] == 13.5


@pytest.mark.parametrize("calls", [2, 3])
def test_unequal_calls_are_refused(calls, monkeypatch, capsys):
    """Neither a rest nor other names in the second half pass for equal calls."""
    monkeypatch.setattr(timing, "_profile", lambda _: profile_of(2, 3, 5, 1))
    assert layer_check.from_profile(lambda: None, calls) == {}
    assert f"4 launches do not divide into {calls} equal calls" in capsys.readouterr().out


def test_parts_that_are_asked_for(monkeypatch, tmp_path):
    """Only parts whose name contains the text run."""
    monkeypatch.setattr(layer_check, "check_layer", lambda sizes, report: report.update(ran=True))
    report = tmp_path / "layer.json"
    layer_check.main(["--tiny", "--only", "attention", "--json", str(report)])
    found = json.loads(report.read_text())
    assert found["attention of a layer"] == {"ran": True}
    assert not any(name.startswith("step of") for name in found)
    with pytest.raises(SystemExit, match="--only 'append' is in none of: attention of a layer, step of 3"):
        layer_check.main(["--tiny", "--only", "append"])


@pytest.mark.full
def test_layer_check_runs(monkeypatch, capsys, tmp_path):
    """All parts, tiny, with an invented profile; two layers launch more than one."""
    lengths = iter([2, 3, 4, *[3] * 6])
    invented = lambda calls: [profile_of(*[2.0] * n) for n in [next(lengths)] for _ in calls]
    monkeypatch.setattr(layer_check, "launches", invented)
    monkeypatch.delitem(layer_check.COMMAND_BUFFERS, "default")
    monkeypatch.setattr(layer_check.checkpoint, "load_pretrained", lambda *_, **__: random_model())
    report = tmp_path / "layer.json"
    options = ["--tiny", "--requests", "3", "--context", "128", "--layers", "1", "--seconds", "1000"]
    layer_check.main([*options, "--json", str(report)])
    found = json.loads(report.read_text())
    assert found["attention of a layer"]["agreement"]["ok"] == "ok"
    assert found["attention of a layer"]["a further layer"]["launches"] == 2
    assert found["attention of a layer"]["xla"]["launches"] == 3
    assert found["step of 1 layers"]["most"]["launches"] == 3
    assert found["step of docs-8m"]["none"]["same tokens"] == 1
    assert "MISSED" in capsys.readouterr().out  # on a CPU both are the reference


@pytest.mark.full
def test_windows_check_runs(capsys, tmp_path):
    """Two shapes, small, of both forms of keys, against both references."""
    options = ["--shapes", "24", "192", "--shapes", "64", "64", "--heads", "16", "--no-peer"]
    windows_check.main([*options, "--seconds", "1000", "--json", str(tmp_path / "windows.json")])
    rows = json.loads((tmp_path / "windows.json").read_text())["rows"]
    forms = ["prefill 24x192 h16", "prefill 64x64 h16"]
    assert [row["problem"] for row in rows] == [*forms, *(f"{name} fp4" for name in forms)]
    assert [(row["misplaced"], row["xla"]["misplaced"]) for row in rows] == [(0, 0)] * 4
    # 24 queries of 16 heads, 192 keys and their scales, weights, two ends of windows, scores.
    moved = 24 * 16 * 128 + 192 * (128 + 4) + 24 * 16 * 4 + 2 * 24 * 4 + 24 * 192 * 4
    assert rows[0]["gb_s"] == pytest.approx(moved / rows[0]["queued"] / 1e3)
    assert "BAD" not in capsys.readouterr().out
