"""The Python of README and of docs/draft_replay.md, as a newcomer would paste it."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dsa_jax.cache import Cache
from dsa_jax.loops import Batch, decode_loop
from dsa_jax.sampling import Sampling

ROOT = Path(__file__).resolve().parents[1]


def blocks_of(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


BLOCKS = blocks_of("README.md")
PRINTED = (r"\(128, 16, 512\) Cache\(v2, 2 layers, 16 slots x 64 tokens", r"(?s).+\n[01]\.\d+\n$")
"""What each block prints: the shape of a layer's output and its cache; a text and the drafts accepted per step."""


def test_every_block_is_run():
    assert len(BLOCKS) == len(PRINTED)


@pytest.mark.parametrize("number", range(len(PRINTED)))
def test_blocks_run(number, capsys):
    exec(compile(BLOCKS[number], f"README.md, block {number}", "exec"), {})
    assert re.match(PRINTED[number], capsys.readouterr().out)


def test_a_loop_by_hand(capsys):
    """The second block of the page; its text is that of a loop without drafts from the same place."""
    names: dict = {}
    exec(compile(blocks_of("docs/draft_replay.md")[1], "docs/draft_replay.md, block 1", "exec"), names)
    printed = capsys.readouterr().out
    # The block donates its caches, so prefill once more.
    step, params, meta, last = (names[name] for name in ("step", "params", "meta", "last"))
    cache, *_ = jax.jit(step)(params, Cache.create(names["layout"], 8), names["prefill"], names["tokens"])
    batch = Batch(last=last, meta=meta, live=jnp.ones(3, bool))
    plain = jax.jit(lambda cache, batch: decode_loop(step, params, cache, batch, 16, Sampling.create())[2])
    wanted = plain(cache, batch).tokens
    assert names["written"].tokens.tolist() == wanted.tolist()
    assert (names["written"].accepted > 0).all()
    texts = [[first, *row] for first, row in zip(last.tolist(), wanted.tolist())]
    assert printed == "".join(names["tokenizer"].decode(text) + "\n" for text in texts)
