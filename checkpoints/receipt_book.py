"""The book of one client: which changes it was given, and which of them lack a receipt.

``ReceiptBook`` makes all decisions of the recovery: which checkpoints are complete, which versions
are subsumed by later ones, how far the low watermark may go, which receipts merge, and what was
missed. It has neither store nor clock nor tasks; ``recovery`` calls it.

Two tables hold what lacks a receipt, in arrays instead of Python objects: a client that is a
million changes behind needs 70 MB instead of 200.

- ``_Objects``: the latest version of each object. An earlier one is never needed again.
- ``_Checkpoints``: how many objects of each checkpoint lack a receipt. The version of an object
  lies within its checkpoint's range of zxids, so a bisection finds the checkpoint.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from checkpoints.errors import PositionUnknownError
from checkpoints.model import (
    Checkpoint,
    CheckpointId,
    CommittedVersion,
    Key,
    Span,
    SpanFilter,
    Version,
)
from checkpoints.receipts import Failure, RangeSet, ReceiptRange
from ledgers.errors import CorruptionError, NotSharedError

NEVER_S: Final = float("-inf")
_REBUILD_ROWS_MIN: Final = 1024
"""Smaller tables are not rebuilt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unstored:
    """The changes that the store does not have yet. Write them in the order of the fields."""

    low_watermark: CheckpointId | None
    """None if the stored one is up to date."""
    processed: tuple[tuple[Key, Version], ...]
    """Objects whose failure is to be deleted, because a receipt followed it. This makes room for
    what follows, in a store of limited size."""
    ranges: tuple[ReceiptRange, ...]
    """Receipts beyond the low watermark."""
    completed: tuple[CheckpointId, ...]
    """The checkpoints that the watermark and the ranges complete."""


