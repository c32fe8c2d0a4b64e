"""A leader's periodic checks, put together as the daemon does, on a cluster in memory."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from auditor.checks.base import Check, Reports
from auditor.checks.copies import AllLedgersCheck, CopyReader, ReplicasCheck
from auditor.checks.records import (
    ALL_LEDGERS,
    PLACEMENT,
    REPLICAS,
    CheckKind,
    CheckRecord,
    CheckRecords,
    CheckRun,
    last_run_ms,
    read_check,
)
from auditor.checks.runner import CheckRunner
from auditor.election import Election
from auditor.findings import Findings
from auditor.ledger_map import LedgerMap
from auditor.marker import BothQueues
from auditor.settings import ChecksSettings
from ledgers.bookies import Bookies
from ledgers.codec.layout import Layout
from ledgers.errors import CorruptionError
from ledgers.health import Quarantine, QuarantiningBookies
from ledgers.manager import LedgerManager
from ledgers.memory.store import MemoryStore
from ledgers.model import BookieId
from ledgers.registration import Registration
from replication import znodes
from replication.cluster import ViewSource
from replication.marks import MarkTree
from replication.nodes import Membership, Role
from replication.orders import OrderStore
from replication.transactions import Batcher
from replication.znodes import Audit
from tests.auditor.scenes import with_ledgers
from tests.replication.cluster import DIGEST, Cluster
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import PATHS, ROOT, node_info

HOURLY = CheckKind(
    name="hourly",
    about="a check of the tests",
    audit=Audit.ALL_LEDGERS,
    interval_of=lambda settings: settings.all_ledgers_interval_s,
)

HOUR_S = 3_600
HOURS = ChecksSettings(
    all_ledgers_interval_s=HOUR_S, replicas_interval_s=HOUR_S, placement_interval_s=HOUR_S
)
NEVER = replace(HOURS, all_ledgers_interval_s=0)
JAVAS_CHECKS = {
    ALL_LEDGERS: "testInitialDelayOfCheckAllLedgers",
    PLACEMENT: "testInitialDelayOfPlacementPolicyCheck",
    REPLICAS: "testInitialDelayOfReplicasCheck",
}
"""The checks that Java knows, and its tests of when each is due."""
LEDGERS = 5


class CountingCheck(Check):
    """Takes ``part_s`` for a part, or a look, and remembers what it looked at, as it did so."""

    def __init__(
        self,
        kind: CheckKind = HOURLY,
        *,
        part_size: int = 2,
        look_size: int | None = None,
        part_s: float = 1.0,
    ) -> None:
        self.kind = kind
        self.part_size = part_size
        self.look_size = look_size
        self.part_s = part_s
        self.looked_at: list[int] = []
        self.started_at: list[int] = []
        """Cursors at which runs began, or went on."""
        self.finished_count = 0
        self.before: Callable[[Sequence[int]], Awaitable[None]] | None = None
        """Called before a part; may raise."""

    async def begin(self, run: CheckRun) -> None:
        self.started_at.append(run.cursor)

    async def look_at(self, ledger_ids: Sequence[int]) -> Counter[str]:
        if self.before is not None:
            await self.before(ledger_ids)
        await asyncio.sleep(self.part_s)
        self.looked_at += ledger_ids
        return Counter(even=sum(ledger_id % 2 == 0 for ledger_id in ledger_ids))

    async def finish(self, run: CheckRun) -> None:
        self.finished_count += 1


@dataclass(slots=True, kw_only=True)
class Checker:
    """An elected node's checks. ``is_audit_pending``, ``is_index_ready``: as the test likes."""

    store: MemoryStore
    views: ViewSource
    ledger_map: LedgerMap
    runner: CheckRunner
    all_ledgers: AllLedgersCheck
    replicas: ReplicasCheck
    findings: Findings
    is_audit_pending: bool = False
    is_index_ready: bool = True
    tasks: "list[asyncio.Task[None]]" = field(default_factory=list)


