"""Reading ahead: order, bounds and failures."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from itertools import count

import pytest

from ledgers.errors import UnavailableError
from ledgers.tasks import read_ahead
from tests.replication.cluster import in_virtual_time
from tests.virtual_time import run


class Source:
    """A source whose entries arrive after a second; it counts those in flight."""

    def __init__(self, entry: Callable[[int], bytes | None]) -> None:
        self._entry = entry
        self.flying_count = self.flying_count_max = 0
        self.started: list[int] = []

    async def read(self, entry_id: int) -> bytes | None:
        self.started.append(entry_id)
        self.flying_count += 1
        self.flying_count_max = max(self.flying_count_max, self.flying_count)
        try:
            await asyncio.sleep(1)
            return self._entry(entry_id)
        finally:
            self.flying_count -= 1


@pytest.mark.compat(
    "LedgerRecoveryTest.testBatchRecoverySize3",
    "LedgerRecoveryTest.testBatchRecoverySize13",
    verdict="better",
)
def test_entries_come_in_order_whatever_order_they_arrive_in() -> None:
    async def read(entry_id: int) -> bytes:
        await asyncio.sleep(10 - entry_id)
        return bytes([entry_id])

    async def scenario() -> list[bytes]:
        async with aclosing(read_ahead(range(10), read)) as entries:
            return [entry async for entry in entries]

    assert b"".join(run(scenario())) == bytes(range(10))


@pytest.mark.compat(
    "LedgerRecoveryTest.testBatchRecoverySize3",
    "LedgerRecoveryTest.testBatchRecoverySize13",
    verdict="better",
    why="the number of reads in flight adapts, up to a bound in bytes",
)
@in_virtual_time
async def test_the_number_in_flight_grows_up_to_its_bound() -> None:
    source = Source(lambda entry_id: b"x")

    async with aclosing(read_ahead(range(200), source.read, entries_max=16)) as entries:
        read_count = len([entry async for entry in entries])

    assert read_count == 200
    assert source.flying_count_max == 16
    # One at a time would have taken 200 s.
    assert asyncio.get_running_loop().time() < 20


@in_virtual_time
async def test_large_entries_are_read_one_at_a_time() -> None:
    source = Source(lambda entry_id: bytes(1000))

    async with aclosing(read_ahead(range(20), source.read, bytes_max=1500)) as entries:
        async for _ in entries:
            assert len(source.started) <= 20

    # Two are under way before the first shows how large they are.
    assert source.flying_count_max == 2


@in_virtual_time
async def test_nothing_is_read_far_beyond_the_end() -> None:
    source = Source(lambda entry_id: b"x" if entry_id < 1 else None)

    async with aclosing(read_ahead(count(), source.read)) as entries:
        assert [entry async for entry in entries] == [b"x"]

    assert max(source.started) <= 3


@in_virtual_time
async def test_a_failure_behind_the_end_does_not_count() -> None:
    def entry(entry_id: int) -> bytes | None:
        if entry_id == 2:
            raise UnavailableError("time-out")
        return b"x" if entry_id == 0 else None

    async with aclosing(read_ahead(count(), Source(entry).read)) as entries:
        assert [entry async for entry in entries] == [b"x"]


@in_virtual_time
async def test_a_failure_is_raised_in_its_place() -> None:
    def entry(entry_id: int) -> bytes | None:
        if entry_id == 1:
            raise UnavailableError("time-out")
        return b"x"

    async with aclosing(read_ahead(count(), Source(entry).read)) as entries:
        assert await anext(entries) == b"x"
        with pytest.raises(UnavailableError):
            await anext(entries)


@in_virtual_time
async def test_leaving_the_loop_cancels_the_reads_in_flight() -> None:
    source = Source(lambda entry_id: b"x")

    async with aclosing(read_ahead(count(), source.read)) as entries:
        async for _ in entries:
            break

    assert source.flying_count == 0
