"""Helpers for the tests of ``LedgerManager``."""

from collections.abc import Sequence

import pytest

from ledgers.codec.layout import Layout, MetadataUri, serialize_layout
from ledgers.manager import Journal, LedgerManager
from ledgers.model import BookieId, LedgerMetadata, Segment
from ledgers.store import MetadataStore
from tests.contract.metadata_stores import Backend

LAYOUTS = pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.name.lower())
LONG_LAYOUTS = pytest.mark.parametrize(
    "layout",
    [Layout.HIERARCHICAL, Layout.LONG_HIERARCHICAL],
    ids=lambda layout: layout.name.lower(),
)
BOOKIES = tuple(BookieId(f"bookie-{number}:3181") for number in (1, 2, 3))
OPEN = LedgerMetadata(
    ensemble_size=3,
    write_quorum=2,
    ack_quorum=2,
    password=b"secret",
    c_token=42,
    segments=(Segment(first_entry_id=0, ensemble=BOOKIES),),
)
CLOSED = OPEN.closed(last_entry_id=9, length=1_000)


def uri(backend: Backend, layout: Layout | None = None) -> MetadataUri:
    return MetadataUri(hosts="127.0.0.1:2181", root=backend.root, layout=layout)


async def new_manager(
    backend: Backend,
    store: MetadataStore,
    layout: Layout = Layout.HIERARCHICAL,
    *,
    journal: Journal | None = None,
) -> LedgerManager:
    """Format a cluster and return a manager of it."""
    await store.create(f"{backend.root}/LAYOUT", serialize_layout(layout))
    await store.create(f"{backend.root}/available/readonly", with_parents=True)
    return await LedgerManager.open(store, uri(backend), journal=journal)


async def all_ids(manager: LedgerManager) -> list[Sequence[int]]:
    return [ledger_ids async for ledger_ids in manager.ledger_ids()]
