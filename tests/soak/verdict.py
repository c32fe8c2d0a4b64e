"""Whether the marks are right: against what is computed from the metadata alone, without any of our
auditor."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ledgers.model import BookieId

SHOWN_MAX = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Ledger ids, ascending; all empty when the marks are right.

    ``unmarked``: that name a lost bookie their mark does not, or have none. ``surplus``: marked
    though they miss nothing. ``false_replicas``: whose mark names a bookie that never was away.
    """

    unmarked: tuple[int, ...]
    surplus: tuple[int, ...]
    false_replicas: tuple[int, ...]

    @property
    def is_right(self) -> bool:
        return not (self.unmarked or self.surplus or self.false_replicas)

    def told(self) -> str:
        if self.is_right:
            return "the marks are right"
        lists = (
            ("not marked", self.unmarked),
            ("marked for nothing", self.surplus),
            ("marked for a bookie that was never away", self.false_replicas),
        )
        return "; ".join(
            f"{title}: {len(ids)}, such as {', '.join(map(str, ids[:SHOWN_MAX]))}"
            for title, ids in lists
            if ids
        )


def judge(
    marks: Mapping[int, frozenset[BookieId]],
    lacking: Mapping[int, frozenset[BookieId]],
    *,
    ever_away: Collection[BookieId],
) -> Verdict:
    """``marks``: per marked ledger the replicas that its mark names; ``lacking``: per ledger, what
    it misses.

    A mark may name more than what is missing now: bookies that came back withdraw nothing (rule
    S6).
    """
    return Verdict(
        unmarked=tuple(
            sorted(i for i, lost in lacking.items() if not lost <= marks.get(i, frozenset()))
        ),
        surplus=tuple(sorted(marks.keys() - lacking.keys())),
        false_replicas=tuple(
            sorted(i for i, named in marks.items() if not named <= set(ever_away))
        ),
    )
