"""Many requests cost the cluster as little as one."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from daemon.admin_session import AdminSession
from daemon.http import cluster_reader
from daemon.http.cluster_reader import (
    AGE_FACTOR,
    PENDING_MAX,
    ClusterReader,
    LoopThread,
    NotReadError,
)
from daemon.settings import Settings
from ledgers.errors import RejectedError, UnavailableError
from ledgers.store import MetadataStore
from tests.daemon.http.serving import without_arguments
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster

DAY_S = 86_400.0


class Source:
    """Opens sessions on a cluster in memory and counts what is read in them."""

    def __init__(self, cluster: Cluster) -> None:
        self.opened_count = self.read_count = 0
        self.is_gone = False
        self.takes_s = 0.0
        self.last: AdminSession | None = None
        self._cluster = cluster

    @asynccontextmanager
    async def open(self) -> AsyncIterator[AdminSession]:
        if self.is_gone:
            raise UnavailableError("no ZooKeeper server answers")
        self.opened_count += 1
        self.last = visiting(self._cluster)
        yield self.last

    async def read(self, cluster: AdminSession) -> int:
        await asyncio.sleep(self.takes_s)
        await cluster.store.exists("/")
        self.read_count += 1
        return self.read_count


def reading(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test with the arguments ``source``, ``reader`` and, if it wants it, ``monkeypatch``."""

    async def run(fixtures: dict[str, object]) -> None:
        source = Source(await Cluster.start())
        reader = ClusterReader(source.open)
        task = asyncio.create_task(reader.run())
        try:
            await test(source=source, reader=reader, **fixtures)
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    return without_arguments(
        test, {"source", "reader"}, lambda fixtures: asyncio.run(run(fixtures))
    )


@reading
async def test_requests_at_the_same_time_share_one_reading(
    source: Source, reader: ClusterReader
) -> None:
    source.takes_s = 0.05

    found = await asyncio.gather(*(reader.read("a", source.read) for _ in range(50)))

    assert {each.value for each in found} == {1}
    assert (source.read_count, source.opened_count) == (1, 1)


@reading
async def test_a_reading_is_served_for_a_while_and_until_something_was_changed(
    source: Source, reader: ClusterReader
) -> None:
    first = await reader.read("a", source.read)
    assert (await reader.read("a", source.read)) is first
    reader.forget()
    assert (await reader.read("a", source.read)).value == 2
    assert source.opened_count == 1, "the session stays open"


@reading
async def test_a_reading_that_began_before_a_change_is_not_served_after_it(
    source: Source, reader: ClusterReader
) -> None:
    source.takes_s = 0.05
    before = asyncio.create_task(reader.read("a", source.read))
    await asyncio.sleep(0.02)
    reader.forget()
    after = await reader.read("a", source.read)
    assert ((await before).value, after.value) == (1, 2)
    assert (await reader.read("a", source.read)) is after


@reading
async def test_a_slow_reading_is_served_longer(
    source: Source, reader: ClusterReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_reader, "AGE_S", 0.0)

    source.takes_s = 0.05
    before_s = time.monotonic()
    found = await reader.read("a", source.read)
    after_s = time.monotonic()
    assert found.until_s - before_s >= AGE_FACTOR * source.takes_s
    assert found.until_s - after_s <= AGE_FACTOR * (after_s - before_s)
    found.until_s = after_s
    assert (await reader.read("a", source.read)).value == 2


def test_readings_run_in_the_given_thread() -> None:
    async def run() -> None:
        source, thread = Source(await Cluster.start()), LoopThread("reader")
        reader = ClusterReader(source.open, on_thread=thread.run)

        async def read(cluster: AdminSession) -> str:
            await cluster.store.exists("/")
            return threading.current_thread().name

        async def wait(cluster: AdminSession) -> None:
            await asyncio.sleep(DAY_S)

        thread.start()
        task = asyncio.create_task(reader.run())
        assert (await reader.read("a", read)).value == "reader"
        waiting = asyncio.create_task(reader.read("b", wait))
        await asyncio.sleep(0.02)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        waiting.cancel()
        assert thread.stop(timeout_s=10)
        assert thread.stop(timeout_s=0), "any number of times"

    asyncio.run(run())


