"""Asking bookies one after the other or all at once, and deciding by their replies."""

from collections.abc import Mapping

import pytest

from ledgers.bookies import Answer
from ledgers.errors import (
    BookmenderError,
    BusyError,
    DigestMismatchError,
    FencedError,
    NoSuchEntryError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.model import BookieId
from ledgers.quorum import Result, Results, ask, first_value
from tests.replication.cluster import in_virtual_time
from tests.virtual_time import LoopClock

A, B, C = (BookieId(name) for name in "abc")


class Bookies:
    """Bookies that answer with their name after these seconds, or fail if the time is negative."""

    def __init__(self, delays_s: Mapping[BookieId, float]) -> None:
        self._delays_s = delays_s
        self.asked: list[tuple[BookieId, float]] = []
        self.clock = LoopClock()

    async def request(self, bookie: BookieId) -> str:
        self.asked.append((bookie, self.clock.now_s()))
        await self.clock.sleep(abs(self._delays_s[bookie]))
        if self._delays_s[bookie] < 0:
            raise UnavailableError("time-out", bookie=bookie)
        return bookie


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        pytest.param(NoSuchEntryError("ENOENTRY"), Answer.ABSENT, id="the only no"),
        pytest.param(DigestMismatchError("bad"), Answer.MISMATCH, id="a wrong copy"),
        pytest.param(UnavailableError("EIO"), Answer.UNKNOWN, id="an error proves nothing"),
        pytest.param(BusyError("busy"), Answer.UNKNOWN, id="nor does being busy"),
        pytest.param(FencedError("fenced"), Answer.UNKNOWN, id="nor a fence"),
        pytest.param(UnauthorizedError("key"), Answer.UNKNOWN, id="nor a wrong key"),
    ],
)
def test_an_error_is_an_answer(error: BookmenderError, answer: Answer) -> None:
    assert Result(error=error).answer is answer


@in_virtual_time
async def test_each_bookie_asked_gets_the_whole_hedge() -> None:
    bookies = Bookies({A: -1.75, B: 1.0, C: 0.0})

    verdict, _ = await ask(
        [A, B, C], bookies.request, first_value, clock=bookies.clock, hedge_s=2.0
    )

    assert verdict == B
    assert bookies.asked == [(A, 0.0), (B, 1.75)]


@in_virtual_time
async def test_an_error_of_the_decision_ends_the_requests() -> None:
    """It is not wrapped."""

    def refuse(results: Results[str]) -> str | None:
        raise UnauthorizedError("wrong key")

    bookies = Bookies({A: 0.0, B: 60.0})

    with pytest.raises(UnauthorizedError):
        await ask([A, B], bookies.request, refuse, clock=bookies.clock)
    assert bookies.clock.now_s() == 0.0


@in_virtual_time
async def test_a_mistake_of_ours_is_no_reply() -> None:
    async def request(bookie: BookieId) -> str:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await ask([A, B], request, first_value, clock=LoopClock())


@in_virtual_time
async def test_slightly_later_replies_count_in_a_second_decision() -> None:
    bookies = Bookies({A: 0.25, B: 0.5, C: 2.0})

    verdict, results = await ask(
        [A, B, C], bookies.request, ",".join, clock=bookies.clock, linger_s=0.75
    )

    assert (verdict, list(results)) == ("a,b", [A, B])
    assert bookies.clock.now_s() == 1.0


@in_virtual_time
async def test_without_a_hedge_all_bookies_are_asked_at_once() -> None:
    """Even if the first reply decides."""
    bookies = Bookies({A: 0.0, B: 60.0, C: 60.0})

    verdict, _ = await ask([A, B, C], bookies.request, first_value, clock=bookies.clock)

    assert verdict == A
    assert bookies.asked == [(A, 0.0), (B, 0.0), (C, 0.0)]
    assert bookies.clock.now_s() == 0.0
