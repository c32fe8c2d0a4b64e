"""Enables auto-recovery again when the time of ``bookmender disable --for`` is over.

Only the leader does. One transaction deletes the order and the disable znode, each at the version
that belongs to the other, so an order to disable that was given since stays in force.
"""

from dataclasses import dataclass

import structlog

from ledgers.clock import Clock
from ledgers.errors import UnauthorizedError, UnavailableError
from ledgers.store import Delete, MetadataStore, MultiFailed
from replication.history import NO_HISTORY, Event, History, Kind
from replication.orders import OrderStore, disable_end_znode
from replication.transactions import Batcher
from replication.znodes import ClusterPaths

log = structlog.get_logger()

LOOK_S = 5.0


@dataclass(kw_only=True)
class DisableEnd:
    """``batcher``: its guards prove the leadership (rule S9)."""

    store: MetadataStore
    batcher: Batcher
    paths: ClusterPaths
    clock: Clock
    history: History = NO_HISTORY

    def __post_init__(self) -> None:
        self._orders = OrderStore(self.store, self.paths)

    async def run(self) -> None:
        """Look until cancelled. Raises SessionLostError or LeadershipLostError."""
        while True:
            try:
                await self.run_once()
            except (UnavailableError, UnauthorizedError) as error:
                log.warning("disable.end_failed", error=str(error), retry_s=LOOK_S)
            await self.clock.sleep(LOOK_S)

    async def run_once(self) -> None:
        """End the switch if its time is over. Remove an order whose switch is gone."""
        znode = disable_end_znode(self.paths)
        stored = await self._orders.stored(znode)
        if stored is None or (order := stored.value) is None:
            return
        disabled = await self.store.exists(self.paths.disable)
        is_its_own = disabled is not None and disabled.version == order.version
        if is_its_own and self.clock.wall_ms() < order.until_ms:
            return
        operations = [Delete(path=znode.path, version=stored.version)]
        if is_its_own:
            operations.append(Delete(path=self.paths.disable, version=order.version))
        try:
            await self.batcher.send(operations)
        except MultiFailed:
            return  # another client changed one of them: look again later
        if is_its_own:
            log.info("disable.ended", until_ms=order.until_ms)
            reason = "the time of the order to disable is over"
            self.history.record(Event(kind=Kind.ORDER, order="enable", reason=reason))
