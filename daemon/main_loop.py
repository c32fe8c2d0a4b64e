"""The main thread of a node while its services run: signals, reloads, and the service manager.

Signal handlers only queue a request. Every second the loop asks each service's event loop to show
that it runs, and reports to the service manager:

- ``READY=1`` once each service has a ZooKeeper session;
- ``STATUS=`` with what the services do;
- ``WATCHDOG=1`` only while the event loops of all services answer.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from enum import Enum

import structlog

from daemon.http.health import is_alive
from daemon.role_state import NodeService
from daemon.service_manager import ServiceManager

log = structlog.get_logger()

TICK_S = 1.0
FEEDS_PER_WATCHDOG = 4
"""Messages to the watchdog in the time that it allows."""


class Request(Enum):
    """What a signal asks for."""

    STOP = "stop"
    RELOAD = "reload"


class MainLoop:
    """Runs on the main thread until a request to stop. ``reload``: reads the settings again."""

    def __init__(
        self, roles: Sequence[NodeService], manager: ServiceManager, *, reload: Callable[[], object]
    ) -> None:
        self._roles = roles
        self._manager = manager
        self._reload = reload
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._is_ready = False
        self._fed_s = -float("inf")

    def ask(self, request: Request) -> None:
        """Queue a request. May be called by a signal handler: SimpleQueue is reentrant."""
        self._requests.put(request)

    def run(self) -> None:
        """Run until a request to stop. Without a service manager it only waits for requests."""
        wait_s = TICK_S if self._manager.is_present else None
        while True:
            self.report(now_s=time.monotonic())
            try:
                request = self._requests.get(timeout=wait_s)
            except queue.Empty:
                continue
            if request is Request.STOP:
                self._manager.stopping()
                return
            self._run_reload()

    def report(self, *, now_s: float) -> None:
        """Probe the services, and tell the service manager how they are."""
        self._manager.send_waiting()
        for role in self._roles:
            role.thread.probe()
        if not self._is_ready and all(role.state.is_connected for role in self._roles):
            self._is_ready = True
            self._manager.ready()
        self._manager.show(status_line(self._roles))
        watchdog_s = self._manager.watchdog_s
        is_due = watchdog_s is not None and now_s - self._fed_s >= watchdog_s / FEEDS_PER_WATCHDOG
        if is_due and all(is_alive(role) for role in self._roles):
            self._fed_s = now_s
            self._manager.feed_watchdog()

    def _run_reload(self) -> None:
        if self._is_ready:  # else READY=1 would claim that the start is complete
            self._manager.reloading()
        try:
            self._reload()
        except Exception:  # a reload must not stop the node
            log.exception("settings.reload_failed", next_step="correct it and reload again")
        if self._is_ready:
            self._manager.ready()


def status_line(roles: Sequence[NodeService]) -> str:
    """Return what the services do, as in ``auditor: leading; worker: repairing 3 ledgers``."""
    return "; ".join(f"{role.state.name}: {_what(role)}" for role in roles)


def _what(role: NodeService) -> str:
    state = role.state
    if not is_alive(role):
        return "the event loop does not answer"
    if not state.is_connected:
        return "waiting for ZooKeeper"
    if not state.is_working:
        return "starting"
    if (backlog := state.backlog) is not None:
        size = backlog.size
        marked = "" if size is None else f", {_ledgers(size.marked_count)} marked"
        return f"leading{marked}"
    if count := state.leased_count:
        return f"repairing {_ledgers(count)}"
    idle = {"auditor": "on standby", "worker": "waiting for marked ledgers"}
    return idle.get(state.name, "working")


def _ledgers(count: int) -> str:
    return f"{count} ledger{'' if count == 1 else 's'}"
