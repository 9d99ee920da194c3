"""Every op that has two kernels, on cards and shapes that neither takes: the error names both, and nothing falls back.

The cards are not here; an abstract mesh names them, as it does for a program that is compiled for one.
"""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from dsa_jax import Bucket, Cache, CacheLayout, StepMetadata, ops, support, xla
from dsa_jax.config import preset

KERNELS = ("mosaic", "triton")
NAMES = {
    "CPU": "cpu",
    "T4": "Tesla T4",
    "A100": "NVIDIA A100-SXM4-80GB (sm80)",
    "H200": "NVIDIA H200 (sm90)",
    "B200": "NVIDIA B200 (sm100)",
}
"""Cards as messages name them; of the T4 the library knows no compute capability."""


def on(card: str):
    """A context whose target is a card; the process's own device for the CPU."""
    if card == "CPU":
        return contextlib.nullcontext()
    device = AbstractDevice(device_kind=NAMES[card].partition(" (")[0], num_cores=100, platform="cuda")
    return use_abstract_mesh(AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device))


def shape(*size: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(size, dtype)


def query(form: str, heads: int):
    """Indexer queries of four tokens in a form, as shapes."""
    if form == "fp4":
        return shape(4, heads, 64, dtype=jnp.uint8), shape(4, heads, dtype=jnp.int32)
    return shape(4, heads, 128, dtype=jnp.uint8 if form == "fp8" else jnp.float32)


def paged_mqa_logits(form="fp8", heads=64, contexts=False):
    layout = CacheLayout.create(preset("deepseek-v3.2"), layers=(0,), index_form=form)
    sizes = dict(context_requests=4, context_tokens=4) if contexts else dict(decode_requests=4)
    meta = StepMetadata.create(
        layout, Bucket(table_width=1, **sizes), [[i] for i in range(4)], [9] * 4, [1] * 4
    )
    arguments = query(form, heads), shape(4, heads), Cache.abstract(layout, 4), jax.eval_shape(meta.derive)
    call = lambda q, w, cache, step, **options: ops.paged_mqa_logits(q, w, cache, 0, step, **options)
    return call, arguments


def mqa_logits(form="fp8", heads=64):
    keys, scale = shape(640, 128, dtype=jnp.uint8), shape(640)
    if form == "fp4":
        keys, scale = shape(640, 64, dtype=jnp.uint8), shape(640, dtype=jnp.int32)
    keys = shape(640, 128) if form == "f32" else (keys, scale)
    window = shape(4, dtype=jnp.int32)
    return ops.mqa_logits, (query(form, heads), keys, shape(4, heads), window, window)


def topk_indices(k=2_048):
    arguments = shape(4, 8_192), shape(4, dtype=jnp.int32)
    return lambda x, limits, **options: ops.topk_indices(x, limits, k, **options), arguments


def sparse_mla(form="bf16", q=jnp.bfloat16, traced_scale=False):
    layout = CacheLayout.create(preset("deepseek-v3.2"), layers=(0,), key_form=form)
    arguments = (
        shape(4, 128, 576, dtype=q),
        Cache.abstract(layout, 4),
        shape(4, 256, dtype=jnp.int32),
        shape(),
    )

    def call(q, cache, rows, scale, **options):
        return ops.sparse_mla(q, cache, 0, rows, scale if traced_scale else 0.1, **options)

    return call, arguments


HEADS_16 = "the kernel takes 16, 32, 64 or 128"
SM80 = "needs an NVIDIA GPU of compute capability 8.0 or more"
WGMMA = "wgmma exists on compute capability 9.0 only (H100, H200); this is "
HOPPER = "uses wgmma, which Hopper (compute capability 9.0) alone has, not "
BUILT = "is built for Hopper (compute capability 9.0), not "
NO_GPU = "needs an NVIDIA GPU"
CASES = [
    # op, arguments, card, why not Mosaic, why not Triton
    (paged_mqa_logits, {}, "CPU", NO_GPU, NO_GPU),
    (paged_mqa_logits, {}, "T4", WGMMA + NAMES["T4"], SM80),
    (paged_mqa_logits, dict(form="fp4"), "T4", WGMMA + NAMES["T4"], SM80),
    (
        paged_mqa_logits,
        dict(heads=3),
        "H200",
        "index heads is 3; the kernel takes 32, 64",
        f"index heads is 3; {HEADS_16}",
    ),
    (paged_mqa_logits, dict(heads=3), "B200", WGMMA + NAMES["B200"], f"index heads is 3; {HEADS_16}"),
    (
        paged_mqa_logits,
        dict(form="fp4", heads=8, contexts=True),
        "H200",
        "index heads is 8; the kernel takes 32, 64",
        f"index heads is 8; {HEADS_16}",
    ),
    (paged_mqa_logits, dict(form="f32"), "H200", *["index_form is 'f32'; the kernel takes fp8 or fp4"] * 2),
    (mqa_logits, {}, "CPU", NO_GPU, NO_GPU),
    (mqa_logits, {}, "T4", WGMMA + NAMES["T4"], SM80),
    (
        mqa_logits,
        dict(form="fp4", heads=8),
        "H200",
        "index heads is 8; the kernel takes 32, 64",
        f"index heads is 8; {HEADS_16}",
    ),
    (
        mqa_logits,
        dict(form="f32"),
        "H200",
        *["form of the keys is 'f32'; the kernel takes fp8 or fp4"] * 2,
    ),
    (topk_indices, {}, "CPU", NO_GPU, NO_GPU),
    (topk_indices, {}, "T4", BUILT + NAMES["T4"], SM80),
    (topk_indices, dict(k=4_096), "H200", *["k is 4096; this kernel selects at most 2048"] * 2),
    (topk_indices, dict(k=4_096), "A100", BUILT + NAMES["A100"], "k is 4096; this kernel selects at most 2048"),
    (sparse_mla, {}, "CPU", NO_GPU, NO_GPU),
    (
        sparse_mla,
        {},
        "T4",
        HOPPER + NAMES["T4"],
        "needs an NVIDIA GPU of compute capability 8.0 or newer, not Tesla T4",
    ),
    (
        sparse_mla,
        dict(q=jnp.float32),
        "H200",
        *["query dtype is 'float32'; the kernel takes bfloat16"] * 2,
    ),
    (
        sparse_mla,
        dict(traced_scale=True),
        "B200",
        HOPPER + NAMES["B200"],
        "softmax_scale is an array; the kernel takes a Python float",
    ),
    (
        sparse_mla,
        dict(form="f32", q=jnp.float32),
        "H200",
        "reads the KEY forms bf16 and fp8_ds_mla, not f32",
        "float32 keys are read faster by the reference: three products of the tensor cores for each",
    ),
]  # fmt: skip


def case_id(op, options, card: str, *reasons: str) -> str:
    values = (getattr(value, "__name__", str(value)) for value in options.values())
    return ", ".join((op.__name__, *values, card))


@pytest.mark.parametrize(
    ("op", "options", "card", "mosaic", "triton"), CASES, ids=[case_id(*case) for case in CASES]
)
def test_neither_kernel(monkeypatch, op, options, card, mosaic, triton):
    """Either order gives both reasons in that order, and the reference is not entered unless it was asked for."""
    name, entered, reference = op.__name__, [], getattr(xla, op.__name__)

    def counted(*arguments):
        entered.append(name)
        return reference(*arguments)

    monkeypatch.setattr(xla, name, counted)
    call, arguments = op(**options)

    def trace(implementation):
        with on(card):
            return jax.eval_shape(lambda *a: call(*a, implementation=implementation), *arguments)

    reasons = dict(mosaic=mosaic, triton=triton)
    for wanted in (KERNELS, KERNELS[::-1]):
        with pytest.raises(ExceptionGroup) as error:
            trace(wanted)
        assert error.value.message == (
            f"{name}: no implementation can run here; pass implementation=None or 'xla'"
        )
        assert all(type(part) is NotImplementedError for part in error.value.exceptions)
        assert [str(part) for part in error.value.exceptions] == [
            f"{name}: {kernel} on {NAMES[card]}: {reasons[kernel]}" for kernel in wanted
        ]
    for kernel in KERNELS:
        with pytest.raises(NotImplementedError) as alone:
            trace(kernel)
        assert str(alone.value) == f"{name}: {kernel} on {NAMES[card]}: {reasons[kernel]}"
    assert not entered
    # What the error says would help does, and the arguments were good.
    wanted = jax.tree.map(lambda x: (x.shape, x.dtype), trace("xla"))
    for implementation in (None, (*KERNELS, "xla")):
        assert jax.tree.map(lambda x: (x.shape, x.dtype), trace(implementation)) == wanted
    assert entered == [name] * 3


def test_all_ops_that_have_two_kernels_are_here():
    two = {
        operation for operation, _, kernels in support.rows() if {k.name for k in kernels()} == set(KERNELS)
    }
    assert two == {op.__name__ for op, *_ in CASES}
