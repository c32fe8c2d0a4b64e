"""The thread and the port of the server: nothing that happens to it reaches the node."""

import asyncio
import errno
import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from collections.abc import Iterator, MutableMapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from daemon.http import app, server
from daemon.http.cluster_reader import ClusterReader, Read, Reading
from daemon.http.server import http_thread
from daemon.live_settings import LiveSettings
from daemon.settings import HttpSettings, Settings
from ledgers.errors import UnavailableError

PATIENCE_S = 60.0
DAY_S = 86_400.0
STEPS_TO_OPEN = 40
"""Steps of the event loop, some more than the opening of the port takes."""


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    """A port that another process uses."""
    with closing(socket.create_server(("127.0.0.1", 0))) as bound:
        yield bound


def settings(port: int) -> Settings:
    """No ZooKeeper answers there."""
    return Settings(
        metadata_service_uri="zk+hierarchical://127.0.0.1:1/ledgers", http=HttpSettings(port=port)
    )


def get(port: int, path: str) -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return answer.status, answer.read()


def wait_until(condition: object) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until_s
        time.sleep(0.01)


def answers(port: int) -> bool:
    with suppress(OSError):
        return get(port, "/healthz")[0] == 200
    return False


@contextmanager
def running(http: HttpSettings) -> Iterator[list[MutableMapping[str, Any]]]:
    """Run a server and yield what it logs, once it has logged something."""
    with capture_logs() as logged:
        thread = http_thread(LiveSettings(replace(settings(0), http=http)), [])
        thread.start()
        try:
            wait_until(lambda: logged)
            yield logged
        finally:
            assert thread.stop(timeout_s=PATIENCE_S)


def test_a_port_in_use_is_told_once_and_tried_again(
    taken: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "RETRY_S", 0.01)
    port = taken.getsockname()[1]
    with running(HttpSettings(port=port)) as logged:
        time.sleep(0.1)
        taken.close()
        wait_until(lambda: answers(port))

    failed = [each for each in logged if each["event"] == "http.listen_failed"]
    assert [(each["log_level"], each["port"]) for each in failed] == [("error", port)]
    assert "http.port" in failed[0]["next_step"]
    assert [each["event"] for each in logged].count("http.listening") == 1


@pytest.mark.parametrize(
    ("number", "next_step"),
    [
        pytest.param(errno.EADDRINUSE, "http.port", id="a taken port"),
        pytest.param(errno.EADDRNOTAVAIL, "an address of this host", id="an address of others"),
        pytest.param(errno.EAFNOSUPPORT, "no IPv6", id="an address of a family that is off"),
        pytest.param(errno.EACCES, "1024", id="a privileged port"),
        pytest.param(errno.EMFILE, "LimitNOFILE", id="no file for the socket"),
    ],
)
def test_a_port_that_cannot_be_opened_is_told_with_its_own_remedy(
    monkeypatch: pytest.MonkeyPatch, number: int, next_step: str
) -> None:
    def fail(*_: object, **__: object) -> socket.socket:
        raise OSError(number, os.strerror(number))

    async def run() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await server.listen(web.Application(), HttpSettings(port=0))

    monkeypatch.setattr(socket, "create_server", fail)
    monkeypatch.setattr(server, "RETRY_S", PATIENCE_S)
    with capture_logs() as logged:
        asyncio.run(run())

    (told,) = logged
    assert os.strerror(number) in told["error"]
    assert next_step in told["next_step"]


def test_all_ipv6_addresses_include_those_of_ipv4() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    with running(HttpSettings(address="::", port=0)) as logged:
        assert answers(logged[0]["port"]), "127.0.0.1 is an address of this host"


def test_a_missing_token_is_told_in_the_log() -> None:
    with running(HttpSettings(port=0, token_file="/nonexistent/token")) as logged:
        wait_until(lambda: any(each["event"] == "http.token_unusable" for each in logged))

    (told,) = (each for each in logged if each["event"] == "http.token_unusable")
    assert "/nonexistent/token" in told["error"]


def test_a_request_in_progress_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZooKeeper does not answer, and the request would wait for a day."""
    real, is_asked = ClusterReader.read, threading.Event()

    async def read(self: ClusterReader, name: str, read: Read) -> Reading:
        is_asked.set()
        with suppress(UnavailableError):
            await real(self, name, read)
        await asyncio.sleep(DAY_S)
        raise AssertionError

    monkeypatch.setattr(ClusterReader, "read", read)
    monkeypatch.setattr(app, "REQUEST_S", DAY_S)
    with capture_logs() as logged:
        thread = http_thread(LiveSettings(settings(0)), [])
        thread.start()
        wait_until(lambda: logged)
        with socket.create_connection(("127.0.0.1", logged[-1]["port"])) as client:
            client.sendall(b"GET /api/v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert is_asked.wait(PATIENCE_S)
            assert thread.stop(timeout_s=PATIENCE_S)


def test_a_server_that_crashes_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    crashes = iter([ZeroDivisionError()])
    real = server.listen

    async def listen(*arguments: object) -> None:
        for error in crashes:
            raise error
        await real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(server, "listen", listen)
    with running(HttpSettings(port=0)) as logged:
        wait_until(lambda: any(each["event"] == "http.listening" for each in logged))
    assert "role.crashed" in [each["event"] for each in logged]


def test_a_stop_while_the_port_opens_leaves_no_socket() -> None:
    async def run(steps: int) -> None:
        opening = asyncio.create_task(server.listen(web.Application(), HttpSettings(port=0)))
        for _ in range(steps):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)

    with warnings.catch_warnings(record=True) as left:
        warnings.simplefilter("always")
        for steps in range(STEPS_TO_OPEN):
            asyncio.run(run(steps))
        gc.collect()
    assert [str(each.message) for each in left] == []


def test_the_list_of_commands_and_other_commands_do_not_load_the_server() -> None:
    code = (
        "import sys; from daemon.cli.main import cli; import daemon.cli.status\n"
        "import daemon.cli.daemon, daemon.node, daemon.roles\n"
        "print(*[m for m in ('aiohttp', 'daemon.http.app') if m in sys.modules])"
    )

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert ended.stdout.split() == []


def test_garbage_is_answered_with_400_and_not_logged(capfd: pytest.CaptureFixture[str]) -> None:
    async def ask(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\x16\x03\x01 nonsense\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            answer = await reader.read()
        writer.close()
        return answer

    with running(HttpSettings(port=0)) as logged:
        port = logged[0]["port"]
        assert asyncio.run(ask(port)).startswith(b"HTTP/1.0 400")
        assert json.loads(get(port, "/healthz")[1])["is_ok"] is True
    assert not answers(port)
    assert [each["event"] for each in logged] == ["http.listening"]
    assert capfd.readouterr().err == ""
