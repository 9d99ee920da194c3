"""The scoring kernels on FP4 keys compile, ptxas included, for every card they claim, and are refused for the others."""

from __future__ import annotations

import pytest

from compile_without_gpu import compile_case

pytestmark = pytest.mark.compile

CASE = "fp4_compile_cases:paged_logits"
HOPPER = [
    dict(heads=64, new_tokens=1, page_size=64),
    dict(heads=32, new_tokens=1, page_size=64, traced_offset=True),
    dict(heads=64, new_tokens=2, page_size=32, context=2080),
    dict(heads=32, config=dict(compute_warpgroups=3, registers=(152, 40), together=2)),
]
# Here the copying warpgroup, or the wide products, are a few registers short, once for every request.
WIDE = [
    dict(heads=32, new_tokens=1, page_size=128, traced_offset=True),
    dict(heads=64, new_tokens=8, page_size=64),
]
EVERYWHERE = [
    ("sm80", dict(heads=64, new_tokens=1, page_size=64)),
    ("sm80", dict(heads=32, new_tokens=8, page_size=128, traced_offset=True)),
    ("sm90", dict(heads=64, new_tokens=2, page_size=256)),
    ("sm100", dict(heads=16, new_tokens=3, page_size=16)),
    # What takes most shared memory: as many heads times rows as a program has.
    ("sm90", dict(heads=64, new_tokens=8, page_size=64)),
    ("sm90", dict(heads=64, new_tokens=6, page_size=256)),
    ("sm90", dict(heads=32, new_tokens=8, page_size=128)),
    ("sm80", dict(heads=128, new_tokens=4, page_size=256)),
    ("sm100", dict(heads=64, new_tokens=8, page_size=128)),
]


def name(options):
    return "-".join(map(str, options.values())) if isinstance(options, dict) else options


@pytest.mark.parametrize("options", HOPPER, ids=name)
def test_hopper_kernel_compiles_without_spills(compile_environment, options):
    result = compile_case(compile_environment, "sm90", CASE, kernel="fp4_mosaic", **options)
    assert "mosaic_gpu" in " ".join(result.get("calls", [])), result
    assert not result["spilled"], result


@pytest.mark.parametrize("options", WIDE, ids=name)
def test_hopper_kernel_compiles(compile_environment, options):
    result = compile_case(compile_environment, "sm90", CASE, kernel="fp4_mosaic", **options)
    assert "mosaic_gpu" in " ".join(result.get("calls", [])), result


@pytest.mark.sample(0, 1, 3, 6, 8)
@pytest.mark.parametrize(("card", "options"), EVERYWHERE, ids=name)
def test_triton_kernel_compiles(compile_environment, card, options):
    result = compile_case(compile_environment, card, CASE, kernel="triton", **options)
    assert any("triton" in call for call in result.get("calls", [])), result


@pytest.mark.parametrize(("card", "kernel"), [("sm90", "fp4_mosaic"), ("sm80", "triton")])
def test_no_copy_of_the_pool(compile_environment, card, kernel):
    """The codes are viewed as words in front of the call; the pool of these shapes has 50 MB."""
    result = compile_case(compile_environment, card, CASE, kernel=kernel, context=4096, heads=32)
    assert result["temp"] < 4 << 20, result


@pytest.mark.parametrize("card", ["sm80", "sm100"])
def test_hopper_kernel_is_refused_elsewhere(compile_environment, card):
    result = compile_case(compile_environment, card, CASE, kernel="fp4_mosaic")
    assert result["refused"].startswith("NotImplementedError"), result
    assert "9.0" in result["refused"]
