"""Builds the ledger map and keeps it current: one scan of all metadata, then the changes that
ZooKeeper reports.

A ledger that is created, changed or deleted is read again, unless this node wrote the change
(``RecentWrites``). After a reconnection, which may have lost events, all ledgers are read again. An
unreadable ledger stops nothing, and is read again from time to time. Nor does a directory that an
ACL hides: its known ledgers are read one by one, and events tell of others. Only ledgers that were
created there while no node watched are missing, so the map is not complete until an ACL opens it.

The ledgers root also holds marks, locks and lists of bookies, many of which change during repairs.
So there is one watch for each directory of ledgers right below the root (a *tree*), and one for the
root's own children. A tree is the unit of a scan: if a scan fails, its tree is scanned again, and
the map stays in use as it was.

An observer may follow all changes of the map (``LedgerMapObserver``). ``wait_known`` tells it when
every change up to some zxid is in the map. The ledgers that must be read wait in ``StaleLedgers``,
in the order of their first event, so that no ledger waits for ever.

``LedgerMapReporter`` records the progress for people in ``<ur>/bookmender/ledger_map``, as
versioned JSON.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice
from typing import Protocol, TypeVar

import structlog
from prometheus_client import Gauge, Histogram

from auditor.ledger_map import LedgerMap
from ledgers.clock import Clock
from ledgers.codec.layout import Layout
from ledgers.codec.metadata import parse_outline
from ledgers.errors import (
    CorruptionError,
    SessionLostError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.store import UNTOLD, Event, EventKind, MetadataStore, Stat, children_if_any
from ledgers.tasks import Changing, until_answered
from replication.records import Count, Record, TimeMs

log = structlog.get_logger()
LEDGERS = Gauge("bookmender_ledger_map_ledgers", "Ledgers in the ledger map of this node.")
UNREADABLE = Gauge(
    "bookmender_ledger_map_unreadable_ledgers",
    "Ledgers in the ledger map whose metadata this node cannot read.",
)
CHANGES_WAITING = Gauge(
    "bookmender_ledger_map_changes_waiting",
    "Changed ledgers that this node has not read again yet: the lag of its ledger map.",
)
SCAN_S = Histogram(
    "bookmender_ledger_map_scan_seconds",
    "Duration of one scan that reads the metadata of all ledgers into the ledger map.",
    buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600),
)
COMPLETE = Gauge(
    "bookmender_ledger_map_complete",
    "1 if the ledger map of this node has every ledger, 0 while metadata is read, is not kept, or "
    "is hidden.",
)

RECENT_WRITES_MAX = 1_000
"""Writes that are kept. Older ones are read like those of other nodes."""
FIRST_REPORT_S = 5.0
READS_AT_ONCE = 500
"""Ledgers in one part of a scan."""
CHANGES_AT_ONCE = 1_000
"""Changed ledgers in one part, if there are so many. A busy ZooKeeper needs 50 ms for an answer, so
smaller parts would limit the rate. Requests for marks wait behind the reads of one part."""
APPLIED_AT_ONCE = 50
"""Ledgers that enter the map without a pause: one or two milliseconds."""
RETRY_MIN_S, RETRY_MAX_S = 1.0, 60.0
"""Bounds of the wait before a failed read is repeated; each wait is twice the one before."""
CHANGES_PAUSE_S = 0.1
"""Pause before changed ledgers are read. More of them are then read together, and our own writes
are known by then."""
GIVE_WAY_MAX_S = 0.25
"""How long changed ledgers wait for urgent requests, in one go."""
GIVE_WAY_CHECK_S = 0.002
UNREADABLE_AGAIN_S = 600.0
"""Interval between two attempts to read an unreadable ledger: no watch reports that an ACL has
changed."""
HIDDEN_AGAIN_S = 60.0
"""Interval between two attempts to list a hidden directory, which costs one request."""
HIDDEN_MAX = 20
"""Hidden directories of a tree that are remembered, and tried again."""
EVENTS_MAX = 100_000
"""Unread events of a tree. If there are more, reading the whole tree again costs less."""
TOUCHED_MAX = 100_000
"""Ledgers remembered for ``take_touched``."""
LOGGED_MAX = 20
"""Ledgers or znodes named in the log of one scan. The rest is only counted."""
LOOK_S = 1.0
WRITE_INTERVAL_S = 10.0
"""Interval between two writes during a scan."""

GAP_CHECK_S = 1.0
"""Longest wait in ``wait_known`` before it checks the connection again."""
REFUSAL_LOG_INTERVAL_S = 60.0
"""How often it is logged that ``wait_known`` waits because an ACL hides the root."""
SETTLE_TURNS = 2
"""Turns of the event loop after which a task has run that an earlier event woke."""

READ_FAILED = (UnavailableError, UnauthorizedError)

T = TypeVar("T")


class LedgerMapObserver(Protocol):
    """Is told every change of the ledger map before the map changes. Must not raise or wait."""

    def ledger_read(self, ledger_id: int, *, before: int, stat: Stat, data: bytes) -> None:
        """A ledger was read, perhaps unchanged. ``before``: the mzxid in the map; 0: not in it.
        ``data``: empty if ACLs deny access."""
        ...

    def ledger_removed(self, ledger_id: int, *, before: int, zxid: int) -> None:
        """A ledger is deleted. ``before``: its mzxid in the map; 0: not in it, or always hidden.
        ``zxid``: of the deletion, greater than ``before``; UNTOLD if it is not known."""
        ...


class LedgerMapUpdater(Changing):
    """Owns ``ledger_map``. Reports a change (``Changing``) when the map changes and when a scan
    ends. ``run`` ends by cancellation or with the session."""

    def __init__(
        self,
        *,
        store: MetadataStore,
        manager: LedgerManager,
        clock: Clock,
        recent_writes: RecentWrites | None = None,
    ) -> None:
        """``recent_writes``: of this node's worker."""
        super().__init__()
        self.store = store
        self.manager = manager
        self.clock = clock
        self._recent_writes = recent_writes or RecentWrites()
        self.ledger_map = LedgerMap()
        self.completed_count = 0
        """Grows when all ledgers must be inspected: a scan has ended, or more ledgers were touched
        than are remembered. 0: the map is still being built."""
        self.refusal: UnauthorizedError | None = None
        """The denied access to the root, which stops everything here. It is tried again."""
        self.progress: ScanProgress | None = None
        """Progress of the current scan, if there is one."""
        self._reader = LedgerMapReader(store, manager, self.ledger_map)
        # Dicts, not sets: trees are watched and scanned in order, so simulations repeat.
        self._trees: dict[str, None] = {}
        self._unwatched: set[str] = set()
        """Trees whose watch is not set yet. They must not be read before."""
        self._hidden: dict[str, list[UnauthorizedError]] = {}
        """By tree, the directories that ACLs hid from its last scan, at most ``HIDDEN_MAX``."""
        self._due: dict[str, None] = {}
        """Trees that must be scanned."""
        self._is_listed = False
        """True if the root's children were read."""
        self._stale = StaleLedgers()
        self._touched: set[int] = set()
        self._has_due = asyncio.Event()
        self._break_counts: dict[str, int] = {}
        """By watched path, the ``break_count`` of the connection that its watch was renewed on."""
        self._is_listing = False
        """True while the root's children are being read again."""
        self.changes_pause_s = CHANGES_PAUSE_S
        self.is_urgent: Callable[[], bool] = lambda: False
        """True while the bookies are read again, and during an audit round. ZooKeeper answers the
        requests of a session in order, so the first mark after a loss would wait behind each part
        of changed ledgers that is read meanwhile."""
        self._refusal_logged_s = -REFUSAL_LOG_INTERVAL_S

    @property
    def is_complete(self) -> bool:
        """True if every ledger is known, as far as events say: no scan is in progress or due, and
        no directory is hidden."""
        return self.completed_count > 0 and self.is_up_to_date and not self._hidden

    @property
    def hidden(self) -> Sequence[str]:
        """The directories that ACLs hide, at most ``HIDDEN_MAX`` of each tree."""
        return [str(each.context["path"]) for part in self._hidden.values() for each in part]

    def is_current(self, ledger_id: int) -> bool:
        """True if the map has the ledger as of the last event."""
        return self.is_up_to_date and ledger_id not in self._stale.zxids

    @property
    def is_up_to_date(self) -> bool:
        """True if no scan is in progress or due. There may be ledgers in hidden directories that
        are not known."""
        is_due = self._due or self._unwatched or self.progress
        return self._is_listed and not is_due

    # --- For observers ------------------------------------------------------------------------

    def observe(self, observer: LedgerMapObserver | None) -> None:
        """Inform ``observer`` about each change from now on; None: no observer."""
        self._reader.observer = observer

    def read_again(self, ledger_ids: Iterable[int]) -> None:
        """Read these ledgers soon, for the observer. Returns at once."""
        for ledger_id in ledger_ids:
            self._stale.add(ledger_id, UNTOLD)

    async def read_now(self, ledger_ids: Collection[int]) -> None:
        """Read these ledgers into the map. Raises UnavailableError."""
        wanted = sorted(ledger_ids)
        for start in range(0, len(wanted), READS_AT_ONCE):
            part = wanted[start : start + READS_AT_ONCE]
            self._report_changes(await self._reader.read(part))

    @property
    def is_gapless(self) -> bool:
        """True if the map has all that ACLs show, and events report every later change."""
        break_count = self.store.break_count
        watched = {*self._trees, self.manager.root}
        return (
            self.completed_count > 0
            and self.is_up_to_date
            and not self._is_listing
            and all(self._break_counts.get(path) == break_count for path in watched)
        )

    async def wait_known(self) -> None:
        """Return when every change is in the map that happened before some reply or event which
        arrived before this call.

        ZooKeeper sends the event of a change before any reply or event of a later zxid on the same
        connection. So these steps suffice:

        1. Let the tasks that follow watches take all events that arrived. They add the ledgers to
           ``_stale``, or make a tree due.
        2. Wait until all these ledgers have been read. A read sent after an event shows its change.
        3. If the connection broke meanwhile, events may be lost. Then wait for the scan that
           follows, which shows everything, and start over. The same holds for new trees, which are
           not watched yet.
        """
        while True:
            break_count = self.store.break_count
            for _ in range(SETTLE_TURNS):
                await asyncio.sleep(0)
            stale = self._stale
            target, failure_count = stale.added_count, stale.failure_count
            seen = stale.change_count
            while (
                is_valid := self.is_gapless and stale.failure_count == failure_count
            ) and stale.read_count < target:
                await stale.wait_change(seen, timeout_s=GAP_CHECK_S)
                seen = stale.change_count
            if is_valid and self.store.break_count == break_count:
                return
            refusal, now_s = self.refusal, self.clock.now_s()
            if refusal is not None and now_s - self._refusal_logged_s >= REFUSAL_LOG_INTERVAL_S:
                self._refusal_logged_s = now_s
                log.warning(
                    "ledger_map.changes_unknown",
                    path=refusal.context.get("path"),
                    error=str(refusal),
                    next_step="grant this node read access to the path; until then the change feed "
                    "publishes nothing",
                )
            await stale.wait_change(seen, timeout_s=GAP_CHECK_S)

    async def run(self) -> None:
        """Raises SessionLostError when the session ends."""
        self._recent_writes.forget()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow_root(tasks))
                tasks.create_task(self._scan_what_is_due())
                tasks.create_task(self._read_what_is_stale())
                tasks.create_task(self._try_unreadable_again())
                tasks.create_task(self._try_hidden_again())
        finally:
            for gauge in (LEDGERS, UNREADABLE, CHANGES_WAITING, COMPLETE):
                gauge.set(0)

    def take_touched(self) -> Collection[int]:
        """Return the ledgers that changed since the last call, except those of the first scan."""
        touched, self._touched = self._touched, set()
        return touched

    # --- Events --------------------------------------------------------------------------------

    async def _follow_root(self, tasks: asyncio.TaskGroup) -> None:
        """Follow each tree, and each new one. A watch outlives its tree."""
        if self.manager.layout is Layout.FLAT:  # the root itself: it cannot be watched in two ways
            self._add_tree(self.manager.root, tasks)
            self._is_listed = True
            return
        async with aclosing(self.store.watch(self.manager.root)) as events:
            async for event in events:
                self._is_listing = True
                if event.kind is EventKind.RESET:
                    self._break_counts[self.manager.root] = self.store.break_count
                trees = await self._retrying(self.manager.trees, "the root")
                self.refusal = None
                for tree in trees:
                    if tree not in self._trees:
                        self._add_tree(tree, tasks)
                self._is_listing = False
                if not self._is_listed:
                    self._is_listed = True
                    self._has_due.set()  # there may be no tree at all
                self._stale.tell()

    def _add_tree(self, tree: str, tasks: asyncio.TaskGroup) -> None:
        self._trees[tree] = None
        self._unwatched.add(tree)
        tasks.create_task(self._follow_tree(tree))

    async def _follow_tree(self, tree: str) -> None:
        watch = self.store.watch(tree, is_recursive=True, events_max=EVENTS_MAX)
        async with aclosing(watch) as events:
            async for event in events:
                self._handle(event, tree)

    def _handle(self, event: Event, tree: str) -> None:
        if event.kind is EventKind.RESET:
            self._break_counts[tree] = self.store.break_count
            # Events of later writes may be lost: read all changed ledgers in any case.
            self._stale.zxids = dict.fromkeys(self._stale.zxids, UNTOLD)
            self._scan_soon(tree)
        elif (
            ledger_id := self.manager.layout.ledger_id(self.manager.root, event.path)
        ) is not None:
            self._stale.add(ledger_id, event.zxid)
            if event.kind is EventKind.DELETED:
                self._reader.deleted[ledger_id] = event.zxid
            else:
                self._reader.deleted.pop(ledger_id, None)

    def _scan_soon(self, tree: str) -> None:
        self._unwatched.discard(tree)
        self._due[tree] = None
        self._has_due.set()
        COMPLETE.set(0)

    # --- Scans ------------------------------------------------------------------------------------

    async def _scan_what_is_due(self) -> None:
        while True:
            await self._has_due.wait()
            await self._retrying(self._scan_trees, "all metadata")

    async def _scan_trees(self) -> None:
        """Scan all trees that are due, one after the other. A tree whose scan fails stays due."""
        if self._unwatched or not self._is_listed:
            self._has_due.clear()
            return  # the first trees alone would count as a complete scan
        self.progress = progress = ScanProgress(
            expected_count=len(self.ledger_map), started_s=self.clock.now_s()
        )
        strays: list[str] = []
        try:
            while self._due:
                tree = next(iter(self._due))
                del self._due[tree]
                try:
                    await self._scan_tree(tree, progress, strays)
                except BaseException:
                    self._scan_soon(tree)
                    raise
        finally:
            self.progress = None
        self._has_due.clear()  # also set by trees that became due meanwhile and were scanned
        SCAN_S.observe(self.clock.now_s() - progress.started_s)
        unreadable = sorted(self.ledger_map.unreadable)
        log.info(
            "ledger_map.built",
            unreadable_count=len(unreadable),
            stray_count=len(strays),
            **progress.fields(self.clock.now_s()),
        )
        if unreadable:
            log.error(
                "ledger_map.unreadable_ledgers",
                count=len(unreadable),
                ledger_ids=unreadable[:LOGGED_MAX],
            )
        if strays:
            log.warning("ledger_map.stray_znodes", count=len(strays), paths=strays[:LOGGED_MAX])
        self.completed_count += 1
        self._report_changes([])
        self._stale.tell()

    async def _scan_tree(self, tree: str, progress: ScanProgress, strays: list[str]) -> None:
        """Read all ledgers of a tree into the map, and remove deleted ones. Raises UnavailableError
        if the listing fails."""
        hidden: list[UnauthorizedError] = []
        """The first directories that ACLs hide. Their known ledgers are read like all others that
        are not listed."""
        hidden_count = 0
        waiting: list[int] = []
        """Listed ledgers. A directory may hold thousands of ledgers, or one."""
        unlisted: list[int] = []
        """Ledgers that the map knows and the listing, which is in the order of ids, did not
        contain."""

        def note_hidden(error: UnauthorizedError) -> None:
            nonlocal hidden_count
            hidden_count += 1
            if hidden_count <= HIDDEN_MAX:
                hidden.append(error)

        async def read(part: Sequence[int], *, listed_count: int) -> None:
            self._report_changes(await self._reader.read(part))
            if progress.add(listed_count, now_s=self.clock.now_s()):
                log.info("ledger_map.progressed", **progress.fields(self.clock.now_s()))

        ids = self.manager.layout.ids_below(self.manager.root, tree)
        passed_id = ids.start
        async for listed in self.manager.ledger_ids(
            tree, on_stray=strays.append, on_hidden=note_hidden
        ):
            known = self.ledger_map.ids_in(passed_id, listed[-1] + 1)
            unlisted += sorted(set(known).difference(listed))
            passed_id = listed[-1] + 1
            waiting += listed
            while len(waiting) >= READS_AT_ONCE:
                await read(waiting[:READS_AT_ONCE], listed_count=READS_AT_ONCE)
                del waiting[:READS_AT_ONCE]
        if waiting:
            await read(waiting, listed_count=len(waiting))
        unlisted += self.ledger_map.ids_in(passed_id, ids.stop)
        # A ledger may have been made since its directory was listed (rule S8).
        await self.store.sync(tree)
        for start in range(0, len(unlisted), READS_AT_ONCE):
            await read(unlisted[start : start + READS_AT_ONCE], listed_count=0)
        self._hidden.pop(tree, None)
        if hidden:
            self._hidden[tree] = hidden
            log.warning(
                "ledger_map.access_denied",
                count=hidden_count,
                paths=[each.context["path"] for each in hidden],
                next_step="grant this node read access to these directories (setAcl)",
            )

    # --- Single ledgers ---------------------------------------------------------------------------

    async def _read_what_is_stale(self) -> None:
        """Read changed ledgers. Give way while ``is_urgent``, but not for long: a loss with many
        marks must not stop the map."""
        urgent_since_s: float | None = None
        """Since when ``is_urgent`` was true whenever reads were due."""
        while True:
            await self._stale.is_filled.wait()
            CHANGES_WAITING.set(len(self._stale.zxids))
            if len(self._stale.zxids) < CHANGES_AT_ONCE:
                await self.clock.sleep(self.changes_pause_s)
            while is_urgent := self.is_urgent():
                now_s = self.clock.now_s()
                urgent_since_s = now_s if urgent_since_s is None else urgent_since_s
                if now_s - urgent_since_s >= GIVE_WAY_MAX_S:
                    break
                await self.clock.sleep(GIVE_WAY_CHECK_S)
            if not is_urgent:
                urgent_since_s = None
            await self._retrying(self._read_stale, "ledgers that changed")

    async def _read_stale(self) -> None:
        """Read one part of the changed ledgers, except those that this node wrote and those that
        were read after their change. Further changes meanwhile make them stale again."""
        part = self._stale.take(CHANGES_AT_ONCE)
        own, unread = [], []
        for ledger_id, zxid in part:
            if written := self._recent_writes.take(ledger_id, zxid):
                if self._reader.put(ledger_id, written):
                    own.append(ledger_id)
            elif zxid == UNTOLD or not self.ledger_map.is_known(ledger_id, mzxid=zxid):
                unread.append(ledger_id)
        if own:
            self._report_changes(own)
        try:
            if unread:
                self._report_changes(await self._reader.read(unread))
        except BaseException:
            self._stale.put_back(unread)
            raise
        self._stale.read_count += len(part)
        self._stale.tell()
        CHANGES_WAITING.set(len(self._stale.zxids))

    async def _try_unreadable_again(self) -> None:
        while True:
            await self.clock.sleep(UNREADABLE_AGAIN_S)
            self.read_again(self.ledger_map.unreadable)

    async def _try_hidden_again(self) -> None:
        """Scan a tree again when an ACL has opened one of its hidden directories. The rest of the
        tree was read, which is expensive to repeat."""
        while True:
            await self.clock.sleep(HIDDEN_AGAIN_S)
            for tree, denied in list(self._hidden.items()):
                for error in denied:
                    with suppress(*READ_FAILED):
                        await children_if_any(self.store, str(error.context["path"]))
                        self._scan_soon(tree)

    async def _retrying(self, read: Callable[[], Awaitable[T]], what: str) -> T:
        """Repeat ``read`` until it succeeds, and return its result. The map stays in use."""

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
            clock=self.clock,
            errors=READ_FAILED,
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
        CHANGES_WAITING.set(len(self._stale.zxids))
        COMPLETE.set(self.is_complete)
        self._notify_change()


