"""Collects the changes of the ledger map that are not published yet, and cuts them into spans.

The promise of a checkpoint is that every change up to its id is in this checkpoint or in an earlier
one, or that a later checkpoint has a later version of the object. The steps that keep it:

1. Changes collect in ``_open``, each with the last published version of its ledger (``begin``) and
   its version now (``end``).
2. ``cut`` chooses the target T: the highest version in ``_open``, or a later zxid that this session
   has seen. ``_open`` becomes ``_closing``.
3. The publisher calls ``LedgerMapUpdater.wait_known``. ZooKeeper reports everything up to T before
   the reply or event that told T. So after ``wait_known`` all of it has been read.
4. Meanwhile reads go on. A version up to T belongs to ``_closing``, a later one to ``_open``. So a
   ledger that changes all the time does not delay the others: it is published with the next target,
   whatever happens meanwhile.
5. ``seal`` ends step 4. From here on, ``_closing`` does not change, and ``spans`` returns it.
6. ``acknowledge`` forgets a change when its checkpoint is committed, and never before. So no
   change is lost with a writer that fails.

Three kinds of versions need care:

- A deletion whose zxid is unknown: a scan found it, or ZooKeeper is older than 3.9. Its version is
  the pzxid of the nearest parent that exists, an upper bound that the publisher reads
  (``undated``, ``date``). It may belong to ``_open`` or ``_closing`` like any other version.
- A late change, whose version is not after the last checkpoint. It was hidden, for example by an
  ACL. It gets the target as its version, and ``_raised`` remembers that, because the mzxid of the
  ledger does not tell what was published. All late changes of one target have the same version, so
  no checkpoint could end between them. Therefore a target takes at most ``LATE_MAX`` of them; the
  others wait for the next targets.
- A ledger created and deleted between two checkpoints has a span from 0 to its deletion.

The last published version of a ledger that is not pending is its mzxid in the map. So the map is
the only index of published versions, and memory is needed only for pending changes, about 250 bytes
each. If ``open_max`` of them are open, the collector is *overfull*: it forgets the open changes and
takes no more. What is being closed can still be committed. Then the publisher compares the map with
the log again.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from heapq import heapify, heappop, heappush, merge
from itertools import islice
from typing import Final, NamedTuple

from checkpoints.model import NO_CHECKPOINT, CheckpointId, Span, Version, ledger_key
from ledgers.store import UNTOLD, Stat

UNREAD: Final = -1
"""The fingerprint of a change that was found by comparison and not read yet."""
LATE_MAX = 8_000
"""Late changes of one target: about one entry of the log."""
SORTED_AT_ONCE = 20_000
"""Changes in one run of ``sealed_runs``: some milliseconds."""


class Change(NamedTuple):
    """A change of a ledger that is not published yet. ``fingerprint``: None for a deletion."""

    begin: Version
    end: Version
    fingerprint: int | None


def fingerprint_of(data: bytes) -> int:
    """Return 64 bits of a hash of the metadata's bytes."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")


UNREADABLE: Final = fingerprint_of(b"")
"""The fingerprint of metadata that ACLs hide."""


