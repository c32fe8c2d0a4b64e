"""Verdicts as rows: the schema of the Parquet files ``ledgers/run=…/`` in the results, and the
conversions.

The schema is stable: a new column or field keeps ``VERSION``, a change of meaning raises it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from auditor.fsck.results.summary import Counts
from auditor.fsck.verdicts import Evidence, Finding, FragmentVerdict, Grade, LedgerVerdict
from ledgers.model import BookieId

VERSION = 1
VERSION_NOTE = "bookmender.version"
"""Key of the version in the metadata of each file."""

T = TypeVar("T")

_STRINGS = pa.list_(pa.string())
_EVIDENCE = pa.struct(
    [
        ("finding", pa.string()),
        ("bookie", pa.string()),
        ("first_entry_id", pa.int64()),
        ("last_entry_id", pa.int64()),
        ("entry_count", pa.int64()),
        ("code", pa.string()),
        ("detail", pa.string()),
    ]
)
_FRAGMENT = pa.struct(
    [
        ("first_entry_id", pa.int64()),
        ("last_entry_id", pa.int64()),
        ("ensemble", _STRINGS),
        ("verdict", pa.string()),
        ("copies_least", pa.int32()),
        ("rests_on_unknown", pa.bool_()),
    ]
)
SCHEMA = pa.schema(
    [
        ("ledger_id", pa.int64()),
        ("verdict", pa.string()),
        ("is_wrong", pa.bool_()),
        ("reasons", _STRINGS),
        ("rests_on_unknown", pa.bool_()),
        ("evidence", pa.list_(_EVIDENCE)),
        ("evidence_left_out", pa.int32()),
        ("fragments", pa.list_(_FRAGMENT)),
        ("state", pa.string()),
        ("length", pa.int64()),
        ("last_entry_id", pa.int64()),
        ("is_tail_unseen", pa.bool_()),
        ("metadata_version", pa.int32()),
        ("mtime_ms", pa.int64()),
        ("entries_read", pa.int64()),
        ("bytes_read", pa.int64()),
        ("checked_ms", pa.int64()),
    ]
)
"""One row for each ledger. ``verdict``: a value of ``Grade``; ``reasons``: values of ``Finding``,
without repetition. The other columns are as in ``LedgerVerdict`` and its parts. Ranges are
inclusive at both ends; entry ids are -1 if there is no entry."""


def to_batch(verdicts: Sequence[LedgerVerdict]) -> pa.RecordBatch:
    """Return the verdicts as rows. Converts column by column, several times as fast as row by row:
    at level ``metadata`` there are millions."""
    columns = _columns(
        SCHEMA,
        verdicts,
        verdict=pa.array([verdict.grade.value for verdict in verdicts], pa.string()),
        reasons=pa.array([_values(verdict.findings) for verdict in verdicts], _STRINGS),
        evidence=_lists([verdict.evidence for verdict in verdicts], _evidence_array),
        fragments=_lists([verdict.fragments for verdict in verdicts], _fragment_array),
    )
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def to_record(verdict: LedgerVerdict) -> dict[str, Any]:
    """Return the row of one verdict, by column."""
    record: dict[str, Any] = to_batch([verdict]).to_pylist()[0]
    return record


def from_table(table: pa.Table) -> Iterator[LedgerVerdict]:
    """Yield the verdicts of the rows, up to 1,000 converted at a time. ``table`` may have more
    columns, such as a data set's ``run``."""
    for batch in table.select(SCHEMA.names).to_batches(max_chunksize=1_000):
        for row in batch.to_pylist():
            yield _from_row(row)


def counts_of(table: pa.Table) -> Counts:
    """Return the counts of the rows. Each grade and finding has a count, even if it is 0."""
    verdicts = _value_counts(table["verdict"])
    reasons = _value_counts(pc.list_flatten(table["reasons"]))
    away = _away(table)
    return Counts(
        ledgers=table.num_rows,
        verdicts={grade.value: verdicts.get(grade.value, 0) for grade in Grade},
        findings={finding.value: reasons.get(finding.value, 0) for finding in Finding},
        wrong=_sum(table["is_wrong"]),
        resting_on_unknown=_sum(table["rests_on_unknown"]),
        entries_read=_sum(table["entries_read"]),
        bytes_read=_sum(table["bytes_read"]),
        out_of_reach=len(away),
        away=dict(Counter(bookie for bookies in away for bookie in bookies)),
        tails_unseen=_sum(table["is_tail_unseen"]),
    )


