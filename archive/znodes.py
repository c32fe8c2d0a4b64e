"""The znodes of a cluster that are archived besides its ledgers, and how they are read.

They are read once a minute, one after the other. So they are not of one moment, unlike the ledgers.
Nothing ephemeral is archived: no registration, lock or vote.

The counters of ledger ids are no znodes with data: ZooKeeper counts the children that a znode ever
had. Their record has the number that the next ledger would get.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from typing import Final

from archive.format import Record, znode_key
from ledgers.errors import NoNodeError, UnauthorizedError
from ledgers.store import MetadataStore, children_if_any

ALONE: Final = (
    "LAYOUT",
    "INSTANCEID",
    "underreplication/lostBookieRecoveryDelay",
    "underreplication/disable",
    "underreplication/bookmender/feed",
    "underreplication/bookmender/archive",
)
"""Relative to the ledgers root."""
TREES: Final = ("cookies", "underreplication/bookmender/orders")
COUNTERS: Final = ("", "idgen")
"""Parents of the sequential znodes that yield ledger ids: in the flat layout, and in the others."""
LONG_COUNTERS: Final = "idgen-long"
HIGH_ORDER: Final = re.compile(r"HOB-([0-9]{10})")
IDS_OF: Final = "ids of "
"""Begin of the path in the record of a counter."""


async def read_znodes(
    store: MetadataStore, root: str, includes: Sequence[str] = ()
) -> AsyncIterator[Record]:
    """Yield the records of all these znodes. ``includes``: further trees, as absolute paths. Those
    that an ACL hides are left out. Raises UnavailableError."""
    for name in ALONE:
        if (record := await _read(store, f"{root}/{name}", name)) is not None:
            yield record
    for tree in (*TREES, *includes):
        waiting = [tree]
        while waiting:
            name = waiting.pop()
            path = name if name.startswith("/") else f"{root}/{name}"
            if (record := await _read(store, path, name)) is None:
                continue
            yield record
            waiting += [f"{name}/{child}" for child in await _children(store, path)]
    for name in COUNTERS:
        stat = await store.exists(f"{root}/{name}".rstrip("/"))
        if stat is not None and (name or await _is_flat(store, root)):
            creations = (stat.cversion + stat.child_count) // 2
            yield Record(znode_key(IDS_OF + name), stat.pzxid, b"%d" % creations)
    for name in await _children(store, f"{root}/{LONG_COUNTERS}"):
        if HIGH_ORDER.fullmatch(name):
            yield Record(znode_key(f"{LONG_COUNTERS}/{name}"), 0, b"")


async def _is_flat(store: MetadataStore, root: str) -> bool:
    record = await _read(store, f"{root}/LAYOUT", "LAYOUT")
    return record is not None and b"Flat" in (record.data or b"")


async def _read(store: MetadataStore, path: str, name: str) -> Record | None:
    try:
        data, stat = await store.get(path)
    except (NoNodeError, UnauthorizedError):
        return None
    return None if stat.ephemeral_owner else Record(znode_key(name), stat.mzxid, data)


async def _children(store: MetadataStore, path: str) -> list[str]:
    try:
        return sorted(await children_if_any(store, path))
    except UnauthorizedError:
        return []
