"""Scores of FP8 keys through the op: every pair of what the kernels take, interpreted on the CPU and on a card."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import cases
import paged_pairs
from dsa_jax.ops import dispatch
from dsa_jax.pallas import paged_logits_mosaic
from dsa_jax.pallas.paged_logits_mosaic import PagedLogitsConfig
from dsa_jax.pallas.paged_logits_triton import Config
from fp8_scores import check, scenario
from interpreted import INTERPRETED, races_found
from paged_pairs import CASES

CONFIGS = {"mosaic": None, "triton": None, "triton for Ampere": Config(fp8_products=False)}
# Of Ampere's products, which differ from Triton's others in how codes become factors alone, a sample.
RUNS = [(kernel, case) for case in CASES for kernel in ("mosaic", "triton")]
RUNS += [("triton for Ampere", case) for case in CASES[::5]]
# Blocks and schedules of the Hopper kernel, in turn.
SCHEDULES = (
    (1, PagedLogitsConfig(compute_warpgroups=3, stages=3)),
    (2, PagedLogitsConfig(stages=4)),
    (4, PagedLogitsConfig(stages=2, query_buffers=1)),
    (12, PagedLogitsConfig()),
    (2, PagedLogitsConfig(compute_warpgroups=1, stages=2)),
    (3, PagedLogitsConfig(product_columns=64)),
    (3, PagedLogitsConfig()),
)


@pytest.mark.parametrize(("kernel", "case"), RUNS, ids=str)
def test_pairs(kernel, case, monkeypatch):
    """The scores of the model, and for Mosaic no race; unused pages and places hold NaN."""
    monkeypatch.setattr(dispatch, "target_device", lambda: cases.CARD)
    config = CONFIGS[kernel]
    if kernel == "mosaic":
        blocks, config = SCHEDULES[CASES.index(case) % len(SCHEDULES)]
        score = functools.partial(
            paged_logits_mosaic.paged_logits_decode, blocks=blocks, interpret=INTERPRETED
        )
        monkeypatch.setattr(paged_logits_mosaic, "paged_logits_decode", score)
    arguments, expected = scenario(case.lengths, **case.shape)
    score = paged_pairs.scorer(kernel.split()[0], config)
    check(np.asarray(score(*paged_pairs.on_cache(case, "fp8", arguments))), expected)
    assert kernel != "mosaic" or not races_found()


@pytest.mark.parametrize("kernel", ["mosaic", "triton"])
def test_every_pair_has_a_case(kernel):
    paged_pairs.check_cover([case for name, case in RUNS if name == kernel])


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "case"), RUNS, ids=str)
def test_pairs_on_the_card(kernel, case):
    """The compiled kernels, with the library's own schedules: right, and the same bits 20 times."""
    arguments, expected = scenario(case.lengths, **case.shape)
    arguments = paged_pairs.on_cache(case, "fp8", arguments)
    paged_pairs.check_on_card(paged_pairs.scorer(kernel.split()[0], CONFIGS[kernel]), arguments, expected)
