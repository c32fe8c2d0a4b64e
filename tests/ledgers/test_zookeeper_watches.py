"""A watch that an overloaded server does not set, without a server."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, cast

import pytest
from kazoo.exceptions import ConnectionLoss, KazooException, ThrottledOpError

from ledgers.errors import SessionLostError
from ledgers.store import READ_TRIES_MAX, Event, EventKind, Session, Subscription
from ledgers.zookeeper.kazoo_internals import AddWatch
from ledgers.zookeeper.store import ZooKeeperStore
from tests.ledgers.scripted_session import ScriptedSession
from tests.replication.cluster import in_virtual_time

LONG_S = 60.0


class WatchingSession(ScriptedSession):
    """A session with readers of its watches. ``life`` tells them what happens to it."""

    def __init__(self) -> None:
        super().__init__()
        self.life = Session()

    @contextmanager
    def subscription(self, path: str, **options: Any) -> Iterator[Subscription]:
        with self.life.subscription(path, **options) as subscription:
            yield subscription

    def subscription_count(self, path: str) -> int:
        return self.life.subscription_count(path)

    def send_without_reply(self, request: Any) -> None:
        self.sent.append(request)


def store_on(session: WatchingSession) -> ZooKeeperStore:
    return ZooKeeperStore(cast(Any, session), is_secured=False)


async def first(events: AsyncGenerator[Event, None]) -> Event:
    async with aclosing(events):
        return await anext(events)


@pytest.mark.parametrize(
    ("error", "request_count"),
    [
        pytest.param(ThrottledOpError(), 1, id="throttled"),
        pytest.param(ConnectionLoss(), READ_TRIES_MAX, id="the connection broke again and again"),
    ],
)
@in_virtual_time
async def test_rule_s8_a_watch_is_requested_until_it_is_set(
    error: KazooException, request_count: int
) -> None:
    """It reports nothing before."""
    session = WatchingSession()
    watching = asyncio.create_task(first(store_on(session).watch("/a")))
    for index in range(request_count):
        await asyncio.sleep(0.1)
        session.reply(index, error=error)
    await asyncio.sleep(LONG_S)
    assert not watching.done(), "it ends with its session alone"
    assert [type(each) for each in session.sent] == [AddWatch] * (request_count + 1)

    session.reply(request_count, True)
    assert (await watching).kind is EventKind.RESET


@in_virtual_time
async def test_the_end_of_the_session_ends_a_watch_that_is_not_set() -> None:
    session = WatchingSession()
    watching = asyncio.create_task(first(store_on(session).watch("/a")))
    await asyncio.sleep(0.1)
    session.reply(0, error=ThrottledOpError())
    await asyncio.sleep(LONG_S)
    session.reply(1, error=SessionLostError("over"))

    with pytest.raises(SessionLostError):
        await watching
