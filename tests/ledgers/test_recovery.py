"""Recovery, case by case: where a ledger ends. ``test_ledger_races`` lets it meet writers and
others."""

import pytest

from ledgers.bookies import LAST_ENTRY, Answer
from ledgers.errors import (
    DigestMismatchError,
    FencedError,
    NoSuchEntryError,
    NoSuchLedgerError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.model import BookieId, LedgerState
from ledgers.quorum import Result, recovery_verdict
from tests.ledgers.hooked_bookies import Call
from tests.ledgers.world import DIGEST, LEDGER_ID, A, B, C, D, E, World
from tests.virtual_time import run

ENTRY: Result[bytes] = Result(value=b"entry")
NO: Result[bytes] = Result(error=NoSuchEntryError("ENOENTRY"))
BAD: Result[bytes] = Result(error=DigestMismatchError("digest"))
ERROR: Result[bytes] = Result(error=UnavailableError("EIO"))
NO_KEY: Result[bytes] = Result(error=UnauthorizedError("EUA"))


@pytest.mark.compat("ParallelLedgerRecoveryTest.testRecoveryWithUnavailableBookie", verdict="same")
@pytest.mark.parametrize(
    ("results", "quorums", "verdict"),
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
    results: list[Result[bytes]], quorums: tuple[int, int], verdict: bytes | Answer | None
) -> None:
    by_bookie = {BookieId(str(index)): result for index, result in enumerate(results)}
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
        world.bookies.bookie(B).lose(LEDGER_ID, 3)

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
    """P3, once more: each read of an entry is sent to the next bookie before the first times
    out."""

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
                    world.bookies.bookie(bookie).corrupt(LEDGER_ID, 1)
                case "limbo":
                    world.bookies.bookie(bookie).lose(LEDGER_ID, 1)
                    world.bookies.bookie(bookie).is_in_limbo = True

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
        world.bookies.bookie(A).wipe()
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
