"""The lock of a ledger, and a marked ledger as a worker reads and locks it.

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

from collections.abc import Callable
from functools import cached_property
from zlib import crc32

import msgspec
from msgspec import Struct

from ledgers.model import BookieId
from ledgers.store import Check, Create, Delete, Operation, SetData
from replication.cluster import SeenAbsences
from replication.ledger_record import ClusterFingerprint, WaitingNote
from replication.marks import MarkedLedger

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


# dict: the properties are computed once.
class QueuedLedger(Struct, frozen=True, kw_only=True, dict=True):
    """A marked ledger, and its marks as they were read: at least one, the shared one first."""

    ledger_id: int
    marks: tuple[MarkedLedger, ...]
    is_loss: bool = True
    """True if it is marked in the shared tree: copies are lost. A ledger that is marked only in the
    private tree must be inspected or moved, or single entries lack a copy."""

    def __post_init__(self) -> None:
        assert self.marks, self

    @cached_property
    def replicas(self) -> frozenset[BookieId]:
        """Bookies that the marks name as missing. Without any: repair the placement."""
        return frozenset(replica for seen in self.marks for replica in seen.replicas)

    def is_loss_besides(self, bookies: frozenset[BookieId]) -> bool:
        """Return True if it is marked in both trees, and the shared mark names other bookies than
        these."""
        lost = self.marks[0].replicas
        return self.is_loss and len(self.marks) > 1 and bool(lost) and bookies.isdisjoint(lost)

    def missed_while_registered(self, czxid: Callable[[BookieId], int]) -> frozenset[BookieId]:
        """Return bookies that the shared mark names although they were registered when it was last
        written.

        Such a bookie was not lost. A check found that it lacks entries; Java's auditor does if
        ``auditorLedgerVerificationPercentage`` is set. ``czxid``: returns the czxid of a bookie's
        registration, 0 if unknown.
        """
        if not self.is_loss:
            return frozenset()  # in the private queue the finding names the bookies
        shared = self.marks[0]
        return frozenset(b for b in shared.replicas if czxid(b) < shared.mzxid)

    def perhaps_missed(self, absences: SeenAbsences) -> frozenset[BookieId]:
        """Return the bookies that the shared mark names, unless they are known to have been absent
        when it was created and last written.

        A mark does not say why it names a bookie. A check may have found that the bookie lacks
        entries, and the bookie may have restarted since. So its first and last entries prove
        nothing.
        """
        if not self.is_loss:
            return frozenset()
        mark = self.marks[0]
        return frozenset(
            bookie
            for bookie in mark.replicas
            if not absences.was_absent(bookie, from_zxid=mark.czxid, to_zxid=mark.mzxid)
        )

    @cached_property
    def since_ms(self) -> int:
        """Wall-clock time of the oldest loss; 0 for a mark without a time, which counts as old."""
        return min((seen.mark and seen.mark.ctime_ms) or 0 for seen in self.marks)

    @property
    def czxid(self) -> int:
        """The czxid of the shared mark, or else of the private one. Older waiting notes do not
        count: they explain what blocked a repair before copies were lost."""
        return self.marks[0].czxid


class LedgerLease(Struct, kw_only=True):
    """A ledger that this session has locked, with its marks as they were read before locking."""

    queued: QueuedLedger
    lock: LedgerLock
    note: WaitingNote | None = None
    """The waiting note in ZooKeeper, as it was read or written under the lock. No other worker
    writes it meanwhile; an operator may."""
    suspects: set[BookieId] = msgspec.field(default_factory=set)
    """Bookies whose copies this try or an earlier one, on any node, found bad. The repair adds to
    it, and the note keeps it for the next try."""
    fingerprint: ClusterFingerprint | None = None
    """The cluster when this try began."""

    @property
    def ledger_id(self) -> int:
        return self.queued.ledger_id

    @property
    def guard(self) -> Check:
        """A check that fails when the lock is gone or is another's (rule S3)."""
        return self.lock.check

    @property
    def new_suspects(self) -> set[BookieId]:
        """The suspects that the note does not name."""
        return self.suspects if self.note is None else self.suspects - self.note.suspects
