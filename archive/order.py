"""The order to archive, and what the archiving node says of its work; both are znodes."""

from __future__ import annotations

from dataclasses import dataclass

from ledgers.errors import NodeExistsError
from ledgers.store import ANY_VERSION, MetadataStore
from replication.records import Count, Record, Stored, TimeMs, read_record, read_stored
from replication.znodes import ClusterPaths

RETENTION_DEFAULT_S = 30 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveOrder(Record):
    """Archive all metadata. ``url``: of the place. ``includes``: further trees of znodes, as
    absolute paths. ``base_ordered_ms``: a base that is older is followed by another."""

    url: str
    since_ms: TimeMs
    by: str = ""
    includes: tuple[str, ...] = ()
    retention_s: Count = RETENTION_DEFAULT_S
    base_ordered_ms: TimeMs = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveState(Record):
    """How far the archive at ``url`` is, as the archiving node wrote it at ``written_ms``.

    ``archived_ms``: everything up to this time of the feed is archived; 0: nothing. ``number``: of
    the last file. ``denied_count``: changes that an ACL hid. ``error``: why nothing is archived
    now; empty if it is.
    """

    node: str
    written_ms: TimeMs
    url: str = ""
    archived_ms: TimeMs = 0
    number: Count = 0
    denied_count: Count = 0
    error: str = ""


async def put(store: MetadataStore, path: str, record: Record) -> None:
    """Create a znode, or write over it."""
    try:
        await store.create(path, record.to_json(), with_parents=True)
    except NodeExistsError:
        await store.set(path, record.to_json(), version=ANY_VERSION)


async def read_order(store: MetadataStore, paths: ClusterPaths) -> Stored[ArchiveOrder]:
    """Raises UnavailableError."""
    return await read_stored(store, paths.archive, ArchiveOrder.parse)


async def read_state(
    store: MetadataStore, paths: ClusterPaths, order: ArchiveOrder
) -> ArchiveState | None:
    """Return the state of this order; None if no node has written one that is readable. Raises
    UnavailableError."""
    state = await read_record(store, paths.archive_state, ArchiveState.parse)
    is_its_own = state and state.url == order.url and state.written_ms >= order.since_ms
    return state if is_its_own else None
