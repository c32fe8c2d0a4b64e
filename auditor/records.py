"""The znodes in which the leader records its state for the next leader and for people.

``identities``: by bookie, the cookie with which its ledgers were last inspected. So a reformatted
bookie is noticed, and only once. ``absences``: since when each bookie is absent, so that the
recovery delay continues. ``audit``: result of the last audit. ``drains``: progress of each drain.

The formats of ``losses`` (``mark_reasons``), ``ledger_map`` (``ledger_map_updater``), ``progress``
(``backlog``), ``urgent`` (``replication.marks``) and ``activity`` (``replication.client_activity``)
are defined there.

Each record has a znode of its own, because they change at very different times. The absences are
written every few seconds while ledgers are counted. The losses, of up to 2,000 bookies, are written
when a bookie is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Self, TypeVar

import structlog

from auditor.backlog import RepairProgress, UnavailableLedgers
from auditor.ledger_map_updater import LedgerMapRecord
from auditor.mark_reasons import LossRecords
from ledgers.clock import Clock
from ledgers.errors import UnauthorizedError, UnavailableError
from ledgers.model import BookieId
from ledgers.store import MetadataStore
from replication.client_activity import ClientActivity
from replication.marks import UrgentLedgers
from replication.records import Count, Record, TimeMs, read_record, read_stored
from replication.transactions import Batcher
from replication.znodes import ACL_HINT, ClusterPaths

log = structlog.get_logger()

R = TypeVar("R", bound=Record)

UNREADABLE_KEPT_MAX = 100
"""Unreadable ledgers in the record of an audit."""
RETRY_S = 5.0
REWRITE_S = 60.0
"""Interval of the check that the records of this leader are still readable."""
NAMING_MAX_MS = 120_000
"""Maximum age of the counts of absences. Older counts are from an earlier leader: a leader writes
them twice in this time (``LossTracker``)."""
UNSEEN_MAX_MS = 600_000
"""Longest time without an active leader after which a new leader still continues the absences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAbsences(Record):
    """The absences as a leader recorded them. Times are wall-clock milliseconds. ``seen_ms``: when
    the leader recorded them.

    ``ledger_counts``: by bookie that is absent for any reason, the number of ledgers that name it,
    for people. ``are_counts_complete``: True if every ledger was counted. ``unavailable``: the
    ledgers with entries whose every copy is on these bookies; None if they were not counted.
    """

    since_ms: Mapping[BookieId, TimeMs] = field(default_factory=dict)
    seen_ms: TimeMs = 0
    ledger_counts: Mapping[BookieId, Count] = field(default_factory=dict)
    are_counts_complete: bool = False
    unavailable: UnavailableLedgers | None = None
    excused_ms: Mapping[BookieId, TimeMs] = field(default_factory=dict)
    """By bookie, until when it does not count as lost because it may return by itself after an
    outage (``absence.Outages``)."""

    def named(self, *, now_ms: int) -> frozenset[BookieId]:
        """Return the absent bookies that ledgers name; none if the counts are too old."""
        if not self.is_fresh(now_ms=now_ms):
            return frozenset()
        return frozenset(bookie for bookie, count in self.ledger_counts.items() if count)

    def named_count(self, bookie: BookieId, *, now_ms: int) -> int | None:
        """Return how many ledgers name the bookie; None if not all were counted recently."""
        is_known = self.are_counts_complete and self.is_fresh(now_ms=now_ms)
        return self.ledger_counts.get(bookie) if is_known else None

    def is_fresh(self, *, now_ms: int) -> bool:
        return now_ms - self.seen_ms <= NAMING_MAX_MS

    @property
    def counts(self) -> tuple[Mapping[BookieId, int], bool, UnavailableLedgers | None]:
        """The part for people, which changes with the ledgers."""
        return self.ledger_counts, self.are_counts_complete, self.unavailable

    @classmethod
    def of(
        cls,
        absent_since_s: Mapping[BookieId, float],
        excused_until_s: Mapping[BookieId, float] = MappingProxyType({}),
        *,
        now_s: float,
        wall_ms: int,
    ) -> Self:
        """Return the record of times that are monotonic seconds of this process, without counts."""

        def wall(times_s: Mapping[BookieId, float]) -> dict[BookieId, int]:
            return {b: max(0, wall_ms + round((s - now_s) * 1000)) for b, s in times_s.items()}

        return cls(since_ms=wall(absent_since_s), excused_ms=wall(excused_until_s), seen_ms=wall_ms)

    def resumed(self, *, now_s: float, wall_ms: int) -> dict[BookieId, float]:
        """Return since when each bookie is absent, in monotonic seconds of this process. Clocks of
        two hosts may differ: an absence that begins in the future begins now."""
        if wall_ms - self.seen_ms > UNSEEN_MAX_MS:
            return {}
        return {
            bookie: now_s - max(0, wall_ms - since_ms) / 1000
            for bookie, since_ms in self.since_ms.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord(Record):
    """The last completed audit. ``unreadable``: ids of at most a hundred unreadable ledgers.
    ``recovery_delay_s``: the delay in force then, for a leader that cannot read it."""

    finished_ms: TimeMs
    ledger_count: Count
    mark_count: Count
    unreadable_count: Count = 0
    unreadable: tuple[Count, ...] = ()
    recovery_delay_s: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainProgress:
    """The drain of one bookie. ``since_ms``: when the drain was ordered. ``ledgers_most``: the
    largest number of ledgers left so far.

    ``is_drained``: no ledger names the bookie or may name it. ``is_in_doubt``: no readable ledger
    names it, but the metadata of some ledgers cannot be read and may name it.
    """

    since_ms: TimeMs
    ledgers_left: Count
    ledgers_most: Count
    is_drained: bool
    is_in_doubt: bool = False
    unreadable_count: Count = 0
    """Unreadable ledgers whose bytes do not prove that they name only other bookies."""
    unreadable: tuple[Count, ...] = ()
    """The first twenty of their ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRecord(Record):
    """The progress of all drains. ``unreadable_count``: ledgers whose metadata cannot be read."""

    scanned_ms: TimeMs
    unreadable_count: Count = 0
    bookies: Mapping[BookieId, DrainProgress] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identities(Record):
    """By bookie, the czxid of the cookie with which its ledgers were last inspected."""

    cookies: Mapping[BookieId, Count]


def record_path(paths: ClusterPaths, kind: type[Record]) -> str:
    """Return the path of the znode with the leader's record of this kind."""
    return {
        StoredAbsences: paths.absences,
        Identities: paths.identities,
        LossRecords: paths.losses,
        AuditRecord: paths.last_audit,
        DrainRecord: paths.drains,
        LedgerMapRecord: paths.ledger_map,
        RepairProgress: paths.progress,
        ClientActivity: paths.activity,
        UrgentLedgers: paths.urgent,
    }[kind]


WRITTEN_RARELY = (StoredAbsences, Identities, LossRecords, AuditRecord, DrainRecord)


@dataclass
class Records:
    """Writes the records through ``batcher``, whose guards prove the leadership (rule S9). No
    record is essential: a write that ACLs deny is logged, and the leader continues."""

    store: MetadataStore
    batcher: Batcher
    paths: ClusterPaths
    _last: dict[type[Record], Record] = field(default_factory=dict, init=False)
    """The records that this leader wrote, or found when it began."""

    async def write(self, record: Record) -> None:
        self._last[type(record)] = record
        path = record_path(self.paths, type(record))
        try:
            await self.batcher.put(path, record.to_json())
        except UnauthorizedError as error:
            log.warning("record.access_denied", path=path, error=str(error), next_step=ACL_HINT)

    async def write_urgent(self, ledger_ids: Sequence[int], *, now_ms: int) -> None:
        """Write the ledgers, most urgent first. An empty list is written only in place of a
        non-empty or corrupt one."""
        stored = await read_stored(self.store, self.paths.urgent, UrgentLedgers.parse)
        if ledger_ids or stored.is_corrupt or (stored.value and stored.value.ledger_ids):
            await self.write(UrgentLedgers.of(ledger_ids, written_ms=now_ms))

    async def keep_readable(self, clock: Clock) -> None:
        """Write records again that became unreadable, until cancelled. Raises SessionLostError or
        LeadershipLostError."""
        is_known = False
        while True:
            try:
                if not is_known:
                    await self.remember_stored()
                    is_known = True
                await clock.sleep(REWRITE_S)
                await self.rewrite_unreadable()
            except UnavailableError as error:
                log.warning("records.rewrite_failed", error=str(error), retry_s=RETRY_S)
                await clock.sleep(RETRY_S)

    async def remember_stored(self) -> None:
        """Read the records that are written rarely, to have them when they become unreadable."""
        for kind in WRITTEN_RARELY:
            record = await read_leader_record(self.store, self.paths, kind)
            if record is not None:
                self._last.setdefault(kind, record)

    async def rewrite_unreadable(self) -> None:
        """Replace the records that this leader wrote and that cannot be parsed any more."""
        for kind, record in list(self._last.items()):
            path = record_path(self.paths, kind)
            stored = await read_stored(self.store, path, kind.parse)
            if stored.is_corrupt and self._last[kind] is record:
                log.warning("record.rewritten", path=path)
                await self.write(record)


async def read_leader_record(store: MetadataStore, paths: ClusterPaths, kind: type[R]) -> R | None:
    """Return the record of this kind; None if it is absent or unreadable."""
    return await read_record(store, record_path(paths, kind), kind.parse)


async def read_identities(store: MetadataStore, paths: ClusterPaths) -> dict[BookieId, int]:
    """Return, by bookie, the czxid of the cookie that was handled. Without a readable record it is
    empty: then the ledgers of every bookie are inspected again."""
    stored = await read_leader_record(store, paths, Identities)
    return {} if stored is None else dict(stored.cookies)


async def read_absences(store: MetadataStore, paths: ClusterPaths) -> StoredAbsences:
    """Return the absences that the leader before recorded; none without a readable record."""
    return await read_leader_record(store, paths, StoredAbsences) or StoredAbsences()


async def read_audit(store: MetadataStore, paths: ClusterPaths) -> AuditRecord | None:
    """Return the last audit; None if the record is absent or unreadable."""
    return await read_leader_record(store, paths, AuditRecord)


async def read_drains(store: MetadataStore, paths: ClusterPaths) -> DrainRecord | None:
    """Return the progress of all drains; None if the record is absent or unreadable."""
    return await read_leader_record(store, paths, DrainRecord)
