"""Stores entries on bookies directly over V2, which is quicker than a writer and needs no
metadata."""

import socket
import struct
import time
from collections.abc import Iterable, Iterator

from ledgers.errors import UnavailableError
from ledgers.model import BookieId

WINDOW_ENTRIES, WINDOW_BYTES = 1_000, 4 << 20
CONNECT_ATTEMPTS, CONNECT_WAIT_S = 20, 0.1
NO_LEDGER_ID = (1 << 63) - 1
_REPLY = struct.Struct(">iiiqq")


def store_entries(bookie: BookieId, entries: Iterable[bytes], *, master_key: bytes) -> None:
    """Add packed entries to one bookie (id ``host:port``) and wait until all are acknowledged.

    Raises UnavailableError if the bookie refuses an entry.
    """
    with _connect(bookie) as connection:
        for window in _windows(entries):
            connection.sendall(b"".join(_add(entry, master_key) for entry in window))
            replies = receive(connection, _REPLY.size * len(window))
            for _, _, code, ledger_id, entry_id in _REPLY.iter_unpack(replies):
                if code != 0:
                    raise UnavailableError(
                        "add was refused",
                        bookie=bookie,
                        code=code,
                        ledger_id=ledger_id,
                        entry_id=entry_id,
                    )


def _windows(entries: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yield the entries in groups that may be in flight at once."""
    window: list[bytes] = []
    window_bytes = 0
    for entry in entries:
        window.append(entry)
        window_bytes += len(entry)
        if len(window) == WINDOW_ENTRIES or window_bytes >= WINDOW_BYTES:
            yield window
            window, window_bytes = [], 0
    if window:
        yield window


def _connect(bookie: BookieId) -> socket.socket:
    """Return a connection on which the bookie has answered. A bookie that starts up accepts some
    connections only to reset them."""
    host, _, port = bookie.rpartition(":")
    for _ in range(CONNECT_ATTEMPTS):
        connection = socket.create_connection((host, int(port)), timeout=30)
        try:
            connection.sendall(struct.pack(">iiqq", 20, 0x0202_0000, NO_LEDGER_ID, 0))
            receive(connection, _REPLY.size)  # "no such ledger"
        except (ConnectionError, UnavailableError):
            connection.close()
            time.sleep(CONNECT_WAIT_S)
        else:
            return connection
    raise UnavailableError("bookie resets every connection", bookie=bookie)


def _add(entry: bytes, master_key: bytes) -> bytes:
    return b"".join((struct.pack(">ii", 24 + len(entry), 0x0201_0000), master_key, entry))


def receive(connection: socket.socket, size: int) -> bytes:
    """Return exactly so many bytes. Raises UnavailableError if the peer closes the connection."""
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise UnavailableError("the server closed the connection")
        data += piece
    return bytes(data)
