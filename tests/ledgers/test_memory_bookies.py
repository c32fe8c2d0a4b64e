"""Behaviour that contract tests cannot demand of real bookies: injected faults, and changes by a
test."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from ledgers.bookies import LAST_ENTRY, Answer, LacAnswer, Transfer, TransferResult
from ledgers.digest import EntryDigest
from ledgers.errors import (
    BookmenderError,
    FencedError,
    NoSuchEntryError,
    ReadOnlyError,
    UnavailableError,
)
from ledgers.model import BookieId, DigestType
from tests.memory.bookies import NO_FAULT, Fault, MemoryBookie, MemoryBookies, Op
from tests.virtual_time import LoopClock, run

DIGEST = EntryDigest(DigestType.CRC32C, b"foobar")
KEY = DIGEST.master_key
LEDGER_ID = 1
ONE, TWO = BookieId("one:1"), BookieId("two:2")


def entry(entry_id: int) -> bytes:
    return DIGEST.pack(
        ledger_id=LEDGER_ID, entry_id=entry_id, lac=entry_id - 1, length=0, payload=b"hello"
    )


def bookie_with(*entry_ids: int) -> MemoryBookie:
    bookie = MemoryBookie()
    for entry_id in entry_ids:
        add(bookie, entry_id)
    return bookie


def add(bookie: MemoryBookie, entry_id: int, *, is_recovery: bool = False) -> None:
    bookie.add(entry(entry_id), master_key=KEY, is_recovery=is_recovery, is_high_priority=False)


def fence(bookie: MemoryBookie) -> None:
    with suppress(NoSuchEntryError):
        bookie.read_fencing(LEDGER_ID, LAST_ENTRY, master_key=KEY)


# --- One bookie -----------------------------------------------------------------------------------


def test_a_ledger_deleted_while_in_use_refuses_every_add() -> None:
    """It refuses them until the bookie restarts."""
    bookie = bookie_with(0)

    bookie.collect(LEDGER_ID)

    for is_recovery in (False, True):
        with pytest.raises(FencedError):
            add(bookie, 1, is_recovery=is_recovery)
    with pytest.raises(NoSuchEntryError):
        bookie.read(LEDGER_ID, 0)
    with pytest.raises(NoSuchEntryError):
        bookie.write_lac(LEDGER_ID, master_key=KEY, record=b"")
    with pytest.raises(NoSuchEntryError):
        bookie.read_fencing(LEDGER_ID, 0, master_key=KEY)

    bookie.crash()
    bookie.start()
    add(bookie, 1)


def test_a_ledger_deleted_out_of_use_may_be_written_again() -> None:
    bookie = bookie_with(0)
    bookie.crash()
    bookie.start()

    bookie.collect(LEDGER_ID)

    add(bookie, 1)
    assert bookie.entry_ids(LEDGER_ID) == {1}


def test_a_read_only_bookie_accepts_only_adds_of_high_priority() -> None:
    bookie = bookie_with(0)
    bookie.is_read_only = True

    with pytest.raises(ReadOnlyError):
        add(bookie, 1, is_recovery=True)
    with pytest.raises(ReadOnlyError):
        bookie.write_lac(LEDGER_ID, master_key=KEY, record=b"")
    bookie.add(entry(2), master_key=KEY, is_recovery=False, is_high_priority=True)
    assert bookie.read_fencing(LEDGER_ID, LAST_ENTRY, master_key=KEY) == entry(2)


def test_the_last_entry_is_looked_up_in_the_write_cache_first() -> None:
    bookie = bookie_with(5)

    bookie.flush()
    assert bookie.read(LEDGER_ID, LAST_ENTRY) == entry(5)

    add(bookie, 3)
    assert bookie.read(LEDGER_ID, LAST_ENTRY) == entry(3)

    bookie.flush()
    assert bookie.read(LEDGER_ID, LAST_ENTRY) == entry(5)


def test_in_limbo_a_bookie_denies_no_entry_but_denies_the_lac() -> None:
    bookie = bookie_with(0)
    bookie.is_in_limbo = True

    assert bookie.read(LEDGER_ID, 0) == entry(0)
    with pytest.raises(UnavailableError):
        bookie.read(LEDGER_ID, 1)
    with pytest.raises(NoSuchEntryError):
        bookie.read_lac(2)


def test_a_crash_forgets_the_fence_of_an_empty_ledger_only() -> None:
    empty, filled = bookie_with(), bookie_with(0)
    for bookie in (empty, filled):
        fence(bookie)
        bookie.crash()
        bookie.start()

    add(empty, 1)
    with pytest.raises(FencedError):
        add(filled, 1)


def test_a_single_entry_can_be_lost_or_damaged() -> None:
    bookie = bookie_with(0, 1, 2)

    bookie.lose(LEDGER_ID, 1)
    bookie.corrupt(LEDGER_ID, 2)

    assert bookie.entry_ids(LEDGER_ID) == {0, 2}
    assert DIGEST.is_good(bookie.read(LEDGER_ID, 0), ledger_id=LEDGER_ID, entry_id=0)
    assert not DIGEST.is_good(bookie.read(LEDGER_ID, 2), ledger_id=LEDGER_ID, entry_id=2)


def test_new_disks_are_empty() -> None:
    bookie = bookie_with(0)
    fence(bookie)

    bookie.wipe()

    assert bookie.entry_ids(LEDGER_ID) == frozenset()
    add(bookie, 0)


# --- Requests and faults --------------------------------------------------------------------------


def check(scenario: Callable[[MemoryBookies], Awaitable[None]]) -> None:
    """Run the scenario in virtual time. Bookie one has entries 0 to 2."""

    async def main() -> None:
        bookies = MemoryBookies((ONE, TWO), clock=LoopClock())
        for entry_id in range(3):
            add(bookies.bookie(ONE), entry_id)
        await scenario(bookies)

    run(main())


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_a_stopped_bookie_answers_nothing() -> None:
    async def scenario(bookies: MemoryBookies) -> None:
        bookies.bookie(ONE).is_down = True
        with pytest.raises(UnavailableError):
            await bookies.read(ONE, LEDGER_ID, 0)

        bookies.bookie(ONE).start()
        assert await bookies.read(ONE, LEDGER_ID, 0) == entry(0)

    check(scenario)


def test_a_request_may_fail_before_or_after_it_is_executed() -> None:
    async def scenario(bookies: MemoryBookies) -> None:
        bookies.fail(TWO, Op.ADD, Fault(error=UnavailableError))
        with pytest.raises(UnavailableError):
            await bookies.add(TWO, entry(0), master_key=KEY)
        assert bookies.bookie(TWO).entry_ids(LEDGER_ID) == frozenset()

        bookies.fail(TWO, Op.ADD, Fault(error=UnavailableError, is_executed=True))
        with pytest.raises(UnavailableError):
            await bookies.add(TWO, entry(1), master_key=KEY)
        assert bookies.bookie(TWO).entry_ids(LEDGER_ID) == {1}

        bookies.stop_failing(TWO, Op.ADD)
        await bookies.add(TWO, entry(2), master_key=KEY)

    check(scenario)


def test_delays_pass_on_the_clock_before_and_after() -> None:
    async def scenario(bookies: MemoryBookies) -> None:
        bookies.fail(TWO, Op.ADD, Fault(delay_s=2, reply_delay_s=3))
        task = asyncio.create_task(bookies.add(TWO, entry(0), master_key=KEY))

        await asyncio.sleep(1.9)
        assert bookies.bookie(TWO).entry_ids(LEDGER_ID) == frozenset()
        await asyncio.sleep(0.2)
        assert bookies.bookie(TWO).entry_ids(LEDGER_ID) == {0}
        assert not task.done()
        await task
        assert now_s() == 5

    check(scenario)


def test_a_bookie_that_stops_loses_the_reply() -> None:
    async def scenario(bookies: MemoryBookies) -> None:
        bookies.fail(ONE, Op.READ, Fault(reply_delay_s=3))
        task = asyncio.create_task(bookies.read(ONE, LEDGER_ID, 0))
        await asyncio.sleep(1)

        bookies.bookie(ONE).crash()

        with pytest.raises(UnavailableError):
            await task

    check(scenario)


def test_faults_may_be_drawn_for_each_request() -> None:
    asked = []

    def faults(bookie: BookieId, op: Op, ledger_id: int) -> Fault:
        asked.append((bookie, op, ledger_id))
        return Fault(error=UnavailableError) if len(asked) == 2 else NO_FAULT

    async def scenario(bookies: MemoryBookies) -> None:
        bookies.faults = faults
        assert await bookies.read_lac(ONE, LEDGER_ID) == LacAnswer(last_entry=entry(2))
        with pytest.raises(UnavailableError):
            await bookies.read(ONE, LEDGER_ID, 0)
        assert await bookies.read(ONE, LEDGER_ID, 0) == entry(0)

    check(scenario)

    assert asked == [
        (ONE, Op.READ_LAC, 1),
        (ONE, Op.READ, 1),
        (ONE, Op.READ, 1),
    ]


# --- Transfers ------------------------------------------------------------------------------------


def transfer(target: BookieId | None) -> Transfer:
    return Transfer(ledger_id=LEDGER_ID, digest=DIGEST, reads={ONE: (0, 1, 2)}, target=target)


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (NoSuchEntryError, Answer.ABSENT),
        (UnavailableError, Answer.UNKNOWN),
        (FencedError, Answer.UNKNOWN),
    ],
)
def test_a_transfer_reports_the_answers_of_each_source(
    error: type[BookmenderError], answer: Answer
) -> None:
    async def scenario(bookies: MemoryBookies) -> None:
        bookies.fail(ONE, Op.READ, Fault(error=error))

        result = await bookies.transfer(transfer(TWO))

        assert result == TransferResult(failures={ONE: dict.fromkeys((0, 1, 2), answer)})

    check(scenario)


def test_a_transfer_ends_with_its_target() -> None:
    async def scenario(bookies: MemoryBookies) -> None:
        drawn = 0

        def faults(bookie: BookieId, op: Op, ledger_id: int) -> Fault:
            nonlocal drawn
            drawn += op is Op.ADD
            return Fault(error=ReadOnlyError) if op is Op.ADD and drawn == 2 else NO_FAULT

        bookies.faults = faults

        result = await bookies.transfer(transfer(TWO))

        assert isinstance(result.target_error, ReadOnlyError)
        assert result.entry_count == 1
        assert result.unwritten == {1, 2}
        assert bookies.bookie(TWO).entry_ids(LEDGER_ID) == {0}

    check(scenario)
