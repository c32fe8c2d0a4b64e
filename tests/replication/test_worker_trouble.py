"""The ReplicationWorker while it is disabled, or when something fails."""

import asyncio
import random
from contextlib import AsyncExitStack
from functools import partial

import pytest
from structlog.testing import capture_logs

from daemon.threads import leaves
from ledgers.bookies import Transfer
from ledgers.errors import (
    BookmenderError,
    JournalError,
    QuotaError,
    SessionLostError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.model import BookieId, LedgerState
from ledgers.store import Create, Delete, Operation
from replication.backoff import PROBE_INTERVAL_S
from replication.ledger_record import WaitingNote, WaitingNotes
from replication.reasons import Blocked, Facts, Reason
from replication.repair import Outcome
from replication.settings import ReplicationSettings
from replication.work_queue import LedgerLease, QueueListing
from replication.worker import TIDY_INTERVAL_S
from tests.memory.bookies import Fault, Op
from tests.memory.store import Fault as StoreFault
from tests.memory.store import MemoryStore
from tests.replication.cluster import (
    Cluster,
    fault_once,
    lease_attempts,
    queue_empty,
    shut_out,
    until,
    with_lost_b2,
)
from tests.replication.ledger_values import B1, B2, B3, B4, B5
from tests.replication.nodes import LEDGER, PATHS, working
from tests.replication.overload import overload, overloaded
from tests.replication.refusing import refuse, writes_below
from tests.replication.repairs import lost_b2, open_ledger
from tests.replication.watched import settle

scene = partial(with_lost_b2, 3)

# --- Denied access --------------------------------------------------------------------------------


async def test_denied_access_to_a_mark_stops_no_other_ledger(cluster: Cluster) -> None:
    async with cluster.node() as node:
        shut_out(node.store, PATHS.mark(1))
        with capture_logs() as logs:
            async with working(node):
                await asyncio.sleep(60)

        assert await node.queue.is_marked(1)
    assert await cluster.marked() == [1]
    told = [each for each in logs if each["event"] == "mark.access_denied"]
    assert [(each["ledger_id"], each["log_level"]) for each in told] == [(1, "warning")]


@pytest.mark.parametrize("level", [2, 3], ids=["of ledgers", "of such directories"])
async def test_denied_access_to_a_directory_stops_no_other_ledger(level: int) -> None:
    cluster = await with_lost_b2(3)
    elsewhere = 1 << 40
    await cluster.mark(B2, ledger_id=elsewhere)
    directory = PATHS.mark(elsewhere).rsplit("/", level)[0]
    async with cluster.node() as node:
        shut_out(node.store, directory)
        with capture_logs() as logs:
            async with working(node):
                await asyncio.sleep(60)

    assert await cluster.marked() == [elsewhere]
    told = [each for each in logs if each["event"] == "marks.access_denied"]
    assert [each["path"] for each in told] == [directory]


@pytest.mark.parametrize(
    "path",
    [
        PATHS.waiting_note(1),
        PATHS.waiting,
        f"{PATHS.nodes}/another",
        PATHS.urgent,
        PATHS.finding(1),
    ],
    ids=["a note", "all notes", "a node", "the list of urgent ledgers", "a finding"],
)
async def test_denied_access_to_our_own_znodes_ends_no_session(cluster: Cluster, path: str) -> None:
    await cluster.mark(B3, ledger_id=1)  # which is there, so that it is asked what was found of it
    if await cluster.store.exists(path) is None:
        await cluster.store.create(path, b"{}", with_parents=True)
    async with cluster.node() as node:
        shut_out(node.store, path)
        async with working(node):
            await asyncio.sleep(60)

    assert set(await cluster.marked()) <= ({1} if path == PATHS.waiting_note(1) else set())


@pytest.mark.compat(
    "TestLedgerUnderreplicationManager.testDisableLedegerReplication",
    verdict="other",
    why="while disabled, bookmender neither repairs nor marks; it marks when it is enabled again",
)
@pytest.mark.compat("TestLedgerUnderreplicationManager.testEnableLedgerReplication", verdict="same")
async def test_while_disabled_no_ledger_is_leased(cluster: Cluster) -> None:
    """Enabling is noticed at once."""
    await cluster.store.create(PATHS.disable)
    settings = ReplicationSettings(idle_wait_s=100)

    async with cluster.node(settings=settings) as node, working(node):
        await asyncio.sleep(50)
        assert len(await cluster.marked()) == 3
        assert await cluster.locked() == []

        await cluster.store.delete(PATHS.disable)
        took_s = await until(cluster, lambda: queue_empty(cluster))

    assert took_s < 1


@pytest.mark.compat(
    "TestLedgerUnderreplicationManager.testDisableLedegerReplication", verdict="other"
)
async def test_disabling_lets_current_repairs_finish() -> None:
    cluster = await with_lost_b2(20)

    async def copy_for_a_second(transfer: Transfer) -> None:
        await asyncio.sleep(1)

    cluster.bookies.before_transfer = copy_for_a_second
    settings = ReplicationSettings(ledgers_at_once=4)
    async with cluster.node(settings=settings) as node, working(node):
        await until(cluster, lambda: locked_count(cluster, 4))
        await cluster.store.create(PATHS.disable)
        await asyncio.sleep(30)

        assert len(await cluster.marked()) == 16
        assert await cluster.locked() == []


async def locked_count(cluster: Cluster, count: int) -> bool:
    return len(await cluster.locked()) == count


# --- Failures -------------------------------------------------------------------------------------


@pytest.mark.compat(
    "TestReplicationWorker.testRWShutDownInTheCaseOfZKOperationFailures", verdict="other"
)
@pytest.mark.compat(
    "G24", verdict="better", why="an unexpected error costs one attempt at one ledger"
)
async def test_a_crashing_repair_stops_no_other_and_returns_its_lease() -> None:
    cluster = await with_lost_b2(5)

    async with cluster.node() as node:
        repair = node.repairer.repair

        async def crash_on_3(lease: LedgerLease, sighting: object = None, **_: object) -> Outcome:
            if lease.ledger_id == 3:
                raise ZeroDivisionError
            return await repair(lease)

        node.repairer.repair = crash_on_3  # type: ignore[method-assign]
        times_s = lease_attempts(cluster, 3)
        async with working(node):
            await asyncio.sleep(15)

            assert await cluster.marked() == [3]
            assert await cluster.locked() == []
            assert len(times_s) == 2
    await cluster.assert_whole(0, 1, 2, 4)


@pytest.mark.compat(
    "TestReplicationWorker.testRWZKConnectionLostOnNonRecoverableZkError",
    verdict="better",
    why="the role drops its leases and continues with a new session, in the same process",
)
@pytest.mark.compat("TestLedgerUnderreplicationManager.testLocking", verdict="same")
async def test_a_lost_session_ends_the_worker_and_every_lock(cluster: Cluster) -> None:

    async def copy_for_long(transfer: Transfer) -> None:
        await asyncio.sleep(100)

    cluster.bookies.before_transfer = copy_for_long
    async with cluster.node() as node:
        worker = asyncio.create_task(node.worker.run())
        await until(cluster, lambda: locked_count(cluster, 3))
        cluster.tree.expire(node.store)
        await asyncio.wait([worker], timeout=10)

        error = worker.exception()
        assert error is not None
        assert {type(leaf) for leaf in leaves(error)} == {SessionLostError}
    assert await cluster.locked() == []
    assert len(await cluster.marked()) == 3


@pytest.mark.compat("TestReplicationWorker.testRWZKConnectionLost", verdict="same")
async def test_a_suspended_session_pauses_and_then_continues() -> None:
    cluster = await with_lost_b2(10)

    async with cluster.node() as node, working(node):
        await settle(30)
        cluster.tree.suspend(node.store)
        before = cluster.tree.snapshot()
        await asyncio.sleep(8)
        assert cluster.tree.snapshot() == before

        cluster.tree.resume(node.store)
        await until(cluster, lambda: queue_empty(cluster))

    await cluster.assert_whole(*range(10))


@pytest.mark.compat(
    "TestReplicationWorker.testRWShutDownInTheCaseOfZKOperationFailures", verdict="other"
)
async def test_an_unreadable_queue_is_read_again(cluster: Cluster) -> None:

    async with cluster.node() as node:
        look, failures = node.queue.list_ledgers, [UnavailableError("no answer in time")] * 3

        async def fail_at_first(rng: random.Random) -> QueueListing:
            if failures:
                raise failures.pop()
            return await look(rng)

        node.queue.list_ledgers = fail_at_first  # type: ignore[method-assign]
        async with working(node):
            took_s = await until(cluster, lambda: queue_empty(cluster))

    assert took_s < 4 * ReplicationSettings().idle_wait_s
    await cluster.assert_whole(*range(3))


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(StoreFault.LOST_REPLY, id="it was leased, as is found out later"),
        pytest.param(StoreFault.LOST_REQUEST, id="it was not, as is found out then"),
    ],
)
async def test_rule_s14_an_unknown_outcome_of_a_lease_ends_no_session(fault: StoreFault) -> None:
    cluster = await with_lost_b2(3)
    async with cluster.node() as node:
        throttled = overload(node.store, PATHS.lock(1))
        fault_once(cluster, node.store, Create, fault, path=PATHS.lock(1))
        async with working(node):
            await asyncio.sleep(60)
            assert 1 in await cluster.marked()

            throttled.clear()
            await until(cluster, lambda: queue_empty(cluster))
    await cluster.assert_whole(*range(3))


