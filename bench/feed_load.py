"""Writes metadata of ledgers to ZooKeeper at a steady rate, or as fast as it accepts them.

A ZooKeeper client in Python needs as much CPU for a write as the node that is measured. So this
load has only what it needs: one plain connection, requests that are prepared in advance, and many
of them in flight. Each write is a ``setData`` of its own, as BookKeeper's clients send them, with a
zxid of its own. It costs about two microseconds.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bench.loading import receive
from ledgers.codec.metadata import serialize_metadata
from ledgers.errors import UnavailableError
from ledgers.manager import LedgerManager
from ledgers.model import BookieId, LedgerMetadata
from tests.znode_cluster import closed

IN_FLIGHT_MAX = 200
"""Unanswered writes. At 1,000 (globalOutstandingLimit) ZooKeeper would stop reading all
connections."""
GROUP_MAX = 50
"""Writes that are sent together. At a steady rate a group is sent every ``GROUP_INTERVAL_S``."""
GROUP_INTERVAL_S = 0.005
LATE_MAX_S = 0.1
"""A steady load that is further behind lets the writes go that it did not send."""
SESSION_TIMEOUT_MS = 60_000
CONNECT_TIMEOUT_S = 10.0
RECEIVE_BYTES = 1 << 16

_LENGTH = struct.Struct(">i")
_CONNECT = struct.Struct(">iqiqi16s?")
_SET_DATA, _CLOSE = 5, -11
_REPLY = struct.Struct(">iiqi68x")
"""Length, xid, zxid, error, and the Stat of the znode. A failed write has no Stat."""
_SHORT_REPLY = struct.Struct(">iiqi")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The writes of one run. Times are monotonic seconds.

    ``zxids``: of all writes, in order. ``sent_s``: the time at which each of them was sent.
    """

    began_s: float
    ended_s: float
    zxids: Sequence[int]
    sent_s: Sequence[float]

    @property
    def count(self) -> int:
        return len(self.zxids)

    @property
    def per_s(self) -> float:
        return self.count / (self.ended_s - self.began_s)


def changing_metadata(number: int, bookies: Sequence[BookieId]) -> tuple[LedgerMetadata, ...]:
    """Return two states of a ledger on these bookies, between which the load switches."""
    return tuple(closed(*bookies, length=start + number) for start in (100_000, 200_000))


def prepare_writes(
    manager: LedgerManager, ledger_ids: Iterable[int], bookies: Sequence[BookieId]
) -> list[bytes]:
    """Return one request for each ledger, and then another one for each."""
    states: tuple[list[bytes], list[bytes]] = ([], [])
    for ledger_id in ledger_ids:
        path = manager.path(ledger_id)
        for state, metadata in zip(states, changing_metadata(ledger_id, bookies), strict=True):
            state.append(_set_data(path, serialize_metadata(metadata)))
    return [*states[1], *states[0]]


class MetadataLoad:
    """Sends prepared writes in turn, on a thread of its own, until it is stopped."""

    def __init__(self, address: str, writes: Sequence[bytes], *, per_s: int = 0) -> None:
        """``address``: ``host:port`` of ZooKeeper. ``per_s``: 0: as many as possible."""
        self._address, self._writes, self._per_s = address, writes, per_s
        self._next = 0
        self._stopping = threading.Event()
        self._thread = ThreadPoolExecutor(1, "metadata-load")

    async def run(self, duration_s: float) -> LoadResult:
        """Write for this time, and return what was written. Raises UnavailableError."""
        self.start()
        try:
            await asyncio.sleep(duration_s)
        finally:
            result = await asyncio.to_thread(self.stop)
        return result

    def start(self) -> None:
        self._stopping.clear()
        self._writing = self._thread.submit(self._write)

    def stop(self) -> LoadResult:
        """Wait for the replies in flight. Raises UnavailableError if a write failed."""
        self._stopping.set()
        try:
            return self._writing.result()
        except OSError as error:
            raise UnavailableError("the load failed") from error

    def _write(self) -> LoadResult:
        with _connect(self._address) as connection:
            result = self._write_until_stopped(connection)
            connection.sendall(_packet(_CLOSE, b""))
            return result

    def _write_until_stopped(self, connection: socket.socket) -> LoadResult:
        groups: deque[tuple[float, int]] = deque()
        """When each group was sent, and how many writes it had."""
        zxids: list[int] = []
        received = bytearray()
        began_s = time.monotonic()
        due_s, sent_count = began_s, 0
        size = min(GROUP_MAX, max(1, round(self._per_s * GROUP_INTERVAL_S))) if self._per_s else 50
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        while True:
            is_stopping = self._stopping.is_set()
            if is_stopping and sent_count == len(zxids):
                break
            now_s = time.monotonic()
            has_room = not is_stopping and sent_count - len(zxids) + size <= IN_FLIGHT_MAX
            if has_room and now_s >= due_s:
                connection.sendall(self._group(size))
                groups.append((now_s, size))
                sent_count += size
                if self._per_s:
                    due_s = max(due_s + size / self._per_s, now_s - LATE_MAX_S)
                wait_s = 0.0
            else:
                wait_s = due_s - now_s if has_room else CONNECT_TIMEOUT_S
            if poll.poll(1000 * max(0.0, wait_s)):
                data = connection.recv(RECEIVE_BYTES)
                if not data:
                    raise UnavailableError("ZooKeeper closed the connection")
                received += data
                _take_replies(received, zxids)
        sent_s = [at_s for at_s, count in groups for _ in range(count)]
        return LoadResult(
            began_s=began_s, ended_s=time.monotonic(), zxids=zxids, sent_s=sent_s[: len(zxids)]
        )

    def _group(self, size: int) -> bytes:
        """Return the next writes, joined."""
        start, self._next = self._next, (self._next + size) % len(self._writes)
        part = self._writes[start : start + size]
        if len(part) < size:
            part = [*part, *self._writes[: size - len(part)]]
        return b"".join(part)


def _take_replies(received: bytearray, zxids: list[int]) -> None:
    """Move the zxids of complete replies from the bytes to the list."""
    end = len(received) - len(received) % _REPLY.size
    for length, _, zxid, error in _REPLY.iter_unpack(memoryview(received)[:end]):
        if error or length != _REPLY.size - _LENGTH.size:
            raise UnavailableError("ZooKeeper refused a write", error=error)
        zxids.append(zxid)
    del received[:end]


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    hello = _CONNECT.pack(0, 0, SESSION_TIMEOUT_MS, 0, 16, bytes(16), False)
    connection.sendall(_LENGTH.pack(len(hello)) + hello)
    (length,) = _LENGTH.unpack(receive(connection, _LENGTH.size))
    receive(connection, length)
    return connection


def _set_data(path: str, data: bytes) -> bytes:
    any_version = _LENGTH.pack(-1)
    return _packet(_SET_DATA, b"".join((_buffer(path.encode()), _buffer(data), any_version)))


def _buffer(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _packet(kind: int, body: bytes) -> bytes:
    """Return a request. ZooKeeper answers in order, so all requests may have one xid."""
    return struct.pack(">iii", len(body) + 8, 1, kind) + body
