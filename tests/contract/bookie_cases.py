"""The kinds of ``Bookies`` to compare, and requests about one ledger."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from daemon.local.cluster import LocalCluster
from ledgers.bookies import LAST_ENTRY, Bookies, LacAnswer
from ledgers.bulk.engine import BulkTransfers
from ledgers.bulk.limiters import Budgets
from ledgers.client import BookieClient, BookieClientSettings
from ledgers.clock import SystemClock
from ledgers.codec.registration import spelled_address
from ledgers.digest import EntryDigest, master_key
from ledgers.errors import NoSuchEntryError
from ledgers.health import Quarantine, QuarantiningBookies
from ledgers.model import BookieId, DigestType
from tests.memory.bookies import MemoryBookies

DIGEST = EntryDigest(DigestType.CRC32C, b"foobar")
KEY = DIGEST.master_key
OTHER_KEY = master_key(b"another password")
MEMORY_BOOKIES = (BookieId("bookie-1:3181"), BookieId("bookie-2:3181"))
LEDGER_IDS = itertools.count(9_000_000_000)
"""Far from those that other tests of a shared cluster write."""


@dataclass(frozen=True)
class Subject:
    """A kind of ``Bookies``, made for each test, and the bookies of its cluster."""

    make: Callable[[], Bookies]
    bookies: tuple[BookieId, ...]


KINDS = [
    "memory",
    "quarantining",
    pytest.param("v3", marks=pytest.mark.cluster),
    pytest.param("v2", marks=pytest.mark.cluster),
]
"""Parameters of a fixture: the fake, as it is and with a quarantine, and real bookies over either
protocol."""


def subject_of(request: pytest.FixtureRequest) -> Subject:
    """Return the subject for one of KINDS. All real ones share the cluster."""
    if request.param == "memory":
        return Subject(make=in_memory, bookies=MEMORY_BOOKIES)
    if request.param == "quarantining":
        return Subject(
            make=lambda: QuarantiningBookies(in_memory(), Quarantine(SystemClock(), lambda _: 1)),
            bookies=MEMORY_BOOKIES,
        )
    cluster: LocalCluster = request.getfixturevalue("cluster")
    return Subject(make=lambda: client(request.param), bookies=cluster.bookies)


def in_memory() -> MemoryBookies:
    return MemoryBookies(MEMORY_BOOKIES, clock=SystemClock())


def client(protocol: str) -> BookieClient:
    assert protocol in ("v2", "v3")
    budgets = Budgets(reads_in_flight_max=64)
    return BookieClient(
        resolve=spelled_address,
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
