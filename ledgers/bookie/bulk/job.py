"""What becomes of the entries of one running transfer. No socket here.

An entry is *pending* until it is asked for, *outstanding* until its source replies, and, given a
target, *unacknowledged* until that replies. At the end it is good, failed or unwritten: exactly one
of them. ``undecided_count`` goes down by each end, and the transfer is done when it is 0.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from ledgers.bookie.bulk.frames import (
    Check,
    digest_check,
    fingerprinting_check,
    recovery_add_prefix,
)
from ledgers.bookies import Answer, Transfer, TransferResult
from ledgers.entry import HEADER_BYTES
from ledgers.errors import BookmenderError
from ledgers.fingerprints import Fingerprints
from ledgers.metadata import BookieId

if TYPE_CHECKING:
    from ledgers.bookie.bulk.gates import Way
    from ledgers.bookie.bulk.readings import AnyReading
    from ledgers.bookie.bulk.target import TargetLane

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
