"""Draft passes, acceptance and rewinding, as functions from values to values.

A draft pass gets metadata of its own: the target's lengths with the draft cache's pages and layout. Nothing of the target is
swapped, so nothing has to be put back, also when the draft raises. Rejected tokens are rolled back by lengths: their rows
stay in memory, lie beyond every limit, and are overwritten when the sequence gets there again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dsa_jax.arguments import FLOATS, described, expect, is_number, is_whole, misfit
from dsa_jax.bucket import Bucket
from dsa_jax.compat import is_traced
from dsa_jax.layout import FIX_LAYOUT, CacheLayout
from dsa_jax.metadata import StepMetadata

_FIX_META = "Pass what StepMetadata.create returned, not the step derived from it."


def draft_metadata(
    target: StepMetadata,
    draft_layout: CacheLayout,
    draft_page_table: Array,
    new_lens: Array | None = None,
    *,
    next_n: int | None = None,
) -> StepMetadata:
    """Metadata of a draft pass over the target's requests.

    Lengths come from the target, pages and geometry from the draft: layer count, page size and table width may differ.
    Works eagerly and under ``jit``; the target is not changed.

    Args:
        target: the target's metadata.
        draft_layout: layout of the draft cache; the ops check it against the cache they are given.
        draft_page_table: ``int32[R, W_draft]`` raw slots of the draft's own allocator.
        new_lens: ``int32[R]`` tokens that the draft pass processes, the last ones of each sequence; the target's by default.
        next_n: token places of each decode request, where the draft pass has another number than the target.

    Returns:
        New metadata with the target's ``kv_lens``.

    Raises:
        ValueError: if the table or ``new_lens`` is not for the target's requests.
    """
    expect("draft_metadata", "target", target, StepMetadata, _FIX_META)
    expect("draft_metadata", "draft_layout", draft_layout, CacheLayout, FIX_LAYOUT)
    requests = target.bucket.requests
    problems = []
    if (
        getattr(draft_page_table, "ndim", None) != 2
        or draft_page_table.shape[0] != requests
        or draft_page_table.dtype != jnp.int32
    ):
        problems.append(
            f"draft_page_table is {described(draft_page_table)}, wanted int32[{requests}, W_draft]"
        )
    if new_lens is not None and (
        getattr(new_lens, "shape", None) != (requests,) or new_lens.dtype != jnp.int32
    ):
        problems.append(f"new_lens is {described(new_lens)}, wanted int32[{requests}]")
    if not problems and not draft_page_table.shape[1]:
        problems.append(
            f"draft_page_table is {described(draft_page_table)}, wanted at least one page a request"
        )
    problems += _next_n_problems(next_n)
    if problems:
        raise ValueError(
            "draft_metadata: "
            + "; ".join(problems)
            + ". Give one table row and one length per request of the target."
        )
    bucket = replace(
        target.bucket, table_width=draft_page_table.shape[1], next_n=next_n or target.bucket.next_n
    )
    return StepMetadata(
        page_table=_own(draft_page_table),
        kv_lens=target.kv_lens,
        new_lens=target.new_lens if new_lens is None else _own(new_lens),
        layout=draft_layout,
        bucket=bucket,
    )


def _own(array: Array) -> Array:
    """The array itself, or a copy of NumPy's, which its owner may write into afterwards."""
    return array if isinstance(array, Array) else jnp.array(array)


def rewind(meta: StepMetadata, kept: Array) -> StepMetadata:
    """Keep only the first ``kept`` of each request's new tokens.

    Args:
        meta: metadata of the step that wrote the tokens.
        kept: ``int32[R]``, or one number for all requests; clipped to ``0 .. new_lens``, so that a length never falls below
            what was there before the step.

    Returns:
        Metadata whose ``new_lens`` are the kept tokens and whose ``kv_lens`` end with them.

    Raises:
        ValueError: ``kept`` has no whole number for each request.
    """
    kept = jnp.clip(_each_len("rewind", meta, "kept", kept), 0, meta.new_lens)
    return replace(meta, kv_lens=meta.kv_lens - meta.new_lens + kept, new_lens=kept)


