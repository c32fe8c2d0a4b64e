"""Writing to one bookie: which entries of a transfer are unacknowledged, and the replies to adds.

``TargetConnection`` sends adds as a source hands them over, limits how many are in flight, and
fails what is not acknowledged in time. ``WritePart`` is the part of one transfer that is written
here. Nothing is retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from ledgers.bulk.connection import LATE_REPLY_TIMEOUTS, BulkConnection, BulkProtocol, SharedState
from ledgers.bulk.flow_control import BookieFlow, ReplyTimes
from ledgers.bulk.frames import (
    ADD_REPLY_WORD,
    REPLY,
    REPLY_BYTES,
    REPLY_PACKET_BYTES,
    recovery_add_prefix,
)
from ledgers.bulk.limiters import BookieWindow, WindowLimiter
from ledgers.bulk.transfer import TransferPart, TransferState, has_first_claim
from ledgers.errors import (
    BookmenderError,
    BusyError,
    CorruptionError,
    LocalLimitError,
    NoAnswerError,
    UnavailableError,
)
from ledgers.model import BookieId
from ledgers.wire.messages import Status

WINDOW_START = 4
"""A target's first window has room for what several slow sources hold of it (``BookieWindow``)."""


class PausableSource(Protocol):
    """A connection whose received entries become adds. Its reception can be paused."""

    def pause_for(self, target: TargetConnection) -> None: ...

    def resume_for(self, target: TargetConnection) -> None: ...


