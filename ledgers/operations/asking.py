"""Several bookies, one question: ask until what they said decides it.

Shared by opening, recovery and reading, which differ in what they ask and in what decides. The
decision is a pure function of the replies so far; this module only sends, waits and stops.
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


@dataclass(frozen=True, kw_only=True)  # no slots: with them Reply[T]() fails in Python 3.11
class Reply(Generic[T]):
    """What one bookie said: a value, or the error in its place."""

    value: T | None = None
    error: BookmenderError | None = None

    def __post_init__(self) -> None:
        assert (self.value is None) != (self.error is None), self

    @property
    def answer(self) -> Answer:
        """What the reply says of the entry that was asked for (rule S5: three-valued)."""
        match self.error:
            case None:
                return Answer.PRESENT
            case NoSuchEntryError():
                return Answer.ABSENT
            case DigestMismatchError():
                return Answer.MISMATCH
            case _:
                return Answer.UNKNOWN


Replies = Mapping[BookieId, Reply[T]]
"""In the order in which they came."""


def said(replies: Replies[T]) -> str:
    """Which bookie said what, for an error's message."""
    return "; ".join(f"{bookie}: {reply.error or 'answered'}" for bookie, reply in replies.items())


def given(replies: Replies[T]) -> T | None:
    """The first value; None where there is none."""
    return next((reply.value for reply in replies.values() if reply.value is not None), None)


async def ask(
    bookies: Iterable[BookieId],
    request: Callable[[BookieId], Awaitable[T]],
    decide: Callable[[Replies[T]], V | None],
    *,
    clock: Clock,
    hedge_s: float = 0.0,
    linger_s: float = 0.0,
) -> tuple[V | None, Replies[T]]:
    """Ask the bookies in order, until ``decide`` returns something or all have replied.

    The next bookie is asked when a reply did not decide, or has been awaited for ``hedge_s``; 0
    asks all at once. Once it is decided, what replies within ``linger_s`` is still heard, and it is
    decided anew. What is still in flight at the end is cancelled, so that a bookie that hangs
    delays nobody for longer. A BookmenderError of ``request`` is its bookie's reply; what ``decide``
    raises ends the asking.
    """
    replies: dict[BookieId, Reply[T]] = {}
    async with task_scope() as scope:
        asking = _Asking(bookies, request, scope=scope, clock=clock, hedge_s=hedge_s)
        asking.ask_next()
        verdict = None
        while len(replies) < asking.bookie_count and (arrival := await asking.arrivals.get()):
            bookie, replies[bookie] = arrival
            is_first_verdict = verdict is None
            verdict = decide(replies)
            if verdict is None:
                asking.ask_next()
            elif linger_s <= 0:
                break
            elif is_first_verdict:
                asking.end_after(linger_s)
        return verdict, replies


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
        self.arrivals: asyncio.Queue[tuple[BookieId, Reply[T]] | None] = asyncio.Queue()
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
            reply: Reply[T] = Reply(value=await self._request(bookie))
        except BookmenderError as error:
            reply = Reply(error=error)
        self.arrivals.put_nowait((bookie, reply))
