"""Reads that are asked for at about the same time go to ZooKeeper in one request.

Ledgers are repaired many at a time, and each reads its mark and its metadata: as single requests
these reads would be nearly all that ZooKeeper has to do for a repair.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from kazoo.exceptions import UnimplementedError
from kazoo.protocol.serialization import GetData

from ledgers.errors import BookmenderError
from ledgers.zookeeper.kazoo_multi_read import MultiRead
from ledgers.zookeeper.kazoo_session import OnReply, resolve

Read = tuple[GetData, "asyncio.Future[Any]"]

READS_MAX = 50
"""Joined into one request: its reply is that many times a ledger's metadata."""


class Sender(Protocol):
    """What is needed of a ``KazooSession``."""

    def send(self, request: Any, on_reply: OnReply) -> None: ...


class JoinedReads:
    """Sends requests on a session, in the order in which they come.

    Reads of one turn of the loop are joined, as long as nothing else comes in between. A server that
    cannot do that (before 3.6) gets them one by one.
    """

    def __init__(self, session: Sender) -> None:
        self._session = session
        self._waiting: list[Read] = []
        self._can_join = True

    def ask(self, request: Any) -> "asyncio.Future[Any]":
        """As ``KazooSession.ask``."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if not isinstance(request, GetData):
            self._flush()
            self._session.send(request, partial(resolve, future))
            return future
        if not self._waiting:
            loop.call_soon(self._flush)
        self._waiting.append((request, future))
        if len(self._waiting) == READS_MAX:
            self._flush()
        return future

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if len(waiting) == 1 or not self._can_join:
            self._send_singly(waiting)
        elif waiting:
            self._send_joined(waiting)

    def _send_singly(self, reads: Sequence[Read]) -> None:
        for request, future in reads:
            self._send(request, partial(resolve, future))

    def _send_joined(self, reads: Sequence[Read]) -> None:
        def on_reply(parts: Sequence[Any], error: BaseException | None) -> None:
            if isinstance(error, UnimplementedError):
                self._can_join = False
                self._send_singly(reads)
            elif error is not None:
                for _, future in reads:
                    resolve(future, None, error)
            else:
                for (_, future), part in zip(reads, parts, strict=True):
                    resolve(future, part, part if isinstance(part, Exception) else None)

        self._send(MultiRead([request.path for request, _ in reads]), on_reply)

    def _send(self, request: Any, on_reply: OnReply) -> None:
        try:
            self._session.send(request, on_reply)
        except BookmenderError as error:  # lost since the read was asked for
            on_reply(None, error)
