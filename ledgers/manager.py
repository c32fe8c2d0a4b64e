"""The ledger manager: reads, creates, changes, deletes and lists the metadata of ledgers.

``LedgerManager`` is the entry point. Metadata changes by compare-and-set only: every write names
the version that its decision was based on (rule S2). Before the write, the bytes before and after
are given to the journal.

- ``ledger_ids`` lists the ledgers. It returns every ledger id or raises an error (rule S8). A
  directory that vanishes during the listing was empty: the client that deletes the last ledger of a
  directory deletes the directory too.
- ``new_ledger_id`` generates ids as BookKeeper does. A short id is the number of a sequential child
  (ZkLedgerIdGenerator). When short ids run out, long ids come from ``idgen-long``
  (LongZkLedgerIdGenerator). An id is x * 2^32 + y: x is the number of a ``HOB-`` directory, and y
  the number of a sequential child in it.

``find_cluster`` proves that there is a cluster, and finds its root and layout.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from msgspec import Struct

from ledgers.codec.layout import SHORT_ID_STOP, Layout, MetadataUri, parse_layout
from ledgers.codec.metadata import parse_metadata, serialize_metadata
from ledgers.errors import (
    ConflictError,
    CorruptionError,
    LockLostError,
    NodeExistsError,
    NoNodeError,
    NoSuchLedgerError,
    NotEmptyError,
    SettingsError,
    UnauthorizedError,
    UnavailableError,
    UnknownOutcomeError,
)
from ledgers.model import LedgerMetadata
from ledgers.store import (
    Check,
    MetadataStore,
    MultiFailed,
    Operation,
    SetData,
    Stat,
    children_if_any,
)

HIGH_ORDER_TRIES_MAX = 10
HIGH_ORDER_KEPT = 3
"""Number of newest ``HOB-`` directories to keep; older ones are deleted."""
LISTINGS_AT_ONCE = 32


RESERVED = frozenset(
    ("available", "cookies", "underreplication", "LAYOUT", "INSTANCEID", "idgen", "idgen-long")
)
"""Other znodes that BookKeeper keeps directly below the ledgers root."""
COUNTER_PREFIX = "ID-"
"""Name prefix of the sequential znodes from which a flat layout generates ledger ids."""

OnStray = Callable[[str], None]
"""Called with the path of a znode that is neither a ledger nor a directory of ledgers."""

OnHidden = Callable[[UnauthorizedError], None]
"""Called for each directory of ledgers that an ACL hides."""

Journal = Callable[[int, bytes, bytes], Awaitable[None]]
"""Stores ledger id, bytes before and bytes after. If it raises, nothing is written."""


WRITE_SLACK_BYTES = 8 * 1024
"""Allowance for the other operations of a transaction, and for longer bookie ids."""


class VersionedMetadata(Struct, frozen=True, kw_only=True):
    """The metadata of a ledger as read or written. ``data``: the bytes of the znode."""

    ledger_id: int
    metadata: LedgerMetadata
    stat: Stat
    data: bytes

    def __repr__(self) -> str:  # without the bytes, which hold the password
        return f"VersionedMetadata({self.ledger_id}, {self.metadata}, {self.stat})"

    @property
    def version(self) -> int:
        return self.stat.version


class LedgerManager:
    """Reads and writes the metadata of the ledgers below ``root``, in this layout."""

    def __init__(
        self, store: MetadataStore, root: str, layout: Layout, *, journal: Journal | None = None
    ) -> None:
        self._store, self.root, self.layout = store, root, layout
        self._journal = journal

    @classmethod
    async def open(
        cls, store: MetadataStore, uri: MetadataUri, *, journal: Journal | None = None
    ) -> LedgerManager:
        """Return the manager of the cluster that ``uri`` names. Raises what ``find_cluster``
        raises, and SettingsError if LAYOUT differs from the URI (rule S8)."""
        uri = await find_cluster(store, uri)
        layout = uri.layout
        with suppress(NoNodeError):
            data, _ = await store.get(f"{uri.root}/{LAYOUT}")
            layout = parse_layout(data)
        if layout is None:
            raise UnavailableError(f"{uri.root}/{LAYOUT} was deleted just now")
        if uri.layout not in (None, layout):
            raise SettingsError(
                f"the metadata service URI says {uri.layout.name.lower()}, but the cluster at "
                f"{uri.root} is {layout.name.lower()}; leave the layout out of the URI, or correct "
                "it"
            )
        return cls(store, uri.root, layout, journal=journal)

    def path(self, ledger_id: int) -> str:
        """Return the path of the ledger's znode. Raises SettingsError if the id does not fit."""
        return self.layout.path(self.root, ledger_id)

    async def sync(self, ledger_id: int) -> None:
        """Make later reads of the ledger see all writes by any client before this call."""
        with suppress(SettingsError):  # the layout cannot hold the id, so there were no writes
            await self._store.sync(self.path(ledger_id))

    async def read(self, ledger_id: int) -> VersionedMetadata:
        """Return the metadata of a ledger. Raises NoSuchLedgerError, CorruptionError."""
        try:
            data, stat = await self._store.get(self.path(ledger_id))
        except (NoNodeError, SettingsError) as error:  # SettingsError: not an id of the layout
            raise NoSuchLedgerError("no such ledger", ledger_id=ledger_id) from error
        try:
            metadata = parse_metadata(data)
        except CorruptionError as error:
            raise CorruptionError(
                f"its metadata cannot be read: {error}", ledger_id=ledger_id
            ) from error
        return VersionedMetadata(ledger_id=ledger_id, metadata=metadata, stat=stat, data=data)

    async def find(self, ledger_id: int) -> VersionedMetadata | None:
        """Return the metadata of a ledger; None if it does not exist, which is believed only after
        a sync and a second read (rule S8). Raises CorruptionError."""
        try:
            return await self.read(ledger_id)
        except NoSuchLedgerError:
            await self.sync(ledger_id)
        try:
            return await self.read(ledger_id)
        except NoSuchLedgerError:
            return None

    async def create(self, ledger_id: int, metadata: LedgerMetadata) -> VersionedMetadata:
        """Create a ledger. Raises NodeExistsError, perhaps after a lost reply to this client."""
        data = serialize_metadata(metadata)
        await self._store.create(self.path(ledger_id), data, with_parents=True)
        return VersionedMetadata(
            ledger_id=ledger_id, metadata=metadata, stat=Stat(version=0), data=data
        )

    async def write(
        self,
        ledger_id: int,
        metadata: LedgerMetadata,
        *,
        read_as: VersionedMetadata,
        guards: Sequence[Operation] = (),
        beside: Sequence[Operation] = (),
    ) -> VersionedMetadata:
        """Replace the metadata if its version is still the one of ``read_as``.

        One transaction contains, in this order: ``guards``, such as the check of the ledger's lock
        (rule S3); the compare-and-set; ``beside``. Raises by the first operation that fails:

        - a guard: LockLostError;
        - the compare-and-set: ConflictError or NoSuchLedgerError;
        - an operation of ``beside``: ConflictError, also if its znode appeared or is gone.

        Raises UnknownOutcomeError if the reply was lost. Then read the metadata again.
        """
        operation = await self.write_operation(ledger_id, metadata, read_as=read_as)
        try:
            results = await self._store.multi([*guards, operation, *beside])
        except MultiFailed as failure:
            if failure.index < len(guards):
                raise LockLostError(
                    "a condition of the write is no longer true", ledger_id=ledger_id
                ) from failure
            is_metadata = failure.index == len(guards)
            if is_metadata and isinstance(failure.cause, NoNodeError):
                raise NoSuchLedgerError("no such ledger", ledger_id=ledger_id) from failure
            if not is_metadata and isinstance(failure.cause, NoNodeError | NodeExistsError):
                raise ConflictError(
                    "a znode that is written beside the metadata changed", ledger_id=ledger_id
                ) from failure
            raise failure.cause from failure
        stat = results[len(guards)]
        assert isinstance(stat, Stat), results
        return VersionedMetadata(
            ledger_id=ledger_id, metadata=metadata, stat=stat, data=operation.data
        )

    async def write_operation(
        self, ledger_id: int, metadata: LedgerMetadata, *, read_as: VersionedMetadata
    ) -> SetData:
        """Journal the write, and return it as an operation for the caller's own transaction."""
        data = serialize_metadata(metadata)
        return await self.put_back_operation(
            ledger_id, data, present=read_as.data, version=read_as.version
        )

    def has_room_for(self, versioned: VersionedMetadata) -> bool:
        """True if this metadata fits into a transaction with other operations."""
        return len(versioned.data) + WRITE_SLACK_BYTES <= self.request_bytes_max

    @property
    def request_bytes_max(self) -> int:
        """Size limit of the store's requests."""
        return self._store.request_bytes_max

    def check(self, versioned: VersionedMetadata) -> Check:
        """Return a check that succeeds while the metadata is unchanged since it was read."""
        return Check(path=self.path(versioned.ledger_id), version=versioned.version)

    async def put_back_operation(
        self, ledger_id: int, data: bytes, *, present: bytes, version: int
    ) -> SetData:
        """Journal and return an operation that replaces the bytes ``present`` by ``data``. ``data``
        may be earlier metadata of the ledger, which is restored unchanged."""
        if self._journal is not None:
            await self._journal(ledger_id, present, data)
        return SetData(path=self.path(ledger_id), data=data, version=version)

    async def delete(self, ledger_id: int, *, version: int) -> None:
        """Delete the metadata of a ledger, and parents that become empty, as BookKeeper does.
        Succeeds if the ledger does not exist. Raises ConflictError, UnknownOutcomeError."""
        path = self.path(ledger_id)
        try:
            await self._store.delete(path, version=version)
        except NoNodeError:
            return
        if self.layout not in (Layout.HIERARCHICAL, Layout.LONG_HIERARCHICAL):
            return
        while (path := path.rpartition("/")[0]) != self.root:
            try:
                await self._store.delete(path)
            except (NotEmptyError, NoNodeError, UnknownOutcomeError):
                return

    # --- Listing ----------------------------------------------------------------------------------

    async def ledger_ids(
        self,
        tree: str | None = None,
        *,
        on_stray: OnStray = lambda path: None,
        on_hidden: OnHidden | None = None,
    ) -> AsyncIterator[Sequence[int]]:
        """Yield the ids of all ledgers, one leaf directory at a time, in the order of directories.

        ``tree``: one of ``trees``; None: all. ``on_stray`` gets each znode that belongs to no
        ledger. An incomplete listing raises UnavailableError (rule S8), or, if an ACL hid a
        directory and ``on_hidden`` does not take this, UnauthorizedError after all other
        directories.
        """
        root, layout = self.root, self.layout
        await self._store.sync(tree or root)
        directories = deque([tree or root])
        refusal: UnauthorizedError | None = None
        while directories:
            count = min(LISTINGS_AT_ONCE, len(directories))
            batch = [directories.popleft() for _ in range(count)]
            listings = await asyncio.gather(*map(self._children_if_allowed, batch))
            for path, names in zip(batch, listings, strict=True):
                if isinstance(names, UnauthorizedError):
                    if on_hidden is not None:
                        on_hidden(names)
                    else:
                        refusal = refusal or names
                    continue
                ledger_ids, others = layout.ledgers_among(root, path, names)
                for child in sorted(f"{path}/{name}" for name in others):
                    if layout.is_parent(root, child):
                        directories.append(child)
                        continue
                    name = child[len(root) + 1 :]
                    is_reserved = name in RESERVED or name.startswith(COUNTER_PREFIX)
                    if path != root or not is_reserved:
                        on_stray(child)
                if ledger_ids:
                    yield sorted(ledger_ids)
        if refusal is not None:
            raise refusal

    async def trees(self) -> list[str]:
        """Return the directories directly below the root that hold all ledgers, but no marks, locks
        and lists of bookies; the root of a flat layout. Raises UnavailableError."""
        if self.layout is Layout.FLAT:
            return [self.root]
        await self._store.sync(self.root)
        children = [f"{self.root}/{name}" for name in await self._children(self.root)]
        return sorted(child for child in children if self.layout.is_parent(self.root, child))

    async def _children_if_allowed(self, path: str) -> Sequence[str] | UnauthorizedError:
        try:
            return await self._children(path)
        except UnauthorizedError as error:
            return error

    async def _children(self, path: str) -> list[str]:
        try:
            return await self._store.children(path)
        except NoNodeError as error:
            if path == self.root:
                raise UnavailableError("the ledgers root does not exist", path=path) from error
            return []

    # --- New ids ----------------------------------------------------------------------------------

    async def new_ledger_id(self) -> int:
        """Return a ledger id that was never given out. Raises UnavailableError if none is left."""
        if self.layout is Layout.FLAT:
            return await self._short_id(f"{self.root}/ID-")
        if self.layout is Layout.LEGACY_HIERARCHICAL:
            return await self._short_id(f"{self.root}/idgen/ID-")
        long_ids = f"{self.root}/idgen-long"
        if await self._store.exists(long_ids) is None:
            number = await self._next_number(f"{self.root}/idgen/ID-")
            if 0 <= number < SHORT_ID_STOP:
                return number
            with suppress(NodeExistsError):
                await self._store.create(long_ids)
        return await self._long_id(long_ids)

    async def _short_id(self, prefix: str) -> int:
        number = await self._next_number(prefix)
        if not 0 <= number < SHORT_ID_STOP:
            raise UnavailableError("no ledger id is left in this layout", layout=self.layout.name)
        return number

    async def _long_id(self, parent: str) -> int:
        for _ in range(HIGH_ORDER_TRIES_MAX):
            names = await self._store.children(parent)
            high_orders = sorted(int(name[4:]) for name in names if _HIGH_ORDER.fullmatch(name))
            high = high_orders[-1] if high_orders else 1
            low = await self._next_number(f"{parent}/HOB-{high:010d}/ID-")
            if 0 <= low < SHORT_ID_STOP:
                return (high << 32) + low
            with suppress(NodeExistsError):
                await self._store.create(f"{parent}/HOB-{high + 1:010d}")
            for old in high_orders[: -(HIGH_ORDER_KEPT - 1)]:
                with suppress(NoNodeError, NotEmptyError):
                    await self._store.delete(f"{parent}/HOB-{old:010d}")
        raise UnavailableError("no ledger id could be generated", path=parent)

    async def _next_number(self, prefix: str) -> int:
        """Create a sequential child, delete it again, and return its number."""
        path = await self._store.create(
            prefix, is_ephemeral=True, is_sequential=True, with_parents=True
        )
        with suppress(NoNodeError):
            await self._store.delete(path)
        return int(path[len(prefix) :])


