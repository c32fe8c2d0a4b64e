"""Recovery, case by case: where a ledger ends. ``test_ledger_races`` adds writers and other
recoveries."""

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
from tests.ledgers.memory_cluster import DIGEST, LEDGER_ID, A, B, C, D, E, MemoryCluster
from tests.replication.cluster import in_virtual_time

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
        pytest.param([NO], (3, 3), Answer.ABSENT, id="A 3: one bookie without it is enough"),
        pytest.param([NO], (2, 2), Answer.ABSENT, id="A = W: one is enough too"),
        pytest.param([NO, ERROR, ERROR], (3, 2), None, id="an error is no no"),
        pytest.param([NO, BAD, BAD], (3, 2), None, id="nor is a bad digest"),
        pytest.param([NO, NO_KEY], (3, 2), None, id="nor a refused key"),
        pytest.param([], (3, 2), None, id="a missing answer proves nothing"),
    ],
)
def test_only_a_copy_or_enough_explicit_denials_prove_anything(
    results: list[Result[bytes]], quorums: tuple[int, int], verdict: bytes | Answer | None
) -> None:
    by_bookie = {BookieId(str(index)): result for index, result in enumerate(results)}
    write_quorum, ack_quorum = quorums

    assert recovery_verdict(by_bookie, write_quorum=write_quorum, ack_quorum=ack_quorum) == verdict


def test_the_denial_of_a_distrusted_bookie_does_not_count() -> None:
    verdict = recovery_verdict({A: NO, B: NO}, write_quorum=3, ack_quorum=2, distrusted={A})

    assert verdict is None


@pytest.mark.compat("LedgerRecoveryTest.testLedgerRecovery", verdict="same")
@in_virtual_time
async def test_an_abandoned_ledger_is_closed_after_its_last_entry() -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C], entries=range(4), on=[A, B, C])

    closed = await cluster.recover()

    assert (closed.state, closed.last_entry_id, closed.length) == (LedgerState.CLOSED, 3, 40)
    assert closed == await cluster.metadata()
    assert await cluster.payloads() == [b"%010d" % entry_id for entry_id in range(4)]


@pytest.mark.compat("LedgerRecoveryTest.testEmptyLedgerRecovery", verdict="same")
@in_virtual_time
async def test_an_empty_ledger_is_closed_empty() -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C])

    closed = await cluster.recover()

    assert (closed.last_entry_id, closed.length) == (-1, 0)


@in_virtual_time
async def test_a_closed_ledger_is_left_alone() -> None:
    cluster = MemoryCluster()
    made = await cluster.make_ledger(
        [A, B, C], state=LedgerState.CLOSED, last_entry_id=5, length=60
    )

    assert await cluster.recover() == made.metadata
    assert cluster.bookies.calls == []


@in_virtual_time
async def test_a_deleted_ledger_is_an_error() -> None:
    with pytest.raises(NoSuchLedgerError):
        await MemoryCluster().recover()


# --- The defects that model checking and the field have found -------------------------------------


@pytest.mark.compat(
    "LedgerRecovery2Test.testFirstWriterCannotCommitWriteAfter2ndWriterCloses", verdict="same"
)
@in_virtual_time
async def test_a_bookie_that_denied_an_entry_never_acknowledges_it() -> None:
    """P1: with reads that do not fence, A already has the entry, and C would make it two."""
    cluster = await MemoryCluster.with_ledger([A, B, C])
    await cluster.put(0, B)  # the writer waits for one more acknowledgement
    entry = DIGEST.pack(ledger_id=LEDGER_ID, entry_id=0, lac=-1, length=10, payload=bytes(10))

    async def spoil(call: Call) -> None:
        if (call.bookie, call.entry_id) in {(C, LAST_ENTRY), (B, 0)}:
            raise UnavailableError("C is not fenced at first, B cannot give its entry")

    cluster.bookies.before = spoil

    closed = await cluster.recover()

    assert closed.last_entry_id == -1
    assert {call.bookie for call in cluster.bookies.called("read_fencing")} == {A, B, C}
    assert cluster.bookies.called("read") == []
    for bookie in (A, C):
        with pytest.raises(FencedError):
            await cluster.bookies.add(bookie, entry, master_key=DIGEST.master_key)


