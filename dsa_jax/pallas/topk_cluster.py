"""What a cluster of blocks does for the top-k of one row, or of one span of a longer row (topk_mosaic.py launches it).

The threads of the cluster hold the row's scores in registers, as unsigned keys in the order of the floats. A turn of the
search counts the keys of a range in 2,048 bins of shared memory and narrows the range to the bin in which the k-th largest
lies; a first range comes from a sample. Two turns mostly suffice and four always do: a sample may mislead once, and each
other turn takes eleven bits. The blocks read each other's bins through distributed shared memory.

The program for long rows skips what a short one lacks score by score, in many steps. So there may be a second program, for
rows that some threads of the first block hold: all others end at once, and no barrier waits for another block.

Scores that pass are marked in one bit per column. Ranks come from counts of bits, so positions come out ascending. They are
gathered in shared memory and written together: written one by one, each would cost a sector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dsa_jax.pallas.topk_machine import Machine
from dsa_jax.pallas.topk_plan import BIN_BITS, BINS, Plan

_GROUP = 8  # consecutive scores of a sample: one sector of memory
_TOP = 0xFFFFFFFF
_FEW = 8192  # loads of a block that are on their way at once
_QUAD = 4  # scores of a thread that are skipped together and lie together in shared memory


def select_row(m: Machine, plan: Plan) -> None:
    """The program of one cluster."""
    row, start = m.program, 0
    if plan.spans > 1:
        row = m.program // plan.spans
        start = (m.program - row * plan.spans) * plan.span
    limit = m.load(m.at(m.row_of("limits", row, 1), 0))
    limit = m.select(limit > 0x7FFFFFFF, 0, m.minimum(limit, plan.columns))
    if plan.merged_span:
        # All spans of a row but its last are full, so its finds lie without gaps.
        full = limit // plan.merged_span
        count = full * plan.kept + m.minimum(limit - full * plan.merged_span, plan.kept)
    elif plan.spans > 1:
        count = m.select(limit > start, m.minimum(limit - start, plan.span), 0)
    else:
        count = limit
    source = _Source(m, plan, row, start)
    result = m.row_of("result", m.program, plan.k)

    def everything():
        for begin in range(0, plan.k, plan.threads):
            index = m.thread + begin
            exists = index < count
            value = source.result(source.position(index, exists), exists)
            unused = index >= count
            m.store(m.at(result, index), m.select(unused, _TOP, value), index < plan.k)

    m.when((count <= plan.k) & (m.rank == 0), everything)
    select = lambda plan: _Row(m, plan, source, result, count).select()
    short = plan.short()
    if short:
        fits = count <= short.threads * short.items
        m.when((count > plan.k) & fits & (m.rank == 0) & (m.thread < short.threads), lambda: select(short))
        m.when((count > plan.k) & ~fits, lambda: select(plan))
    else:
        m.when(count > plan.k, lambda: select(plan))


class _Source:
    """The scores of a row: of its logits from `start` on, or at the positions that spans found."""

    def __init__(self, m: Machine, plan: Plan, row: Any, start: Any):
        self.m, self.plan, self._start = m, plan, start
        self._logits = m.row_of("logits", row, plan.columns)
        if plan.spans > 1:
            self._logits = m.at(self._logits, start)
        self._found = self._table = None
        if plan.merged_span:
            spans = -(-plan.columns // plan.merged_span)
            self._found = m.row_of("found", row, spans * plan.kept)
        if plan.page_size:
            request = m.load(m.at(m.row_of("requests", row, 1), 0))
            # A request that the table lacks has no pages, so nothing is loaded of the line that its number would make.
            self._pages = m.select(request < plan.requests, plan.pages, 0)
            self._table = m.row_of("page_table", request, plan.pages)

    def position(self, index: Any, where: Any) -> Any:
        """Position in the row of a score's index."""
        if self._found is None:
            return index + self._start if self.plan.spans > 1 else index
        return self.m.load(self.m.at(self._found, index), where=where)

    def result(self, position: Any, where: Any) -> Any:
        """What stands for a position in the result: itself, or its row in the cache, -1 where the table has no page."""
        if self._table is None:
            return position
        m, size, page = self.m, self.plan.page_size, position // self.plan.page_size
        slot = m.load(m.at(self._table, page), where=where & (page < self._pages), into=m.variable(_TOP))
        return m.select(slot > 0x7FFFFFFF, _TOP, slot * size + (position & (size - 1)))

    def loader(self, index: Any) -> Callable[..., Any]:
        """A function of an offset, a flag and a variable that loads the score at `index + offset`, as bits of an f32.

        Where the flag says that there is none, the variable keeps what it held. Without a variable the bits are
        returned, a NaN where there is none.
        """
        m = self.m
        pointer = m.at(self._logits if self._found is None else self._found, index)

        def load(offset: int, where: Any, into: Any = None) -> Any:
            into = into or m.variable(_TOP)
            if self._found is None:
                m.load(pointer, offset, where, into)
            else:
                m.load(m.at(self._logits, m.load(pointer, offset, where)), 0, where, into)
            return into.get()

        return load


