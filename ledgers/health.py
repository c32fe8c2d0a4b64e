"""The health of bookies: how long a bookie that failed is left alone, and by which requests.

``BookieHealth`` has all that the requests of one client show. It sends nothing. A bookie is ill in
up to three ways:

- It could not be connected to, or it stopped replying. No connection is tried for a pause, which
  doubles with each failure, up to ``PAUSE_MAX_S``. Requests fail at once meanwhile: a reader asks
  the next bookie, and other callers repeat their request later anyway.
- It failed within the last ``UNHEALTHY_S``. Copies prefer other sources.
- It is registered and does not answer. Every request to it costs its caller a timeout, so the first
  timeout starts a quarantine. Requests fail at once, for ``WAIT_MIN_S`` at first. Then one request
  is sent as a probe, and the others still fail at once. An answer to the probe, of any kind, ends
  the quarantine. No answer doubles the wait, up to ``WAIT_MAX_S``.

A bookie that registers again is well. A lack of files or threads in this process
(``LocalLimitError``) says nothing about a bookie.

``AnsweringBookies`` keeps reads and transfers from bookies in quarantine. To the caller, such a
bookie does not answer: its copies are unknown, never missing (rule S5). Fencing and ledger recovery
ask each bookie directly (rule S13). BookKeeper's client has a quarantine for bookies that fail
reads; Java's repair has none.
"""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

import structlog
from msgspec.structs import replace

from ledgers.bookies import (
    Answer,
    Bookies,
    DiskSpace,
    LacAnswer,
    SourceHealth,
    Transfer,
    TransferResult,
)
from ledgers.clock import Clock, SystemClock
from ledgers.errors import (
    BookmenderError,
    BusyError,
    NoAnswerError,
    RejectedError,
    UnavailableError,
    UnreadableError,
)
from ledgers.model import BookieId

log = structlog.get_logger()

T = TypeVar("T")

Life = Callable[[BookieId], int]
"""Returns a number that differs for each registration, such as its czxid; 0: unregistered."""

PAUSE_FIRST_S, PAUSE_MAX_S = 0.1, 5.0
"""The first and the longest pause after failed connections. Jitter takes up to half off."""
UNHEALTHY_S = 30.0
WAIT_MIN_S, WAIT_MAX_S = 10.0, 300.0
"""The first wait in quarantine, and the longest. Each unanswered probe doubles it."""


def pause_s(failure_count: int, *, jitter: float) -> float:
    """Return the pause after this many failed connections in a row. 0 <= jitter < 1."""
    assert failure_count >= 1, failure_count
    doublings = min(failure_count - 1, 32)  # 2.0**1024 would overflow
    return min(PAUSE_FIRST_S * 2.0**doublings, PAUSE_MAX_S) * (1 + jitter) / 2