class TargetConnection(BulkConnection["WritePart"]):
    """Sends the adds of all transfers that write to one bookie. The window of ``limiter`` counts an
    entry from before it is requested until it is acknowledged, so it has room for all that is
    read."""

    def __init__(self, bookie: BookieId, shared: SharedState, flow: BookieFlow) -> None:
        super().__init__(bookie, shared, flow, ReplyTimes(cap=shared.writes_in_flight_max))
        self._window = BookieWindow(
            count_max=shared.writes_in_flight_max,
            bytes_max=shared.writes_bytes_max,
            start=WINDOW_START,
        )
        self.limiter = WindowLimiter(self._window, is_open=False)
        self._is_full = False
        self._paused_sources: dict[PausableSource, None] = {}
        self.apply_limit()

    # --- Sending -------------------------------------------------------------------------------

    def begin(self, part: WritePart) -> None:
        self._add(part)
        self.connect()

    def start_timing(self, part: WritePart) -> None:
        """Measure a reply time. Entries of the part are about to be sent."""
        self._stopwatch.start(part.unacknowledged, self._loop.time())

    def send(self, frames: Sequence[memoryview | bytes], source: PausableSource) -> None:
        """Send adds whose credit was taken. Copies the bytes, so the caller may reuse its buffer.

        Pauses the source while the send buffer is full. This back-pressure is needed because the
        window counts expected bytes:

        1. The window admits 1,000 entries that are expected to have 1 KB.
        2. The entries turn out to have 1 MB, or the bookie stops receiving.
        3. The send buffer would grow without bound while the source continues to deliver.
        """
        if self._transport is not None:  # else their transfers have failed meanwhile
            self._transport.write(b"".join(frames))
            if self._is_full:
                self._paused_sources[source] = None
                source.pause_for(self)

    def write_buffer_changed(self, protocol: BulkProtocol, *, is_full: bool) -> None:
        if protocol is self._protocol:  # else it was disconnected before
            self._is_full = is_full
            if not is_full:
                self._resume_sources()

    def _resume_sources(self) -> None:
        paused, self._paused_sources = self._paused_sources, {}
        for source in paused:
            source.resume_for(self)

    def opened(self, protocol: BulkProtocol, transport: asyncio.Transport) -> None:
        super().opened(protocol, transport)
        transport.set_write_buffer_limits(high=self._shared.writes_bytes_max)

    # --- Replies -------------------------------------------------------------------------------

    def consume(self, view: memoryview, end: int) -> int:
        position, end = 0, end - end % REPLY_BYTES
        while position < end:
            length, word, _, ledger_id, entry_id = REPLY.unpack_from(view, position)
            if length != REPLY_PACKET_BYTES or word != ADD_REPLY_WORD:
                raise CorruptionError("not a reply to an add", bookie=self.bookie)
            parts = self._parts.get(ledger_id, ())
            part = next((p for p in parts if entry_id in p.unacknowledged), None)
            if part is None:
                self._ignore_unrequested()
                position += REPLY_BYTES
            else:
                # If several parts wait for this entry, the reply belongs to the first of them.
                run_end = end if has_first_claim(parts, part) else position + REPLY_BYTES
                position = self._acknowledge(part, view[:run_end], position)
        now_s = self._loop.time()
        reply_s = self._stopwatch.read(now_s)
        if reply_s is not None:
            self._window.note_reply_time(reply_s)
            is_limiting = self.limiter.is_limiting
            self._reply_times.note_reply(reply_s, is_limiting=is_limiting, now_s=now_s)
            self.apply_limit()
        return end

    def _acknowledge(self, part: WritePart, view: memoryview, position: int) -> int:
        """Process consecutive replies to one part. Returns the position after them."""
        pop, own_ledger_id = part.unacknowledged.pop, part.ledger_id
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
        self._is_proven = True
        self._unrequested_count = 0
        part.progress_s = self._loop.time()
        self._window.note_replies(replied_bytes, count=count)
        part.state.limiters.release(replied_bytes, count=count)
        if not part.is_over:
            part.state.add_written(count - (refusal is not None), good_bytes)
            if refusal is not None:
                part.state.fail_write_part(refusal, entry_id)
        self.forget_if_idle(part)
        return position + count * REPLY_BYTES

    def apply_limit(self) -> None:
        """Set the window to the limit that applies to the bookie at present."""
        times = self._reply_times
        is_by_reply_times = self._flow.limits.is_by_reply_times
        self._window.limit_count(times.limit if is_by_reply_times else times.cap)

    def _refusal(self, code: int, ledger_id: int, entry_id: int) -> BookmenderError:
        error = Status.of_v2(code).error
        assert error is not None, code
        if error is BusyError:
            self._reply_times.note_busy()
            self.apply_limit()
        return error(
            "the target refused an entry",
            bookie=self.bookie,
            ledger_id=ledger_id,
            entry_id=entry_id,
            code=code,
        )

    # --- Ends ----------------------------------------------------------------------------------

    def forget_if_idle(self, part: WritePart) -> None:
        """Remove a part that is over and to which no replies may come."""
        if part.is_over and not part.unacknowledged:
            self._remove(part)

    def check_progress(self, now_s: float) -> None:
        """Fail parts that have waited too long: without a reply, or at a bookie that is too slow
        (``TransferPart.is_slow``). If all parts did, the connection is useless. Disconnect."""
        if self._transport is None:
            return
        waiting = [part for part in self._all_parts() if part.unacknowledged]
        self._window.adapt(sum(len(part.unacknowledged) for part in waiting), now_s)
        self.limiter.wake_if_half_free()
        timeout_s = self._shared.timeout_s
        slow = [part for part in waiting if part.is_slow(self._window, now_s, timeout_s)]
        stalled = [part for part in waiting if now_s - part.progress_s > timeout_s]
        self._note_received()
        if slow and len(slow) == len(waiting):
            self.disconnect(NoAnswerError("the target replies too slowly", bookie=self.bookie))
            return
        if self._checks_without_bytes and stalled and len(stalled) == len(waiting):
            self.disconnect(NoAnswerError("no reply from the target in time", bookie=self.bookie))
            return
        for part in slow:
            part.state.fail_write_part(
                NoAnswerError("the target replies too slowly", bookie=self.bookie)
            )
        error = UnavailableError("the target is slow to reply", bookie=self.bookie)
        for part in stalled:
            part.state.fail_write_part(error)
            if now_s - part.progress_s > LATE_REPLY_TIMEOUTS * self._shared.timeout_s:
                self._give_up(part)

    def _give_up(self, part: WritePart) -> None:
        """Stop waiting for replies to a part that is over."""
        self._stopwatch.stop()
        entry_bytes = list(part.unacknowledged.values())
        part.unacknowledged.clear()
        self.forget_if_idle(part)
        part.state.limiters.release(sum(entry_bytes), count=len(entry_bytes))

    def close_if_idle(self, now_s: float) -> None:
        super().close_if_idle(now_s)
        if not self.is_open:
            self.limiter.shut()

    def _on_connected(self) -> None:
        self.limiter.open()

    def _fail_all(self, error: BookmenderError) -> None:
        self.limiter.shut()
        self._window.reset()
        self._is_full = False
        self._resume_sources()
        for part in self._all_parts():
            if isinstance(error, LocalLimitError):
                part.state.not_asked.add(self.bookie)
            part.state.fail_write_part(error)
            self._give_up(part)


class WritePart(TransferPart):
    """The entries that one transfer writes to its target."""

    __slots__ = ("connection", "prefix", "unacknowledged")

    def __init__(self, state: TransferState, connection: TargetConnection) -> None:
        runs = [entry_ids for entry_ids in state.transfer.reads.values() if entry_ids]
        super().__init__(
            state,
            connection.bookie,
            first_id=min(entry_ids[0] for entry_ids in runs),
            last_id=max(entry_ids[-1] for entry_ids in runs),
            is_written=True,
        )
        self.connection = connection
        self.prefix = recovery_add_prefix(state.transfer.digest.master_key)
        self.unacknowledged: dict[int, int] = {}
        """Stored size by entry id."""

    @property
    def awaited(self) -> Mapping[int, int]:
        return self.unacknowledged

    def end(self) -> list[int]:
        if self.is_over:
            return []
        self.is_over = True
        entry_ids = list(self.unacknowledged)
        self.connection.forget_if_idle(self)
        return entry_ids
