"""Creating a znode together with those above it, which others may be deleting at the same time."""

from contextlib import suppress

from ledgers.errors import NodeExistsError, NoNodeError, UnavailableError
from ledgers.store import Create, MetadataStore

TRIES_MAX = 10
"""Whoever deletes a ledger also deletes the znodes above it that it leaves empty, so that a parent
made here may be gone before its child is made."""


async def create_with_parents(store: MetadataStore, create: Create) -> str:
    """As ``MetadataStore.create``; parents are persistent and empty."""
    for _ in range(TRIES_MAX):
        try:
            return await store.create(
                create.path,
                create.data,
                is_ephemeral=create.is_ephemeral,
                is_sequential=create.is_sequential,
            )
        except NoNodeError:
            await _ensure(store, create.path.rpartition("/")[0])
    raise UnavailableError("its parents vanish as fast as they are made", path=create.path)


async def _ensure(store: MetadataStore, path: str) -> None:
    with suppress(NodeExistsError):
        await create_with_parents(store, Create(path=path))
