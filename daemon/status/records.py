"""Answers about nodes, locks and waiting ledgers, and texts. Other commands use them too."""

from daemon.answers import Answer
from daemon.messages import blocked_text, message
from daemon.words import printable
from ledgers.model import BookieId
from replication.ledger_record import WaitingNote
from replication.marks import LockedLedger
from replication.nodes import NodeInfo
from replication.reasons import Blocked, Facts, Reason


class LiveNodeRecord(Answer, frozen=True, kw_only=True):
    """A role of a bookmender node, or of a command that holds locks."""

    host: str
    pid: int
    role: str
    """``auditor``, ``worker``, or ``hand`` for a command."""
    bookie_id: str | None
    started_ms: int

    @classmethod
    def of(cls, node: NodeInfo) -> "LiveNodeRecord":
        return cls(
            host=node.host,
            pid=node.pid,
            role=node.role.value,
            bookie_id=node.bookie_id,
            started_ms=node.started_ms,
        )


class ForeignLockRecord(Answer, frozen=True, kw_only=True):
    ledger_id: int
    holder: str | None
    since_ms: int

    @classmethod
    def of(cls, lock: LockedLedger) -> "ForeignLockRecord":
        return cls(ledger_id=lock.ledger_id, holder=lock.holder, since_ms=lock.since_ms)


class PendingLossRecord(Answer, frozen=True, kw_only=True):
    """An absent bookie that becomes lost."""

    bookie: BookieId
    since_ms: int
    lost_ms: int
    """When it becomes lost."""
    is_excused: bool
    """An outage of ZooKeeper set that time, not the recovery delay."""


class UnprovenEndsRecord(Answer, frozen=True, kw_only=True):
    """Open ledgers whose end could not be proven at the last attempt."""

    count: int
    ledgers: list[int]
    """At most 1,000 of them, ascending."""


class NoteRecord(Answer, frozen=True, kw_only=True):
    """Why a worker postponed a ledger."""

    ledger_id: int
    reason: str
    facts: Facts
    besides: list[Blocked]
    detail: str
    node: str
    since_ms: int
    tries: int
    next_try_ms: int
    grace_until_ms: int

    @classmethod
    def of(cls, note: WaitingNote) -> "NoteRecord":
        return cls(
            ledger_id=note.ledger_id,
            reason=note.reason.value,
            facts=note.blocked.facts,
            besides=list(note.blocked.besides),
            detail=message(note.ledger_id, note.blocked).text,
            node=note.node,
            since_ms=note.since_ms,
            tries=note.tries,
            next_try_ms=note.next_try_ms,
            grace_until_ms=note.grace_until_ms,
        )


def help_text(note: WaitingNote) -> str:
    """Return a sentence about a ledger that is blocked, or waits for its writer, a hold or a
    maintenance window."""
    what = _WAITED_FOR.get(note.reason, "is blocked")
    return printable(
        f"ledger {note.ledger_id} {what}: {blocked_text(note.ledger_id, note.blocked)}"
    )


_WAITED_FOR = {
    Reason.HOLD: "waits for the end of the safety hold",
    Reason.MAINTENANCE: "waits for the end of a maintenance window",
    Reason.OPEN_FRAGMENT: "waits for its writer",
}


def age_s(since_ms: int, now_ms: int) -> int:
    return max(0, now_ms - since_ms) // 1000


def seconds_until(due_ms: int, now_ms: int) -> int:
    """Return the seconds left, rounded up. 0 if the time is over or was never set."""
    return -(-max(0, due_ms - now_ms) // 1000)
