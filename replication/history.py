"""The history: what happened in the cluster, when, and who did it.

``History`` is the interface through which parts of a node record events. ``HistoryWriter`` keeps
the events of one session in ZooKeeper, ``record_order`` the order of a command, and
``read_history`` reads the events of all nodes.

A session writes its events to segments, ``<ur>/bookmender/history/<session uuid>.<number>``:

- Recording costs nothing but memory. One write every few seconds, and only after an event, carries
  everything new. It is a separate request, so no repair waits for it.
- A segment that is full is followed by the next, and a session deletes its oldest. The leader
  deletes what is too old or too much in total (``auditor/history_cleaner.py``).
- Repairs and marks are sums by cause: one event for an episode, and not one for each ledger. Each
  fence and each recovery is an event of its own.
- Events that arrive faster than they can be written are dropped and counted, and the history says
  how many. A crash loses the events of the last seconds.
"""

from __future__ import annotations

import asyncio
import enum
import math
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

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
    Stat,
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
"""How long the sums of an episode that goes on wait."""
RETRY_S = 30.0
"""Wait after a failed write."""
LAST_WRITE_S = 1.0
"""Time for the last write of a session that ends."""
SUM_GAP_S = 60.0
"""Pause after which the next repair or mark begins another episode."""
SUM_LASTS_S = 600.0
"""Longest episode. A longer one is told in parts."""
SUMS_MAX = 50
"""Episodes at the same time. Further ones are told without their bookie."""
SEGMENT_FULL_BYTES = 32 * 1024
"""Size from which the next segment is begun. With its last write a segment is below 64 KB."""
UNWRITTEN_BYTES_MAX = 16 * 1024
"""Events that wait for a write. Further ones are dropped."""
LEDGER_BYTES_MAX = UNWRITTEN_BYTES_MAX * 3 // 4
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
    """A sum for a ``cause`` and its ``bookies``."""
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
    """One event, or the sum of an episode. Times are wall-clock milliseconds by ZooKeeper's clock.

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


class History(Protocol):
    """Records events. Never fails, never waits."""

    def record(self, event: Event) -> None:
        """Record an event that happened now; its ``at_ms`` and ``until_ms`` are ignored."""
        ...


class NoHistory:
    """Records nothing: for commands that only look, and for tests."""

    def record(self, event: Event) -> None:
        pass


NO_HISTORY = NoHistory()


class MemoryHistory:
    """Keeps every event, with its time, in memory: for tests."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.events: list[Event] = []

    def record(self, event: Event) -> None:
        self.events.append(replace(event, at_ms=self._clock.wall_ms(), until_ms=None))


# --- Writing --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment(Record):
    """The content of one znode. ``node``: who recorded the events."""

    node: str
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What the current segment must hold now. ``is_full``: the next event begins another one.

    ``kept_count``: how many of the events are final. The others are episodes that go on.
    """

    events: tuple[Event, ...]
    kept_count: int
    is_full: bool


class EventBuffer:
    """The events of a session's current segment. Does no I/O."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._bytes = self._unwritten_bytes = 0
        self._sums: dict[tuple[str, str, tuple[BookieId, ...]], Event] = {}
        """Episodes that may go on, by what their parts have in common."""
        self.has_news = False

    def add(self, event: Event) -> bool:
        """Add an event. Return False if an episode just goes on, so that a write can wait."""
        self.has_news = True
        event = event.bounded()
        if event.kind in SUMS:
            return self._add_to_sum(event)
        if self._append(event):
            return True
        DROPPED.inc()
        return self._add_to_sum(Event(kind=Kind.NOT_RECORDED, at_ms=event.at_ms, event_count=1))

    def draft(self) -> Draft:
        """Return what is to be written now. Call ``written`` after the write."""
        is_full = self._bytes + sum(map(_size_bytes, self._sums.values())) >= SEGMENT_FULL_BYTES
        if is_full:  # an episode without room is told in the next segment only
            self._end_episodes(lambda episode: True)
        self.has_news = False
        going_on = () if is_full else self._sums.values()
        return Draft(
            events=(*self._events, *going_on), kept_count=len(self._events), is_full=is_full
        )

    def written(self, draft: Draft) -> None:
        """Note that the draft was written. Events may have been added since."""
        self._unwritten_bytes = sum(map(_size_bytes, self._events[draft.kept_count :]))
        if draft.is_full:
            del self._events[: draft.kept_count]
            self._bytes = self._unwritten_bytes

    def _append(self, event: Event) -> bool:
        """Return False if there is no room."""
        size_bytes = _size_bytes(event)
        most_bytes = UNWRITTEN_BYTES_MAX if event.ledger_id is None else LEDGER_BYTES_MAX
        if self._unwritten_bytes + size_bytes > most_bytes:
            return False
        self._events.append(event)
        self._unwritten_bytes += size_bytes
        self._bytes += size_bytes
        return True

    def _add_to_sum(self, event: Event) -> bool:
        """Return True if another episode has begun."""
        self._end_episodes(lambda episode: _is_over(episode, event.at_ms))
        key = _sum_key(event)
        if key not in self._sums and len(self._sums) >= SUMS_MAX:
            event = replace(event, bookies=())
            key = _sum_key(event)
        episode = self._sums.get(key)
        self._sums[key] = (
            replace(event, until_ms=event.at_ms) if episode is None else episode.plus(event)
        )
        return episode is None

    def _end_episodes(self, is_over: Callable[[Event], bool]) -> None:
        """End these episodes, as far as there is room. The others go on."""
        for key, episode in list(self._sums.items()):
            if is_over(episode) and self._append(episode):
                del self._sums[key]


