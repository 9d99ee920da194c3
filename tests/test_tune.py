"""``python -m benchmarks.tune`` without a card: refusals, shapes, candidates, the table and the file that it writes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import cases
from benchmarks import topk_append_check, tune, tune_kernels
from dsa_jax.pallas import paged_logits_triton, topk_mosaic, tuning

ROOT = Path(__file__).resolve().parents[1]
SHAPES = {
    "append_triton": ["tokens=64", "tokens=8192,form=fp4", "tokens=1,form=f32"],
    "append_triton_latent": ["tokens=64", "tokens=8192,form=fp8_ds_mla", "tokens=64,form=f32"],
    "gather_triton": ["rows=131072", "rows=1,form=fp4"],
    "paged_logits_mosaic": ["requests=64,keys=32768", "requests=1,keys=4096,heads=32", "requests=64,keys=4096,new_tokens=4"],
    "paged_logits_mosaic_prefill": ["tokens=512,keys=2048"],
    "paged_logits_fp4_mosaic": ["requests=64,keys=32768", "requests=4,keys=8192,new_tokens=3"],
    "paged_logits_triton": ["requests=64,keys=32768"],
    "topk_mosaic": ["rows=1,columns=1", "rows=64,columns=32768", "rows=4,columns=9000", "rows=1,columns=1048576"],
    "topk_triton": ["rows=1,columns=1", "rows=64,columns=32768", "rows=4,columns=9000", "rows=1,columns=1048576"],
    "sparse_mla_mosaic": ["tokens=64", "tokens=64,form=fp8_ds_mla"],
    "sparse_mla_triton": ["tokens=64", "tokens=1,heads=8", "tokens=64,form=nvfp4"],
}  # fmt: skip
QUICK, SLOW, WRONG, BROKEN = (topk_mosaic.Config(128, items, 1) for items in (4, 8, 12, 16))
TODAY = topk_mosaic.Config(256, 4, 1)


@pytest.fixture(autouse=True)
def no_rules_left():
    yield
    tuning.load(None)


@pytest.fixture
def card(monkeypatch):
    """The command takes an H200 for granted, and a kernel whose schedules are numbers of a timer."""

    def call(config):
        if config == BROKEN:
            raise RuntimeError("does not compile")
        return lambda x: x + config.items

    problem = tune_kernels.Problem(call, [(jnp.float32(0),)], lambda program: check(program(jnp.float32(0))))
    check = lambda items: "ok" if items != WRONG.items else "WRONG: 3 entries"
    kernel = tune_kernels.Kernel(
        dict(rows=None, columns=100),
        lambda shape: problem,
        lambda shape: topk_mosaic.default_config(**shape),
        lambda shape: [SLOW, QUICK, WRONG, BROKEN, QUICK],
        lambda device, shape: None,
    )
    monkeypatch.setattr(tune, "target_device", lambda: cases.CARD)
    monkeypatch.setitem(tune_kernels.KERNELS, "topk_mosaic", kernel)
    monkeypatch.setattr(topk_mosaic, "default_config", lambda rows, columns: TODAY)


def clock(**of_items):
    """Times by the number that a program adds: microseconds of ``items4`` and so on."""

    def times(program, arguments):
        items = int(program(*arguments[0]))
        us = of_items[f"items{items}"].pop(0) if program is not None else 0
        return {"topk": us, "fill": 1.0, "total": us + 1.0, "queued": 99.0}

    return times


def test_without_a_card_it_says_so():
    """As a command, with the exit code that scripts look at."""
    arguments = [sys.executable, "-m", "benchmarks.tune", "topk_mosaic", "rows=64,columns=32768"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "tune: JAX found no NVIDIA GPU, only cpu; run this on the card to tune for.\n"
    assert done.stdout == ""


def test_a_card_that_the_kernel_does_not_run_on(monkeypatch, capsys):
    monkeypatch.setattr(tune, "target_device", lambda: dataclasses.replace(cases.CARD, capability=(8, 0)))
    assert tune.main(["topk_mosaic", "rows=64,columns=32768"]) == 2
    assert "topk_mosaic on NVIDIA H200 (sm80): is built for Hopper" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "wanted a KERNEL and at least one SHAPE"),
        (["topk_mosaic"], "wanted a KERNEL and at least one SHAPE"),
        (["topk"], "invalid choice: 'topk'"),
        (["topk_mosaic", "rows=64,cols=3"], "topk_mosaic has no 'cols'; it takes rows, columns"),
        (["topk_mosaic", "rows=64"], "topk_mosaic needs columns as well"),
        (["topk_mosaic", "rows=0,columns=3"], "rows is '0', wanted a positive number"),
        (["append_triton", "tokens=1,form=bf16"], "form is 'bf16', wanted 'fp8' or 'f32' or 'fp4'"),
        (["topk_mosaic", "rows,columns=3"], "rows is '', wanted a positive number"),
        (["paged_logits_mosaic", "requests=1,keys=100"], "keys is 100, wanted a multiple of page_size 64"),
        (["paged_logits_mosaic_prefill", "tokens=2048,keys=4096"], "tokens is 2048, wanted at most keys"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        tune.main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_a_file_that_holds_no_rules_is_refused_before_anything_runs(tmp_path, capsys):
    (tmp_path / "a.json").write_text('{"topk": 3}')
    with pytest.raises(SystemExit):
        tune.main(["topk_mosaic", "rows=1,columns=3", "--write", str(tmp_path / "a.json")])
    assert "a.json: unknown kernel 'topk'" in capsys.readouterr().err


def test_the_list_names_every_kernel(capsys):
    assert tune.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(tune_kernels.KERNELS)
    assert "topk_mosaic                  rows=N,columns=N" in lines


def test_kernels_are_those_of_the_rules():
    """All kernels with schedules can be tuned, and the numbers of a shape are facts that a rule may use."""
    assert {*tune_kernels.KERNELS} == {*tuning.KERNELS} - {"append_index_k", "many_row_scores", "sparse_mla"}
    for name, own in tune_kernels.KERNELS.items():
        assert {*own.when(dict.fromkeys(own.numbers))} <= {*tuning.KERNELS[name].facts}


def test_rules_of_fp8_scores_leave_fp4_keys_alone(monkeypatch, tmp_path):
    """Only FP8 keys are measured: what is written decides for them, and FP4 keys keep their schedule."""
    shape, path = tune.shape_of("paged_logits_triton", "requests=64,keys=32768"), tmp_path / "rules.json"
    fast = paged_logits_triton.Config(waves=3)
    problem = tune_kernels.Problem(lambda c: lambda x: x + c.waves, [(jnp.float32(0),)], lambda _: "ok")
    own = dataclasses.replace(
        tune_kernels.KERNELS["paged_logits_triton"],
        problem=lambda shape: problem,
        default=lambda shape: paged_logits_triton.Config(),
        candidates=lambda shape: [fast],
    )
    monkeypatch.setitem(tune_kernels.KERNELS, "paged_logits_triton", own)
    monkeypatch.setattr(tune, "target_device", lambda: cases.CARD)
    times = lambda run, arguments: {"total": float(run(*arguments[0])), "queued": 99.0}
    assert tune.tune("paged_logits_triton", shape, path, times)
    tuning.load(path)
    numbers = {name: shape[name] for name in ("heads", "new_tokens", "requests", "keys", "page_size")}
    chosen = lambda form: paged_logits_triton.default_config(cases.CARD, **numbers, form=form)
    assert chosen("fp8") == fast
    assert chosen("fp4") == paged_logits_triton.Config()


@pytest.mark.parametrize(("kernel", "text"), [(kernel, text) for kernel in SHAPES for text in SHAPES[kernel]])
def test_candidates(kernel, text, monkeypatch):
    """Schedules of the kernel's class, several, and of each a rule that reads back as the same schedule."""
    monkeypatch.setattr(tune_kernels, "target_device", lambda: cases.CARD)
    own, shape = tune_kernels.KERNELS[kernel], tune.shape_of(kernel, text)
    own.supported(cases.CARD, shape)
    make = tuning.KERNELS[kernel].config_type()
    found = {own.default(shape), *own.candidates(shape)}
    assert len(found) >= 3
    for config in found:
        assert type(config) is make
        content = json.dumps({kernel: {"default": [{"config": tune.fields_of(config)}]}})
        [(_, rule)] = tuning.each(tuning.read(content, "a file"))
        assert rule.build(make) == config


