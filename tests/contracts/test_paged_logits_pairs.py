"""Scores of FP8 keys through the op: every pair of what the kernels take, interpreted on the CPU and on a card."""

from __future__ import annotations

import dataclasses
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
from paged_pairs import CASES, Case

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
    score = interpreted(kernel, SCHEDULES[CASES.index(case) % len(SCHEDULES)], monkeypatch)
    arguments, expected = scenario(case.lengths, **case.shape)
    check(np.asarray(score(*paged_pairs.on_cache(case, "fp8", arguments))), expected)
    assert kernel != "mosaic" or not races_found()


def interpreted(kernel: str, schedule: tuple[int, PagedLogitsConfig], monkeypatch):
    """The op with one kernel, which takes the CPU for a card; `schedule` is that of Mosaic, its blocks and its config."""
    monkeypatch.setattr(dispatch, "target_device", lambda: cases.CARD)
    blocks, config = schedule
    score = functools.partial(paged_logits_mosaic.paged_logits_decode, blocks=blocks, interpret=INTERPRETED)
    monkeypatch.setattr(paged_logits_mosaic, "paged_logits_decode", score)
    return paged_pairs.scorer(kernel.split()[0], config if kernel == "mosaic" else CONFIGS[kernel])


@pytest.mark.parametrize("kernel", CONFIGS)
def test_limits_beyond_the_table(kernel, monkeypatch):
    """A length that outgrew the table scores the columns that exist and nothing else: 3 pages, a limit of 1,000 keys."""
    case = Case(32, 1, 32, "v1", (96, 0, 64))
    arguments, expected = scenario(case.lengths, **case.shape)
    *given, step = paged_pairs.on_cache(case, "fp8", arguments)
    longer = dataclasses.replace(step, limits=step.limits.at[0].set(1_000))
    score = interpreted(kernel, (2, PagedLogitsConfig()), monkeypatch)
    check(np.asarray(score(*given, longer)), expected)


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
