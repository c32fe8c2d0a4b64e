"""The end of a lease: the ledger is completed, or returned."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from itertools import combinations

import pytest

from ledgers.errors import (
    BookmenderError,
    ConflictError,
    LockLostError,
    SessionLostError,
    UnknownOutcomeError,
)
from ledgers.model import BookieId
from ledgers.store import Check, Create, Delete, SetData
from replication import znodes
from replication.by_hand import GRACE_WAIT_MAX_S, TELL_INTERVAL_S, WAIT_MAX_S, LockedError, locked
from replication.ledger_record import WaitingNote
from replication.marks import locked_ledger_ids
from replication.reasons import Blocked, Facts, Reason
from replication.work_queue import VERSION_MAX, LedgerLock
from tests.memory.store import Fault
from tests.replication.cluster import Cluster, fault_once
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import LEDGER, PATHS
from tests.replication.refusing import refuse
from tests.replication.watched import settle

MARK = PATHS.mark(LEDGER)
LOCK = PATHS.lock(LEDGER)
DIRECTORY = MARK.rpartition("/")[0]
EXTRA = "/extra"

# --- Finishing ------------------------------------------------------------------------------------


async def test_further_writes_succeed_or_fail_with_the_completion(cluster: Cluster) -> None:
    await cluster.store.create(EXTRA)
    await cluster.mark(B1)

    async with cluster.node() as node:
        lease = await node.lease()
        with pytest.raises(ConflictError):
            await node.queue.complete(lease, [SetData(path=EXTRA, data=b"x", version=5)])
        assert await cluster.marked() == [LEDGER]
        assert len(await cluster.locked()) == 1

        assert await node.queue.complete(lease, [SetData(path=EXTRA, data=b"x", version=0)])
        await cluster.assert_queue_empty()
    assert (await cluster.store.get(EXTRA))[0] == b"x"


@pytest.mark.compat("TestLedgerUnderreplicationManager.testManyFailures", verdict="same")
async def test_rule_s6_a_ledger_marked_again_meanwhile_stays_marked(cluster: Cluster) -> None:
    await cluster.store.create(EXTRA)
    await cluster.mark(B1)

    async with cluster.node() as node:
        lease = await node.lease()
        await cluster.mark(B1, B2)

        assert not await node.queue.complete(lease, [SetData(path=EXTRA, data=b"x", version=0)])

        assert (await cluster.store.get(EXTRA))[0] == b"x"
        assert await cluster.marked() == [LEDGER]
        assert not await node.queue.is_completed(lease)
        await node.queue.release(lease)
        assert await cluster.locked() == []


@pytest.mark.parametrize("is_directory_left", [False, True])
async def test_a_deleted_mark_counts_as_completed(is_directory_left: bool) -> None:
    cluster = await Cluster.start()
    await cluster.mark(B1)

    async with cluster.node() as node:
        lease = await node.lease()
        await cluster.store.delete(MARK)
        if not is_directory_left:
            await cluster.store.delete(DIRECTORY)

        assert await node.queue.complete(lease)
        await cluster.assert_queue_empty()
    assert await cluster.store.exists(DIRECTORY) is None


async def test_an_unknown_znode_beside_the_mark_stays(cluster: Cluster) -> None:
    await cluster.mark(B1)
    await cluster.store.create(f"{DIRECTORY}/strange")

    async with cluster.node() as node:
        assert await node.queue.complete(await node.lease())

        await cluster.assert_queue_empty()
    assert await cluster.store.children(DIRECTORY) == ["strange"]


@pytest.mark.parametrize("is_retaken", [False, True], ids=["deleted", "Java's now"])
async def test_rule_s3_a_ledger_without_its_lock_is_not_completed(
    cluster: Cluster, is_retaken: bool
) -> None:
    """Its metadata is not written either."""
    await cluster.store.create(EXTRA)
    await cluster.mark(B1)

    async with cluster.node() as node:
        lease = await node.lease()
        await cluster.store.delete(LOCK)
        if is_retaken:
            await cluster.store.create(LOCK, is_ephemeral=True)

        write = SetData(path=EXTRA, data=b"x", version=0)
        with pytest.raises(LockLostError):
            await node.queue.complete(lease)
        with pytest.raises(LockLostError):
            await node.queue.write(lease, [write])
        with pytest.raises(LockLostError):
            await node.queue.complete(lease, [write])

        await node.queue.release(lease)
        assert await cluster.marked() == [LEDGER]
        assert len(await cluster.locked()) == is_retaken
    assert (await cluster.store.get(EXTRA))[0] == b""


@pytest.mark.parametrize(
    ("fault", "is_completed"),
    [
        pytest.param(Fault.LOST_REPLY, True, id="it was done"),
        pytest.param(Fault.LOST_REQUEST, False, id="it never arrived"),
    ],
)
async def test_after_a_lost_reply_the_outcome_is_found_out(
    cluster: Cluster, fault: Fault, is_completed: bool
) -> None:
    await cluster.mark(B1)

    async with cluster.node() as node:
        lease = await node.lease()
        fault_once(cluster, node.store, Delete, fault)
        with pytest.raises(UnknownOutcomeError):
            await node.queue.complete(lease)

        assert await node.queue.is_completed(lease) is is_completed


async def test_rule_s3_a_new_mark_after_a_lost_reply_is_not_ours(cluster: Cluster) -> None:
    """The reply was to our completion; another node may have the lock."""
    await cluster.mark(B1)

    async with cluster.node("node-1") as ours, cluster.node("node-2") as theirs:
        lease = await ours.lease()
        fault_once(cluster, ours.store, Delete, Fault.LOST_REPLY)
        with pytest.raises(UnknownOutcomeError):
            await ours.queue.complete(lease)
        await cluster.mark(B3)
        await theirs.lease()

        with pytest.raises(LockLostError):
            await ours.queue.is_completed(lease)


# --- Giving back ----------------------------------------------------------------------------------


@pytest.mark.compat("TestLedgerUnderreplicationManager.testRelease", verdict="same")
async def test_a_returned_ledger_can_be_leased_by_another_node(cluster: Cluster) -> None:
    await cluster.mark(B1)

    async with cluster.node("node-1") as one, cluster.node("node-2") as two:
        await one.queue.release(await one.lease())

        assert await cluster.marked() == [LEDGER]
        await two.lease()


@pytest.mark.compat(
    "G15",
    verdict="better",
    why="our lock is deleted at a version that only our locks have, together with a check of the "
    "session",
)
async def test_rule_s3_returning_never_deletes_another_nodes_lock(cluster: Cluster) -> None:
    await cluster.mark(B1)

    async with cluster.node("node-1") as ours, cluster.node("node-2") as theirs:
        lease = await ours.lease()
        await cluster.store.delete(LOCK)  # a Java worker deletes locks without looking whose
        await theirs.lease()

        await ours.queue.release(lease)

        _, stat = await cluster.store.get(LOCK)
        assert stat.ephemeral_owner == theirs.store.session_id


async def test_returning_twice_is_harmless(cluster: Cluster) -> None:
    await cluster.mark(B1)

    async with cluster.node() as node:
        lease = await node.lease()
        await node.queue.release(lease)
        await node.queue.release(lease)

        assert await cluster.locked() == []
    assert await cluster.marked() == [LEDGER]


@pytest.mark.parametrize("replicas", [(), (B1,)], ids=["no node", "a bookie"])
async def test_the_disable_switch_and_marks_are_read_as_they_are(
    cluster: Cluster, replicas: tuple[BookieId, ...]
) -> None:
    async with cluster.node() as node:
        assert not await node.queue.switch.is_on()
        assert not await node.queue.is_marked(LEDGER)

        await cluster.mark(*replicas)
        await cluster.store.create(PATHS.disable)

        assert await node.queue.switch.is_on()
        assert await node.queue.is_marked(LEDGER)


NOTE = WaitingNote(
    ledger_id=LEDGER, blocked=Blocked(reason=Reason.NO_TARGET), node="host", since_ms=1
)


async def test_the_note_and_the_end_of_the_lease_are_one_request(cluster: Cluster) -> None:
    await cluster.mark(B1)

    async with cluster.node() as node:
        lease = await node.lease()
        await settle()
        before = node.store.request_count

        await node.queue.unlock_with_note(lease, NOTE)

        assert node.store.request_count == before + 1
        assert await node.notes.read(LEDGER) == NOTE
        assert await cluster.locked() == []
        assert await cluster.marked() == [LEDGER]


async def test_a_note_that_an_operator_changes_is_deleted_with_the_mark(cluster: Cluster) -> None:
    await cluster.mark(B1)

    async with cluster.node() as node:
        lease = await node.lease()
        await node.queue.write_note(lease, NOTE)
        await node.notes.let_go(LEDGER, guards=(), beside=replace(NOTE, tries=2))

        assert await node.queue.complete(lease)

        assert await node.notes.ledger_ids() == set()
        await cluster.assert_queue_empty()


# --- The lock of a ledger that an operator works on -----------------------------------------------

SESSION = Check(path="/", version=0)
"""A check in place of the proof of a session; it always succeeds."""


def ignore(text: str) -> None:
    raise AssertionError(text)


def locked_by_us(
    cluster: Cluster, tell: Callable[[str], None] = ignore
) -> AbstractAsyncContextManager[object]:
    return locked(LEDGER, cluster.store, PATHS, SESSION, "host-a", clock=cluster.clock, tell=tell)


async def test_it_works_where_no_node_has_ever_run() -> None:
    cluster = Cluster()

    async with locked_by_us(cluster):
        assert await locked_ledger_ids(cluster.store, PATHS) == {LEDGER}

    assert await locked_ledger_ids(cluster.store, PATHS) == set()


async def test_it_is_not_stolen_from_its_owner(cluster: Cluster) -> None:
    path = PATHS.lock(LEDGER)
    await cluster.store.create(path, znodes.lock_to_bytes("host-b"))

    with pytest.raises(LockedError, match="host-b is at work on it"):
        async with locked_by_us(cluster):
            raise AssertionError("it was given")

    assert znodes.parse_lock((await cluster.store.get(path))[0]) == "host-b"


@pytest.mark.parametrize("error", [UnknownOutcomeError, SessionLostError])
async def test_the_work_counts_although_the_lock_cannot_be_deleted(
    cluster: Cluster, error: type[BookmenderError]
) -> None:
    """The lock ends with the session."""

    async def fail() -> None:
        async with locked_by_us(cluster):
            refuse(cluster.store, lambda each: isinstance(each, Delete), error)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()


async def test_the_owner_is_waited_for_within_bounds(cluster: Cluster) -> None:
    path = PATHS.lock(LEDGER)
    await cluster.store.create(path, znodes.lock_to_bytes("host-b"))

    async def let_go() -> None:
        await asyncio.sleep(WAIT_MAX_S / 2)
        await cluster.store.delete(path)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(let_go())
        async with locked_by_us(cluster):
            assert znodes.parse_lock((await cluster.store.get(path))[0]) == "host-a"


async def left_to_its_writer(cluster: Cluster, *, grace_s: float) -> str:
    """Lock the ledger as host-b during its grace, and return the path of the lock."""
    path = PATHS.lock(LEDGER)
    await cluster.store.create(path, znodes.lock_to_bytes("host-b"))
    now_ms = cluster.clock.wall_ms()
    note = WaitingNote(
        ledger_id=LEDGER,
        blocked=Blocked(
            reason=Reason.OPEN_LEDGER_GRACE, facts=Facts(errors=("left to its writer",))
        ),
        node="host-b",
        since_ms=now_ms,
        grace_until_ms=now_ms + int(grace_s * 1000),
    )
    await cluster.store.create(PATHS.waiting_note(LEDGER), note.to_json(), with_parents=True)
    return path


async def test_the_grace_of_a_worker_is_waited_for_and_reported(cluster: Cluster) -> None:
    grace_s = 2 * WAIT_MAX_S + 5
    path = await left_to_its_writer(cluster, grace_s=grace_s)
    told: list[str] = []

    async def let_go() -> None:
        await asyncio.sleep(grace_s + WAIT_MAX_S / 2)  # it closes and repairs it after the grace
        await cluster.store.delete(path)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(let_go())
        async with locked_by_us(cluster, told.append):
            assert znodes.parse_lock((await cluster.store.get(path))[0]) == "host-a"

    assert told[0] == "waiting up to 25 s for host-b, which locks ledger 7: open-ledger-grace"
    assert len(told) == -(-grace_s // TELL_INTERVAL_S)
    assert told[-1].startswith("waiting up to 5 s for host-b")


async def test_a_node_that_still_works_after_the_grace_is_named(cluster: Cluster) -> None:
    grace_s = WAIT_MAX_S + 5
    await left_to_its_writer(cluster, grace_s=grace_s)
    began_s = cluster.clock.now_s()

    with pytest.raises(LockedError, match="host-b is at work on it"):
        async with locked_by_us(cluster, lambda text: None):
            raise AssertionError("it was given")

    assert cluster.clock.now_s() - began_s == pytest.approx(grace_s + WAIT_MAX_S, abs=1)


async def test_a_grace_too_long_to_wait_for_is_reported_at_once(cluster: Cluster) -> None:
    await left_to_its_writer(cluster, grace_s=GRACE_WAIT_MAX_S + 1)
    began_s = cluster.clock.now_s()

    with pytest.raises(
        LockedError, match=r"for another 61 s \(.*open-ledger-grace\): try again then"
    ):
        async with locked_by_us(cluster):
            raise AssertionError("it was given")

    assert cluster.clock.now_s() == began_s


async def test_a_grace_is_reported_only_of_the_node_that_has_the_lock(cluster: Cluster) -> None:
    path = await left_to_its_writer(cluster, grace_s=GRACE_WAIT_MAX_S + 1)
    await cluster.store.delete(path)
    await cluster.store.create(path, znodes.lock_to_bytes("host-c"))

    with pytest.raises(LockedError, match="host-c is at work on it"):
        async with locked_by_us(cluster):
            raise AssertionError("it was given")


# --- Our locks ------------------------------------------------------------------------------------

PATH = PATHS.lock(7)


def test_a_lock_never_has_the_version_of_javas_locks() -> None:
    versions = {LedgerLock.of(PATH, session_id=session).version for session in range(100)}

    assert versions == set(range(1, VERSION_MAX + 1))


def test_a_session_makes_the_same_lock_each_time() -> None:
    assert LedgerLock.of(PATH, session_id=5) == LedgerLock.of(PATH, session_id=5)


def test_the_locks_of_two_sessions_mostly_differ() -> None:
    locks = [LedgerLock.of(PATH, session_id=session) for session in range(100)]
    pairs = list(combinations(locks, 2))

    assert sum(one != other for one, other in pairs) > 0.7 * len(pairs)


def test_the_operations_lead_to_the_version() -> None:
    lock = LedgerLock(path=PATH, version=3)

    create, *changes = lock.make(b"me")

    assert create == Create(path=PATH, data=b"me", is_ephemeral=True)
    assert changes == [SetData(path=PATH, data=b"me", version=v) for v in (0, 1, 2)]