class StaleLedgers(Changing):
    """Changed ledgers, in the order of their first event, each with the zxid of its last write.
    UNTOLD: read the ledger in any case.

    ``added_count`` and ``read_count`` count ledgers that were added and read. All ledgers that were
    in the queue at some time have been read when ``read_count`` reaches the ``added_count`` of that
    time. Reports a change when ledgers have been read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.added_count = self.read_count = self.failure_count = 0
        self.zxids: dict[int, int] = {}
        self.is_filled = asyncio.Event()

    def add(self, ledger_id: int, zxid: int) -> None:
        """Add a ledger. A ledger that is in the queue keeps its place."""
        self.added_count += ledger_id not in self.zxids
        self.zxids[ledger_id] = zxid
        self.is_filled.set()

    def take(self, count_max: int) -> list[tuple[int, int]]:
        """Remove the first ledgers. The caller adds to ``read_count`` when they are read."""
        part = list(islice(self.zxids.items(), count_max))
        for ledger_id, _ in part:
            del self.zxids[ledger_id]
        if not self.zxids:
            self.is_filled.clear()
        return part

    def put_back(self, ledger_ids: Collection[int]) -> None:
        """Return ledgers to the head of the queue that could not be read. Counts that were taken
        before say nothing any more: ``failure_count`` grows."""
        again = dict.fromkeys(ledger_ids, UNTOLD)
        self.failure_count += 1
        self.zxids = again | {i: zxid for i, zxid in self.zxids.items() if i not in again}
        self.read_count = self.added_count - len(self.zxids)
        if self.zxids:
            self.is_filled.set()
        self.tell()

    def tell(self) -> None:
        """Wake the tasks that wait for changes."""
        self._notify_change()


class LedgerMapReader:
    """Reads metadata into ``ledger_map``, many ledgers at a time.

    A deleted ledger is removed from the map; one that cannot be read is put in as unreadable. Only
    one part is read at a time, so that an earlier read never undoes a removal.
    """

    def __init__(self, store: MetadataStore, manager: LedgerManager, ledger_map: LedgerMap) -> None:
        self._store, self._manager, self._ledger_map = store, manager, ledger_map
        self._reading = asyncio.Lock()
        self.observer: LedgerMapObserver | None = None
        self.deleted: dict[int, int] = {}
        """The zxid of the deletion, for ledgers whose last event was a deletion."""

    async def read(self, ledger_ids: Sequence[int]) -> list[int]:
        """Read these ledgers. Return those whose entry in the map has changed. Raises
        UnavailableError, and SessionLostError if ZooKeeper was restored from a backup."""
        async with self._reading:
            found = await self._find(ledger_ids)
            # Our own write may have been put meanwhile, so they are read again. Otherwise ZooKeeper
            # never goes back within a session, and all that was learnt in this one may be wrong.
            older = self._older(ledger_ids, found)
            if older and (older := self._older(older, await self._find(older))):
                raise SessionLostError(
                    "ZooKeeper was restored from a backup while this session lived",
                    ledger_ids=older[:LOGGED_MAX],
                )
            changed: list[int] = []
            for start in range(0, len(found), APPLIED_AT_ONCE):
                if start:
                    await asyncio.sleep(0)
                stop = start + APPLIED_AT_ONCE
                changed += [
                    ledger_id
                    for ledger_id, result in zip(
                        ledger_ids[start:stop], found[start:stop], strict=True
                    )
                    if self._apply(ledger_id, result)
                ]
            return changed

    def put(self, ledger_id: int, written: VersionedMetadata) -> bool:
        """Store metadata that this node wrote. Return True if it is new."""
        self._tell_read(ledger_id, written.stat, written.data)
        return self._ledger_map.put(ledger_id, written.metadata, written.stat)

    async def _find(self, ledger_ids: Sequence[int]) -> list[tuple[bytes, Stat | None] | None]:
        """Return bytes and stat of each ledger. If ACLs deny access, the bytes are empty and the
        stat may be None. None stands for a deleted ledger."""
        paths = list(map(self._manager.path, ledger_ids))
        results = await self._store.get_each(paths)
        refused = [
            path
            for path, each in zip(paths, results, strict=True)
            if isinstance(each, UnauthorizedError)
        ]
        stats = await asyncio.gather(*map(self._find_refused, refused))
        of_refused = dict(zip(refused, stats, strict=True))
        return [
            result if isinstance(result, tuple) else of_refused.get(path)
            for path, result in zip(paths, results, strict=True)
        ]

    async def _find_refused(self, path: str) -> tuple[bytes, Stat | None] | None:
        """Return what ACLs do not hide of a ledger whose metadata they hide."""
        try:
            stat = await self._store.exists(path)
        except UnauthorizedError:  # servers from 3.9.5 on; of a deleted znode they say so
            return b"", None
        return None if stat is None else (b"", stat)

    def _older(
        self, ledger_ids: Sequence[int], found: Sequence[tuple[bytes, Stat | None] | None]
    ) -> list[int]:
        """Return the ledgers that were read in an older state than the map has."""
        mzxid = self._ledger_map.mzxid
        return [
            ledger_id
            for ledger_id, result in zip(ledger_ids, found, strict=True)
            if result is not None and result[1] is not None and result[1].mzxid < mzxid(ledger_id)
        ]

    def _apply(self, ledger_id: int, found: tuple[bytes, Stat | None] | None) -> bool:
        if found is None:
            has_event = ledger_id in self.deleted  # so it existed, perhaps for a moment only
            zxid = self.deleted.pop(ledger_id, UNTOLD)
            if self.observer is not None and (has_event or ledger_id in self._ledger_map):
                before = self._ledger_map.mzxid(ledger_id)
                self.observer.ledger_removed(
                    ledger_id, before=before, zxid=zxid if zxid > before else UNTOLD
                )
            return self._ledger_map.remove(ledger_id)
        data, stat = found
        if stat is None:
            return self._ledger_map.put_unreadable(ledger_id, None)
        self._tell_read(ledger_id, stat, data)
        if self._ledger_map.is_known(ledger_id, mzxid=stat.mzxid):  # the usual case in a rescan
            return False
        try:
            return self._ledger_map.put(ledger_id, parse_outline(data), stat)
        except CorruptionError:
            return self._ledger_map.put_unreadable(ledger_id, stat)

    def _tell_read(self, ledger_id: int, stat: Stat, data: bytes) -> None:
        if self.observer is not None:
            before = self._ledger_map.mzxid(ledger_id)
            self.observer.ledger_read(ledger_id, before=before, stat=stat, data=data)


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

    def fields(self, now_s: float) -> dict[str, object]:
        """Return the fields of a log event."""
        duration_s = now_s - self.started_s
        return {
            "ledger_count": self.read_count,
            "expected_count": self.expected_count or None,
            "ledgers_per_s": round(self.read_count / max(duration_s, 0.001)),
            "duration_s": round(duration_s, 3),
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


@dataclass
class LedgerMapReporter:
    """Records when the map becomes complete or incomplete, and regularly during a scan."""

    updater: LedgerMapUpdater
    write: Callable[[LedgerMapRecord], Awaitable[None]]
    _: KW_ONLY
    session_id: int
    _written: LedgerMapRecord | None = field(default=None, init=False)

    async def run(self) -> None:
        """Run until cancelled. Raises SessionLostError or LeadershipLostError."""
        while True:
            try:
                await self.run_once()
            except UnavailableError as error:  # not essential: the next write contains everything
                log.warning("ledger_map.record_write_failed", error=str(error))
            await self.updater.clock.sleep(LOOK_S)

    async def run_once(self) -> None:
        """Write if something has changed."""
        updater, progress, before = self.updater, self.updater.progress, self._written
        record = LedgerMapRecord(
            session_id=self.session_id,
            written_ms=self.updater.clock.wall_ms(),
            is_complete=updater.is_complete,
            ledger_count=len(updater.ledger_map),
            unreadable_count=updater.ledger_map.unreadable_count,
            read_count=progress.read_count if progress else 0,
            expected_count=progress.expected_count if progress else 0,
            hidden=() if progress else tuple(updater.hidden),
        )
        if before and (before.is_complete, before.hidden) == (record.is_complete, record.hidden):
            is_early = record.written_ms - before.written_ms < WRITE_INTERVAL_S * 1000
            if is_early or record.is_complete or record.hidden:
                return
        await self.write(record)
        self._written = record


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerMapRecord(Record):
    """Progress of a ledger map. ``session_id``: of the leader that owns the map. ``written_ms``:
    wall clock. ``read_count``: ledgers read by the current scan, of about ``expected_count``; 0:
    unknown. ``hidden``: the first directories that ACLs hide; empty during a scan."""

    session_id: int
    written_ms: TimeMs
    is_complete: bool
    ledger_count: Count
    unreadable_count: Count = 0
    read_count: Count = 0
    expected_count: Count = 0
    hidden: tuple[str, ...] = ()
