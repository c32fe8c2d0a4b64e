"""A small cluster in memory, for the tests of replication and of the auditor.

Real code on fakes: bookies with their ledgers, the znodes of ZooKeeper, virtual time, and any
number of nodes with a session each. Every write of metadata is checked against rule S1.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, ParamSpec

from ledgers.bookies import Bookies
from ledgers.codec.bookkeeper_metadata_pb2 import BookieServiceInfoFormat
from ledgers.codec.layout import Layout
from ledgers.codec.registration import spelled_address
from ledgers.digest import EntryDigest
from ledgers.errors import NoNodeError, UnauthorizedError
from ledgers.manager import Journal, LedgerManager, VersionedMetadata
from ledgers.model import BookieId, DigestType, LedgerMetadata, LedgerState, Segment, write_set
from ledgers.registration import ResolveHost, as_spelled
from ledgers.store import Create, MetadataStore, Operation, Stat
from replication import znodes
from replication.marks import marked_ledger_ids, prepare_tree
from replication.settings import ReplicationSettings
from replication.znodes import Mark, MarkPaths
from tests.memory.bookies import MemoryBookie
from tests.memory.store import Fault, MemoryStore
from tests.replication.ledger_values import B1, B2, B3, BOOKIES
from tests.replication.nodes import LEDGER, PATHS, ROOT, Node, running_node
from tests.replication.watched import RecordingBookies, WatchedTree
from tests.virtual_time import LoopClock, run

PASSWORD = b"secret"
DIGEST = EntryDigest(DigestType.CRC32C, PASSWORD)
WRONG_DIGEST = EntryDigest(DigestType.HMAC, b"another secret")
PAYLOAD_BYTES = 10
ENTRY_BYTES = 32 + 4 + PAYLOAD_BYTES

P = ParamSpec("P")


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make a test of a coroutine function. It runs in its own loop in virtual time."""

    @functools.wraps(test)
    def running(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return running


class Cluster:
    """A cluster. It is made within a running loop; ``start`` creates its znodes."""

    def __init__(self, *, seed: int = 0) -> None:
        self.clock = LoopClock()
        self.seed = seed
        self.tree = WatchedTree(clock=self.clock)
        self.tree.watcher = self._check_write
        self.store = MemoryStore(self.tree)
        """An operator's session, that of all others who are not under test."""
        self.manager = LedgerManager(self.store, root=ROOT, layout=Layout.HIERARCHICAL)
        self.bookies = RecordingBookies(BOOKIES, clock=self.clock)
        self.violations: list[str] = []
        """Violations of rule S1 in all metadata that was written."""
        self.lost: set[tuple[int, int]] = set()
        """Ledger and entry ids of which a test destroyed every copy."""

    @classmethod
    async def start(cls, *bookies: BookieId, seed: int = 0) -> "Cluster":
        """Return a cluster with these bookies registered; without arguments with all of them."""
        cluster = cls(seed=seed)
        await cluster.store.create(f"{ROOT}/available/readonly", with_parents=True)
        await cluster.store.create(f"{ROOT}/cookies", with_parents=True)
        await prepare_tree(cluster.store, PATHS)
        for bookie in bookies or BOOKIES:
            await cluster.store.create(f"{ROOT}/cookies/{bookie}")
            await cluster.register(bookie)
        return cluster

    # --- Bookies ----------------------------------------------------------------------------------

    def bookie(self, bookie: BookieId) -> MemoryBookie:
        return self.bookies.bookie(bookie)

    async def register(self, bookie: BookieId, *, is_read_only: bool = False) -> None:
        await self.store.create(f"{ROOT}/available/{'readonly/' if is_read_only else ''}{bookie}")

    async def register_at(self, bookie: BookieId, other: BookieId, *, host: str = "") -> None:
        """Register the bookie at the address of the other one. ``host``: another spelling of its
        host."""
        address = spelled_address(other)
        info = BookieServiceInfoFormat()
        host = host or address.host
        info.endpoints.add(id="bookie", protocol="bookie-rpc", host=host, port=address.port)
        await self.store.create(f"{ROOT}/available/{bookie}", info.SerializeToString())

    async def unregister(self, bookie: BookieId) -> None:
        try:
            await self.store.delete(f"{ROOT}/available/{bookie}")
        except NoNodeError:
            await self.store.delete(f"{ROOT}/available/readonly/{bookie}")

    async def kill(self, *bookies: BookieId) -> None:
        for bookie in bookies:
            self.bookie(bookie).is_down = True
            await self.unregister(bookie)

    async def revive(self, bookie: BookieId) -> None:
        self.bookie(bookie).start()
        await self.register(bookie)

    async def wipe(self, bookie: BookieId) -> None:
        """Give the bookie, which must be down, new disks and so a new identity."""
        self.bookie(bookie).wipe()
        await self.store.delete(f"{ROOT}/cookies/{bookie}")
        await self.store.create(f"{ROOT}/cookies/{bookie}")

    async def reformat(self, *bookies: BookieId) -> None:
        """Give these bookies new disks and let them return."""
        for bookie in bookies:
            await self.kill(bookie)
            await self.wipe(bookie)
            await self.revive(bookie)

    async def register_again(self, bookie: BookieId, *, is_read_only: bool = False) -> None:
        await self.unregister(bookie)
        await self.register(bookie, is_read_only=is_read_only)

    # --- Ledgers ----------------------------------------------------------------------------------

    async def write_ledger(
        self,
        *ensembles: Sequence[BookieId],
        ledger_id: int = LEDGER,
        starts: Sequence[int] = (0,),
        last: int = 9,
        write_quorum: int = 2,
        state: LedgerState = LedgerState.CLOSED,
        digest: EntryDigest = DIGEST,
        **fields: object,
    ) -> VersionedMetadata:
        """Create a ledger with entries 0 to ``last``, each on every bookie of its write set."""
        is_closed = state is LedgerState.CLOSED
        metadata = LedgerMetadata(
            ensemble_size=len(ensembles[0]),
            write_quorum=write_quorum,
            ack_quorum=1,
            state=state,
            last_entry_id=last if is_closed else -1,
            length=PAYLOAD_BYTES * (last + 1) if is_closed else 0,
            password=PASSWORD,
            segments=tuple(
                Segment(first_entry_id=start, ensemble=tuple(ensemble))
                for start, ensemble in zip(starts, ensembles, strict=True)
            ),
        )
        metadata = replace(metadata, **fields)  # type: ignore[arg-type]
        for entry_id in range(last + 1):
            self.put(ledger_id, entry_id, *named_by(metadata, entry_id), digest=digest)
        for bookie in BOOKIES:
            self.bookie(bookie).flush()
        return await self.manager.create(ledger_id, metadata)

    def put(
        self,
        ledger_id: int,
        entry_id: int,
        *bookies: BookieId,
        digest: EntryDigest = DIGEST,
        lac: int | None = None,
    ) -> None:
        """Store the entry on these bookies as a writer would."""
        for bookie in bookies:
            self.bookie(bookie).add(
                entry_bytes(ledger_id, entry_id, digest=digest, lac=lac),
                master_key=digest.master_key,
                is_recovery=False,
                is_high_priority=False,
            )

    async def metadata(self, ledger_id: int = LEDGER) -> LedgerMetadata:
        return (await self.manager.read(ledger_id)).metadata

    async def ensembles(self, ledger_id: int = LEDGER) -> list[tuple[BookieId, ...]]:
        return [segment.ensemble for segment in (await self.metadata(ledger_id)).segments]

    def good_copies(self, ledger_id: int, metadata: LedgerMetadata, entry_id: int) -> int:
        """Return the number of bookies in the metadata that have an undamaged copy of the entry."""
        return sum(
            self.has_good_copy(bookie, ledger_id, entry_id)
            for bookie in named_by(metadata, entry_id)
        )

    def has_good_copy(self, bookie: BookieId, ledger_id: int, entry_id: int) -> bool:
        """Return True if the bookie, up or down, has a good copy. Sends no request."""
        if entry_id not in self.bookie(bookie).entry_ids(ledger_id):
            return False
        entry = self.bookie(bookie).read(ledger_id, entry_id)
        return DIGEST.is_good(entry, ledger_id=ledger_id, entry_id=entry_id)

    async def assert_whole(self, *ledger_ids: int) -> None:
        """Assert that every copy that metadata names exists on a bookie that can be read."""
        for ledger_id in ledger_ids or (LEDGER,):
            metadata = await self.metadata(ledger_id)
            assert metadata.is_closed, metadata
            for entry_id in range(metadata.last_entry_id + 1):
                for bookie in named_by(metadata, entry_id):
                    assert self.has_good_copy(bookie, ledger_id, entry_id), (
                        ledger_id,
                        entry_id,
                        bookie,
                    )
                    assert not self.bookie(bookie).is_down, (ledger_id, entry_id, bookie)
        assert not self.violations, self.violations

    def _check_write(self, ledger_id: int, before: LedgerMetadata, after: LedgerMetadata) -> None:
        """Check rule S1: a new bookie has its stripe, and no entry has fewer good copies than
        before.

        The worker cannot know that a bookie acknowledged a copy and lost it: copies are read again
        later.
        """
        if any(ledger_id in self.bookie(bookie).dropped for bookie in after.bookies):
            return
        for entry_id in range(after.last_entry_id + 1 if before.is_closed else _settled(after)):
            came = set(named_by(after, entry_id)) - set(named_by(before, entry_id))
            for bookie in came:
                if not self.has_good_copy(bookie, ledger_id, entry_id):
                    self.violations.append(f"{bookie} is named without entry {entry_id}: {after}")
            count = self.good_copies(ledger_id, after, entry_id)
            if count < self.good_copies(ledger_id, before, entry_id):
                self.violations.append(f"a good copy of {entry_id} is no more named: {after}")

    # --- The queue --------------------------------------------------------------------------------

    async def mark(self, *replicas: BookieId, ledger_id: int = LEDGER, ctime_ms: int = 1) -> None:
        """Mark the ledger as an auditor would. An existing mark is written again."""
        path = PATHS.mark(ledger_id)
        data = znodes.mark_to_bytes(Mark(replicas=replicas, ctime_ms=ctime_ms))
        if await self.store.exists(path) is None:
            await self.store.create(path, data, with_parents=True)
        else:
            await self.store.set(path, data, version=-1)

    async def marked(self, paths: MarkPaths = PATHS) -> list[int]:
        """Return the ids of the ledgers marked in a tree: the shared one, or our private one."""
        found = await marked_ledger_ids(self.store, paths)
        return [i for i in found if await self.store.exists(paths.mark(i))]

    async def mark_stat(self, ledger_id: int = LEDGER) -> Stat:
        """Return the stat of the ledger's mark, which must exist."""
        return (await self.store.get(PATHS.mark(ledger_id)))[1]

    async def locked(self) -> list[str]:
        return await self.store.children(PATHS.locks)

    async def assert_queue_empty(self) -> None:
        assert await self.marked() == []
        assert await self.locked() == []

    def node(
        self,
        name: str = "node-1",
        *,
        bookies: Bookies | None = None,
        local: BookieId | None = None,
        settings: ReplicationSettings | None = None,
        journal: Journal | None = None,
        fallback: EntryDigest = DIGEST,
        racks: Mapping[BookieId, str] | None = None,
        moves_misplaced: bool = False,
        resolve: ResolveHost = as_spelled,
    ) -> AbstractAsyncContextManager[Node]:
        """Yield another node with a worker. Without ``racks`` no placement rule applies."""
        return running_node(
            name,
            tree=self.tree,
            bookies=bookies or self.bookies,
            clock=self.clock,
            seed=self.seed,
            local=local,
            settings=settings or ReplicationSettings(),
            journal=journal,
            fallback=fallback,
            racks=racks,
            moves_misplaced=moves_misplaced,
            resolve=resolve,
        )


def entry_bytes(
    ledger_id: int, entry_id: int, *, digest: EntryDigest = DIGEST, lac: int | None = None
) -> bytes:
    return digest.pack(
        ledger_id=ledger_id,
        entry_id=entry_id,
        lac=entry_id - 1 if lac is None else lac,
        length=PAYLOAD_BYTES * (entry_id + 1),
        payload=b"%010d" % entry_id,
    )


def named_by(metadata: LedgerMetadata, entry_id: int) -> list[BookieId]:
    """Return the bookies that should have the entry."""
    ensemble = metadata.segment_of(entry_id).ensemble
    indexes = write_set(
        entry_id, ensemble_size=metadata.ensemble_size, write_quorum=metadata.write_quorum
    )
    return [ensemble[index] for index in indexes]


def _settled(metadata: LedgerMetadata) -> int:
    """Return the entries before the last segment. A recovery may write entries of the last one
    again."""
    return metadata.last_segment.first_entry_id


def fault_once(
    cluster: Cluster,
    store: MemoryStore,
    kind: type[Operation],
    fault: Fault,
    *,
    path: str | None = None,
) -> None:
    """Let the next write of ``store`` with such an operation (on ``path``) suffer the fault."""

    def is_it(operation: Operation) -> bool:
        return isinstance(operation, kind) and path in (None, operation.path)

    def choose(asking: MemoryStore, operations: Sequence[Operation]) -> Fault | None:
        if asking is not store or not any(map(is_it, operations)):
            return None
        cluster.tree.faults = None
        return fault

    cluster.tree.faults = choose


def shut_out(store: MetadataStore, *paths: str, is_stat_open: bool = False) -> set[str]:
    """Let ZooKeeper's ACLs deny the session reads of the znodes in the returned set.

    ``is_stat_open``: older servers do not check ACLs in ``exists``; those of ZooKeeper 3.9.5 do.
    """
    shut, get, children, exists = set(paths), store.get, store.children, store.exists

    def check(path: str) -> None:
        if path in shut:
            raise UnauthorizedError("the ACL shuts us out", path=path)

    async def get_if_allowed(path: str) -> tuple[bytes, Stat]:
        check(path)
        return await get(path)

    async def get_each_if_allowed(
        paths: Sequence[str],
    ) -> list[tuple[bytes, Stat] | NoNodeError | UnauthorizedError]:
        return await asyncio.gather(*map(get_if_any, paths))

    async def get_if_any(path: str) -> tuple[bytes, Stat] | NoNodeError | UnauthorizedError:
        try:
            return await get_if_allowed(path)
        except (NoNodeError, UnauthorizedError) as error:
            return error

    async def children_if_allowed(path: str) -> list[str]:
        check(path)
        return await children(path)

    async def exists_if_allowed(path: str) -> Stat | None:
        found = await exists(path)
        if found is not None and not is_stat_open:
            check(path)
        return found

    store.get = get_if_allowed  # type: ignore[method-assign]
    store.get_each = get_each_if_allowed  # type: ignore[method-assign]
    store.children = children_if_allowed  # type: ignore[method-assign]
    store.exists = exists_if_allowed  # type: ignore[method-assign]
    return shut


async def until(cluster: Cluster, condition: Callable[[], Awaitable[bool]]) -> float:
    """Return how many seconds passed until the condition was true. A minute is the bound."""
    began_s = cluster.clock.now_s()
    while not await condition():
        assert cluster.clock.now_s() - began_s < 60, "waited for a minute"
        await asyncio.sleep(0.1)
    return cluster.clock.now_s() - began_s


async def queue_empty(cluster: Cluster) -> bool:
    return not await cluster.marked() and not await cluster.locked()


async def with_lost_b2(count: int, *bookies: BookieId) -> Cluster:
    """Return a cluster with ledgers 0 to ``count - 1`` on B1, B2 and B3, marked because B2 is
    lost."""
    cluster = await Cluster.start(*bookies)
    for ledger_id in range(count):
        await cluster.write_ledger((B1, B2, B3), ledger_id=ledger_id)
        await cluster.mark(B2, ledger_id=ledger_id)
    await cluster.kill(B2)
    return cluster


def lease_attempts(cluster: Cluster, ledger_id: int = LEDGER) -> list[float]:
    """Return a list that grows by the time of each attempt to lock the ledger."""
    times_s: list[float] = []
    lock = PATHS.lock(ledger_id)

    def note(store: MemoryStore, operations: Sequence[Operation]) -> Fault | None:
        if any(isinstance(each, Create) and each.path == lock for each in operations):
            times_s.append(cluster.clock.now_s())
        return None

    cluster.tree.faults = note
    return times_s