@reading
async def test_only_one_reading_runs_at_a_time(source: Source, reader: ClusterReader) -> None:
    at_work = most = 0

    async def read(cluster: AdminSession) -> None:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        await asyncio.sleep(0.01)
        at_work -= 1

    await asyncio.gather(*(reader.read(str(name), read) for name in range(PENDING_MAX)))
    assert most == 1


@reading
async def test_too_many_different_readings_are_refused(
    source: Source, reader: ClusterReader
) -> None:
    source.takes_s = 0.05
    tasks = [
        asyncio.create_task(reader.read(str(name), source.read)) for name in range(PENDING_MAX)
    ]
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="too many"):
        await reader.read("more", source.read)
    await asyncio.gather(*tasks)


@reading
async def test_while_zookeeper_is_silent_no_reading_is_served(
    source: Source, reader: ClusterReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def why(settings: Settings) -> UnavailableError:
        return UnavailableError("it is frozen")

    monkeypatch.setattr(cluster_reader, "why_silent", why)
    await reader.read("a", source.read)

    source.takes_s = 60
    with monkeypatch.context() as frozen:
        frozen.setattr(MetadataStore, "is_silent", True)
        with pytest.raises(NotReadError, match="it is frozen") as known:
            await reader.read("a", source.read)
        with pytest.raises(NotReadError) as unknown:
            await reader.read("b", source.read)
    assert known.value.taken_ms is not None
    assert unknown.value.taken_ms is None
    assert (await reader.read("a", source.read)).value == 1


@reading
async def test_a_request_that_gives_up_leaves_the_reading_to_the_next(
    source: Source, reader: ClusterReader
) -> None:
    source.takes_s = 0.1
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await reader.read("a", source.read)
    await asyncio.sleep(0.15)
    assert (await reader.read("a", source.read)).value == 1


@reading
async def test_without_zookeeper_each_request_gets_the_error_until_it_is_back(
    source: Source, reader: ClusterReader
) -> None:
    source.is_gone = True
    for _ in range(2):
        with pytest.raises(UnavailableError, match="no ZooKeeper"):
            await reader.read("a", source.read)
    source.is_gone = False
    assert (await reader.read("a", source.read)).value == 1


@reading
async def test_after_a_lost_session_another_one_is_opened(
    source: Source, reader: ClusterReader
) -> None:
    await reader.read("a", source.read)
    assert source.last is not None
    await source.last.store.close()
    reader.forget()
    with suppress(UnavailableError):
        await reader.read("a", source.read)
    assert (await reader.read("a", source.read)).value == 2
    assert source.opened_count == 2


@reading
async def test_an_idle_session_is_closed(
    source: Source, reader: ClusterReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_reader, "IDLE_S", 0.02)

    await reader.read("a", source.read)
    await asyncio.sleep(0.1)
    assert (await reader.read("a", source.read)).value == 2, "old readings use no memory"
    assert source.opened_count == 2


@reading
async def test_an_error_of_one_reading_disturbs_no_other(
    source: Source, reader: ClusterReader
) -> None:
    async def refuse(cluster: AdminSession) -> None:
        raise RejectedError("no")

    async def crash(cluster: AdminSession) -> None:
        raise ZeroDivisionError

    with pytest.raises(RejectedError):
        await reader.read("refused", refuse)
    with pytest.raises(UnavailableError, match="ZeroDivisionError"):
        await reader.read("crashed", crash)
    assert (await reader.read("a", source.read)).value == 1


def test_each_reading_gets_the_settings_in_force() -> None:
    async def run() -> None:
        source = Source(await Cluster.start())
        in_force = source_settings = visiting(await Cluster.start()).settings
        reader = ClusterReader(
            source.open, current=lambda cluster: replace(cluster, settings=in_force)
        )
        task = asyncio.create_task(reader.run())

        async def read(cluster: AdminSession) -> bool:
            return cluster.settings is in_force

        assert (await reader.read("before", read)).value
        in_force = replace(source_settings)
        assert (await reader.read("after", read)).value
        assert source.opened_count == 1
        task.cancel()

    asyncio.run(run())
