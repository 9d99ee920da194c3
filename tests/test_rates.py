"""What the benchmarks say a kernel moves, and how near that is to what the card allows; no time is looked at."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from benchmarks import rates, sparse_mla_check, timing, topk_append_check, xla
from benchmarks.paged_logits import ContextProblem, Problem
from benchmarks.timing import Launch

CARD = rates.Ceilings(4000.0, {"fp8": 1200.0})


@pytest.mark.parametrize(
    ("flops", "product", "wanted", "words"),
    [
        (0, "", {"gb_s": 3000, "share": 0.75, "share_of": "copy"}, "3000 GB/s  75% of copy"),
        (2.4e9, "fp8", {"tflop_s": 240, "share": 0.75, "share_of": "copy"}, "240 TFLOP/s  75% of copy"),
        (9e9, "fp8", {"tflop_s": 900, "share": 0.75, "share_of": "copy"}, "900 TFLOP/s  75% of copy"),
        (10.8e9, "fp8", {"share": 0.9, "share_of": "fp8 products"}, "1080 TFLOP/s  90% of fp8 products"),
        (10.8e9, "bf16", {"tflop_s": 1080, "share": 0.75, "share_of": "copy"}, "1080 TFLOP/s  75% of copy"),
    ],
)
def test_the_nearer_ceiling_counts(flops, product, wanted, words):
    """30 MB in 10 us are three quarters of the copy rate; products count where they are nearer to theirs, if it is known."""
    row = CARD.rates(10.0, 30e6, flops, product)
    assert {name: row[name] for name in wanted} == {
        name: value if isinstance(value, str) else pytest.approx(value) for name, value in wanted.items()
    }
    assert rates.text(row).endswith(words)


def test_a_small_share_and_the_cache_show():
    """64 appended keys move little; a row without a rate has no text."""
    row = CARD.rates(1.0, 25e3) | rates.in_cache(59e6)
    assert rates.text(row) == "    25 GB/s 0.6% of copy (L2)"
    assert rates.in_cache(60e6) == {}
    assert rates.text({"error": "does not compile"}) == ""


def test_ceilings_are_measured_on_any_device(capsys):
    """Copying in GB/s and one product, positive, and said."""
    found = rates.measure("fp8")
    assert found.copy > 0 and set(found.products) == {"fp8"} and found.products["fp8"] > 0
    assert capsys.readouterr().out == f"{found}\n"


def test_a_ceiling_that_cannot_be_measured_is_left_out(monkeypatch, capsys):
    """The run goes on with the copy rate, and says why."""

    def product_rate(name: str, size: int) -> float:
        raise NotImplementedError(f"{name} of {size}")

    monkeypatch.setattr(rates, "product_rate", product_rate)
    assert rates.measure("fp8").products == {}
    assert capsys.readouterr().out.startswith("no ceiling of fp8 products: NotImplementedError: fp8 of 128\n")


def test_bytes_of_scores():
    """Three requests of 128 keys and two new tokens: 132 or 68 bytes and two scores a key; a context's scores."""
    assert Problem(3, 128, new_tokens=2).bytes == 3 * 128 * (132 + 8)
    assert Problem(3, 128, new_tokens=2).moved(68) == 3 * 128 * (68 + 8)
    assert ContextProblem(64, 128).bytes == 64 * 128 * 4


def test_bytes_of_topk():
    """Columns beyond the true length are not read, but they are part of what makes an input large."""
    small = topk_append_check.topk_bytes(64, 8192, None)
    assert small == {"bytes": 64 * (8192 * 4 + 4 + 2048 * 4), "in_cache": True}  # 12 sets of 2 MB
    assert topk_append_check.topk_sets(64, 131072) == 6
    assert topk_append_check.topk_bytes(64, 131072, 8192) == small
    assert "in_cache" not in topk_append_check.topk_bytes(64, 131072, None)


@pytest.mark.parametrize(
    ("part", "form", "token"),
    [
        ("index", "fp8", 256 + 132),
        ("index", "fp4", 256 + 64 + 4),
        ("latent", "bf16", 1152 + 1152),
        ("latent", "fp8_ds_mla", 1152 + 656),
    ],
)
def test_bytes_of_appends(part, form, token):
    """Three tokens of five have a row: bfloat16 in, an entry out."""
    rows = np.array([3, -1, 5, -1, 9], np.int32)
    assert topk_append_check.append_bytes(part, form, rows) == {"bytes": 5 * 4 + 3 * token, "in_cache": True}


