"""Measures how much is left to repair, for metrics: ledgers, bytes, marks, and the time left.
Counts the ledgers that no client can read until a bookie returns.

Only the leader measures. It counts ledgers in its ledger map, lists both queues and reads each new
mark once. The longer the queue, the longer is the pause before the next measurement. The values are
published as metrics and as a ``BacklogSize``, so a scrape costs nothing here. Without a leader of
ours nothing is measured: the counts are 0, and the times NaN. What is left, and the course of it
since the queue was last empty, is also recorded in ZooKeeper (``RepairProgress``), so that every
node and command shows the same.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import structlog
from prometheus_client import Gauge

from auditor.ledger_map import MappedLedger
from auditor.ledger_map_updater import LedgerMapUpdater
from auditor.underreplication import (
    BookieLosses,
    copies_left,
    find_underreplicated,
    lost_bytes,
)
from ledgers.errors import UnauthorizedError, UnavailableError
from ledgers.model import BookieId
from ledgers.tasks import wait_woken
from replication.marks import marked_in_parts, marked_ledger_ids, read_marks
from replication.records import Count, Record, TimeMs, read_record
from replication.znodes import ClusterPaths

log = structlog.get_logger()
ONLY_LEADER = "0 on all nodes except the leader."
UNDERREPLICATED = Gauge(
    "bookmender_underreplicated_ledgers",
    "Ledgers that name a lost or reformatted bookie, by the copies left of their worst entry: 0, "
    f"1, 2, more. {ONLY_LEADER}",
    ["copies_left"],
)
MISSING_BYTES = Gauge(
    "bookmender_missing_copies_bytes",
    "Approximate payload bytes of the copies that these ledgers miss. Open ledgers count as empty. "
    + ONLY_LEADER,
)
MARKED = Gauge(
    "bookmender_queue_ledgers",
    "Marked ledgers, by queue: shared (with Java's AutoRecovery) or private (bookmender's own). "
    + ONLY_LEADER,
    ["queue"],
)
WAITING = Gauge(
    "bookmender_waiting_ledgers",
    f"Marked ledgers that a worker postponed, with the reason in a note. {ONLY_LEADER}",
)
OLDEST_MARK_S = Gauge(
    "bookmender_oldest_mark_age_seconds",
    "Age of the oldest mark in the shared queue; 0: no ledger is marked. NaN on all nodes except "
    "the leader.",
)
REMAINING_S = Gauge(
    "bookmender_repair_remaining_seconds",
    "Estimated seconds until the queue is empty, at the pace of the last minutes; 0: nothing is "
    "left. NaN: unknown, or not the leader.",
)
UNAVAILABLE = Gauge(
    "bookmender_unavailable_ledgers",
    "Ledgers with an entry whose every copy is on bookies that are not registered. 0 on all nodes "
    "except the leader.",
)

INTERVAL_S = 5.0
LEDGERS_PER_S = 4_000
"""Each of so many ledgers that were listed or counted makes the pause a second longer. So even a
measurement of a very long queue takes a small part of the time."""
COUNT_PAUSE_SHARE = 20
"""The pause between two counts of the unavailable ledgers is also at least this many times as long
as the last one took."""
NEW_MARKS_MAX = 5_000
"""New marks that one measurement reads. While there are more, the age is that of the oldest mark
read so far."""
MARKS_KEPT_MAX = 200_000
"""Marks whose time is remembered: those with the lowest ledger ids."""
PACE_WINDOW_MS = 300_000
"""The estimate uses the pace of this time."""
PACE_MIN_S = 15.0
"""Work must have gone on for so long before its end is estimated: it begins slowly."""
GROWN_BY = 1.1
"""A backlog that grew by this factor starts a new estimate: another bookie was lost."""
SAMPLES_MAX = 120
SAMPLES_CONTINUED_MS = 600_000
"""A new leader continues samples that are at most this old."""
LABELS = ("0", "1", "2", "more")
RECOUNT_S = 5.0
"""Minimum pause between two counts of the unavailable ledgers for the same bookies, if ledgers have
changed."""
IDS_KEPT_MAX = 20
"""Unavailable ledgers whose ids are kept for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BacklogSize:
    """The backlog at one moment. ``by_copies_left`` has every label of the metric."""

    by_copies_left: Mapping[str, int] = field(default_factory=lambda: by_label({}))
    missing_bytes: int = 0
    marked_count: int = 0
    private_count: int = 0
    waiting_count: int = 0
    oldest_mark_ms: int | None = None
    """Wall clock. None: no mark, or none could be read."""
    remaining_s: float | None = None
    """None: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The queued ledgers, and the bytes of the copies to make, at one moment."""

    at_ms: TimeMs
    ledgers: Count
    bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairProgress(Record):
    """The work that is left, repairs and drains, as the leader measured it last.

    ``bytes_per_s`` and ``left_s``: None if unknown. ``samples``: since the queue was last empty, at
    most ``SAMPLES_MAX``, the oldest first.
    """

    bytes_left: Count = 0
    bytes_per_s: Count | None = None
    left_s: Count | None = None
    samples: tuple[Sample, ...] = ()


