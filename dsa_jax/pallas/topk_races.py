"""The log of `topk_lockstep`: which accesses to shared memory no barrier orders.

In lockstep all threads finish a step before any begins the next, so a missing barrier changes no result; here it shows.
Two accesses to a word conflict if two threads make them, no barrier lies between, and one of them writes, unless both add;
that both write the same value is no excuse, for the program never does.
Threads of a warp count as any others: what the program does with warps (ballots, shuffles, sums) orders no memory.

Within a block every barrier orders. A word of another block is ordered by barriers of the cluster alone, and exists from
the first of them, when that block has surely begun, to the last, after which it may have ended.
"""

from __future__ import annotations

import numpy as np

READ, WRITE, ADD = range(3)
_AGAINST = {READ: (WRITE, ADD), WRITE: (READ, WRITE, ADD), ADD: (READ, WRITE)}
_DOES, _DID = ("reads", "writes", "adds to"), ("read", "wrote", "added to")
_SEVERAL = -1  # in place of a thread's number


class SharedMemoryLog:
    """Last accesses to every word of shared memory, and the conflicts that were found.

    For each kind of access and word it keeps when the last one was, as the number of barriers before it anywhere, and whose,
    or that there were several since the barrier before. Accesses from other blocks are kept apart: another barrier orders
    them, so two accesses from one other block count as ordered by a barrier of the cluster only.

    Args:
        threads: threads of a block.
        cluster: blocks of a cluster.
        blocks: blocks of all clusters.
        sizes: words by name.
    """

    def __init__(self, *, threads: int, cluster: int, blocks: int, sizes: dict[str, int]):
        self._threads, self._cluster, self._sizes = threads, cluster, sizes
        self._now = 1
        # When each block last passed a barrier, and one of its cluster; 1: never.
        self._passed, self._cluster_passed = (np.ones(blocks, np.int32) for _ in range(2))
        self._parties = np.zeros(blocks, bool)  # blocks that took part in the first barrier of their cluster
        origins = 2 if cluster > 1 else 1
        shapes = {name: (3, origins, blocks * size) for name, size in sizes.items()}
        self._when = {name: np.zeros(shape, np.int32) for name, shape in shapes.items()}
        self._who = {name: np.zeros(shape, np.int32) for name, shape in shapes.items()}
        self._found: dict[tuple, str] = {}  # the first of each kind

    def barrier(self, active: np.ndarray, threads: int) -> None:
        """A barrier of the first `threads` threads of some blocks; `active`, bool`[blocks, threads]`, are at it."""
        blocks = _rows_with_any(active)
        if (active != blocks[:, None] & (np.arange(self._threads) < threads)).any():
            self._add(("barrier",), f"other threads than the first {threads} of a block are at its barrier")
        self._now += 1
        self._passed[blocks] = self._now

    def cluster_barrier(self, active: np.ndarray) -> None:
        """A barrier of all threads of all blocks that have not ended; `active` as in `barrier`."""
        self.barrier(active, self._threads)
        blocks = _rows_with_any(active)
        clusters = self._cluster_any(blocks)
        self._parties |= blocks & ~self._cluster_any(self._parties)
        if (blocks != self._parties)[clusters].any():
            self._add(("cluster barrier",), "a block is not at a barrier of its cluster as at the first")
        self._cluster_passed[blocks] = self._now

    def _cluster_any(self, blocks: np.ndarray) -> np.ndarray:
        """Whether a flag is set for any block of the same cluster."""
        return np.repeat(_rows_with_any(blocks.reshape(-1, self._cluster)), self._cluster)

    def access(self, kind: int, array: str, block: np.ndarray, index: np.ndarray, thread: np.ndarray) -> None:
        """Log what some threads do at the same time.

        Args:
            kind: READ, WRITE or ADD.
            array: name of the array.
            block: int`[n]`, whose word.
            index: int`[n]`, which one.
            thread: int`[n]`, number of the thread among those of all blocks.
        """
        own = thread // self._threads
        word = block.astype(np.int64) * self._sizes[array] + index
        far = (block != own).astype(np.int64)
        cluster_passed = self._cluster_passed[own]
        since = np.where(far, cluster_passed, self._passed[own])
        if (far.astype(bool) & (cluster_passed == 1)).any():
            self._add((array, "early"), f"{array} of a block that may not have begun is accessed by another")
        when, who = self._when[array], self._who[array]
        for other in _AGAINST[kind]:
            for origin in range(when.shape[1]):
                unordered = when[other, origin][word] >= (cluster_passed if origin else since)
                unordered &= who[other, origin][word] != thread
                if unordered.any():
                    at = int(unordered.argmax())
                    earlier = int(who[other, origin][word[at]])
                    self._conflict(kind, other, array, int(word[at]), int(thread[at]), earlier)
        place = far, word
        mixed = (when[kind][place] >= since) & (who[kind][place] != thread)
        mine = np.where(mixed, _SEVERAL, thread)
        when[kind][place], who[kind][place] = self._now, mine
        # Of several threads at one word one has left its number.
        others = who[kind][place] != mine
        if others.any() and kind == WRITE:
            at = int(others.argmax())
            self._conflict(kind, kind, array, int(word[at]), int(thread[at]), int(who[kind][place][at]))
        who[kind][far[others], word[others]] = _SEVERAL

    def finish(self) -> list[str]:
        """The conflicts, when all blocks have ended."""
        for array, when in self._when.items():
            far = when[:, 1:].reshape(3 * (when.shape[1] - 1), len(self._passed), self._sizes[array])
            if (far >= self._cluster_passed[:, None]).any():
                self._add((array, "late"), f"{array} of a block that may have ended is accessed by another")
        return list(self._found.values())

    def _conflict(self, kind: int, other: int, array: str, word: int, thread: int, earlier: int) -> None:
        block, index = divmod(word, self._sizes[array])
        self._add(
            (array, kind, other),
            f"{array}[{index}] of block {block}: {self._name(thread)} {_DOES[kind]} what {self._name(earlier)} "
            f"{_DID[other]}, with no barrier between",
        )

    def _name(self, thread: int) -> str:
        if thread == _SEVERAL:
            return "several threads"
        block, number = divmod(thread, self._threads)
        return f"thread {number} of block {block}"

    def _add(self, key: tuple, text: str) -> None:
        self._found.setdefault(key, text)


def _rows_with_any(flags: np.ndarray) -> np.ndarray:
    return np.asarray(flags.any(axis=1))
