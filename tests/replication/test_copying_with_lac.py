"""Copies for a bookie of a ledger's open end: their headers have the LAC that is known at the time
(rule S12)."""

import asyncio

import pytest

from ledgers.bookies import LAST_ENTRY, Answer, Transfer
from ledgers.digest import EntryDigest, EntryHeader
from ledgers.errors import NoAnswerError
from ledgers.model import DigestType, LedgerMetadata, LedgerState, Segment
from replication.copying import lac_for_copies, replace_lac, transfer_replacing_lac
from tests.memory.bookies import Fault, Op
from tests.replication.cluster import DIGEST, Cluster, entry_bytes
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER, working


@pytest.mark.parametrize("digest_type", list(DigestType))
def test_only_lac_and_digest_of_the_entry_change(digest_type: DigestType) -> None:
    digest = EntryDigest(digest_type, b"secret")
    entry = digest.pack(ledger_id=7, entry_id=3, lac=1, length=40, payload=b"payload")

    after = replace_lac(entry, 9, digest)

    assert digest.check(after, ledger_id=7, entry_id=3) == EntryHeader(
        ledger_id=7, entry_id=3, lac=9, length=40
    )
    assert digest.payload(after) == b"payload"
    assert len(after) == len(entry)


async def test_entries_missing_at_a_source_are_reported_one_by_one(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3), write_quorum=3)
    cluster.bookie(B1).lose(LEDGER, 3)
    cluster.bookie(B1).corrupt(LEDGER, 4)
    transfer = Transfer(ledger_id=LEDGER, digest=DIGEST, reads={B1: range(10)}, target=B4)

    result = await transfer_replacing_lac(cluster.bookies, transfer, 9)

    assert dict(result.failures[B1]) == {3: Answer.ABSENT, 4: Answer.MISMATCH}
    assert result.entry_count == 8
    assert cluster.bookie(B4).entry_ids(LEDGER) == set(range(10)) - {3, 4}


async def test_a_failing_target_is_the_error_and_the_rest_is_unwritten(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3), write_quorum=3, last=200)
    cluster.bookies.fail(B4, Op.ADD, Fault(error=NoAnswerError))
    transfer = Transfer(ledger_id=LEDGER, digest=DIGEST, reads={B1: range(200)}, target=B4)

    result = await transfer_replacing_lac(cluster.bookies, transfer, 9)

    assert isinstance(result.target_error, NoAnswerError)
    assert len(result.unwritten) == 200


# --- A cluster of four ----------------------------------------------------------------------------


async def open_after_a_change() -> Cluster:
    """Return an open ledger on four bookies whose writer has replaced B2 by B4, and continues."""
    cluster = await Cluster.start(B1, B2, B3, B4)
    await cluster.write_ledger(
        (B1, B2, B3),
        (B1, B4, B3),
        starts=(0, 10),
        last=15,
        write_quorum=3,
        ack_quorum=2,
        state=LedgerState.OPEN,
    )
    await cluster.kill(B2)
    await cluster.mark(B2)
    return cluster


async def test_closed_fragments_are_repaired_in_a_small_cluster() -> None:
    """The ledger is open."""
    cluster = await open_after_a_change()

    async with cluster.node() as node, working(node):
        await asyncio.sleep(60)

    metadata = await cluster.metadata()
    assert metadata.state is LedgerState.OPEN
    assert B2 not in metadata.bookies
    assert all(cluster.good_copies(LEDGER, metadata, entry_id) == 3 for entry_id in range(10))
    assert not cluster.violations
    await cluster.assert_queue_empty()


async def test_the_lac_of_copies_is_behind_by_one_entry_at_most() -> None:
    cluster = await open_after_a_change()

    async with cluster.node() as node, working(node):
        await asyncio.sleep(60)

    copied = [cluster.bookie(B4).read(LEDGER, entry_id) for entry_id in range(10)]
    assert {EntryHeader.of(entry).lac for entry in copied} == {8}


async def test_copies_do_not_hide_the_last_flushed_entry() -> None:
    cluster = await open_after_a_change()
    cluster.bookie(B4).flush()

    async with cluster.node() as node, working(node):
        await asyncio.sleep(60)

    assert cluster.bookie(B4).read(LEDGER, LAST_ENTRY) == entry_bytes(LEDGER, 15)


@pytest.mark.parametrize(("first_entry_id", "lac"), [(0, -1), (1, -1), (2, 0), (10, 8)])
def test_java_recovery_still_finds_the_length_in_an_entry(first_entry_id: int, lac: int) -> None:
    """One acknowledged entry lies beyond the LAC of the copies."""
    ensemble = (B1, B2, B3)
    segments = [Segment(first_entry_id=0, ensemble=ensemble)]
    if first_entry_id:
        segments.append(Segment(first_entry_id=first_entry_id, ensemble=(B1, B2, B4)))
    metadata = LedgerMetadata(
        ensemble_size=3, write_quorum=3, ack_quorum=2, segments=tuple(segments)
    )

    assert lac_for_copies(metadata) == lac
