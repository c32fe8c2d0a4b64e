"""Undoes a metadata write that a daemon on this host recorded.

Copies that the old metadata names may have been deleted since. So their bookies are asked for every
entry first, and doubts must be confirmed by force (``replication.by_hand.Restorer``).
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from daemon.admin_session import AdminSession, admin_session, order_event, writing_session
from daemon.answers import Answer
from daemon.messages import copy_doubt_text
from daemon.operations.plan import open_inspection
from daemon.operations.waiting import order_retries
from daemon.settings import Settings
from daemon.state import JOURNAL_FOLDER, state_dir
from ledgers.clock import SystemClock
from ledgers.errors import (
    LockLostError,
    RejectedError,
    SessionLostError,
    SettingsError,
    UnavailableError,
)
from ledgers.manager import LedgerManager
from ledgers.model import LedgerMetadata
from ledgers.registration import read_instance_id
from replication.by_hand import (
    CopyDoubt,
    Restorer,
    RestoreRefusedError,
    Restoring,
    Tell,
    readable,
)
from replication.journal import JournalRecord, read_journal
from replication.reasons import Blocked

ALREADY = "nothing to do: the metadata is already the same"


class RecordedWrite(Answer, frozen=True, kw_only=True):
    """A write of metadata. ``before``, ``after``: the metadata, as lines of text."""

    time_ms: int
    cluster: str | None
    before: list[str]
    after: list[str]


class RecordedWrites(Answer, frozen=True, kw_only=True):
    """The writes of a ledger that this host recorded."""

    ledger_id: int
    writes: list[RecordedWrite]


class Restored(Answer, frozen=True, kw_only=True):
    """What undoing a write changed, or would change."""

    ledger_id: int
    time_ms: int
    """Of the write."""
    now: list[str]
    """The metadata before the restore, as lines of text."""
    restored: list[str]
    doubts: list[str]
    """Why copies may be missing, or later changes be undone, too."""
    result: str

    @property
    def is_in_doubt(self) -> bool:
        return bool(self.doubts) and self.result != ALREADY


def recorded_writes(settings: Settings, ledger_id: int, *, tell: Tell) -> RecordedWrites:
    """Return the recorded writes. ``tell``: receives a note if this host has no journal."""
    return RecordedWrites(
        ledger_id=ledger_id,
        writes=[
            RecordedWrite(
                time_ms=record.time_ms,
                cluster=record.cluster,
                before=metadata_lines(readable(record.before)),
                after=metadata_lines(readable(record.after)),
            )
            for record in _read(settings, ledger_id, tell)
        ],
    )


async def look_before_restoring(
    settings: Settings, record: JournalRecord, *, tell: Tell
) -> Restored:
    """Return what undoing the write would change."""
    async with admin_session(settings) as cluster:
        cluster_id = await read_instance_id(cluster.store, cluster.root)
        async with _open_restorer(cluster, cluster.manager, cluster_id, tell) as restorer:
            found = await restorer.plan(record)
    return answer_of(found)


async def restore_ledger(
    settings: Settings,
    record: JournalRecord,
    *,
    is_forced: bool,
    tell: Tell,
    name: str = "ledger restore",
) -> Restored:
    """Undo the write. ``name``: of the order, for the history. Raises RestoreRefusedError if there
    are doubts and it is not forced, and SettingsError if nothing can be recorded."""
    ledger_id = record.ledger_id
    async with (
        writing_session(settings) as ours,
        _open_restorer(ours.cluster, ours.manager, ours.cluster_id, tell) as restorer,
    ):
        cluster = ours.cluster
        try:
            done = await restorer.restore(
                record, session=ours.session, holder=ours.holder, is_forced=is_forced
            )
        except RestoreRefusedError as error:
            if not error.doubts:
                raise
            texts = [_doubt_text(ledger_id, doubt) for doubt in error.doubts]
            raise RestoreRefusedError("; ".join(texts), ledger_id=ledger_id) from error
        await cluster.note_order(order_event(name), [ledger_id])
        # The metadata is restored. If this order fails, a node tries the ledger later.
        with suppress(UnavailableError, SessionLostError, LockLostError, RejectedError):
            await order_retries([ledger_id], cluster.store, cluster.paths, SystemClock())
    return answer_of(done, "done. The ledger is marked, so nodes check it")


def answer_of(found: Restoring, result: str = "") -> Restored:
    """Return the answer. ``result``: what was done, unless there is nothing to do; empty: nothing
    yet."""
    ledger_id = found.record.ledger_id
    how = "--yes --force restores it despite the doubts" if found.doubts else "--yes restores it"
    result = result or f"nothing was changed. {how}"
    return Restored(
        ledger_id=ledger_id,
        time_ms=found.record.time_ms,
        now=metadata_lines(found.now),
        restored=metadata_lines(found.was),
        doubts=[_doubt_text(ledger_id, doubt) for doubt in found.doubts],
        result=ALREADY if found.is_done else result,
    )


def recorded_write(
    settings: Settings, ledger_id: int, time_ms: int, *, tell: Tell
) -> JournalRecord:
    """Return the write that this host recorded at this time. Raises RejectedError."""
    for record in _read(settings, ledger_id, tell):
        if record.time_ms == time_ms:
            return record
    raise RejectedError(
        f"this host recorded no write of ledger {ledger_id} at {time_ms}. bookmender ledger "
        f"restore {ledger_id} lists the recorded writes"
    )


def _read(settings: Settings, ledger_id: int, tell: Tell) -> list[JournalRecord]:
    directory = state_dir(settings) / JOURNAL_FOLDER
    try:
        return read_journal(directory, ledger_id)
    except FileNotFoundError:
        tell(
            f"{directory} does not exist. Check node.state_dir, and run this command as the "
            "daemon's user."
        )
        return []
    except OSError as error:
        raise SettingsError(
            f"node.state_dir: cannot read {directory}: {error.strerror}. Run this command as the "
            "daemon's user",
            setting="node.state_dir",
        ) from error


@asynccontextmanager
async def _open_restorer(
    cluster: AdminSession, manager: LedgerManager, cluster_id: str | None, tell: Tell
) -> AsyncIterator[Restorer]:
    async with open_inspection(cluster) as inspection:
        yield Restorer(
            store=cluster.store,
            manager=manager,
            inspector=inspection.inspector,
            view=inspection.views.current,
            paths=cluster.paths,
            cluster=cluster_id,
            clock=SystemClock(),
            tell=tell,
        )


def _doubt_text(ledger_id: int, doubt: str | CopyDoubt | Blocked) -> str:
    return doubt if isinstance(doubt, str) else copy_doubt_text(ledger_id, doubt)


def metadata_lines(metadata: LedgerMetadata | None) -> list[str]:
    """Return the metadata as lines of text."""
    if metadata is None:
        return ["(unreadable metadata)"]
    end = f", last entry {metadata.last_entry_id}" if metadata.is_closed else ""
    return [
        f"{metadata.state.name}{end}",
        *(f"from entry {s.first_entry_id}: {', '.join(s.ensemble)}" for s in metadata.segments),
    ]
