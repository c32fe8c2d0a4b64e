"""What a recovery writes back to bookies, and the length it finds on the way."""

import pytest

from ledgers.bookies import LAST_ENTRY
from ledgers.digest import EntryDigest, EntryHeader
from ledgers.errors import (
    BookmenderError,
    FencedError,
    NotEnoughBookiesError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.memory.bookies import Fault, Op
from ledgers.model import BookieId, DigestType, LedgerState, Segment
from tests.ledgers.hooked_bookies import Call
from tests.ledgers.world import DIGEST, LEDGER_ID, A, B, C, D, E, World
from tests.virtual_time import run


@pytest.mark.compat("LedgerRecoveryTest.testLedgerRecoveryWithSlowBookie", verdict="same")
def test_what_was_found_is_written_back_to_its_whole_write_set() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C, D])
        await world.put(0, A, B)
        await world.put(1, B, D, lac=-1)
        await world.put(2, C, A, lac=-1)

        closed = await world.recover()

        assert (closed.last_entry_id, closed.length) == (2, 30)
        holders = [world.holders(entry_id) for entry_id in range(3)]
        assert holders == [{A, B, C}, {B, C, D}, {C, D, A}]

    run(scenario())


def test_entries_are_written_back_with_recovery_flags_their_length_and_the_confirmed_lac() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        await world.put(0, A, B, C)
        for entry_id in (1, 2):
            await world.put(entry_id, A, B, lac=0)

        await world.recover()

        adds = world.bookies.called("add")
        assert len(adds) == 6
        assert {(call.is_recovery, call.is_high_priority) for call in adds} == {(True, True)}
        for call in adds:
            header = DIGEST.check(call.entry, ledger_id=LEDGER_ID, entry_id=call.entry_id)
            assert header.length == 10 * (call.entry_id + 1)
            assert 0 <= header.lac < call.entry_id
            assert DIGEST.payload(call.entry) == b"%010d" % call.entry_id

    run(scenario())


def test_reads_for_the_end_have_high_priority() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])

        await world.recover()

        assert {
            (call.entry_id == LAST_ENTRY, call.is_high_priority)
            for call in world.bookies.called("read_fencing")
        } == {(True, False), (False, True)}

    run(scenario())


@pytest.mark.compat(
    "LedgerRecoveryTest.testEnsembleChangeDuringRecovery",
    "LedgerRecovery2Test.testRecoveryOneBookieFailsDuring",
    verdict="same",
)
@pytest.mark.parametrize(
    "error", [UnavailableError, FencedError], ids=["it failed", "it once deleted its copy"]
)
def test_a_bookie_that_refuses_what_is_written_back_is_replaced(
    error: type[BookmenderError],
) -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C], ack_quorum=3)
        await world.put(0, A, B, C)
        await world.put(1, A, B, C)
        await world.put(2, A, B, C, lac=1)
        world.bookies.fail(C, Op.ADD, Fault(error=error))

        closed = await world.recover()

        (old, new) = closed.segments
        assert old == Segment(first_entry_id=0, ensemble=(A, B, C))
        assert new.first_entry_id == 2
        assert new.ensemble[:2] == (A, B)
        assert set(new.ensemble) <= world.holders(2)
        assert await world.payloads() == [b"%010d" % entry_id for entry_id in range(3)]

    run(scenario())


@pytest.mark.compat("LedgerRecovery2Test.testRecoveryBookieFailedAtStart", verdict="same")
def test_a_bookie_replaced_at_the_start_of_the_segment_leaves_no_trace_of_itself() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C], ack_quorum=3)
        await world.put(0, A, B, C)
        world.bookies.fail(C, Op.ADD, Fault(error=UnavailableError))

        closed = await world.recover()

        (segment,) = closed.segments
        assert C not in segment.ensemble
        assert set(segment.ensemble) <= world.holders(0)

    run(scenario())


