"""A real node under a service manager: its messages, and a reload by SIGHUP."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.steps import errors, events, nodes, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

WATCHDOG_S = 4
CONFIG = """
[hold]
share = {share}
[replication]
ledgers_at_once = {at_once}
bytes_per_s = 5000000
"""


class Manager:
    """Plays systemd: receives the messages of a node."""

    def __init__(self, address: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(address))
        self._socket.setblocking(False)
        self.lines: list[str] = []

    def has(self, line: str) -> bool:
        """Receive what has come, and return whether a line begins so."""
        self.receive()
        return any(each.startswith(line) for each in self.lines)

    def count(self, line: str) -> int:
        self.receive()
        return self.lines.count(line)

    def receive(self) -> None:
        while True:
            try:
                self.lines += self._socket.recv(4096).decode().split("\n")
            except BlockingIOError:
                return

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    address = tmp_path / "notify"
    monkeypatch.setenv("NOTIFY_SOCKET", str(address))
    monkeypatch.setenv("WATCHDOG_USEC", str(WATCHDOG_S * 1_000_000))
    manager = Manager(address)
    yield manager
    manager.close()


def configure(folder: Path, *, share: float = 0.3, at_once: int = 100) -> tuple[str, ...]:
    """Write the settings file, and return the command that uses it."""
    path = folder / "bookmender.toml"
    path.write_text(CONFIG.format(share=share, at_once=at_once))
    return ("daemon", "daemon", "--config", str(path))


async def test_a_node_tells_its_manager_how_it_is(
    uri: str, tmp_path: Path, manager: Manager
) -> None:
    async with nodes(uri, tmp_path) as start:
        node = start("told")
        await wait_for(lambda: manager.has("READY=1"), "readiness")
        leading = "STATUS=worker: waiting for marked ledgers; auditor: leading"
        await wait_for(lambda: manager.has(leading), "status")
        await wait_for(lambda: manager.has("WATCHDOG=1"), "watchdog")
        assert manager.lines.index("STATUS=looking for the cluster") == 0

        node.terminate()
        assert await asyncio.to_thread(node.wait, timeout_s=5)
        manager.receive()
        assert manager.lines[-1] == "STOPPING=1"


@pytest.mark.long(group="commands")
async def test_a_reload_changes_what_can_be_changed_and_names_the_rest(
    uri: str, tmp_path: Path, manager: Manager
) -> None:
    async with nodes(uri, tmp_path) as start:
        node = start("reloaded", command=configure(tmp_path))
        await wait_for(lambda: manager.has("READY=1"), "readiness")

        configure(tmp_path, share=0.5, at_once=7)
        os.kill(node.pid, signal.SIGHUP)

        (reloaded,) = await wait_for(lambda: events(node, "settings.reloaded"), "reload")
        assert reloaded["changed"] == ["hold.share"]
        (rest,) = await wait_for(lambda: events(node, "settings.restart_needed"), "the rest")
        assert rest["settings"] == ["replication.ledgers_at_once"]
        await wait_for(lambda: manager.has("RELOADING=1"), "message")
        assert manager.has("MONOTONIC_USEC=")
        await wait_for(lambda: manager.count("READY=1") == 2, "end of the reload")

        (tmp_path / "bookmender.toml").write_text("[hold]\nshare = 7\n")
        os.kill(node.pid, signal.SIGHUP)
        (refused,) = await wait_for(lambda: events(node, "settings.reload_failed"), "refusal")
        assert "hold.share" in refused["error"]
        assert [each["event"] for each in errors(node)] == ["settings.reload_failed"]
        assert node.is_running


@pytest.mark.long(group="commands")
async def test_an_abort_by_the_watchdog_shows_where_each_thread_was(
    uri: str, tmp_path: Path, manager: Manager
) -> None:
    async with nodes(uri, tmp_path) as start:
        node = start("aborted")
        await wait_for(lambda: manager.has("READY=1"), "readiness")

        os.kill(node.pid, signal.SIGABRT)

        assert await asyncio.to_thread(node.wait, timeout_s=5)
        assert node.exit_code == -signal.SIGABRT
        log = node.log.read_text()
        assert "main_loop.py" in log
        assert log.count("_supervise") + log.count("threads.py") >= 2, "both services"