def advance(
    meta: StepMetadata, new_lens: Array, *, pages: Array | None = None, next_n: int | None = None
) -> StepMetadata:
    """Metadata of the step after ``meta`` that adds ``new_lens`` tokens to each request.

    Inside of the jitted step it costs the host nothing: facts stay on the device, and only new pages are sent there.

    Args:
        meta: metadata of the last step, rewound to what was kept of it.
        new_lens: ``int32[R]``, or one number for all requests; 0 leaves a request out.
        pages: ``int32[A, 3]`` pages handed out since: request, column of its table, slot. A row with a negative entry, or
            one outside of the table, is none.
        next_n: token places of each decode request in the new step, if they change.

    Raises:
        ValueError: ``new_lens`` has no whole number for each request, more of them are known to be added than a decode
            request has places, or ``pages`` or ``next_n`` is of another kind.
    """
    given, new_lens = new_lens, _each_len("advance", meta, "new_lens", new_lens)
    problems = [f"{problem}. Leave it out to keep the bucket's" for problem in _next_n_problems(next_n)]
    problems = problems or _place_problems(given, meta.bucket, next_n or meta.bucket.next_n)
    if pages is not None and (
        getattr(pages, "ndim", None) != 2 or pages.shape[1] != 3 or pages.dtype != jnp.int32
    ):
        problems.append(
            f"pages is {described(pages)}, wanted int32[A, 3]. Give request, column and slot of each"
        )
    if problems:
        raise ValueError("advance: " + "; ".join(problems) + ".")
    table = meta.page_table
    if pages is not None:
        # A negative number would count from the end: such rows go to a request that does not exist, and are dropped.
        request = jnp.where(jnp.all(pages >= 0, axis=1), pages[:, 0], table.shape[0])
        table = table.at[request, pages[:, 1]].set(pages[:, 2], mode="drop")
    bucket = replace(meta.bucket, next_n=next_n or meta.bucket.next_n)
    return replace(meta, page_table=table, kv_lens=meta.kv_lens + new_lens, new_lens=new_lens, bucket=bucket)


def accept_greedy(logits: Array, drafts: Array, draft_lens: Array) -> tuple[Array, Array]:
    """Greedy verification: drafts are kept as long as each is the target's own best token.

    Args:
        logits: ``float32[R, m + 1, V]`` of the target; row j follows the last known token and j drafts.
        drafts: ``int32[R, m]``.
        draft_lens: ``int32[R]``, drafts that count, at most m.

    Returns:
        ``int32[R]`` accepted drafts and ``int32[R]``, the target's token after them.

    Raises:
        ValueError: naming every argument of another shape or dtype.
    """
    _check_drafts("accept_greedy", drafts, draft_lens, {"logits": (logits, 1)})
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    accepted = _leading(best[:, :-1] == drafts, draft_lens)
    return accepted, jnp.take_along_axis(best, accepted[:, None], axis=1)[:, 0]


def accept_sampled(
    keys: Array, target: Array, draft: Array, drafts: Array, draft_lens: Array
) -> tuple[Array, Array]:
    """Rejection sampling: the kept tokens and the one after them are distributed as the target alone would draw them.

    Draft token x at place j is kept with probability ``min(1, target[j, x] / draft[j, x])``; the token after the last kept
    one is drawn from ``max(target - draft, 0)``, normalised, or from ``target`` where all drafts were kept (Leviathan et al.
    2023, Chen et al. 2023).

    Args:
        keys: ``[R]`` JAX random keys, one per request and step.
        target: ``float32[R, m + 1, V]`` probabilities of the target, as ``probabilities`` gives them.
        draft: ``float32[R, m, V]`` probabilities that the drafts were drawn from.
        drafts: ``int32[R, m]``.
        draft_lens: ``int32[R]``, drafts that count, at most m.

    Returns:
        ``int32[R]`` accepted drafts and ``int32[R]``, the token after them.

    Raises:
        ValueError: naming every argument of another shape or dtype.
    """
    _check_drafts("accept_sampled", drafts, draft_lens, {"target": (target, 1), "draft": (draft, 0)}, [keys])
    count = drafts.shape[1]
    pick = drafts[:, :, None]
    p = jnp.take_along_axis(target[:, :-1], pick, axis=2)[:, :, 0]
    q = jnp.take_along_axis(draft, pick, axis=2)[:, :, 0]
    split = jax.vmap(jax.random.split)(keys)
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (count,)))(split[:, 0])
    # u < p/q without the division: a draft the target gives no mass is never kept, whatever q is.
    named = (drafts >= 0) & (drafts < target.shape[2])  # -1 would be read as the last token
    accepted = _leading(named & (uniform * q < p), draft_lens)

    at = accepted[:, None, None]
    p_next = jnp.take_along_axis(target, at, axis=1)[:, 0]
    q_next = jnp.take_along_axis(jnp.pad(draft, ((0, 0), (0, 1), (0, 0))), at, axis=1)[:, 0]
    # Past the last draft that counts there was no proposal to correct for.
    q_next = jnp.where((accepted < draft_lens)[:, None], q_next, 0.0)
    residual = jnp.maximum(p_next - q_next, 0.0)
    # Rounding can leave nothing where p equals q; then p itself is the right distribution.
    residual = jnp.where(jnp.sum(residual, axis=-1, keepdims=True) > 0, residual, p_next)
    token = jax.vmap(jax.random.categorical)(split[:, 1], jnp.log(residual))
    return accepted, token.astype(jnp.int32)