async def test_a_lock_that_cannot_be_deleted_at_first_is_deleted_later(cluster: Cluster) -> None:
    async with cluster.node() as node:
        repair, failures = node.repairer.repair, [UnavailableError("no answer in time")]
        throttled = overload(node.store)

        async def fail_on_1(lease: LedgerLease, sighting: object = None, **_: object) -> Outcome:
            if lease.ledger_id == 1 and failures:
                throttled.add(lease.lock.path)
                raise failures.pop()
            return await repair(lease)

        node.repairer.repair = fail_on_1  # type: ignore[method-assign]
        async with working(node):
            await asyncio.sleep(60)
            assert len(await cluster.locked()) == 1
            assert await cluster.marked() == [1], "the others go on"

            throttled.clear()
            await until(cluster, lambda: queue_empty(cluster))
    await cluster.assert_whole(*range(3))


@pytest.mark.parametrize("seed", range(5))
async def test_a_worker_survives_an_overloaded_zookeeper(seed: int) -> None:
    cluster = await with_lost_b2(12)
    async with cluster.node() as node:
        worker = asyncio.create_task(node.worker.run())
        with overloaded(node.store, random.Random(seed)):
            await asyncio.sleep(120)
        assert not worker.done(), worker.exception()
        await until(cluster, lambda: queue_empty(cluster))
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
    await cluster.assert_whole(*range(12))


