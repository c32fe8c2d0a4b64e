"""The leader's note of the most endangered ledgers: ``<ur>/bookmender/urgent``, versioned JSON.

A mark says how many bookies a ledger misses, not how many copies it has left, and a worker sees but a
part of a long queue. The leading auditor knows both, and names those that everybody should take first.
It is a hint, not the queue: ledgers on it may be done, or marked no more.
"""

import json
from collections.abc import Sequence

from ledgers.clock import Clock
from ledgers.store import ANY_VERSION, Create, MetadataStore, MultiFailed, SetData
from replication.batching import Batcher
from replication.own_state import read_json, urgent_path

URGENT_MAX = 1_000


async def read_urgent(store: MetadataStore, ur: str) -> tuple[int, ...]:
    """Most endangered first; empty also when a later release wrote what we cannot read."""
    record = await read_json(store, urgent_path(ur))
    ledger_ids = None if record is None else record.get("ledger_ids")
    if not isinstance(ledger_ids, list):
        return ()
    return tuple(i for i in ledger_ids[:URGENT_MAX] if type(i) is int and 0 <= i < 2**63)


class UrgentNote:
    """Written through ``batcher``, whose guards prove the leadership (rule S9)."""

    def __init__(self, store: MetadataStore, batcher: Batcher, ur: str, clock: Clock) -> None:
        self._store, self._batcher, self._ur, self._clock = store, batcher, ur, clock

    async def write(self, ledger_ids: Sequence[int]) -> None:
        """The first ``URGENT_MAX`` of them, most endangered first; what stood there goes."""
        if not ledger_ids and not await read_urgent(self._store, self._ur):
            return
        record = {
            "version": 1,
            "written_ms": self._clock.wall_ms(),
            "ledger_ids": list(ledger_ids[:URGENT_MAX]),
        }
        path, data = urgent_path(self._ur), json.dumps(record).encode()
        is_there = await self._store.exists(path) is not None
        operation = (
            SetData(path=path, data=data, version=ANY_VERSION)
            if is_there
            else Create(path=path, data=data)
        )
        try:
            await self._batcher.commit([operation])
        except MultiFailed as failure:
            raise failure.cause from failure
