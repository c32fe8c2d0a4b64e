"""A small cluster in memory, for the tests of operations on ledgers."""

from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

from ledgers.appending import BookiePool
from ledgers.codec.layout import Layout
from ledgers.digest import EntryDigest
from ledgers.errors import UnavailableError
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.model import BookieId, DigestType, LedgerMetadata, Segment
from ledgers.placement import Candidate, RandomPlacement
from ledgers.reading import LedgerReader, OpenedLedger, find_end
from ledgers.recovery import recover_ledger
from ledgers.store import Operation
from ledgers.writing import LedgerOptions, LedgerWriter
from tests.ledgers.hooked_bookies import Call, HookedBookies
from tests.memory.store import MemoryStore, MemoryTree
from tests.virtual_time import LoopClock

ROOT = "/ledgers"
TIMEOUT_S = 5.0
LEDGER_ID = 7
PASSWORD = b"secret"
DIGEST = EntryDigest(DigestType.CRC32C, PASSWORD)
A, B, C, D, E, F = BOOKIES = tuple(BookieId(f"{name}:3181") for name in "abcdef")


class MemoryCluster:
    """Bookies, a metadata store and virtual time. It is made within a running loop.

    ``down``: bookies that answer nothing, and are not writable. ``unwritable``: not registered as
    writable, though they answer.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self.clock = LoopClock()
        self.random = Random(seed)
        self.tree = MemoryTree(clock=self.clock)
        self.store = MemoryStore(self.tree)
        self.manager = self.new_manager(self.store)
        self.bookies = HookedBookies(BOOKIES, clock=self.clock)
        self.bookies.before = self._answer_unless_down
        self.down: set[BookieId] = set()
        self.unwritable: set[BookieId] = set()
        self.pool = BookiePool(writable=self._writable, placement=RandomPlacement(self.random))

    def new_manager(self, store: MemoryStore | None = None) -> LedgerManager:
        """Return a manager, of another session unless a store is given."""
        return LedgerManager(store or MemoryStore(self.tree), root=ROOT, layout=Layout.HIERARCHICAL)

    @classmethod
    async def with_ledger(
        cls,
        *ensembles: Sequence[BookieId],
        entries: Iterable[int] = (),
        on: Sequence[BookieId] = (),
        **fields: Any,
    ) -> "MemoryCluster":
        """Return a cluster with a ledger made by hand, and its entries on the given bookies."""
        cluster = cls()
        await cluster.make_ledger(*ensembles, **fields)
        for entry_id in entries:
            await cluster.put(entry_id, *on)
        return cluster

    @classmethod
    @asynccontextmanager
    async def with_writer(
        cls, **options: object
    ) -> AsyncIterator[tuple["MemoryCluster", LedgerWriter]]:
        """Yield a cluster with the writer of a new ledger."""
        cluster = cls()
        async with cluster.writer(**options) as writer:  # type: ignore[arg-type]
            yield cluster, writer

    # --- Operations on ledgers --------------------------------------------------------------------

    def writer(
        self,
        *,
        manager: LedgerManager | None = None,
        ledger_id: int | None = None,
        **options: object,
    ) -> AbstractAsyncContextManager[LedgerWriter]:
        return LedgerWriter.create(
            replace(LedgerOptions(password=PASSWORD), **options),  # type: ignore[arg-type]
            manager=manager or self.manager,
            bookies=self.bookies,
            pool=self.pool,
            clock=self.clock,
            random=self.random,
            ledger_id=ledger_id,
        )

    async def recover(
        self,
        ledger_id: int = LEDGER_ID,
        *,
        manager: LedgerManager | None = None,
        fallback: EntryDigest | None = None,
        reformatted: Collection[BookieId] = (),
        distrusted: Collection[BookieId] = (),
        guards: Sequence[Operation] = (),
    ) -> LedgerMetadata:
        manager = manager or self.manager
        versioned = await recover_ledger(
            await manager.read(ledger_id),
            manager=manager,
            bookies=self.bookies,
            pool=self.pool,
            clock=self.clock,
            fallback=fallback,
            reformatted=reformatted,
            distrusted=distrusted,
            guards=guards,
        )
        return versioned.metadata

    async def open(self, ledger_id: int = LEDGER_ID) -> OpenedLedger:
        versioned = await self.manager.read(ledger_id)
        return await find_end(versioned, bookies=self.bookies, clock=self.clock)

    async def payloads(self, ledger_id: int = LEDGER_ID) -> list[bytes]:
        """Return everything that a reader reads of the ledger."""
        opened = await self.open(ledger_id)
        reader = LedgerReader(
            ledger_id, opened.metadata, digest=opened.digest, bookies=self.bookies, clock=self.clock
        )
        return [entry.payload async for entry in reader.entries(0, opened.lac)]

    # --- Ledgers made by hand ---------------------------------------------------------------------

    async def make_ledger(
        self, *ensembles: Sequence[BookieId], firsts: Sequence[int] = (0,), **fields: object
    ) -> VersionedMetadata:
        """Create the metadata of ledger ``LEDGER_ID``, without entries. E is the size of the
        ensembles."""
        metadata = LedgerMetadata(
            ensemble_size=len(ensembles[0]),
            write_quorum=3,
            ack_quorum=2,
            password=PASSWORD,
            segments=tuple(
                Segment(first_entry_id=first_entry_id, ensemble=tuple(ensemble))
                for first_entry_id, ensemble in zip(firsts, ensembles, strict=True)
            ),
        )
        return await self.manager.create(LEDGER_ID, replace(metadata, **fields))  # type: ignore[arg-type]

    async def put(
        self,
        entry_id: int,
        *bookies: BookieId,
        lac: int | None = None,
        digest: EntryDigest = DIGEST,
    ) -> bytes:
        """Store an entry with a payload of ten bytes on these bookies, as the writer would."""
        entry = digest.pack(
            ledger_id=LEDGER_ID,
            entry_id=entry_id,
            lac=entry_id - 1 if lac is None else lac,
            length=10 * (entry_id + 1),
            payload=b"%010d" % entry_id,
        )
        for bookie in bookies:
            self.bookies.bookie(bookie).add(
                entry, master_key=digest.master_key, is_recovery=False, is_high_priority=False
            )
        return entry

    def stored_on(self, entry_id: int, ledger_id: int = LEDGER_ID) -> set[BookieId]:
        """Return the bookies that store the entry."""
        return {b for b in BOOKIES if entry_id in self.bookies.bookie(b).entry_ids(ledger_id)}

    async def metadata(self, ledger_id: int = LEDGER_ID) -> LedgerMetadata:
        return (await self.manager.read(ledger_id)).metadata

    # --- Faults -----------------------------------------------------------------------------------

    async def _answer_unless_down(self, call: Call) -> None:
        if call.bookie in self.down:
            await self.clock.sleep(TIMEOUT_S)
            raise UnavailableError("time-out", bookie=call.bookie)

    async def _writable(self) -> list[Candidate]:
        writable: Iterable[BookieId] = set(BOOKIES) - self.down - self.unwritable
        return [Candidate(bookie=bookie) for bookie in sorted(writable)]
