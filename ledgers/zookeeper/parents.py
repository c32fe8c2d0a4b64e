"""Creation of a znode with its parents, while other clients may delete these parents."""

from contextlib import suppress

from ledgers.errors import NodeExistsError, NoNodeError, UnavailableError
from ledgers.store import Create, MetadataStore

TRIES_MAX = 10
"""A client that deletes a ledger also deletes the parents that this leaves empty. So a parent that
is created here may be deleted before its child is created."""


async def create_with_parents(store: MetadataStore, create: Create) -> str:
    """Do ``MetadataStore.create``, and create missing parents, persistent and empty.

    1. If creating the znode fails for lack of its parent, create the parent (and its parents).
    2. Try again. Another client may have deleted the parent in between, so repeat from 1.

    Raises UnavailableError after ``TRIES_MAX`` tries, and what ``create`` raises.
    """
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
