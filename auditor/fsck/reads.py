"""One ledger's entries, asked of its bookies in bulk, until each answer is one that can be built
on.

A read error counts once its bookie gave it twice; what a bookie left unanswered, while it answered
for other entries, is asked for again, after a pause, as it may have been busy. One that answers for
nothing is silent, and is left alone for the rest of the look. An explicit no is certain: the second
look is the run's.
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
AGAIN_AFTER_S = 0.5

Reads = Mapping[BookieId, Sequence[int]]
"""Ascending entry ids of each bookie."""
Errors = Counter[tuple[BookieId, int]]
"""How often each bookie gave a read error for each entry."""


@dataclass(slots=True)
class Answers:
    """What each bookie did not give, of those that refused anything, and what the rest is like."""

    refused: dict[BookieId, Refused] = field(default_factory=dict)
    fingerprints: Mapping[BookieId, Fingerprints] = field(default_factory=dict)


class LedgerReads:
    """Of one look at one ledger."""

    def __init__(
        self,
        ledger_id: int,
        *,
        bookies: Bookies,
        clock: Clock,
        digest: EntryDigest,
        entry_bytes: int,
    ) -> None:
        """``entry_bytes``: a guess at their stored size."""
        self._ledger_id = ledger_id
        self._bookies = bookies
        self._clock = clock
        self._digest = digest
        self._entry_bytes = entry_bytes
        self.silent: set[BookieId] = set()
        """Those that answered for nothing that they were asked for, or fell silent."""
        self.entry_count = 0
        """Good ones, each time that they were read."""
        self.byte_count = 0
        self.mismatch_count = 0

    async def ask_runs(self, asked: Mapping[BookieId, Sequence[Sequence[int]]]) -> Answers:
        """For ascending, disjoint runs of entries, however many."""
        whole = Answers()
        slices = (transfer_slices(runs, sharing=len(asked)) for runs in asked.values())
        for parts in zip_longest(*slices, fillvalue=()):
            answers = await self.ask(dict(zip(asked, parts, strict=True)))
            for bookie, refused in answers.refused.items():
                whole.refused.setdefault(bookie, Refused()).extend(refused)
        return whole

    async def ask(self, reads: Reads, *, compares: bool = False) -> Answers:
        """``compares``: whether fingerprints are wanted; the entries should stand close together
        then."""
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
        """Make the failures certain: each goes, or stays as what it is."""
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
        """What proves nothing yet, of the bookies that answer for anything."""
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
    """Entries of which the bookie's answer proves nothing yet, ascending."""
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
