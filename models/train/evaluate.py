"""The numbers of the model card, from held-out modules.

Everything is measured at positions >= `FIRST_POSITION` of contexts of at least 512 tokens, so that a selection of
``index_topk`` tokens really leaves most of the context out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from dsa_jax.models.batch import Selection, forward_batch
from dsa_jax.models.decoder import Decoder
from dsa_jax.models.train import ngram
from dsa_jax.models.train.stages import token_losses

FIRST_POSITION = 256
LENGTHS = (2048, 1024, 512)
"""Lengths of contexts; none is padded."""

MODES: Mapping[str, dict[str, Any]] = {
    "dense": {"attention": "dense"},
    "sparse_f32": {"attention": "sparse"},
    "sparse_fp8": {"attention": "sparse", "index_keys": "fp8"},
    "sparse_recent": {"attention": "sparse", "selection": "recent"},
    "sparse_random": {"attention": "sparse", "selection": "random"},
}
SELECTIONS: tuple[Selection, ...] = ("indexer", "recent", "random")
SPARSE_LIMIT = 1.03
"""Greatest loss of sparse attention, as a multiple of the dense loss."""


def losses(
    model: Decoder,
    contexts: Mapping[int, np.ndarray],
    *,
    dtype: Any = jnp.float32,
    batch: int = 4,
    first: int = FIRST_POSITION,
) -> dict[str, Any]:
    """Runs the model over the contexts in every mode.

    Args:
        model: the weights, as they ship.
        contexts: per length ``int32[contexts, length]``.
        dtype: of the activations.
        batch: contexts at a time, at most.
        first: first position that counts.

    Returns:
        ``loss`` per mode (nats a token), ``mass`` per selection (share of the dense attention caught, mean over
        heads and layers of the main model), ``mtp_accuracy`` (second token right), ``mtp_agreement`` (the MTP
        layer's guess equals the main model's own one step later, both given the true text), ``accuracy`` (next token
        right) and ``tokens`` counted. Accuracies are of sparse attention with FP8 keys, as generation runs.

    Raises:
        ValueError: there are no contexts, or one has no position that counts.
    """
    if not contexts or min(contexts) < first + 3:
        raise ValueError(
            f"evaluate: contexts of {sorted(contexts)} tokens; want some, each longer than {first + 2}: "
            "pass more held-out text or a model with a longer context"
        )
    graph, weights = nnx.split(model)
    names = [*MODES, *(f"mass/{name}" for name in SELECTIONS)]
    batches = {length: _batches(rows, batch) for length, rows in contexts.items()}
    shapes = sorted({(part.shape[0], length) for length, parts in batches.items() for part in parts})

    def compiled(name: str, shape: tuple[int, ...]) -> Callable:
        if name in MODES:
            function = _measure(graph, MODES[name], dtype, first)
        else:
            selection = SELECTIONS[names.index(name) - len(MODES)]
            function = _catch(graph, selection, dtype, first, model.config.dsa.num_layers)
        return function.lower(weights, jax.ShapeDtypeStruct(shape, jnp.int32), jax.random.key(0)).compile()

    wanted: list[tuple[str, tuple[int, ...]]] = [(name, shape) for name in names for shape in shapes]
    with ThreadPoolExecutor() as pool:  # compilation is most of the time, and it runs in parallel
        functions = dict(zip(wanted, pool.map(lambda pair: compiled(*pair), wanted), strict=True))

    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for length, parts in batches.items():
        for number, rows in enumerate(parts):
            tokens = jnp.asarray(rows)
            key = jax.random.fold_in(jax.random.key(length), number)
            for name in names:
                for kind, (mean, count) in functions[name, rows.shape](weights, tokens, key).items():
                    label = kind.replace("loss", f"loss/{name}").replace("mass", name)
                    sums[label] += float(mean) * int(count)
                    counts[label] += int(count)
    mean = {label: total / counts[label] for label, total in sums.items()}
    accurate = {kind: mean[kind] for kind in ("accuracy", "mtp_accuracy", "mtp_agreement") if kind in mean}
    return {
        "tokens": counts["loss/dense"],
        "loss": {name: mean[f"loss/{name}"] for name in MODES},
        "mass": {name: mean[f"mass/{name}"] for name in SELECTIONS},
        **accurate,
    }


def _batches(rows: np.ndarray, batch: int) -> list[np.ndarray]:
    # Equal batches, so that each length is compiled once.
    size = next(size for size in range(min(batch, len(rows)), 0, -1) if len(rows) % size == 0)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _measure(graph: Any, options: dict[str, Any], dtype: Any, first: int) -> Any:
    """Jitted function of weights, tokens and key: means over the positions that count, with their number."""

    @jax.jit
    def measure(weights: Any, tokens: Array, key: Array) -> dict[str, tuple[Array, Array]]:
        outputs = forward_batch(nnx.merge(graph, weights), tokens, rng=key, dtype=dtype, **options)
        found = {"loss": token_losses(outputs.logits, tokens, 1)[:, first:]}
        if options.get("index_keys") == "fp8":
            guesses = jnp.argmax(outputs.logits, axis=-1)
            found["accuracy"] = (guesses[:, :-1] == tokens[:, 1:])[:, first:]
            if outputs.mtp_logits is not None:
                ahead = jnp.argmax(outputs.mtp_logits, axis=-1)[:, first:-2]
                found["mtp_accuracy"] = ahead == tokens[:, first + 2 :]
                found["mtp_agreement"] = ahead == guesses[:, first + 1 : -1]
        return {
            kind: (jnp.mean(value.astype(jnp.float32)), jnp.int32(value.size))
            for kind, value in found.items()
        }

    return measure


def _catch(graph: Any, selection: Selection, dtype: Any, first: int, layers: int) -> Any:
    """The same for the attention mass; under dense attention all selections are judged by one distribution."""

    @jax.jit
    def catch(weights: Any, tokens: Array, key: Array) -> dict[str, tuple[Array, Array]]:
        run = partial(
            forward_batch, attention="dense", recall=True, recall_from=first, mtp=False, dtype=dtype
        )
        recall = run(nnx.merge(graph, weights), tokens, selection=selection, rng=key).recall
        return {"mass": (jnp.mean(recall[:layers]), jnp.int32(tokens.shape[0] * (tokens.shape[1] - first)))}

    return catch


def bits_per_byte(
    model: ngram.NGram,
    contexts: Mapping[int, np.ndarray],
    loss: float,
    sizes: np.ndarray,
    *,
    start: int,
    first: int = FIRST_POSITION,
) -> dict[str, float]:
    """Compares with the n-gram model on the same predicted tokens.

    Args:
        model: n-gram model of the training tokens.
        contexts: as for `losses`.
        loss: the trained model's nats a token there.
        sizes: bytes of text behind each token, ``int32[vocabulary]``.
        start: the n-gram model's start token.
        first: as for `losses`.

    Returns:
        ``model`` and ``ngram`` in bits a byte, and the n-gram's ``ngram_loss`` in nats a token.
    """
    nats, size, count = 0.0, 0, 0
    for rows in contexts.values():
        for row in rows:
            nats -= float(np.sum(model.log_probabilities(row, start=start)[first + 1 :]))
            size += int(sizes[row[first + 1 :]].sum())
            count += len(row) - first - 1
    bits = math.log(2.0) * size
    return {"model": loss * count / bits, "ngram": nats / bits, "ngram_loss": nats / count}


def gates(evaluation: Mapping[str, Any]) -> dict[str, bool]:
    """Which of the wanted relations hold.

    Args:
        evaluation: result of `losses`, with `bits_per_byte` under ``"bits_per_byte"``.

    Returns:
        Each relation in words, and whether it holds.
    """
    loss, mass, bits = evaluation["loss"], evaluation["mass"], evaluation["bits_per_byte"]
    limit = SPARSE_LIMIT * loss["dense"]
    return {
        "sparse loss (f32 keys) within 3 % of dense": loss["sparse_f32"] <= limit,
        "sparse loss (FP8 keys) within 3 % of dense": loss["sparse_fp8"] <= limit,
        "indexer ahead of the most recent tokens in loss": loss["sparse_fp8"] < loss["sparse_recent"],
        "indexer ahead of random tokens in loss": loss["sparse_fp8"] < loss["sparse_random"],
        "indexer ahead of the most recent tokens in mass": mass["indexer"] > mass["recent"],
        "indexer ahead of random tokens in mass": mass["indexer"] > mass["random"],
        "ahead of the 5-gram model": bits["model"] < bits["ngram"],
    }
