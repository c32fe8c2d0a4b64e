"""Sessions of ZooKeeper's: an executor's, and one that can only read, for as long as something is
looked up."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from auditor.fsck.levels import DEFAULT_TIMEOUTS, SessionTimeouts
from ledgers.formats.layout import MetadataUri
from ledgers.read_only import ReadOnlyStore
from ledgers.store import MetadataStore
from ledgers.zookeeper.store import ZooKeeperStore


async def open_session(uri: MetadataUri, timeouts: SessionTimeouts) -> ZooKeeperStore:
    """To be closed. Raises UnavailableError."""
    return await ZooKeeperStore.open(
        uri.hosts, session_timeout_s=timeouts.session_s, connect_timeout_s=timeouts.connect_s
    )


@asynccontextmanager
async def read_session(
    metadata_service_uri: str, timeouts: SessionTimeouts = DEFAULT_TIMEOUTS
) -> AsyncIterator[tuple[MetadataStore, MetadataUri]]:
    """The session, and the URI taken apart. Raises UnavailableError, SettingsError."""
    uri = MetadataUri.parse(metadata_service_uri)
    store = ReadOnlyStore(await open_session(uri, timeouts))
    try:
        yield store, uri
    finally:
        await store.close()
