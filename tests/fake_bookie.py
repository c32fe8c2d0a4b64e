"""A fake bookie with V2 over loopback, in this process. Its faults are settings."""

import asyncio
import random
import struct
from collections import deque
from collections.abc import Iterable
from types import TracebackType

from ledgers.digest import EntryDigest
from ledgers.model import BookieId

ADD, READ, READ_BATCH = 1, 2, 7
EOK, ENOLEDGER, ENOENTRY = 0, 1, 2
EIO, EUA, EFENCED, EREADONLY, ETOOMANYREQUESTS = 101, 102, 104, 105, 106

_HEADER = struct.Struct(">BBH")
_IDS = struct.Struct(">qq")
_REPLY = struct.Struct(">iBBHiqq")
_BATCH = struct.Struct(">qqqiq")
_BATCH_REPLY = struct.Struct(">iBBHiqqq")
_SIZE = struct.Struct(">i")
BATCH_REPLY_OVERHEAD = 36


class FakeBookie:
    """Stores entries and answers reads and adds. Its public fields may be changed at any time.

    The peaks count reads from their arrival until their reply is passed to the transport, over all
    connections. The client really had at least that many in flight.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self.entries: dict[tuple[int, int], bytes] = {}
        self.read_codes: dict[tuple[int, int], int] = {}
        self.add_codes: dict[tuple[int, int], int] = {}
        self.adds: list[tuple[int, bytes, bytes]] = []
        """Flags, master key and entry of each add received, also of refused ones."""
        self.may_answer = asyncio.Event()
        """While cleared, requests pile up without an answer; ``answer_one`` lets one through."""
        self.may_answer.set()
        self._answering_one = False
        self.is_reading = asyncio.Event()
        """While cleared, nothing more is received, so requests pile up on the client's side."""
        self.is_reading.set()
        self.requests_waiting = 0
        """Requests received and not answered yet."""
        self.stale_codes: deque[int] = deque()
        """Codes of the next replies, even if they are no longer true: the bookie looked before."""
        self.never_answers: set[tuple[int, int]] = set()
        self.is_reordering = False
        """True: replies that wait together are sent in random order."""
        self.split_bytes_max = 0
        """If above 0, replies are sent in random pieces of at most this size."""
        self.knows_batches = True
        """False: a bookie before 4.17, which closes the connection at a batch read."""
        self.batches_seen: list[tuple[int, range, int]] = []
        """For each batch read: the ledger, the entries asked for, and the bytes allowed."""
        self.answers_before_reset: int | None = None
        self.forged: deque[bytes] = deque()
        """Raw bytes that are sent instead of the next replies, one each."""
        self.honest_answers = 0
        """The number of replies before the first forged one."""
        self.extra: list[bytes] = []
        """Raw bytes that are sent after every reply."""
        self.answers_twice = False
        self.reads_in_flight = 0
        self.reads_in_flight_peak = 0
        self.bytes_in_flight_peak = 0
        self.reads_seen: list[tuple[int, int]] = []
        self.connection_count = 0
        self._bytes_in_flight = 0
        self._random = random.Random(seed)
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._port = 0

    @property
    def bookie_id(self) -> BookieId:
        return BookieId(f"127.0.0.1:{self._port}")

    def put(
        self, digest: EntryDigest, ledger_id: int, entry_ids: Iterable[int], payload: bytes = b"p"
    ) -> None:
        """Store good entries, all with that payload."""
        for entry_id in entry_ids:
            self.entries[ledger_id, entry_id] = digest.pack(
                ledger_id=ledger_id, entry_id=entry_id, lac=-1, length=1, payload=payload
            )

    def restart_random(self, seed: int) -> None:
        self._random = random.Random(seed)

    @property
    def is_connected(self) -> bool:
        return bool(self._connections)

    async def __aenter__(self) -> "FakeBookie":
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, on the same port as before if it was stopped."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and drop all connections."""
        assert self._server is not None
        self._server.close()
        self.is_reading.set()
        self.reset()
        while self._connections:
            await asyncio.wait(list(self._connections))
        await self._server.wait_closed()

    def answer_one(self) -> None:
        self._answering_one = True
        self.may_answer.set()

    def reset(self) -> None:
        """Drop all connections, and the requests on them."""
        for writer in self._connections.values():
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        self.connection_count += 1
        requests: asyncio.Queue[bytes] = asyncio.Queue()
        answering = asyncio.create_task(self._answer_all(requests, writer))
        try:
            while await self.is_reading.wait():
                (length,) = struct.unpack(">i", await reader.readexactly(4))
                packet = await reader.readexactly(length)
                self._note(packet)
                requests.put_nowait(packet)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client left, or was dropped
        finally:
            answering.cancel()
            await asyncio.wait([answering])
            while not requests.empty():
                self._unnote(requests.get_nowait())
            writer.transport.abort()
            del self._connections[task]

    async def _answer_all(
        self, requests: asyncio.Queue[bytes], writer: asyncio.StreamWriter
    ) -> None:
        while True:
            batch = [await requests.get()]
            try:
                await asyncio.sleep(0)  # let more requests arrive, so that the peaks are meaningful
                await self.may_answer.wait()
                if self._answering_one:
                    self._answering_one = False
                    self.may_answer.clear()
                else:
                    while not requests.empty():
                        batch.append(requests.get_nowait())
                if self.is_reordering:
                    self._random.shuffle(batch)
                while batch:
                    replies = self._replies(batch[0])
                    self._unnote(batch.pop(0))
                    for reply in replies:
                        await self._send(reply, writer)
            except OSError:
                writer.transport.abort()
                return
            finally:
                for packet in batch:
                    self._unnote(packet)

    async def _send(self, reply: bytes, writer: asyncio.StreamWriter) -> None:
        if self.answers_before_reset is not None:
            if self.answers_before_reset == 0:
                writer.transport.abort()
                raise ConnectionResetError
            self.answers_before_reset -= 1
        if self.split_bytes_max == 0:
            writer.write(reply)
        while self.split_bytes_max and reply:
            size = self._random.randint(1, self.split_bytes_max)
            writer.write(reply[:size])
            reply = reply[size:]
            await asyncio.sleep(0)
        await writer.drain()

    def _replies(self, packet: bytes) -> list[bytes]:
        _, operation, flags = _HEADER.unpack_from(packet)
        if operation == READ_BATCH:
            return [self._batch_reply(packet)]
        if operation == READ:
            key = _IDS.unpack_from(packet, 4)
            code, entry = (self.stale_codes.popleft(), b"") if self.stale_codes else self._read(key)
        else:
            entry = b""
            key = _IDS.unpack_from(packet, 24)
            code = self._add(key, flags, packet[4:24], packet[24:])
        if key in self.never_answers:
            return []
        if self.forged and self.honest_answers == 0:
            return [self.forged.popleft()]
        self.honest_answers = max(0, self.honest_answers - 1)
        reply = _REPLY.pack(24 + len(entry), 2, operation, 0, code, *key) + entry
        return [reply, *self.extra, *([reply] if self.answers_twice else [])]

    def _batch_reply(self, packet: bytes) -> bytes:
        """Return the consecutive entries that exist and are allowed. Only the first may fail."""
        if not self.knows_batches:
            raise ConnectionResetError
        if self.forged:
            return self.forged.popleft()
        ledger_id, first, request_id, count_max, bytes_max = _BATCH.unpack_from(packet, 4)
        code, entry = self._read((ledger_id, first))
        body = b""
        for entry_id in range(first + 1, first + count_max + 1):
            if code != EOK:
                break
            body += _SIZE.pack(len(entry)) + entry
            next_code, entry = self._read((ledger_id, entry_id))
            size = BATCH_REPLY_OVERHEAD + len(body) + 4 + len(entry)
            if next_code != EOK or size > bytes_max:
                break
        length = _BATCH_REPLY.size - 4 + len(body)
        head = _BATCH_REPLY.pack(length, 2, READ_BATCH, 0, code, ledger_id, first, request_id)
        return head + body

    def _read(self, key: tuple[int, int]) -> tuple[int, bytes]:
        code = self.read_codes.get(key, EOK)
        if code == EOK and key not in self.entries:
            code = ENOENTRY
        return code, self.entries[key] if code == EOK else b""

    def _add(self, key: tuple[int, int], flags: int, master_key: bytes, entry: bytes) -> int:
        self.adds.append((flags, master_key, entry))
        code = self.stale_codes.popleft() if self.stale_codes else self.add_codes.get(key, EOK)
        if code == EOK:
            self.entries[key] = entry
        return code

    def _note(self, packet: bytes) -> None:
        self.requests_waiting += 1
        if packet[1] == READ_BATCH:
            ledger_id, first, _, count, bytes_max = _BATCH.unpack_from(packet, 4)
            self.batches_seen.append((ledger_id, range(first, first + count), bytes_max))
        if packet[1] != ADD:
            self.reads_seen.append(_IDS.unpack_from(packet, 4))
            self.reads_in_flight += 1
            self._bytes_in_flight += self._weight(packet)
            self.reads_in_flight_peak = max(self.reads_in_flight_peak, self.reads_in_flight)
            self.bytes_in_flight_peak = max(self.bytes_in_flight_peak, self._bytes_in_flight)

    def _unnote(self, packet: bytes) -> None:
        self.requests_waiting -= 1
        if packet[1] != ADD:
            self.reads_in_flight -= 1
            self._bytes_in_flight -= self._weight(packet)

    def _weight(self, packet: bytes) -> int:
        """Return the bytes that a read asks for, as stored now."""
        ledger_id, first = _IDS.unpack_from(packet, 4)
        count = _BATCH.unpack_from(packet, 4)[3] if packet[1] == READ_BATCH else 1
        ids = range(first, first + count)
        return sum(len(self.entries.get((ledger_id, entry_id), b"")) for entry_id in ids)


def forged_reply(
    *,
    length: int = 24,
    version: int = 2,
    operation: int = READ,
    code: int = EOK,
    ledger_id: int = 0,
    entry_id: int = 0,
    entry: bytes = b"",
) -> bytes:
    """Return a reply in which every field may be wrong."""
    return _REPLY.pack(length, version, operation, 0, code, ledger_id, entry_id) + entry
