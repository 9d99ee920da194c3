"""Problems, reference and bookkeeping of the paged logits benchmark."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

HEAD_DIM = 128
UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""Compiler options of float32 references: nothing is tried out on the card, where kernels may be timed at that moment."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One shape of a decode step's scores: every request has the full context unless `ragged`."""

    requests: int
    context: int
    heads: int = 64
    new_tokens: int = 1
    page_size: int = 64
    ragged: bool = False

    @property
    def name(self) -> str:
        return f"{self.requests}x{self.context} h{self.heads} n{self.new_tokens}" + (
            " ragged" if self.ragged else ""
        )

    @property
    def width(self) -> int:
        return self.context // self.page_size

    @property
    def pages(self) -> int:
        """Pages of the pool: always 2 Mi tokens or more, so that problems can share it and rotate through it."""
        return max((2 << 20) // self.page_size, self.requests * self.width)

    @property
    def sets(self) -> int:
        """Disjoint sets of pages, so that a round of calls reads several times the L2 cache."""
        return self.pages // (self.requests * self.width)

    @property
    def bytes(self) -> int:
        """FP8 keys and scales read plus scores written."""
        return self.moved(HEAD_DIM + 4)

    def moved(self, key_bytes: int) -> int:
        """The same with keys, scales included, of another size."""
        return self.requests * self.context * (key_bytes + 4 * self.new_tokens)

    @property
    def flops(self) -> int:
        return 2 * self.requests * self.context * self.new_tokens * self.heads * HEAD_DIM


@dataclasses.dataclass(frozen=True)
class ContextProblem:
    """A prefill: the last `tokens` of a context of `keys` tokens, causal, one request."""

    tokens: int
    keys: int
    heads: int = 64
    page_size: int = 64
    new_tokens: int = 0

    @property
    def name(self) -> str:
        return f"prefill {self.tokens}x{self.keys} h{self.heads}"

    @property
    def width(self) -> int:
        return self.keys // self.page_size

    @property
    def pages(self) -> int:
        return (2 << 20) // self.page_size

    @property
    def limits(self) -> np.ndarray:
        """Visible keys of every token."""
        return np.arange(self.keys - self.tokens + 1, self.keys + 1, dtype=np.int32)

    @property
    def bytes(self) -> int:
        """Scores written; everything else is small."""
        return self.tokens * self.keys * 4

    @property
    def flops(self) -> int:
        """Inside the windows only."""
        return 2 * int(self.limits.sum(dtype=np.int64)) * self.heads * HEAD_DIM


def context_inputs(problem: ContextProblem, seed: int = 0) -> tuple[tuple[Array, ...], list[Array]]:
    """``(q[N, H, D], weights[N, H], keys, scales, limits[N])`` and two page tables ``int32[1, W]``.

    Both tables' keys stay in the L2 cache; many rows read them, as one call alone would.
    """
    rng = np.random.default_rng(seed)
    shape = (problem.tokens, problem.heads, HEAD_DIM)
    q = rng.normal(size=shape).astype(np.float32).astype(jnp.float8_e4m3fn).view(np.uint8)
    weights = rng.normal(size=shape[:2]).astype(np.float32)
    keys, scales = pool(problem.pages, problem.page_size)
    tables = rng.permutation(problem.pages)[: 2 * problem.width].reshape(2, 1, -1).astype(np.int32)
    arrays = (jnp.asarray(q), jnp.asarray(weights), keys, scales, jnp.asarray(problem.limits))
    return arrays, [jnp.asarray(table) for table in tables]


@functools.cache
def pool(pages: int, page_size: int) -> tuple[Array, Array]:
    """Random e4m3 codes ``uint8[P, T, 128]`` and scales ``float32[P, T]``."""

    @jax.jit
    def make():
        values = jax.random.normal(jax.random.key(2), (pages, page_size, HEAD_DIM), jnp.bfloat16)
        codes = lax.bitcast_convert_type(values.astype(jnp.float8_e4m3fn), jnp.uint8)
        return codes, jax.random.uniform(jax.random.key(3), (pages, page_size), jnp.float32) + 0.5

    return make()


def inputs(problem: Problem, seed: int = 0) -> tuple[tuple[Array, ...], list[Array]]:
    """``(q, weights, keys, scales, limits)`` and one page table per set.

    Ragged problems have lengths between 0 and the context, NaN bytes in every unused place, page table entries beyond the
    length that no kernel may follow, and one set.
    """
    rng = np.random.default_rng(seed)
    r, n, h, p, t = problem.requests, problem.new_tokens, problem.heads, problem.pages, problem.page_size
    q = rng.normal(size=(r, n, h, HEAD_DIM)).astype(np.float32).astype(jnp.float8_e4m3fn).view(np.uint8)
    weights = rng.normal(size=(r, n, h)).astype(np.float32)
    keys, scales = pool(p, t)
    lengths = np.full(r, problem.context)
    if problem.ragged:
        special = [0, 1, 63, 64, 65, 255, 256, 257, 2047, 2048, 2049, problem.context]
        lengths = rng.integers(0, problem.context + 1, r)
        lengths[: len(special)] = np.minimum(special, problem.context)[:r]
    limits = np.maximum(lengths[:, None] - np.arange(n)[::-1], 0).astype(np.int32)
    places = problem.sets * r * problem.width
    tables = rng.permutation(p)[:places].reshape(problem.sets, r, problem.width).astype(np.int32)
    if problem.ragged:
        used = np.arange(problem.width)[None, :] * t < lengths[:, None]
        tables = np.where(used, tables[:1], np.where(rng.random(used.shape) < 0.5, -1, 1 << 28))
        place = np.arange(problem.context).reshape(1, problem.width, t) < lengths[:, None, None]
        visible = np.zeros((p, t), bool)
        visible[tables[0][used]] = place[used]
        keys = jnp.where(jnp.asarray(visible)[:, :, None], keys, jnp.uint8(0x7F))
        scales = jnp.where(jnp.asarray(visible), scales, jnp.nan)
    arrays = (jnp.asarray(q), jnp.asarray(weights), keys, scales, jnp.asarray(limits))
    return arrays, [jnp.asarray(table) for table in tables]


@functools.partial(jax.jit, compiler_options=UNTUNED)
def reference(q: Array, weights: Array, keys: Array, scales: Array, table: Array, limits: Array) -> Array:
    """Scores in float32, one request at a time: ``float32[R, n, W * T]``, -inf at and beyond the limits."""

    def decode(codes):
        # Without the barrier XLA sees a product of FP8 values, which it may give to FP8 tensor cores, whatever precision is
        # asked for; so it does with the options above.
        values = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
        return lax.optimization_barrier(values)

    def of_request(args):
        q, weights, pages, limits = args
        size = keys.shape[1]
        columns = jnp.arange(pages.shape[0] * size)
        used = columns // size * size < jnp.max(limits)
        safe = jnp.where(used[::size], pages, 0)
        k = decode(keys[safe]).reshape(-1, HEAD_DIM)
        dots = jnp.einsum("nhd,sd->nhs", decode(q), k, precision="highest")
        total = jnp.einsum("nhs,nh->ns", jnp.maximum(dots, 0), weights, precision="highest")
        return jnp.where(columns[None] < limits[:, None], total * scales[safe].reshape(1, -1), -jnp.inf)

    return lax.map(of_request, (q, weights, table, limits))


@jax.jit
def difference(got: Array, want: Array) -> tuple[Array, Array]:
    """``(calc_diff, columns whose -inf is misplaced)``; calc_diff is 1 - 2 sum(xy) / sum(x^2 + y^2)."""
    want = want.reshape(got.shape)
    finite = want > -jnp.inf
    x, y = (jnp.where(finite, a, 0).astype(jnp.float32) for a in (got, want))
    # Summed as a relative squared error: the same value without the cancellation of 1 - ratio.
    diff = jnp.sum((x - y) ** 2) / jnp.maximum(jnp.sum(x * x + y * y), 1e-30)
    return diff, jnp.sum((got == -jnp.inf) == finite)
