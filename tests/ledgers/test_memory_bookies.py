"""Behaviour that contract tests cannot demand of real bookies: injected faults, and changes by a
test."""

from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from ledgers.bookies import LAST_ENTRY
from ledgers.digest import EntryDigest
from ledgers.errors import FencedError, NoSuchEntryError, UnavailableError
from ledgers.model import BookieId, DigestType
from tests.memory.bookies import Fault, MemoryBookie, MemoryBookies, Op
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


# --- Requests and faults --------------------------------------------------------------------------


def check(scenario: Callable[[MemoryBookies], Awaitable[None]]) -> None:
    """Run the scenario in virtual time. Bookie one has entries 0 to 2."""

    async def main() -> None:
        bookies = MemoryBookies((ONE, TWO), clock=LoopClock())
        for entry_id in range(3):
            add(bookies.bookie(ONE), entry_id)
        await scenario(bookies)

    run(main())


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
