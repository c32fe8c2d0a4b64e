"""The parts of kazoo that are replaced, without a server."""

import asyncio
import importlib.metadata
import socket
import struct
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionDropped
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import WATCH_XID
from kazoo.protocol.serialization import GetData, SetData

from daemon.local.ports import LOOPBACK
from ledgers.errors import UnavailableError, UnsupportedError
from ledgers.security import OPEN, Security, SecuritySettings, security_for
from ledgers.zookeeper import kazoo_session
from ledgers.zookeeper.kazoo_internals import (
    KAZOO_VERSION,
    SEND_BYTES_MAX,
    AddWatch,
    EventListener,
    OneSessionHandler,
    RemoveWatches,
    WatchMode,
    replace_connection,
)
from ledgers.zookeeper.store import ZooKeeperStore
from tests.replication.cluster import in_virtual_time

SECURITY = security_for(OPEN)


def test_kazoo_has_the_version_for_which_parts_are_replaced() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]

    assert f"kazoo=={KAZOO_VERSION}" in project["dependencies"]
    assert importlib.metadata.version("kazoo") == KAZOO_VERSION


class Outcome:
    """The receiver of a reply."""

    def __init__(self) -> None:
        self.value: object = None
        self.error: BaseException | None = None

    def set(self, value: object = None) -> None:
        self.value = value

    def set_exception(self, error: BaseException) -> None:
        self.error = error


@pytest.fixture
def handler() -> OneSessionHandler:
    return OneSessionHandler(security=SECURITY, connect_timeout_s=0.05, on_crash=lambda error: None)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


# --- The handler ----------------------------------------------------------------------------------


def test_a_host_that_accepts_no_connection_times_out_early(handler: OneSessionHandler) -> None:
    with socket.create_server((LOOPBACK, 0), backlog=0) as deaf:
        address = deaf.getsockname()
        waiting = [_knock(address) for _ in range(4)]  # more than its queue holds

        with pytest.raises(OSError, match="timed out"):
            handler.create_connection(address=address, timeout=600)

        for connection in waiting:
            connection.close()


def _knock(address: tuple[str, int]) -> socket.socket:
    connection = socket.socket()
    connection.setblocking(False)
    connection.connect_ex(address)
    return connection