def test_no_lac_is_told_beyond_an_ensemble_that_only_this_recovery_knows() -> None:
    """Another recovery that believed it would leave entry 1 on fewer than A bookies."""

    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C], ack_quorum=3)
        for entry_id in range(8):
            await world.put(entry_id, A, B, C, lac=-1)
        refusals = iter([None, None, None, UnavailableError("EIO")])

        async def refuse_the_second(call: Call) -> None:
            if call.operation == "add" and call.bookie == C and (error := next(refusals, None)):
                raise error

        world.bookies.before = refuse_the_second

        closed = await world.recover()

        changed = closed.last_segment.first_entry_id
        assert changed > 0
        lacs = [EntryHeader.of(call.entry).lac for call in world.bookies.called("add")]
        assert max(lacs) < changed
        assert closed.last_entry_id == 7

    run(scenario())


def test_without_a_replacement_a_copies_suffice() -> None:
    async def scenario() -> None:
        world = World()
        made = await world.make_ledger([A, B, C], ack_quorum=2)
        await world.put(0, A, B)
        world.unwritable = {D, E, BookieId("f:3181")}
        world.down = {C}

        closed = await world.recover()

        assert closed.segments == made.metadata.segments
        assert world.clock.now_s() < 6

    run(scenario())


@pytest.mark.compat(
    "LedgerRecoveryTest.testLedgerRecoveryWithNotEnoughBookies",
    "LedgerRecovery2Test.testCanReadLacButCantWrite",
    verdict="same",
)
def test_without_a_replacement_fewer_than_a_copies_do_not_suffice() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C], ack_quorum=3)
        await world.put(0, A, B, C)
        world.unwritable = {D, E, BookieId("f:3181")}
        world.bookies.fail(C, Op.ADD, Fault(error=UnavailableError))

        with pytest.raises(NotEnoughBookiesError, match=f"{C}: "):
            await world.recover()
        assert (await world.metadata()).state is LedgerState.IN_RECOVERY

    run(scenario())


@pytest.mark.compat("LedgerRecoveryTest.testLedgerRecoveryWithWrongPassword", verdict="same")
def test_a_refused_key_ends_recovery() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        await world.put(0, A, B, C)
        world.bookies.fail(C, Op.READ_FENCING, Fault(error=UnauthorizedError))

        with pytest.raises(UnauthorizedError):
            await world.recover()

    run(scenario())


def test_a_ledger_without_a_password_is_recovered_with_the_configured_one() -> None:
    async def scenario() -> None:
        world = World()
        configured = EntryDigest(DigestType.CRC32, b"configured")
        await world.make_ledger(
            [A, B, C],
            metadata_version=1,
            ack_quorum=3,
            digest_type=None,
            password=None,
            has_ack_quorum=False,
        )
        await world.put(0, A, B, C, digest=configured)

        with pytest.raises(UnauthorizedError):
            await world.recover()
        assert (await world.recover(fallback=configured)).last_entry_id == 0

    run(scenario())


@pytest.mark.parametrize("digest_type", DigestType)
def test_every_kind_of_digest_is_recovered(digest_type: DigestType) -> None:
    async def scenario() -> None:
        world = World()
        digest = EntryDigest(digest_type, b"key")
        await world.make_ledger([A, B, C], digest_type=digest_type, password=b"key")
        await world.put(0, A, B, digest=digest)

        await world.recover()

        assert await world.payloads() == [b"%010d" % 0]

    run(scenario())


# --- The length -----------------------------------------------------------------------------------


def test_the_length_stops_at_the_last_entry_although_a_header_told_more() -> None:
    """Entry 4 tells LAC 3 and length 50, but is part of the ledger only as long as it is found."""

    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C], ack_quorum=3)
        for entry_id in range(4):
            await world.put(entry_id, A, B, C)
        await world.put(4, A)

        async def lose_the_last(call: Call) -> None:
            if (call.bookie, call.entry_id) == (A, 4):
                raise UnavailableError("EIO")

        world.bookies.before = lose_the_last

        closed = await world.recover()

        assert (closed.last_entry_id, closed.length) == (3, 40)

    run(scenario())


def test_a_length_that_nobody_tells_keeps_no_ledger_open() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C], [A, B, D], firsts=[0, 4])
        for bookie in (A, B, C):
            world.bookies.fail(bookie, Op.READ, Fault(error=UnavailableError))

        closed = await world.recover()

        assert (closed.last_entry_id, closed.length) == (3, 0)

    run(scenario())
