"""Recovery, case by case. ``test_ledger_races`` lets it meet writers and other recoveries."""

from collections.abc import Sequence

import pytest

from ledgers.bookies import LAST_ENTRY, Answer
from ledgers.entry import EntryDigest, EntryHeader
from ledgers.errors import (
    BookmenderError,
    ConflictError,
    DigestMismatchError,
    FencedError,
    LockLostError,
    NoSuchEntryError,
    NoSuchLedgerError,
    NotEnoughBookiesError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.memory.bookies import Fault, Op
from ledgers.memory.store import Fault as StoreFault
from ledgers.memory.store import MemoryStore
from ledgers.metadata import BookieId, DigestType, LedgerState, Segment
from ledgers.operations.asking import Reply
from ledgers.operations.fencing import recovery_verdict
from ledgers.store import Check, Operation
from tests.ledgers.hooked_bookies import Call
from tests.ledgers.world import DIGEST, LEDGER_ID, A, B, C, D, E, World
from tests.virtual_time import run

ENTRY: Reply[bytes] = Reply(value=b"entry")
NO: Reply[bytes] = Reply(error=NoSuchEntryError("ENOENTRY"))
BAD: Reply[bytes] = Reply(error=DigestMismatchError("digest"))
ERROR: Reply[bytes] = Reply(error=UnavailableError("EIO"))
NO_KEY: Reply[bytes] = Reply(error=UnauthorizedError("EUA"))


@pytest.mark.compat("ParallelLedgerRecoveryTest.testRecoveryWithUnavailableBookie", verdict="same")
@pytest.mark.parametrize(
    ("replies", "quorums", "verdict"),
    [
        pytest.param([ENTRY], (3, 2), b"entry", id="one copy may have been acknowledged"),
        pytest.param([NO, ERROR, ENTRY], (3, 2), b"entry", id="one copy, whatever others say"),
        pytest.param([NO, NO], (3, 2), Answer.ABSENT, id="W - A + 1 do not have it"),
        pytest.param([NO, NO], (3, 1), None, id="A 1: the third alone may have acknowledged it"),
        pytest.param([NO], (3, 3), Answer.ABSENT, id="A 3: one without it suffices"),
        pytest.param([NO], (2, 2), Answer.ABSENT, id="A = W likewise"),
        pytest.param([NO, ERROR, ERROR], (3, 2), None, id="an error is no no"),
        pytest.param([NO, BAD, BAD], (3, 2), None, id="nor is a bad digest"),
        pytest.param([NO, NO_KEY], (3, 2), None, id="nor a refused key"),
        pytest.param([], (3, 2), None, id="silence proves nothing"),
    ],
)
def test_only_a_copy_or_enough_explicit_noes_prove_anything(
    replies: list[Reply[bytes]], quorums: tuple[int, int], verdict: bytes | Answer | None
) -> None:
    by_bookie = {BookieId(str(index)): reply for index, reply in enumerate(replies)}
    write_quorum, ack_quorum = quorums

    assert recovery_verdict(by_bookie, write_quorum=write_quorum, ack_quorum=ack_quorum) == verdict


def test_the_no_of_a_distrusted_bookie_does_not_count() -> None:
    verdict = recovery_verdict({A: NO, B: NO}, write_quorum=3, ack_quorum=2, distrusted={A})

    assert verdict is None


@pytest.mark.compat("LedgerRecoveryTest.testLedgerRecovery", verdict="same")
def test_an_abandoned_ledger_is_closed_after_its_last_entry() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        for entry_id in range(4):
            await world.put(entry_id, A, B, C)

        closed = await world.recover()

        assert (closed.state, closed.last_entry_id, closed.length) == (LedgerState.CLOSED, 3, 40)
        assert closed == await world.metadata()
        assert await world.payloads() == [b"%010d" % entry_id for entry_id in range(4)]

    run(scenario())


@pytest.mark.compat("LedgerRecoveryTest.testEmptyLedgerRecovery", verdict="same")
def test_an_empty_ledger_is_closed_empty() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])

        closed = await world.recover()

        assert (closed.last_entry_id, closed.length) == (-1, 0)

    run(scenario())


