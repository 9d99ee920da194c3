"""Coalescing of buffers into pools, as the V2 manager does it: pure arithmetic over any declared buffers.

Buffers are declared per layer. Those of one life cycle that have the same number of bytes per page share a
pool, one slot of which holds one page of each of them in declaration order. All pools of a group are
addressed by the same slot id.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dsa_jax.forms import Role
from dsa_jax.page_index import AddressMode, PageIndex


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
    """A buffer that a layer declares.

    Attributes:
        role: what it holds.
        page_bytes: bytes of one page, where a page has `tokens_per_page` tokens.
        tokens_per_page: tokens per page of this buffer if it is finer than the manager's page, else None.
    """

    role: Role
    page_bytes: int
    tokens_per_page: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerBuffers:
    """The buffers of one layer, in declaration order.

    Attributes:
        layer: layer id.
        buffers: the buffers; no role twice.
        window: sliding window in tokens, None for full attention.
        sink_pages: pages at the start that a window never drops.
    """

    layer: int
    buffers: tuple[Buffer, ...]
    window: int | None = None
    sink_pages: int = 0

    @property
    def life_cycle(self) -> tuple[int | None, int]:
        """Layers with the same life cycle free their pages at the same time and share one page table."""
        return (self.window, self.sink_pages)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedBuffer:
    """A buffer's place in its pool.

    Attributes:
        layer: layer id.
        role: what it holds.
        life_cycle: number of its life cycle, in order of first occurrence.
        offset: bytes from the start of the slot.
        size: bytes in one slot.
        index: how slots become pages.
    """

    layer: int
    role: Role
    life_cycle: int
    offset: int
    size: int
    index: PageIndex

    @property
    def page_stride(self) -> int:
        """Bytes from one kernel page index to the next."""
        return self.size // self.index.expansion

    def base_offset(self, mode: AddressMode = AddressMode.SHARED) -> int:
        """Bytes from the start of the pool to what index 0 addresses."""
        return self.offset if mode == AddressMode.SHARED else 0

    def byte_offset(self, slot: int, mode: AddressMode = AddressMode.SHARED) -> int:
        """Bytes from the start of the pool to this buffer's page in `slot`; a Python integer, it may pass
        2**31.

        Raises:
            ValueError: the slot is negative.
        """
        if slot < 0:
            raise ValueError(
                f"PlacedBuffer.byte_offset: slot {slot} is no slot; mask missing pages before asking for "
                "bytes"
            )
        return self.base_offset(mode) + self.index.convert([slot], mode)[0] * self.page_stride


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """One pool.

    Attributes:
        number: number of the pool, the `pool` of its `PageIndex` values.
        group: pool group; slot ids are valid in every pool of a group.
        slot_bytes: bytes of one slot.
        buffers: the buffers in a slot. Where life cycles were merged into one group, buffers of different
            life cycles describe alternative uses of the same slot and may overlap.
    """

    number: int
    group: int
    slot_bytes: int
    buffers: tuple[PlacedBuffer, ...]

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles in this pool, in order of first occurrence."""
        return tuple(dict.fromkeys(buffer.role for buffer in self.buffers))

    @property
    def scale(self) -> int:
        """Pages per slot of the first life cycle in the pool."""
        return self.buffers[0].index.scale


def coalesce(layers: Sequence[LayerBuffers], page_size: int) -> tuple[PoolSpec, ...]:
    """Groups buffers into pools.

    Buffers are collected in declaration order by life cycle and then by bytes; each collection is one pool,
    whose slot holds its buffers one after the other. The pools of a life cycle are sorted by slot bytes,
    largest first. Life cycles whose pools have the same slot bytes share one pool group. Source:
    TensorRT-LLM's KV cache manager V2.

    Args:
        layers: the declarations, in configuration order.
        page_size: tokens per page of the manager.

    Returns:
        The pools, by group and by size.

    Raises:
        ValueError: a layer or a role is declared twice, a size is not positive, or `tokens_per_page` does not
            divide `page_size`; all problems in one message.
    """
    _check_declarations(layers, page_size)
    collected: dict[tuple[int | None, int], dict[int, list[tuple[int, Role, int]]]] = {}
    for layer in layers:
        sizes = collected.setdefault(layer.life_cycle, {})
        for buffer in layer.buffers:
            expansion = page_size // (buffer.tokens_per_page or page_size)
            sizes.setdefault(buffer.page_bytes * expansion, []).append((layer.layer, buffer.role, expansion))

    groups: dict[tuple[int, ...], list[tuple[int, list[tuple[int, list[tuple[int, Role, int]]]]]]] = {}
    for life_cycle, sizes in enumerate(collected.values()):
        ordered = sorted(sizes.items(), key=lambda item: item[0] * len(item[1]), reverse=True)
        if ordered:
            slot_sizes = tuple(size * len(members) for size, members in ordered)
            groups.setdefault(slot_sizes, []).append((life_cycle, ordered))

    pools: list[PoolSpec] = []
    for group, (slot_sizes, life_cycles) in enumerate(groups.items()):
        for position, slot_bytes in enumerate(slot_sizes):
            number = len(pools)
            buffers = []
            for life_cycle, ordered in life_cycles:
                size, members = ordered[position]
                for offset, (layer_id, role, expansion) in enumerate(members):
                    index = PageIndex(number, len(members), offset, expansion)
                    placed = PlacedBuffer(
                        layer=layer_id,
                        role=role,
                        life_cycle=life_cycle,
                        offset=offset * size,
                        size=size,
                        index=index,
                    )
                    buffers.append(placed)
            pools.append(PoolSpec(number=number, group=group, slot_bytes=slot_bytes, buffers=tuple(buffers)))
    return tuple(pools)


def _check_declarations(layers: Sequence[LayerBuffers], page_size: int) -> None:
    problems = []
    seen: set[int] = set()
    for layer in layers:
        if layer.layer in seen:
            problems.append(f"layer {layer.layer} is declared twice")
        seen.add(layer.layer)
        roles = [buffer.role for buffer in layer.buffers]
        problems += [
            f"layer {layer.layer} declares role {role} twice"
            for role in dict.fromkeys(roles)
            if roles.count(role) > 1
        ]
        for buffer in layer.buffers:
            if buffer.page_bytes < 1:
                problems.append(
                    f"layer {layer.layer} {buffer.role}: page_bytes={buffer.page_bytes} must be positive"
                )
            fine = buffer.tokens_per_page
            if fine is not None and (fine < 1 or page_size % fine):
                problems.append(
                    f"layer {layer.layer} {buffer.role}: tokens_per_page={fine} does not divide "
                    f"page_size={page_size}"
                )
    if problems:
        raise ValueError("coalesce: " + "; ".join(problems))


def find_buffer(pools: Sequence[PoolSpec], layer: int, role: Role) -> PlacedBuffer:
    """The place of one (layer, role).

    Raises:
        ValueError: the layer declares no such buffer.
    """
    for pool in pools:
        for buffer in pool.buffers:
            if buffer.layer == layer and buffer.role == role:
                return buffer
    raise ValueError(
        f"find_buffer: layer {layer} has no {role} buffer; ask for a layer and role that were declared"
    )