def _away(table: pa.Table) -> list[frozenset[BookieId]]:
    """Return the bookies to start, for each ledger with entries on no running bookie. Only the
    few rows without a good copy are converted."""
    fragments = table.select(["fragments"]).combine_chunks()["fragments"]
    lacking = pc.equal(pc.struct_field(pc.list_flatten(fragments), "copies_least"), 0)
    rows = table.take(pc.unique(pc.list_parent_indices(fragments).filter(lacking)))
    return [verdict.bookies_to_start for verdict in from_table(rows) if verdict.bookies_to_start]


def _from_row(row: dict[str, Any]) -> LedgerVerdict:
    return LedgerVerdict(
        ledger_id=row["ledger_id"],
        grade=Grade(row["verdict"]),
        findings=tuple(map(Finding, row["reasons"])),
        rests_on_unknown=row["rests_on_unknown"],
        evidence=tuple(_evidence(each) for each in row["evidence"]),
        evidence_left_out=row["evidence_left_out"],
        fragments=tuple(_fragment(each) for each in row["fragments"]),
        state=row["state"],
        length=row["length"],
        last_entry_id=row["last_entry_id"],
        is_tail_unseen=row["is_tail_unseen"],
        metadata_version=row["metadata_version"],
        mtime_ms=row["mtime_ms"],
        entries_read=row["entries_read"],
        bytes_read=row["bytes_read"],
        checked_ms=row["checked_ms"],
    )


def _evidence(row: dict[str, Any]) -> Evidence:
    return Evidence(**{**row, "finding": Finding(row["finding"])})


def _fragment(row: dict[str, Any]) -> FragmentVerdict:
    return FragmentVerdict(
        first_entry_id=row["first_entry_id"],
        last_entry_id=row["last_entry_id"],
        ensemble=tuple(row["ensemble"]),
        grade=Grade(row["verdict"]),
        copies_least=row["copies_least"],
        rests_on_unknown=row["rests_on_unknown"],
    )


def _evidence_array(evidence: Sequence[Evidence]) -> pa.Array:
    finding = pa.array(_values(each.finding for each in evidence), pa.string())
    return pa.StructArray.from_arrays(
        _columns(_EVIDENCE, evidence, finding=finding), fields=list(_EVIDENCE)
    )


def _fragment_array(fragments: Sequence[FragmentVerdict]) -> pa.Array:
    verdict = pa.array(_values(each.grade for each in fragments), pa.string())
    return pa.StructArray.from_arrays(
        _columns(_FRAGMENT, fragments, verdict=verdict), fields=list(_FRAGMENT)
    )


def _columns(
    fields: Iterable[pa.Field], items: Sequence[object], **known: pa.Array
) -> list[pa.Array]:
    """Return a column for each field: the ``known`` one, or else the items' attributes of that
    name."""
    return [
        known[field.name]
        if field.name in known
        else pa.array(list(map(attrgetter(field.name), items)), field.type)
        for field in fields
    ]


def _lists(
    values: Sequence[Sequence[T]], to_array: Callable[[Sequence[T]], pa.Array]
) -> pa.ListArray:
    offsets = [0, *accumulate(map(len, values))]
    flat = to_array(list(chain.from_iterable(values)))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat)


def _values(members: Iterable[Enum]) -> list[str]:
    return [member.value for member in members]


def _value_counts(column: pa.ChunkedArray) -> dict[str, int]:
    return {each["values"]: each["counts"] for each in pc.value_counts(column).to_pylist()}


def _sum(column: pa.ChunkedArray) -> int:
    return pc.sum(column).as_py() or 0