def test_a_closed_ledger_is_left_alone() -> None:
    async def scenario() -> None:
        world = World()
        made = await world.make_ledger(
            [A, B, C], state=LedgerState.CLOSED, last_entry_id=5, length=60
        )

        assert await world.recover() == made.metadata
        assert world.bookies.calls == []

    run(scenario())


def test_a_deleted_ledger_is_an_error() -> None:
    async def scenario() -> None:
        with pytest.raises(NoSuchLedgerError):
            await World().recover()

    run(scenario())


# --- The defects that model checking and the field have found ------------------------------------


@pytest.mark.compat(
    "LedgerRecovery2Test.testFirstWriterCannotCommitWriteAfter2ndWriterCloses",
    verdict="same",
)
def test_a_bookie_that_said_no_acknowledges_nothing_any_more() -> None:
    """P1: with reads that do not fence, A already has the entry, and C would make it two."""

    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        await world.put(0, B)  # the writer waits for one more acknowledgement
        entry = DIGEST.pack(ledger_id=LEDGER_ID, entry_id=0, lac=-1, length=10, payload=bytes(10))

        async def spoil(call: Call) -> None:
            if (call.bookie, call.entry_id) in {(C, LAST_ENTRY), (B, 0)}:
                raise UnavailableError("C is not fenced at first, B cannot give its entry")

        world.bookies.before = spoil

        closed = await world.recover()

        assert closed.last_entry_id == -1
        assert {call.bookie for call in world.bookies.called("read_fencing")} == {A, B, C}
        assert world.bookies.called("read") == []
        for bookie in (A, C):
            with pytest.raises(FencedError):
                await world.bookies.add(bookie, entry, master_key=DIGEST.master_key)

    run(scenario())


@pytest.mark.compat(
    "LedgerRecovery2Test.testRecoveryWhenSecondEnsembleReturnsLacMinusOne",
    verdict="same",
)
def test_segments_before_the_last_are_complete_and_left_alone() -> None:
    """P2: an empty last ensemble tells LAC -1, which must not start recovery at entry 0."""

    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C], [D, B, E], firsts=[0, 4])
        for entry_id in range(4):
            await world.put(entry_id, A, B, C)
        world.bookies.inner.bookie(B).lose(LEDGER_ID, 3)

        closed = await world.recover()

        assert (closed.last_entry_id, closed.length) == (3, 40)
        assert [s.first_entry_id for s in closed.segments] == [0, 4]
        assert world.bookies.called("add") == []
        fencing = world.bookies.called("read_fencing")
        assert {call.entry_id for call in fencing} <= {LAST_ENTRY, 4, 5}
        assert {call.bookie for call in fencing} == {D, B, E}

    run(scenario())


@pytest.mark.compat("LedgerRecoveryTest.testLedgerRecoveryWithSlowBookie", verdict="same")
def test_a_bookie_that_hangs_delays_nothing() -> None:
    """P3."""

    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        for entry_id in range(20):
            await world.put(entry_id, A, B, C, lac=-1)
        hanging = {A}

        async def hang(call: Call) -> None:
            if call.bookie in hanging and call.operation == "read_fencing":
                await world.clock.sleep(60)

        world.bookies.before = hang

        closed = await world.recover()

        assert closed.last_entry_id == 19
        assert world.clock.now_s() < 1

    run(scenario())


def test_a_bookie_that_hangs_only_after_it_was_fenced_delays_little() -> None:
    """P3, once more: each read of an entry is sent to the next bookie before the first times out."""

    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        await world.put(0, A, B, C)

        async def hang(call: Call) -> None:
            if call.bookie == A and call.entry_id != LAST_ENTRY:
                await world.clock.sleep(60)

        world.bookies.before = hang

        assert (await world.recover()).last_entry_id == 0
        assert world.clock.now_s() < 5

    run(scenario())


