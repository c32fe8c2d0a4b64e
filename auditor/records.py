"""The znodes in which the leader records its state for the next leader and for people.

``identities``: by bookie, the cookie with which its ledgers were last inspected. So a reformatted
bookie is noticed, and only once. ``absences``: since when each bookie is absent, so that the
recovery delay continues. ``audit``: result of the last audit. ``drains``: progress of each drain.

The formats of ``losses`` (``mark_reasons``), ``ledger_map`` (``ledger_map_updater``), ``urgent``
(``replication.marks``) and ``activity`` (``replication.client_activity``) are defined there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import structlog

from auditor.absence import StoredAbsences
from auditor.ledger_map_updater import LedgerMapRecord
from auditor.mark_reasons import LossRecord, LossRecords
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

UNREADABLE_KEPT_MAX = 100
RETRY_S = 5.0
REWRITE_S = 60.0
"""Interval of the check that the records of this leader are still readable."""


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
    """``cookies``: by bookie, the czxid of the cookie with which its ledgers were last
    inspected."""

    cookies: Mapping[BookieId, Count]


class Records:
    """Writes the records through ``batcher``, whose guards prove the leadership (rule S9). No
    record is essential: a write that ACLs deny is logged, and the leader continues."""

    def __init__(self, store: MetadataStore, batcher: Batcher, paths: ClusterPaths) -> None:
        self._store, self._batcher, self._paths = store, batcher, paths
        self._last: dict[str, Record] = {}
        """By path, the record that this leader wrote, or found when it began."""

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
        parsers: Mapping[str, Callable[[bytes], Record]] = {
            self._paths.absences: StoredAbsences.parse,
            self._paths.identities: Identities.parse,
            self._paths.losses: LossRecords.parse,
            self._paths.last_audit: AuditRecord.parse,
            self._paths.drains: DrainRecord.parse,
        }
        for path, parse in parsers.items():
            record = await read_record(self._store, path, parse)
            if record is not None:
                self._last.setdefault(path, record)

    async def rewrite_unreadable(self) -> None:
        """Replace the records that this leader wrote and that cannot be parsed any more."""
        for path, record in list(self._last.items()):
            stored = await read_stored(self._store, path, type(record).parse)
            if stored.is_corrupt and self._last[path] is record:
                log.warning("record.rewritten", path=path)
                await self._put(path, record)

    async def _put(self, path: str, record: Record) -> None:
        self._last[path] = record
        try:
            await self._batcher.put(path, record.to_json())
        except UnauthorizedError as error:
            log.warning("record.access_denied", path=path, error=str(error), next_step=ACL_HINT)

    async def write_identities(self, cookies: Mapping[BookieId, int]) -> None:
        await self._put(self._paths.identities, Identities(cookies=cookies))

    async def write_absences(self, absences: StoredAbsences) -> None:
        await self._put(self._paths.absences, absences)

    async def write_losses(self, losses: Mapping[BookieId, LossRecord]) -> None:
        await self._put(self._paths.losses, LossRecords(bookies=losses))

    async def write_audit(self, audit: AuditRecord) -> None:
        kept = audit.unreadable[:UNREADABLE_KEPT_MAX]
        await self._put(self._paths.last_audit, replace(audit, unreadable=kept))

    async def write_ledger_map(self, record: LedgerMapRecord) -> None:
        await self._put(self._paths.ledger_map, record)

    async def write_activity(self, activity: ClientActivity) -> None:
        await self._put(self._paths.activity, activity)

    async def write_drains(self, drains: DrainRecord) -> None:
        await self._put(self._paths.drains, drains)

    async def write_urgent(self, ledger_ids: Sequence[int], *, now_ms: int) -> None:
        """Write the ledgers, most urgent first. An empty list is written only in place of a
        non-empty or corrupt one."""
        stored = await read_stored(self._store, self._paths.urgent, UrgentLedgers.parse)
        if ledger_ids or stored.is_corrupt or (stored.value and stored.value.ledger_ids):
            await self._put(self._paths.urgent, UrgentLedgers.of(ledger_ids, written_ms=now_ms))


async def read_identities(store: MetadataStore, paths: ClusterPaths) -> dict[BookieId, int]:
    """Return, by bookie, the czxid of the cookie that was handled. Without a readable record it is
    empty: then the ledgers of every bookie are inspected again."""
    stored = await read_record(store, paths.identities, Identities.parse)
    return {} if stored is None else dict(stored.cookies)


async def read_absences(store: MetadataStore, paths: ClusterPaths) -> StoredAbsences:
    """Return the absences that the leader before recorded; none without a readable record."""
    return await read_record(store, paths.absences, StoredAbsences.parse) or StoredAbsences()


async def read_audit(store: MetadataStore, paths: ClusterPaths) -> AuditRecord | None:
    """Return the last audit; None if the record is absent or unreadable."""
    return await read_record(store, paths.last_audit, AuditRecord.parse)


async def read_drains(store: MetadataStore, paths: ClusterPaths) -> DrainRecord | None:
    """Return the progress of all drains; None if the record is absent or unreadable."""
    return await read_record(store, paths.drains, DrainRecord.parse)
