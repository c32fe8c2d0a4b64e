"""The operations on a lock of ours, by whoever holds it. Java's stand at version 0, so neither deletes the other's."""

from collections.abc import Sequence

from ledgers.errors import LockLostError
from ledgers.store import Check, Create, Delete, MetadataStore, MultiFailed, Operation, SetData

OWN_LOCK_VERSION = 1


def make_lock(path: str, data: bytes) -> list[Operation]:
    """It stands at ``OWN_LOCK_VERSION`` from the first moment on."""
    return [
        Create(path=path, data=data, is_ephemeral=True),
        SetData(path=path, data=data, version=0),
    ]


def check_lock(path: str) -> Check:
    return Check(path=path, version=OWN_LOCK_VERSION)


def delete_lock(path: str) -> Delete:
    return Delete(path=path, version=OWN_LOCK_VERSION)


async def guarded_multi(
    store: MetadataStore,
    guards: Sequence[Check],
    operations: Sequence[Operation],
    *,
    ledger_id: int,
) -> None:
    """All of the operations or none, while ``guards`` prove our session and our lock (rule S3).

    Raises LockLostError when they do not, and MultiFailed, whose ``index`` counts within ``operations``.
    """
    try:
        await store.multi([*guards, *operations])
    except MultiFailed as failure:
        if failure.index < len(guards):
            raise LockLostError("our session or our lock is gone", ledger_id=ledger_id) from failure
        raise MultiFailed(failure.index - len(guards), failure.cause) from failure