def _sum_key(event: Event) -> tuple[str, str, tuple[BookieId, ...]]:
    """Return what the parts of an episode have in common.

    Marks are summed by bookie, because only the leader writes them. Repairs are not: every node
    repairs, and after the loss of a rack each node would record an event for each bookie.
    """
    by_bookie = event.kind != Kind.LEDGERS_REPAIRED
    return event.kind, event.cause, event.bookies if by_bookie else ()


def _is_over(episode: Event, now_ms: int) -> bool:
    is_long = now_ms - episode.at_ms >= SUM_LASTS_S * 1000
    return is_long or now_ms - episode.last_ms > SUM_GAP_S * 1000


def _size_bytes(event: Event) -> int:
    return len(msgspec.json.encode(event)) + 1


class HistoryWriter:
    """Keeps the history of one session. ``run`` must be running.

    ``owner``: the uuid of the session. Only the session writes its segments. ``batcher``: proves
    the session, or the leadership, in each write.
    """

    def __init__(
        self,
        batcher: Batcher,
        paths: ClusterPaths,
        *,
        owner: str,
        node: str,
        clock: Clock,
    ) -> None:
        self._batcher, self._paths = batcher, paths
        self._owner, self._node = owner, node
        self._clock = clock
        self._buffer = EventBuffer()
        self._number = 0
        self._due_s = math.inf
        self._woken = asyncio.Event()
        self._has_told = False
        """The log already says that writes fail."""

    def record(self, event: Event) -> None:
        event = replace(event, at_ms=self._clock.wall_ms(), until_ms=None)
        is_new = self._buffer.add(event)
        due_s = self._clock.now_s() + (WRITE_S if is_new else SUM_WRITE_S)
        if due_s < self._due_s:
            self._due_s = due_s
            self._woken.set()

    async def run(self) -> None:
        """Write until cancelled. Raises SessionLostError or LeadershipLostError."""
        try:
            while True:
                await wait_woken(self._woken, timeout_s=self._due_s - self._clock.now_s())
                self._woken.clear()
                if self._clock.now_s() >= self._due_s:
                    await self.write()
        finally:
            await self._write_last()

    async def write(self) -> None:
        """Write what is new. A failure is not raised: the events wait for the next write."""
        self._due_s = math.inf
        if not self._buffer.has_news:
            return
        draft = self._buffer.draft()
        segment = Segment(node=self._node, events=draft.events)
        try:
            await self._put(self._path(self._number), segment.to_json())
        except (UnavailableError, RejectedError) as error:  # RejectedError: an ACL
            self._buffer.has_news = True
            self._due_s = self._clock.now_s() + RETRY_S
            if not self._has_told:
                log.warning(
                    "history.write_failed",
                    path=self._paths.history,
                    error=str(error),
                    retry_s=RETRY_S,
                    next_step=ACL_HINT if isinstance(error, UnauthorizedError) else None,
                )
            self._has_told = True
            return
        self._has_told = False
        self._buffer.written(draft)
        if draft.is_full:
            self._number += 1
            await self._delete_oldest()

    async def _write_last(self) -> None:
        """Write what is left when the session ends, if ZooKeeper answers at once."""
        with suppress(BookmenderError, TimeoutError):
            async with asyncio.timeout(LAST_WRITE_S):
                await self.write()

    def _path(self, number: int) -> str:
        return f"{self._paths.history}/{self._owner}.{number}"

    async def _put(self, path: str, data: bytes) -> None:
        try:
            await self._send(SetData(path=path, data=data, version=ANY_VERSION))
        except NoNodeError:
            with suppress(NodeExistsError):
                await self._send(Create(path=self._paths.history))
            await self._send(Create(path=path, data=data))

    async def _delete_oldest(self) -> None:
        if self._number < SEGMENTS_KEPT:
            return
        with suppress(UnavailableError, RejectedError):  # the leader deletes it some day
            await self._send(Delete(path=self._path(self._number - SEGMENTS_KEPT)))

    async def _send(self, operation: Operation) -> None:
        try:
            await self._batcher.send([operation])
        except MultiFailed as failure:
            raise failure.cause from failure


