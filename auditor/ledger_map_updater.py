"""Building the index, and keeping it true: one walk over all metadata, then what the watch tells.

A ledger that was created, changed or deleted is read again, unless this node wrote what the event
tells of; after a reconnection, which may have swallowed events, all of them are. One unreadable
ledger stops nothing, and is tried again from time to time.

The ledgers root holds marks, locks and lists of bookies as well, and of these a repair changes
many. So there is a watch for each directory of ledgers right below it (a *tree*), and one for the
root's own children. What is scanned is a tree: where the walk breaks off, that tree is scanned
again, and the index stays in use as it was.

Metadata that this node's worker wrote: the index needs not read it again.

A worker has a thread and a session of its own, so that its reply and the index's event come in any
order. Which write an event tells of its zxid says: what was written then is as good as what a read
would give.

How far a scan of all metadata is.

Reading ledgers' metadata into the index, many at a time.

One that is gone leaves the index; one that cannot be read is in it as unreadable. One part at a
time: that a ledger is gone is never undone by a read that was made before.

One walk over the ledgers of one tree: all are read, and those that have gone leave the index.

How far the leader's index is, for people: ``<ur>/bookmender/index``, versioned JSON.
"""

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

KEPT_MAX = 1_000
"""Ledgers: those that were not asked for meanwhile are read, as where another node keeps the
index."""


class RecentWrites:
    """For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, VersionedMetadata] = {}

    def keep(self, written: VersionedMetadata) -> None:
        """``written``: with the znode's stat of that write."""
        with self._lock:
            self._kept.pop(written.ledger_id, None)
            self._kept[written.ledger_id] = written
            if len(self._kept) > KEPT_MAX:
                del self._kept[next(iter(self._kept))]

    def forget(self) -> None:
        """What was kept so far. For an index that begins: a ZooKeeper that was set up anew counts
        its transactions anew."""
        with self._lock:
            self._kept.clear()

    def take(self, ledger_id: int, zxid: int) -> VersionedMetadata | None:
        """What was written to the ledger in that transaction, once. None: not by us, or it is not
        kept any more."""
        with self._lock:
            written = self._kept.get(ledger_id)
            if written is None or written.stat.mzxid != zxid:
                return None
            return self._kept.pop(ledger_id)


FIRST_REPORT_S = 5.0


@dataclass(slots=True, kw_only=True)
class ScanProgress:
    """Times are monotonic seconds. ``expected_count``: about how many ledgers there are; 0:
    unknown."""

    expected_count: int
    started_s: float
    read_count: int = 0
    report_after_s: float = FIRST_REPORT_S

    def add(self, count: int, *, now_s: float) -> bool:
        """Whether that is worth a line in the log: they come at growing intervals."""
        self.read_count += count
        if now_s - self.started_s < self.report_after_s:
            return False
        self.report_after_s *= 2
        return True

    def per_s(self, now_s: float) -> float:
        """Ledgers read in a second, on average."""
        return self.read_count / max(now_s - self.started_s, 0.001)

    def fields(self, now_s: float) -> dict[str, object]:
        """For the log."""
        return {
            "ledger_count": self.read_count,
            "expected_count": self.expected_count or None,
            "ledgers_per_s": round(self.per_s(now_s)),
            "duration_s": round(now_s - self.started_s, 3),
        }


READS_AT_ONCE = 500
"""In one part; it blocks the loop for some milliseconds when it has come."""


class LedgerMapReader:
    """Feeds ``ledger_map``. One loop's."""

    def __init__(self, store: MetadataStore, manager: LedgerManager, ledger_map: LedgerMap) -> None:
        self._store, self._manager, self._ledger_map = store, manager, ledger_map
        self._reading = asyncio.Lock()

    async def read(self, ledger_ids: Sequence[int]) -> list[int]:
        """Those of them that the index did not know, or knew otherwise. Raises UnavailableError."""
        assert len(ledger_ids) <= READS_AT_ONCE, len(ledger_ids)
        async with self._reading:
            found = await asyncio.gather(*map(self._find, ledger_ids))
            return [
                ledger_id
                for ledger_id, result in zip(ledger_ids, found, strict=True)
                if self._apply(ledger_id, result)
            ]

    async def _find(self, ledger_id: int) -> tuple[bytes, Stat | None] | None:
        """Bytes and stat; no bytes, or neither, where ACLs forbid it; None when it is gone."""
        path = self._manager.path(ledger_id)
        try:
            return await self._store.get(path)
        except NoNodeError:
            return None
        except UnauthorizedError:
            pass
        try:
            stat = await self._store.exists(path)
        except UnauthorizedError:  # newer servers (3.9.5); of what is gone they say that it is
            return b"", None
        return None if stat is None else (b"", stat)

    def _apply(self, ledger_id: int, found: tuple[bytes, Stat | None] | None) -> bool:
        if found is None:
            return self._ledger_map.remove(ledger_id)
        data, stat = found
        if stat is None:
            return self._ledger_map.put_unreadable(ledger_id, None)
        if self._ledger_map.is_known(
            ledger_id, mzxid=stat.mzxid
        ):  # nearly always, when all are read again
            return False
        try:
            return self._ledger_map.put(ledger_id, parse_metadata(data), stat)
        except CorruptionError:
            return self._ledger_map.put_unreadable(ledger_id, stat)