@pytest.mark.parametrize("step", ["before", "while it connects", "in the TLS handshake"])
def test_no_connection_is_used_once_the_session_is_given_up(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    security = Security(SecuritySettings(zookeeper_tls=step == "in the TLS handshake"))
    handler = OneSessionHandler(security=security, connect_timeout_s=1, on_crash=lambda error: None)
    connect = SequentialThreadingHandler.create_connection

    def connect_late(*args: Any, **options: Any) -> Any:
        connection = connect(*args, **options)
        if step == "while it connects":
            handler.break_connection()
        return connection

    def shake_hands(connection: socket.socket, host: str) -> socket.socket:
        handler.break_connection()
        return connection

    monkeypatch.setattr(SequentialThreadingHandler, "create_connection", connect_late)
    monkeypatch.setattr(handler, "_with_tls", shake_hands)
    if step == "before":
        handler.forbid_connections()
    with socket.create_server((LOOPBACK, 0)) as server:
        with pytest.raises(ConnectionDropped, match="the session is over"):
            handler.create_connection(address=server.getsockname(), timeout=1)

        if step != "before":
            accepted, _ = server.accept()
            with accepted:
                assert accepted.recv(1) == b"", "it is closed"


def test_breaking_a_connection_wakes_its_waiting_thread(handler: OneSessionHandler) -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        connection = handler.create_connection(address=server.getsockname(), timeout=1)

        handler.break_connection()

        assert handler.select([connection], [], [], None) == ([connection], [], [])
        assert connection.recv(1) == b""
        connection.close()


def test_a_dying_thread_is_reported() -> None:
    crashes: list[BaseException] = []
    handler = OneSessionHandler(security=SECURITY, connect_timeout_s=1, on_crash=crashes.append)

    def crash() -> None:
        raise ValueError("out of luck")

    handler.spawn(crash).join()

    assert [str(crash) for crash in crashes] == ["out of luck"]


# --- The connection -------------------------------------------------------------------------------


class Wire:
    """A connection with its wake-up pipe, whose peer is the test."""

    def __init__(
        self, handler: OneSessionHandler, *, on_events: EventListener = lambda events: None
    ) -> None:
        self.client = KazooClient(handler=handler)
        self.connection = replace_connection(self.client, security=SECURITY, on_events=on_events)
        self.connection._read_sock, self.connection._write_sock = socket.socketpair()
        self.connection._read_sock.setblocking(False)
        self.connection._socket, self.peer = socket.socketpair()
        self.connection._socket.setblocking(False)

    def is_woken(self) -> bool:
        return bool(self.client.handler.select([self.connection._read_sock], [], [], 0)[0])

    def sent_xids(self) -> list[int]:
        """Return the ids of the requests that arrived since the last call."""
        self.peer.setblocking(False)
        received, xids = self.peer.recv(2**20), []
        while received:
            length = int.from_bytes(received[:4])
            xids.append(int.from_bytes(received[4:8]))
            received = received[4 + length :]
        return xids

    def close(self) -> None:
        for end in (
            self.connection._read_sock,
            self.connection._write_sock,
            self.connection._socket,
            self.peer,
        ):
            end.close()


@pytest.fixture
def wire(handler: OneSessionHandler) -> Iterator[Wire]:
    wire = Wire(handler)
    yield wire
    wire.close()


def test_a_large_backlog_is_sent_in_parts_between_replies(wire: Wire) -> None:
    for _ in range(3):
        wire.connection.submit(SetData("/a", bytes(SEND_BYTES_MAX), 0), Outcome())

    pieces = []
    while wire.is_woken():
        wire.connection._send_request(1, 1)
        pieces.append(wire.sent_xids())

    assert pieces == [[1], [2], [3]]


def test_a_request_that_cannot_be_serialized_fails_alone(wire: Wire) -> None:
    bad, good = Outcome(), Outcome()
    wire.connection.submit(GetData("/\ud800", None), bad)  # no such text in UTF-8
    wire.connection.submit(GetData("/a", None), good)

    wire.connection._send_request(1, 1)

    assert isinstance(bad.error, UnicodeEncodeError)
    assert wire.sent_xids() == [1]
    assert good.error is None


def test_a_reply_that_stops_in_the_middle_times_out(wire: Wire) -> None:
    wire.connection.submit(GetData("/a", None), Outcome())
    wire.connection._send_request(1, 1)
    wire.peer.sendall(_reply(1)[:-1])

    with pytest.raises(wire.client.handler.timeout_exception):
        wire.connection._read_socket(0.01)


def test_a_connection_that_ends_within_a_reply_is_dropped(wire: Wire) -> None:
    wire.connection.submit(GetData("/a", None), Outcome())
    wire.connection._send_request(1, 1)
    wire.peer.sendall(_reply(1)[:-1])
    wire.peer.close()

    with pytest.raises(ConnectionDropped):
        wire.connection._read_socket(1)


@pytest.mark.parametrize("xid", [1, WATCH_XID], ids=["a reply", "an event"])
@pytest.mark.parametrize("length", [-(2**31), -4, -1, 2**31 - 1])
def test_an_impossible_length_breaks_the_connection(wire: Wire, length: int, xid: int) -> None:
    wire.peer.sendall(struct.pack("!iiqiiii", length, xid, 0, 0, 1, 3, 0))

    with pytest.raises(ConnectionDropped):
        wire.connection._read_socket(1.0)


def _reply(xid: int) -> bytes:
    body = xid.to_bytes(4) + (1).to_bytes(8) + bytes(4)
    return len(body).to_bytes(4) + body


# --- Persistent watches ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "opcode", "written"),
    [
        pytest.param(
            AddWatch("/a", WatchMode.PERSISTENT_RECURSIVE), 106, "00000002 2f61 00000001", id="add"
        ),
        pytest.param(RemoveWatches("/a"), 18, "00000002 2f61 00000003", id="remove"),
    ],
)
def test_requests_about_watches_have_zookeepers_format(
    request_: AddWatch | RemoveWatches, opcode: int, written: str
) -> None:
    assert request_.type == opcode
    assert request_.serialize() == bytes.fromhex(written)


def test_an_event_is_reported_with_number_path_and_zxid(handler: OneSessionHandler) -> None:
    told: list[tuple[int, str, int]] = []
    client = KazooClient(handler=handler)
    connection = replace_connection(client, security=SECURITY, on_events=told.extend)

    for number in (1, 2, 3, 4):
        event = number.to_bytes(4) + (3).to_bytes(4) + (2).to_bytes(4) + b"/a"
        header = (-1).to_bytes(4, signed=True) + (70 + number).to_bytes(8) + bytes(4)
        connection._read_watch_event(header + event, len(header))

    assert told == [(1, "/a", 71), (2, "/a", 72), (3, "/a", 73), (4, "/a", 74)]


