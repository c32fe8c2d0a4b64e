"""What becomes of the entries of one running transfer. No socket here.

An entry is *pending* until it is asked for, *outstanding* until its source replies, and, given a
target, *unacknowledged* until that replies. At the end it is good, failed or unwritten: exactly one
of them. ``undecided_count`` goes down by each end, and the transfer is done when it is 0.

The entries of one job at one source: which are still to be asked for, and which are outstanding.

Two kinds, by how the source is asked: ``Reading`` entry by entry, ``BatchReading`` by runs of
consecutive ones. No socket here.
"""

import asyncio
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ledgers.bookies import Answer, Transfer, TransferResult
from ledgers.bulk.frames import (
    Check,
    batch_request,
    digest_check,
    fingerprinting_check,
    read_requests,
    recovery_add_prefix,
)
from ledgers.digest import HEADER_BYTES, Fingerprints
from ledgers.errors import BookmenderError
from ledgers.model import BookieId

if TYPE_CHECKING:
    from ledgers.bulk.limiters import Gate, Way
    from ledgers.bulk.source import BatchReads, SourceLane
    from ledgers.bulk.target import TargetLane

QUANTUM_COUNT = 16
QUANTUM_BYTES = 256 * 1024
"""What a transfer may ask of a source before it is another transfer's turn."""


class Totals:
    """Of all transfers since the start, for metrics and progress. Only ever grow."""

    __slots__ = ("entries_read", "entries_written", "read_bytes", "written_bytes")

    def __init__(self) -> None:
        self.entries_read = 0
        """With a good digest."""
        self.read_bytes = 0
        self.entries_written = 0
        """Acknowledged by their target."""
        self.written_bytes = 0