def test_many_appended_latents_leave_the_cache():
    """16 layers of 8,192 entries of 1,152 bytes are 151 MB."""
    rows = np.arange(8192, dtype=np.int32)
    assert "in_cache" not in topk_append_check.append_bytes("latent", "bf16", rows)


def test_rows_of_sparse_attention_count_once():
    """Queries that share rows share their bytes; what is compared reaches from the first query to the last."""
    rows = [np.array([[0, 2, 5], [2, 5, -1]]), np.array([[7, -1, -1], [-1, -1, -1]])]
    assert sparse_mla_check.distinct(rows) == 2  # of 3 and 1
    assert sparse_mla_check.queries_compared(3).tolist() == [0, 1, 2]
    many = sparse_mla_check.queries_compared(4096)
    assert many[:5].tolist() == [0, 1, 2, 3, 4]
    assert many[5:].tolist() == [4095 * i // 63 for i in range(1, 64)]  # 0 is among the first


def profiles(monkeypatch, *lengths: int) -> None:
    """Profiles of so many launches of one kernel, one after the other."""
    made = iter(lengths)
    monkeypatch.setattr(
        timing, "_profile", lambda _: [Launch(i, "scores", 2.0, False) for i in range(next(made))]
    )


def test_a_profile_that_lost_launches_is_repeated_once(monkeypatch):
    """Two calls of three launches each, one of which the first profile lacks; two such profiles are an error."""
    profiles(monkeypatch, 5, 6)
    assert timing.kernel_times([lambda: None] * 2, "scores") == [[2.0] * 3] * 2
    profiles(monkeypatch, 5, 7)
    with pytest.raises(timing.LostLaunches, match="7 launches of scores in 2 calls"):
        timing.kernel_times([lambda: None] * 2, "scores")


def test_the_reference_is_lowered_from_shapes():
    """The same program as from arrays: queries, weights, the pool's keys and scales, and what a step derives."""
    _, scores = xla.lower_scores(Problem(2, 128, heads=32, new_tokens=2), "fp4", 8)
    (q, weights, keys, scales, step), _ = scores.in_avals
    assert [x.shape for x in q] == [(2, 2, 32, 64), (2, 2, 32)]
    assert [x.shape for x in (weights, keys, scales)] == [(2, 2, 32), (8, 64, 64), (8, 64)]
    assert [x.dtype.name for x in (*q, weights, keys, scales)] == [
        "uint8",
        "int32",
        "float32",
        "uint8",
        "int32",
    ]
    assert step.page_table.shape == (2, 2)
    assert scores.out_info.shape == (4, 128)


def test_references_are_timed_in_order(capsys):
    """One has inputs that cannot be made, which costs it its time, not the others; when it is late none begins."""
    problem, broken = Problem(1, 64, heads=8), Problem(1, 64, heads=8, new_tokens=2)
    inputs = lambda: (
        (np.zeros((1, 1, 8, 128), np.uint8), np.ones((1, 1, 8), np.float32))
        + (np.zeros((2, 64, 128), np.uint8), np.ones((2, 64), np.float32)),
        [np.array([[1]], np.int32)],
    )
    with ThreadPoolExecutor(2) as threads:
        made = {name: threads.submit(xla.lower_scores, name, "fp8", 2) for name in (broken, problem)}
        jobs = [
            xla.Job(broken, made[broken], lambda: [].pop()),
            xla.Job(problem, made[problem], inputs),  # pyright: ignore[reportArgumentType]
        ]
        (first, left_out), (second, found) = xla.time_all(jobs, threads, lambda: False)
        assert (first, second) == (broken.name, problem.name)
        assert left_out == {"xla_left_out": "IndexError: pop from empty list"}
        assert found["xla"] > 0
        assert [found for _, found in xla.time_all(jobs, threads, lambda: True)] == [
            {"xla_left_out": "out of time"}
        ] * 2
    capsys.readouterr()
    xla.lines(
        "1x64", [{"us": 5.0, "xla": 4.0}, {"us": 2.0, "xla": 4.0}, {"error": "no"}], "us", lambda _: "mosaic"
    )
    assert capsys.readouterr().out == (
        f"{'1x64':21} mosaic 1.250 x xla (4.0 us) SLOWER\n{'1x64':21} mosaic 0.500 x xla (4.0 us)\n"
    )
