"""The log of shared memory under the top-k's lockstep: by hand, and each barrier of the program taken away in turn."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_jax.pallas import topk_lockstep, topk_mosaic
from dsa_jax.pallas.topk_cluster import select_row
from dsa_jax.pallas.topk_lockstep import LockstepMachine
from dsa_jax.pallas.topk_mosaic import Config

THREADS = 64  # two warps


def races(program, *, cluster: int = 1, programs: int = 1) -> list[str]:
    """What the log says of a program for a machine with an array of 128 words."""
    machine = LockstepMachine(
        threads=THREADS, cluster=cluster, programs=programs, arrays={}, sizes={"words": 128}
    )
    program(machine)
    return machine.races()


def write_then(step):
    """Every thread writes its own word, then something happens, then each reads its neighbour's in the same warp."""

    def program(m):
        m.write("words", m.thread, [m.thread])
        step(m)
        m.read("words", m.thread ^ 1)

    return program


NOTHING = lambda m: None
BLOCK_BARRIER = lambda m: m.barrier(THREADS)
CLUSTER_BARRIER = lambda m: m.cluster_barrier(m.thread >= 0)


def test_a_barrier_orders_a_block():
    assert races(write_then(NOTHING)) == [
        "words[1] of block 0: thread 0 of block 0 reads what thread 1 of block 0 wrote, with no barrier between"
    ]
    assert races(write_then(BLOCK_BARRIER)) == []
    assert races(write_then(CLUSTER_BARRIER), cluster=2) == []
    # One block of two goes on alone.
    assert races(write_then(lambda m: m.cluster_barrier(m.thread < 0)), cluster=2) == []


@pytest.mark.parametrize("collective", ["any", "ballot", "warp_sum", "plus_lower_lane"])
def test_a_collective_of_a_warp_orders_nothing(collective):
    call = {
        "any": lambda m: m.any(m.lane == 0),
        "ballot": lambda m: m.ballot(m.lane == 0),
        "warp_sum": lambda m: m.warp_sum(m.lane),
        "plus_lower_lane": lambda m: m.plus_lower_lane(m.lane, 1),
    }[collective]
    assert len(races(write_then(call))) == 1


@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        # All threads at word 3, and a thread at what it did itself.
        (lambda m: m.read("words", 3), lambda m: m.read("words", 3), []),
        (lambda m: m.increase("words", 3, 1), lambda m: m.increase("words", 3, 1), []),
        (
            lambda m: m.write("words", m.thread, [1]),
            lambda m: (m.read("words", m.thread), m.increase("words", m.thread, 1), m.write("words", m.thread, [2])),
            [],
        ),
        (lambda m: m.write("words", 3, [1]), NOTHING, ["thread 0 of block 0 writes what thread 63 of block 0 wrote"]),
        (
            lambda m: m.increase("words", 3, 1),
            lambda m: m.read("words", 3, where=m.thread == 5),
            ["thread 5 of block 0 reads what several threads added to"],
        ),
        (
            lambda m: m.read("words", 3, where=m.thread == 5),
            lambda m: m.increase("words", 3, 1, m.thread == 6),
            ["thread 6 of block 0 adds to what thread 5 of block 0 read"],
        ),
        (
            lambda m: m.read("words", 3),
            lambda m: m.write("words", 0, [0, 0, 0, 0], m.thread == 63),
            ["thread 63 of block 0 writes what several threads read"],
        ),
        (
            lambda m: m.write("words", 3, [1], m.thread == 0),
            lambda m: m.increase("words", 3, 1, m.thread == 32),
            ["thread 32 of block 0 adds to what thread 0 of block 0 wrote"],
        ),
        (
            lambda m: m.increase("words", 3, 1, m.thread == 0),
            lambda m: m.clear("words", m.thread, 2, THREADS),
            ["thread 3 of block 0 writes what thread 0 of block 0 added to"],
        ),
    ],
)  # fmt: skip
def test_what_conflicts(first, second, wanted):
    def program(m):
        first(m)
        second(m)

    wanted = [f"words[3] of block 0: {text}, with no barrier between" for text in wanted]
    assert races(program) == wanted


