"""Reads recent copies again on their targets, at a time when the targets can no longer lose them
silently (rule S6).

``replication/recent_copies.py`` explains why an acknowledged copy may disappear, and how repairs
record their copies. A worker's session reads its own records ``after_s`` after the repairs ended.
If a session has ended, the live worker with the smallest session id takes over its records. It
waits ``after_s`` from then, because nothing says when those repairs ended. A record is deleted when
each of its copies was read, or when metadata no longer names the copy. A target that does not
answer or is not registered is asked again later, as long as metadata names it.

A copy that has disappeared is reported like the finding of a periodic check: the ledger is marked,
and a worker reads the whole copy and repairs it.
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import ceil

import structlog
from prometheus_client import Counter as Metric
from prometheus_client import Gauge

from auditor.checks.copies import CopyInspector
from auditor.checks.records import RECENT_COPIES, FindingReporter
from ledgers.clock import Clock
from ledgers.errors import (
    CorruptionError,
    NoNodeError,
    NoSuchLedgerError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.model import BookieId
from ledgers.store import Delete, MetadataStore, children_if_any
from ledgers.tasks import task_scope, wait_woken
from replication.cluster import ViewSource
from replication.recent_copies import CopiesToRead, CopyRecord, RecentCopies, session_of
from replication.records import children_if_allowed, read_stored
from replication.transactions import Batcher
from replication.work_queue import Queue
from replication.znodes import ClusterPaths

log = structlog.get_logger()
RECHECKED = Metric(
    "bookmender_recent_copies_rechecked_total",
    "Ledgers whose recent copies were read again, by outcome: good, damaged (marked), obsolete "
    "(the ledger was deleted or copied elsewhere since) or unanswered (read again later).",
    ["outcome"],
)
WAITING = Gauge(
    "bookmender_recent_copies_waiting",
    "Ledgers whose recent copies this node must still read again.",
)
GOOD, DAMAGED, OBSOLETE, UNANSWERED = "good", "damaged", "obsolete", "unanswered"
for _outcome in (GOOD, DAMAGED, OBSOLETE, UNANSWERED):
    RECHECKED.labels(_outcome)  # so that every label exists from the start

SAMPLE_ENTRIES = 1
"""Entries read of a copy between its ends. A late deletion removes all entries of a ledger."""
LEDGERS_AT_ONCE = 16
LEDGERS_PER_S = 500.0
"""Upper bound. The repairs of a lost bookie end together, so their copies become due together."""
RETRY_MIN_S, RETRY_MAX_S = 60.0, 600.0
"""Bounds of the wait before a target that did not answer is asked again; each wait is twice the one
before."""
ADOPT_INTERVAL_S = 60.0
"""Interval between two searches for records whose sessions have ended."""
ADOPTED_MAX = 1_000
"""Records taken over in one search."""


Due = tuple[CopiesToRead, float]
"""Copies to read, and the wait before the next attempt if some do not answer, in seconds."""


@dataclass(kw_only=True)
class CopyRecheck:
    """Reads the recent copies of one worker session. ``run`` ends only by cancellation or with the
    session.

    ``after_s``: must exceed the bookies' ``flushInterval``.
    """

    store: MetadataStore
    batcher: Batcher
    paths: ClusterPaths
    queue: Queue
    views: ViewSource
    inspector: CopyInspector
    reports: FindingReporter
    after_s: float
    clock: Clock
    _due: dict[int, list[Due]] = field(default_factory=dict, init=False)
    """By the monotonic second after which they are due."""
    _adopted: set[str] = field(default_factory=set, init=False)
    """Names of records of other sessions whose copies are not read yet."""
    _wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def expect(self, ended: CopiesToRead) -> None:
        """Schedule the copies of a repair that has just ended."""
        self._put_off([(ended, RETRY_MIN_S)], wait_s=self.after_s)

    async def run(self) -> None:
        """Raises SessionLostError."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read_when_due())
            tasks.create_task(self._adopt_now_and_then())

    # --- Reading ----------------------------------------------------------------------------------

    async def _read_when_due(self) -> None:
        while True:
            self._wake.clear()
            second = min(self._due, default=None)
            wait_s = None if second is None else second - self.clock.now_s()
            if second is None or wait_s is None or wait_s > 0:
                await wait_woken(self._wake, timeout_s=wait_s)
                continue
            due = self._due.pop(second)
            try:  # a damaged copy must be marked, so wait while auto-recovery is disabled
                is_disabled = await self.queue.switch.is_on()
            except (UnavailableError, UnauthorizedError):
                is_disabled = True
            if is_disabled:
                self._put_off(due, wait_s=RETRY_MIN_S)
            else:
                await self._read_all(due)
            WAITING.set(sum(map(len, self._due.values())))

    async def _read_all(self, due: Sequence[Due]) -> None:
        """Read these copies, at no more than ``LEDGERS_PER_S``. A slow bookie delays only a few of
        the readers. Copies without an answer are read again later."""
        counts: Counter[str] = Counter()
        left = iter(due)

        async def read_some() -> None:
            for copies, retry_s in left:
                began_s = self.clock.now_s()
                try:
                    outcome, unanswered = await self._read(copies)
                    if not unanswered:
                        await self._settle(copies.record)
                except (UnavailableError, UnauthorizedError) as error:
                    log.warning(
                        "recent_copies.read_failed", ledger_id=copies.ledger_id, error=str(error)
                    )
                    outcome, unanswered = UNANSWERED, copies.targets
                if unanswered:
                    later = replace(copies, targets=unanswered)
                    self._put_off([(later, min(2 * retry_s, RETRY_MAX_S))], wait_s=retry_s)
                counts[outcome] += 1
                took_s = self.clock.now_s() - began_s
                await self.clock.sleep(max(0.0, LEDGERS_AT_ONCE / LEDGERS_PER_S - took_s))

        async with task_scope() as scope:
            for reading in [scope.start(read_some()) for _ in range(LEDGERS_AT_ONCE)]:
                await reading
        for outcome, count in counts.items():
            RECHECKED.labels(outcome).inc(count)
        log.debug("recent_copies.read", **counts)

    async def _read(self, copies: CopiesToRead) -> tuple[str, frozenset[BookieId]]:
        """Read the copies of one repair. Return the outcome, and the targets to ask again.

        A target that metadata names and that is not registered must be asked when it returns,
        because nothing marks its ledgers within the recovery delay.
        """
        try:
            versioned = await self.inspector.manager.read(copies.ledger_id)
            metadata, named = versioned.metadata, copies.targets & versioned.metadata.bookies
            registered = named & self.views.current.available
            # Of an open ledger only what lies before its last segment is read.
            entry_count = max(metadata.last_entry_id + 1, metadata.last_segment.first_entry_id, 1)
            share = min(1.0, SAMPLE_ENTRIES / entry_count)
            found = await self.inspector.inspect(versioned, share=share, among=registered)
        except (NoSuchLedgerError, CorruptionError):  # the leader's ledger map reports damage
            return OBSOLETE, frozenset()
        if not named or found.is_key_suspect:
            return OBSOLETE, frozenset()
        unanswered = (named - registered) | found.unknown
        if found.damaged:
            detail = f"the copies of a recent repair are damaged: {found.detail}"
            await self.reports.report(RECENT_COPIES, copies.ledger_id, found.visibility, detail)
            return DAMAGED, unanswered
        return (UNANSWERED if unanswered else GOOD), unanswered

    async def _settle(self, record: CopyRecord) -> None:
        """Count the copies of one repair as read. Delete the record after its last repair."""
        if record.unread > 1 or record.path is None:
            record.unread -= 1
            return
        with suppress(NoNodeError):  # another node took the record over and deleted it
            await self.batcher.apply(Delete(path=record.path))
        record.unread = 0
        self._adopted.discard(record.path.rpartition("/")[2])

    def _put_off(self, copies: Sequence[Due], *, wait_s: float) -> None:
        second = ceil(self.clock.now_s() + wait_s)
        if second not in self._due:
            self._wake.set()
        self._due.setdefault(second, []).extend(copies)

    # --- Records of sessions that have ended ------------------------------------------------------

    async def _adopt_now_and_then(self) -> None:
        while True:
            try:
                await self.adopt()
            except (UnavailableError, UnauthorizedError) as error:
                log.warning("recent_copies.read_failed", error=str(error), retry_s=ADOPT_INTERVAL_S)
            await self.clock.sleep(ADOPT_INTERVAL_S)

    async def adopt(self) -> None:
        """Take over the records of ended sessions, if this session is the one to do so."""
        # The names first: a session that joins in between has no record among them.
        names = await children_if_allowed(self.store, self.paths.recent_copies)
        if not names or self.queue.store.session_id != min(await self.queue.workers()):
            return
        alive = await children_if_any(self.store, self.paths.nodes)
        for name in orphans(names, alive=alive, known=self._adopted)[:ADOPTED_MAX]:
            path = f"{self.paths.recent_copies}/{name}"
            copies = (await read_stored(self.store, path, RecentCopies.parse)).permitted_value
            self._adopted.add(name)  # a record that cannot be parsed is of a later release: keep it
            if copies is None:
                continue
            record = CopyRecord(path=path, unread=len(copies.targets))
            for ledger_id, targets in copies.targets.items():
                self.expect(CopiesToRead(ledger_id=ledger_id, targets=targets, record=record))


def orphans(names: Collection[str], *, alive: Collection[str], known: Collection[str]) -> list[str]:
    """Return the names of records that no live session wrote and that are not known yet."""
    live, seen = frozenset(alive), frozenset(known)
    return sorted(name for name in names if session_of(name) not in live and name not in seen)
