"""Builds the ledger map and keeps it current: one scan of all metadata, then the changes that
ZooKeeper reports.

A ledger that is created, changed or deleted is read again, unless this node wrote the change
(``RecentWrites``). After a reconnection, which may have lost events, all ledgers are read again. An
unreadable ledger stops nothing, and is read again from time to time.

The ledgers root also holds marks, locks and lists of bookies, many of which change during repairs.
So there is one watch for each directory of ledgers right below the root (a *tree*), and one for the
root's own children. A tree is the unit of a scan (``TreeScan``): if a scan fails, its tree is
scanned again, and the map stays in use as it was.

``LedgerMapReporter`` records the progress for people in ``<ur>/bookmender/ledger_map``, as
versioned JSON.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass
from typing import Any, Self, TypeVar

import structlog
from prometheus_client import Gauge

from auditor.ledger_map import LedgerMap
from ledgers.clock import Clock
from ledgers.codec.layout import Layout
from ledgers.codec.metadata import parse_metadata
from ledgers.errors import (
    BookmenderError,
    CorruptionError,
    NoNodeError,
    UnauthorizedError,
    UnavailableError,
    UnsupportedError,
)
from ledgers.manager import LedgerManager, OnStray, VersionedMetadata
from ledgers.store import UNTOLD, Event, EventKind, MetadataStore, Stat
from ledgers.tasks import Changing, until_answered, wait_woken
from replication.znodes import ClusterPaths, bool_field, int_field, read_record, time_field

log = structlog.get_logger()
LEDGERS = Gauge("bookmender_ledger_map_ledgers", "Ledgers in the ledger map of this node.")
UNREADABLE = Gauge(
    "bookmender_ledger_map_unreadable_ledgers",
    "Ledgers in the ledger map whose metadata this node cannot read.",
)

RECENT_WRITES_MAX = 1_000
"""Writes that are kept. Older ones are read like those of other nodes."""
FIRST_REPORT_S = 5.0
READS_AT_ONCE = 500
"""Ledgers in one part. Parsing a part blocks the event loop for some milliseconds."""
RETRY_MIN_S, RETRY_MAX_S = 1.0, 60.0
"""Bounds of the wait before a failed read is repeated; each wait is twice the one before."""
CHANGES_PAUSE_S = 0.1
"""Pause before changed ledgers are read. More of them are then read together, and our own writes
are known by then."""
UNREADABLE_AGAIN_S = 600.0
"""Interval between two attempts to read an unreadable ledger or directory: no watch reports that an
ACL has changed."""
EVENTS_MAX = 100_000
"""Unread events of a tree. If there are more, reading the whole tree again costs less."""
TOUCHED_MAX = 100_000
"""Ledgers remembered for ``take_touched``."""
LOGGED_MAX = 20
"""Ledgers or znodes named in the log of one scan. The rest is only counted."""
LOOK_S = 1.0
WRITE_INTERVAL_S = 10.0
"""Interval between two writes during a scan."""
SESSION_MAX = 2**64 - 1
"""ZooKeeper's session ids have 64 bits; kazoo shows them with or without sign."""

READ_FAILED = (UnavailableError, UnauthorizedError)

T = TypeVar("T")