def test_table_and_file(card, tmp_path, capsys):
    """The fastest right schedule, by the shorter of its two times; wrong and broken ones have none."""
    path = tmp_path / "rules.json"
    times = clock(items4=[4.0, 3.0, 7.0, 6.0], items8=[9.0, 8.5])
    # Today's schedule and the quick one both add 4; they take turns, today's first.
    assert tune.tune("topk_mosaic", {"rows": 64, "columns": 100}, path, times)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "topk_mosaic rows=64,columns=100"
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["5.00", "us", "1.000"], ["4.00", "us", "0.800"], ["9.50", "us", "1.900"]
    ]  # fmt: skip
    assert "ok   (today) threads=256 items=4 cluster=1" in lines[1]
    assert "- us      -  WRONG: 3 entries threads=128 items=12" in lines[4]
    assert "- us      -  RuntimeError: does not compile threads=128 items=16" in lines[5]
    assert lines[6:] == [f"written to {path}"]
    [rule] = json.loads(path.read_text())["topk_mosaic"]["NVIDIA H200"]
    assert rule["when"] == {"rows": [64, 64], "columns": [100, 100]}
    assert rule["config"] == {"threads": 128, "items": 4, "cluster": 1}
    assert rule["why"].startswith("4.00 us, 5.00 us before, jax ")


