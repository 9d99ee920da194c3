"""Checks and times top-k, append, gather on a GPU: `python -m benchmarks.topk_append_check [--xla] [--json FILE]`.

Every top-k variant is compared with the XLA reference on random rows, ragged limits and ties before it is timed. Times are
the profiler's device times of one call, summed over its launches. Bytes are the scores up to the limits and the indices of
top-k, vectors read and entries written of an append (tokens of row -1 left out), entries read and written of a gather; lines
have their share of the copy rate measured at the start.

Inputs rotate through more than the L2 cache except where a line says "(L2)": few scores, which at most 12 sets hold, and few
appended entries. All layers of an append get the same vectors and rows. A step finds scores and vectors in the cache, too:
it has just made them. What a gather writes, 9 to 67 MB, goes to the same place in every call, and much of it stays there.

With `--xla` the reference is timed on the same inputs. FP8 index keys and bfloat16 latents have targets, other forms follow.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import rates, verdicts, xla
from benchmarks.timing import device_times, require_card
from dsa_jax import Cache, CacheLayout, quant
from dsa_jax.config import preset
from dsa_jax.forms import INDEX_FORMS, KEY_FORMS, index_arrays, key_arrays
from dsa_jax.ops import gpu
from dsa_jax.pallas import append_triton, gather_triton, topk_mosaic, topk_triton
from dsa_jax.xla import append_index_k, append_latent, gather_index_k
from dsa_jax.xla.topk import topk_indices

K = 2048

Variants = dict[str, Callable[..., jax.Array]]


def cluster(*arguments: int, **options: int) -> Callable[..., jax.Array]:
    """The Mosaic kernel with a configuration of its own."""
    return functools.partial(topk_mosaic.topk, config=topk_mosaic.Config(*arguments, **options))


BOTH: Variants = {"mosaic": topk_mosaic.topk, "triton": topk_triton.topk}
MOSAIC: Variants = {"mosaic": topk_mosaic.topk}
# Programs for short rows, against the default's 512 threads with 16 scores each.
SHORT: Variants = {
    "none for short rows": cluster(1024, 64, 2),
    "1,024 threads": cluster(1024, 64, 2, short_threads=1024, short_items=8),
    "256 threads": cluster(1024, 64, 2, short_threads=256, short_items=32),
}

# name: (rows, columns, true length or None, target in us or None, variants)
TOPK: dict[str, tuple[int, int, int | None, float | None, Variants]] = {
    "64 x 32768": (64, 32768, None, 20, BOTH | {"1,024 threads": cluster(1024, 16, 2, samples=1024)}),
    "64 x 8192": (64, 8192, None, None, BOTH),
    "64 x 4096": (64, 4096, None, None, BOTH),
    "8 x 2048": (8, 2048, None, None, BOTH),
    "64 x 8192 in 131072": (64, 131072, 8192, None, BOTH | SHORT),
    "4 x 131072": (4, 131072, None, 30, BOTH),
    "64 x 131072": (64, 131072, None, 70, BOTH),
    "1 x 32768": (1, 32768, None, None, MOSAIC),
    "128 x 16384": (128, 16384, None, None, MOSAIC),
    "1 x 1048576": (1, 1048576, None, None, BOTH),
    "4096 x 8192": (4096, 8192, None, None, BOTH),
    "1024 x 32768": (1024, 32768, None, None, BOTH),
    "256 x 131072": (256, 131072, None, None, MOSAIC),
}

Row = dict[str, Any]


def scores(kind: str, rows: int, columns: int, seed: int) -> jax.Array:
    """Random scores of a kind of distribution."""
    x = jax.random.normal(jax.random.key(seed), (rows, columns), jnp.float32)
    if kind == "zeros":
        return jnp.maximum(x - 2, 0) * jnp.where(jnp.arange(columns)[None] % 3 == 0, -1.0, 1.0)
    if kind == "coarse":
        return x.astype(jnp.bfloat16).astype(jnp.float32)
    if kind == "heavy":
        return x / jnp.abs(jax.random.normal(jax.random.key(seed + 99), x.shape, jnp.float32))
    if kind == "nan":
        return jnp.where(x > -0.5, jnp.nan, jnp.where(x > -1, -jnp.inf, x))
    return x


def limits_for(rows: int, columns: int, seed: int) -> jax.Array:
    """Ragged limits with the corners among them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, columns + 1, rows)
    corners = [columns, K + 1, 0, 1, K - 1, K, 8192, 8193, 16384, 16385, 32768, 32769, columns - 1]
    lengths[: min(rows, len(corners))] = np.minimum(corners, columns)[: min(rows, len(corners))]
    return jnp.asarray(lengths, jnp.int32)


