"""Verdicts as rows, and back."""

from dataclasses import replace

import pyarrow as pa
import pytest

from auditor.fsck.results.rows import SCHEMA, counts_of, from_table, to_batch
from auditor.fsck.verdicts import Evidence, Finding, FragmentVerdict, Grade, LedgerVerdict
from ledgers.model import BookieId
from tests.fsck.results import counted

A, B, C = (BookieId(f"bookie-{name}:3181") for name in "abc")
LACKING = LedgerVerdict(
    ledger_id=2**40,
    grade=Grade.AT_RISK,
    findings=(Finding.MISSING, Finding.STRAY),
    rests_on_unknown=True,
    evidence=(
        Evidence(finding=Finding.MISSING, bookie=A, first_entry_id=3, last_entry_id=9, code="no"),
        Evidence(finding=Finding.STRAY, detail="on a former member"),
    ),
    evidence_left_out=7,
    fragments=(
        FragmentVerdict(
            first_entry_id=0,
            last_entry_id=9,
            ensemble=(A, B, C),
            grade=Grade.AT_RISK,
            copies_least=1,
            rests_on_unknown=True,
        ),
    ),
    state="closed",
    length=1_000,
    last_entry_id=9,
    metadata_version=4,
    mtime_ms=1_700_000_000_000,
    entries_read=30,
    bytes_read=3_000,
    checked_ms=1_700_000_000_001,
)
VERDICTS = [
    LACKING,
    LedgerVerdict(ledger_id=1, grade=Grade.WHOLE, entries_read=5),
    LedgerVerdict(ledger_id=0, grade=Grade.UNKNOWN, findings=(Finding.UNREADABLE_METADATA,)),
    LedgerVerdict(ledger_id=3, grade=Grade.WHOLE, findings=(Finding.SUSPECT, Finding.STRAY)),
]


def test_a_verdict_survives_its_row_unchanged() -> None:
    table = pa.Table.from_batches([to_batch(VERDICTS)])

    assert list(from_table(table)) == VERDICTS


def test_a_partition_column_is_ignored() -> None:
    table = pa.Table.from_batches([to_batch(VERDICTS)])
    table = table.append_column("run", pa.array(["20261121T193500Z"] * len(VERDICTS)))

    assert list(from_table(table)) == VERDICTS


def test_counts_of_rows_equal_counts_of_verdicts() -> None:
    table = pa.Table.from_batches([to_batch(VERDICTS)])

    assert counts_of(table) == counted(VERDICTS)
    assert counts_of(SCHEMA.empty_table()) == counted([])


FRAGMENT = FragmentVerdict(
    first_entry_id=0, last_entry_id=9, ensemble=(A, B), grade=Grade.UNKNOWN, copies_least=0
)


def on_absent(
    *bookies: BookieId, beside: Finding | None = None, grade: Grade = Grade.UNKNOWN, copies: int = 0
) -> LedgerVerdict:
    evidence = [
        Evidence(finding=Finding.BOOKIE_GONE, bookie=b, first_entry_id=0, last_entry_id=9)
        for b in bookies
    ]
    return LedgerVerdict(
        ledger_id=5,
        grade=grade,
        findings=(Finding.BOOKIE_GONE, *([beside] if beside else [])),
        evidence=tuple(evidence),
        fragments=(replace(FRAGMENT, copies_least=copies),),
    )


@pytest.mark.parametrize(
    ("verdict", "bookies"),
    [
        (on_absent(A, B), {A, B}),
        (on_absent(B, beside=Finding.MISSING, grade=Grade.AT_RISK), {B}),
        (on_absent(A, copies=1), set()),
        (on_absent(A, grade=Grade.LOST), set()),
        (on_absent(A, beside=Finding.NOT_ANSWERED), set()),
        (on_absent(A, beside=Finding.STRAY, grade=Grade.AT_RISK), set()),
    ],
    ids=[
        "all absent",
        "absent or missing",
        "an available copy",
        "lost",
        "unanswered",
        "a former member's",
    ],
)
def test_bookies_with_the_only_copies_should_be_started(
    verdict: LedgerVerdict, bookies: set[BookieId]
) -> None:
    counts = counts_of(pa.Table.from_batches([to_batch([verdict, *VERDICTS])]))

    assert counts.away == dict.fromkeys(bookies, 1)
    assert counts.out_of_reach == bool(bookies)


def test_the_columns_keep_their_names() -> None:
    assert SCHEMA.names == [
        "ledger_id",
        "verdict",
        "is_wrong",
        "reasons",
        "rests_on_unknown",
        "evidence",
        "evidence_left_out",
        "fragments",
        "state",
        "length",
        "last_entry_id",
        "is_tail_unseen",
        "metadata_version",
        "mtime_ms",
        "entries_read",
        "bytes_read",
        "checked_ms",
    ]
