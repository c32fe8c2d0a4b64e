"""Repairs for a registered bookie that lacks entries or does not answer, and repairs without
another target.
"""

import asyncio
import itertools
from dataclasses import replace

import pytest

from ledgers.bookies import Answer
from ledgers.errors import (
    BookmenderError,
    QuotaError,
    UnavailableError,
    UnknownOutcomeError,
    UnreadableError,
)
from ledgers.manager import VersionedMetadata
from ledgers.model import BookieId
from replication import znodes
from replication.ledger_record import WaitingNote, WaitingNotes
from replication.reasons import Blocked, Exclusion, Facts, Reason
from replication.repair import DONE, OutcomeKind
from replication.settings import ReplicationSettings
from replication.work_queue import LedgerLease
from tests.memory.bookies import Fault, Op
from tests.replication.cluster import WRONG_DIGEST, Cluster, named_by
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6, B7
from tests.replication.nodes import LEDGER, PATHS, Node, working
from tests.replication.refusing import refuse, writes_below
from tests.replication.repairs import VERSION_1, assert_still_marked, blocked_by, make_whole, repair

# --- Missing copies of a registered bookie --------------------------------------------------------


@pytest.mark.compat(
    "G11",
    verdict="better",
    why="a registered bookie gets back exactly the entries that it explicitly lacks, in place",
)
async def test_rule_s15_a_live_bookie_gets_its_missing_entries_back(cluster: Cluster) -> None:
    before = await cluster.write_ledger((B1, B2, B3))
    for entry_id in (0, 4):
        cluster.bookie(B2).lose(LEDGER, entry_id)

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.entry_count) == (OutcomeKind.DONE, 2)
    assert (await cluster.manager.read(LEDGER)).version == before.version
    await cluster.assert_whole()
    await cluster.assert_queue_empty()


@pytest.mark.compat("G11", verdict="better")
async def test_rule_s15_copies_in_place_are_read_back(cluster: Cluster) -> None:
    """The mark is deleted afterwards."""
    await cluster.write_ledger((B1, B2, B3))
    for entry_id in (0, 4):
        cluster.bookie(B2).lose(LEDGER, entry_id)

    await repair(cluster)

    assert cluster.bookies.transfers[-1][0].target is None
    written_at = max(i for i, (t, _) in enumerate(cluster.bookies.transfers) if t.target == B2)
    read_back = [
        entry_id
        for transfer, _ in cluster.bookies.transfers[written_at + 1 :]
        for entry_id in transfer.reads.get(B2, ())
    ]
    assert {0, 4} <= set(read_back)


async def test_a_bookie_that_stores_nothing_is_replaced(cluster: Cluster) -> None:
    """It acknowledges every add."""
    await cluster.write_ledger((B1, B2, B3))
    cluster.bookie(B2).lose(LEDGER, 0)
    add = cluster.bookie(B2).add
    cluster.bookie(B2).add = lambda entry, **options: None  # type: ignore[method-assign]

    await make_whole(cluster)

    cluster.bookie(B2).add = add  # type: ignore[method-assign]
    assert B2 not in (await cluster.metadata()).bookies


@pytest.mark.compat(
    "G12",
    verdict="better",
    why="the digest of every entry read is verified, and a damaged copy counts as missing",
)
async def test_rule_s7_a_damaged_copy_is_moved_and_never_copied(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3))
    cluster.bookie(B2).corrupt(LEDGER, 0)

    await make_whole(cluster)

    assert B2 not in (await cluster.metadata()).bookies


async def test_two_differently_damaged_copies_make_two_good_ones(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2))
    cluster.bookie(B1).corrupt(LEDGER, 0)
    cluster.bookie(B2).corrupt(LEDGER, 9)

    await make_whole(cluster)

    assert not (await cluster.metadata()).bookies & {B1, B2}


async def test_rule_s15_without_a_target_damage_is_overwritten() -> None:
    """The copy is read back."""
    cluster = await Cluster.start(B1, B2, B3)
    await cluster.write_ledger((B1, B2, B3))
    cluster.bookie(B2).corrupt(LEDGER, 4)
    cluster.bookie(B2).corrupt(LEDGER, 0)

    await make_whole(cluster)

    assert cluster.bookies.asked(B2).count(4) == 2, "before and after"


