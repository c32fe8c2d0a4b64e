"""The ReplicationWorker in virtual time: which ledgers it leases, defers and tries again."""

import asyncio
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from ledgers.bookies import Transfer
from ledgers.errors import NoAnswerError
from ledgers.model import BookieId, LedgerState
from ledgers.store import MetadataStore
from replication import znodes
from replication.copying import REPAIRED_BYTES, REPAIRED_ENTRIES
from replication.ledger_record import WaitingNote
from replication.reasons import Blocked, Facts, Reason
from replication.repair import DONE, waiting
from replication.settings import ReplicationSettings
from replication.slots import LATE_TIMES_MAX
from replication.worker import TIDY_INTERVAL_S, Summary
from replication.znodes import Mark
from tests.memory.bookies import NO_FAULT, Fault
from tests.memory.history import MemoryHistory
from tests.replication.cluster import (
    ENTRY_BYTES,
    Cluster,
    lease_attempts,
    queue_empty,
    until,
    with_lost_b2,
)
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6, B7
from tests.replication.nodes import LEDGER, PATHS, working
from tests.replication.repairs import THREE, drain
from tests.replication.watched import settle
from tests.replication.workers import noted, without_target
from tests.virtual_time import LoopClock

# --- Many at once ---------------------------------------------------------------------------------


@pytest.mark.compat(
    "TestReplicationWorker.testMultipleLedgerReplicationWithReplicationWorker",
    verdict="better",
    why="many concurrently",
)
@pytest.mark.compat(
    "TestReplicationWorker.testReplicationStats",
    verdict="other",
    why="metrics with names of our own count ledgers, entries and bytes; recording "
    "rules have Java's",
)
async def test_every_marked_ledger_is_repaired_and_counted() -> None:
    cluster = await with_lost_b2(30)
    entries, entry_bytes = REPAIRED_ENTRIES._value.get(), REPAIRED_BYTES._value.get()

    async with cluster.node() as node, working(node):
        await until(cluster, lambda: queue_empty(cluster))

    await cluster.assert_whole(*range(30))
    assert REPAIRED_ENTRIES._value.get() - entries == 30 * 7
    assert REPAIRED_BYTES._value.get() - entry_bytes == 30 * 7 * ENTRY_BYTES


@pytest.mark.compat(
    "TestReplicationWorker.testMultipleLedgerReplicationWithReplicationWorker", verdict="better"
)
async def test_only_the_configured_number_is_repaired_at_once() -> None:
    cluster = await with_lost_b2(20)
    copying: list[int] = []
    most_at_once = 0

    async def copy_for_a_while(transfer: Transfer) -> None:
        nonlocal most_at_once
        if transfer.target is not None:
            copying.append(transfer.ledger_id)
            most_at_once = max(most_at_once, len(copying))
            await asyncio.sleep(0.4)  # within what a ledger keeps its place for
            copying.remove(transfer.ledger_id)

    cluster.bookies.before_transfer = copy_for_a_while
    settings = ReplicationSettings(ledgers_at_once=5)
    async with cluster.node(settings=settings) as node, working(node):
        took_s = await until(cluster, lambda: queue_empty(cluster))

    assert most_at_once == 5
    assert 1.6 <= took_s < 2


@pytest.mark.compat("G28", verdict="better")
async def test_copies_under_way_are_spread_evenly_over_the_bookies() -> None:
    cluster = await with_lost_b2(20)

    async def copy_for_a_second(transfer: Transfer) -> None:
        if transfer.target is not None:
            await asyncio.sleep(1)

    cluster.bookies.before_transfer = copy_for_a_second
    async with cluster.node() as node, working(node):
        await until(cluster, lambda: queue_empty(cluster))

    targets = Counter(t.target for t, _ in cluster.bookies.transfers if t.target is not None)
    assert sorted(targets) == [B4, B5, B6, B7]
    assert set(targets.values()) == {5}


@pytest.mark.compat("TestLedgerUnderreplicationManager.testBasicInteraction", verdict="better")
async def test_a_later_mark_is_found_without_an_event() -> None:
    cluster = await with_lost_b2(2)
    await cluster.store.delete(PATHS.mark(1))

    async with cluster.node() as node, working(node):
        await asyncio.sleep(30)
        await cluster.mark(B2, ledger_id=1)
        took_s = await until(cluster, lambda: queue_empty(cluster))

    assert took_s <= ReplicationSettings().idle_wait_s + 0.2


async def test_a_ledger_marked_again_during_its_repair_is_leased_again() -> None:
    cluster = await with_lost_b2(1)

    async def mark_again(transfer: Transfer) -> None:
        cluster.bookies.before_transfer = None
        await cluster.mark(B2, B3, ledger_id=0)

    cluster.bookies.before_transfer = mark_again
    async with cluster.node() as node, working(node):
        took_s = await until(cluster, lambda: queue_empty(cluster))

    assert took_s < 1
    await cluster.assert_whole(0)