@pytest.mark.parametrize("fault", ["error", "bad digest", "limbo"])
def test_what_is_no_explicit_no_never_ends_a_ledger(fault: str) -> None:
    """P4: the entry is acknowledged by A and B; neither can give it, and C never had it."""

    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        await world.put(0, A, B, C)
        await world.put(1, A, B)

        async def fail_to_read(call: Call) -> None:
            if call.entry_id == 1:
                raise UnavailableError("EIO")

        for bookie in (A, B):
            match fault:
                case "error":
                    world.bookies.before = fail_to_read
                case "bad digest":
                    world.bookies.inner.bookie(bookie).corrupt(LEDGER_ID, 1)
                case "limbo":
                    world.bookies.inner.bookie(bookie).lose(LEDGER_ID, 1)
                    world.bookies.inner.bookie(bookie).is_in_limbo = True

        with pytest.raises(UnavailableError):
            await world.recover()
        assert (await world.metadata()).state is LedgerState.IN_RECOVERY
        assert world.holders(1) <= {A, B}

    run(scenario())


@pytest.mark.compat("BookieRecoveryTest.testBookieRecoveryOnInRecoveryLedger", verdict="same")
def test_without_a_fence_on_every_ack_quorum_nothing_is_decided() -> None:
    """P5: the two that are down could still acknowledge entries to the writer."""

    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C, D, E], write_quorum=3, ack_quorum=2)
        await world.put(0, A, B, C)
        world.down = {C, D}

        with pytest.raises(UnavailableError, match="fenced"):
            await world.recover()
        assert (await world.metadata()).state is LedgerState.IN_RECOVERY

        world.down = {C}
        assert (await world.recover()).last_entry_id == 0

    run(scenario())


def test_the_no_of_a_bookie_that_may_have_been_wiped_is_not_believed() -> None:
    """P6: entry 0 is acknowledged by A and C. A was wiped, C is away, B never had it."""

    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C], ack_quorum=2)
        await world.put(0, A, C)
        world.bookies.inner.bookie(A).wipe()
        world.down = {C}

        with pytest.raises(UnavailableError):
            await world.recover(distrusted={A})
        assert (await world.metadata()).state is LedgerState.IN_RECOVERY

        world.down = set()
        assert (await world.recover(distrusted={A})).last_entry_id == 0

    run(scenario())


def test_what_a_distrusted_bookie_has_is_believed() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        await world.put(0, A)

        async def answer_late(call: Call) -> None:
            await world.clock.sleep(0.0 if call.bookie == A else 0.1)

        world.bookies.before = answer_late

        assert (await world.recover(distrusted={A})).last_entry_id == 0

    run(scenario())


# --- Writing back ---------------------------------------------------------------------------------


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
        world.bookies.inner.fail(C, Op.ADD, Fault(error=error))

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
        world.bookies.inner.fail(C, Op.ADD, Fault(error=UnavailableError))

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
        world.bookies.inner.fail(C, Op.ADD, Fault(error=UnavailableError))

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
        world.bookies.inner.fail(C, Op.READ_FENCING, Fault(error=UnauthorizedError))

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
            world.bookies.inner.fail(bookie, Op.READ, Fault(error=UnavailableError))

        closed = await world.recover()

        assert (closed.last_entry_id, closed.length) == (3, 0)

    run(scenario())


# --- The metadata ---------------------------------------------------------------------------------


def test_every_metadata_write_carries_the_guards() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        writes: list[Sequence[Operation]] = []

        def note(store: MemoryStore, operations: Sequence[Operation]) -> None:
            if operations:
                writes.append(operations)

        world.tree.faults = note
        guard = Check(path="/lock", version=1)
        await world.store.create("/lock")
        await world.store.set("/lock", b"ours", version=0)

        await world.recover(guards=[guard])

        mark, close = writes[2:]
        assert guard in mark
        assert guard in close

    run(scenario())


def test_a_guard_that_does_not_hold_stops_recovery_at_once() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])

        with pytest.raises(LockLostError):
            await world.recover(guards=[Check(path="/lock", version=1)])
        assert (await world.metadata()).state is LedgerState.OPEN

    run(scenario())


