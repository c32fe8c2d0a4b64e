"""JSON and wording of nodes, locks and waiting ledgers. Other commands show them too."""

from typing import Any

from daemon.messages import blocked_record, blocked_text
from daemon.words import printable
from replication.ledger_record import WaitingNote
from replication.marks import LockedLedger
from replication.nodes import NodeInfo
from replication.reasons import Reason


def node_record(node: NodeInfo) -> dict[str, Any]:
    return {
        "host": node.host,
        "pid": node.pid,
        "role": node.role.value,
        "bookie_id": node.bookie_id,
        "started_ms": node.started_ms,
    }


def lock_record(lock: LockedLedger) -> dict[str, Any]:
    return {"ledger_id": lock.ledger_id, "holder": lock.holder, "since_ms": lock.since_ms}


def note_record(note: WaitingNote) -> dict[str, Any]:
    return {
        "ledger_id": note.ledger_id,
        **blocked_record(note.ledger_id, note.blocked),
        "node": note.node,
        "since_ms": note.since_ms,
        "tries": note.tries,
        "next_try_ms": note.next_try_ms,
        "grace_until_ms": note.grace_until_ms,
    }


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
