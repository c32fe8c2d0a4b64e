"""Missing entries that a copy finds on a source, which the copy is not for, reach the repair.

A check reads only the ends, so it would find such a copy good, and the mark would be deleted (rules
S6, S7).
"""

import asyncio
import itertools
from dataclasses import replace

import pytest

from ledgers.bookies import Answer
from ledgers.errors import BookmenderError, QuotaError, UnavailableError, UnknownOutcomeError
from ledgers.manager import VersionedMetadata
from ledgers.model import BookieId
from replication import znodes
from replication.ledger_record import WaitingNote, WaitingNotes
from replication.reasons import Blocked, Facts, Reason
from replication.repair import OutcomeKind
from replication.work_queue import LedgerLease
from tests.replication.cluster import Cluster, named_by
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER, PATHS, Node, working
from tests.replication.refusing import refuse, writes_below
from tests.replication.repairs import repair


@pytest.mark.parametrize("last", [9, 199, 2_999], ids=["presumed", "checked", "checked twice"])
@pytest.mark.parametrize("damage", ["lose", "corrupt"])
async def test_they_are_repaired_before_the_ledger_is_unmarked(damage: str, last: int) -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), write_quorum=3, last=last)
    for bookie in (B1, B3):
        for entry_id in range(2 if bookie == B1 else 3, last - 1, 4):
            getattr(cluster.bookie(bookie), damage)(LEDGER, entry_id)
    await cluster.kill(B2)

    outcome = await repair(cluster)

    metadata = await cluster.metadata()
    found = [
        (bookie, entry_id)
        for _, result in cluster.bookies.transfers
        for bookie, answers in result.failures.items()
        for entry_id, answer in answers.items()
        if answer is not Answer.UNKNOWN
    ]
    assert outcome.kind is OutcomeKind.DONE
    assert found
    for bookie, entry_id in found:
        is_named = bookie in named_by(metadata, entry_id)
        assert not is_named or cluster.has_good_copy(bookie, LEDGER, entry_id), (bookie, entry_id)


async def test_they_are_remembered_from_one_try_to_the_next() -> None:
    """The next try may be possible, and its read of the ends would find nothing."""
    cluster = await Cluster.start(B1, B2, B3, B4)
    await cluster.write_ledger((B1, B2, B3), write_quorum=3)
    cluster.bookie(B3).lose(LEDGER, 4)
    await cluster.kill(B2)
    await cluster.unregister(B3)
    await cluster.register(B3, is_read_only=True)  # so that it may not be given what it lacks
    await cluster.mark()
    async with cluster.node() as node:
        outcomes, found = [], set[BookieId]()
        for _ in range(2):
            lease = await leased(node, found)
            outcomes.append(await node.repairer.repair(lease))
            await node.queue.release(lease)
        await cluster.unregister(B3)
        await cluster.register(B3)
        await asyncio.sleep(1)
        outcomes.append(await node.repairer.repair(await leased(node, found)))

    assert [outcome.reason for outcome in outcomes[:2]] == [Reason.NO_TARGET, Reason.NO_TARGET]
    assert outcomes[2].kind is OutcomeKind.DONE
    await cluster.assert_whole()


async def leased(node: Node, suspects: set[BookieId]) -> LedgerLease:
    """Lease the ledger, with the suspects of earlier tries, as its note keeps them."""
    lease = await node.lease()
    lease.suspects = suspects
    return lease


# --- Notes for other nodes ------------------------------------------------------------------------


async def with_gaps(*, is_own: bool = False) -> Cluster:
    """Return a ledger whose B2 is lost, and whose B3 lacks all entries except its ends.

    B3 may not be given them, and there is no other target. ``is_own``: it is marked in our private
    queue only.
    """
    cluster = await Cluster.start(B1, B2, B3, B4)
    await cluster.write_ledger((B1, B2, B3), write_quorum=3, last=199)
    for entry_id in range(1, 199):
        cluster.bookie(B3).lose(LEDGER, entry_id)
    await cluster.kill(B2)
    await cluster.unregister(B3)
    await cluster.register(B3, is_read_only=True)
    if is_own:
        mark = znodes.mark_to_bytes(znodes.Mark(replicas=(B2,), ctime_ms=1))
        path = PATHS.private.mark(LEDGER)
        await cluster.store.create(path, mark, with_parents=True)
    else:
        await cluster.mark(B2)
    return cluster


async def assert_repaired_once_possible(cluster: Cluster) -> None:
    await cluster.unregister(B3)
    await cluster.register(B3)
    async with cluster.node("last") as node, working(node):
        await asyncio.sleep(60)
    await cluster.assert_queue_empty()
    await cluster.assert_whole()


async def test_other_nodes_and_restarted_ones_learn_of_them() -> None:
    """A read of the ends would find the ledger whole, and delete the mark (rule S6)."""
    cluster = await with_gaps()

    for name in ("one", "two", "two again"):
        async with cluster.node(name) as node, working(node):
            await asyncio.sleep(1_000)
        assert await cluster.marked() == [LEDGER], name

    await assert_repaired_once_possible(cluster)


