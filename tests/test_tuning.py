"""Schedules as data: the rules of the package, how a file of rules is read, and who may choose otherwise."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import pytest

from dsa_jax.compat import Device, describe
from dsa_jax.forms import INDEX_FORMS, KEY_FORMS
from dsa_jax.pallas import (
    append_triton,
    gather_triton,
    paged_logits_config,
    paged_logits_fp4_mosaic,
    paged_logits_triton,
    sparse_mla_mosaic,
    sparse_mla_triton,
    topk_mosaic,
    topk_triton,
    tuning,
)
from dsa_jax.pallas.paged_logits_config import PagedLogitsConfig as Fp8
from dsa_jax.pallas.paged_logits_fp4_mosaic import PagedLogitsFp4Config as Fp4

A100, L40, H200, B200 = (
    describe("gpu", f"NVIDIA {name}") for name in ("A100-SXM4-80GB", "L40", "H200", "B200")
)


@pytest.fixture(autouse=True)
def no_rules_left():
    """Every test begins and ends with the package's rules alone."""
    yield
    if tuning._loaded:
        tuning.load(None)


# --- what the package chooses --------------------------------------------------------------------------------------

SHORT, NARROW = Fp8(compute_warpgroups=1, stages=2, blocks_per_core=2), Fp8(blocks_per_core=2)
DOUBLE, STACKED = Fp8(compute_warpgroups=3, stages=9), Fp8(registers=(216, 72))
SEVERAL = Fp8(compute_warpgroups=3, stages=12, registers=(144, 72), product_columns=128, kept_weights=128)
MOST = dataclasses.replace(SEVERAL, stages=9)
FP4_32, FP4_64 = Fp4(compute_warpgroups=4, registers=(112, 32)), Fp4(compute_warpgroups=3)
FP4_128, FP4_WIDE = (
    Fp4(compute_warpgroups=3, registers=(152, 40)),
    Fp4(registers=(224, 56), product_columns=128),
)


@pytest.mark.parametrize(
    ("heads", "new_tokens", "requests", "keys", "fp8", "fp4"),
    [
        # Shapes of the benchmarks.
        (64, 1, 64, 32768, NARROW, FP4_64),
        (64, 1, 128, 4096, NARROW, FP4_64),
        (64, 1, 4, 131072, NARROW, FP4_64),
        (64, 1, 1, 65536, SHORT, FP4_64),
        (64, 2, 64, 32768, DOUBLE, FP4_128),
        (64, 2, 128, 4096, DOUBLE, FP4_128),
        (64, 2, 4, 131072, DOUBLE, FP4_128),
        (64, 2, 1, 65536, SHORT, FP4_128),
        (64, 4, 64, 32768, STACKED, FP4_WIDE),
        (64, 6, 64, 32768, SEVERAL, FP4_WIDE),
        (32, 1, 64, 32768, NARROW, FP4_32),
        (32, 2, 64, 32768, NARROW, FP4_64),
        (32, 4, 64, 32768, DOUBLE, FP4_128),
        (32, 6, 64, 32768, STACKED, FP4_WIDE),
        (64, 1, 16, 4096, SHORT, FP4_64),
        (32, 2, 16, 4096, SHORT, FP4_64),
        (64, 3, 16, 4096, STACKED, FP4_WIDE),
        (64, 8, 16, 4096, MOST, FP4_WIDE),
        (64, 8, 16, 2048, MOST, FP4_WIDE),
        (32, 1, 300, 2112, NARROW, FP4_32),
        # What is compiled besides; and few tiles, up to and beyond eight for each of 132 multiprocessors.
        (64, 3, 64, 32768, STACKED, FP4_WIDE),
        (64, 5, 64, 2080, SEVERAL, FP4_WIDE),
        (64, 8, 64, 32768, MOST, FP4_WIDE),
        (64, 2, 64, 2080, DOUBLE, FP4_128),
        (32, 1, 1, 65536, SHORT, FP4_32),
        (32, 8, 64, 32768, STACKED, FP4_WIDE),
        (32, 1, 64, 4096, NARROW, FP4_32),
        (64, 1, 132, 512, SHORT, FP4_64),
        (64, 1, 132, 576, NARROW, FP4_64),
    ],
)
def test_schedules_of_paged_scores(heads, new_tokens, requests, keys, fp8, fp4):
    shape = dict(heads=heads, new_tokens=new_tokens, requests=requests, keys=keys)
    assert paged_logits_config.default_config(**shape, cores=132) == fp8
    assert paged_logits_fp4_mosaic.default_config(**shape) == fp4
    hopper = (32, 4, 3) if heads * new_tokens <= 64 else (32, 2, 4)
    for card, form in itertools.product((A100, H200, B200), ("fp8", "fp4")):
        want = hopper if (card, form) == (H200, "fp8") else (8, 4, 3)
        found = paged_logits_triton.default_config(card, **shape, form=form)
        assert found == paged_logits_triton.Config(*want)


