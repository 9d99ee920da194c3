"""Checks and times the sparse MLA kernels on a GPU: ``python benchmarks/sparse_mla_check.py [--json FILE]``.

Every variant is first compared with a float32 reference on inputs whose unused rows are NaN; then it is timed on random
rows of a pool larger than the L2 cache, a different set of rows for every call.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from dsa_jax.pallas import sparse_mla_mosaic, sparse_mla_triton

PAGE_SIZE, LATENT, WIDTH, SCALE = 64, 512, 576, 0.1352338


@dataclasses.dataclass(frozen=True)
class Shape:
    """A problem: queries, heads, keys of a query, slots of 64 tokens, pages per slot, sets of rows, KEY form."""

    tokens: int
    heads: int
    keys: int = 2048
    slots: int = 64 * 512
    scale: int = 1
    sets: int = 8
    form: str = "bf16"
    variants: tuple[str, ...] = ("mosaic",)


Kernel = Callable[..., tuple[jax.Array, jax.Array]]


def triton(**fields) -> Kernel:
    """The Triton kernel with a configuration."""

    def run(q, keys, rows, offset, scale):
        if len(keys) > 1:
            raise NotImplementedError("reads bf16 only")
        return sparse_mla_triton.sparse_mla(
            q, keys[0], rows, page_scale=scale, layer_offset=offset, softmax_scale=SCALE,
            config=sparse_mla_triton.Config(**fields) if fields else None,
        )  # fmt: skip

    return run


def mosaic(**fields) -> Kernel:
    """The Mosaic kernel with a configuration, for either form."""

    def run(q, keys, rows, offset, scale):
        kernel = sparse_mla_mosaic.sparse_mla if len(keys) == 1 else sparse_mla_mosaic.sparse_mla_fp8
        config = sparse_mla_mosaic.Config() if len(keys) == 1 else sparse_mla_mosaic.FP8_CONFIG
        options = dict(page_scale=scale, layer_offset=offset, softmax_scale=SCALE)
        return partial(kernel, q, *keys)(rows, config=dataclasses.replace(config, **fields), **options)

    return run


VARIANTS: dict[str, Kernel] = {
    "mosaic": mosaic(),
    "mosaic, not ahead": mosaic(ahead=False),
    "mosaic, late scores": mosaic(early_scores=False),
    "triton": triton(),
}


def reference(q, keys, rows, offset, scale):
    """Float32 attention of the given queries, one at a time."""

    def one(args):
        q, rows = args
        valid = (rows >= 0)[:, None]
        page = jnp.where(rows >= 0, rows // PAGE_SIZE * scale + offset, 0)
        parts = [array[page, rows % PAGE_SIZE] for array in keys]
        if len(keys) > 1:
            codes, scales, rope = parts
            values = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
            parts = [(values.reshape(-1, 4, 128) * scales[:, :, None]).reshape(-1, LATENT), rope]
        key = jnp.where(valid, jnp.concatenate([part.astype(jnp.float32) for part in parts], axis=1), 0)
        score = jnp.einsum("hd,kd->hk", q.astype(jnp.float32), key, precision="highest") * SCALE
        score = jnp.where(valid.T, score, -jnp.inf)
        top = jnp.maximum(jnp.max(score, axis=1, keepdims=True), -1e30)
        weight = jnp.exp(score - top)
        total = weight.sum(axis=1)
        out = jnp.einsum("hk,kd->hd", weight, key[:, :LATENT], precision="highest")
        return out / jnp.where(total == 0, 1, total)[:, None], jnp.log(total) + top[:, 0]

    return jax.lax.map(one, (q, rows))


def arrays_of(form: str, pages: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of the pool's arrays."""
    widths = {
        "bf16": [(WIDTH, jnp.bfloat16)],
        "fp8": [(LATENT, jnp.uint8), (4, jnp.float32), (WIDTH - LATENT, jnp.bfloat16)],
    }
    return tuple(jax.ShapeDtypeStruct((pages, PAGE_SIZE, width), dtype) for width, dtype in widths[form])


