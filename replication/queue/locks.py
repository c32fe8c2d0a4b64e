"""The lock of a ledger, and the operations on it.

Java's locks have version 0, and ours version 1 or higher, so neither side deletes the other's. Our
versions also differ by session and ledger, because of this interleaving:

1. Node A locks a ledger. The lock disappears: an operator deletes ``locks``, or a bookie's garbage
   collector resumes after its session expired.
2. Node B locks the ledger.
3. Node A writes the metadata, guarded by a check of the lock. The check must fail on B's lock
   (rule S3).

With ``VERSION_MAX`` versions, three of four such writes fail. The others fail if B has written the
metadata, because every write names its version.
"""

from collections.abc import Sequence
from zlib import crc32

from msgspec import Struct

from ledgers.errors import LockLostError
from ledgers.store import Check, Create, Delete, MetadataStore, MultiFailed, Operation, SetData

VERSION_MAX = 4
"""Each version above 1 costs one more operation when a lock is created."""


class LedgerLock(Struct, frozen=True, kw_only=True):
    """A lock of one of our sessions. ``version``: the version of its znode, as soon as it
    exists."""

    path: str
    version: int

    @classmethod
    def of(cls, path: str, *, session_id: int) -> "LedgerLock":
        """Return the lock that this session creates at this path. The version is always the
        same."""
        return cls(path=path, version=1 + crc32(f"{session_id} {path}".encode()) % VERSION_MAX)

    def make(self, data: bytes) -> list[Operation]:
        """Return the operations that create the lock in one transaction. ``data``: the holder, in
        Java's format."""
        return [
            Create(path=self.path, data=data, is_ephemeral=True),
            *(
                SetData(path=self.path, data=data, version=version)
                for version in range(self.version)
            ),
        ]

    @property
    def check(self) -> Check:
        """A check that fails when the lock is gone or has another version (rule S3)."""
        return Check(path=self.path, version=self.version)

    @property
    def delete(self) -> Delete:
        return Delete(path=self.path, version=self.version)


async def guarded_multi(
    store: MetadataStore,
    guards: Sequence[Check],
    operations: Sequence[Operation],
    *,
    ledger_id: int,
) -> None:
    """Apply all operations or none, guarded by checks of session and lock (rule S3).

    Raises LockLostError if a guard fails, and MultiFailed, whose ``index`` counts within
    ``operations``.
    """
    try:
        await store.multi([*guards, *operations])
    except MultiFailed as failure:
        if failure.index < len(guards):
            raise LockLostError("our session or our lock is gone", ledger_id=ledger_id) from failure
        raise MultiFailed(failure.index - len(guards), failure.cause) from failure
