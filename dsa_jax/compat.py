"""The only file that imports names which JAX does not promise to keep, and the only one that asks which device is meant."""

from __future__ import annotations

import re
from dataclasses import dataclass

import jax
from jax.core import Tracer

MOSAIC_STORES_HALF_WORDS = jax.__version_info__ < (0, 12)
"""Whether a Mosaic GPU kernel may write two bytes a thread to global memory; JAX 0.12 refuses to."""


def is_traced(value: object) -> bool:
    """Whether a value is that of a program being traced, which is not known yet."""
    return isinstance(value, Tracer)


@dataclass(frozen=True)
class Device:
    """The device that a program is traced for.

    Attributes:
        platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
        kind: the vendor's name of the card, such as ``"NVIDIA H200"``.
        capability: CUDA compute capability, ``(9, 0)`` on Hopper; ``None`` off NVIDIA cards.
        cores: streaming multiprocessors of the card; 0 where unknown.
    """

    platform: str
    kind: str
    capability: tuple[int, int] | None = None
    cores: int = 0

    def __str__(self) -> str:
        if self.capability is None:
            return self.kind or self.platform
        return f"{self.kind} (sm{self.capability[0]}{self.capability[1]})"

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that a block may have, from CUDA's table; Hopper's where no capability is known."""
        capability = self.capability or (9, 0)
        if capability[0] == 8:
            return (163 if capability in ((8, 0), (8, 7)) else 99) << 10
        return (227 if capability[0] < 12 else 99) << 10


# Name fragment -> (compute capability, SMs), for devices that are only described (compiled for, not present).
_NVIDIA_CARDS = (
    ("A100", (8, 0), 108),
    ("A30", (8, 0), 56),
    ("A10", (8, 6), 72),
    ("L40", (8, 9), 142),
    ("RTX 4090", (8, 9), 128),
    ("H200", (9, 0), 132),
    ("GH200", (9, 0), 132),
    ("H100", (9, 0), 132),
    ("H800", (9, 0), 132),
    ("B200", (10, 0), 148),
    ("GB200", (10, 0), 148),
    ("B300", (10, 3), 148),
    ("RTX PRO 6000", (12, 0), 188),
)


def target_device() -> Device:
    """The device that code traced now will run on.

    An abstract mesh in scope names it (so that a program can be compiled for a card that is not there); otherwise it is
    the default device of the process.
    """
    mesh = jax.sharding.get_abstract_mesh()
    described = getattr(mesh, "abstract_device", None)
    if described is not None:
        return describe(described.platform or "gpu", described.device_kind, described.num_cores or 0)
    device = jax.config.jax_default_device or jax.devices()[0]
    if isinstance(device, str):
        device = jax.devices(device)[0]
    return from_jax(device)


def from_jax(device) -> Device:
    """Describe a ``jax.Device`` of this process."""
    platform = "gpu" if device.platform in ("gpu", "cuda", "rocm") else device.platform
    capability = getattr(device, "compute_capability", None)
    cores = getattr(device, "core_count", None) or 0
    found = describe(platform, device.device_kind, cores)
    if capability and re.fullmatch(r"\d+\.\d+", str(capability)):
        major, minor = str(capability).split(".")
        return Device(platform, device.device_kind, (int(major), int(minor)), cores or found.cores)
    return found


def describe(platform: str, kind: str, cores: int = 0) -> Device:
    """Describe a card by its name alone; an unknown name gets no capability, so that no kernel claims it."""
    if platform in ("cuda", "gpu"):
        for fragment, capability, known_cores in _NVIDIA_CARDS:
            if re.search(rf"\b{re.escape(fragment)}\b", kind):
                return Device("gpu", kind, capability, cores or known_cores)
        return Device("gpu", kind, None, cores)
    return Device(platform, kind, None, cores)
