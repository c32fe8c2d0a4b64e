"""The cluster of every bench of metadata: a ZooKeeper whose ledgers and bookies are only znodes.

The number of ledgers only grows: each size adds ledgers to those of the last size. Each size has a
victim of its own, a bookie that a share of the new ledgers names.
"""

import random
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from daemon.local.java import Java
from daemon.local.processes import Child
from daemon.local.servers import Servers, zookeeper_monitor
from daemon.local.spec import ClusterSpec
from ledgers.errors import NodeExistsError
from ledgers.model import BookieId, LedgerMetadata, Segment
from ledgers.store import ANY_VERSION, Create, SetData, Stat
from ledgers.zookeeper.store import ZooKeeperStore
from tests.znode_cluster import PATHS, ZnodeCluster, bookie, closed
from tests.zookeeper_server import ZooKeeperServer, running_zookeeper

BOOKIE_COUNT = 50
"""Number of bookies beside the victims. Ensembles are drawn from them, so few ledgers share one."""
VICTIM_LEDGERS_MAX = 1_000
VICTIM_SHARE_MAX = 10
"""At most one in this number of new ledgers names the victim; fewer if there are few ledgers."""
CHANGED_ENSEMBLE_SHARE = 0.02
SESSION_TIMEOUT_S = 60.0
ZOOKEEPER_HEAP_MIB = 3_072
ZOOKEEPER_FLAGS = ("-XX:TieredStopAtLevel=4", "-XX:ReservedCodeCacheSize=240m")
"""The memory and compiler that an operator would give."""
GONE = "/bench-gone"
"""Written in the same multi as the end of a bookie's znode, to learn the server's time of it."""
SEED = 5
PULSAR_BOOKIES = [
    BookieId(f"pulsar-bookie-{i}.bookie.pulsar.svc.cluster.local") for i in range(BOOKIE_COUNT)
]
"""As long as the ids of bookies on Kubernetes. Without a port they are no names to look up."""
FIRST_PULSAR_ID = 30_000_000
"""Far above the ids that the id generator gives to the ledgers of the feed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A bookie that is going to be lost, and the ids of the ledgers that name it, ascending."""

    bookie: BookieId
    ledger_ids: tuple[int, ...]


