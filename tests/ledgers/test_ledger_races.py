"""A writer, recoveries and faults at once, drawn from a seed.

No entry that was acknowledged to the writer is lost or changed. Every client that closes or
recovers the ledger gets the same end. Every entry up to it is on an ack quorum of bookies that the
metadata names.
"""

import asyncio
from collections.abc import Sequence
from random import Random

import pytest

from ledgers.errors import BookmenderError, UnavailableError
from ledgers.model import BookieId, LedgerMetadata
from ledgers.reading import replicas_in
from ledgers.store import Operation
from ledgers.writing import LedgerWriter
from tests.ledgers.hooked_bookies import Call
from tests.ledgers.memory_cluster import BOOKIES, A, B, C, MemoryCluster
from tests.memory.bookies import Fault, Op, no_faults
from tests.memory.store import Fault as StoreFault
from tests.memory.store import MemoryStore
from tests.replication.cluster import in_virtual_time

ENTRY_COUNT_MAX = 40


class Race:
    """One race. ``acknowledged`` and ``ends`` are what the clients were told."""

    def __init__(self, seed: int) -> None:
        self.random, self.cluster = Random(seed), MemoryCluster(seed=seed)
        self.ledger_id = seed
        self.sent: list[bytes] = []
        self.acknowledged: set[int] = set()
        self.ends: list[LedgerMetadata] = []

    async def run(self) -> LedgerMetadata:
        ensemble_size = self.random.randint(1, 5)
        write_quorum = self.random.randint(1, ensemble_size)
        async with self.cluster.writer(
            manager=self.cluster.new_manager(),
            ledger_id=self.ledger_id,
            ensemble_size=ensemble_size,
            write_quorum=write_quorum,
            ack_quorum=self.random.randint(1, write_quorum),
        ) as writer:
            self._spoil()
            async with asyncio.TaskGroup() as group:
                spoiler = group.create_task(self._take_bookies_down())
                parties = [group.create_task(self._write(writer))]
                for _ in range(self.random.randint(1, 3)):
                    parties.append(group.create_task(self._recover()))
                await asyncio.wait(parties)
                spoiler.cancel()
            self._clear_faults()
            return await self.cluster.recover(self.ledger_id)

    # --- The parties ------------------------------------------------------------------------------

    async def _write(self, writer: LedgerWriter) -> None:
        try:
            for number in range(self.random.randint(0, ENTRY_COUNT_MAX)):
                payload = b"%d" % number
                self.sent.append(payload)
                (await writer.send(payload)).add_done_callback(self._note_acknowledged)
                await self._pause(0.5)
            if self.random.random() < 0.5:
                self.ends.append((await writer.close()).metadata)
        except BookmenderError:
            pass  # fenced, closed by another client, or without bookies

    def _note_acknowledged(self, add: asyncio.Future[int]) -> None:
        if not add.cancelled() and add.exception() is None:
            self.acknowledged.add(add.result())

    async def _recover(self) -> None:
        """Recover the ledger. Sometimes the recovery is cut short, like that of a worker that
        dies."""
        await self._pause(15)
        manager = self.cluster.new_manager()
        try:
            async with asyncio.timeout(self.random.choice([0.5, 2.0, 120.0])):
                self.ends.append(await self.cluster.recover(self.ledger_id, manager=manager))
        except (BookmenderError, TimeoutError):
            pass

    async def _pause(self, up_to_s: float) -> None:
        await self.cluster.clock.sleep(self.random.uniform(0, up_to_s))

    # --- The faults -------------------------------------------------------------------------------

    def _spoil(self) -> None:
        self.cluster.bookies.faults = self._fault
        self.cluster.tree.faults = self._store_fault
        self.cluster.tree.latency = lambda: self._pause(0.1)

    def _clear_faults(self) -> None:
        self.cluster.bookies.faults = no_faults
        self.cluster.tree.faults = None
        for bookie in BOOKIES:
            self.cluster.bookies.bookie(bookie).start()

    def _fault(self, bookie: BookieId, op: Op, ledger_id: int) -> Fault:
        delay_s, reply_delay_s = self.random.expovariate(20), self.random.expovariate(20)
        lot = self.random.random()
        if lot < 0.06:
            return Fault(delay_s=5.0, error=UnavailableError, is_executed=lot < 0.03)
        if lot < 0.12:
            return Fault(delay_s=self.random.uniform(0, 4), reply_delay_s=reply_delay_s)
        return Fault(delay_s=delay_s, reply_delay_s=reply_delay_s)

    def _store_fault(
        self, store: MemoryStore, operations: Sequence[Operation]
    ) -> StoreFault | None:
        return self.random.choice(list(StoreFault)) if self.random.random() < 0.1 else None

    async def _take_bookies_down(self) -> None:
        while True:
            await self._pause(3)
            bookie = self.cluster.bookies.bookie(self.random.choice(BOOKIES))
            bookie.is_down = True
            await self._pause(3)
            bookie.start()
            bookie.flush()