def with_sample(samples: Sequence[Sample], new: Sample) -> tuple[Sample, ...]:
    """Return the samples with another one, thinned so that they spread over the whole time."""
    spacing_ms = (new.at_ms - samples[0].at_ms) / SAMPLES_MAX if samples else 0
    if len(samples) > 1 and samples[-1].at_ms - samples[-2].at_ms < spacing_ms:
        samples = samples[:-1]  # the last one gives way
    if len(samples) >= SAMPLES_MAX:
        samples = samples[::2]
    return (*samples, new)


def pace(samples: Sequence[Sample]) -> tuple[float | None, float | None]:
    """Return the bytes per second and the seconds left, by the last minutes; None: unknown.

    Bytes decide, because ledgers differ in size; ledgers if all that is left is empty.
    """

    def left(sample: Sample) -> int:
        return sample.bytes if now.bytes else sample.ledgers

    then = now = samples[-1]
    for each in reversed(samples):
        if left(then) > left(each) * GROWN_BY:
            break
        then = each
        if now.at_ms - then.at_ms >= PACE_WINDOW_MS:
            break
    passed_s, done = (now.at_ms - then.at_ms) / 1000, left(then) - left(now)
    if passed_s <= 0:
        return None, None
    is_known = done > 0 and passed_s >= PACE_MIN_S
    left_s = left(now) * passed_s / done if is_known else None
    return max(0, then.bytes - now.bytes) / passed_s, left_s


@dataclass(kw_only=True)
class Backlog:
    """Measures the backlog of one leader."""

    paths: ClusterPaths
    updater: LedgerMapUpdater
    losses: Callable[[], BookieLosses]
    """Returns the lost and reformatted bookies, whether or not a hold is in force."""
    draining: Callable[[], Collection[BookieId]]
    """Returns the bookies to drain."""
    record: Callable[[RepairProgress], Awaitable[None]]
    """Writes the progress to ZooKeeper."""
    size: BacklogSize | None = field(default=None, init=False)
    """The last measurement. Immutable, so that other threads may read it."""
    _counted: tuple[object, Counter[int], float, float] | None = field(default=None, init=False)
    """The last counts by copies left, and bytes to repair and to drain, after what they were
    computed from."""
    _recorded: RepairProgress | None = field(default=None, init=False)
    """The recorded progress, perhaps of an earlier leader; None until it was read."""

    def __post_init__(self) -> None:
        self._times = MarkTimes()

    async def run(self) -> None:
        """Measure until cancelled. Raises SessionLostError."""
        try:
            while True:
                pause_s = INTERVAL_S
                try:
                    size = await self.run_once()
                    listed = size.marked_count + size.private_count
                    pause_s += (listed + sum(size.by_copies_left.values())) / LEDGERS_PER_S
                except (UnavailableError, UnauthorizedError) as error:
                    log.warning("backlog.measure_failed", error=str(error))
                await self.updater.clock.sleep(pause_s)
        finally:
            self.size = None
            publish_none()

    async def run_once(self) -> BacklogSize:
        """Measure, publish and record. Raises UnavailableError."""
        counts, missing_bytes, drained_bytes = await self._count()
        shared = array("q")
        async for part in marked_in_parts(self.updater.store, self.paths):
            shared.extend(part)
        private = set(await marked_ledger_ids(self.updater.store, self.paths.private))
        await self._times.keep(shared[:MARKS_KEPT_MAX])
        new = self._times.unread(NEW_MARKS_MAX)
        for each in await read_marks(self.updater.store, self.paths, new):
            time_ms = None if each.mark is None else each.mark.ctime_ms
            self._times.set(each.ledger_id, time_ms or NO_TIME)
        waiting = await self.updater.store.exists(self.paths.waiting)
        private_count = len(private.difference(shared))
        progress = await self._progress(len(shared) + private_count, missing_bytes + drained_bytes)
        self.size = BacklogSize(
            by_copies_left=by_label(counts),
            missing_bytes=round(missing_bytes),
            marked_count=len(shared),
            private_count=private_count,
            waiting_count=0 if waiting is None else waiting.child_count,
            oldest_mark_ms=self._times.oldest_ms(),
            remaining_s=progress.left_s,
        )
        publish(self.size, now_ms=self.updater.clock.wall_ms())
        if progress.samples or progress != self._recorded:
            await self.record(progress)
        self._recorded = progress
        return self.size

    async def _progress(self, ledger_count: int, byte_count: float) -> RepairProgress:
        """Return the progress with the queue as it is now."""
        now = Sample(
            at_ms=self.updater.clock.wall_ms(), ledgers=ledger_count, bytes=round(byte_count)
        )
        if self._recorded is None:
            path = self.paths.progress
            found = await read_record(self.updater.store, path, RepairProgress.parse)
            self._recorded = found or RepairProgress()
        if not ledger_count:
            return RepairProgress(bytes_left=now.bytes, left_s=None if now.bytes else 0)
        samples = self._recorded.samples
        if samples and now.at_ms - samples[-1].at_ms > SAMPLES_CONTINUED_MS:
            samples = ()
        samples = with_sample(samples, now)
        per_s, left_s = pace(samples)
        return RepairProgress(
            bytes_left=now.bytes,
            bytes_per_s=None if per_s is None else round(per_s),
            left_s=None if left_s is None else round(left_s),
            samples=samples,
        )

    async def _count(self) -> tuple[Counter[int], float, float]:
        """Return the under-replicated ledgers by copies left, the bytes of their missing copies,
        and the bytes of copies to drain. They are counted again only after a change."""
        updater, losses = self.updater, self.losses()
        draining = frozenset(self.draining()) - losses.bookies
        source = losses, draining, updater.change_count
        if self._counted is None or self._counted[0] != source:
            counts, missing_bytes, drained_bytes = Counter[int](), 0.0, 0.0
            for part in find_underreplicated(updater.ledger_map, losses):
                for ledger, each in part:
                    counts[each.copies_left] += 1
                    missing_bytes += lost_bytes(ledger, each.lost)
                await asyncio.sleep(0)
            moved = BookieLosses(lost_since_s=dict.fromkeys(draining, 0.0))
            for part in find_underreplicated(updater.ledger_map, moved):
                drained_bytes += sum(lost_bytes(ledger, each.lost) for ledger, each in part)
                await asyncio.sleep(0)
            self._counted = source, counts, missing_bytes, drained_bytes
        return self._counted[1:]