@pytest.mark.parametrize(
    ("heads", "new_tokens", "page_size", "want"),
    [
        (64, 2, 64, (32, 2, 4)), (64, 2, 128, (8, 4, 3)), (128, 1, 64, (8, 4, 3)), (16, 8, 256, (8, 4, 3)),
        (64, 1, 256, (32, 4, 3)),
    ],
)  # fmt: skip
def test_two_warps_have_no_registers_for_larger_products(heads, new_tokens, page_size, want):
    """Products of 128 keys and 64 heads, or of 64 and 128, spill with two warps (tests/test_compile_paged_logits.py)."""
    shape = dict(heads=heads, new_tokens=new_tokens, requests=64, keys=32768, page_size=page_size)
    assert paged_logits_triton.default_config(H200, **shape) == paged_logits_triton.Config(*want)


@pytest.mark.parametrize(
    ("card", "heads", "page_size", "rows"),
    [
        # FP8 and FP4. Half-size shared memory of consumer cards: sums of queries and page, not the other bounds.
        (H200, 64, 64, (4, 4)),
        (H200, 64, 256, (4, 4)),
        (H200, 32, 128, (8, 4)),
        (H200, 128, 256, (2, 2)),
        (A100, 64, 256, (4, 4)),
        (A100, 16, 256, (8, 4)),
        (B200, 64, 128, (4, 4)),
        (L40, 64, 64, (4, 4)),
        (L40, 64, 128, (3, 3)),
        (L40, 128, 128, (1, 1)),
        (L40, 16, 256, (0, 0)),
    ],
    ids=str,
)
def test_rows_of_a_triton_program(card, heads, page_size, rows):
    shape = dict(heads=heads, page_size=page_size)
    found = tuple(paged_logits_triton.rows_at_once(card, **shape, fp4=fp4) for fp4 in (False, True))
    assert found == rows
    refused = pytest.raises(NotImplementedError, match="page_size is 256; NVIDIA L40 .* 101376 bytes")
    with contextlib.nullcontext() if rows[0] else refused:
        paged_logits_triton.supported_on(card, **shape, new_tokens=1)


@pytest.mark.parametrize("heads", [32, 64])
def test_schedule_of_contexts(heads):
    narrow = dict(group_columns=256, product_columns=128, kept_weights=128)
    want = Fp8(compute_warpgroups=3, stages=6, registers=(144, 72), **narrow)
    assert paged_logits_config.prefill_config(heads=heads) == want


@pytest.mark.parametrize(
    ("rows", "columns", "mosaic", "triton"),
    [
        # threads, items, cluster, samples, threads for short rows; tiles, warps
        (64, 32768, (512, 32, 2, 2048), ((8192, 32768), 16)),
        (64, 8192, (512, 16, 1, 1024), ((8192,), 8)),
        (64, 131072, (1024, 64, 2, 2048, 512), ((8192, 16384), 8)),
        (4, 131072, (512, 32, 8, 2048), ((8192, 32768), 16)),
        (1, 32768, (512, 32, 2, 2048), ((8192, 32768), 16)),
        (128, 16384, (1024, 16, 1, 2048), ((8192, 16384), 8)),
        (1, 1 << 20, (512, 32, 8, 2048), ((8192, 32768), 16)),
        (4096, 8192, (256, 32, 1, 512), ((8192,), 8)),
        (1024, 32768, (512, 64, 1, 2048), ((8192, 32768), 16)),
        (256, 131072, (1024, 64, 2, 2048, 512), ((8192, 16384), 8)),
        (64, 4096, (512, 8, 1, 1024), ((4096,), 4)),
        # Either side of the other bounds: two rows, one, a half, a quarter and an eighth of a multiprocessor's.
        (264, 1000, (512, 4, 1, 1024), ((1024,), 2)),
        (265, 2048, (256, 8, 1, 512), ((2048,), 2)),
        (265, 4096, (256, 16, 1, 512), ((4096,), 4)),
        (132, 20000, (1024, 32, 1, 2048), ((8192, 32768), 16)),
        (67, 32768, (1024, 32, 1, 2048), ((8192, 32768), 16)),
        (33, 65536, (512, 32, 4, 2048), ((8192, 32768), 16)),
        (34, 65536, (1024, 64, 1, 2048), ((8192, 32768), 16)),
        (16, 65537, (512, 32, 8, 2048), ((8192, 32768), 16)),
        (17, 65537, (1024, 64, 2, 2048, 512), ((8192, 32768), 16)),
        (132, 32769, (1024, 64, 1, 2048), ((8192, 16384), 8)),
    ],
)
def test_schedules_of_top_k(rows, columns, mosaic, triton):
    threads, items, cluster, samples, *short = mosaic
    want = topk_mosaic.Config(threads, items, cluster, samples=samples, short_threads=sum(short))
    assert topk_mosaic.default_config(rows, columns, 132) == want
    assert topk_triton.default_config(rows, columns, 2048) == topk_triton.Config(*triton)


