"""The walk over the tree of ledgers. It returns every ledger id or raises an error (rule S8).

At most ``LISTINGS_AT_ONCE`` directories are listed at a time. A directory that vanishes during the
walk was empty: a client that deletes the last ledger of a directory deletes the directory too.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from ledgers.errors import NoNodeError, UnauthorizedError, UnavailableError
from ledgers.formats.layout import Layout
from ledgers.store import MetadataStore

LISTINGS_AT_ONCE = 32


RESERVED = frozenset(
    ("available", "cookies", "underreplication", "LAYOUT", "INSTANCEID", "idgen", "idgen-long")
)
"""Other znodes that BookKeeper keeps directly below the ledgers root."""
COUNTER_PREFIX = "ID-"
"""Name prefix of the sequential znodes from which a flat layout generates ledger ids."""

OnStray = Callable[[str], None]
"""Called with the path of a znode that is neither a ledger nor a directory of ledgers."""


async def walk_ledger_ids(
    store: MetadataStore,
    root: str,
    layout: Layout,
    *,
    tree: str | None = None,
    on_stray: OnStray = lambda path: None,
) -> AsyncIterator[Sequence[int]]:
    """Yield the ledger ids of one directory at a time, ascending from one directory to the next.

    ``tree``: walk only this directory below the root (``ledger_trees``). Raises UnavailableError.
    If an ACL denied access to a directory, raises UnauthorizedError after all other directories.
    """
    await store.sync(tree or root)
    directories = deque([tree or root])
    refusal: UnauthorizedError | None = None
    while directories:
        count = min(LISTINGS_AT_ONCE, len(directories))
        batch = [directories.popleft() for _ in range(count)]
        listings = await asyncio.gather(*(_if_allowed(store, root, path) for path in batch))
        for path, names in zip(batch, listings, strict=True):
            if isinstance(names, UnauthorizedError):
                refusal = refusal or names
                continue
            ledger_ids, others = layout.ledgers_among(root, path, names)
            for child in sorted(f"{path}/{name}" for name in others):
                if layout.is_parent(root, child):
                    directories.append(child)
                elif path != root or not _is_reserved(child[len(root) + 1 :]):
                    on_stray(child)
            if ledger_ids:
                yield sorted(ledger_ids)
    if refusal is not None:
        raise refusal


async def ledger_trees(store: MetadataStore, root: str, layout: Layout) -> list[str]:
    """Return the directories directly below the root that hold all ledgers.

    For a flat layout, return the root. The other directories hold no ledgers, but marks, locks and
    lists of bookies, which change all the time. Raises UnavailableError.
    """
    if layout is Layout.FLAT:
        return [root]
    await store.sync(root)
    children = [f"{root}/{name}" for name in await _children(store, root, root)]
    return sorted(child for child in children if layout.is_parent(root, child))


def _is_reserved(name: str) -> bool:
    return name in RESERVED or name.startswith(COUNTER_PREFIX)


async def _if_allowed(
    store: MetadataStore, root: str, path: str
) -> Sequence[str] | UnauthorizedError:
    try:
        return await _children(store, root, path)
    except UnauthorizedError as error:
        return error


async def _children(store: MetadataStore, root: str, path: str) -> list[str]:
    try:
        return await store.children(path)
    except NoNodeError as error:
        if path == root:
            raise UnavailableError("the ledgers root is gone", path=root) from error
        return []
