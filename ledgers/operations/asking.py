"""Several bookies, one question: ask until what they said decides it.

Shared by opening, recovery and reading, which differ in what they ask and in what decides. The
decision is a pure function of the results so far; this module only sends, waits and stops.
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
"""How long bookies that are not needed any more are waited for where one of them may know more."""

T = TypeVar("T")
V = TypeVar("V")


@dataclass(frozen=True, kw_only=True)  # no slots: with them Result[T]() fails in Python 3.11
class Result(Generic[T]):
    """What came of asking one bookie: the value, or the error in its place, which may be that no reply came."""

    value: T | None = None
    error: BookmenderError | None = None

    def __post_init__(self) -> None:
        assert (self.value is None) != (self.error is None), self

    @property
    def answer(self) -> Answer:
        """What it says of the entry that was asked for (rule S5: three-valued)."""
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
"""In the order in which they came."""


def said(results: Results[T]) -> str:
    """Which bookie said what, for an error's message."""
    return "; ".join(
        f"{bookie}: {result.error or 'answered'}" for bookie, result in results.items()
    )


def given(results: Results[T]) -> T | None:
    """The first value; None where there is none."""
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
    """Ask the bookies in order, until ``decide`` returns something or all have replied.

    The next bookie is asked when a result did not decide, or has been awaited for ``hedge_s``; 0
    asks all at once. Once it is decided, what replies within ``linger_s`` is still heard, and it is
    decided anew. What is still in flight at the end is cancelled, so that a bookie that hangs
    delays nobody for longer. A BookmenderError of ``request`` is its bookie's result; what ``decide``
    raises ends the asking.
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
    """One question on its way from bookie to bookie."""

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
        """None: nobody is waited for any more."""
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
