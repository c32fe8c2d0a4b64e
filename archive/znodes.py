"""Reads what is archived from ZooKeeper: ledgers, and the other znodes of a cluster.

The others are read once a minute, one after the other. So they are not of one moment, unlike the
ledgers. Nothing ephemeral is archived: no registration, lock or vote.

The counters of ledger ids are no znodes with data: ZooKeeper counts the children that a znode ever
had. Their record has the number that the next ledger would get.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from typing import Final

from archive.format import Record, ledger_record, znode_key
from ledgers.codec.layout import Layout
from ledgers.errors import NoNodeError, UnauthorizedError
from ledgers.manager import LedgerManager
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


async def read_ledgers(
    store: MetadataStore, manager: LedgerManager, ledger_ids: Sequence[int]
) -> dict[int, Record]:
    """Return the present metadata, readable or not, without ledgers that an ACL hides. A ledger
    that does not exist has version 0. Raises UnavailableError."""
    found = {}
    replies = await store.get_each(list(map(manager.path, ledger_ids)))
    for ledger_id, reply in zip(ledger_ids, replies, strict=True):
        if isinstance(reply, NoNodeError):
            found[ledger_id] = ledger_record(ledger_id, version=0, data=None)
        elif not isinstance(reply, UnauthorizedError):
            data, stat = reply
            found[ledger_id] = ledger_record(ledger_id, version=stat.mzxid, data=data)
    return found


async def read_znodes(
    store: MetadataStore, manager: LedgerManager, includes: Sequence[str] = ()
) -> AsyncIterator[Record]:
    """Yield the records of all these znodes. ``includes``: further trees, as absolute paths. Those
    that an ACL hides are left out. Raises UnavailableError."""
    root = manager.root
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
        if stat is not None and (name or manager.layout is Layout.FLAT):
            creations = (stat.cversion + stat.child_count) // 2
            yield Record(znode_key(IDS_OF + name), stat.pzxid, b"%d" % creations)
    for name in await _children(store, f"{root}/{LONG_COUNTERS}"):
        if HIGH_ORDER.fullmatch(name):
            yield Record(znode_key(f"{LONG_COUNTERS}/{name}"), 0, b"")


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
