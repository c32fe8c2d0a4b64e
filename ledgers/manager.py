"""The ledgers' metadata in the store: read, created, changed by compare-and-set, deleted, listed.

BookKeeper's word for this is ledger manager. Every overwrite names the version that its decision
was made from (rule S2), and hands the bytes before and after to the journal first.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress

from msgspec import Struct

from ledgers.errors import (
    ConflictError,
    CorruptionError,
    LockLostError,
    NodeExistsError,
    NoNodeError,
    NoSuchLedgerError,
    NotEmptyError,
    SettingsError,
    UnavailableError,
    UnknownOutcomeError,
)
from ledgers.formats.layout import Layout, MetadataUri, parse_layout
from ledgers.formats.metadata_codec import parse_metadata, serialize_metadata
from ledgers.metadata import LedgerMetadata
from ledgers.store import Check, Create, MetadataStore, MultiFailed, Operation, SetData, Stat
from ledgers.zookeeper.id_generator import new_ledger_id
from ledgers.zookeeper.parents import create_with_parents
from ledgers.zookeeper.walk import OnStray, ledger_trees, walk_ledger_ids

Journal = Callable[[int, bytes, bytes], Awaitable[None]]
"""Receives ledger id, bytes before, bytes after, and keeps them; an error from it keeps the write
from happening."""


WRITE_SLACK_BYTES = 8 * 1024
"""For the other operations of a transaction, and for longer bookie ids."""


class VersionedMetadata(Struct, frozen=True, kw_only=True):
    """A ledger's metadata as it was read or written. ``data``: the znode's bytes."""

    ledger_id: int
    metadata: LedgerMetadata
    stat: Stat
    data: bytes

    @property
    def version(self) -> int:
        return self.stat.version


class LedgerManager:
    """The ledgers below ``root``, laid out as ``layout`` says."""

    def __init__(
        self, store: MetadataStore, root: str, layout: Layout, *, journal: Journal | None = None
    ) -> None:
        self._store, self.root, self.layout = store, root, layout
        self._journal = journal

    @classmethod
    async def open(
        cls, store: MetadataStore, uri: MetadataUri, *, journal: Journal | None = None
    ) -> "LedgerManager":
        """For the cluster that ``uri`` names.

        Raises UnavailableError when there is no cluster: the URI may name another path, or
        ZooKeeper have lost what it had. SettingsError: its LAYOUT is not what the URI says (rule
        S8), or the URI may mean another cluster.
        """
        await _refuse_pulsar_root(store, uri)
        try:
            data, _ = await store.get(f"{uri.root}/LAYOUT")
        except NoNodeError as error:
            raise UnavailableError(
                f"there is no BookKeeper cluster at {uri.root} of {uri.hosts}: it has no LAYOUT; "
                "is the path of the metadata service URI the ledgers root, or was ZooKeeper emptied?"
            ) from error
        layout = parse_layout(data)
        if uri.layout not in (None, layout):
            raise SettingsError(
                f"the metadata service URI says {uri.layout.name.lower()}, but the cluster at "
                f"{uri.root} is {layout.name.lower()}; leave the layout out of the URI, or correct it"
            )
        return cls(store, uri.root, layout, journal=journal)

    def path(self, ledger_id: int) -> str:
        """The ledger's znode. Raises SettingsError for an id that the layout cannot hold."""
        return self.layout.path(self.root, ledger_id)

    async def sync(self, ledger_id: int) -> None:
        """Later reads of the ledger see what was written anywhere before this call."""
        with suppress(SettingsError):  # of an id that the layout cannot hold nothing was written
            await self._store.sync(self.path(ledger_id))

    async def read(self, ledger_id: int) -> VersionedMetadata:
        """Raises NoSuchLedgerError, CorruptionError."""
        try:
            data, stat = await self._store.get(self.path(ledger_id))
        except (NoNodeError, SettingsError) as error:  # the latter: the layout cannot hold the id
            raise NoSuchLedgerError("no such ledger", ledger_id=ledger_id) from error
        try:
            metadata = parse_metadata(data)
        except CorruptionError as error:
            raise CorruptionError(
                f"its metadata cannot be read: {error}", ledger_id=ledger_id
            ) from error
        return VersionedMetadata(ledger_id=ledger_id, metadata=metadata, stat=stat, data=data)

    async def find(self, ledger_id: int) -> VersionedMetadata | None:
        """None for a ledger that is gone: believed only after a sync and a second read (rule S8).

        Raises CorruptionError.
        """
        try:
            return await self.read(ledger_id)
        except NoSuchLedgerError:
            await self.sync(ledger_id)
        try:
            return await self.read(ledger_id)
        except NoSuchLedgerError:
            return None

    async def create(self, ledger_id: int, metadata: LedgerMetadata) -> VersionedMetadata:
        """Raises NodeExistsError: the id is taken, or, after a lost reply, perhaps by ourselves."""
        data = serialize_metadata(metadata)
        await create_with_parents(self._store, Create(path=self.path(ledger_id), data=data))
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
        """Compare-and-set on the version of ``read_as``; ``guards`` must hold too (rule S3).

        ``beside`` is applied in the same transaction. Raises ConflictError, also where ``beside``
        does not apply any more; NoSuchLedgerError, UnknownOutcomeError (the reply was lost: read);
        LockLostError when a guard does not hold.
        """
        operation = await self.write_operation(ledger_id, metadata, read_as=read_as)
        try:
            results = await self._store.multi([*guards, operation, *beside])
        except MultiFailed as failure:
            if failure.index < len(guards):
                raise LockLostError(
                    "what must hold for the write does not hold any more", ledger_id=ledger_id
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
        """The write as part of a transaction of the caller's; it is in the journal from now on."""
        data = serialize_metadata(metadata)
        return await self.put_back_operation(
            ledger_id, data, present=read_as.data, version=read_as.version
        )

    def has_room_for(self, versioned: VersionedMetadata) -> bool:
        """Whether this metadata could be written again, changed a little, in a transaction with
        others."""
        return len(versioned.data) + WRITE_SLACK_BYTES <= self.request_bytes_max

    @property
    def request_bytes_max(self) -> int:
        """The largest request that the store sends."""
        return self._store.request_bytes_max

    def check(self, versioned: VersionedMetadata) -> Check:
        """Holds as long as the metadata has not been written since it was read."""
        return Check(path=self.path(versioned.ledger_id), version=versioned.version)

    async def put_back_operation(
        self, ledger_id: int, data: bytes, *, present: bytes, version: int
    ) -> SetData:
        """Likewise, of bytes that were the ledger's metadata once, in place of ``present``."""
        if self._journal is not None:
            await self._journal(ledger_id, present, data)
        return SetData(path=self.path(ledger_id), data=data, version=version)

    async def delete(self, ledger_id: int, *, version: int) -> None:
        """And the parents that it leaves empty, as BookKeeper does. A ledger that is gone is
        success.

        Raises ConflictError, UnknownOutcomeError.
        """
        path = self.path(ledger_id)
        try:
            await self._store.delete(path, version=version)
        except NoNodeError:
            return
        if self.layout in (Layout.HIERARCHICAL, Layout.LONG_HIERARCHICAL):
            await self._delete_empty_parents(path)

    async def _delete_empty_parents(self, path: str) -> None:
        while (path := path.rpartition("/")[0]) != self.root:
            try:
                await self._store.delete(path)
            except (NotEmptyError, NoNodeError, UnknownOutcomeError):
                return

    async def new_ledger_id(self) -> int:
        """An id that nobody was given before."""
        return await new_ledger_id(self._store, self.root, self.layout)

    def ledger_ids(self) -> AsyncIterator[Sequence[int]]:
        """All ledgers, a leaf directory at a time; fails rather than comes back short (rule S8)."""
        return walk_ledger_ids(self._store, self.root, self.layout)

    def ledger_ids_of(self, tree: str, *, on_stray: OnStray) -> AsyncIterator[Sequence[int]]:
        """Likewise those of one of ``trees``, ascending from one directory to the next."""
        return walk_ledger_ids(self._store, self.root, self.layout, tree=tree, on_stray=on_stray)

    async def trees(self) -> list[str]:
        """The topmost znodes below which all ledgers lie, and, but for a flat layout, nothing
        else."""
        return await ledger_trees(self._store, self.root, self.layout)


async def _refuse_pulsar_root(store: MetadataStore, uri: MetadataUri) -> None:
    """Raise SettingsError where Pulsar's driver keeps a cluster at another root than ``uri.root``.

    Its bookies register there. At ``uri.root`` may be nothing, or the empty cluster of an earlier
    set-up, in which every ledger would be found whole.
    """
    if uri.pulsar_root and await store.exists(f"{uri.pulsar_root}/LAYOUT") is not None:
        raise SettingsError(
            f"the metadata service URI may mean {uri.root} or {uri.pulsar_root}, where Pulsar's metadata driver keeps "
            f"a cluster; write zk://{uri.hosts}{uri.pulsar_root} for that cluster, or zk://{uri.hosts}{uri.root}"
        )
