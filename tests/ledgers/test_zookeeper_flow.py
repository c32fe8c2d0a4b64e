"""The order and joining of requests to ZooKeeper, without a server. The contract of the store uses
a server."""

import asyncio

import pytest
from kazoo.exceptions import ConnectionLoss, NoNodeError, ThrottledOpError
from kazoo.protocol.serialization import Exists, GetData

from ledgers.errors import SessionLostError
from ledgers.store import SessionState
from ledgers.zookeeper.flow import (
    BEST_PERIOD_S,
    GIVE_WAY_MAX_S,
    READS_MAX,
    REQUESTS_FIRST,
    REQUESTS_MAX,
    REQUESTS_MIN,
    SLOW_MIN_S,
    SLOW_TIMES,
    Outbox,
    RequestWindow,
)
from tests import virtual_time
from tests.ledgers.scripted_session import SOON_S, ScriptedSession, turn
from tests.replication.cluster import in_virtual_time


def scripted() -> tuple[ScriptedSession, Outbox]:
    session = ScriptedSession()
    return session, Outbox(session)


def read(path: str) -> GetData:
    return GetData(path, None)


def exists(path: str) -> Exists:
    """Return a request that is never joined."""
    return Exists(path, None)


@in_virtual_time
async def test_reads_of_one_turn_are_joined_and_answered_in_order() -> None:
    session, outbox = scripted()
    futures = [outbox.ask(read(path)) for path in ("/a", "/b", "/c")]
    await turn()
    assert session.sent_paths() == [["/a", "/b", "/c"]]

    session.reply(0, ["A", NoNodeError(), "C"])

    outcomes = await asyncio.gather(*futures, return_exceptions=True)
    assert outcomes[0] == "A"
    assert isinstance(outcomes[1], NoNodeError)
    assert outcomes[2] == "C"


@in_virtual_time
async def test_no_request_overtakes_an_earlier_one() -> None:
    session, outbox = scripted()
    for request in (read("/a"), read("/b"), exists("/x"), read("/c"), read("/d")):
        outbox.ask(request)
    await turn()

    assert session.sent_paths() == [["/a", "/b"], "/x", ["/c", "/d"]]


@in_virtual_time
async def test_the_number_of_joined_reads_is_bounded() -> None:
    session, outbox = scripted()
    for number in range(2 * READS_MAX + 1):
        outbox.ask(read(f"/{number}"))
    await turn()

    *joined, last = session.sent_paths()
    assert [len(paths) for paths in joined] == [READS_MAX, READS_MAX]
    assert last == f"/{2 * READS_MAX}"


@in_virtual_time
async def test_a_broken_connection_fails_each_read_with_its_own_error() -> None:
    session, outbox = scripted()
    futures = [outbox.ask(read(path)) for path in ("/a", "/b")]
    await turn()

    session.reply(0, error=ConnectionLoss())

    first, second = await asyncio.gather(*futures, return_exceptions=True)
    assert isinstance(first, ConnectionLoss)
    assert isinstance(second, ConnectionLoss)
    assert first is not second


@in_virtual_time
async def test_a_session_lost_before_the_reads_are_sent_fails_them() -> None:
    session, outbox = scripted()
    futures = [outbox.ask(read(path)) for path in ("/a", "/b")]
    session.state = SessionState.LOST
    await turn()

    for future in futures:
        with pytest.raises(SessionLostError):
            await future


@in_virtual_time
async def test_a_cancelled_reader_disturbs_no_other() -> None:
    session, outbox = scripted()
    gone, stays = (outbox.ask(read(path)) for path in ("/a", "/b"))
    await turn()
    gone.cancel()

    session.reply(0, ["A", "B"])

    assert await stays == "B"


# --- Bounds of ZooKeeper --------------------------------------------------------------------------


@in_virtual_time
async def test_requests_beyond_the_window_are_sent_in_order() -> None:
    """They are sent as answers arrive."""
    session, outbox = scripted()
    paths = [f"/{number}" for number in range(REQUESTS_FIRST + 3)]
    for path in paths:
        outbox.ask(exists(path))
    await turn()
    assert session.sent_paths() == paths[:REQUESTS_FIRST]

    session.reply(0)
    session.reply(1)
    await turn()

    assert session.sent_paths() == paths[: REQUESTS_FIRST + 2]


