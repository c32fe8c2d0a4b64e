"""Reading from one bookie: whose turn it is to ask, and what becomes of the replies.

How entries are asked for, and what a reply looks like, is the subclasses' business: ``singles`` and
``batches``. Here everything runs per turn or per arrival, nothing per entry.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from ledgers.bookie.budget import ReadBudget, Waiter
from ledgers.bookie.bulk.flow import BookieFlow, ReplyTimes
from ledgers.bookie.bulk.gates import Pace
from ledgers.bookie.bulk.inbox import Inbox
from ledgers.bookie.bulk.job import QUANTUM_BYTES, Job, Writing, forget
from ledgers.bookie.bulk.lane import LATE_TIMEOUTS, Common, Lane, Stopwatch
from ledgers.bookie.bulk.readings import AnyReading
from ledgers.bookie.protocol.status import Status
from ledgers.bookies import Answer
from ledgers.errors import BookmenderError, NoAnswerError, NoSuchEntryError, UnreadableError
from ledgers.metadata import BookieId

if TYPE_CHECKING:
    from ledgers.bookie.bulk.target import TargetLane

IMPATIENT_S = 1.0
IMPATIENT_CHECKS = 4
"""Entries that may be had elsewhere are given up when nothing at all came for so long."""
AILING_S = 30.0
"""A bookie that failed or fell silent is asked last for so long."""

R = TypeVar("R", bound=AnyReading)


class SourceLane(Lane, Generic[R]):
    """Reads from one bookie, of all transfers that read there, in turns of a quantum each.

    A read is issued with credit from two ends: the gates of its job, and this bookie's budget,
    which the control path draws on too. Where the first lacks, the reading is parked there and the
    others go on; where the second lacks, the lane waits in line.
    """

    def __init__(
        self, bookie: BookieId, common: Common, budget: ReadBudget, flow: BookieFlow
    ) -> None:
        super().__init__(bookie, common)
        self._budget = budget
        self._flow = flow
        self._readings: dict[int, list[R]] = {}
        """By ledger id, in the order in which they began."""
        self._ring: deque[R] = deque()
        """Those that may ask for more, next turn first."""
        self._in_line: Waiter | None = None
        self._in_flight = 0
        """Requests of ours that the bookie has not answered."""
        self._reply_times = ReplyTimes(cap=budget.count_max)
        self._stopwatch = Stopwatch()
        self._ailing_until_s = 0.0
        self._is_awake = False
        """Whether ``_ask_more`` is about to be called."""
        self._holding_targets: dict[TargetLane, None] = {}
        """Targets that must send first: until then nothing is received here."""
        self._replied_count = 0
        self._replied_bytes = 0
        """Credit of the replies taken in since it was last given back."""
        self._outgoing: dict[TargetLane, list[memoryview | bytes]] = {}
        """Adds to be sent at the end of this arrival, mostly parts of the receive buffer."""

    # --- Asking --------------------------------------------------------------------------------

    @abstractmethod
    def reading(self, job: Job, entry_ids: Sequence[int], writing: Writing | None) -> R:
        """Entries of a job, to be begun here. ``writing``: what becomes of them, if anything."""

    @property
    @abstractmethod
    def pace(self) -> Pace:
        """What entries that are to be copied pass first."""

    @abstractmethod
    def _take_reads(self, count: int, entry_bytes: int) -> int:
        """Of this bookie's budget, for up to ``count`` entries of one turn; how many are granted.

        Where none is, the lane has taken its place in line.
        """

    def _limit(self) -> int:
        """Requests that may be in flight, besides what the budget says."""
        cap = self._reply_times.cap = self._budget.count_max
        return self._reply_times.limit if self._flow.limits.is_by_reply_times else cap

    def _may_ask(self) -> bool:
        """Whether one more request may be made now. If not, a reply changes that."""
        return True

    def begin(self, reading: R) -> None:
        self._used_s = self._loop.time()
        self._readings.setdefault(reading.ledger_id, []).append(reading)
        self.enqueue(reading)

    def enqueue(self, reading: R) -> None:
        """Give it a turn, after all that wait already."""
        reading.is_queued = True
        self._ring.append(reading)
        self.wake()

    def wake(self) -> None:
        """Ask for more in this turn of the loop, once, whatever happened in it."""
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
        """Ask for as many entries as there is credit for, a quantum of each reading in turn."""
        if not self._ring or self._common.is_paused:
            return
        if self._transport is None:
            self.connect()
            return
        now_s = self._loop.time()
        requests = []
        while self._ring and self._may_ask() and self._in_flight < self._limit():
            reading = self._ring[0]
            count = reading.quantum
            if count:
                count = reading.way.take(reading, count)
                if count == 0:  # it is parked there, and the others go on
                    self._ring.popleft()
                    continue
                asked_count = self._take_credit(reading, count)
                if asked_count == 0:
                    break
                requests.append(reading.ask(asked_count, now_s))
                self._in_flight += reading.requests_for(asked_count)
                self._stopwatch.start(reading.outstanding, now_s)
            self._ring.popleft()
            if reading.has_pending and reading.quantum:
                self._ring.append(reading)
            else:
                reading.is_queued = False
        if requests:
            self._transport.write(b"".join(requests))

    def _take_credit(self, reading: R, count: int) -> int:
        """Of this bookie's budget, giving back what the gates had granted beyond it."""
        expected_bytes = reading.job.expected_bytes
        granted_count = self._take_reads(count, expected_bytes)
        if granted_count < count:
            spare_count = count - granted_count
            reading.way.give_back(spare_count * expected_bytes, count=spare_count)
        return granted_count

    def _wait_in_line(self, read_bytes: int) -> None:
        """Until that much of the budget is free for one read."""
        self._in_line = self._budget.wait_in_line(read_bytes, self._take_turn)

    # --- Replies -------------------------------------------------------------------------------

    def _settle(self, reading: R, stretch: "Stretch") -> None:
        """Account for the replies that stood in a row."""
        self._is_proven = True
        self._unasked_count = 0
        self._replied_count += stretch.request_count
        self._replied_bytes += stretch.taken_bytes
        reading.progress_s = self._loop.time()
        if stretch.good_count:
            self._pass_on(reading, stretch)
            reading.job.add_read(reading, stretch.good_count, stretch.good_bytes)
        if not reading.is_over:
            for entry_id, code, taken_bytes in stretch.failures:
                if code == Status.ETOOMANYREQUESTS.v2_code:
                    self._reply_times.note_busy()
                reading.way.give_back(taken_bytes, count=1)
                reading.job.add_failure(reading, entry_id, _answer(code))
            if stretch.left_out_count:
                reading.way.give_back(stretch.left_out_bytes, count=stretch.left_out_count)
        if reading.is_idle:
            forget(self._readings, reading)
        elif not reading.is_queued and reading.has_pending:
            self.enqueue(reading)  # it had to see replies before it could ask again

    def _pass_on(self, reading: R, stretch: "Stretch") -> None:
        """Have the good entries, which are adds by now, sent at the end of this arrival."""
        job, writing = reading.job, reading.writing
        job.weigh(stretch.largest_bytes)
        failed_bytes = sum(taken_bytes for _, _, taken_bytes in stretch.failures)
        good_taken_bytes = stretch.taken_bytes - failed_bytes - stretch.left_out_bytes
        if writing is None:
            reading.way.release(good_taken_bytes, count=stretch.good_count)
            return
        reading.way.resize(stretch.good_bytes - good_taken_bytes)
        if len(writing.unacknowledged) == stretch.good_count:
            writing.progress_s = self._loop.time()
        writing.lane.time(writing)
        self._outgoing.setdefault(writing.lane, []).extend(stretch.frames)

    def _finish_arrival(self) -> None:
        """Send what became of the replies of one arrival, and give their credit back."""
        outgoing, self._outgoing = self._outgoing, {}
        for target, frames in outgoing.items():
            target.send(frames, self)
        count, entry_bytes = self._replied_count, self._replied_bytes
        self._replied_count = self._replied_bytes = 0
        if count:
            self._note_latency()
            self._in_flight -= count
            self._budget.release(entry_bytes, count=count)
        if self._ring:
            self.wake()

    def _note_latency(self) -> None:
        """Before the replies are counted off."""
        now_s = self._loop.time()
        latency_s = self._stopwatch.read(now_s)
        if latency_s is not None:
            is_limiting = self._in_flight >= self._reply_times.limit
            self._reply_times.note_reply(latency_s, is_limiting=is_limiting, now_s=now_s)

    # --- Targets that must send first ----------------------------------------------------------

    def hold(self, target: "TargetLane") -> None:
        """Receive nothing until that target has sent what it has."""
        if self._transport is not None:
            if not self._holding_targets:
                self._transport.pause_reading()
            self._holding_targets[target] = None

    def let_go(self, target: "TargetLane") -> None:
        if target in self._holding_targets:
            del self._holding_targets[target]
            if not self._holding_targets and self._transport is not None:
                self._transport.resume_reading()
                self._restart_clocks()

    def _restart_clocks(self) -> None:
        """It was we who did not listen."""
        self._stopwatch.stop()
        now_s = self._loop.time()
        for reading in self._all_readings():
            reading.progress_s = now_s

    def is_full(self, inbox: Inbox, is_full: bool) -> None:
        """Requests are small, and as few as the budget allows."""

    # --- Ends ----------------------------------------------------------------------------------

    def forget_if_idle(self, reading: R) -> None:
        """Keep a reading that is over no longer than replies to it may come."""
        if reading.is_idle:
            forget(self._readings, reading)

    @property
    def is_busy(self) -> bool:
        return bool(self._readings)

    def check_progress(self, now_s: float) -> None:
        if self._transport is None or self._holding_targets:
            return
        self._listen()
        waiting = [reading for reading in self._all_readings() if reading.request_count]
        stalled = [r for r in waiting if now_s - r.progress_s > self._common.timeout_s]
        if self._silent_checks and stalled and len(stalled) == len(waiting):
            self.break_off(NoAnswerError("no reply in time", bookie=self.bookie))
            return
        if waiting and self._silent_checks >= IMPATIENT_CHECKS:
            self._ail()
            stalled.extend(r for r in self._all_readings() if r.job.transfer.has_alternatives)
        for reading in stalled:
            reading.job.fail_reading(reading)
            if (
                reading.request_count
                and now_s - reading.progress_s > LATE_TIMEOUTS * self._common.timeout_s
            ):
                self._give_up(reading)

    # --- How it does ---------------------------------------------------------------------------

    @property
    def is_ailing(self) -> bool:
        """Whether it failed or fell silent lately."""
        return self._loop.time() < self._ailing_until_s

    @property
    def waiting_bytes(self) -> int:
        """About what those in the ring are going to ask in their next turn."""
        return len(self._ring) * QUANTUM_BYTES // 4

    @property
    def reply_s(self) -> float:
        return self._reply_times.reply_s

    def _ail(self) -> None:
        self._ailing_until_s = self._loop.time() + AILING_S

    def forget_failures(self) -> None:
        super().forget_failures()
        self._ailing_until_s = 0.0

    def _all_readings(self) -> list[R]:
        return [reading for readings in self._readings.values() for reading in readings]

    def _give_up(self, reading: R) -> None:
        """Expect no replies any more to a reading that is over."""
        count, entry_bytes = reading.request_count, reading.outstanding_bytes
        reading.forget_outstanding()
        self._stopwatch.stop()
        self._in_flight -= count
        self.forget_if_idle(reading)
        self._budget.release(entry_bytes, count=count)

    def _go_on(self) -> None:
        self.wake()

    def _fail_all(self, error: BookmenderError) -> None:
        if self._readings:
            self._ail()
        self._holding_targets.clear()
        self._ring.clear()
        is_silent = isinstance(error, NoAnswerError)
        for reading in self._all_readings():
            reading.job.fail_reading(reading, is_silent=is_silent)
            self._give_up(reading)


Failure = tuple[int, int, int]
"""An entry that was not given: its id, the reply's code, and the bytes of credit it took."""


@dataclass(slots=True, kw_only=True)
class Stretch:
    """Replies to one reading that stood in a row, and what they brought.

    ``taken_bytes``: of credit, for the good, the failed and the left out alike.
    """

    request_count: int
    taken_bytes: int
    good_count: int
    good_bytes: int
    largest_bytes: int
    frames: list[memoryview | bytes]
    """The good entries, as adds."""
    failures: list[Failure]
    left_out_count: int = 0
    """Entries that a batch did not bring, and that are asked for again."""
    left_out_bytes: int = 0


def _answer(code: int) -> Answer:
    """What the reply of an entry that is not good says (rule S5)."""
    if code == 0:
        return Answer.MISMATCH
    return _ANSWERS.get(Status.of_v2(code).error, Answer.UNKNOWN)


_ANSWERS: dict[object, Answer] = {
    NoSuchEntryError: Answer.ABSENT,
    UnreadableError: Answer.UNREADABLE,
}
