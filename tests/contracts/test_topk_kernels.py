"""The top-k kernels, interpreted, against a NumPy model: tiles, blocks, lists, spans, and every corner of a row."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compile_without_gpu import compile_case
from dsa_jax.compat import Device, target_device
from dsa_jax.pallas import topk_mosaic, topk_triton
from dsa_jax.pallas.topk_triton import Config

NAN, INF, K, COLUMNS = np.nan, np.inf, 8, 500
NEGATIVE_NAN = np.array([0xFFC00000], np.uint32).view(np.float32)[0]
TINY = np.float32(1e-45)

CONFIGS = {
    "one tile": Config((512,), 1, 512),
    "two tile sizes, two warps": Config((256, 512), 2, 512),
    "candidate list": Config((128,), 1, 512),
    "spans": Config((128,), 1, 128),
    "floats": Config((512,), 1, 512, exact=False),
}
KERNELS = {name: partial(topk_triton.topk, config=config) for name, config in CONFIGS.items()} | {
    f"mosaic, {name}": partial(topk_mosaic.topk, config=config)
    for name, config in {
        "one block": topk_mosaic.Config(128, 4, 1),
        "keys in shared memory": topk_mosaic.Config(128, 8, 1, least=4, held=4),
        "two blocks": topk_mosaic.Config(128, 4, 2, least=1, samples=128),
        "short rows on half of a block": topk_mosaic.Config(
            256, 4, 2, least=1, samples=256, short_threads=128, short_items=4
        ),
        "four blocks, threads to spare": topk_mosaic.Config(256, 4, 4, least=1),
    }.items()
}


MOSAIC = [kernel for name, kernel in KERNELS.items() if name.startswith("mosaic")]


def model(row: np.ndarray, limit: int, k: int) -> np.ndarray:
    """Selection by a stable sort in float64: NaN last, then the greatest, then the lowest position."""
    row = row[: min(max(limit, 0), len(row))].astype(np.float64)
    order = sorted(
        range(len(row)), key=lambda i: (np.isnan(row[i]), -row[i] if not np.isnan(row[i]) else 0.0, i)
    )
    chosen = sorted(order[:k])
    return np.array(chosen + [-1] * (k - len(chosen)), np.int32)


def rows(rng: np.random.Generator) -> dict[str, tuple[np.ndarray, int]]:
    """Named rows of COLUMNS scores with their limits."""
    normal = lambda: rng.normal(size=COLUMNS).astype(np.float32)
    spread = lambda values, filler: (
        np.resize(np.array(values, np.float32), COLUMNS) if filler is None else filler
    )
    found: dict[str, tuple[np.ndarray, int]] = {}
    for limit in (
        -3,
        0,
        1,
        K - 1,
        K,
        K + 1,
        127,
        128,
        129,
        136,
        137,
        255,
        256,
        257,
        384,
        COLUMNS,
        COLUMNS + 50,
    ):
        found[f"normal, limit {limit}"] = (normal(), limit)
    found["all zeros"] = (np.zeros(COLUMNS, np.float32), COLUMNS)
    found["signed zeros"] = (spread([0.0, -0.0, -0.0], None), COLUMNS)
    found["signed zeros among negative"] = (
        np.where(rng.random(COLUMNS) < 0.1, spread([-0.0, 0.0], None), -1),
        COLUMNS,
    )
    found["ties across tiles"] = (
        np.where(np.isin(np.arange(COLUMNS), range(124, 134)), 5, normal() / 9),
        COLUMNS,
    )
    few = normal()
    few[rng.permutation(COLUMNS)[:5]] += 100
    found["large ones and ties"] = (np.where(few > 50, few, 1.0), COLUMNS)
    found["ties and small ones"] = (np.where(few > 50, -few, 1.0), COLUMNS)
    found["rounded"] = (np.round(normal() * 2) / 2, COLUMNS)
    found["constant"] = (np.full(COLUMNS, -3.25, np.float32), 150)
    found["neighbouring floats"] = (
        1 + np.arange(COLUMNS)[::-1].astype(np.float32) % 16 * np.float32(2**-23),
        COLUMNS,
    )
    found["heavy tails"] = (normal() / normal() ** 3 * 1e20, COLUMNS)
    found["far from zero"] = (normal() * np.float32(1e-3) + 1000, COLUMNS)
    found["two lumps"] = (np.where(rng.random(COLUMNS) < 0.03, normal(), normal() - 1e6), COLUMNS)
    found["infinities"] = (np.where(rng.random(COLUMNS) < 0.3, INF, -INF), COLUMNS)
    found["all -inf"] = (np.full(COLUMNS, -INF, np.float32), 100)
    found["-inf within, larger beyond"] = (np.where(np.arange(COLUMNS) < 90, -INF, 7), 90)
    found["NaN beyond the limit"] = (np.where(np.arange(COLUMNS) < 90, normal(), NEGATIVE_NAN), 90)
    found["some NaN"] = (
        np.where(rng.random(COLUMNS) < 0.5, spread([NAN, NEGATIVE_NAN], None), normal()),
        COLUMNS,
    )
    found["four numbers, else NaN"] = (np.where(np.arange(COLUMNS) % 120 == 119, normal(), NAN), COLUMNS)
    found["-inf and NaN"] = (
        np.where(np.arange(COLUMNS) % 80 == 79, -INF, spread([NAN, NEGATIVE_NAN], None)),
        COLUMNS,
    )
    found["all NaN"] = (np.full(COLUMNS, NEGATIVE_NAN, np.float32), COLUMNS)
    found["NaN first, numbers later"] = (np.where(np.arange(COLUMNS) < 300, NAN, normal()), COLUMNS)
    return {name: (row.astype(np.float32), limit) for name, (row, limit) in found.items()}


@pytest.mark.parametrize("kernel", KERNELS)
def test_corners(kernel):
    named = rows(np.random.default_rng(5))
    if kernel != "floats":
        named["subnormals"] = (
            np.resize(np.array([TINY, 3 * TINY, 0, -TINY, 2 * TINY], np.float32), COLUMNS),
            30,
        )
    logits = np.stack([row for row, _ in named.values()])
    limits = np.array([limit for _, limit in named.values()], np.int32)
    got = KERNELS[kernel](jnp.asarray(logits), jnp.asarray(limits), K)
    assert got.shape == (len(named), K)
    assert got.dtype == jnp.int32
    for name, row in zip(named, np.asarray(got), strict=True):
        np.testing.assert_array_equal(row, model(*named[name], K), err_msg=name)


MODULES = {"triton": topk_triton, "mosaic": topk_mosaic}


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(("columns", "k", "dtype"), [(5, 7, jnp.float32), (131, 3, jnp.bfloat16)])
def test_odd_widths(module, columns, k, dtype):
    """Rows that end inside a group of four, k beyond the width, scores of 16 bits."""
    rng = np.random.default_rng(2)
    logits = jnp.asarray(rng.normal(size=(4, columns)), dtype)
    limits = np.array([columns, columns - 1, k, 1], np.int32)
    got = MODULES[module].topk(logits, jnp.asarray(limits), k)
    wanted = [
        model(row, limit, k)
        for row, limit in zip(np.asarray(logits.astype(jnp.float32)), limits, strict=True)
    ]
    np.testing.assert_array_equal(got, np.stack(wanted))


def scores_of(kind: str, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Random scores with ties, infinities or NaN."""
    x = rng.normal(size=shape).astype(np.float32)
    if kind == "equal":
        return np.where(x > 0, np.float32(0), np.float32(-0.0))
    if kind == "rounded":
        return np.round(x * 2) / 2
    if kind == "mostly NaN":
        return np.where(x > -1.5, NEGATIVE_NAN, np.where(x > -2, -INF, x))
    return x


