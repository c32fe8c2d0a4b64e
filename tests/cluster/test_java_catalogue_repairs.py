"""Repairs on real bookies that depend on what bookies store and which bookies are registered.

These are rows of docs/compatibility.md that fakes cannot show. Each test leaves every bookie
running and the queue empty; the last test adds a bookie.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.local.cluster import LocalCluster
from ledgers.digest import EntryDigest
from ledgers.model import BookieId, Segment
from replication.ledger_record import WaitingNote, WaitingNotes
from replication.marks import locked_ledger_ids
from replication.reasons import Reason
from tests.cluster.bookies_in_trouble import kill_and_expire, terminate
from tests.cluster.steps import (
    NONEXISTENT,
    WORKER_ONLY,
    Bench,
    bench,
    errors,
    events,
    nodes,
    shape,
    wait_for,
)
from tests.java.messages import Shape, Verdict
from tests.java.tool import JavaTool
from tests.workload import Written

pytest_plugins = ["tests.java.fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.long(group="java"), pytest.mark.timeout(240)]

ON_ALL, ON_THREE, ON_ONE = (5, 5, 5), (3, 3, 3), (1, 1, 1)
HALF_WAY = 10
"""The first entry of the second segment, in ledgers with two segments."""


async def wait_note(on: Bench, ledger: Written, reason: Reason) -> WaitingNote:
    """Wait until the ledger is deferred for this reason, and return the note."""
    notes = WaitingNotes(on.seen.store, on.seen.paths)

    async def fitting() -> WaitingNote | None:
        note = await notes.read(ledger.ledger_id)
        return note if note is not None and note.reason is reason else None

    found: WaitingNote = await wait_for(fitting, f"note with {reason.value}")
    return found


async def is_unlocked(on: Bench) -> bool:
    """Return True if no ledger is locked."""
    return not await locked_ledger_ids(on.seen.store, on.seen.paths)


def assert_whole(java: JavaTool, uri: str, written: Sequence[Written]) -> None:
    report = java.judge(uri, [each.ledger_id for each in written])
    assert report.verdict is Verdict.WHOLE, report


# --- A registered bookie without all its data -----------------------------------------------------


@pytest.mark.compat("G11", "G12", verdict="better")
async def test_a_reformatted_bookie_gets_its_missing_copies_back(
    module_cluster: LocalCluster, java: JavaTool, uri: str, tmp_path: Path
) -> None:
    """A ledger with a damaged copy is moved to another bookie."""

    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        everywhere, *others = await on.write(
            shape(0, quorums=ON_ALL), *(shape(n, quorums=ON_THREE) for n in range(1, 7))
        )
        wiped = (await on.metadata(others[0])).last_segment.ensemble[0]
        before = await on.metadata(everywhere)
        kill_and_expire(module_cluster, wiped)
        await asyncio.to_thread(module_cluster.wipe, wiped)
        await asyncio.to_thread(module_cluster.start_bookie, wiped)
        await store_damaged(on, others[0], wiped)
        written = [everywhere, *others]
        await on.mark([each.ledger_id for each in written])

        node = start("node", settings=WORKER_ONLY)

        await on.wait_idle()
        assert await on.metadata(everywhere) == before, "no other bookie was registered"
        assert wiped not in (await on.metadata(others[0])).last_segment.ensemble
        assert not errors(node)

    assert_whole(java, uri, written)


async def store_damaged(on: Bench, ledger: Written, bookie: BookieId) -> None:
    """Store entry 0 with one wrong bit. Bookies do not check digests."""
    metadata, bookies = await on.metadata(ledger), on.workload.bookies
    assert metadata.password is not None
    assert metadata.digest_type is not None
    entry = bytearray(await bookies.read(metadata.last_segment.ensemble[1], ledger.ledger_id, 0))
    entry[-1] ^= 1
    key = EntryDigest(metadata.digest_type, metadata.password).master_key
    await bookies.add(bookie, bytes(entry), master_key=key, is_recovery=True)


# --- Without an ack quorum ------------------------------------------------------------------------


@pytest.mark.compat(
    "G36", verdict="other", why="nothing is fenced, so a running writer can still close the ledger"
)
async def test_without_an_ack_quorum_closed_ledgers_are_repaired_and_open_ones_wait(
    module_cluster: LocalCluster, java: JavaTool, uri: str, tmp_path: Path
) -> None:
    """Java writes such ledgers."""
    closed = java.write(uri, Shape(ensemble_size=3, write_quorum=3, ack_quorum=0, count=5))
    [opened] = java.write(uri, Shape(ensemble_size=5, write_quorum=2, ack_quorum=0, close=False))
    victim = BookieId(java.metadata(uri, closed[0].ledger).ensembles[0][0])
    needy = [w for w in closed if victim in java.metadata(uri, w.ledger).ensembles[0]]
    terminate(module_cluster, victim)

    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        await on.mark([each.ledger for each in [*needy, opened]])
        settings = WORKER_ONLY | {"REPLICATION_OPEN_LEDGER_GRACE_S": "1"}
        start("node", settings=settings)
        notes = WaitingNotes(on.seen.store, on.seen.paths)

        async def is_deferred() -> bool:
            note = await notes.read(opened.ledger)
            return note is not None and note.reason is Reason.END_UNPROVEN

        await wait_for(is_deferred, "a note that the end is unproven")
        await wait_for(
            lambda: java.judge(uri, [w.ledger for w in needy]).verdict is Verdict.WHOLE,
            "repairs",
        )
        assert java.metadata(uri, opened.ledger).state == "OPEN"
        module_cluster.start_bookie(victim)
        await on.wait_idle()
        # Later tests lose bookies of this cluster, and wait until no ledger is marked.
        await on.seen.manager.delete(opened.ledger, version=-1)
    assert {java.metadata(uri, w.ledger).ack_quorum for w in needy} == {0}
    assert java.judge(uri, [w.ledger for w in needy], expected=needy).verdict is Verdict.WHOLE


# --- Beside Java's worker -------------------------------------------------------------------------


@pytest.mark.compat(
    "TestReplicationWorker.test2RWsShouldCompeteForReplicationOf2FragmentsAndCompleteReplication",
    verdict="same",
)
async def test_java_and_bookmender_workers_share_two_fragment_ledgers(
    module_cluster: LocalCluster, java: JavaTool, uri: str, tmp_path: Path
) -> None:
    quick = {"rwRereplicateBackoffMs": "200", "zkTimeout": "4000"}

    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        written = await on.write(*(shape(n, quorums=ON_THREE) for n in range(40)))
        for ledger in written:
            await lose_of_two_fragments(on, ledger)
        javas = module_cluster.start_autorecovery(settings=quick)
        node = start("node", settings=WORKER_ONLY | {"REPLICATION_LEDGERS_AT_ONCE": "1"})
        try:
            await wait_for(lambda: events(node, "node.started"), "our worker")
            await on.mark([ledger.ledger_id for ledger in written])
            await on.wait_repaired(written, NONEXISTENT)
            assert javas.is_running
        finally:
            javas.kill()
        # The test wrote each ledger once. Java writes once for each fragment, we write once.
        versions = [(await on.seen.manager.read(w.ledger_id)).version for w in written]
        assert set(versions) <= {3, 4}, "a fragment was repaired twice"
        assert not errors(node)

    assert_whole(java, uri, written)


async def lose_of_two_fragments(on: Bench, ledger: Written) -> None:
    """Give the ledger two segments, each of which misses another bookie index."""
    versioned = await on.seen.manager.read(ledger.ledger_id)
    (segment,) = versioned.metadata.segments
    second = Segment(first_entry_id=HALF_WAY, ensemble=segment.ensemble)
    segments = (segment.with_bookies({0: NONEXISTENT}), second.with_bookies({1: NONEXISTENT}))
    metadata = replace(versioned.metadata, segments=segments)
    await on.seen.manager.write(ledger.ledger_id, metadata, read_as=versioned)


# --- New and returning bookies --------------------------------------------------------------------


@pytest.mark.compat(
    "TestReplicationWorker.testBookiesNotAvailableScenarioForReplicationWorker", verdict="better"
)
@pytest.mark.compat("G13", verdict="better")
async def test_an_unreadable_ledger_is_retried_when_its_bookie_returns(
    module_cluster: LocalCluster, java: JavaTool, uri: str, tmp_path: Path
) -> None:
    """Before that, two workers try it only a few times."""

    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        (ledger,) = await on.write(shape(0, quorums=ON_ONE))
        (only,) = (await on.metadata(ledger)).last_segment.ensemble
        terminate(module_cluster, only)
        two = [start(name, settings=WORKER_ONLY) for name in ("one", "other")]
        try:
            await on.mark([ledger.ledger_id])
            note = await wait_note(on, ledger, Reason.NO_COPY)
            assert only in note.blocked.facts.absent
            await wait_for(lambda: is_unlocked(on), "released lock")
        finally:
            await asyncio.to_thread(module_cluster.start_bookie, only)

        await on.wait_idle()
        assert await on.names([ledger], only)
        attempts = [event for node in two for event in events(node, "ledger.deferred")]
        assert 1 <= len(attempts) <= 4
        assert not [error for node in two for error in errors(node)]
        written = [ledger]

    assert_whole(java, uri, written)


@pytest.mark.compat(
    "TestReplicationWorker.testRWShouldRetryUntilThereAreEnoughBksAvailableForReplication",
    verdict="better",
    why="a new bookie is used at once; until then the reason is visible to every node",
)
@pytest.mark.compat(
    "TestAutoRecoveryAlongWithBookieServers.testAutoRecoveryAlongWithBookieServers",
    verdict="other",
)
async def test_a_new_bookie_becomes_the_target_of_a_waiting_ledger(
    module_cluster: LocalCluster, java: JavaTool, uri: str, tmp_path: Path
) -> None:
    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        (ledger,) = await on.write(shape(0, quorums=ON_ALL))
        lost = (await on.metadata(ledger)).last_segment.ensemble[2]
        node = start("node")
        await wait_for(lambda: events(node, "audit.finished"), "audit")
        terminate(module_cluster, lost)
        try:
            await wait_note(on, ledger, Reason.NO_TARGET)

            joined = await asyncio.to_thread(module_cluster.add_bookie)

            await on.wait_repaired([ledger], lost)
            assert (await on.metadata(ledger)).last_segment.ensemble[2] == joined
            assert not errors(node)
        finally:
            await asyncio.to_thread(module_cluster.start_bookie, lost)
        written = [ledger]

    assert_whole(java, uri, written)
