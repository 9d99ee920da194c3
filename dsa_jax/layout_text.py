"""A layout in words: as a mapping of JSON's types, and as a table for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dsa_jax.coalesce import PoolSpec
from dsa_jax.typed_arrays import ArraySpec


def layout_dict(
    fields: Mapping[str, Any],
    layers: Sequence[int],
    pools: Sequence[PoolSpec],
    arrays: Sequence[ArraySpec],
    refused: str | None,
) -> dict[str, Any]:
    """Packed pools, typed arrays and the map between them.

    Args:
        fields: values that are copied in front; tuples become lists.
        layers: global layer ids by local number.
        pools: the packed pools.
        arrays: the typed arrays.
        refused: why there are no typed arrays, or None.
    """
    described = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    described["pools"] = [
        {
            "pool": pool.number,
            "group": pool.group,
            "slot_bytes": pool.slot_bytes,
            "buffers": [
                {
                    "layer": buffer.layer,
                    "global_layer": layers[buffer.layer],
                    "role": str(buffer.role),
                    "offset": buffer.offset,
                    "size": buffer.size,
                    "scale": buffer.index.scale,
                    "layer_offset": buffer.index.layer_offset,
                    "expansion": buffer.index.expansion,
                }
                for buffer in pool.buffers
            ],
        }
        for pool in pools
    ]
    described["arrays"] = [
        dataclasses.asdict(array) | {"shape": list(array.shape), "role": str(array.role)} for array in arrays
    ]
    if refused:
        described["arrays_refused"] = refused
    return described


def layout_table(described: Mapping[str, Any]) -> str:
    """The table of what `layout_dict` describes."""
    head = (
        f"manager {described['manager']}, page size {described['page_size']}, "
        f"key {described['key_form']}, index {described['index_form']}, "
        f"layers {ranges(described['layers'])} ({sum(described['full'])} of {len(described['layers'])} with "
        "an indexer)"
    )
    columns = ("pool", "role", "layers", "scale", "page bytes", "slot bytes", "bytes/token")
    rows = []
    for pool in described["pools"]:
        for role in dict.fromkeys(buffer["role"] for buffer in pool["buffers"]):
            members = [buffer for buffer in pool["buffers"] if buffer["role"] == role]
            rows.append(
                (
                    pool["pool"],
                    role,
                    ranges([buffer["global_layer"] for buffer in members]),
                    members[0]["scale"],
                    members[0]["size"],
                    pool["slot_bytes"],
                    described["bytes_per_token_by_role"][role],
                )
            )
    total = ("", "all", "", "", "", described["bytes_per_slot"], described["bytes_per_token"])
    lines = [head, "", *text_table(columns, [*rows, total])]
    if described["arrays"]:
        lines += [
            "",
            *text_table(
                ("array", "dtype", "shape for 1 slot", "bytes in the packed page"), _array_rows(described)
            ),
        ]
    else:
        lines += ["", f"no typed arrays: {described['arrays_refused']}"]
    return "\n".join(lines)


def _array_rows(described: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (
            array["name"],
            array["dtype"],
            "x".join(map(str, array["shape"])),
            f"pool {array['pool']}: {array['page_offset']} + token * {array['token_stride']}",
        )
        for array in described["arrays"]
    ]


def text_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Lines of a table with aligned columns: whole numbers to the right with separated thousands, words to
    the left.
    """
    cells = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    right = [any(isinstance(row[i], int) for row in rows) for i in range(len(columns))]
    widths = [max(len(row[i]) for row in [list(columns), *cells]) for i in range(len(columns))]

    def line(row: Sequence[str]) -> str:
        aligned = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        return "  ".join(aligned).rstrip()

    return [line(columns), "  ".join("-" * width for width in widths), *(line(row) for row in cells)]


def ranges(numbers: Sequence[int]) -> str:
    """Numbers as runs, `0-2, 6, 10`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
