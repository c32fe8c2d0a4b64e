"""The kinds of ``Bookies`` to compare, and requests about one ledger."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from daemon.local.cluster import LocalCluster
from ledgers.bookies import LAST_ENTRY, Bookies, LacAnswer, Transfer
from ledgers.bulk.engine import BulkTransfers
from ledgers.bulk.limiters import Budgets
from ledgers.client import BookieClient
from ledgers.clock import SystemClock
from ledgers.digest import EntryDigest, master_key
from ledgers.errors import NoSuchEntryError
from ledgers.health import AnsweringBookies, BookieHealth
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
    pytest.param("real", marks=pytest.mark.cluster),
]
"""Parameters of a fixture: the fake, as it is and with a quarantine, and real bookies."""


def subject_of(request: pytest.FixtureRequest) -> Subject:
    """Return the subject for one of KINDS. All real ones share the cluster."""
    if request.param == "memory":
        return Subject(make=in_memory, bookies=MEMORY_BOOKIES)
    if request.param == "quarantining":
        return Subject(
            make=lambda: AnsweringBookies(in_memory(), BookieHealth(SystemClock(), lambda _: 1)),
            bookies=MEMORY_BOOKIES,
        )
    cluster: LocalCluster = request.getfixturevalue("cluster")
    return Subject(make=client, bookies=cluster.bookies)


def in_memory() -> MemoryBookies:
    return MemoryBookies(MEMORY_BOOKIES, clock=SystemClock())


def client() -> BookieClient:
    return BookieClient(BulkTransfers(Budgets(reads_in_flight_max=64)))


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

    async def read_lac(self) -> LacAnswer:
        return await self.bookies.read_lac(self.bookie, self.id)

    async def entry_ids(self) -> list[int]:
        """Return which of the first ten entries the bookie stores."""
        result = await self.bookies.transfer(
            Transfer(ledger_id=self.id, digest=DIGEST, reads={self.bookie: range(10)})
        )
        return sorted(set(range(10)) - result.failures.get(self.bookie, {}).keys())


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
