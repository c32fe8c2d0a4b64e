"""Finds which ledger ids a query's filters allow, so that no other ledger is read. Pure."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from ledgers.formats.layout import LONG_ID_STOP

_COLUMN = ("ledger_id",)


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedLedgers:
    """The ids from ``first`` to ``last``, both inclusive. If ``among`` is not None, only those in
    it."""

    first: int = 0
    last: int = LONG_ID_STOP - 1
    among: frozenset[int] | None = None

    def of(self, ledger_ids: Sequence[int]) -> Sequence[int]:
        """Return the wanted ones among these ids, which ascend."""
        start, stop = bisect_left(ledger_ids, self.first), bisect_right(ledger_ids, self.last)
        chosen = ledger_ids[start:stop]
        if self.among is None:
            return chosen
        return [ledger_id for ledger_id in chosen if ledger_id in self.among]

    def narrowed(self, condition: Filter) -> "WantedLedgers | None":
        """Return what a further condition leaves. None if it is about another column, or of an
        unsupported kind."""
        match condition:
            case EqualTo(column, int(value)) | EqualNullSafe(column, int(value)):
                bounds = (value, value)
            case GreaterThan(column, int(value)):
                bounds = (value + 1, self.last)
            case GreaterThanOrEqual(column, int(value)):
                bounds = (value, self.last)
            case LessThan(column, int(value)):
                bounds = (self.first, value - 1)
            case LessThanOrEqual(column, int(value)):
                bounds = (self.first, value)
            case In(column, values) if column == _COLUMN:
                found = frozenset(values)
                return replace(self, among=found if self.among is None else self.among & found)
            case _:
                return None
        if column != _COLUMN:
            return None
        return replace(self, first=max(self.first, bounds[0]), last=min(self.last, bounds[1]))


def push(
    filters: Iterable[Filter], wanted: WantedLedgers
) -> tuple[WantedLedgers, Iterator[Filter]]:
    """Return the ledgers that all filters allow, and the filters that Spark must still apply."""
    left = []
    for condition in filters:
        narrowed = wanted.narrowed(condition)
        if narrowed is None:
            left.append(condition)
        else:
            wanted = narrowed
    return wanted, iter(left)
