"""Ledgers whose end cannot be proven: ``<ur>/bookmender/unproven/<ledger id>``, versioned JSON.

Once what is left of such a ledger has its copies again it is marked no more, and nobody tries its
end anew before a bookie of it goes, or a person asks. So whoever tried it in vain leaves a record,
for people. A ledger that was closed meanwhile, or deleted, is passed over by readers, and its
record is deleted by an idle worker.
"""

import asyncio
import json
import random
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from ledgers.clock import Clock
from ledgers.errors import CorruptionError, NoNodeError, NoSuchLedgerError, UnauthorizedError
from ledgers.manager import LedgerManager
from ledgers.operations.tasks import gather_in_parts
from ledgers.store import Delete, MetadataStore
from replication.cluster.membership import ensure
from replication.cluster.own_state import (
    ledger_id_of_name,
    names_in,
    own_path,
    read_record,
    text,
    time_ms,
)
from replication.queue.batching import Batcher

READ_MAX = 1_000
"""Ledgers that are looked at again in one go; further ones are taken for what their records say."""
READS_AT_ONCE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class UnprovenEnd:
    """``detail``: a sentence for an operator. ``tried_ms``: wall-clock, of the last try."""

    ledger_id: int
    detail: str
    tried_ms: int

    def to_json(self) -> bytes:
        record = {
            "version": 1,
            "ledger_id": self.ledger_id,
            "detail": self.detail,
            "tried_ms": self.tried_ms,
        }
        return json.dumps(record).encode()

    @classmethod
    def from_record(cls, ledger_id: int, record: dict[str, Any]) -> Self:
        """Raises CorruptionError."""
        return cls(
            ledger_id=ledger_id,
            detail=text(record, "detail"),
            tried_ms=time_ms(record, "tried_ms"),
        )


def unproven_path(ur: str, ledger_id: int | None = None) -> str:
    parent = f"{own_path(ur)}/unproven"
    return parent if ledger_id is None else f"{parent}/{ledger_id}"


async def read_unproven_end(store: MetadataStore, ur: str, ledger_id: int) -> UnprovenEnd | None:
    """What the last try left, be the ledger closed by now or not; None where that cannot be read
    either."""
    parse = partial(UnprovenEnd.from_record, ledger_id)
    return await read_record(store, unproven_path(ur, ledger_id), parse)


async def unproven_ledger_ids(store: MetadataStore, manager: LedgerManager, ur: str) -> list[int]:
    """Those that are not closed yet, by id."""
    recorded = await _recorded(store, ur)
    looked_at, rest = recorded[:READ_MAX], recorded[READ_MAX:]
    return await _still_open(manager, looked_at) + rest


async def unproven_among(
    store: MetadataStore, manager: LedgerManager, ur: str, ledger_ids: Collection[int]
) -> list[UnprovenEnd]:
    """What was left of those of these ledgers that are not closed yet, by id."""
    recorded = set(await _recorded(store, ur)).intersection(ledger_ids)
    still_open = await _still_open(manager, sorted(recorded))
    ends = await asyncio.gather(*(read_unproven_end(store, ur, i) for i in still_open))
    return [end for end in ends if end is not None]


class UnprovenEnds:
    """The records, for a worker: ``batcher``'s guards prove its session (rule S3)."""

    def __init__(
        self,
        store: MetadataStore,
        batcher: Batcher,
        ur: str,
        *,
        manager: LedgerManager,
        clock: Clock,
    ) -> None:
        self._store, self._batcher, self._ur = store, batcher, ur
        self._manager = manager
        self._clock = clock

    async def note(self, ledger_id: int, detail: str) -> None:
        """In place of what an earlier try left."""
        end = UnprovenEnd(ledger_id=ledger_id, detail=detail, tried_ms=self._clock.wall_ms())
        path, data = unproven_path(self._ur, ledger_id), end.to_json()
        try:
            await self._batcher.put(path, data)
        except NoNodeError:  # the first that there is
            await ensure(self._store, unproven_path(self._ur))
            await self._batcher.put(path, data)

    async def tidy(self, rng: random.Random) -> None:
        """Delete the records of ledgers that are closed, or gone: some of them, where there are
        many."""
        recorded = await _recorded(self._store, self._ur)
        some = rng.sample(recorded, min(len(recorded), READ_MAX))
        over = set(some).difference(await _still_open(self._manager, some))
        await asyncio.gather(*map(self._delete, sorted(over)))

    async def _delete(self, ledger_id: int) -> None:
        with suppress(NoNodeError):  # another node's hand
            await self._batcher.apply(Delete(path=unproven_path(self._ur, ledger_id)))


async def _recorded(store: MetadataStore, ur: str) -> list[int]:
    names = await names_in(store, unproven_path(ur))
    return sorted(i for i in map(ledger_id_of_name, names) if i is not None)


async def _still_open(manager: LedgerManager, ledger_ids: Sequence[int]) -> list[int]:
    """What cannot be read may be open."""

    async def is_open(ledger_id: int) -> bool:
        try:
            return not (await manager.read(ledger_id)).metadata.is_closed
        except NoSuchLedgerError:
            return False
        except (CorruptionError, UnauthorizedError):
            return True

    are_open = await gather_in_parts(is_open, ledger_ids, at_once=READS_AT_ONCE)
    return [i for i, is_so in zip(ledger_ids, are_open, strict=True) if is_so]