class ReceiptBook:
    """The state of one client between its receipts and their store.

    Use: ``recover`` for each checkpoint of the past, latest first, then ``end_recovery`` once; from
    then on ``add`` for each new checkpoint, in ascending order. A new client skips the recovery.

    Invariants: every change up to ``low_watermark`` has a receipt, or a later version of the object
    is known; no object is offered at two versions.
    """

    def __init__(
        self,
        *,
        low_watermark: CheckpointId | None,
        receipts: Iterable[ReceiptRange] = (),
        failures: Iterable[Failure] = (),
        wanted: SpanFilter | None = None,
    ) -> None:
        """``low_watermark``: the stored one; None: the client is new. ``receipts``: the stored
        ones, merged. ``wanted``: None: all changes."""
        self.low_watermark = low_watermark
        self.last_id = low_watermark
        """The highest id that is known; None as long as a new client was given nothing."""
        self.failures = {each.key: each for each in failures}
        self.missed_count = 0
        """Number of objects that ``take_missed`` will return."""
        self._wanted = wanted
        self._has_receipt = low_watermark is not None
        self._is_lift_unconfirmed = False
        """True from a lift until the next receipt. Nothing is stored meanwhile, so a client that
        dies before it could handle the lift is told again."""
        self._stored_watermark = low_watermark
        self._stored = sorted(receipts)
        self._receipts = RangeSet(self._stored)
        self._objects = _Objects()
        self._checkpoints = _Checkpoints()
        self._cursor = 0
        """Rows of objects from here on are not offered, except those that ``add`` brought."""
        self._unstored_begins: set[Version] = set()
        self._completed: list[CheckpointId] = []
        self._processed: dict[Key, Version] = {}
        if low_watermark is not None:
            self._advance(low_watermark)

    @property
    def is_new(self) -> bool:
        """True before the first receipt of a client. Nothing is stored until then."""
        return not self._has_receipt

    @property
    def pending_count(self) -> int:
        """Number of objects that lack a receipt."""
        return self._objects.live_count

    # --- Recovery ---------------------------------------------------------------------------------

    def recover(self, checkpoint: Checkpoint) -> bool:
        """Add a checkpoint of the past; call it latest first. Returns False if neither this nor any
        earlier checkpoint is needed.

        Raises PositionUnknownError if a receipt ends within the checkpoint: then it is a receipt
        for other checkpoints with the same zxids.
        """
        assert self.low_watermark is not None
        if checkpoint.id <= self.low_watermark:
            return False
        assert self.last_id is not None
        self.last_id = max(self.last_id, checkpoint.id)
        begin = checkpoint.previous_id + 1
        if begin <= self.low_watermark:
            raise PositionUnknownError(low_watermark=self.low_watermark, checkpoint=checkpoint.id)
        is_receipted = self._is_receipted(begin, checkpoint.id)
        if not is_receipted:
            self._require_no_part(begin, checkpoint.id)
        spans = _checked(checkpoint)
        if self._wanted is not None:
            spans = list(filter(self._wanted, spans))
        # An object that has a row, even a settled one, has a later version: it subsumes this one.
        if is_receipted:
            self._objects.add_settled(spans)
            return True
        if self.failures:
            self._objects.add_settled(filter(self._has_failed, spans))
        open_count = self._objects.add_missed(spans)
        self.missed_count += open_count
        self._checkpoints.append(begin, checkpoint.id, open_count, NEVER_S, checkpoint.time_ms)
        return True

    def end_recovery(self, *, lift_to: CheckpointId | None = None) -> None:
        """End the recovery.

        ``lift_to``: nothing up to this id can be learnt any more, so the low watermark is lifted to
        it. It is lower than every recovered checkpoint.
        """
        self._checkpoints.reverse()
        if lift_to is not None:
            assert self.low_watermark is not None
            assert self.last_id is not None
            assert lift_to > self.low_watermark, (lift_to, self.low_watermark)
            self.last_id = max(self.last_id, lift_to)
            self._is_lift_unconfirmed = True
            self._advance(lift_to)
        for index in self._checkpoints.complete_indexes():
            self._complete(index)
        self._rebuild_if_sparse()
        self._cursor = len(self._objects)

    def _is_receipted(self, begin: Version, end: CheckpointId) -> bool:
        if not self._stored:
            return False
        index = bisect_right(self._stored, begin, key=lambda each: each.begin) - 1
        return index >= 0 and self._stored[index].end >= end

    def _require_no_part(self, begin: Version, end: CheckpointId) -> None:
        """Raise PositionUnknownError if there is a receipt for a part of a checkpoint."""
        index = bisect_right(self._stored, end, key=lambda each: each.begin) - 1
        if index >= 0 and self._stored[index].end >= begin:
            raise PositionUnknownError(receipt=self._stored[index], checkpoint=end)

    def _has_failed(self, span: Span) -> bool:
        failure = self.failures.get(span.key)
        return failure is not None and failure.version >= span.end

    # --- New checkpoints --------------------------------------------------------------------------

    def add(self, checkpoint: Checkpoint, *, now_s: float) -> Sequence[Span]:
        """Add a new checkpoint. Returns the changes to give to the client; empty for a repetition.

        Raises CorruptionError if a checkpoint between this and the last one is missing, or if the
        last one ended within this one. The next recovery finds out why.
        """
        if self.last_id is None:  # the first checkpoint of a new client
            self.low_watermark = self.last_id = checkpoint.previous_id
        assert self.low_watermark is not None
        if checkpoint.id <= self.last_id:
            return ()
        if checkpoint.previous_id != self.last_id:
            raise CorruptionError(
                "this checkpoint does not follow the last one",
                checkpoint_id=checkpoint.id,
                previous_id=checkpoint.previous_id,
                last_id=self.last_id,
            )
        begin = checkpoint.previous_id + 1
        spans = _checked(checkpoint)
        wanted = spans if self._wanted is None else list(filter(self._wanted, spans))
        self.last_id = checkpoint.id
        objects = self._objects
        if self._is_receipted(begin, checkpoint.id):  # by a process whose source was ahead of ours
            for span in wanted:
                row = objects.row_of(span.key)
                if row >= 0 and objects.versions[row]:
                    self._settle(row)
            return ()
        index = self._checkpoints.append(
            begin, checkpoint.id, len(wanted), now_s, checkpoint.time_ms
        )
        for span in wanted:
            row = objects.find_or_add(span.key)
            if objects.versions[row]:
                self._settle(row)  # the new version subsumes the one before
            objects.set(row, span)
        if not wanted:
            self._complete(index)
        self._rebuild_if_sparse()
        return wanted

    # --- Receipts ---------------------------------------------------------------------------------

    def submit(self, key: Key, version: Version) -> None:
        """Record that the client has processed the object up to this version.

        Does nothing if this version has a receipt already or is subsumed. Raises NotSharedError.
        """
        row = self._row_shared(key, version)
        self._has_receipt = True
        self._is_lift_unconfirmed = False
        if row >= 0 and self._objects.versions[row] == version:
            self._settle(row)
            self._rebuild_if_sparse()
        failure = self.failures.get(key)
        if failure is not None and failure.version <= version:
            del self.failures[key]
            self._processed[key] = version

    def failure_of(self, key: Key, version: Version, *, because: str, now_ms: int) -> Failure:
        """Return the negative receipt to store, before ``fail`` is called. Raises
        NotSharedError."""
        row = self._row_shared(key, version)
        before = self.failures.get(key)
        if row >= 0 and self._objects.versions[row] == version:
            is_deleted = self._objects.is_deleted(row)
        else:
            is_deleted = before is not None and before.version == version and before.is_deleted
        return Failure(
            key=key, version=version, because=because, time_ms=now_ms, is_deleted=is_deleted
        )

    def fail(self, failure: Failure) -> None:
        """Treat the object as processed, because its negative receipt is stored."""
        self.submit(failure.key, failure.version)
        self._processed.pop(failure.key, None)
        before = self.failures.get(failure.key)
        if before is None or before.version <= failure.version:
            self.failures[failure.key] = failure

    def withdraw(self, failure: Failure) -> None:
        """Delete the failure, which may be stored: the client gave up before it was certain."""
        if failure.key not in self.failures:
            self._processed[failure.key] = failure.version

    def pending_version(self, key: Key) -> Version | None:
        """Return the version of the object that lacks a receipt; None if there is none."""
        row = self._objects.row_of(key)
        return (self._objects.versions[row] or None) if row >= 0 else None

    def _row_shared(self, key: Key, version: Version) -> int:
        """Return the row of the object, -1 if it has none. Raises NotSharedError."""
        row = self._objects.row_of(key)
        pending = self._objects.versions[row] if row >= 0 else 0
        highest = pending or self.last_id
        if highest is None or version > highest:
            raise NotSharedError("no checkpoint had this version", key=key.hex(), version=version)
        return row

    def _settle(self, row: int) -> None:
        """The version in this row needs no receipt any more."""
        objects = self._objects
        index = self._checkpoints.index_of(objects.versions[row])
        self.missed_count -= objects.is_missed(row)
        objects.settle(row)
        self._checkpoints.open_counts[index] -= 1
        if self._checkpoints.open_counts[index] == 0:
            self._complete(index)

    def _complete(self, index: int) -> None:
        """Every object of the checkpoint has a receipt or a later version."""
        receipt = self._checkpoints.receipt(index)
        merged = self._receipts.add(receipt)
        self._completed.append(receipt.end)
        self._unstored_begins.add(merged.begin)
        assert self.low_watermark is not None
        if merged.begin == self.low_watermark + 1:
            self._receipts.remove(merged)
            self.low_watermark = merged.end

    def _advance(self, to: CheckpointId) -> None:
        """Raise the low watermark to ``to``, and on through the receipts that touch it."""
        for each in self._receipts:
            if each.begin > to + 1:
                break
            self._receipts.remove(each)
            to = max(to, each.end)
        self.low_watermark = to
        self.last_id = to if self.last_id is None else max(self.last_id, to)

    # --- The store --------------------------------------------------------------------------------

    def unstored(self) -> Unstored | None:
        """Return what the store lacks; None if it lacks nothing, if the client is still new, or if
        it has submitted no receipt since its watermark was lifted."""
        if self.is_new or self._is_lift_unconfirmed:
            if len(self._completed) > _REBUILD_ROWS_MIN:
                self._mark_stored(self._completed)  # no caller waits for them
            return None
        begins = self._unstored_begins
        ranges = tuple(
            each for begin in sorted(begins) if (each := self._receipts.beginning_at(begin))
        )
        if len(ranges) < len(begins):  # the others were merged, or the watermark passed them
            self._unstored_begins = {each.begin for each in ranges}
        is_stored = self.low_watermark == self._stored_watermark
        if is_stored and not ranges and not self._processed:
            return None
        return Unstored(
            low_watermark=None if is_stored else self.low_watermark,
            ranges=ranges,
            processed=tuple(self._processed.items()),
            completed=tuple(self._completed),
        )

    def mark_stored(self, written: Unstored) -> None:
        """Record that ``unstored()`` of some moments ago was written."""
        if written.low_watermark is not None:
            self._stored_watermark = written.low_watermark
        for each in written.ranges:
            if self._receipts.beginning_at(each.begin) == each:
                self._unstored_begins.discard(each.begin)
        for key, version in written.processed:
            if self._processed.get(key) == version:
                del self._processed[key]
        self._mark_stored(written.completed)

    def _mark_stored(self, completed: Sequence[CheckpointId]) -> None:
        """Drop the checkpoints that completed first."""
        for checkpoint_id in completed:
            self._checkpoints.mark_stored(checkpoint_id)
        del self._completed[: len(completed)]
        self._checkpoints.rebuild_if_sparse()

    def unstored_checkpoint(self, version: Version) -> CheckpointId | None:
        """Return the checkpoint of this version if its receipt is not stored yet, else None."""
        index = self._checkpoints.index_of(version)
        return self._checkpoints.ids[index] if index >= 0 else None

    def is_deletion_unstored(self, key: Key) -> bool:
        """Return True if a failure of this object is to be deleted from the store."""
        return key in self._processed

    # --- What was missed --------------------------------------------------------------------------

    def take_missed(self, *, now_s: float) -> CommittedVersion | None:
        """Return one more object that was missed, oldest first; None if there is no more."""
        taken = self._objects.take_missed(self._cursor)
        if taken is None:
            self._cursor = 0
            return None
        self._cursor, key, version, fingerprint = taken
        self.missed_count -= 1
        checkpoints = self._checkpoints
        index = checkpoints.index_of(version)
        checkpoints.shared_s[index] = now_s
        is_deleted = fingerprint is None
        return CommittedVersion(key, version, fingerprint, is_deleted, checkpoints.times_ms[index])

    def offer_again(self, *, shared_until_s: float) -> None:
        """Call missed what was given to the client until this time and lacks a receipt."""
        objects, checkpoints = self._objects, self._checkpoints
        for row, version in enumerate(objects.versions):
            if not version or objects.is_missed(row):
                continue
            if checkpoints.shared_s[checkpoints.index_of(version)] <= shared_until_s:
                objects.mark_missed(row)
                self.missed_count += 1
        self._cursor = len(objects)

    def miss(self, spans: Iterable[Span]) -> None:
        """Call these changes missed: they were not given to the client."""
        objects = self._objects
        for span in spans:
            row = objects.row_of(span.key)
            if row >= 0 and objects.versions[row] == span.end and not objects.is_missed(row):
                objects.mark_missed(row)
                self.missed_count += 1
        self._cursor = len(objects)

    def _rebuild_if_sparse(self) -> None:
        objects = self._objects
        row_count = len(objects.versions)
        if row_count > _REBUILD_ROWS_MIN and 4 * objects.live_count < row_count:
            self._objects = objects.rebuilt()
            self._cursor = len(self._objects)  # rows that were offered carry no mark


