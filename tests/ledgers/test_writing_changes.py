"""A writer whose bookies fail, and the changes it may make of the ledger's metadata."""

from functools import partial

import pytest

from ledgers.errors import (
    BookmenderError,
    ConflictError,
    LedgerClosedError,
    NotEnoughBookiesError,
    ReadOnlyError,
    RejectedError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.model import LedgerMetadata, LedgerState, Segment
from ledgers.writing import changed_by_writer, closed_by_writer
from tests.ledgers.hooked_bookies import Call
from tests.ledgers.memory_cluster import BOOKIES, A, B, C, D, MemoryCluster
from tests.memory.bookies import Fault, Op
from tests.replication.cluster import in_virtual_time


@pytest.mark.parametrize("error", [UnavailableError, ReadOnlyError])
@in_virtual_time
async def test_a_failed_bookie_is_replaced_from_the_first_unconfirmed(
    error: type[BookmenderError],
) -> None:
    async with MemoryCluster.with_writer(write_quorum=3, ack_quorum=3) as (cluster, writer):
        before = writer.metadata.last_segment.ensemble
        await writer.add(b"0")
        cluster.bookies.fail(before[1], Op.ADD, Fault(error=error))
        futures = [await writer.send(payload) for payload in (b"1", b"2", b"3")]
        assert [await future for future in futures] == [1, 2, 3]
        after = (await cluster.metadata(writer.ledger_id)).last_segment
        await writer.close()

    assert after.first_entry_id == 1
    assert (after.ensemble[0], after.ensemble[2]) == (before[0], before[2])
    assert after.ensemble[1] not in before
    for entry_id in (1, 2, 3):
        assert cluster.stored_on(entry_id, writer.ledger_id) >= set(after.ensemble)
    assert await cluster.payloads(writer.ledger_id) == [b"0", b"1", b"2", b"3"]


@in_virtual_time
async def test_without_acknowledged_entries_it_is_replaced_in_place() -> None:
    async with MemoryCluster.with_writer(write_quorum=3, ack_quorum=3) as (cluster, writer):
        failed = writer.metadata.last_segment.ensemble[0]
        cluster.down = {failed}
        await writer.add(b"0")
        (segment,) = (await cluster.metadata(writer.ledger_id)).segments

    assert failed not in segment.ensemble


@pytest.mark.parametrize(
    ("first_s", "second_s"),
    [
        pytest.param(0, 10, id="acknowledged before it was replaced"),
        pytest.param(0, 0.5, id="the second acknowledgement comes while it is being replaced"),
        pytest.param(20, 10, id="acknowledged after it was replaced"),
    ],
)
@in_virtual_time
async def test_an_acknowledgement_of_a_replaced_bookie_does_not_count(
    first_s: float, second_s: float
) -> None:
    """Entry 1 reaches the first bookie, which fails entry 2, then the second, late the third."""
    async with MemoryCluster.with_writer(write_quorum=3, ack_quorum=2) as (cluster, writer):
        first, second, third = writer.metadata.last_segment.ensemble
        await writer.add(b"0")
        cluster.tree.latency = partial(cluster.clock.sleep, 1.0)

        async def spoil(call: Call) -> None:
            if (call.bookie, call.entry_id) == (first, 2):
                raise UnavailableError("EIO")
            await cluster.clock.sleep(
                {first: first_s, second: second_s, third: 30}.get(call.bookie, 60)
            )

        cluster.bookies.before = spoil
        one, _ = [await writer.send(payload) for payload in (b"1", b"2")]
        await one

        named = (await cluster.metadata(writer.ledger_id)).segment_of(1).ensemble
        assert first not in named
        assert len(cluster.stored_on(1, writer.ledger_id) & set(named)) >= 2


@in_virtual_time
async def test_late_failures_of_a_replaced_bookie_are_ignored() -> None:
    async with MemoryCluster.with_writer(write_quorum=3, ack_quorum=3) as (cluster, writer):
        failing = writer.metadata.last_segment.ensemble[0]

        async def fail_later_and_later(call: Call) -> None:
            if call.bookie == failing:
                await cluster.clock.sleep(call.entry_id)
                raise UnavailableError("EIO")

        cluster.bookies.before = fail_later_and_later
        futures = [await writer.send(b"entry") for _ in range(5)]
        await futures[-1]
        await cluster.clock.sleep(10)
        await writer.add(b"entry")

        assert (await cluster.manager.read(writer.ledger_id)).version == 1


@in_virtual_time
async def test_a_bookie_that_fails_during_a_change_is_replaced_too() -> None:
    async with MemoryCluster.with_writer(write_quorum=3, ack_quorum=3) as (cluster, writer):
        first, second, _ = writer.metadata.last_segment.ensemble
        cluster.bookies.fail(first, Op.ADD, Fault(error=UnavailableError))
        cluster.bookies.fail(second, Op.ADD, Fault(error=UnavailableError, delay_s=1))
        await writer.add(b"0")
        (segment,) = (await cluster.metadata(writer.ledger_id)).segments

    assert not {first, second} & set(segment.ensemble)
    assert cluster.stored_on(0, writer.ledger_id) == set(segment.ensemble)


@in_virtual_time
async def test_a_replacement_that_fails_is_replaced_in_turn() -> None:
    async with MemoryCluster.with_writer(write_quorum=3, ack_quorum=3) as (cluster, writer):
        ensemble = writer.metadata.last_segment.ensemble
        others = sorted(set(BOOKIES) - set(ensemble))
        for bookie in (ensemble[0], *others[:2]):
            cluster.bookies.fail(bookie, Op.ADD, Fault(error=UnavailableError))
        await writer.add(b"0")
        (segment,) = (await cluster.metadata(writer.ledger_id)).segments

    assert segment.ensemble[0] == others[2]


@in_virtual_time
async def test_without_a_replacement_an_ack_quorum_is_enough_to_write() -> None:
    async with MemoryCluster.with_writer(ensemble_size=5, write_quorum=3, ack_quorum=2) as (
        cluster,
        writer,
    ):
        ensemble = writer.metadata.last_segment.ensemble
        cluster.unwritable = set(BOOKIES)
        cluster.bookies.fail(ensemble[0], Op.ADD, Fault(error=UnavailableError))
        adds = [await writer.add(b"entry") for _ in range(5)]
        assert adds == [0, 1, 2, 3, 4]
        assert (await cluster.metadata(writer.ledger_id)).last_segment.ensemble == ensemble

        cluster.bookies.fail(ensemble[1], Op.ADD, Fault(error=UnavailableError))
        await writer.send(b"entry 5, for bookie indexes 0 to 2")
        with pytest.raises(NotEnoughBookiesError):
            await writer.add(b"entry 6")


@pytest.mark.compat("BookieRecoveryTest.testMetadataConflictWithRecovery", verdict="same")
@in_virtual_time
async def test_a_repair_of_an_earlier_segment_is_kept_by_a_change() -> None:
    async with MemoryCluster.with_writer(write_quorum=3, ack_quorum=3) as (cluster, writer):
        first, second, third = writer.metadata.last_segment.ensemble
        await writer.add(b"0")
        cluster.bookies.fail(first, Op.ADD, Fault(error=UnavailableError))
        await writer.add(b"1")
        other = (set(BOOKIES) - {*writer.metadata.bookies}).pop()
        found = await cluster.manager.read(writer.ledger_id)
        repaired = Segment(first_entry_id=0, ensemble=(other, second, third))
        await cluster.manager.write(
            writer.ledger_id, found.metadata.with_segment(repaired), read_as=found
        )
        cluster.bookies.fail(second, Op.ADD, Fault(error=UnavailableError))
        await writer.add(b"2")
        closed = await writer.close()

    assert closed.metadata.segments[0] == repaired
    assert [s.first_entry_id for s in closed.metadata.segments] == [0, 1, 2]


@in_virtual_time
async def test_a_bookie_that_denies_access_is_replaced() -> None:
    """It may report a failed write of its journal like this."""
    async with MemoryCluster.with_writer() as (cluster, writer):
        first = (await cluster.manager.read(writer.ledger_id)).metadata.last_segment.ensemble[0]
        cluster.bookies.fail(first, Op.ADD, Fault(error=UnauthorizedError))
        await writer.add(b"entry")
        closed = await writer.close()

    assert first not in closed.metadata.bookies


@in_virtual_time
async def test_an_entry_that_no_bookie_can_take_stops_the_writer() -> None:
    """It replaces no bookie."""
    async with MemoryCluster.with_writer() as (cluster, writer):
        for bookie in BOOKIES:
            cluster.bookies.fail(bookie, Op.ADD, Fault(error=RejectedError))
        with pytest.raises(RejectedError):
            await writer.add(b"entry")
        assert (await cluster.manager.read(writer.ledger_id)).version == 0


# --- The decisions --------------------------------------------------------------------------------

OPEN = LedgerMetadata(
    ensemble_size=3,
    write_quorum=3,
    ack_quorum=2,
    segments=(Segment(first_entry_id=0, ensemble=(A, B, C)),),
)
BEFORE = OPEN.last_segment
CHANGE = Segment(first_entry_id=4, ensemble=(A, B, D))


def test_a_change_appends_a_segment_or_replaces_the_one_there() -> None:
    in_place = Segment(first_entry_id=0, ensemble=(A, B, D))

    assert changed_by_writer(OPEN, CHANGE, before=BEFORE).segments == (BEFORE, CHANGE)
    assert changed_by_writer(OPEN, in_place, before=BEFORE).segments == (in_place,)


@pytest.mark.compat("MetadataUpdateLoopTest.testConflictOnWriteBothWritingSame", verdict="same")
def test_an_existing_change_is_not_made_twice() -> None:
    changed = OPEN.with_segment(CHANGE)

    assert changed_by_writer(changed, CHANGE, before=BEFORE) is changed


def test_a_change_keeps_unknown_fields() -> None:
    segment = Segment(first_entry_id=0, ensemble=(A, B, C), unknown_fields=b"new")
    metadata = OPEN.with_segment(segment)
    in_place = Segment(first_entry_id=0, ensemble=(A, B, D))

    changed = changed_by_writer(metadata, in_place, before=segment)

    assert changed.last_segment == Segment(
        first_entry_id=0, ensemble=(A, B, D), unknown_fields=b"new"
    )


@pytest.mark.parametrize("state", [LedgerState.IN_RECOVERY, LedgerState.CLOSED])
def test_only_an_open_ledger_changes_its_ensemble(state: LedgerState) -> None:
    with pytest.raises(LedgerClosedError):
        changed_by_writer(OPEN.with_state(state), CHANGE, before=BEFORE)


@pytest.mark.compat(
    "MetadataUpdateLoopTest.testConflictOnLocalUpdate",
    verdict="other",
    why="metadata is not cached; each decision reads it again",
)
@pytest.mark.compat(
    "MetadataUpdateLoopTest.testNewestValueCannotBeUsedAfterReadBack", verdict="same"
)
def test_an_ensemble_changed_by_another_client_is_not_ours() -> None:
    other = OPEN.with_segment(Segment(first_entry_id=0, ensemble=(A, D, C)))

    with pytest.raises(ConflictError):
        changed_by_writer(other, CHANGE, before=BEFORE)


@pytest.mark.compat(
    "ParallelLedgerRecoveryTest.testRecoveryWhenClosingLedgerHandle", verdict="same"
)
@pytest.mark.parametrize("state", [LedgerState.OPEN, LedgerState.IN_RECOVERY])
def test_a_writer_may_close_during_a_recovery(state: LedgerState) -> None:
    metadata = OPEN.with_state(state)

    closed = closed_by_writer(metadata, last_entry_id=4, length=50)

    assert closed == OPEN.closed(last_entry_id=4, length=50)


@pytest.mark.parametrize(("last_entry_id", "length"), [(4, 51), (5, 50)])
def test_another_end_than_the_writers_is_an_error(last_entry_id: int, length: int) -> None:
    closed = OPEN.closed(last_entry_id=4, length=50)

    assert closed_by_writer(closed, last_entry_id=4, length=50) is closed
    with pytest.raises(LedgerClosedError):
        closed_by_writer(closed, last_entry_id=last_entry_id, length=length)
