"""Open ledgers as they were last seen: ``<ur>/bookmender/idle``, versioned JSON.

Whether one is idle only time can tell, more of it than a leader may last: so what was seen is kept.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ledgers.errors import CorruptionError
from ledgers.operations.last_entries import NO_ENTRY
from ledgers.store import MetadataStore
from replication.cluster.own_state import (
    TIME_MS_MAX,
    WHOLE_MAX,
    as_whole,
    own_path,
    read_record,
)
from replication.queue.batching import Batcher

SIGHTINGS_MAX = 10_000
"""Kept: those of the longest standing. About 300 kB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """An open ledger has got no entry since ``since_ms`` (wall clock), nor was its metadata
    written.

    ``last_entry_id``: the last that its bookies told of; -1: none.
    """

    last_entry_id: int
    since_ms: int

    def idle_s(self, now_ms: int) -> float:
        """At least so long it has been idle."""
        return max(0, now_ms - self.since_ms) / 1000


def seen_again(
    before: Sighting | None, *, last_entry_id: int | None, written_ms: int, now_ms: int
) -> Sighting | None:
    """What is known of a ledger now. None: nothing, for no bookie said anything.

    ``written_ms``: when its metadata was last written. A last entry before the one known comes of
    bookies that did not answer this time.
    """
    is_as_before = (
        before is not None
        and written_ms <= before.since_ms
        and (last_entry_id is None or last_entry_id <= before.last_entry_id)
    )
    if is_as_before:
        return before
    if last_entry_id is None:
        return None
    return Sighting(last_entry_id=last_entry_id, since_ms=now_ms)


def idle_path(ur: str) -> str:
    return f"{own_path(ur)}/idle"


def longest_standing(sightings: Mapping[int, Sighting]) -> dict[int, Sighting]:
    """Those that are kept, the longest idle first."""
    order = sorted(sightings, key=lambda ledger_id: (sightings[ledger_id].since_ms, ledger_id))
    return {ledger_id: sightings[ledger_id] for ledger_id in order[:SIGHTINGS_MAX]}


def sightings_to_json(sightings: Mapping[int, Sighting]) -> bytes:
    """By columns: with a name to each value it would be three times as large."""
    record = {
        "version": 1,
        "ledger_ids": list(sightings),
        "last_entry_ids": [each.last_entry_id for each in sightings.values()],
        "since_ms": [each.since_ms for each in sightings.values()],
    }
    return json.dumps(record, separators=(",", ":")).encode()


async def read_sightings(store: MetadataStore, ur: str) -> dict[int, Sighting]:
    """By ledger, the longest idle first; none where nothing is stored, or nothing that can be
    read."""
    return await read_record(store, idle_path(ur), _sightings) or {}


def _sightings(record: Mapping[str, Any]) -> dict[int, Sighting]:
    if record.get("version") != 1:
        return {}
    columns = [record.get(key) for key in ("ledger_ids", "last_entry_ids", "since_ms")]
    return dict(_row(*row) for row in _rows(columns))


def _rows(columns: list[object]) -> list[tuple[object, ...]]:
    lists = [column for column in columns if isinstance(column, list)]
    if len(lists) < len(columns) or len(set(map(len, lists))) > 1:
        raise CorruptionError("a record whose columns do not fit together")
    return list(zip(*lists, strict=True))


def _row(ledger_id: object, last_entry_id: object, since_ms: object) -> tuple[int, Sighting]:
    return as_whole(ledger_id, "ledger"), Sighting(
        last_entry_id=as_whole(last_entry_id, "last entry", least=NO_ENTRY, most=WHOLE_MAX),
        since_ms=as_whole(since_ms, "time", most=TIME_MS_MAX),
    )


class Sightings:
    """The leader's: written through ``batcher``, whose guards prove the leadership (rule S9)."""

    def __init__(self, store: MetadataStore, batcher: Batcher, ur: str) -> None:
        self._store, self._batcher, self._ur = store, batcher, ur

    async def read(self) -> dict[int, Sighting]:
        return await read_sightings(self._store, self._ur)

    async def write(self, sightings: Mapping[int, Sighting]) -> None:
        data = sightings_to_json(longest_standing(sightings))
        await self._batcher.put(idle_path(self._ur), data)
