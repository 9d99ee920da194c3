"""`CacheLayout`: where each byte of the caches lives, for both manager versions.

A layout describes two things and the map between them: the packed pools of the original managers (slot bytes,
and per buffer offset, size, scale and layer offset), and the typed arrays that `Cache` allocates.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from dsa_jax.arguments import described, expect, is_whole
from dsa_jax.coalesce import Buffer, LayerBuffers, PlacedBuffer, PoolSpec, coalesce
from dsa_jax.config import DSAConfig
from dsa_jax.forms import (
    INDEX_FORMS,
    KEY_FORMS,
    Role,
    TokenArray,
    check_page_size,
    index_arrays,
    key_arrays,
    role_bytes,
)
from dsa_jax.layout_text import layout_dict, layout_table, ranges
from dsa_jax.layout_v1 import decode_v1_table, encode_v1_table, v1_pools
from dsa_jax.page_index import AddressMode, PageIndex
from dsa_jax.typed_arrays import ArraySpec, typed_arrays

__all__ = [
    "AddressMode",
    "ArraySpec",
    "CacheLayout",
    "PageIndex",
    "PlacedBuffer",
    "PoolSpec",
    "Role",
    "decode_v1_table",
    "encode_v1_table",
]

FIX_CONFIG = "Pass config.preset('deepseek-v3.2') or DSAConfig.from_hf(mapping)."
FIX_LAYOUT = "Pass CacheLayout.create(config)."
MANAGERS = ("v1", "v2")
SCALE_RULES = ("ue8m0", "fp32")
TIE_RULES = ("deepgemm", "even")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """Static, hashable description of a cache. Make one with `CacheLayout.create`.

    Attributes:
        manager: "v1" or "v2".
        key_form: storage form of KEY, one of `forms.KEY_FORMS`.
        index_form: storage form of INDEX_KEY, one of `forms.INDEX_FORMS`.
        page_size: tokens per page.
        layers: global ids of this rank's layers; a layer's local number is its position, and ops take local
            numbers.
        full: per local layer, whether it owns an indexer.
        latent_dim: elements of the latent.
        rope_dim: elements of the rotary part.
        index_head_dim: elements of an indexer key.
        hadamard: indexer queries and keys pass a Hadamard rotation.
        scale_rule: "ue8m0" rounds indexer scales up to powers of two, "fp32" does not.
        tie_rule: FP4 ties, "deepgemm" or "even".
        pools: the packed pools; `PlacedBuffer.layer` in them is the local layer number.
    """

    manager: Literal["v1", "v2"]
    key_form: str
    index_form: str
    page_size: int
    layers: tuple[int, ...]
    full: tuple[bool, ...]
    latent_dim: int
    rope_dim: int
    index_head_dim: int
    hadamard: bool
    scale_rule: Literal["ue8m0", "fp32"]
    tie_rule: Literal["deepgemm", "even"]
    # Derived from the fields above, so the hash, which every jitted call computes, can leave it out.
    pools: tuple[PoolSpec, ...] = dataclasses.field(hash=False)

    @classmethod
    def create(
        cls,
        config: DSAConfig,
        *,
        manager: Literal["v1", "v2"] = "v2",
        key_form: str = "bf16",
        index_form: str = "fp8",
        page_size: int = 64,
        layers: Sequence[int] | None = None,
        hadamard: bool | None = None,
        scale_rule: Literal["ue8m0", "fp32"] = "ue8m0",
        tie_rule: Literal["deepgemm", "even"] = "deepgemm",
    ) -> CacheLayout:
        """Lays out the caches of a model, or of one pipeline stage of it.

        Args:
            config: the model.
            manager: manager version whose derivation is used.
            key_form: storage form of KEY.
            index_form: storage form of INDEX_KEY.
            page_size: tokens per page, a power of two from 1 to 256; 64 with "fp8_ds_mla".
            layers: global ids of the layers to cache; None for all decoder layers without the prediction
                layers. A draft cache passes the ids of its prediction layers.
            hadamard: overrides `config.index_hadamard`.
            scale_rule: rounding of the indexer's scales.
            tie_rule: rounding of FP4 ties.

        Returns:
            The layout.

        Raises:
            ValueError: a value is unknown or does not fit the others; all problems in one message.
        """
        expect("CacheLayout.create", "config", config, DSAConfig, FIX_CONFIG)
        problems: list[str] = []
        for name, value, known in (
            ("manager", manager, MANAGERS),
            ("key_form", key_form, KEY_FORMS),
            ("index_form", index_form, INDEX_FORMS),
            ("scale_rule", scale_rule, SCALE_RULES),
            ("tie_rule", tie_rule, TIE_RULES),
        ):
            if not isinstance(value, str) or value not in known:
                problems.append(f"{name}={described(value)} is unknown, choose one of {', '.join(known)}")
        local, found = global_layers(config, layers)
        problems += found
        full = () if problems else tuple(config.full_layers[layer] for layer in local)
        key: tuple[TokenArray, ...] = ()
        index: tuple[TokenArray, ...] = ()
        try:
            check_page_size(page_size, key_form)
        except ValueError as error:
            problems.append(str(error))
        rotates = config.index_hadamard if hadamard is None else hadamard
        if not isinstance(rotates, (bool, np.bool_)):
            problems.append(
                f"hadamard={described(hadamard)} is neither True, False nor None (as the model says)"
            )
        elif any(full) and rotates and config.index_head_dim & (config.index_head_dim - 1):
            problems.append(
                f"hadamard=True needs a power of two as index_head_dim, got {config.index_head_dim}; set "
                "hadamard=False"
            )
        if not problems:
            try:
                key = key_arrays(key_form, config.kv_lora_rank, config.qk_rope_head_dim)
            except ValueError as error:
                problems.append(str(error))
            try:
                index = index_arrays(index_form, config.index_head_dim) if any(full) else ()
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError("CacheLayout.create: " + "; ".join(problems))
        page_size = int(page_size)  # JSON knows no NumPy integers
        page_bytes = {role: size * page_size for role, size in role_bytes(key + index).items()}
        derive = v1_pools if manager == "v1" else _v2_pools
        pools = derive(tuple(range(len(local))), full, page_bytes)
        check_dsa_pools(pools)
        return cls(
            manager=manager,
            key_form=key_form,
            index_form=index_form,
            page_size=page_size,
            layers=local,
            full=full,
            latent_dim=config.kv_lora_rank,
            rope_dim=config.qk_rope_head_dim,
            index_head_dim=config.index_head_dim,
            hadamard=bool(rotates),
            scale_rule=scale_rule,
            tie_rule=tie_rule,
            pools=pools,
        )

    @functools.cached_property
    def _places(self) -> dict[tuple[int, Role], PlacedBuffer]:
        return {(buffer.layer, buffer.role): buffer for pool in self.pools for buffer in pool.buffers}

    @functools.cached_property
    def _token_arrays(self) -> tuple[TokenArray, ...]:
        index = index_arrays(self.index_form, self.index_head_dim) if any(self.full) else ()
        return key_arrays(self.key_form, self.latent_dim, self.rope_dim) + index

    def buffer(self, layer: int, role: Role) -> PlacedBuffer:
        """Place of a local layer's buffer in its packed pool.

        Raises:
            ValueError: the layer number is out of range, or the layer has no such buffer.
        """
        return self.find("CacheLayout.buffer", layer, role)

    def find(self, operation: str, layer: int, role: Role) -> PlacedBuffer:
        """`buffer` in the name of another operation, which is the one that a message should name.

        Raises:
            ValueError: as `buffer` raises, in the words of `operation`.
        """
        if not is_whole(layer):
            raise ValueError(
                f"{operation}: layer is {described(layer)}, wanted the local number of a layer, a whole number from 0 to "
                f"{len(self.layers) - 1}; pass its position among this rank's layers"
            )
        if not 0 <= layer < len(self.layers):
            raise ValueError(
                f"{operation}: layer {described(layer)} is out of range, this rank has the local layers 0 .. "
                f"{len(self.layers) - 1} (global ids {ranges(self.layers)}); pass the local number"
            )
        known_role = as_role(operation, role)
        place = self._places.get((int(layer), known_role))
        if place is not None:
            return place
        if known_role == Role.INDEX_KEY:
            raise ValueError(
                f"{operation}: local layer {layer} (global {self.layers[layer]}) is a shared-indexer layer and has no "
                "INDEX_KEY cache; use the selection of the nearest full layer before it"
            )
        raise ValueError(
            f"{operation}: key_form={self.key_form!r} has no {known_role} buffer; ask for another role"
        )

    def page_index(self, layer: int, role: Role) -> PageIndex:
        """How slots become pages for one local layer and role.

        Raises:
            ValueError: the layer number is out of range, or the layer has no such buffer (a shared-indexer
                layer).
        """
        return self.find("CacheLayout.page_index", layer, role).index

    def layer_offsets(self, role: Role) -> tuple[int, ...]:
        """Layer offset of each local layer, -1 where the layer has no such buffer."""
        role = as_role("CacheLayout.layer_offsets", role)
        places = (self._places.get((layer, role)) for layer in range(len(self.layers)))
        return tuple(-1 if place is None else place.index.layer_offset for place in places)

    def scale(self, role: Role) -> int:
        """Pages per slot in the pool of a role; 0 where no local layer has the role."""
        for (_, owned), place in self._places.items():
            if owned == role:
                return place.index.scale
        return 0

    @functools.cached_property
    def bytes_per_token_by_role(self) -> dict[Role, int]:
        """Bytes that one token takes on this rank, by role; roles that no local layer owns are left out."""
        total: dict[Role, int] = {}
        for (_, role), place in self._places.items():
            total[role] = total.get(role, 0) + place.size // self.page_size
        return total

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all pools of this rank."""
        return sum(self.bytes_per_token_by_role.values())

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot over all pools."""
        return sum(pool.slot_bytes for pool in self.pools)

    def arrays(self, slots: int) -> tuple[ArraySpec, ...]:
        """The typed arrays of a cache with `slots` slots. A role that no local layer owns has no array.

        Args:
            slots: slots of the pool group.

        Raises:
            ValueError: `slots` is not positive, or buffers of different roles were coalesced into one pool,
                which has no typed array.
        """
        return typed_arrays(self.pools, self._token_arrays, slots, self.page_size, self.manager)

    def to_dict(self, slots: int = 1) -> dict[str, Any]:
        """Everything another process needs to find and move the pages, in JSON's types.

        Args:
            slots: slots of the pools, for the shapes of the arrays.

        Returns:
            The fields; "pools" with every buffer's place in the packed pools; "arrays" with shape, dtype and
            place of every typed array in them. Where roles share a pool, "arrays" is empty and
            "arrays_refused" says why.

        Raises:
            ValueError: `slots` is no whole number of at least 1.
        """
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "pools"
        }
        if not is_whole(slots) or slots < 1:
            raise ValueError(
                f"CacheLayout.to_dict: slots={described(slots)} must be a whole number of at least 1; pass the slots of "
                "the pool"
            )
        slots = int(slots)
        try:
            arrays, refused = self.arrays(slots), None
        except ValueError as error:
            arrays, refused = (), str(error)
        sizes = {
            "slots": slots,
            "bytes_per_token": self.bytes_per_token,
            "bytes_per_token_by_role": self.bytes_per_token_by_role,
            "bytes_per_slot": self.bytes_per_slot,
        }
        return layout_dict(fields | sizes, self.layers, self.pools, arrays, refused)

    def to_json(self, slots: int = 1) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(slots), indent=2)

    def table(self, slots: int = 1) -> str:
        """The layout as a table for people: pools, bytes, and runs of layers; shapes are those of `slots` slots."""
        return layout_table(self.to_dict(slots))

    def __str__(self) -> str:
        """The table."""
        return self.table()


def _v2_pools(
    layers: tuple[int, ...], full: tuple[bool, ...], page_bytes: dict[Role, int]
) -> tuple[PoolSpec, ...]:
    """Declares each layer's buffers and coalesces them: all DSA layers attend fully, so they have one life
    cycle.
    """
    declared = []
    for layer, owner in zip(layers, full, strict=True):
        roles = [role for role in page_bytes if role != Role.INDEX_KEY or owner]
        buffers = tuple(Buffer(role=role, page_bytes=page_bytes[role]) for role in roles)
        declared.append(LayerBuffers(layer=layer, buffers=buffers))
    # Sizes are bytes per page already; with no finer pages declared, the page size does not enter.
    return coalesce(declared, page_size=1)


def check_dsa_pools(pools: tuple[PoolSpec, ...]) -> None:
    """Refuses pools that DSA cannot address.

    Raises:
        ValueError: a KEY or INDEX_KEY buffer is expanded, or the layers' INDEX_KEY scales differ.
    """
    scales: set[int] = set()
    for pool in pools:
        for buffer in pool.buffers:
            if buffer.role in (Role.KEY, Role.INDEX_KEY) and buffer.index.expansion != 1:
                raise ValueError(
                    f"check_dsa_pools: {buffer.role} of layer {buffer.layer} has expansion "
                    f"{buffer.index.expansion}, wanted 1; "
                    "DSA needs the same page size for every buffer"
                )
            if buffer.role == Role.INDEX_KEY:
                scales.add(buffer.index.scale)
    if len(scales) > 1:
        raise ValueError(
            f"check_dsa_pools: layers have different INDEX_KEY scales {sorted(scales)}, wanted one; give "
            "every indexer the "
            "same head dimension and form"
        )


def as_role(operation: str, role: Any) -> Role:
    """A role by itself or by its name.

    Raises:
        ValueError: it is neither.
    """
    try:
        return Role(role)
    except ValueError as error:
        raise ValueError(
            f"{operation}: role is {described(role)}, wanted one of {', '.join(Role)}; pass Role.KEY or Role.INDEX_KEY"
        ) from error


def global_layers(config: DSAConfig, layers: Any) -> tuple[tuple[int, ...], list[str]]:
    """The layers that an argument `layers` means: all decoder layers for None; and what is wrong with it."""
    count = len(config.full_layers)
    if layers is None:
        return tuple(range(config.num_layers)), []
    try:
        listed = () if isinstance(layers, str) else tuple(layers)
    except TypeError:
        listed = ()
    if not listed:
        empty = isinstance(layers, (tuple, list, range, np.ndarray))
        came = "layers is empty" if empty else f"layers is {described(layers)}"
        return (), [f"{came}, a rank needs at least one layer; pass global ids such as (0, 1)"]
    strange = [described(layer) for layer in listed if not is_whole(layer)]
    if strange:
        return (), [f"layers holds {', '.join(strange)}, wanted whole numbers"]
    problems = []
    listed = tuple(map(int, listed))
    outside = [layer for layer in listed if not 0 <= layer < count]
    if outside:
        problems.append(f"layers {outside} do not exist, the model has global ids 0 .. {count - 1}")
    if len(set(listed)) != len(listed):
        problems.append(f"layers {list(listed)} repeats an id; name each layer once")
    return listed, problems