@in_virtual_time
async def test_waiting_reads_are_joined() -> None:
    """The busier ZooKeeper is, the fewer requests it gets for the same work."""
    session, outbox = scripted()
    for number in range(REQUESTS_FIRST):
        outbox.ask(exists(f"/{number}"))
    for path in ("/a", "/b", "/c"):
        outbox.ask(read(path))
        await turn()
    assert len(session.sent) == REQUESTS_FIRST

    session.reply(0)
    await turn()

    assert session.sent_paths()[-1] == ["/a", "/b", "/c"]


@in_virtual_time
async def test_a_request_cancelled_while_it_waits_is_not_sent() -> None:
    session, outbox = scripted()
    for number in range(REQUESTS_FIRST):
        outbox.ask(exists(f"/{number}"))
    outbox.ask(exists("/given-up")).cancel()
    outbox.ask(exists("/wanted"))
    await turn()

    session.reply(0)
    await turn()

    assert session.sent_paths()[REQUESTS_FIRST:] == ["/wanted"]


@pytest.mark.parametrize(
    ("value", "error", "latency_s", "shrinks"),
    [
        pytest.param("reply", None, SOON_S, False, id="quick"),
        pytest.param("reply", None, 1.0, True, id="slow"),
        pytest.param(None, NoNodeError(), 1.0, True, id="an error of the server's is an answer"),
        pytest.param(
            None, ThrottledOpError(), SOON_S, True, id="the server says that it is too much"
        ),
        pytest.param(None, ConnectionLoss(), 1.0, False, id="a broken connection says nothing"),
    ],
)
@in_virtual_time
async def test_the_window_follows_the_answers_and_their_latency(
    value: str | None, error: Exception | None, latency_s: float, shrinks: bool
) -> None:
    assert latency_s == SOON_S or latency_s > SLOW_TIMES * SOON_S

    session, outbox = scripted()
    asked = outbox.ask(exists("/quick"))
    await turn()
    session.reply(0, "reply")
    for number in range(10 * REQUESTS_FIRST):
        asked = outbox.ask(exists(f"/{number}"))
        await turn()
        session.replies[-1](value, error, latency_s)
        await asyncio.wait([asked])
        asked.exception()

    sent_count = len(session.sent)
    for number in range(2 * REQUESTS_FIRST):
        outbox.ask(exists(f"/again/{number}"))
    await turn()

    in_flight_count = len(session.sent) - sent_count
    assert (in_flight_count < REQUESTS_FIRST) is shrinks
    assert in_flight_count >= REQUESTS_MIN


def test_requests_obey_the_rate_limit_joined_reads_as_one() -> None:
    async def scenario() -> None:
        session = ScriptedSession()
        outbox = Outbox(session)
        outbox.requests_per_s = 2
        for number in range(3):
            outbox.ask(exists(f"/{number}"))
        for path in ("/a", "/b"):
            outbox.ask(read(path))

        await asyncio.sleep(10)

        assert session.sent_paths() == ["/0", "/1", "/2", ["/a", "/b"]]
        gaps_s = [
            after - before
            for before, after in zip(session.sent_at_s, session.sent_at_s[1:], strict=False)
        ]
        assert gaps_s[1:] == pytest.approx([0.5, 0.5])

    virtual_time.run(scenario())


def test_a_removed_rate_limit_delays_no_request() -> None:
    async def scenario() -> None:
        session = ScriptedSession()
        outbox = Outbox(session)
        outbox.requests_per_s = 1
        for number in range(20):
            outbox.ask(exists(f"/{number}"))
        await turn()
        assert len(session.sent) == 1

        outbox.requests_per_s = 0

        assert len(session.sent) == 20

    virtual_time.run(scenario())


# --- The session's state --------------------------------------------------------------------------


@in_virtual_time
async def test_nothing_is_sent_while_suspended_and_all_of_it_later() -> None:
    session, outbox = scripted()
    session.become(SessionState.SUSPENDED)
    for path in ("/a", "/b"):
        outbox.ask(exists(path))
    await turn()
    assert session.sent == []

    session.become(SessionState.CONNECTED)

    assert session.sent_paths() == ["/a", "/b"]