async def test_rule_s7_our_key_is_suspected_if_all_copies_mismatch(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3), **VERSION_1)
    await cluster.kill(B3)

    outcome = await repair(cluster, fallback=WRONG_DIGEST)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.DIGEST_SUSPECT)
    assert cluster.bookies.copied_count == 0
    await assert_still_marked(cluster)


async def test_rule_s6_the_ends_do_not_prove_a_returned_bookie_whole(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)
    await cluster.wipe(B2)
    for entry_id in (0, 9):  # as if a client had read-repaired its ends
        cluster.put(LEDGER, entry_id, B2)
    await cluster.revive(B2)

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.entry_count) == (OutcomeKind.DONE, 5)
    await cluster.assert_whole()


async def test_rule_s6_a_bookie_back_with_its_data_needs_only_its_ends(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)
    await cluster.revive(B2)

    assert await repair(cluster) == DONE

    assert cluster.bookies.asked(B2) == [0, 9]


# --- Missing answers ------------------------------------------------------------------------------


async def test_rule_s5_s6_an_unresponsive_bookie_keeps_the_mark(cluster: Cluster) -> None:
    before = await cluster.write_ledger((B1, B2, B3))
    cluster.bookies.fail(B2, Op.READ, Fault(error=UnavailableError))

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.NO_ANSWER)
    assert blocked_by(outcome).facts.unresponsive == (B2,)
    assert (await cluster.manager.read(LEDGER)).version == before.version
    await assert_still_marked(cluster)


async def test_the_rest_is_repaired_while_a_bookie_does_not_answer(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3), (B4, B5, B6), starts=(0, 10), last=19)
    await cluster.kill(B2)
    cluster.bookies.fail(B5, Op.READ, Fault(error=UnavailableError))

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.NO_ANSWER)
    assert B2 not in (await cluster.metadata()).bookies
    await assert_still_marked(cluster)
    cluster.bookies.stop_failing(B5, Op.READ)
    await cluster.assert_whole()


@pytest.mark.compat("G8", verdict="better")
@pytest.mark.compat(
    "TestReplicationWorker.testBookiesNotAvailableScenarioForReplicationWorker",
    verdict="better",
    why="the return of a bookie ends the backoff at once, and a note names the missing entries",
)
@pytest.mark.parametrize(
    "gone",
    [
        pytest.param((4,), id="one"),
        pytest.param((0, 1, 2, 3, 4), id="a few"),
        pytest.param((1, 2, 3, 4, 5, 9), id="many"),
    ],
)
async def test_without_a_good_copy_the_ledger_waits_and_names_entries(
    cluster: Cluster, gone: tuple[int, ...]
) -> None:
    await cluster.write_ledger((B1, B2))
    await cluster.kill(B2)
    for entry_id in gone:
        cluster.bookie(B1).lose(LEDGER, entry_id)

    outcome = await repair(cluster, local=B3)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.NO_COPY)
    facts = blocked_by(outcome).facts
    assert (facts.entry_ids, facts.entry_count) == (gone[:5], len(gone))
    assert facts.absent == (B2,)
    assert B2 in (await cluster.metadata()).bookies
    await assert_still_marked(cluster)


async def test_rule_s15_an_entry_is_found_on_a_former_member(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2), (B3, B2), starts=(0, 5), last=9)
    cluster.put(LEDGER, 4, B3)
    cluster.bookie(B1).lose(LEDGER, 4)
    await cluster.kill(B2)

    outcome = await repair(cluster)
    again = await repair(cluster)

    assert {outcome.kind, again.kind} == {OutcomeKind.DONE}
    assert B2 not in (await cluster.metadata()).bookies
    assert Answer.ABSENT in {
        answer
        for _, result in cluster.bookies.transfers
        for answers in result.failures.values()
        for answer in answers.values()
    }


# --- Targets --------------------------------------------------------------------------------------


@pytest.mark.compat(
    "BookieRecoveryTest.testAsyncBookieRecoveryToRandomBookiesNotEnoughBookies",
    verdict="better",
    why="the ledger waits, and every node can read the reason",
)
async def test_without_a_target_the_ledger_waits() -> None:
    cluster = await Cluster.start(B1, B2, B3)
    await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.NO_TARGET)
    assert blocked_by(outcome).facts.excluded == ((Exclusion.MEMBER, 2),)
    await assert_still_marked(cluster)


