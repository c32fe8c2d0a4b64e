"""A marked ledger as a worker finds it in the queue, and takes it."""

from collections.abc import Callable
from functools import cached_property

from msgspec import Struct

from ledgers.metadata import BookieId
from ledgers.store import Check
from replication.queue.locks import LedgerLock
from replication.queue.mark_tree import SeenMark


class QueuedLedger(
    Struct, frozen=True, kw_only=True, dict=True
):  # dict: the properties are computed once
    """A marked ledger, and its marks as they were read: at least one, the shared one first."""

    ledger_id: int
    marks: tuple[SeenMark, ...]
    is_loss: bool = True
    """Marked in the shared tree: copies are lost. In our own alone, it is to be looked at or moved,
    or single entries lack a copy."""

    def __post_init__(self) -> None:
        assert self.marks, self

    @cached_property
    def replicas(self) -> frozenset[BookieId]:
        """Bookies that somebody found missing. Without any: repair the placement."""
        return frozenset(replica for seen in self.marks for replica in seen.mark.replicas)

    def is_loss_besides(self, bookies: frozenset[BookieId]) -> bool:
        """Whether it is marked in both trees, and the shared mark names bookies, but none of
        these."""
        lost = self.marks[0].mark.replicas
        return self.is_loss and len(self.marks) > 1 and bool(lost) and bookies.isdisjoint(lost)

    def missed_while_registered(self, czxid: Callable[[BookieId], int]) -> frozenset[BookieId]:
        """Bookies that the shared mark names although they were registered when it was last
        written.

        Such a bookie was not lost: entries were missed that it should have, by Java's auditor, for
        example, which reads between the ends where ``auditorLedgerVerificationPercentage`` is set.
        Its ends prove nothing. ``czxid``: of a bookie's registration, 0 where that is not known.
        """
        if not self.is_loss:
            return frozenset()  # our own queue: the finding beside the mark says who lost what
        shared = self.marks[0]
        return frozenset(b for b in shared.mark.replicas if czxid(b) < shared.mzxid)

    @cached_property
    def since_ms(self) -> int:
        """Wall-clock time of the oldest loss; 0 for a mark without a time, which counts as old."""
        return min(seen.mark.ctime_ms or 0 for seen in self.marks)

    @property
    def czxid(self) -> int:
        """Of its shared mark, if there is one: what was in the way before copies were lost is
        another matter."""
        return self.marks[0].czxid


class Take(Struct, frozen=True, kw_only=True):
    """A ledger whose lock we hold, and the marks that it stands for, as they were before we took
    it."""

    queued: QueuedLedger
    lock: LedgerLock

    @property
    def ledger_id(self) -> int:
        return self.queued.ledger_id

    @property
    def guard(self) -> Check:
        """Holds as long as the lock is the one we made (rule S3)."""
        return self.lock.check
