"""Reading from one bookie: whose turn it is to ask, and what the replies are.

``_take_in`` is the one loop that runs for every entry; everything else runs per turn or per arrival.
"""

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ledgers.bookie.budget import ReadBudget, Waiter
from ledgers.bookie.bulk.frames import READ_REPLY, READ_WORD, REPLY, REPLY_BYTES, REPLY_PACKET_BYTES
from ledgers.bookie.bulk.inbox import Inbox
from ledgers.bookie.bulk.job import Reading, forget
from ledgers.bookie.bulk.lane import LATE_TIMEOUTS, Common, Lane
from ledgers.bookie.protocol.status import Status
from ledgers.bookies import Answer
from ledgers.errors import BookmenderError, CorruptionError, NoSuchEntryError, UnavailableError
from ledgers.metadata import BookieId

if TYPE_CHECKING:
    from ledgers.bookie.bulk.target import TargetLane

_NEVER = 1 << 62


class SourceLane(Lane):
    """Reads from one bookie, of all transfers that read there, in turns of a quantum each.

    A read is issued with credit from two ends: the target's window, and this bookie's budget, which
    the control path draws on too. Where the first lacks, the reading is parked there and the others
    go on; where the second lacks, the lane waits in line.
    """

    def __init__(self, bookie: BookieId, common: Common, budget: ReadBudget) -> None:
        super().__init__(bookie, common)
        self._budget = budget
        self._readings: dict[int, list[Reading]] = {}
        """By ledger id, in the order in which they began."""
        self._ring: deque[Reading] = deque()
        """Those that may ask for more, next turn first."""
        self._in_line: Waiter | None = None
        self._is_awake = False
        """Whether ``_ask_more`` is about to be called."""
        self._holding_targets: dict[TargetLane, None] = {}
        """Targets that must send first: until then nothing is received here."""
        self._replied_count = 0
        self._replied_bytes = 0
        """Credit of the replies taken in since it was last given back."""
        self._outgoing: dict[TargetLane, list[memoryview]] = {}
        """Adds to be sent at the end of this arrival: parts of the receive buffer."""

    # --- Asking --------------------------------------------------------------------------------

    def begin(self, reading: Reading) -> None:
        self._used_s = self._loop.time()
        self._readings.setdefault(reading.ledger_id, []).append(reading)
        self.enqueue(reading)

    def enqueue(self, reading: Reading) -> None:
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
        while self._ring:
            reading = self._ring[0]
            count = reading.quantum
            if count and (target := reading.target) is not None:
                count = target.take(reading, count)
                if count == 0:
                    self._ring.popleft()
                    target.park(reading)
                    continue
            if count:
                asked_count = self._take_credit(reading, count)
                if asked_count == 0:
                    break
                requests.append(reading.ask(asked_count, now_s))
            self._ring.popleft()
            if reading.quantum:
                self._ring.append(reading)
            else:
                reading.is_queued = False
        if requests:
            self._transport.write(b"".join(requests))

    def _take_credit(self, reading: Reading, count: int) -> int:
        """Of this bookie's budget, giving back what the target had granted beyond it."""
        expected_bytes = reading.job.expected_bytes
        granted_count = self._budget.take(count, expected_bytes)
        if granted_count < count and reading.target is not None:
            spare_count = count - granted_count
            reading.target.release(spare_count * expected_bytes, count=spare_count)
        if granted_count == 0:
            self._in_line = self._budget.wait_in_line(expected_bytes, self._take_turn)
        return granted_count

    # --- Replies -------------------------------------------------------------------------------

    def consume(self, view: memoryview, end: int) -> int:
        position = 0
        packet_bytes_max = self._common.frame_bytes_max - 4
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
                readings = self._readings.get(ledger_id, ())
                reading = next((r for r in readings if entry_id in r.outstanding), None)
                if reading is None:
                    self._ignore_unasked()
                    position = stop
                else:
                    # Where a ledger has several readings each reply is the first one's that waits for it.
                    stretch_end = end if len(readings) == 1 else stop
                    position = self._take_in(reading, view, position, stretch_end)
        finally:
            self._finish_arrival()
        return position

    def _take_in(self, reading: Reading, view: memoryview, position: int, end: int) -> int:
        """Take the replies to one reading that stand in a row; the position after them.

        Good entries are made recovery adds where they lie. It stops at what is not a whole reply to
        this reading, and leaves the judgement of that to ``consume``.
        """
        job, writing = reading.job, reading.job.writing
        prefix = writing.prefix if writing is not None else b""
        unacknowledged = writing.unacknowledged if writing is not None else {}
        unpack, pop, check = READ_REPLY.unpack_from, reading.outstanding.pop, job.check
        own_ledger_id = reading.ledger_id
        # A reading that is over waits for its replies, but wants nothing of them.
        length_min = _NEVER if reading.is_over else REPLY_PACKET_BYTES + job.entry_bytes_min
        good_count = good_lengths = largest_length = replied_count = taken_bytes_sum = 0
        failures: list[_Failure] = []
        runs: list[memoryview] = []
        run_start = position  # of the good frames in a row that are not in ``runs`` yet
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
                or not (taken_bytes := pop(entry_id, 0))
            ):
                break
            replied_count += 1
            taken_bytes_sum += taken_bytes
            if (
                length >= length_min
                and code == 0
                and inner_entry_id == entry_id
                and inner_ledger_id == ledger_id
                and check(view, position + REPLY_BYTES, stop, first, second)
            ):
                good_count += 1
                good_lengths += length
                if length > largest_length:
                    largest_length = length
                if prefix:
                    view[position + 4 : position + REPLY_BYTES] = prefix
                    unacknowledged[entry_id] = length - REPLY_PACKET_BYTES
            else:
                if run_start < position:
                    runs.append(view[run_start:position])
                run_start = stop
                failures.append((entry_id, code, taken_bytes))
            position = stop
        if run_start < position:
            runs.append(view[run_start:position])

        self._settle(
            reading,
            _Stretch(
                replied_count=replied_count,
                taken_bytes=taken_bytes_sum,
                good_count=good_count,
                good_bytes=good_lengths - good_count * REPLY_PACKET_BYTES,
                largest_bytes=largest_length - REPLY_PACKET_BYTES,
                runs=runs,
                failures=failures,
            ),
        )
        return position

    def _settle(self, reading: Reading, stretch: "_Stretch") -> None:
        """Account for the replies that stood in a row."""
        self._is_proven = True
        self._unasked_count = 0
        self._replied_count += stretch.replied_count
        self._replied_bytes += stretch.taken_bytes
        reading.progress_s = self._loop.time()
        if stretch.good_count:
            self._pass_on(reading, stretch)
            reading.job.add_read(stretch.good_count, stretch.good_bytes)
        if not reading.is_over:
            for entry_id, code, taken_bytes in stretch.failures:
                if reading.target is not None:
                    reading.target.release(taken_bytes, count=1)
                reading.job.add_failure(reading, entry_id, _answer(code))
        if reading.is_idle:
            forget(self._readings, reading)
        elif not reading.is_queued and reading.has_pending:
            self.enqueue(reading)  # it had to see replies before it could ask again

    def _pass_on(self, reading: Reading, stretch: "_Stretch") -> None:
        """Have the good entries, which are adds by now, sent at the end of this arrival."""
        reading.job.weigh(stretch.largest_bytes)
        writing = reading.job.writing
        if writing is None:
            return
        if len(writing.unacknowledged) == stretch.good_count:
            writing.progress_s = self._loop.time()
        failed_bytes = sum(taken_bytes for _, _, taken_bytes in stretch.failures)
        writing.lane.resize(stretch.good_bytes - (stretch.taken_bytes - failed_bytes))
        self._outgoing.setdefault(writing.lane, []).extend(stretch.runs)

    def _finish_arrival(self) -> None:
        """Send what became of the replies of one arrival, and give their credit back."""
        outgoing, self._outgoing = self._outgoing, {}
        for target, frames in outgoing.items():
            target.send(frames, self)
        count, entry_bytes = self._replied_count, self._replied_bytes
        self._replied_count = self._replied_bytes = 0
        if count:
            self._budget.release(entry_bytes, count=count)
        if self._ring:
            self.wake()

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
        now_s = self._loop.time()
        for reading in self._all_readings():
            reading.progress_s = now_s

    def is_full(self, inbox: Inbox, is_full: bool) -> None:
        """Requests are small, and as few as the budget allows."""

    # --- Ends ----------------------------------------------------------------------------------

    def forget_if_idle(self, reading: Reading) -> None:
        """Keep a reading that is over no longer than replies to it may come."""
        if reading.is_idle:
            forget(self._readings, reading)

    @property
    def is_busy(self) -> bool:
        return bool(self._readings)

    def check_progress(self, now_s: float) -> None:
        if self._transport is None or self._holding_targets:
            return
        waiting = [reading for reading in self._all_readings() if reading.outstanding]
        stalled = [r for r in waiting if now_s - r.progress_s > self._common.timeout_s]
        if self._is_silent() and stalled and len(stalled) == len(waiting):
            self.break_off(UnavailableError("no reply in time", bookie=self.bookie))
            return
        for reading in stalled:
            reading.job.fail_reading(reading)
            if now_s - reading.progress_s > LATE_TIMEOUTS * self._common.timeout_s:
                self._give_up(reading)

    def _all_readings(self) -> list[Reading]:
        return [reading for readings in self._readings.values() for reading in readings]

    def _give_up(self, reading: Reading) -> None:
        """Expect no replies any more to a reading that is over."""
        count, entry_bytes = len(reading.outstanding), sum(reading.outstanding.values())
        reading.outstanding.clear()
        self.forget_if_idle(reading)
        self._budget.release(entry_bytes, count=count)

    def _go_on(self) -> None:
        self.wake()

    def _fail_all(self, error: BookmenderError) -> None:
        self._holding_targets.clear()
        self._ring.clear()
        for reading in self._all_readings():
            reading.job.fail_reading(reading)
            self._give_up(reading)


_Failure = tuple[int, int, int]
"""An entry that was not given: its id, the reply's code, and the bytes of credit it took."""


@dataclass(slots=True, kw_only=True)
class _Stretch:
    """Replies to one reading that stood in a row. ``taken_bytes``: of credit, failures included."""

    replied_count: int
    taken_bytes: int
    good_count: int
    good_bytes: int
    largest_bytes: int
    runs: list[memoryview]
    """The good entries' frames, as adds."""
    failures: list[_Failure]


def _answer(code: int) -> Answer:
    """What the reply of an entry that is not good says (rule S5)."""
    if code == 0:
        return Answer.MISMATCH
    is_absent = Status.of_v2(code).error is NoSuchEntryError
    return Answer.ABSENT if is_absent else Answer.UNKNOWN
