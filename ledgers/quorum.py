"""Sends one request to several bookies until their replies decide the outcome.

``ask`` sends the requests. Opening, reading and recovery pass their own request and their own
decision, a pure function of the results so far. The other functions judge results for recovery:
what the answers of fenced bookies prove about an entry, and which answers count (rule S5). No
retries and no deadline: each request has its own.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from ledgers.bookies import Answer
from ledgers.clock import Clock
from ledgers.errors import (
    BookmenderError,
    DigestMismatchError,
    NoSuchEntryError,
    UnauthorizedError,
    UnreadableError,
)
from ledgers.model import BookieId, Segment
from ledgers.tasks import task_scope

LATE_REPLY_WAIT_S = 0.5
"""Time to wait for more replies after the decision, if one of them may report a higher entry."""

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


def replies_text(results: Results[T]) -> str:
    """Return the reply of each bookie as text for an error message."""
    return "; ".join(
        f"{bookie}: {result.error or 'answered'}" for bookie, result in results.items()
    )


def raise_if_denied(results: Results[T]) -> None:
    """Raise UnauthorizedError if bookies denied access and no value proves our key (rule S7). If it
    is proven, such a bookie is only out of reach: it may know another key for the ledger."""
    denials = [r.error for r in results.values() if isinstance(r.error, UnauthorizedError)]
    if denials and first_value(results) is None:
        raise denials[0]


def first_value(results: Results[T]) -> T | None:
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
    """Send ``request`` to the bookies in order, until ``decide`` returns a value or all replied.

    The next bookie is asked if a result did not decide, or after ``hedge_s``; 0 asks all at once.
    After the decision, replies within ``linger_s`` are added and ``decide`` runs again. Requests in
    flight at the end are cancelled. A BookmenderError of ``request`` becomes its bookie's result;
    an error of ``decide`` is raised.
    """
    waiting = deque(dict.fromkeys(bookies))
    assert waiting
    bookie_count = len(waiting)
    arrivals: asyncio.Queue[tuple[BookieId, Result[T]] | None] = asyncio.Queue()
    hedge: asyncio.Task[None] | None = None

    async def fly(bookie: BookieId) -> None:
        try:
            result: Result[T] = Result(value=await request(bookie))
        except BookmenderError as error:
            result = Result(error=error)
        arrivals.put_nowait((bookie, result))

    async def ask_next_later() -> None:
        nonlocal hedge
        await clock.sleep(hedge_s)
        hedge = None
        ask_next()

    async def end_later() -> None:
        await clock.sleep(linger_s)
        arrivals.put_nowait(None)

    def ask_next() -> None:
        nonlocal hedge
        if hedge is not None:
            hedge.cancel()
            hedge = None
        while waiting:
            scope.start(fly(waiting.popleft()))
            if hedge_s > 0:
                break
        if waiting:
            hedge = scope.start(ask_next_later())

    results: dict[BookieId, Result[T]] = {}
    async with task_scope() as scope:
        ask_next()
        verdict = None
        while len(results) < bookie_count and (arrival := await arrivals.get()):
            bookie, results[bookie] = arrival
            is_first_verdict = verdict is None
            verdict = decide(results)
            if verdict is None:
                ask_next()
            elif linger_s <= 0:
                break
            elif is_first_verdict:
                scope.start(end_later())
        return verdict, results


Proof = bytes | Literal[Answer.ABSENT]
"""The entry, or ABSENT: the entry cannot be acknowledged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredEnd:
    """The end of a ledger, as found by recovery. ``segments``: those with changed ensembles.
    ``members``: the last ensemble as it was fenced. ``trusted``: members whose answers the end is
    based on."""

    last_entry_id: int
    length: int
    members: tuple[BookieId, ...]
    trusted: frozenset[BookieId]
    segments: tuple[Segment, ...] = ()
    given_up: "GivenUp | None" = None

    @property
    def new_members(self) -> frozenset[BookieId]:
        """Bookies that replaced failed ones during recovery."""
        return frozenset(b for s in self.segments for b in s.ensemble).difference(self.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """Entries cut off by an operator's order although they may be acknowledged: from one without a
    good copy to the last that any bookie returned, inclusive. ``replies``: for the first entry."""

    first_entry_id: int
    last_entry_id: int
    replies: str


def is_damaged(result: Result[T]) -> bool:
    """Return True if the bookie has a bad copy: wrong digest, or I/O error."""
    return result.answer is Answer.MISMATCH or isinstance(result.error, UnreadableError)


def recovery_verdict(
    results: Results[bytes],
    *,
    write_quorum: int,
    ack_quorum: int,
    distrusted: Collection[BookieId] = (),
    awaited: Collection[BookieId] = (),
    gives_up_damaged: bool = False,
) -> Proof | None:
    """Return what the fenced bookies of a write set prove: the entry, its absence, or None for
    nothing yet.

    One good copy suffices, because the entry may be acknowledged. W - A + 1 explicit "no" prove
    that it is not: fewer than A bookies are left that could have acknowledged it, and those that
    answered "no" are fenced. Errors, timeouts and bad digests prove nothing. Absence is proven only
    after all ``awaited`` bookies have replied or failed. ``gives_up_damaged``: a damaged copy
    counts as missing, by an operator's order.
    """
    if (entry := first_value(results)) is not None:
        return entry
    if any(bookie not in results for bookie in awaited):
        return None
    absent_count = sum(
        (result.answer is Answer.ABSENT or (gives_up_damaged and is_damaged(result)))
        and bookie not in distrusted
        for bookie, result in results.items()
    )
    return Answer.ABSENT if absent_count > write_quorum - ack_quorum else None


def fenced_bookies(results: Results[T], distrusted: Collection[BookieId]) -> frozenset[BookieId]:
    """Return the bookies known to be fenced: those with a good entry or a trusted "no"."""
    return frozenset(
        bookie
        for bookie, result in results.items()
        if result.answer in (Answer.PRESENT, Answer.ABSENT) and bookie not in distrusted
    )


def has_every_answer(results: Results[T]) -> bool:
    """Return True if every bookie returned an entry, good or bad, or answered "no"."""
    return all(result.answer is not Answer.UNKNOWN for result in results.values())


def fenced_text(results: Results[T]) -> str:
    """Return the known fenced bookies as text. Of others only the reply may be lost."""
    fenced = [bookie for bookie, result in results.items() if result.answer is not Answer.UNKNOWN]
    return ", ".join(sorted(fenced)) or "none"
