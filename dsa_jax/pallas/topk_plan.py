"""Static facts of a launch of the top-k on clusters: what topk_mosaic.py decides and topk_cluster.py is built from."""

from __future__ import annotations

import dataclasses

BINS, BIN_BITS = 2048, 11


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static facts of a launch.

    Attributes:
        k: entries per row.
        columns: columns of the row that limits count.
        span: columns of a cluster.
        spans: clusters of a row.
        merged_span: span of the launch before, whose finds this one merges; 0 if there is none.
        threads: threads of a block, a power of two from 128.
        items: scores of a thread, a multiple of 4, at most 64.
        held: how many of them a thread holds in registers, a multiple of 4; the others lie in shared memory.
        cluster: blocks of a cluster, a power of two.
        least: scores that a thread takes before another block helps, a power of two.
        samples: scores that the first range comes from, a power of two.
        short_threads: threads of the program for short rows, 0 for none.
        short_items: scores of each of them, at most 32.
        page_size: the result holds cache rows of pages this large, a power of two; 0 for positions.
        requests, pages: lines of the page table, and pages of each.
    """

    k: int
    columns: int
    span: int
    spans: int
    merged_span: int
    threads: int
    items: int
    held: int
    cluster: int
    least: int
    samples: int
    short_threads: int = 0
    short_items: int = 0
    page_size: int = 0
    requests: int = 0
    pages: int = 0

    @property
    def kept(self) -> int:
        """Finds of a full span of the launch before: k, or all of a span that is shorter."""
        return min(self.k, self.merged_span)

    def short(self) -> Plan | None:
        """For rows that some threads of one block hold in registers; None if all rows take the same program."""
        if not self.short_threads:
            return None
        return dataclasses.replace(
            self,
            threads=self.short_threads,
            items=self.short_items,
            held=self.short_items,
            cluster=1,
            least=min(self.least, self.short_items),
            samples=min(self.samples, 2 * self.short_threads),
            short_threads=0,
        )

    def shared_sizes(self) -> dict[str, int]:
        """Words of shared memory by name."""
        stored = (self.items - self.held) * self.threads
        return {"bins": 2 * BINS + 32, "beyond": 2, "found": 8, "warps": 32, "blocks": 8, "keys": stored}
