"""Scores of FP4 keys through the op: every pair of what the kernels take, interpreted on the CPU and on a card."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import cases
import paged_pairs
from dsa_jax.ops import dispatch
from dsa_jax.pallas import paged_logits_fp4_mosaic
from dsa_jax.pallas.paged_logits_fp4_mosaic import PagedLogitsFp4Config as Config
from fp4_scores import check, scenario
from interpreted import INTERPRETED, races_found
from paged_pairs import CASES

KERNELS = ("mosaic", "triton")
RUNS = [(kernel, case) for case in CASES for kernel in KERNELS]
FEW = [CASES[i] for i in (0, 1, 3, 6, 11, 12, 16, 18, 22)]
"""What runs by default: with the form as one more factor these are enough, since FP8 keys meet every pair of the others."""
# Blocks and schedules of the Hopper kernel, in turn.
SCHEDULES = (
    (1, Config(compute_warpgroups=3, stages=3)),
    (2, Config(stages=4)),
    (4, Config(stages=2, query_buffers=1)),
    (9, Config(stages=4)),
    (2, Config(compute_warpgroups=1, stages=2, product_columns=64)),
    (3, Config()),
    (3, Config(stages=2, together=2)),
)


@pytest.mark.parametrize(
    ("kernel", "case"),
    [
        pytest.param(*run, marks=() if run[1] in FEW else pytest.mark.full, id=f"{run[0]}-{run[1]}")
        for run in RUNS
    ],
)
def test_pairs(kernel, case, monkeypatch):
    """The scores of the model, and for Mosaic no race; unused pages and places hold NaN."""
    monkeypatch.setattr(dispatch, "target_device", lambda: cases.CARD)
    config = None
    if kernel == "mosaic":
        blocks, config = SCHEDULES[CASES.index(case) % len(SCHEDULES)]
        score = functools.partial(
            paged_logits_fp4_mosaic.paged_logits_decode, blocks=blocks, interpret=INTERPRETED
        )
        monkeypatch.setattr(paged_logits_fp4_mosaic, "paged_logits_decode", score)
    arguments, expected = scenario(case.lengths, **case.shape)
    score = paged_pairs.scorer(kernel, config)
    check(np.asarray(score(*paged_pairs.on_cache(case, "fp4", arguments))), expected)
    assert kernel != "mosaic" or not races_found()


def test_every_value_and_schedule_has_a_case_by_default():
    met = {factor for case in FEW for factor in case.factors}
    assert {(name, value) for name, values in paged_pairs.FACTORS.items() for value in values} <= met
    assert {CASES.index(case) % len(SCHEDULES) for case in FEW} == set(range(len(SCHEDULES)))


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_pair_has_a_case(kernel):
    paged_pairs.check_cover([case for name, case in RUNS if name == kernel])


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "case"), RUNS, ids=str)
def test_pairs_on_the_card(kernel, case):
    """The compiled kernels, with the library's own schedules: right, and the same bits 20 times."""
    arguments, expected = scenario(case.lengths, **case.shape)
    arguments = paged_pairs.on_cache(case, "fp4", arguments)
    paged_pairs.check_on_card(paged_pairs.scorer(kernel), arguments, expected)
