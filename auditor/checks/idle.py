"""Reports idle open ledgers: all their bookies are registered, but no entry was added for a long
time (gap G35).

The check asks the bookies of the last ensemble for their last entry, without fencing. If neither
that entry nor the metadata changes from one run to the next, the ledger is idle. It is reported
with its age and never closed: a writer may just be slow, and closing would stop the writer
(``bookmender ledger close``). The leader may write nothing to a ledger of the change feed for days,
so these are left out.

A ledger may have to be watched for longer than one leader lasts. So the last known changes are
stored in ``<ur>/bookmender/idle``, as versioned JSON.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import structlog
from msgspec import Meta

from auditor.checks.records import IDLE_OPEN, Check, CheckRecords, CheckRun
from auditor.ledger_map import LedgerMap
from ledgers.bookies import Bookies
from ledgers.clock import Clock
from ledgers.errors import NoSuchLedgerError
from ledgers.manager import LedgerManager
from ledgers.model import LedgerState
from ledgers.reading import NO_ENTRY, highest_entry_id
from ledgers.store import MetadataStore
from replication.cluster import ViewSource
from replication.records import Count, Record, Stored, TimeMs, read_stored
from replication.znodes import INT_MAX, ClusterPaths

KEPT_MAX = 10_000
"""Ledgers that are stored, the longest idle first. About 300 kB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastChange:
    """Since ``since_ms`` (wall clock) an open ledger got no entry and no write of its metadata.
    ``last_entry_id``: the last entry that its bookies reported; -1: none."""

    last_entry_id: int
    since_ms: int

    def idle_s(self, now_ms: int) -> float:
        """Return for how long the ledger has been idle, at least."""
        return max(0, now_ms - self.since_ms) / 1000


def updated_change(
    before: LastChange | None, *, last_entry_id: int | None, written_ms: int, now_ms: int
) -> LastChange | None:
    """Return the last known change of a ledger after another reading; None if nothing is known.

    ``last_entry_id``: None if no bookie answered. ``written_ms``: when the metadata was last
    written. A last entry below the known one comes from other bookies than before.
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
    return LastChange(last_entry_id=last_entry_id, since_ms=now_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChanges(Record):
    """Columns instead of rows: with keys for each row the record would be three times as large."""

    ledger_ids: tuple[Count, ...]
    last_entry_ids: tuple[Annotated[int, Meta(ge=NO_ENTRY, le=INT_MAX)], ...]
    since_ms: tuple[TimeMs, ...]

    def __post_init__(self) -> None:
        """Raises ValueError, which makes the record unreadable."""
        if not len(self.ledger_ids) == len(self.last_entry_ids) == len(self.since_ms):
            raise ValueError("the columns of the record have different lengths")

    def by_ledger(self) -> dict[int, LastChange]:
        rows = zip(self.ledger_ids, self.last_entry_ids, self.since_ms, strict=True)
        return {
            ledger_id: LastChange(last_entry_id=last_entry_id, since_ms=since_ms)
            for ledger_id, last_entry_id, since_ms in rows
        }


def last_changes_to_json(changes: Mapping[int, LastChange]) -> bytes:
    return StoredChanges(
        ledger_ids=tuple(changes),
        last_entry_ids=tuple(each.last_entry_id for each in changes.values()),
        since_ms=tuple(each.since_ms for each in changes.values()),
    ).to_json()


async def read_last_changes(store: MetadataStore, paths: ClusterPaths) -> Stored[StoredChanges]:
    """Read the stored changes, the longest idle first."""
    return await read_stored(store, paths.idle, StoredChanges.parse)


log = structlog.get_logger()


@dataclass(kw_only=True)
class IdleOpenCheck(Check):
    """Counts ``open`` ledgers, ``idle`` ones, and ``unknown`` ones whose bookies did not answer."""

    kind = IDLE_OPEN
    part_size = 1_000

    records: CheckRecords
    ledger_map: LedgerMap
    manager: LedgerManager
    bookies: Bookies
    views: ViewSource
    after_s: float
    reads_per_s: int
    """May be changed at any time. Both: see ``ChecksSettings``."""
    clock: Clock
    _known: dict[int, LastChange] = field(default_factory=dict, init=False)
    _started_ms: int | None = field(default=None, init=False)
    """Start of the run that ``_known`` belongs to, in milliseconds since 1970."""
    _next_read_s: float = field(default=0.0, init=False)
    _warned_of: frozenset[int] = field(default=frozenset(), init=False)
    """The idle ledgers that were logged last."""

    async def begin(self, run: CheckRun) -> None:
        """Start or continue a run. The sightings that an earlier leader made in this run are lost,
        so those of the previous run are used for its ledgers."""
        if self._started_ms != run.started_ms:
            stored = await read_last_changes(self.records.store, self.records.paths)
            self._known = stored.permitted_value.by_ledger() if stored.permitted_value else {}
            self._started_ms = run.started_ms

    async def check_ledger(self, ledger_id: int) -> Counter[str]:
        if not self._is_open(ledger_id):
            return Counter()
        try:
            versioned = await self.manager.read(ledger_id)
        except NoSuchLedgerError:
            return Counter()
        if versioned.metadata.is_closed or versioned.metadata.is_of_feed:
            self._known.pop(ledger_id, None)
            return Counter()
        registered = self.views.current.available
        members = [b for b in versioned.metadata.last_segment.ensemble if b in registered]
        turn_s = max(self.clock.now_s(), self._next_read_s)
        self._next_read_s = turn_s + (len(members) / self.reads_per_s if self.reads_per_s else 0)
        await self.clock.sleep(turn_s - self.clock.now_s())
        last, silent = await highest_entry_id(self.bookies, members, ledger_id)
        last_entry_id = None if silent.issuperset(members) else last
        found = updated_change(
            self._known.get(ledger_id),
            last_entry_id=last_entry_id,
            written_ms=versioned.stat.mtime_ms,
            now_ms=self.clock.wall_ms(),
        )
        if found is None:
            self._known.pop(ledger_id, None)
        else:
            self._known[ledger_id] = found
        if found is None or last_entry_id is None:
            return Counter(open=1, unknown=1)
        return Counter(open=1, idle=int(found.idle_s(self.clock.wall_ms()) >= self.after_s))

    async def finish(self, run: CheckRun) -> None:
        """Forget ledgers that were closed or deleted meanwhile, store the rest, and log the idle
        ones: as a warning if they are not the ones that this leader logged last."""
        self._known = {i: each for i, each in self._known.items() if self._is_open(i)}
        order = sorted(self._known, key=lambda i: (self._known[i].since_ms, i))
        kept = {ledger_id: self._known[ledger_id] for ledger_id in order[:KEPT_MAX]}
        await self.records.batcher.put(self.records.paths.idle, last_changes_to_json(kept))
        now_ms = self.clock.wall_ms()
        ages_s = {
            i: age_s
            for i, each in self._known.items()
            if (age_s := each.idle_s(now_ms)) >= self.after_s
        }
        has_changed, self._warned_of = ages_s.keys() != self._warned_of, frozenset(ages_s)
        if ages_s:
            oldest = max(ages_s, key=lambda ledger_id: ages_s[ledger_id])
            log_event = log.warning if has_changed else log.info
            log_event(
                "ledgers.idle",
                ledger_count=len(ages_s),
                oldest_ledger_id=oldest,
                oldest_idle_s=round(ages_s[oldest]),
            )

    def _is_open(self, ledger_id: int) -> bool:
        ledger = self.ledger_map.get(ledger_id)
        return ledger is not None and ledger.state is not LedgerState.CLOSED
