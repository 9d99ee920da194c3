"""Checks and times the sparse MLA kernels on a GPU: ``python benchmarks/sparse_mla_check.py [--json FILE]``.

Every variant is first compared with a float32 reference on inputs whose unused rows are NaN, at most 64 queries and the
first five; then it is timed on random rows of a pool, a different set of rows for every call. The pool of decode shapes, and
what their sets read, are larger than the L2 cache; the 38 MB of the prefill's, one request's context, stay there. Times are
device times from a profile. Operations are those of valid entries; bytes are each row of the pool once, queries and results.
Each line has its share of the nearer ceiling, copying or bfloat16 products, both measured at the start (see `rates`).
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import rates, verdicts
from benchmarks.timing import launches, require_card, require_match
from benchmarks.xla import lines
from dsa_jax import Cache, CacheLayout, ops, quant
from dsa_jax.compat import target_device
from dsa_jax.config import preset
from dsa_jax.forms import key_arrays
from dsa_jax.pallas import sparse_mla_mosaic, sparse_mla_triton

PAGE_SIZE, LATENT, WIDTH, SCALE = 64, 512, 576, 0.1352338
KEY_SCALE = {"fp8": 0.01, "nvfp4": 0.001}
"""Scales of the forms that have one for a whole cache; the keys' values are about a tenth."""


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
    variants: tuple[str, ...] = ("mosaic", "xla")


Kernel = Callable[..., tuple[jax.Array, jax.Array]]
"""``(shape, q, keys, rows, offset) -> out, lse``."""


def triton(**fields) -> Kernel:
    """The Triton kernel with a configuration."""

    def run(shape, q, keys, rows, offset):
        return sparse_mla_triton.sparse_mla(
            q, keys, rows, page_scale=shape.scale, layer_offset=offset, softmax_scale=SCALE, form=shape.form,
            key_scale=KEY_SCALE.get(shape.form), config=sparse_mla_triton.Config(**fields) if fields else None,
        )  # fmt: skip

    return run


def mosaic(**fields) -> Kernel:
    """The Mosaic kernel with a configuration, for either form."""

    def run(shape, q, keys, rows, offset):
        return sparse_mla_mosaic.sparse_mla(
            q, keys, rows, page_scale=shape.scale, layer_offset=offset, softmax_scale=SCALE, form=shape.form,
            config=dataclasses.replace(
                sparse_mla_mosaic.default_config(
                    target_device(), shape.form, tokens=shape.tokens, heads=shape.heads, keys=shape.keys
                ),
                **fields,
            ),
        )  # fmt: skip

    return run


def xla(shape, q, keys, rows, offset):
    """The reference of the library; the layer is not an operand here."""
    del offset
    model = preset("deepseek-v3.2")
    layers = tuple(range(shape.scale))
    layout = CacheLayout.create(model, layers=layers, page_size=PAGE_SIZE, key_form=shape.form)
    names = [array.name for array in key_arrays(shape.form, LATENT, WIDTH - LATENT)]
    cache = Cache.create(layout, shape.slots).replace_pages(**dict(zip(names, keys, strict=True)))
    options: dict = dict(key_scale=KEY_SCALE.get(shape.form), implementation="xla")
    return ops.sparse_mla(q, cache, shape.scale - 1, rows, SCALE, **options)


VARIANTS: dict[str, Kernel] = {
    "mosaic": mosaic(),
    "mosaic, ahead 64": mosaic(ahead=64),
    "mosaic, ahead 0": mosaic(ahead=0),
    "triton": triton(),
    "xla": xla,
}


