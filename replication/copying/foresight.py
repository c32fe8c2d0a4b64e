"""What will come of a plan, as far as the survey tells: the copies that will be made, and what is
in the way of the rest.

For ``bookmender plan``, and for copies that have no target, which nobody tries. The worker's own
``CopyResults`` decide; only what each copy comes to is foreseen: an entry that every bookie there
is known to lack, or of which no bookie is there, is without a copy. Bookies that hold other parts
of the ledger may have it all the same; a worker asks them, and nobody here.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import islice

from msgspec import Struct, structs

from ledgers.fragments import Fragment
from ledgers.striping import write_set
from replication.copying.copy_index import LACKING_MAX, kept_back_of
from replication.copying.copy_job import CopyOutcome, ends_apart
from replication.planning.check import IndexFinding
from replication.planning.entry_runs import EntryRuns
from replication.planning.plan import Repair
from replication.planning.survey import Survey


class Lacking(Struct, frozen=True, kw_only=True):
    """Entries of a copy that cannot be had, ascending. ``is_cut``: these are not all."""

    without_copy: Sequence[int] = ()
    unknown: Sequence[int] = ()
    """Some bookie there has them, and could not read them."""
    is_cut: bool = False


class Foresight:
    """Of one survey."""

    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        self._available = survey.view.available
        self._findings: dict[Fragment, dict[int, IndexFinding]] = defaultdict(dict)
        for finding in survey.findings:
            self._findings[finding.fragment][finding.index] = finding

    def outcome(self, repair: Repair) -> CopyOutcome:
        """As ``copy_index`` would tell of it, if every bookie gives what is not known to be bad."""
        lacking = self.lacking(repair.fragment, repair.index, repair.entry_ids)
        kept_back = _kept_back(repair, lacking.without_copy)
        without_copy = tuple(e for e in lacking.without_copy if e not in kept_back)
        left_count = len(without_copy) + len(lacking.unknown) + len(kept_back)
        is_hopeless = left_count > LACKING_MAX  # then it is given up
        entry_count = 0 if is_hopeless else len(repair.entry_ids) - left_count
        return CopyOutcome(
            entry_count=entry_count,
            entry_bytes=entry_count * self._survey.entry_bytes,
            without_copy=without_copy,
            unknown=tuple(lacking.unknown),
            kept_back=kept_back,
        )

    def lacking(
        self, fragment: Fragment, index: int, entry_ids: Sequence[int], *, limit: int = LACKING_MAX
    ) -> Lacking:
        """Those of ``entry_ids``, which the bookie index stores, that no bookie there will give; of
        more than ``limit`` the first of them, and one."""
        doubted = merge(*self._doubted(fragment, index))
        found = islice((e for e in doubted if e in entry_ids), limit + 1)
        without_copy, unknown = array("q"), array("q")
        for entry_id in found:
            are_any_unread = any(
                entry_id in finding.unreadable for finding in self._sources(fragment, entry_id)
            )
            (unknown if are_any_unread else without_copy).append(entry_id)
        is_cut = len(without_copy) + len(unknown) > limit
        return Lacking(without_copy=without_copy, unknown=unknown, is_cut=is_cut)

    def _doubted(self, fragment: Fragment, index: int) -> Iterator[Iterable[int]]:
        """Entries that no bookie there has good, by write sets: E apart, they share one."""
        size, last = fragment.ensemble_size, fragment.last_entry_id
        assert last is not None, fragment  # none is copied whose end nobody knows (rule S4)
        for first in range(fragment.first_entry_id, fragment.first_entry_id + size):
            if index not in _write_set(fragment, first):
                continue
            sources = self._sources(fragment, first)
            if not sources:
                yield range(first, last + 1, size)
            elif all(finding.bad_count for finding in sources):
                yield _bad_everywhere(sources, first % size, size)

    def _sources(self, fragment: Fragment, entry_id: int) -> list[IndexFinding]:
        """What is known of the entry's bookies that are there."""
        findings = self._findings[fragment]
        indexes = _write_set(fragment, entry_id)
        return [findings[index] for index in indexes if fragment.ensemble[index] in self._available]


def _write_set(fragment: Fragment, entry_id: int) -> tuple[int, ...]:
    return write_set(
        entry_id, ensemble_size=fragment.ensemble_size, write_quorum=fragment.write_quorum
    )


def _bad_everywhere(sources: Sequence[IndexFinding], residue: int, size: int) -> Iterator[int]:
    fewest = min(sources, key=lambda finding: finding.bad_count)
    for entry_id in merge(fewest.absent, fewest.mismatched, fewest.unreadable):
        if entry_id % size == residue and all(finding.is_bad(entry_id) for finding in sources):
            yield entry_id


def _kept_back(repair: Repair, without_copy: Sequence[int]) -> tuple[int, ...]:
    """The end that a copy in place leaves out (``copy_index``)."""
    if not without_copy or not repair.is_in_place:
        return ()
    lost = EntryRuns(without_copy)
    inner, ends = ends_apart(repair.fragment, repair.index, repair.entry_ids)
    return tuple(kept_back_of(ends, lost=lost)) if any(e in lost for e in inner) else ()


def made_of(repair: Repair, outcome: CopyOutcome, *, is_split: bool) -> Repair:
    """The repair without what does not come of it. ``is_split``: what is kept back will come in the
    next round."""
    kept_back = () if is_split else outcome.kept_back
    left = EntryRuns(sorted({*outcome.without_copy, *outcome.unknown, *kept_back}))
    if not left:
        return repair
    made = array("q", (entry_id for entry_id in repair.entry_ids if entry_id not in left))
    byte_count = len(made) * repair.byte_count // len(repair.entry_ids)
    return structs.replace(repair, entry_ids=made, byte_count=byte_count)