class TreeScan:
    """To be run once. ``tree``: one of ``LedgerManager.trees``."""

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
        """Ledgers that the index knows, and the walk passed by."""

    async def run(self) -> AsyncIterator[tuple[int, Sequence[int]]]:
        """How many ledgers were read, and which the index did not know so; a part at a time.

        Raises UnavailableError when the walk cannot be completed, and at its end UnauthorizedError
        where ACLs shut some directory away: nothing has left the index then.
        """
        async for part in self._parts():
            yield len(part), await self._reader.read(part)
        # A ledger may have been made since its directory was listed (rule S8).
        await self._store.sync(self._tree)
        for start in range(0, len(self._unlisted), READS_AT_ONCE):
            yield 0, await self._reader.read(self._unlisted[start : start + READS_AT_ONCE])

    async def _parts(self) -> AsyncIterator[Sequence[int]]:
        """All that are listed. A directory may hold thousands of them, or a single one."""
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
        """``listed``: all that are in this range of ids. The walk goes through them in order."""
        known = self._ledger_map.ids_in(first, stop)
        if known:
            self._unlisted += sorted(set(known).difference(listed))


log = structlog.get_logger()
LEDGERS = Gauge("bookmender_index_ledgers", "Ledgers that this node's index knows.")
UNREADABLE = Gauge(
    "bookmender_index_unreadable_ledgers", "Ledgers whose metadata this node cannot read."
)

RETRY_MIN_S, RETRY_MAX_S = 1.0, 60.0
"""Between two tries to read what could not be read; doubled from one to the next."""
CHANGES_PAUSE_S = 0.1
"""Before what changed is read: more of it is read together, and our own writes are known by
then."""
UNREADABLE_AGAIN_S = 600.0
"""Between two tries to read what cannot be read, a ledger or a directory of them: no watch tells
that an ACL was opened."""
EVENTS_MAX = 100_000
"""Unread events of a tree, past which all of it is read again: that is dearer."""
TOUCHED_MAX = 100_000
"""Ledgers remembered for ``take_touched``."""
LOGGED_MAX = 20
"""Ledgers or znodes named in the log by one scan; the count tells of the rest."""

READ_FAILED = (UnavailableError, UnauthorizedError)

T = TypeVar("T")