class BookieHealth:
    """What one client knows of the health of its bookies. Used by one event loop only."""

    def __init__(
        self,
        clock: Clock | None = None,
        life: Life = lambda bookie: 0,
        rng: random.Random | None = None,
    ) -> None:
        """``life``: by default no bookie is registered, so that there is no quarantine."""
        self._clock, self._life = clock or SystemClock(), life
        self._rng = rng or random.Random()
        self._failures: dict[BookieId, _Failure] = {}
        self._stays: dict[BookieId, _Stay] = {}

    def forget(self, bookie: BookieId) -> None:
        """Forget the failures of a bookie that registered again. ``Life`` ends its quarantine."""
        self._failures.pop(bookie, None)

    # --- Connections, and the choice of sources --------------------------------------------------

    def check_may_connect(self, bookie: BookieId) -> None:
        """Raises UnavailableError during the pause after a failed connection."""
        failure = self._failures.get(bookie)
        if failure is not None and failure.cause and self._clock.now_s() < failure.retry_at_s:
            # The text is the same for repeated failures, because records and logs report changes.
            raise UnavailableError(
                f"not tried for up to {PAUSE_MAX_S:g} s, because the bookie was not reachable: "
                f"{_cause_text(failure.cause)}",
                bookie=bookie,
            ) from failure.cause

    def note_failure(self, bookie: BookieId, cause: Exception) -> None:
        """Record that no connection could be made, that it never delivered a reply, or that replies
        stopped. A bookie that is starting accepts connections and resets them."""
        self.note_trouble(bookie)
        now_s, failure = self._clock.now_s(), self._failures[bookie]
        if now_s >= failure.retry_at_s:  # else it failed several connections at once
            failure.cause, failure.count = cause, failure.count + 1
            failure.retry_at_s = now_s + pause_s(failure.count, jitter=self._rng.random())

    def note_connected(self, bookie: BookieId) -> None:
        """Record that a connection delivered a reply. The next one may be tried at once."""
        if (failure := self._failures.get(bookie)) is not None:
            failure.count, failure.retry_at_s = 0, 0.0

    def note_trouble(self, bookie: BookieId) -> None:
        """Record slow or missing replies. Other sources are preferred for a while."""
        self._failures.setdefault(bookie, _Failure()).at_s = self._clock.now_s()

    def is_unhealthy(self, bookie: BookieId) -> bool:
        """Return True if other sources should be preferred."""
        failure = self._failures.get(bookie)
        is_recent = failure is not None and self._clock.now_s() < failure.at_s + UNHEALTHY_S
        return is_recent or self.holds(bookie)

    # --- Quarantine ------------------------------------------------------------------------------

    def holds(self, bookie: BookieId) -> bool:
        """Return True if the bookie did not answer its last request, even if its wait is over."""
        return self._stay(bookie) is not None

    def is_shut(self, bookie: BookieId) -> bool:
        """Return True if the bookie gets no requests now."""
        stay = self._stay(bookie)
        return stay is not None and (stay.is_probed or self._clock.now_s() < stay.until_s)

    def shut(self) -> Mapping[BookieId, Shut]:
        """Return all bookies that get no requests now."""
        now_s, now_ms = self._clock.now_s(), self._clock.wall_ms()
        return {
            bookie: Shut(now_ms + int(max(0.0, stay.until_s - now_s) * 1000), stay.reason)
            for bookie, stay in list(self._stays.items())
            if self.is_shut(bookie)
        }

    def admits(self, bookie: BookieId) -> bool:
        """Return True if the caller may send a request. If the wait is over, this is the probe. The
        caller must then call ``note_answer``, ``note_silence`` or ``note_nothing``."""
        if self.is_shut(bookie):
            return False
        if (stay := self._stay(bookie)) is not None:
            stay.is_probed = True
        return True

    def note_answer(self, bookie: BookieId) -> None:
        """Record an answer of any kind, which ends the quarantine."""
        if (stay := self._stays.pop(bookie, None)) is not None:
            silent_s = round(self._clock.now_s() - stay.since_s, 1)
            log.info("bookie.answered_again", bookie=bookie, silent_s=silent_s)

    def note_silence(self, bookie: BookieId, reason: str = "") -> None:
        """Record that the bookie did not answer, which begins a quarantine if it is registered.
        Only an unanswered probe makes it longer, not the other requests in flight."""
        now_s, stay, life = self._clock.now_s(), self._stay(bookie), self._life(bookie)
        if stay is None and life:
            self._stays[bookie] = _Stay(life, now_s, until_s=now_s + WAIT_MIN_S, reason=reason)
            fields = {"reason": reason} if reason else {}
            log.warning("bookie.quarantined", bookie=bookie, **fields)
        if stay is not None and reason:
            stay.reason = reason
        if stay is not None and stay.is_probed:
            stay.is_probed = False
            stay.wait_s = min(2 * stay.wait_s, WAIT_MAX_S)
            stay.until_s = now_s + stay.wait_s

    def note_nothing(self, bookie: BookieId) -> None:
        """Record that a request showed nothing, such as a cancelled one. The next is the probe."""
        if (stay := self._stays.get(bookie)) is not None:
            stay.is_probed = False

    def _stay(self, bookie: BookieId) -> _Stay | None:
        """Return the quarantine of this registration of the bookie. The next starts without one."""
        stay = self._stays.get(bookie)
        if stay is not None and stay.life != self._life(bookie):
            del self._stays[bookie]
            return None
        return stay


@dataclass(frozen=True, slots=True)
class Shut:
    """Why and until when a bookie gets no requests. ``until_ms``: wall-clock time in milliseconds.
    ``reason``: why the bookie did not answer, or ""."""

    until_ms: int
    reason: str = ""


@dataclass(slots=True)
class _Failure:
    """The last failure, and the failed connections in a row. Times are the clock's seconds."""

    at_s: float = 0.0
    cause: Exception | None = None
    count: int = 0
    retry_at_s: float = 0.0


@dataclass(slots=True)
class _Stay:
    """The quarantine of one bookie. Times are the clock's seconds."""

    life: int
    since_s: float
    until_s: float
    reason: str = ""
    wait_s: float = WAIT_MIN_S
    is_probed: bool = False
    """True while the probe is in flight."""


def _cause_text(failure: BaseException) -> str:
    """Return the failure and its causes as text, without ids, which the caller adds."""
    if isinstance(failure, OSError) and failure.errno:
        told = os.strerror(failure.errno).lower()
    else:
        text = str(failure.args[0]) if isinstance(failure, BookmenderError) else str(failure)
        told = text or type(failure).__name__
    return f"{told}: {_cause_text(failure.__cause__)}" if failure.__cause__ else told


