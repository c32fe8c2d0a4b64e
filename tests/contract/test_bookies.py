"""What every ``Bookies`` does: the fake in memory, and real bookies over either protocol."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from daemon.local.cluster import LocalCluster
from ledgers.bookie_client import BookieClient, BookieClientSettings
from ledgers.bookies import LAST_ENTRY, Answer, Bookies, LacAnswer, Transfer, TransferResult
from ledgers.budget import Budgets
from ledgers.bulk.transfers import BulkTransfers
from ledgers.clock import SystemClock
from ledgers.entry import EntryDigest, master_key
from ledgers.errors import (
    FencedError,
    NoSuchEntryError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.memory_bookies import MemoryBookies
from ledgers.metadata import BookieId, DigestType

DIGEST = EntryDigest(DigestType.CRC32C, b"foobar")
KEY = DIGEST.master_key
OTHER_KEY = master_key(b"another password")
MEMORY_BOOKIES = (BookieId("bookie-1:3181"), BookieId("bookie-2:3181"))
LEDGER_IDS = itertools.count(9_000_000_000)
"""Far from those that other tests of a shared cluster write."""


@dataclass(frozen=True)
class Subject:
    """A kind of ``Bookies``, made anew for each test, and the bookies there are."""

    make: Callable[[], Bookies]
    bookies: tuple[BookieId, ...]


@pytest.fixture(
    params=[
        "memory",
        pytest.param("v3", marks=pytest.mark.cluster),
        pytest.param("v2", marks=pytest.mark.cluster),
    ]
)
def subject(request: pytest.FixtureRequest) -> Subject:
    if request.param == "memory":
        return Subject(
            make=lambda: MemoryBookies(MEMORY_BOOKIES, clock=SystemClock()),
            bookies=MEMORY_BOOKIES,
        )
    cluster: LocalCluster = request.getfixturevalue("cluster")
    return Subject(make=lambda: client(request.param), bookies=cluster.bookies)


def client(protocol: str) -> BookieClient:
    assert protocol in ("v2", "v3")
    budgets = Budgets()
    return BookieClient(
        resolve=lambda bookie: None,
        budgets=budgets,
        bulk=BulkTransfers(budgets),
        clock=SystemClock(),
        rng=random.Random(1),
        settings=BookieClientSettings(protocol="v2" if protocol == "v2" else "v3"),
    )


class Ledger:
    """A fresh ledger on the first bookie, and requests about it."""

    def __init__(self, subject: Subject, bookies: Bookies) -> None:
        self.bookies = bookies
        self.bookie, self.other_bookie = subject.bookies[:2]
        self.id = next(LEDGER_IDS)

    def entry(self, entry_id: int, payload: bytes = b"hello") -> bytes:
        return DIGEST.pack(
            ledger_id=self.id, entry_id=entry_id, lac=entry_id - 1, length=0, payload=payload
        )

    async def add(
        self,
        entry_id: int,
        payload: bytes = b"hello",
        *,
        key: bytes = KEY,
        is_recovery: bool = False,
        is_high_priority: bool = False,
    ) -> None:
        await self.bookies.add(
            self.bookie,
            self.entry(entry_id, payload),
            master_key=key,
            is_recovery=is_recovery,
            is_high_priority=is_high_priority,
        )

    async def read(self, entry_id: int) -> bytes:
        return await self.bookies.read(self.bookie, self.id, entry_id)

    async def fence(self, entry_id: int = LAST_ENTRY, *, key: bytes = KEY) -> bytes:
        return await self.bookies.read_fencing(self.bookie, self.id, entry_id, master_key=key)

    async def fence_unknown(self) -> None:
        """Fence it before anything was written to it."""
        with pytest.raises(NoSuchEntryError):
            await self.fence()

    async def write_lac(self, lac: int, *, key: bytes = KEY) -> None:
        await self.bookies.write_lac(
            self.bookie, self.id, lac, master_key=key, record=self.lac_record(lac)
        )

    def lac_record(self, lac: int) -> bytes:
        return DIGEST.pack_lac_record(ledger_id=self.id, lac=lac)

    async def read_lac(self) -> LacAnswer:
        return await self.bookies.read_lac(self.bookie, self.id)

    async def read_batch(
        self, first_entry_id: int, *, count_max: int = 100, bytes_max: int = 100_000
    ) -> list[bytes]:
        return await self.bookies.read_batch(
            self.bookie, self.id, first_entry_id, count_max=count_max, bytes_max=bytes_max
        )

    async def entry_ids(self) -> list[int]:
        runs = await self.bookies.list_entries(self.bookie, self.id)
        return [entry_id for run in runs for entry_id in run]


def check(subject: Subject, scenario: Callable[[Ledger], Awaitable[None]]) -> None:
    """Run a test's scenario on a ledger of its own."""

    async def main() -> None:
        bookies = subject.make()
        try:
            async with asyncio.timeout(30):
                await scenario(Ledger(subject, bookies))
        finally:
            await bookies.close()

    asyncio.run(main())