class LedgerMapUpdater(Changing):
    """``ledger_map`` is what it keeps; it changes with it, and with every completed scan.

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
        """``rescan_interval_s``: between two scans where the server does not tell what changed.
        ``recent_writes``: of whoever writes metadata beside this, if anybody does."""
        super().__init__()
        self._store = store
        self._manager = manager
        self._clock = clock
        self._rescan_interval_s = rescan_interval_s
        self._recent_writes = recent_writes or RecentWrites()
        self.ledger_map = LedgerMap()
        self.completed_count = 0
        """Grows when all of the index is to be looked at: all that can be read was read, or more
        was touched than is remembered. 0 means that the index is still being built."""
        self.refusal: UnauthorizedError | None = None
        """Why no scan can be completed: what ACLs shut away. It is tried again, and again."""
        self.progress: ScanProgress | None = None
        """Of the scan that is under way."""
        self._reader = LedgerMapReader(store, manager, self.ledger_map)
        self._trees: set[str] = set()
        self._unwatched: set[str] = set()
        """Trees whose watch does not stand yet: nothing there is to be read before it does."""
        self._due: set[str] = set()
        """Trees to be scanned."""
        self._is_listed = False
        """Whether the root's children were read."""
        self._is_told = True
        """Whether the server tells of changes in a tree."""
        self._stale: dict[int, int] = {}
        """Ledgers that changed, and the zxid of the last write; UNTOLD: to be read in any case."""
        self._touched: set[int] = set()
        self._has_due, self._has_stale = asyncio.Event(), asyncio.Event()

    @property
    def is_complete(self) -> bool:
        """Whether every ledger is known, as far as anything was told: no scan is under way or
        due."""
        return self.completed_count > 0 and not self._is_unfinished

    def is_current(self, ledger_id: int) -> bool:
        """Whether the index has the ledger as the last event that came to us had it."""
        return self.is_up_to_date and ledger_id not in self._stale

    @property
    def is_up_to_date(self) -> bool:
        """Whether all that changes is told, and nothing is to be read again because it may have
        changed untold."""
        return self._is_told and not self._is_unfinished

    async def run(self) -> None:
        """Raises SessionLostError when that is over."""
        self._recent_writes.forget()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_root(tasks))
            tasks.create_task(self._scan_what_is_due())
            tasks.create_task(self._read_what_is_stale())
            tasks.create_task(self._try_unreadable_again())

    def rescan(self) -> None:
        """All metadata is to be read again. Returns at once; ``completed_count`` tells."""
        self._due |= self._trees - self._unwatched
        self._has_due.set()

    def take_touched(self) -> Collection[int]:
        """The ledgers put or removed since this was called last: the caller's to look at, once.

        Not those of the scan that builds the index.
        """
        touched, self._touched = self._touched, set()
        return touched

    @property
    def _is_unfinished(self) -> bool:
        return bool(self._due or self._unwatched or self.progress) or not self._is_listed

    # --- What is told ------------------------------------------------------------------------------

    async def _follow_root(self, tasks: asyncio.TaskGroup) -> None:
        """Follow each tree there is, and each that is new. A watch outlives its tree."""
        if self._manager.layout is Layout.FLAT:  # the root itself: it cannot be watched in two ways
            self._add_tree(self._manager.root, tasks)
            self._is_listed = True
            return
        async with aclosing(self._store.watch(self._manager.root)) as events:
            async for event in events:
                trees = await self._retrying(self._manager.trees, "the root")
                for tree in set(trees) - self._trees:
                    self._add_tree(tree, tasks)
                if event.kind is EventKind.RESET and not self._is_told:
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
        if self._is_told:
            self._is_told = False
            log.warning(
                "ledger_map.untold",
                error="ZooKeeper before 3.6 does not tell which ledgers change",
                rescan_interval_s=self._rescan_interval_s,
            )
        self._scan_soon(tree)

    def _handle(self, event: Event, tree: str) -> None:
        if event.kind is EventKind.RESET:
            self._stale = dict.fromkeys(self._stale, UNTOLD)  # later writes were perhaps not told
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

    # --- Scans -------------------------------------------------------------------------------------

    async def _scan_what_is_due(self) -> None:
        is_second_try = False
        while True:
            await self._wait_due()
            try:
                await self._retrying(self._scan_trees, "all metadata", errors=UnavailableError)
            except UnauthorizedError as error:
                if len(self.ledger_map) and not is_second_try:
                    self._count_scan()  # what can be read was read: whoever is named there is to be seen to
                is_second_try = await self._wait_opened(error)
            else:
                is_second_try = False

    async def _wait_opened(self, error: UnauthorizedError) -> bool:
        """All else of the tree was read, which is dear: it is due again when something else is
        (False), or after a while."""
        retry_s = UNREADABLE_AGAIN_S if self._is_told else self._rescan_interval_s
        log.warning("ledger_map.access_denied", error=str(error), retry_s=retry_s)
        self._has_due.clear()
        is_woken = await wait_woken(self._has_due, timeout_s=retry_s)
        if not (is_woken or self._is_told):
            self.rescan()
        self._has_due.set()
        return not is_woken and self._is_told

    async def _wait_due(self) -> None:
        timeout_s = None if self._is_told else self._rescan_interval_s
        if not await wait_woken(self._has_due, timeout_s=timeout_s):
            self.rescan()

    async def _scan_trees(self) -> None:
        """All that are due, one after the other. One that fails stays due.

        The rest goes on where ACLs shut a directory away; as nobody knows what lies there, the
        index is not complete by that. Raises UnauthorizedError then, once all else was read.
        """
        if self._unwatched or not self._is_listed:
            self._has_due.clear()
            return  # whichever of them is first would be counted as all of them
        self.progress = progress = ScanProgress(
            expected_count=len(self.ledger_map), started_s=self._clock.now_s()
        )
        strays: list[str] = []
        shut: list[tuple[str, UnauthorizedError]] = []
        try:
            while self._due:
                tree = self._due.pop()
                try:
                    await self._scan_tree(tree, progress, strays)
                except UnauthorizedError as error:
                    shut.append((tree, error))
                except BaseException:
                    self._scan_soon(tree)
                    raise
            if shut:
                raise shut[0][1]
        finally:
            for tree, _ in shut:
                self._scan_soon(tree)
            self.progress = None
        self._has_due.clear()  # set also by what became due meanwhile, and has been scanned
        self._report(progress, strays)
        self.refusal = None
        self._count_scan()

    def _count_scan(self) -> None:
        self.completed_count += 1
        self._tell([])

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
            self._tell(changed)
            if progress.add(read_count, now_s=self._clock.now_s()):
                log.info("ledger_map.progress", **progress.fields(self._clock.now_s()))

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
                next_step="bookmender ledger show ID says what is wrong with one",
            )
        if strays:
            log.warning("ledger_map.stray_znodes", count=len(strays), paths=strays[:LOGGED_MAX])

    # --- Single ledgers ----------------------------------------------------------------------------

    async def _read_what_is_stale(self) -> None:
        while True:
            await self._has_stale.wait()
            await self._clock.sleep(CHANGES_PAUSE_S)
            await self._retrying(self._read_stale, "ledgers that changed")

    async def _read_stale(self) -> None:
        """One part. What happens to them meanwhile makes them stale again."""
        part = [self._stale.popitem() for _ in range(min(READS_AT_ONCE, len(self._stale)))]
        unread = self._put_own(part)
        try:
            if unread:
                self._tell(await self._reader.read(unread))
        except BaseException:
            self._stale |= dict.fromkeys(unread, UNTOLD)
            raise
        if not self._stale:
            self._has_stale.clear()

    def _put_own(self, stale: Iterable[tuple[int, int]]) -> list[int]:
        """What this node wrote; the others are to be read, unless they were since they changed."""
        changed, unread = [], []
        for ledger_id, zxid in stale:
            if written := self._recent_writes.take(ledger_id, zxid):
                if self.ledger_map.put(ledger_id, written.metadata, written.stat):
                    changed.append(ledger_id)
            elif zxid == UNTOLD or not self.ledger_map.is_known(ledger_id, mzxid=zxid):
                unread.append(ledger_id)
        if changed:
            self._tell(changed)
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
        """What it returns once it succeeds; after these errors the pauses grow. The index stays in
        use as it is."""

        async def reading() -> T:
            try:
                return await read()
            except UnauthorizedError as error:
                self.refusal = error
                self._tell_change()
                raise

        return await until_answered(
            reading,
            event="index.read_failed",
            what=what,
            clock=self._clock,
            errors=errors,
            retry_min_s=RETRY_MIN_S,
            retry_max_s=RETRY_MAX_S,
        )

    def _tell(self, changed: Collection[int]) -> None:
        """Of changes, and of completed scans."""
        if self.completed_count:
            self._touched.update(changed)
        if len(self._touched) > TOUCHED_MAX:
            self._touched.clear()
            self.completed_count += 1
        LEDGERS.set(len(self.ledger_map))
        UNREADABLE.set(self.ledger_map.unreadable_count)
        self._tell_change()


