"""A read whose connection fails, without a server. The contract of the store uses a server."""

import asyncio
from typing import Any, cast

import pytest
from kazoo.exceptions import ConnectionLoss, SessionMovedError, ThrottledOpError

from ledgers.errors import UnavailableError
from ledgers.store import READ_TRIES_MAX, Session
from ledgers.zookeeper.store import ZooKeeperStore
from tests.ledgers.scripted_session import ScriptedSession, turn
from tests.replication.cluster import in_virtual_time


async def is_sent(session: ScriptedSession, count: int) -> None:
    """Wait until this number of requests has been sent."""
    async with asyncio.timeout(10):
        while len(session.sent) < count:
            await turn()


def store_on(session: ScriptedSession) -> ZooKeeperStore:
    return ZooKeeperStore(cast(Any, session), is_secured=False)


@pytest.mark.parametrize("error", [ConnectionLoss(), SessionMovedError()], ids=["lost", "moved"])
@in_virtual_time
async def test_a_read_is_sent_again_if_its_connection_has_broken(error: Exception) -> None:
    session = ScriptedSession()
    reading = asyncio.create_task(store_on(session).children("/a"))
    await is_sent(session, 1)
    session.reply(0, error=error)
    await is_sent(session, 2)

    assert session.sent_paths() == ["/a", "/a"]
    session.reply(1, ["name"])
    assert await reading == ["name"]


@in_virtual_time
async def test_a_read_is_sent_again_only_after_the_break_is_known() -> None:
    """kazoo fails each request with the same break until it has reported it."""
    session = ScriptedSession()
    session.break_is_told.clear()
    reading = asyncio.create_task(store_on(session).children("/a"))
    await is_sent(session, 1)
    session.reply(0, error=ConnectionLoss())
    for _ in range(20):
        await turn()

    assert len(session.sent) == 1

    session.break_is_told.set()
    await is_sent(session, 2)
    session.reply(1, ["name"])
    assert await reading == ["name"]


@pytest.mark.parametrize("is_told_before", [False, True])
@in_virtual_time
async def test_a_caller_waits_until_a_break_is_reported(is_told_before: bool) -> None:
    session = Session()
    if is_told_before:
        session.suspend()
        session.resume()
    waiting = asyncio.create_task(session.wait_break_reported(0))
    for _ in range(5):
        await turn()

    assert waiting.done() is is_told_before

    session.suspend()
    async with asyncio.timeout(10):
        await waiting


@in_virtual_time
async def test_a_read_is_not_repeated_for_ever() -> None:
    session = ScriptedSession()
    reading = asyncio.create_task(store_on(session).children("/a"))
    for attempt in range(READ_TRIES_MAX):
        await is_sent(session, attempt + 1)
        session.reply(attempt, error=SessionMovedError())

    with pytest.raises(UnavailableError, match="again and again"):
        await reading


@in_virtual_time
async def test_a_read_refused_by_an_overloaded_server_is_not_repeated() -> None:
    session = ScriptedSession()
    reading = asyncio.create_task(store_on(session).children("/a"))
    await is_sent(session, 1)
    session.reply(0, error=ThrottledOpError())

    with pytest.raises(UnavailableError, match="overloaded"):
        await reading
    assert len(session.sent) == 1