UNREAD, NO_TIME = 2**63 - 1, 2**63 - 2
"""Later than every time, so that ``min`` finds the oldest one."""
TIMES_AT_ONCE = 5_000
"""Times that are carried over without a pause. That takes about a millisecond."""


class MarkTimes:
    """The time in each mark of the shared queue. Two arrays need 16 bytes for each mark."""

    def __init__(self) -> None:
        self._ledger_ids, self._times_ms = array("q"), array("q")
        """The marked ledgers, ascending, and for each its time, UNREAD or NO_TIME."""

    async def keep(self, marked: array[int]) -> None:
        """Set the marked ledgers, which ascend. The times of those that were known stay."""
        if marked == self._ledger_ids:
            return
        times_ms = array("q")
        known_ids, known_ms, place = self._ledger_ids, self._times_ms, 0
        for start in range(0, len(marked), TIMES_AT_ONCE):
            part = marked[start : start + TIMES_AT_ONCE]
            end = bisect_left(known_ids, part[-1] + 1, place)
            known = dict(zip(known_ids[place:end], known_ms[place:end], strict=True))
            times_ms.extend(known.get(ledger_id, UNREAD) for ledger_id in part)
            place = end
            await asyncio.sleep(0)
        self._ledger_ids, self._times_ms = marked, times_ms

    def unread(self, count_max: int) -> list[int]:
        """Return the first ledgers whose mark was not read yet."""
        found: list[int] = []
        place = -1
        with suppress(ValueError):  # there is no further one
            while len(found) < count_max:
                place = self._times_ms.index(UNREAD, place + 1)
                found.append(self._ledger_ids[place])
        return found

    def set(self, ledger_id: int, time_ms: int) -> None:
        """Set the time of a kept ledger."""
        self._times_ms[bisect_left(self._ledger_ids, ledger_id)] = time_ms

    def oldest_ms(self) -> int | None:
        """Return the oldest time that was read; None if there is none."""
        oldest_ms = min(self._times_ms, default=NO_TIME)
        return oldest_ms if oldest_ms < NO_TIME else None


def by_label(counts: Mapping[int, int]) -> dict[str, int]:
    """Return the counts by the labels of the metric."""
    labelled = dict.fromkeys(LABELS, 0)
    for left, count in counts.items():
        labelled[str(left) if str(left) in LABELS else "more"] += count
    return labelled