LOOK_S = 1.0
WRITE_INTERVAL_S = 10.0
"""Between two writes while a scan is under way."""
SESSION_MAX = 2**64 - 1
"""ZooKeeper's session ids have 64 bits; kazoo shows them with a sign or without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerMapRecord:
    """``session_id``: whose index it is. ``written_ms``: wall clock. ``read_count``: by the scan
    under way, of about ``expected_count``; 0: unknown."""

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
    """None when there is none, or a later release tells of it in another way."""
    return await read_record(store, paths.ledger_map, LedgerMapRecord.from_record)


class LedgerMapReporter:
    """Writes the note when the index is complete, when it is not any more, and now and then
    between."""

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
        """Until cancelled. Raises SessionLostError or LeadershipLostError."""
        while True:
            try:
                await self.run_once()
            except (
                UnavailableError
            ) as error:  # it is a help, no more: the next write tells all of it
                log.warning("ledger_map.note_unwritten", error=str(error))
            await self._clock.sleep(LOOK_S)

    async def run_once(self) -> None:
        """Write if there is something new to tell."""
        note = self._note()
        if self._is_news(note):
            await self._write(note)
            self._written = note

    def _note(self) -> LedgerMapRecord:
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

    def _is_news(self, note: LedgerMapRecord) -> bool:
        before = self._written
        if before is None or before.is_complete != note.is_complete:
            return True
        is_due = note.written_ms - before.written_ms >= WRITE_INTERVAL_S * 1000
        return is_due and not note.is_complete