async def record_order(
    store: MetadataStore, paths: ClusterPaths, *, node: str, events: Sequence[Event]
) -> None:
    """Record what an operator ordered, in a segment of its own. ZooKeeper stamps the time.

    Raises UnavailableError, SessionLostError, and RejectedError where ZooKeeper refuses the znode.
    """
    segment = Segment(node=node, events=tuple(event.bounded() for event in events))
    path = f"{paths.history}/{uuid.uuid4()}.0"
    await store.create(path, segment.to_json(), with_parents=True)


def order_events(event: Event, ledger_ids: Collection[int]) -> list[Event]:
    """Return the order as one event for each ledger, or as one with their number if there are
    many."""
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

    ``unreadable``: znodes that cannot be read, so events may be missing.
    """

    events: tuple[NodeEvent, ...] = ()
    unreadable: tuple[str, ...] = ()


async def read_history(
    store: MetadataStore, paths: ClusterPaths, since_ms: int = 0
) -> RecordedHistory:
    """Return the events since ``since_ms``, and the sums that were not over then. Raises
    UnavailableError."""
    try:
        names = sorted(await children_if_any(store, paths.history))
    except UnauthorizedError:
        return RecordedHistory(unreadable=(paths.history,))

    segments = await gather_in_parts(
        lambda name: _read_segment(store, f"{paths.history}/{name}", since_ms),
        names,
        at_once=READS_AT_ONCE,
    )
    unreadable = [n for n, s in zip(names, segments, strict=True) if s.is_unreadable]
    # Orders of one host within a millisecond are told as ZooKeeper applied them.
    segments.sort(key=lambda stored: 0 if stored.stat is None else stored.stat.mzxid)
    events = [each for s in segments for each in _node_events(s) if each.event.last_ms >= since_ms]
    events.sort(key=lambda each: (each.event.at_ms, each.node))
    return RecordedHistory(
        events=tuple(events), unreadable=tuple(f"{paths.history}/{name}" for name in unreadable)
    )


async def _read_segment(store: MetadataStore, path: str, since_ms: int) -> Stored[Segment]:
    """Read a segment, unless it was written long before ``since_ms``."""
    if since_ms and await _last_written_ms(store, path) < since_ms - CLOCKS_APART_MS:
        return Stored()
    return await read_stored(store, path, Segment.parse)


def _node_events(stored: Stored[Segment]) -> list[NodeEvent]:
    if stored.value is None or stored.stat is None:
        return []
    node, written_ms = stored.value.node, stored.stat.mtime_ms
    timed = (e if e.at_ms else replace(e, at_ms=written_ms) for e in stored.value.events)
    return [NodeEvent(node=node, event=event) for event in timed]


async def _last_written_ms(store: MetadataStore, path: str) -> float:
    """Return the time of the last write; infinity if an ACL hides it."""
    try:
        stat: Stat | None = await store.exists(path)
    except UnauthorizedError:
        return math.inf
    return -math.inf if stat is None else stat.mtime_ms
