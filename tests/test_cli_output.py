"""Where output goes wrong: full and closed outputs, readers that leave, Ctrl-C, too little memory."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from dsa_jax.cli import layout, main

FULL = Path("/dev/full")


def interrupted(_):
    print("half", end="")
    raise KeyboardInterrupt


@pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("buffering", [1, -1], ids=["lines", "blocks"])
def test_a_full_disk(capsys, monkeypatch, buffering):
    """Told once, by the write or by the last flush, and not again when Python closes the file."""
    with FULL.open("w", buffering=buffering) as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main(["layout", "glm-5"]) == 1
    assert capsys.readouterr().err == (
        "dsa-jax: error: standard output cannot be written (No space left on device)\n"
    )


@pytest.mark.parametrize("arguments", [["layout", "glm-5"], ["layout", "glm-5", "--json"], ["--help"]])
def test_a_reader_that_left(capsys, monkeypatch, arguments):
    """As after ``| head``: no word, and the shell's number for SIGPIPE."""

    class Pipe(io.StringIO):
        def write(self, text):
            return len(text)

        def flush(self):
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stdout", Pipe())
    assert main(arguments) == 141
    assert capsys.readouterr().err == ""


def test_a_real_pipe_without_a_reader():
    """Also at the end of the process, where Python writes what is left."""
    read, write = subprocess.PIPE, subprocess.PIPE
    command = [
        sys.executable,
        "-c",
        "import sys; from dsa_jax.cli import main; sys.exit(main())",
        "layout",
        "glm-5",
    ]
    with subprocess.Popen(command, stdout=read, stderr=write, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 141


def test_as_a_module(capsys):
    """``python -m dsa_jax`` is the command."""
    arguments = ["layout", "glm-5"]
    run = subprocess.run(
        [sys.executable, "-m", "dsa_jax", *arguments], capture_output=True, text=True, check=False
    )
    assert main(arguments) == run.returncode == 0, run.stderr
    assert run.stdout == capsys.readouterr().out
    refused = subprocess.run(
        [sys.executable, "-m", "dsa_jax", "layout", "glm-6"], capture_output=True, check=False
    )
    assert refused.returncode == 2


def test_no_output_at_all(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)  # what Python makes of a closed descriptor
    assert main(["layout", "glm-5"]) == 1
    assert "standard output cannot be written (it is closed)" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["layout", "glm-5"]) == 1


def test_nowhere_to_complain(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["layout", "nowhere"]) == 2
    assert capsys.readouterr().out == ""


def test_ctrl_c(capsys, monkeypatch):
    """What was written before is written; nothing is said."""
    monkeypatch.setattr(layout, "run", interrupted)
    assert main(["layout"]) == 130
    assert capsys.readouterr() == ("half", "")


@pytest.mark.parametrize(
    "error", [MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.\nLong story")]
)
def test_too_little_memory(capsys, monkeypatch, error):
    def run(_):
        raise error

    monkeypatch.setattr(layout, "run", run)
    assert main(["layout"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("dsa-jax: error: layout: there is too little memory (")
    assert err.endswith("); ask for less\n")


def test_faults_of_the_library_keep_their_traceback(monkeypatch):
    def run(_):
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")

    monkeypatch.setattr(layout, "run", run)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        main(["layout"])


def test_other_files(capsys, monkeypatch):
    def run(_):
        raise PermissionError(13, "Permission denied", "weights")

    monkeypatch.setattr(layout, "run", run)
    assert main(["layout"]) == 2
    assert capsys.readouterr().err == "dsa-jax: error: weights: Permission denied\n"