@pytest.mark.parametrize(
    ("kind", "k"), [("normal", 64), ("rounded", 64), ("mostly NaN", 64), ("mostly NaN", 300)]
)
@pytest.mark.parametrize(
    ("columns", "config"),
    [
        (3_000, topk_mosaic.Config(128, 8, 4, least=2)),
        (2_200, topk_mosaic.Config(128, 4, 1)),  # five spans of 512
        (2_200, topk_mosaic.Config(128, 4, 2, least=2)),  # three of 1,024
        (5_000, topk_mosaic.Config(128, 40, 1, held=8)),  # over 32 scores a thread: two words of marks a lane
        (9_000, topk_mosaic.Config(128, 64, 2, least=4, held=0)),
        # Rows of up to 1,024 and of up to 512 have a program of their own, the latter in each of three spans.
        (3_000, topk_mosaic.Config(256, 8, 2, least=2, short_threads=128, short_items=8)),
        (2_200, topk_mosaic.Config(128, 4, 2, least=2, short_threads=128, short_items=4)),
        # Twelve scores a thread: two lanes share a word of marks, and 24 of 32 lanes have one. The program for short rows
        # has fewer scores a thread than another block waits for.
        (3_000, topk_mosaic.Config(128, 12, 2, least=8, short_threads=128, short_items=4)),
    ],
)
def test_blocks_and_spans(kind, k, columns, config):
    """Rows of all lengths around the blocks' and spans' ends, each divided anew over blocks and threads."""
    ends = (129, 257, 310, 511, 512, 513, 575, 577, 1_023, 1_025, 2_047, 2_049)
    limits = [0, k, k + 1, *ends, columns - 1, columns]
    logits = scores_of(kind, np.random.default_rng(11), (len(limits), columns))
    got = topk_mosaic.topk(jnp.asarray(logits), jnp.asarray(limits, jnp.int32), k, config=config)
    for row, limit, positions in zip(logits, limits, np.asarray(got), strict=True):
        np.testing.assert_array_equal(positions, model(row, limit, k), err_msg=f"limit {limit}")