class LedgerMapUpdater(Changing):
    """Owns ``ledger_map``. Reports a change (``Changing``) when the map changes and when a scan
    ends.

    ``run`` ends by cancellation or with the session.
    """

    def __init__(
        self,
        *,
        store: MetadataStore,
        manager: LedgerManager,
        clock: Clock,
        rescan_interval_s: float,
        recent_writes: RecentWrites | None = None,
    ) -> None:
        """``rescan_interval_s``: interval of scans if the server does not report changes.
        ``recent_writes``: of this node's worker."""
        super().__init__()
        self._store = store
        self._manager = manager
        self._clock = clock
        self._rescan_interval_s = rescan_interval_s
        self._recent_writes = recent_writes or RecentWrites()
        self.ledger_map = LedgerMap()
        self.completed_count = 0
        """Grows when all ledgers must be inspected: a scan has ended, or more ledgers were touched
        than are remembered. 0: the map is still being built."""
        self.refusal: UnauthorizedError | None = None
        """The access that ACLs deny, so that no scan can be completed. It is tried again."""
        self.progress: ScanProgress | None = None
        """Progress of the current scan, if there is one."""
        self._reader = LedgerMapReader(store, manager, self.ledger_map)
        self._trees: set[str] = set()
        self._unwatched: set[str] = set()
        """Trees whose watch is not set yet. They must not be read before."""
        self._due: set[str] = set()
        """Trees that must be scanned."""
        self._is_listed = False
        """True if the root's children were read."""
        self._are_changes_reported = True
        """True if the server reports changes in a tree."""
        self._stale: dict[int, int] = {}
        """Changed ledgers, and the zxid of the last write. UNTOLD: read the ledger in any case."""
        self._touched: set[int] = set()
        self._has_due, self._has_stale = asyncio.Event(), asyncio.Event()

    @property
    def is_complete(self) -> bool:
        """True if every ledger is known, as far as events say: no scan is in progress or due."""
        return self.completed_count > 0 and not self._is_unfinished

    def is_current(self, ledger_id: int) -> bool:
        """True if the map has the ledger as of the last event."""
        return self.is_up_to_date and ledger_id not in self._stale

    @property
    def is_up_to_date(self) -> bool:
        """True if all changes are reported, and no scan is in progress or due."""
        return self._are_changes_reported and not self._is_unfinished

    async def run(self) -> None:
        """Raises SessionLostError when the session ends."""
        self._recent_writes.forget()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_root(tasks))
            tasks.create_task(self._scan_what_is_due())
            tasks.create_task(self._read_what_is_stale())
            tasks.create_task(self._try_unreadable_again())

    def rescan(self) -> None:
        """Read all metadata again. Returns at once; ``completed_count`` grows at the end."""
        self._due |= self._trees - self._unwatched
        self._has_due.set()

    def take_touched(self) -> Collection[int]:
        """Return the ledgers that were put or removed since the last call, except those of the
        first scan."""
        touched, self._touched = self._touched, set()
        return touched

    @property
    def _is_unfinished(self) -> bool:
        return bool(self._due or self._unwatched or self.progress) or not self._is_listed

    # --- Events --------------------------------------------------------------------------------

    async def _follow_root(self, tasks: asyncio.TaskGroup) -> None:
        """Follow each tree, and each new one. A watch outlives its tree."""
        if self._manager.layout is Layout.FLAT:  # the root itself: it cannot be watched in two ways
            self._add_tree(self._manager.root, tasks)
            self._is_listed = True
            return
        async with aclosing(self._store.watch(self._manager.root)) as events:
            async for event in events:
                trees = await self._retrying(self._manager.trees, "the root")
                for tree in set(trees) - self._trees:
                    self._add_tree(tree, tasks)
                if event.kind is EventKind.RESET and not self._are_changes_reported:
                    self.rescan()
                if not self._is_listed:
                    self._is_listed = True
                    self._has_due.set()  # there may be no tree at all

    def _add_tree(self, tree: str, tasks: asyncio.TaskGroup) -> None:
        self._trees.add(tree)
        self._unwatched.add(tree)
        tasks.create_task(self._follow_tree(tree))

    async def _follow_tree(self, tree: str) -> None:
        with suppress(UnsupportedError):
            async with aclosing(
                self._store.watch(tree, is_recursive=True, events_max=EVENTS_MAX)
            ) as events:
                async for event in events:
                    self._handle(event, tree)
        if self._are_changes_reported:
            self._are_changes_reported = False
            log.warning(
                "ledger_map.watch_unsupported",
                error="ZooKeeper before 3.6 does not report which ledgers change",
                rescan_interval_s=self._rescan_interval_s,
            )
        self._scan_soon(tree)

    def _handle(self, event: Event, tree: str) -> None:
        if event.kind is EventKind.RESET:
            self._stale = dict.fromkeys(self._stale, UNTOLD)  # events of later writes may be lost
            self._scan_soon(tree)
        elif (
            ledger_id := self._manager.layout.ledger_id(self._manager.root, event.path)
        ) is not None:
            self._stale[ledger_id] = event.zxid
            self._has_stale.set()

    def _scan_soon(self, tree: str) -> None:
        self._unwatched.discard(tree)
        self._due.add(tree)
        self._has_due.set()

    # --- Scans ------------------------------------------------------------------------------------

    async def _scan_what_is_due(self) -> None:
        is_second_try = False
        while True:
            await self._wait_due()
            try:
                await self._retrying(self._scan_trees, "all metadata", errors=UnavailableError)
            except UnauthorizedError as error:
                if len(self.ledger_map) and not is_second_try:
                    self._count_scan()  # everything that can be read was read: inspect it
                is_second_try = await self._wait_opened(error)
            else:
                is_second_try = False

    async def _wait_opened(self, error: UnauthorizedError) -> bool:
        """Wait before the denied access is tried again, until another scan is due (return False) or
        for some time. The rest of the tree was read, which is expensive to repeat."""
        retry_s = UNREADABLE_AGAIN_S if self._are_changes_reported else self._rescan_interval_s
        log.warning("ledger_map.access_denied", error=str(error), retry_s=retry_s)
        self._has_due.clear()
        is_woken = await wait_woken(self._has_due, timeout_s=retry_s)
        if not (is_woken or self._are_changes_reported):
            self.rescan()
        self._has_due.set()
        return not is_woken and self._are_changes_reported

    async def _wait_due(self) -> None:
        timeout_s = None if self._are_changes_reported else self._rescan_interval_s
        if not await wait_woken(self._has_due, timeout_s=timeout_s):
            self.rescan()

    async def _scan_trees(self) -> None:
        """Scan all trees that are due, one after the other. A tree whose scan fails stays due.

        If ACLs deny access to a directory, the other trees are scanned, but the map is not
        complete. Then this raises UnauthorizedError at the end.
        """
        if self._unwatched or not self._is_listed:
            self._has_due.clear()
            return  # the first trees alone would count as a complete scan
        self.progress = progress = ScanProgress(
            expected_count=len(self.ledger_map), started_s=self._clock.now_s()
        )
        strays: list[str] = []
        denied: list[tuple[str, UnauthorizedError]] = []
        try:
            while self._due:
                tree = self._due.pop()
                try:
                    await self._scan_tree(tree, progress, strays)
                except UnauthorizedError as error:
                    denied.append((tree, error))
                except BaseException:
                    self._scan_soon(tree)
                    raise
            if denied:
                raise denied[0][1]
        finally:
            for tree, _ in denied:
                self._scan_soon(tree)
            self.progress = None
        self._has_due.clear()  # also set by trees that became due meanwhile and were scanned
        self._report(progress, strays)
        self.refusal = None
        self._count_scan()

    def _count_scan(self) -> None:
        self.completed_count += 1
        self._report_changes([])

    async def _scan_tree(self, tree: str, progress: ScanProgress, strays: list[str]) -> None:
        scan = TreeScan(
            self._store,
            self._manager,
            self._reader,
            self.ledger_map,
            tree=tree,
            on_stray=strays.append,
        )
        async for read_count, changed in scan.run():
            self._report_changes(changed)
            if progress.add(read_count, now_s=self._clock.now_s()):
                log.info("ledger_map.progressed", **progress.fields(self._clock.now_s()))

    def _report(self, progress: ScanProgress, strays: list[str]) -> None:
        unreadable = sorted(self.ledger_map.unreadable)
        log.info(
            "ledger_map.built",
            unreadable_count=len(unreadable),
            stray_count=len(strays),
            **progress.fields(self._clock.now_s()),
        )
        if unreadable:
            log.error(
                "ledger_map.unreadable_ledgers",
                count=len(unreadable),
                ledger_ids=unreadable[:LOGGED_MAX],
            )
        if strays:
            log.warning("ledger_map.stray_znodes", count=len(strays), paths=strays[:LOGGED_MAX])

    # --- Single ledgers ---------------------------------------------------------------------------

    async def _read_what_is_stale(self) -> None:
        while True:
            await self._has_stale.wait()
            await self._clock.sleep(CHANGES_PAUSE_S)
            await self._retrying(self._read_stale, "ledgers that changed")

    async def _read_stale(self) -> None:
        """Read one part of the changed ledgers. Further changes meanwhile make them stale again."""
        part = [self._stale.popitem() for _ in range(min(READS_AT_ONCE, len(self._stale)))]
        unread = self._put_own(part)
        try:
            if unread:
                self._report_changes(await self._reader.read(unread))
        except BaseException:
            self._stale |= dict.fromkeys(unread, UNTOLD)
            raise
        if not self._stale:
            self._has_stale.clear()

    def _put_own(self, stale: Iterable[tuple[int, int]]) -> list[int]:
        """Store what this node wrote. Return the ledgers that must be read: the others, unless they
        were read after the change."""
        changed, unread = [], []
        for ledger_id, zxid in stale:
            if written := self._recent_writes.take(ledger_id, zxid):
                if self.ledger_map.put(ledger_id, written.metadata, written.stat):
                    changed.append(ledger_id)
            elif zxid == UNTOLD or not self.ledger_map.is_known(ledger_id, mzxid=zxid):
                unread.append(ledger_id)
        if changed:
            self._report_changes(changed)
        return unread

    async def _try_unreadable_again(self) -> None:
        while True:
            await self._clock.sleep(UNREADABLE_AGAIN_S)
            if self.ledger_map.unreadable:
                self._stale |= dict.fromkeys(self.ledger_map.unreadable, UNTOLD)
                self._has_stale.set()

    async def _retrying(
        self,
        read: Callable[[], Awaitable[T]],
        what: str,
        *,
        errors: type[BookmenderError] | tuple[type[BookmenderError], ...] = READ_FAILED,
    ) -> T:
        """Repeat ``read`` after these errors, with growing pauses, and return its result. The map
        stays in use as it is."""

        async def reading() -> T:
            try:
                return await read()
            except UnauthorizedError as error:
                self.refusal = error
                self._notify_change()
                raise

        return await until_answered(
            reading,
            event="ledger_map.read_failed",
            what=what,
            clock=self._clock,
            errors=errors,
            retry_min_s=RETRY_MIN_S,
            retry_max_s=RETRY_MAX_S,
        )

    def _report_changes(self, changed: Collection[int]) -> None:
        """Remember changed ledgers, set the metrics and wake those who wait."""
        if self.completed_count:
            self._touched.update(changed)
        if len(self._touched) > TOUCHED_MAX:
            self._touched.clear()
            self.completed_count += 1
        LEDGERS.set(len(self.ledger_map))
        UNREADABLE.set(self.ledger_map.unreadable_count)
        self._notify_change()


