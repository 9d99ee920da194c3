"""How loops and engines draw tokens, and how drafts are accepted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dsa_jax.arguments import described, is_mass, is_seed, is_temperature, is_whole, plain
from dsa_jax.compat import is_traced
from dsa_jax.draft import accept_greedy, accept_sampled, over_temperature, probabilities


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    What is None is known when a loop is traced, and costs nothing in it: no softmax, no random numbers, no sort.

    Attributes:
        key: JAX random key; a draw depends on it, the request's place and its position alone.
        temperature: ``float32`` scalar; None (and 0, for programs of any temperature) takes the best token, the lowest id
            among equals.
        top_p: ``float32`` scalar in (0, 1]; None for all tokens.
        stop: ``int32[S]`` tokens that end a request; they are part of the output.
    """

    key: Array
    temperature: Array | None
    top_p: Array | None
    stop: Array

    @classmethod
    def create(
        cls, seed: int = 0, temperature: float = 0.0, top_p: float = 1.0, stop: tuple[int, ...] = ()
    ) -> Sampling:
        """Sampling from plain numbers; temperature 0 and top_p 1 become None.

        Raises:
            ValueError: for a temperature that is negative or not finite, a top_p outside (0, 1], a seed that is not from 0
                to 2**32 - 1, stop tokens that are no ids, and anything that is no number.
        """
        problems = []
        if not is_traced(temperature) and not is_traced(top_p):
            temperature, top_p = plain(temperature), plain(top_p)
        if not is_temperature(temperature):
            problems.append(f"temperature is {described(temperature)}, wanted a finite number of at least 0")
        if not is_mass(top_p):
            problems.append(f"top_p is {described(top_p)}, wanted a number of more than 0 up to 1")
        # A traced seed is fine: it becomes a key in the program.
        if not is_traced(seed) and not is_seed(plain(seed)):
            problems.append(f"seed is {described(seed)}, wanted a whole number from 0 to 2**32 - 1")
        ids = _stop_ids(stop)
        if ids is None:
            problems.append(f"stop is {described(stop)}, wanted token ids such as (2, 5)")
        if problems:
            raise ValueError(
                "Sampling: "
                + "; ".join(problems)
                + ". Use temperature 0 for the best token, top_p 1 for all tokens and "
                "stop () for no end."
            )
        return cls(
            key=jax.random.key(seed),
            temperature=jnp.float32(temperature) if temperature else None,
            top_p=jnp.float32(top_p) if top_p < 1 else None,
            stop=jnp.array(ids, jnp.int32),
        )

    def keys(self, positions: Array, stream: int = 0) -> Array:
        """One key per request for the token at ``positions`` (``int32[R]``)."""
        key = jax.random.fold_in(self.key, stream)
        place = jnp.arange(positions.shape[0], dtype=jnp.int32)
        return jax.vmap(lambda r, p: jax.random.fold_in(jax.random.fold_in(key, r), p))(place, positions)

    def draw(self, logits: Array, positions: Array, stream: int = 0) -> tuple[Array, Array | None]:
        """One token for each request, and what it was drawn from.

        Args:
            logits: ``float32[R, V]``.
            positions: ``int32[R]`` of the tokens before the drawn ones.
            stream: tells apart what is drawn for the same position.

        Returns:
            ``int32[R]`` and ``float32[R, V]`` probabilities, None where the best token is taken.
        """
        if self.temperature is None:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32), None
        p = probabilities(logits, self.temperature, self.top_p)
        return jax.vmap(jax.random.categorical)(self.keys(positions, stream), jnp.log(p)).astype(jnp.int32), p

    def accept(
        self, logits: Array, positions: Array, drafts: Array, given: Array | None
    ) -> tuple[Array, Array]:
        """How many drafts of each request to keep, and the token after them.

        Args:
            logits: ``float32[R, m + 1, V]`` of the target.
            positions: ``int32[R]`` that the draws depend on.
            drafts: ``int32[R, m]`` from ``draw``.
            given: ``float32[R, m, V]`` that they were drawn from, None where the best token is taken.

        Returns:
            ``int32[R]`` accepted drafts and ``int32[R]``, the token after them.

        Raises:
            ValueError: ``given`` is missing although tokens are drawn, or an argument has another shape or dtype.
        """
        every = jnp.full(drafts.shape[:1], drafts.shape[1], jnp.int32)
        if self.temperature is None:
            return accept_greedy(logits, drafts, every)
        if given is None:
            raise ValueError(
                "Sampling.accept: given is None, wanted float32[R, m, V], as the sampling has a temperature. Pass what draw "
                "returned with the drafts."
            )
        target = probabilities(logits, self.temperature, self.top_p)
        return accept_sampled(self.keys(positions), target, given, drafts, every)

    def stops(self, tokens: Array) -> Array:
        """Which of ``int32[...]`` tokens end their request."""
        return jnp.any(tokens[..., None] == self.stop.reshape((1,) * tokens.ndim + (-1,)), axis=-1)


def _stop_ids(stop: Any) -> list[int] | None:
    """Token ids of any iterable of whole numbers from 0 that fit int32; None for anything else."""
    if isinstance(stop, str | bytes) or not hasattr(stop, "__iter__") or getattr(stop, "shape", None) == ():
        return None
    given = list(stop)
    if any(map(is_traced, given)):
        return None
    ids = [plain(token) for token in given]
    return ids if all(is_whole(token) and 0 <= token < 2**31 for token in ids) else None


def sample(logits: Array, rows: Array, key: Array, stream: Array, temperature: Array) -> Array:
    """Draw one token from chosen rows of the logits.

    Args:
        logits: ``float32[N, vocab]``.
        rows: ``int32[R]`` rows to draw from.
        key: a JAX random key.
        stream: ``int32[R, 2]`` folded into the key, so that a draw depends on its request and position alone.
        temperature: ``float32`` scalar; 0 takes the best token, the lowest id among equals.

    Returns:
        ``int32[R]``.
    """
    chosen = logits[rows]
    keys = jax.vmap(lambda s: jax.random.fold_in(jax.random.fold_in(key, s[0]), s[1]))(stream)
    warm, scaled = over_temperature(chosen, temperature)
    drawn = jax.vmap(jax.random.categorical)(keys, scaled)
    return jnp.where(warm, drawn, jnp.argmax(chosen, axis=-1)).astype(jnp.int32)
