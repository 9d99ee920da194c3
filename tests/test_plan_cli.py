"""``dsa-jax plan``: what it prints is what the API says; what cannot be ends with one line and exit code 2."""

from __future__ import annotations

import json
import math

import pytest

from dsa_jax import presets
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
            "--page-size 32 with --kv-dtype fp8_ds_mla: the 656-byte token is defined for pages of 64 tokens only; use "
            "--page-size 64 or another --kv-dtype",
        ),
        ("glm-5.2 --gpu-memory 80GB --batch 0", "give a whole number of at least 1"),
        (
            "glm-5.2 --gpu-memory 80GB --context 2000000",
            "--context 2000000 is longer than the model's 1048576 tokens",
        ),
        (
            "glm-5.2 --gpu-memory 80GB --weights 80GB",
            "use more memory, more ranks, a shorter context or a narrower form",
        ),
        (
            "glm-5.2 --gpu-memory 80GB --weights 80GB",
            "--gpu-memory 80,000,000,000 less --weights 80,000,000,000 and",
        ),
        ("glm-5.2 --gpu-memory " + "9" * 5000, "is more than 9,223,372,036,854,775,807 bytes"),
        ("glm-5.2 --gpu-memory " + "9" * 400 + ".5GB", "is more than 9,223,372,036,854,775,807 bytes"),
        ("glm-5.2 --gpu-memory 80GB --weights 8388608TiB", "is more than"),
        ("glm-5.2 --gpu-memory 80GB --batch 2147483648", "give a whole number of at most 2147483647"),
        ("no-such-model --gpu-memory 80GB", "one of the presets: deepseek-v3,"),
    ],
)
def test_bad_input(capsys, arguments, words):
    code, out, err = run(capsys, *arguments.split())
    assert (code, out) == (2, "")
    assert words in err
    assert "Traceback" not in err


CONFIG = dict(presets.PRESETS["deepseek-v3.2"])
YARN = CONFIG["rope_scaling"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (CONFIG | {"architectures": 5}, "architectures=5 is neither a list of names nor a name; set it to"),
        (CONFIG | {"architectures": [{}]}, "architectures=[{}] is neither a list of names nor a name"),
        (CONFIG | {"rope_scaling": YARN | {"factor": math.inf}}, "factor=inf is not a finite number"),
        (
            CONFIG | {"rope_scaling": YARN | {"original_max_position_embeddings": math.nan}},
            "_embeddings=nan is not",
        ),
        (
            CONFIG | {"num_hidden_layers": 10**6},
            "num_hidden_layers=1000000 is too large, wanted at most 1,000",
        ),
        ("[" * 100_000, "cannot be read as JSON"),
        ('{"num_hidden_layers": ' + "1" * 5000 + "}", "cannot be read as JSON"),
        ("[]", "holds no JSON object"),
    ],
)
def test_bad_configurations(capsys, tmp_path, content, words):
    """NaN and Infinity are no JSON, but Python reads and writes them."""
    (tmp_path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    code, out, err = run(capsys, str(tmp_path), "--gpu-memory", "80GB")
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert words in err
    assert str(tmp_path / "config.json") in err


def test_the_most_layers_are_planned(capsys, tmp_path):
    """What is just allowed works: 1,000 layers of 1,152 and 132 bytes."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1000}))
    code, out, _ = run(capsys, str(tmp_path), "--gpu-memory", "8TB", "--json")
    assert code == 0
    assert json.loads(out)["bytes_per_token"] == 1_284_000


def test_drafts_of_a_model_without_prediction_layers(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_nextn_predict_layers": 0}))
    code, out, err = run(capsys, str(tmp_path), "--gpu-memory", "80GB", "--draft")
    assert (code, out) == (2, "")
    assert (
        "--draft is given, but DeepseekV32ForCausalLM has no prediction layers here; leave --draft out" in err
    )
