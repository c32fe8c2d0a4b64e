"""Servers of notifications without a cluster, and thousands of clients, each in a process of its
own, for ``bench.notify``.

The bench writes changes into memory that all processes share. The servers read them there, as they
would from the change feed, and the clients find the time of each change there. At the end each
client must have exactly the latest version of each of its objects.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing as mp
import random
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, cast
from uuid import uuid4

import aiohttp
import uvloop
from aiohttp import web
from msgspec import Struct

from bench.usage import cpu_of, rss_bytes
from bench.waiting import wait_until
from daemon.http.access import Access, check_request
from daemon.http.server import listen
from daemon.local.ports import free_ports
from daemon.notify import keep_pauses_short
from daemon.settings import HttpSettings
from ledgers.clock import SystemClock
from ledgers.errors import UnavailableError
from notifications.client import retry_after_s, wait_before
from notifications.client_state import ClientState
from notifications.following import Follower, Sources
from notifications.protocol import (
    LEDGER,
    SUBPROTOCOL,
    Change,
    Changes,
    Goodbye,
    Key,
    Version,
    decode_server_frame,
    encode,
    ledger,
)
from notifications.server import NotificationServer
from notifications.sources import FRESH_EVERY_S, Batch
from notifications.versions import VersionTable

BASE = 1 << 32
"""The version of all ledgers before the first change."""
CHANGES_MAX = 4_000_000
STEP_S, SOURCE_POLL_S, READY_POLL_S = 0.005, 0.01, 0.05
READY_S = 60.0
_spawn = mp.get_context("spawn")


class ChangeLog:
    """The changes of one run, in memory that processes share. Change number ``i`` has the version
    ``BASE + 1 + i``."""

    def __init__(self, objects: int) -> None:
        self.objects = objects
        self.count = _spawn.RawValue("q", 0)
        self.ledger_ids = _spawn.RawArray("i", CHANGES_MAX)
        self.sent_s = _spawn.RawArray("d", CHANGES_MAX)

    async def write(self, per_s: int, duration_s: float) -> None:
        """Change ledgers at random, at a steady rate."""
        chance, began_s, first = random.Random(per_s), time.monotonic(), int(self.count.value)
        while (elapsed_s := time.monotonic() - began_s) < duration_s:
            now_s, until = time.monotonic(), first + int(elapsed_s * per_s)
            for number in range(int(self.count.value), until):
                self.ledger_ids[number] = chance.randrange(self.objects)
                self.sent_s[number] = now_s
            self.count.value = until
            await asyncio.sleep(STEP_S)

    def latest(self) -> dict[Key, Version]:
        """Return the version of each ledger that changed."""
        changed = self.ledger_ids[: self.count.value]
        return {ledger(each): BASE + 1 + number for number, each in enumerate(changed)}


# --- Servers --------------------------------------------------------------------------------------


class LogSource:
    """A ``Source`` that reads a change log. ``known``: the ledgers that exist."""

    kind = LEDGER

    def __init__(self, log: ChangeLog, known: int) -> None:
        self._log, self._known = log, known

    async def load(self) -> VersionTable:
        ids, versions = array("q", range(self._known)), array("q", [BASE]) * self._known
        return VersionTable(LEDGER, position=BASE, horizon=BASE, ids=ids, versions=versions)

    async def changes(self) -> AsyncGenerator[Batch, None]:
        seen, said_s = 0, 0.0
        keys = [ledger(each) for each in range(self._log.objects)]
        while True:
            count, now_s = int(self._log.count.value), time.monotonic()
            if count > seen or now_s - said_s > FRESH_EVERY_S:
                changed = self._log.ledger_ids[seen:count]
                versions = range(BASE + 1 + seen, BASE + 1 + count)
                changes = map(Change, map(keys.__getitem__, changed), versions)
                yield Batch(list(changes), BASE + count)
                seen, said_s = count, now_s
            await asyncio.sleep(SOURCE_POLL_S)


class ServerProcess:
    """A server, with all that ``bookmender notify serve`` has but ZooKeeper."""

    def __init__(self, log: ChangeLog, *, known: int) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self.process = _spawn.Process(target=_serve, args=(log, known, port), daemon=True)
        self.process.start()

    @property
    def cpu_s(self) -> float:
        return cpu_of([self.process.pid])

    @property
    def rss_bytes(self) -> int:
        assert self.process.pid is not None
        return rss_bytes(self.process.pid)

    async def wait_ready(self) -> None:
        await wait_ready(self.url)


async def wait_ready(url: str) -> None:
    """Wait until a server takes clients. Raises UnavailableError."""
    async with aiohttp.ClientSession() as http:

        async def is_ready() -> bool:
            with suppress(aiohttp.ClientError, OSError):
                async with http.get(f"{url}/readyz") as response:
                    return response.status == 200
            return False

        await wait_until(is_ready, "a server", timeout_s=READY_S, poll_s=READY_POLL_S)


@contextmanager
def server_process(log: ChangeLog, *, known: int) -> Iterator[ServerProcess]:
    server = ServerProcess(log, known=known)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.join()


def _serve(log: ChangeLog, known: int, port: int) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_log(log, known, port))


async def _serve_log(log: ChangeLog, known: int, port: int) -> None:
    http = HttpSettings(port=port)
    access = Access(http, observes=False)

    async def authorize(request: web.Request, changes: bool) -> None:
        await check_request(access, request, changes=changes)

    @asynccontextmanager
    async def sources() -> AsyncIterator[Sources]:
        yield Sources(feed="bench:1", cluster=cast("Any", None), each=[LogSource(log, known)])

    follower = Follower("bench", sources, SystemClock())
    served = NotificationServer(follower, server="bench", authorize=authorize)
    app = served.build()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(follower.run())
        tasks.create_task(served.run())
        tasks.create_task(keep_pauses_short(served))
        tasks.create_task(listen(app, http, connections_max=20_000))


# --- Clients --------------------------------------------------------------------------------------


class ClientFigures(Struct, frozen=True, kw_only=True):
    """The notifications since ``begin``. ``median_s``, ``p99_s``: time from a change to its
    notification. ``last_s``: when the last notification came. ``live_s``: when the last client knew
    everything on its connection; infinite if one does not. ``behind``: objects whose latest version
    a client lacks. ``wrong``: versions that came after later ones."""

    told_count: int
    median_s: float
    p99_s: float
    last_s: float
    live_s: float
    behind: int
    wrong: Sequence[str]


class Holder:
    """A client of the protocol. It behaves as the library, but has no tasks for sending and
    checking, of which ten thousand would use a core."""

    def __init__(self, keys: Sequence[Key], swarm: Swarm) -> None:
        self.has: dict[Key, Version] = dict.fromkeys(keys, BASE)
        self.live_s = float("inf")
        self._swarm, self._client = swarm, str(uuid4())
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._state = ClientState(client=self._client, now_s=time.monotonic())
        for key in keys:
            self._state.register(key, BASE)

    async def run(self, http: aiohttp.ClientSession, urls: Sequence[str]) -> None:
        failures = 0
        while True:
            for url in urls:
                try:
                    failures, retry_s = 0, await self._connect(http, url)
                except aiohttp.WSServerHandshakeError as error:
                    retry_s = retry_after_s(error)
                except (aiohttp.ClientError, OSError):
                    retry_s = 0.0
                self._socket, self.live_s = None, float("inf")
                failures += 1
                await asyncio.sleep(wait_before(failures, retry_s))

    async def _connect(self, http: aiohttp.ClientSession, url: str) -> float:
        async with http.ws_connect(
            f"{url}/v1/notifications", protocols=(SUBPROTOCOL,), compress=0
        ) as self._socket:
            hello = encode(self._state.connected(time.monotonic()))
            await self._socket.send_frame(hello, aiohttp.WSMsgType.TEXT)
            while (message := await self._socket.receive()).type is not aiohttp.WSMsgType.CLOSED:
                if message.type is not aiohttp.WSMsgType.TEXT:
                    return 0.0
                frame, now_s = decode_server_frame(message.data), time.monotonic()
                if isinstance(frame, Goodbye):
                    return frame.retry_after_ms / 1000
                self._state.receive(frame, now_s)
                while isinstance(item := self._state.next_item(), Change):
                    self._state.done(item)
                    self._swarm.take(self, item, now_s)
                if not isinstance(frame, Changes):
                    await self.say()
                elif self.live_s == float("inf") and frame.n:
                    self.live_s = now_s
        return 0.0

    async def say(self) -> None:
        """Send what is to be sent now."""
        if self._socket is None:
            return
        with suppress(ConnectionError, aiohttp.ClientError):
            for frame in self._state.frames(time.monotonic()):
                await self._socket.send_frame(encode(frame), aiohttp.WSMsgType.TEXT)


class Swarm:
    """The clients of one process."""

    def __init__(self, log: ChangeLog, *, clients: int, keys_each: int, seed: int) -> None:
        chance, keys = random.Random(seed), [ledger(each) for each in range(log.objects)]
        self._log = log
        self._waits_s, self._last_s = array("d"), 0.0
        self._wrong: list[str] = []
        self._holders = [Holder(chance.sample(keys, keys_each), self) for _ in range(clients)]

    def take(self, holder: Holder, change: Change, now_s: float) -> None:
        version = change.version
        if version is None or version < holder.has[change.key]:
            self._wrong.append(f"{change} after {holder.has[change.key]}")
            return
        holder.has[change.key] = version
        self._waits_s.append(now_s - self._log.sent_s[version - BASE - 1])
        self._last_s = now_s

    async def run(self, urls: Sequence[str], pipe: Connection, starts_per_s: float) -> None:
        asyncio.get_running_loop().add_reader(pipe.fileno(), self._answer, pipe)
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(self._beat_always())
            for holder in self._holders:
                tasks.create_task(holder.run(http, urls))
                await asyncio.sleep(1 / starts_per_s)

    async def _beat_always(self) -> None:
        """Send the beats that are due. Each second's share of the clients has its turn, so that a
        second has no peak."""
        while True:
            for first in range(20):
                for holder in self._holders[first::20]:
                    await holder.say()
                await asyncio.sleep(0.05)

    def _answer(self, pipe: Connection) -> None:
        if pipe.recv() == "begin":
            self._waits_s, self._last_s = array("d"), 0.0
            pipe.send(None)
            return
        latest = self._log.latest()
        behind = sum(
            version != latest.get(key, BASE)
            for holder in self._holders
            for key, version in holder.has.items()
        )
        waits_s = sorted(self._waits_s) or [0.0]
        pipe.send(
            ClientFigures(
                told_count=len(self._waits_s),
                median_s=waits_s[len(waits_s) // 2],
                p99_s=waits_s[len(waits_s) * 99 // 100],
                last_s=self._last_s,
                live_s=max(holder.live_s for holder in self._holders),
                behind=behind,
                wrong=self._wrong[:3],
            )
        )


class ClientProcess:
    """Many clients. Each registers for ``keys_each`` ledgers, at random."""

    def __init__(
        self,
        log: ChangeLog,
        urls: Sequence[str],
        *,
        clients: int,
        keys_each: int = 10,
        seed: int = 1,
        starts_per_s: float = 800.0,
    ) -> None:
        self._pipe, theirs = _spawn.Pipe()
        make = partial(Swarm, clients=clients, keys_each=keys_each, seed=seed)
        arguments = (make, log, list(urls), theirs, starts_per_s)
        self.process = _spawn.Process(target=_hold, args=arguments, daemon=True)
        self.process.start()

    @property
    def cpu_s(self) -> float:
        return cpu_of([self.process.pid])

    async def begin(self) -> None:
        """Forget what was told before."""
        await asyncio.to_thread(self._ask, "begin")

    async def figures(self) -> ClientFigures:
        """Raises UnavailableError if a wrong version was told."""
        found: ClientFigures = await asyncio.to_thread(self._ask, "figures")
        if found.wrong:
            raise UnavailableError(f"a wrong version was told: {found.wrong}")
        return found

    async def wait_current(self, *, timeout_s: float, poll_s: float = 0.5) -> ClientFigures:
        """Wait until each client has the latest versions. Raises UnavailableError."""
        found: list[ClientFigures] = []

        async def is_current() -> bool:
            found[:] = [await self.figures()]
            return not found[0].behind and found[0].live_s < float("inf")

        await wait_until(is_current, "all versions", timeout_s=timeout_s, poll_s=poll_s)
        return found[0]

    def _ask(self, what: str) -> Any:
        self._pipe.send(what)
        return self._pipe.recv()


@contextmanager
def client_process(log: ChangeLog, urls: Sequence[str], **options: Any) -> Iterator[ClientProcess]:
    clients = ClientProcess(log, urls, **options)
    try:
        yield clients
    finally:
        clients.process.kill()
        clients.process.join()


def _hold(
    make: partial[Swarm], log: ChangeLog, urls: Sequence[str], pipe: Connection, starts_per_s: float
) -> None:
    gc.disable()  # else its pauses would be measured as delays
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(make(log).run(urls, pipe, starts_per_s))
