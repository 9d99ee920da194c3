"""Questions about coalesced pools: representative layers, and the view of all KEY pages as one array."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dsa_jax.coalesce import PlacedBuffer, PoolSpec, find_buffer
from dsa_jax.forms import Role


def representatives(
    pools: Sequence[PoolSpec], role: Role, order: Sequence[int]
) -> Mapping[int, PlacedBuffer]:
    """The representative buffer of each pool that holds `role`: that of the first layer in configuration
    order.

    Base address, scale and offset of a pool are read from it. It does not depend on the order in which a pool
    lists its layers, which is unspecified.

    Args:
        pools: the pools.
        role: the role.
        order: layer ids in configuration order.

    Returns:
        Pool number -> representative.
    """
    position = {layer: i for i, layer in enumerate(order)}
    found: dict[int, PlacedBuffer] = {}
    for pool in pools:
        candidates = [buffer for buffer in pool.buffers if buffer.role == role]
        if candidates:
            found[pool.number] = min(candidates, key=lambda buffer: position[buffer.layer])
    return found


def pool_mapping(pools: Sequence[PoolSpec], role: Role, order: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Per layer in configuration order: its pool and its distance in pages from the pool's representative
    layer.
    """
    base = representatives(pools, role, order)
    rows = []
    for layer in order:
        buffer = find_buffer(pools, layer, role)
        pool = buffer.index.pool
        rows.append((pool, (buffer.offset - base[pool].offset) // buffer.size))
    return tuple(rows)


def unique_primary_pool(
    pools: Sequence[PoolSpec],
    order: Sequence[int],
    slots: int,
    *,
    item_bytes: int = 1,
    head_dims: Sequence[int] | None = None,
    head_counts: Sequence[int] | None = None,
) -> tuple[int, tuple[int, int, int, int]]:
    """The one pool that holds nothing but the KEY pages of all layers, and its shape seen as an array.

    Args:
        pools: the pools.
        order: layer ids in configuration order.
        slots: slots of the pool.
        item_bytes: bytes of an array element.
        head_dims: head dimension per layer, where it is not the same by construction.
        head_counts: key heads per layer, where it is not the same by construction.

    Returns:
        Pool number and `(slots, layers, 1, page_bytes // item_bytes)`.

    Raises:
        ValueError: a precondition is broken: there are layers; no VALUE buffers; one head dimension; one head
            count; no expansion; the first layer comes first in the slot; the pool holds one page per layer
            and nothing else; the layers follow each other in configuration order; addresses agree with layer
            offsets. The message says which.
    """

    def refuse(reason: str) -> ValueError:
        return ValueError(
            f"unique_primary_pool: {reason}; address each layer through its own PageIndex instead"
        )

    if not order:
        raise refuse("there are no layers, wanted at least one")
    if any(buffer.role == Role.VALUE for pool in pools for buffer in pool.buffers):
        raise refuse("VALUE buffers are present, wanted KEY alone (kv_factor 1)")
    if len(set(head_dims or ())) > 1:
        raise refuse(f"layers have the head dimensions {sorted(set(head_dims or ()))}, wanted one")
    if len(set(head_counts or ())) > 1:
        raise refuse(f"layers have the head counts {sorted(set(head_counts or ()))}, wanted one")
    first = find_buffer(pools, order[0], Role.KEY)
    if first.index.expansion != 1:
        raise refuse(f"layer {order[0]} has expansion {first.index.expansion}, wanted 1")
    if first.index.layer_offset != 0:
        raise refuse(f"layer {order[0]} has layer offset {first.index.layer_offset}, wanted 0")
    if first.index.scale != len(order):
        raise refuse(
            f"the KEY pool has {first.index.scale} pages per slot, wanted one for each of {len(order)} layers"
        )
    for position, layer in enumerate(order):
        buffer = find_buffer(pools, layer, Role.KEY)
        index = buffer.index
        if (index.pool, index.scale, index.expansion) != (first.index.pool, first.index.scale, 1):
            raise refuse(
                f"layer {layer} has pool {index.pool}, scale {index.scale} and expansion {index.expansion}, "
                "wanted "
                f"{first.index.pool}, {first.index.scale} and 1"
            )
        if index.layer_offset != position:
            raise refuse(
                f"layer {layer} has layer offset {index.layer_offset}, wanted its position {position}"
            )
        if buffer.offset != first.offset + position * first.page_stride:
            raise refuse(
                f"layer {layer} starts at byte {buffer.offset} of a slot, wanted "
                f"{first.offset + position * first.page_stride}"
            )
    return first.index.pool, (slots, len(order), 1, first.size // item_bytes)
