"""Generation of ledger ids, as in BookKeeper's ledger managers.

A short id is the number of a sequential child (ZkLedgerIdGenerator). When short ids run out, long
ids come from ``idgen-long`` (LongZkLedgerIdGenerator): x * 2^32 + y, where x is the number of a
``HOB-`` directory and y the number of a sequential child in it.
"""

from contextlib import suppress

from ledgers.errors import NodeExistsError, NoNodeError, NotEmptyError, UnavailableError
from ledgers.formats.layout import SHORT_ID_STOP, Layout
from ledgers.store import Create, MetadataStore
from ledgers.zookeeper.parents import create_with_parents

TRIES_MAX = 10
HIGH_ORDER_KEPT = 3
"""Number of newest ``HOB-`` directories to keep; older ones are deleted."""


async def new_ledger_id(store: MetadataStore, root: str, layout: Layout) -> int:
    """Return a new ledger id. Raises UnavailableError if the layout has no ids left."""
    if layout is Layout.FLAT:
        return await _short(store, f"{root}/ID-", layout)
    if layout is Layout.LEGACY_HIERARCHICAL:
        return await _short(store, f"{root}/idgen/ID-", layout)
    if await store.exists(f"{root}/idgen-long") is None:
        number = await _sequence(store, f"{root}/idgen/ID-")
        if 0 <= number < SHORT_ID_STOP:
            return number
        with suppress(NodeExistsError):
            await store.create(f"{root}/idgen-long")
    return await _long(store, f"{root}/idgen-long")


async def _short(store: MetadataStore, prefix: str, layout: Layout) -> int:
    number = await _sequence(store, prefix)
    if not 0 <= number < SHORT_ID_STOP:
        raise UnavailableError("no ledger id is left in this layout", layout=layout.name)
    return number


async def _long(store: MetadataStore, parent: str) -> int:
    for _ in range(TRIES_MAX):
        names = await store.children(parent)
        high_orders = sorted(
            int(n[4:]) for n in names if n.startswith("HOB-") and n[4:].isdecimal()
        )
        high = high_orders[-1] if high_orders else 1
        low = await _sequence(store, f"{parent}/HOB-{high:010d}/ID-")
        if 0 <= low < SHORT_ID_STOP:
            return (high << 32) + low
        with suppress(NodeExistsError):
            await store.create(f"{parent}/HOB-{high + 1:010d}")
        for old in high_orders[: -(HIGH_ORDER_KEPT - 1)]:
            with suppress(NoNodeError, NotEmptyError):
                await store.delete(f"{parent}/HOB-{old:010d}")
    raise UnavailableError("no ledger id could be generated", path=parent)


async def _sequence(store: MetadataStore, prefix: str) -> int:
    """Create a sequential child, delete it again, and return its number."""
    path = await create_with_parents(
        store, Create(path=prefix, is_ephemeral=True, is_sequential=True)
    )
    with suppress(NoNodeError):
        await store.delete(path)
    return int(path[len(prefix) :])
