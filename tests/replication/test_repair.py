"""Repairs of closed ledgers that lost bookies, on bookies and ZooKeeper in memory."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from ledgers.codec.metadata import parse_metadata, serialize_metadata
from ledgers.model import BookieId
from replication.history import Cause, CausedBy
from replication.inspection import SMALL_ENTRIES
from replication.reasons import Reason
from replication.repair import DONE, OutcomeKind
from tests.replication.cluster import (
    ENTRY_BYTES,
    Cluster,
    shut_out,
)
from tests.replication.ledger_values import B1, B2, B3, B4, B5
from tests.replication.nodes import LEDGER
from tests.replication.repairs import (
    VERSION_1,
    assert_still_marked,
    repair,
    repair_with,
)

# --- Lost entries ---------------------------------------------------------------------------------


@pytest.mark.compat(
    "BookieAutoRecoveryTest.testLedgerMetadataContainsHostNameAsBookieID",
    verdict="same",
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
    cluster: Cluster,
    ack_quorum: int,
) -> None:
    await cluster.write_ledger((B1, B2, B3), ack_quorum=ack_quorum)
    await cluster.kill(B2)

    outcome = await repair(cluster)

    metadata = await cluster.metadata()
    assert outcome.kind is OutcomeKind.DONE
    assert B2 not in metadata.bookies
    assert metadata.ack_quorum == ack_quorum
    await cluster.assert_whole()


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
    await cluster.unregister(B1)
    await cluster.register(B1, is_read_only=True)
    await cluster.kill(B2)

    assert (await repair(cluster)).kind is OutcomeKind.DONE

    assert (await cluster.ensembles())[0][0] == B1
    await cluster.assert_whole()


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

    assert (await repair(cluster)).kind is OutcomeKind.DONE

    after = await cluster.manager.read(LEDGER)
    assert after.metadata.metadata_version == version
    assert parse_metadata(serialize_metadata(after.metadata)) == after.metadata
    await cluster.assert_whole()


# --- Missing copies -------------------------------------------------------------------------------


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
