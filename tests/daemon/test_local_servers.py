"""When a server of the local cluster counts as ready."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from daemon.local.servers import is_bookie_ready

REPLY = b"\x00\x00\x00\x01x"


@contextmanager
def bookie(reply: bytes) -> Iterator[int]:
    """Serve one connection: read, send the reply, close. Without a reply, close at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                if reply:
                    connection.recv(1024)
                    connection.sendall(reply)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


@pytest.mark.parametrize(("reply", "ready"), [(REPLY, True), (b"", False)])
def test_a_bookie_is_ready_when_it_replies(reply: bytes, ready: bool) -> None:
    """A bookie that starts accepts connections and closes them at once."""
    with bookie(reply) as port:
        assert is_bookie_ready(port) is ready


def test_a_bookie_that_does_not_listen_is_not_ready() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    assert not is_bookie_ready(port)
