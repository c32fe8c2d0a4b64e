"""Loopback: its free ports, and whether somebody answers on one."""

import random
import socket

LOOPBACK = "127.0.0.1"
CONNECT_TIMEOUT_S = 1.0

# Below the range that systems hand out for outgoing connections, so that a bookie which is down
# finds its port still free when it comes back.
PORT_FIRST, PORT_LAST = 20_000, 32_000
TRIES_MAX = 1_000


def free_ports(count: int) -> tuple[int, ...]:
    """Distinct ports that nobody listens on now. Random, so that two clusters rarely collide."""
    candidates = random.sample(range(PORT_FIRST, PORT_LAST), TRIES_MAX)
    found = [port for port, _ in zip(filter(is_free, candidates), range(count), strict=False)]
    assert len(found) == count, "no free ports between 20000 and 32000"
    return tuple(found)


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: connections of a former server that linger in TIME_WAIT do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def loopback_interface() -> str:
    """What this system calls it: ``lo`` (Linux), ``lo0`` (macOS, the BSDs)."""
    names = [name for _, name in socket.if_nameindex()]
    return next(name for name in ("lo", "lo0") if name in names)


def answers(port: int) -> bool:
    """Whether a TCP connection can be made."""
    try:
        socket.create_connection((LOOPBACK, port), CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def ask(port: int, question: bytes) -> bytes:
    """What is answered to a question until the connection is closed; empty when nobody answers."""
    try:
        with socket.create_connection((LOOPBACK, port), CONNECT_TIMEOUT_S) as connection:
            connection.sendall(question)
            return b"".join(iter(lambda: connection.recv(65_536), b""))
    except OSError:
        return b""
