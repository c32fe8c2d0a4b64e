"""Reading entries one by one, with one request each: any bookie, any entries.

A good reply becomes a recovery add in place, where its bytes lie in the receive buffer.
``SingleReadConnection._receive_run`` is the only loop that runs for every entry.
"""

from __future__ import annotations

from collections.abc import Sequence

from ledgers.bulk.frames import (
    READ_REPLY,
    READ_WORD,
    REPLY,
    REPLY_BYTES,
    REPLY_PACKET_BYTES,
    read_requests,
)
from ledgers.bulk.limiters import RateLimiter
from ledgers.bulk.source import Failure, ReadPart, ReplyRun, SourceConnection
from ledgers.bulk.target import WritePart
from ledgers.bulk.transfer import QUANTUM_COUNT, TransferState, has_first_claim
from ledgers.errors import CorruptionError

_NEVER = 1 << 62


class SingleReadConnection(SourceConnection["SingleReadPart"]):
    """Reads single entries from one bookie."""

    def make_part(
        self, state: TransferState, entry_ids: Sequence[int], write_part: WritePart | None
    ) -> SingleReadPart:
        return SingleReadPart(state, self, entry_ids, write_part)

    @property
    def rate_limit(self) -> RateLimiter:
        return self._flow.single_reads

    def _take_reads(self, count: int, entry_bytes: int) -> int:
        room_count = self._limit() - self._in_flight
        granted_count = self._budget.take(min(count, room_count), entry_bytes)
        if granted_count == 0:
            self._wait_in_line(entry_bytes)
        return granted_count

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

    def _receive_run(self, part: SingleReadPart, view: memoryview, position: int, end: int) -> int:
        """Process consecutive replies to one part. Returns the position after them.

        Turns good entries into recovery adds in place. Stops at anything that is not a whole reply
        to this part. ``consume`` decides what that is.
        """
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


class SingleReadPart(ReadPart):
    """Entries that are requested one by one. ``outstanding``: bytes of credit by entry id."""

    __slots__ = ()

    outstanding: dict[int, int]

    @property
    def has_pending(self) -> bool:
        return self._next < len(self._entry_ids)

    @property
    def outstanding_count(self) -> int:
        return len(self.outstanding)

    @property
    def outstanding_bytes(self) -> int:
        return sum(self.outstanding.values())

    @property
    def quantum(self) -> int:
        state = self.state
        count = state.quantum if state.has_measured_size else QUANTUM_COUNT - len(self.outstanding)
        pending_count = len(self._entry_ids) - self._next
        return count if count < pending_count else pending_count

    def requests_for(self, count: int) -> int:
        return count

    def ask(self, count: int, now_s: float) -> bytes:
        entry_ids = self._entry_ids[self._next : self._next + count]
        self._next += count
        if not self.outstanding:
            self.progress_s = now_s
        self.outstanding.update(dict.fromkeys(entry_ids, self.state.expected_bytes))
        return read_requests(self.ledger_id, entry_ids)

    def _drop_all(self) -> list[int]:
        entry_ids = [*self.outstanding, *self._entry_ids[self._next :]]
        self._next = len(self._entry_ids)
        return entry_ids
