"""The static sizes that a step is traced for."""

from __future__ import annotations

from dataclasses import dataclass

from dsa_jax.arguments import described, is_whole


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Static padded sizes that a jitted step is traced for.

    The first ``context_requests`` requests are contexts: their new tokens are packed one request after the other into
    the first ``context_tokens`` token places. Then come ``decode_requests`` requests with ``next_n`` places each.

    Attributes:
        context_requests: requests in the prefill part.
        context_tokens: token places shared by them.
        decode_requests: requests in the decode part.
        next_n: token places of each decode request.
        table_width: W, pages a sequence can have.
        gathered_keys: keys that ``gather_index_k`` returns for the contexts; 0 when it is not called.
    """

    context_requests: int = 0
    context_tokens: int = 0
    decode_requests: int = 0
    next_n: int = 1
    table_width: int
    gathered_keys: int = 0

    def __post_init__(self) -> None:
        """NumPy's integers would overflow in what is made of the sizes; `validate` refuses what is no number."""
        for name, value in vars(self).items():
            if type(value) is not int and is_whole(value):
                object.__setattr__(self, name, int(value))

    @property
    def requests(self) -> int:
        """R, all request places."""
        return self.context_requests + self.decode_requests

    @property
    def tokens(self) -> int:
        """N, all token places."""
        return self.context_tokens + self.decode_requests * self.next_n

    def validate(self) -> None:
        """Raise ValueError naming every size that makes no sense."""
        problems = [
            f"{name} is {described(value)}; wanted a whole number"
            for name, value in vars(self).items()
            if not is_whole(value)
        ]
        problems += [
            f"{name} is {value}; wanted less than 2**31"
            for name, value in vars(self).items()
            if is_whole(value) and value >= 2**31
        ]
        if problems:
            raise ValueError("Bucket: " + "; ".join(problems) + ". Choose sizes that hold the batch.")
        for name in ("context_requests", "context_tokens", "decode_requests", "gathered_keys"):
            if getattr(self, name) < 0:
                problems.append(f"{name} is {getattr(self, name)}; wanted at least 0")
        if self.next_n < 1:
            problems.append(f"next_n is {self.next_n}; wanted at least 1")
        if self.table_width < 1:
            problems.append(f"table_width is {self.table_width}; wanted at least 1 page")
        if bool(self.context_requests) != bool(self.context_tokens):
            problems.append(
                f"context_requests is {self.context_requests} and context_tokens {self.context_tokens}; "
                "wanted both or neither"
            )
        if problems:
            raise ValueError("Bucket: " + "; ".join(problems) + ". Choose sizes that hold the batch.")
