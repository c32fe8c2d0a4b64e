"""Entries that a recovery writes back to bookies, and the length that it finds."""

import pytest

from ledgers.bookies import LAST_ENTRY
from ledgers.digest import EntryDigest, EntryHeader
from ledgers.errors import (
    BookmenderError,
    CorruptionError,
    FencedError,
    NoSuchEntryError,
    NotEnoughBookiesError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.model import BookieId, DigestType, LedgerState, Segment
from tests.ledgers.hooked_bookies import Call
from tests.ledgers.memory_cluster import DIGEST, LEDGER_ID, A, B, C, D, E, MemoryCluster
from tests.memory.bookies import Fault, Op
from tests.replication.cluster import in_virtual_time


@pytest.mark.compat("LedgerRecoveryTest.testLedgerRecoveryWithSlowBookie", verdict="same")
@in_virtual_time
async def test_found_entries_are_written_back_to_their_whole_write_set() -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C, D], entries=[0], on=[A, B])
    await cluster.put(1, B, D, lac=-1)
    await cluster.put(2, C, A, lac=-1)

    closed = await cluster.recover()

    assert (closed.last_entry_id, closed.length) == (2, 30)
    holders = [cluster.stored_on(entry_id) for entry_id in range(3)]
    assert holders == [{A, B, C}, {B, C, D}, {C, D, A}]


@in_virtual_time
async def test_entries_are_written_back_with_recovery_flag_and_lac() -> None:
    """And with their length."""
    cluster = await MemoryCluster.with_ledger([A, B, C], entries=[0], on=[A, B, C])
    for entry_id in (1, 2):
        await cluster.put(entry_id, A, B, lac=0)

    await cluster.recover()

    adds = cluster.bookies.called("add")
    assert len(adds) == 6
    assert {(call.is_recovery, call.is_high_priority) for call in adds} == {(True, True)}
    for call in adds:
        header = DIGEST.check(call.entry, ledger_id=LEDGER_ID, entry_id=call.entry_id)
        assert header.length == 10 * (call.entry_id + 1)
        assert 0 <= header.lac < call.entry_id
        assert DIGEST.payload(call.entry) == b"%010d" % call.entry_id


@in_virtual_time
async def test_reads_for_the_end_have_high_priority() -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C])

    await cluster.recover()

    assert {
        (call.entry_id == LAST_ENTRY, call.is_high_priority)
        for call in cluster.bookies.called("read_fencing")
    } == {(True, False), (False, True)}


@pytest.mark.compat(
    "LedgerRecoveryTest.testEnsembleChangeDuringRecovery",
    "LedgerRecovery2Test.testRecoveryOneBookieFailsDuring",
    verdict="same",
)
@pytest.mark.parametrize(
    "error", [UnavailableError, FencedError], ids=["it failed", "it once deleted its copy"]
)
@in_virtual_time
async def test_a_bookie_that_refuses_an_entry_is_replaced(error: type[BookmenderError]) -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C], ack_quorum=3, entries=[0], on=[A, B, C])
    await cluster.put(1, A, B, C)
    await cluster.put(2, A, B, C, lac=1)
    cluster.bookies.fail(C, Op.ADD, Fault(error=error))

    closed = await cluster.recover()

    (old, new) = closed.segments
    assert old == Segment(first_entry_id=0, ensemble=(A, B, C))
    assert new.first_entry_id == 2
    assert new.ensemble[:2] == (A, B)
    assert set(new.ensemble) <= cluster.stored_on(2)
    assert await cluster.payloads() == [b"%010d" % entry_id for entry_id in range(3)]


@pytest.mark.compat("LedgerRecovery2Test.testRecoveryBookieFailedAtStart", verdict="same")
@in_virtual_time
async def test_a_replacement_at_the_start_of_a_segment_is_in_place() -> None:
    """The segment keeps no trace of the replaced bookie."""
    cluster = await MemoryCluster.with_ledger([A, B, C], ack_quorum=3, entries=[0], on=[A, B, C])
    cluster.bookies.fail(C, Op.ADD, Fault(error=UnavailableError))

    closed = await cluster.recover()

    (segment,) = closed.segments
    assert C not in segment.ensemble
    assert set(segment.ensemble) <= cluster.stored_on(0)


@in_virtual_time
async def test_the_lac_stays_within_ensembles_that_others_know() -> None:
    """Another recovery that believed a higher one would leave entry 1 on too few bookies."""
    cluster = await MemoryCluster.with_ledger([A, B, C], ack_quorum=3)
    for entry_id in range(8):
        await cluster.put(entry_id, A, B, C, lac=-1)
    refusals = iter([None, None, None, UnavailableError("EIO")])

    async def refuse_the_second(call: Call) -> None:
        if call.operation == "add" and call.bookie == C and (error := next(refusals, None)):
            raise error

    cluster.bookies.before = refuse_the_second

    closed = await cluster.recover()

    changed = closed.last_segment.first_entry_id
    assert changed > 0
    lacs = [EntryHeader.of(call.entry).lac for call in cluster.bookies.called("add")]
    assert max(lacs) < changed
    assert closed.last_entry_id == 7