@pytest.mark.compat(
    "LedgerRecovery2Test.testRecoveryWhenSecondEnsembleReturnsLacMinusOne", verdict="same"
)
@in_virtual_time
async def test_earlier_segments_are_complete_and_left_alone() -> None:
    """P2: an empty last ensemble tells LAC -1, which must not start recovery at entry 0."""
    cluster = await MemoryCluster.with_ledger(
        [A, B, C], [D, B, E], firsts=[0, 4], entries=range(4), on=[A, B, C]
    )
    cluster.bookies.bookie(B).lose(LEDGER_ID, 3)

    closed = await cluster.recover()

    assert (closed.last_entry_id, closed.length) == (3, 40)
    assert [s.first_entry_id for s in closed.segments] == [0, 4]
    assert cluster.bookies.called("add") == []
    fencing = cluster.bookies.called("read_fencing")
    assert {call.entry_id for call in fencing} <= {LAST_ENTRY, 4, 5}
    assert {call.bookie for call in fencing} == {D, B, E}


@pytest.mark.compat("LedgerRecoveryTest.testLedgerRecoveryWithSlowBookie", verdict="same")
@in_virtual_time
async def test_a_hanging_bookie_delays_nothing() -> None:
    """P3."""
    cluster = await MemoryCluster.with_ledger([A, B, C])
    for entry_id in range(20):
        await cluster.put(entry_id, A, B, C, lac=-1)
    hanging = {A}

    async def hang(call: Call) -> None:
        if call.bookie in hanging and call.operation == "read_fencing":
            await cluster.clock.sleep(60)

    cluster.bookies.before = hang

    closed = await cluster.recover()

    assert closed.last_entry_id == 19
    assert cluster.clock.now_s() < 1


@in_virtual_time
async def test_a_bookie_that_hangs_after_its_fence_delays_little() -> None:
    """P3: each read of an entry is sent to the next bookie before the first times out."""
    cluster = await MemoryCluster.with_ledger([A, B, C], entries=[0], on=[A, B, C])

    async def hang(call: Call) -> None:
        if call.bookie == A and call.entry_id != LAST_ENTRY:
            await cluster.clock.sleep(60)

    cluster.bookies.before = hang

    assert (await cluster.recover()).last_entry_id == 0
    assert cluster.clock.now_s() < 5


@pytest.mark.parametrize("fault", ["error", "bad digest", "limbo"])
@in_virtual_time
async def test_an_answer_that_is_no_explicit_denial_ends_no_ledger(fault: str) -> None:
    """P4: the entry is acknowledged by A and B; neither can give it, and C never had it."""
    cluster = await MemoryCluster.with_ledger([A, B, C], entries=[0], on=[A, B, C])
    await cluster.put(1, A, B)

    async def fail_to_read(call: Call) -> None:
        if call.entry_id == 1:
            raise UnavailableError("EIO")

    for bookie in (A, B):
        match fault:
            case "error":
                cluster.bookies.before = fail_to_read
            case "bad digest":
                cluster.bookies.bookie(bookie).corrupt(LEDGER_ID, 1)
            case "limbo":
                cluster.bookies.bookie(bookie).lose(LEDGER_ID, 1)
                cluster.bookies.bookie(bookie).is_in_limbo = True

    with pytest.raises(UnavailableError):
        await cluster.recover()
    assert (await cluster.metadata()).state is LedgerState.IN_RECOVERY
    assert cluster.stored_on(1) <= {A, B}


@pytest.mark.compat("BookieRecoveryTest.testBookieRecoveryOnInRecoveryLedger", verdict="same")
@in_virtual_time
async def test_without_a_fence_on_every_ack_quorum_nothing_is_decided() -> None:
    """P5: the two that are down could still acknowledge entries to the writer."""
    cluster = await MemoryCluster.with_ledger(
        [A, B, C, D, E], write_quorum=3, ack_quorum=2, entries=[0], on=[A, B, C]
    )
    cluster.down = {C, D}

    with pytest.raises(UnavailableError, match="fenced"):
        await cluster.recover()
    assert (await cluster.metadata()).state is LedgerState.IN_RECOVERY

    cluster.down = {C}
    assert (await cluster.recover()).last_entry_id == 0


@in_virtual_time
async def test_a_possibly_reformatted_bookies_denial_is_not_believed() -> None:
    """P6: A and C acknowledged entry 0. A was reformatted, C is down, B never had it."""
    cluster = await MemoryCluster.with_ledger([A, B, C], ack_quorum=2, entries=[0], on=[A, C])
    cluster.bookies.bookie(A).wipe()
    cluster.down = {C}

    with pytest.raises(UnavailableError):
        await cluster.recover(distrusted={A})
    assert (await cluster.metadata()).state is LedgerState.IN_RECOVERY

    cluster.down = set()
    assert (await cluster.recover(distrusted={A})).last_entry_id == 0


@in_virtual_time
async def test_an_entry_of_a_distrusted_bookie_is_believed() -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C], entries=[0], on=[A])

    async def answer_late(call: Call) -> None:
        await cluster.clock.sleep(0.0 if call.bookie == A else 0.1)

    cluster.bookies.before = answer_late

    assert (await cluster.recover(distrusted={A})).last_entry_id == 0