def test_what_is_written_is_what_is_chosen(card, tmp_path):
    """The rule decides for its card and shape alone; a second run replaces it and keeps the others."""
    path = tmp_path / "rules.json"
    other = {"config": {"threads": 1024, "items": 64, "cluster": 2}}
    path.write_text(json.dumps({"topk_mosaic": {"NVIDIA H200": [other]}, "sparse_mla": {}}))
    for _ in range(2):
        times = clock(items4=[7.0, 3.0, 7.0, 3.0], items8=[9.0, 9.0])
        assert tune.tune("topk_mosaic", {"rows": 64, "columns": 100}, path, times)
    content = json.loads(path.read_text())
    assert content["sparse_mla"] == {}
    assert content["topk_mosaic"]["NVIDIA H200"][1:] == [other]
    assert tuning.load(path) == 2
    choose = lambda rows: tuning.choose(
        "topk_mosaic",
        topk_mosaic.Config,
        dict(rows=rows, columns=100, cores=132, rows_per_core=rows / 132),
        cases.CARD,
    )
    assert choose(64) == QUICK
    assert choose(65) == topk_mosaic.Config(1024, 64, 2)


def test_nothing_is_written_where_nothing_is_gained(card, tmp_path, capsys):
    path = tmp_path / "rules.json"
    times = clock(items4=[2.0, 3.0, 2.0, 3.0], items8=[9.0, 9.0])
    assert tune.tune("topk_mosaic", {"rows": 64, "columns": 100}, path, times)
    assert capsys.readouterr().out.endswith("today's schedule is the fastest\n")
    assert not path.exists()


def test_no_right_schedule_is_a_failure(card, monkeypatch, capsys):
    own = tune_kernels.KERNELS["topk_mosaic"]
    wrong = dataclasses.replace(own, default=lambda shape: WRONG, candidates=lambda shape: [BROKEN])
    monkeypatch.setitem(tune_kernels.KERNELS, "topk_mosaic", wrong)
    assert tune.main(["topk_mosaic", "rows=64"]) == 1
    assert capsys.readouterr().out.endswith("no schedule is right\n")


@pytest.mark.parametrize(
    ("times", "kernel", "us"),
    [
        ({"topk": 3.0, "topk_merge": 1.0, "fusion": 5.0, "total": 9.5, "queued": 20.0}, "topk", 4.0),
        ({"topk": 3.0, "topk_merge": 1.0, "fusion": 5.0, "total": 9.5, "queued": 20.0}, "", 9.5),
        ({"queued": 20.0}, "topk", 20.0),
    ],
)
def test_counted_time(times, kernel, us):
    """Of the named kernels, of all, or of the queue where no profiler says more."""
    assert tune.counted(times, kernel) == us


@pytest.mark.parametrize("kernel", ["topk_mosaic", "topk_triton"])
def test_scores_of_topk(kernel):
    """Every kind of scores can be made under strict ranks and dtypes, and the reference agrees with itself."""
    problem = tune_kernels.KERNELS[kernel].problem(dict(rows=2, columns=40))
    reference = lambda x, limits: topk_append_check.reference(x, limits, topk_append_check.K)
    assert problem.check(reference) == "ok"
    assert problem.check(lambda x, limits: reference(x, limits) + 1).startswith("WRONG normal")


@pytest.mark.parametrize(
    ("kernel", "text"),
    [("append_triton", "tokens=5"), ("append_triton_latent", "tokens=5,form=f32"), ("gather_triton", "rows=70,form=fp4")],
)  # fmt: skip
def test_appends_and_gathers(kernel, text, monkeypatch):
    """The interpreted kernel agrees with the reference, under a schedule that is not today's; a changed one does not."""
    monkeypatch.setattr(tune_kernels, "_POOL", 1 << 14)
    own, shape = tune_kernels.KERNELS[kernel], tune.shape_of(kernel, text)
    problem = own.problem(shape)
    program = jax.jit(problem.call(own.candidates(shape)[3]))
    assert problem.check(program) == "ok"
    shifted = lambda *arguments: jax.tree.map(lambda x: x.at[0].add(1), program(*arguments))
    assert problem.check(shifted).startswith("WRONG: ")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        ("append_triton", "tokens=64"),
        ("append_triton_latent", "tokens=64,form=nvfp4"),
        ("gather_triton", "rows=4096"),
        ("topk_triton", "rows=8,columns=4096"),
        ("paged_logits_triton", "requests=4,keys=4096"),
        ("sparse_mla_triton", "tokens=8,heads=16"),
    ],
)
def test_on_the_card(kernel, text, tmp_path, monkeypatch, capsys):
    """Today's schedule and one other are right and have times; a rule that was written can be loaded."""
    own, path = tune_kernels.KERNELS[kernel], tmp_path / "rules.json"
    two = dataclasses.replace(own, candidates=lambda shape: own.candidates(shape)[-1:])
    monkeypatch.setitem(tune_kernels.KERNELS, kernel, two)
    assert tune.main([kernel, text, "--write", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(" ok " in line and float(line.split()[0]) > 0 for line in lines[2:4]), lines
    assert path.exists() == lines[-1].startswith("written")
    assert tuning.load(path if path.exists() else None) == path.exists()