def _checked(checkpoint: Checkpoint) -> Sequence[Span]:
    """Return the spans. Raises CorruptionError if one lies beyond the checkpoint."""
    for span in checkpoint.spans:
        if span.end > checkpoint.id:
            raise CorruptionError(
                "a change lies beyond its checkpoint",
                checkpoint_id=checkpoint.id,
                version=span.end,
            )
    return checkpoint.spans


_IS_DELETED: Final = 1
_IS_MISSED: Final = 2
_SLOTS_MIN: Final = 64
_SLOTS_FEW: Final = 1 << 20
"""Slots of 4 MB."""


class _Objects:
    """A hash table from keys to versions, in the order in which the keys were added.

    A row whose version is 0 is settled: nothing of the object lacks a receipt. Settled rows are
    dropped when the table is rebuilt. A row takes about 35 bytes.

    A client that was away long fills and empties it with millions of rows. So the loops that every
    row passes are written out, without calls.
    """

    def __init__(self) -> None:
        self.versions = array("Q")
        self.live_count = 0
        self._fingerprints = array("Q")
        self._flags = bytearray()
        self._keys = bytearray()
        self._key_ends = array("Q", (0,))
        """Where the key of each row ends, after the begin of the first one."""
        self._slots = array("I", bytes(4 * _SLOTS_MIN))
        """Row + 1, or 0 for an empty slot. Open addressing; at most half of the slots are used."""

    def __len__(self) -> int:
        return len(self.versions)

    def row_of(self, key: Key) -> int:
        """Return the row of the key, or -1."""
        slots, keys, ends = self._slots, self._keys, self._key_ends
        mask = len(slots) - 1
        slot = hash(key) & mask
        while row := slots[slot]:
            if keys[ends[row - 1] : ends[row]] == key:
                return row - 1
            slot = (slot + 1) & mask
        return -1

    def find_or_add(self, key: Key) -> int:
        """Return the row of the key; a new, settled one if it has none."""
        slots, keys, ends = self._slots, self._keys, self._key_ends
        mask = len(slots) - 1
        slot = hash(key) & mask
        while row := slots[slot]:
            if keys[ends[row - 1] : ends[row]] == key:
                return row - 1
            slot = (slot + 1) & mask
        keys += key
        ends.append(len(keys))
        self.versions.append(0)
        self._fingerprints.append(0)
        self._flags.append(0)
        slots[slot] = row = len(self.versions)
        if 2 * row >= len(slots):
            self._grow()
        return row - 1

    def add_settled(self, spans: Iterable[Span]) -> None:
        """Add settled rows for the objects that have none."""
        self._add((span.key, 0, 0, 0) for span in spans)

    def add_missed(self, spans: Iterable[Span]) -> int:
        """Add missed versions of the objects that have no row, and return their number."""
        count = self._add(
            (
                span.key,
                span.end,
                span.fingerprint or 0,
                _IS_MISSED if span.fingerprint is not None else _IS_MISSED | _IS_DELETED,
            )
            for span in spans
        )
        self.live_count += count
        return count

    def _add(self, rows: Iterable[tuple[Key, Version, int, int]]) -> int:
        """Add key, version, fingerprint and flags for each key that has no row. Return the number
        of new rows."""
        keys, ends, versions = self._keys, self._key_ends, self.versions
        fingerprints, flags = self._fingerprints, self._flags
        slots, before = self._slots, len(versions)
        mask, room = len(slots) - 1, len(slots) // 2 - before
        for key, version, fingerprint, flag in rows:
            slot = hash(key) & mask
            while row := slots[slot]:
                if keys[ends[row - 1] : ends[row]] == key:
                    break
                slot = (slot + 1) & mask
            else:
                keys += key
                ends.append(len(keys))
                versions.append(version)
                fingerprints.append(fingerprint)
                flags.append(flag)
                slots[slot] = len(versions)
                room -= 1
                if room <= 0:
                    self._grow()
                    slots = self._slots
                    mask, room = len(slots) - 1, len(slots) // 2 - len(versions)
        return len(versions) - before

    def _grow(self) -> None:
        """Double the slots, or more while they are few: each growth costs as much as adding all
        rows."""
        factor = 8 if len(self._slots) <= _SLOTS_FEW else 2
        self._slots = slots = array("I", bytes(4 * factor * len(self._slots)))
        keys, mask, begin = bytes(self._keys), len(slots) - 1, 0
        for row, end in enumerate(self._key_ends):
            if row:
                slot = hash(keys[begin:end]) & mask
                while slots[slot]:
                    slot = (slot + 1) & mask
                slots[slot] = row
            begin = end

    def key(self, row: int) -> Key:
        return bytes(self._keys[self._key_ends[row] : self._key_ends[row + 1]])

    def set(self, row: int, span: Span) -> None:
        """Put a version into a settled row."""
        assert not self.versions[row]
        self.versions[row] = span.end
        self._fingerprints[row] = span.fingerprint or 0
        self._flags[row] = _IS_DELETED * (span.fingerprint is None)
        self.live_count += 1

    def settle(self, row: int) -> None:
        self.versions[row] = 0
        self._flags[row] = 0
        self.live_count -= 1

    def is_deleted(self, row: int) -> bool:
        return bool(self._flags[row] & _IS_DELETED)

    def is_missed(self, row: int) -> bool:
        return bool(self._flags[row] & _IS_MISSED)

    def take_missed(self, before: int) -> tuple[int, Key, Version, int | None] | None:
        """Take the mark off the last missed row before this one. Return the row, its key, version
        and fingerprint, or None."""
        flags, row = self._flags, before - 1
        while row >= 0 and not flags[row] & _IS_MISSED:
            row -= 1
        if row < 0:
            return None
        is_deleted = flags[row] & _IS_DELETED
        flags[row] = is_deleted
        ends = self._key_ends
        key = bytes(self._keys[ends[row] : ends[row + 1]])
        return row, key, self.versions[row], None if is_deleted else self._fingerprints[row]

    def mark_missed(self, row: int) -> None:
        self._flags[row] |= _IS_MISSED

    def rebuilt(self) -> _Objects:
        """Return the table without settled rows."""
        new = _Objects()
        new._add(
            (self.key(row), version, self._fingerprints[row], self._flags[row])
            for row, version in enumerate(self.versions)
            if version
        )
        new.live_count = self.live_count
        return new


