"""A decode layer and a decode step as a whole: ``python -m benchmarks.layer_check --json FILE``.

First the attention part of a layer, input norm to o_proj with its residual connection, at the widths of DeepSeek-V3.2:
64 requests of 32,768 tokens, FP8 index keys, bfloat16 latents, random weights. It is compared with the XLA reference and
with the sum of its own kernels' times; a program of two layers shows what a further layer costs, because what all layers
share (the plan of the scores) is computed once in a program. Metadata is derived outside, as a step derives it once.

Then whole steps, of some such layers with dense feed-forward halves and of the shipped model: queued and awaited, with
command buffers as JAX sets them (custom calls among them), without any, and with as many as XLA makes of the program. A
profile counts the launches, and those that came from a command buffer.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from benchmarks.paged_logits import difference
from benchmarks.timing import Launch, launches, require_match
from dsa_jax.cache import Cache
from dsa_jax.layout import CacheLayout
from dsa_jax.metadata import Bucket, StepMetadata
from dsa_jax.models import checkpoint, presets
from dsa_jax.models.config import ModelConfig
from dsa_jax.models.decoder import Decoder
from dsa_jax.models.mla import MLA
from dsa_jax.models.norm import RMSNorm
from dsa_jax.models.rope import rotation
from dsa_jax.models.step import _layer, make_step
from dsa_jax.models.weights import take_apart
from dsa_jax.ops.dispatch import Choice
from dsa_jax.presets import PRESETS

FASTER, OVER_KERNELS = 4.0, 1.10
"""Wanted: so many times as fast as the reference, and at most so many times the sum of the kernels' times."""
LEAST_SHARED, BOUND = 0.98, 1e-4
"""Least share of selected rows common to kernels and reference, and calc_diff of outputs beyond what other rows explain."""
COMMAND_BUFFERS: dict[str, dict[str, Any]] = {
    "default": {},
    "none": {"xla_gpu_enable_command_buffer": ""},
    "most": {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE,"
        "DYNAMIC_SLICE_FUSION",
        "xla_gpu_graph_min_graph_size": 1,
    },
}
"""Compiler options by name."""
# Otherwise a profile runs the commands of a buffer one by one, and shows another program than the one that is timed.
PROFILED = {"xla_enable_command_buffers_during_profiling": True}
CALLS = 20
"""Calls in a profile."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """What is run: fields of a model configuration, the batch, and the layers of the whole step."""

    model: dict[str, Any]
    requests: int
    context: int
    layers: int
    dtype: Any

    def config(self, layers: int) -> ModelConfig:
        """The model with so many layers, all of them dense and full, and no prediction layer."""
        fields = self.model | {"num_hidden_layers": layers, "num_nextn_predict_layers": 0}
        return ModelConfig.from_hf(fields | {"first_k_dense_replace": layers})


WIDE = {
    name: value
    for name, value in presets.PRESETS["small"].items()
    if name not in ("index_hadamard", "rope_parameters")
}
WIDE |= PRESETS["deepseek-v3.2"] | {"hidden_size": 7168, "intermediate_size": 18432}
"""DeepSeek-V3.2's widths; its vocabulary would take more time than the layers, so that of the small model stays."""


class Attention(nnx.Module):
    """The decoder layers of a model without their feed-forward halves.

    Attributes:
        parts: one for each layer, see `AttentionPart`.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Draw random weights."""
        self.parts = nnx.List([AttentionPart(config, i, rngs=rngs) for i in range(config.dsa.num_layers)])


class AttentionPart(nnx.Module):
    """What the paged step asks of a decoder layer; the feed-forward half changes nothing."""

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs):
        """Draw random weights."""
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MLA(config, layer, rngs=rngs)

    def feed_forward(self, x: Array) -> tuple[Array, None]:
        """The residual stream as it came."""
        return x, None


def with_weights(make: Callable[..., Any], dtype: Any) -> Any:
    """A module with weights N(0, 1 / inputs), unit norms and no biases, drawn on the device, without a float32 copy."""
    module = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    for number, (path, variable) in enumerate(nnx.to_flat_state(nnx.state(module))):
        if len(variable.shape) > 1:
            value = _normal(jax.random.key(number), variable.shape, dtype, variable.shape[-1] ** -0.5)
        else:
            value = (jnp.zeros if "bias" in str(path[-1]) else jnp.ones)(variable.shape, dtype)
        variable.set_value(value)
    return module


