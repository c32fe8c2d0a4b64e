"""Verdicts as rows: the schema of the Parquet files ``ledgers/run=…/`` in the results, and the
conversions; and the reading and replacing of Parquet files.

The schema is stable: a new column or field keeps ``VERSION``, a change of meaning raises it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import accumulate, chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from auditor.fsck.results.summary import Counts
from auditor.fsck.verdicts import Evidence, Finding, FragmentVerdict, Grade, LedgerVerdict
from ledgers.plain_files import in_place

VERSION = 1
VERSION_NOTE = "bookmender.version"
"""Key of the version in the metadata of each file."""

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
        evidence=_lists(_EVIDENCE, [each.evidence for each in verdicts], finding="finding"),
        fragments=_lists(_FRAGMENT, [each.fragments for each in verdicts], verdict="grade"),
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
    # Bookies to start for a ledger with entries on no running bookie. Only the few rows without a
    # good copy are converted.
    fragments = table.select(["fragments"]).combine_chunks()["fragments"]
    lacking = pc.equal(pc.struct_field(pc.list_flatten(fragments), "copies_least"), 0)
    rows = table.take(pc.unique(pc.list_parent_indices(fragments).filter(lacking)))
    away = [found for verdict in from_table(rows) if (found := verdict.bookies_to_start)]
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


def _from_row(row: dict[str, Any]) -> LedgerVerdict:
    del row["is_wrong"]  # follows from the others
    return LedgerVerdict(
        grade=Grade(row.pop("verdict")),
        findings=tuple(map(Finding, row.pop("reasons"))),
        evidence=tuple(
            Evidence(finding=Finding(each.pop("finding")), **each) for each in row.pop("evidence")
        ),
        fragments=tuple(
            FragmentVerdict(
                ensemble=tuple(each.pop("ensemble")), grade=Grade(each.pop("verdict")), **each
            )
            for each in row.pop("fragments")
        ),
        **row,
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


def _lists(struct: pa.StructType, items: Sequence[Sequence[object]], **values: str) -> pa.ListArray:
    """Return a column of lists of structs. ``values``: the attribute with the ``Enum`` whose value
    a field has."""
    flat = list(chain.from_iterable(items))
    known = {
        name: pa.array(_values(map(attrgetter(attribute), flat)), pa.string())
        for name, attribute in values.items()
    }
    structs = pa.StructArray.from_arrays(_columns(struct, flat, **known), fields=list(struct))
    offsets = pa.array([0, *accumulate(map(len, items))], pa.int32())
    return pa.ListArray.from_arrays(offsets, structs)


def _values(members: Iterable[Enum]) -> list[str]:
    return [member.value for member in members]


def _value_counts(column: pa.ChunkedArray) -> dict[str, int]:
    return {each["values"]: each["counts"] for each in pc.value_counts(column).to_pylist()}


def _sum(column: pa.ChunkedArray) -> int:
    return pc.sum(column).as_py() or 0


# --- Parquet files --------------------------------------------------------------------------------


def replace_table(path: Path, table: pa.Table, *, note: Mapping[str, str] | None = None) -> None:
    """Write the table as Parquet in place of an old file. ``note``: stored in the file's metadata,
    for ``read_note``."""
    if note is not None:
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), **note})
    with in_place(path) as beside:
        pq.write_table(table, beside, compression="zstd")


def read_note(path: Path, key: str, *, default: str | None = None) -> str:
    """Return a note without reading the rows. Raises KeyError without ``default``."""
    metadata: dict[bytes, bytes] = pq.read_schema(path).metadata
    if default is not None and key.encode() not in metadata:
        return default
    return metadata[key.encode()].decode()
