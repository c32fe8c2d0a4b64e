"""Publishes the conditions of ``bookmender status`` as metrics of the leader, for alerts.

So alerts, ``status`` and the page agree, and a muted condition raises no alert.
"""

import asyncio
import math
from collections.abc import Iterable, Sequence
from functools import partial

import structlog
from prometheus_client import Gauge

from daemon.admin_session import AdminSession
from daemon.http.cluster_reader import ClusterReader
from daemon.role_state import NodeService
from daemon.status.answers import ConditionRecord
from daemon.status.condition import subjects
from daemon.status.conditions import conditions
from daemon.status.gathering import gather_status
from daemon.status.state import Status
from ledgers.errors import BookmenderError
from ledgers.tasks import in_daemon_thread

log = structlog.get_logger()
CONDITION = Gauge(
    "bookmender_condition",
    "1 for each condition of `bookmender status` that holds and is not muted. The subject is a "
    "bookie that it is about, or a reason that blocks repairs, at most 50; empty: the cluster. "
    "Only the leader has them.",
    ["code", "severity", "subject"],
)
READ_AT = Gauge(
    "bookmender_conditions_timestamp_seconds",
    "When the leader last found out which conditions hold. NaN on all nodes except the leader.",
)
INTERVAL_S = 15.0
LEDGERS_PER_S = 1_000
"""Each of so many queued ledgers makes the pause a second longer."""
SUBJECTS_MAX = 50


async def publish_conditions(roles: Sequence[NodeService], reader: ClusterReader) -> None:
    """Publish while this node leads, until cancelled. If the state cannot be read, the conditions
    that were published stay, and their time tells how old they are."""
    while True:
        pause_s = INTERVAL_S
        if not any(each.state.is_leader for each in roles):
            publish((), read_s=math.nan)
        else:
            try:
                status = (await reader.read("conditions", _read)).value
                found = await in_daemon_thread(partial(conditions, status))
                publish(found, read_s=status.taken_ms / 1000)
                pause_s += status.queue.total / LEDGERS_PER_S
            except BookmenderError as error:
                log.warning("conditions.read_failed", error=str(error))
        await asyncio.sleep(pause_s)


async def _read(cluster: AdminSession) -> Status:
    return await gather_status(cluster, are_marks_read=False)


def publish(found: Iterable[ConditionRecord], *, read_s: float) -> None:
    CONDITION.clear()
    READ_AT.set(read_s)
    for each in found:
        if each.muted_until_ms is None:
            for subject in subjects(each)[:SUBJECTS_MAX] or ("",):
                CONDITION.labels(code=each.code, severity=each.severity, subject=subject).set(1)
