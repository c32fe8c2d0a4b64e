"""Whom to ask for the entries of a copy, from what was answered so far and how each source does."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from msgspec import Struct

from ledgers.bookies import Answer, Standing
from ledgers.metadata import BookieId
from ledgers.striping import write_set
from replication.copying.copy_job import CopyJob

STRETCH_ENTRIES = 64
"""So many of an index's entries in a row come from one source, where several have them: consecutive
ones can be read in batches."""
IDLE_BYTES = 64 * 1024
"""What an idle source counts for, so that a slow one is not preferred for being idle."""
REPLY_MIN_S = 0.001
"""Sources that reply sooner are equally good."""

History = tuple[tuple[BookieId, Answer], ...]
"""Who was asked for an entry, in this order, and the answer."""


@dataclass(slots=True)
class SliceProgress:
    """What became of the entries of one slice.

    ``tried``: the history of each entry that was asked for in vain. Entries that were refused alike
    share theirs.
    """

    tried: dict[int, History] = field(default_factory=dict)
    without_copy: list[int] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)

    def note(self, failures: Mapping[BookieId, Mapping[int, Answer]]) -> list[int]:
        """Remember who failed to give what; the entries that are still to be had."""
        shared: dict[History, History] = {}
        for bookie, answers in failures.items():
            for entry_id, answer in answers.items():
                history = (*self.tried.get(entry_id, ()), (bookie, answer))
                self.tried[entry_id] = shared.setdefault(history, history)
        return sorted({entry_id for answers in failures.values() for entry_id in answers})


class Reads(Struct, frozen=True, kw_only=True):
    """Whom to ask for which entries next; ascending ids."""

    entry_ids: Mapping[BookieId, Sequence[int]]
    have_alternatives: bool
    """Whether others may still be asked for every one of them."""


def assign(
    entry_ids: Sequence[int],
    progress: SliceProgress,
    job: CopyJob,
    standing: Callable[[BookieId], Standing],
) -> Reads:
    """Whom to ask for each entry next; entries that nobody is left to ask for are noted.

    Of several sources, stretch by stretch, the one that has the least before it; one that failed
    lately only where there is no other.
    """
    loads = _Loads(standing, entry_bytes=job.entry_bytes_hint)
    reads: dict[BookieId, list[Sequence[int]]] = {}
    have_alternatives = True
    to_ask: list[tuple[Sequence[BookieId], Sequence[int]]] = []
    for (residue, history), ids in _groups(entry_ids, progress, job).items():
        sources, is_last_chance = _sources(residue, history, job)
        if sources:
            to_ask.append((sources, ids))
            have_alternatives &= not is_last_chance
        else:
            unanswered = any(answer in _PROVES_NOTHING for _, answer in history)
            (progress.unknown if unanswered else progress.without_copy).extend(ids)
    for start in range(0, len(entry_ids), STRETCH_ENTRIES):
        for sources, ids in to_ask:  # in turn, so that loads are even over all of them
            if stretch := ids[start : start + STRETCH_ENTRIES]:
                source = loads.take(sources, len(stretch))
                reads.setdefault(source, []).append(stretch)
    return Reads(
        entry_ids={source: _joined(stretches) for source, stretches in reads.items()},
        have_alternatives=have_alternatives,
    )


def _joined(stretches: Sequence[Sequence[int]]) -> Sequence[int]:
    """Their ids, ascending. Those of one stretch do already, and small ledgers have no more."""
    if len(stretches) == 1:
        return stretches[0]
    return array("q", sorted(chain.from_iterable(stretches)))


_PROVES_NOTHING = frozenset({Answer.UNKNOWN, Answer.UNREADABLE})
"""Where a bookie answered so, it may have the entry (rule S5)."""


def _groups(
    entry_ids: Sequence[int], progress: SliceProgress, job: CopyJob
) -> Mapping[tuple[int, History], Sequence[int]]:
    """The entries by what decides whom they may be asked of: their write set, and who was asked.

    Entries that are E apart have the same write set; where E = W all have.
    """
    size = job.fragment.ensemble_size
    write_sets = 1 if size == job.fragment.write_quorum else size
    if write_sets == 1 and not progress.tried:
        return {(0, ()): entry_ids}
    groups: dict[tuple[int, History], array[int]] = {}
    for entry_id in entry_ids:
        key = (entry_id % write_sets, progress.tried.get(entry_id, ()))
        groups.setdefault(key, array("q")).append(entry_id)
    return groups


def _sources(entry_id: int, history: History, job: CopyJob) -> tuple[Sequence[BookieId], bool]:
    """Who may be asked for it now, and whether nobody else is left after that.

    Other replicas come first; then the bookie that is being replaced, if it is there (what is
    damaged on it need not be all of it); then former members of the ledger; and at last, once more,
    the first one that did not answer: it was not given much time.
    """
    tried = {bookie for bookie, _ in history}
    replicas = [bookie for bookie in _replicas(entry_id, job) if bookie not in tried]
    others = [
        bookie
        for bookie in (job.fragment.ensemble[job.index], *job.former)
        if bookie in job.available and bookie not in tried and bookie != job.target
    ]
    if replicas:
        turn = job.fragment.ledger_id % len(replicas)
        return [*replicas[turn:], *replicas[:turn]], len(replicas) + len(others) == 1
    if others:
        return others[:1], len(others) == 1
    silent = [bookie for bookie, answer in history if answer is Answer.UNKNOWN]
    is_first_time = len(history) == len(tried) > 1
    return (silent[:1] if is_first_time else []), True


class _Loads:
    """What each source has before it, with what is being assigned to it now."""

    def __init__(self, standing: Callable[[BookieId], Standing], *, entry_bytes: int) -> None:
        self._standing = standing
        self._entry_bytes = entry_bytes
        self._known: dict[BookieId, Standing] = {}
        self._assigned_bytes: dict[BookieId, int] = {}

    def take(self, sources: Sequence[BookieId], count: int) -> BookieId:
        """The best of them, which is to be asked for that many entries; the first among equals."""
        source = min(sources, key=self._load) if len(sources) > 1 else sources[0]
        self._assigned_bytes[source] = self._assigned_to(source) + count * self._entry_bytes
        return source

    def _load(self, bookie: BookieId) -> tuple[bool, float]:
        if bookie not in self._known:
            self._known[bookie] = self._standing(bookie)
        standing = self._known[bookie]
        waiting_bytes = standing.waiting_bytes + self._assigned_to(bookie) + IDLE_BYTES
        return standing.is_ailing, waiting_bytes * max(standing.reply_s, REPLY_MIN_S)

    def _assigned_to(self, bookie: BookieId) -> int:
        return self._assigned_bytes.get(bookie, 0)


def _replicas(entry_id: int, job: CopyJob) -> list[BookieId]:
    """Who is there of the entry's write set, without the one that is being replaced or refilled."""
    fragment = job.fragment
    indexes = write_set(
        entry_id, ensemble_size=fragment.ensemble_size, write_quorum=fragment.write_quorum
    )
    bookies = (fragment.ensemble[index] for index in indexes if index != job.index)
    return [bookie for bookie in bookies if bookie in job.available]
