"""The cache: one immutable pytree of page pools and per-layer index maps.

Nothing here writes. Ops take a cache and return a new one; when the caller's outermost ``jit`` donates the old cache, the
pools are updated in place, and without donation the old cache stays valid and unchanged.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dsa_jax.arguments import described, expect, is_whole
from dsa_jax.compat import is_traced, target_device
from dsa_jax.layout import FIX_LAYOUT, ArraySpec, CacheLayout, Role, as_role

POOL_NAMES = ("key", "key_scale", "key_rope", "index_key", "index_scale")
"""Names of the pool leaves, in pytree order; a form that has no such array leaves None."""


class PoolTooLarge(ValueError):
    """Page pools that cannot be allocated. Nothing was.

    Attributes:
        slots: page slots asked for.
        nbytes: bytes that they take.
        reason: what they are too large for.
    """

    def __init__(self, operation: str, layout: CacheLayout, slots: int, reason: str):
        self.slots, self.nbytes, self.reason = slots, layout.bytes_per_slot * slots, reason
        super().__init__(
            f"{operation}: slots is {described(slots)}, which takes {self.nbytes:,} bytes ({layout.bytes_per_slot:,} a "
            f"slot): {reason}. Pass fewer slots (planning.plan says how many fit), or split the cache over more devices."
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Cache:
    """Page pools and index maps of one rank.

    Attributes:
        key: latent and rotary key of MLA, ``[slots * scale, T, width]`` (V2) or ``[slots, rows, T, width]`` (V1). Width and
            dtype are those of the form: floats of 576, ``uint8`` of 576 (FP8), 288 (NVFP4) or 512 (656-byte token).
        key_scale: scales of quantised latents: ``uint8[..., T, 36]`` (NVFP4) or ``float32[..., T, 4]``; else None.
        key_rope: ``bfloat16[..., T, 64]`` rotary part of the 656-byte token, or None.
        index_key: indexer keys, codes ``uint8[..., T, D]`` (FP8) or ``uint8[..., T, D/2]`` (FP4), or ``float32`` values;
            None where no local layer owns an indexer.
        index_scale: ``float32[..., T]`` (FP8) or ``int32[..., T]`` (FP4) scales of the indexer keys, or None.
        key_offsets: ``int32[L]``, layer offset of each local layer in the KEY pool.
        index_offsets: ``int32[L]``, layer offset in the INDEX_KEY pool, -1 for layers without an indexer.
        block_scale_offsets: ``int32[L]``, layer offset in the KEY_BLOCK_SCALE pool, which NVFP4 alone has; else None.
        layout: the static description.
    """

    key: Array
    key_scale: Array | None = None
    key_rope: Array | None = None
    index_key: Array | None = None
    index_scale: Array | None = None
    key_offsets: Array
    index_offsets: Array
    block_scale_offsets: Array | None = None
    layout: CacheLayout = field(metadata={"static": True})

    @classmethod
    def create(cls, layout: CacheLayout, slots: int) -> Cache:
        """Allocate an empty cache. Every leaf owns its buffer, so the whole cache can be donated.

        Args:
            layout: what to allocate.
            slots: physical page slots shared by all pools; tokens that fit are ``slots * layout.page_size``.

        Raises:
            ValueError: for fewer than one slot or more than int32 rows can count, or a layout that coalesced buffers of
                different roles into one pool.
            PoolTooLarge: the device has no room for that many; it is a ValueError too, and nothing stays allocated.
        """
        specs = _array_specs("Cache.create", layout, slots)
        too_large = layout.bytes_per_slot * int(slots) > _host_memory()
        if too_large and not is_traced(jnp.zeros(())):  # a trace allocates nothing
            raise PoolTooLarge("Cache.create", layout, int(slots), "this machine has less memory")
        try:
            arrays = {spec.name: jnp.zeros(spec.shape, spec.dtype) for spec in specs}
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise PoolTooLarge(
                "Cache.create", layout, int(slots), "the device has no room for them"
            ) from error
        return cls._build(layout, arrays, jnp.asarray)

    @classmethod
    def abstract(cls, layout: CacheLayout, slots: int) -> Cache:
        """The same tree of ``jax.ShapeDtypeStruct``, without allocating anything."""
        specs = _array_specs("Cache.abstract", layout, slots)
        arrays = {spec.name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in specs}
        return cls._build(layout, arrays, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))

    @classmethod
    def _build(cls, layout, arrays, wrap) -> Cache:
        offsets = {
            name: wrap(np.asarray(layout.layer_offsets(role), np.int32))
            for name, role in _OFFSETS.items()
            if role != Role.KEY_BLOCK_SCALE or layout.scale(role)
        }
        return cls(**arrays, **offsets, layout=layout)

    @property
    def slots(self) -> int:
        """Physical page slots of every pool."""
        if self.layout.manager == "v1":
            return self.key.shape[0]
        return self.key.shape[0] // self.layout.scale(Role.KEY)

    @property
    def nbytes(self) -> int:
        """Bytes of the page pools; the index maps (eight bytes a layer) are apart."""
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in self.pools().values())

    def pools(self) -> dict[str, Array]:
        """The pool leaves that this layout has, by name."""
        return {name: leaf for name in POOL_NAMES if (leaf := getattr(self, name)) is not None}

    def pages(self, name: str) -> Array:
        """One pool as flat pages ``[P, T, ...]``, as ops read it (a free reshape under V1).

        Raises:
            ValueError: the cache has no pool of that name.
        """
        pool = self._pool("pages", name)
        if self.layout.manager == "v1":
            return pool.reshape(pool.shape[0] * pool.shape[1], *pool.shape[2:])
        return pool

    def _pool(self, operation: str, name: str) -> Array:
        pool = getattr(self, name) if name in POOL_NAMES else None
        if pool is None:
            raise ValueError(
                f"Cache.{operation}: name is {described(name)}; wanted one of this cache's pools: "
                f"{', '.join(self.pools())}. Its forms are {self.layout.key_form}/{self.layout.index_form}."
            )
        return pool

    def replace_pages(self, **pages: Array) -> Cache:
        """A cache with the named pools replaced, each given as flat pages.

        Raises:
            ValueError: naming a pool that this cache does not have, or pages of another dtype or size.
        """
        for name, given in pages.items():
            pool = self._pool("replace_pages", name)
            if getattr(given, "size", None) != pool.size or given.dtype != pool.dtype:
                raise ValueError(
                    f"Cache.replace_pages: {name} is {described(given)}, wanted the dtype and size of {described(pool)}. "
                    "Change values, not shapes."
                )
        return replace(self, **{n: p.reshape(getattr(self, n).shape) for n, p in pages.items()})

    def role(self, name: str) -> Role:
        """The role that a pool leaf belongs to: the scales of NVFP4 latents have their own, all others share their key's.

        Args:
            name: one of ``POOL_NAMES``.

        Raises:
            ValueError: for any other.
        """
        if name not in POOL_NAMES:
            raise ValueError(
                f"Cache.role: name is {described(name)}; wanted one of {', '.join(POOL_NAMES)}. Pass a pool's name."
            )
        if name == "key_scale" and self.layout.scale(Role.KEY_BLOCK_SCALE):
            return Role.KEY_BLOCK_SCALE
        return Role.INDEX_KEY if name.startswith("index") else Role.KEY

    def page_of(self, role: Role, layer: int | Array, slot: Array) -> Array:
        """Page of each raw slot for a (local layer, role): ``slot * scale + layer_offset``; -1 where there is none.

        A slot that is negative or beyond the pool has no page. A known ``layer`` is checked here; a traced one that does
        not exist or owns no such role yields -1 for every slot.

        Args:
            role: ``Role.KEY``, ``Role.KEY_BLOCK_SCALE`` or ``Role.INDEX_KEY``.
            layer: local layer number.
            slot: ``int32`` raw slots of any shape, -1 for none.

        Raises:
            ValueError: for a layer that is not local, that is a shared-indexer layer when ``role`` is INDEX_KEY, or a role
                that the key form does not have.
        """
        offset = self._offset("Cache.page_of", role, layer)
        known = (slot >= 0) & (slot < self.slots) & (offset >= 0)
        return jnp.where(known, slot * self.layout.scale(role) + offset, -1)

    def layer_offset(self, role: Role, layer: int | Array) -> Array:
        """``int32`` scalar: the layer's offset in the pool of ``role``. Checks a known ``layer`` as ``page_of`` does."""
        return self._offset("Cache.layer_offset", role, layer)

    def check_layer(self, operation: str, role: Role, layer: int | Array) -> None:
        """Refuse a layer that has no pages of ``role``, as far as that can be known: a traced layer has no value yet.

        Args:
            operation: whose argument it is, for the message.
            role: as in ``page_of``.
            layer: local layer number.

        Raises:
            ValueError: for a layer that is no whole number, is not local, or has no such pages.
        """
        if is_whole(layer):
            self.layout.find(operation, int(layer), role)
            return
        if not isinstance(layer, (jax.Array, np.ndarray)) or not jnp.issubdtype(layer.dtype, jnp.integer):
            raise ValueError(
                f"{operation}: layer is {described(layer)}, wanted the local number of a layer, a Python int or an int32 "
                "scalar. Pass its position among this rank's layers."
            )
        if is_traced(layer):
            return
        if not isinstance(layer, jax.Array) or layer.is_fully_addressable:
            for number in np.asarray(jax.device_get(layer)).reshape(-1).tolist():
                self.layout.find(operation, number, role)

    def _offset(self, operation: str, role: Role, layer: int | Array) -> Array:
        role = as_role(operation, role)
        self.check_layer(operation, role, layer)
        offsets = next((getattr(self, name) for name, owner in _OFFSETS.items() if owner == role), None)
        if offsets is None:
            raise ValueError(
                f"{operation}: key_form {self.layout.key_form!r} has no {role} pages. Ask for Role.KEY."
            )
        # A traced layer cannot be checked; out of range it must not wrap or clamp into another layer's pages.
        return jnp.asarray(offsets).at[layer].get(mode="fill", fill_value=-1, wrap_negative_indices=False)

    def validate(self) -> None:
        """Check that every leaf is what the layout says.

        Raises:
            ValueError: naming every leaf that differs, with what came and what is wanted.
        """
        problems = []
        for spec in self.layout.arrays(self.slots):
            leaf = getattr(self, spec.name)
            if leaf is None or tuple(leaf.shape) != tuple(spec.shape) or leaf.dtype != np.dtype(spec.dtype):
                came = "nothing" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"
                problems.append(f"{spec.name} is {came}, wanted {np.dtype(spec.dtype)}{list(spec.shape)}")
        wanted = {spec.name for spec in self.layout.arrays(self.slots)}
        problems += [f"{name} is present, wanted nothing" for name in self.pools() if name not in wanted]
        for name, role in _OFFSETS.items():
            came, offsets = getattr(self, name), list(self.layout.layer_offsets(role))
            absent = role == Role.KEY_BLOCK_SCALE and not self.layout.scale(role)
            if (came is not None) if absent else (came is None or np.asarray(came).tolist() != offsets):
                problems.append(f"{name} differs from the layout's {None if absent else offsets}")
        if problems:
            raise ValueError(
                "Cache.validate: "
                + "; ".join(problems)
                + ". Build the cache with Cache.create(layout, slots)."
            )

    def __repr__(self) -> str:
        layout = self.layout
        if not all(hasattr(leaf, "dtype") for leaf in (self.key, *self.pools().values())):
            return f"Cache({', '.join(f'{name}={leaf!r}' for name, leaf in self.pools().items())})"  # specs, shardings
        roles = ", ".join(f"{role} {size} B" for role, size in layout.bytes_per_token_by_role.items())
        return (
            f"Cache({layout.manager}, {len(layout.layers)} layers, {self.slots} slots x {layout.page_size} tokens, "
            f"per token: {roles}; {self.nbytes:,} B)"
        )


