"""What tests of `status` have in common."""

from daemon.status.state import Status
from replication.ledger_record import WaitingNote
from replication.nodes import NodeInfo, Role
from replication.reasons import Blocked, Facts, Reason
from tests.replication.ledger_values import B1, B2, B3

WHOLE = Status(
    leader="java:3181",
    leader_node=None,
    nodes=(),
    writable=(B1, B2, B3),
    read_only=(),
    lost=(),
    is_disabled=False,
    marked_count=0,
    by_missing=(),
    by_bookie=(),
    under_repair=0,
    waiting=(),
    waiting_count=0,
)


def note(ledger_id: int, reason: Reason, detail: str = "because") -> WaitingNote:
    return WaitingNote(
        ledger_id=ledger_id,
        blocked=Blocked(reason=reason, facts=Facts(errors=(detail,))),
        node="host-a",
        since_ms=1_000,
    )


def node(host: str, pid: int, role: Role) -> NodeInfo:
    return NodeInfo(role=role, host=host, pid=pid, bookie_id=None, started_ms=0)
