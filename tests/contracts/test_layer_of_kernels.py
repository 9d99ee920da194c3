"""One layer made of kernels, through the public ops: what a step writes, selects and attends, against NumPy.

Index keys, queries and weights are small whole numbers, which every kernel scores exactly, so that most choices are ties and
all selections must be equal, on a card as well. Everything that a step must not look at is NaN: unused pages, the first and
the last page among them, places beyond a length, index queries, weights and keys of padding tokens. B04, B11, B15, B16,
B19, B23, B31, B32, B34, B42, B64 and B65 are scenarios of such steps.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import cases
from card_scores import no_case
from dsa_jax import ops
from dsa_jax.layout import CacheLayout
from dsa_jax.metadata import Bucket, StepMetadata
from dsa_jax.ops import dispatch
from interpreted import INTERPRETED, races_found
from numpy_model import attention, encode_e4m3, row_of, scores, topk

TOKENS, K, HEADS, SCALE = 20, 8, 8, 0.135
LATENT, ROPE = 512, 64
_RNG = np.random.default_rng(3)
KEYS = _RNG.integers(-1, 2, (TOKENS, 128)).astype(np.float32)
KEYS[0] = 0  # B11: a zero key scores exactly 0, which beats many others
LATENTS = (_RNG.normal(size=(TOKENS, LATENT + ROPE)) / 10).astype(ml_dtypes.bfloat16)
ATTENTION = _RNG.normal(size=(TOKENS, HEADS, LATENT + ROPE)).astype(ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True)
class Request:
    """A sequence of which the last ``new`` tokens are this step's, and how many the scheduler says there are."""

    length: int
    new: int
    said: int | None = None

    def sequence(self, seed: int) -> list[int]:
        return np.random.default_rng(seed).integers(0, TOKENS, self.length).tolist()


RAGGED = (Request(70, 4), Request(3, 2), Request(0, 0), Request(130, 1), Request(1, 1, said=6), Request(9, 4))
"""More and fewer keys than a page and than K, an empty request, and one that a careless scheduler pads (B31)."""
EMPTY = (Request(0, 0),) * 3
CONTEXTS = (Request(131, 5), Request(0, 0), Request(6, 6))


