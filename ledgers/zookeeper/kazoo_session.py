"""One ZooKeeper session through kazoo, whose thread hands replies and events to the event loop.

``KazooSession`` opens the session, sends requests and reports its state. A lost session stays lost:
its locks may belong to others (rule S3), so kazoo must not replace it by a new session. The order
and the rate of requests are the business of ``flow``; everything about kazoo's insides is in
``kazoo_internals``. ``LoopInbox`` passes calls from kazoo's thread to the loop.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import structlog
from kazoo.client import KazooClient
from kazoo.exceptions import (
    ConnectionDropped,
    KazooException,
    SessionClosedRequireSaslError,
    UnimplementedError,
)
from kazoo.protocol.states import KazooState, KeeperState
from kazoo.retry import KazooRetry

from ledgers.errors import (
    BookmenderError,
    LocalLimitError,
    SecureConnectionError,
    SettingsError,
    UnauthorizedError,
    UnavailableError,
    UnsupportedError,
)
from ledgers.security import OPEN, Security, security_for
from ledgers.store import SILENT_S, Event, EventKind, Session, SessionState, session_lost
from ledgers.tasks import in_daemon_thread
from ledgers.zookeeper.kazoo_internals import MultiRead, OneSessionHandler, replace_connection

log = structlog.get_logger()

RECONNECT_DELAY_MIN_S, RECONNECT_DELAY_MAX_S = 0.05, 1.0
SUSPENDED_TIMEOUTS_MAX = 3
"""Session timeouts without a connection, or with our loop blocked, after which we treat the session
as lost. More than one, because a new ZooKeeper leader restarts the timeout of every session:
sessions and their locks survive an outage of all of ZooKeeper."""
EVENTS_WAITING_MAX = 100_000
"""Events that wait for our loop. Further ones break the connection; watchers then read again."""
GOODBYE_MAX_S = 2.0
"""Time that a server has to close the session before we close the connection."""
THREAD_END_MAX_S = 2.0
"""Time that kazoo's thread has to end after that. It cannot be woken while it looks up a host
name, which takes a minute if no name server answers."""
UNOPENED_END_MAX_S = 0.2
"""The same before a session was opened. Nothing depends on its end then."""

EVENT_KINDS = {
    1: EventKind.CREATED,
    2: EventKind.DELETED,
    3: EventKind.CHANGED,
    4: EventKind.CHILDREN,
}
"""Event kinds by the number that ZooKeeper sends (Watcher.Event.EventType)."""

SASL_REQUIRED = (
    "ZooKeeper admits only clients that authenticate themselves: set security.zookeeper_user and "
    "security.zookeeper_password_file"
)

OnReply = Callable[[Any, BaseException | None, float], None]
"""Receives a reply or an error, and the latency in seconds, measured until kazoo's thread has the
reply. So a busy loop does not look like a slow ZooKeeper. Must not raise."""

# Messages below CRITICAL are dropped, because kazoo also reports their causes as states and errors.
_kazoo_log = logging.getLogger("ledgers.kazoo")
_kazoo_log.setLevel(logging.CRITICAL)


class KazooSession(Session):
    """A session on its own kazoo client. Call ``open`` once, ``close`` any number of times."""

    def __init__(
        self,
        hosts: str,
        *,
        session_timeout_s: float,
        security: Security | None = None,
        ends_with_loop: bool = False,
    ) -> None:
        """``hosts``: ``host:port`` joined by commas. ``ends_with_loop``: see
        ``ZooKeeperStore.open``. Raises SettingsError if ``hosts`` is malformed or contains a
        path."""
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._inbox = LoopInbox(self._loop)
        self._hosts = hosts
        self._suspended_max_s = SUSPENDED_TIMEOUTS_MAX * session_timeout_s
        self._suspended_timer: asyncio.TimerHandle | None = None
        self._ends_with_loop = ends_with_loop
        self._loop_asked_s: float | None = None
        """Time at which the loop was asked to run ``_loop_runs``; None if it has run it since."""
        self._in_flight: set[_Reply] = set()
        # Counted by kazoo's thread, and by the loop.
        self._came_count = self._published_count = 0
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._why_lost: Callable[[], BookmenderError] = session_lost
        self._is_closed = False
        security = security or security_for(OPEN)
        self._handler = OneSessionHandler(
            security=security,
            # One session timeout suffices to try every server, and one of them twice.
            connect_timeout_s=session_timeout_s / (hosts.count(",") + 2),
            on_crash=self._crashed,
        )
        try:
            self._client = KazooClient(
                hosts,
                timeout=session_timeout_s,
                handler=self._handler,
                connection_retry=KazooRetry(
                    max_tries=-1, delay=RECONNECT_DELAY_MIN_S, max_delay=RECONNECT_DELAY_MAX_S
                ),
                logger=_kazoo_log,
            )
        except ValueError as error:
            raise SettingsError("not a connect string of ZooKeeper", hosts=hosts) from error
        if self._client.chroot:
            raise SettingsError("the path belongs in the metadata service URI", hosts=hosts)
        self._connection = replace_connection(
            self._client, security=security, on_events=self._events_came, on_ping=self._ping_is_due
        )
        self._client.add_listener(self._state_changed)

    @property
    def silent_s(self) -> float:
        return self._connection.silent_s

    async def open(self, *, timeout_s: float) -> None:
        """Connect to a server. After an error the session is closed. Raises UnavailableError (no
        answer), SecureConnectionError, UnauthorizedError, UnsupportedError (server older than
        3.6)."""
        try:
            self._client.start_async()
        except (OSError, RuntimeError) as error:  # kazoo's thread does not run yet
            self._is_closed = True
            self._client.close()
            raise LocalLimitError.of(error) or error from error
        try:
            await self._wait_opened(timeout_s)
        except BaseException:
            await self.close()
            raise

    async def _wait_opened(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._opened
                # Answered only after the credentials were accepted. Fails if the server is too old.
                await self.ask(MultiRead(["/"]))
        except SessionClosedRequireSaslError as error:
            raise UnauthorizedError(SASL_REQUIRED, hosts=self._hosts) from error
        except (TimeoutError, KazooException) as error:
            context = {"hosts": self._hosts, "waited_s": timeout_s}
            if no_files := self._handler.out_of_files:
                raise LocalLimitError(str(no_files), **context) from error
            if failure := self._handler.failure:
                raise SecureConnectionError(failure, **context) from error
            raise UnavailableError("no ZooKeeper server answers", **context) from error

    def ask(self, request: Any) -> asyncio.Future[Any]:
        """Send a request and return the future of its reply, or of kazoo's exception, or of the
        reason why the session was lost. If that is known already, ``ask`` itself raises it."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self.send(request, lambda value, error, latency_s: resolve(future, value, error))
        return future

    def send(self, request: Any, on_reply: OnReply) -> None:
        """Send a request. ``on_reply`` is called exactly once, with the result that a future of
        ``ask`` would have. Raises the same errors as ``ask``."""
        if self.state is SessionState.LOST:
            raise self._why_lost()
        reply = _Reply(self, on_reply)
        self._in_flight.add(reply)
        self.request_count += 1
        self._connection.submit(request, reply)

    def send_without_reply(self, request: Any) -> None:
        """Send a request whose reply does not matter."""
        if self.state is SessionState.CONNECTED:
            self.send(request, lambda value, error, latency_s: None)

    async def close(self) -> None:
        """End the session on the server, if connected, and kazoo's thread. A thread that looks up a
        host name ends later: it may make no new connection."""
        if self._is_closed:
            return
        self._is_closed = True
        goodbye_max_s = GOODBYE_MAX_S if self._client.connected and self.silent_s < SILENT_S else 0
        end_max_s = THREAD_END_MAX_S if self.session_id else UNOPENED_END_MAX_S
        self._handle_lost(session_lost)

        def stop() -> None:
            self._client.stop()  # waits for kazoo's thread
            self._client.close()

        stopping = asyncio.ensure_future(in_daemon_thread(stop))
        _, late = await asyncio.wait([stopping], timeout=goodbye_max_s)
        has_no_thread = not late and stopping.exception() is not None
        if has_no_thread:  # the session, and kazoo's thread, must end all the same
            self._connection.abandon()
        if late or has_no_thread:
            self._handler.break_connection()
            _, late = await asyncio.wait([stopping], timeout=end_max_s)
        if late:
            stopping.cancel()
        else:
            stopping.result()

    # --- On kazoo's thread -------------------------------------------------------------------

    def _state_changed(self, state: str) -> None:
        if state == KazooState.CONNECTED:
            self._inbox.post(self._handle_connected, self._client.client_id[0])
        elif state == KazooState.SUSPENDED:
            self._inbox.post(self._handle_suspended)
        else:
            self._handler.forbid_connections()
            is_refused = self._client.client_state == KeeperState.AUTH_FAILED
            self._inbox.post(self._handle_lost, self._refused if is_refused else session_lost)

    def _events_came(self, events: Sequence[tuple[int, str, int]]) -> None:
        if self._came_count - self._published_count > EVENTS_WAITING_MAX:
            raise ConnectionDropped("the loop does not keep up with the events")
        self._came_count += len(events)
        self._inbox.post(
            self._publish,
            [
                Event(kind=EVENT_KINDS[number], path=path, zxid=zxid)
                for number, path, zxid in events
                if number in EVENT_KINDS
            ],
            len(events),
        )

    def _ping_is_due(self) -> None:
        """With ``ends_with_loop``, end the session if our loop is blocked, for example by a disk
        that hangs.

        1. kazoo calls this before each ping. The first call asks the loop to run ``_loop_runs``.
        2. If the loop has not run it after ``_suspended_max_s``, the connection is dropped, and no
           new one is allowed. The loop finds the session lost when it runs again.
        3. The server expires the session, so that other nodes can take its locks. Without this,
           kazoo's pings would keep the session alive for ever.
        """
        if not self._ends_with_loop:
            return
        now_s = time.monotonic()
        if self._loop_asked_s is None:
            self._loop_asked_s = now_s
            self._inbox.post(self._loop_runs)
        elif now_s - self._loop_asked_s > self._suspended_max_s:
            self._handler.forbid_connections()
            self._inbox.post(self._handle_lost, session_lost)
            log.error(
                "session.loop_stalled",
                session=f"{self.session_id:#x}",
                for_s=round(now_s - self._loop_asked_s),
                next_step="check the disks of this host for calls that do not return; other nodes "
                "may lease the ledgers of this session",
            )
            raise ConnectionDropped("the event loop is blocked")

    def _crashed(self, error: BaseException) -> None:
        context = {"message": "the connection to ZooKeeper crashed", "exception": error}
        self._inbox.post(self._loop.call_exception_handler, context)

    # --- Back on the loop --------------------------------------------------------------------

    def _handle_connected(self, session_id: int) -> None:
        if self.state is SessionState.LOST:  # given up while kazoo was connecting
            return
        if self._opened.done():
            log.info("session.resumed", session=f"{session_id:#x}")
            self._stop_timer()
            self.resume()
        else:
            self.session_id = session_id
            self._opened.set_result(None)

    def _publish(self, events: Sequence[Event], count: int) -> None:
        self._published_count += count
        self.publish(events)

    def _loop_runs(self) -> None:
        self._loop_asked_s = None

    def _handle_suspended(self) -> None:
        if self.state is SessionState.LOST:
            return
        log.warning("session.suspended", session=f"{self.session_id:#x}")
        self._stop_timer()
        self._suspended_timer = self._loop.call_later(self._suspended_max_s, self._give_up)
        self.suspend()

    def _give_up(self) -> None:
        # Also breaks a connection that kazoo is opening right now. We consider our locks lost, so
        # this session must not stay alive on the server.
        self._handler.break_connection()
        self._handle_lost(session_lost)

    def _handle_lost(self, why: Callable[[], BookmenderError]) -> None:
        """Mark the session lost and fail all calls in flight, each with ``why()``."""
        if self.state is SessionState.LOST:
            return
        if not self._is_closed:
            log.warning("session.lost", session=f"{self.session_id:#x}", error=str(why()))
        self._why_lost = why
        self._handler.forbid_connections()
        self._stop_timer()
        self.lose()
        if not self._opened.done():
            self._opened.set_exception(why())
        in_flight, self._in_flight = self._in_flight, set()
        for reply in in_flight:
            reply.on_reply(None, why(), reply.latency_s())

    def _refused(self) -> UnauthorizedError:
        return UnauthorizedError(self._handler.failure or "ZooKeeper refuses our credentials")

    def _stop_timer(self) -> None:
        if self._suspended_timer is not None:
            self._suspended_timer.cancel()

    def _settle(
        self, reply: _Reply, value: Any, error: BaseException | None, latency_s: float
    ) -> None:
        if isinstance(error, UnimplementedError):
            # Servers before 3.6 know neither joined reads nor persistent watches. The session ends
            # also if it moved to such a server: there it would miss changes.
            self._handle_lost(
                lambda: UnsupportedError(
                    "this ZooKeeper server is older than 3.6, and bookmender needs 3.6 or later: "
                    "upgrade all ZooKeeper servers",
                    hosts=self._hosts,
                )
            )
        if reply in self._in_flight:  # else the session was lost before the reply arrived
            self._in_flight.discard(reply)
            reply.on_reply(value, error, latency_s)


