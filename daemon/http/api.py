"""``/api/v1``: reads the state of the cluster as JSON.

Each function gathers values with a session (``ClusterReader`` decides when), or makes an answer of
what was gathered. Several answers are made of one status.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from daemon.admin_session import AdminSession
from daemon.cli.bookie import gather_bookies
from daemon.cli.check import read_checks
from daemon.cli.history import is_about
from daemon.cli.queue import queue_rows
from daemon.history_texts import history_record
from daemon.http.cluster_reader import ClusterReader, Reading
from daemon.http.endpoints import HISTORY_DEFAULT_S, HISTORY_MAX_S
from daemon.http.health import role_record
from daemon.http.metrics import package_version
from daemon.http.records import BacklogRecord, NodeRecord
from daemon.role_state import NodeService
from daemon.settings import Settings
from daemon.status.conditions import conditions, health
from daemon.status.gathering import gather_status
from daemon.status.records import note_record
from daemon.status.report import LEDGERS_LISTED_MAX
from daemon.status.state import Status
from ledgers.clock import SystemClock
from replication.history import RecordedHistory, read_history
from replication.marks import marked_ledger_ids, read_marks

LEDGERS_MAX = 1_000
"""Ledgers in one answer."""
PERIODS_S = (HISTORY_DEFAULT_S, HISTORY_MAX_S)
"""Periods of the history that are read. All requests for a part of one share its reading."""


async def read_status(cluster: AdminSession) -> Status:
    return await gather_status(cluster)


def conditions_record(status: Status) -> dict[str, Any]:
    found = conditions(status)
    return {
        "health": health(found),
        "taken_ms": status.taken_ms,
        "conditions": [each.to_json() for each in found],
    }


def blocked_ledgers_record(status: Status) -> dict[str, Any]:
    blocked = status.queue.blocked
    return {
        "count": len(blocked),
        "by_reason": dict(Counter(note.reason.value for note in blocked)),
        "taken_ms": status.taken_ms,
        "ledgers": [note_record(note) for note in blocked[:LEDGERS_LISTED_MAX]],
    }


async def read_bookies(cluster: AdminSession) -> dict[str, Any]:
    rows, unreadable = await gather_bookies(cluster, clock=SystemClock())
    return {"bookies": [row.to_json() for row in rows], "unreadable_orders": list(unreadable)}


async def read_queue(cluster: AdminSession) -> dict[str, Any]:
    """Return the marked ledgers of both queues, the first ``LEDGERS_MAX`` of them in detail. Only
    the marks of these are read."""
    shared = await marked_ledger_ids(cluster.store, cluster.paths)
    private = await marked_ledger_ids(cluster.store, cluster.paths.private)
    own = set(private).difference(shared)
    chosen = sorted(own.union(shared))[:LEDGERS_MAX]
    marks = [
        *await read_marks(cluster.store, cluster.paths, [i for i in chosen if i not in own]),
        *await read_marks(cluster.store, cluster.paths.private, [i for i in chosen if i in own]),
    ]
    marks.sort(key=lambda marked: marked.ledger_id)
    rows = await queue_rows(cluster, marks, only_private=own)
    return {"marked": len(own) + len(shared), "ledgers": rows}


async def read_checks_record(cluster: AdminSession) -> dict[str, Any]:
    return (await read_checks(cluster, clock=SystemClock())).to_json()


async def read_recent_history(reader: ClusterReader, since_s: int = HISTORY_DEFAULT_S) -> Reading:
    """Return a reading of a ``RecordedHistory`` of at least ``since_s``, which is at most
    ``HISTORY_MAX_S``."""
    period_s = next(each for each in PERIODS_S if each >= since_s)
    return await reader.read(f"history_{period_s}", partial(_read_period, period_s=period_s))


async def _read_period(cluster: AdminSession, *, period_s: int) -> RecordedHistory:
    since_ms = SystemClock().wall_ms() - period_s * 1000
    return await read_history(cluster.store, cluster.paths, since_ms)


def recent_history_record(
    recorded: RecordedHistory, *, since_s: int, kinds: Collection[str], limit: int
) -> dict[str, Any]:
    since_ms = SystemClock().wall_ms() - since_s * 1000
    events = [
        noted
        for noted in recorded.events
        if noted.event.last_ms >= since_ms
        and is_about(noted, kinds=kinds, ledger_id=None, bookie=None)
    ]
    return history_record(events, since_ms=since_ms, limit=limit, unreadable=recorded.unreadable)


def node_record(settings: Settings, roles: Sequence[NodeService], *, started_ms: int) -> NodeRecord:
    """Return what this node knows of itself."""
    # Each backlog is read once: its thread may end the leadership at any moment.
    backlogs = (each.state.backlog for each in roles)
    size = next((backlog.size for backlog in backlogs if backlog is not None), None)
    return NodeRecord(
        version=package_version(),
        host=socket.gethostname(),
        pid=os.getpid(),
        mode=settings.node.mode,
        cluster=settings.metadata_service_uri,
        started_ms=started_ms,
        is_leader=any(each.state.is_leader for each in roles),
        backlog=None
        if size is None
        else BacklogRecord(
            by_copies_left=dict(size.by_copies_left),
            missing_bytes=size.missing_bytes,
            marked=size.marked_count,
            private=size.private_count,
            waiting=size.waiting_count,
            oldest_mark_ms=size.oldest_mark_ms,
            remaining_s=size.remaining_s,
        ),
        roles=[role_record(each) for each in roles],
    )