class AnsweringBookies:
    """Other ``Bookies`` without those in quarantine. Learns from each outcome."""

    def __init__(self, bookies: Bookies, health: BookieHealth) -> None:
        self._inner, self._health = bookies, health
        # Fencing and recovery ask directly.
        self.read_fencing, self.add, self.close = bookies.read_fencing, bookies.add, bookies.close

    async def read(self, bookie: BookieId, ledger_id: int, entry_id: int) -> bytes:
        return await self._ask(bookie, lambda: self._inner.read(bookie, ledger_id, entry_id))

    async def read_lac(self, bookie: BookieId, ledger_id: int) -> LacAnswer:
        return await self._ask(bookie, lambda: self._inner.read_lac(bookie, ledger_id))

    async def room(self, bookie: BookieId) -> DiskSpace:
        return await self._ask(bookie, lambda: self._inner.room(bookie))

    def source_health(self, bookie: BookieId) -> SourceHealth:
        known = self._inner.source_health(bookie)
        return replace(known, is_unhealthy=True) if self._health.holds(bookie) else known

    async def _ask(self, bookie: BookieId, request: Callable[[], Awaitable[T]]) -> T:
        if not self._health.admits(bookie):
            raise NoAnswerError("in quarantine", bookie=bookie)
        try:
            answer = await request()
        except NoAnswerError as error:
            self._health.note_silence(bookie, str(error.args[0]))
            raise
        except (RejectedError, BusyError, UnreadableError):  # also an answer
            self._health.note_answer(bookie)
            raise
        except BaseException:  # cancelled, or an error that says nothing about the bookie
            self._health.note_nothing(bookie)
            raise
        self._health.note_answer(bookie)
        return answer

    async def transfer(self, transfer: Transfer) -> TransferResult:
        health, target = self._health, transfer.target
        if target is not None and health.is_shut(target):
            return TransferResult(
                failures=_unanswered(transfer, transfer.checks),
                unwritten=frozenset().union(*transfer.reads.values()),
                target_error=NoAnswerError("in quarantine", bookie=target),
            )
        sources = {*transfer.reads, *transfer.checks}
        shut = [bookie for bookie in sources if not health.admits(bookie)]
        asked = transfer
        if shut:
            asked = replace(
                transfer,
                reads={b: ids for b, ids in transfer.reads.items() if b not in shut},
                checks={b: ids for b, ids in transfer.checks.items() if b not in shut},
            )
        if shut and not asked.reads:
            for bookie in asked.checks:
                health.note_nothing(bookie)
            return TransferResult(failures=_unanswered(transfer, sources))
        members = {*asked.reads, *asked.checks}
        if target is not None and health.admits(target):
            members.add(target)
        probed = [bookie for bookie in members if health.holds(bookie)]
        try:
            result = await self._inner.transfer(asked)
        except BaseException:
            for bookie in probed:
                health.note_nothing(bookie)
            raise
        silent = dict.fromkeys(result.unresponsive, "")
        if target is not None and isinstance(result.target_error, NoAnswerError):
            silent[target] = str(result.target_error.args[0])
        for bookie, reason in silent.items():
            health.note_silence(bookie, reason)
        for bookie in probed:
            if bookie not in silent:
                self._judge_probe(bookie, asked, result)
        if not shut:
            return result
        return replace(result, failures={**result.failures, **_unanswered(transfer, shut)})

    def _judge_probe(self, bookie: BookieId, transfer: Transfer, result: TransferResult) -> None:
        """Judge a probe by the outcome of the transfer. A short silence changes no quarantine."""
        if bookie == transfer.target:
            has_answered = result.entry_count > 0 or isinstance(
                result.target_error, RejectedError | BusyError
            )
            is_asked = has_answered or result.target_error is not None
        else:
            failures = result.failures.get(bookie, {})
            given = transfer.asked_of(bookie) - failures.keys() - result.unwritten
            has_answered = bool(given) or any(a is not Answer.UNKNOWN for a in failures.values())
            is_asked = has_answered or bool(failures)
        if has_answered:
            self._health.note_answer(bookie)
        elif is_asked and bookie not in result.not_asked:
            self._health.note_silence(bookie)
        else:  # not asked, because another bookie failed before, or this process lacks a file
            self._health.note_nothing(bookie)


def _unanswered(
    transfer: Transfer, bookies: Collection[BookieId]
) -> dict[BookieId, dict[int, Answer]]:
    return {b: dict.fromkeys(transfer.asked_of(b), Answer.UNKNOWN) for b in bookies}
