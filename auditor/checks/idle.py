"""Looks for open ledgers that nobody writes any more, though all their bookies are there (gap G35).

The bookies of the last ensemble are asked for their last entry, without fencing; one that stays the
same from one run to the next, while the metadata is not written either, means that the ledger is
idle. It is told of, with its age, and never closed: a writer may be slow, and closing locks him out
(``bookmender ledger close``).

Open ledgers as they were last seen: ``<ur>/bookmender/idle``, versioned JSON.

Whether one is idle only time can tell, more of it than a leader may last: so what was seen is kept.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from auditor.checks.base import Check, look_at_each
from auditor.checks.records import IDLE_OPEN, CheckRun
from auditor.ledger_map import LedgerMap
from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.errors import CorruptionError, NoSuchLedgerError
from ledgers.manager import LedgerManager
from ledgers.model import LedgerState
from ledgers.reading import NO_ENTRY, highest_entry_id
from ledgers.store import MetadataStore
from replication.cluster import ViewSource
from replication.transactions import Batcher
from replication.znodes import INT_MAX, TIME_MS_MAX, ClusterPaths, as_int, read_record

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


async def read_sightings(store: MetadataStore, paths: ClusterPaths) -> dict[int, Sighting]:
    """By ledger, the longest idle first; none where nothing is stored, or nothing that can be
    read."""
    return await read_record(store, paths.idle, _sightings) or {}


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
    return as_int(ledger_id, "ledger"), Sighting(
        last_entry_id=as_int(last_entry_id, "last entry", least=NO_ENTRY, most=INT_MAX),
        since_ms=as_int(since_ms, "time", most=TIME_MS_MAX),
    )


class Sightings:
    """The leader's: written through ``batcher``, whose guards prove the leadership (rule S9)."""

    def __init__(self, store: MetadataStore, batcher: Batcher, paths: ClusterPaths) -> None:
        self._store, self._batcher, self._paths = store, batcher, paths

    async def read(self) -> dict[int, Sighting]:
        return await read_sightings(self._store, self._paths)

    async def write(self, sightings: Mapping[int, Sighting]) -> None:
        data = sightings_to_json(longest_standing(sightings))
        await self._batcher.put(self._paths.idle, data)


log = structlog.get_logger()

LEDGERS_AT_ONCE = 16


class IdleOpenCheck(Check):
    """Counts ``open`` ledgers, those that are ``idle``, and those of which no bookie said anything:
    ``unknown``."""

    kind = IDLE_OPEN
    part_size = 1_000

    def __init__(
        self,
        *,
        ledger_map: LedgerMap,
        manager: LedgerManager,
        bookies: Bookies,
        views: ViewSource,
        sightings: Sightings,
        after_s: float,
        reads_per_s: int,
        clock: Clock,
    ) -> None:
        """``after_s``, ``reads_per_s``: see ``ChecksSettings``."""
        self._ledger_map = ledger_map
        self._manager = manager
        self._bookies = bookies
        self._views = views
        self._sightings = sightings
        self._after_s = after_s
        self._read_s = 1 / reads_per_s if reads_per_s else 0.0
        self._clock = clock
        self._known: dict[int, Sighting] = {}
        self._started_ms: int | None = None
        """Of the run that ``_known`` is of."""
        self._next_read_s = 0.0
        self._warned_of: frozenset[int] = frozenset()
        """The idle ledgers that were logged last."""

    async def begin(self, run: CheckRun) -> None:
        """What an earlier leader saw in this run is lost: those ledgers are as the run before saw
        them."""
        if self._started_ms != run.started_ms:
            self._known = await self._sightings.read()
            self._started_ms = run.started_ms

    async def look_at(self, ledger_ids: Sequence[int]) -> Counter[str]:
        counts: Counter[str] = Counter()
        open_ids = [ledger_id for ledger_id in ledger_ids if self._is_open(ledger_id)]
        for start in range(0, len(open_ids), LEDGERS_AT_ONCE):
            part = open_ids[start : start + LEDGERS_AT_ONCE]
            counts += await look_at_each(self.kind, part, self._look_at_one)
        return counts

    async def finish(self, run: CheckRun) -> None:
        """Those that were closed or deleted meanwhile are forgotten."""
        self._known = {i: each for i, each in self._known.items() if self._is_open(i)}
        await self._sightings.write(self._known)
        now_ms = self._clock.wall_ms()
        ages_s = {i: each.idle_s(now_ms) for i, each in self._known.items()}
        self._tell({i: age_s for i, age_s in ages_s.items() if age_s >= self._after_s})

    def _tell(self, ages_s: Mapping[int, float]) -> None:
        """``ages_s``: of those that are idle. A warning only where others are than were at the last
        look of this leader."""
        is_news, self._warned_of = ages_s.keys() != self._warned_of, frozenset(ages_s)
        if not ages_s:
            return
        oldest = max(ages_s, key=lambda ledger_id: ages_s[ledger_id])
        tell = log.warning if is_news else log.info
        tell(
            "ledgers.idle",
            ledger_count=len(ages_s),
            oldest_ledger_id=oldest,
            oldest_idle_s=round(ages_s[oldest]),
            next_step="bookmender ledger idle lists them",
        )

    def _is_open(self, ledger_id: int) -> bool:
        ledger = self._ledger_map.get(ledger_id)
        return ledger is not None and ledger.state is not LedgerState.CLOSED

    async def _look_at_one(self, ledger_id: int) -> Counter[str]:
        try:
            versioned = await self._manager.read(ledger_id)
        except NoSuchLedgerError:
            return Counter()
        if versioned.metadata.is_closed:
            return Counter()
        there = self._views.current.available
        members = [b for b in versioned.metadata.last_segment.ensemble if b in there]
        await self._wait_turn(len(members))
        last, silent = await highest_entry_id(self._bookies, members, ledger_id)
        last_entry_id = None if silent.issuperset(members) else last
        found = seen_again(
            self._known.get(ledger_id),
            last_entry_id=last_entry_id,
            written_ms=versioned.stat.mtime_ms,
            now_ms=self._clock.wall_ms(),
        )
        return Counter(open=1) + self._note(ledger_id, found, is_unknown=last_entry_id is None)

    def _note(self, ledger_id: int, found: Sighting | None, *, is_unknown: bool) -> Counter[str]:
        if found is None:
            self._known.pop(ledger_id, None)
        else:
            self._known[ledger_id] = found
        if is_unknown:
            return Counter(unknown=1)
        assert found is not None, ledger_id
        return Counter(idle=int(found.idle_s(self._clock.wall_ms()) >= self._after_s))

    async def _wait_turn(self, read_count: int) -> None:
        now_s = self._clock.now_s()
        turn_s = max(now_s, self._next_read_s)
        self._next_read_s = turn_s + read_count * self._read_s
        if turn_s > now_s:
            await self._clock.sleep(turn_s - now_s)
