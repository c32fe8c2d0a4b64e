"""A ZooKeeper session without a server: requests are recorded, and answered when the test says
so."""

import asyncio
from collections.abc import Callable
from typing import Any

from ledgers.store import SessionState, session_lost
from ledgers.zookeeper.kazoo_internals import MultiRead
from ledgers.zookeeper.kazoo_session import OnReply

SOON_S = 0.001
"""A latency that is nothing special."""


class ScriptedSession:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.replies: list[OnReply] = []
        self.sent_at_s: list[float] = []
        self.state = SessionState.CONNECTED
        self.on_not_suspended: Callable[[], None] = lambda: None
        self.break_count = 0
        self.break_is_told = asyncio.Event()
        self.break_is_told.set()

    async def wait_break_reported(self, break_count: int) -> None:
        await self.break_is_told.wait()

    def send(self, request: Any, on_reply: OnReply) -> None:
        if self.state is SessionState.LOST:
            raise session_lost()
        self.sent.append(request)
        self.replies.append(on_reply)
        self.sent_at_s.append(asyncio.get_running_loop().time())

    def reply(self, index: int, value: Any = None, error: BaseException | None = None) -> None:
        self.replies[index](value, error, SOON_S)

    def become(self, state: SessionState) -> None:
        self.state = state
        if state is not SessionState.SUSPENDED:
            self.on_not_suspended()

    def sent_paths(self) -> list[Any]:
        """Return the requests: a path for a single one, a list for joined reads."""
        return [
            list(request.paths) if isinstance(request, MultiRead) else request.path
            for request in self.sent
        ]


async def turn() -> None:
    """Let the loop turn once."""
    await asyncio.sleep(0)
