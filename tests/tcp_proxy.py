"""A TCP proxy that breaks, delays and slows connections on demand, on the test's own loop."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from daemon.local.ports import LOOPBACK


class TcpProxy:
    """A proxy in front of a port of this machine."""

    def __init__(self, port: int) -> None:
        self._target_port = port
        self.address = ""
        """``host:port``, after the start."""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_up = True
        self._is_silent = False
        self._has_ignored = asyncio.Event()
        self._replies_pass = asyncio.Event()
        self._replies_pass.set()
        self._has_reply = asyncio.Event()
        self.reply_delay_s = 0.0
        """The delay of each reply, and of those behind it."""
        self.garble: Callable[[bytes], bytes] = lambda piece: piece
        """Changes each piece of the replies."""

    async def start(self) -> str:
        """Start to listen, and return the address, ``host:port``."""
        self._server = await asyncio.start_server(self._serve, LOOPBACK, 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        return self.address

    def cut(self) -> None:
        """Break all connections with their requests, and refuse new ones."""
        self._is_up = False
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def restore(self) -> None:
        self.admit()
        self._replies_pass.set()

    def admit(self) -> None:
        """Accept connections again. Replies that are held stay held."""
        self._is_up = True

    async def ignore_one(self) -> None:
        """Accept one connection without serving it, and return when it is there."""
        self._is_up = self._is_silent = True
        self._has_ignored.clear()
        await self._has_ignored.wait()
        self._is_silent = False

    def hold_replies(self) -> None:
        """Hold replies until ``restore``. Those of a connection that is cut before are lost."""
        self._replies_pass.clear()
        self.expect_reply()

    def expect_reply(self) -> None:
        """Let ``wait_reply`` wait for a reply that comes after this call."""
        self._has_reply.clear()

    async def wait_reply(self) -> None:
        """Wait until a reply has reached the proxy."""
        await self._has_reply.wait()

    async def wait_unused(self) -> None:
        """Wait until no client is connected."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._is_up:
            writer.transport.abort()
            return
        if self._is_silent:
            self._writers.add(writer)
            self._has_ignored.set()
            return
        from_server, to_server = await asyncio.open_connection(LOOPBACK, self._target_port)
        self._writers |= {writer, to_server}
        self._start(self._carry_requests(reader, to_server))
        self._start(self._carry_replies(from_server, writer))

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_requests(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while chunk := await source.read(65_536):
                target.write(chunk)
                await target.drain()
        target.transport.abort()

    async def _carry_replies(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while chunk := await source.read(65_536):
                self._has_reply.set()
                await self._replies_pass.wait()
                await asyncio.sleep(self.reply_delay_s)
                target.write(self.garble(chunk))
                await target.drain()
        target.transport.abort()