@pytest.mark.compat("G14", verdict="better")
async def test_an_unresponsive_bookie_defers_only_its_own_ledgers(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B5, B2), ledger_id=9)
    await cluster.mark(B2, ledger_id=9)
    cluster.bookies.fail(B5, Op.READ, Fault(error=UnavailableError))

    async with cluster.node(local=B4) as node, working(node):
        await asyncio.sleep(5)
        assert await cluster.marked() == [9]

        cluster.bookies.stop_failing(B5, Op.READ)
        await until(cluster, lambda: queue_empty(cluster))
    await cluster.assert_whole(9, *range(3))


# --- The ReplicationWorker where ZooKeeper refuses a write ----------------------------------------

LEDGERS = 20
LOCKS_MAX = 5


async def test_a_quota_with_room_for_few_locks_slows_the_work_only() -> None:
    """Each completed ledger frees room: its mark and its lock are deleted."""
    cluster = await with_lost_b2(LEDGERS)
    async with cluster.node() as node:
        refuse_further_locks(node.store, cluster)
        async with working(node):
            await asyncio.sleep(600)

    assert await queue_empty(cluster)
    await cluster.assert_whole(*range(LEDGERS))


def refuse_further_locks(store: MemoryStore, cluster: Cluster) -> None:
    locks = PATHS.locks

    def is_refused(operation: Operation) -> bool:
        parent = cluster.tree.nodes.find(locks)
        held_count = 0 if parent is None else len(parent.names)
        return writes_below(locks)(operation) and held_count >= LOCKS_MAX

    refuse(store, is_refused, QuotaError)


@pytest.mark.parametrize("error", [QuotaError, UnauthorizedError])
async def test_a_note_that_cannot_be_written_stops_no_repair(error: type[BookmenderError]) -> None:
    cluster = await open_ledger()
    await cluster.kill(B2)
    async with cluster.node() as node:
        refuse(node.store, writes_below(PATHS.waiting), error)
        with capture_logs() as logs:
            async with working(node):
                await asyncio.sleep(120)

    assert (await cluster.metadata()).state is LedgerState.CLOSED
    assert await cluster.marked() == []
    assert [each["event"] for each in logs].count("notes.write_failed") == 1


async def test_without_a_note_the_ledger_is_not_tried_all_the_time() -> None:
    cluster = await lost_b2(B1, B2, B3)  # no bookie can be a target
    async with cluster.node() as node:
        refuse(node.store, writes_below(PATHS.waiting), QuotaError)
        tries: list[int] = []
        repair = node.repairer.repair

        async def counted(*args: object, **options: object) -> object:
            tries.append(1)
            return await repair(*args, **options)  # type: ignore[arg-type]

        node.repairer.repair = counted  # type: ignore[method-assign, assignment]
        async with working(node):
            await asyncio.sleep(600)

    assert 1 < len(tries) < 20


@pytest.mark.parametrize("error", [QuotaError, UnauthorizedError])
async def test_refused_metadata_writes_are_noted_for_all_nodes(
    error: type[BookmenderError],
) -> None:
    """No other node copies in vain."""
    cluster = await lost_b2()
    metadata = cluster.manager.path(LEDGER)
    async with AsyncExitStack() as nodes:
        for name in ("one", "two", "three"):
            node = await nodes.enter_async_context(cluster.node(name))
            refuse(node.store, writes_below(metadata), error)
            await nodes.enter_async_context(working(node))
        await asyncio.sleep(3_600)
        (note,) = await WaitingNotes(cluster.store, PATHS).read_all([LEDGER])

    copies = [transfer for transfer, _ in cluster.bookies.transfers if transfer.target is not None]
    assert note.reason is Reason.WRITE_REFUSED
    assert note.reason.needs_help
    assert "refused" in note.blocked.facts.errors[0]
    assert 1 <= len(copies) < 10
    assert await cluster.marked() == [LEDGER]


