"""The operations on a lock of ours, by whoever holds it. Java's stand at version 0, so neither deletes the other's."""

from ledgers.store import Check, Create, Delete, Operation, SetData

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
