"""The support matrix in the docs is the one that the dispatch gives."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dsa_jax import Cache, CacheLayout, support
from dsa_jax.config import preset
from dsa_jax.forms import INDEX_FORMS, KEY_FORMS
from dsa_jax.ops import gpu


def test_the_page_is_generated():
    page = Path(__file__).parents[1] / "docs" / "support.md"
    assert page.read_text() == support.document(), "run: dsa-jax support > docs/support.md"


def test_kernels_are_claimed_and_the_cpu_runs_the_reference():
    by_line = {(operation, form): kernels for operation, form, kernels in support.rows()}
    pick = lambda operation, form, card: support.chosen(
        operation, by_line[operation, form](), support.CARDS[card]
    )
    assert pick("paged_mqa_logits", "fp8 keys, decode", "H100, H200") == "mosaic"
    assert pick("paged_mqa_logits", "fp8 keys, decode", "A100") == "triton"
    assert pick("paged_mqa_logits", "fp8 keys, contexts", "H100, H200") == "mosaic"
    assert pick("paged_mqa_logits", "fp8 keys, contexts", "A100") == "triton"
    for form, hopper, ampere in (
        ("fp8", "mosaic", "triton"),
        ("fp4", "mosaic", "triton"),
        ("f32", "xla", "xla"),
    ):
        assert pick("mqa_logits", f"{form} keys", "H100, H200") == hopper
        assert pick("mqa_logits", f"{form} keys", "A100") == ampere
    assert pick("topk_indices", "k up to 2,048", "A100") == "triton"
    assert pick("topk_indices", "k up to 2,048", "H100, H200") == "mosaic"
    assert pick("topk_indices", "larger k", "H100, H200") == "xla"
    for operation, kind, forms in (
        ("append_index_k", "keys", INDEX_FORMS),
        ("gather_index_k", "keys", INDEX_FORMS),
        ("append_latent", "latents", KEY_FORMS),
    ):
        for form in forms:
            assert pick(operation, f"{form} {kind}", "A100") == "triton"
            assert pick(operation, f"{form} {kind}", "H100, H200") == "triton"
    assert {support.chosen(op, kernels(), support.CARDS["CPU"]) for op, _, kernels in support.rows()} == {
        "xla"
    }


def test_widths_that_triton_cannot_take_go_to_the_reference():
    """None never fails: a latent of 24 entries is refused by the kernel before it is tried."""
    model = dataclasses.replace(preset("deepseek-v3.2"), kv_lora_rank=24)
    cache = Cache.abstract(CacheLayout.create(model, layers=(0,)), 1)
    assert support.chosen("append_latent", gpu.append_latent(cache), support.CARDS["H100, H200"]) == "xla"