@pytest.mark.compat(
    "TestReplicationWorker.testRWShouldReplicateTheLedgersAfterTimeoutIfLastFragmentIsUR",
    verdict="better",
)
@pytest.mark.compat(
    "G14",
    verdict="better",
    why="each deferred ledger has its own backoff, and a deleted one has none",
)
async def test_a_ledger_in_its_grace_keeps_its_lock() -> None:
    """It delays no other ledger."""
    cluster = await with_lost_b2(4)
    await cluster.write_ledger(
        THREE, ledger_id=9, state=LedgerState.OPEN, write_quorum=3, ack_quorum=2
    )
    await cluster.mark(B2, B2, ledger_id=9)  # the ledger at most risk
    settings = ReplicationSettings(ledgers_at_once=1)

    async with cluster.node(settings=settings) as node, working(node):
        await asyncio.sleep(settings.open_ledger_grace_s - 1)

        assert await cluster.marked() == [9]
        assert await cluster.locked() == ["urL0000000009"]
        assert (await noted(node, 9)).reason is Reason.OPEN_LEDGER_GRACE

        took_s = await until(cluster, lambda: queue_empty(cluster))
        assert took_s < 3
        assert await node.notes.read(9) is None
    await cluster.assert_whole(9, *range(4))


async def test_ledgers_in_grace_beyond_their_bound_are_deferred(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("replication.worker.GRACES_AT_ONCE_MAX", 2)
    cluster = await Cluster.start()
    for ledger_id in range(5):
        await cluster.write_ledger(
            THREE, ledger_id=ledger_id, state=LedgerState.OPEN, write_quorum=3, ack_quorum=2
        )
        await cluster.mark(ledger_id=ledger_id)
    await cluster.kill(B2)

    async with cluster.node() as node, working(node):
        await asyncio.sleep(5)
        assert len(await cluster.locked()) == 2

        await asyncio.sleep(300)
        await cluster.assert_queue_empty()
    await cluster.assert_whole(*range(5))


# --- Deferred -------------------------------------------------------------------------------------


async def test_a_deferred_ledger_has_a_note_with_its_reason() -> None:
    cluster = await without_target(LEDGER)

    async with cluster.node("node-1") as node, working(node):
        await asyncio.sleep(5)

        note = await noted(node)
        assert (note.ledger_id, note.reason, note.node) == (LEDGER, Reason.NO_TARGET, "node-1")
        assert note.since_ms == cluster.clock.wall_ms() - 5_000
        assert note.tries == 1
        assert 3_000 <= note.next_try_ms - cluster.clock.wall_ms() <= 7_000
        assert note.blocked.facts.absent == (B2,)
        assert await cluster.locked() == []
        assert await cluster.marked() == [LEDGER]


@pytest.mark.compat(
    "TestReplicationWorker.testDeferLedgerLockReleaseForReplicationWorker",
    verdict="other",
    why="the lock is released during the backoff, which is configurable (10 s to 5 min, with "
    "jitter); one note per ledger says why",
)
async def test_it_is_tried_again_after_waits_that_double() -> None:
    cluster = await without_target(LEDGER)
    times_s = lease_attempts(cluster)
    settings = ReplicationSettings(retry_min_s=10, retry_max_s=40, idle_wait_s=0.5)

    async with cluster.node(settings=settings) as node, working(node):
        await asyncio.sleep(200)

    waits_s = [after - before for before, after in pairwise(times_s)]
    assert len(waits_s) >= 5
    for wait_s, nominal_s in zip(waits_s, [10, 20, 40, 40, 40], strict=False):
        assert 0.8 * nominal_s <= wait_s <= 1.2 * nominal_s + settings.idle_wait_s


async def test_a_note_is_deleted_by_the_node_that_completes_the_ledger() -> None:
    cluster = await without_target(LEDGER)
    async with cluster.node("node-1") as one, working(one):
        await asyncio.sleep(5)
    await cluster.register(B4)

    async with cluster.node("node-2") as two, working(two):
        await until(cluster, lambda: queue_empty(cluster))
        await settle()

        assert await two.notes.ledger_ids() == set()


async def test_a_reason_that_returns_is_noted_again() -> None:
    cluster = await without_target(LEDGER)

    async with cluster.node() as node, working(node):
        await asyncio.sleep(5)
        await cluster.store.delete(PATHS.mark(LEDGER))
        await cluster.store.delete(PATHS.waiting_note(LEDGER))  # another node was done with it
        await asyncio.sleep(5)
        await cluster.mark(B2)
        await asyncio.sleep(60)

        assert await node.notes.ledger_ids() == {LEDGER}


async def test_a_note_without_a_mark_is_deleted() -> None:
    cluster = await without_target(LEDGER)

    async with cluster.node() as node:
        for ledger_id in (LEDGER, 50):
            await node.notes.put(
                WaitingNote(
                    ledger_id=ledger_id,
                    blocked=Blocked(reason=Reason.NO_COPY),
                    node="node-0",
                    since_ms=0,
                )
            )
        async with working(node):
            await asyncio.sleep(TIDY_INTERVAL_S + 5)

            assert await node.notes.ledger_ids() == {LEDGER}


async def test_many_deferred_ledgers_cost_an_idle_worker_few_requests() -> None:
    cluster = await without_target(*range(100))
    settings = ReplicationSettings(retry_min_s=3600, retry_max_s=3600)

    async with cluster.node(settings=settings) as node, working(node):
        await asyncio.sleep(10)
        before = node.store.request_count
        await asyncio.sleep(600)

        looks = 600 / settings.idle_wait_s
        assert node.store.request_count - before < 10 * looks + 150 * 600 / TIDY_INTERVAL_S


async def test_waits_between_tries_that_are_applied_count_from_the_next_try_on() -> None:
    cluster = await without_target(LEDGER)
    times_s = lease_attempts(cluster)
    settings = ReplicationSettings(retry_min_s=10, retry_max_s=10, idle_wait_s=0.5)

    async with cluster.node(settings=settings) as node, working(node):
        await asyncio.sleep(5)
        node.worker.apply(replace(settings, retry_min_s=50, retry_max_s=50))
        await asyncio.sleep(200)

    first_s, *others_s = [after - before for before, after in pairwise(times_s)]
    assert first_s < 15
    assert min(others_s) >= 40


async def test_an_open_ledger_grace_that_is_applied_counts_for_the_next_ledger() -> None:
    cluster = await with_lost_b2(0)
    await cluster.write_ledger(
        THREE, ledger_id=9, state=LedgerState.OPEN, write_quorum=3, ack_quorum=2
    )

    async with cluster.node() as node, working(node):
        node.worker.apply(replace(ReplicationSettings(), open_ledger_grace_s=500))
        await cluster.mark(B2, ledger_id=9)
        await asyncio.sleep(470)

        assert await cluster.marked() == [9]
        assert await until(cluster, lambda: queue_empty(cluster)) < 50


SLOTS = 4
DRAINING_COUNT = 2 * SLOTS * (1 + LATE_TIMES_MAX)
"""More than there are places, and loans of them."""
SOON_S = 10


async def drained_slowly(*, copy_s: float) -> Cluster:
    """Drain B2: its many ledgers are marked in our private queue, and each copy lasts that long.

    The copy of the first ledger never ends.
    """
    cluster = await Cluster.start()
    await drain(cluster, B2)
    for ledger_id in range(DRAINING_COUNT):
        await cluster.write_ledger((B1, B2, B3), ledger_id=ledger_id)
        path = PATHS.private.mark(ledger_id)
        data = znodes.mark_to_bytes(Mark(replicas=(B2,), ctime_ms=1 + ledger_id))
        await cluster.store.create(path, data, with_parents=True)

    async def copy_slowly(transfer: Transfer) -> None:
        if transfer.target is not None and transfer.ledger_id < DRAINING_COUNT:
            await asyncio.sleep(copy_s if transfer.ledger_id else 1_000_000)

    cluster.bookies.before_transfer = copy_slowly
    return cluster


@pytest.mark.parametrize("others_marked", [0, 3])
async def test_a_loss_is_repaired_at_once_if_other_slots_are_taken(others_marked: int) -> None:
    cluster = await drained_slowly(copy_s=100_000)
    settings = ReplicationSettings(ledgers_at_once=SLOTS, idle_wait_s=2)
    async with cluster.node(settings=settings) as node, working(node):
        await asyncio.sleep(100)
        assert len(await cluster.locked()) == (SLOTS - 1) * (1 + LATE_TIMES_MAX)

        for ledger_id in range(1_000, 1_001 + others_marked):
            await cluster.write_ledger((B4, B5, B6), ledger_id=ledger_id)
            await cluster.mark(B6, ledger_id=ledger_id)

        async def is_repaired() -> bool:
            return not await cluster.marked()

        assert await until(cluster, is_repaired) < SOON_S


async def test_the_other_slots_are_used_again_when_they_are_free() -> None:
    copy_s = 500
    cluster = await drained_slowly(copy_s=copy_s)
    settings = ReplicationSettings(ledgers_at_once=SLOTS, idle_wait_s=1_000)

    async with cluster.node(settings=settings) as node, working(node):
        await asyncio.sleep(3 * copy_s + 2 * SOON_S)

        marked = [i for i in range(DRAINING_COUNT) if await node.queue.is_marked(i)]
    assert marked == [0]


FOREIGN = 1
"""A ledger leased by another node. Its mark keeps the directories, so no event reports others."""
LOST = 2
SELDOM = ReplicationSettings(idle_wait_s=600)


async def idle_cluster() -> Cluster:
    cluster = await Cluster.start(B1, B2, B3, B4)
    for ledger_id in (FOREIGN, LOST):
        await cluster.write_ledger((B1, B2, B3), ledger_id=ledger_id)
    await cluster.mark(B2, ledger_id=FOREIGN)
    await cluster.store.create(PATHS.lock(FOREIGN))
    return cluster


async def is_marked(store: MetadataStore) -> bool:
    return await store.exists(PATHS.mark(LOST)) is not None


@pytest.mark.parametrize("marked_after_s", [0.01, 0.3, 3.0])
async def test_marks_soon_after_a_loss_are_found_soon(marked_after_s: float) -> None:
    """The wait is no longer than the marks took to come."""
    cluster = await idle_cluster()

    async with cluster.node(settings=SELDOM) as node, working(node):
        await asyncio.sleep(3_000)
        await cluster.kill(B2)
        await asyncio.sleep(marked_after_s)
        await cluster.mark(B2, ledger_id=LOST)

        async def is_done() -> bool:
            return not await is_marked(cluster.store)

        assert await until(cluster, is_done) <= marked_after_s + 0.2

    await cluster.assert_whole(LOST)


async def test_a_worker_without_events_looks_as_seldom_as_configured() -> None:
    cluster = await idle_cluster()

    async with cluster.node(settings=SELDOM) as node, working(node):
        await asyncio.sleep(3_000)
        before = node.store.request_count
        await asyncio.sleep(10 * 600)

        assert node.store.request_count - before < 10 * 20


IN_VAIN = waiting(Blocked(reason=Reason.NO_TARGET, facts=Facts(errors=("all are short of room",))))


async def test_the_history_gets_the_counts_of_repairs_alone() -> None:
    history = MemoryHistory(LoopClock())
    summary = Summary(history)
    for outcome in (DONE, IN_VAIN, structs.replace(DONE, entry_count=7, entry_bytes=70)):
        summary.add(outcome)

    summary.tell(at_work_count=0)
    summary.add(IN_VAIN)
    summary.tell(at_work_count=0)

    (event,) = history.events
    assert (event.ledger_count, event.entry_count, event.entry_bytes) == (2, 7, 70)


def test_repeated_deferrals_do_not_fill_the_log() -> None:
    summary = Summary()

    with capture_logs() as lines:
        for _ in range(100):
            summary.add(IN_VAIN)
            summary.tell_if_done()
        assert lines == []

        summary.tell(at_work_count=0)  # the interval is over
    assert [line["deferred_count"] for line in lines] == [100]


OPEN_LEDGERS = 100
PLACES = 8
SETTINGS = ReplicationSettings(ledgers_at_once=PLACES, idle_wait_s=1, open_ledger_grace_s=30)
SILENCE = Fault(delay_s=5.0, error=NoAnswerError)


async def with_open_ledgers(hanging: BookieId) -> Cluster:
    """Return open ledgers marked for B2, which is not registered because it hangs or is dead."""
    cluster = await Cluster.start()
    for ledger_id in range(OPEN_LEDGERS):
        await cluster.write_ledger(
            THREE, ledger_id=ledger_id, last=3, write_quorum=3, ack_quorum=2, state=LedgerState.OPEN
        )
        await cluster.mark(B2, ledger_id=ledger_id, ctime_ms=1)
    await (cluster.unregister(B2) if hanging == B2 else cluster.kill(B2))
    cluster.bookies.faults = lambda bookie, op, _: SILENCE if bookie == hanging else NO_FAULT
    return cluster


@pytest.mark.parametrize(
    ("hanging", "after_s"),
    [
        pytest.param(B2, 0, id="whether it is written to is asked before the grace"),
        pytest.param(B3, 31, id="the ledgers are recovered after it"),
    ],
)
async def test_open_ledgers_of_a_hanging_bookie_delay_no_closed_ones(
    hanging: BookieId, after_s: float
) -> None:
    """Were they to keep their places, the closed ones would wait for 5 s of each eighth of them."""
    cluster = await with_open_ledgers(hanging)
    closed = range(OPEN_LEDGERS, OPEN_LEDGERS + 5)

    async def are_done() -> bool:
        return not set(await cluster.marked()).intersection(closed)

    async with cluster.node(settings=SETTINGS) as node, working(node):
        await asyncio.sleep(after_s)
        for ledger_id in closed:
            await cluster.write_ledger((B1, B2), ledger_id=ledger_id, last=3)
            await cluster.mark(B2, ledger_id=ledger_id, ctime_ms=2)

        took_s = await until(cluster, are_done)

    assert took_s < 0.5 * OPEN_LEDGERS / PLACES * SILENCE.delay_s
