"""Reads recent copies again on their targets, once the targets can no longer lose them silently (rule S6).

``replication/recent_copies.py`` says why a copy that was acknowledged may disappear, and how repairs
record their copies. A worker's session reads its own records ``after_s`` after the repairs ended.
Records of sessions that have ended are taken over by one of the live workers, the one with the
smallest session id; it waits ``after_s`` from then, because nothing says when those repairs ended.
A record is deleted when each of its copies was read, or is not named by metadata any more. A target
that does not answer, or is not registered, is asked again later, for as long as metadata names it.

A copy that is not there is reported like the finding of a periodic check: the ledger is marked, and
a worker reads the whole copy and repairs it.
"""

import asyncio
import heapq
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import structlog
from prometheus_client import Counter as Metric
from prometheus_client import Gauge

from auditor.checks.copies import CopyReader
from auditor.checks.kinds import RECENT_COPIES
from auditor.checks.reports import Reports
from ledgers.clock import Clock
from ledgers.errors import (
    CorruptionError,
    NoNodeError,
    SessionLostError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.metadata import BookieId
from ledgers.operations.tasks import gather_in_parts, wait_woken
from ledgers.store import Delete, MetadataStore, children_if_any
from replication.cluster.cluster_view import ViewSource
from replication.cluster.own_state import names_in, nodes_path, read_record
from replication.queue.batching import Batcher
from replication.queue.queue import Queue
from replication.recent_copies import (
    RecentCopies,
    RecordedCopies,
    recent_copies_path,
    session_of,
)

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
"""Entries between the ends that are read of a copy. A late deletion takes all entries of a ledger."""
LEDGERS_AT_ONCE = 16
LEDGERS_PER_S = 500.0
"""At most. The repairs of a lost bookie end together, so their copies become due together."""
RETRY_MIN_S, RETRY_MAX_S = 60.0, 600.0
"""Before a target is asked again that did not answer; each wait is twice the one before."""
ADOPT_INTERVAL_S = 60.0
"""Between two looks for records whose sessions have ended."""
ADOPTED_MAX = 1_000
"""Records taken over in one look."""


@dataclass(order=True, slots=True)
class _Due:
    """Copies to be read again at ``due_s`` (monotonic seconds)."""

    due_s: float
    number: int
    """Orders what is due at the same time."""
    targets: Mapping[int, frozenset[BookieId]] = field(compare=False)
    path: str | None = field(compare=False)
    retry_s: float = field(compare=False, default=RETRY_MIN_S)


class CopyRecheck:
    """One worker session's. ``run`` ends only by cancellation or with the session.

    ``after_s``: must exceed the bookies' ``flushInterval``.
    """

    def __init__(
        self,
        *,
        store: MetadataStore,
        batcher: Batcher,
        ur: str,
        queue: Queue,
        views: ViewSource,
        reader: CopyReader,
        reports: Reports,
        after_s: float,
        clock: Clock,
    ) -> None:
        self._store, self._batcher, self._ur = store, batcher, ur
        self._queue, self._views = queue, views
        self._reader, self._reports = reader, reports
        self._after_s, self._clock = after_s, clock
        self._heap: list[_Due] = []
        self._number = 0
        self._adopted: set[str] = set()
        """Names of records of other sessions that are in ``_heap``, or being read."""
        self._wake = asyncio.Event()

    def expect(self, recorded: RecordedCopies) -> None:
        """The repairs of a record have ended just now."""
        self._push(recorded.copies.targets, recorded.path, wait_s=self._after_s)

    async def run(self) -> None:
        """Raises SessionLostError."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read_when_due())
            tasks.create_task(self._adopt_now_and_then())

    # --- Reading ----------------------------------------------------------------------------------

    async def _read_when_due(self) -> None:
        while True:
            self._wake.clear()
            wait_s = self._heap[0].due_s - self._clock.now_s() if self._heap else None
            if wait_s is None or wait_s > 0:
                await wait_woken(self._wake, timeout_s=wait_s)
                continue
            due = heapq.heappop(self._heap)
            await self._read_again(due)
            WAITING.set(sum(len(other.targets) for other in self._heap))

    async def _read_again(self, due: _Due) -> None:
        """Read what can be read, and keep the rest for later."""
        try:
            if await self._queue.switch.is_on():  # nothing may be marked now
                return self._push(due.targets, due.path, wait_s=RETRY_MIN_S)
            left = await self._read_all(due.targets)
            if left:
                return self._push(
                    left,
                    due.path,
                    wait_s=due.retry_s,
                    retry_s=min(2 * due.retry_s, RETRY_MAX_S),
                )
            await self._forget(due.path)
        except SessionLostError:
            raise
        except (UnavailableError, UnauthorizedError) as error:
            log.warning("recent_copies.unread", error=str(error), retry_s=due.retry_s)
            self._push(due.targets, due.path, wait_s=due.retry_s)

    async def _read_all(
        self, targets: Mapping[int, frozenset[BookieId]]
    ) -> dict[int, frozenset[BookieId]]:
        """Read the copies of each ledger at no more than ``LEDGERS_PER_S``; what remains unanswered."""
        left: dict[int, frozenset[BookieId]] = {}
        counts: Counter[str] = Counter()
        ledger_ids = sorted(targets)

        async def read(ledger_id: int) -> None:
            outcome, silent = await self._read_one(ledger_id, targets[ledger_id])
            counts[outcome] += 1
            _COUNTERS[outcome].inc()
            if silent:
                left[ledger_id] = silent

        for start in range(0, len(ledger_ids), LEDGERS_AT_ONCE):
            part = ledger_ids[start : start + LEDGERS_AT_ONCE]
            began_s = self._clock.now_s()
            await gather_in_parts(read, part, at_once=LEDGERS_AT_ONCE)
            pace_s = len(part) / LEDGERS_PER_S - (self._clock.now_s() - began_s)
            if pace_s > 0:
                await self._clock.sleep(pace_s)
        log.debug("recent_copies.read", **counts)
        return left

    async def _read_one(
        self, ledger_id: int, targets: frozenset[BookieId]
    ) -> tuple[str, frozenset[BookieId]]:
        """What came of it, and the targets that are to be asked again.

        A target that metadata names and that is not registered has to be asked when it is back: within
        the recovery delay nobody marks its ledgers.
        """
        try:
            versioned = await self._reader.metadata(ledger_id)
        except (CorruptionError, UnauthorizedError):  # the index and the checks report that
            return MOOT, frozenset()
        named = frozenset() if versioned is None else targets & versioned.metadata.bookies
        if versioned is None or not named:
            return MOOT, frozenset()
        there = named & self._views.current.available
        copies = await self._reader.of(versioned, there, sample_entries=SAMPLE_ENTRIES)
        if copies is None or copies.is_key_suspect:
            return MOOT, frozenset()
        silent = (named - there) | copies.unknown
        if copies.bad:
            detail = f"a repair made these copies, and they are gone again: {copies.detail}"
            await self._reports.report(RECENT_COPIES, ledger_id, copies.sight, detail)
            return BAD, silent
        return (UNANSWERED if silent else GOOD), silent

    async def _forget(self, path: str | None) -> None:
        if path is None:
            return
        with suppress(NoNodeError):  # another node took it over, and was quicker
            await self._batcher.apply(Delete(path=path))
        self._adopted.discard(path.rpartition("/")[2])

    def _push(
        self,
        targets: Mapping[int, frozenset[BookieId]],
        path: str | None,
        *,
        wait_s: float,
        retry_s: float = RETRY_MIN_S,
    ) -> None:
        self._number += 1
        due = _Due(
            due_s=self._clock.now_s() + wait_s,
            number=self._number,
            targets=targets,
            path=path,
            retry_s=retry_s,
        )
        heapq.heappush(self._heap, due)
        WAITING.set(sum(len(other.targets) for other in self._heap))
        self._wake.set()

    # --- Records of sessions that have ended --------------------------------------------------------

    async def _adopt_now_and_then(self) -> None:
        while True:
            try:
                await self.adopt()
            except SessionLostError:
                raise
            except (UnavailableError, UnauthorizedError) as error:
                log.warning("recent_copies.unread", error=str(error), retry_s=ADOPT_INTERVAL_S)
            await self._clock.sleep(ADOPT_INTERVAL_S)

    async def adopt(self) -> None:
        """Take over what ended sessions left, if this session is the one to do so."""
        # The names first: a session that joins in between has no record among them.
        names = await names_in(self._store, recent_copies_path(self._ur))
        if not names or self._queue.session_id != min(await self._queue.workers()):
            return
        alive = await children_if_any(self._store, nodes_path(self._ur))
        for name in orphans(names, alive=alive, known=self._adopted)[:ADOPTED_MAX]:
            path = f"{recent_copies_path(self._ur)}/{name}"
            copies = await read_record(self._store, path, RecentCopies.from_record)
            self._adopted.add(name)  # one that cannot be read is a later release's: it stays
            if copies is not None:
                self.expect(RecordedCopies(copies=copies, path=path))


def orphans(names: Collection[str], *, alive: Collection[str], known: Collection[str]) -> list[str]:
    """Records, by name, that no live session wrote, and that are not known yet."""
    live, seen = frozenset(alive), frozenset(known)
    return sorted(name for name in names if session_of(name) not in live and name not in seen)
