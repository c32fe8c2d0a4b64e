"""The state of one running transfer: which entries are decided, and how. No socket here.

A transfer has one read part for each source, and one write part if it has a target (``source``,
``target``). An entry is *pending* until it is requested, and *outstanding* until its source
replies. With a target it is then *unacknowledged* until the target replies. In the end it is
exactly one of good, failed or unwritten. Each end lowers ``undecided_count``; at 0 the transfer is
done.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ledgers.bookies import Answer, Transfer, TransferResult
from ledgers.bulk.frames import DigestCheck, digest_check, fingerprinting_check
from ledgers.bulk.limiters import WINDOW_BYTES_MIN, WINDOW_ENTRIES_MIN, BookieWindow, LimiterChain
from ledgers.digest import HEADER_BYTES, Fingerprints
from ledgers.errors import BookmenderError
from ledgers.model import BookieId

QUANTUM_COUNT = 16
QUANTUM_BYTES = 256 * 1024
"""Limits on what one transfer requests from a source before the next transfer has its turn."""


SLOW_CHECKS_MIN = 3
"""A bookie is slow only after this many further checks."""
NOTHING_MEASURED = -1


@dataclass(slots=True)
class Totals:
    """Counts of all transfers since the start, for metrics and progress. They only grow."""

    entries_read: int = 0
    """Entries received with a good digest."""
    read_bytes: int = 0
    entries_written: int = 0
    """Entries acknowledged by their target."""
    written_bytes: int = 0


class TransferState:
    """One running transfer: its counts, its parts, and the future of its result."""

    def __init__(
        self,
        transfer: Transfer,
        totals: Totals,
        *,
        limiters: LimiterChain,
        check_limiters: LimiterChain,
    ) -> None:
        """``limiters``: for entries that are written, after the rate limit of their source.
        ``check_limiters``: for entries that are only verified."""
        self.transfer = transfer
        self.limiters = limiters
        self.check_limiters = check_limiters
        self.ledger_id = transfer.ledger_id
        self.totals = totals
        self.entry_bytes_min = HEADER_BYTES + transfer.digest.size
        self.done: asyncio.Future[TransferResult] = asyncio.get_running_loop().create_future()
        self.undecided_count = transfer.asked_count
        self.read_parts: list[TransferPart] = []
        self.write_part: TransferPart | None = None
        self.expected_bytes = max(1, transfer.entry_bytes_hint)
        """Expected size of the next entry: the largest seen. Falls slowly for smaller ones."""
        self.quantum = QUANTUM_COUNT
        """The number of entries that may be requested from a source in one turn."""
        self.has_measured_size = False
        """True once an entry was received. Until then ``expected_bytes`` is a guess."""
        self.has_started = False
        """True once an entry passed the rate limit of the target."""
        self.is_over = False
        self._good_count = 0
        self._good_bytes = 0
        self._fingerprints: dict[BookieId, Fingerprints] = {}
        self._failures: dict[BookieId, dict[int, Answer]] = {}
        self._unresponsive: set[BookieId] = set()
        self.not_asked: set[BookieId] = set()
        """Bookies to which no connection was tried (LocalLimitError)."""

    def digest_check_for(self, bookie: BookieId) -> DigestCheck:
        """Return the digest check for the entries of this source."""
        if not self.transfer.takes_fingerprints:
            return digest_check(self.transfer.digest)
        found = self._fingerprints.get(bookie)
        if found is None:
            entry_ids = self.transfer.reads[bookie]
            found = self._fingerprints[bookie] = Fingerprints(entry_ids[0], entry_ids[-1])
        return fingerprinting_check(self.transfer.digest, found)

    def note_size(self, largest_bytes: int) -> None:
        """Adapt the expected size to received entries, the largest of which is given."""
        excess_bytes = self.expected_bytes - largest_bytes
        self.has_measured_size = True
        self.expected_bytes = largest_bytes + max(0, excess_bytes) * 3 // 4
        self.quantum = max(1, min(QUANTUM_COUNT, QUANTUM_BYTES // self.expected_bytes))

    def add_read(self, part: TransferPart, count: int, entry_bytes: int) -> None:
        """Record entries read with a good digest. Entries that are written stay undecided."""
        self.totals.entries_read += count
        self.totals.read_bytes += entry_bytes
        if self.write_part is None:
            self._add_good(count, entry_bytes)
        elif not part.is_written:
            self._decide(count)

    def add_written(self, count: int, entry_bytes: int) -> None:
        self.totals.entries_written += count
        self.totals.written_bytes += entry_bytes
        self._add_good(count, entry_bytes)

    def add_failure(self, part: TransferPart, entry_id: int, answer: Answer) -> None:
        self._failures.setdefault(part.bookie, {})[entry_id] = answer
        self._decide(1)

    def fail_read_part(self, part: TransferPart, *, is_unresponsive: bool = False) -> None:
        """End a part whose source does not reply: its entries without an answer are UNKNOWN.
        ``is_unresponsive``: report the source as unresponsive in the result."""
        entry_ids = part.end()
        if entry_ids:
            if is_unresponsive:
                self._unresponsive.add(part.bookie)
            failed = self._failures.setdefault(part.bookie, {})
            failed.update(dict.fromkeys(entry_ids, Answer.UNKNOWN))
            self._decide(len(entry_ids))

    def fail_write_part(self, error: BookmenderError, *refused: int) -> None:
        """End the transfer, because the target failed or refused these entries."""
        if not self.is_over:
            assert self.write_part is not None
            unwritten = {*refused, *self.write_part.end()}
            checks: list[TransferPart] = []
            for part in self.read_parts:
                if part.is_written:
                    unwritten.update(part.end())
                else:
                    checks.append(part)
            for part in checks:
                self.fail_read_part(part)
            self._finish(frozenset(unwritten), error)
            assert len(unwritten) == self.undecided_count, self.ledger_id

    def abandon(self) -> None:
        """End the transfer without a result, unless it is over. Later replies are ignored."""
        if self.is_over:
            return
        self.is_over = True
        for part in self.read_parts:
            part.end()
        if self.write_part is not None:
            self.write_part.end()

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
        if self.write_part is not None:
            self.write_part.end()
        if not self.done.done():  # else the caller was cancelled, and ``abandon`` follows
            self.done.set_result(
                TransferResult(
                    entry_count=self._good_count,
                    entry_bytes=self._good_bytes,
                    failures=self._failures,
                    unwritten=unwritten,
                    target_error=target_error,
                    unresponsive=frozenset(self._unresponsive),
                    not_asked=frozenset(self.not_asked),
                    fingerprints=self._fingerprints,
                )
            )


class TransferPart(ABC):
    """The part of a transfer that one bookie carries: entries to read, or entries to write.

    After its end a part stays in the table of its connection until its outstanding requests are
    answered. The bookie still works on them, so they count against its limits, and their replies
    must not be taken for replies to another part.
    """

    __slots__ = (
        "_measured_check_count",
        "_measured_key",
        "_measured_replies",
        "_measured_s",
        "bookie",
        "first_id",
        "is_over",
        "is_written",
        "last_id",
        "ledger_id",
        "progress_s",
        "state",
    )

    def __init__(
        self,
        state: TransferState,
        bookie: BookieId,
        *,
        first_id: int,
        last_id: int,
        is_written: bool,
    ) -> None:
        self.state = state
        self.bookie = bookie
        self.ledger_id = state.ledger_id
        self.first_id, self.last_id = first_id, last_id
        """All entries of the part lie in this range, which includes both ends."""
        self.is_written = is_written
        """True if the entries are written to the target, False if they are only verified."""
        self.progress_s = 0.0
        """Loop time of the last reply, or of the first request after none was outstanding."""
        self.is_over = False
        self.restart_measurement()

    @property
    @abstractmethod
    def awaited(self) -> Mapping[int, Any]:
        """The outstanding requests by the key of their reply, oldest first."""

    def restart_measurement(self) -> None:
        """Let ``is_slow`` measure from the next check on."""
        self._measured_key = NOTHING_MEASURED
        self._measured_s = 0.0
        self._measured_check_count = 0
        self._measured_replies = (0, 0)

    def is_slow(self, window: BookieWindow, now_s: float, timeout_s: float) -> bool:
        """Return True if the bookie is too slow for this part. Called at each check.

        A single reply is no progress. The newest request is measured until it is answered. The
        bookie is slow if that takes longer than the timeout although it answered less than the
        smallest window meanwhile. So a bookie is never slow because of our own limits, or because
        it had much to answer.

        ``window``: of the connection, for all parts. Checks are counted as well, because a loop
        that was delayed itself checks only once.
        """
        count, entry_bytes = self._measured_replies
        if (
            self._measured_key not in self.awaited
            or window.replied_count - count >= WINDOW_ENTRIES_MIN
            or window.replied_bytes - entry_bytes >= WINDOW_BYTES_MIN
        ):
            self._measured_key = next(reversed(self.awaited), NOTHING_MEASURED)
            self._measured_s, self._measured_check_count = now_s, 0
            self._measured_replies = (window.replied_count, window.replied_bytes)
        self._measured_check_count += 1
        is_overdue = now_s - self._measured_s > timeout_s
        return is_overdue and self._measured_check_count > SLOW_CHECKS_MIN

    @abstractmethod
    def end(self) -> list[int]:
        """End the part. Returns the entries that were undecided here; nothing if it was over."""


def has_first_claim(parts: Sequence[TransferPart], part: TransferPart) -> bool:
    """Return True if no earlier part can wait for the same entries.

    Replies to single reads and adds carry no request id. If several parts wait for an entry, its
    reply goes to the first of them:

    1. Part A requests entries 5 to 9. Its transfer ends, but A still waits for the replies.
    2. Part B of another transfer requests entries 0 to 9.
    3. Replies to entries 0 to 9 arrive. Those to 5 to 9 go to A. B gets the second replies to them.

    So a run of replies may be given to B in one go only if no earlier part can wait for any of
    them. Slices of a ledger never overlap, so the common case is fast.
    """
    for other in parts:
        if other is part:
            return True
        if other.first_id <= part.last_id and part.first_id <= other.last_id:
            return False
    return False
