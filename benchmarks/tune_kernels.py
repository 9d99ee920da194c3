"""What `benchmarks.tune` can tune: problems, checks and candidate schedules of the kernels."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import fp4_check, kernel_check, paged_logits, sparse_mla_check, topk_append_check
from benchmarks.verdicts import scores_agree
from dsa_jax import Cache, CacheLayout
from dsa_jax.compat import Device, target_device
from dsa_jax.config import preset
from dsa_jax.forms import INDEX_FORMS, KEY_FORMS
from dsa_jax.ops import gpu
from dsa_jax.pallas import (
    append_triton,
    gather_triton,
    paged_logits_config,
    paged_logits_fp4_mosaic,
    paged_logits_mosaic,
    paged_logits_triton,
    sparse_mla_mosaic,
    sparse_mla_triton,
    topk_mosaic,
    topk_triton,
)

Shape = dict[str, Any]
_SETS = 64
"""Most sets of arguments that calls go through; those of small problems exceed the L2 cache with as many."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A shape with its data.

    Attributes:
        call: gives the function of the arguments under a schedule.
        arguments: arguments that rotate through more than the L2 cache.
        check: compares a compiled function with the reference; ``"ok"`` or what is wrong.
        kernel: part of the names of the device kernels whose time counts, empty for all.
    """

    call: Callable[[Any], Callable[..., Any]]
    arguments: Sequence[tuple]
    check: Callable[[Callable[..., Any]], str]
    kernel: str = ""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """How a kernel is tuned.

    Attributes:
        numbers: the shape's numbers and their defaults, None for those that must be given.
        problem: data of a shape.
        default: the schedule that the library chooses.
        candidates: schedules to compare it with.
        supported: raises NotImplementedError where the kernel does not take the shape.
        facts: what a rule's conditions are about; the shape itself if None.
        refuses: says why a shape cannot be measured.
        words: conditions that hold for all that is measured, beside the shape's.
    """

    numbers: Shape
    problem: Callable[[Shape], Problem]
    default: Callable[[Shape], Any]
    candidates: Callable[[Shape], list[Any]]
    supported: Callable[[Device, Shape], None]
    facts: tuple[str, ...] | None = None
    refuses: Callable[[Shape], str | None] = lambda shape: None
    words: Shape = dataclasses.field(default_factory=dict)

    def when(self, shape: Shape) -> Shape:
        """The numbers and words of a rule's conditions."""
        return {name: shape[name] for name in self.facts or tuple(shape)} | self.words


# --- scores --------------------------------------------------------------------------------------------------------

_DECODE: Shape = dict(requests=None, keys=None, heads=64, new_tokens=1, page_size=64)
_DECODE_FACTS = ("requests", "keys", "heads", "new_tokens")
_TRITON_FACTS = (*_DECODE_FACTS, "page_size")


def _paged(shape: Shape) -> paged_logits.Problem:
    return paged_logits.Problem(
        shape["requests"], shape["keys"], shape["heads"], shape["new_tokens"], shape["page_size"]
    )


def _decode_fact(shape: Shape) -> Shape:
    return {name: shape[name] for name in _DECODE_FACTS}


def _compared(got: Any, want: Any) -> str:
    """What a check of scores says."""
    diff, misplaced = paged_logits.difference(got, want)
    found = {"diff": float(diff), "misplaced": int(misplaced)}
    wrong = f"WRONG: difference {found['diff']:.1e}, {found['misplaced']} columns misplaced"
    return "ok" if scores_agree(found) else wrong


def _scored(module: Any, reference: Callable, arrays: tuple, tables: list, limits, q: Callable) -> Problem:
    """A decode problem; the plan of the work is made in the call, and its time does not count."""
    options: dict = dict(page_scale=1, layer_offset=0)
    want = reference(*arrays, tables[0], limits)

    def call(config: Any) -> Callable[..., Any]:
        def run(*operands):
            *arrays, table, limits = operands
            return module.paged_logits_decode(*q(arrays), table, limits, config=config, **options)

        return run

    def check(program: Callable) -> str:
        return _compared(program(*arrays, tables[0], limits), want)

    arguments = [(*arrays, table, limits) for table in tables[:_SETS]]
    return Problem(call, arguments, check, "paged_mqa_logits")


