"""Repairs of closed ledgers that lost bookies, on bookies and ZooKeeper in memory."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from ledgers.bookies import Answer, Transfer
from ledgers.codec.metadata import parse_metadata, serialize_metadata
from ledgers.errors import BookmenderError, BusyError, JournalError, RejectedError, UnavailableError
from ledgers.model import BookieId, LedgerState
from replication.copying import REPAIRED_PAYLOAD_BYTES
from replication.history import Cause, CausedBy
from replication.inspection import SMALL_ENTRIES
from replication.ledger_record import WaitingNotes
from replication.reasons import Reason
from replication.repair import DONE, OutcomeKind
from tests.memory.bookies import NO_FAULT, Fault, Op
from tests.metric_changes import changes
from tests.replication.cluster import (
    ENTRY_BYTES,
    PAYLOAD_BYTES,
    Cluster,
    queue_empty,
    shut_out,
    until,
    with_lost_b2,
)
from tests.replication.copies import cluster_with_ledger, copy, job
from tests.replication.ledger_values import B1, B2, B3, B4, B5
from tests.replication.nodes import LEDGER, PATHS, working
from tests.replication.repairs import (
    VERSION_1,
    assert_still_marked,
    blocked_by,
    lost_b2,
    make_whole,
    open_ledger,
    repair,
    repair_with,
)

# --- Lost entries ---------------------------------------------------------------------------------


@pytest.mark.compat(
    "BookieAutoRecoveryTest.testLedgerMetadataContainsHostNameAsBookieID", verdict="same"
)
@pytest.mark.compat(
    "TestReplicationWorker.testRWShouldReplicateFragmentsToTargetBookie",
    verdict="better",
    why="only the entries that the lost bookie index stored are copied, not the whole fragment",
)
async def test_a_lost_bookie_is_replaced_by_one_with_just_its_entries(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)

    outcome = await repair(cluster)

    [(first, target, third)] = await cluster.ensembles()
    assert (first, third) == (B1, B3)
    assert cluster.bookie(target).entry_ids(LEDGER) == {0, 1, 3, 4, 6, 7, 9}
    assert outcome == structs.replace(DONE, entry_count=7, entry_bytes=7 * ENTRY_BYTES)
    await cluster.assert_whole()
    await cluster.assert_queue_empty()


@pytest.mark.parametrize("ack_quorum", [0, -1])
async def test_a_closed_ledger_without_an_ack_quorum_is_repaired_and_keeps_it(
    cluster: Cluster, ack_quorum: int
) -> None:
    await cluster.write_ledger((B1, B2, B3), ack_quorum=ack_quorum)
    await cluster.kill(B2)

    await make_whole(cluster)

    metadata = await cluster.metadata()
    assert B2 not in metadata.bookies
    assert metadata.ack_quorum == ack_quorum


@pytest.mark.compat("G17", verdict="better")
async def test_all_losses_are_written_in_one_compare_and_set(cluster: Cluster) -> None:
    before = await cluster.write_ledger(
        (B1, B2, B3), (B1, B4, B3), (B4, B1, B5), starts=(0, 10, 20), last=29, write_quorum=3
    )
    await cluster.kill(B1, B3)
    await cluster.mark()

    async with cluster.node() as node:
        outcome = await repair_with(node)

    after = await cluster.manager.read(LEDGER)
    assert after.version == before.version + 1
    assert node.written == [after]
    assert not after.metadata.bookies & {B1, B3}
    assert outcome.kind is OutcomeKind.DONE
    assert outcome.entry_count == 30 + 20
    await cluster.assert_whole()


@pytest.mark.compat(
    "BookieAutoRecoveryTest.testClosedLedgers",
    verdict="better",
    why="only the entries that the lost bookie index stored are copied, not the whole fragment",
)
@pytest.mark.parametrize(
    ("ensemble", "write_quorum", "lost"),
    [
        pytest.param((B1,), 1, (), id="nothing lost, one copy"),
        pytest.param((B1, B2), 2, (B2,), id="E 2, W 2"),
        pytest.param((B1, B2, B3), 3, (B1, B3), id="all but the last copy"),
        pytest.param((B1, B2, B3, B4), 2, (B1, B3), id="W < E, lost ones that share nothing"),
        pytest.param((B1, B2, B3, B4, B5), 3, (B2, B3), id="W < E, lost neighbours"),
    ],
)
async def test_every_shape_is_whole_afterwards_with_no_byte_too_many(
    cluster: Cluster, ensemble: tuple[BookieId, ...], write_quorum: int, lost: tuple[BookieId, ...]
) -> None:
    await cluster.write_ledger(ensemble, write_quorum=write_quorum, last=20)
    await cluster.kill(*lost)
    lost_count = sum(len(cluster.bookie(b).entry_ids(LEDGER)) for b in lost)

    outcome = await repair(cluster)

    assert outcome.kind is OutcomeKind.DONE
    assert (outcome.entry_count, outcome.entry_bytes) == (lost_count, lost_count * ENTRY_BYTES)
    assert cluster.bookies.copied_count == lost_count
    await cluster.assert_whole()
    await cluster.assert_queue_empty()


@pytest.mark.parametrize("last", [-1, 0], ids=["an empty ledger", "a single entry"])
async def test_small_ledgers_are_repaired_too(cluster: Cluster, last: int) -> None:
    await cluster.write_ledger((B1, B2, B3), last=last)
    await cluster.kill(B3)

    outcome = await repair(cluster)

    assert outcome.kind is OutcomeKind.DONE
    assert outcome.entry_count == 0  # B3 stores entry 1 first
    assert B3 not in (await cluster.metadata()).bookies
    await cluster.assert_whole()


async def test_rule_s10_the_window_counts_the_real_size_of_entries(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3), last=SMALL_ENTRIES)
    await cluster.kill(B2)

    await repair(cluster)

    assert {t.target is None for t, _ in cluster.bookies.transfers} == {True, False}
    hints = {transfer.entry_bytes_hint for transfer, _ in cluster.bookies.transfers}
    assert hints == {ENTRY_BYTES}, "of the check as of the copy"


@pytest.mark.compat(
    "BookKeeperAdminTest.testAreEntriesOfLedgerStoredInTheBookieForLastEmptySegment",
    verdict="other",
    why="nothing is copied, but the bookie is replaced, so no metadata names an absent bookie",
)
async def test_an_empty_fragment_at_the_end_is_repaired_too(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3), (B1, B4, B3), starts=(0, 10), last=9)
    await cluster.kill(B4)

    assert (await repair(cluster)).kind is OutcomeKind.DONE

    assert B4 not in (await cluster.metadata()).bookies
    assert cluster.bookies.copied_count == 0


async def test_a_whole_ledger_is_only_unmarked(cluster: Cluster) -> None:
    before = await cluster.write_ledger((B1, B2, B3))

    outcome = await repair(cluster)

    assert outcome == DONE
    assert (await cluster.manager.read(LEDGER)).version == before.version
    assert cluster.bookies.copied_count == 0
    await cluster.assert_queue_empty()


async def test_a_read_only_bookie_is_a_source_and_not_lost(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2))
    await cluster.register_again(B1, is_read_only=True)
    await cluster.kill(B2)

    await make_whole(cluster)

    assert (await cluster.ensembles())[0][0] == B1


# --- Metadata -------------------------------------------------------------------------------------


async def test_rule_s2_a_repair_changes_only_the_ensembles(cluster: Cluster) -> None:
    written = await cluster.write_ledger(
        (B1, B2, B3),
        ack_quorum=2,
        custom=(("app", b"\x00"), ("other", b"y")),
        ctime_ms=1234,
        c_token=99,
        unknown_fields=b"\xa2\x06\x03abc",  # field 100, of a later BookKeeper
    )
    before = replace(
        written.metadata,
        segments=(replace(written.metadata.segments[0], unknown_fields=b"\xa2\x06\x01z"),),
    )
    await cluster.manager.write(LEDGER, before, read_as=written)
    await cluster.kill(B2)

    await repair(cluster)

    after = await cluster.metadata()
    [segment] = after.segments
    assert after == replace(
        before, segments=(replace(before.segments[0], ensemble=segment.ensemble),)
    )
    assert segment.ensemble != (B1, B2, B3)


async def test_rule_s2_the_journal_has_the_bytes_before_and_after(cluster: Cluster) -> None:
    written = await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)
    lines: list[tuple[int, bytes, bytes]] = []

    async def journal(*line: Any) -> None:
        lines.append(line)

    await repair(cluster, journal=journal)

    assert lines == [(LEDGER, written.data, (await cluster.manager.read(LEDGER)).data)]


async def test_rule_s2_without_a_journal_nothing_is_written(cluster: Cluster) -> None:
    before = await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)

    async def refuse(ledger_id: int, old: bytes, new: bytes) -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        await repair(cluster, journal=refuse)

    assert (await cluster.manager.read(LEDGER)).version == before.version
    await assert_still_marked(cluster)


async def test_unreadable_metadata_is_left_alone_and_reported(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3))
    await cluster.store.set(cluster.manager.path(LEDGER), b"rubbish", version=-1)

    outcome = await repair(cluster)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.CORRUPT_METADATA)
    assert (await cluster.store.get(cluster.manager.path(LEDGER)))[0] == b"rubbish"
    await assert_still_marked(cluster)


async def test_metadata_with_denied_access_is_left_alone_and_reported(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3))
    await cluster.mark()

    async with cluster.node() as node:
        shut_out(node.store, cluster.manager.path(LEDGER))
        outcome = await repair_with(node)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.ACCESS_DENIED)
    await assert_still_marked(cluster)


@pytest.mark.parametrize("version", [1, 2, 3])
async def test_metadata_keeps_its_version(cluster: Cluster, version: int) -> None:
    fields = VERSION_1 if version == 1 else {"metadata_version": version}
    await cluster.write_ledger((B1, B2), **fields)
    await cluster.kill(B2)

    await make_whole(cluster)

    after = await cluster.manager.read(LEDGER)
    assert after.metadata.metadata_version == version
    assert parse_metadata(serialize_metadata(after.metadata)) == after.metadata


@pytest.mark.compat(
    "TestReplicationWorker.testRWShouldCleanTheLedgerFromUnderReplicationIfLedgerAlreadyDeleted",
    verdict="better",
    why="without the pause of 5 s, and only after a sync and a second read",
)
@pytest.mark.compat("BookieAutoRecoveryTest.testNoSuchLedgerExists", verdict="same")
async def test_a_deleted_ledger_is_unmarked(cluster: Cluster) -> None:

    outcome = await repair(cluster)

    assert outcome == structs.replace(DONE, caused_by=CausedBy(Cause.DELETED))
    await cluster.assert_queue_empty()


@pytest.mark.compat(
    "TestReplicationWorker.testRWShouldCleanTheLedgerFromUnderReplicationIfLedgerAlreadyDeleted",
    verdict="better",
)
async def test_rule_s8_a_ledger_counts_as_deleted_only_after_a_sync(cluster: Cluster) -> None:
    """And a second read."""
    await cluster.write_ledger((B1, B2))
    await cluster.mark()
    async with cluster.node() as node:
        lease = await node.lease()
        await cluster.manager.delete(LEDGER, version=0)
        synced: list[str] = []
        sync = node.store.sync

        async def sync_and_find_it(path: str) -> None:
            synced.append(path)
            await sync(path)
            await cluster.write_ledger((B1, B2))  # only now has our server heard of it

        node.store.sync = sync_and_find_it  # type: ignore[method-assign]

        outcome = await node.repairer.repair(lease)

    assert outcome == DONE
    assert synced == [cluster.manager.path(LEDGER)]
    assert cluster.bookies.asked(B1), "it was found, and so it was checked"


# --- The metrics of repairs -----------------------------------------------------------------------

TRIES = ("repair_seconds_count", "outcome", "done", "waiting", "marked-again", "interrupted")
COPIED = ("copied_ledgers_total", "cause", "loss", "placement")
FAILURES = ("copy_failures_total", "kind", "absent", "mismatch", "unreadable", "unknown", "target")


async def test_tries_and_copies_of_ledgers_are_counted() -> None:
    cluster = await with_lost_b2(4)
    tries, copied = changes(*TRIES), changes(*COPIED)
    payload_bytes = REPAIRED_PAYLOAD_BYTES._value.get()

    async with cluster.node() as node, working(node):
        await until(cluster, lambda: queue_empty(cluster))

    assert tries() == {"done": 4}
    assert copied() == {"loss": 4}
    assert REPAIRED_PAYLOAD_BYTES._value.get() - payload_bytes == 4 * 7 * PAYLOAD_BYTES


async def test_a_ledger_that_needs_no_copy_is_not_counted_as_copied() -> None:
    cluster = await with_lost_b2(1)
    await cluster.revive(B2)
    tries, copied = changes(*TRIES), changes(*COPIED)

    async with cluster.node() as node, working(node):
        await until(cluster, lambda: queue_empty(cluster))

    assert tries() == {"done": 1}
    assert copied() == {}


@pytest.mark.parametrize("damage", ["lose", "corrupt"])
async def test_reads_that_a_source_fails_are_counted_by_answer(damage: str) -> None:
    cluster = await cluster_with_ledger(write_quorum=3)
    for bookie in (B1, B2):
        getattr(cluster.bookie(bookie), damage)(LEDGER, 4)
    failures = changes(*FAILURES)

    outcome = await copy(cluster, job(write_quorum=3))

    answer = Answer.ABSENT if damage == "lose" else Answer.MISMATCH
    assert outcome.without_copy == (4,)
    assert failures() == {answer.value: 2}


# --- Metadata near the largest request that ZooKeeper accepts -------------------------------------

NEARLY_TOO_LARGE = (("x", b"y" * 999_400),)


async def large_ledger(state: LedgerState = LedgerState.CLOSED) -> Cluster:
    cluster = await Cluster.start()
    await cluster.write_ledger(
        (B1, B2, B3), (B1, B4, B3), starts=(0, 5), custom=NEARLY_TOO_LARGE, state=state
    )
    await cluster.kill(B2)
    await cluster.mark(B2)
    return cluster


@pytest.mark.parametrize("state", [LedgerState.CLOSED, LedgerState.OPEN])
async def test_a_ledger_with_too_large_metadata_is_not_copied(state: LedgerState) -> None:
    cluster = await large_ledger(state)

    async with cluster.node() as node, working(node):
        await asyncio.sleep(3_600)
        note = await node.notes.read(LEDGER)

    assert cluster.bookies.copied_count == 0
    assert await cluster.marked() == [LEDGER]
    if state is LedgerState.CLOSED:
        assert note is not None
        assert note.reason is Reason.WRITE_REFUSED
        assert note.blocked.facts.request_bytes_max == 1_000_000
        assert note.blocked.facts.metadata_bytes


async def test_it_is_repaired_where_the_limit_allows_it() -> None:
    cluster = await large_ledger()
    async with cluster.node() as node:
        node.store.request_bytes_max = 10_000_000

        outcome = await repair_with(node)

    assert outcome.kind is OutcomeKind.DONE
    assert B2 not in (await cluster.metadata()).bookies


async def test_a_whole_ledger_is_unmarked_whatever_its_metadatas_size() -> None:
    cluster = await large_ledger()
    await cluster.revive(B2)

    outcome = await repair(cluster)

    assert outcome.kind is OutcomeKind.DONE
    await cluster.assert_queue_empty()


# --- A host that cannot write its journal of metadata writes --------------------------------------


async def full(ledger_id: int, before: bytes, after: bytes) -> None:
    raise JournalError("cannot write to /var/lib/x: No space left on device. Free disk space")


async def test_rule_s2_without_a_record_the_repair_is_deferred() -> None:
    """Nothing is changed."""
    cluster = await lost_b2()
    before = await cluster.manager.read(LEDGER)

    outcome = await repair(cluster, journal=full)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.JOURNAL)
    (error,) = blocked_by(outcome).facts.errors
    assert "/var/lib/x" in error
    assert "Free disk space" in error
    assert await cluster.manager.read(LEDGER) == before


async def test_an_open_ledger_is_not_recovered_without_a_record() -> None:
    cluster = await open_ledger()
    await cluster.kill(B2)
    before = await cluster.manager.read(LEDGER)

    async with cluster.node(journal=full) as node:
        lease, first = await node.first_try()
        outcome = await node.repairer.repair(lease, first.sighting)

    assert outcome.reason is Reason.JOURNAL
    assert await cluster.manager.read(LEDGER) == before


async def test_it_is_noted_without_a_traceback() -> None:
    """Another node repairs the ledger meanwhile."""
    cluster = await lost_b2()
    with capture_logs() as logs:
        async with cluster.node("full", journal=full) as ours, working(ours):
            await asyncio.sleep(60)
            (note,) = await WaitingNotes(cluster.store, PATHS).read_all([LEDGER])
            assert note.reason is Reason.JOURNAL

            async with cluster.node("healthy") as other, working(other):
                await asyncio.sleep(60)

    await cluster.assert_queue_empty()
    await cluster.assert_whole()
    assert "repair.crashed" not in {line["event"] for line in logs}
    told = [line["log_level"] for line in logs if line["event"] == "ledger.deferred"]
    assert told == ["debug"], "the journal has said it, once for all ledgers"


# --- Small ledgers are copied while their bookies prove that all other entries exist --------------


def copies(cluster: Cluster) -> list[Transfer]:
    return [transfer for transfer, _ in cluster.bookies.transfers if transfer.target is not None]


@pytest.mark.parametrize("write_quorum", [2, 3])
async def test_a_small_ledger_needs_one_transfer_for_check_and_copy(
    cluster: Cluster, write_quorum: int
) -> None:
    await cluster.write_ledger((B1, B2, B3), write_quorum=write_quorum)
    await cluster.kill(B2)

    await make_whole(cluster)

    assert len(cluster.bookies.transfers) == 1
    stored = {B1: (0, 9), B3: (0, 9)} if write_quorum == 3 else {B1: (0, 9), B3: (1, 8)}
    for bookie, ends in stored.items():
        assert set(ends) <= set(cluster.bookies.asked(bookie)), "as a check would have asked"


@pytest.mark.parametrize("entry_count", [SMALL_ENTRIES, SMALL_ENTRIES + 1])
async def test_a_larger_one_is_checked_first(cluster: Cluster, entry_count: int) -> None:
    await cluster.write_ledger((B1, B2, B3), last=entry_count - 1)
    await cluster.kill(B2)

    await repair(cluster)

    is_checked_first = cluster.bookies.transfers[0][0].target is None
    assert is_checked_first == (entry_count > SMALL_ENTRIES)
    await cluster.assert_whole()


@pytest.mark.parametrize("entry_id", [0, 4, 9])
@pytest.mark.parametrize("damage", ["lose", "corrupt"])
@pytest.mark.parametrize("bookie", [B1, B3])
async def test_further_losses_are_repaired_without_a_second_copy(
    cluster: Cluster, bookie: BookieId, damage: str, entry_id: int
) -> None:
    """The check finds them."""
    await cluster.write_ledger((B1, B2, B3), write_quorum=3)
    getattr(cluster.bookie(bookie), damage)(LEDGER, entry_id)
    await cluster.kill(B2)

    outcome = await repair(cluster)

    assert outcome.kind is OutcomeKind.DONE
    copied = outcome.entry_count
    assert copied <= 20, "the lost index, and at most the other one"
    assert copied >= 10
    is_asked = entry_id in (0, 9) or bookie == B3  # B3 is the source
    if is_asked:
        await cluster.assert_whole()
    assert B2 not in (await cluster.metadata()).bookies


async def test_a_source_that_does_not_answer_keeps_the_mark() -> None:
    cluster = await lost_b2()
    cluster.bookies.fail(B3, Op.READ, Fault(delay_s=5, error=UnavailableError))

    outcome = await repair(cluster)

    assert outcome.reason is Reason.NO_ANSWER
    await assert_still_marked(cluster)


@pytest.mark.parametrize("error", [BusyError, RejectedError], ids=["busy", "refuses"])
@pytest.mark.parametrize("bookie", [B1, B3])
async def test_a_failing_target_leaves_unread_entries_unproven(
    cluster: Cluster, bookie: BookieId, error: type[BookmenderError]
) -> None:
    await cluster.write_ledger((B1, B2, B3), write_quorum=3)
    cluster.bookie(bookie).lose(LEDGER, 9)
    await cluster.kill(B2)
    has_failed = False

    def fail_once(bookie: BookieId, op: Op, ledger_id: int) -> Fault:
        nonlocal has_failed
        if op is not Op.ADD or has_failed:
            return NO_FAULT
        has_failed = True
        return Fault(error=error)

    cluster.bookies.faults = fail_once

    await make_whole(cluster)

    assert has_failed
