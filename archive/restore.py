"""Restores the metadata of an archive into a ZooKeeper that has lost it.

Bookies delete ledgers that ZooKeeper does not list. So the bookies are stopped, and what lets a
bookie start is written last. The steps, and what a kill after each of them leaves:

1. The marker ``restoring``, which names the archive and the point, and the switch that disables
   auto-recovery. Nodes and commands refuse a cluster with the marker. Only a restore of the same
   point goes on in it.
2. The ledgers. What exists already must be equal.
3. The orders, and the further trees of znodes.
4. The counters of ledger ids. No bookie can say which ids it stores, and the archive lacks what was
   created after its end. So new ids begin far behind.
5. The feed: a new generation, which every client is told of.
6. LAYOUT, then INSTANCEID, then the cookies. A bookie refuses to start without its cookie.
7. The order to trust the cookies, which are newer than all ledgers now (rule S5).
8. The marker is deleted. Auto-recovery stays disabled until an operator enables it.

Marks are not archived, because the leader finds and marks under-replicated ledgers again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

import msgspec

from archive.archiver import InThread
from archive.format import Record
from archive.order import put
from archive.reading import Archive, Point
from archive.znodes import COUNTERS, HIGH_ORDER, IDS_OF, LONG_COUNTERS, read_ledgers
from checkpoints.chain import FeedChain
from checkpoints.model import Key
from ledgers.clock import Clock
from ledgers.codec.layout import Layout, parse_layout
from ledgers.codec.metadata import parse_metadata, serialize_metadata
from ledgers.errors import (
    ConflictError,
    CorruptionError,
    NodeExistsError,
    NoNodeError,
    RejectedError,
)
from ledgers.manager import LAYOUT, RESTORING, LedgerManager
from ledgers.model import BookieId
from ledgers.store import (
    Create,
    Delete,
    MetadataStore,
    MultiFailed,
    Operation,
    children_if_any,
)
from ledgers.tasks import in_daemon_thread
from replication.orders import IdentitiesOrder, identities_znode
from replication.znodes import ClusterPaths, ensure_znode

LEDGERS_A_TRANSACTION: Final = 25
TRANSACTION_BYTES_MAX: Final = 256 * 1024
TRANSACTIONS_AT_ONCE: Final = 32
SKIPPED_IDS: Final = 1_000_000
"""Ids that are left out where they are short: more than were created in the archive's lag."""
IDS_A_TRANSACTION: Final = 500
HIGH_ORDERS_SKIPPED: Final = 2
"""How much further the ``HOB-`` directory of new ids is than the archived one. Another one may have
begun after the end of the archive."""
LIVE_READS_AT_ONCE: Final = 500
FEED: Final = "underreplication/bookmender/feed"
DISABLE: Final = "underreplication/disable"
ALONE_LAST: Final = (LAYOUT, "INSTANCEID")
UNREADABLE: Final = "unreadable"


