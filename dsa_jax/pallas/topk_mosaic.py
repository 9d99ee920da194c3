"""Exact, deterministic top-k on Hopper: a cluster of blocks per row, which share counts through each other's memory.

`topk_cluster` holds the program, written for a machine of threads; here it becomes PTX inside a Mosaic GPU kernel, or runs
in lockstep where there is no card. A row longer than a cluster holds is cut into spans, and a second launch
selects from what those found. The work follows each row's true length: it is divided anew among the blocks, and blocks
that a short row does not need end at once.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from dsa_jax.compat import Device, target_device
from dsa_jax.pallas import topk_lockstep, tuning
from dsa_jax.pallas.config_checks import check_fields, multiple_of, one_of, power_of_two
from dsa_jax.pallas.topk_cluster import select_row
from dsa_jax.pallas.topk_plan import Plan
from dsa_jax.pallas.topk_ptx import PtxMachine
from dsa_jax.pallas.topk_triton import MAX_K, Paging

MAX_CLUSTER = 8
"""Blocks of the largest cluster that every Hopper card takes."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How a top-k is laid out on the card.

    Attributes:
        threads: threads of a block, a power of two from 128 to 1,024.
        items: scores of a thread, a multiple of 4, at most 64.
        cluster: blocks of a cluster, 1, 2, 4 or 8.
        least: scores that a thread takes before another block helps, a power of two.
        held: how many of its scores a thread holds in registers, a multiple of 4; the others lie in shared memory.
        samples: scores that the first range comes from, a power of two from `threads` up to 2,048.
        short_threads: threads of the program for short rows, a power of two from 128 to `threads`; 0 for none. There is none
            either where all rows, or all spans of them, would be short.
        short_items: scores of each of them, a multiple of 4, at most 32; rows of up to their product are short.
    """

    threads: int
    items: int
    cluster: int
    least: int = 8
    held: int = 32
    samples: int = 2048
    short_threads: int = 0
    short_items: int = 16

    def __post_init__(self) -> None:
        # Types first: limits are computed of other fields.
        check_fields(self)
        check_fields(
            self,
            threads=power_of_two(128, 1024),
            items=multiple_of(4, 4, 64),
            cluster=one_of(1, 2, 4, MAX_CLUSTER),
            least=power_of_two(),
            held=multiple_of(4),
            samples=power_of_two(max(self.threads, 128), 2048),
            short_threads=one_of(0, *(n for n in (128, 256, 512, 1024) if n <= self.threads)),
            short_items=multiple_of(4, 4, 32),
        )

    @property
    def capacity(self) -> int:
        """Columns that a cluster holds."""
        return self.threads * self.items * self.cluster


def supported_on(device: Device, *, k: int | None = None) -> None:
    """Raise NotImplementedError with the reason if the kernel cannot run there."""
    if device.platform != "gpu" or device.capability is None or device.capability[0] != 9:
        raise NotImplementedError(f"is built for Hopper (compute capability 9.0), not {device}")
    if k is not None and k > MAX_K:
        raise NotImplementedError(f"k is {k}; this kernel selects at most {MAX_K}")


def default_config(rows: int, columns: int, cores: int = 132) -> Config:
    """Threads and blocks for a problem, by the rules of `tuning`.

    As many blocks as the multiprocessors take at once, of 16,384 columns or more each: more would cost more to join than
    they save. Where rows alone fill the card, blocks are small, so that several share a multiprocessor.
    """
    facts = dict(rows=rows, columns=columns, cores=cores, rows_per_core=rows / cores)
    return tuning.choose("topk_mosaic", Config, facts)


@functools.partial(jax.jit, static_argnames=("k", "page_size", "config", "interpret"))
def topk(
    logits: Array,
    limits: Array,
    k: int,
    *,
    page_table: Array | None = None,
    requests: Array | None = None,
    page_size: int | None = None,
    config: Config | None = None,
    interpret: bool | None = None,
) -> Array:
    """Positions, or cache rows, of the k largest of the first `limits` columns of each row.

    The lowest position wins among equal scores, +0.0 equals -0.0, a NaN ranks below -inf. What stands in columns at and
    beyond a row's limit has no influence.

    Args:
        logits: f32, bf16 or f16 `[N, S]`; those of 16 bits are converted first.
        limits: int32`[N]`; what lies outside 0..S is clipped.
        k: entries per row, 1 to 2,048.
        page_table: int32`[R, W]` slots. With it the result holds rows `slot * page_size + offset` instead of positions,
            which saves the launch of a conversion. Every page below the limit must be there; one that is not (a
            negative slot, a column beyond the table) leaves -1 in place.
        requests: int32`[N]`, the line of the page table of each row; needed with `page_table`. A row whose request is
            none of the R gives -1.
        page_size: tokens of a page, a power of two; needed with `page_table`.
        config: layout on the card, `default_config` if None.
        interpret: run in NumPy, in lockstep; None does so where the target is no GPU.

    Returns:
        int32`[N, k]`: in ascending order of position, then -1.

    Raises:
        NotImplementedError: if k is over 2,048, or the row is too long for two launches.
    """
    rows, columns = logits.shape
    if k > MAX_K:
        raise NotImplementedError(f"topk (Mosaic): k is {k}; this kernel selects at most {MAX_K}")
    paging = Paging.of(page_table, requests, page_size)
    if rows == 0 or columns == 0 or (paging and paging.page_table.size == 0):
        return jnp.full((rows, k), -1, jnp.int32)
    device = target_device()
    config = config or default_config(rows, columns, device.cores or 132)
    interpret = device.platform != "gpu" if interpret is None else interpret
    operands = {"logits": logits.astype(jnp.float32), "limits": limits}
    span = min(config.capacity, columns)
    spans = pl.cdiv(columns, span)
    if spans == 1:
        return _launch(operands, _plan(k, columns, config, span), paging, interpret)
    # A span that is shorter than k keeps all it has: entries of -1 among the finds would be read as positions.
    kept = min(k, span)
    merge = config if spans * kept <= config.capacity else dataclasses.replace(config, cluster=MAX_CLUSTER)
    if spans * kept > merge.capacity:
        raise NotImplementedError(
            f"topk (Mosaic): {columns} columns in {spans} spans leave more candidates than a cluster holds "
            f"({merge.capacity}); choose a larger configuration or another implementation"
        )
    plan = dataclasses.replace(_plan(kept, columns, config, span), spans=spans)
    operands["found"] = _launch(operands, plan, None, interpret)
    plan = dataclasses.replace(_plan(k, columns, merge, spans * kept), merged_span=span)
    return _launch(operands, plan, paging, interpret)


def _plan(k: int, columns: int, config: Config, span: int) -> Plan:
    """For clusters that take `span` columns; a cluster has no more blocks than those can use."""
    least = min(config.least, config.items)
    useful = pl.next_power_of_2(pl.cdiv(span, config.threads * least))
    return Plan(
        k=k,
        columns=columns,
        span=span,
        spans=1,
        merged_span=0,
        threads=config.threads,
        items=config.items,
        held=min(config.held, config.items),
        cluster=min(config.cluster, useful),
        least=least,
        samples=config.samples,
        short_threads=config.short_threads if span > config.short_threads * config.short_items else 0,
        short_items=config.short_items,
    )


def _launch(operands: dict[str, Array], plan: Plan, paging: Paging | None, interpret: bool) -> Array:
    """int32`[rows * spans, k]`, the finds of each span."""
    programs = operands["logits"].shape[0] * plan.spans
    if paging:
        operands = operands | {"page_table": paging.page_table, "requests": paging.requests}
        count, width = paging.page_table.shape
        plan = dataclasses.replace(plan, page_size=paging.page_size, requests=count, pages=width)
    if interpret:
        return topk_lockstep.run(
            functools.partial(select_row, plan=plan), operands, programs=programs, k=plan.k,
            threads=plan.threads, cluster=plan.cluster, sizes=plan.shared_sizes(),
        )  # fmt: skip
    return _kernel(plan, programs, tuple(operands))(*operands.values())


def _kernel(plan: Plan, programs: int, names: tuple[str, ...]):
    """The Mosaic GPU kernel: all it holds is the program's PTX."""
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.pallas import mosaic_gpu as plgpu

    raw, sizes = plgpu.RefType(), plan.shared_sizes()
    words = sum(-(-size // 4) * 4 for size in sizes.values())

    def body(*refs):
        *arrays, result, shared = refs

        @plgpu.inline_mgpu(arg_types=(raw,) * (len(arrays) + 2))
        def program(_, *operands):
            machine = PtxMachine(
                threads=plan.threads, cluster=plan.cluster, shared=f"${len(arrays) + 1}", sizes=sizes,
                arrays={name: f"${i}" for i, name in enumerate((*names, "result"))},
            )  # fmt: skip
            select_row(machine, plan)
            pointers = [mgpu.utils.memref_ptr(operand) for operand in operands]
            mgpu.utils.inline_ptx(machine.ptx(), *pointers, has_side_effects=True)

        program(*arrays, result, shared)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((programs, plan.k), jnp.int32),
        grid=(programs,),
        grid_names=("program",),
        cluster=(plan.cluster,) if plan.cluster > 1 else (),
        cluster_names=("block",) if plan.cluster > 1 else (),
        num_threads=plan.threads // 128,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((words,), jnp.int32)],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
        kernel_name="topk_merge" if plan.merged_span else "topk",
    )
