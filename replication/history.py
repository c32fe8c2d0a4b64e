"""The history: what happened in the cluster, when, and who did it.

Parts of a node record events in a ``History``. ``HistoryWriter`` keeps the events of one session in
ZooKeeper, ``record_order`` the order of a command, and
``read_history`` reads the events of all nodes.

A session writes its events to segments, ``<ur>/bookmender/history/<session uuid>.<number>``:

- Recording costs nothing but memory. One write every few seconds, and only after an event, carries
  everything new. It is a separate request, so no repair waits for it.
- A segment that is full is followed by the next, and a session deletes its oldest. The leader
  deletes what is too old or too much in total (``auditor/history_cleaner.py``).
- Repairs and marks are sums by cause, and not an event for each ledger. Each fence and each
  recovery is an event of its own.
- Events that arrive faster than they can be written are dropped and counted, and the history says
  how many. A crash loses the events of the last seconds.
"""

from __future__ import annotations

import asyncio
import enum
import math
import uuid
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace
from prometheus_client import Counter

from ledgers.clock import Clock
from ledgers.errors import (
    BookmenderError,
    NodeExistsError,
    NoNodeError,
    RejectedError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.model import BookieId
from ledgers.store import (
    ANY_VERSION,
    Create,
    Delete,
    MetadataStore,
    MultiFailed,
    Operation,
    SetData,
    children_if_any,
)
from ledgers.tasks import gather_in_parts, wait_woken
from replication.records import Count, Record, Stored, TimeMs, read_stored
from replication.transactions import Batcher
from replication.znodes import ACL_HINT, ClusterPaths

log = structlog.get_logger()

WRITE_S = 5.0
"""How long an event waits for others, to be written with them."""
SUM_WRITE_S = 30.0
"""How long a sum that has grown waits."""
RETRY_S = 30.0
"""Wait after a failed write."""
LAST_WRITE_S = 1.0
"""Time for the last write of a session that ends."""
SUM_LASTS_MS, SUM_PAUSE_MS = 600_000, 60_000
"""Age at which a sum is final, and a pause that ends one: later parts begin another one."""
SEGMENT_FULL_BYTES = 32 * 1024
"""Size from which the next segment is begun."""
SEGMENT_BYTES_MAX = 48 * 1024
"""Size of a segment without its sums. Further events are dropped. With the sums it is below 64 KB.
"""
LEDGER_BYTES_MAX = 44 * 1024
"""The part of it for events about single ledgers, which may be many thousands after a loss."""
SEGMENTS_KEPT = 4
"""Segments of one session."""
BOOKIES_MAX = 20
TEXT_LENGTH_MAX = 300
COUNTS_MAX = 20
"""Bounds on one event."""
LEDGERS_TOLD_MAX = 20
"""An order about more ledgers is one event with their number."""
READS_AT_ONCE = 100
CLOCKS_APART_MS = 60_000
"""Largest expected difference between ZooKeeper's stamps and the times of events."""

DROPPED = Counter(
    "bookmender_history_dropped_total", "Events that this node did not record in the history."
)


# --- Events ---------------------------------------------------------------------------------------


class Kind(enum.StrEnum):
    """What happened. Stored, and shown by commands: never change a value."""

    BOOKIE_LOST = "bookie-lost"
    """``since_ms``: absent since."""
    BOOKIE_REFORMATTED = "bookie-reformatted"
    BOOKIE_RETURNED = "bookie-returned"
    """A lost bookie registered again."""
    LOSS_ENDED = "loss-ended"
    """A bookie counts no longer as lost, although it is not registered."""
    LEDGERS_MARKED = "ledgers-marked"
    """A sum for a ``cause``. ``bookies``: all that caused one of the marks."""
    LEDGERS_REPAIRED = "ledgers-repaired"
    """A sum for a ``cause``. ``bookies``: all that caused one of the repairs."""
    LEDGER_FENCED = "ledger-fenced"
    """The writer is locked out. ``cause`` and ``bookies``: why."""
    LEDGER_RECOVERED = "ledger-recovered"
    """Closed after ``last_entry_id``."""
    RECOVERY_UNFINISHED = "recovery-unfinished"
    """Its writer may be fenced, and the ledger is not closed. ``reason``: why."""
    LEADER_ELECTED = "leader-elected"
    HOLD_BEGAN = "hold-began"
    HOLD_ENDED = "hold-ended"
    CHECK_FINISHED = "check-finished"
    """``cause``: the check, or fsck. ``counts``: outcomes by kind."""
    FINDING = "finding"
    """``cause``: the check. ``reason``: what it found."""
    ORDER = "order"
    """``order``: its name. ``by``: user and host."""
    NOT_RECORDED = "not-recorded"
    """A sum. ``event_count`` events were dropped."""


class Cause(enum.StrEnum):
    """Why ledgers were marked, repaired or fenced. Stored: never change a value."""

    LOST = "lost"
    REFORMATTED = "reformatted"
    DRAINED = "drained"
    FOUND = "found"
    """A check found copies missing or damaged on the bookies."""
    RETURNED = "returned"
    """The bookies were lost when the ledgers were marked, and registered again before the repair.
    """
    CANCELLED = "cancelled"
    """The drain of the bookies was cancelled before the repair."""
    DELETED = "deleted"
    """The ledgers were deleted, so only their marks remained."""


@dataclass(frozen=True, slots=True)
class CausedBy:
    """A cause, and the bookies that it is about."""

    cause: Cause
    bookies: tuple[BookieId, ...] = ()


def cause_at(
    named: AbstractSet[BookieId],
    *,
    registered: AbstractSet[BookieId],
    reformatted: AbstractSet[BookieId],
    draining: AbstractSet[BookieId],
    found_bad: AbstractSet[BookieId],
) -> CausedBy | None:
    """Return why a ledger that names these bookies needs a repair; None if they all have their
    copies. Only the gravest cause is told."""
    by_gravity = (
        (Cause.LOST, named - registered),
        (Cause.REFORMATTED, named & reformatted),
        (Cause.FOUND, named & found_bad),
        (Cause.DRAINED, named & draining),
    )
    for cause, bookies in by_gravity:
        if bookies:
            return CausedBy(cause, tuple(sorted(bookies)))
    return None


SUMS = frozenset({Kind.LEDGERS_MARKED, Kind.LEDGERS_REPAIRED, Kind.NOT_RECORDED})


class Event(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event, or a sum. Times are wall-clock milliseconds by ZooKeeper's clock.

    ``kind``: a ``Kind``, or a word that a later release wrote. ``until_ms``: of a sum, its last
    part. ``ends_ms``: when what was ordered or begun ends by itself. ``reason``: text of a person
    or of an error.
    """

    kind: str
    at_ms: TimeMs = 0
    """0: when its znode was written."""
    until_ms: TimeMs | None = None
    bookies: tuple[BookieId, ...] = ()
    ledger_id: Count | None = None
    since_ms: TimeMs | None = None
    ends_ms: TimeMs | None = None
    ledger_count: Count = 0
    entry_count: Count = 0
    entry_bytes: Count = 0
    event_count: Count = 0
    last_entry_id: int | None = None
    cause: str = ""
    counts: Mapping[str, Count] = {}
    order: str = ""
    by: str = ""
    reason: str = ""

    @property
    def last_ms(self) -> int:
        """The time of the event; of a sum, that of its last part."""
        return self.at_ms if self.until_ms is None else self.until_ms

    def bounded(self) -> Event:
        """Return the event with lists and texts cut to their bounds."""
        return replace(
            self,
            bookies=self.bookies[:BOOKIES_MAX],
            counts=dict(sorted(self.counts.items())[:COUNTS_MAX]),
            by=_text(self.by),
            reason=_text(self.reason),
        )

    def plus(self, other: Event) -> Event:
        """Return this sum with another part added, which came later."""
        return replace(
            self,
            until_ms=other.at_ms,
            bookies=tuple(sorted({*self.bookies, *other.bookies})[:BOOKIES_MAX]),
            ledger_count=self.ledger_count + other.ledger_count,
            entry_count=self.entry_count + other.entry_count,
            entry_bytes=self.entry_bytes + other.entry_bytes,
            event_count=self.event_count + other.event_count,
        )


def _text(text: str) -> str:
    """Cut the text, and replace what UTF-8 cannot encode, such as bytes of a wrong user name."""
    return text[:TEXT_LENGTH_MAX].encode(errors="replace").decode()


class History:
    """Records events. Never fails, never waits. This one records nothing: for commands that only
    look, and for tests."""

    def record(self, event: Event) -> None:
        """Record an event that happened now; its ``at_ms`` and ``until_ms`` are ignored."""


NO_HISTORY = History()


# --- Writing --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment(Record):
    """The content of one znode. ``node``: who recorded the events."""

    node: str
    events: tuple[Event, ...]


class SegmentBuffer:
    """The events of one segment. Does no I/O."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._sums: dict[tuple[str, str], Event] = {}
        """By kind and cause, the sums that still grow. These are few."""
        self._bytes = 0  # of the events without these sums

    @property
    def events(self) -> tuple[Event, ...]:
        return (*self._events, *self._sums.values())

    @property
    def is_full(self) -> bool:
        return self._bytes >= SEGMENT_FULL_BYTES

    def add(self, event: Event) -> bool:
        """Add an event. Return False if a sum has only grown, so that a write can wait."""
        event = event.bounded()
        if event.kind not in SUMS:
            if self._append(event):
                return True
            DROPPED.inc()
            event = Event(kind=Kind.NOT_RECORDED, at_ms=event.at_ms, event_count=1)
        key = event.kind, event.cause
        total = self._sums.get(key)
        # Without room for another sum, the old one goes on, so nothing grows without a bound.
        if total is not None:
            is_paused = event.at_ms - (total.until_ms or total.at_ms) >= SUM_PAUSE_MS
            is_final = is_paused or event.at_ms - total.at_ms >= SUM_LASTS_MS
            total = None if is_final and self._append(total) else total
        new = replace(event, until_ms=event.at_ms) if total is None else total.plus(event)
        self._sums[key] = new
        return total is None

    def _append(self, event: Event) -> bool:
        """Return False if there is no room."""
        size_bytes = len(msgspec.json.encode(event)) + 1
        most_bytes = SEGMENT_BYTES_MAX if event.ledger_id is None else LEDGER_BYTES_MAX
        if self._bytes + size_bytes > most_bytes:
            return False
        self._events.append(event)
        self._bytes += size_bytes
        return True


@dataclass(slots=True, eq=False)
class HistoryWriter(History):
    """Keeps the history of one session. ``run`` must be running.

    ``owner``: the uuid of the session. Only the session writes its segments. ``batcher``: proves
    the session, or the leadership, in each write.
    """

    batcher: Batcher
    paths: ClusterPaths
    owner: str
    node: str
    clock: Clock
    _buffer: SegmentBuffer = field(default_factory=SegmentBuffer, init=False)
    _full: SegmentBuffer | None = field(default=None, init=False)
    """The full segment before ``_buffer``, until it is written."""
    _number: int = field(default=0, init=False)
    _due_s: float = field(default=math.inf, init=False)
    """When to write; infinity: nothing is new."""
    _woken: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _is_failing: bool = field(default=False, init=False)

    def record(self, event: Event) -> None:
        event = replace(event, at_ms=self.clock.wall_ms(), until_ms=None)
        is_new = self._buffer.add(event)
        due_s = self.clock.now_s() + (WRITE_S if is_new else SUM_WRITE_S)
        if due_s < self._due_s:
            self._due_s = due_s
            self._woken.set()

    async def run(self) -> None:
        """Write until cancelled. Raises SessionLostError or LeadershipLostError."""
        try:
            while True:
                await wait_woken(self._woken, timeout_s=self._due_s - self.clock.now_s())
                self._woken.clear()
                if self.clock.now_s() >= self._due_s:
                    await self.write()
        finally:  # what is left, if ZooKeeper answers at once
            with suppress(BookmenderError, TimeoutError):
                async with asyncio.timeout(LAST_WRITE_S):
                    await self.write()

    async def write(self) -> None:
        """Write what is new. A failure is not raised: the events wait for the next write."""
        if self._due_s == math.inf:
            return
        self._due_s = math.inf
        if self._full is None and self._buffer.is_full:
            self._full, self._buffer = self._buffer, SegmentBuffer()
        try:
            if self._full is not None:
                await self._put(self._full)
                self._full = None
                self._number += 1
                if self._number >= SEGMENTS_KEPT:
                    # If this fails, the leader deletes it some day.
                    with suppress(UnavailableError, RejectedError):
                        await self._send(Delete(path=self._path(self._number - SEGMENTS_KEPT)))
            if self._buffer.events:
                await self._put(self._buffer)
            self._is_failing = False
        except (UnavailableError, RejectedError) as error:  # RejectedError: an ACL
            self._due_s = self.clock.now_s() + RETRY_S
            if not self._is_failing:  # logged once, not at each attempt
                log.warning(
                    "history.write_failed",
                    path=self.paths.history,
                    error=str(error),
                    retry_s=RETRY_S,
                    next_step=ACL_HINT if isinstance(error, UnauthorizedError) else None,
                )
            self._is_failing = True

    def _path(self, number: int) -> str:
        return f"{self.paths.history}/{self.owner}.{number}"

    async def _put(self, buffer: SegmentBuffer) -> None:
        path = self._path(self._number)
        data = Segment(node=self.node, events=buffer.events).to_json()
        try:
            await self._send(SetData(path=path, data=data, version=ANY_VERSION))
        except NoNodeError:
            with suppress(NodeExistsError):
                await self._send(Create(path=self.paths.history))
            await self._send(Create(path=path, data=data))

    async def _send(self, operation: Operation) -> None:
        try:
            await self.batcher.send([operation])
        except MultiFailed as failure:
            raise failure.cause from failure


async def record_order(
    store: MetadataStore, paths: ClusterPaths, *, node: str, events: Sequence[Event]
) -> None:
    """Record what an operator ordered, in a segment of its own. ZooKeeper stamps the time. Raises
    UnavailableError, SessionLostError, and RejectedError where ZooKeeper refuses the znode."""
    segment = Segment(node=node, events=tuple(event.bounded() for event in events))
    path = f"{paths.history}/{uuid.uuid4()}.0"
    await store.create(path, segment.to_json(), with_parents=True)


def order_events(event: Event, ledger_ids: Collection[int]) -> list[Event]:
    """Return an event for each ledger, or one with their number if there are many."""
    if not ledger_ids:
        return [event]
    if len(ledger_ids) > LEDGERS_TOLD_MAX:
        return [replace(event, ledger_count=len(ledger_ids))]
    return [replace(event, ledger_id=ledger_id) for ledger_id in sorted(ledger_ids)]


# --- Reading --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvent:
    """An event, and the node that recorded it."""

    node: str
    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedHistory:
    """What all nodes recorded, in the order of time, and of node names at the same millisecond.
    ``unreadable``: znodes that cannot be read, so events may be missing."""

    events: tuple[NodeEvent, ...] = ()
    unreadable: tuple[str, ...] = ()


async def read_history(
    store: MetadataStore, paths: ClusterPaths, since_ms: int = 0
) -> RecordedHistory:
    """Return the events since ``since_ms``, and sums that went on. Raises UnavailableError."""
    try:
        names = sorted(await children_if_any(store, paths.history))
    except UnauthorizedError:
        return RecordedHistory(unreadable=(paths.history,))
    found = [f"{paths.history}/{name}" for name in names]
    segments = await gather_in_parts(
        lambda path: _read_segment(store, path, since_ms), found, at_once=READS_AT_ONCE
    )
    unreadable = tuple(p for p, s in zip(found, segments, strict=True) if s.is_unreadable)
    # Orders of one host within a millisecond are told as ZooKeeper applied them.
    segments.sort(key=lambda stored: 0 if stored.stat is None else stored.stat.mzxid)
    events = [
        NodeEvent(node=stored.value.node, event=event)
        for stored in segments
        if stored.value is not None and stored.stat is not None
        for each in stored.value.events
        if (event := each if each.at_ms else replace(each, at_ms=stored.stat.mtime_ms)).last_ms
        >= since_ms
    ]
    events.sort(key=lambda each: (each.event.at_ms, each.node))
    return RecordedHistory(events=tuple(events), unreadable=unreadable)


async def _read_segment(store: MetadataStore, path: str, since_ms: int) -> Stored[Segment]:
    """Read a segment, unless it was written long before ``since_ms``."""
    if since_ms:
        with suppress(UnauthorizedError):  # an ACL hides when it was written
            stat = await store.exists(path)
            if stat is None or stat.mtime_ms < since_ms - CLOCKS_APART_MS:
                return Stored()
    return await read_stored(store, path, Segment.parse)