@pytest.mark.parametrize("fault", StoreFault)
@pytest.mark.parametrize("spoilt", [0, 1], ids=["mark", "close"])
def test_a_write_whose_reply_is_lost_is_looked_up(fault: StoreFault, spoilt: int) -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        await world.put(0, A, B, C)
        writes = 0

        def lose(store: MemoryStore, operations: Sequence[Operation]) -> StoreFault | None:
            nonlocal writes
            writes += bool(operations)
            return fault if operations and writes == spoilt + 1 else None

        world.tree.faults = lose

        assert (await world.recover()).last_entry_id == 0
        assert (await world.metadata()).is_closed

    run(scenario())


@pytest.mark.compat(
    "LedgerRecovery2Test.testMetadataClosedDuringRecovery",
    "ParallelLedgerRecoveryTest.testRecoveryWhenClosingLedgerHandle",
    verdict="same",
)
@pytest.mark.parametrize(
    ("state", "last_entry_id"),
    [
        pytest.param(LedgerState.CLOSED, 0, id="another recovery found less, and was first"),
        pytest.param(LedgerState.IN_RECOVERY, 1, id="nobody closed it, only its version moved"),
    ],
)
def test_whoever_closes_first_is_right(state: LedgerState, last_entry_id: int) -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        await world.put(0, A, B, C)
        await world.put(1, A, B)
        is_changed = False

        async def change(call: Call) -> None:
            nonlocal is_changed
            if call.operation == "add" and not is_changed:
                is_changed = True
                found = await world.manager.read(LEDGER_ID)
                changed = (
                    found.metadata.closed(last_entry_id=0, length=10)
                    if state is LedgerState.CLOSED
                    else found.metadata
                )
                await world.manager.write(LEDGER_ID, changed, read_as=found)

        world.bookies.before = change

        closed = await world.recover()

        assert closed.last_entry_id == last_entry_id
        assert closed == await world.metadata()

    run(scenario())


@pytest.mark.compat(
    "ParallelLedgerRecoveryTest.testRereadDuringRecovery1",
    "ParallelLedgerRecoveryTest.testRereadDuringRecovery2",
    "ParallelLedgerRecoveryTest.testRereadDuringRecovery3",
    "ParallelLedgerRecoveryTest.testRereadDuringRecovery4",
    verdict="same",
)
def test_a_repair_of_an_earlier_segment_meanwhile_is_kept() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C], [A, B, D], firsts=[0, 1])
        await world.put(0, A, B, C)
        await world.put(1, A)
        repaired = Segment(first_entry_id=0, ensemble=(A, B, E))
        is_repaired = False

        async def repair(call: Call) -> None:
            nonlocal is_repaired
            if call.operation == "add" and not is_repaired:
                is_repaired = True
                found = await world.manager.read(LEDGER_ID)
                await world.manager.write(
                    LEDGER_ID, found.metadata.with_segment(repaired), read_as=found
                )

        world.bookies.before = repair

        closed = await world.recover()

        assert closed.segments[0] == repaired
        assert closed.last_entry_id == 1

    run(scenario())


@pytest.mark.compat(
    "LedgerRecovery2Test.testNewEnsembleAddedDuringRecovery",
    "MetadataUpdateLoopTest.testNewestValueCannotBeUsedAfterReadBack",
    verdict="same",
)
def test_an_ensemble_that_changes_under_a_recovery_voids_it() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        await world.put(0, A, B)
        is_changed = False

        async def change(call: Call) -> None:
            nonlocal is_changed
            if call.operation == "add" and not is_changed:
                is_changed = True
                found = await world.manager.read(LEDGER_ID)
                other = Segment(first_entry_id=0, ensemble=(A, B, E))
                await world.manager.write(
                    LEDGER_ID, found.metadata.with_segment(other), read_as=found
                )

        world.bookies.before = change

        with pytest.raises(ConflictError):
            await world.recover()
        assert not (await world.metadata()).is_closed

    run(scenario())


def test_a_ledger_deleted_under_a_recovery_is_an_error() -> None:
    async def scenario() -> None:
        world = World()
        await world.make_ledger([A, B, C])
        await world.put(0, A, B)

        async def delete(call: Call) -> None:
            if call.operation == "add" and call.bookie == A:
                await world.manager.delete(LEDGER_ID, version=1)

        world.bookies.before = delete

        with pytest.raises(NoSuchLedgerError):
            await world.recover()

    run(scenario())