@pytest.mark.parametrize(
    ("form", "card", "triton"),
    [
        ("bf16", A100, (32, 64, 0, 8, 2, False, 512)),
        ("bf16", H200, (64, 64, 0, 8, 3, False, 512)),
        ("bf16", B200, (64, 64, 0, 8, 3, False, 512)),
        *[(form, A100, (32, 32, 0, 8, 2, False, 128)) for form in ("fp8", "nvfp4", "fp8_ds_mla")],
        *[(form, H200, (32, 64, 0, 8, 2, False, 128)) for form in ("fp8", "nvfp4", "fp8_ds_mla")],
        *[(form, B200, (32, 32, 0, 8, 2, False, 128)) for form in ("fp8", "nvfp4", "fp8_ds_mla")],
        ("bf16", Device("gpu", "unheard of"), (64, 64, 0, 8, 3, False, 512)),
    ],
)
def test_schedules_of_attention(form, card, triton):
    """Whatever the number of queries, heads and keys."""
    registers = dict(compute_registers=208, copy_registers=88, ahead=64) if form == "fp8_ds_mla" else {}
    for tokens, heads, keys in itertools.product((1, 8, 64, 128, 4096), (8, 16, 64, 128), (1000, 2048)):
        shape = dict(tokens=tokens, heads=heads, keys=keys)
        assert sparse_mla_triton.default_config(card, form, **shape) == sparse_mla_triton.Config(*triton)
        assert sparse_mla_mosaic.default_config(card, form, **shape) == sparse_mla_mosaic.Config(**registers)


def every_choice():
    """Ask for schedules of many shapes, so that each rule has its turn."""
    for columns in (1000, 2000, 4000, 8000, 16000, 32000, 65000, 131072):
        for rows in (1, 16, 33, 66, 132, 264, 4096):
            topk_mosaic.default_config(rows, columns)
            topk_triton.default_config(rows, columns, 2048)
    shapes = [(32, 1, 64), *((64, new_tokens, 64) for new_tokens in (1, 2, 4, 6, 8)), (64, 1, 1)]
    for heads, new_tokens, requests in shapes:
        shape = dict(heads=heads, new_tokens=new_tokens, requests=requests, keys=32768)
        paged_logits_config.default_config(**shape, cores=132)
        paged_logits_fp4_mosaic.default_config(**shape)
        for card in (A100, H200):
            paged_logits_triton.default_config(card, **shape)
    paged_logits_config.prefill_config(heads=64)
    for card in (A100, H200):
        for form in ("bf16", "fp8", "nvfp4", "fp8_ds_mla"):
            for module in (sparse_mla_mosaic, sparse_mla_triton):
                module.default_config(card, form, tokens=64, heads=128, keys=2048)
            for heads in (16, 128):
                facts = {"form": form, "tokens": 64, "heads": heads}
                tuning.choose("sparse_mla", tuning.Preference, facts, card)
    for form, tokens in itertools.product(INDEX_FORMS, (64, 8192)):
        append_triton.default_config(form, tokens=tokens, row_bytes=512)
    for form, tokens in itertools.product(KEY_FORMS, (64, 8192)):
        append_triton.default_config(form, tokens=tokens, row_bytes=1152, latent=True)
    append_triton.default_config("f32", tokens=64, row_bytes=2048)
    gather_triton.default_config("fp8", rows=1)
    for form in ("f32", "fp8"):
        tuning.choose("append_index_k", tuning.KernelOrReference, {"form": form, "tokens": 8192})
    for form, products in (("fp8", 1), ("fp4", 1), ("fp4", 2**28)):
        facts = {"form": form, "rows_per_request": 64, "products": products}
        tuning.choose("many_row_scores", tuning.Preference, facts)


