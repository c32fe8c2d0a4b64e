"""Recent copies are read again: missing ones are found, and records survive every interruption."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from auditor.mark_reasons import read_findings
from auditor.recheck import ADOPT_INTERVAL_S, RETRY_MIN_S, orphans
from ledgers.bookies import Transfer
from ledgers.errors import NoAnswerError
from replication.recent_copies import CopiesToRead, CopyRecord
from tests.auditor.rechecking import recheck_of
from tests.memory.bookies import NO_FAULT, Fault
from tests.replication.cluster import Cluster, queue_empty, until
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER, PATHS, Node, working

AFTER_S = 120.0


@asynccontextmanager
async def rechecking_node(cluster: Cluster, name: str = "node-1") -> AsyncIterator[Node]:
    """Yield a node that repairs ledgers and reads its copies again."""
    async with cluster.node(name) as node:
        recheck = asyncio.create_task(recheck_of(node, cluster, after_s=AFTER_S).run())
        try:
            async with working(node):
                yield node
        finally:
            recheck.cancel()
            with suppress(asyncio.CancelledError):
                await recheck


async def records(cluster: Cluster) -> list[str]:
    path = PATHS.recent_copies
    return await cluster.store.children(path) if await cluster.store.exists(path) else []


async def scene() -> Cluster:
    """Return a marked ledger on B1, B2 and B3, of which B2 is lost. Only B4 can be a target."""
    cluster = await Cluster.start(B1, B2, B3, B4)
    await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)
    await cluster.mark(B2)
    return cluster


async def repaired(cluster: Cluster) -> None:
    await until(cluster, lambda: queue_empty(cluster))
    assert await cluster.ensembles() == [(B1, B4, B3)]


async def test_a_copy_removed_by_a_late_index_deletion_is_made_again(cluster: Cluster) -> None:
    cluster.bookie(B4).collect_late(LEDGER)
    async with rechecking_node(cluster):
        await repaired(cluster)
        cluster.bookie(B4).flush()
        assert not cluster.bookie(B4).entry_ids(LEDGER)

        await asyncio.sleep(AFTER_S + 30)

        await cluster.assert_whole()
        assert await cluster.marked() == await cluster.marked(PATHS.private) == []


async def test_a_missing_copy_is_reported_with_its_bookie(cluster: Cluster) -> None:
    async with cluster.node() as node:
        recheck = recheck_of(node, cluster, after_s=AFTER_S)
        outcome = await node.repairer.repair(await node.lease())
        assert outcome.reason is None
        cluster.bookie(B4).lose(LEDGER, 0)
        running = asyncio.create_task(recheck.run())

        await asyncio.sleep(AFTER_S + 10)

        running.cancel()
    (finding,) = (await read_findings(cluster.store, PATHS, [LEDGER])).values()
    assert (finding.check, finding.bookies) == ("recent-copies", (B4,))
    assert await cluster.marked() + await cluster.marked(PATHS.private) == [LEDGER]


async def test_copies_are_not_read_before_their_time(cluster: Cluster) -> None:
    async with rechecking_node(cluster):
        await repaired(cluster)
        read: list[Transfer] = []

        async def note(transfer: Transfer) -> None:
            read.append(transfer)

        cluster.bookies.before_transfer = note

        await asyncio.sleep(AFTER_S - 10)
        assert not read

        await asyncio.sleep(20)
        assert [set(transfer.reads) for transfer in read] == [{B4}]


async def test_another_node_adopts_the_records_of_a_dead_one(cluster: Cluster) -> None:
    async with rechecking_node(cluster, "node-1"):
        await repaired(cluster)
    cluster.bookie(B4).collect_late(LEDGER)

    async with rechecking_node(cluster, "node-2"):
        await asyncio.sleep(ADOPT_INTERVAL_S + AFTER_S + 60)

    await cluster.assert_whole()
    assert await records(cluster) == []


async def test_only_one_node_adopts_a_record(cluster: Cluster) -> None:
    async with rechecking_node(cluster, "node-1"):
        await repaired(cluster)
    async with rechecking_node(cluster, "node-2"), rechecking_node(cluster, "node-3"):
        read: list[Transfer] = []

        async def note(transfer: Transfer) -> None:
            read.append(transfer)

        cluster.bookies.before_transfer = note

        await asyncio.sleep(2 * ADOPT_INTERVAL_S + AFTER_S)

    assert len(read) == 1


async def test_a_target_that_does_not_answer_is_asked_again_later(cluster: Cluster) -> None:
    async with rechecking_node(cluster):
        await repaired(cluster)
        unresponsive = Fault(error=NoAnswerError)
        cluster.bookies.faults = lambda b, op, i: unresponsive if b == B4 else NO_FAULT
        await asyncio.sleep(AFTER_S + 10)
        assert len(await records(cluster)) == 1
        cluster.bookies.faults = lambda b, op, i: NO_FAULT

        await asyncio.sleep(2 * RETRY_MIN_S + 10)

        assert await records(cluster) == []
        assert await cluster.marked() == await cluster.marked(PATHS.private) == []


async def test_a_slow_target_does_not_delay_the_reads_of_others() -> None:
    cluster = await Cluster.start(B1, B2, B3, B4)
    record, slow_ids = CopyRecord(), range(0, 200, 20)
    reads: set[int] = set()
    async with cluster.node() as node:
        recheck = recheck_of(node, cluster, after_s=0.0)
        for ledger_id in range(200):
            target = B4 if ledger_id in slow_ids else B1
            await cluster.write_ledger((target, B2), ledger_id=ledger_id)
            recheck.expect(
                CopiesToRead(ledger_id=ledger_id, targets=frozenset({target}), record=record)
            )

        async def note(transfer: Transfer) -> None:
            if transfer.ledger_id in slow_ids:
                await asyncio.sleep(60.0)
            reads.add(transfer.ledger_id)

        cluster.bookies.before_transfer = note
        running = asyncio.create_task(recheck.run())

        await asyncio.sleep(30.0)

        assert reads == set(range(200)).difference(slow_ids)
        running.cancel()


async def test_an_absent_target_is_asked_when_it_returns(cluster: Cluster) -> None:
    """Its absence is shorter than the recovery delay."""
    async with rechecking_node(cluster):
        await repaired(cluster)
        await cluster.kill(B4)
        await asyncio.sleep(AFTER_S + 10)
        for entry_id in cluster.bookie(B4).entry_ids(LEDGER):
            cluster.bookie(B4).lose(LEDGER, entry_id)
        await cluster.revive(B4)

        await asyncio.sleep(4 * RETRY_MIN_S)

        await cluster.assert_whole()


async def test_a_copy_that_metadata_no_longer_names_is_not_read(cluster: Cluster) -> None:
    async with rechecking_node(cluster):
        await repaired(cluster)
        await cluster.revive(B2)
        await cluster.kill(B4)
        await cluster.mark(B4)
        await until(cluster, lambda: queue_empty(cluster))
        assert await cluster.ensembles() == [(B1, B2, B3)]

        await asyncio.sleep(AFTER_S + RETRY_MIN_S)

        assert await records(cluster) == []


async def test_nothing_is_marked_while_auto_recovery_is_disabled(cluster: Cluster) -> None:
    async with rechecking_node(cluster):
        await repaired(cluster)
        cluster.bookie(B4).lose(LEDGER, 0)
        await cluster.store.create(PATHS.disable)
        await asyncio.sleep(AFTER_S + 300)
        assert await cluster.marked() == await cluster.marked(PATHS.private) == []
        await cluster.store.delete(PATHS.disable)

        await asyncio.sleep(RETRY_MIN_S + 30)

        await cluster.assert_whole()


async def test_an_unreadable_record_stays_and_stops_nothing(cluster: Cluster) -> None:
    path = f"{PATHS.recent_copies}/of-a-later-release.0"
    await cluster.store.create(path, b'{"version": 9}', with_parents=True)
    async with rechecking_node(cluster):
        await repaired(cluster)

        await asyncio.sleep(AFTER_S + 2 * ADOPT_INTERVAL_S)

    assert await records(cluster) == ["of-a-later-release.0"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        pytest.param(["a.0", "a.1"], [], id="a live session reads its own records"),
        pytest.param(["b.0"], ["b.0"], id="an ended session's record is adopted"),
        pytest.param(["c.0"], [], id="a record is adopted once"),
        pytest.param(["junk"], ["junk"], id="a name without a number has no live session"),
    ],
)
def test_records_of_dead_sessions_are_orphans(names: list[str], expected: list[str]) -> None:
    assert orphans(names, alive=["a"], known=["c.0"]) == expected