# The index map of each role that has pages. Those of KEY and INDEX_KEY are always there.
_OFFSETS = {
    "key_offsets": Role.KEY,
    "index_offsets": Role.INDEX_KEY,
    "block_scale_offsets": Role.KEY_BLOCK_SCALE,
}


def _host_memory() -> float:
    """Bytes that arrays on the CPU can take at most; no limit where another device holds them.

    Some systems promise memory that they do not have and then end the process. GPUs refuse by themselves.
    """
    if target_device().platform != "cpu" or not hasattr(os, "sysconf"):
        return math.inf
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _array_specs(operation: str, layout: CacheLayout, slots: int) -> tuple[ArraySpec, ...]:
    """The arrays to allocate; refuses by name what cannot be allocated."""
    expect(operation, "layout", layout, CacheLayout, FIX_LAYOUT)
    if not is_whole(slots) or slots < 1:
        raise ValueError(
            f"{operation}: slots is {described(slots)}; wanted at least 1 page slot. Change the slot count."
        )
    per_slot = max(layout.page_size, *(pool.scale for pool in layout.pools))
    if int(slots) * per_slot > 2**31:
        reason = f"rows and pages are int32, which counts to {2**31 // per_slot:,} slots"
        raise PoolTooLarge(operation, layout, int(slots), reason)
    try:
        return layout.arrays(int(slots))
    except ValueError as error:
        raise ValueError(f"{operation}: {error}") from error
