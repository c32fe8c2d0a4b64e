"""Reads one ledger's entries from its bookies in bulk, until each answer is reliable.

A read error counts when the bookie gave it twice. An entry that a bookie left unanswered while it
answered for others is requested again after a pause: the bookie may have been busy. A bookie that
answers for nothing is silent, and is not asked again during this look. An explicit "no" is certain;
the run's second look confirms it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from ledgers.bookies import TRANSFER_ENTRIES_MAX, Answer, Bookies, Transfer, TransferResult
from ledgers.clock import Clock
from ledgers.entry import EntryDigest
from ledgers.fingerprints import NO_FINGERPRINT, Fingerprints
from ledgers.metadata import BookieId
from replication.planning.questions import Refused, transfer_slices

AGAIN_MAX = 3
"""Number of repeated requests for unreliable answers, ``AGAIN_AFTER_S`` apart."""
AGAIN_AFTER_S = 0.5

Reads = Mapping[BookieId, Sequence[int]]
"""Ascending entry ids to read, by bookie."""
Errors = Counter[tuple[BookieId, int]]
"""Number of read errors, by bookie and entry."""


@dataclass(slots=True)
class Answers:
    """The answers to one request. ``refused`` has only bookies that did not give everything; the
    ``fingerprints`` are of the good copies."""

    refused: dict[BookieId, Refused] = field(default_factory=dict)
    fingerprints: Mapping[BookieId, Fingerprints] = field(default_factory=dict)


class LedgerReads:
    """The reads of one look at one ledger, with their totals."""

    def __init__(
        self,
        ledger_id: int,
        *,
        bookies: Bookies,
        clock: Clock,
        digest: EntryDigest,
        entry_bytes: int,
    ) -> None:
        """``entry_bytes``: a guess at the stored size of an entry."""
        self._ledger_id = ledger_id
        self._bookies = bookies
        self._clock = clock
        self._digest = digest
        self._entry_bytes = entry_bytes
        self.silent: set[BookieId] = set()
        """Bookies that answered no request, or stopped answering."""
        self.entry_count = 0
        """Good entries; an entry that was read twice counts twice."""
        self.byte_count = 0
        self.mismatch_count = 0

    async def ask_runs(self, asked: Mapping[BookieId, Sequence[Sequence[int]]]) -> Answers:
        """Read ascending, disjoint runs of entries, of any number."""
        whole = Answers()
        slices = (transfer_slices(runs, sharing=len(asked)) for runs in asked.values())
        for parts in zip_longest(*slices, fillvalue=()):
            answers = await self.ask(dict(zip(asked, parts, strict=True)))
            for bookie, refused in answers.refused.items():
                whole.refused.setdefault(bookie, Refused()).extend(refused)
        return whole

    async def ask(self, reads: Reads, *, compares: bool = False) -> Answers:
        """Read these entries, ``TRANSFER_ENTRIES_MAX`` at most. ``compares``: True to get
        fingerprints; the entry ids should be close together then."""
        reads = {b: ids for b, ids in reads.items() if ids and b not in self.silent}
        if not reads:
            return Answers()
        assert sum(map(len, reads.values())) <= TRANSFER_ENTRIES_MAX, self._ledger_id
        result = await self._transfer(reads, compares)
        failures = {bookie: dict(answers) for bookie, answers in result.failures.items() if answers}
        if failures:
            await self._ask_again(reads, failures, result.fingerprints)
        answers = Answers(fingerprints=result.fingerprints)
        for bookie, kept in failures.items():
            if _answered_nothing(reads[bookie], kept):
                self.silent.add(bookie)
            elif kept:
                refused = answers.refused[bookie] = Refused()
                refused.add(kept)
                self.mismatch_count += len(refused.mismatched)
        return answers

    async def _ask_again(
        self,
        reads: Reads,
        failures: dict[BookieId, dict[int, Answer]],
        fingerprints: Mapping[BookieId, Fingerprints],
    ) -> None:
        """Repeat failed reads until each entry is given, or its failure is certain. Changes
        ``failures`` and ``fingerprints``."""
        errors = Counter(_unreadable(failures))
        for _ in range(AGAIN_MAX):
            again = self._still_open(reads, failures, errors)
            if not again:
                break
            await self._clock.sleep(AGAIN_AFTER_S)
            result = await self._transfer(again, bool(fingerprints))
            errors.update(_unreadable(result.failures))
            for bookie, entry_ids in again.items():
                now = result.failures.get(bookie, {})
                failures[bookie].update(now)
                for given in set(entry_ids).difference(now):
                    del failures[bookie][given]
                if bookie in result.fingerprints:
                    _complete(fingerprints[bookie], result.fingerprints[bookie], entry_ids)
        for bookie, answers in failures.items():
            for entry_id in _open_entries(bookie, answers, errors):
                answers[entry_id] = Answer.UNKNOWN

    def _still_open(
        self, reads: Reads, failures: Mapping[BookieId, Mapping[int, Answer]], errors: Errors
    ) -> dict[BookieId, list[int]]:
        """Return the entries whose answers prove nothing yet, for bookies that answered at least
        once."""
        still_open = {
            bookie: _open_entries(bookie, answers, errors)
            for bookie, answers in failures.items()
            if bookie not in self.silent and not _answered_nothing(reads[bookie], answers)
        }
        return {bookie: entry_ids for bookie, entry_ids in still_open.items() if entry_ids}

    async def _transfer(self, reads: Reads, compares: bool) -> TransferResult:
        result = await self._bookies.transfer(
            Transfer(
                ledger_id=self._ledger_id,
                digest=self._digest,
                reads=reads,
                entry_bytes_hint=self._entry_bytes,
                takes_fingerprints=compares,
            )
        )
        self.entry_count += result.entry_count
        self.byte_count += result.entry_bytes
        self.silent |= result.silent
        return result


def _open_entries(bookie: BookieId, answers: Mapping[int, Answer], errors: Errors) -> list[int]:
    """Return the entries, ascending, for which the bookie's answer proves nothing yet."""
    return [
        entry_id
        for entry_id, answer in sorted(answers.items())
        if answer is Answer.UNKNOWN
        or (answer is Answer.UNREADABLE and errors[bookie, entry_id] < 2)
    ]


def _unreadable(failures: Mapping[BookieId, Mapping[int, Answer]]) -> list[tuple[BookieId, int]]:
    return [
        (bookie, entry_id)
        for bookie, answers in failures.items()
        for entry_id, answer in answers.items()
        if answer is Answer.UNREADABLE
    ]


def _answered_nothing(asked: Sequence[int], answers: Mapping[int, Answer]) -> bool:
    return len(answers) == len(asked) and all(a is Answer.UNKNOWN for a in answers.values())


def _complete(known: Fingerprints, more: Fingerprints, entry_ids: Sequence[int]) -> None:
    for entry_id in entry_ids:
        if (value := more.of(entry_id)) != NO_FINGERPRINT:
            known.values[entry_id - known.first_entry_id] = value
