"""How many bytes a token takes, how many tokens fit, and how much score memory a chunk needs. Pure
arithmetic.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from dsa_jax.arguments import described, expect, is_number, is_whole
from dsa_jax.config import DSAConfig
from dsa_jax.forms import index_arrays, key_arrays, role_bytes
from dsa_jax.layout import FIX_CONFIG, FIX_LAYOUT, CacheLayout, global_layers

SCORE_BUDGET = 512 << 20
"""Default bytes of indexer scores that are held at once."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

MOST_BYTES = 2**63 - 1
"""Bytes that any device can count."""


def whole_numbers(operation: str, **values: Any) -> list[int]:
    """Counts of bytes, tokens, slots and the like as Python ints: a NumPy integer would overflow in what is made of it.

    Raises:
        ValueError: naming every one that is no whole number.
    """
    problems = [f"{name}={described(value)}" for name, value in values.items() if not is_whole(value)]
    if problems:
        raise ValueError(f"{operation}: {', '.join(problems)} must be a whole number; pass a Python int")
    return [int(value) for value in values.values()]


def pages_per_seq(max_len: int, page_size: int, *, extra_tokens: int = 0) -> int:
    """Pages that one sequence needs, and so the width of its page table: `ceil((max_len + extra_tokens) /
    page_size)`.

    Args:
        max_len: longest sequence in tokens.
        page_size: tokens per page.
        extra_tokens: tokens beyond it that are written too, such as draft tokens.

    Raises:
        ValueError: a number is negative, or `page_size` is not positive.
    """
    max_len, page_size, extra_tokens = whole_numbers(
        "pages_per_seq", max_len=max_len, page_size=page_size, extra_tokens=extra_tokens
    )
    if max_len < 0 or extra_tokens < 0 or page_size < 1:
        raise ValueError(
            f"pages_per_seq: max_len={max_len} and extra_tokens={extra_tokens} must not be negative and "
            f"page_size={page_size} must be at least 1"
        )
    return -(-(max_len + extra_tokens) // page_size)


def rows_per_chunk(budget_bytes: int, keys: int, bytes_per_score: int = 4) -> int:
    """Query rows whose scores fit into a budget: `budget // (keys * bytes_per_score)`, at least 1.

    Args:
        budget_bytes: bytes for scores.
        keys: scores per row; count the longest context, not the chunk's own length.
        bytes_per_score: bytes of one score.

    Raises:
        ValueError: an argument is not positive.
    """
    budget_bytes, keys, bytes_per_score = whole_numbers(
        "rows_per_chunk", budget_bytes=budget_bytes, keys=keys, bytes_per_score=bytes_per_score
    )
    if budget_bytes < 1 or keys < 1 or bytes_per_score < 1:
        raise ValueError(
            f"rows_per_chunk: budget_bytes={budget_bytes}, keys={keys} and bytes_per_score={bytes_per_score} "
            "must be at "
            "least 1"
        )
    return max(budget_bytes // (keys * bytes_per_score), 1)


@dataclasses.dataclass(frozen=True)
class CacheCost:
    """Cache bytes as a line over tokens: `bytes_per_token * tokens + fixed_bytes`.

    Attributes:
        bytes_per_token: slope.
        fixed_bytes: intercept, for buffers that do not grow with the context.
    """

    bytes_per_token: int
    fixed_bytes: int = 0

    def __add__(self, other: CacheCost) -> CacheCost:
        """Cost of two caches that hold the same tokens, such as a target's and a draft's."""
        return CacheCost(self.bytes_per_token + other.bytes_per_token, self.fixed_bytes + other.fixed_bytes)

    def bytes(self, tokens: int) -> int:
        """Bytes for a number of tokens."""
        return self.bytes_per_token * tokens + self.fixed_bytes

    def tokens(self, budget_bytes: int) -> int:
        """Tokens that fit into a budget; 0 where nothing fits or the slope is not positive."""
        if self.bytes_per_token <= 0:
            return 0
        return max((budget_bytes - self.fixed_bytes) // self.bytes_per_token, 0)


def static_cost(
    config: DSAConfig,
    *,
    key_form: str = "bf16",
    index_form: str = "fp8",
    layers: Sequence[int] | None = None,
    num_layers: int | None = None,
) -> CacheCost:
    """Estimate before any cache exists, for turning a memory budget into tokens.

    It equals the bytes of the layout that `CacheLayout.create` makes of the same layers, also for NVFP4 (324
    bytes a token and layer), which TensorRT-LLM's estimate charges as 1,152.

    Args:
        config: the model.
        key_form: storage form of KEY.
        index_form: storage form of INDEX_KEY.
        layers: global ids of this rank's layers; None for all decoder layers.
        num_layers: layers of a draft cache, each of which owns an indexer; replaces `layers`. 0 counts as 1.

    Raises:
        ValueError: `layers` and `num_layers` are both given, `layers` are not those of a rank, `num_layers` is no
            number of layers, or a form is unknown.
    """
    expect("static_cost", "config", config, DSAConfig, FIX_CONFIG)
    if layers is not None and num_layers is not None:
        raise ValueError(
            "static_cost: layers and num_layers are both given; pass num_layers for a draft cache only"
        )
    if num_layers is not None:
        (num_layers,) = whole_numbers("static_cost", num_layers=num_layers)
        if num_layers < 0:
            raise ValueError(
                f"static_cost: num_layers={num_layers} must not be negative; pass the layers of a draft cache"
            )
        count = max(num_layers, 1)
        owners = count if config.index_n_heads else 0
    else:
        local, problems = global_layers(config, layers)
        if problems:
            raise ValueError("static_cost: " + "; ".join(problems))
        count, owners = len(local), sum(config.full_layers[layer] for layer in local)
    key = sum(role_bytes(key_arrays(key_form, config.kv_lora_rank, config.qk_rope_head_dim)).values())
    index = sum(role_bytes(index_arrays(index_form, config.index_head_dim)).values()) if owners else 0
    return CacheCost(count * key + owners * index)


def layout_cost(layout: CacheLayout) -> CacheCost:
    """Exact cost of a layout."""
    expect("layout_cost", "layout", layout, CacheLayout, FIX_LAYOUT)
    return CacheCost(layout.bytes_per_token)


def quota_for_tokens(layouts: CacheLayout | Sequence[CacheLayout], tokens: int) -> int:
    """Bytes that hold `tokens` tokens of context in every one of the layouts, without rounding to pages."""
    (tokens,) = whole_numbers("quota_for_tokens", tokens=tokens)
    return sum(layout.bytes_per_token for layout in _listed("quota_for_tokens", layouts)) * tokens


def tokens_for_quota(layouts: CacheLayout | Sequence[CacheLayout], quota_bytes: int) -> int:
    """Tokens that a quota holds in every one of the layouts, without rounding to pages."""
    (quota_bytes,) = whole_numbers("tokens_for_quota", quota_bytes=quota_bytes)
    return max(quota_bytes, 0) // sum(
        layout.bytes_per_token for layout in _listed("tokens_for_quota", layouts)
    )


def quota_for_slots(layouts: CacheLayout | Sequence[CacheLayout], slots: int, *, grain_bytes: int = 1) -> int:
    """Bytes that pools of `slots` slots take when memory comes in grains: each pool rounds up on its own.

    Args:
        layouts: the caches that get that many slots each.
        slots: slots of each pool group.
        grain_bytes: smallest piece of memory that is handed out; 2 MiB for TensorRT-LLM's numbers.

    Raises:
        ValueError: `slots` is negative or `grain_bytes` is not positive.
    """
    slots, grain_bytes = whole_numbers("quota_for_slots", slots=slots, grain_bytes=grain_bytes)
    if slots < 0 or grain_bytes < 1:
        raise ValueError(
            f"quota_for_slots: slots={slots} must be >= 0 and grain_bytes={grain_bytes} at least 1"
        )
    sizes = [pool.slot_bytes for layout in _listed("quota_for_slots", layouts) for pool in layout.pools]
    return sum(-(-slots * size // grain_bytes) for size in sizes) * grain_bytes


def slots_for_quota(
    layouts: CacheLayout | Sequence[CacheLayout], quota_bytes: int, *, grain_bytes: int = 1
) -> int:
    """Greatest number of slots whose pools fit into a quota.

    Args:
        layouts: the caches that get that many slots each.
        quota_bytes: bytes; what does not fill a grain is lost.
        grain_bytes: smallest piece of memory that is handed out.

    Returns:
        Slots, 0 where not even one fits.

    Raises:
        ValueError: `grain_bytes` is not positive.
    """
    listed = _listed("slots_for_quota", layouts)
    quota_bytes, grain_bytes = whole_numbers(
        "slots_for_quota", quota_bytes=quota_bytes, grain_bytes=grain_bytes
    )
    quota_for_slots(listed, 0, grain_bytes=grain_bytes)  # refuses a wrong grain
    quota = max(quota_bytes, 0) // grain_bytes * grain_bytes
    low, high = 0, quota // sum(layout.bytes_per_slot for layout in listed)
    while low < high:
        middle = (low + high + 1) // 2
        if quota_for_slots(listed, middle, grain_bytes=grain_bytes) <= quota:
            low = middle
        else:
            high = middle - 1
    return low


def cache_quota(
    layouts: CacheLayout | Sequence[CacheLayout],
    *,
    max_tokens: int | None = None,
    max_bytes: int | None = None,
    usable_fraction: float = 1.0,
) -> int:
    """Bytes to give to the caches: the smaller of what `max_tokens` needs and `max_bytes`.

    Args:
        layouts: the caches.
        max_tokens: tokens to hold, or None.
        max_bytes: bytes at most, or None.
        usable_fraction: share of the pages that admission lets requests use; `max_tokens` is divided by it.

    Raises:
        ValueError: neither limit is given, or one is not positive.
    """
    if max_tokens is None and max_bytes is None:
        raise ValueError("cache_quota: neither max_tokens nor max_bytes is given; pass at least one of them")
    limits = {name: v for name, v in (("max_tokens", max_tokens), ("max_bytes", max_bytes)) if v is not None}
    limits = dict(zip(limits, whole_numbers("cache_quota", **limits), strict=True))
    problems = [f"{name}={value} must be positive" for name, value in limits.items() if value < 1]
    if not is_number(usable_fraction) or not 0 < usable_fraction <= 1:
        problems.append(f"usable_fraction={described(usable_fraction)} must lie above 0 and at most at 1")
    if problems:
        raise ValueError("cache_quota: " + "; ".join(problems))
    quotas = [limits["max_bytes"]] if "max_bytes" in limits else []
    if "max_tokens" in limits:
        # A fraction of its decimal form: 0.95 means 95/100, and byte counts pass what a float holds exactly.
        quotas.append(
            math.ceil(quota_for_tokens(layouts, limits["max_tokens"]) / Fraction(str(usable_fraction)))
        )
    return min(quotas)


def agree_on_tokens(layouts: Sequence[CacheLayout], quotas: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """What several ranks agree on: the smallest number of tokens, and each rank's bytes for it.

    Ranks with different numbers of layers must agree on tokens, not on bytes.

    Args:
        layouts: one layout per rank.
        quotas: bytes per rank.

    Raises:
        ValueError: there is no rank, or the two sequences differ in length.
    """
    if isinstance(layouts, CacheLayout) or not hasattr(layouts, "__len__") or not hasattr(quotas, "__len__"):
        raise ValueError(
            f"agree_on_tokens: layouts is {described(layouts)} and quotas {described(quotas)}, wanted a list of each; "
            "pass one layout and one quota per rank"
        )
    if not layouts or len(layouts) != len(quotas):
        raise ValueError(
            f"agree_on_tokens: {len(layouts)} layouts and {len(quotas)} quotas, wanted one of each per rank, "
            "at least one"
        )
    tokens = min(tokens_for_quota(layout, quota) for layout, quota in zip(layouts, quotas, strict=True))
    return tokens, tuple(quota_for_tokens(layout, tokens) for layout in layouts)


def parse_bytes(text: str) -> int:
    """Reads "80GB" (80 * 10**9), "80GiB" (80 * 2**30) or a plain number of bytes.

    Raises:
        ValueError: the text is no size, or more than 2**63 - 1 bytes.

    >>> parse_bytes("80GiB"), parse_bytes("1.5 kB")
    (85899345920, 1500)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text) if isinstance(text, str) else None
    unit = match and match[2].upper()
    if not match or unit not in _UNITS:
        raise ValueError(
            f"parse_bytes: {described(text)} is no size; write for example 80GB, 80GiB or 85899345920"
        )
    number, factor = match[1], _UNITS[unit or ""]
    # Nobody writes so many digits for a size that exists, and Python refuses to read very long numbers.
    if len(number) <= 400 and float(number) * factor < 2.0**63:
        return int(number) * factor if number.isdigit() else round(float(number) * factor)
    raise ValueError(
        f"parse_bytes: {described(text)} is more than {MOST_BYTES:,} bytes; give the memory of one device"
    )


def _listed(
    operation: str, layouts: CacheLayout | Sequence[CacheLayout], name: str = "layouts"
) -> Sequence[CacheLayout]:
    if isinstance(layouts, CacheLayout):
        return [layouts]
    try:
        listed = list(layouts)
    except TypeError:
        listed = []
    if not listed or not all(isinstance(layout, CacheLayout) for layout in listed):
        came = f"[{', '.join(map(described, listed))}]" if listed else described(layouts)
        raise ValueError(
            f"{operation}: {name} is {came}, wanted a CacheLayout or a list of them. {FIX_LAYOUT}"
        )
    return listed
