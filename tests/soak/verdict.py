"""Checks that the marks are right by the metadata alone, without our auditor's code."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ledgers.model import BookieId

SHOWN_MAX = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Ledger ids, ascending; all empty when the marks are right.

    ``unmarked``: ledgers with a lost bookie that no mark names. ``surplus``: marked ledgers that
    miss nothing. ``false_replicas``: ledgers whose mark names a bookie that was never absent.
    """

    unmarked: tuple[int, ...]
    surplus: tuple[int, ...]
    false_replicas: tuple[int, ...]

    @property
    def is_right(self) -> bool:
        return not (self.unmarked or self.surplus or self.false_replicas)

    def to_text(self) -> str:
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
    ever_absent: Collection[BookieId],
) -> Verdict:
    """Compare the marks with the missing copies.

    ``marks``: the bookies that the mark of each ledger names; ``lacking``: the lost bookies of each
    ledger. A mark may name more bookies: the return of a bookie withdraws nothing (rule S6).
    """
    return Verdict(
        unmarked=tuple(
            sorted(i for i, lost in lacking.items() if not lost <= marks.get(i, frozenset()))
        ),
        surplus=tuple(sorted(marks.keys() - lacking.keys())),
        false_replicas=tuple(
            sorted(i for i, named in marks.items() if not named <= set(ever_absent))
        ),
    )
