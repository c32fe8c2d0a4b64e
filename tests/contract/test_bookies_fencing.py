"""The contract of ``Bookies`` for fences and master keys; see also ``test_bookies``."""

import pytest

from ledgers.bookies import LAST_ENTRY
from ledgers.errors import (
    FencedError,
    NoSuchEntryError,
    UnauthorizedError,
)
from tests.contract.bookie_cases import (
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


# --- Fencing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry_id", "expected"),
    [
        pytest.param(0, 0, id="a given entry"),
        pytest.param(LAST_ENTRY, 1, id="the last entry"),
        pytest.param(5, None, id="an entry that is not there"),
    ],
)
def test_a_fenced_ledger_accepts_only_recovery_adds(
    subject: Subject, entry_id: int, expected: int | None
) -> None:
    async def scenario(ledger: Ledger) -> None:
        await ledger.add(0)
        await ledger.add(1)

        if expected is None:
            with pytest.raises(NoSuchEntryError):
                await ledger.fence(entry_id)
        else:
            assert await ledger.fence(entry_id) == ledger.entry(expected)

        with pytest.raises(FencedError):
            await ledger.add(2)
        await ledger.add(3, is_recovery=True)
        assert await ledger.entry_ids() == [0, 1, 3]

    check(subject, scenario)


def test_an_unknown_ledger_is_fenced_all_the_same(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        await ledger.fence_unknown()

        with pytest.raises(FencedError):
            await ledger.add(0)
        await ledger.add(1, is_recovery=True)
        assert await ledger.read(1) == ledger.entry(1)

    check(subject, scenario)


def test_a_ledger_that_was_only_fenced_is_known_and_empty(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        await ledger.fence_unknown()

        assert await ledger.entry_ids() == []
        with pytest.raises(NoSuchEntryError):
            await ledger.read(LAST_ENTRY)

    check(subject, scenario)


def test_a_recovery_add_fences_nothing(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        await ledger.add(0, is_recovery=True)
        await ledger.add(1)

        assert await ledger.entry_ids() == [0, 1]

    check(subject, scenario)


def test_fencing_twice_is_fencing(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        await ledger.add(0)

        assert await ledger.fence() == await ledger.fence() == ledger.entry(0)

    check(subject, scenario)


# --- Master keys ----------------------------------------------------------------------------------


@pytest.mark.compat("LedgerRecoveryTest.testLedgerRecoveryWithWrongPassword", verdict="same")
def test_the_first_key_counts(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        await ledger.add(0)

        for is_recovery in (False, True):
            with pytest.raises(UnauthorizedError):
                await ledger.add(1, key=OTHER_KEY, is_recovery=is_recovery)
        with pytest.raises(UnauthorizedError):
            await ledger.fence(key=OTHER_KEY)

        await ledger.add(1)  # so no client fenced it

    check(subject, scenario)


def test_fencing_an_unknown_ledger_sets_its_key(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        with pytest.raises(NoSuchEntryError):
            await ledger.fence(key=OTHER_KEY)

        with pytest.raises(UnauthorizedError):
            await ledger.add(0, is_recovery=True)

    check(subject, scenario)


def test_a_wrong_key_is_reported_before_a_fence(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        await ledger.fence_unknown()

        with pytest.raises(UnauthorizedError):
            await ledger.add(0, key=OTHER_KEY)

    check(subject, scenario)
