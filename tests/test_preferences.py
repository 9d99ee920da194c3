"""Which implementation is tried first where several can: the package's rules."""

from __future__ import annotations

import pytest

import cases
from dsa_jax.pallas import tuning

FEW_ROWS, MANY_ROWS = (32.5, 2**30), (33, 2**27)
"""Rows a request, and products of rows, keys and heads."""


@pytest.mark.parametrize(("heads", "few"), [(1, True), (16, True), (17, False), (128, False)])
@pytest.mark.parametrize("form", ["bf16", "fp8", "nvfp4", "fp8_ds_mla"])
def test_which_attention_is_tried_first(heads, few, form):
    """Triton has few heads of bfloat16; of 656-byte latents it takes 2.5 times as long."""
    first = "triton" if few and form == "bf16" else "mosaic"
    for tokens in (1, 64, 4096):
        facts = {"form": form, "tokens": tokens, "heads": heads}
        assert tuning.choose("sparse_mla", tuning.Preference, facts, cases.CARD) == tuning.Preference(first)


@pytest.mark.parametrize(
    ("form", "size", "first"),
    [
        ("fp4", MANY_ROWS, "mosaic"),
        ("fp4", FEW_ROWS, "triton"),
        ("fp4", (33, 2**27 - 1), "triton"),
        ("fp8", MANY_ROWS, "mosaic"),
        ("fp8", (1, 64), "mosaic"),
    ],
)
def test_which_scores_of_many_rows_are_tried_first(form, size, first):
    facts = dict(zip(("form", "rows_per_request", "products"), (form, *size), strict=True))
    assert tuning.choose("many_row_scores", tuning.Preference, facts, cases.CARD) == tuning.Preference(first)


@pytest.mark.parametrize(
    ("form", "tokens", "first"),
    [("f32", 4095, "triton"), ("f32", 4096, "xla"), ("fp8", 8192, "triton"), ("fp4", 8192, "triton")],
)
def test_who_appends_keys(form, tokens, first):
    chosen = tuning.choose(
        "append_index_k", tuning.KernelOrReference, dict(form=form, tokens=tokens), cases.CARD
    )
    assert chosen == tuning.KernelOrReference(first)
