"""Reading entries one by one: any bookie, any entries, and the bytes turned into adds where they
lie.

``_take_in`` is the one loop that runs for every entry; everything else runs per turn or per
arrival.
"""

from collections.abc import Sequence

from ledgers.bookie.bulk.frames import READ_REPLY, READ_WORD, REPLY, REPLY_BYTES, REPLY_PACKET_BYTES
from ledgers.bookie.bulk.gates import Pace
from ledgers.bookie.bulk.job import Job, Writing, is_first_choice
from ledgers.bookie.bulk.readings import Reading
from ledgers.bookie.bulk.source import Failure, SourceLane, Stretch
from ledgers.errors import CorruptionError

_NEVER = 1 << 62


class SingleReads(SourceLane[Reading]):
    """The connection to one bookie for reads of single entries."""

    def reading(self, job: Job, entry_ids: Sequence[int], writing: Writing | None) -> Reading:
        return Reading(job, self, entry_ids, writing)

    @property
    def pace(self) -> Pace:
        return self._flow.single_reads

    def _take_reads(self, count: int, entry_bytes: int) -> int:
        room_count = self._limit() - self._in_flight
        granted_count = self._budget.take(min(count, room_count), entry_bytes)
        if granted_count == 0:
            self._wait_in_line(entry_bytes)
        return granted_count

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
                    # Where several readings wait for an entry its reply is the first one's.
                    stretch_end = end if is_first_choice(readings, reading) else stop
                    position = self._take_in(reading, view, position, stretch_end)
        finally:
            self._finish_arrival()
        return position

    def _take_in(self, reading: Reading, view: memoryview, position: int, end: int) -> int:
        """Take the replies to one reading that stand in a row; the position after them.

        Good entries are made recovery adds where they lie. It stops at what is not a whole reply to
        this reading, and leaves the judgement of that to ``consume``.
        """
        job, writing = reading.job, reading.writing
        prefix = writing.prefix if writing is not None else b""
        unacknowledged = writing.unacknowledged if writing is not None else {}
        unpack, pop, check = READ_REPLY.unpack_from, reading.outstanding.pop, reading.check
        own_ledger_id = reading.ledger_id
        # A reading that is over waits for its replies, but wants nothing of them.
        length_min = _NEVER if reading.is_over else REPLY_PACKET_BYTES + job.entry_bytes_min
        good_count = good_lengths = largest_length = replied_count = taken_bytes_sum = 0
        failures: list[Failure] = []
        runs: list[memoryview | bytes] = []
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
            Stretch(
                request_count=replied_count,
                taken_bytes=taken_bytes_sum,
                good_count=good_count,
                good_bytes=good_lengths - good_count * REPLY_PACKET_BYTES,
                largest_bytes=largest_length - REPLY_PACKET_BYTES,
                frames=runs,
                failures=failures,
            ),
        )
        return position
