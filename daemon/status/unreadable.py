"""Finds the private records of bookmender that cannot be read, for ``bookmender status``.

Orders are not among them: ``OrderStore`` reports unreadable orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from archive.order import ArchiveOrder, ArchiveState
from auditor.backlog import RepairProgress
from auditor.checks.idle import StoredChanges
from auditor.checks.records import KINDS, RECENT_COPIES, CheckRecord
from auditor.fsck.results.summary import Summary
from auditor.ledger_map_updater import LedgerMapRecord
from auditor.mark_reasons import Finding, LossRecords
from auditor.records import AuditRecord, DrainRecord, Identities, StoredAbsences
from checkpoints.chain import FeedChain
from checkpoints.stalls import FeedStateRecord
from ledgers.store import MetadataStore
from ledgers.tasks import gather_in_parts
from replication.client_activity import ClientActivity
from replication.ledger_record import GivenUpEntries, WaitingNote
from replication.marks import UrgentLedgers
from replication.nodes import NodeInfo
from replication.racks import StoredRacks
from replication.recent_copies import RecentCopies
from replication.records import children_if_allowed, read_stored
from replication.znodes import ClusterPaths

PER_DIRECTORY_MAX = 1_000
"""Records of one directory that are read. A queue may have a hundred thousand."""
READS_AT_ONCE = 500

Parse = Callable[[bytes], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableRecord:
    """``unknown``: what is unknown while the record cannot be read."""

    path: str
    unknown: str


def single_records(paths: ClusterPaths) -> Iterator[tuple[str, Parse, str]]:
    """Yield each private record that exists once: its path, its parser, and what it tells."""
    yield paths.absences, StoredAbsences.parse, "since when bookies are absent, unavailable ledgers"
    yield paths.identities, Identities.parse, "which reformatted bookies were handled"
    yield paths.losses, LossRecords.parse, "why ledgers are marked"
    yield paths.last_audit, AuditRecord.parse, "the last audit, ledgers with unreadable metadata"
    yield paths.ledger_map, LedgerMapRecord.parse, "the progress of the ledger map"
    yield paths.progress, RepairProgress.parse, "how far the repairs are"
    yield paths.drains, DrainRecord.parse, "the progress of drains"
    yield paths.urgent, UrgentLedgers.parse, "which ledgers workers repair first"
    yield paths.racks, StoredRacks.parse, "the racks of absent bookies"
    yield paths.activity, ClientActivity.parse, "which bookies have active clients"
    yield paths.idle, StoredChanges.parse, "how long open ledgers have been idle"
    yield paths.feed, FeedChain.parse, "whether the change feed is enabled, and its ledgers"
    yield paths.archive, ArchiveOrder.parse, "whether all metadata is archived, and where"
    yield paths.archive_state, ArchiveState.parse, "how far the archive is"
    yield paths.feed_state, FeedStateRecord.parse, "why the change feed is stalled"
    yield paths.fsck_last, Summary.parse, "the last run of fsck"
    yield paths.fsck_closer, Summary.parse, "an earlier run of fsck that found damage"
    for name in (*(kind.name for kind in KINDS), RECENT_COPIES.name):
        yield paths.check(name), CheckRecord.parse, f"the runs of the check {name}"


def record_directories(paths: ClusterPaths) -> Iterator[tuple[str, Parse, str]]:
    """Yield each directory of private records, with the parser of its children."""
    yield paths.nodes, NodeInfo.parse, "that a node runs"
    yield paths.waiting, WaitingNote.parse, "why a ledger is blocked, or its end not proven"
    yield paths.findings, Finding.parse, "what a check found wrong with a ledger"
    yield paths.given_up_entries, GivenUpEntries.parse, "which entries an operator gave up"
    yield paths.recent_copies, RecentCopies.parse, "new copies that must be read again"


async def unreadable_records(
    store: MetadataStore, paths: ClusterPaths
) -> tuple[UnreadableRecord, ...]:
    """Return the private records that cannot be read. Raises UnavailableError.

    In each directory only the first ``PER_DIRECTORY_MAX`` records are read.
    """
    records = list(single_records(paths))
    for directory, parse, tells in record_directories(paths):
        names = sorted(await children_if_allowed(store, directory))
        records += [(f"{directory}/{name}", parse, tells) for name in names[:PER_DIRECTORY_MAX]]

    async def look(record: tuple[str, Parse, str]) -> UnreadableRecord | None:
        path, parse, tells = record
        stored = await read_stored(store, path, parse)
        return UnreadableRecord(path=path, unknown=tells) if stored.is_unreadable else None

    found = await gather_in_parts(look, records, at_once=READS_AT_ONCE)
    return tuple(each for each in found if each is not None)