async def test_entries_without_a_copy_are_named_although_there_is_no_target_either() -> None:
    cluster = await Cluster.start(B1, B2, B3)
    await cluster.write_ledger((B1, B2, B3), last=29)
    await cluster.kill(B2, B3)

    outcome = await repair(cluster)

    assert set(blocked_by(outcome).all_reasons) == {Reason.NO_COPY, Reason.NO_TARGET}
    facts = blocked_by(outcome).facts
    assert (facts.entry_ids, facts.entry_count) == ((1, 4, 7, 10, 13), 10)
    assert facts.absent == (B2, B3)


@pytest.mark.parametrize("local", [B4, B5, B6, B7])
async def test_among_equal_targets_the_local_bookie_is_chosen(local: BookieId) -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)

    await repair(cluster, local=local)

    assert await cluster.ensembles() == [(B1, local, B3)]


@pytest.mark.compat(
    "BookieRecoveryTest.testAsyncBookieRecoveryToSpecificBookie",
    "BookieRecoveryTest.testSyncBookieRecoveryToSpecificBookie",
    verdict="other",
    why='the placement policy, or target = "local", chooses the target; no command names one '
    "(Java ignores it)",
)
@pytest.mark.parametrize(
    ("local", "reason"),
    [
        pytest.param(B5, None, id="it can be the target"),
        pytest.param(B1, Reason.LEFT_TO_OTHERS, id="it is a member already"),
        pytest.param(None, Reason.NO_TARGET, id="there is no local bookie"),
    ],
)
async def test_target_local_leaves_no_other_choice(
    cluster: Cluster, local: BookieId | None, reason: Reason | None
) -> None:
    await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)

    outcome = await repair(cluster, local=local, settings=ReplicationSettings(target="local"))

    assert outcome.reason is reason
    assert cluster.bookies.targets == ([local] if reason is None else [])


async def test_rule_s15_entries_a_bookie_cannot_read_are_moved(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3))
    cluster.bookies.fail(B2, Op.READ, Fault(error=UnreadableError))

    await make_whole(cluster)

    assert B2 not in (await cluster.metadata()).bookies


async def test_rule_s5_an_unreadable_entry_is_not_called_lost(cluster: Cluster) -> None:
    before = await cluster.write_ledger((B1, B2))
    await cluster.kill(B1)
    cluster.bookies.fail(B2, Op.READ, Fault(error=UnreadableError))

    outcome = await repair(cluster)

    assert outcome.reason is Reason.NO_ANSWER
    assert (await cluster.manager.read(LEDGER)).version == before.version
    await assert_still_marked(cluster)


# --- Missing entries that a copy finds on a source ------------------------------------------------
# A check reads only the ends, so it would find such a copy good, and the mark would be deleted
# (rules S6, S7).


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
    await cluster.register_again(B3, is_read_only=True)  # so that it may not be given what it lacks
    await cluster.mark()
    async with cluster.node() as node:
        outcomes, found = [], set[BookieId]()
        for _ in range(2):
            lease = await leased(node, found)
            outcomes.append(await node.repairer.repair(lease))
            await node.queue.release(lease)
        await cluster.register_again(B3)
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
    await cluster.register_again(B3, is_read_only=True)
    if is_own:
        mark = znodes.mark_to_bytes(znodes.Mark(replicas=(B2,), ctime_ms=1))
        path = PATHS.private.mark(LEDGER)
        await cluster.store.create(path, mark, with_parents=True)
    else:
        await cluster.mark(B2)
    return cluster


async def assert_repaired_once_possible(cluster: Cluster) -> None:
    await cluster.register_again(B3)
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
async def test_the_ledger_stays_locked_until_they_are_noted(error: type[BookmenderError]) -> None:
    """Other nodes could not know of them."""
    cluster, is_full = await with_gaps(), True
    async with cluster.node("one") as one, cluster.node("two") as two:
        refuse(one.store, lambda each: is_full and writes_below(PATHS.waiting)(each), error)
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