class RestoreRefusedError(RejectedError):
    """A restore into this ZooKeeper would be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """The ledgers and znodes that a restore of a point writes. ``by_state``: how many ledgers;
    those in the state ``unreadable`` are restored as well. ``named``: the bookies in the metadata.
    ``others``: the znodes that are no ledgers, by path. ``until_ms``: the state was the same from
    the point until this time."""

    point: Point
    until_ms: int
    layout: Layout
    by_state: Mapping[str, int]
    named: Set[BookieId]
    last_ledger_id: int
    others: Mapping[str, bytes] = field(repr=False)

    @property
    def ledger_count(self) -> int:
        return sum(self.by_state.values())

    @property
    def bookies(self) -> list[BookieId]:
        """The bookies that have a cookie."""
        names = (path.removeprefix("cookies/") for path in self.others)
        return sorted(BookieId(name) for name in names if f"cookies/{name}" in self.others)

    @property
    def high_order(self) -> int | None:
        """The number of the ``HOB-`` directory from which new ids come; None: the layout has only
        short ids."""
        if self.layout not in (Layout.HIERARCHICAL, Layout.LONG_HIERARCHICAL):
            return None
        names = (HIGH_ORDER.fullmatch(path.rpartition("/")[2]) for path in self.others)
        used = (int(match[1]) for match in names if match)
        return max(self.last_ledger_id >> 32, *used, 0) + HIGH_ORDERS_SKIPPED

    @property
    def first_new_id(self) -> int:
        """The id that the next new ledger gets at least."""
        if self.high_order is not None:
            return self.high_order << 32
        counted = (self.others.get(IDS_OF + name, b"0") for name in COUNTERS)
        return max(self.last_ledger_id + 1, *map(int, counted)) + SKIPPED_IDS


def plan_restore(archive: Archive, point: Point) -> RestorePlan:
    """Read the state of a point, and return what a restore writes. It blocks. Raises
    CorruptionError if the archive is damaged."""
    others: dict[str, bytes] = {}
    by_state, named, last_ledger_id = Counter[str](), set[BookieId](), 0
    for record in archive.state(point):
        assert record.data is not None
        if record.path is not None:
            others[record.path] = record.data
        if record.ledger_id is not None:
            last_ledger_id = max(last_ledger_id, record.ledger_id)
            try:
                metadata = parse_metadata(record.data)
                by_state[metadata.state.name] += 1
                named |= metadata.bookies
            except CorruptionError:
                by_state[UNREADABLE] += 1
    return RestorePlan(
        point=point,
        until_ms=max(point.header.time_ms, archive.confirmed_ms(point)),
        layout=parse_layout(others[LAYOUT]) if others.get(LAYOUT) else Layout.HIERARCHICAL,
        by_state=by_state,
        named=named,
        last_ledger_id=last_ledger_id,
        others=others,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Clone:
    """Turns metadata into that of another cluster. ``bookies``: the new id of each bookie. Orders,
    cookies and further trees are left out."""

    instance_id: str
    bookies: Mapping[BookieId, BookieId]

    def check(self, plan: RestorePlan) -> None:
        """Raise RestoreRefusedError unless each bookie has another one, of its own."""
        originals = {*plan.named, *plan.bookies}
        if missing := sorted(plan.named - self.bookies.keys()):
            raise RestoreRefusedError(
                f"ledgers name {missing[0]}, for which no other bookie is given. A clone must not "
                "name a bookie of the original"
            )
        new = Counter(self.bookies.values())
        if wrong := sorted(bookie for bookie in new if new[bookie] > 1 or bookie in originals):
            raise RestoreRefusedError(
                f"{wrong[0]} cannot be a bookie of the clone: it is one of the original, or given "
                "for two bookies"
            )

    def metadata(self, data: bytes) -> bytes:
        """Return metadata that names the new bookies. Raises CorruptionError if it cannot be
        parsed."""
        metadata = parse_metadata(data)
        segments = tuple(
            replace(each, ensemble=tuple(self.bookies[b] for b in each.ensemble))
            for each in metadata.segments
        )
        return serialize_metadata(replace(metadata, segments=segments))

    def others(self, others: Mapping[str, bytes]) -> dict[str, bytes]:
        kept = {path: data for path, data in others.items() if path.startswith((LAYOUT, IDS_OF))}
        return kept | {"INSTANCEID": self.instance_id.encode()}


@dataclass(kw_only=True)
class Restore:
    """Writes a point of an archive below ``root``. ``on_progress``: called with the number of
    ledgers that are written."""

    store: MetadataStore
    root: str
    archive: Archive
    plan: RestorePlan
    clock: Clock
    clone: Clone | None = None
    on_progress: Callable[[int], None] = lambda count: None
    in_thread: InThread = in_daemon_thread

    def __post_init__(self) -> None:
        others = self.plan.others
        self._others = dict(others if self.clone is None else self.clone.others(others))
        self._paths = ClusterPaths.below(self.root)
        self._marker = f"{self.root}/{RESTORING}"
        end = self.plan.point.header
        point = {"generation": end.generation, "checkpoint": hex(end.end)}
        self._marker_data = msgspec.json.encode(point)
        self._made: set[str] = set()
        """Parents of ledgers that exist."""

    async def run(self) -> bool:
        """Restore. It may be repeated after a failure, and then returns True. Raises
        RestoreRefusedError, ConflictError if something else is in the tree, CorruptionError,
        UnavailableError."""
        has_begun = await self.check()
        await self._put_marker()
        await self.check()  # of two restores that begin at once, only one has written the marker
        await self._put(self._paths.disable, b"")
        await self._write_ledgers()
        await self._write_orders()
        await self._advance_ids()
        await self._renew_feed()
        await self._let_bookies_start()
        with suppress(NoNodeError):  # of two restores, the other one was faster
            await self.store.delete(self._marker)
        return has_begun

    async def check(self) -> bool:
        """Raise RestoreRefusedError unless the tree is empty, or has what this restore began.
        Return True if it has."""
        if self.clone is not None:
            self.clone.check(self.plan)
        for directory in ("available", "available/readonly"):
            names = await children_if_any(self.store, f"{self.root}/{directory}")
            if bookies := sorted(name for name in names if name != "readonly"):
                raise RestoreRefusedError(
                    f"{len(bookies)} bookies are registered, such as {bookies[0]}. Stop all "
                    "bookies first: a bookie deletes what ZooKeeper does not list yet"
                )
        try:
            data, _ = await self.store.get(self._marker)
        except NoNodeError:
            if names := await children_if_any(self.store, self.root):
                raise RestoreRefusedError(
                    f"{self.root} is not empty: it has {', '.join(sorted(names)[:5])}. A cluster "
                    "is only restored into a ZooKeeper that has lost it. A single ledger can be "
                    "restored alone"
                ) from None
            return False
        if data != self._marker_data:
            raise RestoreRefusedError(
                f"a restore of another point has begun in {self.root}: {data.decode()}. Go on with "
                f"that one, or delete {self.root} to begin again"
            )
        return True

    async def _put_marker(self) -> None:
        """Create the marker and its parents in one step: a tree with a parent alone is refused."""
        await ensure_znode(self.store, self.root)
        if await self.store.exists(self._marker) is None:
            names = RESTORING.split("/")
            paths = [f"{self.root}/{'/'.join(names[: i + 1])}" for i in range(len(names))]
            parents = [Create(path=path) for path in paths[:-1]]
            try:
                await self.store.multi(
                    [*parents, Create(path=self._marker, data=self._marker_data)]
                )
            except MultiFailed as failure:
                if not isinstance(failure.cause, NodeExistsError):
                    raise failure.cause from failure

    # --- Ledgers ----------------------------------------------------------------------------------

    async def _write_ledgers(self) -> None:
        transactions = self._transactions(self.archive.state(self.plan.point))
        count = 0
        while some := await self.in_thread(
            lambda: list(islice(transactions, TRANSACTIONS_AT_ONCE))
        ):
            for transaction in some:
                for create in transaction:
                    parent = create.path.rpartition("/")[0]
                    if parent not in self._made:
                        await ensure_znode(self.store, parent)
                        self._made.add(parent)
            await asyncio.gather(*map(self._create_all, some))
            count += sum(map(len, some))
            self.on_progress(count)

    def _transactions(self, records: Iterator[Record]) -> Iterator[list[Create]]:
        layout, transaction, size_bytes = self.plan.layout, list[Create](), 0
        for record in records:
            if record.ledger_id is None:
                continue
            assert record.data is not None
            data = record.data
            if self.clone is not None:
                data = self.clone.metadata(data)
            is_full = len(transaction) == LEDGERS_A_TRANSACTION
            if transaction and (is_full or size_bytes + len(data) > TRANSACTION_BYTES_MAX):
                yield transaction
                transaction, size_bytes = [], 0
            transaction.append(Create(path=layout.path(self.root, record.ledger_id), data=data))
            size_bytes += len(data)
        if transaction:
            yield transaction

    async def _create_all(self, transaction: Sequence[Create]) -> None:
        try:
            await self.store.multi(transaction)
        except MultiFailed as failure:
            if not isinstance(failure.cause, NodeExistsError):
                raise failure.cause from failure
            for create in transaction:  # an earlier try was killed
                await self._put(create.path, create.data)

    async def _put(self, path: str, data: bytes) -> None:
        """Create a znode, which may exist already with this data. Raises ConflictError."""
        try:
            await self.store.create(path, data, with_parents=True)
        except NodeExistsError as error:
            present, _ = await self.store.get(path)
            if present != data:
                raise ConflictError(
                    "another znode is in place of an archived one", path=path
                ) from error

    # --- The others -------------------------------------------------------------------------------

    async def _write_orders(self) -> None:
        identities = identities_znode(self._paths).path
        for path, data in self._others.items():
            is_later = path in (*ALONE_LAST, FEED, DISABLE) or path.startswith("cookies")
            if is_later or path.startswith((IDS_OF, LONG_COUNTERS)):
                continue
            full = path if path.startswith("/") else f"{self.root}/{path}"
            if full != identities:
                await self._put(full, data)

    async def _advance_ids(self) -> None:
        """Make sure that no id is given to a second ledger."""
        if (high := self.plan.high_order) is not None:
            await self._put(f"{self.root}/{LONG_COUNTERS}/HOB-{high:010d}", b"")
            return
        parent = self.root if self.plan.layout is Layout.FLAT else f"{self.root}/idgen"
        await ensure_znode(self.store, parent)
        child = f"{parent}/restoring"
        step: list[Operation] = [Create(path=child), Delete(path=child)] * IDS_A_TRANSACTION
        while True:
            stat = await self.store.exists(parent)
            assert stat is not None
            if (stat.cversion + stat.child_count) // 2 >= self.plan.first_new_id:
                return
            await self.store.multi(step)

    async def _renew_feed(self) -> None:
        """Begin another generation of the feed, as after each restore of ZooKeeper."""
        stored = self._others.get(FEED)
        if stored is None:
            return
        with suppress(CorruptionError, NodeExistsError):
            chain = FeedChain.parse(stored)
            if chain.is_enabled:
                end = self.plan.point.header
                chain = chain.renewed(
                    now_ms=self.clock.wall_ms(), generation_min=end.generation + 1
                )
            await self.store.create(self._paths.feed, chain.to_json(), with_parents=True)

    async def _let_bookies_start(self) -> None:
        if LAYOUT in self._others:
            await self._put(f"{self.root}/{LAYOUT}", self._others[LAYOUT])
        await ensure_znode(self.store, f"{self.root}/available/readonly")
        await ensure_znode(self.store, f"{self.root}/cookies")
        if "INSTANCEID" in self._others:
            await self._put(f"{self.root}/INSTANCEID", self._others["INSTANCEID"])
        if self.clone is not None:
            return
        trusted = {}
        for bookie in self.plan.bookies:
            path = f"{self.root}/cookies/{bookie}"
            await self._put(path, self._others[f"cookies/{bookie}"])
            stat = await self.store.exists(path)
            trusted[bookie] = 0 if stat is None else stat.czxid
        order = IdentitiesOrder(since_ms=self.clock.wall_ms(), cookies=trusted)
        await put(self.store, identities_znode(self._paths).path, order)


# --- Comparing ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A ledger, or another znode, that differs between two states. ``before``, ``after``: its
    bytes; None: it does not exist."""

    key: Key
    before: bytes | None
    after: bytes | None


def differences(before: Iterable[Record], after: Iterable[Record]) -> Iterator[Difference]:
    """Yield what differs between two states: first what is in ``after``, in its order, then what is
    only in ``before``. Needs memory for the state ``before``."""
    known = {record.key: record.data for record in before}
    for record in after:
        data = known.pop(record.key, None)
        if data != record.data:
            yield Difference(key=record.key, before=data, after=record.data)
    for key, data in known.items():
        yield Difference(key=key, before=data, after=None)


async def live_ledgers(store: MetadataStore, manager: LedgerManager) -> list[Record]:
    """Return the metadata of all ledgers that ZooKeeper has, without those that an ACL hides."""
    found: list[Record] = []
    async for ledger_ids in manager.ledger_ids(on_hidden=lambda error: None):
        for start in range(0, len(ledger_ids), LIVE_READS_AT_ONCE):
            some = ledger_ids[start : start + LIVE_READS_AT_ONCE]
            read = await read_ledgers(store, manager, some)
            found += [record for record in read.values() if record.data is not None]
    return found
