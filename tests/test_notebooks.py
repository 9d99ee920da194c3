"""Every notebook runs from top to bottom, and is committed without outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs(path, capsys):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells), "strip the outputs"
    names: dict = {}
    for cell in cells:
        exec("".join(cell["source"]), names)
    assert "B a token" in capsys.readouterr().out
