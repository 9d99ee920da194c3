"""The typed arrays that a cache allocates, and where their bytes lie in the packed pools."""

from __future__ import annotations

import dataclasses

from dsa_jax.arguments import described, is_whole
from dsa_jax.coalesce import PoolSpec
from dsa_jax.forms import Role, TokenArray, role_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """A typed array of the cache and its place in the packed pool.

    Token t of page p lies in the packed pool at `p * page_bytes + page_offset + t * token_stride`,
    `token_bytes` long.

    Attributes:
        name: leaf name in the cache.
        role: buffer that it is a part of.
        shape: V2 `[slots * scale, page_size, ...]`, V1 `[slots, rows, page_size, ...]`.
        dtype: NumPy name of the dtype.
        pool: number of the packed pool.
        page_bytes: bytes of one packed page.
        page_offset: bytes from the start of the packed page to token 0.
        token_bytes: bytes of one token in this array.
        token_stride: bytes from one token to the next in the packed page.
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: str
    pool: int
    page_bytes: int
    page_offset: int
    token_bytes: int
    token_stride: int

    def byte_offset(self, page: int, token: int) -> int:
        """Bytes from the start of the packed pool to a token of this array; a Python integer, it may pass
        2**31.

        Given an index relative to a layer's SHARED base, the result is relative to that base too.
        """
        return page * self.page_bytes + self.page_offset + token * self.token_stride


def typed_arrays(
    pools: tuple[PoolSpec, ...], arrays: tuple[TokenArray, ...], slots: int, page_size: int, manager: str
) -> tuple[ArraySpec, ...]:
    """Arrays of a cache with `slots` slots.

    Args:
        pools: the packed pools.
        arrays: the storage forms' arrays, for roles that some layer owns.
        slots: slots of the pool group.
        page_size: tokens per page.
        manager: "v1" for `[slots, rows, page_size, ...]`, "v2" for `[slots * scale, page_size, ...]`.

    Raises:
        ValueError: `slots` is not positive, or buffers of different roles share a pool.
    """
    if not is_whole(slots) or slots < 1:
        raise ValueError(f"typed_arrays: slots={described(slots)} must be a whole number of at least 1")
    slots = int(slots)
    for pool in pools:
        if len(pool.roles) > 1:
            raise ValueError(
                f"typed_arrays: {' and '.join(pool.roles)} have {pool.buffers[0].size} bytes per "
                "page each and were "
                f"coalesced into pool {pool.number}; a typed array holds one role, so choose forms of "
                "different widths "
                "or manager='v1'"
            )
    page_bytes = {role: size * page_size for role, size in role_bytes(arrays).items()}
    page_offset: dict[Role, int] = {}
    specs = []
    for array in arrays:
        pool = next(pool for pool in pools if array.role in pool.roles)
        leading = (slots, pool.scale) if manager == "v1" else (slots * pool.scale,)
        start = page_offset.get(array.role, 0)
        # Interleaved parts follow each other inside a token, planar parts inside a page.
        page_offset[array.role] = start + array.token_bytes * (1 if array.interleaved else page_size)
        whole = page_bytes[array.role]
        specs.append(
            ArraySpec(
                name=array.name,
                role=array.role,
                shape=(*leading, page_size, *array.shape),
                dtype=array.dtype,
                pool=pool.number,
                page_bytes=whole,
                page_offset=start,
                token_bytes=array.token_bytes,
                token_stride=whole // page_size if array.interleaved else array.token_bytes,
            )
        )
    return tuple(specs)
