"""The lock of a ledger during a command (close, restore), for marked and unmarked ledgers."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from ledgers.clock import Clock
from ledgers.errors import (
    ConflictError,
    NodeExistsError,
    NoNodeError,
    SessionLostError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.store import Check, MetadataStore, MultiFailed
from replication import znodes
from replication.ledger_record import WaitingNote, WaitingNotes
from replication.locks import LedgerLock
from replication.marks import prepare_tree, read_locks
from replication.znodes import ClusterPaths

WAIT_MAX_S, PAUSE_S = 10.0, 0.25
"""Maximum wait for a worker that repairs the ledger, and the pause between two attempts. A worker
waits five seconds for bookies that do not answer."""
GRACE_WAIT_MAX_S = 60.0
"""Maximum total wait for open-ledger graces: twice the default grace."""
TELL_INTERVAL_S = 10.0

Tell = Callable[[str], None]
"""Prints what the command waits for."""


class LockedError(UnavailableError):
    """Another holder keeps the ledger's lock. The message names the holder and what to do."""


@asynccontextmanager
async def locked(
    ledger_id: int,
    store: MetadataStore,
    paths: ClusterPaths,
    session: Check,
    holder: str,
    *,
    clock: Clock,
    tell: Tell,
) -> AsyncIterator[Check]:
    """Hold the ledger's lock, as a worker does. Yields the check that the lock still exists.

    ``session``: the check that this session still exists (rule S3). Waits for another holder up to
    ``WAIT_MAX_S``. If the holder waits for an open-ledger grace, waits for its end, and says so
    through ``tell``. Raises LockedError if the lock stays taken or the grace is too long, and
    SettingsError if the layout of the queue is unknown.
    """
    await prepare_tree(store, paths)  # it is possible that no node, ours or Java's, ever ran
    lock = LedgerLock.of(paths.lock(ledger_id), session_id=store.session_id)
    data = znodes.lock_to_bytes(holder)
    patience = _Patience(ledger_id, clock=clock, tell=tell)
    while not await _lock(lock, data, store, session):
        patience.show(*await _who_and_why(ledger_id, store, paths))
        await clock.sleep(PAUSE_S)
    try:
        yield lock.check
    finally:
        # The lock is ephemeral, so it ends with the session at the latest. An error here must not
        # replace the error of the body.
        with suppress(UnavailableError, SessionLostError):
            await _unlock(lock, store, session)


class _Patience:
    """Decides how long to wait for the holder of a lock."""

    def __init__(self, ledger_id: int, *, clock: Clock, tell: Tell) -> None:
        self._ledger_id, self._clock, self._tell = ledger_id, clock, tell
        now_s = clock.now_s()
        self._until_s, self._graces_until_s = now_s + WAIT_MAX_S, now_s + GRACE_WAIT_MAX_S
        self._told_due_s = now_s

    def show(self, holder: str, note: WaitingNote | None) -> None:
        """Raise LockedError if the command should no longer wait for the lock.

        ``note``: why the holder waits; None if it does not.
        """
        now_s = self._clock.now_s()
        grace_ms = 0 if note is None else note.grace_until_ms - self._clock.wall_ms()
        if note is not None and grace_ms > 0:
            self._show_grace(holder, note, now_s=now_s, grace_s=grace_ms / 1000)
        elif now_s >= self._until_s:
            raise LockedError(
                f"{holder} is at work on it, or waits for the open-ledger grace: "
                "try again in a moment",
                ledger_id=self._ledger_id,
            )

    def _show_grace(self, holder: str, note: WaitingNote, *, now_s: float, grace_s: float) -> None:
        if now_s + grace_s > self._graces_until_s:
            raise LockedError(
                f"{holder} holds its lock for another {grace_s:.0f} s ({note.reason.value}): try "
                "again then",
                ledger_id=self._ledger_id,
            )
        # After the grace, the holder works on the ledger itself, and the usual wait applies again.
        self._until_s = now_s + grace_s + WAIT_MAX_S
        if now_s >= self._told_due_s:
            self._told_due_s = now_s + TELL_INTERVAL_S
            self._tell(
                f"waiting up to {grace_s:.0f} s for {holder}, which locks ledger "
                f"{self._ledger_id}: {note.reason.value}"
            )


async def _lock(lock: LedgerLock, data: bytes, store: MetadataStore, session: Check) -> bool:
    """Create the lock. Returns False if it exists."""
    try:
        await store.multi([session, *lock.make(data)])
    except MultiFailed as failure:
        if isinstance(failure.cause, NodeExistsError):
            return False
        raise failure.cause from failure
    return True


async def _who_and_why(
    ledger_id: int, store: MetadataStore, paths: ClusterPaths
) -> tuple[str, WaitingNote | None]:
    """Return the holder, for people, and its waiting note if there is one. A note written before
    the lock was created belongs to another holder or attempt, and is ignored."""
    lock = next(iter(await read_locks(store, paths, [ledger_id])), None)
    note = None
    with suppress(UnauthorizedError):
        note = await WaitingNotes(store, paths).read(ledger_id)
    if note is not None and lock is not None and note.is_older_than(lock.czxid):
        note = None
    holder = None if lock is None else lock.holder
    return holder or "another client", note


async def _unlock(lock: LedgerLock, store: MetadataStore, session: Check) -> None:
    """Delete the lock if it is still ours; otherwise it ended with our session."""
    try:
        await store.multi([session, lock.delete])
    except MultiFailed as failure:
        if not isinstance(failure.cause, NoNodeError | ConflictError):
            raise failure.cause from failure