def probabilities(logits: Array, temperature: Array | float, top_p: Array | float | None = None) -> Array:
    """What is drawn from: softmax of ``logits / temperature``, cut to the smallest set of tokens with mass ``top_p``.

    Args:
        logits: ``float32[..., V]``.
        temperature: positive; 0, and anything below float32's smallest normal number, puts all mass on the best token, the
            lowest id among equals.
        top_p: in (0, 1]; tokens are taken by falling probability, lower ids first among equals, until their mass reaches it.
            None keeps all tokens without sorting them.

    Returns:
        ``float32[..., V]`` that sum to 1.

    Raises:
        ValueError: logits that are no floats, or a known temperature or ``top_p`` out of range.
    """
    _check_probabilities(logits, temperature, top_p)
    greedy = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
    warm, scaled = over_temperature(logits, temperature)
    p = jax.nn.softmax(scaled, axis=-1)
    if top_p is not None:
        order = jnp.argsort(-p, axis=-1, stable=True)
        ranked = jnp.take_along_axis(p, order, axis=-1)
        before = jnp.cumsum(ranked, axis=-1) - ranked
        kept = jnp.where(before < top_p, ranked, 0.0)
        p = jnp.put_along_axis(jnp.zeros_like(p), order, kept, axis=-1, inplace=False)
        p = p / jnp.sum(p, axis=-1, keepdims=True)
    return jnp.where(warm, p, greedy)


def over_temperature(logits: Array, temperature: Array | float) -> tuple[Array, Array]:
    """Whether to draw at all, and logits that differ by ``logits / temperature`` and are finite where the best one is.

    The best logit becomes 0 first: divided by a small temperature, all that differ much would be infinite, and nothing could
    be said of them. A temperature below the smallest normal float32 counts as 0, as it does in a program on any device.
    """
    temperature = jnp.asarray(temperature, jnp.float32)
    warm = temperature >= np.finfo(np.float32).tiny
    logits = logits.astype(jnp.float32)
    return warm, (logits - jnp.max(logits, axis=-1, keepdims=True)) / jnp.where(warm, temperature, 1.0)


def _each_len(operation: str, meta: StepMetadata, name: str, lens: Any) -> Array:
    """``int32[R]``: ``lens``, or the one number that came for all requests; ValueError for anything else."""
    expect(operation, "meta", meta, StepMetadata, _FIX_META)
    wanted = meta.new_lens.shape
    known = hasattr(lens, "shape") and hasattr(lens, "dtype")
    each = known and lens.shape in ((), wanted) and jnp.issubdtype(lens.dtype, jnp.integer)
    if is_whole(lens):
        each = 0 <= int(lens) < 2**31
    elif each and isinstance(lens, np.ndarray):
        each = int(lens.min(initial=0)) >= 0 and int(lens.max(initial=0)) < 2**31
    elif each:  # values on a device are not looked at
        each = jnp.iinfo(lens.dtype).max < 2**31
    if not each:
        raise ValueError(
            f"{operation}: {name} is {_with_values(lens)}, wanted int32{list(wanted)}, none negative. Give the tokens of "
            "each request, unused places included."
        )
    return jnp.broadcast_to(jnp.asarray(lens, jnp.int32), wanted)


def _place_problems(lens: Any, bucket: Bucket, next_n: int) -> list[str]:
    """Numbers that are known on the host and more than the places of a decode request: the rest would never be written."""
    if not bucket.decode_requests or not (is_whole(lens) or isinstance(lens, np.ndarray)):
        return []
    most = int(np.broadcast_to(lens, (bucket.requests,))[bucket.context_requests :].max())
    if most <= next_n:
        return []
    return [
        f"new_lens is {_with_values(lens)}, wanted at most {next_n} for a decode request. Pass a larger next_n"
    ]


def _with_values(lens: Any) -> str:
    """What came; of a NumPy array the values as well, which are what is wrong with it if its dtype is not."""
    return (
        f"{described(lens)} {described(lens.tolist())}" if isinstance(lens, np.ndarray) else described(lens)
    )


def _next_n_problems(next_n: Any) -> list[str]:
    if next_n is None or (is_whole(next_n) and 1 <= next_n < 2**31):
        return []
    if is_whole(next_n) and next_n >= 1:
        return [f"next_n is {next_n}, wanted less than 2**31"]
    return [
        f"next_n is {described(next_n)}, wanted {'' if is_whole(next_n) else 'a whole number of '}at least 1"
    ]


