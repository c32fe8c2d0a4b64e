"""What the leader records in our znodes for the next leader, and for people.

``identities``: by bookie, the cookie with which its ledgers were last inspected. A reformatted
bookie is thus noticed, and only once. ``absences``: since when each bookie is absent, so that the
recovery delay continues. ``audit``: result of the last audit. ``drains``: progress of each drain.
For ``causes``, ``urgent``, ``index`` (in ``index.note``) and ``activity`` (in
``replication.client_activity``) see there.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import structlog

from auditor.absence import StoredAbsences, UnavailableLedgers
from auditor.findings import Cause, causes_to_bytes
from auditor.ledger_map_updater import LedgerMapRecord
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
            "naming": dict(sorted(absences.naming.items())),
            "are_all_named": absences.are_all_named,
            "excused": dict(sorted(absences.excused_ms.items())),
            **_unavailable_record(absences.unavailable),
        }
        await self._put(self._paths.absences, json.dumps(record).encode())

    async def write_causes(self, causes: Mapping[BookieId, Cause]) -> None:
        await self._put(self._paths.causes, causes_to_bytes(causes))

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

    async def write_index(self, note: LedgerMapRecord) -> None:
        await self._put(self._paths.ledger_map, note.to_json())

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
    return await read_if_allowed(store, paths.identities, _cookies) or {}


def _cookies(record: Mapping[str, Any]) -> dict[BookieId, int]:
    cookies = object_field(record, "cookies")
    return {BookieId(as_text(b, "bookie")): int_field(cookies, b) for b in cookies}


async def read_absences(store: MetadataStore, paths: ClusterPaths) -> StoredAbsences:
    """Return the absences that the leader before recorded; none if nothing is stored."""
    return await read_if_allowed(store, paths.absences, _absences) or StoredAbsences()


def _absences(record: Mapping[str, Any]) -> StoredAbsences:
    away = object_field(record, "bookies")
    return StoredAbsences(
        since_ms={BookieId(as_text(b, "bookie")): time_field(away, b) for b in away},
        seen_ms=time_field(record, "seen_ms"),
        excused_ms=_excused(record),
        **_naming(record),
    )


def _excused(record: Mapping[str, Any]) -> dict[BookieId, int]:
    """Return no bookie if an earlier release wrote the record."""
    if "excused" not in record:
        return {}
    excused = object_field(record, "excused")
    return {BookieId(as_text(b, "bookie")): time_field(excused, b) for b in excused}


def _naming(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return nothing, or only a part, if an earlier release wrote the record."""
    if "naming" not in record:
        return {}
    naming = object_field(record, "naming")
    return {
        "unavailable": _unavailable(record),
        "naming": {BookieId(as_text(b, "bookie")): int_field(naming, b) for b in naming},
        "are_all_named": bool_field(record, "are_all_named"),
    }


def _unavailable_record(unavailable: UnavailableLedgers | None) -> dict[str, Any]:
    """``unavailable`` is the count, as in records of earlier releases."""
    if unavailable is None:
        return {"unavailable": None}
    return {
        "unavailable": unavailable.count,
        "copyless_first": list(unavailable.first),
        "copyless_enough_for": dict(sorted(unavailable.enough_for.items())),
    }


def _unavailable(record: Mapping[str, Any]) -> UnavailableLedgers | None:
    """Return only the count if an earlier release wrote the record."""
    if record.get("unavailable") is None:
        return None
    count = int_field(record, "unavailable")
    if "copyless_first" not in record:
        return UnavailableLedgers(count=count)
    enough_for = object_field(record, "copyless_enough_for")
    return UnavailableLedgers(
        count=count,
        first=ints_field(record, "copyless_first"),
        enough_for={BookieId(as_text(b, "bookie")): int_field(enough_for, b) for b in enough_for},
    )


async def last_audit(store: MetadataStore, paths: ClusterPaths) -> AuditRecord | None:
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


async def last_drains(store: MetadataStore, paths: ClusterPaths) -> DrainRecord | None:
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
