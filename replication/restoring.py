"""Putting a ledger's metadata back as it was before a recorded write (rule S2).

Under the ledger's lock, by compare-and-set on the version that the decision was made from, and
recorded itself, so that it can be undone in turn. What the metadata says is put back, not what bookies
store: copies that it named then may be gone since.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ledgers.errors import (
    ConflictError,
    CorruptionError,
    LockLostError,
    NodeExistsError,
    NoNodeError,
    NoSuchLedgerError,
    RejectedError,
    UnavailableError,
)
from ledgers.formats.metadata_codec import parse_metadata
from ledgers.manager import LedgerManager
from ledgers.metadata import LedgerMetadata
from ledgers.store import Check, Create, Delete, MetadataStore, MultiFailed, SetData
from replication.journal import JournalRecord
from replication.queue import payloads
from replication.queue.queue import OWN_LOCK_VERSION


class RestoreRefusedError(RejectedError):
    """Putting the bytes back would undo more than the recorded write. The message says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restoring:
    """What is to be put back in place of what: bytes of the ledger's znode, and what they say.

    ``now`` is None where the present ones cannot be read as metadata. ``version``: the znode's.
    """

    record: JournalRecord
    was: LedgerMetadata
    present: bytes
    now: LedgerMetadata | None
    version: int

    @property
    def is_done(self) -> bool:
        """The metadata is as it was already."""
        return self.present == self.record.before

    @property
    def doubts(self) -> Sequence[str]:
        """Why this should not be done without a person's word for it."""
        was, now = self.was, self.now
        told = []
        if self.present != self.record.after:
            told.append(
                "the metadata was written again since (or the recorded write was never made): "
                "later changes would be undone with it"
            )
        if now is None or not now.is_closed:
            return told
        if not was.is_closed:
            told.append(f"it would turn a closed ledger back to {was.state.name}")
        elif (was.last_entry_id, was.length) != (now.last_entry_id, now.length):
            told.append(
                f"it would move the ledger's end from entry {now.last_entry_id} to {was.last_entry_id}"
            )
        return told


async def plan_restoring(
    record: JournalRecord, store: MetadataStore, manager: LedgerManager
) -> Restoring:
    """Raises NoSuchLedgerError, and CorruptionError when the record cannot be read as metadata."""
    try:
        was = parse_metadata(record.before)
    except CorruptionError as error:
        raise CorruptionError(
            f"the record cannot be read as metadata: {error}", ledger_id=record.ledger_id
        ) from error
    try:
        present, stat = await store.get(manager.path(record.ledger_id))
    except NoNodeError as error:
        raise NoSuchLedgerError("no such ledger", ledger_id=record.ledger_id) from error
    return Restoring(
        record=record, was=was, present=present, now=readable(present), version=stat.version
    )


def readable(data: bytes) -> LedgerMetadata | None:
    """None for bytes that are no metadata."""
    try:
        return parse_metadata(data)
    except CorruptionError:
        return None


async def restore(
    record: JournalRecord,
    *,
    store: MetadataStore,
    manager: LedgerManager,
    ur: str,
    session: Check,
    holder: str,
    is_forced: bool = False,
) -> Restoring:
    """Put back what was before the recorded write; what was done.

    ``session``: proves that it is still ours (rule S3). ``is_forced``: whatever the doubts. Raises
    RestoreRefusedError; UnavailableError when somebody else holds the ledger; ConflictError, LockLostError
    and UnknownOutcomeError as ``LedgerManager.write``.
    """
    async with _locked(record.ledger_id, store, ur, session, holder) as lock:
        restoring = await plan_restoring(record, store, manager)
        if restoring.is_done:
            return restoring
        if restoring.doubts and not is_forced:
            raise RestoreRefusedError("; ".join(restoring.doubts), ledger_id=record.ledger_id)
        write = manager.put_back_operation(
            record.ledger_id,
            record.before,
            present=restoring.present,
            version=restoring.version,
        )
        try:
            await store.multi([session, lock, write])
        except MultiFailed as failure:
            if failure.index < 2:
                raise LockLostError(
                    "our session or our lock is gone", ledger_id=record.ledger_id
                ) from failure
            raise failure.cause from failure
        return restoring


@asynccontextmanager
async def _locked(
    ledger_id: int, store: MetadataStore, ur: str, session: Check, holder: str
) -> AsyncIterator[Check]:
    """The ledger's lock, marked or not: made as the queue makes it."""
    path, data = payloads.lock_path(ur, ledger_id), payloads.lock_to_bytes(holder)
    try:
        await store.multi(
            [
                session,
                Create(path=path, data=data, is_ephemeral=True),
                SetData(path=path, data=data, version=0),
            ]
        )
    except MultiFailed as failure:
        if isinstance(failure.cause, NodeExistsError):
            raise UnavailableError(
                "somebody is repairing it now: try again in a moment", ledger_id=ledger_id
            ) from failure
        raise failure.cause from failure
    try:
        yield Check(path=path, version=OWN_LOCK_VERSION)
    finally:
        await _unlock(path, store, session)


async def _unlock(path: str, store: MetadataStore, session: Check) -> None:
    """If it still is ours; otherwise it went with our session."""
    try:
        await store.multi([session, Delete(path=path, version=OWN_LOCK_VERSION)])
    except MultiFailed as failure:
        if not isinstance(failure.cause, NoNodeError | ConflictError):
            raise failure.cause from failure
