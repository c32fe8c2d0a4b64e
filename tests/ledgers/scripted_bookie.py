"""A bookie on loopback that follows a script, and a loop whose time a test moves."""

import asyncio
import functools
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, ParamSpec, TypeVar

from ledgers.codec.registration import Address
from ledgers.model import BookieId
from ledgers.wire import bookkeeper_wire_pb2 as wire
from ledgers.wire.framing import frame
from ledgers.wire.messages import Status

P = ParamSpec("P")
T = TypeVar("T")


class ShiftableLoop(asyncio.SelectorEventLoop):
    """A loop with the real time plus what a test added, so that no test waits for a deadline."""

    _added_s = 0.0

    def time(self) -> float:
        return super().time() + self._added_s

    def add(self, duration_s: float) -> None:
        self._added_s += duration_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run on a ShiftableLoop. No test may last a minute of any time."""

    async def bounded() -> T:
        async with asyncio.timeout(60):
            return await main

    with asyncio.Runner(loop_factory=ShiftableLoop) as runner:
        return runner.run(bounded())


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make a test of a coroutine function. It runs on a ShiftableLoop."""

    @functools.wraps(test)
    def running(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return running


def pass_time(duration_s: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ShiftableLoop)
    loop.add(duration_s)


async def step() -> None:
    """Let every ready task run, and receive what is ready on sockets."""
    for _ in range(20):
        await asyncio.sleep(0)


class Peer:
    """The bookie's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def packet(self) -> bytes:
        """Return the next packet. Raises IncompleteReadError after the client has left."""
        (packet_bytes,) = struct.unpack(">i", await self._reader.readexactly(4))
        return await self._reader.readexactly(packet_bytes)

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def is_left(self) -> None:
        """Wait until the client closes or resets the connection. Discards everything that it still
        sends."""
        try:
            while await self._reader.read(65_536):
                pass
        except ConnectionError:
            pass

    def reset(self) -> None:
        transport = self._writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


Script = Callable[[Peer], Awaitable[None]]


class ScriptedBookie:
    def __init__(self, address: Address) -> None:
        self.address = address
        self.id = BookieId(f"{address[0]}:{address[1]}")
        self.connection_count = 0


@asynccontextmanager
async def scripted_bookie(*scripts: Script) -> AsyncIterator[ScriptedBookie]:
    """Yield a bookie. Its first connection runs the first script, and so on; the last script runs
    for all that follow.

    A script that ends closes its connection. A script that still runs at the end is cancelled.
    """
    running: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        script = scripts[min(bookie.connection_count, len(scripts) - 1)]
        bookie.connection_count += 1
        try:
            await script(Peer(reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client left, or the test is over
        finally:
            running.discard(task)
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    bookie = ScriptedBookie(Address(*server.sockets[0].getsockname()[:2]))
    try:
        yield bookie
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running)
        await server.wait_closed()


# --- Replies --------------------------------------------------------------------------------------


def v2_reply(packet: bytes, status: Status = Status.EOK) -> bytes:
    """Return the frame that answers a V2 add."""
    return frame(packet[:2] + bytes(2) + struct.pack(">i", status.v2_code) + packet[24:40])


def v3_reply(packet: bytes, status: Status = Status.EOK, entry: bytes = b"") -> bytes:
    """Return the frame that answers a V3 add or read."""
    request = wire.Request.FromString(packet)
    response = wire.Response(header=request.header, status=status.v3_code)
    if request.header.operation == wire.READ_ENTRY:
        asked = request.readRequest
        inner = wire.ReadResponse(ledgerId=asked.ledgerId, entryId=asked.entryId)
        inner.status = response.status
        if status is Status.EOK:
            inner.body = entry
        response.readResponse.CopyFrom(inner)
    return frame(response.SerializeToString())
