"""What the plot shows of each check's JSON file: times beside those of the peer and the reference, and the targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from benchmarks.verdicts import scores_agree

Row = dict[str, Any]

OF_PEER = 0.98
"""Wanted of decode scores with one or two new tokens: at most so many times the peer's time."""
OF_OWN = {"h32 n4": 1.2, "h32 n6": 1.5, "h64 n4": 1.9, "h64 n6": 2.8}
"""Wanted of 64 x 32,768 with more new tokens: at most so many times the own time with one."""
OF_FP8 = {"64x32768 h32 n1": 0.65, "64x32768 h64 n1": 0.8}
"""Wanted of FP4 keys: at most so many times the time of FP8 keys."""
SPARSE_MLA = {"decode 64x128": 69.9, "decode 64x128 656 B": 95.5}
"""Wanted microseconds: FlashMLA's."""
FASTER_THAN_XLA, LEAST_OF_COPY, WIDER = 4, 0.75, 1.3
"""Wanted of a layer, of the gather, and of short rows in a wide array against a narrow one."""


class Bar(NamedTuple):
    """One kernel on one shape: microseconds, of the peer, the reference and the target where there are such."""

    label: str
    us: float
    peer: float | None = None
    xla: float | None = None
    target: float | None = None
    wrong: bool = False


def best(rows: Iterable[Row], key: Callable[[Row], str], us: Callable[[Row], Any]) -> dict[str, Row]:
    """``{key: row}`` of the fastest right row of each kind that was timed at all; a wrong one only if no row is right."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if us(row):
            found.setdefault(key(row), []).append(row)
    return {name: min(same, key=lambda row: (misses(row), us(row))) for name, same in found.items()}


def at_rate(us: float, reached: float, wanted: float) -> float:
    """The time at the wanted rate."""
    return us * reached / wanted


def misses(row: Row) -> bool:
    """Whether scores differ from the float32 reference; rows without a comparison pass."""
    return "diff" in row and not scores_agree(row)


def scores(data: Row) -> list[Bar]:
    """`kernel_check`."""
    rows = best(data["timed"], lambda row: row["problem"], lambda row: row.get("kernel"))
    bars = []
    for name, row in rows.items():
        peer, target = data["peer"].get(name, {}).get("kernel"), None
        shape, _, rest = name.partition(" ")
        one = rows.get(f"{shape} {rest[:3]} n1")  # the same heads
        if name == "prefill 8192x8192 h64":
            target = at_rate(row["kernel"], row["tflop_s"], 1000)
        elif shape == "64x32768" and rest in OF_OWN:
            target = OF_OWN[rest] * one["kernel"] if one else None
        elif peer:
            target = OF_PEER * peer
        bars.append(Bar(name, row["kernel"], peer, row.get("xla"), target, misses(row)))
    return bars


def fp4_scores(data: Row) -> list[Bar]:
    """`fp4_check`: the bars of FP8 keys are what its targets go by."""
    name = lambda row: f"{row['problem']}, {row['kernel']}"
    rows = best(data["timed"], name, lambda row: row.get("us"))
    bars = []
    for label, row in rows.items():
        fp8, share = rows.get(f"{row['problem']}, fp8"), OF_FP8.get(row["problem"])
        target = share * fp8["us"] if fp8 and share and row is not fp8 else None
        bars.append(Bar(label, row["us"], None, row.get("xla"), target, misses(row)))
    return bars


def topk_and_append(data: list[Row]) -> list[Bar]:
    """`topk_append_check`."""
    narrow = {row["variant"]: row["us"] for row in data if row["shape"] == "64 x 8192" and "us" in row}
    bars = []
    for row in (row for row in data if "us" in row):
        target = row.get("target")
        if row["op"] == "gather":
            target = at_rate(row["us"], row["share"], LEAST_OF_COPY)
        elif row["shape"] == "64 x 8192 in 131072" and row["variant"] in narrow:
            target = WIDER * narrow[row["variant"]]
        label = f"{row['op']} {row['shape']}, {row['variant']}"
        bars.append(Bar(label, row["us"], None, row.get("xla"), target, row.get("check") != "ok"))
    return bars


def sparse_mla(data: list[Row]) -> list[Bar]:
    """`sparse_mla_check`: the reference is one of its variants."""
    timed = [row for row in data if "us" in row]
    xla = {row["shape"]: row["us"] for row in timed if row["variant"] == "xla"}
    bars = []
    for row in (row for row in timed if row["variant"] != "xla"):
        shape, target = row["shape"], SPARSE_MLA.get(row["shape"])
        if shape == "prefill 4096x128":
            target = at_rate(row["us"], row["tflop_s"], 500)
        wrong = row.get("wrong", 0) > 0
        bars.append(Bar(f"{shape}, {row['variant']}", row["us"], None, xla.get(shape), target, wrong))
    return bars


def layers(data: Row) -> list[Bar]:
    """`layer_check`: queued calls."""
    bars = []
    for part, report in data.items():
        if not isinstance(report, dict):
            continue
        wall = report.get("wall", {})
        xla = wall.get("xla", {}).get("queued_us")
        if "kernels" in wall:
            wrong = report.get("agreement", {}).get("ok") != "ok"
            bars.append(
                Bar(part, wall["kernels"]["queued_us"], None, xla, xla and xla / FASTER_THAN_XLA, wrong)
            )
            continue
        times = [
            (n, row["queued_us"]) for n, row in report.items() if isinstance(row, dict) and "queued_us" in row
        ]
        bars += [Bar(f"{part}, command buffers {name}", us) for name, us in times]
    return bars


def windows(data: Row) -> list[Bar]:
    """`windows_check`."""
    bars = []
    for row in data["rows"]:
        us, (peer, xla) = row.get("kernel", row["queued"]), (row.get(name, {}) for name in ("peer", "xla"))
        target = at_rate(us, row["tflop_s"], 1000) if row["problem"] == "prefill 8192x8192 h64" else None
        times = peer.get("kernel", peer.get("queued")), xla.get("total", xla.get("queued"))
        bars.append(Bar(row["problem"], us, *times, target, misses(row)))
    return bars


READERS: dict[str, tuple[str, Callable[[Any], list[Bar]]]] = {
    "kernel_check": ("Paged scores, FP8 keys", scores),
    "fp4_check": ("Paged scores, FP4 keys", fp4_scores),
    "topk_append_check": ("Top-k, append, gather", topk_and_append),
    "sparse_mla_check": ("Sparse MLA", sparse_mla),
    "layer_check": ("Layer and step", layers),
    "windows_check": ("Scores inside windows", windows),
}