@pytest.mark.parametrize("cluster", [1, 2])
def test_spans_of_clusters_shorter_than_k(cluster):
    """Spans hold fewer scores than k: all of each are finds, and the second launch selects from them."""
    columns, k, config = 1_100 * cluster, 600 * cluster, topk_mosaic.Config(128, 4, cluster, least=1)
    limits = [cluster * limit for limit in (0, 511, 512, 513, 600, 601, 1_023, 1_024, 1_025, 1_100)]
    logits = scores_of("mostly NaN", np.random.default_rng(5), (len(limits), columns))
    got = topk_mosaic.topk(jnp.asarray(logits), jnp.asarray(limits, jnp.int32), k, config=config)
    for row, limit, positions in zip(logits, limits, np.asarray(got), strict=True):
        np.testing.assert_array_equal(positions, model(row, limit, k), err_msg=f"limit {limit}")


@pytest.mark.parametrize("sampled", [-100, 100, None])
def test_misleading_sample(sampled):
    """The k-th largest lies above or below all that the sample holds: the search widens its range, and stays exact."""
    columns, k = 4_096, 256
    logits = scores_of("normal", np.random.default_rng(4), (2, columns))
    places = (np.arange(16)[:, None] * 256 + np.arange(8)).reshape(-1)  # what a sample of 128 reads
    if sampled is not None:
        logits[0, places] = sampled + np.arange(128)[::-1] / 256
    logits[1, places] = 3e38 * (-1) ** np.arange(128)
    config = topk_mosaic.Config(128, 32, 1, samples=128)
    got = topk_mosaic.topk(jnp.asarray(logits), jnp.full(2, columns, jnp.int32), k, config=config)
    np.testing.assert_array_equal(got, np.stack([model(row, columns, k) for row in logits]))


@pytest.mark.parametrize("module", MODULES)
def test_large_tied_group(module):
    """A tied group far larger than k around the threshold: every distinct large one, no small one, the first of the ties."""
    scores = np.ones(10_000, np.float32)
    large, small = [9_999, 17, 5_000, 5_001, 2_500], [3, 4_000, 4_001, 8_191, 8_192]
    scores[large] = [5, 6, 7, 8, 9]
    scores[small] = 0
    logits = np.stack([scores, np.zeros_like(scores)])
    got = np.asarray(MODULES[module].topk(jnp.asarray(logits), jnp.array([10_000, 10_000], jnp.int32), 2_048))
    ties = [i for i in range(10_000) if i not in large + small][: 2_048 - 5]
    np.testing.assert_array_equal(got[0], sorted(large + ties))
    np.testing.assert_array_equal(got[1], np.arange(2_048))


@pytest.mark.parametrize(
    ("kernel", "width"),
    [
        (KERNELS["one tile"], COLUMNS),
        (KERNELS["spans"], COLUMNS),
        (KERNELS["mosaic, two blocks"], COLUMNS),
        (KERNELS["mosaic, one block"], 2 * COLUMNS),  # two spans
    ],
)
def test_cache_rows(kernel, width):
    """Positions translated through the page table of each row's request; a page that is not there leaves -1 (B24)."""
    rng, page_size = np.random.default_rng(3), 16
    limits = np.array([width, 5, 170, 0, width, width, 5, width], np.int32)
    requests = np.array(
        [1, 0, 0, -1, 2, 3, -1, 2**31 - 1], np.int32
    )  # the last three are none of the table's
    logits = rng.normal(size=(len(limits), width)).astype(np.float32)
    table = rng.permutation(240)[: 3 * 30].reshape(3, 30).astype(np.int32)
    table[2, 4] = -1
    logits[4, 64:67] = 50  # three of the best lie on the missing page
    logits[4, 479:482] = 50  # and two beyond the table
    paging = dict(page_table=jnp.asarray(table), requests=jnp.asarray(requests), page_size=page_size)
    got = kernel(jnp.asarray(logits), jnp.asarray(limits), K, **paging)
    wanted = np.full((len(limits), K), -1)
    for row in range(5):
        for i, position in enumerate(model(logits[row], int(limits[row]), K)):
            page = position // page_size
            if 0 <= page < 30 and table[requests[row], page] >= 0:
                wanted[row, i] = table[requests[row], page] * page_size + position % page_size
    np.testing.assert_array_equal(got, wanted)
    assert (wanted[4] < 0).sum() >= 5
    with pytest.raises(ValueError, match="Pass all three or none"):
        kernel(jnp.asarray(logits), jnp.asarray(limits), K, page_size=page_size)


