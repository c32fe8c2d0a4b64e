"""Verdicts as rows: the schema of the Parquet files ``ledgers/run=…/`` in a run's results, and both ways.

The schema is stable: a column or a field that is added keeps ``VERSION``, one with another meaning raises it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from auditor.fsck.results.summary import Counts
from auditor.fsck.verdicts import Evidence, Finding, FragmentVerdict, Grade, LedgerVerdict

VERSION = 1

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
        ("ensemble", pa.list_(pa.string())),
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
        ("reasons", pa.list_(pa.string())),
        ("rests_on_unknown", pa.bool_()),
        ("evidence", pa.list_(_EVIDENCE)),
        ("evidence_left_out", pa.int32()),
        ("fragments", pa.list_(_FRAGMENT)),
        ("state", pa.string()),
        ("length", pa.int64()),
        ("last_entry_id", pa.int64()),
        ("metadata_version", pa.int32()),
        ("mtime_ms", pa.int64()),
        ("entries_read", pa.int64()),
        ("bytes_read", pa.int64()),
        ("checked_ms", pa.int64()),
    ]
)
"""One row a ledger. ``verdict``: a value of ``Grade``; ``reasons``: of ``Finding``, without repetition; the rest
as in ``LedgerVerdict`` and what is in it. Ends of ranges count in; ids of entries are -1 where there are none."""


def to_batch(verdicts: Sequence[LedgerVerdict]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([_to_row(verdict) for verdict in verdicts], schema=SCHEMA)


def from_table(table: pa.Table) -> Iterator[LedgerVerdict]:
    """As many at a time as stand in a batch. ``table`` may have more columns, as a data set's ``run``."""
    for batch in table.select(SCHEMA.names).to_batches(max_chunksize=1_000):
        for row in batch.to_pylist():
            yield _from_row(row)


def counts_of(table: pa.Table) -> Counts:
    """As ``Counts.of``, of any number of rows at once."""
    verdicts = _value_counts(table["verdict"])
    reasons = _value_counts(pc.list_flatten(table["reasons"]))
    return Counts(
        ledgers=table.num_rows,
        verdicts={grade.value: verdicts.get(grade.value, 0) for grade in Grade},
        findings={finding.value: reasons.get(finding.value, 0) for finding in Finding},
        wrong=_sum(table["is_wrong"]),
        resting_on_unknown=_sum(table["rests_on_unknown"]),
        entries_read=_sum(table["entries_read"]),
        bytes_read=_sum(table["bytes_read"]),
    )


def _to_row(verdict: LedgerVerdict) -> dict[str, Any]:
    return {
        "ledger_id": verdict.ledger_id,
        "verdict": verdict.grade.value,
        "is_wrong": verdict.is_wrong,
        "reasons": [finding.value for finding in verdict.findings],
        "rests_on_unknown": verdict.rests_on_unknown,
        "evidence": [_evidence_row(evidence) for evidence in verdict.evidence],
        "evidence_left_out": verdict.evidence_left_out,
        "fragments": [_fragment_row(fragment) for fragment in verdict.fragments],
        "state": verdict.state,
        "length": verdict.length,
        "last_entry_id": verdict.last_entry_id,
        "metadata_version": verdict.metadata_version,
        "mtime_ms": verdict.mtime_ms,
        "entries_read": verdict.entries_read,
        "bytes_read": verdict.bytes_read,
        "checked_ms": verdict.checked_ms,
    }


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
        metadata_version=row["metadata_version"],
        mtime_ms=row["mtime_ms"],
        entries_read=row["entries_read"],
        bytes_read=row["bytes_read"],
        checked_ms=row["checked_ms"],
    )


def _evidence_row(evidence: Evidence) -> dict[str, Any]:
    return {
        "finding": evidence.finding.value,
        "bookie": evidence.bookie,
        "first_entry_id": evidence.first_entry_id,
        "last_entry_id": evidence.last_entry_id,
        "entry_count": evidence.entry_count,
        "code": evidence.code,
        "detail": evidence.detail,
    }


def _evidence(row: dict[str, Any]) -> Evidence:
    return Evidence(**{**row, "finding": Finding(row["finding"])})


def _fragment_row(fragment: FragmentVerdict) -> dict[str, Any]:
    return {
        "first_entry_id": fragment.first_entry_id,
        "last_entry_id": fragment.last_entry_id,
        "ensemble": fragment.ensemble,
        "verdict": fragment.grade.value,
        "copies_least": fragment.copies_least,
        "rests_on_unknown": fragment.rests_on_unknown,
    }


def _fragment(row: dict[str, Any]) -> FragmentVerdict:
    return FragmentVerdict(
        first_entry_id=row["first_entry_id"],
        last_entry_id=row["last_entry_id"],
        ensemble=tuple(row["ensemble"]),
        grade=Grade(row["verdict"]),
        copies_least=row["copies_least"],
        rests_on_unknown=row["rests_on_unknown"],
    )


def _value_counts(column: pa.ChunkedArray) -> dict[str, int]:
    return {each["values"]: each["counts"] for each in pc.value_counts(column).to_pylist()}


def _sum(column: pa.ChunkedArray) -> int:
    return pc.sum(column).as_py() or 0