def _fp8_problem(module: Any, shape: Shape) -> Problem:
    (*arrays, limits), tables = paged_logits.inputs(_paged(shape))
    return _scored(module, paged_logits.reference, tuple(arrays), tables, limits, tuple)


def _fp4_problem(shape: Shape) -> Problem:
    (*arrays, limits), tables = fp4_check.inputs(_paged(shape))
    pair = lambda arrays: ((arrays[0], arrays[1]), *arrays[2:])
    return _scored(paged_logits_fp4_mosaic, fp4_check.reference, tuple(arrays), tables, limits, pair)


def _prefill_problem(shape: Shape) -> Problem:
    problem = paged_logits.ContextProblem(shape["tokens"], shape["keys"], shape["heads"], shape["page_size"])
    (q, weights, keys, scales, limits), tables = paged_logits.context_inputs(problem)
    owners = jnp.zeros_like(limits)
    own = jnp.broadcast_to(tables[0], (problem.tokens, problem.width))
    want = paged_logits.reference(q[:, None], weights[:, None], keys, scales, own, limits[:, None])

    def call(config: Any) -> Callable[..., Any]:
        return functools.partial(
            paged_logits_mosaic.paged_logits_prefill, page_scale=1, layer_offset=0, config=config
        )

    def check(program: Callable) -> str:
        return _compared(program(*arguments[0]), want)

    arguments = [(q, weights, keys, scales, table, owners, limits) for table in tables]
    return Problem(call, arguments, check, "paged_mqa_logits")


def _fp8_default(shape: Shape) -> Any:
    return paged_logits_config.default_config(**_decode_fact(shape), cores=_cores())


def _fp8_candidates(shape: Shape) -> list[Any]:
    columns = shape["heads"] * shape["new_tokens"]
    wide = kernel_check.DOUBLE if columns <= 128 else kernel_check.STACKED
    return [*kernel_check.SHORT, *kernel_check.NARROW] if columns <= 64 else [*kernel_check.SHORT, *wide]


def _fp4_candidates(shape: Shape) -> list[Any]:
    make = paged_logits_fp4_mosaic.PagedLogitsFp4Config
    columns = shape["heads"] * shape["new_tokens"]
    more = [
        make(compute_warpgroups=3, registers=(152, 40)),
        make(compute_warpgroups=2, registers=(224, 56), product_columns=128),
        make(compute_warpgroups=1, blocks_per_core=2),
    ]
    return [*(fp4_check.SWEEP if columns <= 64 else ()), *more]


def _triton_scores(shape: Shape) -> list[Any]:
    grid = itertools.product((4, 8, 16, 32), (2, 4, 8), (2, 3, 4))
    return [paged_logits_triton.Config(*fields) for fields in grid]


def _fits_pages(shape: Shape) -> str | None:
    rest = shape["keys"] % shape["page_size"]
    return f"keys is {shape['keys']}, wanted a multiple of page_size {shape['page_size']}" if rest else None


def _fits_prefill(shape: Shape) -> str | None:
    if not shape["tokens"] <= min(shape["keys"], 1024):
        return f"tokens is {shape['tokens']}, wanted at most keys, and at most 1,024, which the reference can check"
    return _fits_pages(shape)


def _cores() -> int:
    return target_device().cores or 132


def _takes_scores(module: Any) -> Callable[[Device, Shape], None]:
    def supported(device: Device, shape: Shape) -> None:
        numbers = {name: shape.get(name, 1) for name in ("heads", "new_tokens", "page_size")}
        module.supported_on(device, **numbers)

    return supported


# --- top-k ---------------------------------------------------------------------------------------------------------