def check_outside_of_the_table(topk, columns: int, limit: int, times: int = 1) -> None:
    """By hand, of ties: a request or a column that the table lacks gives -1, and never what lies elsewhere in it (B24).

    Args:
        topk: the kernel.
        columns, limit: of the rows that are longer than k, which is 16.
        times: how often the eight rows are repeated.
    """
    table = jnp.array([[2, 5, 7], [3, -1, 1]], jnp.int32)
    requests = [0, 1, 2, -1, 2**31 - 1, -(2**31), 0, 2] * times
    limits = ([limit] * 6 + [10, 10]) * times
    arguments = jnp.zeros((8 * times, columns)), jnp.array(limits, jnp.int32), 16
    paging = dict(requests=jnp.array(requests, jnp.int32), page_size=4)
    got = topk(*arguments, page_table=table, **paging)
    nothing = [-1] * 4
    whole = [*range(8, 12), *range(20, 24), *range(28, 32), *nothing]
    holed = [*range(12, 16), *nothing, *range(4, 8), *nothing]
    short = [*whole[:10], *[-1] * 6]
    assert got.tolist() == [whole, holed, *[nothing * 4] * 4, short, nothing * 4] * times
    assert topk(*arguments, page_table=table[:0], **paging).tolist() == [nothing * 4] * 8 * times


@pytest.mark.parametrize("kernel", [partial(topk_triton.topk, config=Config((128,), 1)), *MOSAIC])
def test_cache_rows_outside_of_the_table(kernel):
    check_outside_of_the_table(kernel, 128, 128)


@pytest.mark.parametrize("module", MODULES)
def test_no_rows(module):
    assert MODULES[module].topk(jnp.zeros((0, 64)), jnp.zeros(0, jnp.int32), 4).shape == (0, 4)


@pytest.mark.parametrize(
    "kernel",
    [
        partial(topk_triton.topk, config=Config((1024,), 4, 2048)),
        partial(topk_triton.topk, config=Config((4096,), 4, 40_960)),
        partial(topk_mosaic.topk, config=topk_mosaic.Config(128, 4, 1)),
    ],
)
def test_candidates_that_fit_nowhere_are_refused(kernel):
    """Too many tiles for a candidate list, too many spans for a cluster's merge."""
    with pytest.raises(NotImplementedError, match="more candidates than a (tile|cluster) holds"):
        kernel(jnp.zeros((1, 40_000)), jnp.zeros(1, jnp.int32), 2_048)


