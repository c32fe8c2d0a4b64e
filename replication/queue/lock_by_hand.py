"""The lock of a ledger that somebody works on by hand, whether it is marked or not."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ledgers.errors import ConflictError, NodeExistsError, NoNodeError, UnavailableError
from ledgers.store import Check, Delete, MetadataStore, MultiFailed
from replication.queue import payloads
from replication.queue.queue import OWN_LOCK_VERSION, lock_operations
from replication.queue.tree import prepare_tree


@asynccontextmanager
async def locked(
    ledger_id: int, store: MetadataStore, ur: str, session: Check, holder: str
) -> AsyncIterator[Check]:
    """Hold the ledger's lock, marked or not: made as the queue makes it. What is given proves that it stands.

    ``session``: proves that it is still ours (rule S3). Raises UnavailableError when somebody else has it,
    SettingsError when the queue has a layout that we do not know.
    """
    await prepare_tree(store, ur)  # no node, ours or Java's, may ever have run
    path, data = payloads.lock_path(ur, ledger_id), payloads.lock_to_bytes(holder)
    try:
        await store.multi([session, *lock_operations(path, data)])
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
