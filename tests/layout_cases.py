"""Small models and their layouts, shared by the layout, sizing and selection tests."""

from __future__ import annotations

import dataclasses
import math

from dsa_jax.config import DSAConfig, preset
from dsa_jax.layout import ArraySpec

ITEM_BYTES = {"uint8": 1, "bfloat16": 2, "float32": 4, "int32": 4}


def small_config(full: str = "FSFS", **changes) -> DSAConfig:
    """DeepSeek-V3.2 with a layer for each letter: F owns an indexer, S shares."""
    fields = {
        "num_layers": len(full),
        "num_mtp_layers": 0,
        "full_layers": tuple(letter == "F" for letter in full),
    }
    return dataclasses.replace(preset("deepseek-v3.2"), **fields | changes)


def narrow_config(full: str = "FSF", key_width: int = 128) -> DSAConfig:
    """A model whose KEY is narrower than the released ones: 64 rotary elements, the rest latent."""
    return small_config(full, kv_lora_rank=key_width - 64)


def array_bytes(spec: ArraySpec) -> int:
    return math.prod(spec.shape) * ITEM_BYTES[spec.dtype]
