"""Keys that a decode step reads once say so to the L2 cache, in the machine code; nothing else does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from compile_without_gpu import compile_case

pytestmark = pytest.mark.compile

DECODE, FP4 = "compile_cases:paged_logits", "fp4_compile_cases:paged_logits"


def copies(environment: dict[str, str], folder: Path, case: str, **options) -> list[bool]:
    """Of every copy to shared memory that the kernel has, whether it carries a hint."""
    folder.mkdir()
    environment = environment | {"MOSAIC_GPU_DUMP_TO": str(folder), "MOSAIC_GPU_DUMP_PTX": "1"}
    result = compile_case(environment, "sm90", case, **options)
    assert "mosaic_gpu" in " ".join(result.get("calls", [])), result
    (ptx,) = (path.read_text() for path in folder.glob("*.ptx"))
    return ["L2::cache_hint" in copy for copy in re.findall(r"cp\.async\.bulk\.tensor\S+", ptx)]


@pytest.mark.sample(0)
@pytest.mark.parametrize(("new_tokens", "page_size"), [(1, 64), (2, 32), (1, 128)])
def test_keys_and_their_scales_carry_the_hint_and_queries_and_weights_do_not(
    compile_environment, tmp_path, new_tokens, page_size
):
    options = dict(heads=64, new_tokens=new_tokens, page_size=page_size)
    found = copies(compile_environment, tmp_path / "ptx", DECODE, kernel="mosaic", **options)
    pages = 64 // min(page_size, 64)
    # A request's first tile, then its queries and weights, then a loop over its other tiles.
    assert found == [True] * 2 * pages + [False] * 2 + [True] * 2 * pages


def test_fp4_keys_carry_the_hint(compile_environment, tmp_path):
    found = copies(compile_environment, tmp_path / "ptx", FP4, kernel="fp4_mosaic", heads=64, new_tokens=1)
    assert found.count(False) == 2, found
    assert found.count(True) >= 2, found


def test_few_scores_need_no_room(compile_environment, tmp_path):
    options = dict(heads=64, new_tokens=1, requests=1, context=65536)
    found = copies(compile_environment, tmp_path / "ptx", DECODE, kernel="mosaic", **options)
    assert len(found) == 6
    assert not any(found)


@pytest.mark.full
def test_keys_of_contexts_are_read_again(compile_environment, tmp_path):
    found = copies(compile_environment, tmp_path / "ptx", "compile_cases:paged_logits_prefill")
    assert len(found) == 6
    assert not any(found)
