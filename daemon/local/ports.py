"""Loopback: finds free ports, and asks the servers on ports."""

import random
import socket

LOOPBACK = "127.0.0.1"
CONNECT_TIMEOUT_S = 1.0

# Below the range that systems use for outgoing connections, so that the port of a bookie that is
# down is still free when the bookie starts again.
PORT_FIRST, PORT_LAST = 20_000, 32_000
TRIES_MAX = 1_000


def free_ports(count: int) -> tuple[int, ...]:
    """Return distinct ports on which no process listens. Random, so that two clusters rarely
    collide."""
    candidates = random.sample(range(PORT_FIRST, PORT_LAST), TRIES_MAX)
    found = [port for port, _ in zip(filter(is_free, candidates), range(count), strict=False)]
    assert len(found) == count, "no free ports between 20000 and 32000"
    return tuple(found)


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        # Set, as servers do: connections of an earlier server in TIME_WAIT do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def loopback_interface() -> str:
    """Return the name of the loopback interface: ``lo`` (Linux), ``lo0`` (macOS, the BSDs)."""
    names = [name for _, name in socket.if_nameindex()]
    return next(name for name in ("lo", "lo0") if name in names)


def replies(port: int, request: bytes) -> bool:
    """Return True if the server sends anything after this request."""
    try:
        with socket.create_connection((LOOPBACK, port), CONNECT_TIMEOUT_S) as connection:
            connection.sendall(request)
            return bool(connection.recv(1))
    except OSError:
        return False


def ask(port: int, question: bytes) -> bytes:
    """Send the question and return the answer up to the end of the connection; empty if no server
    answers."""
    try:
        with socket.create_connection((LOOPBACK, port), CONNECT_TIMEOUT_S) as connection:
            connection.sendall(question)
            return b"".join(iter(lambda: connection.recv(65_536), b""))
    except OSError:
        return b""