async def test_once_the_write_is_allowed_the_ledger_is_repaired() -> None:
    cluster = await lost_b2()
    is_full = True
    metadata = cluster.manager.path(LEDGER)
    async with cluster.node() as node:
        refuse(
            node.store, lambda operation: is_full and writes_below(metadata)(operation), QuotaError
        )
        async with working(node):
            await asyncio.sleep(60)
            assert await cluster.marked() == [LEDGER]
            is_full = False
            await cluster.unregister(B5)
            await cluster.register(B5)  # a better world: tried at once

            await until(cluster, lambda: queue_empty(cluster))
    await cluster.assert_whole()


@pytest.mark.parametrize("spare", [(), (B5,)], ids=["the lease is returned", "it is repaired"])
async def test_a_lock_that_may_not_be_deleted_does_not_end_the_session(
    spare: tuple[BookieId, ...],
) -> None:
    cluster = await lost_b2(B1, B2, B3, *spare)
    locks = PATHS.locks
    async with cluster.node() as node:
        refuse(
            node.store,
            lambda each: isinstance(each, Delete) and each.path.startswith(locks),
            UnauthorizedError,
        )
        with capture_logs() as logs:
            async with working(node):
                await asyncio.sleep(60)

        assert "lock.release_denied" in {each["event"] for each in logs}
        assert len(await cluster.locked()) == 1
        assert await cluster.marked() == ([] if spare else [LEDGER])


async def test_a_note_that_may_not_be_deleted_stops_no_other() -> None:
    cluster, gone = await Cluster.start(), 50
    async with cluster.node() as node:
        await node.notes.put(
            WaitingNote(
                ledger_id=gone, blocked=Blocked(reason=Reason.NO_COPY), node="node-0", since_ms=0
            )
        )
        await node.note_unproven(gone + 1, Facts(errors=("why",)))
        notes = PATHS.waiting
        refuse(
            node.store,
            lambda each: isinstance(each, Delete) and each.path == PATHS.waiting_note(gone),
            UnauthorizedError,
        )
        async with working(node):
            await asyncio.sleep(TIDY_INTERVAL_S + 5)

    assert await cluster.store.children(notes) == [str(gone)]


# --- Ledgers deferred because a host cannot record metadata writes are tried soon after it can ----


PATIENT = ReplicationSettings(retry_min_s=600, retry_max_s=600, idle_wait_s=0.5)


class Journal:
    """A journal that is full until a test changes that."""

    is_full = True
    asked_count = 0

    async def __call__(self, ledger_id: int, before: bytes, after: bytes) -> None:
        self.asked_count += 1
        if self.is_full:
            raise JournalError("/var/lib/x cannot be written to: free disk space there")


async def test_the_first_successful_try_brings_the_others_forward() -> None:
    cluster, journal = await with_lost_b2(LEDGERS), Journal()
    async with cluster.node(journal=journal, settings=PATIENT) as node, working(node):
        await asyncio.sleep(5)
        journal.is_full = False

        took_s = await until(cluster, lambda: queue_empty(cluster))

    assert took_s < PROBE_INTERVAL_S + 5
    await cluster.assert_whole(*range(LEDGERS))


async def test_until_then_only_one_of_them_is_tried_at_times() -> None:
    """A try copies first, and in vain."""
    cluster, journal = await with_lost_b2(LEDGERS), Journal()
    async with cluster.node(journal=journal, settings=PATIENT) as node, working(node):
        await asyncio.sleep(5)
        first_count = journal.asked_count
        await asyncio.sleep(10 * PROBE_INTERVAL_S)

    assert first_count == LEDGERS
    assert 8 <= journal.asked_count - first_count <= 10


async def test_each_try_is_noted() -> None:
    cluster = await with_lost_b2(1)
    async with cluster.node(journal=Journal(), settings=PATIENT) as node, working(node):
        await asyncio.sleep(5)
        (first,) = await WaitingNotes(cluster.store, PATHS).read_all([0])
        await asyncio.sleep(PROBE_INTERVAL_S + 5)
        (second,) = await WaitingNotes(cluster.store, PATHS).read_all([0])

    assert (first.reason, second.reason) == (Reason.JOURNAL, Reason.JOURNAL)
    assert (first.tries, second.tries) == (1, 2)
    assert second.since_ms == first.since_ms
    assert second.next_try_ms > first.next_try_ms
