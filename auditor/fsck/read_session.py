"""ZooKeeper sessions: an executor's, and short read-only ones."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from auditor.fsck.levels import DEFAULT_TIMEOUTS, SessionTimeouts
from ledgers.formats.layout import MetadataUri
from ledgers.read_only import ReadOnlyStore
from ledgers.store import MetadataStore
from ledgers.zookeeper.store import ZooKeeperStore


async def open_session(uri: MetadataUri, timeouts: SessionTimeouts) -> ZooKeeperStore:
    """Return a new session, which the caller must close. Raises UnavailableError."""
    return await ZooKeeperStore.open(
        uri.hosts, session_timeout_s=timeouts.session_s, connect_timeout_s=timeouts.connect_s
    )


@asynccontextmanager
async def read_session(
    metadata_service_uri: str, timeouts: SessionTimeouts = DEFAULT_TIMEOUTS
) -> AsyncIterator[tuple[MetadataStore, MetadataUri]]:
    """Yield a read-only store and the parsed URI. Raises UnavailableError, SettingsError."""
    uri = MetadataUri.parse(metadata_service_uri)
    store = ReadOnlyStore(await open_session(uri, timeouts))
    try:
        yield store, uri
    finally:
        await store.close()
