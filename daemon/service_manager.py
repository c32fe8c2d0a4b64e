"""Messages to the service manager that started this process: systemd's ``sd_notify`` protocol.

A message is a datagram of lines ``NAME=value`` to the socket that ``NOTIFY_SOCKET`` names. Without
that variable (a terminal, a container) every method does nothing. The node must never wait for its
manager, or fail because of it. While the socket is full, messages wait in a short queue, because a
lost ``READY=1`` would make systemd stop the node. Other errors drop the message.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress

STATUS_MAX = 200
"""Longest status line in characters. ``systemctl status`` shows one line."""
WAITING_MAX = 16
"""Messages that wait for the socket: a few reloads and the last status."""
_FULL = (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM)


class ServiceManager:
    """Owns the socket to the service manager. Must be used on one thread only.

    ``address``: the path of the socket, or ``@name`` for an abstract name; empty: no manager.
    ``watchdog_s``: the manager restarts the process if ``feed_watchdog`` is not called for this
    long; None: no watchdog.
    """

    def __init__(self, address: str, *, watchdog_s: float | None = None) -> None:
        self.watchdog_s = watchdog_s if address else None
        self._address = b"\0" + address[1:].encode() if address[:1] == "@" else address.encode()
        self._socket: socket.socket | None = None
        self._status = ""
        self._waiting: deque[str] = deque(maxlen=WAITING_MAX)
        if address[:1] in ("@", "/"):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ServiceManager:
        """Return the manager that the environment of this process names."""
        is_ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        usec = environment.get("WATCHDOG_USEC", "")
        watchdog_s = int(usec) / 1e6 if is_ours and usec.isdecimal() and int(usec) else None
        return cls(environment.get("NOTIFY_SOCKET", ""), watchdog_s=watchdog_s)

    @property
    def is_present(self) -> bool:
        return self._socket is not None

    def ready(self) -> None:
        """Tell that the start, or a reload, is complete."""
        self._send("READY=1")

    def reloading(self) -> None:
        """Tell that a reload began. ``ready`` must follow."""
        self._send(
            "RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}"
        )

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def feed_watchdog(self) -> None:
        """Tell that the process works. Without a watchdog this does nothing.

        This message never waits for the socket: a late one would hide that the process hangs.
        """
        if self.watchdog_s is not None and not self._waiting:
            with suppress(OSError):
                self._send_now("WATCHDOG=1")

    def show(self, status: str) -> None:
        """Show one line in ``systemctl status``. The same line is sent once."""
        status = " ".join(status.split())[:STATUS_MAX]
        if status != self._status:
            self._status = status
            outdated = [text for text in self._waiting if text.startswith("STATUS=")]
            for text in outdated:
                self._waiting.remove(text)
            self._send(f"STATUS={status}")

    def send_waiting(self) -> None:
        """Send the messages for which the socket was full. Call this regularly."""
        while self._socket is not None and self._waiting:
            try:
                self._send_now(self._waiting[0])
            except OSError as error:
                if error.errno in _FULL:
                    return
                self._waiting.clear()  # no such socket any more
            else:
                self._waiting.popleft()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send_now(self, text: str) -> None:
        if self._socket is not None:
            self._socket.sendto(text.encode(), self._address)

    def _send(self, *lines: str) -> None:
        if self._socket is not None:
            self._waiting.append("\n".join(lines))
            self.send_waiting()
