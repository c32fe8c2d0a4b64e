"""Writing to one bookie: a window of entries on their way, and the replies to them."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ledgers.bulk.connection import LATE_TIMEOUTS, Common, Inbox, Lane, Stopwatch
from ledgers.bulk.flow_control import BookieFlow, ReplyTimes
from ledgers.bulk.frames import ADD_REPLY_WORD, REPLY, REPLY_BYTES, REPLY_PACKET_BYTES
from ledgers.bulk.limiters import Window, WindowGate
from ledgers.bulk.transfer import Writing, forget, is_first_choice
from ledgers.errors import (
    BookmenderError,
    BusyError,
    CorruptionError,
    NoAnswerError,
    UnavailableError,
)
from ledgers.model import BookieId
from ledgers.wire.messages import Status

if TYPE_CHECKING:
    from ledgers.bulk.source import SourceLane


class TargetLane(Lane):
    """Adds to one bookie, of all transfers that write there.

    The window of ``gate`` counts an entry from before it is asked of its source until it is
    acknowledged, so that what was read always has a place to go.
    """

    def __init__(self, bookie: BookieId, common: Common, flow: BookieFlow) -> None:
        super().__init__(bookie, common)
        self._flow = flow
        self.gate = WindowGate(
            Window(count_max=common.writes_in_flight_max, bytes_max=common.writes_bytes_max),
            is_open=False,
        )
        self._writings: dict[int, list[Writing]] = {}
        """By ledger id, in the order in which they began."""
        self._reply_times = ReplyTimes(cap=common.writes_in_flight_max)
        self._stopwatch = Stopwatch()
        self._is_full = False
        self._held_sources: dict[SourceLane[Any], None] = {}
        self.keep_to_limit()

    # --- Sending -------------------------------------------------------------------------------

    def begin(self, writing: Writing) -> None:
        self._used_s = self._loop.time()
        self._writings.setdefault(writing.ledger_id, []).append(writing)
        self.connect()

    def time(self, writing: Writing) -> None:
        """Entries of it are about to be sent: see how long one takes."""
        self._stopwatch.start(writing.unacknowledged, self._loop.time())

    def send(self, frames: Sequence[memoryview | bytes], source: "SourceLane[Any]") -> None:
        """Send adds whose credit was taken. The bytes are copied: the caller reuses its buffer."""
        if self._transport is not None:  # else their jobs have failed meanwhile
            self._transport.write(b"".join(frames))
            if self._is_full:
                # Entries turned out larger than expected, or the bookie takes nothing.
                self._held_sources[source] = None
                source.hold(self)

    def is_full(self, inbox: Inbox, is_full: bool) -> None:
        if inbox is self._inbox:  # else it was broken off before
            self._is_full = is_full
            if not is_full:
                self._let_go()

    def _let_go(self) -> None:
        held, self._held_sources = self._held_sources, {}
        for source in held:
            source.let_go(self)

    def opened(self, inbox: Inbox, transport: asyncio.Transport) -> None:
        super().opened(inbox, transport)
        transport.set_write_buffer_limits(high=self._common.writes_bytes_max)

    # --- Replies -------------------------------------------------------------------------------

    def consume(self, view: memoryview, end: int) -> int:
        position, end = 0, end - end % REPLY_BYTES
        while position < end:
            length, word, _, ledger_id, entry_id = REPLY.unpack_from(view, position)
            if length != REPLY_PACKET_BYTES or word != ADD_REPLY_WORD:
                raise CorruptionError("not a reply to an add", bookie=self.bookie)
            writings = self._writings.get(ledger_id, ())
            writing = next((w for w in writings if entry_id in w.unacknowledged), None)
            if writing is None:
                self._ignore_unasked()
                position += REPLY_BYTES
            else:
                # Where several writings wait for an entry its reply is the first one's.
                stretch_end = end if is_first_choice(writings, writing) else position + REPLY_BYTES
                position = self._acknowledge(writing, view[:stretch_end], position)
        self._note_latency()
        return end

    def _acknowledge(self, writing: Writing, view: memoryview, position: int) -> int:
        """Take the replies to one writing that stand in a row; the position after them."""
        pop, own_ledger_id = writing.unacknowledged.pop, writing.ledger_id
        count = replied_bytes = good_bytes = 0
        refusal: BookmenderError | None = None
        for length, word, code, ledger_id, entry_id in REPLY.iter_unpack(view[position:]):
            if (
                ledger_id != own_ledger_id
                or length != REPLY_PACKET_BYTES
                or word != ADD_REPLY_WORD
                or not (entry_bytes := pop(entry_id, 0))
            ):
                break
            count += 1
            replied_bytes += entry_bytes
            if code != 0:
                refusal = self._refusal(code, ledger_id, entry_id)
                break
            good_bytes += entry_bytes
        self._settle(writing, count, replied_bytes)
        if not writing.is_over:
            writing.job.add_written(count - (refusal is not None), good_bytes)
            if refusal is not None:
                writing.job.fail_writing(refusal, entry_id)
        self.forget_if_idle(writing)
        return position + count * REPLY_BYTES

    def _settle(self, writing: Writing, count: int, replied_bytes: int) -> None:
        self._is_proven = True
        self._unasked_count = 0
        writing.progress_s = self._loop.time()
        writing.job.way.release(replied_bytes, count=count)

    def _note_latency(self) -> None:
        now_s = self._loop.time()
        latency_s = self._stopwatch.read(now_s)
        if latency_s is not None:
            is_limiting = self.gate.is_limiting
            self._reply_times.note_reply(latency_s, is_limiting=is_limiting, now_s=now_s)
            self.keep_to_limit()

    def keep_to_limit(self) -> None:
        """Let as much be on its way as is right for the bookie now."""
        times = self._reply_times
        is_by_reply_times = self._flow.limits.is_by_reply_times
        self.gate.window.count_max = times.limit if is_by_reply_times else times.cap

    def _refusal(self, code: int, ledger_id: int, entry_id: int) -> BookmenderError:
        error = Status.of_v2(code).error
        assert error is not None, code
        if error is BusyError:
            self._reply_times.note_busy()
            self.keep_to_limit()
        return error(
            "the target refused an entry",
            bookie=self.bookie,
            ledger_id=ledger_id,
            entry_id=entry_id,
            code=code,
        )

    # --- Ends ----------------------------------------------------------------------------------

    def forget_if_idle(self, writing: Writing) -> None:
        """Keep a writing that is over no longer than replies to it may come."""
        if writing.is_over and not writing.unacknowledged:
            forget(self._writings, writing)

    @property
    def is_busy(self) -> bool:
        return bool(self._writings)

    def check_progress(self, now_s: float) -> None:
        if self._transport is None:
            return
        self.gate.unpark_if_free()
        waiting = [writing for writing in self._all_writings() if writing.unacknowledged]
        stalled = [w for w in waiting if now_s - w.progress_s > self._common.timeout_s]
        self._listen()
        if self._silent_checks and stalled and len(stalled) == len(waiting):
            self.break_off(NoAnswerError("no reply from the target in time", bookie=self.bookie))
            return
        error = UnavailableError("the target is slow to reply", bookie=self.bookie)
        for writing in stalled:
            writing.job.fail_writing(error)
            if now_s - writing.progress_s > LATE_TIMEOUTS * self._common.timeout_s:
                self._give_up(writing)

    def _all_writings(self) -> list[Writing]:
        return [writing for writings in self._writings.values() for writing in writings]

    def _give_up(self, writing: Writing) -> None:
        self._stopwatch.stop()
        entry_bytes = list(writing.unacknowledged.values())
        writing.unacknowledged.clear()
        self.forget_if_idle(writing)
        writing.job.way.release(sum(entry_bytes), count=len(entry_bytes))

    def close_if_idle(self, now_s: float) -> None:
        super().close_if_idle(now_s)
        if not self.is_open:
            self.gate.shut()

    def _go_on(self) -> None:
        self.gate.open()

    def _fail_all(self, error: BookmenderError) -> None:
        self.gate.shut()
        self._is_full = False
        self._let_go()
        for writing in self._all_writings():
            writing.job.fail_writing(error)
            self._give_up(writing)
