"""A leader's periodic checks, put together as the daemon does, on a cluster in memory."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from auditor.checks.copies import AllLedgersCheck, CopyInspector, ReplicasCheck
from auditor.checks.records import (
    ALL_LEDGERS,
    PLACEMENT,
    REPLICAS,
    Check,
    CheckKind,
    CheckRecord,
    CheckRecords,
    CheckRun,
    FindingReporter,
    read_audit_time,
    read_check,
)
from auditor.checks.runner import CheckRunner, CheckState, check_safely
from auditor.election import Election
from auditor.ledger_map import LedgerMap
from auditor.mark_reasons import Findings
from auditor.settings import ChecksSettings
from ledgers.bookies import Bookies
from ledgers.codec.layout import Layout
from ledgers.errors import CorruptionError
from ledgers.health import AnsweringBookies, BookieHealth
from ledgers.manager import LedgerManager
from ledgers.model import BookieId
from ledgers.registration import Registration
from ledgers.tasks import gather_in_parts
from replication import znodes
from replication.cluster import ViewSource
from replication.marks import MarkTree
from replication.nodes import Membership, Role
from replication.orders import OrderStore
from replication.transactions import Batcher
from replication.znodes import Audit
from tests.auditor import auditing
from tests.auditor.scenes import with_ledgers
from tests.memory.history import MemoryHistory
from tests.memory.store import MemoryStore
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
    """A check that needs ``part_s`` for a part, and remembers the inspected ledgers."""

    def __init__(
        self, kind: CheckKind = HOURLY, *, part_size: int = 2, part_s: float = 1.0
    ) -> None:
        self.kind = kind
        self.part_size = self.at_once = part_size
        self.part_s = part_s
        self.looked_at: list[int] = []
        self.started_at: list[int] = []
        """Cursors at which runs began, or went on."""
        self.finished_count = 0
        self.before: Callable[[int], Awaitable[None]] | None = None
        """Called before a ledger; may raise."""

    async def begin(self, run: CheckRun) -> None:
        self.started_at.append(run.cursor)

    async def check_ledger(self, ledger_id: int) -> Counter[str]:
        if self.before is not None:
            await self.before(ledger_id)
        await asyncio.sleep(self.part_s)
        self.looked_at.append(ledger_id)
        return Counter(even=int(ledger_id % 2 == 0))

    async def finish(self, run: CheckRun) -> None:
        self.finished_count += 1


@dataclass(slots=True, kw_only=True)
class Checker:
    """The checks of an elected node. Tests set ``is_audit_pending`` and ``is_ledger_map_ready``."""

    store: MemoryStore
    views: ViewSource
    ledger_map: LedgerMap
    runner: CheckRunner
    all_ledgers: AllLedgersCheck
    replicas: ReplicasCheck
    findings: Findings
    history: MemoryHistory
    is_audit_pending: bool = False
    is_ledger_map_ready: bool = True
    tasks: "list[asyncio.Task[None]]" = field(default_factory=list)

    def runs(self, *checks: Check) -> None:
        """Let the runner run these checks."""
        self.runner._states = [CheckState(check=check) for check in checks]


@asynccontextmanager
async def checker(
    cluster: Cluster,
    *checks: Check,
    name: str = "node-1",
    settings: ChecksSettings | None = None,
    bookies: Bookies | None = None,
) -> AsyncIterator[Checker]:
    """Yield a leader that knows every ledger. Its ``runner`` has ``checks`` and does not run
    yet."""
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
        inspector = CopyInspector(
            manager=manager,
            bookies=AnsweringBookies(
                bookies or cluster.bookies, BookieHealth(cluster.clock, views.life)
            ),
            views=views,
            clock=cluster.clock,
            rng=random.Random(cluster.seed),
            fallback_digest=DIGEST,
        )
        history = MemoryHistory(cluster.clock)
        findings = Findings(store, batcher, PATHS, cluster.clock, history)
        reports = FindingReporter(findings)
        made = Checker(
            store=store,
            views=views,
            ledger_map=await filled_ledger_map(manager),
            runner=None,  # type: ignore[arg-type]  # it asks the Checker
            all_ledgers=AllLedgersCheck(inspector, reports, share=settings.all_ledgers_share),
            replicas=ReplicasCheck(inspector, reports, MarkTree(store, PATHS)),
            findings=findings,
            history=history,
        )
        made.runner = CheckRunner(
            checks=checks,
            ledger_map=made.ledger_map,
            is_ledger_map_ready=lambda: made.is_ledger_map_ready,
            views=views,
            records=CheckRecords(store, batcher, PATHS),
            is_audit_pending=lambda: made.is_audit_pending,
            settings=settings,
            clock=cluster.clock,
            history=history,
        )
        yield made
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await store.close()


def running(made: Checker) -> AbstractAsyncContextManager[object]:
    """Run the runner. An error of the runner ends the test."""
    return auditing.running(made.runner.run())


async def filled_ledger_map(manager: LedgerManager) -> LedgerMap:
    """Return the leader's ledger map as it is after the first scan."""
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
    """Return when the check was last completed, as Java reads it."""
    if kind.audit is None:
        return (await read_check(cluster.store, PATHS, kind.name)).last_ms
    return (await read_audit_time(cluster.store, PATHS, kind.audit)).value


async def store_time(cluster: Cluster, time_ms: int, audit: Audit = Audit.ALL_LEDGERS) -> None:
    path, data = PATHS.audit_time(audit), znodes.audit_time_to_bytes(time_ms)
    if await cluster.store.exists(path) is None:
        await cluster.store.create(path, data)
    else:
        await cluster.store.set(path, data, version=-1)


async def record(cluster: Cluster, kind: CheckKind = HOURLY) -> CheckRecord:
    return await read_check(cluster.store, PATHS, kind.name)


async def last_run(cluster: Cluster, kind: CheckKind = HOURLY) -> CheckRun:
    """Return the record of the last finished run, which must exist."""
    last = (await record(cluster, kind)).last
    assert last is not None
    return last


async def ten_ledgers() -> Cluster:
    return await with_ledgers(*[(B1, B2, B3)] * 10)


async def five_ledgers() -> Cluster:
    """Return a cluster with ledgers 0 to 4, entries 0 to 9, with two copies of each on B1, B2 and
    B3."""
    return await with_ledgers(*[(B1, B2, B3)] * LEDGERS)


async def look(
    cluster: Cluster, *ledger_ids: int, settings: ChecksSettings | None = None
) -> Counter[str]:
    """Run the check of all ledgers on these ledgers, or on all five."""
    async with checker(cluster, settings=settings) as made:
        return await check_each(made.all_ledgers, ledger_ids or range(LEDGERS))


async def check_each(check: Check, ledger_ids: Sequence[int]) -> Counter[str]:
    """Check these ledgers as the runner does, and return the counts that are not 0."""
    counts: Counter[str] = Counter()
    for each in await gather_in_parts(
        partial(check_safely, check), ledger_ids, at_once=check.at_once
    ):
        counts += each
    return counts


def asked_of(cluster: Cluster, bookie: BookieId) -> Counter[tuple[int, int]]:
    return Counter(
        (transfer.ledger_id, entry_id)
        for transfer, _ in cluster.bookies.transfers
        for entry_id in transfer.reads.get(bookie, ())
    )


def lose_first(cluster: Cluster) -> None:
    """Lose an entry of ledger 3 on a registered bookie."""
    cluster.bookie(B2).lose(3, 0)


def lose_the_ledger(cluster: Cluster) -> None:
    """Lose everything of ledger 3 on a registered bookie."""
    cluster.bookie(B2)._ledgers.pop(3)
