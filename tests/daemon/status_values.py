"""Statuses for the tests of `bookmender status`."""

from dataclasses import fields, replace
from typing import Any

import msgspec

from daemon.status.conditions import conditions
from daemon.status.report import status_record
from daemon.status.state import BookieStates, Services, Status
from replication.ledger_record import WaitingNote
from replication.nodes import NodeInfo, Role
from replication.reasons import Blocked, Facts, Reason
from tests.replication.ledger_values import B1, B2, B3

HEALTHY = Status(services=Services(leader="java:3181"), bookies=BookieStates(writable=(B1, B2, B3)))
"""A cluster without a problem. Java's auditor leads."""


def changed(status: Status, **changes: Any) -> Status:
    """Return a copy with other fields. A change names a field of ``Status`` or of one of its parts,
    as in ``changed(HEALTHY, lost=(B1,))``."""
    for name, value in changes.items():
        if name in {field.name for field in fields(Status)}:
            status = replace(status, **{name: value})
            continue
        [part] = [
            field.name
            for field in fields(Status)
            if name in getattr(getattr(status, field.name), "__dataclass_fields__", {})
        ]
        status = replace(status, **{part: replace(getattr(status, part), **{name: value})})
    return status


def codes(status: Status) -> list[str]:
    """Return ``CODE severity`` of each condition, in order."""
    return [f"{each.code} {each.severity}" for each in conditions(status)]


def as_json(status: Status) -> Any:
    """Return the status as ``bookmender status -o json`` prints it."""
    return msgspec.json.decode(msgspec.json.encode(status_record(status)))


def fact(status: Status, code: str) -> str:
    """Return the fact of one condition that holds."""
    [told] = [each.fact for each in conditions(status) if each.code == code]
    return told


def note(ledger_id: int, reason: Reason, detail: str = "because") -> WaitingNote:
    return WaitingNote(
        ledger_id=ledger_id,
        blocked=Blocked(reason=reason, facts=Facts(errors=(detail,))),
        node="host-a",
        since_ms=1_000,
    )


def node(host: str, pid: int, role: Role) -> NodeInfo:
    return NodeInfo(role=role, host=host, pid=pid, bookie_id=None, started_ms=0)
