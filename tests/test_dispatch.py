"""Choice of implementation: what is tried, what is refused, and how it is said."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from dsa_jax import compat, ops
from dsa_jax.ops.dispatch import Candidate, dispatch, select

H100 = compat.describe("gpu", "NVIDIA H100 80GB HBM3")
CPU = compat.describe("cpu", "cpu")


def refuses(reason: str):
    """A ``supported`` that refuses every device."""

    def supported(device):
        raise NotImplementedError(reason)

    return supported


def fails(error: Exception):
    """A ``run`` that raises."""

    def run(*args, **kwargs):
        raise error

    return run


GOOD = Candidate("xla", lambda x: ("xla", x))


def test_the_first_that_can_run_wins():
    mosaic = Candidate("mosaic", lambda x: ("mosaic", x))
    assert dispatch("op", None, (mosaic, GOOD), 3) == ("mosaic", 3)
    assert dispatch("op", "xla", (mosaic, GOOD), 3) == ("xla", 3)
    assert dispatch("op", ("xla", "mosaic"), (mosaic, GOOD), 3) == ("xla", 3)


@pytest.mark.parametrize(
    "candidate",
    [Candidate("mosaic", fails(NotImplementedError("no"))), Candidate("mosaic", GOOD.run, refuses("no"))],
)
def test_not_implemented_lets_the_next_try(candidate):
    assert dispatch("op", None, (candidate, GOOD), 3) == ("xla", 3)
    assert dispatch("op", ("mosaic", "xla"), (candidate, GOOD), 3) == ("xla", 3)


@pytest.mark.parametrize("error", [ValueError("bad"), RuntimeError("bad"), TypeError("bad")])
def test_any_other_error_is_raised_at_once(error):
    with pytest.raises(type(error), match="bad"):
        dispatch("op", None, (Candidate("mosaic", fails(error)), GOOD), 3)


def test_a_named_implementation_is_used_or_raises():
    old = Candidate("mosaic", GOOD.run, refuses("needs sm90"))
    with pytest.raises(NotImplementedError, match="op: mosaic on .*: needs sm90"):
        dispatch("op", "mosaic", (old, GOOD), 3)
    with pytest.raises(NotImplementedError, match="op: mosaic: too wide"):
        dispatch("op", "mosaic", (Candidate("mosaic", fails(NotImplementedError("too wide"))), GOOD), 3)
    with pytest.raises(
        NotImplementedError, match=r"op: has no triton implementation, only xla.*implementation=None"
    ):
        dispatch("op", "triton", (GOOD,), 3)


def test_all_reasons_are_reported_together():
    refused = (
        Candidate("mosaic", GOOD.run, refuses("needs sm90")),
        Candidate("triton", fails(NotImplementedError("no fp4"))),
    )
    with pytest.raises(
        ExceptionGroup, match="op: no implementation can run here; pass implementation=None or 'xla'"
    ) as error:
        dispatch("op", ("mosaic", "triton"), (*refused, GOOD), 3)
    assert [str(e).rpartition(": ")[2] for e in error.value.exceptions] == ["needs sm90", "no fp4"]


def test_reasons_name_the_missing_ones_too():
    """Asked for two, one of which the op does not have: both must be accounted for."""
    refused = Candidate("triton", GOOD.run, refuses("needs a card"))
    with pytest.raises((NotImplementedError, ExceptionGroup)) as error:
        dispatch("op", ("mosaic", "triton"), (refused, GOOD), 3)
    reasons = error.value.exceptions if isinstance(error.value, ExceptionGroup) else [error.value]
    text = " ".join(map(str, reasons))
    assert "mosaic" in text
    assert "needs a card" in text


@pytest.mark.parametrize("choice", ["cuda", "XLA", "", (), ("xla", "cuda"), 5, ["xla", None]])
def test_unknown_names(choice):
    with pytest.raises(
        ValueError, match="op: implementation is .*wanted None, one of 'mosaic', 'triton', 'xla'"
    ):
        dispatch("op", choice, (GOOD,), 3)


def test_select_tells_what_would_happen():
    only_hopper = Candidate(
        "mosaic", GOOD.run, lambda device: None if device.capability == (9, 0) else refuses("no")(device)
    )
    on_card = select("op", None, (only_hopper, GOOD), H100)
    assert [(c.name, refusal) for c, refusal in on_card] == [("mosaic", None), ("xla", None)]
    on_cpu = select("op", None, (only_hopper, GOOD), CPU)
    assert [c.name for c, _ in on_cpu] == ["mosaic", "xla"]
    assert "mosaic on cpu: no" in str(on_cpu[0][1])


@pytest.mark.parametrize("name", ops.__all__)
def test_every_op_refuses_unknown_names_and_takes_xla(name):
    """The keyword exists on each op; a name that is not known is a ValueError before anything runs."""
    import inspect

    parameter = inspect.signature(getattr(ops, name)).parameters["implementation"]
    assert parameter.default is None
    assert parameter.kind is parameter.KEYWORD_ONLY


def test_an_op_that_has_no_kernel_says_so():
    with pytest.raises(NotImplementedError, match=r"topk_indices: .*mosaic|topk_indices: .*triton"):
        ops.topk_indices(jnp.zeros((1, 2)), jnp.ones(1, jnp.int32), 1, implementation=("mosaic",))
    with pytest.raises(ValueError, match="topk_indices: implementation is 'cpu'"):
        ops.topk_indices(jnp.zeros((1, 2)), jnp.ones(1, jnp.int32), 1, implementation="cpu")  # pyright: ignore[reportArgumentType]


# --- devices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "capability"),
    [
        ("NVIDIA A100-SXM4-80GB", (8, 0)),
        ("NVIDIA H100 80GB HBM3", (9, 0)),
        ("NVIDIA H200", (9, 0)),
        ("NVIDIA GH200 480GB", (9, 0)),
        ("NVIDIA B200", (10, 0)),
        ("NVIDIA A10", (8, 6)),
        ("NVIDIA Unheard-of 9000", None),
    ],
)
def test_capability_by_name(kind, capability):
    device = compat.describe("cuda", kind)
    assert device.platform == "gpu"
    assert device.capability == capability


def test_target_device_is_the_process_default():
    assert compat.target_device() == compat.from_jax(jax.devices()[0])
    assert compat.target_device().platform == "cpu"
    with jax.default_device(jax.devices("cpu")[1]):
        assert compat.target_device().platform == "cpu"


def test_target_device_honours_an_abstract_mesh():
    """What is compiled for a card that is not there must see that card."""
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

    device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="cuda")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with use_abstract_mesh(mesh):
        seen = compat.target_device()
    assert seen.capability == (9, 0)
    assert seen.cores == 132
