"""README's Python, as a newcomer would paste it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
PRINTED = (r"\(128, 16, 512\) Cache\(v2, 2 layers, 16 slots x 64 tokens", r"(?s).+\n[01]\.\d+\n$")
"""What each block prints: the shape of a layer's output and its cache; a text and the drafts accepted per step."""


def test_every_block_is_run():
    assert len(BLOCKS) == len(PRINTED)


@pytest.mark.parametrize("number", range(len(PRINTED)))
def test_blocks_run(number, capsys):
    exec(compile(BLOCKS[number], f"README.md, block {number}", "exec"), {})
    assert re.match(PRINTED[number], capsys.readouterr().out)