def _topk_problem(module: Any, shape: Shape) -> Problem:
    rows, columns, k = shape["rows"], shape["columns"], topk_append_check.K
    sets = int(np.clip(200e6 // (rows * columns * 4) + 1, 2, 12))
    limits = jnp.full((rows,), columns, jnp.int32)
    return Problem(
        lambda config: lambda x, limits: module.topk(x, limits, k, config=config),
        [(topk_append_check.scores("normal", rows, columns, seed), limits) for seed in range(sets)],
        lambda program: topk_append_check.check_topk(program, rows, columns, None),
    )


def _clusters(shape: Shape) -> list[Any]:
    """Threads and blocks that hold a row, with as few scores a thread as that takes."""
    found = []
    for threads, cluster in itertools.product((256, 512, 1024), (1, 2, 4, 8)):
        share = -(-shape["columns"] // (threads * cluster))
        items = min(max(1 << (share - 1).bit_length(), 4), 64)
        spans = -(-shape["columns"] // (threads * items * cluster))
        if spans > 1 and cluster < topk_mosaic.MAX_CLUSTER and items * threads < 65536:
            continue  # a larger block or cluster holds more of the row
        found += [
            topk_mosaic.Config(threads, items, cluster, samples=samples)
            for samples in (512, 1024, 2048)
            if samples >= threads
        ]
    return found


def _tiles(shape: Shape) -> list[Any]:
    widest = min(max(1 << (shape["columns"] - 1).bit_length(), 1024), topk_triton.MAX_TILE)
    found = []
    for largest, warps in itertools.product((widest, widest // 2), (2, 4, 8, 16)):
        if largest >= max(1024, 128 * warps):
            small = largest > 8192 >= 128 * warps
            found.append(topk_triton.Config((8192, largest) if small else (largest,), warps))
    return found


def _triton_topk_default(shape: Shape) -> Any:
    return topk_triton.default_config(**shape, k=topk_append_check.K)


def _takes_k(module: Any) -> Callable[[Device, Shape], None]:
    return lambda device, shape: module.supported_on(device, k=topk_append_check.K)


# --- attention -----------------------------------------------------------------------------------------------------


def _attention_problem(kernel: Callable[..., Any], shape: Shape) -> Problem:
    problem = sparse_mla_check.Shape(
        shape["tokens"], shape["heads"], shape["keys"], form=shape["form"], slots=_slots(shape)
    )
    q, keys, rows = sparse_mla_check.make(problem, seed=1)
    chosen = np.unique(np.r_[np.arange(min(5, problem.tokens)), problem.tokens // 2, problem.tokens - 1])
    checked, offset = rows[0][chosen], jnp.int32(0)
    reference = jax.jit(sparse_mla_check.reference, static_argnums=(0, 5))
    want = reference(problem.form, q[chosen], keys, checked, offset, problem.scale)
    empty = np.asarray((checked < 0).all(axis=1))

    def call(config: Any) -> Callable[..., Any]:
        run = cast(Any, kernel)(**dataclasses.asdict(config))
        return functools.partial(run, problem)

    def check(program: Callable) -> str:
        got = program(q, keys, rows[0], offset)
        found = sparse_mla_check.errors([x[chosen] for x in got], want, empty)
        return (
            "ok"
            if not found["wrong"]
            else f"WRONG: {found['wrong']} entries, difference {found['max_out']:.1e}"
        )

    return Problem(call, [(q, keys, own, offset) for own in rows], check)


def _slots(shape: Shape) -> int:
    """Pages of a pool larger than the L2 cache, in which every query has keys of its own as far as 2 GB go."""
    return int(np.clip(shape["tokens"] * shape["keys"] * 4 // sparse_mla_check.PAGE_SIZE, 4096, 32768))


def _attention_default(module: Any, shape: Shape) -> Any:
    numbers = {name: shape[name] for name in ("tokens", "heads", "keys")}
    return module.default_config(target_device(), shape["form"], **numbers)


def _mosaic_attention(shape: Shape) -> list[Any]:
    default = _attention_default(sparse_mla_mosaic, shape)
    kinds: list[dict] = [dict(), dict(ahead=64), dict(ahead=128), dict(prefetch=256)]
    changes = [*kinds, *(dict(splits=splits) for splits in (1, 2, 4, 8))]
    return [dataclasses.replace(default, **change) for change in changes]


def _triton_attention(shape: Shape) -> list[Any]:
    default = _attention_default(sparse_mla_triton, shape)
    grid = itertools.product((16, 32, 64), (16, 32, 64), (2, 3), (4, 8))
    names = ("block_keys", "block_heads", "num_stages", "num_warps")
    found = [dataclasses.replace(default, **dict(zip(names, fields, strict=True))) for fields in grid]
    return [config for config in found if config.block_heads <= max(16, shape["heads"])]


def _takes_form(module: Any) -> Callable[[Device, Shape], None]:
    return lambda device, shape: module.supported_on(device, form=shape["form"])


# --- append and gather ---------------------------------------------------------------------------------------------

_PAGE_SIZE = 64
_POOL = 128 << 20
"""Bytes of a pool to write to or read from: more than the L2 cache holds."""


def _append_layout(shape: Shape, latent: bool) -> CacheLayout:
    forms: Any = {"key_form" if latent else "index_form": shape["form"]}
    return CacheLayout.create(preset("deepseek-v3.2"), layers=(0,), page_size=_PAGE_SIZE, **forms)


def _row_bytes(shape: Shape, latent: bool) -> int:
    cache = Cache.abstract(_append_layout(shape, latent), 1)
    pool = cache.pages("key" if latent else "index_key")
    return pool.shape[-1] * pool.dtype.itemsize


def _append_problem(latent: bool, shape: Shape) -> Problem:
    """Whole pools have to be the reference's. They are not donated; copies of them have names of their own."""
    tokens, rng = shape["tokens"], np.random.default_rng(0)
    slots = max(-(-tokens // _PAGE_SIZE), _POOL // (_PAGE_SIZE * _row_bytes(shape, latent)))
    cache = Cache.create(_append_layout(shape, latent), slots)
    vectors = [jnp.asarray(rng.normal(size=(tokens, n)), jnp.bfloat16) for n in (128, 512, 64)]
    vectors = vectors[1:] if latent else vectors[:1]
    rows = [jnp.asarray(rng.permutation(slots * _PAGE_SIZE)[:tokens], jnp.int32) for _ in range(4)]
    kernel: Any = (gpu.append_latent if latent else gpu.append_index_k)(cache)[0].run
    reference: Any = topk_append_check.append_latent if latent else topk_append_check.append_index_k
    written = lambda cache: [x for name, x in cache.pools().items() if name.startswith("index") != latent]
    want = jax.jit(lambda cache: written(reference(cache, 0, *vectors, rows[0])))(cache)

    def call(config: Any) -> Callable[..., Any]:
        scale = (None,) if latent else ()
        return lambda cache, rows, *vectors: written(kernel(cache, 0, *vectors, rows, *scale, config=config))

    def check(program: Callable) -> str:
        wrong = [int((a != b).sum()) for a, b in zip(program(cache, rows[0], *vectors), want, strict=True)]
        return f"WRONG: {sum(wrong)} entries" if any(wrong) else "ok"

    name = "append_latent" if latent else "append_index_k"
    return Problem(call, [(cache, own, *vectors) for own in rows], check, name)


def _append_default(latent: bool, shape: Shape) -> Any:
    numbers = dict(tokens=shape["tokens"], row_bytes=_row_bytes(shape, latent))
    return append_triton.default_config(shape["form"], **numbers, latent=latent)


def _append_candidates(shape: Shape) -> list[Any]:
    return [append_triton.Config(*fields) for fields in itertools.product((1, 2, 4, 8, 16), (2, 4, 8))]


def _gather_problem(shape: Shape) -> Problem:
    """Rows of whole pages, some of which do not exist; the reference's results."""
    rng, count = np.random.default_rng(1), shape["rows"]
    used = -(-count // _PAGE_SIZE)
    slots = max(used, _POOL // (_PAGE_SIZE * _row_bytes(shape, latent=False)))
    keys, scales = topk_append_check.stored(shape["form"], slots)

    def rows() -> jax.Array:
        found = rng.permutation(slots)[:used, None] * _PAGE_SIZE + np.arange(_PAGE_SIZE)
        found[:, 1::50] = -1
        return jnp.asarray(found.reshape(-1)[:count], jnp.int32)

    def call(config: Any) -> Callable[..., Any]:
        return functools.partial(gather_triton.gather_index_k, page_scale=1, layer_offset=0, config=config)

    def reference(rows: jax.Array, pool: jax.Array) -> jax.Array:
        flat = pool.reshape(-1, *pool.shape[2:])
        return flat.at[rows].get(mode="fill", fill_value=0, wrap_negative_indices=False)

    def check(program: Callable) -> str:
        got = [x for x in program(*arguments[0]) if x is not None]
        pools = [keys] if scales is None else [keys, scales]
        wrong = [int((a != reference(arguments[0][0], b)).sum()) for a, b in zip(got, pools, strict=True)]
        return f"WRONG: {sum(wrong)} entries" if any(wrong) else "ok"

    arguments = [(rows(), keys, scales) for _ in range(8)]
    return Problem(call, arguments, check, "gather_index_k")


def _gather_candidates(shape: Shape) -> list[Any]:
    return [gather_triton.Config(*fields) for fields in itertools.product((16, 32, 64, 128, 256), (2, 4, 8))]


def _takes_pages(module: Any) -> Callable[[Device, Shape], None]:
    return lambda device, shape: module.supported_on(device, page_size=_PAGE_SIZE)


def _known_form(forms: Sequence[str], shape: Shape) -> str | None:
    known = shape["form"] in forms
    return None if known else f"form is {shape['form']!r}, wanted {' or '.join(map(repr, forms))}"


_ROWS: Shape = dict(rows=None, columns=None)
_ATTENTION: Shape = dict(tokens=None, heads=128, keys=2048, form="bf16")

KERNELS: dict[str, Kernel] = {
    "append_triton": Kernel(
        dict(tokens=None, form="fp8"), functools.partial(_append_problem, False),
        functools.partial(_append_default, False), _append_candidates, _takes_pages(append_triton),
        refuses=functools.partial(_known_form, INDEX_FORMS),
    ),
    "append_triton_latent": Kernel(
        dict(tokens=None, form="bf16"), functools.partial(_append_problem, True),
        functools.partial(_append_default, True), _append_candidates, _takes_pages(append_triton),
        refuses=functools.partial(_known_form, KEY_FORMS),
    ),
    "gather_triton": Kernel(
        dict(rows=None, form="fp8"), _gather_problem,
        lambda shape: gather_triton.default_config(shape["form"], rows=shape["rows"]),
        _gather_candidates, _takes_pages(gather_triton), refuses=functools.partial(_known_form, INDEX_FORMS),
    ),
    "paged_logits_mosaic": Kernel(
        _DECODE, functools.partial(_fp8_problem, paged_logits_mosaic), _fp8_default, _fp8_candidates,
        _takes_scores(paged_logits_mosaic), _DECODE_FACTS, _fits_pages,
    ),
    "paged_logits_mosaic_prefill": Kernel(
        dict(tokens=512, keys=2048, heads=64, page_size=64), _prefill_problem,
        lambda shape: paged_logits_config.prefill_config(heads=shape["heads"]),
        lambda shape: [*kernel_check.CONTEXTS],
        _takes_scores(paged_logits_mosaic), ("heads",), _fits_prefill,
    ),
    "paged_logits_fp4_mosaic": Kernel(
        _DECODE, _fp4_problem,
        lambda shape: paged_logits_fp4_mosaic.default_config(**_decode_fact(shape)),
        _fp4_candidates, _takes_scores(paged_logits_mosaic), _DECODE_FACTS, _fits_pages,
    ),
    "paged_logits_triton": Kernel(
        _DECODE, functools.partial(_fp8_problem, paged_logits_triton),
        lambda shape: paged_logits_triton.default_config(target_device(), **shape),
        _triton_scores, _takes_scores(paged_logits_triton), _TRITON_FACTS, _fits_pages, dict(form="fp8"),
    ),
    "topk_mosaic": Kernel(
        _ROWS, functools.partial(_topk_problem, topk_mosaic),
        lambda shape: topk_mosaic.default_config(**shape, cores=_cores()), _clusters, _takes_k(topk_mosaic),
    ),
    "topk_triton": Kernel(
        _ROWS, functools.partial(_topk_problem, topk_triton), _triton_topk_default, _tiles, _takes_k(topk_triton),
    ),
    "sparse_mla_mosaic": Kernel(
        _ATTENTION, functools.partial(_attention_problem, sparse_mla_check.mosaic),
        functools.partial(_attention_default, sparse_mla_mosaic), _mosaic_attention, _takes_form(sparse_mla_mosaic),
    ),
    "sparse_mla_triton": Kernel(
        _ATTENTION, functools.partial(_attention_problem, sparse_mla_check.triton),
        functools.partial(_attention_default, sparse_mla_triton), _triton_attention, _takes_form(sparse_mla_triton),
    ),
}  # fmt: skip
"""By the names that rules have."""
