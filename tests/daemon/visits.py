"""Gives a command access to a cluster in memory."""

from dataclasses import dataclass, field

from daemon.admin_session import AdminSession
from daemon.operations.drains import order_drains
from daemon.operations.queue import QueuedLedgerRecord, queue_rows
from daemon.settings import Settings
from ledgers.codec.layout import Layout
from ledgers.manager import LedgerManager
from ledgers.model import BookieId
from ledgers.registration import Registration
from replication.marks import read_marks
from tests.memory.store import MemoryStore
from tests.replication.cluster import Cluster
from tests.replication.nodes import PATHS, ROOT


def visiting(cluster: Cluster) -> AdminSession:
    """Return an admin session of its own on the cluster."""
    store = MemoryStore(cluster.tree)
    return AdminSession(
        settings=Settings(metadata_service_uri=f"zk+hierarchical://zk:2181{ROOT}"),
        store=store,
        manager=LedgerManager(store, ROOT, Layout.HIERARCHICAL),
        registration=Registration(store, ROOT),
    )


@dataclass(slots=True)
class Heard:
    """Records what a long command reports while it waits."""

    told: list[str] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)

    def tell(self, text: str) -> None:
        self.told.append(text)

    def show(self, left: int, *, waiting: int = 0, beside: str = "") -> None:
        self.left.append(left)
        self.waiting.append(waiting)
        self.beside.append(beside)


async def order_drain(cluster: Cluster, *bookies: BookieId, may_fence: bool | None = None) -> None:
    await order_drains(visiting(cluster), bookies, may_fence=may_fence, clock=cluster.clock)


async def rows_of(cluster: Cluster, *ledger_ids: int) -> list[QueuedLedgerRecord]:
    """Return the rows of ``queue``."""
    marked = await read_marks(cluster.store, PATHS, ledger_ids)
    return await queue_rows(visiting(cluster), marked, only_private=())
