"""Reads one ledger's copies from its bookies in bulk, until each answer is reliable.

- A "no such entry" is certain at once; the run's recheck confirms it.
- A read error counts when the bookie gave it twice.
- An entry that a bookie left unanswered while it answered for others is requested again after a
  pause: the bookie may have been busy.
- A bookie that answers for nothing is unresponsive. It gets no more requests in this inspection.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from ledgers.bookies import TRANSFER_ENTRIES_MAX, Answer, Bookies, Transfer, TransferResult
from ledgers.clock import Clock
from ledgers.digest import NO_FINGERPRINT, EntryDigest, Fingerprints
from ledgers.model import BookieId
from replication.copy_checks import ReadFailures, transfer_slices

RETRIES_MAX = 3
"""Number of repeated requests for unreliable answers, ``RETRY_WAIT_S`` apart."""
RETRY_WAIT_S = 0.5

Reads = Mapping[BookieId, Sequence[int]]
"""Ascending entry ids to read, by bookie."""
Errors = Counter[tuple[BookieId, int]]
"""Number of read errors, by bookie and entry."""


@dataclass(slots=True)
class ReadAnswers:
    """The answers to one request. ``failures`` has only bookies that did not return everything; the
    ``fingerprints`` are of the good copies."""

    failures: dict[BookieId, ReadFailures] = field(default_factory=dict)
    fingerprints: Mapping[BookieId, Fingerprints] = field(default_factory=dict)


class CopyReader:
    """Reads copies of one ledger during one inspection, and counts what it read."""

    def __init__(
        self,
        ledger_id: int,
        *,
        bookies: Bookies,
        clock: Clock,
        digest: EntryDigest,
        entry_bytes: int,
    ) -> None:
        """``entry_bytes``: the estimated stored size of an entry."""
        self._ledger_id = ledger_id
        self._bookies = bookies
        self._clock = clock
        self._digest = digest
        self._entry_bytes = entry_bytes
        self.unresponsive: set[BookieId] = set()
        """Bookies that answered no request, or stopped answering."""
        self.entry_count = 0
        """Good entries; an entry that was read twice counts twice."""
        self.byte_count = 0
        self.mismatch_count = 0

    async def read_runs(
        self, runs_by_bookie: Mapping[BookieId, Sequence[Sequence[int]]]
    ) -> ReadAnswers:
        """Read ascending, disjoint runs of entries, of any number."""
        total = ReadAnswers()
        slices = (
            transfer_slices(runs, sharing=len(runs_by_bookie)) for runs in runs_by_bookie.values()
        )
        for parts in zip_longest(*slices, fillvalue=()):
            answers = await self.read(dict(zip(runs_by_bookie, parts, strict=True)))
            for bookie, failures in answers.failures.items():
                total.failures.setdefault(bookie, ReadFailures()).extend(failures)
        return total

    async def read(self, reads: Reads, *, compares: bool = False) -> ReadAnswers:
        """Read these entries, ``TRANSFER_ENTRIES_MAX`` at most. ``compares``: True to get
        fingerprints; the entry ids should be close together then."""
        reads = {b: ids for b, ids in reads.items() if ids and b not in self.unresponsive}
        if not reads:
            return ReadAnswers()
        assert sum(map(len, reads.values())) <= TRANSFER_ENTRIES_MAX, self._ledger_id
        result = await self._transfer(reads, compares)
        failed = {bookie: dict(answers) for bookie, answers in result.failures.items() if answers}
        if failed:
            await self._retry(reads, failed, result.fingerprints)
        answers = ReadAnswers(fingerprints=result.fingerprints)
        for bookie, answers_left in failed.items():
            if _answered_nothing(reads[bookie], answers_left):
                self.unresponsive.add(bookie)
            elif answers_left:
                failures = answers.failures[bookie] = ReadFailures()
                failures.add(answers_left)
                self.mismatch_count += len(failures.mismatched)
        return answers

    async def _retry(
        self,
        reads: Reads,
        failures: dict[BookieId, dict[int, Answer]],
        fingerprints: Mapping[BookieId, Fingerprints],
    ) -> None:
        """Repeat failed reads until each entry is returned, or its failure is certain. Changes
        ``failures`` and ``fingerprints``."""
        errors = Counter(_unreadable(failures))
        for _ in range(RETRIES_MAX):
            retries = self._uncertain(reads, failures, errors)
            if not retries:
                break
            await self._clock.sleep(RETRY_WAIT_S)
            result = await self._transfer(retries, bool(fingerprints))
            errors.update(_unreadable(result.failures))
            for bookie, entry_ids in retries.items():
                still_failed = result.failures.get(bookie, {})
                failures[bookie].update(still_failed)
                for returned in set(entry_ids).difference(still_failed):
                    del failures[bookie][returned]
                if bookie in result.fingerprints:
                    _add_fingerprints(fingerprints[bookie], result.fingerprints[bookie], entry_ids)
        for bookie, answers in failures.items():
            for entry_id in _uncertain_entries(bookie, answers, errors):
                answers[entry_id] = Answer.UNKNOWN

    def _uncertain(
        self, reads: Reads, failures: Mapping[BookieId, Mapping[int, Answer]], errors: Errors
    ) -> dict[BookieId, list[int]]:
        """Return the entries whose answers prove nothing yet, for bookies that answered at least
        once."""
        uncertain = {
            bookie: _uncertain_entries(bookie, answers, errors)
            for bookie, answers in failures.items()
            if bookie not in self.unresponsive and not _answered_nothing(reads[bookie], answers)
        }
        return {bookie: entry_ids for bookie, entry_ids in uncertain.items() if entry_ids}

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
        self.unresponsive |= result.unresponsive
        return result


def _uncertain_entries(
    bookie: BookieId, answers: Mapping[int, Answer], errors: Errors
) -> list[int]:
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


def _answered_nothing(entry_ids: Sequence[int], answers: Mapping[int, Answer]) -> bool:
    return len(answers) == len(entry_ids) and all(a is Answer.UNKNOWN for a in answers.values())


def _add_fingerprints(known: Fingerprints, more: Fingerprints, entry_ids: Sequence[int]) -> None:
    for entry_id in entry_ids:
        if (value := more.of(entry_id)) != NO_FINGERPRINT:
            known.values[entry_id - known.first_entry_id] = value
