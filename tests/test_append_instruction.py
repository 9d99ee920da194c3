"""FP8 codes of appends, made by the card's instruction or with integer arithmetic: who gets which, and who is refused."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from dsa_jax.compat import Device
from dsa_jax.pallas import append_triton

A100, L40 = Device("gpu", "NVIDIA A100", (8, 0), 108), Device("gpu", "NVIDIA L40", (8, 9), 142)
B200 = Device("gpu", "NVIDIA B200", (10, 0), 148)
INSTRUCTION = "cvt.rn.satfinite.e4m3x2.f32"
TOKENS = 8


def append(form: str, config: append_triton.Config | None = None, interpret: bool | None = False):
    """A step's kernel of index keys or latents in FP8, not jitted, and its arguments."""
    row, pages = jnp.arange(TOKENS), lambda n, dtype=jnp.uint8: jnp.zeros((1, TOKENS, n), dtype)
    k, latent, rope = (jnp.linspace(-5, 7, TOKENS * n).reshape(TOKENS, n) for n in (128, 512, 64))
    options: dict = dict(config=config, interpret=interpret)
    if form == "index":
        run = partial(append_triton.append_index_k.__wrapped__, page_scale=1, layer_offset=0, **options)
        return run, (k, row, pages(128), jnp.zeros((1, TOKENS)))
    pools = {
        "fp8": (pages(576),),
        "nvfp4": (pages(288), pages(36)),
        "fp8_ds_mla": (pages(512), pages(4, jnp.float32), pages(64, jnp.bfloat16)),
    }[form]
    places: dict = dict(page_scales=(1,) * len(pools), layer_offsets=(0,) * len(pools))
    return partial(append_triton.append_latent_codes.__wrapped__, **places, **options), (
        latent,
        rope,
        row,
        pools,
    )


def traced(form: str, config: append_triton.Config | None = None) -> str:
    """What a card would run."""
    run, arguments = append(form, config)
    return str(jax.make_jaxpr(run)(*arguments))


@pytest.mark.parametrize("form", ["index", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize(
    ("card", "asked", "used"),
    [
        (A100, None, False), (A100, False, False), (L40, None, True), (L40, False, False), (cases.CARD, None, True),
        (cases.CARD, True, True), (cases.CARD, False, False), (B200, None, True),
    ],
)  # fmt: skip
def test_who_uses_the_instruction(monkeypatch, form, card, asked, used):
    monkeypatch.setattr(append_triton, "target_device", lambda: card)
    config = None if asked is None else append_triton.Config(4, fp8_instruction=asked)
    assert (INSTRUCTION in traced(form, config)) == used


@pytest.mark.parametrize("form", ["index", "fp8", "fp8_ds_mla"])
def test_a_card_without_it_is_refused(monkeypatch, form):
    monkeypatch.setattr(append_triton, "target_device", lambda: A100)
    with pytest.raises(NotImplementedError, match="fp8_instruction is True; NVIDIA A100 .sm80. has no such"):
        traced(form, append_triton.Config(4, fp8_instruction=True))


def test_a_form_without_it_does_not_ask(monkeypatch):
    """NVFP4's codes and those of its scales are made of integers, on a card with the instruction as well."""
    for card in (A100, cases.CARD):
        monkeypatch.setattr(append_triton, "target_device", lambda card=card: card)
        assert INSTRUCTION not in traced("nvfp4", append_triton.Config(4, fp8_instruction=True))


def test_a_number_is_no_answer():
    with pytest.raises(ValueError, match="fp8_instruction is 1, wanted bool"):
        append_triton.Config(4, fp8_instruction=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["index", "fp8", "fp8_ds_mla"])
def test_the_interpreter_has_integers(form):
    """It runs no instruction of a card, whatever the configuration says, and every configuration gives the same bytes."""
    found = []
    for asked in (None, False, True):
        run, arguments = append(form, append_triton.Config(2, fp8_instruction=asked), interpret=True)
        assert INSTRUCTION not in str(jax.make_jaxpr(run)(*arguments))
        found.append([np.asarray(x).tobytes() for x in jax.tree.leaves(run(*arguments))])
    assert found[0] == found[1] == found[2]
    assert any(found[0][0])