def test_an_access_outlives_later_ones_of_the_same_kind():
    """Thread 1 reads after thread 0; that thread 1 itself may write then does not hide thread 0's read."""

    def program(m):
        m.read("words", 3, where=m.thread == 0)
        m.read("words", 3, where=m.thread == 1)
        m.write("words", 3, [1], m.thread == 1)

    assert races(program) == [
        "words[3] of block 0: thread 1 of block 0 writes what several threads read, with no barrier between"
    ]


def to_the_other_block(step):
    """After a first barrier of the cluster, block 0 writes a word of block 1's, which block 1 then reads."""

    def program(m):
        CLUSTER_BARRIER(m)
        m.write_at("words", 7, 1 - m.rank, m.thread, (m.rank == 0) & (m.thread == 2))
        step(m)
        m.read("words", 7, where=(m.rank == 1) & (m.thread == 2))
        CLUSTER_BARRIER(m)

    return program


def test_only_a_barrier_of_the_cluster_orders_its_blocks():
    """In the second cluster likewise; threads of the same number in two blocks are two threads."""
    assert races(to_the_other_block(CLUSTER_BARRIER), cluster=2, programs=2) == []
    for step in (NOTHING, BLOCK_BARRIER):
        assert races(to_the_other_block(step), cluster=2, programs=2) == [
            "words[7] of block 1: thread 2 of block 1 reads what thread 2 of block 0 wrote, with no barrier between"
        ]


def test_what_another_block_reads_may_not_change():
    """The other block's read, then a barrier of each block alone, then the owner's write."""

    def program(m, between):
        CLUSTER_BARRIER(m)
        m.read_at("words", 7, 0, where=(m.rank == 1) & (m.thread == 2))
        between(m)
        m.write("words", 7, [1], (m.rank == 0) & (m.thread == 2))
        CLUSTER_BARRIER(m)

    assert races(lambda m: program(m, CLUSTER_BARRIER), cluster=2) == []
    assert races(lambda m: program(m, BLOCK_BARRIER), cluster=2) == [
        "words[7] of block 0: thread 2 of block 0 writes what thread 2 of block 1 read, with no barrier between"
    ]


def test_another_block_must_have_begun_and_not_ended():
    read = lambda m: m.read_at("words", 7, 0, where=m.rank == 1)

    def early(m):
        read(m)
        CLUSTER_BARRIER(m)

    def late(m):
        CLUSTER_BARRIER(m)
        read(m)

    def between(m):
        CLUSTER_BARRIER(m)
        read(m)
        CLUSTER_BARRIER(m)

    assert races(early, cluster=2) == ["words of a block that may not have begun is accessed by another"]
    assert races(late, cluster=2) == ["words of a block that may have ended is accessed by another"]
    assert races(between, cluster=2) == []


def test_barriers_are_for_all():
    """A barrier in a branch that some threads, or a block of the cluster, do not take: the card would wait forever."""

    def some_threads(m):
        m.when(m.thread < 40, lambda: m.barrier(THREADS))

    def too_many(m):
        m.barrier(32)

    def one_block(m):
        CLUSTER_BARRIER(m)
        m.when(m.rank == 0, lambda: CLUSTER_BARRIER(m))

    wanted = "other threads than the first {} of a block are at its barrier"
    assert races(some_threads) == [wanted.format(64)]
    assert races(too_many) == [wanted.format(32)]
    assert races(lambda m: m.when(m.thread < 32, lambda: m.barrier(32))) == []
    assert races(one_block, cluster=2) == ["a block is not at a barrier of its cluster as at the first"]


# --- the program ---------------------------------------------------------------------------------------------------


class Forgetful(LockstepMachine):
    """Leaves out one barrier of the program; a barrier of the cluster may become one of each block instead.

    Attributes:
        forget: which, counted in the order of execution; -1 for none.
        weaken: turn a barrier of the cluster into one of each block.
        passed: kinds of all barriers so far.
    """

    def __init__(self, forget: int = -1, weaken: bool = False, **options):
        super().__init__(**options)
        self.forget, self.weaken = forget, weaken
        self.passed: list[str] = []

    def _forgotten(self, kind: str) -> bool:
        self.passed.append(kind)
        return len(self.passed) - 1 == self.forget

    def barrier(self, threads):
        if not self._forgotten("block"):
            super().barrier(threads)

    def cluster_barrier(self, several):
        if not self._forgotten("cluster"):
            super().cluster_barrier(several)
        elif self.weaken:
            super().cluster_barrier(several & ~several)


