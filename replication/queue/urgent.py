"""The leader's note of the most endangered ledgers: ``<ur>/bookmender/urgent``, versioned JSON.

A mark says how many bookies a ledger misses, not how many copies it has left, and a worker sees but
a part of a long queue. The leading auditor knows both, and names those that everybody should take
first. It is a hint, not the queue: ledgers on it may be done, or marked no more.
"""

import json
from collections.abc import Sequence

from ledgers.errors import UnauthorizedError
from ledgers.store import MetadataStore
from replication.cluster.own_state import read_record, urgent_path, wholes

URGENT_MAX = 1_000


async def read_urgent(store: MetadataStore, ur: str) -> tuple[int, ...]:
    """Most endangered first; empty also when a later release wrote what we cannot read."""
    try:
        ledger_ids = await read_record(
            store, urgent_path(ur), lambda note: wholes(note, "ledger_ids")
        )
    except UnauthorizedError:  # it is a hint
        return ()
    return (ledger_ids or ())[:URGENT_MAX]


def urgent_to_bytes(ledger_ids: Sequence[int], *, written_ms: int) -> bytes:
    """The first ``URGENT_MAX`` of them. ``written_ms``: wall-clock time, for people."""
    record = {
        "version": 1,
        "written_ms": written_ms,
        "ledger_ids": list(ledger_ids[:URGENT_MAX]),
    }
    return json.dumps(record).encode()