_STORED: Final = -1


class _Checkpoints:
    """The checkpoints whose receipts are not stored, ascending. Indexes hold until a change of the
    table; columns are parallel."""

    def __init__(self) -> None:
        self.ids = array("Q")
        self.shared_s = array("d")
        """When an object of the checkpoint was last given to the client; monotonic seconds."""
        self.open_counts = array("q")
        """Number of objects that lack a receipt; 0: complete."""
        self.times_ms = array("Q")
        self._begins = array("Q")
        self._stored_count = 0

    def append(
        self, begin: Version, end: CheckpointId, open_count: int, shared_s: float, time_ms: int
    ) -> int:
        """Add a checkpoint, and return its index."""
        self.ids.append(end)
        self.shared_s.append(shared_s)
        self.open_counts.append(open_count)
        self.times_ms.append(time_ms)
        self._begins.append(begin)
        return len(self.ids) - 1

    def reverse(self) -> None:
        for column in (self.ids, self.shared_s, self.open_counts, self.times_ms, self._begins):
            column.reverse()

    def index_of(self, version: Version) -> int:
        """Return the index of the checkpoint that has this version; -1 if its receipt is stored."""
        index = bisect_left(self.ids, version)
        if index == len(self.ids) or self._begins[index] > version:
            return -1
        return -1 if self.open_counts[index] == _STORED else index

    def receipt(self, index: int) -> ReceiptRange:
        return ReceiptRange(self._begins[index], self.ids[index])

    def complete_indexes(self) -> list[int]:
        return [index for index, count in enumerate(self.open_counts) if count == 0]

    def mark_stored(self, checkpoint_id: CheckpointId) -> None:
        index = bisect_left(self.ids, checkpoint_id)
        assert self.open_counts[index] == 0, checkpoint_id
        self.open_counts[index] = _STORED
        self._stored_count += 1

    def rebuild_if_sparse(self) -> None:
        """Drop stored checkpoints when they are more than half."""
        if self._stored_count <= max(len(self.ids) // 2, _REBUILD_ROWS_MIN):
            return
        kept = [index for index, count in enumerate(self.open_counts) if count != _STORED]
        self.ids = array("Q", (self.ids[index] for index in kept))
        self.shared_s = array("d", (self.shared_s[index] for index in kept))
        self.open_counts = array("q", (self.open_counts[index] for index in kept))
        self.times_ms = array("Q", (self.times_ms[index] for index in kept))
        self._begins = array("Q", (self._begins[index] for index in kept))
        self._stored_count = 0
