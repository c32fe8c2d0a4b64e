"""Reads that go out together, without a server. With one: the contract of the metadata store."""

import asyncio
from typing import Any

import pytest
from kazoo.exceptions import ConnectionLoss, NoNodeError, UnimplementedError
from kazoo.protocol.serialization import Exists, GetData

from ledgers.errors import SessionLostError
from ledgers.zookeeper.joined_reads import READS_MAX, JoinedReads
from ledgers.zookeeper.kazoo_multi_read import MultiRead
from ledgers.zookeeper.kazoo_session import OnReply
from ledgers.zookeeper.session import session_lost


class ScriptedSession:
    """Keeps what is sent, and answers when told."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.replies: list[OnReply] = []
        self.is_lost = False

    def send(self, request: Any, on_reply: OnReply) -> None:
        if self.is_lost:
            raise session_lost()
        self.sent.append(request)
        self.replies.append(on_reply)

    def sent_paths(self) -> list[Any]:
        """A path for a single read, a list for a joined one, the request itself for another."""
        return [
            list(request.paths)
            if isinstance(request, MultiRead)
            else request.path
            if isinstance(request, GetData)
            else request
            for request in self.sent
        ]


def read(path: str) -> GetData:
    return GetData(path, None)


async def turn() -> None:
    """Let the loop turn once."""
    await asyncio.sleep(0)


def test_reads_of_one_turn_go_together_and_are_answered_in_order() -> None:
    async def scenario() -> None:
        session = ScriptedSession()
        reads = JoinedReads(session)
        futures = [reads.ask(read(path)) for path in ("/a", "/b", "/c")]
        await turn()
        assert session.sent_paths() == [["/a", "/b", "/c"]]

        session.replies[0](["A", NoNodeError(), "C"], None)

        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert outcomes[0] == "A"
        assert isinstance(outcomes[1], NoNodeError)
        assert outcomes[2] == "C"

    asyncio.run(scenario())


def test_a_read_alone_is_a_plain_one() -> None:
    async def scenario() -> None:
        session = ScriptedSession()
        reads = JoinedReads(session)
        for path in ("/a", "/b"):
            reads.ask(read(path))
            await turn()

        assert session.sent_paths() == ["/a", "/b"]

    asyncio.run(scenario())


def test_nothing_overtakes_what_came_before_it() -> None:
    async def scenario() -> None:
        session = ScriptedSession()
        reads = JoinedReads(session)
        other = Exists("/x", None)
        for request in (read("/a"), read("/b"), other, read("/c"), read("/d")):
            reads.ask(request)
        await turn()

        assert session.sent_paths() == [["/a", "/b"], other, ["/c", "/d"]]

    asyncio.run(scenario())


def test_so_many_reads_are_joined_and_no_more() -> None:
    async def scenario() -> None:
        session = ScriptedSession()
        reads = JoinedReads(session)
        for number in range(2 * READS_MAX + 1):
            reads.ask(read(f"/{number}"))
        await turn()

        sizes = [len(paths) for paths in session.sent_paths()[:2]]
        assert sizes == [READS_MAX, READS_MAX]
        assert session.sent_paths()[2] == f"/{2 * READS_MAX}"

    asyncio.run(scenario())


def test_a_server_that_cannot_join_gets_the_reads_one_by_one_from_then_on() -> None:
    async def scenario() -> None:
        session = ScriptedSession()
        reads = JoinedReads(session)
        futures = [reads.ask(read(path)) for path in ("/a", "/b")]
        await turn()

        session.replies[0](None, UnimplementedError())
        reads.ask(read("/c"))
        reads.ask(read("/d"))
        await turn()

        assert session.sent_paths() == [["/a", "/b"], "/a", "/b", "/c", "/d"]
        for value, reply in zip("AB", session.replies[1:], strict=False):
            reply(value, None)
        assert await asyncio.gather(*futures) == ["A", "B"]

    asyncio.run(scenario())


def test_a_connection_that_breaks_fails_each_read_with_an_error_of_its_own() -> None:
    async def scenario() -> None:
        session = ScriptedSession()
        reads = JoinedReads(session)
        futures = [reads.ask(read(path)) for path in ("/a", "/b")]
        await turn()

        session.replies[0](None, ConnectionLoss())

        first, second = await asyncio.gather(*futures, return_exceptions=True)
        assert isinstance(first, ConnectionLoss)
        assert isinstance(second, ConnectionLoss)
        assert first is not second

    asyncio.run(scenario())


def test_a_session_lost_before_the_reads_went_out_fails_them() -> None:
    async def scenario() -> None:
        session = ScriptedSession()
        reads = JoinedReads(session)
        futures = [reads.ask(read(path)) for path in ("/a", "/b")]
        session.is_lost = True
        await turn()

        for future in futures:
            with pytest.raises(SessionLostError):
                await future

    asyncio.run(scenario())


def test_a_reader_who_has_gone_disturbs_nobody() -> None:
    async def scenario() -> None:
        session = ScriptedSession()
        reads = JoinedReads(session)
        gone, stays = (reads.ask(read(path)) for path in ("/a", "/b"))
        await turn()
        gone.cancel()

        session.replies[0](["A", "B"], None)

        assert await stays == "B"

    asyncio.run(scenario())
