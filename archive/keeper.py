"""Archives on one node of the cluster while an operator has ordered it.

Each node that stands for election runs ``keep_archive``. The node that creates the znode
``archiver`` archives, until its session ends. The leader lets the others go first, because it has
other work.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

import structlog

from archive.archiver import Archiver, InThread
from archive.order import ArchiveOrder, ArchiveState, put, read_order, read_state
from archive.places import Place, open_place
from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.errors import (
    BookmenderError,
    NodeExistsError,
    SessionLostError,
    UnavailableError,
)
from ledgers.manager import LedgerManager
from ledgers.store import MetadataStore
from ledgers.tasks import in_daemon_thread
from replication.znodes import ClusterPaths, ensure_znode

log = structlog.get_logger()

CHECK_S = 5.0
"""How often the order is read, and the state written."""
LEADER_WAITS_S = 20.0
RETRY_S = 10.0


class OrderChangedError(BookmenderError):
    """The order was changed or withdrawn."""


@dataclass(kw_only=True)
class ArchiveKeeper:
    """The part of one session. ``leads``: returns True while this node leads."""

    store: MetadataStore
    manager: LedgerManager
    paths: ClusterPaths
    clock: Clock
    node: str
    leads: Callable[[], bool]
    open_bookies: Callable[[], AbstractAsyncContextManager[Bookies]]
    place_of: Callable[[str], Place] = open_place
    in_thread: InThread = in_daemon_thread
    _checked_s: float = field(default=0.0, init=False)
    _logged: str = field(default="", init=False)

    async def run(self) -> None:
        """Run until cancelled. Raises SessionLostError."""
        while True:
            try:
                if await self._order() and not await self.store.exists(self.paths.archiver):
                    if self.leads():
                        await self.clock.sleep(LEADER_WAITS_S)
                    async with self._chosen() as is_chosen:
                        while is_chosen and (order := await self._order()) is not None:
                            await self._archive(order)
            except SessionLostError:
                raise
            except BookmenderError as error:  # of ZooKeeper
                log.warning("archive.failed", error=str(error))
            await self.clock.sleep(CHECK_S)

    async def _order(self) -> ArchiveOrder | None:
        return (await read_order(self.store, self.paths)).value

    @asynccontextmanager
    async def _chosen(self) -> AsyncIterator[bool]:
        """Create the znode that says who archives, for the block. Yields False if another node was
        faster."""
        await ensure_znode(self.store, self.paths.feed_watchers)
        try:
            await self.store.create(self.paths.archiver, self.node.encode(), is_ephemeral=True)
        except NodeExistsError:
            yield False
            return
        try:
            yield True
        finally:
            with suppress(BookmenderError):
                await self.store.delete(self.paths.archiver)

    async def _archive(self, order: ArchiveOrder) -> None:
        """Archive until the order changes, or for one try that fails."""
        archiver: Archiver | None = None
        known = await read_state(self.store, self.paths, order)

        async def check() -> None:
            if self.clock.now_s() - self._checked_s < CHECK_S:
                return
            self._checked_s = self.clock.now_s()
            await self._write_state(order, known, archiver)
            if await self._order() != order:
                raise OrderChangedError("the order to archive was changed")

        try:
            place = await self.in_thread(lambda: self.place_of(order.url))
            async with self.open_bookies() as bookies:
                archiver = Archiver(
                    store=self.store,
                    manager=self.manager,
                    bookies=bookies,
                    clock=self.clock,
                    place=place,
                    known_number=known.number if known else 0,
                    includes=order.includes,
                    retention_s=order.retention_s,
                    base_ordered_ms=order.base_ordered_ms,
                    on_round=check,
                    in_thread=self.in_thread,
                )
                await archiver.run()
        except SessionLostError:
            raise
        except OrderChangedError:
            pass
        except (BookmenderError, BaseExceptionGroup) as error:
            if isinstance(error, BaseExceptionGroup) and error.subgroup(SessionLostError):
                raise
            await self._write_state(order, known, archiver, error=str(error))
            await self.clock.sleep(RETRY_S)

    async def _write_state(
        self,
        order: ArchiveOrder,
        known: ArchiveState | None,
        archiver: Archiver | None,
        *,
        error: str = "",
    ) -> None:
        """Write how far the archive is. ``known``: what was known before this try, and still holds
        if it failed early."""
        if error and error != self._logged:
            log.error(
                "archive.stalled", error=error, next_step="make sure that this node can write there"
            )
        self._logged = error
        state = replace(
            known or ArchiveState(url=order.url, node="", written_ms=0),
            node=self.node,
            written_ms=self.clock.wall_ms(),
            error=error,
        )
        if archiver is not None and archiver.number:
            state = replace(
                state,
                archived_ms=archiver.restorable_ms,
                number=archiver.number,
                denied_count=archiver.denied_count,
            )
        with suppress(UnavailableError):
            await put(self.store, self.paths.archive_state, state)
