"""Several workers on one queue: which leases what, the cost of looking, and the switch."""

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
import structlog
from structlog.testing import capture_logs

from ledgers.bookies import Transfer
from ledgers.model import BookieId, LedgerState
from replication import znodes
from replication.backoff import WaitingList
from replication.ledger_record import ClusterFingerprint, WaitingNote
from replication.marks import DIRECTORIES_LISTED_MAX, UrgentLedgers
from replication.nodes import Membership, Role
from replication.reasons import Blocked, Reason
from replication.settings import ReplicationSettings
from replication.work_queue import GivenLedgers
from replication.worker import SUMMARY_INTERVAL_S, LedgerPicker, ReplicationWorker
from replication.znodes import Mark
from tests.replication.cluster import Cluster, queue_empty, until, with_lost_b2
from tests.replication.ledger_values import B1, B2, B3, B4, B5
from tests.replication.nodes import LEDGER, PATHS, Node, node_info, working
from tests.replication.repairs import drain
from tests.replication.watched import settle
from tests.replication.workers import lockers, start_nodes, without_target


async def copy_for_a_second(transfer: Transfer) -> None:
    if transfer.target is not None:
        await asyncio.sleep(1)


# --- Shares of workers ----------------------------------------------------------------------------


@pytest.mark.compat(
    "TestReplicationWorker.test2RWsShouldCompeteForReplicationOf2FragmentsAndCompleteReplication",
    verdict="same",
)
async def test_nodes_of_a_short_queue_never_lease_the_same_ledger() -> None:
    cluster = await with_lost_b2(40)
    cluster.bookies.before_transfer = copy_for_a_second
    asked = lockers(cluster)

    async with AsyncExitStack() as stack:
        await start_nodes(stack, cluster, 4, ReplicationSettings())
        took_s = await until(cluster, lambda: queue_empty(cluster))

    assert took_s < 1.5
    assert all(len(stores) == 1 for stores in asked.values())
    counts = Counter(stores[0].session_id for stores in asked.values())
    assert len(counts) == 4
    assert max(counts.values()) <= 20
    await cluster.assert_whole(*range(40))


async def test_other_nodes_repair_the_ledgers_of_a_busy_one() -> None:
    cluster = await with_lost_b2(20)

    async def copy_for_a_minute(transfer: Transfer) -> None:
        if transfer.target is not None and len(await cluster.locked()) == 1:
            await asyncio.sleep(50)

    cluster.bookies.before_transfer = copy_for_a_minute
    settings = ReplicationSettings(ledgers_at_once=1)
    async with cluster.node("busy", settings=settings) as busy, working(busy):
        await asyncio.sleep(1)
        assert len(await cluster.locked()) == 1
        async with cluster.node("idle") as idle, working(idle):
            await asyncio.sleep(20)
            assert len(await cluster.marked()) == 1
            await until(cluster, lambda: queue_empty(cluster))


async def test_ledgers_that_the_leader_calls_urgent_come_first() -> None:
    cluster = await with_lost_b2(60)
    await cluster.store.create(
        PATHS.urgent, UrgentLedgers.of([999, 41, 17], written_ms=0).to_json()
    )
    asked = lockers(cluster)

    async with cluster.node(settings=ReplicationSettings(ledgers_at_once=1)) as node, working(node):
        await until(cluster, lambda: queue_empty(cluster))

    assert list(asked)[:2] == [41, 17]


# --- The cost of looking --------------------------------------------------------------------------


async def test_of_very_many_notes_each_look_reads_a_part_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("replication.worker.WINDOW_LEDGERS_MAX", 50)
    cluster = await Cluster.start()
    async with cluster.node("writer") as writer:
        note = WaitingNote(
            ledger_id=0,
            blocked=Blocked(reason=Reason.NO_COPY),
            node="writer",
            since_ms=0,
            next_try_ms=cluster.clock.wall_ms() + 3_600_000,
            fingerprint=ClusterFingerprint.of(writer.views.current),
        )
        for ledger_id in range(400):
            await cluster.mark(B2, ledger_id=ledger_id)
            await writer.notes.put(replace(note, ledger_id=ledger_id))

    costs: list[int] = []
    look = LedgerPicker.pick

    async def counted(self: LedgerPicker, **options: int) -> object:
        before = node.store.request_count
        found = await look(self, **options)  # type: ignore[arg-type]
        costs.append(node.store.request_count - before)
        return found

    monkeypatch.setattr(LedgerPicker, "pick", counted)
    async with cluster.node() as node:
        await settle()  # its view of the bookies has been read
        async with working(node):
            await asyncio.sleep(20)

    assert max(costs) <= 2 * 50 + 15
    assert sum(costs) <= 2 * 400 + 15 * len(costs)
    assert costs[-1] <= 15


