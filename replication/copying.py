"""Copying the entries of one bookie index of one fragment to a target.

Just the entries that the index stored are copied, each from any good replica, in bulk. An entry that
one replica did not give is asked of the next (``assign``, a pure decision but for its notes). What
remains in the end is said entry by entry: without a copy, or unknown.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ledgers.bookies import Answer, Bookies, Transfer
from ledgers.entry import EntryDigest
from ledgers.errors import BookmenderError
from ledgers.fragments import Fragment
from ledgers.metadata import BookieId
from ledgers.striping import write_set
from replication.check import transfer_slices


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyJob:
    """Entries of a fragment that ``target`` is to hold at bookie index ``index``.

    ``target`` may be the bookie that stands there already (an in-place repair, rule S15).
    ``former``: bookies of the ledger's other ensembles, asked before an entry is called lost.
    """

    fragment: Fragment
    index: int
    target: BookieId
    entry_ids: Sequence[int]
    available: frozenset[BookieId]
    former: tuple[BookieId, ...] = ()
    entry_bytes_hint: int = 1024

    @property
    def runs(self) -> list[Sequence[int]]:
        """The entries in the order in which they are to be written.

        In place the ends come last, when all else is there. They are what a check asks for: once
        they were written, nothing would tell of the entries between them that are missing still.
        """
        if self.target != self.fragment.ensemble[self.index]:
            return [self.entry_ids]
        stored = self.fragment.entries_of(self.index)
        ends = {stored.first, stored.last}
        return [
            [entry_id for entry_id in self.entry_ids if entry_id not in ends],
            [entry_id for entry_id in self.entry_ids if entry_id in ends],
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOutcome:
    """``target_error``: the target failed, another is to be chosen. Entry ids in the sets ascend."""

    entry_count: int = 0
    entry_bytes: int = 0
    target_error: BookmenderError | None = None
    without_copy: tuple[int, ...] = ()
    """Entries of which no bookie that is there holds a good copy; one that is away still may."""
    unknown: tuple[int, ...] = ()
    """Entries for which a bookie that is there did not answer."""

    @property
    def is_complete(self) -> bool:
        return self.target_error is None and not self.without_copy and not self.unknown

    def then(self, later: "CopyOutcome") -> "CopyOutcome":
        """Of both together."""
        return CopyOutcome(
            entry_count=self.entry_count + later.entry_count,
            entry_bytes=self.entry_bytes + later.entry_bytes,
            target_error=self.target_error or later.target_error,
            without_copy=self.without_copy + later.without_copy,
            unknown=self.unknown + later.unknown,
        )


@dataclass(slots=True)
class Progress:
    """What became of the entries of one slice. ``tried``: per entry, who was asked, and the answer."""

    tried: dict[int, dict[BookieId, Answer]] = field(default_factory=dict)
    without_copy: list[int] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)


async def copy_index(job: CopyJob, *, bookies: Bookies, digest: EntryDigest) -> CopyOutcome:
    """Copy run by run, as far as each of them can be copied whole."""
    outcome = CopyOutcome()
    for run in job.runs:
        for entry_ids in transfer_slices([run]):
            outcome = outcome.then(await _copy_slice(entry_ids, job, bookies, digest))
            if outcome.target_error is not None:  # nothing is gained by going on
                return outcome
        if not outcome.is_complete:
            break
    return outcome


async def _copy_slice(
    entry_ids: Sequence[int], job: CopyJob, bookies: Bookies, digest: EntryDigest
) -> CopyOutcome:
    progress = Progress()
    entry_count = entry_bytes = 0
    while entry_ids and (reads := assign(entry_ids, progress, job)):
        result = await bookies.transfer(
            Transfer(
                ledger_id=job.fragment.ledger_id,
                digest=digest,
                reads=reads,
                target=job.target,
                entry_bytes_hint=job.entry_bytes_hint,
            )
        )
        entry_count += result.entry_count
        entry_bytes += result.entry_bytes
        if result.target_error is not None:
            return CopyOutcome(
                entry_count=entry_count, entry_bytes=entry_bytes, target_error=result.target_error
            )
        entry_ids = _note(result.failures, progress)
    return CopyOutcome(
        entry_count=entry_count,
        entry_bytes=entry_bytes,
        without_copy=tuple(progress.without_copy),
        unknown=tuple(progress.unknown),
    )


def assign(entry_ids: Iterable[int], progress: Progress, job: CopyJob) -> dict[BookieId, list[int]]:
    """Whom to ask for each entry next; entries that nobody is left to ask for are noted.

    Other replicas come first, spread evenly by entry id; then the bookie that is being replaced, if
    it is there (what is damaged on it need not be all of it); then former members of the ledger.
    """
    size = job.fragment.ensemble_size
    replicas = [_replicas(residue, job) for residue in range(size)]  # by entry id modulo E
    reads: dict[BookieId, list[int]] = {}
    for entry_id in entry_ids:
        tried = progress.tried.get(entry_id, _NOBODY)
        source = _next_source(entry_id, replicas[entry_id % size], tried, job)
        if source is not None:
            reads.setdefault(source, []).append(entry_id)
        elif Answer.UNKNOWN in tried.values():
            progress.unknown.append(entry_id)
        else:
            progress.without_copy.append(entry_id)
    return reads


_NOBODY: Mapping[BookieId, Answer] = {}


def _next_source(
    entry_id: int, replicas: Sequence[BookieId], tried: Collection[BookieId], job: CopyJob
) -> BookieId | None:
    if tried:
        replicas = [b for b in replicas if b not in tried]
    if replicas:
        # Entries that are E apart have the same write set: its bookies take turns at them.
        return replicas[entry_id // job.fragment.ensemble_size % len(replicas)]
    others = (job.fragment.ensemble[job.index], *job.former)
    return next(
        (b for b in others if b in job.available and b not in tried and b != job.target), None
    )


def _replicas(entry_id: int, job: CopyJob) -> list[BookieId]:
    """Who is there of the entry's write set, without the one that is being replaced or refilled."""
    fragment = job.fragment
    indexes = write_set(
        entry_id, ensemble_size=fragment.ensemble_size, write_quorum=fragment.write_quorum
    )
    bookies = (fragment.ensemble[index] for index in indexes if index != job.index)
    return [bookie for bookie in bookies if bookie in job.available]


def _note(failures: Mapping[BookieId, Mapping[int, Answer]], progress: Progress) -> list[int]:
    """Remember who failed to give what; returns the entries that are still to be had."""
    for bookie, answers in failures.items():
        for entry_id, answer in answers.items():
            progress.tried.setdefault(entry_id, {})[bookie] = answer
    return sorted({entry_id for answers in failures.values() for entry_id in answers})
