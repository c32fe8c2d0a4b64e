"""What we keep in ZooKeeper for ourselves, below ``<ur>/bookmender``: versioned JSON.

``nodes/<uuid>`` one ephemeral znode a session (``membership``); ``waiting/<ledger id>`` why a
marked ledger is not being repaired now; ``orders/…`` what an operator wants (``orders``);
``ledgers/…`` a tree of marks like the shared one, of ledgers that Java would find whole: those of
draining bookies (rule S16); ``urgent`` the leader's note of the most endangered (``urgent``).
Java's payloads never carry a field of ours, so whatever it does not know of stands here. A reader
skips what it cannot read: it is a later release's.
"""

import json
from typing import Any

from ledgers.errors import NoNodeError
from ledgers.store import MetadataStore


def own_path(ur: str) -> str:
    return f"{ur}/bookmender"


def nodes_path(ur: str) -> str:
    return f"{own_path(ur)}/nodes"


def waiting_path(ur: str, ledger_id: int | None = None) -> str:
    parent = f"{own_path(ur)}/waiting"
    return parent if ledger_id is None else f"{parent}/{ledger_id}"


def orders_path(ur: str) -> str:
    return f"{own_path(ur)}/orders"


def urgent_path(ur: str) -> str:
    return f"{own_path(ur)}/urgent"


async def read_json(store: MetadataStore, path: str) -> dict[str, Any] | None:
    """The object in a znode of ours; None when the znode is gone or holds something else."""
    try:
        data, _ = await store.get(path)
        record = json.loads(data)
    except (NoNodeError, ValueError):
        return None
    return record if isinstance(record, dict) else None
