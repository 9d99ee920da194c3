"""Pieces of the top-k kernels that work on one tile of scores held in registers.

The k-th largest score of a tile is found by counting, not by sorting: `count(x >= t)` for two thresholds a pass, placed
by interpolation between counts already known, until exactly k scores are left or the bracket holds a single value.
Thresholds are numbered by `float_key`, so that the search ends after finitely many passes whatever the scores are.
A NaN is counted nowhere, which ranks it below -inf.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from dsa_jax.pallas.topk_scores import NAN, NEGATIVE_INFINITY, TOP, Scores, float_key, key_float

_FIRST_SNAP, _SNAP_EVERY = 6, 4  # snapping costs twice a count, and most searches end before
_LATE = 10


class Threshold(NamedTuple):
    """Where to cut a tile.

    Attributes:
        key: `float_key` of the threshold; `topk_scores.NAN` if all numbers and some NaN are taken.
        reached: how many scores are at or above it, at least as many as wanted.
        above: how many are strictly above it, if `reached` is more than wanted.
    """

    key: Array
    reached: Array
    above: Array


def guess(sample: Array, shift: Array, count: Array, wanted: Array, total: Array) -> tuple[Array, Array]:
    """Two thresholds that enclose the `wanted`-th largest of `total` scores if they are about normally distributed.

    Args:
        sample: f32[S] some of the scores, NaN where there is none.
        shift: f32 scalar, one of the scores: keeps the variance of scores that lie far from zero.
        count: int32 scalar, how many there are.
        wanted: int32 scalar, at least 1 and less than `total`.
        total: int32 scalar.

    Returns:
        Lower and upper threshold, f32 scalars, NaN where the sample says nothing.
    """
    shift = jnp.where(jnp.abs(shift) < jnp.inf, shift, jnp.float32(0))
    # What is no finite number counts as the shift. That biases the guess, and a biased guess costs passes, not the result.
    centred = jnp.where(jnp.abs(sample) < jnp.inf, sample - shift, jnp.float32(0))
    count = count.astype(jnp.float32)
    mean = jnp.sum(centred) / count
    variance = jnp.sum(centred * centred) / count - mean * mean
    deviation = jnp.sqrt(jnp.maximum(variance, jnp.float32(0)))
    z = normal_quantile(wanted.astype(jnp.float32) / total.astype(jnp.float32))
    # Twice the standard error of a quantile that is estimated from mean and variance, and 2 % for the shape.
    margin = deviation * (2 * jnp.sqrt((1 + z * z / 2) / count) + jnp.float32(0.02))
    middle = mean + shift + z * deviation
    return middle - margin, middle + margin


def normal_quantile(share: Array) -> Array:
    """The z above which this share of a standard normal distribution lies, to 5e-4.

    Formula 26.2.23 of Abramowitz and Stegun, Handbook of Mathematical Functions.
    """
    tail = jnp.minimum(share, 1 - share)
    t = jnp.sqrt(-2 * jnp.log(tail))
    z = t - (2.515517 + t * (0.802853 + t * 0.010328)) / (1 + t * (1.432788 + t * (0.189269 + t * 0.001308)))
    return jnp.where(share < 0.5, z, -z)


def find_threshold(
    scores: Scores, first: tuple[Array, Array], wanted: Array, floor: Array, above_floor: Array
) -> Threshold:
    """Search the cut that leaves the `wanted` largest scores of a tile.

    Args:
        scores: the tile.
        first: two thresholds to begin with, f32 scalars, from `guess`.
        wanted: int32 scalar, less than `above_floor`.
        floor: int32 key, known to be reached by `above_floor` scores.
        above_floor: int32 scalar.

    Returns:
        The threshold. Ties are left to the caller: `reached` may exceed `wanted`.
    """
    first_low, first_high = first

    def unfinished(state):
        _, low, high, reached, _ = state
        return (reached != wanted) & (low + 1 < high)

    def one_pass(state):
        step, low, high, reached, above = state

        def snap():
            new_low, new_high = _snap(scores, low, high)
            return new_low, new_high, reached, above

        def narrow():
            a, b = _place(step, low, high, reached, above, wanted, first_low, first_high)
            at_a, at_b = scores.counts(a, b)
            low_b, low_a = at_b >= wanted, at_a >= wanted
            return (
                jnp.where(low_b, b, jnp.where(low_a, a, low)),
                jnp.where(low_b, high, jnp.where(low_a, b, a)),
                jnp.where(low_b, at_b, jnp.where(low_a, at_a, reached)),
                jnp.where(low_b, above, jnp.where(low_a, at_b, at_a)),
            )

        due = (step >= _FIRST_SNAP) & ((step - _FIRST_SNAP) % _SNAP_EVERY == 0)
        low, high, reached, above = lax.cond(due, snap, narrow)
        return step + 1, low, high, reached, above

    start = (jnp.int32(0), floor, jnp.int32(TOP), above_floor, jnp.int32(0))
    _, low, _, reached, above = lax.while_loop(unfinished, one_pass, start)
    return Threshold(low, reached, above)


def _snap(scores: Scores, low: Array, high: Array) -> tuple[Array, Array]:
    """Pull both ends of the bracket to scores that exist. This is what ends a search among ties."""
    bottom = jnp.maximum(low, NEGATIVE_INFINITY)
    least, greatest, exist = scores.extremes(bottom, high)
    # Where no number is left in the bracket, none lies above -inf there.
    high = jnp.minimum(high, jnp.where(exist, greatest, NEGATIVE_INFINITY) + 1)
    # On the NaN level the count of numbers is not known to suffice, so the low end must stay.
    return jnp.where((low > NAN) & exist, jnp.maximum(low, least), low), high


def _place(step, low, high, reached, above, wanted, first_low, first_high) -> tuple[Array, Array]:
    """Two keys strictly inside the bracket, the first not above the second.

    All warps compute this alike, pass after pass, so what is rare has a branch of its own.
    """
    bottom, top = key_float(jnp.maximum(low, NEGATIVE_INFINITY)), key_float(high - 1)
    known_bottom, known_top = jnp.abs(bottom) < jnp.inf, jnp.abs(top) < jnp.inf
    held = (reached - above).astype(jnp.float32)

    def interpolated():
        # One threshold each side of the goal: that shrinks the bracket to about the square root of what it held. The last
        # few scores are told apart by aiming between neighbours.
        aside = jnp.where(held < 24, jnp.float32(0.5), jnp.float32(0.5) * jnp.sqrt(held) + jnp.float32(0.5))
        slope = (top - bottom) / held
        goal = (reached - wanted).astype(jnp.float32)
        first = jnp.maximum(goal - aside, jnp.float32(0.25))
        second = jnp.minimum(goal + aside, held - jnp.float32(0.25))
        return float_key(bottom + slope * first), float_key(bottom + slope * second)

    def sure():
        # Thirds of the bracket by key, which is slow but sure; before those the guess, and if all lies on one side of it,
        # steps of its width.
        third = (lax.shift_right_arithmetic(high, 1) - lax.shift_right_arithmetic(low, 1)) // 3 * 2
        width = first_high - first_low
        guessed = (jnp.abs(first_low) < jnp.inf) & (width > 0)
        upwards = guessed & (step < 3) & known_bottom & ~known_top
        downwards = guessed & (step < 3) & ~known_bottom & known_top
        a = jnp.where(upwards, bottom + width, jnp.where(downwards, top - 4 * width, first_low))
        b = jnp.where(upwards, bottom + 4 * width, jnp.where(downwards, top - width, first_high))
        by_width = (guessed & (step == 0)) | upwards | downwards
        return jnp.where(by_width, float_key(a), low + third), jnp.where(by_width, float_key(b), high - third)

    thirds = ((step % 3 == 2) & (held >= 512)) | ((step > _LATE) & (step % 2 == 0))
    a, b = lax.cond(known_bottom & known_top & ~thirds, interpolated, sure)
    a = jnp.minimum(jnp.maximum(a, low + 1), high - 1)
    return a, jnp.minimum(jnp.maximum(b, a), high - 1)
