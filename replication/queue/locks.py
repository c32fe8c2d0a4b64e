"""The lock of a ledger as our sessions make it, and the operations on it.

Java's locks stand at version 0 and ours at 1 or above, so neither side deletes the other's. Among
ourselves the version differs as well, by session and ledger. Suppose that a lock of ours disappears
while we hold it (an operator deletes ``locks``; a bookie's garbage collector resumes after its session
expired), and another node of ours takes the ledger. Then our check of "the lock" must not hold on that
node's lock: it would let our metadata write through (rule S3). With ``VERSION_MAX`` versions, three of
four such writes fail; the version of the metadata, which the writes name too, guards the others.
"""

from collections.abc import Sequence
from zlib import crc32

from msgspec import Struct

from ledgers.errors import LockLostError
from ledgers.store import Check, Create, Delete, MetadataStore, MultiFailed, Operation, SetData

VERSION_MAX = 4
"""Each version above 1 costs an operation when the lock is made."""


class LedgerLock(Struct, frozen=True, kw_only=True):
    """A lock of one of our sessions. ``version`` is its znode's, from the moment that it exists."""

    path: str
    version: int

    @classmethod
    def of(cls, path: str, *, session_id: int) -> "LedgerLock":
        """The lock that this session makes at this path, each time."""
        return cls(path=path, version=1 + crc32(f"{session_id} {path}".encode()) % VERSION_MAX)

    def make(self, data: bytes) -> list[Operation]:
        """The operations that create it, in one transaction. ``data``: who holds it, as Java reads it."""
        return [
            Create(path=self.path, data=data, is_ephemeral=True),
            *(
                SetData(path=self.path, data=data, version=version)
                for version in range(self.version)
            ),
        ]

    @property
    def check(self) -> Check:
        """Holds as long as the lock is the one that was made (rule S3)."""
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
    """All of the operations or none, while ``guards`` prove our session and our lock (rule S3).

    Raises LockLostError when they do not, and MultiFailed, whose ``index`` counts within ``operations``.
    """
    try:
        await store.multi([*guards, *operations])
    except MultiFailed as failure:
        if failure.index < len(guards):
            raise LockLostError("our session or our lock is gone", ledger_id=ledger_id) from failure
        raise MultiFailed(failure.index - len(guards), failure.cause) from failure
