"""One node: starts its services, runs until SIGTERM or SIGINT, and stops the services in reverse
order."""

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, closing
from functools import partial

import structlog
import uvloop

from auditor.ledger_map_updater import RecentWrites
from daemon.observe.node import ReportFile, run_observer_session
from daemon.observe.observing import open_observing
from daemon.placement import check_rack_sources
from daemon.roles import new_outages, run_auditor_session, run_worker_session
from daemon.session import open_session
from daemon.settings import Settings
from daemon.state import open_journal, state_dir
from daemon.threads import ServiceThread, own_cause
from ledgers.errors import SettingsError
from replication.journal import MetadataJournal
from replication.nodes import Role

log = structlog.get_logger()

OpenSession = AbstractAsyncContextManager[object]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
STOP_TIMEOUT_S = 4.0
"""Deadline for stopping all services. Closing a session releases its locks and its vote at once."""

YOUNG_OBJECTS_MAX = 100_000
"""Number of new objects after which the garbage collector looks for cycles. Python's default of 700
is less than the ledgers under repair need at any moment."""


def run_node(settings: Settings) -> int:
    """Run until a signal, and return the exit code. Raises BookmenderError if the node cannot
    start."""
    _step_back(settings.node.nice)
    check_rack_sources(settings.placement)
    if settings.node.mode == "observe":
        report = ReportFile(state_dir(settings))
        session = partial(run_observer_session, settings, report, new_outages(settings))
        observer = ServiceThread("observer", session, loop_factory=uvloop.new_event_loop)
        return _run(settings, [observer], partial(open_observing, settings))
    with closing(open_journal(settings)) as journal:
        journal.try_out()
        roles = _roles(settings, journal)
        return _run(settings, roles, partial(open_session, settings, Role.WORKER, journal))


def _run(
    settings: Settings, roles: Sequence[ServiceThread], open_once: Callable[[], OpenSession]
) -> int:
    """Check the cluster, then run the services until a signal.

    ``open_once``: opens a session once in this thread, so that errors are reported before any
    service starts.
    """
    check_cluster(open_once)  # holds no lock, so a signal may stop it at once
    stop = threading.Event()
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: stop.set())
    log.info(
        "node.started",
        pid=os.getpid(),
        mode=settings.node.mode,
        cluster=settings.metadata_service_uri,
        auditor=settings.auditor.enabled,
        replication=settings.replication.enabled,
    )
    _spare_the_collector()
    _start(roles)
    stop.wait()
    is_stopped = _stop(roles)
    log.info("node.stopped", is_clean=is_stopped)
    return 0 if is_stopped else 1


def _step_back(nice: int) -> None:
    """Lower the priority of the process. A lower priority that it was started with stays."""
    if nice > os.getpriority(os.PRIO_PROCESS, 0):
        try:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        except OSError as error:  # forbidden by a sandbox; the node works without it
            log.warning("node.nice_failed", nice=nice, error=error.strerror)


def _spare_the_collector() -> None:
    """Make the garbage collector run less often. It took a tenth of a repair's CPU.

    Modules and other permanent objects are frozen: scanning them stopped both services for 15 ms at
    a time. The objects of one repair form no cycles, so reference counting frees them before a
    collection.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX)


def _start(roles: Sequence[ServiceThread]) -> None:
    """Start the services with signals blocked in their threads, so that a signal always wakes the
    main thread.

    Linux may deliver a signal to any thread if the process was stopped when the signal arrived.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        for role in roles:
            role.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _stop(roles: Sequence[ServiceThread]) -> bool:
    """Stop the services in reverse order. All are stopped even if one fails to end; returns whether
    all ended."""
    stopped = [role.stop(timeout_s=STOP_TIMEOUT_S / len(roles)) for role in reversed(roles)]
    return all(stopped)


def check_cluster(open_once: Callable[[], OpenSession]) -> None:
    """Open a session and close it again. Raises BookmenderError."""

    async def check() -> None:
        async with open_once():
            pass

    try:
        asyncio.run(check())
    except BaseExceptionGroup as group:
        if (cause := own_cause(group)) is None:
            raise
        raise cause from group


def _roles(settings: Settings, journal: MetadataJournal) -> list[ServiceThread]:
    """Return the enabled services in start order. Raises SettingsError if none is enabled."""
    roles: list[ServiceThread] = []
    recent_writes = RecentWrites()
    if settings.replication.enabled:
        session = partial(run_worker_session, settings, journal, recent_writes)
        roles.append(
            ServiceThread("replication-worker", session, loop_factory=uvloop.new_event_loop)
        )
    if settings.auditor.enabled:
        outages = new_outages(settings)
        session = partial(run_auditor_session, settings, journal, outages, recent_writes)
        roles.append(ServiceThread("auditor", session, loop_factory=uvloop.new_event_loop))
    if not roles:
        raise SettingsError("auditor.enabled and replication.enabled are both false: nothing to do")
    return roles