class TreeScan:
    """One scan of the ledgers of one tree: reads all of them, and removes deleted ones from the
    map. Run it once. ``tree``: one of ``LedgerManager.trees``."""

    def __init__(
        self,
        store: MetadataStore,
        manager: LedgerManager,
        reader: LedgerMapReader,
        ledger_map: LedgerMap,
        *,
        tree: str,
        on_stray: OnStray,
    ) -> None:
        self._store, self._manager, self._reader, self._ledger_map = (
            store,
            manager,
            reader,
            ledger_map,
        )
        self._tree, self._on_stray = tree, on_stray
        self._unlisted: list[int] = []
        """Ledgers that the map knows and the listing did not contain."""

    async def run(self) -> AsyncIterator[tuple[int, Sequence[int]]]:
        """Yield, for each part, how many ledgers were read and which of them changed in the map.

        Raises UnavailableError if the listing fails. Raises UnauthorizedError at the end if ACLs
        deny access to some directory; then nothing was removed from the map.
        """
        async for part in self._parts():
            yield len(part), await self._reader.read(part)
        # A ledger may have been made since its directory was listed (rule S8).
        await self._store.sync(self._tree)
        for start in range(0, len(self._unlisted), READS_AT_ONCE):
            yield 0, await self._reader.read(self._unlisted[start : start + READS_AT_ONCE])

    async def _parts(self) -> AsyncIterator[Sequence[int]]:
        """Yield the listed ledgers in parts. A directory may hold thousands of ledgers, or one."""
        waiting: list[int] = []
        ids = self._manager.layout.ids_below(self._manager.root, self._tree)
        passed_id = ids.start
        refusal: UnauthorizedError | None = None
        try:
            async for listed in self._manager.ledger_ids_of(self._tree, on_stray=self._on_stray):
                self._note_unlisted(passed_id, listed[-1] + 1, listed)
                passed_id = listed[-1] + 1
                waiting += listed
                while len(waiting) >= READS_AT_ONCE:
                    yield waiting[:READS_AT_ONCE]
                    del waiting[:READS_AT_ONCE]
        except UnauthorizedError as error:
            refusal = error
        if waiting:
            yield waiting
        if refusal is not None:
            raise refusal
        self._note_unlisted(passed_id, ids.stop, ())

    def _note_unlisted(self, first: int, stop: int, listed: Sequence[int]) -> None:
        """``listed``: all listed ledgers in this range of ids. The listing is in the order of ids."""
        known = self._ledger_map.ids_in(first, stop)
        if known:
            self._unlisted += sorted(set(known).difference(listed))