_HIGH_ORDER = re.compile(r"HOB-[0-9]{10}")


LAYOUT = "LAYOUT"
RESTORING = "underreplication/bookmender/restoring"
"""Exists below the root while the metadata is restored from an archive (``archive.restore``)."""
WITHOUT_LAYOUT = ("INSTANCEID", "available", "cookies")
"""Together these znodes prove a cluster without LAYOUT: Pulsar's metadata driver writes none."""


async def find_cluster(store: MetadataStore, uri: MetadataUri) -> MetadataUri:
    """Return the URI with the one root at which there is a cluster. Without LAYOUT it also names
    the layout: its own, or BookKeeper's default, which Pulsar's metadata driver always uses.

    Raises UnavailableError if there is no cluster, or only a part of one, or one whose ledgers have
    another layout: the path is wrong, or ZooKeeper has lost its data (rule S8). Raises
    SettingsError if both roots that the URI may mean have znodes of a cluster: one of the two may
    be old and empty, and every check would find all its ledgers healthy.
    """
    await store.sync(uri.root)
    roots = [root for root in (uri.root, uri.pulsar_root) if root]
    found: dict[str, set[str]] = {}
    for root in roots:
        if await store.exists(f"{root}/{RESTORING}") is not None:
            raise UnavailableError(
                f"the cluster at {root} of {uri.hosts} is being restored from an archive. Wait "
                "until that is done. If the restore was killed, repeat it"
            )
        names: set[str] = set()
        # LAYOUT last again: BookKeeper's own bookies create it before their cookies.
        for name in (LAYOUT, *WITHOUT_LAYOUT, LAYOUT):
            if LAYOUT not in names and await store.exists(f"{root}/{name}") is not None:
                names.add(name)
        if names:
            found[root] = names
    if len(found) > 1:
        ways = " or ".join(f"zk://{uri.hosts}{root}" for root in roots)
        raise SettingsError(
            f"the metadata service URI may mean {uri.root}, or {uri.pulsar_root} as for Pulsar's "
            f"metadata driver, and both have znodes of a BookKeeper cluster. Write {ways}"
        )
    if not found:
        raise UnavailableError(
            f"there is no BookKeeper cluster at {' or '.join(roots)} of {uri.hosts}: it has "
            f"neither {LAYOUT} nor {WITHOUT_LAYOUT[0]}. Check that the path of the metadata "
            "service URI is the ledgers root, and that ZooKeeper was not emptied"
        )
    ((root, names),) = found.items()
    if LAYOUT in names:
        return replace(uri, root=root, pulsar_root="")
    if missing := [name for name in WITHOUT_LAYOUT if name not in names]:
        raise UnavailableError(
            f"the BookKeeper cluster at {root} of {uri.hosts} is incomplete: it lacks "
            f"{', '.join((LAYOUT, *missing))}. If it is new, start its bookies; otherwise "
            "ZooKeeper has lost data: restore it from a backup"
        )
    if uri.layout is None and (other := await _foreign_layout(store, root)) is not None:
        raise UnavailableError(
            f"the BookKeeper cluster at {root} of {uri.hosts} has ledgers of the layout "
            f"{other.name.lower()}, but no {LAYOUT}: ZooKeeper has lost data. Restore it from a "
            "backup, or give the layout in the metadata service URI"
        )
    return replace(uri, root=root, pulsar_root="", layout=uri.layout or Layout.HIERARCHICAL)


async def _foreign_layout(store: MetadataStore, root: str) -> Layout | None:
    """Return another layout than the default if a ledger is found that has it (rule S8)."""
    if Layout.FLAT.ledgers_among(root, root, await children_if_any(store, root))[0]:
        return Layout.FLAT
    parent, long = f"{root}/000/0000", Layout.LONG_HIERARCHICAL
    for directory in [f"{parent}/{name}" for name in await children_if_any(store, parent)]:
        is_parent = long.is_parent(root, directory)
        if is_parent and not Layout.HIERARCHICAL.ids_below(root, directory):
            return long
    return None