@in_virtual_time
async def test_waiting_requests_fail_at_once_when_the_session_is_lost() -> None:
    session, outbox = scripted()
    outbox.requests_per_s = 1
    futures = [outbox.ask(exists(f"/{number}")) for number in range(2 * REQUESTS_FIRST)]
    await turn()

    session.become(SessionState.LOST)

    for future in futures[1:]:
        assert isinstance(future.exception(), SessionLostError)


@pytest.mark.parametrize("is_answered", [True, False], ids=["until the answer", "not for ever"])
@in_virtual_time
async def test_a_caller_gives_way_to_the_requests_of_others(is_answered: bool) -> None:
    session, outbox = scripted()
    outbox.ask(exists("/mark"))
    waiting = asyncio.ensure_future(outbox.give_way())
    await asyncio.sleep(0.9 * GIVE_WAY_MAX_S)
    assert not waiting.done()

    if is_answered:
        session.reply(0)
    await asyncio.sleep(0 if is_answered else 0.2 * GIVE_WAY_MAX_S)
    await turn()

    assert waiting.done()


# --- The number of requests in flight -------------------------------------------------------------


QUICK_S = 0.02
SLOW_S = SLOW_TIMES * QUICK_S + 0.001
ROUND = 2 * REQUESTS_MAX
"""More answers than any round has."""


def keep_full(window: RequestWindow, latency_s: float, *, answers: int, now_s: float = 0.0) -> None:
    """Note answers of that latency, with as many requests in flight as the window allows."""
    for _ in range(answers):
        fill(window)
        window.answered(latency_s, now_s=now_s)


def fill(window: RequestWindow) -> None:
    while not window.is_full:
        window.sent()


def one_at_a_time(window: RequestWindow, latency_s: float, *, answers: int) -> None:
    for _ in range(answers):
        window.sent()
        window.answered(latency_s, now_s=0.0)


def test_one_slow_period_halves_it_once() -> None:
    """All that was in flight is late then, and must not count again."""
    window = RequestWindow()
    keep_full(window, QUICK_S, answers=1)
    fill(window)

    for _ in range(REQUESTS_FIRST):  # a round, and more were sent meanwhile
        window.answered(SLOW_S, now_s=0.0)
        fill(window)
    shrunk = window.size
    for _ in range(window.in_flight):
        window.answered(SLOW_S, now_s=0.0)

    assert shrunk == window.size == REQUESTS_FIRST // 2


def test_a_few_late_answers_neither_shrink_it_nor_let_it_grow() -> None:
    window = RequestWindow()
    keep_full(window, QUICK_S, answers=1)
    for _ in range(100):
        keep_full(window, SLOW_S, answers=1)
        keep_full(window, QUICK_S, answers=7)

    assert window.size == REQUESTS_FIRST


@pytest.mark.parametrize(
    ("best_s", "latency_s", "is_slow"),
    [
        pytest.param(0.0002, SLOW_MIN_S - 0.001, False, id="a few milliseconds do no harm"),
        pytest.param(0.0002, SLOW_MIN_S + 0.001, True, id="many times the best, and much"),
        pytest.param(0.1, 0.1 * SLOW_TIMES - 0.01, False, id="distant is not slow"),
        pytest.param(0.1, 0.1 * SLOW_TIMES + 0.01, True, id="distant and slow"),
    ],
)
def test_slow_is_far_above_the_best(best_s: float, latency_s: float, is_slow: bool) -> None:
    window = RequestWindow()
    one_at_a_time(window, best_s, answers=1)

    one_at_a_time(window, latency_s, answers=ROUND)

    assert (window.size < REQUESTS_FIRST) is is_slow


def test_the_best_latency_is_forgotten_after_a_while() -> None:
    """Else one quick hour would hold it down for good after a move to servers farther away."""
    window = RequestWindow()
    keep_full(window, QUICK_S, answers=ROUND)
    keep_full(window, SLOW_S, answers=10 * ROUND)
    assert window.size == REQUESTS_MIN

    for period in (1, 2):
        keep_full(window, SLOW_S, answers=100 * ROUND, now_s=period * BEST_PERIOD_S)

    assert window.size == REQUESTS_MAX
