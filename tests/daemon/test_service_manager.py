"""Messages to systemd, received on a real socket."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from daemon.service_manager import STATUS_MAX, ServiceManager


@pytest.fixture(params=["path", "abstract"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "abstract":
        return f"@bookmender-test-{os.getpid()}"
    return str(tmp_path / "notify")


@pytest.fixture
def received(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + address[1:] if address.startswith("@") else address)
        sock.settimeout(5)
        yield sock


@pytest.fixture
def manager(address: str, received: socket.socket) -> Iterator[ServiceManager]:
    with closing(ServiceManager.from_environment({"NOTIFY_SOCKET": address})) as manager:
        yield manager


def test_ready_and_stopping_are_sent(manager: ServiceManager, received: socket.socket) -> None:
    manager.ready()
    manager.stopping()

    assert received.recv(1024) == b"READY=1"
    assert received.recv(1024) == b"STOPPING=1"


def test_a_reload_tells_the_monotonic_time(
    manager: ServiceManager, received: socket.socket
) -> None:
    before_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000

    manager.reloading()

    first, second = received.recv(1024).decode().split("\n")
    assert first == "RELOADING=1"
    name, value = second.split("=")
    assert name == "MONOTONIC_USEC"
    assert before_us <= int(value) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000


def test_a_status_is_one_short_line_and_is_sent_once(
    manager: ServiceManager, received: socket.socket
) -> None:
    manager.show("repairing\nREADY=1")
    manager.show("repairing\nREADY=1")
    manager.show("x" * 1_000)

    assert received.recv(4096) == b"STATUS=repairing READY=1", "a text adds no other message"
    assert received.recv(4096) == b"STATUS=" + b"x" * STATUS_MAX


@pytest.mark.parametrize(
    ("variables", "watchdog_s"),
    [
        pytest.param({"WATCHDOG_USEC": "30000000"}, 30.0, id="in microseconds"),
        pytest.param({}, None, id="none"),
        pytest.param({"WATCHDOG_USEC": "0"}, None, id="zero is none"),
        pytest.param({"WATCHDOG_USEC": "x"}, None, id="not a number"),
        pytest.param(
            {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None, id="another process"
        ),
        pytest.param(
            {"WATCHDOG_USEC": "5", "WATCHDOG_PID": str(os.getpid())}, 5e-6, id="this process"
        ),
    ],
)
def test_the_watchdog_is_as_the_environment_says(
    variables: dict[str, str], watchdog_s: float | None
) -> None:
    environment = {"NOTIFY_SOCKET": "/no/such/socket", **variables}

    with closing(ServiceManager.from_environment(environment)) as manager:
        assert manager.watchdog_s == watchdog_s


def test_without_a_watchdog_it_is_not_fed(manager: ServiceManager, received: socket.socket) -> None:
    manager.feed_watchdog()
    manager.ready()

    assert received.recv(1024) == b"READY=1"


@pytest.mark.parametrize(
    "address", [pytest.param("", id="no manager"), pytest.param("vsock:2:1", id="unknown kind")]
)
def test_without_a_socket_nothing_happens(address: str) -> None:
    with closing(ServiceManager(address, watchdog_s=None)) as manager:
        assert not manager.is_present
        manager.ready()
        manager.show("working")


def test_a_manager_that_does_not_listen_is_no_error(tmp_path: Path) -> None:
    with closing(ServiceManager(str(tmp_path / "gone"), watchdog_s=1.0)) as manager:
        manager.ready()
        manager.feed_watchdog()


def test_messages_for_which_the_socket_is_full_are_sent_later(
    manager: ServiceManager, received: socket.socket
) -> None:
    """systemd stops a service whose READY=1 does not arrive."""
    for number in range(10_000):
        manager.show(f"{number}")

    manager.ready()
    manager.show("working")
    while (said := received.recv(1024)) != b"READY=1":
        assert said.startswith(b"STATUS=")
        manager.send_waiting()

    assert received.recv(1024) == b"STATUS=working"


def test_a_message_to_the_watchdog_is_never_late(
    manager: ServiceManager, received: socket.socket
) -> None:
    """An old one would hide that the node hangs now."""
    manager.watchdog_s = 1.0
    for _ in range(10_000):
        manager.feed_watchdog()

    received.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            received.recv(1024)
    manager.send_waiting()

    with pytest.raises(BlockingIOError):
        received.recv(1024)
