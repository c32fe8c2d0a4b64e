"""One node: starts its services and its HTTP server, runs until SIGTERM or SIGINT, and stops them
in reverse order. SIGHUP reloads the settings."""

import asyncio
import gc
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, closing
from functools import partial

import structlog
import uvloop

from auditor.ledger_map_updater import RecentWrites
from daemon.live_settings import LOG_SETTINGS, RELOADABLE, LiveSettings, reload
from daemon.logs import set_up_logs
from daemon.main_loop import MainLoop, Request
from daemon.operations.observe import open_observing, run_observer_session
from daemon.placement import check_rack_sources
from daemon.role_state import NodeService, RoleState
from daemon.roles import new_outages, run_auditor_session, run_worker_session
from daemon.service_manager import ServiceManager
from daemon.session import open_session
from daemon.settings import Settings
from daemon.state import open_journal
from daemon.threads import ServiceThread, own_cause
from ledgers.errors import SettingsError
from replication.journal import MetadataJournal
from replication.nodes import Role

log = structlog.get_logger()

OpenSession = AbstractAsyncContextManager[object]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SIGNALS = (*STOP_SIGNALS, signal.SIGHUP)
STOP_TIMEOUT_S = 4.0
"""Deadline for stopping all services. Closing a session releases its locks and its vote at once."""
HTTP_STOP_TIMEOUT_S = 1.0

FILES_MAX = 65_536
"""Open files: no more, because the programs that the service starts inherit the limit, and some
look at each possible file. The connections to a thousand bookies need a tenth."""
YOUNG_OBJECTS_MAX = 100_000
"""Number of new objects after which the garbage collector looks for cycles. Python's default of 700
is less than the ledgers under repair need at any moment."""


def run_node(settings: Settings, *, read_settings: Callable[[], Settings]) -> int:
    """Run until a signal, and return the exit code. Raises BookmenderError if the node cannot
    start. ``read_settings``: reads them again, for a reload; it raises SettingsError."""
    live = LiveSettings(settings)
    open_once: Callable[[], OpenSession]
    with ExitStack() as stack:
        manager = stack.enter_context(closing(ServiceManager.from_environment(os.environ)))
        manager.show("looking for the cluster")
        _step_back(settings.node.nice)
        _raise_file_limit()
        check_rack_sources(settings.placement)
        if settings.node.mode == "observe":
            state = RoleState("observer")
            session = partial(run_observer_session, settings, new_outages(settings), state)
            roles, reloadable = [_role("observer", session, state)], LOG_SETTINGS
            open_once = partial(open_observing, settings, None, RoleState("observer"))
        else:
            journal = stack.enter_context(closing(open_journal(settings)))
            journal.try_out()
            roles, reloadable = _roles(live, journal), RELOADABLE
            open_once = partial(open_session, live, Role.WORKER, journal)
        reread = partial(reload, live, read_settings, reloadable=reloadable, apply_log=set_up_logs)
        return _run(live, roles, open_once, MainLoop(roles, manager, reload=reread))


def _run(
    live: LiveSettings,
    roles: Sequence[NodeService],
    open_once: Callable[[], OpenSession],
    loop: MainLoop,
) -> int:
    """Check the cluster, then run the services until a signal.

    ``open_once``: opens a session once in this thread, so that errors are reported before any
    service starts.
    """
    settings = live.current
    # On a terminal SIGHUP means that the terminal was closed.
    is_reloading = not (sys.stdin and sys.stdin.isatty())
    if is_reloading:
        signal.signal(signal.SIGHUP, lambda *_: loop.ask(Request.RELOAD))
    check_cluster(open_once)  # holds no lock, so a signal may stop it at once
    http: list[ServiceThread] = []
    if settings.http.enabled:
        from daemon.http.server import http_thread  # 11 MB, which other nodes need not load

        http.append(http_thread(live, roles))
    threads = [role.thread for role in roles]
    for number in STOP_SIGNALS if is_reloading else SIGNALS:
        signal.signal(number, lambda *_: loop.ask(Request.STOP))
    log.info(
        "node.started",
        pid=os.getpid(),
        mode=settings.node.mode,
        cluster=settings.metadata_service_uri,
        auditor=settings.auditor.enabled,
        replication=settings.replication.enabled,
    )
    _spare_the_collector()
    _start([*http, *threads])
    loop.run()
    for server in http:  # the services do not wait for it: they hold locks, and it holds none
        server.stop(timeout_s=0)
    each_s = STOP_TIMEOUT_S / len(threads)
    stopped = [thread.stop(timeout_s=each_s) for thread in reversed(threads)]
    is_stopped = all(stopped)  # all are stopped, even if one fails to end
    for server in http:
        server.stop(timeout_s=HTTP_STOP_TIMEOUT_S)
    log.info("node.stopped", is_clean=is_stopped)
    return 0 if is_stopped else 1


def _step_back(nice: int) -> None:
    """Lower the priority of the process. A lower priority that it was started with stays."""
    if nice > os.getpriority(os.PRIO_PROCESS, 0):
        try:
            for thread in os.listdir("/proc/self/task"):  # Linux sets it thread by thread
                os.setpriority(os.PRIO_PROCESS, int(thread), nice)
        except OSError as error:  # forbidden by a sandbox; the node works without it
            log.warning("node.nice_failed", nice=nice, error=error.strerror)


def _raise_file_limit() -> None:
    """Raise the soft limit of open files, which is often 1,024, as far as the service may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        for role in roles:
            role.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


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


def _role(name: str, session: Callable[[], Awaitable[None]], state: RoleState) -> NodeService:
    """Return a service with a thread of its own, named ``name``."""
    thread = ServiceThread(name, session, loop_factory=uvloop.new_event_loop)
    return NodeService(thread=thread, state=state)


def _roles(live: LiveSettings, journal: MetadataJournal) -> list[NodeService]:
    """Return the enabled services in start order. Raises SettingsError if none is enabled."""
    settings = live.current
    roles: list[NodeService] = []
    recent_writes = RecentWrites()
    if settings.replication.enabled:
        state = RoleState("worker")
        session = partial(run_worker_session, live, journal, recent_writes, state)
        roles.append(_role("replication-worker", session, state))
    if settings.auditor.enabled:
        outages, state = new_outages(settings), RoleState("auditor")
        session = partial(run_auditor_session, live, journal, outages, recent_writes, state)
        roles.append(_role("auditor", session, state))
    if not roles:
        raise SettingsError("auditor.enabled and replication.enabled are both false: nothing to do")
    return roles