async def test_a_repairable_ledger_is_found_among_very_many_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("replication.worker.WINDOW_LEDGERS_MAX", 20)
    cluster = await without_target(*range(200))
    settings = ReplicationSettings(retry_min_s=3600, retry_max_s=3600)

    async with cluster.node(settings=settings) as node, working(node):
        await asyncio.sleep(10)
        await cluster.write_ledger((B1, B3), ledger_id=999)
        await cluster.mark(ledger_id=999)

        async def is_done() -> bool:
            return 999 not in await cluster.marked()

        assert await until(cluster, is_done) <= settings.idle_wait_s + 0.2


async def test_a_look_that_waited_for_a_free_slot_is_not_a_slow_one() -> None:
    cluster = await with_lost_b2(3)
    await cluster.store.delete(PATHS.mark(2))

    async def copy_for_long(transfer: Transfer) -> None:
        if transfer.target is not None and transfer.ledger_id != 2:
            await asyncio.sleep(20 if transfer.ledger_id == 0 else 300)

    cluster.bookies.before_transfer = copy_for_long
    settings = ReplicationSettings(ledgers_at_once=2)
    async with cluster.node(settings=settings) as node, working(node):
        await asyncio.sleep(30)
        await cluster.mark(B2, ledger_id=2)

        async def is_done() -> bool:
            return 2 not in await cluster.marked()

        assert await until(cluster, is_done) <= settings.idle_wait_s + 0.2


async def test_a_slow_zookeeper_is_asked_less_often(cluster: Cluster) -> None:

    async def far_away() -> None:
        await asyncio.sleep(0.5)

    settings = ReplicationSettings(idle_wait_s=0.5)
    async with cluster.node(settings=settings) as node, working(node):
        await asyncio.sleep(10)
        cluster.tree.latency = far_away
        await asyncio.sleep(30)
        before = node.store.request_count
        await asyncio.sleep(120)

        assert node.store.request_count - before <= 10 * 10


