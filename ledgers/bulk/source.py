"""Reading from one bookie: which transfer may request entries next, and what replies lead to.

``SourceConnection`` requests entries one by one, which every bookie supports: turns, credit,
back-pressure and timeouts. ``batch_reads`` requests runs of consecutive entries instead.
``ReadPart`` is the part of one transfer that is read here.

A good reply becomes a recovery add in place, where its bytes lie in the receive buffer.
``SourceConnection._receive_run`` is the only loop that runs for every entry. All other code runs
once per turn or per arrival of bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ledgers.bookies import Answer
from ledgers.bulk.connection import LATE_REPLY_TIMEOUTS, BulkConnection, BulkProtocol, SharedState
from ledgers.bulk.flow_control import BookieFlow, ReplyTimes
from ledgers.bulk.frames import (
    READ_REPLY,
    READ_WORD,
    REPLY,
    REPLY_BYTES,
    REPLY_PACKET_BYTES,
    read_requests,
)
from ledgers.bulk.limiters import (
    ASKED_BYTES_MAX,
    BookieWindow,
    Limiter,
    LimiterChain,
    ReadBudget,
    Waiter,
)
from ledgers.bulk.target import TargetConnection, WritePart
from ledgers.bulk.transfer import (
    QUANTUM_BYTES,
    QUANTUM_COUNT,
    TransferPart,
    TransferState,
    has_first_claim,
)
from ledgers.errors import (
    BookmenderError,
    CorruptionError,
    LocalLimitError,
    NoAnswerError,
    NoSuchEntryError,
    UnreadableError,
)
from ledgers.model import BookieId
from ledgers.wire.messages import Status

IMPATIENT_S = 1.0
IMPATIENT_CHECKS = 4
"""Entries that other sources may have are given up after this silence, in so many checks."""
READ_ENTRIES_MAX = 8_192
"""Limit on one connection: a quarter of the entries that the process may have in flight."""
_NEVER = 1 << 62


class SourceConnection(BulkConnection["ReadPart"]):
    """Reads from one bookie for all transfers that read there. They take turns, a quantum each.

    A read needs credit twice: from the limiters of its transfer, and from the bookie's read budget,
    which the control path uses too. If a limiter has no credit, the part waits there, and other
    parts go on. If the budget has no credit, the whole connection waits in line.
    """

    def __init__(
        self, bookie: BookieId, shared: SharedState, budget: ReadBudget, flow: BookieFlow
    ) -> None:
        super().__init__(bookie, shared, flow, ReplyTimes(cap=budget.count_max))
        self.rate_limit = flow.single_reads
        """The first limiter that entries to be written must pass."""
        self._budget = budget
        self._turns: deque[ReadPart] = deque()
        """Parts that may request more, next turn first."""
        self._in_line: Waiter | None = None
        """The place in the line of the budget, while the connection waits there."""
        self._in_flight = 0
        """Requests of this connection that the bookie has not answered."""
        self._window = BookieWindow(count_max=READ_ENTRIES_MAX, bytes_max=ASKED_BYTES_MAX)
        """The entries of these requests."""
        self._is_awake = False
        """True if ``_wake_up`` is scheduled."""
        self._full_targets: dict[TargetConnection, None] = {}
        """Targets whose send buffer is full. While there is one, nothing is received here."""
        self._replied_count = 0
        self._replied_entry_count = 0
        self._replied_bytes = 0
        """Credit of replies in this arrival, to be released at its end."""
        self._outgoing: dict[TargetConnection, list[memoryview | bytes]] = {}
        """Adds to send at the end of this arrival. Most are slices of the receive buffer."""

    # --- Requests ------------------------------------------------------------------------------

    def make_part(
        self, state: TransferState, entry_ids: Sequence[int], write_part: WritePart | None
    ) -> ReadPart:
        """Return a part for ``begin``. ``write_part``: None if the entries are only verified."""
        return ReadPart(state, self, entry_ids, write_part)

    def _take_reads(self, count: int, entry_bytes: int) -> int:
        """Take credit of the read budget for up to ``count`` entries of one turn. Returns for how
        many. On 0 the connection has taken its place in line."""
        room_count = self._limit() - self._in_flight
        granted_count = self._budget.take(min(count, room_count), entry_bytes)
        if granted_count == 0:
            self._wait_in_line(entry_bytes)
        return granted_count

    def _limit(self) -> int:
        """Return how many requests may be in flight, apart from the read budget."""
        cap = self._reply_times.cap = self._budget.count_max
        return self._reply_times.limit if self._flow.limits.is_by_reply_times else cap

    def _may_ask(self) -> bool:
        """Return True if another request may be made now. If not, a reply will change that."""
        return self._window.has_room

    def begin(self, part: ReadPart) -> None:
        self._add(part)
        self.enqueue(part)

    def enqueue(self, part: ReadPart) -> None:
        """Give the part a turn after all parts that have one already."""
        part.is_queued = True
        self._turns.append(part)
        self.wake()

    def wake(self) -> None:
        """Schedule requests: once in this turn of the loop, however often it is called."""
        if not self._is_awake:
            self._is_awake = True
            self._loop.call_soon(self._wake_up)

    def _wake_up(self) -> None:
        self._is_awake = False
        if self._in_line is None:
            self._ask_more()

    def _take_turn(self) -> None:
        self._in_line = None
        self._ask_more()

    def _ask_more(self) -> None:
        """Request as many entries as there is credit for, one quantum of each part in turn."""
        if not self._turns or self._shared.is_paused:
            return
        if self._transport is None:
            self.connect()
            return
        now_s = self._loop.time()
        frames = []
        while self._turns and self._may_ask() and self._in_flight < self._limit():
            part = self._turns[0]
            count = part.quantum
            if count:
                count = part.limiters.admit(part, count)
                if count == 0:  # the part waits at a limiter, and the others go on
                    self._turns.popleft()
                    continue
                expected_bytes = part.state.expected_bytes
                asked_count = self._take_reads(count, expected_bytes)
                if asked_count < count:
                    spare_count = count - asked_count
                    part.limiters.refund(spare_count * expected_bytes, count=spare_count)
                if asked_count == 0:
                    break
                self._window.add(asked_count, expected_bytes)
                frames.append(part.ask(asked_count, now_s))
                self._in_flight += part.requests_for(asked_count)
                self._stopwatch.start(part.outstanding, now_s)
            self._turns.popleft()
            if part.has_pending and part.quantum:
                self._turns.append(part)
            else:
                part.is_queued = False
        if frames:
            self._transport.write(b"".join(frames))

    def _wait_in_line(self, read_bytes: int) -> None:
        """Wait until the budget has credit for one read of this size."""
        self._in_line = self._budget.wait_in_line(read_bytes, self._take_turn)

    # --- Replies -------------------------------------------------------------------------------

    def consume(self, view: memoryview, end: int) -> int:
        position = 0
        packet_bytes_max = self._shared.frame_bytes_max - 4
        try:
            while end - position >= REPLY_BYTES:
                length, word, code, ledger_id, entry_id = REPLY.unpack_from(view, position)
                if (
                    not REPLY_PACKET_BYTES <= length <= packet_bytes_max
                    or word != READ_WORD
                    or (code != 0 and length != REPLY_PACKET_BYTES)
                ):
                    raise CorruptionError("not a reply to a read", bookie=self.bookie)
                stop = position + 4 + length
                if stop > end:
                    break
                parts = self._parts.get(ledger_id, ())
                part = next((r for r in parts if entry_id in r.outstanding), None)
                if part is None:
                    self._ignore_unrequested()
                    position = stop
                else:
                    # If several parts wait for this entry, the reply belongs to the first of them.
                    run_end = end if has_first_claim(parts, part) else stop
                    position = self._receive_run(part, view, position, run_end)
        finally:
            # Also after an error: the adds to send are slices of the receive buffer, which the next
            # arrival on any connection overwrites.
            self._finish_arrival()
        return position

    def _receive_run(self, part: ReadPart, view: memoryview, position: int, end: int) -> int:
        """Process consecutive replies to one part, and turn good entries into recovery adds in
        place. Returns the position after them: ``consume`` decides what follows."""
        state, write_part = part.state, part.write_part
        prefix = write_part.prefix if write_part is not None else b""
        unacknowledged = write_part.unacknowledged if write_part is not None else {}
        unpack, pop, is_good = READ_REPLY.unpack_from, part.outstanding.pop, part.digest_check
        own_ledger_id = part.ledger_id
        # A part that is over waits for its replies, but does not use them.
        length_min = _NEVER if part.is_over else REPLY_PACKET_BYTES + state.entry_bytes_min
        good_count = good_lengths = largest_length = replied_count = credit_bytes_sum = 0
        failures: list[Failure] = []
        runs: list[memoryview | bytes] = []
        good_start = position  # start of the good frames that are not in ``runs`` yet
        while end - position >= REPLY_BYTES:
            (
                length,
                word,
                code,
                ledger_id,
                entry_id,
                inner_ledger_id,
                inner_entry_id,
                first,
                second,
            ) = unpack(view, position)
            stop = position + 4 + length
            if (
                ledger_id != own_ledger_id
                or stop > end
                or word != READ_WORD
                or length < REPLY_PACKET_BYTES
                or (code and length != REPLY_PACKET_BYTES)
                or not (credit_bytes := pop(entry_id, 0))
            ):
                break
            replied_count += 1
            credit_bytes_sum += credit_bytes
            if (
                length >= length_min
                and code == 0
                and inner_entry_id == entry_id
                and inner_ledger_id == ledger_id
                and is_good(view, position + REPLY_BYTES, stop, first, second)
            ):
                good_count += 1
                good_lengths += length
                if length > largest_length:
                    largest_length = length
                if prefix:
                    view[position + 4 : position + REPLY_BYTES] = prefix
                    unacknowledged[entry_id] = length - REPLY_PACKET_BYTES
            else:
                if good_start < position:
                    runs.append(view[good_start:position])
                good_start = stop
                failures.append((entry_id, code, credit_bytes))
            position = stop
        if good_start < position:
            runs.append(view[good_start:position])

        self._settle(
            part,
            ReplyRun(
                request_count=replied_count,
                entry_count=replied_count,
                credit_bytes=credit_bytes_sum,
                good_count=good_count,
                good_bytes=good_lengths - good_count * REPLY_PACKET_BYTES,
                largest_bytes=largest_length - REPLY_PACKET_BYTES,
                frames=runs,
                failures=failures,
            ),
        )
        return position

    def _settle(self, part: ReadPart, run: ReplyRun) -> None:
        """Account for consecutive replies to one part."""
        self._is_proven = True
        self._unrequested_count = 0
        self._replied_count += run.request_count
        self._replied_entry_count += run.entry_count
        self._replied_bytes += run.credit_bytes
        part.progress_s = self._loop.time()
        state, write_part = part.state, part.write_part
        if run.good_count:
            state.note_size(run.largest_bytes)
            failed_bytes = sum(credit_bytes for _, _, credit_bytes in run.failures)
            good_credit_bytes = run.credit_bytes - failed_bytes - run.left_out_bytes
            if write_part is None:
                part.limiters.release(good_credit_bytes, count=run.good_count)
            else:  # the entries are adds by now, to be sent at the end of this arrival
                part.limiters.resize(run.good_bytes - good_credit_bytes)
                if len(write_part.unacknowledged) == run.good_count:
                    write_part.progress_s = self._loop.time()
                write_part.connection.start_timing(write_part)
                self._outgoing.setdefault(write_part.connection, []).extend(run.frames)
            state.add_read(part, run.good_count, run.good_bytes)
        if not part.is_over:
            for entry_id, code, credit_bytes in run.failures:
                if code == Status.ETOOMANYREQUESTS.v2_code:
                    self._reply_times.note_busy()
                part.limiters.refund(credit_bytes, count=1)
                state.add_failure(part, entry_id, _answer(code))
            if run.left_out_count:
                part.limiters.refund(run.left_out_bytes, count=run.left_out_count)
        self.forget_if_idle(part)
        if not part.is_queued and part.has_pending:
            self.enqueue(part)  # it needed replies before it could request more

    def _finish_arrival(self) -> None:
        """Send the adds of one arrival, and release the credit of its replies."""
        outgoing, self._outgoing = self._outgoing, {}
        for target, frames in outgoing.items():
            target.send(frames, self)
        count, entry_bytes = self._replied_count, self._replied_bytes
        entry_count = self._replied_entry_count
        self._replied_count = self._replied_entry_count = self._replied_bytes = 0
        if count:
            now_s = self._loop.time()
            if (reply_s := self._stopwatch.read(now_s)) is not None:
                self._window.note_reply_time(reply_s)
                is_limiting = self._in_flight >= self._reply_times.limit
                self._reply_times.note_reply(reply_s, is_limiting=is_limiting, now_s=now_s)
            self._in_flight -= count
            self._window.release(entry_bytes, count=entry_count)
            self._window.note_replies(entry_bytes, count=entry_count)
            self._budget.release(entry_bytes, count=count)
        if self._turns:
            self.wake()

    # --- Back-pressure (PausableSource) --------------------------------------------------------

    def pause_for(self, target: TargetConnection) -> None:
        """Receive nothing until that target calls ``resume_for``."""
        if self._transport is not None:
            if not self._full_targets:
                self._transport.pause_reading()
            self._full_targets[target] = None

    def resume_for(self, target: TargetConnection) -> None:
        if target in self._full_targets:
            del self._full_targets[target]
            if not self._full_targets and self._transport is not None:
                self._transport.resume_reading()
                # Restart all timeouts: the pause was ours, not the bookie's.
                self._stopwatch.stop()
                for part in self._all_parts():
                    part.progress_s = self._loop.time()
                    part.restart_measurement()

    def write_buffer_changed(self, protocol: BulkProtocol, *, is_full: bool) -> None:
        """Do nothing: requests are small, and the budget limits their number."""

    # --- Ends ----------------------------------------------------------------------------------

    def forget_if_idle(self, part: ReadPart) -> None:
        """Remove a part that has nothing to request and to which no replies may come."""
        if part.is_idle:
            self._remove(part)

    def check_progress(self, now_s: float) -> None:
        """Fail parts that have waited too long. Four cases, by what arrived on the connection:

        1. Nothing arrived since the last check, and all waiting parts timed out: the connection is
           useless. Disconnect.
        2. Nothing arrived for ``IMPATIENT_S``: the bookie is unhealthy. Parts whose entries other
           sources may have fail now, before their timeout.
        3. Replies arrive, but not for some parts: only these parts fail. Their requests still count
           as in flight, because the bookie may work on them, until ``LATE_REPLY_TIMEOUTS``.
        4. Replies arrive too slowly (``TransferPart.is_slow``): the bookie is unhealthy. Parts fail
           whose entries are only verified, or may be read from others. The rest goes on: a slow
           copy is better than none, and the window keeps it small.
        """
        if self._transport is None or self._full_targets:
            return
        self._note_received()
        self._window.adapt(self._window.count, now_s)
        waiting = [part for part in self._all_parts() if part.request_count]
        slow = [p for p in waiting if p.is_slow(self._window, now_s, self._shared.timeout_s)]
        stalled = [p for p in waiting if now_s - p.progress_s > self._shared.timeout_s]
        if self._checks_without_bytes and stalled and len(stalled) == len(waiting):
            self.disconnect(NoAnswerError("no reply in time", bookie=self.bookie))
            return
        if waiting and self._checks_without_bytes >= IMPATIENT_CHECKS:
            self._shared.health.note_trouble(self.bookie)
            stalled.extend(p for p in self._all_parts() if p.state.transfer.has_alternatives)
        if slow:
            self._shared.health.note_trouble(self.bookie)
        for part in slow:
            if not part.is_written or part.state.transfer.has_alternatives:
                part.state.fail_read_part(part, is_unresponsive=True)
        for part in stalled:
            part.state.fail_read_part(part)
            if (
                part.request_count
                and now_s - part.progress_s > LATE_REPLY_TIMEOUTS * self._shared.timeout_s
            ):
                self._give_up(part)

    # --- Health --------------------------------------------------------------------------------

    @property
    def waiting_bytes(self) -> int:
        """Estimated size of what the queued parts will request in their next turn."""
        return len(self._turns) * QUANTUM_BYTES // 4

    @property
    def reply_s(self) -> float:
        return self._reply_times.reply_s

    def _give_up(self, part: ReadPart) -> None:
        """Stop waiting for replies to a part that is over."""
        count, entry_bytes = part.request_count, part.outstanding_bytes
        entry_count = part.outstanding_count
        part.outstanding.clear()
        self._stopwatch.stop()
        self._in_flight -= count
        self._window.release(entry_bytes, count=entry_count)
        self.forget_if_idle(part)
        self._budget.release(entry_bytes, count=count)

    def _on_connected(self) -> None:
        self.wake()

    def _fail_all(self, error: BookmenderError) -> None:
        is_asked = not isinstance(error, LocalLimitError)
        if self._parts and is_asked:
            self._shared.health.note_trouble(self.bookie)
        self._full_targets.clear()
        self._turns.clear()
        is_unresponsive = isinstance(error, NoAnswerError)
        for part in self._all_parts():
            if not is_asked:
                part.state.not_asked.add(self.bookie)
            part.state.fail_read_part(part, is_unresponsive=is_unresponsive)
            self._give_up(part)
        self._window.reset()


class ReadPart(TransferPart):
    """The entries that one transfer reads from one source: to be requested, or outstanding."""

    __slots__ = (
        "_entry_ids",
        "_next",
        "connection",
        "digest_check",
        "is_queued",
        "limiters",
        "outstanding",
        "woken_by",
        "write_part",
    )

    def __init__(
        self,
        state: TransferState,
        connection: SourceConnection,
        entry_ids: Sequence[int],
        write_part: WritePart | None,
    ) -> None:
        super().__init__(
            state,
            connection.bookie,
            first_id=entry_ids[0],
            last_id=entry_ids[-1],
            is_written=write_part is not None,
        )
        self.write_part = write_part
        """The part that writes the entries; None if they are only verified."""
        self.connection = connection
        self.limiters = (
            state.check_limiters
            if write_part is None
            else LimiterChain(connection.rate_limit, *state.limiters.limiters)
        )
        self.digest_check = state.digest_check_for(connection.bookie)
        self.is_queued = False
        """True if the part waits for its next turn or at a limiter."""
        self.woken_by: set[Limiter] = set()
        """See ``limiters.Applicant``."""
        self.outstanding: dict[int, Any] = {}
        """Outstanding requests, oldest first: the bytes of credit by the key of the reply."""
        self._entry_ids = entry_ids
        self._next = 0

    @property
    def awaited(self) -> Mapping[int, Any]:
        return self.outstanding

    @property
    def has_pending(self) -> bool:
        """True if entries remain to be requested."""
        return self._next < len(self._entry_ids)

    @property
    def request_count(self) -> int:
        """Outstanding requests, which count against the read budget."""
        return len(self.outstanding)

    @property
    def outstanding_count(self) -> int:
        """Outstanding entries."""
        return len(self.outstanding)

    @property
    def outstanding_bytes(self) -> int:
        """The credit taken for the outstanding entries."""
        return sum(self.outstanding.values())

    @property
    def quantum(self) -> int:
        """The number of entries to request in one turn. 0: wait for the first replies."""
        state = self.state
        count = state.quantum if state.has_measured_size else QUANTUM_COUNT - len(self.outstanding)
        pending_count = len(self._entry_ids) - self._next
        return count if count < pending_count else pending_count

    def requests_for(self, count: int) -> int:
        """Return how many requests are sent for ``count`` entries, which are at most a quantum."""
        return count

    def ask(self, count: int, now_s: float) -> bytes:
        """Return the requests for the next ``count`` entries, and make these outstanding."""
        entry_ids = self._entry_ids[self._next : self._next + count]
        self._next += count
        if not self.outstanding:
            self.progress_s = now_s
        self.outstanding.update(dict.fromkeys(entry_ids, self.state.expected_bytes))
        return read_requests(self.ledger_id, entry_ids)

    @property
    def is_idle(self) -> bool:
        """True if nothing remains to be requested and nothing is outstanding."""
        return not self.request_count and not self.has_pending

    def enqueue(self) -> None:
        """Give the part a turn. Limiters call this."""
        self.connection.enqueue(self)

    def end(self) -> list[int]:
        if self.is_over:
            return []
        self.is_over = True
        entry_ids = self._drop_all()
        if self.outstanding_count:
            self.limiters.refund(self.outstanding_bytes, count=self.outstanding_count)
        self.connection.forget_if_idle(self)
        return entry_ids

    def _drop_all(self) -> list[int]:
        """Make nothing pending. Returns the entries that were pending or are outstanding."""
        entry_ids = [*self.outstanding, *self._entry_ids[self._next :]]
        self._next = len(self._entry_ids)
        return entry_ids


Failure = tuple[int, int, int]
"""An entry that was not received: its id, the code of the reply, and the bytes of its credit."""


@dataclass(slots=True, kw_only=True)
class ReplyRun:
    """The outcome of consecutive replies to one read part. ``entry_count``, ``credit_bytes``: of
    all entries in the replies: good, failed and left out."""

    request_count: int
    entry_count: int
    credit_bytes: int
    good_count: int
    good_bytes: int
    largest_bytes: int
    frames: list[memoryview | bytes]
    """The good entries, as adds."""
    failures: list[Failure]
    left_out_count: int = 0
    """Entries that a batch reply did not contain. They are requested again."""
    left_out_bytes: int = 0


def _answer(code: int) -> Answer:
    """Return the meaning of a reply without a good entry (rule S5)."""
    if code == 0:
        return Answer.MISMATCH
    return _ANSWERS.get(Status.of_v2(code).error, Answer.UNKNOWN)


_ANSWERS: dict[object, Answer] = {
    NoSuchEntryError: Answer.ABSENT,
    UnreadableError: Answer.UNREADABLE,
}
