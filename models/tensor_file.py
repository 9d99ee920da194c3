"""The safetensors file format: eight bytes of header length, a JSON header, then the tensors' bytes.

Read here without the ``safetensors`` package, so that a damaged file is described instead of refused with an offset, and so
that every dtype of JAX can be read. Tensors are mapped, not copied: what is not used is not read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "U8": np.dtype(np.uint8),
}
"""Names of the format for the dtypes that are read and written, all little-endian."""

HEADER_LIMIT = 100 << 20
"""Longest header that the format allows, in bytes."""


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Map all tensors of a file.

    Args:
        path: a ``.safetensors`` file.

    Returns:
        Read-only arrays by name.

    Raises:
        ValueError: the file is missing, truncated, not of this format, or its header contradicts itself or the size of the
            file; all problems in one message.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > HEADER_LIMIT or 8 + length > size:
                raise ValueError(
                    f"{path}: {size} bytes, but the header alone should take {8 + length}; "
                    "the file is truncated or not a safetensors file. Fetch it again."
                )
            header = json.loads(file.read(length))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}). Check the path.") from error
    except RecursionError as error:
        raise ValueError(f"{path}: the header is not JSON (too many brackets). Fetch it again.") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path}: the header is not JSON ({error}); not a safetensors file. Fetch it again."
        ) from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: the header is not a JSON object; not a safetensors file. Fetch it again.")
    header.pop("__metadata__", None)
    problems, spans = [], []
    for name, entry in header.items():
        problem, span = _check_entry(name, entry)
        problems += problem
        spans += span
    end = 0
    for begin, stop, name in sorted(spans):
        if begin != end:
            problems.append(f"{name} starts at byte {begin}, wanted {end} (where the tensor before it ends)")
        end = stop
    held = size - 8 - length
    if not problems and end != held:
        what = "truncated" if held < end else "longer than its header says"
        problems.append(f"the tensors take {end} bytes, the file holds {held}: it is {what}")
    if problems:
        raise ValueError(f"{path}: " + "; ".join(problems) + ". Fetch the file again.")
    data = np.memmap(path, np.uint8, "r", offset=8 + length) if held else np.zeros(0, np.uint8)
    return {
        name: data[slice(*entry["data_offsets"])].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a file; it appears complete or not at all.

    Args:
        path: where; replaced if it exists.
        tensors: arrays by name, of the dtypes in ``DTYPES``; written in the order of their names.

    Raises:
        ValueError: for a dtype that the format does not know.
    """
    known = {dtype: name for name, dtype in DTYPES.items()}
    bad = [f"{name} is {tensor.dtype}" for name, tensor in tensors.items() if tensor.dtype not in known]
    if bad:
        raise ValueError(
            f"write_tensors: {'; '.join(bad)}; wanted one of {', '.join(DTYPES)}. Convert before writing."
        )
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        header[name] = {
            "dtype": known[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    replace_file(
        path,
        b"".join(
            [len(encoded).to_bytes(8, "little"), encoded]
            + [np.ascontiguousarray(tensors[name]).tobytes() for name in sorted(tensors)]
        ),
    )


def replace_file(path: Path, content: bytes) -> None:
    """Write ``content`` next to ``path`` and move it there, so that no reader sees half a file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _check_entry(name: str, entry: Any) -> tuple[list[str], list[tuple[int, int, str]]]:
    """Problems of one header entry, and its span of bytes if it has a credible one."""
    if not isinstance(entry, dict):
        return [f"{name}: the entry is not an object"], []
    dtype, shape, offsets = (
        entry.get("dtype"),
        _naturals(entry.get("shape")),
        _naturals(entry.get("data_offsets")),
    )
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return [f"{name}: dtype {dtype!r}, wanted one of {', '.join(DTYPES)}"], []
    if shape is None:
        return [f"{name}: shape {entry.get('shape')!r} is not a list of sizes"], []
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        return [f"{name}: data_offsets {entry.get('data_offsets')!r} are not [begin, end]"], []
    problems = []
    wanted = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != wanted:
        problems.append(f"{name}: {offsets[1] - offsets[0]} bytes for {dtype}{shape}, wanted {wanted}")
    return problems, [(offsets[0], offsets[1], name)]


def _naturals(value: Any) -> list[int] | None:
    """``value`` if it is a list of integers that are not negative."""
    whole = isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)
    return value if whole else None
