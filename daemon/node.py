"""One node: started, kept running until SIGTERM or SIGINT, stopped in reverse order."""

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

from auditor.index.own_writes import OwnWrites
from daemon.auditor_half import new_outages, run_auditor_session
from daemon.observe.node import ReportFile, run_observer_session
from daemon.observe.observing import open_observing
from daemon.rack_sources import check_rack_sources
from daemon.session import open_session
from daemon.settings import Settings
from daemon.state import open_journal, state_dir
from daemon.threads import HalfThread, own_cause
from daemon.worker_half import run_worker_session
from ledgers.errors import SettingsError
from replication.cluster.membership import Half
from replication.journal import MetadataJournal

log = structlog.get_logger()

OpenSession = AbstractAsyncContextManager[object]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
STOP_TIMEOUT_S = 4.0
"""For both halves together: closing a session gives back its locks and its vote at once."""

YOUNG_OBJECTS_MAX = 100_000
"""So many more objects than before, and cycles among them are looked for; by default 700, which the
ledgers at work at once are more than."""


def run_node(settings: Settings) -> int:
    """Run until told to stop; the exit code. Raises BookmenderError when it cannot start."""
    _step_back(settings.node.nice)
    check_rack_sources(settings.placement)
    if settings.node.mode == "observe":
        session = partial(run_observer_session, settings, ReportFile(state_dir(settings)))
        observer = HalfThread("observer", session, loop_factory=uvloop.new_event_loop)
        return _run(settings, [observer], partial(open_observing, settings))
    with closing(open_journal(settings)) as journal:
        journal.try_out()
        halves = _halves(settings, journal)
        return _run(settings, halves, partial(open_session, settings, Half.WORKER, journal))


def _run(
    settings: Settings, halves: Sequence[HalfThread], open_once: Callable[[], OpenSession]
) -> int:
    """``open_once``: tried in this thread, so that what is wrong is said before anything starts."""
    check_cluster(open_once)  # a signal ends it at once: it holds nothing
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
    _start(halves)
    stop.wait()
    is_stopped = _stop(halves)
    log.info("node.stopped", is_clean=is_stopped)
    return 0 if is_stopped else 1


def _step_back(nice: int) -> None:
    """All threads, as long as there is one. What was started further back stays there."""
    if nice > os.getpriority(os.PRIO_PROCESS, 0):
        try:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        except OSError as error:  # a sandbox's rule: no reason to repair nothing
            log.warning("node.not_nice", nice=nice, error=error.strerror)


def _spare_the_collector() -> None:
    """Have the garbage collector look less often at what is no garbage: a tenth of a repair's CPU.

    Modules and their like stay; it stopped both halves for 15 ms at a time to look at them. What a
    ledger leaves behind hangs together in no cycles, and is gone before it comes to be looked at.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX)


def _start(halves: Sequence[HalfThread]) -> None:
    """With the signals blocked in the threads: one that another thread got would not wake this one.

    (Linux gives it to any thread when the process was stopped as it came.)
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        for half in halves:
            half.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _stop(halves: Sequence[HalfThread]) -> bool:
    """In reverse order; every one is told, whatever becomes of the others."""
    stopped = [half.stop(timeout_s=STOP_TIMEOUT_S / len(halves)) for half in reversed(halves)]
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


def _halves(settings: Settings, journal: MetadataJournal) -> list[HalfThread]:
    """Those that are switched on, in the order in which they start."""
    halves: list[HalfThread] = []
    own_writes = OwnWrites()
    if settings.replication.enabled:
        session = partial(run_worker_session, settings, journal, own_writes)
        halves.append(HalfThread("replication-worker", session, loop_factory=uvloop.new_event_loop))
    if settings.auditor.enabled:
        outages = new_outages(settings)
        session = partial(run_auditor_session, settings, journal, outages, own_writes)
        halves.append(HalfThread("auditor", session, loop_factory=uvloop.new_event_loop))
    if not halves:
        raise SettingsError("auditor.enabled and replication.enabled are both false: nothing to do")
    return halves
