"""Rotary embedding: published vectors, the two pair rules, and where each is used."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dsa_jax.config import DSAConfig, RopeParameters, preset
from dsa_jax.models.rope import Rotation, inverse_frequencies, rotate, rotation
from dsa_jax.presets import PRESETS
from random_models import indexer_of, random_model

V32 = preset("deepseek-v3.2").rope
X = np.arange(64) / 64


def test_yarn_frequencies_of_v32():
    plain = 1e4 ** (-np.arange(32) / 32)
    got = inverse_frequencies(V32, 64)
    np.testing.assert_array_equal(got[:11], plain[:11])
    np.testing.assert_allclose(got[10:15], [0.0562341, 0.0390069, 0.0268794, 0.0183782, 0.0124480], atol=6e-8)
    np.testing.assert_allclose(got[23:], plain[23:] / 40, rtol=1e-14)
    assert got[23] == pytest.approx(3.33380e-5, rel=1e-5)


def test_plain_frequencies_of_glm():
    np.testing.assert_allclose(
        inverse_frequencies(preset("glm-5").rope, 64), 1e6 ** (-np.arange(32) / 32), rtol=1e-14
    )


@pytest.mark.parametrize(
    ("interleaved", "places", "values"),
    [
        (False, [0, 1, 31, 32, 63], [0.253183, 0.219304, 0.484047, 0.431159, 0.984536]),
        (True, [0, 1, 2, 3, 63], [0.007912, 0.013474, 0.047308, 0.030590, 0.984698]),
    ],
)
def test_vectors_of_v32_at_position_100(interleaved, places, values):
    turn = rotation(V32, 64, jnp.array([100], jnp.int32))
    got = rotate(jnp.asarray(X[None], jnp.float32), turn, interleaved=interleaved)
    # The angles are float32 products as in the reference; an angle of 100 is good to 4e-6.
    np.testing.assert_allclose(np.asarray(got)[0, places], values, atol=5e-6)


def test_two_pair_rules():
    quarter = Rotation(jnp.array([0.0, 1.0]), jnp.array([1.0, 0.0]))
    x = jnp.array([1.0, 2.0, 3.0, 4.0])
    assert rotate(x, quarter, interleaved=True).tolist() == [-2, 1, 3, 4]
    assert rotate(x, quarter, interleaved=False).tolist() == [-3, 2, 1, 4]


@pytest.mark.parametrize("interleaved", [True, False])
def test_products_depend_on_the_distance_alone(interleaved):
    draw = np.random.default_rng(0)
    q, k = (jnp.asarray(draw.standard_normal(64), jnp.float32) for _ in range(2))

    def product(query_position: int, key_position: int) -> float:
        turned = [
            rotate(x, rotation(V32, 64, jnp.int32(position)), interleaved=interleaved)
            for x, position in ((q, query_position), (k, key_position))
        ]
        return float(turned[0] @ turned[1])

    assert product(90, 50) == pytest.approx(product(45, 5), abs=1e-4)
    assert abs(product(90, 50) - product(90, 51)) > 1e-2


def test_bfloat16_is_rotated_in_float32():
    x = jnp.asarray(X, jnp.bfloat16)
    turn = rotation(V32, 64, jnp.int32(77))
    exact = rotate(x.astype(jnp.float32), turn, interleaved=True)
    assert rotate(x, turn, interleaved=True).tolist() == exact.astype(jnp.bfloat16).tolist()


def test_rule_of_the_indexer_comes_from_its_own_field():
    without = {k: v for k, v in PRESETS["deepseek-v3.2"].items() if k != "indexer_rope_interleave"}
    assert not DSAConfig.from_hf(without | {"rope_interleave": True}).indexer_rope_interleave
    assert preset("glm-5.2").indexer_rope_interleave


@pytest.mark.parametrize("interleaved", [True, False])
def test_indexer_turns_its_first_dimensions_and_no_others(interleaved):
    indexer = indexer_of(random_model("tiny", indexer_rope_interleave=interleaved))
    rotated = indexer.config.qk_rope_head_dim
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 48)), jnp.float32)
    here, there = (
        indexer.key(x, rotation(indexer.config.rope, rotated, jnp.array([p], jnp.int32)), hadamard=False)
        for p in (0, 9)
    )
    np.testing.assert_array_equal(here[:, rotated:], there[:, rotated:])
    expected = rotate(
        here[:, :rotated],
        rotation(indexer.config.rope, rotated, jnp.array([9], jnp.int32)),
        interleaved=interleaved,
    )
    np.testing.assert_array_equal(there[:, :rotated], expected)
    assert float(jnp.abs(there - here).max()) > 0.1


def test_bad_parameters_are_named():
    with pytest.raises(ValueError, match="dim is 7"):
        inverse_frequencies(V32, 7)
    with pytest.raises(ValueError, match="rope_type='linear' is not supported"):
        inverse_frequencies(dataclasses.replace(V32, type="linear"), 64)
    assert inverse_frequencies(RopeParameters(theta=100.0), 4).tolist() == pytest.approx([1.0, 0.1])