def test_every_rule_is_reached(monkeypatch):
    """No rule stands in another's shadow, so none can be changed without an effect."""
    found, find = set(), tuning.find

    def recording(*arguments):
        rule = find(*arguments)
        found.add(rule.name)
        return rule

    monkeypatch.setattr(tuning, "find", recording)
    every_choice()
    assert {rule.name for _, rule in tuning.each(tuning.package())} - found == set()


@pytest.mark.parametrize("kernel", tuning.KERNELS)
def test_every_rule_is_valid(kernel):
    """Each builds its kernel's class, and the last of a kernel's rules holds for every device and shape."""
    rules = tuning.package()[kernel]
    make = tuning.KERNELS[kernel].config_type()
    built = [rule.build(make) for given in rules.values() for rule in given]
    assert all(type(config) is make for config in built)
    assert not rules[tuning.DEFAULT][-1].when
    assert len({(rule.name) for given in rules.values() for rule in given}) == len(built)


# --- files of one's own --------------------------------------------------------------------------------------------

RULE = {
    "when": {"rows": [60, 70], "columns": [None, 40000]},
    "config": dict(threads=256, items=16, cluster=8),
}


def written(path, content):
    path.write_text(json.dumps(content))
    return path


def chosen(rows, columns, card=H200):
    """The cluster kernel's choice on a card."""
    facts = dict(rows=rows, columns=columns, cores=132, rows_per_core=rows / 132)
    return tuning.choose("topk_mosaic", topk_mosaic.Config, facts, card)


def test_loaded_rules_come_first(tmp_path):
    own, package = topk_mosaic.Config(256, 16, 8), topk_mosaic.Config(512, 32, 2)
    assert chosen(64, 32768) == package
    assert tuning.load(written(tmp_path / "a.json", {"topk_mosaic": {"NVIDIA H200": [RULE]}})) == 1
    # Intervals are closed, null is no bound, and what no loaded rule takes is the package's.
    for rows, columns, want in ((60, 1, own), (70, 40000, own), (59, 20000, package), (71, 40000, None)):
        assert chosen(rows, columns) == (want or topk_mosaic.Config(1024, 64, 1))
    assert chosen(64, 32768, B200) == package
    assert tuning.load(None) == 0
    assert chosen(64, 32768) == package


@pytest.mark.parametrize(
    ("kind", "card", "applies"),
    [
        ("NVIDIA H200", "NVIDIA H200", True),
        ("H200", "NVIDIA H200", True),
        ("H200", "NVIDIA GH200 480GB", False),
        ("A10", "NVIDIA A100-SXM4-80GB", False),
        ("A100", "NVIDIA A100-SXM4-80GB", True),
        ("default", "NVIDIA B200", True),
        ("H100", "NVIDIA H200", False),
    ],
)
def test_kinds_of_device(tmp_path, kind, card, applies):
    tuning.load(written(tmp_path / "a.json", {"topk_mosaic": {kind: [RULE]}}))
    assert (chosen(64, 32768, describe("gpu", card)).cluster == 8) is applies


def test_a_kind_comes_before_the_default(tmp_path):
    other = {"config": dict(threads=128, items=4, cluster=1)}
    path = written(tmp_path / "a.json", {"topk_mosaic": {"default": [other], "H200": [RULE]}})
    assert tuning.load(path) == 2
    assert [chosen(64, 32768).threads, chosen(1, 32768).threads, chosen(64, 32768, A100).threads] == [
        256, 128, 128
    ]  # fmt: skip


def test_loading_reaches_programs_that_were_traced(tmp_path, monkeypatch):
    """The same call after loading follows the new rules: nothing that was traced under the old ones is kept."""
    seen, plan = [], topk_mosaic._plan
    recording = lambda k, columns, config, span: seen.append(config) or plan(k, columns, config, span)
    monkeypatch.setattr(topk_mosaic, "_plan", recording)
    call = lambda: topk_mosaic.topk(jnp.arange(600.0)[None], jnp.array([600], jnp.int32), 3)
    own = topk_mosaic.Config(128, 8, 1, samples=512)
    first, again = call(), call()
    fields = dict(threads=128, items=8, cluster=1, samples=512)
    tuning.load(written(tmp_path / "a.json", {"topk_mosaic": {"default": [{"config": fields}]}}))
    assert call().tolist() == first.tolist() == again.tolist() == [[597, 598, 599]]
    assert seen == [topk_mosaic.Config(512, 4, 1, samples=1024), own]


