"""Building the index, and keeping it true: one walk over all metadata, then what the watch tells.

A ledger that was created, changed or deleted is read again, unless this node wrote what the event
tells of; after a reconnection, which may have swallowed events, all of them are. One unreadable
ledger stops nothing, and is tried again from time to time.

The ledgers root holds marks, locks and lists of bookies as well, and of these a repair changes
many. So there is a watch for each directory of ledgers right below it (a *tree*), and one for the
root's own children. What is scanned is a tree: where the walk breaks off, that tree is scanned
again, and the index stays in use as it was.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import aclosing, suppress
from typing import TypeVar

import structlog
from prometheus_client import Gauge

from auditor.index.ledger_index import LedgerIndex
from auditor.index.own_writes import OwnWrites
from auditor.index.progress import ScanProgress
from auditor.index.reader import READS_AT_ONCE, IndexReader
from auditor.index.tree_scan import TreeScan
from ledgers.answers import until_answered
from ledgers.changing import Changing
from ledgers.clock import Clock
from ledgers.errors import (
    BookmenderError,
    UnauthorizedError,
    UnavailableError,
    UnsupportedError,
)
from ledgers.formats.layout import Layout
from ledgers.manager import LedgerManager
from ledgers.operations.tasks import wait_woken
from ledgers.store import UNTOLD, Event, EventKind, MetadataStore

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


class IndexKeeper(Changing):
    """``index`` is what it keeps; it changes with it, and with every completed scan.

    ``run`` ends by cancellation or with the session.
    """

    def __init__(
        self,
        *,
        store: MetadataStore,
        manager: LedgerManager,
        clock: Clock,
        rescan_interval_s: float,
        own_writes: OwnWrites | None = None,
    ) -> None:
        """``rescan_interval_s``: between two scans where the server does not tell what changed.
        ``own_writes``: of whoever writes metadata beside this, if anybody does."""
        super().__init__()
        self._store = store
        self._manager = manager
        self._clock = clock
        self._rescan_interval_s = rescan_interval_s
        self._own_writes = own_writes or OwnWrites()
        self.index = LedgerIndex()
        self.completed_count = 0
        """Grows when all of the index is to be looked at: all that can be read was read, or more
        was touched than is remembered. 0 means that the index is still being built."""
        self.refusal: UnauthorizedError | None = None
        """Why no scan can be completed: what ACLs shut away. It is tried again, and again."""
        self.progress: ScanProgress | None = None
        """Of the scan that is under way."""
        self._reader = IndexReader(store, manager, self.index)
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
        self._own_writes.forget()
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
                "index.untold",
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
                if len(self.index) and not is_second_try:
                    self._count_scan()  # what can be read was read: whoever is named there is to be seen to
                is_second_try = await self._wait_opened(error)
            else:
                is_second_try = False

    async def _wait_opened(self, error: UnauthorizedError) -> bool:
        """All else of the tree was read, which is dear: it is due again when something else is
        (False), or after a while."""
        retry_s = UNREADABLE_AGAIN_S if self._is_told else self._rescan_interval_s
        log.warning("index.shut_away", error=str(error), retry_s=retry_s)
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
            expected_count=len(self.index), started_s=self._clock.now_s()
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
            self.index,
            tree=tree,
            on_stray=strays.append,
        )
        async for read_count, changed in scan.run():
            self._tell(changed)
            if progress.add(read_count, now_s=self._clock.now_s()):
                log.info("index.progress", **progress.fields(self._clock.now_s()))

    def _report(self, progress: ScanProgress, strays: list[str]) -> None:
        unreadable = sorted(self.index.unreadable)
        log.info(
            "index.built",
            unreadable_count=len(unreadable),
            stray_count=len(strays),
            **progress.fields(self._clock.now_s()),
        )
        if unreadable:
            log.error(
                "index.unreadable_ledgers",
                count=len(unreadable),
                ledger_ids=unreadable[:LOGGED_MAX],
                next_step="bookmender ledger show ID says what is wrong with one",
            )
        if strays:
            log.warning("index.stray_znodes", count=len(strays), paths=strays[:LOGGED_MAX])

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
            if written := self._own_writes.take(ledger_id, zxid):
                if self.index.put(ledger_id, written.metadata, written.stat):
                    changed.append(ledger_id)
            elif zxid == UNTOLD or not self.index.is_known(ledger_id, mzxid=zxid):
                unread.append(ledger_id)
        if changed:
            self._tell(changed)
        return unread

    async def _try_unreadable_again(self) -> None:
        while True:
            await self._clock.sleep(UNREADABLE_AGAIN_S)
            if self.index.unreadable:
                self._stale |= dict.fromkeys(self.index.unreadable, UNTOLD)
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
        LEDGERS.set(len(self.index))
        UNREADABLE.set(self.index.unreadable_count)
        self._tell_change()