def numbers(index_heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Query values and weights of every token; a third of the weights is negative (B15)."""
    rng = np.random.default_rng(index_heads)
    q = rng.integers(-1, 2, (TOKENS, index_heads, 128)).astype(np.float32)
    return q, rng.integers(-2, 4, (TOKENS, index_heads)).astype(np.float32)


@functools.cache
def layout_of(page_size: int, manager: Any = "v2") -> CacheLayout:
    """Three layers with the released widths; the middle one shares a selection."""
    model = dataclasses.replace(cases.config(index_head_dim=128), kv_lora_rank=LATENT, qk_rope_head_dim=ROPE)
    return CacheLayout.create(model, manager=manager, index_form="fp8", key_form="bf16", page_size=page_size)


class Case:
    """A step over a poisoned cache, and what must come out of it."""

    def __init__(
        self, decodes, contexts, *, next_n, index_heads, page_size, slots=None, manager="v2", layer=2
    ):
        self.layout, self.layer, self.index_heads = layout_of(page_size, manager), layer, index_heads
        requests = [*contexts, *decodes]
        texts = [request.sequence(seed) for seed, request in enumerate(requests)]
        pages = [-(-request.length // page_size) for request in requests]
        slots = slots or sum(pages) + 2
        # The pool's last slot and its first are used, those next to them are not, if there are so many.
        order = np.random.default_rng(page_size).permutation(np.arange(1, max(slots - 1, 1))).tolist()
        free = [slots - 1, *([0] if slots > 1 else []), *order]
        self.tables = [[free.pop(0) for _ in range(count)] for count in pages]
        width = max(*pages, 1) + 1
        self.cache = cases.poisoned(self.layout, slots)
        for table, text, request in zip(self.tables, texts, requests, strict=True):
            held = request.length - request.new
            rows = [row_of([table], 0, p, page_size) for p in range(held)]
            self.cache = self._written(self.cache, rows, np.array(text[:held], int))
        places = [
            (r, p)
            for r, request in enumerate(contexts)
            for p in range(request.length - request.new, request.length)
        ]
        packed = len(places) + 3 if contexts else 0
        places += [(-1, -1)] * (packed - len(places))
        self.said = [request.new for request in contexts]
        for r, request in enumerate(decodes, start=len(contexts)):
            said = request.new if request.said is None else min(request.said, next_n)
            self.said.append(said)
            own = [(r, request.length - said + j) for j in range(said)]
            own = [(r, p) if p >= 0 else (-1, -1) for r, p in own]
            places += own + [(-1, -1)] * (next_n - said)
        self.places = places
        self.ids = np.array([texts[r][p] if r >= 0 else 0 for r, p in places])
        self.real = np.array([r >= 0 for r, _ in places], bool)
        bucket = Bucket(
            context_requests=len(contexts),
            context_tokens=packed,
            decode_requests=len(decodes),
            next_n=next_n,
            table_width=width,
        )
        lens = [request.length for request in requests]
        meta = StepMetadata.create(self.layout, bucket, self.tables, lens, [q.new for q in requests])
        # Stale columns: no page, one beyond the pool, another request's.
        table = np.array(meta.page_table)
        for r, count in enumerate(pages):
            table[r, count:] = np.resize([-5, 1 << 28, 0, slots - 1], width - count)
        self.meta = dataclasses.replace(
            meta, page_table=jnp.asarray(table), new_lens=jnp.asarray(self.said, jnp.int32)
        )
        self._expect(texts)

    def _written(self, cache, rows, ids):
        """Keys and latents of tokens at rows, by plain assignment."""
        cache = cases.write_keys(cache, self.layer, rows, KEYS[ids])
        return cases.write(cache, "key", self.layer, rows, LATENTS[ids])

    def _expect(self, texts) -> None:
        q, weights = numbers(self.index_heads)
        size, tables = self.layout.page_size, self.tables
        rows = [row_of(tables, r, p, size) for r, p in self.places]
        self.after = self._written(self.cache, rows, self.ids)
        self.rows = np.full((len(rows), K), -1, np.int32)
        self.out = np.zeros((len(rows), HEADS, LATENT))
        self.lse = np.full((len(rows), HEADS), -np.inf)
        for t, (r, p) in enumerate(self.places):
            if r < 0:
                continue
            seen = texts[r][: p + 1]
            score = scores(q[self.ids[t]], weights[self.ids[t]], KEYS[seen])
            chosen = [position for position in topk(score, p + 1, K) if position >= 0]
            self.rows[t, : len(chosen)] = [row_of(tables, r, position, size) for position in chosen]
            keys = LATENTS[[seen[position] for position in chosen]].astype(np.float64)
            self.out[t], self.lse[t] = attention(ATTENTION[self.ids[t]], keys, LATENT, SCALE)

    def attended(self, few: bool) -> np.ndarray:
        """Tokens that attend: all, or a long, a short and an empty one: each takes Mosaic's interpreter seconds."""
        if not few:
            return np.arange(len(self.places))
        found = (self.rows >= 0).sum(axis=1)
        kinds = (found == K, (found > 0) & (found < K), found == 0)
        return np.unique([np.flatnonzero(kind)[-1] for kind in kinds if kind.any()])

    def run(self, implementation: Any, *, layer=None, few: bool = False):
        """Append, select and attend with kernels."""
        return self.program(implementation, layer=layer, few=few)()

    def program(self, implementation: Any, *, layer=None, few: bool = False) -> Callable[[], Any]:
        """The same to be called again and again: it is compiled once."""
        attended = self.attended(few)
        q, weights = numbers(self.index_heads)
        padded = lambda table, nothing: np.where(
            self.real.reshape(-1, *[1] * (table.ndim - 1)), table[self.ids], np.asarray(nothing, table.dtype)
        )
        codes = padded(encode_e4m3(q), 0x7F)
        arguments = (
            codes,
            padded(weights, np.nan),
            padded(KEYS, np.nan),
            padded(LATENTS, np.nan),
            padded(ATTENTION, 100),  # NaN has a test of its own in test_nothing_to_do.py
        )

        @jax.jit
        def step(traced, cache, meta, codes, weights, keys, latents, q):
            derived, layer_ = meta.derive(), self.layer if layer is None else traced
            cache = ops.append_index_k(cache, layer_, keys, derived, implementation="triton")
            rows = ops.select_rows(codes, weights, cache, layer_, derived, K, implementation=implementation)
            latents = latents[:, :LATENT], latents[:, LATENT:]
            cache = ops.append_latent(cache, layer_, *latents, derived, implementation="triton")
            out, lse = ops.sparse_mla(
                q[attended], cache, layer_, rows[attended], SCALE, implementation=implementation
            )
            return cache, rows, out, lse

        number = jnp.int32(self.layer if layer is None else layer)
        return lambda: step(number, self.cache, self.meta, *map(jnp.asarray, arguments))

    def check(self, result) -> None:
        cache, rows, out, lse = result
        attended = self.attended(len(out) < len(rows))
        wanted, wanted_lse = self.out[attended], self.lse[attended]
        assert cases.pool_bytes(cache) == cases.pool_bytes(self.after)
        assert rows.tolist() == self.rows.tolist()
        np.testing.assert_allclose(np.asarray(out, np.float32), wanted, rtol=2**-6, atol=2e-3)
        np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(wanted_lse))
        held = np.isfinite(wanted_lse)
        np.testing.assert_allclose(np.asarray(lse)[held], wanted_lse[held], rtol=2e-4, atol=2e-4)