async def test_many_repairs_make_one_log_line(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = await with_lost_b2(30)
    # A logger remembers the configuration that it was first used with.
    monkeypatch.setattr("replication.worker.log", structlog.get_logger())

    with capture_logs() as logs:
        async with cluster.node() as node, working(node):
            await until(cluster, lambda: queue_empty(cluster))
            await asyncio.sleep(SUMMARY_INTERVAL_S)

    told = [entry for entry in logs if entry["log_level"] != "debug"]
    assert [(entry["event"], entry["ledger_count"]) for entry in told] == [("ledgers.repaired", 30)]


async def test_waiting_locks_are_not_requested_once_disabled() -> None:
    cluster = await with_lost_b2(100)
    cluster.bookies.before_transfer = copy_for_a_second
    asked = lockers(cluster)

    async with cluster.node() as node, working(node):
        while not asked:
            await settle(1)
        await cluster.store.create(PATHS.disable)
        await asyncio.sleep(30)

        assert 0 < len(asked) <= 50
        assert len(await cluster.marked()) == 100 - len(asked)
        assert await cluster.locked() == []


async def test_a_ledger_whose_grace_ends_while_disabled_is_not_fenced(cluster: Cluster) -> None:
    """Its lease is returned."""
    await cluster.write_ledger((B1, B2, B3), state=LedgerState.OPEN, write_quorum=3, ack_quorum=2)
    await cluster.mark(B2)
    await cluster.kill(B2)
    settings = ReplicationSettings(open_ledger_grace_s=5)

    async with cluster.node(settings=settings, local=B5) as node, working(node):
        await asyncio.sleep(2)
        await cluster.store.create(PATHS.disable)
        await asyncio.sleep(30)

        assert await cluster.locked() == []
        assert (await cluster.metadata()).state is LedgerState.OPEN

        await cluster.store.delete(PATHS.disable)
        await until(cluster, lambda: queue_empty(cluster))
    await cluster.assert_whole()


# --- A worker that repairs ledgers given by hand, and no others -----------------------------------

PRIVATE = PATHS.private
IN_A_DIRECTORY = 1 << 16
"""Ledgers that a lowest directory of marks has room for."""


def by_hand(cluster: Cluster, node: Node, *ledger_ids: int) -> ReplicationWorker:
    """Return a worker of this session for the given ledgers."""
    waiting = WaitingList(
        queue=GivenLedgers(
            node.store,
            node.batcher,
            PATHS,
            holder="hand",
            clock=cluster.clock,
            ledger_ids=ledger_ids,
        ),
        views=node.views,
        manager=node.manager,
        settings=ReplicationSettings(),
        node="hand",
        clock=cluster.clock,
        rng=random.Random(cluster.seed),
    )
    return ReplicationWorker(waiting=waiting, repairer=node.repairer)


async def mark_own(cluster: Cluster, *ledger_ids: int) -> None:
    for ledger_id in ledger_ids:
        await cluster.store.create(PRIVATE.mark(ledger_id), with_parents=True)


async def run_until_unmarked(cluster: Cluster, worker: ReplicationWorker, *ledger_ids: int) -> None:
    async def are_done() -> bool:
        paths = [queue.mark(i) for queue in (PATHS, PRIVATE) for i in ledger_ids]
        return not any([await cluster.store.exists(path) for path in paths])

    running = asyncio.create_task(worker.run())
    try:
        await until(cluster, are_done)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_only_the_given_ledgers_are_repaired() -> None:
    cluster = await with_lost_b2(3)
    await mark_own(cluster, 0, 1)
    async with cluster.node() as node:
        await run_until_unmarked(cluster, by_hand(cluster, node, 1), 1)

    assert await cluster.marked() == [0, 2]
    assert B2 not in (await cluster.metadata(1)).bookies
    await cluster.assert_whole(1)
    assert B2 in (await cluster.metadata(0)).bookies


async def test_they_are_found_at_once_in_a_very_long_queue(cluster: Cluster) -> None:
    ledger_ids = [number * IN_A_DIRECTORY for number in range(3 * DIRECTORIES_LISTED_MAX)]
    given = ledger_ids[::5]
    for ledger_id in given:
        await cluster.write_ledger((B1, B2, B3), ledger_id=ledger_id)
    await mark_own(cluster, *ledger_ids)
    await cluster.kill(B2)
    async with cluster.node() as node:
        began_s = cluster.clock.now_s()
        await run_until_unmarked(cluster, by_hand(cluster, node, *given), *given)

        assert cluster.clock.now_s() - began_s < 0.2
    await cluster.assert_whole(*given)


async def test_completed_ledgers_are_not_looked_for_again() -> None:
    cluster = await with_lost_b2(40)
    async with cluster.node() as node:
        worker = by_hand(cluster, node, *range(40))
        running = asyncio.create_task(worker.run())
        await asyncio.sleep(30)
        before = node.store.request_count
        await asyncio.sleep(100)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

        assert node.store.request_count - before < 2 * 100
    assert await cluster.marked() == []


async def test_no_ledger_is_left_to_other_workers() -> None:
    """Other workers may be dead or busy."""
    cluster = await with_lost_b2(8)
    async with cluster.node() as node:
        for number in range(9):
            await Membership.join(cluster.store, PATHS, node_info(f"busy-{number}", Role.WORKER))
        began_s = cluster.clock.now_s()
        await run_until_unmarked(cluster, by_hand(cluster, node, *range(8)), *range(8))

        assert cluster.clock.now_s() - began_s < ReplicationSettings().idle_wait_s


async def test_it_repairs_by_hand_while_auto_recovery_is_disabled() -> None:
    cluster = await with_lost_b2(1)
    await cluster.store.create(PATHS.disable)
    async with cluster.node() as node:
        await run_until_unmarked(cluster, by_hand(cluster, node, 0), 0)

    await cluster.assert_whole(0)


async def test_a_repair_by_hand_has_no_share_of_other_ledgers() -> None:
    cluster = await with_lost_b2(0)
    await Membership.join(cluster.store, PATHS, node_info("hand", Role.HAND))
    async with cluster.node() as node:
        assert await node.queue.workers() == {node.store.session_id}
        assert await node.membership.reader_count() == 3, (
            "but it reads from bookies (S10), as checks do"
        )


# --- A ledger that lost copies and must be moved as well ------------------------------------------
#
# Otherwise its mark would report a loss for as long as the draining bookie has no target.


async def lost_and_draining(*, last: int = 9) -> Cluster:
    """Return a ledger on B1, B2 and B3: B2 is lost, B3 drains, and only B4 is registered
    besides."""
    cluster = await Cluster.start(B1, B2, B3, B4)
    await cluster.write_ledger((B1, B2, B3), last=last)
    await cluster.kill(B2)
    await drain(cluster, B3)
    await cluster.mark(B2)
    await mark_as_our_own(cluster, B3)
    return cluster


async def mark_as_our_own(cluster: Cluster, bookie: BookieId) -> None:
    """Mark the ledger in our own queue, as the leader does for a draining bookie."""
    data = znodes.mark_to_bytes(Mark(replicas=(bookie,), ctime_ms=1))
    await cluster.store.create(PRIVATE.mark(LEDGER), data, with_parents=True)


async def waits_for_a_target(cluster: Cluster, node: Node) -> None:
    await waits(cluster, node, Reason.NO_TARGET)


async def waits(cluster: Cluster, node: Node, reason: Reason) -> None:
    async def is_put_aside() -> bool:
        notes = await node.notes.read_all([LEDGER])
        is_noted = [note.reason for note in notes] == [reason]
        return is_noted and not await cluster.locked()

    await until(cluster, is_put_aside)


@pytest.mark.parametrize("last", [9, 4_999], ids=["small", "the ledger is inspected again"])
async def test_the_loss_is_repaired_and_only_the_move_stays_marked(last: int) -> None:
    cluster = await lost_and_draining(last=last)

    async with cluster.node() as node, working(node):
        await waits_for_a_target(cluster, node)

    assert await cluster.ensembles() == [(B1, B4, B3)]
    await cluster.assert_whole()
    assert (await cluster.marked(), await cluster.marked(PRIVATE)) == ([], [LEDGER])


async def test_a_bookie_back_with_all_copies_is_no_loss_either() -> None:
    cluster = await lost_and_draining()
    await cluster.kill(B4)
    await cluster.revive(B2)

    async with cluster.node() as node, working(node):
        await waits_for_a_target(cluster, node)

    assert await cluster.ensembles() == [(B1, B2, B3)]
    assert (await cluster.marked(), await cluster.marked(PRIVATE)) == ([], [LEDGER])


async def test_of_a_ledger_being_written_only_the_drain_stays_marked() -> None:
    cluster = await Cluster.start(B1, B2, B3, B4)
    await cluster.write_ledger((B1, B2, B3), write_quorum=3, ack_quorum=2, state=LedgerState.OPEN)
    await drain(cluster, B3)
    await cluster.mark(B2)
    await mark_as_our_own(cluster, B3)

    async with cluster.node() as node, working(node):
        await waits(cluster, node, Reason.OPEN_FRAGMENT)

    assert (await cluster.marked(), await cluster.marked(PRIVATE)) == ([], [LEDGER])


async def test_a_bookie_both_marked_and_draining_keeps_the_mark() -> None:
    cluster = await lost_and_draining()
    await cluster.mark(B2, B3)

    async with cluster.node() as node, working(node):
        await waits_for_a_target(cluster, node)

    assert (await cluster.marked(), await cluster.marked(PRIVATE)) == ([LEDGER], [LEDGER])


async def test_an_unrepaired_loss_stays_marked() -> None:
    cluster = await lost_and_draining()
    await cluster.kill(B4)

    async with cluster.node() as node, working(node):
        await waits_for_a_target(cluster, node)

    assert (await cluster.marked(), await cluster.marked(PRIVATE)) == ([LEDGER], [LEDGER])


async def test_a_further_loss_marked_meanwhile_keeps_the_mark() -> None:
    cluster = await lost_and_draining()
    async with cluster.node() as node:
        lease = await node.queue.lease((await node.queue.read([LEDGER]))[0])
        assert lease is not None
        await cluster.mark(B1)

        assert not await node.queue.unmark_loss(lease, [])

    assert await cluster.marked() == [LEDGER]
