"""Single ledgers: their metadata and bookies, and the open ones that get no more entries."""

from functools import partial

from auditor.checks.idle import LastChange, read_last_changes
from auditor.checks.records import IDLE_OPEN, read_stored_check
from daemon.admin_session import AdminSession
from daemon.answers import Answer
from daemon.messages import earlier_metadata_hint, end_doubt_text, message
from daemon.operations.bookies import registered_bookies
from ledgers.clock import Clock
from ledgers.errors import CorruptionError, NoSuchLedgerError, UnauthorizedError
from ledgers.manager import VersionedMetadata
from ledgers.model import BookieId
from ledgers.tasks import gather_in_parts
from replication.cluster import ClusterView
from replication.ledger_record import (
    GivenUpEntries,
    UnprovenEnd,
    read_given_up,
    read_unproven_end,
)
from replication.open_ledgers import end_doubts
from replication.orders import OrderStore

CUSTOM_BYTES_MAX = 300
"""Longest value of custom metadata that is shown. Applications may store anything there."""
READS_AT_ONCE = 100


class ShownSegment(Answer, frozen=True, kw_only=True):
    """A run of entries on one ensemble."""

    first_entry_id: int
    ensemble: list[BookieId]
    absent: list[BookieId]
    reformatted: list[BookieId]
    """Reformatted after the ledger was created (a closed ledger: after its metadata was last
    written, because a repair may have put the bookie into the ensemble)."""


class ShownLedger(Answer, frozen=True, kw_only=True):
    """The metadata of a ledger, and the state of its bookies."""

    ledger_id: int
    version: int
    """Of the znode."""
    state: str
    metadata_version: int
    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    digest_type: str | None
    last_entry_id: int | None
    """null, as ``length``: the ledger is not closed."""
    length: int | None
    segments: list[ShownSegment]
    end_doubt: str | None
    """Why the end of an open ledger may not be provable."""
    custom: dict[str, str]
    given_up: GivenUpEntries | None
    unreadable_records: list[str]


async def show_ledger(cluster: AdminSession, ledger_id: int) -> ShownLedger:
    """Return the ledger. Raises NoSuchLedgerError, CorruptionError (with a hint)."""
    try:
        found = await cluster.manager.read(ledger_id)
    except CorruptionError as error:
        raise CorruptionError(f"{error}; {earlier_metadata_hint(ledger_id)}") from error
    view = ClusterView(
        bookies=await registered_bookies(cluster),
        cookies=await cluster.registration.cookies(),
        orders=await OrderStore(cluster.store, cluster.paths).read(),
    )
    tried = await read_unproven_end(cluster.store, cluster.paths, ledger_id)
    given_up = await read_given_up(cluster.store, cluster.paths, ledger_id)
    unreadable = {
        cluster.paths.waiting_note(ledger_id): tried.is_unreadable,
        cluster.paths.given_up(ledger_id): given_up.is_unreadable,
    }
    metadata = found.metadata
    reformatted = view.initialised_after(
        found.stat.mzxid if metadata.is_closed else found.stat.czxid
    )
    return ShownLedger(
        ledger_id=found.ledger_id,
        version=found.version,
        state=metadata.state.name,
        metadata_version=metadata.metadata_version,
        ensemble_size=metadata.ensemble_size,
        write_quorum=metadata.write_quorum,
        ack_quorum=metadata.ack_quorum,
        digest_type=metadata.digest_type.name if metadata.digest_type else None,
        last_entry_id=metadata.last_entry_id if metadata.is_closed else None,
        length=metadata.length if metadata.is_closed else None,
        segments=[
            ShownSegment(
                first_entry_id=segment.first_entry_id,
                ensemble=list(segment.ensemble),
                absent=[b for b in segment.ensemble if b not in view.available],
                reformatted=[b for b in segment.ensemble if b in reformatted],
            )
            for segment in metadata.segments
        ],
        end_doubt=_end_doubt(found, view, tried.value),
        custom={
            key: value[:CUSTOM_BYTES_MAX].decode(errors="replace") for key, value in metadata.custom
        },
        given_up=given_up.value,
        unreadable_records=[path for path, is_so in unreadable.items() if is_so],
    )


def _end_doubt(
    found: VersionedMetadata, view: ClusterView, tried: UnprovenEnd | None
) -> str | None:
    if found.metadata.is_closed:
        return None
    if tried is not None:
        return message(found.ledger_id, tried.blocked).text
    doubts = end_doubts(found, view)
    return None if doubts is None else end_doubt_text(doubts)


# --- Idle ledgers ---------------------------------------------------------------------------------


class IdleLedger(Answer, frozen=True, kw_only=True):
    """An open ledger without new entries."""

    ledger_id: int
    state: str
    idle_s: int
    """It had no new entry for at least this long."""
    last_entry_id: int
    """-1: it has no entries."""
    bookies: list[BookieId]
    """The ensemble of its last segment."""


class IdleLedgers(Answer, frozen=True, kw_only=True):
    """The idle ledgers, longest idle first."""

    checked_ms: int | None
    """When the last check for idle ledgers finished; null: none has."""
    unreadable_records: list[str]
    """Znodes of the check that cannot be read. So ledgers may be missing here."""
    ledgers: list[IdleLedger]


async def find_idle(cluster: AdminSession, *, after_s: float, clock: Clock) -> IdleLedgers:
    """Return the ledgers without a new entry for ``after_s`` whose metadata is unchanged since
    then."""
    now_ms = clock.wall_ms()
    stored = await read_last_changes(cluster.store, cluster.paths)
    changes = stored.value.by_ledger() if stored.value else {}
    idle = [(i, each) for i, each in changes.items() if each.idle_s(now_ms) >= after_s]
    look = partial(_still_idle, cluster, now_ms=now_ms)
    looked = await gather_in_parts(look, idle, at_once=READS_AT_ONCE)
    check = await read_stored_check(cluster.store, cluster.paths, IDLE_OPEN.name)
    last = check.value.last if check.value else None
    unreadable = {
        cluster.paths.idle: stored.is_unreadable,
        cluster.paths.check(IDLE_OPEN.name): check.is_unreadable,
    }
    return IdleLedgers(
        checked_ms=None if last is None else last.finished_ms,
        unreadable_records=[path for path, is_so in unreadable.items() if is_so],
        ledgers=[each for each in looked if each is not None],
    )


async def _still_idle(
    cluster: AdminSession, change: tuple[int, LastChange], *, now_ms: int
) -> IdleLedger | None:
    """Return the ledger if it is still idle.

    Returns None if it was closed, written or deleted since the check saw it, or cannot be read.
    """
    ledger_id, sighting = change
    try:
        found = await cluster.manager.read(ledger_id)
    except (NoSuchLedgerError, CorruptionError, UnauthorizedError):
        return None
    if found.metadata.is_closed or found.stat.mtime_ms > sighting.since_ms:
        return None
    return IdleLedger(
        ledger_id=ledger_id,
        state=found.metadata.state.name,
        idle_s=round(sighting.idle_s(now_ms)),
        last_entry_id=sighting.last_entry_id,
        bookies=list(found.metadata.last_segment.ensemble),
    )
