"""Plans a deployment: from a model and a device's memory to tokens, slots and bytes."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from dsa_jax.arguments import described, expect, is_number
from dsa_jax.config import DSAConfig
from dsa_jax.layout import FIX_CONFIG, CacheLayout
from dsa_jax.layout_text import text_table
from dsa_jax.sizing import (
    MOST_BYTES,
    SCORE_BUDGET,
    pages_per_seq,
    quota_for_slots,
    rows_per_chunk,
    slots_for_quota,
    whole_numbers,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What fits on one device.

    Attributes:
        layout: layout of the target's cache.
        draft_layout: layout of a draft cache with as many slots, or None.
        gpu_memory: bytes of the device.
        weight_bytes: bytes of the weights.
        workspace_bytes: bytes of a step's temporaries, by name.
        cache_bytes: bytes of all pools.
        slots: slots of each pool group.
        tokens: tokens that fit, `slots * page_size`.
        bytes_by_role: bytes of the target's pools by role; a draft's pools are under "draft".
        batch: requests asked for.
        context: tokens of each request asked for.
        pages_per_request: pages that one such request needs.
        requests: such requests that fit.
    """

    layout: CacheLayout
    draft_layout: CacheLayout | None
    gpu_memory: int
    weight_bytes: int
    workspace_bytes: dict[str, int]
    cache_bytes: int
    slots: int
    tokens: int
    bytes_by_role: dict[str, int]
    batch: int
    context: int
    pages_per_request: int
    requests: int

    @property
    def fits(self) -> bool:
        """Whether the batch asked for fits at the context asked for."""
        return self.requests >= self.batch

    @property
    def free_bytes(self) -> int:
        """Bytes left over after weights, workspace and pools."""
        return self.gpu_memory - self.weight_bytes - sum(self.workspace_bytes.values()) - self.cache_bytes

    def to_dict(self) -> dict[str, Any]:
        """The plan in JSON's types."""
        names = (
            "gpu_memory",
            "weight_bytes",
            "workspace_bytes",
            "cache_bytes",
            "free_bytes",
            "bytes_by_role",
        )
        names += ("slots", "tokens", "batch", "context", "pages_per_request", "requests", "fits")
        layout = {
            name: getattr(self.layout, name)
            for name in ("manager", "key_form", "index_form", "page_size", "bytes_per_token")
        }
        draft = {"draft_bytes_per_token": self.draft_layout.bytes_per_token if self.draft_layout else 0}
        return layout | draft | {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        """The table."""
        return self.table()

    def table(self) -> str:
        """The plan as a table for people."""
        rows: list[tuple[str, Any]] = [("memory", self.gpu_memory), ("weights", self.weight_bytes)]
        rows += [(f"workspace: {name}", size) for name, size in self.workspace_bytes.items()]
        rows += [(f"cache: {name}", size) for name, size in self.bytes_by_role.items()]
        rows += [("left over", self.free_bytes)]
        answer = "fit" if self.fits else "do not fit"
        return "\n".join(
            [
                f"manager {self.layout.manager}, page size {self.layout.page_size}, key "
                f"{self.layout.key_form}, "
                f"index {self.layout.index_form}: {self.layout.bytes_per_token:,} bytes a token",
                "",
                *text_table(("what", "bytes"), rows),
                "",
                f"{self.slots:,} slots, {self.tokens:,} tokens; {self.batch:,} requests of {self.context:,} "
                "tokens "
                f"{answer}, there is room for {self.requests:,}",
            ]
        )


def plan(
    config: DSAConfig,
    *,
    gpu_memory: int,
    weight_bytes: int = 0,
    manager: Literal["v1", "v2"] = "v2",
    key_form: str = "bf16",
    index_form: str = "fp8",
    page_size: int = 64,
    layers: tuple[int, ...] | None = None,
    draft: bool = False,
    batch: int = 1,
    context: int | None = None,
    extra_tokens: int = 0,
    chunk_tokens: int = 2048,
    score_budget: int = SCORE_BUDGET,
    grain_bytes: int = 1,
) -> Plan:
    """Plans the caches of one device.

    The workspace counts what grows with the context: indexer scores (rows at a time so that they stay within
    `score_budget`, over the longest context, not the chunk's own length), selected positions and rows, and
    the page table. The model's activations depend on the model and are not counted.

    Args:
        config: the model.
        gpu_memory: bytes of the device.
        weight_bytes: bytes of the weights on this device.
        manager: manager version.
        key_form: storage form of KEY.
        index_form: storage form of INDEX_KEY.
        page_size: tokens per page.
        layers: global ids of this rank's layers; None for all decoder layers.
        draft: also plan a cache for the prediction layers, with as many slots.
        batch: requests at the same time.
        context: tokens of each request; None for the model's longest context.
        extra_tokens: tokens beyond `context` that are written too, such as draft tokens.
        chunk_tokens: new tokens of one prefill step.
        score_budget: bytes for scores.
        grain_bytes: smallest piece of memory that is handed out to a pool.

    Returns:
        The plan; `fits` says whether the batch fits.

    Raises:
        ValueError: a value is not positive, the model has no prediction layers to plan a draft cache for, the
            layout is refused, or weights and workspace leave no memory for a single slot.
    """
    expect("plan", "config", config, DSAConfig, FIX_CONFIG)
    context = config.max_position_embeddings if context is None else context
    batch, context, extra_tokens, chunk_tokens = whole_numbers(
        "plan", batch=batch, context=context, extra_tokens=extra_tokens, chunk_tokens=chunk_tokens
    )
    gpu_memory, weight_bytes, score_budget, grain_bytes = _whole_bytes(
        gpu_memory=gpu_memory, weight_bytes=weight_bytes, score_budget=score_budget, grain_bytes=grain_bytes
    )
    numbers = {"gpu_memory": gpu_memory, "batch": batch, "context": context, "chunk_tokens": chunk_tokens}
    numbers |= {"score_budget": score_budget, "grain_bytes": grain_bytes}
    problems = [f"{name}={value} must be at least 1" for name, value in numbers.items() if value < 1]
    problems += [
        f"{name}={value} must not be negative"
        for name, value in (("weight_bytes", weight_bytes), ("extra_tokens", extra_tokens))
        if value < 0
    ]
    if context > config.max_position_embeddings:
        problems.append(
            f"context={context} is longer than the model's {config.max_position_embeddings} tokens"
        )
    if draft and not config.num_mtp_layers:
        problems.append(
            f"draft=True, but {config.architecture} has no prediction layers here; use draft=False"
        )
    if problems:
        raise ValueError("plan: " + "; ".join(problems))

    def lay_out(chosen: tuple[int, ...] | None) -> CacheLayout:
        return CacheLayout.create(
            config,
            manager=manager,
            key_form=key_form,
            index_form=index_form,
            page_size=page_size,
            layers=chosen,
        )

    layout = lay_out(layers)
    draft_layout = None
    if draft:
        draft_layout = lay_out(tuple(range(config.num_layers, config.num_layers + config.num_mtp_layers)))
    layouts = [layout] if draft_layout is None else [layout, draft_layout]

    width = pages_per_seq(context, page_size, extra_tokens=extra_tokens)
    workspace = _workspace(config, batch, width, width * page_size, chunk_tokens, score_budget)
    left = gpu_memory - weight_bytes - sum(workspace.values())
    slots = slots_for_quota(layouts, left, grain_bytes=grain_bytes)
    if slots < 1:
        raise ValueError(
            f"plan: gpu_memory={gpu_memory:,} less weight_bytes={weight_bytes:,} and "
            f"{sum(workspace.values()):,} of workspace "
            f"leaves {left:,} bytes, and one slot takes "
            f"{quota_for_slots(layouts, 1, grain_bytes=grain_bytes):,}; use more "
            "memory, more ranks, a shorter context or a narrower form"
        )
    by_role = {str(role): size * slots * page_size for role, size in layout.bytes_per_token_by_role.items()}
    if draft_layout is not None:
        by_role["draft"] = draft_layout.bytes_per_slot * slots
    return Plan(
        layout=layout,
        draft_layout=draft_layout,
        gpu_memory=gpu_memory,
        weight_bytes=weight_bytes,
        workspace_bytes=workspace,
        cache_bytes=quota_for_slots(layouts, slots, grain_bytes=grain_bytes),
        slots=slots,
        tokens=slots * page_size,
        bytes_by_role=by_role,
        batch=batch,
        context=context,
        pages_per_request=width,
        requests=slots // width,
    )


def _whole_bytes(**sizes: Any) -> list[int]:
    """Bytes as integers: 80e9 is as good as 80 * 10**9, half a byte is not."""
    strange = [
        f"{name}={described(size)}"
        for name, size in sizes.items()
        if not is_number(size) or not abs(size) <= MOST_BYTES or size != int(size)
    ]
    if strange:
        raise ValueError(
            f"plan: {', '.join(strange)} must be a whole number of bytes, at most {MOST_BYTES:,}; sizing.parse_bytes reads "
            "80GB and 80GiB"
        )
    return [int(size) for size in sizes.values()]


def _workspace(
    config: DSAConfig, batch: int, width: int, keys: int, chunk_tokens: int, score_budget: int
) -> dict[str, int]:
    rows = max(chunk_tokens, batch)
    table = {"page table": batch * width * 4}
    if not config.index_n_heads:
        return table
    scores = min(rows, rows_per_chunk(score_budget, keys)) * keys * 4
    selected = rows * config.index_topk * 4
    return {"scores": scores, "selected positions and rows": 2 * selected} | table
