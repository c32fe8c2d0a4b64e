"""A cluster of znodes alone: bookies are registrations and cookies, ledgers are metadata.

This is all that an auditor reads, in numbers that are impossible for bookies with data.
"""

import asyncio
import itertools
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from ledgers.codec.layout import Layout, serialize_layout
from ledgers.codec.metadata import serialize_metadata
from ledgers.errors import NodeExistsError
from ledgers.manager import LedgerManager
from ledgers.model import BookieId, LedgerMetadata, LedgerState, Segment
from ledgers.registration import READ_ONLY
from ledgers.store import Create, Delete, MetadataStore, Operation
from replication import znodes
from replication.marks import marked_ledger_ids, prepare_tree, read_marks
from replication.znodes import Audit, ClusterPaths

T = TypeVar("T")
ROOT = "/ledgers"
LAYOUT = Layout.HIERARCHICAL
PATHS = ClusterPaths.below(ROOT)
OPERATIONS_PER_MULTI = 500
MULTIS_AT_ONCE = 8
READS_AT_ONCE = 1_000


def bookie(number: int) -> BookieId:
    """Return one of up to 62,500 bookies, at addresses of this machine without a listener."""
    return BookieId(f"127.1.{number // 250}.{number % 250 + 1}:3181")


def closed(*ensemble: BookieId, length: int = 1_000_000) -> LedgerMetadata:
    """Return the metadata of a closed ledger of a thousand entries, with a copy on every bookie."""
    return LedgerMetadata(
        ensemble_size=len(ensemble),
        write_quorum=len(ensemble),
        ack_quorum=len(ensemble) // 2 + 1,
        state=LedgerState.CLOSED,
        last_entry_id=999,
        length=length,
        ctime_ms=1_700_000_000_000,
        segments=(Segment(first_entry_id=0, ensemble=ensemble),),
    )


@dataclass(slots=True)
class ZnodeCluster:
    """The registrations belong to the session of ``store`` and end with it."""

    store: MetadataStore

    @property
    def manager(self) -> LedgerManager:
        return LedgerManager(self.store, ROOT, LAYOUT)

    async def format(self) -> None:
        """Create the tree.

        All ledgers count as just checked, because these bookies have no entries.
        """
        store = self.store
        await store.create(f"{ROOT}/LAYOUT", serialize_layout(LAYOUT), with_parents=True)
        await store.create(f"{ROOT}/available/readonly", with_parents=True)
        await store.create(f"{ROOT}/cookies")
        await prepare_tree(store, PATHS)
        now = znodes.audit_time_to_bytes(round(time.time() * 1000))
        await store.create(PATHS.audit_time(Audit.ALL_LEDGERS), now)
        await store.create(f"{ROOT}/INSTANCEID", b"00000000-0000-0000-0000-000000000001")

    async def add_bookies(self, bookies: Iterable[BookieId]) -> None:
        bookies = list(bookies)
        await self.send(Create(path=f"{ROOT}/cookies/{each}") for each in bookies)
        await self.send(self.registration(each) for each in bookies)

    def registration(self, bookie: BookieId) -> Create:
        return Create(path=f"{ROOT}/available/{bookie}", is_ephemeral=True)

    async def register(self, bookie: BookieId) -> None:
        """Register the bookie. Raises NodeExistsError."""
        await self.store.create(self.registration(bookie).path, is_ephemeral=True)

    async def deregister(self, bookie: BookieId) -> None:
        """Delete the registration, as the end of the session would. Raises NoNodeError."""
        await self.store.delete(self.deregistration(bookie).path)

    def deregistration(self, bookie: BookieId) -> Delete:
        return Delete(path=f"{ROOT}/available/{bookie}")

    async def create_ledgers(self, ledgers: Iterable[tuple[int, LedgerMetadata]]) -> None:
        """Create ledgers in bulk. Ids should ascend, because each new directory costs a request."""
        known: set[str] = set()
        for part in _parts(ledgers, OPERATIONS_PER_MULTI * MULTIS_AT_ONCE):
            creations = [
                Create(path=self.manager.path(ledger_id), data=serialize_metadata(metadata))
                for ledger_id, metadata in part
            ]
            parents = {_above(creation.path) for creation in creations} - known
            for parent in parents:
                with suppress(NodeExistsError):
                    await self.store.create(parent, with_parents=True)
            known |= parents
            await self.send(creations)

    async def send(self, operations: Iterable[Operation]) -> None:
        """Send many operations in one transaction, and some transactions at a time."""
        for part in _parts(operations, OPERATIONS_PER_MULTI * MULTIS_AT_ONCE):
            multis = _parts(part, OPERATIONS_PER_MULTI)
            await asyncio.gather(*(self.store.multi(each) for each in multis))

    async def delete_marks(self) -> None:
        """Delete all marks, and the directories that belong to one mark only."""
        ledger_ids = await marked_ledger_ids(self.store, PATHS)
        paths = (PATHS.mark(ledger_id) for ledger_id in ledger_ids)
        await self.send(Delete(path=each) for path in paths for each in (path, _above(path)))

    async def marks(self) -> dict[int, frozenset[BookieId]]:
        """Return the bookies that the mark of each ledger names."""
        ledger_ids = await marked_ledger_ids(self.store, PATHS)
        found = await read_marks(self.store, PATHS, ledger_ids)
        return {
            each.ledger_id: frozenset() if each.mark is None else frozenset(each.mark.replicas)
            for each in found
        }

    async def registered(self) -> frozenset[BookieId]:
        """Return the registered bookies. All of them are writable."""
        names = await self.store.children(f"{ROOT}/available")
        return frozenset(map(BookieId, names)) - {READ_ONLY}

    async def lacking(self, lost: Collection[BookieId]) -> dict[int, frozenset[BookieId]]:
        """Compute from scratch the lost bookies that the metadata of each ledger names."""
        found: dict[int, frozenset[BookieId]] = {}
        async for ledger_ids in self.manager.ledger_ids():
            for part in _parts(ledger_ids, READS_AT_ONCE):
                for read in await asyncio.gather(*map(self.manager.read, part)):
                    if named := read.metadata.bookies.intersection(lost):
                        found[read.ledger_id] = named
        return found


def _parts(items: Iterable[T], size: int) -> Iterator[Sequence[T]]:
    iterator = iter(items)
    while part := list(itertools.islice(iterator, size)):
        yield part


def _above(path: str) -> str:
    return path.rpartition("/")[0]