async def test_a_new_mark_does_not_make_them_forgotten() -> None:
    cluster = await with_gaps(is_own=True)
    async with cluster.node("one") as node, working(node):
        await asyncio.sleep(100)
    await cluster.kill(B1)
    await cluster.mark(B1)
    await cluster.revive(B1)

    async with cluster.node("two") as node, working(node):
        await asyncio.sleep(100)

    assert await cluster.marked() == [LEDGER]
    await assert_repaired_once_possible(cluster)


@pytest.mark.parametrize("error", [UnavailableError, ZeroDivisionError])
async def test_a_repair_that_is_interrupted_afterwards_notes_them(error: type[Exception]) -> None:
    cluster = await with_gaps()
    async with cluster.node("one") as one:
        find, calls = one.repairer.inspector.find, itertools.count()

        async def break_off(ledger_id: int) -> VersionedMetadata | Blocked | None:
            if next(calls) == 1:
                raise error("broken off")
            return await find(ledger_id)

        one.repairer.inspector.find = break_off  # type: ignore[method-assign]
        async with working(one):
            await asyncio.sleep(1)
        assert next(calls) == 2, "it was not tried again"
        assert await cluster.locked() == []
    async with cluster.node("two") as two, working(two):
        await asyncio.sleep(100)

    assert await cluster.marked() == [LEDGER]
    await assert_repaired_once_possible(cluster)


async def test_an_operators_immediate_try_keeps_them() -> None:
    cluster = await with_gaps()
    async with cluster.node("one") as node, working(node):
        await asyncio.sleep(20)
    notes = WaitingNotes(cluster.store, PATHS)
    noted = await notes.read(LEDGER)
    assert noted is not None
    assert noted.reason.needs_help

    await notes.let_go(LEDGER, guards=())

    left = await notes.read(LEDGER)
    assert left is not None
    assert left.suspects == noted.suspects == {B3}
    assert not left.reason.needs_help, "who waits for the try would take it for its outcome"
    async with cluster.node("two") as node, working(node):
        await asyncio.sleep(1)
        again = await notes.read(LEDGER)
    assert again is not None
    assert again.reason is noted.reason, "it was tried at once"
    assert await cluster.marked() == [LEDGER]
    await assert_repaired_once_possible(cluster)


async def test_a_note_written_while_old_ones_are_deleted_stays() -> None:
    cluster = await Cluster.start(B1, B2, B3)
    note = WaitingNote(
        ledger_id=LEDGER,
        blocked=Blocked(reason=Reason.NO_TARGET, facts=Facts(errors=("so it is",))),
        node="host-a",
        since_ms=0,
    )
    async with cluster.node() as node:
        await node.notes.put(note)

        async def was_not_marked(ledger_id: int) -> bool:
            """It is marked, tried and given back while the answer is on its way."""
            await node.notes.put(replace(note, suspects=frozenset({B3})))
            return False

        node.queue.is_marked = was_not_marked  # type: ignore[method-assign]
        await node.worker.waiting.tidy()

        left = await node.notes.read(LEDGER)
    assert left is not None
    assert left.suspects == {B3}


@pytest.mark.parametrize("lost_count", [0, 1, 3])
async def test_a_node_that_read_the_mark_before_does_not_lease_it(lost_count: int) -> None:
    """Between a look at the queue and the take another node may have tried the ledger, which leaves
    the mark as it was.

    ``lost_count``: of its writes of the mark, on the way to ZooKeeper.
    """
    cluster = await with_gaps()
    lost = iter(range(lost_count))
    of_mark = writes_below(PATHS.mark(LEDGER))
    async with cluster.node("late") as late:
        queued = await late.queued()
        async with cluster.node("one") as node:
            refuse(
                node.store,
                lambda each: of_mark(each) and next(lost, None) is not None,
                UnknownOutcomeError,
            )
            async with working(node):
                await asyncio.sleep(20)
        assert next(lost, None) is None

        assert await late.queue.lease(queued) is None
        assert await late.queue.lease(await late.queued()) is not None


@pytest.mark.parametrize("error", [QuotaError, UnknownOutcomeError])
async def test_the_ledger_stays_locked_until_they_are_noted(
    error: type[BookmenderError],
) -> None:
    """Other nodes could not know of them."""
    cluster, is_full = await with_gaps(), True
    async with cluster.node("one") as one, cluster.node("two") as two:
        refuse(
            one.store,
            lambda each: is_full and writes_below(PATHS.waiting)(each),
            error,
        )
        async with working(one):
            await asyncio.sleep(20)
            async with working(two):
                await asyncio.sleep(1_000)
                assert await cluster.marked() == [LEDGER]
                assert len(await cluster.locked()) == 1

                is_full = False
                await asyncio.sleep(100)
                assert await cluster.locked() == []
    assert await cluster.marked() == [LEDGER]
    await assert_repaired_once_possible(cluster)
