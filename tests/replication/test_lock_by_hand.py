"""The lock of a ledger that an operator works on: leased as a worker does, and returned."""

import asyncio

import pytest

from ledgers.errors import BookmenderError, SessionLostError, UnknownOutcomeError
from ledgers.store import Check, Delete
from replication import znodes
from replication.by_hand import (
    GRACE_WAIT_MAX_S,
    TELL_INTERVAL_S,
    WAIT_MAX_S,
    LockedError,
    locked,
)
from replication.ledger_record import WaitingNote
from replication.marks import locked_ledger_ids
from replication.reasons import Blocked, Facts, Reason
from tests.replication.cluster import Cluster
from tests.replication.nodes import LEDGER, PATHS
from tests.replication.refusing import refuse

SESSION = Check(path="/", version=0)
"""A check in place of the proof of a session; it always succeeds."""


def ignore(text: str) -> None:
    raise AssertionError(text)


async def test_it_works_where_no_node_has_ever_run() -> None:
    cluster = Cluster()

    async with locked(
        LEDGER, cluster.store, PATHS, SESSION, "host-a", clock=cluster.clock, tell=ignore
    ):
        assert await locked_ledger_ids(cluster.store, PATHS) == {LEDGER}

    assert await locked_ledger_ids(cluster.store, PATHS) == set()


async def test_it_is_not_stolen_from_its_owner(cluster: Cluster) -> None:
    path = PATHS.lock(LEDGER)
    await cluster.store.create(path, znodes.lock_to_bytes("host-b"))

    with pytest.raises(LockedError, match="host-b is at work on it"):
        async with locked(
            LEDGER, cluster.store, PATHS, SESSION, "host-a", clock=cluster.clock, tell=ignore
        ):
            raise AssertionError("it was given")

    assert znodes.parse_lock((await cluster.store.get(path))[0]) == "host-b"


@pytest.mark.parametrize("error", [UnknownOutcomeError, SessionLostError])
async def test_the_work_counts_although_the_lock_cannot_be_deleted(
    cluster: Cluster,
    error: type[BookmenderError],
) -> None:
    """The lock ends with the session."""

    async def fail() -> None:
        async with locked(
            LEDGER, cluster.store, PATHS, SESSION, "host-a", clock=cluster.clock, tell=ignore
        ):
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
        async with locked(
            LEDGER, cluster.store, PATHS, SESSION, "host-a", clock=cluster.clock, tell=ignore
        ):
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
        async with locked(
            LEDGER, cluster.store, PATHS, SESSION, "host-a", clock=cluster.clock, tell=told.append
        ):
            assert znodes.parse_lock((await cluster.store.get(path))[0]) == "host-a"

    assert told[0] == "waiting up to 25 s for host-b, which locks ledger 7: open-ledger-grace"
    assert len(told) == -(-grace_s // TELL_INTERVAL_S)
    assert told[-1].startswith("waiting up to 5 s for host-b")


async def test_a_node_that_still_works_after_the_grace_is_named(cluster: Cluster) -> None:
    grace_s = WAIT_MAX_S + 5
    await left_to_its_writer(cluster, grace_s=grace_s)
    began_s = cluster.clock.now_s()

    with pytest.raises(LockedError, match="host-b is at work on it"):
        async with locked(
            LEDGER,
            cluster.store,
            PATHS,
            SESSION,
            "host-a",
            clock=cluster.clock,
            tell=lambda text: None,
        ):
            raise AssertionError("it was given")

    assert cluster.clock.now_s() - began_s == pytest.approx(grace_s + WAIT_MAX_S, abs=1)


async def test_a_grace_too_long_to_wait_for_is_reported_at_once(cluster: Cluster) -> None:
    await left_to_its_writer(cluster, grace_s=GRACE_WAIT_MAX_S + 1)
    began_s = cluster.clock.now_s()

    with pytest.raises(
        LockedError, match=r"for another 61 s \(.*open-ledger-grace\): try again then"
    ):
        async with locked(
            LEDGER, cluster.store, PATHS, SESSION, "host-a", clock=cluster.clock, tell=ignore
        ):
            raise AssertionError("it was given")

    assert cluster.clock.now_s() == began_s


async def test_a_grace_is_reported_only_of_the_node_that_has_the_lock(cluster: Cluster) -> None:
    path = await left_to_its_writer(cluster, grace_s=GRACE_WAIT_MAX_S + 1)
    await cluster.store.delete(path)
    await cluster.store.create(path, znodes.lock_to_bytes("host-c"))

    with pytest.raises(LockedError, match="host-c is at work on it"):
        async with locked(
            LEDGER, cluster.store, PATHS, SESSION, "host-a", clock=cluster.clock, tell=ignore
        ):
            raise AssertionError("it was given")
