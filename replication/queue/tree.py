"""The znodes that must stand before anything can be queued: Java's, and ours below them."""

from ledgers.errors import NodeExistsError
from ledgers.store import MetadataStore
from replication.cluster.membership import ensure
from replication.cluster.own_state import (
    nodes_path,
    orders_path,
    own_path,
    recent_copies_path,
    waiting_path,
)
from replication.queue import payloads


async def prepare_tree(store: MetadataStore, ur: str) -> None:
    """Create what is missing. Raises SettingsError when the queue has a layout that we do not
    know."""
    await _agree_on_layout(store, ur)
    for path in (
        payloads.marks_path(ur),
        payloads.locks_path(ur),
        payloads.election_path(ur),
        nodes_path(ur),
        waiting_path(ur),
        recent_copies_path(ur),
        orders_path(ur),
        payloads.marks_path(own_path(ur)),
    ):
        await ensure(store, path)


async def _agree_on_layout(store: MetadataStore, ur: str) -> None:
    path = payloads.layout_path(ur)
    try:
        await store.create(path, payloads.LAYOUT_DATA, with_parents=True)
    except NodeExistsError:
        data, _ = await store.get(path)
        payloads.check_layout(data)
