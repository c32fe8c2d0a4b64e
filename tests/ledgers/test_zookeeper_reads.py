"""What becomes of a read whose connection fails, without a server. With one: the contract of the store."""

import asyncio
from typing import Any, cast

import pytest
from kazoo.exceptions import ConnectionLoss, SessionMovedError, ThrottledOpError

from ledgers.errors import UnavailableError
from ledgers.zookeeper.session import READ_TRIES_MAX
from ledgers.zookeeper.store import ZooKeeperStore
from tests.ledgers.scripted_session import ScriptedSession, turn


async def is_sent(session: ScriptedSession, count: int) -> None:
    """Until so many requests have been sent."""
    async with asyncio.timeout(10):
        while len(session.sent) < count:
            await turn()


def store_on(session: ScriptedSession) -> ZooKeeperStore:
    return ZooKeeperStore(cast(Any, session), is_secured=False)


@pytest.mark.parametrize("error", [ConnectionLoss(), SessionMovedError()], ids=["lost", "moved"])
def test_a_read_is_sent_again_when_the_connection_it_was_sent_on_is_no_more(
    error: Exception,
) -> None:
    async def scenario() -> None:
        session = ScriptedSession(is_old=True)
        reading = asyncio.create_task(store_on(session).children("/a"))
        await is_sent(session, 1)
        session.reply(0, error=error)
        await is_sent(session, 2)

        assert session.sent_paths() == ["/a", "/a"]
        session.reply(1, ["name"])
        assert await reading == ["name"]

    asyncio.run(scenario())


def test_a_read_is_not_sent_again_for_ever() -> None:
    async def scenario() -> None:
        session = ScriptedSession(is_old=True)
        reading = asyncio.create_task(store_on(session).children("/a"))
        for attempt in range(READ_TRIES_MAX):
            await is_sent(session, attempt + 1)
            session.reply(attempt, error=SessionMovedError())

        with pytest.raises(UnavailableError, match="again and again"):
            await reading

    asyncio.run(scenario())


def test_a_read_that_an_overloaded_server_refuses_is_left_to_the_caller() -> None:
    async def scenario() -> None:
        session = ScriptedSession(is_old=True)
        reading = asyncio.create_task(store_on(session).children("/a"))
        await is_sent(session, 1)
        session.reply(0, error=ThrottledOpError())

        with pytest.raises(UnavailableError, match="overloaded"):
            await reading
        assert len(session.sent) == 1

    asyncio.run(scenario())
