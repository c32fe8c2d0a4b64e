"""Sends one request to several bookies until their replies decide the outcome.

Opening, recovery and reading share this module. Each passes its own request and its own decision, a
pure function of the results so far.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from ledgers.bookies import Answer
from ledgers.clock import Clock
from ledgers.errors import BookmenderError, DigestMismatchError, NoSuchEntryError
from ledgers.metadata import BookieId
from ledgers.operations.tasks import TaskScope, task_scope

OTHERS_S = 0.5
"""How long replies are still awaited after the decision, if one of them may report a higher
entry."""

T = TypeVar("T")
V = TypeVar("V")


@dataclass(frozen=True, kw_only=True)  # no slots: with them Result[T]() fails in Python 3.11
class Result(Generic[T]):
    """The result from one bookie: a value, or an error, which includes a missing reply."""

    value: T | None = None
    error: BookmenderError | None = None

    def __post_init__(self) -> None:
        assert (self.value is None) != (self.error is None), self

    @property
    def answer(self) -> Answer:
        """The meaning for the requested entry (three-valued, rule S5)."""
        match self.error:
            case None:
                return Answer.PRESENT
            case NoSuchEntryError():
                return Answer.ABSENT
            case DigestMismatchError():
                return Answer.MISMATCH
            case _:
                return Answer.UNKNOWN


Results = Mapping[BookieId, Result[T]]
"""Results by bookie, in the order of arrival."""


def said(results: Results[T]) -> str:
    """Return the reply of each bookie as text for an error message."""
    return "; ".join(
        f"{bookie}: {result.error or 'answered'}" for bookie, result in results.items()
    )


def given(results: Results[T]) -> T | None:
    """Return the first value; None if there is none."""
    return next((result.value for result in results.values() if result.value is not None), None)


async def ask(
    bookies: Iterable[BookieId],
    request: Callable[[BookieId], Awaitable[T]],
    decide: Callable[[Results[T]], V | None],
    *,
    clock: Clock,
    hedge_s: float = 0.0,
    linger_s: float = 0.0,
) -> tuple[V | None, Results[T]]:
    """Send ``request`` to the bookies in order, until ``decide`` returns a value or all have
    replied.

    The next bookie is asked if a result did not decide, or after ``hedge_s`` without reply. 0 asks
    all at once. After the decision, replies within ``linger_s`` are still added and ``decide`` runs
    again. Requests in flight at the end are cancelled, so a hanging bookie causes no further delay.
    A BookmenderError of ``request`` becomes the result of its bookie. An error of ``decide`` is
    raised.
    """
    results: dict[BookieId, Result[T]] = {}
    async with task_scope() as scope:
        asking = _Asking(bookies, request, scope=scope, clock=clock, hedge_s=hedge_s)
        asking.ask_next()
        verdict = None
        while len(results) < asking.bookie_count and (arrival := await asking.arrivals.get()):
            bookie, results[bookie] = arrival
            is_first_verdict = verdict is None
            verdict = decide(results)
            if verdict is None:
                asking.ask_next()
            elif linger_s <= 0:
                break
            elif is_first_verdict:
                asking.end_after(linger_s)
        return verdict, results


class _Asking(Generic[T]):
    """The requests of one ``ask``."""

    def __init__(
        self,
        bookies: Iterable[BookieId],
        request: Callable[[BookieId], Awaitable[T]],
        *,
        scope: TaskScope,
        clock: Clock,
        hedge_s: float,
    ) -> None:
        self.arrivals: asyncio.Queue[tuple[BookieId, Result[T]] | None] = asyncio.Queue()
        """None in the queue ends the waiting."""
        self._waiting = deque(dict.fromkeys(bookies))
        self.bookie_count = len(self._waiting)
        self._request, self._scope = request, scope
        self._clock, self._hedge_s = clock, hedge_s
        self._hedge: asyncio.Task[None] | None = None
        assert self._waiting

    def ask_next(self) -> None:
        if self._hedge is not None:
            self._hedge.cancel()
            self._hedge = None
        while self._waiting:
            self._scope.start(self._fly(self._waiting.popleft()))
            if self._hedge_s > 0:
                break
        if self._waiting:
            self._hedge = self._scope.start(self._ask_next_later())

    def end_after(self, linger_s: float) -> None:
        self._scope.start(self._end_after(linger_s))

    async def _end_after(self, linger_s: float) -> None:
        await self._clock.sleep(linger_s)
        self.arrivals.put_nowait(None)

    async def _ask_next_later(self) -> None:
        await self._clock.sleep(self._hedge_s)
        self._hedge = None
        self.ask_next()

    async def _fly(self, bookie: BookieId) -> None:
        try:
            result: Result[T] = Result(value=await self._request(bookie))
        except BookmenderError as error:
            result = Result(error=error)
        self.arrivals.put_nowait((bookie, result))