@pytest.mark.parametrize("columns", [1, 2_049, 8_192, 32_768, 131_072, 1 << 20])
@pytest.mark.parametrize("k", [8, 2_048])
@pytest.mark.parametrize("rows", [1, 4, 64, 4_096])
def test_default_config_fits(rows, columns, k):
    """What the kernel requires of a configuration holds for the defaults, up to a million columns."""
    launches = topk_triton.levels(topk_triton.default_config(rows, columns, k), columns, k)
    finds = columns
    for launch in launches:
        assert list(launch.tiles) == sorted(launch.tiles)
        assert all(tile % (128 * launch.warps) == 0 for tile in launch.tiles)
        assert launch.columns == launch.tiles[-1]  # no candidate lists
        spans = -(-finds // launch.columns)
        assert spans == 1 or spans * k < finds
        finds = spans * k
    assert spans == 1
    assert len(launches) <= 3


@pytest.mark.parametrize("columns", [1, 2_049, 8_192, 9_000, 32_768, 50_000, 131_072, 1 << 20])
@pytest.mark.parametrize("rows", [1, 4, 64, 130, 4_096])
def test_default_cluster_fits(rows, columns):
    """The same for clusters: two launches at most, scores in quads, shared memory that a block can have."""
    config = topk_mosaic.default_config(rows, columns)
    spans = -(-columns // config.capacity)
    assert spans == 1 or spans * topk_mosaic.MAX_K <= config.capacity
    assert (config.items % 4, config.held % 4, config.samples % config.threads) == (0, 0, 0)
    assert config.items <= 64
    assert (config.items - config.held) * config.threads * 4 <= 180_000


@pytest.mark.parametrize(
    ("device", "k", "reason"),
    [
        (Device("cpu", "cpu"), 8, "needs an NVIDIA GPU"),
        (Device("gpu", "unknown card"), 8, "needs an NVIDIA GPU"),
        (Device("gpu", "T4", (7, 5)), 8, "8.0 or more"),
        (Device("gpu", "NVIDIA H200", (9, 0)), 4_096, "at most 2048"),
    ],
)
def test_unsupported(device, k, reason):
    with pytest.raises(NotImplementedError, match=reason):
        topk_triton.supported_on(device, k=k)


@pytest.mark.parametrize(
    ("device", "k", "reason"),
    [
        (Device("gpu", "NVIDIA A100", (8, 0)), 8, "built for Hopper"),
        (Device("gpu", "NVIDIA B200", (10, 0)), 8, "built for Hopper"),
        (Device("gpu", "NVIDIA H200", (9, 0)), 4_096, "at most 2048"),
    ],
)
def test_unsupported_cluster(device, k, reason):
    with pytest.raises(NotImplementedError, match=reason):
        topk_mosaic.supported_on(device, k=k)
    topk_mosaic.supported_on(Device("gpu", "NVIDIA H200", (9, 0)), k=2_048)


def compiled_case(*, rows, columns, k=2_048, paged=False, module="triton"):
    """For `compile_without_gpu`: the kernel with its default configuration, refused where `supported_on` says so."""

    def run(logits, limits, page_table, requests):
        MODULES[module].supported_on(target_device(), k=k)
        paging = dict(page_table=page_table, requests=requests, page_size=64) if paged else {}
        return MODULES[module].topk(logits, limits, k, **paging)

    shapes = (
        ((rows, columns), jnp.float32),
        ((rows,), jnp.int32),
        ((rows, columns // 64), jnp.int32),
        ((rows,), jnp.int32),
    )
    return run, [jax.ShapeDtypeStruct(*shape) for shape in shapes]


@pytest.mark.sample(0, 1, 2, 3, 7)
@pytest.mark.compile
@pytest.mark.parametrize("card", ["sm80", "sm90", "sm100"])
@pytest.mark.parametrize(("rows", "columns", "launches"), [(64, 4_096, 1), (4, 131_072, 2), (1, 1 << 20, 3)])
def test_compiles(compile_environment, card, rows, columns, launches):
    """Short rows take one launch, longer ones a merge or two; the finds are the only workspace."""
    case = "contracts.test_topk_kernels:compiled_case"
    result = compile_case(compile_environment, card, case, rows=rows, columns=columns, paged=launches > 1)
    assert len(result.get("calls", [])) == launches, result
    assert not result["spilled"]
    assert result["temp"] <= rows * columns * 4, result


@pytest.mark.compile
@pytest.mark.parametrize(
    ("rows", "columns", "launches"),
    [
        (64, 8_192, 1),
        (4_096, 8_192, 1),
        (4, 131_072, 1),
        (64, 131_072, 1),
        (1_024, 32_768, 1),
        (1, 1 << 20, 2),
    ],
)
def test_cluster_compiles(compile_environment, rows, columns, launches):
    """One launch up to 131,072 columns, without spilled registers; the finds of spans are the only workspace."""
    case = "contracts.test_topk_kernels:compiled_case"
    options = dict(rows=rows, columns=columns, paged=columns > 8_192, module="mosaic")
    result = compile_case(compile_environment, "sm90", case, **options)
    assert len(result.get("calls", [])) == launches, result
    assert not result["spilled"]
    assert result["temp"] <= (launches - 1) * rows * columns * 4, result


@pytest.mark.compile
@pytest.mark.parametrize("card", ["sm80", "sm100"])
def test_cluster_is_refused(compile_environment, card):
    case = "contracts.test_topk_kernels:compiled_case"
    result = compile_case(compile_environment, card, case, rows=4, columns=8_192, module="mosaic")
    assert "built for Hopper" in result["refused"]
