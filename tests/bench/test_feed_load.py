"""The load of the change feed's bench, against a server that only answers writes."""

import asyncio
import itertools
import socket
import struct
import threading
from contextlib import suppress

import pytest

from bench.feed_load import MetadataLoad, prepare_writes
from ledgers.codec.layout import Layout
from ledgers.codec.metadata import parse_metadata
from ledgers.errors import UnavailableError
from ledgers.manager import LedgerManager
from ledgers.model import BookieId
from tests.memory.store import MemoryStore, MemoryTree

BOOKIES = tuple(BookieId(f"b{number}:3181") for number in range(3))


class Server:
    """Answers a connection like ZooKeeper. ``refuse_from``: number of the first refused write."""

    def __init__(self, *, refuse_from: int = 10**9) -> None:
        self.paths: list[str] = []
        self.data: list[bytes] = []
        self._refuse_from = refuse_from
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        # A load that failed has closed its end.
        with suppress(OSError, struct.error), connection, connection.makefile("rb") as received:
            read_frame(received)
            connection.sendall(framed(bytes(36)))
            for zxid in itertools.count(1):
                request = read_frame(received)
                xid, kind = struct.unpack_from(">ii", request)
                if kind != 5:
                    return
                size = int.from_bytes(request[8:12])
                self.paths.append(request[12 : 12 + size].decode())
                self.data.append(request[16 + size : -4])
                if zxid >= self._refuse_from:
                    connection.sendall(framed(struct.pack(">iqi", xid, zxid, -101)))
                else:
                    connection.sendall(framed(struct.pack(">iqi68x", xid, zxid, 0)))

    def close(self) -> None:
        self._listener.close()
        self._thread.join(5)


def read_frame(received: object) -> bytes:
    size = int.from_bytes(received.read(4))  # type: ignore[attr-defined]
    data: bytes = received.read(size)  # type: ignore[attr-defined]
    return data


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4) + body


def writes(count: int) -> list[bytes]:
    manager = LedgerManager(MemoryStore(MemoryTree()), "/ledgers", Layout.HIERARCHICAL)
    return prepare_writes(manager, range(count), BOOKIES)


def test_each_ledger_changes_in_turn_and_each_change_is_new() -> None:
    async def scenario() -> None:
        server = Server()

        result = await MetadataLoad(server.address, writes(3), per_s=1_000).run(0.2)

        server.close()
        paths = [f"/ledgers/00/0000/L000{number}" for number in range(3)]
        assert server.paths == list(itertools.islice(itertools.cycle(paths), result.count))
        assert list(result.zxids) == list(range(1, result.count + 1))
        assert len(result.sent_s) == result.count > 6
        lengths = [parse_metadata(data).length for data in server.data[:7:3]]
        assert lengths[0] == lengths[2] != lengths[1]

    asyncio.run(scenario())


def test_a_refused_write_ends_the_load() -> None:
    async def scenario() -> None:
        server = Server(refuse_from=5)

        with pytest.raises(UnavailableError):
            await MetadataLoad(server.address, writes(3)).run(0.1)

        server.close()

    asyncio.run(scenario())
