"""The entries of one job at one source: which are still to be asked for, and which are outstanding.

Two kinds, by how the source is asked: ``Reading`` entry by entry, ``BatchReading`` by runs of
consecutive ones. No socket here.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ledgers.bookie.bulk.frames import batch_request, read_requests
from ledgers.bookie.bulk.job import QUANTUM_COUNT, Job, Writing

if TYPE_CHECKING:
    from ledgers.bookie.bulk.batches import BatchReads
    from ledgers.bookie.bulk.gates import Gate
    from ledgers.bookie.bulk.source import SourceLane

BATCH_BYTES = 64 * 1024
"""What one batch read is to bring; a request never asks for more than ``BATCH_BYTES_MAX``."""
BATCH_BYTES_MAX = 256 * 1024
"""Rule S10."""
BATCH_COUNT_MAX = 250
"""A quarter of what may be on its way to a target."""
BATCH_ENTRY_BYTES_MAX = BATCH_BYTES // 4
"""Larger entries are read one by one: their bytes need not be moved to become adds."""


class AnyReading(ABC):
    """What both kinds share.

    When it is over the lane keeps it until its outstanding requests are answered: the bookie is
    still at work on them, so they count against its budget, and their replies are nobody else's.
    """

    __slots__ = (
        "_entry_ids",
        "_next",
        "check",
        "first_id",
        "is_over",
        "is_queued",
        "job",
        "lane",
        "last_id",
        "ledger_id",
        "let_go_by",
        "outstanding",
        "progress_s",
        "way",
        "writing",
    )

    def __init__(
        self,
        job: Job,
        lane: "SourceLane[Any]",
        entry_ids: Sequence[int],
        writing: Writing | None,
    ) -> None:
        self.job = job
        self.writing = writing
        """The job's, where the entries are to be written; None where to see them is enough."""
        self.way = job.check_way if writing is None else job.way.behind(lane.pace)
        self.lane = lane
        self.ledger_id = job.ledger_id
        self.check = job.check_for(lane.bookie)
        self.progress_s = 0.0
        """Loop time at which the source last replied, or was asked while nothing was
        outstanding."""
        self.is_queued = False
        """Whether it waits for its next turn, in the lane's ring or parked at a gate."""
        self.let_go_by: set[Gate] = set()
        """Gates where it was parked longest, and has not come to again: it goes before those that
        still are, though it may be parked at others on the way."""
        self.is_over = False
        self.outstanding: dict[int, Any] = {}
        """What is outstanding, by the key of its reply, oldest first."""
        self.first_id, self.last_id = entry_ids[0], entry_ids[-1]
        self._entry_ids = entry_ids
        self._next = 0

    @property
    @abstractmethod
    def has_pending(self) -> bool:
        """Whether an entry is still to be asked for."""

    @property
    def request_count(self) -> int:
        """Requests outstanding: what counts against the source's budget."""
        return len(self.outstanding)

    @property
    @abstractmethod
    def outstanding_count(self) -> int:
        """Entries outstanding."""

    @property
    @abstractmethod
    def outstanding_bytes(self) -> int:
        """What they were taken for."""

    @property
    @abstractmethod
    def quantum(self) -> int:
        """How many entries may be asked in one turn; 0 when the first replies should be seen
        first."""

    @abstractmethod
    def requests_for(self, count: int) -> int:
        """How many requests that many entries, at most a quantum, are asked in."""

    @abstractmethod
    def ask(self, count: int, now_s: float) -> bytes:
        """The requests for the next ``count`` entries, which are outstanding from now on."""

    @property
    def is_idle(self) -> bool:
        """Nothing left to ask and nothing outstanding."""
        return not self.request_count and not self.has_pending

    def end(self) -> list[int]:
        """Ask nothing more; the entries that were pending or outstanding until now."""
        if self.is_over:
            return []
        self.is_over = True
        entry_ids = self._drop_all()
        if self.outstanding_count:
            self.way.give_back(self.outstanding_bytes, count=self.outstanding_count)
        self.lane.forget_if_idle(self)
        return entry_ids

    def forget_outstanding(self) -> None:
        """Expect no reply any more."""
        self.outstanding.clear()

    @abstractmethod
    def _drop_all(self) -> list[int]:
        """Make nothing pending; the entries that were, and those outstanding."""