def reference(form, q, keys, rows, offset, scale):
    """Float32 attention of the given queries, one at a time."""
    names = [array.name for array in key_arrays(form, LATENT, WIDTH - LATENT)]

    def one(args):
        q, rows = args
        valid = (rows >= 0)[:, None]
        page = jnp.where(rows >= 0, rows // PAGE_SIZE * scale + offset, 0)
        entry = {name: array[page, rows % PAGE_SIZE] for name, array in zip(names, keys, strict=True)}
        key = jnp.where(valid, quant.decode_latent(entry, form, KEY_SCALE.get(form)), 0)
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
    arrays = key_arrays(form, LATENT, WIDTH - LATENT)
    return tuple(jax.ShapeDtypeStruct((pages, PAGE_SIZE, *a.shape), jnp.dtype(a.dtype)) for a in arrays)


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

    @jax.jit
    def fill():
        values = jax.random.normal(key, (shape.slots, PAGE_SIZE, WIDTH)) / 10
        scale = KEY_SCALE.get(shape.form)
        entry = quant.encode_latent(values[..., :LATENT], values[..., LATENT:], shape.form, scale)
        poison = lambda part: 0x7F if part.dtype == jnp.uint8 else jnp.nan
        layer = [jnp.where(used, part, jnp.asarray(poison(part), part.dtype)) for part in entry.values()]
        return tuple(part if shape.scale == 1 else jnp.repeat(part, shape.scale, axis=0) for part in layer)

    return q, fill(), [jnp.asarray(x) for x in rows]


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


def queries_compared(tokens: int) -> np.ndarray:
    """Some with holes at the beginning (see `make`), and 64 from the first to the last; all of a few."""
    spread = np.linspace(0, tokens - 1, min(tokens, 64)).astype(np.int32)
    return np.unique(np.r_[np.arange(min(5, tokens)), spread])


def compile_program(kernel: Kernel, shape: Shape) -> Callable:
    """A program that calls the kernel once for every set of rows, back to back."""
    one = jax.jit(kernel, static_argnums=0)  # lowered once, however often it is called

    @jax.jit
    def program(q, keys, rows, offset):
        return [one(shape, q, keys, some, offset) for some in rows]

    spec = jax.ShapeDtypeStruct
    q = spec((shape.tokens, shape.heads, WIDTH), jnp.bfloat16)
    rows = [spec((shape.tokens, shape.keys), jnp.int32)] * shape.sets
    keys = arrays_of(shape.form, shape.slots * shape.scale)
    return program.lower(q, keys, rows, spec((), jnp.int32)).compile()


def distinct(rows: Sequence[jax.Array | np.ndarray]) -> float:
    """Rows of the pool that a call reads, each once, on average of the sets: queries of one context share many."""
    return statistics.mean(int((np.bincount(x[x >= 0]) > 0).sum()) for x in map(np.asarray, rows))


def timed(program: Callable, operands: tuple, repeats: int = 5) -> float:
    """Median device time of one call, microseconds: of its kernel, and of what joins its splits."""
    runs = launches([lambda: program(*operands)] * repeats)
    return statistics.median(sum(launch.us for launch in run) for run in runs) / len(operands[2])


SCHEDULES = tuple(name for name in VARIANTS if name.startswith("mosaic"))
BOTH = ("mosaic", "triton", "xla")
SHAPES = {
    "decode 64x128": Shape(64, 128, sets=12, variants=(*SCHEDULES, "triton", "xla")),
    "decode 64x128 656 B": Shape(64, 128, sets=12, form="fp8_ds_mla", variants=(*SCHEDULES, "triton", "xla")),
    "prefill 4096x128": Shape(4096, 128, slots=512, sets=2, variants=("mosaic", "xla")),
    # What the rule by the number of heads decides.
    "decode 64x16": Shape(64, 16, sets=12, variants=BOTH),
    "decode 64x32": Shape(64, 32, sets=12, variants=BOTH),
    "decode 1x16": Shape(1, 16, slots=4096, sets=36, variants=BOTH),
    "prefill 4096x16": Shape(4096, 16, slots=512, sets=2, variants=BOTH),
    "decode 64x64": Shape(64, 64, sets=12),
    "decode 8x128": Shape(8, 128, slots=8 * 512, sets=24),
    "decode 1x128": Shape(1, 128, slots=4096, sets=36),
    "decode 128x128": Shape(128, 128),
    "decode 128x128 656 B": Shape(128, 128, form="fp8_ds_mla"),
    "decode 64x128, 4.8 GB pool": Shape(64, 128, scale=2),
    **{f"decode 64x128 {form}": Shape(64, 128, sets=4, form=form, variants=("triton", "xla")) for form in
       ("fp8", "nvfp4")},
    **{f"decode 64x16 {form}": Shape(64, 16, sets=4, form=form, variants=("triton", "xla")) for form in
       ("fp8", "nvfp4")},
    "decode 64x16 fp8_ds_mla": Shape(64, 16, sets=4, form="fp8_ds_mla", variants=BOTH),
    "decode 1x16 fp8_ds_mla": Shape(1, 16, slots=4096, sets=36, form="fp8_ds_mla", variants=BOTH),
    "prefill 4096x16 fp8_ds_mla": Shape(4096, 16, slots=512, sets=2, form="fp8_ds_mla", variants=BOTH),
}  # fmt: skip


def measure(name: str, programs: dict[str, Future], deadline: float, ceilings: rates.Ceilings) -> list[dict]:
    """Check and time the variants of one shape, given their programs."""
    shape = SHAPES[name]
    tokens, heads = shape.tokens, shape.heads
    q, keys, rows = make(shape, seed=1)
    chosen = queries_compared(tokens)
    checked = rows[0][chosen]
    offset = jnp.int32(shape.scale - 1)
    want = jax.jit(reference, static_argnums=(0, 5))(
        shape.form, q[chosen], keys, checked, offset, shape.scale
    )
    want = [np.asarray(x) for x in want]
    empty = np.asarray((checked < 0).all(axis=1))
    valid = sum(int((x >= 0).sum()) for x in rows) / shape.sets
    flop = 2 * heads * valid * (WIDTH + LATENT)
    row_bytes = sum(array.token_bytes for array in key_arrays(shape.form, LATENT, WIDTH - LATENT))
    moved = distinct(rows) * row_bytes + tokens * heads * (2 * (WIDTH + LATENT) + 4)
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
            entry |= dict(us=us) | ceilings.rates(us, moved, flop, "bf16")
        except Exception as error:  # a variant that does not compile must not end the run
            entry |= dict(error=f"{type(error).__name__}: {str(error)[:160]}")
        results.append(entry)
        print(line(entry), flush=True)
    others = [entry for entry in results if entry["variant"] != "xla"]
    for entry in results:
        if entry["variant"] == "xla" and "us" in entry:
            for other in others:
                other["xla"] = entry["us"]
            lines(name, others, "us", lambda row: row["variant"])
    return results


def right(entry: dict) -> bool:
    """Whether a variant ran and agrees with the reference."""
    return "error" not in entry and entry["wrong"] == 0


def line(entry: dict) -> str:
    """One row of the table."""
    title = f"{entry['shape']:26} {entry['variant']:16}"
    if "error" in entry:
        return f"{title} {entry['error']}"
    verdict = "ok" if right(entry) else f"WRONG {entry['wrong']}"
    gaps = f"out {entry['max_out']:.0e} lse {entry['max_lse']:.0e} diff {entry['calc_diff']:.0e}"
    return f"{title} {entry['us']:8.1f} us{rates.text(entry)} {verdict} {gaps}"


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
    failed: list[str] = []
    if options.here:
        require_card("sparse_mla_check")
        print(jax.devices()[0].device_kind, "jax", jax.__version__, flush=True)
        ceilings = rates.measure("bf16")  # before anything compiles
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
                    results += measure(name, programs[name], deadline, ceilings)
                    if options.json:
                        options.json.write_text(json.dumps(results, indent=1) + "\n")
            pool.shutdown(wait=False, cancel_futures=True)
        return  # what is wrong is told by the process that reads the results
    require_match(options.only, (variant for name in names for variant in SHAPES[name].variants))
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
                failed.append(f"{group[0]} ...")
                only = only or "triton"
            if file.exists():
                results += json.loads(file.read_text())
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{time.time() - begin:.0f} s")
    verdicts.end(failed + [f"{entry['shape']} {entry['variant']}" for entry in results if not right(entry)])


if __name__ == "__main__":
    main()
