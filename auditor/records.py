"""The znodes in which the leader records its state for the next leader and for people.

``identities``: by bookie, the cookie with which its ledgers were last inspected. So a reformatted
bookie is noticed, and only once. ``absences``: since when each bookie is absent, so that the
recovery delay continues. ``audit``: result of the last audit. ``drains``: progress of each drain.

The formats of ``losses`` (``mark_reasons``), ``ledger_map`` (``ledger_map_updater``), ``urgent``
(``replication.marks``) and ``activity`` (``replication.client_activity``) are defined there.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import structlog

from auditor.absence import StoredAbsences
from auditor.ledger_map_updater import LedgerMapRecord
from auditor.mark_reasons import LossRecord, losses_path, losses_to_bytes
from auditor.unavailable_ledgers import UnavailableLedgers
from ledgers.errors import UnauthorizedError
from ledgers.model import BookieId
from ledgers.store import MetadataStore
from replication.client_activity import ClientActivity
from replication.marks import read_urgent, urgent_to_bytes
from replication.transactions import Batcher
from replication.znodes import (
    ACL_HINT,
    ClusterPaths,
    as_text,
    bool_field,
    int_field,
    ints_field,
    object_field,
    read_if_allowed,
    read_record,
    time_field,
)

log = structlog.get_logger()

UNREADABLE_KEPT_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """The last completed audit. ``unreadable``: ids of at most a hundred unreadable ledgers."""

    finished_ms: int
    ledger_count: int
    mark_count: int
    unreadable_count: int = 0
    unreadable: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainProgress:
    """The drain of one bookie. ``since_ms``: when the drain was ordered. ``ledgers_most``: the
    largest number of ledgers left so far.

    ``is_drained``: no ledger names the bookie or may name it. ``is_in_doubt``: no readable ledger
    names it, but the metadata of some ledgers cannot be read and may name it.
    """

    since_ms: int
    ledgers_left: int
    ledgers_most: int
    is_drained: bool
    is_in_doubt: bool = False
    unreadable_count: int = 0
    """Unreadable ledgers whose bytes do not prove that they name only other bookies."""
    unreadable: tuple[int, ...] = ()
    """The first twenty of their ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRecord:
    """The progress of all drains. ``unreadable_count``: ledgers whose metadata cannot be read."""

    scanned_ms: int
    unreadable_count: int = 0
    bookies: Mapping[BookieId, DrainProgress] = field(default_factory=dict)


class Records:
    """Writes the records through ``batcher``, whose guards prove the leadership (rule S9). No
    record is essential: a write that ACLs deny is logged, and the leader goes on."""

    def __init__(self, store: MetadataStore, batcher: Batcher, paths: ClusterPaths) -> None:
        self._store, self._batcher, self._paths = store, batcher, paths

    async def _put(self, path: str, data: bytes) -> None:
        try:
            await self._batcher.put(path, data)
        except UnauthorizedError as error:
            log.warning("record.access_denied", path=path, error=str(error), next_step=ACL_HINT)

    async def write_identities(self, cookies: Mapping[BookieId, int]) -> None:
        record = {"version": 1, "cookies": dict(sorted(cookies.items()))}
        await self._put(self._paths.identities, json.dumps(record).encode())

    async def write_absences(self, absences: StoredAbsences) -> None:
        record = {
            "version": 1,
            "seen_ms": absences.seen_ms,
            "bookies": dict(sorted(absences.since_ms.items())),
            "ledger_counts": dict(sorted(absences.ledger_counts.items())),
            "are_counts_complete": absences.are_counts_complete,
            "excused": dict(sorted(absences.excused_ms.items())),
            "unavailable": absences.unavailable and asdict(absences.unavailable),
        }
        await self._put(self._paths.absences, json.dumps(record).encode())

    async def write_losses(self, losses: Mapping[BookieId, LossRecord]) -> None:
        await self._put(losses_path(self._paths), losses_to_bytes(losses))

    async def write_audit(self, audit: AuditRecord) -> None:
        record = {
            "version": 1,
            "finished_ms": audit.finished_ms,
            "ledger_count": audit.ledger_count,
            "mark_count": audit.mark_count,
            "unreadable_count": audit.unreadable_count,
            "unreadable": list(audit.unreadable[:UNREADABLE_KEPT_MAX]),
        }
        await self._put(self._paths.last_audit, json.dumps(record).encode())

    async def write_ledger_map(self, record: LedgerMapRecord) -> None:
        await self._put(self._paths.ledger_map, record.to_json())

    async def write_activity(self, activity: ClientActivity) -> None:
        await self._put(self._paths.activity, activity.to_json())

    async def write_drains(self, drains: DrainRecord) -> None:
        record = {"version": 1, **asdict(drains)}
        await self._put(self._paths.drains, json.dumps(record).encode())

    async def write_urgent(self, ledger_ids: Sequence[int], *, now_ms: int) -> None:
        """Write the ledgers, most endangered first. An empty list is written only in place of a
        non-empty one."""
        if ledger_ids or await read_urgent(self._store, self._paths):
            data = urgent_to_bytes(ledger_ids, written_ms=now_ms)
            await self._put(self._paths.urgent, data)


