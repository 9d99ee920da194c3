"""What the scoring kernel asks of the card beyond Pallas, and what stands for it in Mosaic GPU's interpreter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from dsa_jax.pallas.paged_logits_finish import finish, finish_interpreted
from dsa_jax.pallas.read_once_mosaic import read_once


@dataclasses.dataclass(frozen=True)
class Machine:
    """Operations of the kernel's body.

    Attributes:
        fence: ``() -> None``, parts ordinary reads of shared memory from the copy engine's next writes there.
        drain: ``(barriers, used, size) -> None``, waits for hand-overs that nobody waited for: the interpreter minds a
            barrier in the middle of a phase; a card does not, and the wait at the end of every block cost 0.2 us there.
        read_now: ``(ref) -> int32``, reads the one number of an array in global memory at once, where the compiler would
            put it off until it is needed.
        read_once: see ``read_once_mosaic``.
        finish: see ``paged_logits_finish``.
    """

    fence: Callable[[], None]
    drain: Callable[..., None]
    read_now: Callable[[Any], Any]
    read_once: Callable[..., None]
    finish: Callable[..., None]


def _fence() -> None:
    """`plgpu.commit_smem` without its barrier, which nobody needs here: every thread arrives for itself."""

    @plgpu.inline_mgpu()
    def fence(_):
        mgpu.utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)

    fence()


def _read_now(ref) -> Array:
    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(())),
    )
    def read(_, ref):
        i32 = mgpu.utils.dtype_to_ir_type(jnp.int32)
        address = mgpu.utils.memref_ptr(ref)
        value = mgpu.utils.inline_ptx(
            "ld.volatile.global.b32 $0, [$1];", address, result_types=i32, has_side_effects=True
        )
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return read(ref)


def _drain(barriers, used, size: int) -> None:
    """Wait for the last hand-over of every barrier that was used, oldest first."""

    def wait(i, carry):
        plgpu.barrier_wait(barriers.at[lax.rem(i, jnp.int32(size))])
        return carry

    lax.fori_loop(jnp.maximum(used - size, 0), used, wait, ())


INTERPRETER = Machine(
    fence=lambda: plgpu.commit_smem(),  # looked up at each call, so that a test can take it away
    drain=_drain,
    read_now=lambda ref: ref[0],
    read_once=lambda *refs: None,
    finish=finish_interpreted,
)
CARD = Machine(
    fence=lambda: None,
    drain=lambda barriers, used, size: None,
    read_now=_read_now,
    read_once=read_once,
    finish=finish,
)
FENCED_CARD = dataclasses.replace(CARD, fence=_fence)