# --- Adding and reading --------------------------------------------------------------------------


@pytest.mark.parametrize("payload_bytes", [0, 1, 1000, 65_536, 1 << 20, 5 * (1 << 20) - 200])
def test_an_entry_comes_back_as_it_was_added(subject: Subject, payload_bytes: int) -> None:
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


@pytest.mark.parametrize("entry_id", [0, 4, LAST_ENTRY])
def test_nothing_is_read_of_an_unknown_ledger(subject: Subject, entry_id: int) -> None:
    async def scenario(ledger: Ledger) -> None:
        with pytest.raises(NoSuchEntryError):
            await ledger.read(entry_id)

    check(subject, scenario)


def test_an_entry_that_is_not_there_is_an_explicit_no(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        await ledger.add(0)
        await ledger.add(2)

        for entry_id in (1, 3):
            with pytest.raises(NoSuchEntryError):
                await ledger.read(entry_id)

    check(subject, scenario)


def test_the_last_entry_is_that_with_the_greatest_id(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        for entry_id in (0, 7, 3):
            await ledger.add(entry_id)

        assert await ledger.read(LAST_ENTRY) == ledger.entry(7)

    check(subject, scenario)


def test_a_thousand_adds_at_once_are_all_stored(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        async with asyncio.TaskGroup() as group:
            for entry_id in range(1000):
                group.create_task(ledger.add(entry_id))

        assert await ledger.entry_ids() == list(range(1000))
        entries = await asyncio.gather(*map(ledger.read, range(1000)))
        assert entries == [ledger.entry(entry_id) for entry_id in range(1000)]

    check(subject, scenario)


def test_high_priority_changes_nothing_but_the_priority(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        await ledger.add(0, is_high_priority=True)
        entry = await ledger.bookies.read_fencing(
            ledger.bookie, ledger.id, 0, master_key=KEY, is_high_priority=True
        )

        assert entry == ledger.entry(0)
        with pytest.raises(FencedError):
            await ledger.add(1, is_high_priority=True)

    check(subject, scenario)


# --- Fencing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry_id", "expected"),
    [
        pytest.param(0, 0, id="a given entry"),
        pytest.param(LAST_ENTRY, 1, id="the last entry"),
        pytest.param(5, None, id="an entry that is not there"),
    ],
)
def test_a_fenced_ledger_takes_nothing_but_recovery_adds(
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


# --- Master keys ---------------------------------------------------------------------------------


def test_the_first_key_is_the_one_that_counts(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        await ledger.add(0)

        for is_recovery in (False, True):
            with pytest.raises(UnauthorizedError):
                await ledger.add(1, key=OTHER_KEY, is_recovery=is_recovery)
        with pytest.raises(UnauthorizedError):
            await ledger.write_lac(0, key=OTHER_KEY)
        with pytest.raises(UnauthorizedError):
            await ledger.fence(key=OTHER_KEY)

        await ledger.add(1)  # so nobody fenced it

    check(subject, scenario)


def test_fencing_an_unknown_ledger_sets_its_key(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        with pytest.raises(NoSuchEntryError):
            await ledger.fence(key=OTHER_KEY)

        with pytest.raises(UnauthorizedError):
            await ledger.add(0, is_recovery=True)

    check(subject, scenario)


def test_a_wrong_key_is_told_before_a_fence(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        await ledger.fence_unknown()

        with pytest.raises(UnauthorizedError):
            await ledger.add(0, key=OTHER_KEY)

    check(subject, scenario)


# --- Batch reads ---------------------------------------------------------------------------------


def test_a_batch_ends_where_an_entry_is_missing(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        for entry_id in (0, 1, 2, 4):
            await ledger.add(entry_id)

        assert await ledger.read_batch(0) == [ledger.entry(entry_id) for entry_id in (0, 1, 2)]
        assert await ledger.read_batch(2) == [ledger.entry(2)]
        assert await ledger.read_batch(4) == [ledger.entry(4)]

    check(subject, scenario)


def test_a_batch_without_its_first_entry_is_an_explicit_no(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        with pytest.raises(NoSuchEntryError):
            await ledger.read_batch(0)
        await ledger.add(1)
        with pytest.raises(NoSuchEntryError):
            await ledger.read_batch(0)

    check(subject, scenario)


@pytest.mark.parametrize("count_max", [1, 3, 10])
def test_a_batch_has_no_more_entries_than_asked_for(subject: Subject, count_max: int) -> None:
    async def scenario(ledger: Ledger) -> None:
        for entry_id in range(5):
            await ledger.add(entry_id)

        assert len(await ledger.read_batch(0, count_max=count_max)) == min(count_max, 5)

    check(subject, scenario)


def test_a_batch_has_no_more_bytes_than_asked_for_but_one_entry_at_least(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        for entry_id in range(5):
            await ledger.add(entry_id)
        three = 36 + 3 * (4 + len(ledger.entry(0)))

        assert len(await ledger.read_batch(0, bytes_max=three)) == 3
        assert len(await ledger.read_batch(0, bytes_max=three - 1)) == 2
        assert len(await ledger.read_batch(0, bytes_max=1)) == 1

    check(subject, scenario)


def test_batches_at_once_do_not_mix(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        for entry_id in range(60):
            await ledger.add(entry_id)

        batches = await asyncio.gather(*(ledger.read_batch(i, count_max=5) for i in range(55)))

        assert batches == [[ledger.entry(i + k) for k in range(5)] for i in range(55)]

    check(subject, scenario)


# --- LACs ------------------------------------------------------------------------------------------


def test_the_lac_of_an_unknown_ledger_is_an_explicit_no(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        with pytest.raises(NoSuchEntryError):
            await ledger.read_lac()

    check(subject, scenario)


def test_the_lac_is_told_by_record_and_last_entry_whichever_there_is(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        await ledger.write_lac(3)
        assert await ledger.read_lac() == LacAnswer(lac_record=ledger.lac_record(3))

        await ledger.add(0)
        both = LacAnswer(lac_record=ledger.lac_record(3), last_entry=ledger.entry(0))
        assert await ledger.read_lac() == both

    check(subject, scenario)


def test_reading_the_lac_fences_nothing(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        await ledger.add(0)

        assert await ledger.read_lac() == LacAnswer(last_entry=ledger.entry(0))
        await ledger.add(1)

    check(subject, scenario)


def test_a_fence_does_not_keep_lac_records_out(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        await ledger.add(0)
        await ledger.fence()

        await ledger.write_lac(0)

        assert (await ledger.read_lac()).lac_record == ledger.lac_record(0)

    check(subject, scenario)


# --- Lists of entries --------------------------------------------------------------------------


def test_a_list_of_entries_has_its_gaps(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        for entry_id in (8, 0, 1, 2, 5, 7):
            await ledger.add(entry_id)

        runs = await ledger.bookies.list_entries(ledger.bookie, ledger.id)

        assert list(runs) == [range(3), range(5, 6), range(7, 9)]

    check(subject, scenario)


def test_the_entries_of_an_unknown_ledger_are_an_explicit_no(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        with pytest.raises(NoSuchEntryError):
            await ledger.entry_ids()

    check(subject, scenario)


# --- Transfers ---------------------------------------------------------------------------------


def transfer(ledger: Ledger, *entry_ids: int, target: BookieId | None) -> Awaitable[TransferResult]:
    return ledger.bookies.transfer(
        Transfer(
            ledger_id=ledger.id, digest=DIGEST, reads={ledger.bookie: entry_ids}, target=target
        )
    )


def test_a_transfer_stores_the_same_bytes_on_the_target_fenced_or_not(subject: Subject) -> None:
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


def test_a_transfer_without_a_target_tells_what_is_good(subject: Subject) -> None:
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


def test_a_transfer_tells_why_its_target_refused(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        await ledger.add(0)
        other = ledger.other_bookie
        with pytest.raises(NoSuchEntryError):
            await ledger.bookies.read_fencing(other, ledger.id, 0, master_key=OTHER_KEY)

        result = await transfer(ledger, 0, target=other)

        assert isinstance(result.target_error, UnauthorizedError)
        assert (result.entry_count, result.unwritten) == (0, frozenset({0}))

    check(subject, scenario)


# --- Bookies that are not there ------------------------------------------------------------------


def test_a_bookie_that_nobody_knows_cannot_be_asked(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        with pytest.raises(UnavailableError):
            await ledger.bookies.read(BookieId("nobody-s-bookie"), ledger.id, 0)

    check(subject, scenario)


def test_after_closing_nobody_is_asked(subject: Subject) -> None:
    async def scenario(ledger: Ledger) -> None:
        await ledger.add(0)
        await ledger.bookies.close()

        with pytest.raises(UnavailableError):
            await ledger.read(0)

    check(subject, scenario)
