"""The lock of a ledger that somebody works on by hand, whether it is marked or not."""

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
"""How long whoever is at work on it is waited for: a worker asks bookies that hang for five
seconds; and between two tries."""
GRACE_WAIT_MAX_S = 60.0
"""How long graces are waited for, in all: twice as long as one by default."""
TELL_INTERVAL_S = 10.0

Tell = Callable[[str], None]
"""Says to a person what is waited for."""


class LockedError(UnavailableError):
    """Somebody else has the ledger, and goes on to. The message says who, and what to do."""


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
    """Hold the ledger's lock, marked or not: made as the queue makes it. What is given proves that
    it stands.

    ``session``: proves that it is still ours (rule S3). Who has it is waited for, as only they give
    it back: up to ``WAIT_MAX_S`` while a worker tries it, and, as ``tell`` says, until the
    open-ledger grace is over that it leaves to the ledger's writer. Raises LockedError when
    somebody has it still, or such a grace is too long; SettingsError when the queue has a layout
    that we do not know.
    """
    await prepare_tree(store, paths)  # no node, ours or Java's, may ever have run
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
    """How long whoever has a ledger is waited for."""

    def __init__(self, ledger_id: int, *, clock: Clock, tell: Tell) -> None:
        self._ledger_id, self._clock, self._tell = ledger_id, clock, tell
        now_s = clock.now_s()
        self._until_s, self._graces_until_s = now_s + WAIT_MAX_S, now_s + GRACE_WAIT_MAX_S
        self._told_due_s = now_s

    def show(self, holder: str, note: WaitingNote | None) -> None:
        """Returns where it is to be waited for yet. ``note``: what the ledger waits for, if for
        anything."""
        now_s = self._clock.now_s()
        grace_ms = 0 if note is None else note.grace_until_ms - self._clock.wall_ms()
        if note is not None and grace_ms > 0:
            self._show_grace(holder, note, now_s=now_s, grace_s=grace_ms / 1000)
        elif now_s >= self._until_s:
            raise LockedError(
                f"{holder} is at work on it, or leaves it to its writer for the open-ledger grace: "
                "try again in a moment",
                ledger_id=self._ledger_id,
            )

    def _show_grace(self, holder: str, note: WaitingNote, *, now_s: float, grace_s: float) -> None:
        if now_s + grace_s > self._graces_until_s:
            raise LockedError(
                f"{holder} has it: {note.detail}; that lasts {grace_s:.0f} s yet, and is not waited for: try again then",
                ledger_id=self._ledger_id,
            )
        # After the grace it works on the ledger itself, and is waited for as at the beginning.
        self._until_s = now_s + grace_s + WAIT_MAX_S
        if now_s >= self._told_due_s:
            self._told_due_s = now_s + TELL_INTERVAL_S
            self._tell(
                f"waiting up to {grace_s:.0f} s for {holder}, which has ledger {self._ledger_id}: {note.detail}"
            )


async def _lock(lock: LedgerLock, data: bytes, store: MetadataStore, session: Check) -> bool:
    """False when somebody has it."""
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
    """Who has it, for people; and what they wait for, if it is known. What was noted under an
    earlier lock is not told: it was another's, or of another try."""
    lock = next(iter(await read_locks(store, paths, [ledger_id])), None)
    note = None
    with suppress(UnauthorizedError):
        note = await WaitingNotes(store, paths).read(ledger_id)
    if note is not None and lock is not None and note.is_older_than(lock.czxid):
        note = None
    holder = None if lock is None else lock.holder
    return holder or "somebody", note


async def _unlock(lock: LedgerLock, store: MetadataStore, session: Check) -> None:
    """If it still is ours; otherwise it went with our session."""
    try:
        await store.multi([session, lock.delete])
    except MultiFailed as failure:
        if not isinstance(failure.cause, NoNodeError | ConflictError):
            raise failure.cause from failure
