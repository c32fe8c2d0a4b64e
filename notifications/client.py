"""The client library of notifications: an application registers for objects, and is told of each
change until it ends, whatever fails.

Example::

    async with Notifications.open("http://notify1:7319", "http://notify2:7319") as notifications:
        notifications.register(ledger(7), known=version)
        async for change in notifications:
            ...  # read the object again; taking the next item says that this one is done

An item is a ``Change``, the latest version of an object; a ``Refused`` registration; ``Stale`` when
changes may not have been told for a while, and ``Fresh`` when all were told again. Lost connections
and servers are not told: the library connects again, and what was missed is told then.
"""

from __future__ import annotations

import asyncio
import os
import random
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import aiohttp
import structlog

from ledgers.errors import (
    CorruptionError,
    SettingsError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.plain_files import replace_file
from ledgers.tasks import in_daemon_thread, task_scope
from notifications.client_state import ClientState, Fresh, Item, Stale, StoredState
from notifications.discovery import in_order_of
from notifications.protocol import (
    FRAME_BYTES_MAX,
    SILENT_S,
    SUBPROTOCOL,
    Change,
    Goodbye,
    Key,
    Positions,
    Refused,
    Version,
    Welcome,
    bookie,
    check_key,
    decode_server_frame,
    encode,
    ledger,
    published,
)

__all__ = [
    "Change",
    "Fresh",
    "NotificationThread",
    "Notifications",
    "Refused",
    "Stale",
    "bookie",
    "ledger",
    "published",
]

log = structlog.get_logger()

GATHER_S: Final = 0.05
"""How long the first registrations are collected before the client says hello."""
CONNECT_S: Final = 10.0
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.5, 30.0
LIVE_S: Final = 30.0
"""A connection that lasted this long resets the backoff."""
CHECK_S: Final = 1.0
"""How often the client looks whether it has become stale, and stores its state."""


class Notifications:
    """A client. Belongs to one event loop. ``open`` makes it."""

    def __init__(
        self,
        servers: Sequence[str],
        *,
        name: str,
        token_file: str,
        state_file: str,
        context: ssl.SSLContext | None,
        is_manual: bool,
    ) -> None:
        for url in servers:
            if not url.startswith(("http://", "https://")):
                raise SettingsError(f"{url!r} is no server. Give its URL: http://host:7319")
        if not servers:
            raise SettingsError("name at least one server: http://host:7319")
        self._client = str(uuid4())
        self._given_servers, self._servers = list(servers), list(servers)
        self._token_file, self._state_file = token_file, state_file
        self._context, self._is_manual = context, is_manual
        stored = _read_state(state_file)
        self._state = ClientState(
            client=self._client, name=name, stored=stored, now_s=time.monotonic()
        )
        self._saved = stored
        self._told = ""
        """Why the state could not be saved, as it was logged last."""
        self._given: Change | None = None
        self._news = asyncio.Event()
        """Something for the application."""
        self._orders = asyncio.Event()
        """Something for the server."""
        self._refusing: set[str] = set()
        """Servers that do not let this client in."""
        self._error: Exception | None = None

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        *servers: str,
        name: str = "",
        token_file: str = "",
        state_file: str = "",
        context: ssl.SSLContext | None = None,
        is_manual: bool = False,
    ) -> AsyncIterator[Notifications]:
        """Connect to one of the servers, and to another one when it fails.

        ``servers``: URLs as http://notify1:7319; further ones are learned from them. ``name``: for
        operators. ``token_file``: of a token that the servers want. ``state_file``: where the
        client keeps what it knows over a restart; empty: it begins again. ``is_manual``: the
        application calls ``done`` for each change. Raises OSError if a file cannot be read, and
        SettingsError if a URL is none.
        """
        notifications = cls(
            servers,
            name=name,
            token_file=token_file,
            state_file=state_file,
            context=context,
            is_manual=is_manual,
        )
        notifications._token()
        task = asyncio.create_task(notifications._run())
        try:
            yield notifications
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            notifications._save()

    # --- The application --------------------------------------------------------------------------

    def register(self, key: Key, known: Version = 0) -> None:
        """Want to be told of an object (``ledger``, ``bookie``, ``published``). ``known``: the
        version that the application has read, as a zxid; 0: none. Raises SettingsError."""
        self._state.register(key, known)
        self._orders.set()

    def unregister(self, key: Key) -> None:
        self._state.unregister(key)
        self._orders.set()

    def done(self, change: Change) -> None:
        """The application has finished with a change. Otherwise it is told again after a
        restart."""
        self._state.done(change)

    @property
    def stale_s(self) -> float | None:
        """How old the application's knowledge may be; None: it is fresh."""
        return self._state.stale_s(time.monotonic())

    @property
    def positions(self) -> Positions:
        return self._state.positions

    def __aiter__(self) -> Notifications:
        return self

    async def __anext__(self) -> Item:
        """Return the next item. Raises UnauthorizedError if no server lets this client in."""
        if self._given is not None and not self._is_manual:
            self._state.done(self._given)
        self._given = None
        while (item := self._state.next_item()) is None:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        if isinstance(item, Change):
            self._given = item
        return item

    # --- The connections --------------------------------------------------------------------------

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=CONNECT_S)
        try:
            async with task_scope() as scope, aiohttp.ClientSession(timeout=timeout) as http:
                scope.start(self._check_always())
                await self._connect_always(http)
        except Exception as error:  # an application that waits for the next item must not wait on
            self._error = error
            self._news.set()

    async def _connect_always(self, http: aiohttp.ClientSession) -> None:
        """Connect to one server after the other."""
        failures = 0
        await asyncio.sleep(GATHER_S)
        while True:
            for url in in_order_of(self._client, self._servers):
                began_s = time.monotonic()
                retry_s = await self._connect(http, url)
                failures = 0 if time.monotonic() - began_s > LIVE_S else failures + 1
                await asyncio.sleep(wait_before(failures, retry_s))

    async def _connect(self, http: aiohttp.ClientSession, url: str) -> float:
        """Stay connected to a server for as long as possible. Return how long to stay away."""
        try:
            headers = {"Authorization": f"Bearer {token}"} if (token := self._token()) else {}
            async with http.ws_connect(
                f"{url.rstrip('/')}/v1/notifications",
                protocols=(SUBPROTOCOL,),
                headers=headers,
                ssl=self._context or True,
                max_msg_size=FRAME_BYTES_MAX,
                timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
                compress=0,
            ) as socket:
                self._error, self._refusing = None, set()
                hello = self._state.connected(time.monotonic())
                await socket.send_str(encode(hello).decode())
                sending = asyncio.create_task(self._send_always(socket))
                try:
                    return await self._receive_always(socket)
                finally:
                    sending.cancel()
        except aiohttp.WSServerHandshakeError as error:
            log.warning("notify.connection_refused", url=url, status=error.status)
            if error.status in (401, 403):
                self._refusing.add(url)
                if self._refusing.issuperset(self._servers):
                    self._error = UnauthorizedError(
                        f"{url} refuses this client. Name the file with its token",
                        status=error.status,
                    )
                    self._news.set()
            return retry_after_s(error)
        except (aiohttp.ClientError, OSError, TimeoutError, CorruptionError) as error:
            log.warning("notify.connection_failed", url=url, error=str(error) or "timeout")
            return 0.0

    async def _receive_always(self, socket: aiohttp.ClientWebSocketResponse) -> float:
        while True:
            async with asyncio.timeout(SILENT_S):
                message = await socket.receive()
            if message.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                return 0.0
            frame = decode_server_frame(message.data)
            self._state.receive(frame, time.monotonic())
            if isinstance(frame, Goodbye):
                log.debug("notify.goodbye", code=frame.code)
                return frame.retry_after_ms / 1000
            if isinstance(frame, Welcome):
                self._servers = list(dict.fromkeys([*self._given_servers, *frame.urls]))
            self._news.set()
            self._orders.set()

    async def _send_always(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            for frame in self._state.frames(time.monotonic()):
                await socket.send_str(encode(frame).decode())
            self._orders.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await self._orders.wait()

    async def _check_always(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            self._state.check(time.monotonic())
            self._news.set()
            self._save()

    def _token(self) -> str:
        return Path(self._token_file).read_text().strip() if self._token_file else ""

    def _save(self) -> None:
        stored = self._state.stored()
        if self._state_file and stored is not None and stored != self._saved:
            try:
                replace_file(Path(self._state_file), str(stored))
                self._saved = stored
            except OSError as error:
                if self._told != str(error):
                    log.warning("notify.state_not_saved", file=self._state_file, error=str(error))
                self._told = str(error)


class NotificationThread:
    """A client for programs without asyncio: it calls ``use`` with each item, on a thread of its
    own, one after the other. ``options``: as for ``Notifications.open``, which may raise.

    ``error``: what ended the thread, such as an exception of ``use``. Nothing is told after it.
    """

    def __init__(
        self, servers: Sequence[str], use: Callable[[Item], object], **options: Any
    ) -> None:
        self._use, self._servers, self._options = use, servers, options
        self._loop = asyncio.new_event_loop()
        self._opened = threading.Event()
        self.error: Exception | None = None
        self._notifications: Notifications
        self._task: asyncio.Task[None]
        self._thread = threading.Thread(target=self._run, name="notifications", daemon=True)
        self._thread.start()
        self._opened.wait()
        if self.error is not None:
            raise self.error

    def register(self, key: Key, known: Version = 0) -> None:
        """Raises SettingsError if no object can have this key, and ``error``."""
        check_key(key)
        self._call(lambda: self._notifications.register(key, known))

    def unregister(self, key: Key) -> None:
        self._call(lambda: self._notifications.unregister(key))

    def close(self) -> None:
        """End the thread, after ``use`` has returned. Raises ``error``."""
        self._call(self._task.cancel)
        self._thread.join()

    def _call(self, act: Callable[[], object]) -> None:
        if self.error is not None:
            raise self.error
        with suppress(RuntimeError):  # the thread ends now
            self._loop.call_soon_threadsafe(act)

    def _run(self) -> None:
        try:
            with (
                asyncio.Runner(loop_factory=lambda: self._loop) as runner,
                suppress(asyncio.CancelledError),
            ):
                runner.run(self._follow())
        except Exception as error:  # the program must not believe that it is still told
            self.error = error
            if self._opened.is_set():
                log.exception("notify.thread_ended")
        finally:
            self._opened.set()

    async def _follow(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        async with Notifications.open(*self._servers, **self._options) as notifications:
            self._notifications = notifications
            self._opened.set()
            async for item in notifications:
                await asyncio.shield(in_daemon_thread(partial(self._use, item)))


def wait_before(failures: int, retry_s: float) -> float:
    """Return how long to wait before the next connection, in seconds: any time up to a bound that
    doubles with each failure (full jitter). So clients that lost a server at once do not come back
    at once. ``retry_s``: what the server asked for."""
    return retry_s + random.uniform(0, min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2**failures))


async def ask(
    method: str, url: str, *, token: str = "", context: ssl.SSLContext | None = None
) -> bytes:
    """Send one request to a server, such as GET /v1/servers. Raises UnavailableError,
    UnauthorizedError."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(CONNECT_S)) as http,
            http.request(method, url, headers=headers, ssl=context or True) as response,
        ):
            data = await response.read()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise UnavailableError(f"{url} does not answer: {error or 'timeout'}") from error
    if response.status in (401, 403):
        raise UnauthorizedError(data.decode(errors="replace"), url=url)
    if response.status != 200:
        raise UnavailableError(data.decode(errors="replace"), url=url)
    return data


def _read_state(file: str) -> StoredState | None:
    if not file or not os.path.exists(file):
        return None
    return StoredState.parse(Path(file).read_bytes())


def retry_after_s(error: aiohttp.WSServerHandshakeError) -> float:
    text = error.headers.get("Retry-After", "") if error.headers else ""
    return float(text) if text.isdecimal() else 0.0