@functools.cache
def expected(
    kind: str, rows: int, columns: int, length: int | None
) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """Scores, limits and what the reference selects; ragged limits if no length is given."""
    x = scores(kind, rows, columns, seed=7)
    limits = limits_for(rows, columns, 3) if length is None else jnp.full((rows,), length, jnp.int32)
    return x, limits, np.asarray(reference(x, limits, K))


reference = jax.jit(topk_indices, static_argnums=2)


def check_topk(call: Callable, rows: int, columns: int, length: int | None) -> str:
    """Compare with the reference; says what differs."""
    for kind in ("normal", "zeros", "coarse", "heavy", "nan"):
        for given in (length or columns, None):
            x, limits, want = expected(kind, rows, columns, given)
            got = np.asarray(call(x, limits))
            if not (got == want).all():
                bad = np.where((got != want).any(axis=1))[0]
                return (
                    f"WRONG {kind}: rows {bad[:4].tolist()} of length {np.asarray(limits)[bad[:4]].tolist()}"
                )
            again = np.asarray(call(x, limits))
            if not (again == got).all():
                return f"NOT DETERMINISTIC {kind}"
    return "ok"


def compile_topk(pool: ThreadPoolExecutor, only: str) -> dict[tuple[str, str], Future]:
    """Start compiling all variants side by side."""

    def build(rows: int, columns: int, topk: Callable[..., jax.Array]):
        call = jax.jit(lambda x, limits: topk(x, limits, K))
        x = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
        return call.lower(x, jax.ShapeDtypeStruct((rows,), jnp.int32)).compile()

    return {
        (shape, name): pool.submit(build, rows, columns, topk)
        for shape, (rows, columns, _, _, variants) in TOPK.items()
        for name, topk in variants.items()
        if only in f"topk {shape} {name}"
    }


def run_topk(
    report: Callable[[Row], None],
    compiled: dict[tuple[str, str], Future],
    late: Callable[[], bool],
    every: bool,
    with_xla: bool,
) -> None:
    references: dict[str, Row] = {}
    for (shape, name), future in compiled.items():
        if not late():
            rows, columns, length, target, _ = TOPK[shape]
            row = guarded(measure_topk, future, rows, columns, length, every)
            if with_xla and shape not in references:
                given = topk_inputs("normal", rows, columns, length)
                references[shape] = xla.timed(f"topk {shape}", lambda x, n: topk_indices(x, n, K), given)
            row |= references.get(shape, {})
            report({"op": "topk", "shape": shape, "variant": name, "target": target} | row)


def topk_inputs(kind: str, rows: int, columns: int, length: int | None) -> list[tuple]:
    """Scores and limits for several calls: more than the L2 cache holds, or 12 of them."""
    limits = jnp.full((rows,), length or columns, jnp.int32)
    return [(scores(kind, rows, columns, seed), limits) for seed in range(topk_sets(rows, columns))]


