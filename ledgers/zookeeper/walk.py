"""Walking the tree of ledgers: every id, complete or an error (rule S8).

Several directories are listed at a time, never more than a bound. A directory that vanishes during
the walk has become empty: whoever deletes its last ledger deletes it too.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence

from ledgers.errors import NoNodeError, UnavailableError
from ledgers.formats.layout import Layout
from ledgers.store import MetadataStore

LISTINGS_AT_ONCE = 32


async def walk_ledger_ids(
    store: MetadataStore, root: str, layout: Layout
) -> AsyncIterator[Sequence[int]]:
    """Ids of one directory at a time, ascending within it. Raises UnavailableError."""
    await store.sync(root)
    directories = deque([root])
    while directories:
        count = min(LISTINGS_AT_ONCE, len(directories))
        batch = [directories.popleft() for _ in range(count)]
        listings = await asyncio.gather(*(_children(store, root, path) for path in batch))
        for path, names in zip(batch, listings, strict=True):
            below = [f"{path}/{name}" for name in names]
            directories.extend(child for child in sorted(below) if layout.is_parent(root, child))
            ledger_ids = [i for child in below if (i := layout.ledger_id(root, child)) is not None]
            if ledger_ids:
                yield sorted(ledger_ids)


async def _children(store: MetadataStore, root: str, path: str) -> list[str]:
    try:
        return await store.children(path)
    except NoNodeError as error:
        if path == root:
            raise UnavailableError("the ledgers root is gone", path=root) from error
        return []