@pytest.mark.parametrize("piece_bytes", [1, 7, 34, 40, 1_000])
def test_events_and_replies_are_handled_in_order_however_they_arrive(
    handler: OneSessionHandler, piece_bytes: int
) -> None:
    told: list[object] = []
    wire = Wire(handler, on_events=told.extend)
    for xid in (1, 2):
        wire.client._pending.append((GetData("/a", None), Told(told), xid))
    reply = bytes(12) + bytes(4) + bytes(68)  # rest of the header, no data, stat
    frames = b"".join(
        (
            framed(event_bytes(3, "/x/1", zxid=5)),
            framed(event_bytes(2, "/x/22", zxid=6)),
            framed((1).to_bytes(4) + reply),
            framed(event_bytes(1, "/x/\u00e4", zxid=7)),
            framed((2).to_bytes(4) + reply),
        )
    )

    def send() -> None:
        for start in range(0, len(frames), piece_bytes):
            wire.peer.sendall(frames[start : start + piece_bytes])

    sending = threading.Thread(target=send)
    sending.start()
    while len(told) < 5:
        wire.connection._read_socket(10)
    sending.join()
    wire.close()

    assert told == [(3, "/x/1", 5), (2, "/x/22", 6), "reply", (1, "/x/\u00e4", 7), "reply"]


def test_an_impossible_event_breaks_the_connection(wire: Wire) -> None:
    """With this length the loop over the events would never end."""
    wire.peer.sendall((-4).to_bytes(4, signed=True) + framed(event_bytes(3, "/a", zxid=5))[4:])

    with pytest.raises(ConnectionDropped):
        wire.connection._read_socket(10)


class Told:
    """The result of a request, which only notes that its reply was handled."""

    def __init__(self, told: list[object]) -> None:
        self._told = told

    def set(self, value: object = None) -> None:
        self._told.append("reply")

    def set_exception(self, error: BaseException) -> None:
        raise error


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4) + body


def event_bytes(number: int, path: str, *, zxid: int) -> bytes:
    header = (-1).to_bytes(4, signed=True) + zxid.to_bytes(8) + bytes(4)
    name = path.encode()
    return header + number.to_bytes(4) + (3).to_bytes(4) + len(name).to_bytes(4) + name


# --- An old server --------------------------------------------------------------------------------


@pytest.fixture
def old_zookeeper() -> Iterator[int]:
    """The port of a server before 3.6, which refuses a joined read and closes the connection."""

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(framed(struct.pack("!iiqi16s?", 0, 4_000, 77, 16, b"", False)))
            xid = connection.recv(4096)[4:8]
            connection.sendall(framed(xid + struct.pack("!qi", 1, -6)))

    with socket.create_server((LOOPBACK, 0)) as listening:
        serving = threading.Thread(target=serve)
        serving.start()
        yield listening.getsockname()[1]
        serving.join()


def test_a_server_that_is_too_old_is_refused_with_the_version_that_is_needed(
    old_zookeeper: int,
) -> None:
    with pytest.raises(UnsupportedError, match=r"older than 3\.6.* upgrade all ZooKeeper servers"):
        asyncio.run(ZooKeeperStore.open(f"{LOOPBACK}:{old_zookeeper}"))


# --- The end --------------------------------------------------------------------------------------


def test_a_resolver_that_does_not_answer_does_not_delay_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers, lookups = threading.Event(), []

    def hang(host: str, *args: object, **options: object) -> None:
        lookups.append(answers.wait(60))
        raise socket.gaierror("no name server answers")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setattr(kazoo_session, "UNOPENED_END_MAX_S", 0.01)
    try:
        with pytest.raises(UnavailableError):
            asyncio.run(ZooKeeperStore.open("zk.example.com:2181", connect_timeout_s=0.05))

        assert lookups == [], "a lookup had to end first"
    finally:
        answers.set()


@in_virtual_time
async def test_events_that_the_loop_does_not_handle_break_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kazoo_session, "EVENTS_WAITING_MAX", 10)

    session = kazoo_session.KazooSession(f"{LOOPBACK}:1", session_timeout_s=4.0)
    for _ in range(2):
        session._events_came([(1, "/a", 5)] * 11)
        with pytest.raises(ConnectionDropped):
            session._events_came([(1, "/a", 6)])
        await asyncio.sleep(0)