def run_row(config: Config, k: int, scores: np.ndarray, limit: int | None = None, **options):
    """The program for one row, on a machine that may forget: the machine, and its races. The result is right anyway."""
    plan = topk_mosaic._plan(k, len(scores), config, len(scores))
    limit, result = limit or len(scores), np.full(k, topk_lockstep.UNWRITTEN, np.int32)
    machine = Forgetful(
        threads=plan.threads,
        cluster=plan.cluster,
        programs=1,
        arrays={"logits": scores, "limits": np.array([limit], np.int32), "result": result},
        sizes=plan.shared_sizes(),
        **options,
    )
    with np.errstate(all="ignore"):
        select_row(machine, plan)
    np.testing.assert_array_equal(result, np.sort(np.argsort(-scores[:limit], kind="stable")[:k]))
    return machine, machine.races()


def normal(columns: int) -> np.ndarray:
    return np.random.default_rng(8).normal(size=columns).astype(np.float32)


def misleading(columns: int) -> np.ndarray:
    """The sample holds the greatest scores alone, and the others lie close together: three turns after the first count."""
    scores = np.float32(1) + normal(columns) / 1024
    scores[(np.arange(16)[:, None] * (columns // 16) + np.arange(8)).reshape(-1)] = 1e30
    return scores


PROGRAMS = {
    # config, k, scores, barriers of the cluster, a barrier that this row alone could do without
    "one block": (Config(128, 4, 1), 8, normal(500), 0, None),
    "keys in shared memory": (Config(128, 8, 1, least=4, held=4), 8, normal(1_000), 0, None),
    # In the first range no bin is found: nothing is written before the seventh barrier, and nothing read after it counts.
    "several turns": (Config(128, 32, 1, samples=128), 256, misleading(4_096), 0, 6),
    "two blocks": (Config(128, 4, 2, least=1, samples=128), 8, normal(500), 2, None),
    "eight blocks": (Config(128, 8, 8, least=1), 64, normal(5_000), 2, None),
    "two blocks, several turns": (Config(128, 32, 2, samples=128), 256, misleading(4_096), 5, 6),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_barrier_is_needed_and_missed(name):
    """As it is the program has no races. Without any one of its barriers it has, though lockstep's result is the same."""
    config, k, scores, of_clusters, spare = PROGRAMS[name]
    machine, found = run_row(config, k, scores)
    assert found == []
    kinds = machine.passed
    assert kinds.count("cluster") == of_clusters
    assert kinds.count("block") >= 8
    seen = [bool(run_row(config, k, scores, forget=number)[1]) for number in range(len(kinds))]
    assert seen == [number != spare for number in range(len(kinds))]


@pytest.mark.parametrize("name", ["two blocks", "eight blocks", "two blocks, several turns"])
def test_a_barrier_of_one_block_is_not_enough(name):
    config, k, scores, *_ = PROGRAMS[name]
    machine, _ = run_row(config, k, scores)
    for number, kind in enumerate(machine.passed):
        if kind == "cluster":
            assert run_row(config, k, scores, forget=number, weaken=True)[1], number


def test_a_short_row_on_part_of_a_block():
    """Its program has nine barriers, for its own threads; the ten of the program for long rows are then for nobody."""
    config = Config(256, 4, 2, least=1, samples=256, short_threads=128, short_items=4)
    seen = [bool(run_row(config, 8, normal(600), 500, forget=number)[1]) for number in range(-1, 19)]
    assert seen == [False] + [True] * 9 + [False] * 10


def test_the_kernel_refuses_a_race(monkeypatch):
    """Through the kernel's own entry, as all other tests call it."""

    class Machine(Forgetful):
        def __init__(self, **options):
            super().__init__(forget=2, **options)

    monkeypatch.setattr(topk_lockstep, "LockstepMachine", Machine)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"threads race. warps\[0\] of block 0: thread 0 of block 0 reads"
    ):
        topk_mosaic.topk(
            jnp.asarray(normal(500))[None], jnp.array([500], jnp.int32), 8, config=Config(128, 4, 1)
        )
