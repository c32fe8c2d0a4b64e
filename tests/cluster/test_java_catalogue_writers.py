"""Java's writers and readers during our repairs: no early fencing, and no change is lost.

These are rows of docs/compatibility.md that only Java's own clients can show. Each test leaves
every bookie running. Ledgers name at most three bookies, so two may be down at a time.
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
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

SHORT_GRACE = {"REPLICATION_OPEN_LEDGER_GRACE_S": "1"}
ENOUGH_GRACE = {"REPLICATION_OPEN_LEDGER_GRACE_S": "3"}
"""Enough time for a Java writer to replace a bookie, even on a busy machine."""
NO_GRACE = {"REPLICATION_OPEN_LEDGER_GRACE_S": "0"}
ON_TWO = Shape(ensemble_size=2, write_quorum=2, ack_quorum=2)
ABANDONED_EMPTY = Shape(write_quorum=2, ack_quorum=2, entries=0, close=False)
WINDOW = 5
"""The most entries that a writer has in flight."""
STOPPED_BY_OTHERS = {"BKLedgerFencedException", "BKLedgerClosedException"}


@contextmanager
def back_afterwards(cluster: LocalCluster, *bookies: BookieId) -> Iterator[None]:
    """Start these bookies again at the end if they are down, however the test ends."""
    try:
        yield
    finally:
        for bookie in bookies:
            if cluster.pid(bookie) is None:
                cluster.start_bookie(bookie)


# --- Helpers --------------------------------------------------------------------------------------


def members(java: JavaTool, uri: str, ledger_id: int) -> list[BookieId]:
    """Return the last ensemble."""
    ensembles = java.metadata(uri, ledger_id).ensembles
    return [BookieId(bookie) for bookie in ensembles[max(ensembles)]]


async def wait_unnamed(on: Bench, bookie: BookieId, ledger_ids: Iterable[int]) -> None:
    """Wait until none of the ledgers names the bookie, and the queue is empty."""

    async def is_repaired() -> bool:
        read = [await on.seen.manager.read(ledger_id) for ledger_id in ledger_ids]
        return not any(bookie in each.metadata.bookies for each in read) and await on.is_idle()

    await wait_for(is_repaired, f"repaired ledgers without {bookie}")


def assert_acknowledged(
    java: JavaTool, uri: str, stopped: Stopped, *, allows_late_copies: bool = False
) -> None:
    """Assert that every copy of each acknowledged entry exists, with the written content.

    ``allows_late_copies``: one bookie, the slowest when it was fenced, may lack copies beyond the
    ack quorum. A recovery by Java writes only entries beyond the LAC again, so these copies stay
    missing.
    """
    content = java.read(uri, stopped.ledger, last=stopped.last)
    assert (content.error, content.sha256) == (None, stopped.sha256)
    judged = java.judge(uri, [stopped.ledger]).ledgers[stopped.ledger]
    assert judged.error is None, judged
    assert judged.problems.keys() <= {"absent"}, judged
    slow = {each.bookie for each in judged.examples}
    assert len(slow) <= (1 if allows_late_copies else 0), judged
    lacking = Counter(copy.entry for copy in judged.examples)
    assert set(lacking.values()) <= {1}, "the ack quorum has all copies"


# --- Fencing after the grace ----------------------------------------------------------------------


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
def test_open_java_ledgers_are_fenced_after_the_grace(
    module_cluster: LocalCluster, java: JavaTool, uri: str, tmp_path: Path
) -> None:
    """Their writers get an error."""
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


@pytest.mark.long(group="java")
@pytest.mark.compat(
    "BookieAutoRecoveryTest.testEmptyLedgerLosesQuorumEventually",
    "TestReplicationWorker.testReplicateEmptyOpenStateLedger",
    verdict="same",
)
async def test_an_empty_open_ledger_survives_two_losses_in_turn(
    module_cluster: LocalCluster, java: JavaTool, uri: str, tmp_path: Path
) -> None:
    (written,) = java.write(uri, ABANDONED_EMPTY)
    first, second, _ = members(java, uri, written.ledger)

    with back_afterwards(module_cluster, first, second):
        async with bench(uri) as on, nodes(uri, tmp_path) as start:
            node = start("node", settings=NO_GRACE)
            await wait_for(lambda: events(node, "audit.finished"), "audit")
            for victim in (first, second):
                terminate(module_cluster, victim)
                await wait_unnamed(on, victim, [written.ledger])
            assert not errors(node)
            content = await asyncio.to_thread(java.read, uri, written.ledger, with_recovery=True)

    assert (content.error, content.state, content.last) == (None, "CLOSED", -1)


# --- Both change the metadata ---------------------------------------------------------------------


@pytest.mark.long(group="java")
@pytest.mark.compat(
    "TestReplicationWorker.testRWShouldReplicateTheLedgersAfterTimeoutIfLastFragmentIsNotUR",
    "BookieRecoveryTest.testMetadataConflictWithRecovery",
    "BookieRecoveryTest.testMetadataConflictWhenDelayingEnsembleChange",
    verdict="same",
)
@pytest.mark.parametrize("delays", [False, True], ids=["at once", "delayed"])
def test_ensemble_changes_by_java_and_by_a_repair_both_last(
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


@pytest.mark.long(group="java")
@pytest.mark.compat(
    "TestFencing.testFencingInteractionWithBookieRecovery",
    "TestFencing.testFencingInteractionWithBookieRecovery2",
    "ConcurrentV2RecoveryTest.testConcurrentOpen",
    verdict="better",
    why="the loser of the race adopts the result of the winner instead of failing",
)
@pytest.mark.parametrize("is_fenced_first", [False, True], ids=["at once", "Java first"])
def test_a_recovery_by_java_during_a_repair_loses_no_entry(
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
    assert_acknowledged(java, uri, stopped, allows_late_copies=True)
    report = java.judge(uri, [each.ledger for each in written], expected=written)
    assert report.verdict is Verdict.WHOLE, report


# --- Readers --------------------------------------------------------------------------------------


@pytest.mark.long(group="java")
@pytest.mark.compat(
    "FullEnsembleDecommissionedTest.testOpenedLedgerHandleStillWorkAfterDecommissioning",
    "FullEnsembleDecommissionedTest.testRecoverOpenLedgerHandleStillWorkAfterDecommissioning",
    verdict="same",
)
def test_a_java_reader_continues_after_all_bookies_are_replaced(
    module_cluster: LocalCluster, java: JavaTool, uri: str, tmp_path: Path
) -> None:
    left_open = msgspec.structs.replace(ON_TWO, close=False)
    written = on_the_same_two(
        java,
        uri,
        java.write(uri, msgspec.structs.replace(ON_TWO, count=24)),
        java.write(uri, msgspec.structs.replace(left_open, count=24)),
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
    """Return a closed and an open ledger on the same two bookies.

    There are ten pairs, so 24 ledgers of each kind leave no doubt that one matches.
    """
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
