"""The support matrix, asked of the dispatch itself: which implementation ``None`` picks, per op, form and card."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import jax.numpy as jnp

from dsa_jax import compat
from dsa_jax.cache import Cache
from dsa_jax.config import preset
from dsa_jax.layout import CacheLayout
from dsa_jax.metadata import Bucket, StepMetadata
from dsa_jax.ops import gpu
from dsa_jax.ops.dispatch import Candidate, select

CARDS = {
    "CPU": compat.describe("cpu", "cpu"),
    "A100": compat.describe("gpu", "NVIDIA A100-SXM4-80GB"),
    "H100, H200": compat.describe("gpu", "NVIDIA H200"),
    "B200": compat.describe("gpu", "NVIDIA B200"),
}
"""Devices of the matrix; they are described, not present."""
RUN = ("CPU", "H100, H200")
"""Devices that the tests have run on; for the others the kernels are compiled, not run."""

TOKENS, KEYS = 2048, 32768
"""New tokens and keys of contexts and windows."""

Kernels = Callable[[], tuple[Candidate, ...]]


def chosen(operation: str, kernels: tuple[Candidate, ...], device: compat.Device) -> str:
    """Name of the implementation that ``implementation=None`` starts with on a device."""
    reference = Candidate("xla", lambda: None)
    for candidate, refusal in select(operation, None, (*kernels, reference), device):
        if refusal is None and candidate is not None:
            return candidate.name
    raise AssertionError("the reference refuses nothing")


def rows() -> Iterator[tuple[str, str, Kernels]]:
    """Op, form and kernels of every line: DeepSeek-V3.2 widths, pages of 64 tokens, decode steps with next_n 1.

    Contexts and windows are large: for few rows another kernel may be first.
    """
    for form in ("fp8", "fp4", "f32"):
        cache, step = _case(index_form=form)
        yield "append_index_k", f"{form} keys", lambda cache=cache: gpu.append_index_k(cache)
        yield "gather_index_k", f"{form} keys", lambda cache=cache: gpu.gather_index_k(cache)
        yield (
            "paged_mqa_logits",
            f"{form} keys, decode",
            lambda cache=cache, step=step: gpu.paged_mqa_logits(cache, 64, step),
        )
        bucket = Bucket(context_requests=1, context_tokens=TOKENS, table_width=KEYS // step.layout.page_size)
        contexts = replace(step, bucket=bucket)
        yield (
            "paged_mqa_logits",
            f"{form} keys, contexts",
            lambda cache=cache, step=contexts: gpu.paged_mqa_logits(cache, 64, step),
        )
        yield "mqa_logits", f"{form} keys", lambda form=form: gpu.mqa_logits(form, 64, 128, TOKENS, KEYS)
    yield "topk_indices", "k up to 2,048", lambda: gpu.topk_indices(2048)
    yield "topk_indices", "larger k", lambda: gpu.topk_indices(4096)
    for form in ("bf16", "fp8", "nvfp4", "fp8_ds_mla", "f32"):
        cache, _ = _case(key_form=form)
        dtype = jnp.float32 if form == "f32" else jnp.bfloat16
        yield "append_latent", f"{form} latents", lambda cache=cache: gpu.append_latent(cache)
        yield (
            "sparse_mla",
            f"{form} latents",
            lambda cache=cache, dtype=dtype: gpu.sparse_mla(cache, 64, 128, dtype, 0.1),
        )


def table() -> str:
    """The matrix as Markdown, lines in the order of a layer."""
    lines = ["| op | form | " + " | ".join(CARDS) + " |", "|---" * (len(CARDS) + 2) + "|"]
    order = {name: i for i, (name, _, _) in enumerate(rows())}
    for operation, form, kernels in sorted(rows(), key=lambda row: order[row[0]]):
        names = (chosen(operation, kernels(), device) for device in CARDS.values())
        lines.append(f"| `{operation}` | {form} | " + " | ".join(names) + " |")
    return "\n".join(lines)


def document() -> str:
    """``docs/support.md``."""
    unrun = ", ".join(name for name in CARDS if name not in RUN)
    return (
        "# What runs where\n\n"
        "The implementation that `implementation=None` picks, asked of the dispatch (`dsa-jax support` prints this page).\n"
        "Widths of DeepSeek-V3.2, pages of 64 tokens, contexts and windows of 2,048 tokens on 32,768 keys. On Hopper\n"
        "small ones of FP4 keys are `triton`, and so is attention of up to 16 heads to bf16 latents; appends of 4,096\n"
        "and more f32 keys are `xla` on every card. `xla` is the exact reference and runs everywhere. `to_rows` and\n"
        "`quantize_index_k` are `xla` on every device; `select_tokens` and `select_rows` are made of the ops below, and\n"
        "under a kernel of `topk_indices` the rows of `select_rows` come out of that kernel.\n"
        f"{unrun}: kernels are compiled for these cards, ptxas included, and have not been run on them.\n\n"
        f"{table()}\n"
    )


def _case(index_form: str = "fp8", key_form: str = "bf16"):
    layout = CacheLayout.create(
        preset("deepseek-v3.2"), layers=(0,), index_form=index_form, key_form=key_form
    )
    bucket = Bucket(decode_requests=1, table_width=1)
    step = StepMetadata.create(layout, bucket, [[0]], [1], [1]).derive()
    return Cache.abstract(layout, 1), step