def broken(change):
    content = {"topk_mosaic": {"H200": [copy.deepcopy(RULE), copy.deepcopy(RULE)]}}
    change(content["topk_mosaic"]["H200"][1])
    return content


SECOND = r"topk_mosaic / H200 / 2.*"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "holds a list, wanted an object of kernels"),
        ({"topk": {}}, "unknown kernel 'topk', wanted one of .*topk_mosaic"),
        ({"topk_mosaic": []}, "topk_mosaic: wanted an object of lists of rules"),
        ({"topk_mosaic": {"H200": RULE}}, "topk_mosaic: wanted an object of lists of rules"),
        (broken(dict.clear), SECOND + "wanted an object with a config"),
        (broken(lambda r: r.update(whem={})), SECOND + "unknown whem, wanted when, config and why"),
        (broken(lambda r: r.update(why=3)), SECOND + "a string as why"),
        (broken(lambda r: r["when"].update(row=[1, 2])), SECOND + "unknown condition 'row', wanted one of rows"),
        (broken(lambda r: r["when"].update(rows=[2, 1])), SECOND + r"rows is \[2, 1\], wanted \[least, most\]"),
        (broken(lambda r: r["when"].update(rows=64)), SECOND + "rows is 64"),
        (broken(lambda r: r["when"].update(rows=[1])), SECOND + r"rows is \[1\]"),
        (broken(lambda r: r["when"].update(rows=["a", None])), SECOND + "rows is"),
        (broken(lambda r: r["config"].update(thread=1)), SECOND + "unknown field 'thread', wanted one of threads"),
        (broken(lambda r: r["config"].pop("items")), SECOND + "items is missing"),
        (broken(lambda r: r["config"].update(items="8")), SECOND + "items is '8', wanted int"),
        (broken(lambda r: r["config"].update(items=True)), SECOND + "items is True, wanted int"),
        (broken(lambda r: r["config"].update(threads=96)), SECOND + "threads is 96, wanted a power of two from 128"),
        ({"sparse_mla": {"default": [{"config": {"first": "xla"}}]}}, "sparse_mla / default / 1.*first is 'xla'"),
        ({"append_index_k": {"default": [{"config": {"first": "mosaic"}}]}}, "append_index_k / .*first is 'mosaic'"),
        ({"sparse_mla": {"default": [{"when": {"form": []}, "config": {}}]}}, r"form is \[\], wanted a list of words"),
        ({"append_index_k": {"": [{"config": {"first": "xla"}}]}}, "append_index_k: a kind of device has no name"),
        (
            {"append_index_k": {"H200": [{"when": {"form": ["F32", "bf16"]}, "config": {"first": "xla"}}]}},
            "append_index_k / H200 / 1: unknown form F32, bf16, wanted fp8, f32, fp4",
        ),
        ({"many_row_scores": {"default": [{"config": {"first": "xla"}}]}}, "wanted 'mosaic' or 'triton'. Correct"),
        (
            {"paged_logits_mosaic": {"default": [{"config": {"compute_warpgroups": 0}}]}},
            "compute_warpgroups is 0, wanted a multiple of 1 from 1 to 7",
        ),
    ],
)  # fmt: skip
def test_broken_files_are_refused_by_rule(tmp_path, content, message):
    """And change nothing."""
    tuning.load(written(tmp_path / "good.json", {"topk_mosaic": {"H200": [RULE]}}))
    with pytest.raises(ValueError, match="tuning: .*broken.json.*" + message):
        tuning.load(written(tmp_path / "broken.json", content))
    assert chosen(64, 32768) == topk_mosaic.Config(256, 16, 8)