class Reading(AnyReading):
    """Entries asked for one by one. ``outstanding``: entry id to the bytes it was taken for."""

    __slots__ = ()

    outstanding: dict[int, int]

    @property
    def has_pending(self) -> bool:
        return self._next < len(self._entry_ids)

    @property
    def outstanding_count(self) -> int:
        return len(self.outstanding)

    @property
    def outstanding_bytes(self) -> int:
        return sum(self.outstanding.values())

    @property
    def quantum(self) -> int:
        job = self.job
        count = job.quantum if job.is_weighed else QUANTUM_COUNT - len(self.outstanding)
        pending_count = len(self._entry_ids) - self._next
        return count if count < pending_count else pending_count

    def requests_for(self, count: int) -> int:
        return count

    def ask(self, count: int, now_s: float) -> bytes:
        entry_ids = self._entry_ids[self._next : self._next + count]
        self._next += count
        if not self.outstanding:
            self.progress_s = now_s
        self.outstanding.update(dict.fromkeys(entry_ids, self.job.expected_bytes))
        return read_requests(self.ledger_id, entry_ids)

    def _drop_all(self) -> list[int]:
        entry_ids = [*self.outstanding, *self._entry_ids[self._next :]]
        self._next = len(self._entry_ids)
        return entry_ids


@dataclass(slots=True)
class Batch:
    """One batch read under way: ``count`` entries from the first on, taken for so many bytes
    each."""

    reading: "BatchReading"
    first_entry_id: int
    count: int
    taken_bytes: int

    @property
    def entry_ids(self) -> range:
        return range(self.first_entry_id, self.first_entry_id + self.count)


class BatchReading(AnyReading):
    """Entries asked for in runs of consecutive ones. ``outstanding``: by request id.

    What a reply leaves out, because it was full or an entry is missing, is asked for again first.
    """

    __slots__ = ("_again",)

    lane: "BatchReads"
    outstanding: dict[int, Batch]

    def __init__(
        self, job: Job, lane: "BatchReads", entry_ids: Sequence[int], writing: Writing | None
    ) -> None:
        super().__init__(job, lane, entry_ids, writing)
        self._again: deque[range] = deque()

    @property
    def has_pending(self) -> bool:
        return bool(self._again) or self._next < len(self._entry_ids)

    @property
    def outstanding_count(self) -> int:
        return sum(batch.count for batch in self.outstanding.values())

    @property
    def outstanding_bytes(self) -> int:
        return sum(batch.count * batch.taken_bytes for batch in self.outstanding.values())

    @property
    def quantum(self) -> int:
        job = self.job
        if not job.is_weighed and self.outstanding:
            return 0
        count_max = BATCH_COUNT_MAX if job.is_weighed else QUANTUM_COUNT
        count = max(1, min(BATCH_BYTES // job.expected_bytes, count_max))
        if self._again:
            return min(count, len(self._again[0]))
        return run_length(self._entry_ids, self._next, count)

    def requests_for(self, count: int) -> int:
        return 1

    def ask(self, count: int, now_s: float) -> bytes:
        first_entry_id = self._take(count)
        if not self.outstanding:
            self.progress_s = now_s
        request_id = self.lane.next_request_id(self)
        self.outstanding[request_id] = Batch(self, first_entry_id, count, self.job.expected_bytes)
        return batch_request(
            self.ledger_id,
            first_entry_id,
            request_id=request_id,
            count_max=count,
            bytes_max=BATCH_BYTES_MAX,
        )

    def ask_again(self, entry_ids: range) -> None:
        if entry_ids and not self.is_over:
            self._again.append(entry_ids)

    def _take(self, count: int) -> int:
        """The first of the next ``count`` entries, which stand in a row and are pending no more."""
        if not self._again:
            self._next += count
            return self._entry_ids[self._next - count]
        run = self._again.popleft()
        if count < len(run):
            self._again.appendleft(run[count:])
        return run[0]

    def _drop_all(self) -> list[int]:
        runs = [*(batch.entry_ids for batch in self.outstanding.values()), *self._again]
        entry_ids = [entry_id for run in runs for entry_id in run]
        entry_ids.extend(self._entry_ids[self._next :])
        self._again.clear()
        self._next = len(self._entry_ids)
        return entry_ids


def run_length(entry_ids: Sequence[int], start: int, count_max: int) -> int:
    """How many of the ascending ids from ``start`` on are consecutive, up to ``count_max``."""
    stop = min(start + count_max, len(entry_ids))
    if start == stop:
        return 0
    offset = entry_ids[start] - start
    if entry_ids[stop - 1] - (stop - 1) == offset:
        return stop - start
    # An id less its place in the sequence never falls, and grows at the first gap.
    return bisect_left(range(stop), offset + 1, lo=start, key=lambda n: entry_ids[n] - n) - start


def has_runs(entry_ids: Sequence[int]) -> bool:
    """Whether most of the ascending ids stand in rows of two or more: worth reading in batches."""
    first_run = run_length(entry_ids, 0, 2)
    return first_run == 2 or run_length(entry_ids, first_run, 2) == 2
