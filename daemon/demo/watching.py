"""What happens while the daemons work, as it is seen from outside: ZooKeeper, and their logs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from daemon.demo.nodes import Node
from daemon.status.state import Status
from replication.waiting.notes import WaitingNote


@dataclass(slots=True)
class Timeline:
    """Times in seconds since the bookie was killed; None until it has happened."""

    bookie_gone_s: float | None = None
    """Its znode ended: ZooKeeper's session time-out."""
    first_mark_s: float | None = None
    whole_s: float | None = None
    leader: str | None = None
    marked_max: int = 0
    mended_ledgers: int = 0
    mended_entries: int = 0
    mended_bytes: int = 0
    zookeeper_requests: int = 0
    """Of the sessions that were closed in good order; a multi counts as one."""
    errors: list[str] = field(default_factory=list)
    """Errors that a daemon logged: there should be none."""

    def hear(self, nodes: Sequence[Node]) -> None:
        """Read on in the daemons' logs."""
        for node in nodes:
            for event in node.events():
                self._note(node, event)

    def see(self, status: Status, *, bookie: str, now_s: float) -> None:
        """Take in the state of the cluster."""
        self.leader = status.leader
        self.marked_max = max(self.marked_max, status.marked_count)
        if self.bookie_gone_s is None and bookie not in (*status.writable, *status.read_only):
            self.bookie_gone_s = now_s
        if self.first_mark_s is None and status.marked_count:
            self.first_mark_s = now_s

    def _note(self, node: Node, event: dict[str, Any]) -> None:
        match event.get("event"):
            case "ledger.repaired":
                self.mended_ledgers += 1
                self.mended_entries += event.get("entry_count", 0)
                self.mended_bytes += event.get("entry_bytes", 0)
            case "session.closed":
                self.zookeeper_requests += event.get("request_count", 0)
            case "unreadable":
                self.errors.append(f"{node.name}: {event['line']}")
            case name if event.get("level") == "error":
                self.errors.append(f"{node.name}: {name} {event.get('error', '')}".rstrip())


def line(timeline: Timeline, status: Status, *, now_s: float) -> str:
    """One line of progress."""
    waiting = waiting_in_words(status.waiting)
    return (
        f"{now_s:6.1f} s  leader {status.leader or 'none':<18} marked {status.marked_count:>4}  "
        f"under repair {status.under_repair:>3}  mended {timeline.mended_ledgers:>4} ledgers, "
        f"{timeline.mended_bytes / 1e6:.1f} MB" + (f"  waiting: {waiting}" if waiting else "")
    )


def waiting_in_words(notes: Sequence[WaitingNote]) -> str:
    counts: dict[str, int] = {}
    for note in notes:
        counts[note.reason.value] = counts.get(note.reason.value, 0) + 1
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))


def stuck_ledgers(status: Status) -> frozenset[int] | None:
    """The marked ledgers, if all of them wait for help from outside; None while some are worked
    on."""
    stuck = [note.ledger_id for note in status.waiting if note.reason.needs_help]
    is_all = status.marked_count == len(stuck) == status.waiting_count
    return frozenset(stuck) if is_all else None


Say = Callable[[str], None]
