"""A session that has to wait for ZooKeeper: who gives up when, and what is told."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from daemon import zookeeper
from daemon.local.ports import LOOPBACK, free_ports
from daemon.settings import Settings, ZooKeeperSettings
from daemon.zookeeper import open_store
from ledgers.errors import UnavailableError

PATIENCE_S = 60.0


def settings_for(where: str, *, connect_timeout_s: float) -> Settings:
    return Settings(
        metadata_service_uri=f"zk+hierarchical://{where}/ledgers",
        zookeeper=ZooKeeperSettings(connect_timeout_s=connect_timeout_s),
    )


@asynccontextmanager
async def slow_server() -> AsyncIterator[str]:
    """A server that answers ``srvr``, and opens no session."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(4) == b"srvr":
            writer.write(b"Zookeeper version: 3.9.5\n")
        else:
            await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, LOOPBACK) as serving:
        yield f"{LOOPBACK}:{serving.sockets[0].getsockname()[1]}"


async def opened(settings: Settings, *, is_of_node: bool = False) -> list[str]:
    """Try to open a session, and return what is told, with the error at the end."""
    told: list[str] = []
    try:
        async with (
            asyncio.timeout(PATIENCE_S),
            open_store(settings, is_of_node=is_of_node, tell=told.append),
        ):
            pass
    except UnavailableError as error:
        told.append(str(error))
    return told


def test_a_command_gives_up_when_no_server_answers() -> None:
    (port,) = free_ports(1)

    told = asyncio.run(opened(settings_for(f"{LOOPBACK}:{port}", connect_timeout_s=600)))

    assert told == [
        f"nothing listens at {LOOPBACK}:{port}: start the servers, or correct metadata_service_uri"
    ]


def test_a_node_says_that_it_waits_and_waits_for_the_whole_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zookeeper, "LOOK_S", 0.01)
    (port,) = free_ports(1)

    settings = settings_for(f"{LOOPBACK}:{port}", connect_timeout_s=0.5)
    waits, error = asyncio.run(opened(settings, is_of_node=True))

    assert waits == f"Waiting for ZooKeeper, at most 0.5 s: {error}"


def test_a_command_waits_for_a_server_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zookeeper, "LOOK_S", 0.01)

    async def ask() -> tuple[str, list[str]]:
        async with slow_server() as where:
            return where, await opened(settings_for(where, connect_timeout_s=0.5))

    where, (waits, error) = asyncio.run(ask())

    assert waits == f"Waiting for ZooKeeper, at most 0.5 s: {error}"
    assert error.startswith(f"ZooKeeper at {where} runs")
