"""Quarantine: registered bookies that do not answer get no requests for a while.

Every request to such a bookie costs its caller a timeout. So the first timeout starts a quarantine:

1. Requests to the bookie fail at once, for ``WAIT_MIN_S`` at first.
2. Then one request is sent as a probe; the others still fail at once.
3. An answer to the probe, of any kind, ends the quarantine. No answer doubles the wait, up to
   ``WAIT_MAX_S``.

``QuarantiningBookies`` applies this to all requests of other ``Bookies``. ``Quarantine`` has the
state and sends nothing. To the caller, a bookie in quarantine does not answer: its copies are
unknown, never missing (rule S5). BookKeeper's client has a quarantine for bookies that fail reads;
Java's repair has none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
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
from ledgers.clock import Clock
from ledgers.errors import (
    BookmenderError,
    BusyError,
    NoAnswerError,
    RejectedError,
    UnreadableError,
)
from ledgers.model import BookieId

log = structlog.get_logger()

T = TypeVar("T")

Life = Callable[[BookieId], int]
"""Returns a number that differs for each registration of a bookie, such as its czxid; 0: the bookie
is not registered."""

WAIT_MIN_S = 10.0
"""The first wait. Each unanswered probe doubles it."""
WAIT_MAX_S = 300.0


class QuarantiningBookies:
    """Sends requests to other ``Bookies``, except to bookies in quarantine, and learns from the
    outcome."""

    def __init__(self, bookies: Bookies, quarantine: Quarantine) -> None:
        self._inner, self._quarantine = bookies, quarantine

    # --- Single requests -----------------------------------------------------------------------

    async def read(self, bookie: BookieId, ledger_id: int, entry_id: int) -> bytes:
        return await self._ask(bookie, lambda: self._inner.read(bookie, ledger_id, entry_id))

    async def read_fencing(
        self,
        bookie: BookieId,
        ledger_id: int,
        entry_id: int,
        *,
        master_key: bytes,
        is_high_priority: bool = False,
    ) -> bytes:
        return await self._ask(
            bookie,
            lambda: self._inner.read_fencing(
                bookie,
                ledger_id,
                entry_id,
                master_key=master_key,
                is_high_priority=is_high_priority,
            ),
        )

    async def read_lac(self, bookie: BookieId, ledger_id: int) -> LacAnswer:
        return await self._ask(bookie, lambda: self._inner.read_lac(bookie, ledger_id))

    async def read_batch(
        self,
        bookie: BookieId,
        ledger_id: int,
        first_entry_id: int,
        *,
        count_max: int,
        bytes_max: int,
    ) -> list[bytes]:
        return await self._ask(
            bookie,
            lambda: self._inner.read_batch(
                bookie, ledger_id, first_entry_id, count_max=count_max, bytes_max=bytes_max
            ),
        )

    async def add(
        self,
        bookie: BookieId,
        entry: bytes,
        *,
        master_key: bytes,
        is_recovery: bool = False,
        is_high_priority: bool = False,
    ) -> None:
        await self._ask(
            bookie,
            lambda: self._inner.add(
                bookie,
                entry,
                master_key=master_key,
                is_recovery=is_recovery,
                is_high_priority=is_high_priority,
            ),
        )

    async def write_lac(
        self, bookie: BookieId, ledger_id: int, lac: int, *, master_key: bytes, record: bytes
    ) -> None:
        await self._ask(
            bookie,
            lambda: self._inner.write_lac(
                bookie, ledger_id, lac, master_key=master_key, record=record
            ),
        )

    async def list_entries(self, bookie: BookieId, ledger_id: int) -> Sequence[range]:
        return await self._ask(bookie, lambda: self._inner.list_entries(bookie, ledger_id))

    async def room(self, bookie: BookieId) -> DiskSpace:
        return await self._ask(bookie, lambda: self._inner.room(bookie))

    async def _ask(self, bookie: BookieId, request: Callable[[], Awaitable[T]]) -> T:
        if not self._quarantine.admits(bookie):
            raise NoAnswerError("in quarantine", bookie=bookie)
        try:
            answer = await request()
        except NoAnswerError as error:
            self._note_silence(bookie, error)
            raise
        except (RejectedError, BusyError, UnreadableError):  # also an answer
            self._note_answer(bookie)
            raise
        except BaseException:  # cancelled, or an error that says nothing about the bookie
            self._quarantine.note_nothing(bookie)
            raise
        self._note_answer(bookie)
        return answer

    # --- Transfers -----------------------------------------------------------------------------

    async def transfer(self, transfer: Transfer) -> TransferResult:
        if self._quarantine.is_empty:  # the common case
            return await self._carry_out(transfer)
        target = transfer.target
        if target is not None and self._quarantine.is_shut(target):
            return TransferResult(
                failures=_unanswered(transfer, transfer.checks),
                unwritten=frozenset().union(*transfer.reads.values()),
                target_error=NoAnswerError("in quarantine", bookie=target),
            )
        sources = dict.fromkeys([*transfer.reads, *transfer.checks])
        shut = [bookie for bookie in sources if not self._quarantine.admits(bookie)]
        asked = _without(transfer, shut) if shut else transfer
        if shut and not asked.reads:
            for bookie in asked.checks:
                self._quarantine.note_nothing(bookie)
            return TransferResult(failures=_unanswered(transfer, sources))
        if target is not None:
            self._quarantine.admits(target)
        result = await self._carry_out(asked)
        if not shut:
            return result
        return replace(result, failures={**result.failures, **_unanswered(transfer, shut)})

    async def _carry_out(self, transfer: Transfer) -> TransferResult:
        """Run a transfer whose bookies were all admitted, and learn from the outcome."""
        probed = [] if self._quarantine.is_empty else self._members_held(transfer)
        try:
            result = await self._inner.transfer(transfer)
        except BaseException:
            for bookie in probed:
                self._quarantine.note_nothing(bookie)
            raise
        silent = set(result.unresponsive)
        if isinstance(result.target_error, NoAnswerError) and transfer.target is not None:
            silent.add(transfer.target)
        for bookie in silent:
            self._note_silence(bookie, result.target_error if bookie == transfer.target else None)
        for bookie in probed:
            if bookie not in silent:
                self._judge_probe(bookie, transfer, result)
        return result

    def _members_held(self, transfer: Transfer) -> list[BookieId]:
        members = {*transfer.reads, *transfer.checks, transfer.target} - {None}
        return [b for b in members if b is not None and self._quarantine.holds(b)]

    def _judge_probe(self, bookie: BookieId, transfer: Transfer, result: TransferResult) -> None:
        """Judge a probe by the outcome of the transfer. A short silence neither begins nor ends a
        quarantine."""
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
            self._note_answer(bookie)
        elif is_asked and bookie not in result.not_asked:
            self._note_silence(bookie)
        else:  # not asked, because another bookie failed before, or this process lacks a file
            self._quarantine.note_nothing(bookie)

    def source_health(self, bookie: BookieId) -> SourceHealth:
        source_health = self._inner.source_health(bookie)
        return (
            replace(source_health, is_unhealthy=True)
            if self._quarantine.holds(bookie)
            else source_health
        )

    # --- The rest ------------------------------------------------------------------------------

    async def close(self) -> None:
        await self._inner.close()

    def _note_answer(self, bookie: BookieId) -> None:
        silent_s = self._quarantine.note_answer(bookie)
        if silent_s is not None:
            log.info("bookie.answered_again", bookie=bookie, silent_s=round(silent_s, 1))

    def _note_silence(self, bookie: BookieId, error: BookmenderError | None = None) -> None:
        reason = "" if error is None else str(error.args[0])
        if self._quarantine.note_silence(bookie, reason):
            log.warning(
                "bookie.quarantined", bookie=bookie, **({"reason": reason} if reason else {})
            )


class Quarantine:
    """The bookies that are in quarantine. A worker has one, for all of its requests. Sends nothing.

    A quarantine begins when a registered bookie does not answer, never when it refuses. It ends
    with any answer, and when the bookie is unregistered or registers again.
    """

    def __init__(self, clock: Clock, life: Life) -> None:
        self._clock, self._life = clock, life
        self._stays: dict[BookieId, _Stay] = {}

    @property
    def is_empty(self) -> bool:
        """True if no bookie is in quarantine."""
        return not self._stays

    def holds(self, bookie: BookieId) -> bool:
        """Return True if the bookie did not answer its last request, even if its wait is over."""
        return self._stay(bookie) is not None

    def is_shut(self, bookie: BookieId) -> bool:
        """Return True if the bookie gets no requests now."""
        stay = self._stay(bookie)
        return stay is not None and (stay.is_probed or self._clock.now_s() < stay.until_s)

    def shut(self) -> Mapping[BookieId, Shut]:
        """Return all bookies that get no requests now."""
        if not self._stays:
            return {}
        now_s, now_ms = self._clock.now_s(), self._clock.wall_ms()
        return {
            bookie: Shut(now_ms + int(max(0.0, stay.until_s - now_s) * 1000), stay.reason)
            for bookie, stay in list(self._stays.items())
            if self.is_shut(bookie)
        }

    def admits(self, bookie: BookieId) -> bool:
        """Return True if the caller may send a request. If the wait is over, this is the probe.

        The caller must then call ``note_answer``, ``note_silence`` or ``note_nothing``.
        """
        if self.is_shut(bookie):
            return False
        if (stay := self._stay(bookie)) is not None:
            stay.is_probed = True
        return True

    def note_answer(self, bookie: BookieId) -> float | None:
        """Record an answer. Returns for how many seconds the bookie was in quarantine; None if it
        was not."""
        stay = self._stays.pop(bookie, None)
        return None if stay is None else self._clock.now_s() - stay.since_s

    def note_silence(self, bookie: BookieId, reason: str = "") -> bool:
        """Record that the bookie did not answer. Returns True if a quarantine begins.

        Requests that were in flight when the quarantine began also stay unanswered. Only an
        unanswered probe makes the quarantine longer.
        """
        now_s, stay, life = self._clock.now_s(), self._stay(bookie), self._life(bookie)
        if stay is None and life:
            self._stays[bookie] = _Stay(life, now_s, until_s=now_s + WAIT_MIN_S, reason=reason)
            return True
        if stay is not None and reason:
            stay.reason = reason
        if stay is not None and stay.is_probed:
            stay.is_probed = False
            stay.wait_s = min(2 * stay.wait_s, WAIT_MAX_S)
            stay.until_s = now_s + stay.wait_s
        return False

    def note_nothing(self, bookie: BookieId) -> None:
        """Record that a request was cancelled. The next request is the probe."""
        if (stay := self._stays.get(bookie)) is not None:
            stay.is_probed = False

    def _stay(self, bookie: BookieId) -> _Stay | None:
        """Return the quarantine of this registration of the bookie. A later registration starts
        without one."""
        stay = self._stays.get(bookie)
        if stay is not None and stay.life != self._life(bookie):
            del self._stays[bookie]
            return None
        return stay


@dataclass(frozen=True, slots=True)
class Shut:
    """Why and until when a bookie gets no requests.

    ``until_ms``: wall-clock time in milliseconds. ``reason``: why the bookie did not answer, or "".
    """

    until_ms: int
    reason: str = ""


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


def _without(transfer: Transfer, shut: Collection[BookieId]) -> Transfer:
    """Return the transfer without the entries read from these bookies."""
    return replace(
        transfer,
        reads={b: ids for b, ids in transfer.reads.items() if b not in shut},
        checks={b: ids for b, ids in transfer.checks.items() if b not in shut},
    )


def _unanswered(
    transfer: Transfer, bookies: Collection[BookieId]
) -> dict[BookieId, dict[int, Answer]]:
    return {b: dict.fromkeys(transfer.asked_of(b), Answer.UNKNOWN) for b in bookies}
