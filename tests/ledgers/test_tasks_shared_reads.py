"""Reads that callers share: there are few of them, and none is older than the call it answers."""

import asyncio

import pytest

from ledgers.errors import UnavailableError
from ledgers.tasks import SharedReads
from tests.replication.cluster import in_virtual_time


class Server:
    """A server that answers after a second with its value when the read reached it."""

    def __init__(self) -> None:
        self.value = 0
        self.reads = 0
        self.failures = 0

    async def read(self, key: str) -> int:
        self.reads += 1
        if self.failures:
            self.failures -= 1
            raise UnavailableError("no answer")
        value = self.value
        await asyncio.sleep(1)
        return value


@in_virtual_time
async def test_concurrent_callers_share_a_read() -> None:
    server = Server()
    shared = SharedReads(server.read)

    values = await asyncio.gather(*(shared.get(["b"]) for _ in range(50)))

    assert values == [{"b": 0}] * 50
    assert server.reads == 2  # the first one began before the others came


@in_virtual_time
async def test_callers_for_several_keys_share_their_reads() -> None:
    server = Server()
    shared = SharedReads(server.read)

    await asyncio.gather(shared.get(["a"]), shared.get(["b", "c"]), shared.get(["c", "d"]))

    assert server.reads == 4  # a alone, then b, c and d


@in_virtual_time
async def test_a_read_that_has_started_does_not_answer_later_callers() -> None:
    server = Server()
    shared = SharedReads(server.read)
    first = asyncio.create_task(shared.get(["b"]))
    await asyncio.sleep(0.5)
    server.value = 1

    later = await asyncio.gather(*(shared.get(["b"]) for _ in range(50)))

    assert await first == {"b": 0}
    assert later == [{"b": 1}] * 50
    assert server.reads == 2


@in_virtual_time
async def test_a_failed_read_fails_only_its_caller() -> None:
    server = Server()
    server.failures = 1
    shared = SharedReads(server.read)

    first, second = await asyncio.gather(
        shared.get(["b"]), shared.get(["b"]), return_exceptions=True
    )

    assert isinstance(first, UnavailableError)
    assert second == {"b": 0}


@in_virtual_time
async def test_a_cancelled_caller_leaves_the_others_their_answer() -> None:
    server = Server()
    shared = SharedReads(server.read)
    first = asyncio.create_task(shared.get(["b"]))
    second = asyncio.create_task(shared.get(["b"]))
    await asyncio.sleep(0.5)

    first.cancel()

    assert await second == {"b": 0}
    with pytest.raises(asyncio.CancelledError):
        await first


@in_virtual_time
async def test_all_callers_of_a_read_go_on_together() -> None:
    """Within a few turns of the loop, so that their next writes share a transaction."""
    gates = {number: asyncio.Event() for number in (1, 2)}
    ended: list[int] = []
    reads = 0

    async def read(key: str) -> None:
        nonlocal reads
        reads += 1
        await gates[reads].wait()

    async def get(number: int) -> None:
        await shared.get(["b"])
        ended.append(number)

    shared = SharedReads(read)
    async with asyncio.TaskGroup() as tasks:
        for number in range(50):
            tasks.create_task(get(number))
        for gate in gates.values():
            await asyncio.sleep(1)
            gate.set()
        for _ in range(6):
            await asyncio.sleep(0)
        assert len(ended) == 50
