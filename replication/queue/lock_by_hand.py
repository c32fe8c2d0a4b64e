"""The lock of a ledger that somebody works on by hand, whether it is marked or not."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from ledgers.clock import Clock
from ledgers.errors import (
    ConflictError,
    CorruptionError,
    NodeExistsError,
    NoNodeError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.store import Check, Delete, MetadataStore, MultiFailed
from replication.queue import payloads
from replication.queue.queue import OWN_LOCK_VERSION, lock_operations
from replication.queue.tree import prepare_tree

WAIT_MAX_S, PAUSE_S = 10.0, 0.25
"""How long whoever has it is waited for: a worker asks bookies that hang for five seconds; and between two tries."""


@asynccontextmanager
async def locked(
    ledger_id: int, store: MetadataStore, ur: str, session: Check, holder: str, *, clock: Clock
) -> AsyncIterator[Check]:
    """Hold the ledger's lock, marked or not: made as the queue makes it. What is given proves that it stands.

    ``session``: proves that it is still ours (rule S3). Who has it is waited for, up to ``WAIT_MAX_S``: a worker tries
    a ledger for some seconds. Raises UnavailableError when somebody has it still, SettingsError when the queue has a
    layout that we do not know.
    """
    await prepare_tree(store, ur)  # no node, ours or Java's, may ever have run
    path, data = payloads.lock_path(ur, ledger_id), payloads.lock_to_bytes(holder)
    until_s = clock.now_s() + WAIT_MAX_S
    while not await _lock(path, data, store, session):
        if clock.now_s() >= until_s:
            raise UnavailableError(
                f"{await _holder(path, store)} is at work on it, or leaves it to its writer for the open-ledger grace: "
                "try again in a moment",
                ledger_id=ledger_id,
            )
        await clock.sleep(PAUSE_S)
    try:
        yield Check(path=path, version=OWN_LOCK_VERSION)
    finally:
        await _unlock(path, store, session)


async def _lock(path: str, data: bytes, store: MetadataStore, session: Check) -> bool:
    """False when somebody has it."""
    try:
        await store.multi([session, *lock_operations(path, data)])
    except MultiFailed as failure:
        if isinstance(failure.cause, NodeExistsError):
            return False
        raise failure.cause from failure
    return True


async def _holder(path: str, store: MetadataStore) -> str:
    """For people."""
    with suppress(NoNodeError, CorruptionError, UnauthorizedError):
        data, _ = await store.get(path)
        return payloads.parse_lock(data) or "somebody"
    return "somebody"


async def _unlock(path: str, store: MetadataStore, session: Check) -> None:
    """If it still is ours; otherwise it went with our session."""
    try:
        await store.multi([session, Delete(path=path, version=OWN_LOCK_VERSION)])
    except MultiFailed as failure:
        if not isinstance(failure.cause, NoNodeError | ConflictError):
            raise failure.cause from failure