@asynccontextmanager
async def checker(
    cluster: Cluster,
    *checks: Check,
    name: str = "node-1",
    settings: ChecksSettings | None = None,
    bookies: Bookies | None = None,
    entry_lists: bool = False,
) -> AsyncIterator[Checker]:
    """Won its election, knows every ledger; ``runner`` has ``checks`` and does not run yet."""
    settings = settings or ChecksSettings()
    store = MemoryStore(cluster.tree)
    beside: list[asyncio.Task[None]] = []
    try:
        views = ViewSource(Registration(store, ROOT), cluster.clock, OrderStore(store, PATHS))
        await views.refresh()
        membership = await Membership.join(store, PATHS, node_info(name, Role.AUDITOR))
        leadership = await Election(
            store, PATHS, membership, candidate=name, clock=cluster.clock
        ).win()
        batcher = Batcher(store, leadership.guards)
        beside += [asyncio.create_task(batcher.run()), asyncio.create_task(views.run())]
        manager = LedgerManager(store, ROOT, Layout.HIERARCHICAL)
        reader = CopyReader(
            manager=manager,
            bookies=QuarantiningBookies(
                bookies or cluster.bookies, Quarantine(cluster.clock, views.life)
            ),
            views=views,
            clock=cluster.clock,
            rng=random.Random(cluster.seed),
            fallback_digest=DIGEST,
            entry_lists=entry_lists,
        )
        findings = Findings(store, batcher, PATHS, cluster.clock)
        reports = Reports(BothQueues(store, batcher, PATHS, cluster.clock), findings)
        made = Checker(
            store=store,
            views=views,
            ledger_map=await indexed(manager),
            runner=None,  # type: ignore[arg-type]  # it asks the Checker
            all_ledgers=AllLedgersCheck(reader, reports, share=settings.all_ledgers_share),
            replicas=ReplicasCheck(reader, reports, MarkTree(store, PATHS)),
            findings=findings,
        )
        made.runner = CheckRunner(
            checks,
            store=store,
            paths=PATHS,
            ledger_map=made.ledger_map,
            is_index_ready=lambda: made.is_index_ready,
            views=views,
            records=CheckRecords(store, batcher, PATHS),
            is_audit_pending=lambda: made.is_audit_pending,
            settings=settings,
            clock=cluster.clock,
        )
        yield made
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await store.close()


@asynccontextmanager
async def running(made: Checker) -> AsyncIterator[None]:
    """Its runner runs; what ends it ends the test."""
    task = asyncio.create_task(made.runner.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


async def indexed(manager: LedgerManager) -> LedgerMap:
    """As the leader's index is once it is built."""
    ledger_map = LedgerMap()
    async for ledger_ids in manager.ledger_ids():
        for ledger_id in ledger_ids:
            try:
                found = await manager.read(ledger_id)
                ledger_map.put(ledger_id, found.metadata, found.stat)
            except CorruptionError:
                stat = await manager._store.exists(manager.path(ledger_id))
                assert stat is not None
                ledger_map.put_unreadable(ledger_id, stat)
    return ledger_map


async def checked_at_ms(cluster: Cluster, kind: CheckKind = HOURLY) -> int | None:
    """When the check was last completed, as Java sees it."""
    return await last_run_ms(cluster.store, PATHS, kind.name, kind.audit)


async def store_time(cluster: Cluster, time_ms: int, audit: Audit = Audit.ALL_LEDGERS) -> None:
    path, data = PATHS.audit_time(audit), znodes.audit_time_to_bytes(time_ms)
    if await cluster.store.exists(path) is None:
        await cluster.store.create(path, data)
    else:
        await cluster.store.set(path, data, version=-1)


async def record(cluster: Cluster, kind: CheckKind = HOURLY) -> CheckRecord:
    return await read_check(cluster.store, PATHS, kind.name)


async def ten_ledgers() -> Cluster:
    return await with_ledgers(*[(B1, B2, B3)] * 10)


async def five_ledgers() -> Cluster:
    """0 to 4, entries 0 to 9, two copies of each on B1, B2 and B3."""
    return await with_ledgers(*[(B1, B2, B3)] * LEDGERS)


async def look(
    cluster: Cluster, *ledger_ids: int, settings: ChecksSettings | None = None
) -> Counter[str]:
    """The check of all ledgers, at these, or at all five."""
    async with checker(cluster, settings=settings) as made:
        return await made.all_ledgers.look_at(ledger_ids or range(LEDGERS))


def asked_of(cluster: Cluster, bookie: BookieId) -> Counter[tuple[int, int]]:
    return Counter(
        (transfer.ledger_id, entry_id)
        for transfer, _ in cluster.bookies.transfers
        for entry_id in transfer.reads.get(bookie, ())
    )


def lose_first(cluster: Cluster) -> None:
    """An entry of ledger 3 is gone from a live bookie."""
    cluster.bookie(B2).lose(3, 0)


def lose_the_ledger(cluster: Cluster) -> None:
    """All that it has of ledger 3."""
    cluster.bookie(B2)._ledgers.pop(3)
