"""A repair whose metadata write is recorded, and a session that restores it: for the tests of
restoring."""

import random

from ledgers.codec.layout import Layout
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.registration import Registration
from replication.by_hand import Restorer, Restoring
from replication.cluster import ViewSource
from replication.inspection import Inspector
from replication.journal import JournalRecord
from replication.marks import marked_ledger_ids
from replication.nodes import Membership
from replication.orders import OrderStore
from tests.memory.store import MemoryStore
from tests.replication.cluster import DIGEST, Cluster
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER, PATHS, ROOT, node_info
from tests.replication.repairs import repair

PRIVATE = PATHS.private
HERE = "the cluster's instance id"


class Undoing:
    """A cluster whose repairs are recorded, and an operator's session that restores metadata."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.records: list[JournalRecord] = []
        self.store = MemoryStore(cluster.tree)
        self.manager = LedgerManager(
            self.store, root=ROOT, layout=Layout.HIERARCHICAL, journal=self.journal
        )

    async def journal(self, ledger_id: int, before: bytes, after: bytes) -> None:
        self.records.append(
            JournalRecord(
                time_ms=len(self.records),
                ledger_id=ledger_id,
                before=before,
                after=after,
                cluster=HERE,
            )
        )

    async def restorer(self) -> Restorer:
        views = ViewSource(
            Registration(self.store, ROOT), self.cluster.clock, OrderStore(self.store, PATHS)
        )
        return Restorer(
            store=self.store,
            manager=self.manager,
            inspector=Inspector(
                manager=self.manager,
                bookies=self.cluster.bookies,
                clock=self.cluster.clock,
                rng=random.Random(0),
                fallback_digest=DIGEST,
            ),
            view=await views.refresh(),
            paths=PATHS,
            cluster=HERE,
            clock=self.cluster.clock,
            tell=lambda text: None,
        )

    async def undo(self, record: JournalRecord, *, is_forced: bool = False) -> Restoring:
        membership = await Membership.join(self.store, PATHS, node_info("operator"))
        return await (await self.restorer()).restore(
            record, session=membership.guard.check, holder="operator", is_forced=is_forced
        )

    async def own_marks(self) -> list[int]:
        found = await marked_ledger_ids(self.cluster.store, PRIVATE)
        return [i for i in found if await self.store.exists(PRIVATE.mark(i))]

    async def is_unmarked(self) -> bool:
        return await self.own_marks() == []

    async def read(self) -> VersionedMetadata:
        return await self.cluster.manager.read(LEDGER)


async def repaired() -> Undoing:
    """Return a cluster on whose ledger B2 was replaced; B2 is back with all its entries."""
    cluster = await Cluster.start()
    undoing = Undoing(cluster)
    await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)
    await repair(cluster, local=B4, journal=undoing.journal)
    await cluster.revive(B2)
    return undoing
