"""``/healthz`` and ``/readyz``, for systemd, Kubernetes and load balancers.

``/healthz`` says that the process lives: the event loop of each role answered lately. A restart
does not help against anything else, so ZooKeeper's absence is no failure here. ``/readyz`` says
that each role has a ZooKeeper session that is answered, and does its work.
"""

import asyncio
import math
from collections.abc import Sequence

from daemon.http.records import HealthRecord, RoleRecord
from daemon.role_state import NodeService, RoleState

PROBE_S = 1.0
SILENT_MAX_S = 15.0
"""A loop that was silent for longer is stuck. Slow disks block loops for some seconds."""


def is_alive(role: NodeService) -> bool:
    return role.thread.silent_s <= SILENT_MAX_S


def role_record(role: NodeService) -> RoleRecord:
    silent_s, state = role.thread.silent_s, role.state
    return RoleRecord(
        role=state.name,
        is_alive=is_alive(role),
        silent_s=None if math.isinf(silent_s) else round(silent_s, 3),
        is_connected=state.is_connected,
        is_working=state.is_working,
        is_leader=state.is_leader,
    )


async def probe(roles: Sequence[NodeService]) -> None:
    """Ask each loop again and again to show that it runs, until cancelled."""
    while True:
        for role in roles:
            role.thread.probe()
        await asyncio.sleep(PROBE_S)


def alive(roles: Sequence[NodeService]) -> HealthRecord:
    """Return the answer of ``/healthz``."""
    stuck = [each.state.name for each in roles if not is_alive(each)]
    return HealthRecord(
        is_ok=not stuck,
        problem=f"{' and '.join(stuck)}: the event loop does not answer. Restart the node."
        if stuck
        else None,
        roles=[role_record(each) for each in roles],
    )


def ready(roles: Sequence[NodeService]) -> HealthRecord:
    """Return the answer of ``/readyz``."""
    unready = [each.state for each in roles if not (is_alive(each) and each.state.is_ready)]
    return HealthRecord(
        is_ok=not unready,
        problem="; ".join(f"{state.name}: {_why_unready(state)}" for state in unready) or None,
        roles=[role_record(each) for each in roles],
    )


def _why_unready(state: RoleState) -> str:
    if not state.is_connected:
        return "ZooKeeper does not answer"
    return "the role is starting" if not state.is_working else "the event loop does not answer"