def publish(size: BacklogSize, *, now_ms: int) -> None:
    """Set the metrics."""
    for label, count in size.by_copies_left.items():
        UNDERREPLICATED.labels(copies_left=label).set(count)
    MISSING_BYTES.set(size.missing_bytes)
    MARKED.labels(queue="shared").set(size.marked_count)
    MARKED.labels(queue="private").set(size.private_count)
    WAITING.set(size.waiting_count)
    oldest_ms = now_ms if size.oldest_mark_ms is None else size.oldest_mark_ms
    OLDEST_MARK_S.set(max(0, now_ms - oldest_ms) / 1000)
    REMAINING_S.set(math.nan if size.remaining_s is None else size.remaining_s)


def publish_none() -> None:
    """Set the metrics of a node that measures nothing."""
    publish(BacklogSize(), now_ms=0)
    OLDEST_MARK_S.set(math.nan)


publish_none()  # so that every label exists from the start


# --- Unavailable ledgers --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class UnavailableLedgers:
    """The unavailable ledgers at one moment: those with an entry whose every copy is on absent
    bookies. No client can read such an entry until a bookie returns.

    ``first``: the lowest of their ids. ``restored_by``: by absent bookie that one of them names,
    how many of these ledgers become available again if this bookie alone returns.
    """

    count: Count
    first: tuple[Count, ...] = ()
    restored_by: Mapping[BookieId, Count] = field(default_factory=dict)


@dataclass
class UnavailableLedgerCounter:
    """Counts the unavailable ledgers among those that the ledger map knows so far. Inspects only
    ledgers that name at least a write quorum of the absent bookies, one block of the map at a time.
    """

    updater: LedgerMapUpdater
    on_count: Callable[[], None]
    """Called when the result has changed."""

    def __post_init__(self) -> None:
        self.absent: frozenset[BookieId] = frozenset()
        self._was_updated = asyncio.Event()
        self._counted: tuple[frozenset[BookieId], UnavailableLedgers, bool] | None = None
        """The absent bookies, the result of the last count, and whether the ledger map was complete
        when the count began."""
        self._change_count = -1
        """``change_count`` of the ledger map when that count began."""

    def update(self, absent: frozenset[BookieId]) -> None:
        """Set the absent bookies. Call this also when the ledger map may have become complete."""
        if absent != self.absent or not self._is_valid():
            self.absent = absent
            self._was_updated.set()

    def found_for(self, absent: Collection[BookieId]) -> UnavailableLedgers | None:
        """Return the result for exactly these bookies; None if there is none yet, or if the ledger
        map became complete after the count."""
        if self._counted is None or self._counted[0] != absent or not self._is_valid():
            return None
        return self._counted[1]

    def _is_valid(self) -> bool:
        return self._counted is not None and (self._counted[2] or not self.updater.is_complete)

    async def run(self) -> None:
        """Count until cancelled."""
        try:
            while True:
                began_s = self.updater.clock.now_s()
                await self.run_once()
                took_s = self.updater.clock.now_s() - began_s
                pause_s = max(RECOUNT_S, COUNT_PAUSE_SHARE * took_s) if self.absent else math.inf
                await wait_woken(self._was_updated, timeout_s=pause_s)
        finally:
            UNAVAILABLE.set(0)

    async def run_once(self) -> None:
        """Count if something has changed. If other bookies are absent meanwhile, the count ends
        without a result, and starts over."""
        self._was_updated.clear()
        absent, updater, ledger_map = self.absent, self.updater, self.updater.ledger_map
        change_count, is_complete = updater.change_count, updater.is_complete
        if self.found_for(absent) is not None and change_count == self._change_count:
            return
        count, ids, restored_by = 0, list[int](), Counter[BookieId]()
        count_least, first = ledger_map.write_quorum_least, 0
        while True:
            ledger_ids, next_first = ledger_map.naming_several(
                absent, count_least=count_least, first=first
            )
            for ledger_id in ledger_ids:
                ledger = ledger_map.get(ledger_id)
                if ledger is None or not has_unavailable_entry(ledger, absent):
                    continue
                count += 1
                ids += [ledger_id] if len(ids) < IDS_KEPT_MAX else []
                named = ledger.bookies & absent
                for bookie in named:  # a bookie that does not suffice alone is listed with 0
                    restored_by[bookie] += not has_unavailable_entry(ledger, named - {bookie})
            if next_first is None:
                break
            first = next_first
            await asyncio.sleep(0)
            if self.absent != absent:
                return
        UNAVAILABLE.set(count)
        found = UnavailableLedgers(count=count, first=tuple(ids), restored_by=dict(restored_by))
        counted = absent, found, is_complete
        has_changed, self._counted = counted != self._counted, counted
        self._change_count = change_count
        if has_changed:
            self.on_count()


def has_unavailable_entry(ledger: MappedLedger, absent: Collection[BookieId]) -> bool:
    """True if all copies of some entry are on the absent bookies."""
    return copies_left(ledger, absent) == 0