@pytest.fixture
def interpreted(monkeypatch):
    """Dispatch takes a card for granted, Mosaic kernels run in their interpreter; returns what tells of races."""
    from dsa_jax.pallas import paged_logits_mosaic, sparse_mla_mosaic

    monkeypatch.setattr(dispatch, "target_device", lambda: cases.CARD)
    for module, name, blocks in (
        (paged_logits_mosaic, "paged_logits_decode", 3),
        (paged_logits_mosaic, "paged_logits_prefill", 3),
        (sparse_mla_mosaic, "sparse_mla", None),
    ):
        options: dict = {"interpret": INTERPRETED} | ({"blocks": blocks} if blocks else {})
        monkeypatch.setattr(module, name, functools.partial(getattr(module, name), **options))

    return races_found


# Implementation, decode requests, contexts, new tokens, index heads, page size, manager: heads, next_n, page sizes, R and
# managers pairwise.
STEPS = [
    ("triton", RAGGED, (), 6, 32, 64, "v2"),
    ("mosaic", RAGGED, (), 6, 32, 64, "v2"),
    ("triton", RAGGED, (), 4, 16, 16, "v1"),
    ("triton", RAGGED, (), 7, 64, 32, "v1"),
    ("triton", RAGGED, (), 8, 32, 128, "v1"),
    ("triton", RAGGED, (), 4, 64, 256, "v2"),
    ("mosaic", RAGGED, (), 4, 64, 32, "v1"),
    ("mosaic", RAGGED, (), 7, 64, 128, "v2"),
    ("mosaic", RAGGED, (), 8, 32, 32, "v1"),
    ("triton", EMPTY, (), 1, 32, 64, "v2"),
    ("mosaic", EMPTY, (), 2, 64, 64, "v1"),
    ("triton", RAGGED[:2], CONTEXTS, 4, 32, 64, "v2"),
    ("mosaic", RAGGED[:2], CONTEXTS, 4, 32, 64, "v2"),
    ("mosaic", (), CONTEXTS, 1, 64, 32, "v1"),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("implementation", "decodes", "contexts", "next_n", "heads", "page_size", "manager"), STEPS
)
def test_a_step(interpreted, implementation, decodes, contexts, next_n, heads, page_size, manager):
    case = Case(
        decodes, contexts, next_n=next_n, index_heads=heads, page_size=page_size, manager=manager, layer=2
    )
    if any(request.length > K for request in (*decodes, *contexts)):
        assert (case.rows[case.rows[:, 0] >= 0] >= 0).all(axis=1).any()  # the choice drops tokens
    case.check(case.run(implementation, few=implementation == "mosaic"))
    assert implementation == "triton" or not interpreted()


@pytest.mark.parametrize("implementation", ["triton", pytest.param("mosaic", marks=pytest.mark.full)])
def test_one_page(interpreted, implementation):
    """B65: the whole pool is one page, the first and the last."""
    case = Case((Request(64, 2),), (), next_n=2, index_heads=32, page_size=64, slots=1)
    case.check(case.run(implementation, few=implementation == "mosaic"))


@pytest.mark.full
@pytest.mark.parametrize("implementation", ["triton", "mosaic"])
@pytest.mark.parametrize("layer", [-1, 1, 3])
def test_a_traced_layer_without_pages(interpreted, implementation, layer):
    """A layer that shares, or does not exist, selects nothing and writes no index key; others' pages are not touched."""
    case = Case(RAGGED, (), next_n=4, index_heads=32, page_size=64)
    cache, rows, _, lse = case.run(implementation, layer=layer, few=True)
    before, after = cases.pool_bytes(case.cache), cases.pool_bytes(cache)
    assert after["index_key"] == before["index_key"] and after["index_scale"] == before["index_scale"]
    assert (after["key"] == before["key"]) == (layer != 1)
    if layer != 1:
        assert np.isneginf(lse).all()
    assert rows.shape == case.rows.shape


@pytest.mark.full
def test_the_case_can_fail():
    """The reference gives the same; and a step whose limits are one too many does not."""
    case = Case(RAGGED, CONTEXTS, next_n=4, index_heads=16, page_size=16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "append_index_k", _by_reference(ops.append_index_k))
        patch.setattr(ops, "append_latent", _by_reference(ops.append_latent))
        case.check(case.run("xla"))
        case.rows = np.where(case.rows >= 0, case.rows + 1, -1)
        with pytest.raises(AssertionError):
            case.check(case.run("xla"))


def _by_reference(op):
    return lambda *arguments, implementation: op(*arguments, implementation="xla")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("implementation", "decodes", "contexts", "next_n", "heads", "page_size", "manager"), STEPS
)
def test_a_step_on_the_card(implementation, decodes, contexts, next_n, heads, page_size, manager):
    """The same steps with compiled kernels, and the same bits 20 times."""
    case = Case(
        decodes, contexts, next_n=next_n, index_heads=heads, page_size=page_size, manager=manager, layer=2
    )
    program = case.program(implementation)
    try:
        first = program()
    except (NotImplementedError, ExceptionGroup) as reason:
        no_case(reason)
    case.check(first)
    bits = lambda result: [np.asarray(x).view(np.uint8) for x in jax.tree.leaves(result)]
    for _ in range(19):
        for a, b in zip(bits(program()), bits(first), strict=True):
            np.testing.assert_array_equal(a, b)