async def read_identities(store: MetadataStore, paths: ClusterPaths) -> dict[BookieId, int]:
    """Return, by bookie, the czxid of the cookie that was handled; empty if nothing is stored."""
    path = paths.identities
    return (
        await read_if_allowed(store, path, lambda record: _counts(object_field(record, "cookies")))
        or {}
    )


async def read_absences(store: MetadataStore, paths: ClusterPaths) -> StoredAbsences:
    """Return the absences that the leader before recorded; none if nothing is stored."""
    return await read_if_allowed(store, paths.absences, _absences) or StoredAbsences()


def _absences(record: Mapping[str, Any]) -> StoredAbsences:
    since, excused = object_field(record, "bookies"), object_field(record, "excused")
    has_unavailable = record.get("unavailable") is not None
    return StoredAbsences(
        since_ms={BookieId(as_text(b, "bookie")): time_field(since, b) for b in since},
        seen_ms=time_field(record, "seen_ms"),
        ledger_counts=_counts(object_field(record, "ledger_counts")),
        are_counts_complete=bool_field(record, "are_counts_complete"),
        unavailable=_unavailable(object_field(record, "unavailable")) if has_unavailable else None,
        excused_ms={BookieId(as_text(b, "bookie")): time_field(excused, b) for b in excused},
    )


def _unavailable(record: Mapping[str, Any]) -> UnavailableLedgers:
    return UnavailableLedgers(
        count=int_field(record, "count"),
        first=ints_field(record, "first"),
        restored_by=_counts(object_field(record, "restored_by")),
    )


def _counts(record: Mapping[str, Any]) -> dict[BookieId, int]:
    return {BookieId(as_text(b, "bookie")): int_field(record, b) for b in record}


async def read_audit(store: MetadataStore, paths: ClusterPaths) -> AuditRecord | None:
    """Return None if there was no audit, or a later release wrote the record in a format that we
    cannot read."""
    return await read_record(store, paths.last_audit, _audit)


def _audit(record: Mapping[str, Any]) -> AuditRecord:
    return AuditRecord(
        finished_ms=time_field(record, "finished_ms"),
        ledger_count=int_field(record, "ledger_count"),
        mark_count=int_field(record, "mark_count"),
        unreadable_count=int_field(record, "unreadable_count"),
        unreadable=ints_field(record, "unreadable"),
    )


async def read_drains(store: MetadataStore, paths: ClusterPaths) -> DrainRecord | None:
    """Return None if nothing was drained yet, or a later release wrote the record in a format that
    we cannot read."""
    return await read_record(store, paths.drains, _drains)


def _drains(record: Mapping[str, Any]) -> DrainRecord:
    bookies = object_field(record, "bookies")
    return DrainRecord(
        scanned_ms=time_field(record, "scanned_ms"),
        unreadable_count=int_field(record, "unreadable_count"),
        bookies={
            BookieId(as_text(b, "bookie")): _progress(object_field(bookies, b)) for b in bookies
        },
    )


def _progress(record: Mapping[str, Any]) -> DrainProgress:
    return DrainProgress(
        since_ms=time_field(record, "since_ms"),
        ledgers_left=int_field(record, "ledgers_left"),
        ledgers_most=int_field(record, "ledgers_most"),
        is_drained=bool_field(record, "is_drained"),
        is_in_doubt=bool_field(record, "is_in_doubt"),
        unreadable_count=int_field(record, "unreadable_count"),
        unreadable=ints_field(record, "unreadable"),
    )
