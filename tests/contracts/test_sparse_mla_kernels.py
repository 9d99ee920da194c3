"""The sparse MLA kernels, interpreted on the CPU, against attention in NumPy float64."""

from __future__ import annotations

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from compile_without_gpu import CARDS, compile_case
from dsa_jax import compat
from dsa_jax.compat import Device
from dsa_jax.forms import KEY_FORMS, key_arrays
from dsa_jax.pallas import sparse_mla_mosaic, sparse_mla_triton
from interpreted import INTERPRETED, races_found

SCALE, LAYER_OFFSET, SOFTMAX_SCALE = 3, 2, 0.135
H200, A100 = Device("gpu", "NVIDIA H200", (9, 0), 132), Device("gpu", "NVIDIA A100", (8, 0), 108)
B200, CPU = Device("gpu", "NVIDIA B200", (10, 0), 148), Device("cpu", "cpu")


@dataclasses.dataclass
class Problem:
    """Arguments of a kernel and the attention they should give."""

    q: jax.Array
    pages: jax.Array
    rows: jax.Array
    out: np.ndarray
    lse: np.ndarray


def problem(
    tokens: int,
    heads: int,
    keys: int,
    *,
    page_size: int = 16,
    latent: int = 64,
    rope: int = 16,
    seed: int = 0,
) -> Problem:
    """Random selections with rows of -1 anywhere, one empty query, and NaN in every row that nobody selected.

    Inputs follow FlashMLA's tests: queries clipped to 1, keys a tenth of a normal distribution.
    """
    rng = np.random.default_rng(seed)
    slots = -(-2 * keys // page_size) + 1
    rows = np.stack([rng.permutation(slots * page_size)[:keys] for _ in range(tokens)]).astype(np.int32)
    rows[rng.random(rows.shape) < 0.2] = -1
    rows[0, :: max(keys - 1, 1)] = -1  # the first and the last
    rows[-1] = -1
    if tokens > 2:
        rows[1, keys // 3 :] = -1
        rows[1, 0] = slots * page_size - 1  # the last row of the last page
    selected = rows[rows >= 0]
    where = (selected // page_size * SCALE + LAYER_OFFSET, selected % page_size)
    pages = np.full((slots * SCALE, page_size, latent + rope), np.nan, ml_dtypes.bfloat16)
    pages[where] = (rng.standard_normal((selected.size, latent + rope)) / 10).astype(ml_dtypes.bfloat16)
    q = np.clip(rng.standard_normal((tokens, heads, latent + rope)), -1, 1).astype(ml_dtypes.bfloat16)
    lse = np.full((tokens, heads), -np.inf)
    result = Problem(
        jnp.asarray(q), jnp.asarray(pages), jnp.asarray(rows), np.zeros((tokens, heads, latent)), lse
    )
    attend(result, pages.astype(np.float64))
    return result


def nowhere(rows, total: int) -> np.ndarray:
    """Selections ``int32[N, K]`` with, for -1, each value in turn that is no row of a pool of ``total`` rows."""
    rows = np.array(rows, np.int32)
    rows[rows < 0] = np.resize(
        np.array([-1, total, 2**31 - 1, -5, -(2**31)], np.int32), np.count_nonzero(rows < 0)
    )
    return rows


def rows_in_all(p: Problem) -> int:
    """Rows of a layer of the problem's pool."""
    return p.pages.shape[0] // SCALE * p.pages.shape[1]


def attend(p: Problem, keys: np.ndarray) -> None:
    """Fill in the attention over ``keys`` ``float64[P, T, width]``, one query at a time."""
    page_size, latent = keys.shape[1], p.out.shape[-1]
    for t, rows in enumerate(np.asarray(p.rows)):
        row = rows[rows >= 0]
        if row.size:
            key = keys[row // page_size * SCALE + LAYER_OFFSET, row % page_size]
            score = np.asarray(p.q[t], np.float64) @ key.T * SOFTMAX_SCALE
            top = score.max(axis=1, keepdims=True)
            weight = np.exp(score - top)
            p.out[t] = weight @ key[:, :latent] / weight.sum(axis=1, keepdims=True)
            p.lse[t] = np.log(weight.sum(axis=1)) + top[:, 0]


def run_triton(p: Problem, *, layer_offset=LAYER_OFFSET, rows=None, **config):
    latent = p.out.shape[-1]
    return sparse_mla_triton.sparse_mla(
        p.q, (p.pages,), p.rows if rows is None else rows, page_scale=SCALE, layer_offset=layer_offset,
        softmax_scale=SOFTMAX_SCALE, latent_dim=latent, config=sparse_mla_triton.Config(**config), interpret=True,
    )  # fmt: skip


def run_mosaic(p: Problem, **config):
    return sparse_mla_mosaic.sparse_mla(
        p.q, (p.pages,), p.rows, page_scale=SCALE, layer_offset=jnp.int32(LAYER_OFFSET),
        softmax_scale=SOFTMAX_SCALE, config=sparse_mla_mosaic.Config(**config), interpret=INTERPRETED,
    )  # fmt: skip


def fp8_problem(tokens: int, heads: int, keys: int) -> tuple[Problem, tuple[jax.Array, ...]]:
    """A problem in the 656-byte form, with NaN codes, scales and rope where nobody selected; scales are any numbers."""
    p = problem(tokens, heads, keys, latent=512, rope=64, page_size=64)
    rng = np.random.default_rng(keys)
    used = ~np.isnan(np.asarray(p.pages[..., 0], np.float32))
    codes = rng.integers(0, 256, (*used.shape, 512)).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x01  # a subnormal code
    codes[~used] = 0x7F
    scales = np.where(used[..., None], rng.uniform(1e-4, 1e-3, (*used.shape, 4)), np.nan).astype(np.float32)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64).reshape(*used.shape, 4, 128)
    latent = (values * scales[..., None]).reshape(*used.shape, 512)
    rope = np.asarray(p.pages[..., 512:])
    key = np.concatenate([latent, rope.astype(np.float64)], axis=-1)
    attend(p, key)
    return p, (jnp.asarray(codes), jnp.asarray(scales), jnp.asarray(rope))


def close(got: np.ndarray, want: np.ndarray, absolute: float, relative: float) -> None:
    """Every element within the absolute or the relative bound; infinities at the same places."""
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    gap = np.abs(got[finite] - want[finite])
    wrong = (gap > absolute) & (gap > relative * (np.abs(want[finite]) + 1e-6))
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} elements differ, the worst by {gap[wrong].max()}"


def check(p: Problem, result) -> None:
    """FlashMLA's tolerances for a decode step."""
    out, lse = (np.asarray(x, np.float64) for x in result)
    assert result[0].dtype == p.q.dtype
    close(out, p.out, 1e-3, 2.01 / 128)
    close(lse, p.lse, 1e-6, 8.01 / 65536)
    difference = 1 - 2 * (out * p.out).sum() / ((out**2).sum() + (p.out**2).sum())
    assert difference < 5e-6


@pytest.mark.parametrize(
    ("heads", "keys", "page_size", "splits", "block_keys", "prefetch"),
    [
        (8, 1, 1, 1, 64, False),
        (8, 70, 16, 1, 16, True),
        (16, 64, 64, 2, 32, False),
        (24, 33, 4, 3, 16, True),
        (64, 128, 128, 1, 64, False),
        (64, 96, 32, 3, 32, True),
        (128, 50, 16, 2, 16, False),
    ],
)
def test_triton_agrees_with_numpy(heads, keys, page_size, splits, block_keys, prefetch):
    p = problem(3, heads, keys, page_size=page_size, seed=heads + keys)
    check(p, run_triton(p, splits=splits, block_keys=block_keys, prefetch=prefetch))


def test_triton_takes_the_widths_of_the_models():
    p = problem(2, 16, 80, latent=512, rope=64, page_size=64)
    check(p, run_triton(p, splits=2, block_keys=32))


def test_triton_takes_a_traced_layer():
    p = problem(3, 8, 40)
    traced = jax.jit(lambda offset: run_triton(p, layer_offset=offset))
    check(p, traced(jnp.int32(LAYER_OFFSET)))
    assert np.isnan(np.asarray(traced(jnp.int32(0))[0], np.float32)).any()  # the other layers hold NaN
    out, lse = traced(jnp.int32(-1))  # no such layer
    assert not np.asarray(out, np.float32).any()
    assert np.isneginf(lse).all()


def test_triton_merges_shares_without_a_valid_row():
    p = problem(3, 8, 64)
    rows = np.asarray(p.rows)
    apart = np.full((3, 192), -1, np.int32)  # shares of 48 rows, of which the third has none
    apart[:, :64], apart[:, 160:] = rows, -1
    check(p, run_triton(p, rows=jnp.asarray(apart), splits=4, block_keys=16))


def test_merge_is_a_softmax_over_shares():
    """Two shares with sums 1 and 3, by hand: weights of a quarter and three quarters."""
    partials = jnp.stack([jnp.full((1, 2, 16), 4.0), jnp.full((1, 2, 16), 8.0)], axis=1)
    lses = jnp.log(jnp.asarray([[[1.0, 0.0], [3.0, 0.0]]]))
    out, lse = sparse_mla_triton.merge(partials, lses, jnp.float32, interpret=True)
    np.testing.assert_allclose(out[0, 0], 7.0, rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0], np.log(4.0), rtol=1e-6)
    assert not np.asarray(out[0, 1]).any()
    assert np.isneginf(lse[0, 1])


@pytest.mark.parametrize("run", [run_triton, run_mosaic])
def test_rows_given_twice_count_twice(run):
    """The output of a single row is its latent whatever its score, and a second time adds log 2 to lse."""
    p = problem(3, 8, 8, latent=512, rope=64)
    row = int(p.rows[1, 0])
    p.rows = jnp.array([[row, -1, -1, -1], [-1, row, row, -1], [-1, -1, -1, -1]], jnp.int32)
    p.q = jnp.broadcast_to(p.q[:1], p.q.shape)
    out, lse = map(np.asarray, run(p, splits=1))
    np.testing.assert_array_equal(out[1], out[0])
    np.testing.assert_allclose(lse[1] - lse[0], np.log(2), rtol=1e-5)
    assert np.isneginf(lse[2]).all()


@pytest.mark.parametrize("run", [run_triton, run_mosaic])
def test_large_scores(run):
    """Scores of hundreds, of which exp is infinite in float32: the softmax is that of their differences."""
    p = problem(3, 8, 24, latent=512, rope=64)
    p.q = (p.q.astype(jnp.float32) * 4_096).astype(jnp.bfloat16)
    attend(p, np.asarray(p.pages, np.float64))
    assert p.lse[:2].min() > 100
    out, lse = map(np.asarray, run(p, splits=1))
    np.testing.assert_allclose(lse[:2], p.lse[:2], rtol=1e-6)
    np.testing.assert_allclose(out, p.out, atol=1e-2 * np.abs(p.out).max())


@pytest.mark.parametrize("kernel", [sparse_mla_triton, sparse_mla_mosaic])
def test_no_queries(kernel):
    q, pages = jnp.zeros((0, 64, 576), jnp.bfloat16), jnp.zeros((2, 64, 576), jnp.bfloat16)
    rows = jnp.zeros((0, 128), jnp.int32)
    out, lse = kernel.sparse_mla(q, (pages,), rows, page_scale=1, layer_offset=0, softmax_scale=1.0)
    assert out.shape == (0, 64, 512)
    assert lse.shape == (0, 64)


@pytest.mark.parametrize(
    ("heads", "keys", "page_size", "splits"),
    [pytest.param(64, 200, 64, 1, marks=pytest.mark.full), (8, 300, 64, 1), (8, 140, 256, 2), (96, 70, 1, 1)],
)
def test_mosaic_agrees_with_numpy_without_races(heads, keys, page_size, splits):
    p = problem(2, heads, keys, latent=512, rope=64, page_size=page_size, seed=keys)
    result = run_mosaic(p, splits=splits)
    check(p, result)
    assert not races_found()


def test_mosaic_reads_the_656_byte_form():
    p, keys = fp8_problem(2, 64, 150)
    result = sparse_mla_mosaic.sparse_mla(
        p.q, keys, p.rows, page_scale=SCALE, layer_offset=LAYER_OFFSET, softmax_scale=SOFTMAX_SCALE,
        form="fp8_ds_mla", config=sparse_mla_mosaic.Config(splits=1), interpret=INTERPRETED,
    )  # fmt: skip
    check(p, result)
    assert not races_found()


@pytest.mark.planted
def test_a_planted_race_is_seen(monkeypatch):
    """Keys that are announced before they are written."""
    honest = sparse_mla_mosaic.INTERPRETER

    def announce_too_early(*refs, barriers, buffer, **options):
        for part in range(len(honest.parts)):
            plgpu.barrier_arrive(barriers.at[buffer * len(honest.parts) + part])
        honest.copy_rows(*refs, barriers=_NoBarriers(), buffer=buffer, **options)

    monkeypatch.setattr(plgpu, "barrier_arrive", _skip_marked(plgpu.barrier_arrive))
    dishonest = dataclasses.replace(honest, copy_rows=announce_too_early)
    monkeypatch.setattr(sparse_mla_mosaic, "INTERPRETER", dishonest)
    jax.block_until_ready(run_mosaic(problem(1, 64, 128, latent=512, rope=64, page_size=64)))
    assert races_found()


@dataclasses.dataclass
class _NoBarriers:
    """Stands for barriers on which nothing is to arrive."""

    @property
    def at(self):
        return self

    def __getitem__(self, _):
        return self


def _skip_marked(arrive):
    return lambda barrier, **options: None if isinstance(barrier, _NoBarriers) else arrive(barrier, **options)


@pytest.mark.parametrize(
    ("kernel", "device", "options", "reason"),
    [
        (sparse_mla_triton, CPU, {}, "NVIDIA GPU"),
        (sparse_mla_triton, Device("gpu", "NVIDIA V100", (7, 0), 80), {}, "8.0"),
        (sparse_mla_triton, H200, dict(form="fp4"), "KEY form fp4"),
        (sparse_mla_triton, H200, dict(form="nvfp4", rope_dim=16), "from 32 with nvfp4"),
        (sparse_mla_triton, H200, dict(latent_dim=48), "powers of two"),
        (sparse_mla_triton, H200, dict(page_size=48), "power of two"),
        (sparse_mla_mosaic, CPU, {}, "9.0"),
        (sparse_mla_mosaic, A100, {}, "9.0"),
        (sparse_mla_mosaic, B200, {}, "9.0"),
        (sparse_mla_mosaic, H200, dict(form="nvfp4"), "bf16"),
        (sparse_mla_mosaic, H200, dict(latent_dim=256), r"512 \+ 64"),
    ],
)
def test_refusals_name_their_reason(kernel, device, options, reason):
    with pytest.raises(NotImplementedError, match=reason):
        kernel.supported_on(device, **options)


FORMS = [form for form in KEY_FORMS if form != "f32"]


@pytest.mark.parametrize("form", FORMS)
def test_claimed_devices(form):
    """Every form but float32 has a kernel on every card."""
    widths: dict = dict(form=form, latent_dim=512, rope_dim=64, page_size=64)
    for device in (A100, H200, B200):
        sparse_mla_triton.supported_on(device, **widths)
    if form in ("bf16", "fp8_ds_mla"):
        sparse_mla_mosaic.supported_on(H200, **widths)


def test_splits_fill_the_cores_and_no_more():
    """128 programs are one wave of 132 cores; one query of two blocks of heads is spread out."""
    fit, config = sparse_mla_triton.fit, sparse_mla_triton.Config()
    assert fit(config, 64, 128, 2048, 132).splits == 1
    assert fit(config, 4096, 128, 2048, 132).splits == 1
    assert fit(config, 64, 64, 2048, 132).splits == 2
    assert fit(config, 1, 128, 2048, 132).splits >= 8
    assert fit(config, 1, 128, 64, 132).splits == 1  # there is one step only
    assert sparse_mla_mosaic.choose_splits(128, 16, 132) == 1
    assert sparse_mla_mosaic.choose_splits(64, 16, 132) == 2


def compiled_case(*, kernel, tokens=64, heads=128, keys=2048, pages=4096, form="bf16", config=None):
    """For `compile_without_gpu`: a kernel with its shapes, refused where its `supported_on` says so."""
    module = importlib.import_module(f"dsa_jax.pallas.sparse_mla_{kernel}")

    def run(q, rows, offset, *arrays):
        module.supported_on(compat.target_device(), form=form)
        place: dict = dict(page_scale=SCALE, layer_offset=offset, softmax_scale=SOFTMAX_SCALE, form=form)
        if config:
            place |= dict(config=module.Config(**config))
        return module.sparse_mla(q, arrays, rows, **place)

    return run, [
        jax.ShapeDtypeStruct((tokens, heads, 576), jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens, keys), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
        *[
            jax.ShapeDtypeStruct((pages, 64, *array.shape), jnp.dtype(array.dtype))
            for array in key_arrays(form, 512, 64)
        ],
    ]


CASE = "contracts.test_sparse_mla_kernels:compiled_case"


@pytest.mark.compile
@pytest.mark.parametrize(
    ("card", "kernel", "options"),
    [
        ("sm80", "triton", dict(heads=128)),
        ("sm80", "triton", dict(heads=16, keys=1000)),
        ("sm90", "triton", dict(heads=128)),
        ("sm90", "triton", dict(heads=8, tokens=1)),
        ("sm90", "triton", dict(heads=64, pages=131072)),  # more than 4 GiB: 64-bit addresses
        ("sm100", "triton", dict(heads=128)),
        ("sm100", "triton", dict(heads=16)),
        *[(card, "triton", dict(heads=128, form=form)) for form in FORMS[1:] for card in CARDS],
        *[("sm80", "triton", dict(heads=16, form=form)) for form in FORMS[1:]],
        *[
            pytest.param(card, "triton", dict(heads=16, form=form), marks=pytest.mark.full)
            for form in FORMS[1:]
            for card in ("sm90", "sm100")
        ],
        ("sm90", "mosaic", dict(heads=128)),
        ("sm90", "mosaic", dict(heads=16, tokens=1, keys=1000)),
        ("sm90", "mosaic", dict(heads=128, form="fp8_ds_mla")),
        ("sm90", "mosaic", dict(heads=16, tokens=1, form="fp8_ds_mla")),
        ("sm90", "mosaic", dict(heads=96, form="fp8_ds_mla")),
        ("sm90", "mosaic", dict(heads=128, config=dict(ahead=64))),
    ],
)
def test_claimed_cards_compile(compile_environment, card, kernel, options):
    result = compile_case(compile_environment, card, CASE, kernel=kernel, **options)
    assert any(kernel in call for call in result.get("calls", [])), result
    # Decoding leaves the computing warpgroups too few registers, by a dozen words a thread.
    assert kernel == "triton" or options.get("form") == "fp8_ds_mla" or not result["spilled"], result


@pytest.mark.compile
@pytest.mark.parametrize("card", ["sm80", "sm100"])
def test_other_cards_are_refused(compile_environment, card):
    result = compile_case(compile_environment, card, CASE, kernel="mosaic")
    assert result["refused"].startswith("NotImplementedError"), result