def topk_sets(rows: int, columns: int) -> int:
    """How many inputs take turns."""
    return int(np.clip(200e6 // (rows * columns * 4) + 1, 2, 12))


def topk_bytes(rows: int, columns: int, length: int | None) -> Row:
    """Bytes of a call: each row's scores up to the limit, its limit and indices; and whether the cache holds a round."""
    read = rows * (length or columns) * 4
    return {"bytes": read + rows * (4 + K * 4)} | rates.in_cache(topk_sets(rows, columns) * read)


def measure_topk(future: Future, rows: int, columns: int, length: int | None, every: bool) -> Row:
    call = future.result()
    row: Row = {"check": check_topk(call, rows, columns, length)} | topk_bytes(rows, columns, length)
    for kind in ("normal", *(("zeros", "coarse", "heavy") if every else ())):
        times = device_times(call, topk_inputs(kind, rows, columns, length))
        total = xla.total(times)
        if kind == "normal":
            row |= {"us": total, "queued": times["queued"], "kernels": kernels_of(times)}
        else:
            row[kind] = total
    return row


def kernels_of(times: dict[str, float]) -> dict[str, float]:
    return {name: us for name, us in times.items() if name not in ("total", "queued")}


def guarded(measure: Callable[..., Row], *args) -> Row:
    """A variant that does not compile or run must not end the benchmark."""
    try:
        return measure(*args)
    except Exception as error:
        return {"check": f"{type(error).__name__}: {str(error)[:200]}"}


LAYERS, PAGE_SIZE, SLOTS = 16, 64, 640


def run_append(report: Callable[[Row], None], only: str, late: Callable[[], bool], with_xla: bool) -> None:
    for tokens, target in ((64, 4), (8192, 8)):
        for name in ("index", "latent", "both"):
            if only in f"append {name}" and not late():
                row = guarded(measure_append, name, tokens, with_xla)
                goal = target if name == "index" else None
                report({"op": "append", "shape": f"n={tokens}", "variant": name, "target": goal} | row)


def vectors(tokens: int) -> tuple[jax.Array, jax.Array, jax.Array, np.ndarray]:
    """Index keys of all sizes, latents and rotary keys, and the rows that they go to, some of them nowhere."""
    rng = np.random.default_rng(0)
    k = jnp.asarray(rng.normal(size=(tokens, 128)) * np.exp(rng.normal(size=(tokens, 1)) * 3), jnp.bfloat16)
    latent = jnp.asarray(rng.normal(size=(tokens, 512)), jnp.bfloat16)
    k_rope = jnp.asarray(rng.normal(size=(tokens, 64)), jnp.bfloat16)
    rows = rng.permutation(SLOTS * PAGE_SIZE)[:tokens].astype(np.int32)
    rows[::17] = -1
    return k, latent, k_rope, rows


def append_bytes(part: str, form: str, rows: np.ndarray) -> Row:
    """Bytes of a layer: rows, bfloat16 vectors and entries of ``"index"`` or ``"latent"`` keys, and whether the cache holds
    what all layers write."""
    arrays, width = (index_arrays(form, 128), 128) if part == "index" else (key_arrays(form, 512, 64), 576)
    kept, entry = int((rows >= 0).sum()), sum(array.token_bytes for array in arrays)
    return {"bytes": rows.nbytes + kept * (2 * width + entry)} | rates.in_cache(LAYERS * kept * entry)


def all_layers(one: Callable, state: Any) -> Any:
    """One call for each layer in turn."""
    for layer in range(LAYERS):
        state = one(state, layer)
    return state


def measure_append(name: str, tokens: int, with_xla: bool) -> Row:
    """All layers of a donated pool, unrolled; times are those of one layer."""
    k, latent, k_rope, rows = vectors(tokens)
    where = jnp.asarray(rows)

    def append(state, layer):
        if name == "index":
            return append_triton.append_index_k(k, where, *state, page_scale=LAYERS, layer_offset=layer)
        if name == "latent":
            args = (latent, k_rope, where, *state)
            return (append_triton.append_latent(*args, page_scale=LAYERS, layer_offset=layer),)
        places = dict(index_scale=LAYERS, index_offset=layer, key_scale=LAYERS, key_offset=layer)
        return append_triton.append_both(k, latent, k_rope, where, *state, **places)

    def reference(state, layer):
        names = {"index": ("index_key", "index_scale"), "latent": ("key",)}
        names = names.get(name, names["index"] + names["latent"])
        cache = xla.cache_of(layout, **dict(zip(names, state, strict=True)))
        if name != "latent":
            cache = append_index_k(cache, layer, k, where)
        if name != "index":
            cache = append_latent(cache, layer, latent, k_rope, where)
        return tuple(cache.pages(name) for name in names)

    def empty():
        pages, state = SLOTS * LAYERS, ()
        if name != "latent":
            state = (jnp.full((pages, PAGE_SIZE, 128), 0x55, jnp.uint8), jnp.full((pages, PAGE_SIZE), -1.0))
        if name != "index":
            state += (jnp.full((pages, PAGE_SIZE, 576), 3, jnp.bfloat16),)
        return state

    layout = xla.layout_of(LAYERS, PAGE_SIZE)
    state = empty()
    step = jax.jit(functools.partial(all_layers, append), donate_argnums=0).lower(state).compile()
    state = step(state)
    row: Row = {"check": check_append(name, state, k, latent, k_rope, rows)}
    parts = [
        append_bytes(part, form, rows)
        for part, form in (("index", "fp8"), ("latent", "bf16"))
        if name in (part, "both")
    ]
    row |= parts[-1] | {"bytes": sum(part["bytes"] for part in parts) - (len(parts) - 1) * rows.nbytes}
    times = times_in_place(step, state)
    del state  # donated
    row |= {"us": xla.total(times) / LAYERS, "queued": times["queued"] / LAYERS, "kernels": kernels_of(times)}
    if with_xla:
        whole = functools.partial(all_layers, reference)
        row |= reference_in_place(f"append {name} n={tokens}", whole, empty())
    return row


FORMS = [("index", form) for form in INDEX_FORMS if form != "fp8"]
FORMS += [("latent", form) for form in KEY_FORMS if form != "bf16"]


def run_forms(report: Callable[[Row], None], only: str, late: Callable[[], bool], with_xla: bool) -> None:
    for tokens in (64, 8192):
        for part, form in FORMS:
            if only in f"append {part} {form}" and not late():
                row = guarded(measure_form, part, form, tokens, with_xla)
                report({"op": "append", "shape": f"n={tokens}", "variant": f"{part} {form}"} | row)


def measure_form(part: str, form: str, tokens: int, with_xla: bool) -> Row:
    """The same with the kernel that the op chooses, on a whole cache, which has to equal the reference's."""
    k, latent, k_rope, rows = vectors(tokens)
    where, scale = jnp.asarray(rows), 0.37 if part == "latent" and form in ("fp8", "nvfp4") else None
    forms: Any = {"index_form" if part == "index" else "key_form": form}
    layout = CacheLayout.create(preset("deepseek-v3.2"), layers=range(LAYERS), page_size=PAGE_SIZE, **forms)

    def kernel(cache, layer):
        if part == "index":
            return gpu.append_index_k(cache)[0].run(cache, layer, k, where)
        return gpu.append_latent(cache)[0].run(cache, layer, latent, k_rope, where, scale)

    def reference(cache, layer):
        if part == "index":
            return append_index_k(cache, layer, k, where)
        return append_latent(cache, layer, latent, k_rope, where, scale)

    steps, held = [], []
    for one in (kernel, reference):
        step = jax.jit(functools.partial(all_layers, one), donate_argnums=0)
        steps.append(step.lower(Cache.abstract(layout, SLOTS)).compile())
        held.append(steps[-1](Cache.create(layout, SLOTS)))
    wrong = [name for name, pool in held[0].pools().items() if (pool != held[1].pools()[name]).any()]
    times = times_in_place(steps[0], held[0])
    row: Row = {"check": f"WRONG {', '.join(wrong)}" if wrong else "ok"} | append_bytes(part, form, rows)
    row |= {"us": xla.total(times) / LAYERS, "queued": times["queued"] / LAYERS, "kernels": kernels_of(times)}
    return row | ({"xla": xla.total(times_in_place(steps[1], held[1])) / LAYERS} if with_xla else {})


def reference_in_place(title: str, all_layers: Callable, state: tuple[jax.Array, ...]) -> Row:
    """As `xla.timed` for one layer of a program that is donated its state."""
    try:
        step = jax.jit(all_layers, donate_argnums=0).lower(state).compile()
        if reason := xla.too_large(step):
            return xla.left_out(title, reason)
        return {"xla": xla.total(times_in_place(step, state)) / LAYERS}
    except Exception as error:
        return xla.left_out(title, f"{type(error).__name__}: {str(error)[:200]}")


def times_in_place(step: Callable, state: Any) -> dict[str, float]:
    """Device times of a program that gets a donated state and returns it."""
    held = [state]

    def call():
        held[0] = step(held[0])
        return held[0]

    return device_times(call, [()] * 4)


def check_append(name: str, state, k, latent, k_rope, rows: np.ndarray) -> str:
    """Whole pools against a NumPy model of them."""
    state, kept, problems = [np.asarray(x) for x in state], rows >= 0, []
    expected = []
    if name != "latent":
        codes, scales = quant.quantize_fp8(k)
        expected += [(state[0], codes, 0x55), (state[1], scales, -1)]
    if name != "index":
        expected += [(state[-1], jnp.concatenate([latent, k_rope], axis=1), 3)]
    for pool, values, fill in expected:
        want = np.full(pool.shape, fill, pool.dtype)
        for layer in range(LAYERS):
            want[rows[kept] // PAGE_SIZE * LAYERS + layer, rows[kept] % PAGE_SIZE] = np.asarray(values)[kept]
        if not (want.view(np.uint8) == pool.view(np.uint8)).all():
            problems.append(f"WRONG {pool.shape}: {int((want != pool).sum())} entries")
    return "; ".join(problems) or "ok"


def run_gather(report: Callable[[Row], None], only: str, late: Callable[[], bool], with_xla: bool) -> None:
    tokens, slots = 131072, 4096
    rng, sets = np.random.default_rng(1), []
    for _ in range(8):
        slot = rng.permutation(slots)[: tokens // PAGE_SIZE]
        rows = (slot[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1).astype(np.int32)
        rows[-5:] = -1
        sets.append(jnp.asarray(rows))
    for form in ("fp8", *(form for form in INDEX_FORMS if form != "fp8")):
        config = gather_triton.default_config(form, rows=tokens)
        name = f"block {config.block}, {config.warps} warps" + (f", {form}" if form != "fp8" else "")
        if only in f"gather {name}" and not late():
            keys, scales = stored(form, slots * 8)
            row = guarded(measure_gather, sets, keys, scales)
            if with_xla:
                call = functools.partial(gather_reference, form)
                row |= xla.timed(f"gather {form}", call, [(rows, keys, scales) for rows in sets])
            report({"op": "gather", "shape": f"{tokens}", "variant": name} | row)


def stored(form: str, pages: int) -> tuple[jax.Array, jax.Array | None]:
    """Random index keys of a form, and scales where it has any."""
    key, shape = jax.random.key(0), (pages, PAGE_SIZE)
    if form == "f32":
        return jax.random.normal(key, (*shape, 128), jnp.float32), None
    codes = jax.random.bits(key, (*shape, 64 if form == "fp4" else 128), jnp.uint8)
    if form == "fp4":
        return codes, jax.random.randint(jax.random.key(1), shape, 0, 1 << 30, jnp.int32)
    return codes, jax.random.normal(jax.random.key(1), shape, jnp.float32)


def gather_reference(form: str, rows: jax.Array, keys: jax.Array, scales: jax.Array | None):
    """Layer 3 of 8, as `measure_gather` reads it."""
    pages = {"index_key": keys} | ({} if scales is None else {"index_scale": scales})
    return gather_index_k(xla.cache_of(xla.layout_of(8, PAGE_SIZE, form), **pages), 3, rows)


def measure_gather(sets: list[jax.Array], keys, scales) -> Row:
    layout = dict(page_scale=8, layer_offset=3)
    call = jax.jit(lambda rows, keys, scales: gather_triton.gather_index_k(rows, keys, scales, **layout))
    data, scale = call(sets[0], keys, scales)
    data, scale = np.asarray(data), None if scale is None else np.asarray(scale)
    rows = np.asarray(sets[0])[:-5]
    page = rows // PAGE_SIZE * 8 + 3
    right = (data[:-5] == np.asarray(keys)[page, rows % PAGE_SIZE]).all() and not data[-5:].any()
    if scale is not None:
        wanted = np.asarray(scales)[page, rows % PAGE_SIZE]
        right = right and (scale[:-5] == wanted).all() and not scale[-5:].any()
    times = device_times(call, [(rows, keys, scales) for rows in sets])
    token = data[0].nbytes + (0 if scale is None else scale.itemsize)
    row: Row = {"check": "ok" if right else "WRONG", "bytes": sets[0].shape[0] * token * 2}
    return row | {"us": xla.total(times), "queued": times["queued"]}


def line(row: Row) -> str:
    """One line of the table, and a second one where a call launches several kernels."""
    name = f"{row['op']:6} {row['shape']:19} {row['variant']:22}"
    if "us" not in row:
        return f"{name} {row['check']}"
    target = f" target {row['target']}" if row.get("target") else ""
    others = "".join(f" {kind} {row[kind]:.1f}" for kind in ("zeros", "coarse", "heavy") if kind in row)
    found = f"{name} {row['us']:8.2f} us queued {row['queued']:.0f}{target}{rates.text(row)}"
    found += f"{xla.text(row['us'], row)}{others} {row['check']}"
    parts = [f"{kernel[:14]} {us:.2f}" for kernel, us in row.get("kernels", {}).items()]
    return found + (f"\n{'':7}of one launch: {', '.join(parts)[:120]}" if len(parts) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=240, help="start nothing new after this time")
    parser.add_argument(
        "--only", default="", help="run only what contains this, such as 'topk 4 x' or 'append'"
    )
    parser.add_argument("--every", action="store_true", help="also time other distributions of scores")
    parser.add_argument("--xla", action="store_true", help="time the reference as well (slow)")
    options = parser.parse_args()
    require_card("topk_append_check")
    begin, results = time.perf_counter(), []
    late = lambda: time.perf_counter() - begin > options.seconds
    print(jax.devices()[0].device_kind, "jax", jax.__version__, flush=True)
    ceilings = rates.measure()  # before anything compiles

    def report(row: Row) -> None:
        if "us" in row:
            row |= ceilings.rates(row["us"], row["bytes"])
        results.append(row)
        print(line(row), flush=True)

    with ThreadPoolExecutor(8) as pool:
        compiled = compile_topk(pool, options.only)
        run_append(report, options.only, late, options.xla)
        if options.only in "gather" or options.only.startswith("gather"):
            run_gather(report, options.only, late, options.xla)
        run_topk(report, compiled, late, options.every, options.xla)
        run_forms(report, options.only, late, options.xla)
    if not results:
        raise SystemExit(
            f"--only {options.only!r} chose nothing, or --seconds {options.seconds} was too little"
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{time.perf_counter() - begin:.0f} s")
    verdicts.end(f"{row['op']} {row['shape']} {row['variant']}" for row in results if row["check"] != "ok")


if __name__ == "__main__":
    main()
