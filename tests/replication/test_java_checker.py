"""Missing entries in the cases that the tests of Java's LedgerChecker cover."""

import asyncio
import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from ledgers.model import BookieId, LedgerState
from ledgers.registration import Registration
from replication import znodes
from replication.cluster import ClusterView
from replication.copy_reader import Verdict
from replication.inspection import Inspection, Inspector, RecoveryRequired
from replication.repair import OutcomeKind
from tests.auditor.auditing import Leader, leading
from tests.replication.cluster import DIGEST, Cluster, named_by
from tests.replication.ledger_values import B1, B2, B3, B4, B5
from tests.replication.nodes import LEDGER, PATHS, ROOT, Node
from tests.replication.repairs import repair

CHECKER = "TestLedgerChecker"
Missing = Mapping[int, set[int]]
"""By the first entry of each fragment, its bookie indexes that miss copies."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """A ledger with write quorum 2. ``starts``: the first entry of each ensemble; ``last``: the
    last of all."""

    ensembles: tuple[tuple[BookieId, ...], ...] = ((B1, B2, B3),)
    starts: tuple[int, ...] = (0,)
    last: int = 9
    is_open: bool = False

    async def write(self, cluster: Cluster) -> None:
        await cluster.write_ledger(
            *self.ensembles,
            starts=self.starts,
            last=self.last,
            ack_quorum=2,
            state=LedgerState.OPEN if self.is_open else LedgerState.CLOSED,
        )


async def missing(cluster: Cluster) -> Missing:
    inspector = Inspector(
        manager=cluster.manager,
        bookies=cluster.bookies,
        clock=cluster.clock,
        rng=random.Random(0),
        fallback_digest=DIGEST,
    )
    view = ClusterView(bookies=await Registration(cluster.store, ROOT).read())
    match await inspector.inspect(LEDGER, view):
        case RecoveryRequired(versioned=versioned, leaving=leaving):
            last = versioned.metadata.last_segment
            return {last.first_entry_id: {last.ensemble.index(bookie) for bookie in leaving}}
        case Inspection(findings=findings):
            found: dict[int, set[int]] = defaultdict(set)
            for finding in findings:
                if finding.verdict is not Verdict.GOOD:
                    found[finding.fragment.first_entry_id].add(finding.index)
            return found
        case None:
            return {}
        case blocked:
            raise AssertionError(blocked)


def same(*tests: str) -> pytest.MarkDecorator:
    return pytest.mark.compat(*(f"{CHECKER}.{test}" for test in tests), verdict="same")


@pytest.mark.parametrize(
    ("ledger", "dead", "found"),
    [
        pytest.param(
            Ledger(), (B2,), {0: {1}}, id="one bookie of one fragment", marks=same("testChecker")
        ),
        pytest.param(
            Ledger(((B1, B2, B3), (B1, B4, B3), (B1, B4, B5)), (0, 4, 7)),
            (B2, B3, B5),
            {0: {1, 2}, 4: {2}, 7: {2}},
            id="several of three fragments",
            marks=same("testChecker"),
        ),
        pytest.param(
            Ledger(last=0),
            (B3,),
            {0: {2}},
            id="the dead bookie stores no entry",
            marks=same("testShouldNotGetTheFragmentIfThereIsNoMissedEntry"),
        ),
        pytest.param(
            Ledger(((B1, B2, B3), (B1, B2, B4)), (0, 5)),
            (B1, B2),
            {0: {0, 1}, 5: {0, 1}},
            id="two of either fragment",
            marks=same("testShouldGetTwoFrgamentsIfTwoBookiesFailedInSameEnsemble"),
        ),
        pytest.param(
            Ledger(),
            (B1, B2, B3),
            {0: {0, 1, 2}},
            id="all of an ensemble",
            marks=same(
                "testShouldGetFailedEnsembleNumberOfFgmntsIfEnsembleBookiesFailedOnNextWrite"
            ),
        ),
        pytest.param(
            Ledger(last=-1, is_open=True),
            (),
            {},
            id="an empty ledger on live bookies",
            marks=same("testShouldNotGetAnyFragmentWithEmptyLedger"),
        ),
        pytest.param(
            Ledger(last=-1, is_open=True),
            (B1, B2, B3),
            {0: {0, 1, 2}},
            id="an empty ledger on dead ones",
            marks=same("testShouldGet2FragmentsWithEmptyLedgerButBookiesDead"),
        ),
        pytest.param(
            Ledger(last=0, is_open=True),
            (B2,),
            {0: {1}},
            id="an open ledger of one entry",
            marks=same("testShouldGetOneFragmentWithSingleEntryOpenedLedger"),
        ),
        pytest.param(
            Ledger(((B1, B2, B3), (B1, B4, B3)), (0, 1), last=1),
            (B2, B3),
            {0: {1, 2}, 1: {2}},
            id="one entry before the ensemble changed, one after",
            marks=same("testSingleEntryAfterEnsembleChange"),
        ),
        pytest.param(
            Ledger(last=-1),
            (B2,),
            {0: {1}},
            id="a closed ledger without entries",
            marks=same("testClosedEmptyLedger"),
        ),
        *(
            pytest.param(
                Ledger(last=0),
                dead,
                {0: set(range(len(dead)))},
                id=f"a closed ledger of one entry, {len(dead)} dead",
                marks=same("testClosedSingleEntryLedger"),
            )
            for dead in ((B1,), (B1, B2), (B1, B2, B3))
        ),
    ],
)
async def test_lost_bookies_make_entries_missing(
    cluster: Cluster, ledger: Ledger, dead: tuple[BookieId, ...], found: Missing
) -> None:
    await ledger.write(cluster)

    await cluster.kill(*dead)

    assert await missing(cluster) == found


@same("testShouldNotGetAnyFragmentIfNoLedgerPresent")
async def test_a_deleted_ledger_lacks_nothing(cluster: Cluster) -> None:
    await Ledger().write(cluster)
    await cluster.kill(B2)

    await cluster.manager.delete(LEDGER, version=0)

    assert await missing(cluster) == {}


@pytest.mark.compat(
    "LedgerCloseTest.testLedgerCheckerShouldnotSelectInvalidLastFragments", verdict="same"
)
@pytest.mark.parametrize(
    "ledger",
    [
        pytest.param(Ledger(last=-1, is_open=True), id="without entries"),
        pytest.param(Ledger(last=9, is_open=True), id="in its only segment"),
        pytest.param(
            Ledger(((B1, B2, B3), (B1, B4, B3)), (0, 10), last=9, is_open=True),
            id="before the first entry of another segment",
        ),
    ],
)
async def test_an_open_ledger_of_a_dead_writer_lacks_nothing(ledger: Ledger) -> None:
    cluster = await Cluster.start()

    await ledger.write(cluster)

    assert await missing(cluster) == {}


@pytest.mark.compat(
    "G8",
    verdict="better",
    why="the metadata of a closed ledger says which entries exist; an entry that all its bookies "
    "deny is lost",
)
@pytest.mark.parametrize(
    ("ledger", "found"),
    [
        pytest.param(Ledger(last=0), {0: {0, 1}}, id="the only entry"),
        pytest.param(
            Ledger(((B1, B2, B3), (B1, B4, B3)), (0, 10), last=10),
            {10: {1, 2}},
            id="the only one of the last segment",
        ),
    ],
)
async def test_a_last_entry_that_all_its_bookies_deny_is_missing(
    cluster: Cluster, ledger: Ledger, found: Missing
) -> None:
    await ledger.write(cluster)

    for bookie in named_by(await cluster.metadata(), ledger.last):
        cluster.bookie(bookie).lose(LEDGER, ledger.last)

    assert await missing(cluster) == found


@pytest.mark.compat("G10", verdict="better")
async def test_a_read_only_bookie_of_an_open_ledger_is_not_missing(cluster: Cluster) -> None:
    await Ledger(is_open=True).write(cluster)

    await cluster.register_again(B2, is_read_only=True)

    assert await missing(cluster) == {}


@pytest.mark.compat(
    "BookieWriteLedgerTest.testReadLacNotSameWithMetadataLedgerReplication",
    verdict="better",
    why="a new segment proves that all earlier entries are acknowledged, whatever LAC the bookies "
    "report; no ledger is fenced",
)
async def test_all_fragments_before_an_empty_last_segment_are_repaired(cluster: Cluster) -> None:
    """The bookies of the last segment report an old LAC."""
    await cluster.write_ledger(
        (B1, B2, B3), (B1, B4, B3), starts=(0, 10), last=9, ack_quorum=2, state=LedgerState.OPEN
    )
    await cluster.kill(B2)

    outcome = await repair(cluster)

    (_, other, _), last = await cluster.ensembles()
    metadata = await cluster.metadata()
    assert outcome.kind is OutcomeKind.DONE
    assert other not in {B1, B2, B3, B4}
    assert last == (B1, B4, B3)
    assert metadata.state is LedgerState.OPEN
    assert all(cluster.good_copies(LEDGER, metadata, entry_id) == 2 for entry_id in range(10))
    await cluster.assert_queue_empty()


# --- The queue with several clients ---------------------------------------------------------------

MANAGER = "TestLedgerUnderreplicationManager"
LONG_ID = 0xFEADEEFDAC
"""An id of 40 bits: more than one directory of its path differs from those of small ids."""
SOME_DIRECTORIES_SHARED = 0x5555_5555
SEED = 11


async def replicas(cluster: Cluster, ledger_id: int = LEDGER) -> tuple[BookieId, ...]:
    data, _ = await cluster.store.get(PATHS.mark(ledger_id))
    return znodes.parse_mark(data).replicas


@pytest.mark.compat(
    f"{MANAGER}.testMultipleManagersShouldBeAbleToTakeAndReleaseLock", verdict="same"
)
async def test_two_nodes_never_lease_one_ledger_at_the_same_time(cluster: Cluster) -> None:
    """They lease it and give it back a hundred times."""
    await cluster.mark(B1, ledger_id=LONG_ID)
    holding: set[str] = set()
    rng = random.Random(SEED)

    async def take_and_give_back(name: str, node: Node) -> None:
        taken_count = 0
        while taken_count < 100:
            lease = await node.queue.lease(await node.queued(LONG_ID))
            if lease is not None:
                assert not holding
                holding.add(name)
                await asyncio.sleep(rng.uniform(0, 0.02))
                holding.remove(name)
                await node.queue.release(lease)
                taken_count += 1
            await asyncio.sleep(rng.uniform(0, 0.02))

    async with (
        cluster.node("node-1") as one,
        cluster.node("node-2") as two,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(take_and_give_back("node-1", one))
        tasks.create_task(take_and_give_back("node-2", two))

    assert await cluster.marked() == [LONG_ID]
    assert await cluster.locked() == []


@pytest.mark.compat(f"{MANAGER}.test2reportSame", verdict="same")
async def test_concurrent_reports_of_a_loss_make_one_mark(cluster: Cluster) -> None:
    """The mark names the bookie once."""

    async with leading(cluster) as leader:
        await asyncio.gather(*(leader.marker.mark(LEDGER, [B1]) for _ in range(2)))

    assert await replicas(cluster) == (B1,)
    async with cluster.node() as node:
        assert await node.queue.complete(await node.lease())
    await cluster.assert_queue_empty()


@pytest.mark.compat(f"{MANAGER}.testManyFailuresInAnEnsemble", verdict="same")
async def test_losses_reported_one_by_one_are_all_in_the_mark(cluster: Cluster) -> None:

    async with leading(cluster) as leader:
        await leader.marker.mark(LEDGER, [B1])
        await leader.marker.mark(LEDGER, [B2])

    assert await replicas(cluster) == (B1, B2)


@pytest.mark.compat(f"{MANAGER}.testMarkSimilarMissingReplica", verdict="same")
async def test_bookies_with_similar_names_are_two_in_a_mark(cluster: Cluster) -> None:
    """One name is a part of the other."""
    names = tuple(map(BookieId, ("localhost:3181", "localhost:318", "localhost:31812")))

    async with leading(cluster) as leader:
        for name in names:
            await leader.marker.mark(LEDGER, [name])

    assert await replicas(cluster) == names


@pytest.mark.compat(f"{MANAGER}.testHierarchyCleanupInterference", verdict="same")
async def test_ledgers_marked_during_completions_are_all_handled(cluster: Cluster) -> None:
    """The tree is empty in the end."""
    rng = random.Random(SEED)
    cluster.tree.latency = lambda: cluster.clock.sleep(rng.uniform(0, 0.02))
    wanted = [number * SOME_DIRECTORIES_SHARED for number in range(100)]
    done: list[int] = []

    async def mark_all(leader: Leader) -> None:
        for ledger_id in wanted:
            await leader.marker.mark(ledger_id, [B1])

    async def work_off(node: Node) -> None:
        while len(done) < len(wanted):
            found = await node.queue.list_ledgers(rng)
            for queued in await node.queue.read(found.free):
                lease = await node.queue.lease(queued)
                assert lease is not None
                assert await node.queue.complete(lease)
                done.append(queued.ledger_id)
            await node.queue.tidy()

    async with leading(cluster) as leader, cluster.node() as node:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(mark_all(leader))
            tasks.create_task(work_off(node))
        await node.queue.list_ledgers(rng)
        await node.queue.tidy()

    assert sorted(done) == wanted
    assert await cluster.store.children(PATHS.marks) == []