@pytest.mark.compat(
    "LedgerRecoveryTest.testLedgerRecoveryWithRollingRestart",
    "ParallelLedgerRecoveryTest.testRereadDuringRecovery1",
    "ParallelLedgerRecoveryTest.testRereadDuringRecovery2",
    "ParallelLedgerRecoveryTest.testRereadDuringRecovery3",
    "ParallelLedgerRecoveryTest.testRereadDuringRecovery4",
    "ParallelLedgerRecoveryTest.testRecoverBeforeWriteMetadata1",
    "ParallelLedgerRecoveryTest.testRecoverBeforeWriteMetadata2",
    "ParallelLedgerRecoveryTest.testRecoverBeforeWriteMetadata3",
    "ParallelLedgerRecoveryTest.testRecoverBeforeWriteMetadata4",
    "ParallelLedgerRecoveryTest.testConcurrentRecovery1",
    "ParallelLedgerRecoveryTest.testConcurrentRecovery2",
    "ParallelLedgerRecoveryTest.testConcurrentRecovery3",
    "ParallelLedgerRecoveryTest.testConcurrentRecovery4",
    verdict="same",
)
@pytest.mark.parametrize("seed", range(150))
@in_virtual_time
async def test_no_acknowledged_entry_is_lost_and_all_agree_on_the_end(seed: int) -> None:
    race = Race(seed)

    closed = await race.run()

    assert {(end.last_entry_id, end.length) for end in race.ends} <= {
        (closed.last_entry_id, closed.length)
    }
    assert max(race.acknowledged, default=-1) <= closed.last_entry_id
    payloads = await race.cluster.payloads(seed)
    assert payloads == race.sent[: closed.last_entry_id + 1]
    for entry_id in range(closed.last_entry_id + 1):
        replicas = replicas_in(
            closed.segment_of(entry_id), entry_id, write_quorum=closed.write_quorum
        )
        assert len(race.cluster.stored_on(entry_id, seed) & set(replicas)) >= closed.ack_quorum


@pytest.mark.compat("LedgerRecoveryTest.testBookieFailureDuringRecovery", verdict="same")
@pytest.mark.parametrize("step", range(40))
@in_virtual_time
async def test_a_recovery_cut_short_at_any_step_leaves_all_to_the_next(step: int) -> None:
    """Entries 0 to 5 are acknowledged by A and B; B then fails, and is replaced."""
    cluster = await MemoryCluster.with_ledger([A, B, C])
    for entry_id in range(6):
        await cluster.put(entry_id, A, B, lac=-1)
    requests = 0

    async def cut_short(call: Call) -> None:
        nonlocal requests
        requests += 1
        if requests == step:
            first.cancel()

    cluster.bookies.before = cut_short
    cluster.bookies.fail(B, Op.ADD, Fault(error=UnavailableError))
    first = asyncio.create_task(cluster.recover(manager=cluster.new_manager()))
    await asyncio.wait([first])

    closed = await cluster.recover()

    assert first.cancelled() or first.result() == closed
    assert (closed.last_entry_id, closed.length) == (5, 60)
    assert len(await cluster.payloads()) == 6
    for entry_id in range(6):
        named = set(closed.segment_of(entry_id).ensemble)
        assert len(cluster.stored_on(entry_id) & named) >= closed.ack_quorum
