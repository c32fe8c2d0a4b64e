"""A session of ZooKeeper's that can only read, for as long as something is looked up."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ledgers.formats.layout import MetadataUri
from ledgers.read_only import ReadOnlyStore
from ledgers.store import MetadataStore
from ledgers.zookeeper.store import ZooKeeperStore


@asynccontextmanager
async def read_session(
    metadata_service_uri: str,
) -> AsyncIterator[tuple[MetadataStore, MetadataUri]]:
    """The session, and the URI taken apart. Raises UnavailableError, SettingsError."""
    uri = MetadataUri.parse(metadata_service_uri)
    store = ReadOnlyStore(await ZooKeeperStore.open(uri.hosts))
    try:
        yield store, uri
    finally:
        await store.close()