@in_virtual_time
async def test_without_a_replacement_an_ack_quorum_of_copies_suffices() -> None:
    cluster = MemoryCluster()
    made = await cluster.make_ledger([A, B, C], ack_quorum=2)
    await cluster.put(0, A, B)
    cluster.unwritable = {D, E, BookieId("f:3181")}
    cluster.down = {C}

    closed = await cluster.recover()

    assert closed.segments == made.metadata.segments
    assert cluster.clock.now_s() < 6


@pytest.mark.compat(
    "LedgerRecoveryTest.testLedgerRecoveryWithNotEnoughBookies",
    "LedgerRecovery2Test.testCanReadLacButCantWrite",
    verdict="same",
)
@in_virtual_time
async def test_without_a_replacement_fewer_copies_do_not_suffice() -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C], ack_quorum=3, entries=[0], on=[A, B, C])
    cluster.unwritable = {D, E, BookieId("f:3181")}
    cluster.bookies.fail(C, Op.ADD, Fault(error=UnavailableError))

    with pytest.raises(NotEnoughBookiesError, match=f"{C}: "):
        await cluster.recover()
    assert (await cluster.metadata()).state is LedgerState.IN_RECOVERY


@pytest.mark.compat("LedgerRecoveryTest.testLedgerRecoveryWithWrongPassword", verdict="same")
@in_virtual_time
async def test_a_key_that_every_bookie_refuses_ends_recovery() -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C], entries=[0], on=[A, B, C])
    for bookie in (A, B, C):
        cluster.bookies.fail(bookie, Op.READ_FENCING, Fault(error=UnauthorizedError))

    with pytest.raises(UnauthorizedError):
        await cluster.recover()


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(UnauthorizedError, id="it stores another key, or its authentication differs"),
        pytest.param(NoSuchEntryError, id="it says that the ledger is unknown"),
        pytest.param(CorruptionError, id="its reply is malformed"),
    ],
)
@in_virtual_time
async def test_one_bookie_that_refuses_everything_does_not_stop_recovery(
    error: type[BookmenderError],
) -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C], entries=[0], on=[A, B, C])
    await cluster.put(1, A, B, lac=-1)
    if error is not NoSuchEntryError:  # a "no" is an answer
        cluster.bookies.fail(C, Op.READ_FENCING, Fault(error=error))
    cluster.bookies.fail(C, Op.ADD, Fault(error=error))

    closed = await cluster.recover()

    assert closed.last_entry_id == 1
    assert C not in closed.last_segment.ensemble


@in_virtual_time
async def test_a_ledger_without_a_password_uses_the_configured_one() -> None:
    cluster = MemoryCluster()
    configured = EntryDigest(DigestType.CRC32, b"configured")
    await cluster.make_ledger(
        [A, B, C],
        metadata_version=1,
        ack_quorum=3,
        digest_type=None,
        password=None,
        has_ack_quorum=False,
    )
    await cluster.put(0, A, B, C, digest=configured)

    with pytest.raises(UnauthorizedError):
        await cluster.recover()
    assert (await cluster.recover(fallback=configured)).last_entry_id == 0


@pytest.mark.parametrize("digest_type", DigestType)
@in_virtual_time
async def test_every_digest_type_is_recovered(digest_type: DigestType) -> None:
    cluster = MemoryCluster()
    digest = EntryDigest(digest_type, b"key")
    await cluster.make_ledger([A, B, C], digest_type=digest_type, password=b"key")
    await cluster.put(0, A, B, digest=digest)

    await cluster.recover()

    assert await cluster.payloads() == [b"%010d" % 0]


# --- The length -----------------------------------------------------------------------------------


@in_virtual_time
async def test_the_length_stops_at_the_last_entry() -> None:
    """Entry 4 tells LAC 3 and length 50; it belongs to the ledger only if it is found."""
    cluster = await MemoryCluster.with_ledger(
        [A, B, C], ack_quorum=3, entries=range(4), on=[A, B, C]
    )
    await cluster.put(4, A)

    async def lose_the_last(call: Call) -> None:
        if (call.bookie, call.entry_id) == (A, 4):
            raise UnavailableError("EIO")

    cluster.bookies.before = lose_the_last

    closed = await cluster.recover()

    assert (closed.last_entry_id, closed.length) == (3, 40)


@in_virtual_time
async def test_an_unknown_length_does_not_keep_a_ledger_open() -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C], [A, B, D], firsts=[0, 4])
    for bookie in (A, B, C):
        cluster.bookies.fail(bookie, Op.READ, Fault(error=UnavailableError))

    closed = await cluster.recover()

    assert (closed.last_entry_id, closed.length) == (3, 0)
