"""Auditors and workers, many ledgers, and faults drawn from a seed: at the end every ledger is
whole.

Bookies disappear and return, some reformatted. Single entries vanish. Bookies drain, or are in
maintenance. Sessions expire; requests and replies are lost. Bookies collect ledgers late, and
delete copies that were made meanwhile. No copy is destroyed while it may be the last one but one,
so everything missing at the end was lost by us. The other copies may be unreachable for long, and
ledgers be split around them. Rule S1 is checked at every single write of metadata (``Cluster``).
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import pytest

from auditor.recheck import ADOPT_INTERVAL_S, RETRY_MAX_S
from auditor.settings import AuditorSettings
from ledgers.errors import (
    BookmenderError,
    NodeExistsError,
    NoNodeError,
    ReadOnlyError,
    UnavailableError,
)
from ledgers.model import BookieId, LedgerState
from ledgers.store import Operation
from replication.orders import drain_znode, maintenance_znode
from replication.settings import ReplicationSettings
from tests.auditor.auditing import auditing
from tests.auditor.rechecking import recheck_of
from tests.memory import bookies as memory_bookies
from tests.memory import store as memory_store
from tests.memory.bookies import NO_FAULT, Op
from tests.memory.store import MemoryStore
from tests.replication.cluster import Cluster, named_by, until
from tests.replication.ledger_values import BOOKIES
from tests.replication.nodes import PATHS, working
from tests.replication.repairs import drain, order_maintenance
from tests.virtual_time import run

LEDGER_COUNT = 12
STORM_S = 90.0
FLUSH_S, REREAD_S = 10.0, 15.0
ALIVE_MIN = 5
SETTINGS = ReplicationSettings(
    ledgers_at_once=4,
    open_ledger_grace_s=3,
    retry_min_s=1,
    retry_max_s=5,
    idle_wait_s=0.5,
    checked_share=1,  # what vanishes is in the middle, too
)


class Storm:
    """The faults, drawn from a seed."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self.cluster, self.rng = cluster, rng
        self.stores: set[MemoryStore] = set()
        """The sessions of our nodes, as they are seen at work."""
        self.draining: list[BookieId] = []
        self.is_over = False
        cluster.tree.faults = self._at_store
        cluster.bookies.faults = self._at_bookie

    async def blow(self) -> None:
        """Cause faults until the time is over. Then absent bookies return, except one that is not
        needed."""
        end_s = self.cluster.clock.now_s() + STORM_S
        happenings = [self._kill, self._revive, self._revive, self._expire]
        happenings += [self._vanish, self._eclipse, self._eclipse]
        happenings += [self._drain, self._stop_draining, self._maintain]
        happenings += [self._collect]
        while self.cluster.clock.now_s() < end_s:
            await asyncio.sleep(self.rng.uniform(0.5, 6))
            await self.rng.choice(happenings)()
        self.is_over = True
        await self._clear_up()

    async def _clear_up(self) -> None:
        await self._stop_draining()
        for bookie in BOOKIES:  # whatever is copied from now on is lost again at the next flush
            await self._collect_on(bookie)
        absent = [b for b in BOOKIES if self.cluster.bookie(b).is_down]
        spared = [b for b in absent if not await self._is_needed(b)][:1]
        for bookie in absent:
            if bookie not in spared:
                await self.cluster.revive(bookie)
        for ledger_id in range(LEDGER_COUNT):  # no client reports entries that vanished
            await self._mark(ledger_id)

    async def _vanish(self) -> None:
        """Lose an entry of a closed ledger on a bookie if two others have it."""
        cluster, ledger_id = self.cluster, self.rng.randrange(LEDGER_COUNT)
        metadata = await cluster.metadata(ledger_id)
        entry_id = self.rng.randint(0, 8)
        if not metadata.is_closed or cluster.good_copies(ledger_id, metadata, entry_id) < 3:
            return
        bookie = self.rng.choice(named_by(metadata, entry_id))
        cluster.bookie(bookie).lose(ledger_id, entry_id)
        await self._mark(ledger_id)

    async def _eclipse(self) -> None:
        """Make an entry unreachable: two of its bookies disappear, and the third has lost it."""
        cluster, ledger_id = self.cluster, self.rng.randrange(LEDGER_COUNT)
        metadata, entry_id = await cluster.metadata(ledger_id), self.rng.randint(0, 8)
        alive = [b for b in BOOKIES if not cluster.bookie(b).is_down]
        named = [b for b in named_by(metadata, entry_id) if b in alive]
        if not metadata.is_closed or cluster.good_copies(ledger_id, metadata, entry_id) < 3:
            return
        if len(named) == 3 and len(alive) - 2 >= ALIVE_MIN:
            cluster.bookie(named[0]).lose(ledger_id, entry_id)
            await cluster.kill(*named[1:])
            await self._mark(ledger_id)

    async def _collect(self) -> None:
        """Let a bookie collect the ledgers that do not name it. Their indexes are deleted with its
        next flush."""
        await self._collect_on(self.rng.choice(BOOKIES))

    async def _collect_on(self, bookie: BookieId) -> None:
        """Collect each ledger under its lock, as bookies do."""
        for ledger_id in range(LEDGER_COUNT):
            lock = PATHS.lock(ledger_id)
            with suppress(NodeExistsError):
                await self.cluster.store.create(lock, is_ephemeral=True)
                if bookie not in (await self.cluster.metadata(ledger_id)).bookies:
                    self.cluster.bookie(bookie).collect_late(ledger_id)
                await self.cluster.store.delete(lock)

    async def flush(self) -> None:
        """Run the bookies' checkpoints until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            for bookie in BOOKIES:
                self.cluster.bookie(bookie).flush()

    async def _drain(self) -> None:
        bookie = self.rng.choice(BOOKIES)
        if self.draining:
            return
        self.draining.append(bookie)
        await drain(self.cluster, bookie, may_fence=self.rng.random() < 0.5)
        for ledger_id in range(LEDGER_COUNT):  # as the leader does
            if bookie in (await self.cluster.metadata(ledger_id)).bookies:
                await self._mark(ledger_id)

    async def _mark(self, ledger_id: int) -> None:
        with suppress(NodeExistsError, NoNodeError):  # another mark, or a repair, was quicker
            await self.cluster.mark(ledger_id=ledger_id)

    async def _stop_draining(self) -> None:
        if self.draining:
            await self.cluster.store.delete(drain_znode(PATHS, self.draining.pop()).path)

    async def _maintain(self) -> None:
        """Order a maintenance window. The bookie is mostly absent in it, and perhaps for longer."""
        bookie = self.rng.choice(BOOKIES)
        if await self.cluster.store.exists(maintenance_znode(PATHS, bookie).path) is None:
            await order_maintenance(self.cluster, bookie, for_s=self.rng.uniform(5, 30))

    async def _kill(self) -> None:
        alive = [b for b in BOOKIES if not self.cluster.bookie(b).is_down]
        if len(alive) > ALIVE_MIN:
            await self.cluster.kill(self.rng.choice(alive))

    async def _revive(self) -> None:
        if down := [b for b in BOOKIES if self.cluster.bookie(b).is_down]:
            bookie = self.rng.choice(down)
            if self.rng.random() < 0.5 and not await self._is_needed(bookie):
                await self.cluster.wipe(bookie)
            await self.cluster.revive(bookie)

    async def _is_needed(self, bookie: str) -> bool:
        """Return True if an entry has fewer than two other copies that metadata names."""
        cluster = self.cluster
        for ledger_id in range(LEDGER_COUNT):
            metadata = await cluster.metadata(ledger_id)
            if bookie not in metadata.bookies:
                continue
            if not metadata.is_closed:
                return True
            for entry_id in range(metadata.last_entry_id + 1):
                copies = cluster.good_copies(ledger_id, metadata, entry_id)
                if copies - cluster.has_good_copy(bookie, ledger_id, entry_id) < 2:  # type: ignore[arg-type]
                    return True
        return False

    async def _expire(self) -> None:
        if self.stores:
            store = self.rng.choice(sorted(self.stores, key=lambda store: store.session_id))
            self.stores.discard(store)
            self.cluster.tree.expire(store)

    def _at_store(
        self, store: MemoryStore, operations: Sequence[Operation]
    ) -> memory_store.Fault | None:
        if store is self.cluster.store or self.is_over:
            return None
        self.stores.add(store)
        if not operations or self.rng.random() > 0.03:
            return None
        return self.rng.choice(list(memory_store.Fault))

    def _at_bookie(self, bookie: str, op: Op, ledger_id: int) -> memory_bookies.Fault:
        if self.is_over:
            return NO_FAULT
        delay_s = self.rng.choice([0.0, 0.0, 0.01, 0.3])
        if self.rng.random() > 0.02:
            return memory_bookies.Fault(delay_s=delay_s)
        error = self.rng.choice(
            [UnavailableError, ReadOnlyError if op is Op.ADD else UnavailableError]
        )
        return memory_bookies.Fault(
            delay_s=delay_s, error=error, is_executed=error is UnavailableError
        )


async def scene(seed: int) -> Cluster:
    cluster = await Cluster.start(seed=seed)
    rng = random.Random(seed)
    for ledger_id in range(LEDGER_COUNT):
        is_open = ledger_id % 4 == 0
        # Bookies of an open end get no copies of the rest (rule S12): four might leave no target.
        ensemble_size = 3 if is_open else 4
        await cluster.write_ledger(
            rng.sample(BOOKIES, ensemble_size),
            rng.sample(BOOKIES, ensemble_size),
            ledger_id=ledger_id,
            starts=(0, 5),
            last=8,
            write_quorum=3,
            ack_quorum=2,
            state=LedgerState.OPEN if is_open else LedgerState.CLOSED,
        )
    return cluster


async def restarting(session: Callable[[], Awaitable[None]]) -> None:
    """Start a new session whenever one ends, as ``daemon.threads`` does."""
    while True:
        try:
            await session()
        except (BookmenderError, ExceptionGroup):
            await asyncio.sleep(0.5)


async def weather(seed: int) -> None:
    cluster = await scene(seed)
    storm = Storm(cluster, random.Random(seed))

    async def work() -> None:
        async with cluster.node(settings=SETTINGS) as node, working(node) as worker:
            recheck = asyncio.create_task(recheck_of(node, cluster, after_s=REREAD_S).run())
            await asyncio.wait([worker, recheck], return_when=asyncio.FIRST_COMPLETED)
            recheck.cancel()
            await asyncio.gather(recheck, return_exceptions=True)

    async def audit() -> None:
        settings = AuditorSettings(bookie_check_interval_s=20)
        async with auditing(cluster, settings=settings) as leader:
            assert leader.task is not None
            await asyncio.wait([leader.task])

    halves = [asyncio.create_task(restarting(role)) for role in (work, work, audit, audit)]
    halves.append(asyncio.create_task(storm.flush()))
    await storm.blow()
    await until(cluster, lambda: is_calm(cluster))
    await asyncio.sleep(ADOPT_INTERVAL_S + REREAD_S + RETRY_MAX_S)
    await until(cluster, lambda: is_calm(cluster))
    for role in halves:
        role.cancel()
    await asyncio.gather(*halves, return_exceptions=True)

    await asyncio.sleep(1)
    for ledger_id in range(LEDGER_COUNT):
        metadata = await cluster.metadata(ledger_id)
        assert metadata.last_entry_id == 8 or not metadata.is_closed
        for entry_id in range(8 + 1):
            assert cluster.good_copies(ledger_id, metadata, entry_id) == 3, (ledger_id, entry_id)
    assert cluster.violations == []


async def is_calm(cluster: Cluster) -> bool:
    """Return True if nothing is marked or locked, all ledgers are closed, and none names an absent
    bookie."""
    if await cluster.marked() or await cluster.locked():
        return False
    found = [await cluster.metadata(ledger_id) for ledger_id in range(LEDGER_COUNT)]
    return not any(cluster.bookie(b).is_down for metadata in found for b in metadata.bookies)


@pytest.mark.parametrize("seed", range(12))
def test_after_any_storm_all_ledgers_are_whole(seed: int) -> None:
    run(weather(seed))