def _check_drafts(
    operation: str, drafts: Any, draft_lens: Any, scores: dict[str, tuple[Any, int]], keys: Sequence[Any] = ()
) -> None:
    """Raise ValueError naming every argument of an acceptance whose shape or dtype is not that of the drafts.

    Args:
        operation: whose arguments they are.
        drafts: ``int32[R, m]``.
        draft_lens: ``int32[R]``.
        scores: by name, values over the vocabulary and how many rows more than drafts they have.
        keys: one entry, random keys ``[R]``, or none.
    """
    problems = misfit("drafts", drafts, (None, None), ("int32",), "int32[R, m]")
    requests, count = (None, None) if problems else drafts.shape
    r = "R" if requests is None else requests
    problems += misfit("draft_lens", draft_lens, (requests,), ("int32",), f"int32[{r}]")
    vocabulary = None
    for name, (values, more) in scores.items():
        rows = None if count is None else count + more
        m = f"m + {more}" if more else "m"
        wanted = f"float32[{r}, {m if rows is None else rows}, {'V' if vocabulary is None else vocabulary}]"
        found = misfit(name, values, (requests, rows, vocabulary), FLOATS, wanted)
        if not found and not values.shape[2]:
            found = [f"{name} is {described(values)}, wanted a vocabulary of at least one token"]
        if vocabulary is None and len(getattr(values, "shape", ())) == 3:
            vocabulary = values.shape[2]
        problems += found
    problems += [
        f"keys is {described(value)}, wanted {r} random keys"
        for value in keys
        if not _are_keys(value, requests)
    ]
    if problems:
        raise ValueError(
            f"{operation}: "
            + "; ".join(problems)
            + ". Pass arrays for the same requests and vocabulary, with one row of "
            "the target more than drafts."
        )


def _are_keys(keys: Any, requests: int | None) -> bool:
    """Whether these are typed random keys, one for each request, or raw ones of the default generator."""
    shape, dtype = getattr(keys, "shape", ()), getattr(keys, "dtype", None)
    if dtype is None or not shape or requests not in (None, shape[0]):
        return False
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return len(shape) == 1
    return str(dtype) == "uint32" and shape[1:] == jax.eval_shape(lambda: jax.random.PRNGKey(0)).shape


def _check_probabilities(logits: Any, temperature: Any, top_p: Any) -> None:
    """Raise ValueError for logits that are no floats, and for numbers out of range that are known while tracing."""
    problems = []
    shape = getattr(logits, "shape", ())
    if not shape or not shape[-1] or str(getattr(logits, "dtype", "")) not in FLOATS:
        problems.append(f"logits is {described(logits)}, wanted float32[..., V]")
    if not _known(temperature, lambda value: value >= 0):
        problems.append(
            f"temperature is {_shown(temperature)}, wanted a number of at least 0 (0 takes the best token)"
        )
    for name, value in (("temperature", temperature), ("top_p", top_p)):
        own = getattr(value, "shape", ())
        # One for each row must not be taken for one for each token.
        if own and (own[-1] != 1 or not _spreads(own, shape)):
            problems.append(f"{name} is {described(value)}, wanted a number or [..., 1]")
    if top_p is not None and not _known(
        top_p, lambda value: (value >= np.finfo(np.float32).tiny) & (value <= 1)
    ):
        problems.append(
            f"top_p is {_shown(top_p)}, wanted a number of more than 0 up to 1, or None for all tokens"
        )
    if problems:
        raise ValueError("probabilities: " + "; ".join(problems) + ". Correct what is named.")


def _known(value: Any, fits: Callable[[Any], Any]) -> bool:
    """Whether all of a number or an array of numbers fits; of a traced one only that it is real."""
    if not is_number(value) and (
        not hasattr(value, "dtype")
        or not (jnp.issubdtype(value.dtype, jnp.number) and not jnp.iscomplexobj(value))
    ):
        return False
    return is_traced(value) or bool(np.all(fits(np.asarray(value))))


def _spreads(own: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether an array of shape ``own`` is repeated along axes of size 1, or missing in front, to have ``shape``."""
    return len(own) <= len(shape) and all(
        size in (1, wanted) for size, wanted in zip(own[::-1], shape[::-1], strict=False)
    )


def _shown(value: Any) -> str:
    """A number by itself, also where an array holds it."""
    known = hasattr(value, "dtype") and not is_traced(value) and getattr(value, "shape", None) == ()
    return described(value.item() if known else value)


def _leading(good: Array, lens: Array) -> Array:
    """``int32[R]``: how many of the first ``lens`` entries of each row are good before the first that is not."""
    place = jnp.arange(good.shape[1], dtype=jnp.int32)[None, :]
    run = jnp.cumprod((good & (place < lens[:, None])).astype(jnp.int32), axis=1, dtype=jnp.int32)
    return jnp.sum(run, axis=1, dtype=jnp.int32)
