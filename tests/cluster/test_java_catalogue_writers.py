"""Java's writers and readers while ours repairs: fenced only after the grace, never losing a
change.

The rows of docs/compatibility.md that only Java's own clients can show. Each test leaves every
bookie up; ledgers name three bookies at most, so that two may be down at a time.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from daemon.local.cluster import LocalCluster
from ledgers.model import BookieId
from replication.reasons import Reason
from tests.cluster.bookies_in_trouble import terminate
from tests.cluster.steps import Bench, bench, errors, events, nodes, wait_for
from tests.java.messages import Content, Expected, Shape, Stopped, Verdict
from tests.java.tool import JavaReader, JavaTool, JavaWriter

pytest_plugins = ["tests.java.fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

SHORT_GRACE = {"REPLICATION_OPEN_LEDGER_GRACE_S": "1"}
ENOUGH_GRACE = {"REPLICATION_OPEN_LEDGER_GRACE_S": "3"}
"""For a Java writer to replace a bookie, on a busy machine too."""
NO_GRACE = {"REPLICATION_OPEN_LEDGER_GRACE_S": "0"}
ON_TWO = Shape(ensemble_size=2, write_quorum=2, ack_quorum=2)
ABANDONED_EMPTY = Shape(write_quorum=2, ack_quorum=2, entries=0, close=False)
WINDOW = 5
"""Entries that a writer has under way at most."""
STOPPED_BY_OTHERS = {"BKLedgerFencedException", "BKLedgerClosedException"}


@contextmanager
def back_afterwards(cluster: LocalCluster, *bookies: BookieId) -> Iterator[None]:
    """Whatever becomes of the test, these bookies are up when it ends."""
    try:
        yield
    finally:
        for bookie in bookies:
            if cluster.pid(bookie) is None:
                cluster.start_bookie(bookie)


# --- What is seen ----------------------------------------------------------------------------------


def members(java: JavaTool, uri: str, ledger_id: int) -> list[BookieId]:
    """Of the last ensemble."""
    ensembles = java.metadata(uri, ledger_id).ensembles
    return [BookieId(bookie) for bookie in ensembles[max(ensembles)]]


async def wait_unnamed(on: Bench, bookie: BookieId, ledger_ids: Iterable[int]) -> None:
    """Until none of the ledgers names the bookie, and the queue is empty."""

    async def is_repaired() -> bool:
        read = [await on.seen.manager.read(ledger_id) for ledger_id in ledger_ids]
        return not any(bookie in each.metadata.bookies for each in read) and await on.is_idle()

    await wait_for(is_repaired, f"repaired ledgers without {bookie}")


def assert_acknowledged(
    java: JavaTool, uri: str, stopped: Stopped, *, never_arrived_max: int = 0
) -> None:
    """All that its writer was told is acknowledged is there as it was written, in every copy.

    ``never_arrived_max``: copies beyond the ack quorum that were on their way when a bookie was
    fenced. A recovery by Java writes again only what is beyond the LAC, so that these stay away.
    """
    content = java.read(uri, stopped.ledger, last=stopped.last)
    assert (content.error, content.sha256) == (None, stopped.sha256)
    judged = java.judge(uri, [stopped.ledger]).ledgers[stopped.ledger]
    assert judged.error is None, judged
    assert judged.problems.keys() <= {"absent"}, judged
    assert sum(judged.problems.values()) <= never_arrived_max, judged
    lacking = Counter(copy.entry for copy in judged.examples)
    assert set(lacking.values()) <= {1}, "the ack quorum has them"


# --- Fenced, after the grace -----------------------------------------------------------------------


@pytest.mark.compat(
    "TestReplicationWorker.testRWShouldReplicateTheLedgersAfterTimeoutIfLastFragmentIsUR",
    verdict="better",
)
@pytest.mark.compat(
    "TestReplicationWorker.testReplicateEmptyOpenStateLedger",
    "BookieAutoRecoveryTest.testOpenLedgers",
    "BookieRecoveryTest.testBookieRecoveryOnOpenedLedgers",
    verdict="same",
)
def test_open_ledgers_of_java_are_fenced_after_the_grace_and_their_writer_learns_of_it(
    module_cluster: LocalCluster, java: JavaTool, uri: str, tmp_path: Path
) -> None:
    empty = [each.ledger for each in java.write(uri, ABANDONED_EMPTY, ABANDONED_EMPTY)]
    with JavaWriter(uri, Shape(), window=5) as writer:
        writer.wait_acknowledged(20)
        writer.pause()
        victim = members(java, uri, writer.ledger_id)[0]

        async def run() -> None:
            async with bench(uri) as on, nodes(uri, tmp_path) as start:
                node = start("node", settings=SHORT_GRACE)
                await wait_for(lambda: events(node, "audit.finished"), "audit")
                terminate(module_cluster, victim)
                await wait_unnamed(on, victim, [writer.ledger_id, *empty])
                defer = events(node, "ledger.deferred")
                assert Reason.OPEN_LEDGER_GRACE.value in {event["reason"] for event in defer}
                assert not errors(node)

        with back_afterwards(module_cluster, victim):
            asyncio.run(run())
            writer.resume()
            stopped = writer.wait_stopped()

    closed = java.metadata(uri, writer.ledger_id)
    assert stopped.error in STOPPED_BY_OTHERS
    assert closed.state == "CLOSED"
    assert closed.last >= stopped.last
    assert_acknowledged(java, uri, stopped)


@pytest.mark.compat(
    "BookieAutoRecoveryTest.testEmptyLedgerLosesQuorumEventually",
    "TestReplicationWorker.testReplicateEmptyOpenStateLedger",
    verdict="same",
)
def test_an_open_ledger_without_entries_outlives_the_loss_of_two_bookies_in_turn(
    module_cluster: LocalCluster, java: JavaTool, uri: str, tmp_path: Path
) -> None:
    (written,) = java.write(uri, ABANDONED_EMPTY)
    first, second, _ = members(java, uri, written.ledger)

    async def run() -> Content:
        async with bench(uri) as on, nodes(uri, tmp_path) as start:
            node = start("node", settings=NO_GRACE)
            await wait_for(lambda: events(node, "audit.finished"), "audit")
            for victim in (first, second):
                terminate(module_cluster, victim)
                await wait_unnamed(on, victim, [written.ledger])
            assert not errors(node)
            return await asyncio.to_thread(java.read, uri, written.ledger, with_recovery=True)

    with back_afterwards(module_cluster, first, second):
        content = asyncio.run(run())

    assert (content.error, content.state, content.last) == (None, "CLOSED", -1)


# --- Both change the metadata ----------------------------------------------------------------------


@pytest.mark.compat(
    "TestReplicationWorker.testRWShouldReplicateTheLedgersAfterTimeoutIfLastFragmentIsNotUR",
    "BookieRecoveryTest.testMetadataConflictWithRecovery",
    "BookieRecoveryTest.testMetadataConflictWhenDelayingEnsembleChange",
    verdict="same",
)
@pytest.mark.parametrize("delays", [False, True], ids=["at once", "when it must"])
def test_a_java_writer_changes_its_ensemble_while_we_repair_and_both_changes_last(
    module_cluster: LocalCluster, java: JavaTool, uri: str, tmp_path: Path, delays: bool
) -> None:
    with JavaWriter(uri, ON_TWO, window=5, delays_ensemble_change=delays) as writer:

        async def lose_a_member(on: Bench) -> None:
            await asyncio.to_thread(writer.wait_acknowledged, writer.last_acknowledged + 200)
            victim = members(java, uri, writer.ledger_id)[1]
            with back_afterwards(module_cluster, victim):
                terminate(module_cluster, victim)
                await wait_unnamed(on, victim, [writer.ledger_id])

        async def run() -> None:
            async with bench(uri) as on, nodes(uri, tmp_path) as start:
                node = start("node", settings=ENOUGH_GRACE)
                await wait_for(lambda: events(node, "audit.finished"), "audit")
                await lose_a_member(on)
                await lose_a_member(on)
                assert java.metadata(uri, writer.ledger_id).state == "OPEN"
                assert not errors(node)

        asyncio.run(run())
        stopped = writer.stop()

    assert stopped.error is None
    assert len(java.metadata(uri, writer.ledger_id).ensembles) >= 3
    assert_acknowledged(java, uri, stopped)


@pytest.mark.compat(
    "TestFencing.testFencingInteractionWithBookieRecovery",
    "TestFencing.testFencingInteractionWithBookieRecovery2",
    "ConcurrentV2RecoveryTest.testConcurrentOpen",
    verdict="better",
    why="the loser of the race adopts the result of the winner instead of failing",
)
@pytest.mark.parametrize("is_fenced_first", [False, True], ids=["at once", "Java first"])
def test_java_recovers_ledgers_that_we_repair_and_nothing_acknowledged_is_lost(
    module_cluster: LocalCluster,
    java: JavaTool,
    uri: str,
    tmp_path: Path,
    is_fenced_first: bool,
) -> None:
    written = java.write(uri, Shape(ack_quorum=2, entries=50, close=False, count=8))
    with JavaWriter(uri, Shape(ack_quorum=2), window=WINDOW) as writer:
        writer.wait_acknowledged(20)
        victim = members(java, uri, writer.ledger_id)[0]
        ledger_ids = [writer.ledger_id, *(each.ledger for each in written)]

        def recovered_by_java() -> list[Content]:
            return [java.read(uri, ledger_id, with_recovery=True) for ledger_id in ledger_ids]

        async def run() -> list[Content]:
            async with bench(uri) as on, nodes(uri, tmp_path) as start:
                node = start("node", settings=NO_GRACE)
                await wait_for(lambda: events(node, "audit.finished"), "audit")
                found = await asyncio.to_thread(recovered_by_java) if is_fenced_first else []
                terminate(module_cluster, victim)
                found = found or await asyncio.to_thread(recovered_by_java)
                await wait_unnamed(on, victim, ledger_ids)
                assert not errors(node)
                return found

        with back_afterwards(module_cluster, victim):
            found = asyncio.run(run())
            stopped = writer.wait_stopped()

    assert [content.error for content in found] == [None] * len(ledger_ids)
    closed = {content.ledger: content.last for content in found}
    assert closed == {each: java.metadata(uri, each).last for each in ledger_ids}
    assert stopped.last <= (closed[writer.ledger_id] or 0)
    assert_acknowledged(java, uri, stopped, never_arrived_max=WINDOW)
    report = java.judge(uri, [each.ledger for each in written], expected=written)
    assert report.verdict is Verdict.WHOLE, report


# --- Readers ---------------------------------------------------------------------------------------


@pytest.mark.compat(
    "FullEnsembleDecommissionedTest.testOpenedLedgerHandleStillWorkAfterDecommissioning",
    "FullEnsembleDecommissionedTest.testRecoverOpenLedgerHandleStillWorkAfterDecommissioning",
    verdict="same",
)
def test_a_java_reader_reads_on_when_every_bookie_of_its_ledger_has_been_replaced(
    module_cluster: LocalCluster, java: JavaTool, uri: str, tmp_path: Path
) -> None:
    left_open = msgspec.structs.replace(ON_TWO, close=False)
    written = on_the_same_two(
        java,
        uri,
        java.write(uri, msgspec.structs.replace(ON_TWO, count=8)),
        java.write(uri, msgspec.structs.replace(left_open, count=8)),
    )
    ledger_ids = [each.ledger for each in written]
    victims = members(java, uri, ledger_ids[0])

    with JavaReader(uri, ledger_ids) as reader, back_afterwards(module_cluster, *victims):
        assert_content(reader.read(), written)

        async def run() -> None:
            async with bench(uri) as on, nodes(uri, tmp_path) as start:
                node = start("node", settings=NO_GRACE)
                await wait_for(lambda: events(node, "audit.finished"), "audit")
                for victim in victims:
                    terminate(module_cluster, victim)
                    await wait_unnamed(on, victim, ledger_ids)
                assert not errors(node)

        asyncio.run(run())
        assert_content(reader.read(), written)


def on_the_same_two(
    java: JavaTool, uri: str, closed: Sequence[Expected], left_open: Sequence[Expected]
) -> list[Expected]:
    """One of either, on the same two bookies: with ten such pairs, chance would have to try
    hard."""
    pairs = {frozenset(members(java, uri, each.ledger)): each for each in closed}
    return next(
        [pairs[pair], each]
        for each in left_open
        if (pair := frozenset(members(java, uri, each.ledger))) in pairs
    )


def assert_content(found: Sequence[Content], written: Sequence[Expected]) -> None:
    assert [(each.error, each.last, each.sha256) for each in found] == [
        (None, each.last, each.sha256) for each in written
    ]
