"""The support matrix, cell by cell: who is chosen, that no kernel is claimed in vain, and that each choice compiles.

``docs/support.md`` is generated; this table is written by hand, so that a kernel that silently refuses is seen.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compile_without_gpu import compile_case
from dsa_jax import Bucket, Cache, CacheLayout, StepMetadata, ops, support
from dsa_jax.compat import describe, target_device
from dsa_jax.config import preset
from dsa_jax.ops import dispatch

CHOSEN = {
    # op and form: on Ampere, on Hopper, on Blackwell
    ("append_index_k", "fp8 keys"): ("triton", "triton", "triton"),
    ("append_index_k", "fp4 keys"): ("triton", "triton", "triton"),
    ("append_index_k", "f32 keys"): ("triton", "triton", "triton"),
    ("gather_index_k", "fp8 keys"): ("triton", "triton", "triton"),
    ("gather_index_k", "fp4 keys"): ("triton", "triton", "triton"),
    ("gather_index_k", "f32 keys"): ("triton", "triton", "triton"),
    ("paged_mqa_logits", "fp8 keys, decode"): ("triton", "mosaic", "triton"),
    ("paged_mqa_logits", "fp8 keys, contexts"): ("triton", "mosaic", "triton"),
    ("paged_mqa_logits", "fp4 keys, decode"): ("triton", "mosaic", "triton"),
    ("paged_mqa_logits", "fp4 keys, contexts"): ("triton", "mosaic", "triton"),
    ("paged_mqa_logits", "f32 keys, decode"): ("xla", "xla", "xla"),
    ("paged_mqa_logits", "f32 keys, contexts"): ("xla", "xla", "xla"),
    ("mqa_logits", "fp8 keys"): ("triton", "mosaic", "triton"),
    ("mqa_logits", "fp4 keys"): ("triton", "mosaic", "triton"),
    ("mqa_logits", "f32 keys"): ("xla", "xla", "xla"),
    ("topk_indices", "k up to 2,048"): ("triton", "mosaic", "triton"),
    ("topk_indices", "larger k"): ("xla", "xla", "xla"),
    ("append_latent", "bf16 latents"): ("triton", "triton", "triton"),
    ("append_latent", "fp8 latents"): ("triton", "triton", "triton"),
    ("append_latent", "nvfp4 latents"): ("triton", "triton", "triton"),
    ("append_latent", "fp8_ds_mla latents"): ("triton", "triton", "triton"),
    ("append_latent", "f32 latents"): ("triton", "triton", "triton"),
    ("sparse_mla", "bf16 latents"): ("triton", "mosaic", "triton"),
    ("sparse_mla", "fp8 latents"): ("triton", "triton", "triton"),
    ("sparse_mla", "nvfp4 latents"): ("triton", "triton", "triton"),
    ("sparse_mla", "fp8_ds_mla latents"): ("triton", "mosaic", "triton"),
    ("sparse_mla", "f32 latents"): ("xla", "xla", "xla"),
}
MANY_ROWS_OF_FP4 = [("paged_mqa_logits", "fp4 keys, contexts"), ("mqa_logits", "fp4 keys")]
CARDS = {"sm80": "A100", "sm90": "H100, H200", "sm100": "B200"}


def claims(candidate, device) -> bool:
    try:
        candidate.supported(device)
    except NotImplementedError:
        return False
    return True


@functools.cache
def kernels_of() -> dict[tuple[str, str], Any]:
    return {(operation, form): kernels for operation, form, kernels in support.rows()}


def test_the_table_is_whole():
    assert set(kernels_of()) == set(CHOSEN)


@pytest.mark.parametrize("number", range(3))
def test_who_is_chosen(number):
    """And wherever any kernel takes a case, a kernel is what runs it."""
    device = support.CARDS[list(CARDS.values())[number]]
    for line, kernels in kernels_of().items():
        got = support.chosen(line[0], kernels(), device)
        assert got == CHOSEN[line][number], line
        assert (got != "xla") == any(claims(kernel, device) for kernel in kernels()), line


def test_only_what_ran_is_called_run():
    """A100: compiled, not run."""
    assert support.RUN == ("CPU", "H100, H200")
    sentence = (
        "A100, B200: kernels are compiled for these cards, ptxas included, and have not been run on them."
    )
    assert sentence in support.document()


# --- each cell as a program ----------------------------------------------------------------------------------------


def program(operation: str, form: str):
    """The op through its public signature with ``implementation=None``, and its arguments: four tokens, pages of 64.

    Contexts and windows have 8,192 rows, because few rows of FP4 go to another kernel.
    """
    kind = form.split()[0]
    forms: dict = {"key_form" if form.endswith("latents") else "index_form": kind}
    forms = {} if operation == "topk_indices" else forms
    layout = CacheLayout.create(preset("deepseek-v3.2"), layers=(0,), **forms)
    cache = Cache.abstract(layout, 8)
    contexts = form.endswith("contexts") or operation == "gather_index_k"
    sizes: dict = (
        dict(context_requests=2, context_tokens=8192, gathered_keys=64)
        if contexts
        else dict(decode_requests=4)
    )
    tokens = 8192 if form.endswith("contexts") or operation == "mqa_logits" else 4
    requests = 2 if contexts else 4
    meta = StepMetadata.create(
        layout, Bucket(table_width=8, **sizes), [[i] for i in range(requests)], [9] * requests, [1] * requests
    )
    step = jax.eval_shape(meta.derive)
    shape = lambda *size, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(size, dtype)
    ints = lambda *size: shape(*size, dtype=jnp.int32)
    codes = lambda *size: shape(*size[:-1], size[-1] // 2 if kind == "fp4" else size[-1], dtype=jnp.uint8)
    float32 = lambda *size: shape(*size, dtype=jnp.float32)
    scale_dtype = jnp.int32 if kind == "fp4" else jnp.float32
    query = codes(tokens, 64, 128) if kind != "f32" else float32(tokens, 64, 128)
    query = (query, ints(tokens, 64)) if kind == "fp4" else query
    if operation == "append_index_k":
        return lambda c, s, k: ops.append_index_k(c, 0, k, s), (cache, step, shape(4, 128))
    if operation == "gather_index_k":
        return lambda c, s: ops.gather_index_k(c, 0, s), (cache, step)
    if operation == "paged_mqa_logits":
        arguments = (query, float32(tokens, 64), cache, step)
        return lambda q, w, c, s: ops.paged_mqa_logits(q, w, c, 0, s), arguments
    if operation == "mqa_logits":
        keys = float32(640, 128) if kind == "f32" else (codes(640, 128), shape(640, dtype=scale_dtype))
        return ops.mqa_logits, (query, keys, float32(tokens, 64), ints(tokens), ints(tokens))
    if operation == "topk_indices":
        k = 2_048 if form.startswith("k up to") else 4_096
        return lambda x, n: ops.topk_indices(x, n, k), (float32(4, 8_192), ints(4))
    if operation == "append_latent":
        arguments = (cache, step, shape(4, 512), shape(4, 64))
        return lambda c, s, latent, rope: ops.append_latent(c, 0, latent, rope, s), arguments
    q = float32(4, 128, 576) if kind == "f32" else shape(4, 128, 576)
    return lambda q, c, r: ops.sparse_mla(q, c, 0, r, 0.1), (q, cache, ints(4, 256))


def compiled_cell(*, operation, form):
    """For `compile_without_gpu`."""
    return program(operation, form)


CELLS = [
    (card, *line)
    for line, names in CHOSEN.items()
    for card, name in zip(CARDS, names, strict=True)
    if name != "xla"
]


@pytest.mark.full
@pytest.mark.parametrize(("card", "operation", "form"), CELLS)
def test_every_claim_compiles(compile_environment, card, operation, form):
    """Contract 3: ptxas included, and the program calls the kernel that the matrix names."""
    case = "contracts.test_matrix:compiled_cell"
    result = compile_case(compile_environment, card, case, operation=operation, form=form)
    wanted = CHOSEN[operation, form][list(CARDS).index(card)]
    assert any(wanted in call for call in result.get("calls", [])), result


SMALL = describe("gpu", "NVIDIA A10")


def test_who_is_chosen_on_a_card_of_less_shared_memory():
    """As on an A100, but for attention that would ask for more of it than there is."""
    too_large = [("sparse_mla", "bf16 latents"), ("sparse_mla", "nvfp4 latents")]
    for line, kernels in kernels_of().items():
        wanted = "xla" if line in too_large else CHOSEN[line][0]
        assert support.chosen(line[0], kernels(), SMALL) == wanted, line


@pytest.mark.full
@pytest.mark.parametrize(
    ("card", "operation", "form"),
    [(card, *line) for card in ("sm86", "sm89", "sm120") for line in CHOSEN]
    + [("sm103", "sparse_mla", "bf16 latents")],
)
def test_what_other_cards_get_compiles(compile_environment, card, operation, form):
    """Contract 3 for cards that the kernels claim by capability alone: whoever is chosen compiles, ptxas included."""
    case = "contracts.test_matrix:compiled_cell"
    result = compile_case(compile_environment, card, case, operation=operation, form=form)
    names = {"sm86": "A10", "sm89": "L40", "sm103": "B300", "sm120": "RTX PRO 6000"}
    device = describe("gpu", f"NVIDIA {names[card]}")
    wanted = support.chosen(operation, kernels_of()[operation, form](), device)
    assert "calls" in result, result
    assert wanted == "xla" or any(wanted in call for call in result["calls"]), result


@pytest.mark.gpu
@pytest.mark.parametrize(("operation", "form"), list(CHOSEN))
def test_what_none_runs_on_the_card(operation, form):
    """The choice for this very card is the hand-written one, and the compiled program has that kernel, or none.

    Mosaic for many rows of FP4 has Triton beside it, for what FP8 cannot express.
    """
    device = target_device()
    assert device.capability is not None
    wanted = CHOSEN[operation, form][device.capability[0] - 8]
    assert support.chosen(operation, kernels_of()[operation, form](), device) == wanted
    function, arguments = program(operation, form)
    text = jax.jit(function).lower(*arguments).compile().as_text() or ""
    calls = [part.split('"')[0] for part in text.split('custom_call_target="')[1:]]
    found = {name for name in ("mosaic", "triton") if any(name in call for call in calls)}
    both = wanted == "mosaic" and (operation, form) in MANY_ROWS_OF_FP4
    assert found == ({"mosaic", "triton"} if both else {wanted} - {"xla"})


@pytest.mark.full
def test_cells_are_programs(monkeypatch):
    """Their arguments are good: each traces with the reference, and has the shapes of a step of four tokens."""
    monkeypatch.setattr(dispatch, "target_device", lambda: support.CARDS["CPU"])
    for operation, form in CHOSEN:
        function, arguments = program(operation, form)
        leaves = jax.tree.leaves(jax.eval_shape(function, *arguments))
        assert leaves and all(np.prod(leaf.shape) for leaf in leaves), (operation, form)
