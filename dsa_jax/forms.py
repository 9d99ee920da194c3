"""Storage forms: which typed arrays hold a cached token, and how many bytes each takes.

This module alone knows the row widths. The layout, the allocator of arrays, the writers, the readers and the
byte accounting all ask it, so that two places cannot disagree about the width of a row.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

from dsa_jax.arguments import described, is_whole

QUANT_BLOCK_SIZE = 128  # indexer key elements that share one scale
FP4_GROUP = 16  # NVFP4 latent elements that share one e4m3 scale
FP8_DS_MLA_PAGE_SIZE = 64  # the only page size of the 656-byte token
FP8_TILE = 128  # latent elements of the 656-byte token that share one float32 scale

KEY_FORMS = ("bf16", "f32", "fp8", "nvfp4", "fp8_ds_mla")
INDEX_FORMS = ("fp8", "f32", "fp4")
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

_ITEM_BYTES = {"uint8": 1, "bfloat16": 2, "float32": 4, "int32": 4}


class Role(enum.StrEnum):
    """What a buffer of a layer holds. DSA uses KEY, KEY_BLOCK_SCALE and INDEX_KEY; the others exist for
    planning.
    """

    KEY = "key"
    VALUE = "value"
    KEY_BLOCK_SCALE = "key_block_scale"
    VALUE_BLOCK_SCALE = "value_block_scale"
    INDEX_KEY = "index_key"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenArray:
    """One typed array of a storage form, seen for one token.

    Attributes:
        name: leaf name in the cache: "key", "key_scale", "key_rope", "index_key" or "index_scale".
        role: buffer of the packed pool that this array is a part of.
        dtype: NumPy name of the stored dtype; quantised codes are "uint8".
        shape: trailing shape of one token, `()` for a scalar.
        interleaved: in the packed page, parts of one token lie side by side (the 656-byte token) instead of
            all tokens of one part first.
    """

    name: str
    role: Role
    dtype: str
    shape: tuple[int, ...]
    interleaved: bool = False

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in this array."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def key_arrays(form: str, latent_dim: int, rope_dim: int) -> tuple[TokenArray, ...]:
    """Arrays that hold the MLA latent and its rotary part of one token.

    Args:
        form: one of `KEY_FORMS`.
        latent_dim: elements of the latent (kv_lora_rank), 512 in the released models.
        rope_dim: elements of the rotary part, 64 in the released models.

    Returns:
        The arrays in the order in which they follow each other in a packed token.

    Raises:
        ValueError: the form is unknown or does not take these dimensions.
    """
    width = latent_dim + rope_dim
    key = Role.KEY
    if form == "bf16":
        return (TokenArray(name="key", role=key, dtype="bfloat16", shape=(width,)),)
    if form == "f32":
        return (TokenArray(name="key", role=key, dtype="float32", shape=(width,)),)
    if form == "fp8":
        return (TokenArray(name="key", role=key, dtype="uint8", shape=(width,)),)
    if form == "nvfp4":
        if width % FP4_GROUP:
            raise ValueError(
                f"key_arrays: key_form='nvfp4' groups {FP4_GROUP} elements under one scale, but the key has "
                f"{latent_dim} + "
                f"{rope_dim} = {width} elements; use a width that divides by {FP4_GROUP}, or key_form='bf16'"
            )
        return (
            TokenArray(name="key", role=key, dtype="uint8", shape=(width // 2,)),
            TokenArray(
                name="key_scale", role=Role.KEY_BLOCK_SCALE, dtype="uint8", shape=(width // FP4_GROUP,)
            ),
        )
    if form == "fp8_ds_mla":
        if (latent_dim, rope_dim) != (512, 64):
            raise ValueError(
                "key_arrays: key_form='fp8_ds_mla' is the 656-byte token of a latent of 512 and a rotary "
                "part of 64, got "
                f"{latent_dim} and {rope_dim}; use key_form='fp8' or 'bf16' for this model"
            )
        return (
            TokenArray(name="key", role=key, dtype="uint8", shape=(latent_dim,), interleaved=True),
            TokenArray(
                name="key_scale", role=key, dtype="float32", shape=(latent_dim // FP8_TILE,), interleaved=True
            ),
            TokenArray(name="key_rope", role=key, dtype="bfloat16", shape=(rope_dim,), interleaved=True),
        )
    raise ValueError(
        f"key_arrays: cannot support key_form={form!r} as KV cache; choose one of {', '.join(KEY_FORMS)}"
    )


def index_arrays(form: str, head_dim: int) -> tuple[TokenArray, ...]:
    """Arrays that hold the indexer key of one token.

    Args:
        form: one of `INDEX_FORMS`.
        head_dim: elements of an indexer key; the quantised forms take 128 only, because one scale covers 128
            elements.

    Returns:
        The arrays in the order in which they follow each other in a packed page.

    Raises:
        ValueError: the form is unknown or does not take this head dimension.
    """
    index = Role.INDEX_KEY
    if form in ("fp8", "fp4") and head_dim != QUANT_BLOCK_SIZE:
        raise ValueError(
            f"index_arrays: index_form={form!r} keeps one 4-byte scale for {QUANT_BLOCK_SIZE} elements and "
            "takes "
            f"index_head_dim={QUANT_BLOCK_SIZE} only, got {head_dim}; use index_form='f32' for this model"
        )
    if form == "fp8":
        return (
            TokenArray(name="index_key", role=index, dtype="uint8", shape=(head_dim,)),
            TokenArray(name="index_scale", role=index, dtype="float32", shape=()),
        )
    if form == "fp4":
        return (
            TokenArray(name="index_key", role=index, dtype="uint8", shape=(head_dim // 2,)),
            TokenArray(name="index_scale", role=index, dtype="int32", shape=()),
        )
    if form == "f32":
        return (TokenArray(name="index_key", role=index, dtype="float32", shape=(head_dim,)),)
    raise ValueError(
        f"index_arrays: cannot support index_form={form!r}; choose one of {', '.join(INDEX_FORMS)}"
    )


def role_bytes(arrays: tuple[TokenArray, ...]) -> dict[Role, int]:
    """Bytes per token of each role that occurs in `arrays`, in the order in which the roles first occur."""
    total: dict[Role, int] = {}
    for array in arrays:
        total[array.role] = total.get(array.role, 0) + array.token_bytes
    return total


def check_page_size(page_size: Any, key_form: str = "bf16") -> None:
    """Refuses page sizes that no implementation takes.

    Raises:
        ValueError: `page_size` is no power of two from 1 to 256, or the form is bound to pages of 64 tokens.
    """
    if not is_whole(page_size) or page_size not in PAGE_SIZES:
        raise ValueError(
            f"page_size={described(page_size)}: a page holds a power of two from 1 to 256 tokens; use 64, which every "
            "GPU kernel takes"
        )
    if key_form == "fp8_ds_mla" and page_size != FP8_DS_MLA_PAGE_SIZE:
        raise ValueError(
            f"page_size={page_size} with key_form='fp8_ds_mla': the 656-byte token is defined for pages of "
            "64 tokens only; "
            "use page_size=64 or another key_form"
        )
