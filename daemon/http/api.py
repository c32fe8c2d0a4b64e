"""The paths of bookmender: the node, the state of the cluster as JSON, and changes.

Reading handlers take values from ``ClusterReader``, which decides when something is read. Several
answers are made of one status.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from daemon.admin_session import AdminSession
from daemon.http import changes, health, records
from daemon.http.changes import WrongRequestError
from daemon.http.cluster_reader import ClusterReader, Reading
from daemon.http.endpoints import (
    JSON,
    Endpoint,
    Kind,
    Shared,
    flag,
    option,
    order,
    serve_change,
    serves,
)
from daemon.http.metrics import package_version
from daemon.operations.bookies import BookiesRecord, bookies_record, gather_bookies
from daemon.operations.checks import ChecksRecord, read_checks
from daemon.operations.history import HistoryRecord, select
from daemon.operations.holds import HoldStateRecord, read_hold
from daemon.operations.queue import QueueRecord, read_queue
from daemon.role_state import NodeService
from daemon.settings import Settings
from daemon.status import answers
from daemon.status.gathering import gather_status
from daemon.status.report import blocked_ledgers_record, conditions_record, status_record
from daemon.status.state import Status
from daemon.words import DURATION_PATTERN, parse_duration_s
from ledgers.clock import SystemClock
from ledgers.tasks import in_daemon_thread
from replication.history import Kind as EventKind
from replication.history import RecordedHistory, read_history

EVENTS_MAX = 1_000
"""Events in one answer."""
HISTORY_DEFAULT_S = 86_400
HISTORY_MAX_S = 7 * 86_400
"""How far the history looks back. The texts of its parameter say the same."""
PERIODS_S = (HISTORY_DEFAULT_S, HISTORY_MAX_S)
"""Periods of the history that are read. All requests for a part of one share its reading."""


# --- The node -------------------------------------------------------------------------------------


@Endpoint(
    "GET /metrics",
    "Metrics of this node for Prometheus, as text or OpenMetrics",
    str,
    kind=Kind.METRICS,
)
async def metrics(shared: Shared, request: web.Request) -> web.Response:
    text, content_type = shared.metrics_text.text(request.headers.get("Accept", ""))
    return web.Response(body=text, headers={"Content-Type": content_type})


@Endpoint(
    "GET /healthz",
    "The process lives: the event loop of each role answers",
    records.HealthRecord,
    others={503: records.HealthRecord},
    kind=Kind.HEALTH,
)
async def healthz(shared: Shared, request: web.Request) -> web.Response:
    return _health(health.alive(shared.roles))


@Endpoint(
    "GET /readyz",
    "Each role has a ZooKeeper session and does its work",
    records.HealthRecord,
    others={503: records.HealthRecord},
    kind=Kind.HEALTH,
)
async def readyz(shared: Shared, request: web.Request) -> web.Response:
    return _health(health.ready(shared.roles))


def _health(record: records.HealthRecord) -> web.Response:
    status = 200 if record.is_ok else 503
    return web.Response(body=msgspec.json.encode(record), status=status, content_type=JSON)


@Endpoint("GET /api/v1/node", "This node and its roles", records.NodeRecord)
async def node(shared: Shared, request: web.Request) -> records.NodeRecord:
    return node_record(shared.settings, shared.roles, started_ms=shared.started_ms)


def node_record(
    settings: Settings, roles: Sequence[NodeService], *, started_ms: int
) -> records.NodeRecord:
    """Return what this node knows of itself."""
    # Each backlog is read once: its thread may end the leadership at any moment.
    backlogs = (each.state.backlog for each in roles)
    size = next((backlog.size for backlog in backlogs if backlog is not None), None)
    return records.NodeRecord(
        version=package_version(),
        host=socket.gethostname(),
        pid=os.getpid(),
        mode=settings.node.mode,
        cluster=settings.metadata_service_uri,
        started_ms=started_ms,
        is_leader=any(each.state.is_leader for each in roles),
        backlog=None
        if size is None
        else records.BacklogRecord(
            by_copies_left=dict(size.by_copies_left),
            missing_bytes=size.missing_bytes,
            marked=size.marked_count,
            private=size.private_count,
            waiting=size.waiting_count,
            oldest_mark_ms=size.oldest_mark_ms,
            remaining_s=size.remaining_s,
        ),
        roles=[health.role_record(each) for each in roles],
    )


# --- The state of the cluster ---------------------------------------------------------------------


def _of_status(name: str, about: str, answer: Any, make: Callable[[Status], Any]) -> None:
    async def handler(shared: Shared, request: web.Request) -> bytes:
        return await (await shared.reader.read("status", read_status)).json(name, make)

    Endpoint(f"GET /api/v1/{name}", about, answer, name=name)(handler)


async def read_status(cluster: AdminSession) -> Status:
    return await gather_status(cluster)


_of_status("status", "As bookmender status -o json", answers.StatusRecord, status_record)
_of_status("conditions", "Health and conditions", answers.ConditionsRecord, conditions_record)
_of_status(
    "blocked", "Ledgers that need help, and why", answers.BlockedRecord, blocked_ledgers_record
)


@Endpoint(
    "GET /api/v1/history",
    "As bookmender history -o json",
    HistoryRecord,
    option(
        "since",
        "How far to look back: 30m, 2h, 7d. At most 7d",
        type="string",
        pattern=f"^{DURATION_PATTERN}$",
        default="24h",
    ),
    option(
        "kind",
        "Only these events. May be repeated",
        type="array",
        items={"type": "string", "enum": [kind.value for kind in EventKind]},
    ),
    option(
        "limit",
        "Events in the answer, the last ones of the period",
        type="integer",
        minimum=1,
        maximum=EVENTS_MAX,
        default=EVENTS_MAX,
    ),
)
async def history(shared: Shared, request: web.Request) -> bytes:
    query = request.query
    try:
        since_s = parse_duration_s(query["since"]) if "since" in query else HISTORY_DEFAULT_S
    except ValueError as error:
        raise WrongRequestError(f"since: {error}") from error
    if since_s > HISTORY_MAX_S:
        raise WrongRequestError(
            "since: at most 7d. For a longer period run `bookmender history --since 30d`."
        )
    limit = query.get("limit", str(EVENTS_MAX))
    # Python refuses to convert a number of very many digits.
    is_short = limit.isascii() and limit.isdecimal() and len(limit) <= len(str(EVENTS_MAX))
    if not (is_short and 1 <= int(limit) <= EVENTS_MAX):
        raise WrongRequestError(f"limit: a number from 1 to {EVENTS_MAX}")
    kinds, known = query.getall("kind", []), [kind.value for kind in EventKind]
    if not set(kinds) <= set(known):
        raise WrongRequestError(f"kind: one of {', '.join(known)}")
    recorded = (await read_recent_history(shared.reader, since_s)).value
    make = partial(recent_history_record, recorded, since_s=since_s, kinds=kinds, limit=int(limit))
    return await in_daemon_thread(lambda: msgspec.json.encode(make()))


@serves("/api/v1/bookies", "As bookmender bookie list -o json", BookiesRecord)
async def read_bookies(cluster: AdminSession) -> BookiesRecord:
    rows, unreadable = await gather_bookies(cluster, clock=SystemClock())
    return bookies_record(rows, unreadable)


serves("/api/v1/queue", "As bookmender queue -o json", QueueRecord)(read_queue)


@serves("/api/v1/checks", "As bookmender check -o json", ChecksRecord)
async def read_checks_record(cluster: AdminSession) -> ChecksRecord:
    return (await read_checks(cluster, clock=SystemClock())).record()


@serves("/api/v1/hold", "As bookmender hold -o json", HoldStateRecord)
async def read_hold_record(cluster: AdminSession) -> HoldStateRecord:
    return await read_hold(cluster, clock=SystemClock())


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
) -> HistoryRecord:
    since_ms = SystemClock().wall_ms() - since_s * 1000
    return select(recorded, since_ms=since_ms, kinds=kinds, limit=limit)


# --- Changes --------------------------------------------------------------------------------------


@Endpoint(
    "POST /api/v1/hold",
    "Begin a safety hold, or replace the present one",
    HoldStateRecord,
    body=records.HoldOrderRecord,
)
async def begin_hold(shared: Shared, request: web.Request) -> HoldStateRecord:
    wanted = await order(request, records.HoldOrderRecord)
    return await shared.change(lambda c: changes.begin(c, wanted))


@Endpoint(
    "DELETE /api/v1/hold",
    "End the safety hold",
    HoldStateRecord,
    option(
        "accept_lost",
        "true: end it although bookies are absent, which then count as lost",
        type="boolean",
    ),
)
async def end_hold(shared: Shared, request: web.Request) -> HoldStateRecord:
    accepts = flag("accept_lost", request.query.get("accept_lost", "false"))
    return await shared.change(lambda c: changes.end(c, accepts_lost=accepts))


serve_change(
    "POST /api/v1/disable",
    "Disable auto-recovery, Java's too",
    records.SwitchRecord,
    changes.disable,
    records.DisableOrderRecord,
)
serve_change(
    "POST /api/v1/enable", "Enable auto-recovery again", records.SwitchRecord, changes.enable
)
serve_change(
    "PUT /api/v1/bookies/{bookie}/drain",
    "Move all copies off a running bookie",
    records.ChangedRecord,
    changes.begin_drain,
    records.DrainOrderRecord,
)
serve_change(
    "DELETE /api/v1/bookies/{bookie}/drain",
    "Withdraw the drain. Moved copies stay moved",
    records.ChangedRecord,
    changes.end_drain,
)
serve_change(
    "PUT /api/v1/bookies/{bookie}/maintenance",
    "Let a bookie be absent for a while without copying",
    records.ChangedRecord,
    changes.begin_maintenance,
    records.MaintenanceOrderRecord,
)
serve_change(
    "DELETE /api/v1/bookies/{bookie}/maintenance",
    "End the maintenance window",
    records.ChangedRecord,
    changes.end_maintenance,
)