class _Row:
    """The selection from a row of more than k scores."""

    def __init__(self, m: Machine, plan: Plan, source: _Source, result: Any, count: Any):
        self.m, self.plan, self.source, self.result, self.count = m, plan, source, result, count
        threads = plan.threads * plan.cluster
        self.items = m.maximum((count + (threads - 1)) // threads, plan.least)  # of each thread
        alone = plan.threads * plan.least
        self.busy = m.select(self.items > plan.least, plan.cluster, (count + (alone - 1)) // alone)
        self.several = self.busy > 1
        # A warp owns a contiguous range, of which each lane takes every 32nd column.
        self.first = (m.rank * (plan.threads // 32) + m.warp) * self.items * 32
        self.end = m.minimum(self.first + self.items * 32, count)
        self.column = self.first + m.lane
        self.left = m.select(self.column < self.end, self.end - self.column, 0)

    def select(self) -> None:
        self.m.when(self.m.rank < self.busy, self._select)

    def _select(self) -> None:
        m, plan = self.m, self.plan
        # A use waits for memory, and no load passes it. A few loads are on their way at once, and the sample is used after
        # them; many queue up, and the sample would wait for room in the queue.
        sample, late = self._load_sample(), plan.threads * plan.items <= _FEW
        if not late:
            sample = [self._key(bits) for bits in sample]
        self._store_keys()
        scores = self._load_scores()
        m.clear("bins", m.thread, 2 * BINS // plan.threads, plan.threads)
        m.write("beyond", m.thread, [0], m.thread < 2)
        self._barrier()
        if late:
            sample = [self._key(bits) for bits in sample]
        for key in sample:
            m.increase("bins", key >> (32 - BIN_BITS), 1)
        self._barrier()
        low, last = self._guess()
        self.held = self._keys_of(scores)
        self._emit(*self._search(low, last))

    def _barrier(self) -> None:
        self.m.barrier(self.plan.threads)

    def _cluster_barrier(self) -> None:
        if self.plan.cluster > 1:
            self.m.cluster_barrier(self.several)
        else:
            self._barrier()

    def _quads(self, body: Callable[[int, list[Any]], None]) -> None:
        """Run a body for each four scores of a thread, given their first number and keys; skip what no thread has."""
        m, plan = self.m, self.plan

        def run(begin: int) -> None:
            if begin < plan.held:
                keys = [self.held[begin + i].get() for i in range(_QUAD)]
            else:
                keys = m.read("keys", self._stored(begin), _QUAD)
            body(begin, keys)

        self._each_quad(0, plan.items, run)

    def _each_quad(self, begin: int, end: int, body: Callable[[int], None]) -> None:
        """Run a body for the number of each four scores, and skip what no thread has: sixteen at once, then four."""
        m = self.m

        def sixteen(first: int) -> None:
            body(first)
            for quad in range(first + _QUAD, min(first + 4 * _QUAD, end), _QUAD):
                m.when(self.items > quad, lambda quad=quad: body(quad))

        for first in range(begin, end, 4 * _QUAD):
            m.when(self.items > first, lambda first=first: sixteen(first))

    def _stored(self, begin: int) -> Any:
        """Place of four keys in shared memory."""
        return self.m.thread * _QUAD + (begin - self.plan.held) * self.plan.threads

    def _load_sample(self) -> list[Any]:
        """This thread's part of the sample, as bits."""
        m, plan = self.m, self.plan
        groups, bits = self.count >> 3, (plan.samples // _GROUP).bit_length() - 1
        found = []
        for i in range(plan.samples // plan.threads):
            number = m.thread + i * plan.threads
            index = ((number >> 3) * groups >> bits) * _GROUP + (number & (_GROUP - 1))
            found.append(self.source.loader(index)(0, index < self.count))
        return found

    def _load_scores(self) -> list[Any]:
        """Scores for the registers, as bits in variables, while they arrive."""
        m, load = self.m, self.source.loader(self.column)
        scores = [m.variable(_TOP) for _ in range(self.plan.held)]

        def quad(begin):
            for j in range(begin, begin + _QUAD):
                load(j * 32, self.left > j * 32, scores[j])

        self._each_quad(0, self.plan.held, quad)
        return scores

    def _keys_of(self, scores: list[Any]) -> list[Any]:
        def quad(begin):
            for j in range(begin, begin + _QUAD):
                scores[j].set(self._key(scores[j].get()))

        self._each_quad(0, self.plan.held, quad)
        return scores

    def _store_keys(self) -> None:
        """Load what does not fit into the registers into shared memory, as keys."""
        m, plan, load = self.m, self.plan, self.source.loader(self.column)
        step = 2 * _QUAD

        def part(begin):
            numbers = range(begin, min(begin + step, plan.items))
            bits = [load(j * 32, self.left > j * 32) for j in numbers]
            for quad in range(0, len(bits), _QUAD):
                m.write("keys", self._stored(begin + quad), [self._key(b) for b in bits[quad : quad + _QUAD]])

        for begin in range(plan.held, plan.items, step):
            m.when(self.items > begin, lambda begin=begin: part(begin))

    def _key(self, bits: Any) -> Any:
        """A number in ascending order of the floats; both zeros have the same, and 1 is NaN."""
        m = self.m
        bits = m.canonical(bits)  # NaN is now the greatest: it wraps around
        return (bits ^ (m.sign(bits) | 0x80000000)) + 2

    # Sums over a block

    def _before(self, value: Any) -> tuple[Any, Any]:
        """Sum over all lower threads of the block, and over all. Needs a barrier before it is called again."""
        m = self.m
        through = value
        for distance in (1, 2, 4, 8, 16):
            through = m.plus_lower_lane(through, distance)
        m.write("warps", m.warp, [through], m.lane == 31)
        self._barrier()
        [totals] = m.read("warps", m.lane, where=m.lane < self.plan.threads // 32)
        lower_warps = m.warp_sum(m.select(m.lane < m.warp, totals, 0))
        return lower_warps + through - value, m.warp_sum(totals)

    def _find(self, counts: Sequence[Any], before: Any, needs: Sequence[Any]) -> list[list[Any]]:
        """For each need the bin in which the sum of bins from the top reaches it: bin, sum above, sum with it.

        Args:
            counts: of this thread's bins, from the top.
            before: sum of all higher bins.
            needs: what to reach.
        """
        m, each = self.m, len(counts)
        total = _sum(counts)
        highest = (BINS - 1) - m.thread * each
        for n, need in enumerate(needs):

            def walk(n=n, need=need):
                above = before
                for i, count in enumerate(counts):
                    through = above + count
                    m.write("found", 4 * n, [highest - i, above, through], (above < need) & (through >= need))
                    above = through

            m.when((before < need) & (before + total >= need), walk)
        self._barrier()
        found = m.read("found", 0, 4 * len(needs))
        return [found[4 * n : 4 * n + 3] for n in range(len(needs))]

    def _guess(self) -> tuple[Any, Any]:
        """A range of keys that should hold the k-th largest, from the sample."""
        m, plan = self.m, self.plan
        each = BINS // plan.threads
        counts = m.read("bins", (BINS - each) - m.thread * each, each)[::-1]
        before, _ = self._before(_sum(counts))
        # Four times the standard deviation of what is expected for the usual shares, and more where there are few.
        expected = plan.k * plan.samples // self.count
        margin = (expected >> 2) + 16
        high = m.select(expected > margin, expected - margin, 1)
        low = m.minimum(expected + margin, plan.samples)
        highest, lowest = self._find(counts, before, [high, low])
        shift = 32 - BIN_BITS
        return lowest[0] << shift, (highest[0] << shift) | ((1 << shift) - 1)

    # Search

    def _search(self, first: Any, last: Any) -> tuple[Any, Any, Any, Any]:
        """Range of keys that ends the selection, how many lie above it, and whether all of it is taken."""
        m, plan = self.m, self.plan
        shift = self._shift(last - first)
        # A range of all bins, so that a key's bin alone tells whether it lies within.
        size = (1 << shift) << BIN_BITS
        first = m.minimum(first, 0 - size)
        last = first + size - 1
        own_beyond = m.variable(0)
        spare = m.lane + BINS

        def count(_, keys):
            for key in keys:
                m.increase("bins", m.minimum((key - first) >> shift, spare), 1, offset=BINS)
                own_beyond.increment(key > last)

        self._quads(count)
        m.increase("beyond", 0, m.warp_sum(own_beyond.get()), m.lane == 0)
        counts, beyond = self._gather(1)
        before, total = self._before(_sum(counts))
        before = before + beyond
        [(bin_, bin_above, bin_reached)] = self._find(counts, before, [plan.k])
        too_low, too_high = beyond >= plan.k, beyond + total < plan.k
        choose = lambda a, b, c: m.select(too_low, a, m.select(too_high, b, c))
        low = m.variable(choose(last + 1, 1, first + (bin_ << shift)))
        high = m.variable(choose(_TOP, first - 1, first + (bin_ << shift) + ((1 << shift) - 1)))
        above = m.variable(choose(0, beyond + total, bin_above))
        reached = m.variable(choose(0, 0, bin_reached))
        half, done = m.variable(0), m.variable(0)
        finished = lambda shift, reached: m.select((shift == 0) | (reached == plan.k), 1, 0)
        done.set(choose(0, 0, finished(shift, bin_reached)))

        def turn():
            a, b, place = low.get(), high.get(), half.get() * BINS
            width = b - a
            shift = self._shift(width)

            def count(_, keys):
                inside = [key - a <= width for key in keys]

                def increase():
                    for key, flag in zip(keys, inside, strict=True):
                        m.increase("bins", place + ((key - a) >> shift), 1, flag)

                m.when(m.any(_any(inside)), increase)

            self._quads(count)
            counts, _ = self._gather(half.get())
            before, _ = self._before(_sum(counts))
            [(bin_, bin_above, bin_reached)] = self._find(counts, before + above.get(), [plan.k])
            low.set(a + (bin_ << shift))
            high.set(low.get() + m.minimum(b - low.get(), (1 << shift) - 1))
            above.set(bin_above)
            reached.set(bin_reached)
            half.set(1 - half.get())
            done.set(finished(shift, bin_reached))

        m.loop(lambda: done.get() == 0, turn)
        return low.get(), high.get(), above.get(), reached.get() == plan.k

    def _shift(self, width: Any) -> Any:
        """Bits of a distance within a range of `width + 1` that do not matter for its bin."""
        used = 32 - self.m.leading_zeros(width)
        return self.m.select(used > BIN_BITS, used - BIN_BITS, 0)

    def _gather(self, half: Any) -> tuple[list[Any], Any]:
        """Wait for all blocks; this thread's share of a half's bins, from the top, and what lies beyond."""
        m, plan = self.m, self.plan
        each = BINS // plan.threads
        place = (half * BINS + (BINS - each)) - m.thread * each
        self._cluster_barrier()
        if plan.cluster > 1:
            counts, beyond = self._of_all_blocks(place, each)
        else:
            counts, [beyond] = m.read("bins", place, each), m.read("beyond", 0)
        # The other half was read before this barrier, so it may be cleared for the next turn.
        other = BINS - half * BINS + m.thread
        m.clear("bins", other, each, plan.threads)
        return counts[::-1], beyond

    def _of_all_blocks(self, place: Any, each: int) -> tuple[list[Any], Any]:
        m, sums = self.m, []
        for rank in range(self.plan.cluster):
            exists = self.busy > rank
            part = m.read_at("bins", place, rank, each, exists) + m.read_at("beyond", 0, rank, 1, exists)
            sums = [a + b for a, b in zip(sums, part, strict=True)] if sums else part
        return sums[:-1], sums[-1]

    # Result

    def _emit(self, low: Any, high: Any, above: Any, whole: Any) -> None:
        """Write positions of the keys above a range, and of as many in it as there is room for."""
        m, plan = self.m, self.plan
        each = -(-plan.items // 32)  # words of a lane
        # Where there are fewer words than lanes, several lanes share one, each with bits of its own: the loop over bits
        # takes as long as the fullest lane.
        sharing = 1 << max(0, 5 - (plan.items - 1).bit_length())
        holder, own_bits = m.lane // sharing, 32 // sharing
        own = ((1 << own_bits) - 1) << ((m.lane & (sharing - 1)) * own_bits)
        sure, level = ([m.variable(0) for _ in range(each)] for _ in range(2))
        width = high - low

        def mark(begin, keys):
            for j, key in enumerate(keys, begin):
                sure[j % each].set(m.ballot(key >= low), holder == j // each)

            def mark_level():
                inside = [key - low <= width for key in keys]

                def set_level():
                    for j, flag in enumerate(inside, begin):
                        level[j % each].set(m.ballot(flag), holder == j // each)

                m.when(m.any(_any(inside)), set_level)

            m.when(~whole, mark_level)

        self._quads(mark)
        counts = None
        for i in range(each):
            held = m.select(holder * each + i < self.items, own, 0)
            level[i].set(level[i].get() & held)
            sure[i].set(sure[i].get() & (level[i].get() ^ _TOP) & held)
            count = m.bits(sure[i].get()) + (m.bits(level[i].get()) << 12)
            counts = count if counts is None else counts + count
        # Fewer than 4,096 are sure, so two counts share a number.
        room = plan.k - above
        before, total = self._before(counts)
        sure_before, level_before = m.variable(before & 0xFFF), m.variable(before >> 12)
        if plan.cluster > 1:
            m.write_at("blocks", m.rank, m.thread, total, m.thread < self.busy)
            self._cluster_barrier()
            for rank in range(plan.cluster - 1):
                [block] = m.read("blocks", rank, where=m.rank > rank)
                sure_before.set(sure_before.get() + (block & 0xFFF))
                level_before.set(level_before.get() + (block >> 12))
        begin = sure_before.get() - (before & 0xFFF) + m.minimum(level_before.get() - (before >> 12), room)
        for i in range(each):
            word = m.variable(sure[i].get() | level[i].get())
            first = self.first + holder * (32 * each) + 32 * i

            def next_bit(word=word, first=first, sure=sure[i]):
                bit = m.lowest_bit(word.get())
                certain = ((sure.get() >> bit) & 1) == 1
                tied = level_before.get()
                rank = sure_before.get() + m.minimum(tied, room)
                take = certain | (tied < room)
                m.write("bins", rank - begin, [first + bit], take)
                sure_before.increment(certain)
                level_before.increment(~certain)
                word.set(word.get() & (word.get() - 1))

            m.loop(lambda word=word: word.get() != 0, next_bit)
        m.write(
            "found",
            0,
            [sure_before.get() + m.minimum(level_before.get(), room)],
            m.thread == plan.threads - 1,
        )
        self._barrier()
        [end] = m.read("found", 0)
        result = m.at(self.result, begin)
        for i in range(0, plan.k, plan.threads):
            index = m.thread + i
            exists = index < end - begin
            [column] = m.read("bins", index, where=exists)
            place = m.at(result, index)
            m.store(place, self.source.result(self.source.position(column, exists), exists), exists)


def _sum(numbers: Sequence[Any]) -> Any:
    total = numbers[0]
    for number in numbers[1:]:
        total = total + number
    return total


def _any(flags: Sequence[Any]) -> Any:
    found = flags[0]
    for flag in flags[1:]:
        found = found | flag
    return found
