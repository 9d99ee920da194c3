"""The kernels for contiguous keys compile, ptxas included, for the cards they claim, and are refused for the others."""

from __future__ import annotations

import pytest

from compile_without_gpu import compile_case

pytestmark = pytest.mark.compile

CASE = "compile_cases:window_logits"
HOPPER = [
    dict(heads=64),
    dict(heads=32, keys=8000),
    dict(heads=64, rows=3, keys=50, dtype="bfloat16"),
    dict(heads=64, form="fp4"),
]
EVERYWHERE = [
    ("sm80", dict(heads=64)),
    ("sm80", dict(heads=32, rows=5, keys=8000, form="fp4")),
    ("sm80", dict(heads=128, form="fp4")),
    ("sm90", dict(heads=64, form="fp4")),
    ("sm90", dict(heads=32, rows=130, keys=1999, form="fp4")),
    ("sm90", dict(heads=16)),
    ("sm90", dict(heads=128)),
    ("sm100", dict(heads=64)),
]


def name(options):
    return "-".join(map(str, options.values())) if isinstance(options, dict) else options


@pytest.mark.sample(0, 3)
@pytest.mark.parametrize("options", HOPPER, ids=name)
def test_hopper_kernel_compiles_without_spills(compile_environment, options):
    result = compile_case(compile_environment, "sm90", CASE, kernel="mosaic", **options)
    assert "mosaic_gpu" in " ".join(result.get("calls", [])), result
    assert not result["spilled"], result


@pytest.mark.sample(0, 2, 5, 7)
@pytest.mark.parametrize(("card", "options"), EVERYWHERE, ids=name)
def test_triton_kernel_compiles(compile_environment, card, options):
    result = compile_case(compile_environment, card, CASE, kernel="triton", **options)
    assert any("triton" in call for call in result.get("calls", [])), result


def test_no_copy_of_whole_tiles(compile_environment):
    """Keys of a multiple of 64 are viewed, not copied, and so are the scores; here the keys alone have 128 MB."""
    result = compile_case(compile_environment, "sm90", CASE, kernel="mosaic", rows=64, keys=1 << 20)
    assert result["temp"] < 1 << 20, result


@pytest.mark.parametrize("card", ["sm80", "sm100"])
def test_hopper_kernel_is_refused_elsewhere(compile_environment, card):
    result = compile_case(compile_environment, card, CASE, kernel="mosaic")
    assert result["refused"].startswith("NotImplementedError"), result
    assert "9.0" in result["refused"]