def test_all_problems_are_told_together(tmp_path):
    content = {"topk_mosaic": {"a": [{"when": {"row": [1, 2]}, "config": {}}], "b": [{}]}, "other": {}}
    with pytest.raises(ValueError, match="(?=.*a / 1.*'row')(?=.*b / 1.*config)(?=.*'other')"):
        tuning.load(written(tmp_path / "a.json", content))
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(ValueError, match="b.json is no JSON"):
        tuning.load(tmp_path / "b.json")
    with pytest.raises(FileNotFoundError):
        tuning.load(tmp_path / "none.json")
    (tmp_path / "c.json").write_text("{}", encoding="utf-16")
    with pytest.raises(ValueError, match="c.json is no UTF-8.* Save it as UTF-8"):
        tuning.load(tmp_path / "c.json")
    (tmp_path / "d.json").write_text('{"sparse_mla": {"H200": [], "H200": []}}')
    with pytest.raises(ValueError, match="d.json has 'H200' twice in one object"):
        tuning.load(tmp_path / "d.json")
    (tmp_path / "e.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="e.json is nested too deeply"):
        tuning.load(tmp_path / "e.json")
    with pytest.raises(ValueError, match="path is {}, wanted a file's path or None"):
        tuning.load({})  # pyright: ignore[reportArgumentType]


def test_facts_are_complete():
    """A kernel that forgets a number would never see a rule about it."""
    with pytest.raises(ValueError, match="topk_mosaic was asked about .*wanted"):
        tuning.choose("topk_mosaic", topk_mosaic.Config, {"rows": 1}, H200)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: topk_mosaic.Config(100, 5, 3), "(?=.*threads is 100)(?=.*items is 5)(?=.*cluster is 3)"),
        (
            lambda: topk_mosaic.Config(512, 8, 1, samples=256),
            "samples is 256, wanted a power of two from 512",
        ),
        (lambda: topk_mosaic.Config(512.0, 8, 1), "threads is 512.0, wanted int"),
        (lambda: topk_triton.Config([1024], 2), r"tiles is \[1024\], wanted tuple\[int, ...\]"),
        (lambda: topk_triton.Config((1024,), None), "warps is None, wanted int"),
        (lambda: topk_mosaic.Config("1024", 64, 2), "threads is '1024', wanted int"),
        (lambda: topk_mosaic.Config(1024, 64, 2, short_threads=True), "short_threads is True, wanted int"),
        (lambda: topk_triton.Config((1024,), 16), "tiles is .*from 2048"),
        (lambda: topk_triton.Config((2048, 1024), 2), "tiles is .*ascending"),
        (lambda: topk_triton.Config((1024,), 2, 1500), "span is 1500, wanted None or a multiple"),
        (lambda: topk_triton.Config((1024,), 2, merge_tile=300), "merge_tile is 300, .* from 256 to 32,768"),
        (lambda: sparse_mla_triton.Config(block_keys=48, num_stages=0), "(?=.*block_keys)(?=.*num_stages)"),
        (lambda: sparse_mla_mosaic.Config(compute_registers=232), "copy_registers is 56, wanted .*to 40"),
        (lambda: sparse_mla_mosaic.Config(prefetch=32), "prefetch is 32, wanted 64 or 128 or 256"),
        (
            lambda: Fp8(compute_warpgroups=3, stages=4),
            "stages is 4, wanted None or a multiple of the 3 compute",
        ),
        (
            lambda: Fp8(product_columns=0, query_buffers=3),
            "(?=.*query_buffers is 3)(?=.*product_columns is 0)",
        ),
        (
            lambda: Fp8(compute_warpgroups=3, registers=(216, 72)),
            "registers is .*3 times the first .* at most 512",
        ),
        (lambda: Fp4(waves=0, kept_weights="all"), "PagedLogitsFp4Config: kept_weights is 'all', wanted int"),
        (lambda: Fp4(together=0), "together is 0, wanted a multiple of 1 from 1 to 16"),
        (lambda: paged_logits_triton.Config(num_warps=3), "num_warps is 3, wanted a power of two"),
    ],
)
def test_configurations_say_what_they_take(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_choices_are_hashable():
    """Lists of JSON become tuples: a schedule is a static argument."""
    config = topk_triton.default_config(64, 32768, 2048)
    assert hash(config) == hash(dataclasses.replace(config))
    assert jax.jit(lambda c: c.tiles[-1], static_argnums=0)(config) == 32768


@pytest.mark.parametrize("field", ["product_columns", "group_columns"])
@pytest.mark.parametrize("config", [Fp8, Fp4])
def test_columns_hold_the_heads_of_a_token(config, field):
    count = lambda columns, heads: paged_logits_config.tokens_at_once(
        config(**{field: columns}), field, heads
    )
    assert [count(128, 32), count(128, 64), count(64, 64)] == [4, 2, 1]
    with pytest.raises(ValueError, match=f"{config.__name__}: {field} is 32, wanted at least the 64 heads"):
        count(32, 64)