def make(shape: Shape, seed: int):
    """Random queries, a pool whose unused rows are NaN, and several sets of ascending rows with holes."""
    tokens, keys, total = shape.tokens, shape.keys, shape.slots * PAGE_SIZE
    rng = np.random.default_rng(seed)
    window = max(total // tokens, keys) if total // tokens >= keys else total
    step = window // keys
    starts = (np.arange(tokens) * window) % max(total - window + 1, 1)
    rows = starts[:, None] + np.arange(keys) * step + rng.integers(0, step, (shape.sets, tokens, keys))
    rows = rows.astype(np.int32)
    used = np.zeros(total, bool)
    used[rows.reshape(-1)] = True
    holes = rows[0]
    holes[0, keys // 3 : keys // 2] = -1
    holes[1 % tokens, ::7] = -1
    if tokens > 2:
        holes[2] = -1
        holes[3 % tokens, 5:] = -1
    key = jax.random.key(seed)
    q = jnp.clip(jax.random.normal(key, (tokens, shape.heads, WIDTH), jnp.bfloat16), -1, 1)
    used = jnp.asarray(used).reshape(shape.slots, PAGE_SIZE, 1)

    def fill(spec):
        size = (shape.slots, PAGE_SIZE, spec.shape[-1])
        if spec.dtype == jnp.uint8:
            codes = jax.random.bits(key, size, jnp.uint8)
            codes = jnp.where((codes & 0x7F) == 0x7F, jnp.uint8(1), codes)
            layer = jnp.where(used, codes, jnp.uint8(0x7F))
        elif spec.dtype == jnp.float32:
            layer = jnp.where(
                used, jnp.exp2(jax.random.randint(key, size, -13, -9).astype(jnp.float32)), jnp.nan
            )
        else:
            layer = jax.random.normal(key, size, spec.dtype) * jnp.asarray(0.1, spec.dtype)
            layer = jnp.where(used, layer, jnp.asarray(jnp.nan, spec.dtype))
        if shape.scale == 1:
            return layer
        return jnp.repeat(layer, shape.scale, axis=0)  # every layer the same

    pool = tuple(jax.jit(fill, static_argnums=0)(spec) for spec in arrays_of(shape.form, shape.slots))
    return q, pool, jnp.asarray(rows)


def errors(got, want, empty) -> dict:
    """Share of elements outside FlashMLA's tolerances, and the largest differences."""
    out, lse = (np.asarray(x, np.float64) for x in got)
    ref_out, ref_lse = (np.asarray(x, np.float64) for x in want)
    gap = np.abs(out - ref_out)
    bad = (gap > 1e-3) & (gap > 2.01 / 128 * (np.abs(ref_out) + 1e-6))
    finite = np.isfinite(ref_lse)
    lse_gap = np.abs(np.where(finite, lse - np.where(finite, ref_lse, 0), 0))
    lse_bad = (lse_gap > 1e-6) & (lse_gap > 8.01 / 65536 * (np.abs(np.where(finite, ref_lse, 0)) + 1e-6))
    cosine = 1 - 2 * (out * ref_out).sum() / max((out**2 + ref_out**2).sum(), 1e-30)
    wrong = int(bad.sum() + lse_bad.sum() + (~np.isfinite(out)).sum())
    wrong += int((~np.isneginf(lse[empty])).sum() + (out[empty] != 0).sum())
    return dict(
        wrong=wrong, max_out=float(np.nanmax(gap)), max_lse=float(lse_gap.max()), calc_diff=float(cosine)
    )


def compile_program(kernel: Kernel, shape: Shape) -> Callable:
    """A program that calls the kernel once for every set of rows, back to back."""
    one = jax.jit(kernel, static_argnums=4)  # lowered once, however often it is called

    @jax.jit
    def program(q, keys, rows, offset):
        return [one(q, keys, rows[s], offset, shape.scale) for s in range(shape.sets)]

    spec = jax.ShapeDtypeStruct
    q, rows = (shape.tokens, shape.heads, WIDTH), (shape.sets, shape.tokens, shape.keys)
    keys = arrays_of(shape.form, shape.slots * shape.scale)
    return program.lower(spec(q, jnp.bfloat16), keys, spec(rows, jnp.int32), spec((), jnp.int32)).compile()


def timed(program: Callable, operands: tuple, repeats: int = 7) -> float:
    """Median microseconds of one call of the kernel."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(program(*operands))
        times.append(time.perf_counter() - start)
    return statistics.median(times) / operands[2].shape[0] * 1e6


SHAPES = {
    "decode 64x128": Shape(64, 128, sets=12, variants=("mosaic", "mosaic, not ahead", "triton")),
    "decode 64x128 FP8": Shape(64, 128, sets=12, form="fp8", variants=("mosaic", "mosaic, not ahead")),
    "prefill 4096x128": Shape(4096, 128, slots=512, sets=2, variants=("mosaic", "mosaic, not ahead")),
    "decode 64x16": Shape(64, 16, sets=12, variants=("mosaic", "triton")),
    "decode 64x64": Shape(64, 64, sets=12),
    "decode 8x128": Shape(8, 128, slots=8 * 512, sets=24),
    "decode 1x128": Shape(1, 128, slots=4096, sets=24),
    "decode 128x128": Shape(128, 128),
    "decode 128x128 FP8": Shape(128, 128, form="fp8"),
    "decode 64x128, 4.8 GB pool": Shape(64, 128, scale=2),
}


def measure(name: str, programs: dict[str, Future], deadline: float) -> list[dict]:
    """Check and time the variants of one shape, given their programs."""
    shape = SHAPES[name]
    tokens, heads = shape.tokens, shape.heads
    q, keys, rows = make(shape, seed=1)
    chosen = np.unique(np.r_[np.arange(min(5, tokens)), tokens // 2, tokens - 1])
    checked = rows[0][chosen]
    offset = jnp.int32(shape.scale - 1)
    want = jax.jit(reference, static_argnums=4)(q[chosen], keys, checked, offset, shape.scale)
    want = [np.asarray(x) for x in want]
    empty = np.asarray((checked < 0).all(axis=1))
    valid = int((rows >= 0).sum()) / shape.sets
    flop = 2 * heads * valid * (WIDTH + LATENT)
    moved = valid * (WIDTH * 2 if shape.form == "bf16" else 656) + tokens * heads * (WIDTH + LATENT) * 2
    results = []
    operands = (q, keys, rows, offset)
    for variant, future in programs.items():
        if time.time() > deadline:
            break
        entry = dict(shape=name, variant=variant)
        try:
            program = future.result()
            got = program(*operands)[0]
            entry |= errors([x[chosen] for x in got], want, empty)
            del got
            us = timed(program, operands)
            entry |= dict(us=us, tflops=flop / us / 1e6, gbs=moved / us / 1e3)
        except Exception as error:  # a variant that does not compile must not end the run
            entry |= dict(error=f"{type(error).__name__}: {str(error)[:160]}")
        results.append(entry)
        print(line(entry), flush=True)
    return results


def line(entry: dict) -> str:
    """One row of the table."""
    title = f"{entry['shape']:28} {entry['variant']:26}"
    if "error" in entry:
        return f"{title} {entry['error']}"
    verdict = "ok" if entry["wrong"] == 0 else f"WRONG {entry['wrong']}"
    rates = f"{entry['us']:9.1f} us {entry['tflops']:6.0f} TFLOP/s {entry['gbs']:6.0f} GB/s"
    return f"{title} {rates} {verdict} out {entry['max_out']:.1e} lse {entry['max_lse']:.1e} diff {entry['calc_diff']:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=95, help="end the run after this time")
    parser.add_argument(
        "--hang", type=float, default=50, help="seconds after which the first shape counts as hanging"
    )
    parser.add_argument("--only", default="", help="run only variants whose name contains this")
    parser.add_argument(
        "--shapes", default="", help="run only these shapes (names or parts of names, by semicolons)"
    )
    parser.add_argument(
        "--here", action="store_true", help="run in this process, without protection from hanging"
    )
    options = parser.parse_args()
    begin = time.time()
    wanted = options.shapes.split(";")
    names = [
        shape for shape in SHAPES if shape in wanted or any(w in shape for w in wanted if w not in SHAPES)
    ]
    results: list[dict] = []
    if options.here:
        print(jax.devices()[0].device_kind, "jax", jax.__version__, flush=True)
        deadline = begin + options.seconds
        with ThreadPoolExecutor(8) as pool:
            programs = {
                name: {
                    variant: pool.submit(compile_program, VARIANTS[variant], SHAPES[name])
                    for variant in SHAPES[name].variants
                    if options.only in variant
                }
                for name in names
            }
            for name in names:
                if programs[name] and time.time() < deadline:
                    results += measure(name, programs[name], deadline)
                    if options.json:
                        options.json.write_text(json.dumps(results, indent=1) + "\n")
            pool.shutdown(wait=False, cancel_futures=True)
        return
    # A kernel that hangs would take the rest of the run with it, so the first shape has a process of its own; a hanging
    # one rules out its kind.
    only = options.only
    with tempfile.TemporaryDirectory() as folder:
        for number, group in enumerate((names[:1], names[1:])):
            left = begin + options.seconds - time.time()
            if left < 8 or not group:
                break
            file = Path(folder) / f"{number}.json"
            command = [sys.executable, __file__, "--here", "--shapes", ";".join(group), "--only", only]
            command += ["--json", str(file), "--seconds", str(left - 4)]
            limit = min(left, options.hang) if number == 0 else left + 10
            try:
                subprocess.run(command, timeout=limit, check=False)
            except subprocess.TimeoutExpired:
                print(f"{group[0]} ...: no answer after {limit:.0f} s", flush=True)
                only = only or "triton"
            if file.exists():
                results += json.loads(file.read_text())
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
