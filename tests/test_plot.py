"""``python -m benchmarks.plot``: what it reads of the checks' files, and what it says without them or without matplotlib."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import plot
from benchmarks.bars import READERS, Bar

GOOD, BAD = {"diff": 1e-7, "misplaced": 0}, {"diff": 1e-7, "misplaced": 3}
SCORES = {
    "device": "card",
    "jax": "0",
    "peer": {"64x32768 h64 n1": {"kernel": 73.0, "queued": 74.0}, "64x32768 h64 n2": {"queued": 80.0}},
    "timed": [
        {"problem": "64x32768 h64 n1", "kernel": 75.0, "tflop_s": 1.0, **GOOD},
        {"problem": "64x32768 h64 n1", "kernel": 72.0, "tflop_s": 1.0, "xla": 900.0, **GOOD},
        {"problem": "64x32768 h64 n1", "kernel": 10.0, "tflop_s": 1.0, **BAD},
        {"problem": "64x32768 h64 n1", "error": "does not compile"},
        {"problem": "64x32768 h64 n2", "kernel": 79.0, "tflop_s": 1.0, **BAD},
        {"problem": "64x32768 h64 n4", "kernel": 140.0, "tflop_s": 1.0, **GOOD},
        {"problem": "prefill 8192x8192 h64", "kernel": 700.0, "tflop_s": 800.0, **GOOD},
    ],
}
FP4 = {
    "timed": [
        {"problem": "64x32768 h32 n1", "kernel": "fp8", "us": 70.0},
        {"problem": "64x32768 h32 n1", "kernel": "mosaic", "us": 57.0, "xla": 800.0, **GOOD},
        {"problem": "64x32768 h32 n1", "kernel": "triton", "error": "does not compile"},
    ]
}
TOPK = [
    {"op": "topk", "shape": "64 x 8192", "variant": "mosaic", "target": None, "us": 5.0, "check": "ok"},
    {
        "op": "topk",
        "shape": "64 x 8192 in 131072",
        "variant": "mosaic",
        "target": None,
        "us": 8.0,
        "check": "ok",
    },
    {
        "op": "append",
        "shape": "n=64",
        "variant": "index",
        "target": 4,
        "us": 1.5,
        "xla": 20.0,
        "check": "WRONG",
    },
    {
        "op": "gather",
        "shape": "131072",
        "variant": "block 64",
        "us": 10.0,
        "share": 0.9,
        "check": "ok",
    },
    {"op": "topk", "shape": "4 x 131072", "variant": "mosaic", "target": 30, "check": "ValueError: no"},
]
SPARSE = [
    {"shape": "decode 64x128", "variant": "mosaic", "us": 110.0, "tflop_s": 300.0, "wrong": 0},
    {"shape": "decode 64x128", "variant": "xla", "us": 400.0, "tflop_s": 90.0, "wrong": 0},
    {"shape": "prefill 4096x128", "variant": "mosaic", "us": 5000.0, "tflop_s": 450.0, "wrong": 1},
    {"shape": "decode 8x128", "variant": "mosaic", "error": "does not compile"},
]
LAYER = {
    "device": "card",
    "jax": "0",
    "requests": 64,
    "attention of a layer": {
        "agreement": {"ok": "ok"},
        "wall": {"kernels": {"queued_us": 500.0, "awaited_us": 520.0}, "xla": {"queued_us": 4000.0}},
        "kernels": {"span_us": 480.0},
    },
    "step of 3 layers": {"default": {"queued_us": 1500.0}, "none": {"queued_us": 1600.0}},
    "step of docs-8m": {"error": "out of memory"},
}
WINDOWS = {
    "device": "card",
    "jax": "0",
    "rows": [
        {"problem": "prefill 2048x32768 h64", "queued": 950.0, "tflop_s": 1100.0, "peer": {"queued": 934.0}, **GOOD},
        {"problem": "prefill 8192x8192 h64", "queued": 610.0, "kernel": 600.0, "tflop_s": 900.0, **GOOD}
        | {"peer": {"kernel": 504.0, "queued": 510.0}, "xla": {"total": 30000.0, "queued": 30100.0}},
    ],
}  # fmt: skip
FILES = dict(zip(READERS, (SCORES, FP4, TOPK, SPARSE, LAYER, WINDOWS), strict=True))
WANTED = {
    "kernel_check": [
        Bar("64x32768 h64 n1", 72.0, 73.0, 900.0, 0.98 * 73),
        Bar("64x32768 h64 n2", 79.0, wrong=True),
        Bar("64x32768 h64 n4", 140.0, None, None, 1.9 * 72),
        Bar("prefill 8192x8192 h64", 700.0, None, None, 560.0),
    ],
    "fp4_check": [
        Bar("64x32768 h32 n1, fp8", 70.0),
        Bar("64x32768 h32 n1, mosaic", 57.0, None, 800.0, 0.65 * 70),
    ],
    "topk_append_check": [
        Bar("topk 64 x 8192, mosaic", 5.0),
        Bar("topk 64 x 8192 in 131072, mosaic", 8.0, None, None, 6.5),
        Bar("append n=64, index", 1.5, None, 20.0, 4, True),
        Bar("gather 131072, block 64", 10.0, None, None, 12.0),
    ],
    "sparse_mla_check": [
        Bar("decode 64x128, mosaic", 110.0, None, 400.0, 69.9),
        Bar("prefill 4096x128, mosaic", 5000.0, None, None, 4500.0, True),
    ],
    "layer_check": [
        Bar("attention of a layer", 500.0, None, 4000.0, 1000.0),
        Bar("step of 3 layers, command buffers default", 1500.0),
        Bar("step of 3 layers, command buffers none", 1600.0),
    ],
    "windows_check": [
        Bar("prefill 2048x32768 h64", 950.0, 934.0),
        Bar("prefill 8192x8192 h64", 600.0, 504.0, 30000.0, 540.0),
    ],
}


@pytest.fixture
def folder(tmp_path):
    """All checks' files."""
    for suite, data in FILES.items():
        (tmp_path / f"{suite}.json").write_text(json.dumps(data))
    return tmp_path


