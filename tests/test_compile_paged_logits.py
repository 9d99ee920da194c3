"""The paged logits kernels compile, ptxas included, for every card they claim, and are refused for the others."""

from __future__ import annotations

import pytest

from compile_without_gpu import compile_case

pytestmark = pytest.mark.compile

CASE = "compile_cases:paged_logits"
# Heads, new tokens, page sizes and contexts, pairwise where they matter to the generated code.
HOPPER = [
    dict(heads=64, new_tokens=1, page_size=64),
    dict(heads=64, new_tokens=2, page_size=32),
    dict(heads=64, new_tokens=3, page_size=128, traced_offset=True),
    dict(heads=64, new_tokens=4, page_size=64),
    dict(heads=64, new_tokens=5, page_size=32, context=2080),
    dict(heads=64, new_tokens=6, page_size=64),
    dict(heads=64, new_tokens=2, page_size=64, dtype="bfloat16"),
    dict(heads=64, new_tokens=8, page_size=128),
    dict(heads=32, new_tokens=1, page_size=128, requests=1, context=65536),
    dict(heads=32, new_tokens=8, page_size=64, traced_offset=True),
]
EVERYWHERE = [
    ("sm80", dict(heads=64, new_tokens=1, page_size=64)),
    ("sm80", dict(heads=32, new_tokens=8, page_size=128, traced_offset=True)),
    ("sm80", dict(heads=64, new_tokens=2, page_size=32)),
    ("sm90", dict(heads=64, new_tokens=2, page_size=256, dtype="bfloat16")),
    ("sm100", dict(heads=64, new_tokens=3, page_size=64)),
    ("sm100", dict(heads=16, new_tokens=1, page_size=16)),
    # What takes most shared memory at each page size: as many heads times rows as a program has, uneven shares of them.
    ("sm90", dict(heads=64, new_tokens=6, page_size=128)),
    ("sm90", dict(heads=64, new_tokens=8, page_size=256, dtype="bfloat16")),
    ("sm80", dict(heads=64, new_tokens=8, page_size=256)),
    ("sm80", dict(heads=128, new_tokens=3, page_size=256)),
    ("sm80", dict(heads=64, new_tokens=5, page_size=128)),
    ("sm100", dict(heads=64, new_tokens=8, page_size=256)),
    *[
        pytest.param("sm90", dict(heads=heads, new_tokens=n, page_size=page_size), marks=pytest.mark.full)
        for heads, n, page_size in ((128, 4, 256), (32, 8, 256), (16, 8, 256), (64, 7, 64), (64, 8, 32))
    ],
]


def name(options):
    return "-".join(map(str, options.values())) if isinstance(options, dict) else options


@pytest.mark.parametrize("options", HOPPER, ids=name)
def test_hopper_kernel_compiles_without_spills(compile_environment, options):
    result = compile_case(compile_environment, "sm90", CASE, kernel="mosaic", **options)
    assert "mosaic_gpu" in " ".join(result.get("calls", [])), result
    assert not result["spilled"], result


@pytest.mark.parametrize(
    "options",
    [
        dict(heads=64),
        dict(heads=32, page_size=32),
        dict(page_size=128),
        dict(heads=32, form="fp4"),
    ],
    ids=name,
)
def test_hopper_prefill_compiles_without_spills(compile_environment, options):
    result = compile_case(compile_environment, "sm90", "compile_cases:paged_logits_prefill", **options)
    assert "mosaic_gpu" in " ".join(result.get("calls", [])), result
    assert not result["spilled"], result


@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_layers_of_a_prefill_copy_no_pool(compile_environment, form):
    """A later layer writes the pool in place that an earlier one has scored: pools of index keys of 0.5 and 1 GB."""
    result = compile_case(
        compile_environment, "sm90", "compile_cases:prefill_of_two_layers", form=form, slots=1 << 16
    )
    assert "mosaic_gpu" in " ".join(result.get("calls", [])), result
    assert result["temp"] < 256 << 20, result


@pytest.mark.sample(0, 1, 2, 3, 4, 6, 9, 11)
@pytest.mark.parametrize(("card", "options"), EVERYWHERE, ids=name)
def test_triton_kernel_compiles(compile_environment, card, options):
    result = compile_case(compile_environment, card, CASE, kernel="triton", **options)
    assert any("triton" in call for call in result.get("calls", [])), result


@pytest.mark.parametrize(
    "options",
    [
        dict(heads=64, new_tokens=4, page_size=64),
        dict(heads=64, new_tokens=2, page_size=128),
        dict(heads=128, new_tokens=1, page_size=64),
        dict(heads=16, new_tokens=8, page_size=256),
    ],
    ids=name,
)
def test_triton_schedules_for_hopper_do_not_spill(compile_environment, options):
    result = compile_case(compile_environment, "sm90", CASE, kernel="triton", **options)
    assert not result["spilled"], result


@pytest.mark.sample(0, 3, 4, 7)
@pytest.mark.parametrize("form", ["fp8", "fp4"])
@pytest.mark.parametrize(
    ("card", "options"),
    [
        ("sm80", dict(heads=64)),
        ("sm80", dict(heads=128, page_size=256)),
        ("sm90", dict(heads=32, page_size=16)),
        ("sm100", dict(heads=64, page_size=128)),
    ],
    ids=name,
)
def test_triton_prefill_compiles(compile_environment, card, options, form):
    case = "compile_cases:paged_logits_prefill"
    result = compile_case(compile_environment, card, case, kernel="triton", form=form, **options)
    assert any("triton" in call for call in result.get("calls", [])), result


@pytest.mark.parametrize(("card", "kernel"), [("sm90", "mosaic"), ("sm80", "triton")])
def test_no_copy_of_the_pool(compile_environment, card, kernel):
    """The codes are viewed as float8 or as words in front of the call; the pool of these shapes has 100 MB."""
    result = compile_case(compile_environment, card, CASE, kernel=kernel, context=4096, heads=32)
    assert result["temp"] < 1 << 20, result


def test_a_spill_is_seen(compile_environment):
    """Four tokens of 64 heads do not fit without moving registers from the copying warpgroup: the warning arrives."""
    config = dict(compute_warpgroups=2)
    result = compile_case(compile_environment, "sm90", CASE, kernel="mosaic", new_tokens=4, config=config)
    assert result["spilled"], result


@pytest.mark.parametrize("card", ["sm80", "sm100"])
def test_hopper_kernel_is_refused_elsewhere(compile_environment, card):
    result = compile_case(compile_environment, card, CASE, kernel="mosaic")
    assert result["refused"].startswith("NotImplementedError"), result
    assert "9.0" in result["refused"]
    assert {"sm80": "A100", "sm100": "B200"}[card] in result["refused"]


def test_a_process_that_dies_is_reported(compile_environment):
    result = compile_case(compile_environment, "sm90", "os:abort")
    assert "exit code" in result.get("died", ""), result