class Job:
    """One transfer on its way: its counts, its readings, its writing, and the future of its
    result."""

    def __init__(self, transfer: Transfer, totals: Totals, *, way: "Way", check_way: "Way") -> None:
        """``way``: of its entries, but for the pace of their source; ``check_way``: of those that
        are only to be checked."""
        self.transfer = transfer
        self.way = way
        self.check_way = check_way
        self.ledger_id = transfer.ledger_id
        self.totals = totals
        self.entry_bytes_min = HEADER_BYTES + transfer.digest.size
        self.done: asyncio.Future[TransferResult] = asyncio.get_running_loop().create_future()
        self.undecided_count = transfer.asked_count
        self.readings: list[AnyReading] = []
        self.writing: Writing | None = None
        self.expected_bytes = max(1, transfer.entry_bytes_hint)
        """What the next entry may weigh: the largest seen, falling slowly while smaller ones
        come."""
        self.quantum = QUANTUM_COUNT
        """How many entries a source may be asked for in one turn."""
        self.is_weighed = False
        """Whether an entry has been seen, so that ``expected_bytes`` is more than the caller's
        guess."""
        self.is_begun = False
        """Whether any of it has passed the pace of its target."""
        self.is_over = False
        self._good_count = 0
        self._good_bytes = 0
        self._fingerprints: dict[BookieId, Fingerprints] = {}
        self._failures: dict[BookieId, dict[int, Answer]] = {}
        self._silent: set[BookieId] = set()

    def check_for(self, bookie: BookieId) -> Check:
        """What the entries that come from it have to pass."""
        if not self.transfer.takes_fingerprints:
            return digest_check(self.transfer.digest)
        found = self._fingerprints.get(bookie)
        if found is None:
            entry_ids = self.transfer.reads[bookie]
            found = self._fingerprints[bookie] = Fingerprints(entry_ids[0], entry_ids[-1])
        return fingerprinting_check(self.transfer.digest, found)

    def weigh(self, largest_bytes: int) -> None:
        """Learn from the largest of some entries that came."""
        excess_bytes = self.expected_bytes - largest_bytes
        self.is_weighed = True
        self.expected_bytes = largest_bytes + max(0, excess_bytes) * 3 // 4
        self.quantum = max(1, min(QUANTUM_COUNT, QUANTUM_BYTES // self.expected_bytes))

    def add_read(self, reading: "AnyReading", count: int, entry_bytes: int) -> None:
        """Entries came whole: all there is to do, unless they are to be written."""
        self.totals.entries_read += count
        self.totals.read_bytes += entry_bytes
        if self.writing is None:
            self._add_good(count, entry_bytes)
        elif reading.writing is None:
            self._decide(count)

    def add_written(self, count: int, entry_bytes: int) -> None:
        self.totals.entries_written += count
        self.totals.written_bytes += entry_bytes
        self._add_good(count, entry_bytes)

    def add_failure(self, reading: "AnyReading", entry_id: int, answer: Answer) -> None:
        self._failures.setdefault(reading.lane.bookie, {})[entry_id] = answer
        self._decide(1)

    def fail_reading(self, reading: "AnyReading", *, is_silent: bool = False) -> None:
        """The source is silent or gone: nothing is known of what it has not answered yet.

        ``is_silent``: for so long that it is to be told of.
        """
        entry_ids = reading.end()
        if entry_ids:
            if is_silent:
                self._silent.add(reading.lane.bookie)
            failed = self._failures.setdefault(reading.lane.bookie, {})
            failed.update(dict.fromkeys(entry_ids, Answer.UNKNOWN))
            self._decide(len(entry_ids))

    def fail_writing(self, error: BookmenderError, *refused: int) -> None:
        """The target is gone, or refused an entry: nothing more is read for it."""
        if not self.is_over:
            assert self.writing is not None
            unwritten = {*refused, *self.writing.end()}
            unchecked: list[AnyReading] = []
            for reading in self.readings:
                if reading.writing is None:
                    unchecked.append(reading)
                else:
                    unwritten.update(reading.end())
            for reading in unchecked:
                self.fail_reading(reading)
            self._finish(frozenset(unwritten), error)
            assert len(unwritten) == self.undecided_count, self.ledger_id

    def abandon(self) -> None:
        """Nobody waits for the result any more. Replies still to come are ignored."""
        if self.is_over:
            return
        self.is_over = True
        for reading in self.readings:
            reading.end()
        if self.writing is not None:
            self.writing.end()

    def _add_good(self, count: int, entry_bytes: int) -> None:
        self._good_count += count
        self._good_bytes += entry_bytes
        self._decide(count)

    def _decide(self, count: int) -> None:
        self.undecided_count -= count
        if self.undecided_count == 0:
            self._finish(frozenset(), None)

    def _finish(self, unwritten: frozenset[int], target_error: BookmenderError | None) -> None:
        self.is_over = True
        if self.writing is not None:
            self.writing.end()
        if not self.done.done():  # else it was cancelled, and abandon() follows
            self.done.set_result(
                TransferResult(
                    entry_count=self._good_count,
                    entry_bytes=self._good_bytes,
                    failures=self._failures,
                    unwritten=unwritten,
                    target_error=target_error,
                    silent=frozenset(self._silent),
                    fingerprints=self._fingerprints,
                )
            )


class Writing:
    """The entries of one job on their way to its target. ``unacknowledged``: entry id to its bytes.

    When it is over the lane keeps it until they are answered, as with a reading.
    """

    __slots__ = (
        "first_id",
        "is_over",
        "job",
        "lane",
        "last_id",
        "ledger_id",
        "prefix",
        "progress_s",
        "unacknowledged",
    )

    def __init__(self, job: Job, lane: "TargetLane") -> None:
        self.job = job
        runs = [entry_ids for entry_ids in job.transfer.reads.values() if entry_ids]
        self.first_id = min(entry_ids[0] for entry_ids in runs)
        self.last_id = max(entry_ids[-1] for entry_ids in runs)
        """All its entries are between them, both included; of a reading likewise."""
        self.lane = lane
        self.ledger_id = job.ledger_id
        self.prefix = recovery_add_prefix(job.transfer.digest.master_key)
        self.unacknowledged: dict[int, int] = {}
        self.progress_s = 0.0
        """Loop time at which the target last replied, or was sent one while none was
        unacknowledged."""
        self.is_over = False

    def end(self) -> list[int]:
        """Expect nothing more; the entries that were unacknowledged until now."""
        if self.is_over:
            return []
        self.is_over = True
        entry_ids = list(self.unacknowledged)
        self.lane.forget_if_idle(self)
        return entry_ids


Part = TypeVar("Part", bound="AnyReading | Writing")


def is_first_choice(parts: Sequence[Part], part: Part) -> bool:
    """Whether no part before it may wait for any of the same entries: slices of a ledger never
    do."""
    for other in parts:
        if other is part:
            return True
        if other.first_id <= part.last_id and part.first_id <= other.last_id:
            return False
    return False


def forget(parts: dict[int, list[Part]], part: Part) -> None:
    """Take a part out of a lane's table by ledger id. Harmless when it is not there."""
    siblings = parts.get(part.ledger_id, [])
    if part in siblings:
        siblings.remove(part)
        if not siblings:
            del parts[part.ledger_id]


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
