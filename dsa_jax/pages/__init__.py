"""Host side of the cache: which request owns which page slot."""

from dsa_jax.pages.allocator import OutOfPages, PagePoolState, fork, free, grow, shrink

__all__ = [
    "OutOfPages",
    "PagePoolState",
    "fork",
    "free",
    "grow",
    "shrink",
]
