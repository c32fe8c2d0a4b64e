"""A copy that is to be made, and what came of it: values."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from msgspec import Struct

from ledgers.errors import BookmenderError
from ledgers.fragments import Fragment
from ledgers.metadata import BookieId
from replication.planning.entry_runs import EntryRuns


class CopyJob(Struct, frozen=True, kw_only=True):
    """Entries of a fragment that ``target`` is to hold at bookie index ``index``.

    ``target`` may be the bookie that stands there already (an in-place repair, rule S15).
    ``former``: bookies of the ledger's other ensembles, asked before an entry is called lost.
    ``lac``: written into the header of each entry (``with_lac``); None: the bytes pass as they are.
    """

    fragment: Fragment
    index: int
    target: BookieId
    entry_ids: Sequence[int]
    available: frozenset[BookieId]
    former: tuple[BookieId, ...] = ()
    entry_bytes_hint: int = 1024
    lac: int | None = None

    @property
    def others(self) -> frozenset[BookieId]:
        """The members of the fragment whose copies it leaves where they are."""
        return frozenset(self.fragment.ensemble).difference(
            (self.target, self.fragment.ensemble[self.index])
        )

    @property
    def parts(self) -> tuple[Sequence[int], Sequence[int]]:
        """What is to be written first, and the ends, which in place come after it (see
        ``copy_index``)."""
        if self.target != self.fragment.ensemble[self.index]:
            return self.entry_ids, ()
        return ends_apart(self.fragment, self.index, self.entry_ids)


def ends_apart(
    fragment: Fragment, index: int, entry_ids: Sequence[int]
) -> tuple[Sequence[int], Sequence[int]]:
    """Those between the first and the last entry that the index stores, and those of these two.
    Nothing is listed: a bookie that came back empty lacks all, and there may be ten million."""
    stored = fragment.entries_of(index)
    first, last = stored.first, stored.last
    if first is None or last is None:  # it stores none
        return entry_ids, ()
    ends = [end for end in dict.fromkeys((first, last)) if end in entry_ids]
    if isinstance(entry_ids, EntryRuns):
        return entry_ids.between(first + 1, last - 1), ends
    return entry_ids[bisect_right(entry_ids, first) : bisect_left(entry_ids, last)], ends


class CopyOutcome(Struct, frozen=True, kw_only=True):
    """``target_error``: the target failed, another is to be chosen. Entry ids in the sets
    ascend."""

    entry_count: int = 0
    entry_bytes: int = 0
    target_error: BookmenderError | None = None
    without_copy: tuple[int, ...] = ()
    """Entries of which no bookie that is there holds a good copy; one that is away still may."""
    unknown: tuple[int, ...] = ()
    """Entries for which a bookie that is there did not answer."""
    kept_back: tuple[int, ...] = ()
    """An end that was not written, so that a check goes on to see what is without a copy."""
    gave_all_asked: bool = False
    """Whether something was asked besides, and bookies gave all of that."""
    bad_sources: frozenset[BookieId] = frozenset()
    """Members of the fragment that should have an entry, and do not have a good copy of it."""

    @property
    def is_complete(self) -> bool:
        return self.target_error is None and not self.without_copy and not self.unknown
