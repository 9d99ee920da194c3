"""What a kernel reaches of what the card allows: bytes moved against copying, operations against one large product.

Both ceilings are measured once, at the start of a run. Bytes are those that the work has to move: each input once, however
often the kernel reads it, and each result. Reading alone is faster than copying, and what is still in the L2 cache is
faster than both, so a share of the copy rate may exceed 1.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.timing import copy_rate

L2_BYTES = 60e6
"""The L2 cache of an H200: what a round of calls reads and writes less than this, it finds there."""
TYPES = {"fp8": jnp.float8_e4m3fn, "bf16": jnp.bfloat16}
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What the card does at most.

    Attributes:
        copy: GB/s, bytes read plus written.
        products: TFLOP/s of matrix products by their operands' type, a key of `TYPES`; empty where operations do not matter.
    """

    copy: float
    products: dict[str, float] = dataclasses.field(default_factory=dict)

    def rates(self, us: float, moved: float, flops: float = 0, product: str = "") -> Row:
        """What a kernel reaches, and its share of the ceiling that is nearer.

        Args:
            us: its time, microseconds.
            moved: bytes.
            flops: operations of its products.
            product: type of their operands.

        Returns:
            ``gb_s``, ``tflop_s`` where there are products, ``share`` and ``share_of``: ``"copy"`` or ``"fp8 products"``.
        """
        row: Row = {"gb_s": moved / us / 1e3}
        row |= {"share": row["gb_s"] / self.copy, "share_of": "copy"}
        if flops:
            row["tflop_s"] = flops / us / 1e6
        if flops and product in self.products:
            share = row["tflop_s"] / self.products[product]
            row |= {"share": share, "share_of": f"{product} products"} if share > row["share"] else {}
        return row

    def __str__(self) -> str:
        products = "".join(f", {name} products {rate:.0f} TFLOP/s" for name, rate in self.products.items())
        return f"copy rate {self.copy:.0f} GB/s{products}"


def measure(*types: str) -> Ceilings:
    """Measure and print the ceilings, before anything compiles beside: copying, and products of the given types.

    On a CPU, where only tests run the checks, with arrays that are quick.
    """
    card = jax.default_backend() == "gpu"
    ceilings = Ceilings(copy_rate(4.0 if card else 1e-3) * 1e3)
    for name in types:
        try:
            ceilings.products[name] = product_rate(name, 8192 if card else 128)
        except Exception as error:  # a ceiling that is not known must not cost the run
            print(f"no ceiling of {name} products: {type(error).__name__}: {str(error)[:200]}")
    print(ceilings, flush=True)
    return ceilings


def product_rate(name: str, size: int) -> float:
    """TFLOP/s of a product of two square matrices of a type of `TYPES`, which XLA gives to cuBLASLt; awaited calls."""
    x, y = (
        jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16).astype(TYPES[name]) for i in (0, 1)
    )

    def product(x, y):
        return lax.dot_general(x, y, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)

    # Trying the schedules of XLA's own kernels as well would take seconds.
    call = jax.jit(product, compiler_options={"xla_gpu_enable_triton_gemm": False})
    jax.block_until_ready(call(x, y))
    times = []
    for _ in range(10):
        start = time.perf_counter()
        jax.block_until_ready(call(x, y))
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times) / 1e12


def in_cache(bytes_of_a_round: float) -> Row:
    """A mark for rows whose calls find in the L2 cache what they read: a round of them touches too little to leave it."""
    return {"in_cache": True} if bytes_of_a_round < L2_BYTES else {}


def text(row: Row) -> str:
    """For the line of a table: rates, the share of the nearer ceiling, and whether the L2 cache had the data."""
    if "share" not in row:
        return ""
    products = f" {row['tflop_s']:5.0f} TFLOP/s" if "tflop_s" in row else ""
    digits = 0 if row["share"] >= 0.1 else 1
    share = f" {row['share']:4.{digits}%} of {row['share_of']}"
    return f" {row['gb_s']:5.0f} GB/s{products}{share}" + (" (L2)" if row.get("in_cache") else "")
