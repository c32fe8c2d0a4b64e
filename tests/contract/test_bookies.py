"""The contract of ``Bookies``: the fake in memory, and real bookies over each protocol."""

import asyncio
import random
from collections.abc import Awaitable

import pytest

from ledgers.bookies import LAST_ENTRY, Answer, LacAnswer, Transfer, TransferResult
from ledgers.errors import (
    FencedError,
    NoSuchEntryError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.model import BookieId
from tests.contract.bookie_cases import (
    DIGEST,
    KEY,
    KINDS,
    OTHER_KEY,
    Ledger,
    Subject,
    check,
    subject_of,
)


@pytest.fixture(params=KINDS)
def subject(request: pytest.FixtureRequest) -> Subject:
    return subject_of(request)


# --- Adding and reading ---------------------------------------------------------------------------


@pytest.mark.parametrize("payload_bytes", [0, 1, 1000, 65_536, 1 << 20, 5 * (1 << 20) - 200])
def test_an_entry_is_returned_as_it_was_added(subject: Subject, payload_bytes: int) -> None:
    payload = random.Random(payload_bytes).randbytes(payload_bytes)

    async def scenario(ledger: Ledger) -> None:
        await ledger.add(0, payload)

        assert await ledger.read(0) == ledger.entry(0, payload)

    check(subject, scenario)


def test_an_entry_may_be_added_again(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        await ledger.add(0)
        await ledger.add(0)

        assert await ledger.read(0) == ledger.entry(0)

    check(subject, scenario)


@pytest.mark.compat(
    "BookKeeperAdminTest.testGetListOfEntriesOfNonExistingLedger",
    verdict="other",
    why="the entries are read; bookies with DbLedgerStorage give no lists",
)
@pytest.mark.parametrize("entry_id", [0, 4, LAST_ENTRY])
def test_nothing_can_be_read_of_an_unknown_ledger(subject: Subject, entry_id: int) -> None:
    async def scenario(ledger: Ledger) -> None:
        with pytest.raises(NoSuchEntryError):
            await ledger.read(entry_id)

    check(subject, scenario)


def test_a_missing_entry_is_denied_explicitly(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        await ledger.add(0)
        await ledger.add(2)

        for entry_id in (1, 3):
            with pytest.raises(NoSuchEntryError):
                await ledger.read(entry_id)

    check(subject, scenario)


def test_the_last_entry_is_the_one_with_the_greatest_id(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        for entry_id in (0, 7, 3):
            await ledger.add(entry_id)

        assert await ledger.read(LAST_ENTRY) == ledger.entry(7)

    check(subject, scenario)


def test_a_thousand_concurrent_adds_are_all_stored(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        async with asyncio.TaskGroup() as group:
            for entry_id in range(1000):
                group.create_task(ledger.add(entry_id))

        entries = await asyncio.gather(*map(ledger.read, range(1000)))
        assert entries == [ledger.entry(entry_id) for entry_id in range(1000)]

    check(subject, scenario)


def test_high_priority_changes_only_the_priority(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        await ledger.add(0, is_high_priority=True)
        entry = await ledger.bookies.read_fencing(
            ledger.bookie, ledger.id, 0, master_key=KEY, is_high_priority=True
        )

        assert entry == ledger.entry(0)
        with pytest.raises(FencedError):
            await ledger.add(1, is_high_priority=True)

    check(subject, scenario)


# --- LACs -----------------------------------------------------------------------------------------


def test_the_lac_of_an_unknown_ledger_is_denied_explicitly(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        with pytest.raises(NoSuchEntryError):
            await ledger.read_lac()

    check(subject, scenario)


def test_reading_the_lac_fences_nothing(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        await ledger.add(0)

        assert await ledger.read_lac() == LacAnswer(last_entry=ledger.entry(0))
        await ledger.add(1)

    check(subject, scenario)


# --- DiskSpace ------------------------------------------------------------------------------------


def test_a_bookie_reports_the_space_on_its_disks(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        room = await ledger.bookies.room(ledger.bookie)

        assert 0 < room.free_bytes <= room.total_bytes

    check(subject, scenario)


# --- Transfers ------------------------------------------------------------------------------------


def transfer(ledger: Ledger, *entry_ids: int, target: BookieId | None) -> Awaitable[TransferResult]:
    return ledger.bookies.transfer(
        Transfer(
            ledger_id=ledger.id, digest=DIGEST, reads={ledger.bookie: entry_ids}, target=target
        )
    )


@pytest.mark.compat(
    "TestLedgerFragmentReplicationWithMock.testRecoverLedgerFragmentEntrySendRightRequestWithFlag",
    verdict="same",
)
def test_a_transfer_stores_the_same_bytes_on_the_target(subject: Subject) -> None:
    """Fenced there or not."""

    async def scenario(ledger: Ledger) -> None:
        for entry_id in range(10):
            await ledger.add(entry_id)
        with pytest.raises(NoSuchEntryError):
            await ledger.bookies.read_fencing(ledger.other_bookie, ledger.id, 0, master_key=KEY)

        result = await transfer(ledger, 1, 4, 7, target=ledger.other_bookie)

        assert result == TransferResult(entry_count=3, entry_bytes=3 * len(ledger.entry(0)))
        for entry_id in (1, 4, 7):
            copy = await ledger.bookies.read(ledger.other_bookie, ledger.id, entry_id)
            assert copy == ledger.entry(entry_id)

    check(subject, scenario)


@pytest.mark.compat("G12", verdict="better")
def test_a_transfer_without_a_target_reports_good_entries(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        await ledger.add(0)
        bad = ledger.entry(1)[:-1] + b"?"
        await ledger.bookies.add(ledger.bookie, bad, master_key=KEY)

        result = await transfer(ledger, 0, 1, 2, target=None)

        assert result == TransferResult(
            entry_count=1,
            entry_bytes=len(ledger.entry(0)),
            failures={ledger.bookie: {1: Answer.MISMATCH, 2: Answer.ABSENT}},
        )

    check(subject, scenario)


def test_a_transfer_reports_why_its_target_refused(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        await ledger.add(0)
        other = ledger.other_bookie
        with pytest.raises(NoSuchEntryError):
            await ledger.bookies.read_fencing(other, ledger.id, 0, master_key=OTHER_KEY)

        result = await transfer(ledger, 0, target=other)

        assert isinstance(result.target_error, UnauthorizedError)
        assert (result.entry_count, result.unwritten) == (0, frozenset({0}))

    check(subject, scenario)


def test_a_transfer_may_check_entries_that_it_does_not_write(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        for entry_id in range(3):
            await ledger.add(entry_id)
        transfer = Transfer(
            ledger_id=ledger.id,
            digest=DIGEST,
            reads={ledger.bookie: [1]},
            checks={ledger.bookie: [0, 2, 3]},
            target=ledger.other_bookie,
        )

        result = await ledger.bookies.transfer(transfer)

        assert (result.entry_count, result.entry_bytes) == (1, len(ledger.entry(1)))
        assert result.failures == {ledger.bookie: {3: Answer.ABSENT}}
        for entry_id in (0, 2):
            with pytest.raises(NoSuchEntryError):
                await ledger.bookies.read(ledger.other_bookie, ledger.id, entry_id)

    check(subject, scenario)


# --- Bookies that are not there -------------------------------------------------------------------


def test_an_unknown_bookie_cannot_be_asked(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        with pytest.raises(UnavailableError):
            await ledger.bookies.read(BookieId("nobody-s-bookie"), ledger.id, 0)

    check(subject, scenario)


@pytest.mark.compat("BookKeeperCloseTest.testBookKeeperAdmin", verdict="same")
def test_after_closing_no_bookie_is_asked(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        await ledger.add(0)
        await ledger.bookies.close()

        with pytest.raises(UnavailableError):
            await ledger.read(0)

    check(subject, scenario)