@dataclass(slots=True)
class Field:
    """The cluster, with what daemons need to start and what the bench does."""

    server: ZooKeeperServer
    store: ZooKeeperStore
    data: Path
    size: int = 0
    """Number of ledgers."""
    _victims: list[Victim] = field(default_factory=list)
    _rng: random.Random = field(default_factory=lambda: random.Random(SEED))

    # --- For daemons ------------------------------------------------------------------------------

    @property
    def metadata_service_uri(self) -> str:
        return self._spec.metadata_service_uri

    @property
    def logs(self) -> Path:
        return self.data / "logs"

    def start_autorecovery(self, name: str, *, settings: Mapping[str, str]) -> Child:
        servers = Servers(data=self.data, java=Java.find())
        return servers.autorecovery(self._spec, name, port=1, settings=settings)

    @property
    def _spec(self) -> ClusterSpec:
        return ClusterSpec(zookeeper_port=self.server.port, bookie_ports=(), session_timeout_s=4.0)

    # --- For the bench ----------------------------------------------------------------------------

    @property
    def cluster(self) -> ZnodeCluster:
        return ZnodeCluster(self.store)

    @property
    def zookeeper_pid(self) -> int:
        return self.server.process.pid

    def packets(self) -> int:
        """Return the packets that ZooKeeper has received so far, without this process's own
        requests."""
        received = int(zookeeper_monitor(self.server.port)["zk_packets_received"])
        return received - self.store.request_count

    async def format(self) -> None:
        await self.cluster.format()
        await self.cluster.add_bookies(map(bookie, range(BOOKIE_COUNT)))
        await self.store.create(GONE)

    async def grow(self, size: int) -> Victim:
        """Add ledgers up to this number, and return the victim of this size.

        The victim's ledgers are locked as if other workers repaired them. Otherwise the contender
        would try to repair the ledgers that it marks, on bookies that do not exist.
        """
        new = range(self.size, size)
        victim_count = min(VICTIM_LEDGERS_MAX, len(new) // VICTIM_SHARE_MAX)
        victim = Victim(
            bookie=bookie(BOOKIE_COUNT + len(self._victims)),
            ledger_ids=tuple(new[:: len(new) // victim_count][:victim_count]),
        )
        self._victims.append(victim)
        await self.cluster.add_bookies([victim.bookie])
        await self.cluster.create_ledgers(drawn_ledgers(self._rng, new, victim))
        locks = (PATHS.lock(ledger_id) for ledger_id in victim.ledger_ids)
        await self.cluster.send(Create(path=path) for path in locks)
        self.size = size
        return victim

    async def lose(self, victim: Victim) -> int:
        """Delete the victim's znode and return the time of that, in milliseconds of the server."""
        gone = SetData(path=GONE, data=b"", version=ANY_VERSION)
        _, stat = await self.store.multi([self.cluster.deregistration(victim.bookie), gone])
        assert isinstance(stat, Stat), stat
        return stat.mtime_ms

    async def restore(self, victim: Victim) -> None:
        """Undo the loss of the victim."""
        with suppress(NodeExistsError):
            await self.cluster.register(victim.bookie)
        await self.cluster.delete_marks()


def drawn_ledgers(
    rng: random.Random, ledger_ids: range, victim: Victim
) -> Iterator[tuple[int, LedgerMetadata]]:
    """Yield closed ledgers, a few of them with a second ensemble."""
    bookies = [bookie(number) for number in range(BOOKIE_COUNT)]
    of_victim = frozenset(victim.ledger_ids)
    for ledger_id in ledger_ids:
        first, second, third, other = rng.sample(bookies, 4)
        if ledger_id in of_victim:
            first = victim.bookie
        metadata = closed(first, second, third, length=rng.randrange(2**31))
        if rng.random() < CHANGED_ENSEMBLE_SHARE:
            changed = Segment(first_entry_id=500, ensemble=(first, other, third))
            metadata = metadata.with_segment(changed)
        yield ledger_id, metadata


def pulsar_ledgers(count: int) -> Iterator[tuple[int, LedgerMetadata]]:
    """Yield ledgers of topics and of their subscriptions, with the properties that Pulsar's managed
    ledger writes."""
    rng = random.Random(SEED)
    for ledger_id in range(FIRST_PULSAR_ID, FIRST_PULSAR_ID + count):
        topic = rng.randrange(count // 10 + 1)
        name = f"tenant-{topic % 20}/namespace-{topic % 200}/persistent/topic-{topic}-partition-0"
        properties = {"component": "managed-ledger", "pulsar/managed-ledger": name}
        if rng.random() < 0.3:
            properties["pulsar/cursor"] = f"subscription-{rng.randrange(5)}"
        properties["application"] = "pulsar"
        metadata = replace(
            closed(*rng.sample(PULSAR_BOOKIES, 3), length=rng.randrange(2**31)),
            last_entry_id=rng.randrange(50_000),
            ctime_ms=1_700_000_000_000 + ledger_id * 1_000 + rng.randrange(1_000),
            custom=tuple((key, value.encode()) for key, value in properties.items()),
        )
        yield ledger_id, metadata


@asynccontextmanager
async def open_field() -> AsyncIterator[Field]:
    """Open a new field without ledgers."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-znodes-") as folder,
        running_zookeeper(
            Path(folder), heap_mib=ZOOKEEPER_HEAP_MIB, flags=ZOOKEEPER_FLAGS
        ) as server,
    ):
        store = await ZooKeeperStore.open(server.address, session_timeout_s=SESSION_TIMEOUT_S)
        try:
            opened = Field(server=server, store=store, data=Path(folder))
            await opened.format()
            yield opened
        finally:
            await store.close()
