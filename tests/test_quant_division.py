"""`exact_divide` against NumPy's division, bit for bit, whatever the device's own division is like."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import form_cases
from dsa_jax.quant import fp8

COUNT = 1 << 15


def off_by(units: int):
    """A division whose results are off by so many units in the last place."""

    def divide(x, y):
        quotient = x / y
        bits = lax.bitcast_convert_type(quotient, jnp.int32)
        usable = jnp.isfinite(quotient) & (quotient != 0)
        return jnp.where(usable, lax.bitcast_convert_type(bits + units, jnp.float32), quotient)

    return divide


DIVISIONS = {
    "its own": lambda x, y: x / y,
    "a product with the reciprocal": lambda x, y: x * (jnp.float32(1) / y),
    "too large": off_by(3),
    "too small": off_by(-3),
}


def problems() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Pairs of any bits, of quotients next to 1 and 2, next to the middles of codes, and with subnormal numbers."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 1 << 32, (2, COUNT), np.uint32).view(np.float32)
    low, high = (
        rng.integers(first, first + 50, COUNT).astype(np.float32) for first in (1 << 23, (1 << 24) - 50)
    )
    near = form_cases.near_middles(0.37)
    small = rng.integers(-(1 << 22), 1 << 22, COUNT).astype(np.int32)
    small = (np.abs(small) | (small & np.int32(-(1 << 31)))).view(np.float32)
    return {
        "any": (x, y),
        "one scale": (x, np.full_like(x, 0.37)),
        "small over large": (low, high),
        "large over small": (high, low),
        "equal": (low, low),
        "middles": (near, np.full_like(near, 0.37)),
        "subnormal": (small, np.full_like(small, 1e-38)),
    }


@pytest.mark.parametrize("estimate", DIVISIONS)
def test_correctly_rounded(estimate, monkeypatch):
    monkeypatch.setattr(fp8, "_estimate", DIVISIONS[estimate])
    divide = jax.jit(lambda x, y: fp8.exact_divide(x, y))
    for name, (x, y) in problems().items():
        with np.errstate(all="ignore"):
            want = x / y
        want = np.where(np.abs(want) < 2.0**-126, np.copysign(np.float32(0), want), want)
        got = np.asarray(divide(x, y))
        same = (got.view(np.int32) == want.view(np.int32)) | (np.isnan(got) & np.isnan(want))
        assert same.all(), (name, x[~same][:3], y[~same][:3], got[~same][:3], want[~same][:3])


def test_special_values():
    """Infinities, zeros and NaN as in IEEE arithmetic; a NaN of `x` keeps its sign."""
    x = np.array([np.inf, -np.inf, 0.0, -0.0, 1.0, 0.0, np.inf, 1.0, -1.0, -np.nan, 1.0], np.float32)
    y = np.array([2.0, 2.0, 3.0, 3.0, 0.0, 0.0, np.inf, np.inf, np.inf, 2.0, np.nan], np.float32)
    want = [np.inf, -np.inf, 0.0, -0.0, np.inf, np.nan, np.nan, 0.0, -0.0, np.nan, np.nan]
    got = np.asarray(jax.jit(fp8.exact_divide)(x, y))
    np.testing.assert_array_equal(got, np.asarray(want, np.float32))
    sign_counts = [0, 1, 2, 3, 4, 7, 8, 9]
    np.testing.assert_array_equal(np.signbit(got)[sign_counts], np.signbit(x)[sign_counts])


def test_powers_of_two():
    power = np.exp2(np.arange(-126, 127)).astype(np.float32)
    np.testing.assert_array_equal(fp8.pow2_reciprocal(jnp.asarray(power)), 1 / power)
