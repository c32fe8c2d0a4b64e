"""The figures of the report, counted from a run's rows: by bookie, by rack, by age, and the worst
ledgers.

Counts column by column, so that a million ledgers fit in memory.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from auditor.fsck.results.reading import Results
from auditor.fsck.verdicts import Finding, Grade, LedgerVerdict
from ledgers.metadata import BookieId

WORST_MAX = 200
"""Number of ledgers that are shown one by one."""
UNKNOWN_RACK = "rack not known"
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
AGES = (
    (0, "up to an hour"),
    (HOUR_MS, "up to a day"),
    (DAY_MS, "up to a week"),
    (7 * DAY_MS, "up to a month"),
    (30 * DAY_MS, "up to a year"),
    (365 * DAY_MS, "more than a year"),
)
"""The age since the last write of the metadata: the lower bound in milliseconds, and a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceFigure:
    """A bookie or a rack. ``ledgers``: number of ledgers with a finding there; ``by_finding``
    splits it."""

    name: str
    ledgers: int
    by_finding: Mapping[Finding, int] = field(default_factory=dict)
    rack: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgeFigure:
    """The ledgers of one age."""

    name: str
    by_grade: Mapping[Grade, int]

    @property
    def ledgers(self) -> int:
        return sum(self.by_grade.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """All figures. ``worst``: at most ``WORST_MAX`` ledgers with a finding, or not whole, the worst
    first. ``told_count``: the number of all such ledgers."""

    bookies: Sequence[PlaceFigure]
    racks: Sequence[PlaceFigure]
    ages: Sequence[AgeFigure]
    worst: Sequence[LedgerVerdict]
    told_count: int


def figures_of(results: Results, racks: Mapping[BookieId, str]) -> Figures:
    """Return the figures of a run. ``racks``: the known racks of bookies."""
    told = results.table(
        ["ledger_id", "verdict", "is_wrong", "length"],
        where=(pc.field("verdict") != Grade.WHOLE.value)
        | (pc.list_value_length(pc.field("reasons")) > 0),
    )
    seen = _seen(results)
    return Figures(
        bookies=_places(seen, {b: b for b in seen["bookie"].unique().to_pylist()}, racks),
        racks=_places(
            seen, {b: racks.get(b, UNKNOWN_RACK) for b in seen["bookie"].unique().to_pylist()}, {}
        ),
        ages=_ages(results),
        worst=_worst(results, told),
        told_count=told.num_rows,
    )


def _seen(results: Results) -> pa.Table:
    """Return ledger, bookie and finding, each combination once."""
    rows = results.table(
        ["ledger_id", "evidence"], where=pc.list_value_length(pc.field("evidence")) > 0
    ).combine_chunks()
    ledger_ids, evidence = rows["ledger_id"], rows["evidence"]
    flat = pc.list_flatten(evidence)
    table = pa.table(
        {
            "ledger_id": pc.take(ledger_ids, pc.list_parent_indices(evidence)),
            "bookie": pc.struct_field(flat, "bookie"),
            "finding": pc.struct_field(flat, "finding"),
        }
    )
    named = table.filter(pc.is_valid(table["bookie"]))
    return named.group_by(["ledger_id", "bookie", "finding"]).aggregate([])


def _places(
    seen: pa.Table, place_of: Mapping[str, str], racks: Mapping[BookieId, str]
) -> list[PlaceFigure]:
    """Return the figures of each place, those with most ledgers first."""
    places = pa.array([place_of[bookie] for bookie in seen["bookie"].to_pylist()], pa.string())
    table = seen.set_column(seen.schema.get_field_index("bookie"), "place", places)
    ledgers = _ledger_counts(table, ["place"])
    by_finding: dict[str, dict[Finding, int]] = defaultdict(dict)
    for (place, finding), count in _ledger_counts(table, ["place", "finding"]).items():
        by_finding[place][Finding(finding)] = count
    return sorted(
        (
            PlaceFigure(
                name=place,
                ledgers=count,
                by_finding=by_finding[place],
                rack=racks.get(BookieId(place), ""),
            )
            for (place,), count in ledgers.items()
        ),
        key=lambda figure: (-figure.ledgers, figure.name),
    )


def _ledger_counts(table: pa.Table, keys: list[str]) -> dict[tuple[str, ...], int]:
    """Return the number of different ledgers for each combination of these columns."""
    counted = table.group_by(keys).aggregate([("ledger_id", "count_distinct")])
    columns = [counted[key].to_pylist() for key in keys]
    counts = counted["ledger_id_count_distinct"].to_pylist()
    return dict(zip(zip(*columns, strict=True), counts, strict=True))


def _ages(results: Results) -> list[AgeFigure]:
    """Return the ledgers with readable metadata by age, the youngest first."""
    rows = results.table(["verdict", "checked_ms", "mtime_ms"], where=pc.field("mtime_ms") > 0)
    age_ms = pc.subtract(rows["checked_ms"], rows["mtime_ms"])
    steps = [pc.cast(pc.greater(age_ms, since_ms), pa.int32()) for since_ms, _ in AGES[1:]]
    place = steps[0]
    for step in steps[1:]:
        place = pc.add(place, step)
    table = pa.table({"place": place, "verdict": rows["verdict"]})
    counted = table.group_by(["place", "verdict"]).aggregate([([], "count_all")])
    by_place: dict[int, dict[Grade, int]] = defaultdict(dict)
    for row in counted.to_pylist():
        by_place[row["place"]][Grade(row["verdict"])] = row["count_all"]
    return [
        AgeFigure(name=name, by_grade=by_place[number])
        for number, (_, name) in enumerate(AGES)
        if by_place[number]
    ]


def _worst(results: Results, told: pa.Table) -> list[LedgerVerdict]:
    """Return the worst ledgers: wrong ones first, then by grade, then the largest."""
    ranks = pa.array([Grade(value).rank for value in told["verdict"].to_pylist()], pa.int32())
    order = pc.sort_indices(
        told.append_column("rank", ranks),
        sort_keys=[
            ("is_wrong", "descending"),
            ("rank", "ascending"),
            ("length", "descending"),
            ("ledger_id", "ascending"),
        ],
    )
    ledger_ids = told["ledger_id"].take(order[:WORST_MAX]).to_pylist()
    found = {v.ledger_id: v for v in results.verdicts(pc.field("ledger_id").isin(ledger_ids))}
    return [found[ledger_id] for ledger_id in ledger_ids]
