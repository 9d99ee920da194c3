"""``dsa-jax plan``: what it prints is what the API says; what cannot be ends with one line and exit code 2."""

from __future__ import annotations

import json

import pytest

from dsa_jax.cli import main
from dsa_jax.config import preset
from dsa_jax.planning import plan


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of ``dsa-jax plan``."""
    try:
        code = main(["plan", *arguments])
    except SystemExit as stop:  # argparse
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json_is_the_plan(capsys):
    arguments = "glm-5.2 --gpu-memory 141GB --weights 90GB --kv-dtype fp8_ds_mla --index-dtype fp4"
    code, out, err = run(capsys, *arguments.split(), "--batch", "4", "--context", "131072", "--json")
    assert (code, err) == (0, "")
    wanted = plan(
        preset("glm-5.2"),
        gpu_memory=141 * 10**9,
        weight_bytes=90 * 10**9,
        key_form="fp8_ds_mla",
        index_form="fp4",
        batch=4,
        context=131072,
    )
    assert json.loads(out) == {"model": "glm-5.2"} | wanted.to_dict()
    assert wanted.layout.bytes_per_token == 78 * 656 + 21 * 68


def test_table_is_the_plan(capsys):
    code, out, _ = run(
        capsys, "deepseek-v3.2", "--gpu-memory", "80GiB", "--page-size", "32", "--context", "4096"
    )
    wanted = plan(preset("deepseek-v3.2"), gpu_memory=80 * 2**30, page_size=32, context=4096)
    assert code == 0
    assert out == f"deepseek-v3.2\n{wanted.table()}\n"
    assert f"{wanted.slots:,} slots" in out
    assert "78,324 bytes a token" in out  # 61 * (1,152 + 132)


@pytest.mark.parametrize("unit", ["GB", "GiB"])
def test_units(capsys, unit):
    """80GB are 80 * 10^9 bytes, 80GiB 80 * 2^30; both differ by six thousand tokens and more."""
    _, out, _ = run(capsys, "glm-5", "--gpu-memory", f"80{unit}", "--json")
    assert json.loads(out)["gpu_memory"] == 80 * (10**9 if unit == "GB" else 2**30)


def test_options_reach_the_plan(capsys):
    """Manager, draft cache and the defaults: bf16 latents, fp8 index keys, pages of 64, one request of the full length."""
    _, out, _ = run(capsys, "deepseek-v3.2", "--gpu-memory", "140GB", "--manager", "v1", "--draft", "--json")
    got = json.loads(out)
    assert (got["manager"], got["key_form"], got["index_form"], got["page_size"]) == ("v1", "bf16", "fp8", 64)
    assert got["draft_bytes_per_token"] == 1284
    assert (got["batch"], got["context"]) == (1, 163840)


def test_the_shipped_model_is_the_default(capsys):
    code, out, _ = run(capsys, "--gpu-memory", "1GiB")
    assert code == 0
    assert out.startswith("docs-8m\n")


def test_a_batch_that_does_not_fit_is_an_answer(capsys):
    code, out, _ = run(capsys, "glm-5.2", "--gpu-memory", "80GB", "--batch", "64")
    assert code == 0
    assert "64 requests of 1,048,576 tokens do not fit, there is room for 0" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("glm-5.2", "--gpu-memory"),
        ("glm-5.2 --gpu-memory 80XB", "'80XB' is no size; write for example 80GB, 80GiB or 85899345920"),
        ("glm-5.2 --gpu-memory 80GB --weights much", "'much' is no size; write"),
        ("glm-5.2 --gpu-memory 80GB --kv-dtype int8", "bf16"),
        ("glm-5.2 --gpu-memory 80GB --page-size 48", "a power of two from 1 to 256 tokens; use 64"),
        (
            "glm-5.2 --gpu-memory 80GB --kv-dtype fp8_ds_mla --page-size 32",
            "use page_size=64 or another key_form",
        ),
        ("glm-5.2 --gpu-memory 80GB --batch 0", "give a whole number of at least 1"),
        ("glm-5.2 --gpu-memory 80GB --context 2000000", "is longer than the model's 1048576 tokens"),
        (
            "glm-5.2 --gpu-memory 80GB --weights 80GB",
            "use more memory, more ranks, a shorter context or a narrower form",
        ),
        ("no-such-model --gpu-memory 80GB", "one of the presets: deepseek-v3,"),
    ],
)
def test_bad_input(capsys, arguments, words):
    code, out, err = run(capsys, *arguments.split())
    assert (code, out) == (2, "")
    assert words in err
    assert "Traceback" not in err