class ChangeCollector:
    """The pending changes: a ``LedgerMapObserver``. ``last_id``: of the last committed
    checkpoint."""

    def __init__(
        self, last_id: CheckpointId = NO_CHECKPOINT, *, open_max: int = sys.maxsize
    ) -> None:
        """``open_max``: open changes that are kept, besides those that the comparison found and
        those that wait because of ``LATE_MAX``."""
        self.last_id = last_id
        self.is_overfull = False
        """True if open changes were forgotten. Then a new collector must be made by comparison."""
        self._open: dict[int, Change] = {}
        self._closing: dict[int, Change] = {}
        self._target: Version = 0
        """0: nothing is being closed."""
        self._is_sealed = False
        self._open_end: Version = 0
        """The highest version in ``_open``."""
        self._undated: dict[int, Version] = {}
        """Deleted ledgers whose deletion has no version yet, and their last published versions."""
        self._late: set[int] = set()
        """Ledgers in ``_closing`` whose version is the target, although their mzxid is lower."""
        self._raised: dict[int, Version] = {}
        """Published versions that differ from the mzxid in the map."""
        self._observed: set[int] = set()
        """Ledgers whose changes were observed before the comparison with the log ended, that is,
        before the first ``cut``."""
        self._is_comparing = True
        self._open_max = open_max
        self._allowed_count = sys.maxsize
        """Open and undated changes that are kept now. Unlimited during the comparison: it is
        short, and each change that it forgot would prevent its success."""
        self._unmapped: list[int] | None = None
        """A heap of the pending ledgers that the map may lack, while a base is written."""

    def __len__(self) -> int:
        """Return the number of pending changes."""
        return len(self._open) + len(self._closing) + len(self._undated)

    @property
    def has_open(self) -> bool:
        """True if a change waits for the next ``cut``."""
        return bool(self._open)

    @property
    def is_closing(self) -> bool:
        """True from ``cut`` until everything of it is committed."""
        return self._target > 0

    @property
    def is_late(self) -> bool:
        """True if no pending change is after the last checkpoint, so that ``cut`` needs another
        target."""
        return self._open_end <= self.last_id

    # --- What the map tells -------------------------------------------------------------------

    def ledger_read(self, ledger_id: int, *, before: int, stat: Stat, data: bytes) -> None:
        if stat.mzxid > before:
            if self._is_comparing:
                self._observed.add(ledger_id)
            if ledger_id in self._undated:  # it exists again
                before = self._undated.pop(ledger_id)
            else:
                before = self._published(ledger_id, before)
            self._note(ledger_id, before, stat.mzxid, fingerprint_of(data))
        else:
            self._fill(ledger_id, stat.mzxid, data)

    def ledger_removed(self, ledger_id: int, *, before: int, zxid: int) -> None:
        if self._is_comparing:
            self._observed.add(ledger_id)
        if self._unmapped is not None:
            heappush(self._unmapped, ledger_id)
        published = self._published(ledger_id, before)
        if zxid != UNTOLD:
            self._note(ledger_id, published, zxid, None)
        elif self._has_room():
            self._undated[ledger_id] = published

    def _published(self, ledger_id: int, mzxid: int) -> Version:
        """Return the published version of a ledger that is not pending."""
        return max(mzxid, self._raised.get(ledger_id, 0)) if self._raised else mzxid

    def _note(
        self, ledger_id: int, published: Version, version: Version, fingerprint: int | None
    ) -> None:
        closing = self._closing.get(ledger_id)
        if closing is not None:
            if version <= self._target and not self._is_sealed:
                self._closing[ledger_id] = Change(closing.begin, version, fingerprint)
                return
            published = NO_CHECKPOINT if closing.fingerprint is None else closing.end
        known = self._open.get(ledger_id)
        if known is None:
            # A late change waits for the next target, because of LATE_MAX.
            if self.last_id < version <= self._target and not self._is_sealed:
                self._closing[ledger_id] = Change(published, version, fingerprint)
                return
            if not self._has_room():
                return
        begin = published if known is None else known.begin
        self._open[ledger_id] = Change(begin, version, fingerprint)
        self._open_end = max(self._open_end, version)

    def _has_room(self) -> bool:
        """True if another change may be open. If there are too many, forget all that are open.

        ``_closing`` still gets every version up to the target, so each ledger that existed then
        is in the log. Its later versions and its deletion are found by the comparison.
        """
        if not self.is_overfull and len(self._open) + len(self._undated) >= self._allowed_count:
            self.is_overfull = True
            self._open, self._open_end, self._undated = {}, 0, {}
            self._raised, self._unmapped = {}, None
        return not self.is_overfull

    def _fill(self, ledger_id: int, version: Version, data: bytes) -> None:
        """Store the fingerprint of a change that was found by comparison."""
        for changes in (self._open, self._closing):
            change = changes.get(ledger_id)
            if change is not None and change.fingerprint == UNREAD and change.end == version:
                changes[ledger_id] = change._replace(fingerprint=fingerprint_of(data))

    # --- Comparison with the log --------------------------------------------------------------

    def compare(
        self,
        published: Mapping[int, Version],
        mapped: Mapping[int, Version],
        *,
        first: int = 0,
        stop: int | None = None,
    ) -> Collection[int]:
        """Note where the map differs from what was published. Return the ledgers to read again.

        ``published``, ``mapped``: all ledgers from ``first`` to before ``stop`` (None: to the end)
        by the log and by the map at this moment. Changes that were observed before this call get
        the published version as their begin; 0 for a ledger that was created unpublished and is
        deleted already. ``cut`` must not be called before all ranges are compared.
        """
        assert self._is_comparing
        observed = {i for i in self._observed if i >= first and (stop is None or i < stop)}
        self._observed -= observed
        unread = []
        # All other ledgers are as published. Nearly all are, so they are passed over in one step.
        differing = {ledger_id for ledger_id, _ in published.items() ^ mapped.items()}
        for ledger_id in differing | observed:
            begin, mzxid = published.get(ledger_id, NO_CHECKPOINT), mapped.get(ledger_id)
            if (change := self._open.get(ledger_id)) is not None:
                self._open[ledger_id] = change._replace(begin=begin)
            elif ledger_id in self._undated or mzxid is None:
                self._undated[ledger_id] = begin
            elif mzxid == 0:  # ACLs hide even its mzxid: the log alone knows what was published
                if begin:
                    self._raised[ledger_id] = begin
            elif mzxid != begin:
                self._open[ledger_id] = Change(begin, mzxid, UNREAD)
                self._open_end = max(self._open_end, mzxid)
                unread.append(ledger_id)
        return unread

    def end_comparison(self) -> None:
        """All ranges are compared: limit the open changes from here on."""
        self._is_comparing = False
        self._observed.clear()
        self._limit_open()

    def _limit_open(self) -> None:
        self._allowed_count = self._open_max + len(self._open) + len(self._undated)

    # --- Cutting ------------------------------------------------------------------------------

    def cut(self, *, target_least: Version = 0) -> Version:
        """Begin to close all changes that are open, and return the target: the id of their last
        checkpoint.

        ``target_least``: a zxid that this session has seen; it is needed if ``is_late``.
        """
        assert not self.is_closing
        assert self._open, "nothing to cut"
        self._is_comparing = False
        self._observed.clear()
        self._target = max(self._open_end, target_least)
        assert self._target > self.last_id, (self._target, self.last_id)
        self._closing, self._open, self._open_end = self._open, {}, 0
        if len(self._closing) > LATE_MAX:
            self._postpone_late()
        self._limit_open()
        return self._target

    def _postpone_late(self) -> None:
        """Leave late changes beyond ``LATE_MAX`` open."""
        late = [i for i, change in self._closing.items() if change.end <= self.last_id]
        for ledger_id in late[LATE_MAX:]:
            change = self._open[ledger_id] = self._closing.pop(ledger_id)
            self._open_end = max(self._open_end, change.end)

    def undated(self) -> Sequence[int]:
        """Return the deleted ledgers whose deletion has no version yet."""
        return list(self._undated)

    def date(self, ledger_id: int, version: Version) -> None:
        """Give the deletion of a ledger its version, an upper bound of its zxid. Does nothing if
        the ledger exists again."""
        published = self._undated.pop(ledger_id, None)
        if published is not None:
            self._note(ledger_id, published, version, None)

    def seal(self) -> None:
        """Fix what ``cut`` began to close. After a failure it may be called again."""
        assert self.is_closing
        self._is_sealed = True
        for ledger_id, change in self._closing.items():
            if change.end <= self.last_id:
                self._late.add(ledger_id)
                self._closing[ledger_id] = change._replace(end=self._target)
                following = self._open.get(ledger_id)
                if following is not None and following.begin == change.end:
                    self._open[ledger_id] = following._replace(begin=self._target)

    def sealed_runs(self) -> Iterator[Sequence[tuple[Version, int]]]:
        """Yield the ends and ledger ids of all sealed changes that are not committed yet, in sorted
        runs. A first checkpoint may have millions: the caller lets other tasks run in between."""
        assert self._is_sealed
        changes = iter(self._closing.items())
        while part := [(change.end, i) for i, change in islice(changes, SORTED_AT_ONCE)]:
            part.sort()
            yield part

    def spans(self, runs: Iterable[Sequence[tuple[Version, int]]]) -> Iterator[Span]:
        """Yield the spans of these runs by ascending end. They may be committed meanwhile."""
        for _, ledger_id in merge(*runs):
            begin, end, fingerprint = self._closing[ledger_id]
            yield Span(
                ledger_key(ledger_id),
                begin,
                end,
                UNREADABLE if fingerprint == UNREAD else fingerprint,
            )

    @property
    def target(self) -> CheckpointId:
        """The id of the last checkpoint that is being closed."""
        return self._target

    def acknowledge(
        self, checkpoint_id: CheckpointId, ledger_ids: Collection[int] | None = None
    ) -> None:
        """Forget the changes that this checkpoint and earlier ones contain: they are committed.

        ``ledger_ids``: the ledgers in the checkpoint, if all earlier ones were acknowledged. Saves
        a search.
        """
        assert checkpoint_id >= self.last_id, (checkpoint_id, self.last_id)
        if checkpoint_id == self.last_id:
            return
        self.last_id = checkpoint_id
        if ledger_ids is not None:
            done = list(ledger_ids)
        elif checkpoint_id < self._target:
            done = [i for i, change in self._closing.items() if change.end <= checkpoint_id]
        else:
            done = list(self._closing)
        for ledger_id in done:
            change = self._closing.pop(ledger_id)
            if ledger_id in self._late and change.fingerprint is not None:
                self._raised[ledger_id] = change.end
            else:
                self._raised.pop(ledger_id, None)
            if ledger_id in self._undated:  # deleted again meanwhile
                is_deleted = change.fingerprint is None
                self._undated[ledger_id] = NO_CHECKPOINT if is_deleted else change.end
        if checkpoint_id >= self._target:
            self._target, self._is_sealed = 0, False
            self._late.clear()

    def published_version(self, ledger_id: int, mzxid: Version) -> Version:
        """Return the last published version of a ledger that the map has, with this mzxid; 0 if it
        was never published."""
        change = self._closing.get(ledger_id) or self._open.get(ledger_id)
        return self._published(ledger_id, mzxid) if change is None else change.begin

    def begin_base(self) -> None:
        """Prepare for ``published_between``, until ``end_base``."""
        self._unmapped = [
            ledger_id
            for changes in (self._open, self._closing)
            for ledger_id, change in changes.items()
            if change.fingerprint is None
        ]
        self._unmapped += self._undated
        heapify(self._unmapped)

    def end_base(self) -> None:
        self._unmapped = None

    def published_between(
        self, mapped: Mapping[int, Version], first: int, stop: int | None
    ) -> dict[int, Version]:
        """Return the published versions of all ledgers in a range of ids, in the order of ids.
        ``mapped``: the mzxids of this range in the map, at this moment. The ranges of a base
        ascend.

        Deleted ledgers whose deletion is not published yet are included. Otherwise a base would
        lack them, and the next leader would never learn that their deletion must be published.
        """
        versions = {
            ledger_id: self.published_version(ledger_id, mzxid)
            for ledger_id, mzxid in mapped.items()
        }
        unmapped = self._unmapped or []
        while unmapped and (stop is None or unmapped[0] < stop):
            ledger_id = heappop(unmapped)
            if ledger_id >= first and ledger_id not in mapped:
                versions[ledger_id] = self._published_deleted(ledger_id)
        return {i: version for i, version in sorted(versions.items()) if version}

    def _published_deleted(self, ledger_id: int) -> Version:
        """Return the published version of a ledger that the map lacks; 0 if its deletion is
        published."""
        # Of two changes, the closing one is published first.
        change = self._closing.get(ledger_id) or self._open.get(ledger_id)
        return self._undated.get(ledger_id, 0) if change is None else change.begin