class LedgerMapReader:
    """Reads metadata into ``ledger_map``, many ledgers at a time.

    A deleted ledger is removed from the map; one that cannot be read is put in as unreadable. Only
    one part is read at a time, so that an earlier read never undoes a removal.
    """

    def __init__(self, store: MetadataStore, manager: LedgerManager, ledger_map: LedgerMap) -> None:
        self._store, self._manager, self._ledger_map = store, manager, ledger_map
        self._reading = asyncio.Lock()

    async def read(self, ledger_ids: Sequence[int]) -> list[int]:
        """Read these ledgers. Return those whose entry in the map has changed. Raises
        UnavailableError."""
        assert len(ledger_ids) <= READS_AT_ONCE, len(ledger_ids)
        async with self._reading:
            found = await asyncio.gather(*map(self._find, ledger_ids))
            return [
                ledger_id
                for ledger_id, result in zip(ledger_ids, found, strict=True)
                if self._apply(ledger_id, result)
            ]

    async def _find(self, ledger_id: int) -> tuple[bytes, Stat | None] | None:
        """Return bytes and stat. If ACLs deny access, the bytes are empty and the stat may be None.
        Return None if the ledger is deleted."""
        path = self._manager.path(ledger_id)
        try:
            return await self._store.get(path)
        except NoNodeError:
            return None
        except UnauthorizedError:
            pass
        try:
            stat = await self._store.exists(path)
        except UnauthorizedError:  # servers from 3.9.5 on; of a deleted znode they say so
            return b"", None
        return None if stat is None else (b"", stat)

    def _apply(self, ledger_id: int, found: tuple[bytes, Stat | None] | None) -> bool:
        if found is None:
            return self._ledger_map.remove(ledger_id)
        data, stat = found
        if stat is None:
            return self._ledger_map.put_unreadable(ledger_id, None)
        if self._ledger_map.is_known(ledger_id, mzxid=stat.mzxid):  # the usual case in a rescan
            return False
        try:
            return self._ledger_map.put(ledger_id, parse_metadata(data), stat)
        except CorruptionError:
            return self._ledger_map.put_unreadable(ledger_id, stat)


