"""Schedules of append and gather: what the package's rules choose for every form."""

from __future__ import annotations

import itertools

import pytest

from dsa_jax.pallas import append_triton, gather_triton

KEYS = {"fp8": (4, 8, 128), "fp4": (4, 8, 64), "f32": (4, 8, 512)}
LATENTS = {
    "bf16": (4, 8, 1152), "f32": (1, 8, 2304), "fp8": (1, 4, 576), "nvfp4": (1, 4, 288), "fp8_ds_mla": (1, 4, 512)
}  # fmt: skip
"""Tokens of a program in a step of up to 1,023 and in one of more; bytes of a row of DeepSeek-V3.2."""


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 64, 1023, 1024, 8192, 70_000])
def test_blocks_of_appends(tokens):
    """As they were measured, four warps everywhere; the widths are those of the kernels' first pools."""
    for table, latent in ((KEYS, False), (LATENTS, True)):
        for form, (few, many, row_bytes) in table.items():
            found = append_triton.default_config(form, tokens=tokens, row_bytes=row_bytes, latent=latent)
            assert found == append_triton.Config(many if tokens >= 1024 else few, 4), form


@pytest.mark.parametrize(
    ("form", "latent", "row_bytes", "few"),
    [
        ("f32", False, 2044, 4), ("f32", False, 2048, 1), ("fp8", False, 2048, 4),
        ("bf16", True, 2044, 4), ("bf16", True, 2048, 1), ("f32", True, 320, 4), ("fp8", True, 80, 1),
    ],
)  # fmt: skip
def test_blocks_of_few_tokens_by_width(form, latent, row_bytes, few):
    """Floats of 2,048 bytes and more go one by one; so does every latent that is encoded, and no key that is."""
    found = append_triton.default_config(form, tokens=64, row_bytes=row_bytes, latent=latent)
    assert found == append_triton.Config(few)


def test_blocks_of_gathers():
    for form, rows in itertools.product(("fp8", "fp4", "f32"), (1, 63, 131_072)):
        assert gather_triton.default_config(form, rows=rows) == gather_triton.Config(64, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: append_triton.Config(3, 64),
            "(?=.*block is 3, wanted .* to 1,024)(?=.*warps is 64, .* to 32)",
        ),
        (lambda: append_triton.Config(None), "append_triton.Config: block is None, wanted int"),
        (lambda: gather_triton.Config(2048), "gather_triton.Config: block is 2048, wanted a power of two"),
    ],
)
def test_configurations_say_what_they_take(make, message):
    with pytest.raises(ValueError, match=message):
        make()