class _Reply:
    """The result object that kazoo's thread sets; it passes the result to the loop."""

    __slots__ = ("_sent_s", "_session", "on_reply")

    def __init__(self, session: KazooSession, on_reply: OnReply) -> None:
        self._session = session
        self._sent_s = time.monotonic()
        self.on_reply = on_reply

    def latency_s(self) -> float:
        return time.monotonic() - self._sent_s

    def set(self, value: Any = None) -> None:
        self._session._inbox.post(self._session._settle, self, value, None, self.latency_s())

    def set_exception(self, error: BaseException) -> None:
        self._session._inbox.post(self._session._settle, self, None, error, self.latency_s())


def resolve(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    """Set the result or the error of a future, unless its waiter was cancelled."""
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        # A copy, because kazoo gives one exception object to all requests of a broken connection.
        # Each waiter would append its own frames to the traceback of that object.
        future.set_exception(copy.copy(error))


class LoopInbox:
    """A queue of calls that other threads post and the loop runs, in this order. Only the first
    waiting call costs a system call and a handle."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._is_woken = False

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """Queue a call, from any thread. Calls after the end of the loop are dropped."""
        self._calls.append((function, args))
        if not self._is_woken:
            self._is_woken = True
            try:
                self._loop.call_soon_threadsafe(self._run_all)
            except RuntimeError:
                if not self._loop.is_closed():
                    raise

    def _run_all(self) -> None:
        # Cleared before the queue is read: a call posted after that wakes the loop again.
        self._is_woken = False
        while self._calls:
            function, args = self._calls.popleft()
            try:
                function(*args)
            except Exception as error:  # a failed call must not stop the calls after it
                self._loop.call_exception_handler(
                    {"message": f"{function!r} failed", "exception": error}
                )
