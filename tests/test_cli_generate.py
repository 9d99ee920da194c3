"""``dsa-jax generate``: the main job, and every way to ask for it wrongly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import pytest

import dsa_jax.models
from dsa_jax.cli import main

CHECKPOINT = Path(dsa_jax.models.__file__).parent / "checkpoints" / "docs-8m"
PROMPTS = ["Return the sum of the array elements", "The default is"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home of its own, so that no test finds or leaves compiled programs; the cache settings are put back."""
    monkeypatch.setenv("HOME", str(tmp_path))
    kept = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    # What conftest is strict about, users are not: the command must work with JAX's defaults.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    jax.config.update("jax_compilation_cache_dir", kept[0])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", kept[1])


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        code = main(list(arguments))
    except SystemExit as stop:  # argparse
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def generated(capsys, *arguments: str) -> dict:
    code, out, err = run(
        capsys, "generate", *PROMPTS, "--tokens", "9", "--temperature", "0", "--json", *arguments
    )
    assert code == 0, err
    return json.loads(out)


@pytest.mark.full
def test_both_managers_write_the_same_tokens_and_the_figures_add_up(capsys):
    v2 = generated(capsys)
    v1 = generated(capsys, "--manager", "v1", "--page-size", "16")
    assert v1["tokens"] == v2["tokens"]
    assert all(0 < len(tokens) <= 9 for tokens in v2["tokens"])
    figures = v1["figures"]
    lengths = [len(p) + len(t) - 1 for p, t in zip(v1["prompts"], v1["tokens"], strict=True)]
    assert figures["context_lengths"] == lengths
    assert figures["pages_used"] == sum(-(-n // 16) for n in lengths)
    assert figures["bytes_per_token"] == {"key": 4 * 1152, "index_key": 4 * 132}
    assert figures["pool_bytes"] == 8192 * 4 * (1152 + 132)
    assert figures["tokens_attended"] == [min(n, 64) for n in lengths]


def test_text_and_table(capsys):
    code, out, err = run(capsys, "generate", *PROMPTS, "--tokens", "5", "--seed", "3", "--index-topk", "4")
    assert code == 0, err
    assert out.index(PROMPTS[0]) < out.index(PROMPTS[1]) < out.index("bytes/token")
    assert "tokens attended per query   4, 4" in out
    assert "tokens a second" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", ""], "prompt 0 is empty; pass text"),
        (["generate", "a" * 9000], "shorten the prompt or ask for fewer tokens"),
        (["generate", "a", "--page-size", "48"], "power of two from 1 to 256"),
        (
            ["generate", "a", "--pool-tokens", "64", "--tokens", "100"],
            "pass --pool-tokens 128, or ask for fewer",
        ),
        (
            ["generate", "a", "--draft", "1", "--page-size", "32", "--pool-tokens", "64", "--tokens", "100"],
            "each need 128 in pages of 32; pass --pool-tokens 128, or ask for fewer --tokens",
        ),
        # 2**30 tokens of 4 layers with 1152 and 132 bytes each.
        (["generate", "a", "--pool-tokens", "1073741824"], "takes 5,514,738,008,064 bytes: "),
        (["generate", "a", "--pool-tokens", "1073741824", "--page-size", "1"], "pass fewer --pool-tokens"),
        (
            ["generate", "a", "--pool-tokens", "9" * 5000],
            "'999999999999999999999999999999999999... is no count",
        ),
        (["generate", "a", "--tokens", "2147483648"], "give a whole number of at most 2147483647"),
        (["generate", "a", "--model", "m" * 5000], "neither a directory nor a shipped model"),
        (["generate", "a", "--implementation", "mosaic,triton"], "pass no --implementation or 'xla'"),
        (["generate", "a", "--tokens", "0"], "give a whole number of at least 1"),
        (["generate", "a", "--tokens", "-3"], "give a whole number of at least 1"),
        (["generate", "a", "--temperature", "-1"], "give a number from 0"),
        (["generate", "a", "--implementation", "cuda"], "give mosaic, triton, xla"),
        (["generate", "a", "--implementation", "triton"], "needs an NVIDIA GPU"),
        (["generate", "a", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["generate", "a", "--model", "nowhere"], "neither a directory nor a shipped model"),
        (["generate"], "the following arguments are required: PROMPT"),
        (["layout", "nowhere"], "one of the presets"),
        (["layout", "m" * 5000], "its config.json cannot be read (File name too long). Pass a folder with"),
        (["layout", "glm-5", "--page-size", "3"], "--page-size 3: a page holds a power of two from 1 to 256"),
        (
            ["layout", "glm-5", "--page-size", "32", "--kv-dtype", "fp8_ds_mla"],
            "use --page-size 64 or another --kv-dtype",
        ),
        (["layout", "glm-5", "--slots", "1" * 30], "give a whole number of at most 2147483647"),
    ],
)
def test_bad_input_is_explained(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_truncated_checkpoints_are_explained(capsys, tmp_path, name):
    folder = tmp_path / "checkpoint"
    shutil.copytree(CHECKPOINT, folder)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    code, out, err = run(capsys, "generate", "a", "--model", str(folder))
    assert (code, out) == (2, "")
    assert name in err
    assert "Traceback" not in err


def test_layout_prints_the_shipped_model(capsys):
    code, out, _ = run(capsys, "layout")
    assert code == 0
    assert "docs-8m" in out
    code, out, _ = run(capsys, "layout", "glm-5.2", "--json", "--kv-dtype", "fp8")
    described = json.loads(out)
    assert sum(pool["slot_bytes"] for pool in described["pools"]) == 64 * 47_700