@dataclass(slots=True, kw_only=True)
class ScanProgress:
    """Progress of a scan. Times are monotonic seconds. ``expected_count``: about how many ledgers
    there are; 0: unknown."""

    expected_count: int
    started_s: float
    read_count: int = 0
    report_after_s: float = FIRST_REPORT_S

    def add(self, count: int, *, now_s: float) -> bool:
        """Count ledgers. Return True if the progress should be logged; the interval grows."""
        self.read_count += count
        if now_s - self.started_s < self.report_after_s:
            return False
        self.report_after_s *= 2
        return True

    def per_s(self, now_s: float) -> float:
        """Return the ledgers read per second, on average."""
        return self.read_count / max(now_s - self.started_s, 0.001)

    def fields(self, now_s: float) -> dict[str, object]:
        """Return the fields of a log event."""
        return {
            "ledger_count": self.read_count,
            "expected_count": self.expected_count or None,
            "ledgers_per_s": round(self.per_s(now_s)),
            "duration_s": round(now_s - self.started_s, 3),
        }


class RecentWrites:
    """Metadata that this node's worker wrote recently, so that the ledger map need not read it
    again. Thread-safe.

    The worker has its own thread and session, so the reply to a write and the event of it arrive in
    any order. The zxid of an event says which write it reports.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, VersionedMetadata] = {}

    def keep(self, written: VersionedMetadata) -> None:
        """``written``: with the stat of that write."""
        with self._lock:
            self._kept.pop(written.ledger_id, None)
            self._kept[written.ledger_id] = written
            if len(self._kept) > RECENT_WRITES_MAX:
                del self._kept[next(iter(self._kept))]

    def forget(self) -> None:
        """Forget all writes. Called when a ledger map begins, because a newly installed ZooKeeper
        starts its transaction ids over."""
        with self._lock:
            self._kept.clear()

    def take(self, ledger_id: int, zxid: int) -> VersionedMetadata | None:
        """Return what was written to the ledger in that transaction, once; None if another node
        wrote it, or if it is not kept any more."""
        with self._lock:
            written = self._kept.get(ledger_id)
            if written is None or written.stat.mzxid != zxid:
                return None
            return self._kept.pop(ledger_id)


# --- The record for people ------------------------------------------------------------------------


class LedgerMapReporter:
    """Records when the map becomes complete or incomplete, and regularly during a scan."""

    def __init__(
        self,
        updater: LedgerMapUpdater,
        write: Callable[[LedgerMapRecord], Awaitable[None]],
        *,
        session_id: int,
        clock: Clock,
    ) -> None:
        self._updater = updater
        self._write = write
        self._session_id = session_id
        self._clock = clock
        self._written: LedgerMapRecord | None = None

    async def run(self) -> None:
        """Run until cancelled. Raises SessionLostError or LeadershipLostError."""
        while True:
            try:
                await self.run_once()
            except UnavailableError as error:  # not essential: the next write contains everything
                log.warning("ledger_map.record_write_failed", error=str(error))
            await self._clock.sleep(LOOK_S)

    async def run_once(self) -> None:
        """Write if something has changed."""
        record = self._current_record()
        if self._is_due(record):
            await self._write(record)
            self._written = record

    def _current_record(self) -> LedgerMapRecord:
        updater, progress = self._updater, self._updater.progress
        return LedgerMapRecord(
            session_id=self._session_id,
            written_ms=self._clock.wall_ms(),
            is_complete=updater.is_complete,
            ledger_count=len(updater.ledger_map),
            unreadable_count=updater.ledger_map.unreadable_count,
            read_count=progress.read_count if progress else 0,
            expected_count=progress.expected_count if progress else 0,
        )

    def _is_due(self, record: LedgerMapRecord) -> bool:
        before = self._written
        if before is None or before.is_complete != record.is_complete:
            return True
        is_due = record.written_ms - before.written_ms >= WRITE_INTERVAL_S * 1000
        return is_due and not record.is_complete


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerMapRecord:
    """Progress of a ledger map. ``session_id``: of the leader that owns the map. ``written_ms``:
    wall clock. ``read_count``: ledgers read by the current scan, of about ``expected_count``; 0:
    unknown."""

    session_id: int
    written_ms: int
    is_complete: bool
    ledger_count: int
    unreadable_count: int = 0
    read_count: int = 0
    expected_count: int = 0

    def to_json(self) -> bytes:
        return json.dumps({"version": 1, **asdict(self)}).encode()

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Raises CorruptionError."""
        return cls(
            session_id=int_field(record, "session_id", least=-SESSION_MAX, most=SESSION_MAX),
            written_ms=time_field(record, "written_ms"),
            is_complete=bool_field(record, "is_complete"),
            ledger_count=int_field(record, "ledger_count"),
            unreadable_count=int_field(record, "unreadable_count"),
            read_count=int_field(record, "read_count"),
            expected_count=int_field(record, "expected_count"),
        )


async def read_ledger_map_record(
    store: MetadataStore, paths: ClusterPaths
) -> LedgerMapRecord | None:
    """Return None if there is none, or if a later release wrote it in another format."""
    return await read_record(store, paths.ledger_map, LedgerMapRecord.from_record)