@partial(jax.jit, static_argnums=(1, 2))
def _normal(key: Array, shape: tuple[int, ...], dtype: Any, deviation: float) -> Array:
    def draw(key):
        return jax.random.normal(key, (shape[0] // pieces, *shape[1:]), dtype) * jnp.asarray(deviation, dtype)

    pieces = math.gcd(shape[0], 64)  # all at once would need counters several times the size of a pool
    return jax.lax.map(draw, jax.random.split(key, pieces)).reshape(shape)


def batch(layout: CacheLayout, requests: int, context: int) -> tuple[Cache, StepMetadata]:
    """Requests in the middle of decoding: random latents and index keys in pages in random order, one new token each."""
    width = -(-context // layout.page_size)
    slots = requests * width
    shapes = Cache.abstract(layout, slots)
    assert shapes.index_key is not None and shapes.index_scale is not None
    cache = replace(
        Cache.create(layout, slots),
        key=_normal(jax.random.key(1), shapes.key.shape, shapes.key.dtype, 1.0),
        index_key=_codes(jax.random.key(2), shapes.index_key.shape),
        index_scale=jnp.full(shapes.index_scale.shape, 2.0**-7, jnp.float32),
    )
    table = np.random.default_rng(0).permutation(slots).reshape(requests, width)
    bucket = Bucket(decode_requests=requests, table_width=width)
    return cache, StepMetadata.create(layout, bucket, table, [context] * requests, [1] * requests)


@partial(jax.jit, static_argnums=1)
def _codes(key: Array, shape: tuple[int, ...]) -> Array:
    """Codes of index keys N(0, 1) with the scale 2^-7, which is about what normalised keys get."""
    values = jnp.clip(_normal(key, shape, jnp.bfloat16, 128.0), -448, 448)
    return jax.lax.bitcast_convert_type(values.astype(jnp.float8_e4m3fn), jnp.uint8)


class Runner:
    """Programs ``(params, cache, *arguments) -> (cache, *results)`` that hand one donated cache on."""

    def __init__(self, params: Any, cache: Cache, *arguments: Any):
        """Keep what every call gets; ``arguments`` must not change."""
        self.params, self.cache, self.arguments = params, cache, arguments

    def lower(self, function: Callable, params: Any = None) -> Any:
        """Trace a function for these arguments; threads may compile what comes back."""
        jitted = jax.jit(function, donate_argnums=1)
        return jitted.lower(self.params if params is None else params, self.cache, *self.arguments)

    def call(self, program: Callable, params: Any = None) -> Any:
        """The results without the cache."""
        given = self.params if params is None else params
        self.cache, *results = program(given, self.cache, *self.arguments)
        return results


def wall(call: Callable[[], Any], seconds: float = 0.25) -> Row:
    """Wall microseconds of a call: queued, when many wait in the device's queue, and awaited, when the host waits for each.

    Medians, over five rounds and over all calls.
    """
    for _ in range(3):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        one = time.perf_counter() - begin
    count = max(3, min(100, int(seconds / 5 / one)))
    queued, awaited = [], []
    for _ in range(5):
        begin = time.perf_counter()
        out = [call() for _ in range(count)]
        jax.block_until_ready(out)
        queued.append((time.perf_counter() - begin) / count * 1e6)
    for _ in range(count):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        awaited.append((time.perf_counter() - begin) * 1e6)
    return {"queued_us": statistics.median(queued), "awaited_us": statistics.median(awaited)}


def from_profile(call: Callable[[], Any], calls: int = CALLS) -> Row:
    """What a profile of queued calls shows.

    Returns:
        ``launches`` of a call, how many of them ``in_graphs``; medians of ``span_us``, from the first kernel's start to the
        last one's end, and of ``kernels_us``, the sum of all durations; ``kernels``, name and median microseconds in order
        of start. Empty without a working profiler.
    """
    try:
        found = launches([call] * calls)
    except RuntimeError as error:
        say(f"no profile: {error}")
        return {}
    if not found:
        return {}
    spans = [(max(x.start + 1e3 * x.us for x in one) - one[0].start) / 1e3 for one in found]
    return {
        "launches": len(found[0]),
        "in_graphs": sum(x.in_graph for x in found[-1]),
        "span_us": statistics.median(spans),
        "kernels_us": statistics.median(sum(x.us for x in one) for one in found),
        "kernels": kernel_table(found),
    }


def kernel_table(calls: list[list[Launch]]) -> list[tuple[str, float]]:
    """Name and median duration of every launch of a call; the n-th launch of a name is the n-th of all calls."""
    durations: dict[tuple[str, int], list[float]] = {}
    for one in calls:
        seen: dict[str, int] = {}
        for launch in one:
            seen[launch.name] = seen.get(launch.name, 0) + 1
            durations.setdefault((launch.name, seen[launch.name]), []).append(launch.us)
    return [(name, statistics.median(times)) for (name, _), times in durations.items()]


def layers_program(rebuild: Callable, topk: int, implementation: Choice) -> Callable:
    """``(params, cache, step, turn, x) -> (cache, x, rows)`` through all attention parts of a module taken apart."""

    def run(params, cache, step, turn, x):
        rows = None
        for local, part in enumerate(rebuild(params).parts):
            cache, x, rows = _layer(part, x, turn, cache, local, step, rows, topk, implementation)
        return cache, x, rows

    return run


def check_layer(sizes: Sizes, report: Row) -> None:
    """The attention part of one layer against the reference, and its launches; fills the report as it goes."""
    config = sizes.config(2)
    dsa = config.dsa
    layout = CacheLayout.create(
        dsa, key_form="f32" if sizes.dtype == jnp.float32 else "bf16", layers=range(2)
    )
    cache, meta = batch(layout, sizes.requests, sizes.context)
    step = jax.jit(StepMetadata.derive)(meta)
    turn = jax.jit(partial(rotation, dsa.rope, dsa.qk_rope_head_dim))(step.positions)
    # Small beside what the attention adds, so that rounding their sum hides no difference; the norm undoes the factor.
    x = _normal(jax.random.key(3), (sizes.requests, config.hidden_size), sizes.dtype, 0.01)
    parts = {}
    for count in (1, 2):
        module = with_weights(partial(Attention, sizes.config(count)), sizes.dtype)
        params, rebuild = take_apart(module, dsa)
        parts[count] = params, partial(layers_program, rebuild, dsa.index_topk)
    runner = Runner(parts[1][0], cache, step, turn, x)
    lowered = {
        "kernels": runner.lower(parts[1][1](None)),
        "xla": runner.lower(parts[1][1]("xla")),
        "two layers": runner.lower(parts[2][1](None), parts[2][0]),
    }
    options = {}
    if jax.default_backend() == "gpu":  # a profile of the first runs its commands one by one
        lowered["kernels in command buffers"] = lowered["kernels"]
        options["kernels in command buffers"] = PROFILED
    programs = compiled(lowered, options)
    own = {"two layers": parts[2][0]}
    calls = {name: partial(runner.call, program, own.get(name)) for name, program in programs.items()}

    report["agreement"] = agreement(calls["kernels"](), calls["xla"](), x)
    say("agreement", report["agreement"])
    times = {name: wall(calls[name]) for name in lowered if name in calls}
    report["wall"] = times
    for name, row in times.items():
        say(name, row)
    faster = times["xla"]["queued_us"] / times["kernels"]["queued_us"]
    report["faster"] = faster
    say(f"{faster:.2f} times as fast as xla (wanted {FASTER:.0f}): {verdict(faster >= FASTER)}")
    for name, call in calls.items():
        report[name] = row = from_profile(call, 5 if name == "xla" else CALLS)
        say(f"{name}, profile", row)
        if name == "kernels":
            for number, (kernel, us) in enumerate(row.get("kernels", ()), 1):
                print(f"{number:5} {us:9.2f} us  {kernel[:90]}", flush=True)
        if name.startswith("kernels") and row:
            over(row, times["kernels"]["queued_us"])
    if report["kernels"] and report.get("two layers"):
        further = {
            key: report["two layers"][key] - report["kernels"][key]
            for key in ("launches", "span_us", "kernels_us")
        }
        report["a further layer"] = further
        say("a further layer of the same program", further)
        ratio = further["span_us"] / further["kernels_us"]
        say(
            f"its span over its kernels: {ratio:.3f} (wanted {OVER_KERNELS}): {verdict(ratio <= OVER_KERNELS)}"
        )


def agreement(kernels: Sequence[Array], reference: Sequence[Array], x: Array) -> Row:
    """Compare ``(x, rows)`` of two programs.

    Their dense products round differently, which moves a few rows across the edge of the selection; every row that differs
    brings its share of the attention with it.
    """
    (got, rows), (want, wanted) = kernels, reference
    pairs = zip(np.asarray(rows).tolist(), np.asarray(wanted).tolist(), strict=True)
    shared = [len(set(a) & set(b)) / max(len(set(b)), 1) for a, b in pairs]
    diff, _ = difference(*(y.astype(jnp.float32) - x.astype(jnp.float32) for y in (got, want)))
    mean = statistics.mean(shared)
    found = {"shared_rows": mean, "fewest_shared_rows": min(shared), "calc_diff": float(diff)}
    good = mean >= LEAST_SHARED and found["calc_diff"] <= BOUND + 4 * (1 - mean)
    return found | {"ok": verdict(good)}


def over(row: Row, queued: float) -> None:
    """Compare a layer's span in the profile, and its time in a queue without one, with the sum of its kernels' times."""
    for name, time_us in (("span", row["span_us"]), ("queued", queued)):
        ratio = row[f"{name} over kernels"] = time_us / row["kernels_us"]
        good = verdict(ratio <= OVER_KERNELS)
        say(f"{name} over the sum of its kernels: {ratio:.3f} (wanted {OVER_KERNELS}): {good}")


def compiled(lowered: dict[str, Any], options: dict[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    """Compile several programs in threads, each with its compiler options; one that cannot be compiled is left out."""
    begin = time.perf_counter()
    given = options or {}
    with ThreadPoolExecutor(len(lowered)) as pool:
        work = {
            name: pool.submit(low.compile, compiler_options=given.get(name)) for name, low in lowered.items()
        }
    for name, future in work.items():
        if error := future.exception():
            say(f"{name}: not compiled: {type(error).__name__}: {str(error)[:500]}")
    say(f"compiled {', '.join(work)} in {time.perf_counter() - begin:.1f} s")
    return {name: future.result() for name, future in work.items() if not future.exception()}


def check_step(model: Decoder, sizes: Sizes, report: Row) -> None:
    """Whole decode steps of a model, embedding to the best token; fills the report as it goes."""
    layout = CacheLayout.create(model.config.dsa, key_form="f32" if sizes.dtype == jnp.float32 else "bf16")
    cache, meta = batch(layout, sizes.requests, sizes.context)
    step, params = make_step(model)

    def best(params, cache, meta, tokens):
        cache, logits = step(params, cache, meta, tokens)
        return cache, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    runner = Runner(params, cache, meta, jnp.arange(sizes.requests, dtype=jnp.int32))
    lowered = runner.lower(best)
    options: dict[str, dict[str, Any]] = {}
    if jax.default_backend() == "gpu":
        options = {name: PROFILED | chosen for name, chosen in COMMAND_BUFFERS.items()}
    programs = compiled(dict.fromkeys(COMMAND_BUFFERS, lowered), options)
    tokens = {name: np.asarray(runner.call(program)[0]) for name, program in programs.items()}
    for name, program in programs.items():
        call = partial(runner.call, program)
        report[name] = row = wall(call)
        row["same tokens"] = float(np.mean(tokens[name] == next(iter(tokens.values()))))
        say(f"command buffers {name}", row)
    for name, program in programs.items():
        row = from_profile(partial(runner.call, program), CALLS // 2)
        row.pop("kernels", None)
        report[name] |= row
        say(f"command buffers {name}, profile", row)


def say(name: str, row: Row | None = None) -> None:
    """Print at once, numbers with few digits; a cut run still shows what it found."""
    if row is None:
        print(name, flush=True)
        return
    short = {k: f"{v:.4g}" if isinstance(v, float) and v < 1 else v for k, v in row.items() if k != "kernels"}
    text = ", ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in short.items())
    print(f"{name}: {text}", flush=True)


def verdict(good: bool) -> str:
    """For the end of a line."""
    return "ok" if good else "MISSED"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and report; a part that fails or is wrong does not cost the others their turn, but the exit code is then 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=70, help="start no part after this time")
    parser.add_argument("--only", default="", help="only parts whose name contains this")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=3, help="of the wide step")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the programs anywhere")
    options = parser.parse_args(arguments)
    begin = time.perf_counter()
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    widths = presets.PRESETS["tiny"] if options.tiny else WIDE
    sizes = Sizes(widths, options.requests, options.context, options.layers, dtype)

    def wide(report: Row) -> None:
        model = with_weights(partial(Decoder, sizes.config(sizes.layers)), dtype)
        check_step(model, sizes, report)

    def shipped(report: Row) -> None:
        model = checkpoint.load_pretrained("docs-8m", dtype=None if dtype == jnp.bfloat16 else dtype)
        context = min(options.context, model.config.dsa.max_position_embeddings)
        check_step(model, replace(sizes, context=context), report)

    parts = {
        "attention of a layer": partial(check_layer, sizes),
        f"step of {sizes.layers} layers": wide,
        "step of docs-8m": shipped,
    }
    require_match(options.only, parts)
    found: Row = {"device": str(jax.devices()[0].device_kind), "jax": jax.__version__}
    found |= {"requests": options.requests, "context": options.context}
    failed = False
    for name, part in parts.items():
        if options.only not in name:
            continue
        if time.perf_counter() - begin > options.seconds:
            say(f"{name}: out of time")
            continue
        say(f"--- {name}")
        found[name] = report = {}
        try:
            part(report)
        except Exception as error:
            failed = True
            report["error"] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        failed |= report.get("agreement", {}).get("ok") == verdict(False)
        say(f"{time.perf_counter() - begin:.0f} s")
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
