"""A model as what a program is called with: its weights as a flat list of arrays, and the way back.

The module tree is taken apart once, outside of the loop, so that a step costs no walk over modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from dsa_jax.arguments import described
from dsa_jax.compat import target_device
from dsa_jax.config import DSAConfig

Parameters = list[Array]
MOST_STACKED = 1 << 17
"""Most elements of a weight that travels in a stack with others: no matrix of a released model is as small."""


def take_apart(
    module: Any, dsa: DSAConfig, *, stacked: bool | None = None
) -> tuple[Parameters, Callable[[Parameters], Any]]:
    """Weights of a model, or of a part of one, and the function that makes it of such weights.

    `kv_b_proj` goes as two arrays, the rows that make keys and the rows that make values. The absorbed step uses them apart:
    of one array XLA copies both parts in every layer and step, while it sees through their being joined and cut again.

    Every array that a program is called with costs its host a microsecond, however small it is. On a GPU XLA reads a matrix
    from within a stack of them, unless a library multiplies it as it does large ones, or the step is the body of a loop. On
    a CPU it copies it first.

    Args:
        module: the weights; they are not copied, but for those that are cut or stacked.
        dsa: its configuration.
        stacked: let weights of one shape and dtype, of at most `MOST_STACKED` elements each, travel as one array. None does
            so where the target is a GPU.

    Raises:
        ValueError: ``stacked`` is another value. The function that comes back raises it for weights of another number, shape
            or kind.
    """
    if stacked is not None and not isinstance(stacked, bool):
        raise ValueError(
            f"take_apart: stacked is {described(stacked)}, wanted True, False or None (the target decides). Leave it out "
            "for this function's default."
        )
    graph, state = nnx.split(module)
    leaves, tree = jax.tree.flatten_with_path(state)
    pieces, shapes = [], []
    for path, leaf in leaves:
        cut = "kv_b_proj" in jax.tree_util.keystr(path)
        shapes.append(leaf.shape if cut else None)
        heads = leaf.reshape(dsa.num_heads, -1, leaf.shape[-1]) if cut else leaf
        pieces += [heads[:, : dsa.qk_nope_head_dim], heads[:, dsa.qk_nope_head_dim :]] if cut else [leaf]
    on_gpu = target_device().platform == "gpu"
    params, unstack = _stack(pieces, MOST_STACKED if (on_gpu if stacked is None else stacked) else 0)
    own = [(weight.shape, weight.dtype) for weight in params]

    def rebuild(params: Parameters) -> Any:
        _check_weights(params, own)
        given = iter(unstack(params))
        whole = [
            jnp.concatenate([next(given), next(given)], axis=1).reshape(shape) if shape else next(given)
            for shape in shapes
        ]
        return nnx.merge(graph, jax.tree.unflatten(tree, whole))

    return params, rebuild


def _stack(pieces: list[Array], most: int) -> tuple[Parameters, Callable[[Parameters], list[Array]]]:
    """Arrays of one shape and dtype as one array, unless they have more than so many elements; and the way back."""
    groups: dict[Any, list[int]] = {}
    for place, piece in enumerate(pieces):
        alone = piece.size > most
        groups.setdefault(place if alone else (piece.shape, piece.dtype), []).append(place)
    members = list(groups.values())
    params = [
        jnp.stack([pieces[place] for place in places]) if len(places) > 1 else pieces[places[0]]
        for places in members
    ]

    def unstack(params: Parameters) -> list[Array]:
        found: dict[int, Array] = {}
        for places, array in zip(members, params, strict=True):
            for number, place in enumerate(places):
                found[place] = array if len(places) == 1 else lax.index_in_dim(array, number, keepdims=False)
        return [found[place] for place in range(len(pieces))]

    return params, unstack


def _check_weights(params: Any, own: list[tuple[tuple[int, ...], Any]]) -> None:
    """Raise ValueError for weights that cannot be the ones that were taken apart; floats may be of another width."""
    count = len(own)
    fix = (
        "Pass the params that came with this function, in their order; those of another model, or with another choice of "
        "`stacked`, are not the same."
    )
    if not isinstance(params, list | tuple) or len(params) != count:
        came = f"{len(params)} arrays" if isinstance(params, list | tuple) else described(params)
        raise ValueError(f"paged step: params is {came}, wanted a list of {count}. {fix}")
    is_float = lambda dtype: jnp.issubdtype(dtype, jnp.floating)
    problems = [
        f"params[{place}] is {described(weight)}, wanted {dtype}{list(shape)}"
        for place, (weight, (shape, dtype)) in enumerate(zip(params, own, strict=True))
        if getattr(weight, "shape", None) != shape or is_float(weight.dtype) != is_float(dtype)
    ]
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(f"paged step: {'; '.join(problems[:3])}{more}. {fix}")