@pytest.mark.parametrize("suite", READERS)
def test_a_file_becomes_bars(suite):
    """The fastest right schedule, the peer and the reference of the same run, and targets relative to them."""
    got = READERS[suite][1](FILES[suite])
    assert [(bar.label, bar.wrong) for bar in got] == [(bar.label, bar.wrong) for bar in WANTED[suite]]
    for bar, wanted in zip(got, WANTED[suite]):
        assert bar[1:5] == pytest.approx(wanted[1:5]), bar.label


@pytest.mark.full
def test_a_folder_becomes_a_figure(folder):
    """One panel for each file that is there, with all its bars; importing matplotlib takes a second."""
    (folder / "windows_check.json").unlink()
    panels, machine = plot.read(folder)
    assert list(panels) == [READERS[suite][0] for suite in FILES if suite != "windows_check"]
    assert machine == "card, jax 0"
    axes = plot.draw(panels, machine).axes
    assert axes[0].get_yticklabels()[0].get_text() == "64x32768 h64 n1   72.0 us"
    assert [len(axis.patches) for axis in axes] == [len(bars) for bars in panels.values()]


@pytest.mark.full
@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_command_writes_a_file(folder, capsys, suffix):
    """In either format; laying out six panels takes seconds."""
    file = folder / f"figure.{suffix}"
    plot.main([str(folder), "--out", str(file)])
    assert capsys.readouterr().out == f"plot: {file}\n"
    assert file.read_bytes().startswith(b"<?xml" if suffix == "svg" else b"\x89PNG")


def test_what_cannot_be_drawn_is_refused(folder, tmp_path_factory, monkeypatch):
    """Another format, an empty folder, another file's content, a missing matplotlib: each says what is wanted."""
    with pytest.raises(SystemExit, match=r"written as \.svg or \.png"):
        plot.main([str(folder), "--out", str(folder / "plot.txt")])
    with pytest.raises(SystemExit, match=r"no times: wanted some of kernel_check\.json"):
        plot.main([str(tmp_path_factory.mktemp("empty"))])
    (folder / "fp4_check.json").write_text("[]")
    with pytest.raises(
        SystemExit, match=r"fp4_check\.json is not what benchmarks\.fp4_check writes: TypeError"
    ):
        plot.main([str(folder)])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="needs matplotlib .* `viz`"):
        plot.figure_class()
