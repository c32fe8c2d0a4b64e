"""The bound on connections holds from accept on, and no flood closes what matters more."""

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import uvloop
from aiohttp import web
from structlog.testing import capture_logs

from daemon.http import connections
from daemon.http.connections import CONNECTION, Connections
from daemon.http.server import listen
from daemon.settings import HttpSettings
from tests.daemon.http.test_tls import Tls, ask

PATIENCE_S = 60.0
PLAIN = HttpSettings(port=0)
Waiting = dict[str, asyncio.Event]


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 4)


@asynccontextmanager
async def served(
    http: HttpSettings, begun: asyncio.Event, go_on: asyncio.Event
) -> AsyncIterator[int]:
    """Serve ``/healthz`` at once, and ``/slow`` after ``go_on``. Gives the port."""

    async def healthz(request: web.Request) -> web.Response:
        return web.Response(text="well")

    async def slow(request: web.Request) -> web.Response:
        request[CONNECTION].changes = request.method == "POST"
        begun.set()
        await go_on.wait()
        return web.Response(text="changed")

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/slow", slow), web.post("/slow", slow)])
    with capture_logs() as logged:
        serving = asyncio.create_task(listen(app, http))
        while not (told := [e for e in logged if e["event"] == "http.listening"]):  # noqa: ASYNC110  # no event
            await asyncio.sleep(0.01)
        yield told[0]["port"]
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def flood(port: int, first_bytes: bytes, *, count: int = 40) -> list[socket.socket]:
    """Open many connections and send these bytes on each."""
    loop, opened = asyncio.get_running_loop(), []
    for _ in range(count):
        opened.append(each := socket.socket())
        each.setblocking(False)
        await loop.sock_connect(each, ("127.0.0.1", port))
        with suppress(OSError):
            await loop.sock_sendall(each, first_bytes)
    return opened


def test_unfinished_handshakes_count_and_make_room(tmp_path: Path) -> None:
    tls = Tls(tmp_path)

    async def run() -> None:
        async with served(tls.settings, asyncio.Event(), asyncio.Event()) as port:
            before_count = len(os.listdir("/proc/self/fd"))
            # Silent ones, and some that begin a handshake and never go on.
            held = await flood(port, b"") + await flood(port, b"\x16\x03\x01\x02\x00\x01")
            status, _ = await ask(port, tls.client(), "GET", "/healthz")
            files = len(os.listdir("/proc/self/fd")) - before_count - len(held)
            for each in held:
                each.close()
        assert status == 200
        assert files <= 4

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


@pytest.mark.parametrize(
    ("method", "first_bytes"),
    [
        pytest.param("POST", b"", id="a change, among silent connections"),
        pytest.param("GET", b"GET ", id="a read, among connections without a whole request"),
        pytest.param("POST", b"GET /slow HTTP/1.1\r\nHost: h\r\n\r\n", id="a change, among reads"),
    ],
)
def test_a_request_at_work_stays_while_lesser_connections_close(
    method: str, first_bytes: bytes
) -> None:
    async def run() -> str:
        begun, go_on = asyncio.Event(), asyncio.Event()
        async with asyncio.timeout(PATIENCE_S), served(PLAIN, begun, go_on) as port:
            asked = asyncio.create_task(ask(port, None, method, "/slow"))
            await begun.wait()
            held = await flood(port, first_bytes)
            await asyncio.sleep(0)
            go_on.set()
            _, text = await asked
            for each in held:
                each.close()
            return text

    assert asyncio.run(run()) == "changed"


def test_while_all_connections_change_something_a_new_one_is_refused() -> None:
    async def run() -> list[tuple[int, str]]:
        begun, go_on = asyncio.Event(), asyncio.Event()
        async with asyncio.timeout(PATIENCE_S), served(PLAIN, begun, go_on) as port:
            asked = [asyncio.create_task(ask(port, None, "POST", "/slow")) for _ in range(4)]
            await begun.wait()
            await asyncio.sleep(0.1)
            (refused,) = await flood(port, b"", count=1)
            with suppress(ConnectionError):
                assert await asyncio.get_running_loop().sock_recv(refused, 1) == b""
            refused.close()
            go_on.set()
            return await asyncio.gather(*asked)

    assert asyncio.run(run()) == [(200, "changed")] * 4


class NoFiles(socket.socket):
    """A listening socket of a process that is out of files at first."""

    tries = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.tries += 1
        if self.tries <= 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_without_files_accepting_waits_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "NO_FILES_PAUSE_S", 0.01)

    async def run() -> None:
        listening = NoFiles()
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.setblocking(False)
        made = asyncio.Event()
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            accepting = Connections(tasks)

            def protocol() -> asyncio.Protocol:
                made.set()
                return asyncio.Protocol()

            accepting.listen(listening, protocol)
            (client,) = await flood(listening.getsockname()[1], b"x", count=1)
            await made.wait()
            accepting.close(listening)
            client.close()

    with capture_logs() as logged:
        asyncio.run(run())

    (told,) = logged
    assert told["event"] == "http.accept_failed"
    assert "LimitNOFILE" in told["error"]


def test_a_client_that_has_gone_is_no_defect(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        ended = asyncio.Event()

        async def talk(request: web.Request) -> web.StreamResponse:
            try:
                response = web.StreamResponse()
                await response.prepare(request)
                while True:
                    await response.write(b"x" * 1000)
                    await asyncio.sleep(0.01)
            finally:
                ended.set()

        app = web.Application()
        app.add_routes([web.get("/talk", talk)])
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(listen(app, PLAIN, on_open=port.set_result))
        _, writer = await asyncio.open_connection("127.0.0.1", await port)
        writer.write(b"GET /talk HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.sleep(0.1)
        writer.transport.abort()
        async with asyncio.timeout(PATIENCE_S):
            await ended.wait()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(run())

    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
