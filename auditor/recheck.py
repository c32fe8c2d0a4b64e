"""Reads recent copies again on their targets, once the targets can no longer lose them silently
(rule S6).

``replication/recent_copies.py`` says why a copy that was acknowledged may disappear, and how
repairs record their copies. A worker's session reads its own records ``after_s`` after the repairs
ended. Records of sessions that have ended are taken over by one of the live workers, the one with
the smallest session id; it waits ``after_s`` from then, because nothing says when those repairs
ended. A record is deleted when each of its copies was read, or is not named by metadata any more. A
target that does not answer, or is not registered, is asked again later, for as long as metadata
names it.

A copy that is not there is reported like the finding of a periodic check: the ledger is marked, and
a worker reads the whole copy and repairs it.
"""

import asyncio
import heapq
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil

import structlog
from prometheus_client import Counter as Metric
from prometheus_client import Gauge

from auditor.checks.base import Reports
from auditor.checks.copies import CopyReader
from auditor.checks.records import RECENT_COPIES
from ledgers.clock import Clock
from ledgers.errors import (
    CorruptionError,
    NoNodeError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.model import BookieId
from ledgers.store import Delete, MetadataStore, children_if_any
from ledgers.tasks import wait_woken
from replication.cluster import ViewSource
from replication.recent_copies import (
    CopiesToRead,
    CopyRecord,
    RecentCopies,
    session_of,
)
from replication.transactions import Batcher
from replication.work_queue import Queue
from replication.znodes import ClusterPaths, children_if_allowed, read_record

log = structlog.get_logger()
RECHECKED = Metric(
    "bookmender_recent_copies_rechecked_total",
    "Ledgers whose recent copies were read again, by outcome: good, bad (marked), moot (deleted, or "
    "copied elsewhere since) or unanswered (read again later).",
    ["outcome"],
)
WAITING = Gauge(
    "bookmender_recent_copies_waiting",
    "Ledgers whose recent copies this node is to read again.",
)
GOOD, BAD, MOOT, UNANSWERED = "good", "bad", "moot", "unanswered"
_COUNTERS = {
    outcome: RECHECKED.labels(outcome=outcome) for outcome in (GOOD, BAD, MOOT, UNANSWERED)
}

SAMPLE_ENTRIES = 1
"""Entries between the ends that are read of a copy. A late deletion takes all entries of a
ledger."""
LEDGERS_AT_ONCE = 16
LEDGERS_PER_S = 500.0
"""At most. The repairs of a lost bookie end together, so their copies become due together."""
RETRY_MIN_S, RETRY_MAX_S = 60.0, 600.0
"""Before a target is asked again that did not answer; each wait is twice the one before."""
ADOPT_INTERVAL_S = 60.0
"""Between two looks for records whose sessions have ended."""
ADOPTED_MAX = 1_000
"""Records taken over in one look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """Copies to be read; ``retry_s``: how much later once more, should they remain unanswered."""

    copies: CopiesToRead
    retry_s: float = RETRY_MIN_S


class CopyRecheck:
    """One worker session's. ``run`` ends only by cancellation or with the session.

    ``after_s``: must exceed the bookies' ``flushInterval``.
    """

    def __init__(
        self,
        *,
        store: MetadataStore,
        batcher: Batcher,
        paths: ClusterPaths,
        queue: Queue,
        views: ViewSource,
        reader: CopyReader,
        reports: Reports,
        after_s: float,
        clock: Clock,
    ) -> None:
        self._store, self._batcher, self._paths = store, batcher, paths
        self._queue, self._views = queue, views
        self._reader, self._reports = reader, reports
        self._after_s, self._clock = after_s, clock
        self._due: dict[int, list[_Waiting]] = {}
        """By the monotonic second after which they are due."""
        self._seconds: list[int] = []
        """A heap of these seconds."""
        self._adopted: set[str] = set()
        """Names of records of other sessions whose copies are yet to be read."""
        self._wake = asyncio.Event()

    def expect(self, ended: CopiesToRead) -> None:
        """A repair has ended just now."""
        self._put_off([_Waiting(copies=ended)], wait_s=self._after_s)

    async def run(self) -> None:
        """Raises SessionLostError."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read_when_due())
            tasks.create_task(self._adopt_now_and_then())

    # --- Reading ----------------------------------------------------------------------------------

    async def _read_when_due(self) -> None:
        while True:
            self._wake.clear()
            wait_s = self._seconds[0] - self._clock.now_s() if self._seconds else None
            if wait_s is None or wait_s > 0:
                await wait_woken(self._wake, timeout_s=wait_s)
                continue
            due = self._due.pop(heapq.heappop(self._seconds))
            if await self._may_mark():
                await self._read_all(due)
            else:
                self._put_off(due, wait_s=RETRY_MIN_S)
            WAITING.set(sum(map(len, self._due.values())))

    async def _may_mark(self) -> bool:
        """Whether auto-recovery is enabled: a bad copy has to be marked."""
        try:
            return not await self._queue.switch.is_on()
        except (UnavailableError, UnauthorizedError):
            return False

    async def _read_all(self, due: Sequence[_Waiting]) -> None:
        """Read these copies, at no more than ``LEDGERS_PER_S``."""
        counts: Counter[str] = Counter()
        for start in range(0, len(due), LEDGERS_AT_ONCE):
            part = due[start : start + LEDGERS_AT_ONCE]
            began_s = self._clock.now_s()
            counts.update(await asyncio.gather(*map(self._read, part)))
            pace_s = len(part) / LEDGERS_PER_S - (self._clock.now_s() - began_s)
            if pace_s > 0:
                await self._clock.sleep(pace_s)
        for outcome, count in counts.items():
            _COUNTERS[outcome].inc(count)
        log.debug("recent_copies.read", **counts)

    async def _read(self, waiting: _Waiting) -> str:
        """Read one repair's copies and return the outcome. Copies without an answer are put off."""
        copies = waiting.copies
        try:
            outcome, silent = await self._outcome(copies)
            if not silent:
                await self._settle(copies.record)
                return outcome
        except (UnavailableError, UnauthorizedError) as error:
            log.warning("recent_copies.unread", ledger_id=copies.ledger_id, error=str(error))
            outcome, silent = UNANSWERED, copies.targets
        later = _Waiting(
            copies=replace(copies, targets=silent), retry_s=min(2 * waiting.retry_s, RETRY_MAX_S)
        )
        self._put_off([later], wait_s=waiting.retry_s)
        return outcome

    async def _outcome(self, copies: CopiesToRead) -> tuple[str, frozenset[BookieId]]:
        """Return the outcome, and the targets that are to be asked again.

        A target that metadata names and that is not registered has to be asked when it is back:
        within the recovery delay nothing marks its ledgers.
        """
        ledger_id = copies.ledger_id
        try:
            versioned = await self._reader.metadata(ledger_id)
        except CorruptionError:  # the leader's index reports that
            return MOOT, frozenset()
        named = frozenset() if versioned is None else copies.targets & versioned.metadata.bookies
        if versioned is None or not named:
            return MOOT, frozenset()
        there = named & self._views.current.available
        found = await self._reader.of(versioned, there, sample_entries=SAMPLE_ENTRIES)
        if found is None or found.is_key_suspect:
            return MOOT, frozenset()
        silent = (named - there) | found.unknown
        if found.bad:
            detail = f"a repair made these copies, and they are gone again: {found.detail}"
            await self._reports.report(RECENT_COPIES, ledger_id, found.sight, detail)
            return BAD, silent
        return (UNANSWERED if silent else GOOD), silent

    async def _settle(self, record: CopyRecord) -> None:
        """The copies of one of the record's repairs need no further look."""
        if record.unread > 1 or record.path is None:
            record.unread -= 1
            return
        with suppress(NoNodeError):  # another node took it over, and was faster
            await self._batcher.apply(Delete(path=record.path))
        record.unread = 0
        self._adopted.discard(record.path.rpartition("/")[2])

    def _put_off(self, waiting: Sequence[_Waiting], *, wait_s: float) -> None:
        second = ceil(self._clock.now_s() + wait_s)
        if second not in self._due:
            heapq.heappush(self._seconds, second)
            self._wake.set()
        self._due.setdefault(second, []).extend(waiting)

    # --- Records of sessions that have ended --------------------------------------------------------

    async def _adopt_now_and_then(self) -> None:
        while True:
            try:
                await self.adopt()
            except (UnavailableError, UnauthorizedError) as error:
                log.warning("recent_copies.unread", error=str(error), retry_s=ADOPT_INTERVAL_S)
            await self._clock.sleep(ADOPT_INTERVAL_S)

    async def adopt(self) -> None:
        """Take over what ended sessions left, if this session is the one to do so."""
        # The names first: a session that joins in between has no record among them.
        names = await children_if_allowed(self._store, self._paths.recent_copies)
        if not names or self._queue.session_id != min(await self._queue.workers()):
            return
        alive = await children_if_any(self._store, self._paths.nodes)
        for name in orphans(names, alive=alive, known=self._adopted)[:ADOPTED_MAX]:
            path = f"{self._paths.recent_copies}/{name}"
            copies = await read_record(self._store, path, RecentCopies.from_record)
            self._adopted.add(name)  # one that cannot be read is a later release's: it stays
            if copies is None:
                continue
            record = CopyRecord(path=path, unread=len(copies.targets))
            for ledger_id, targets in copies.targets.items():
                self.expect(CopiesToRead(ledger_id=ledger_id, targets=targets, record=record))


def orphans(names: Collection[str], *, alive: Collection[str], known: Collection[str]) -> list[str]:
    """Records, by name, that no live session wrote, and that are not known yet."""
    live, seen = frozenset(alive), frozenset(known)
    return sorted(name for name in names if session_of(name) not in live and name not in seen)
