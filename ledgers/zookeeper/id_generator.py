"""New ledger ids, as each of BookKeeper's ledger managers generates them.

Short ones are the counter of a parent's sequential children (ZkLedgerIdGenerator); once these run
out, long ones come from ``idgen-long`` (LongZkLedgerIdGenerator): x * 2^32 + y, with x the number
of a ``HOB-`` directory and y the counter within it.
"""

from contextlib import suppress

from ledgers.errors import NodeExistsError, NoNodeError, NotEmptyError, UnavailableError
from ledgers.formats.layout import SHORT_ID_STOP, Layout
from ledgers.store import Create, MetadataStore
from ledgers.zookeeper.parents import create_with_parents

TRIES_MAX = 10
HIGH_ORDER_KEPT = 3
"""Older ``HOB-`` directories than these are deleted."""


async def new_ledger_id(store: MetadataStore, root: str, layout: Layout) -> int:
    """Raises UnavailableError when the layout has no id left to give."""
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
    """The number that the store gives to a new child, which is deleted again."""
    path = await create_with_parents(
        store, Create(path=prefix, is_ephemeral=True, is_sequential=True)
    )
    with suppress(NoNodeError):
        await store.delete(path)
    return int(path[len(prefix) :])
