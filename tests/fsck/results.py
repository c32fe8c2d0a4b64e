"""Results of a run as its job writes them, from given verdicts."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from auditor.fsck.options import Level
from auditor.fsck.results.rows import VERSION, VERSION_NOTE, replace_table, to_batch
from auditor.fsck.results.run_folder import Results
from auditor.fsck.results.summary import Counts, Summary, write_summary
from auditor.fsck.verdicts import Evidence, Finding, FragmentVerdict, Grade, LedgerVerdict
from ledgers.model import BookieId

RUN = "20261121T193500Z"
LATER_RUN = "20261122T193500Z"
NOW_MS = 1_700_000_000_000
DAY_MS = 86_400_000


def leave_results(
    folder: Path, verdicts: Sequence[LedgerVerdict], run: str = RUN, **changes: Any
) -> Results:
    """Write the results in two files, as of two parts. ``changes``: of the summary."""
    path = folder / "ledgers" / f"run={run}"
    path.mkdir(parents=True)
    for number, part in enumerate((verdicts[:1], verdicts[1:])):
        table = pa.Table.from_batches([to_batch(part)])
        note = {VERSION_NOTE: str(VERSION)}
        replace_table(path / f"part-{number:05}.parquet", table, note=note)
    fields: dict[str, Any] = {
        "level": Level.FULL,
        "started_ms": NOW_MS - 90_000,
        "finished_ms": NOW_MS,
    } | changes
    write_summary(folder, Summary(run=run, counts=counted(verdicts), **fields))
    return Results.open(folder, run)


def counted(verdicts: Iterable[LedgerVerdict]) -> Counts:
    """Count the verdicts one by one."""
    verdicts = list(verdicts)
    grades = Counter(verdict.grade for verdict in verdicts)
    findings = Counter(finding for verdict in verdicts for finding in verdict.findings)
    return Counts(
        ledgers=len(verdicts),
        verdicts={grade.value: grades[grade] for grade in Grade},
        findings={finding.value: findings[finding] for finding in Finding},
        wrong=sum(verdict.is_wrong for verdict in verdicts),
        resting_on_unknown=sum(verdict.rests_on_unknown for verdict in verdicts),
        entries_read=sum(verdict.entries_read for verdict in verdicts),
        bytes_read=sum(verdict.bytes_read for verdict in verdicts),
        out_of_reach=sum(bool(verdict.bookies_to_start) for verdict in verdicts),
        away=dict(Counter(bookie for verdict in verdicts for bookie in verdict.bookies_to_start)),
        tails_unseen=sum(verdict.is_tail_unseen for verdict in verdicts),
    )


def whole(ledger_id: int, *, age_ms: int = DAY_MS // 2, **changes: Any) -> LedgerVerdict:
    return _verdict(ledger_id, Grade.WHOLE, age_ms=age_ms, **changes)


def damaged(
    ledger_id: int, grade: Grade, *evidence: Evidence, age_ms: int = DAY_MS // 2, **changes: Any
) -> LedgerVerdict:
    findings = tuple(f for f in Finding if f in {each.finding for each in evidence})
    return _verdict(
        ledger_id, grade, age_ms=age_ms, evidence=evidence, findings=findings, **changes
    )


def seen(finding: Finding, bookie: BookieId | None = None, **changes: Any) -> Evidence:
    fields: dict[str, Any] = {"first_entry_id": 3, "last_entry_id": 3, "entry_count": 1} | changes
    return Evidence(finding=finding, bookie=bookie, **fields)


def _verdict(ledger_id: int, grade: Grade, *, age_ms: int, **changes: Any) -> LedgerVerdict:
    fragment = FragmentVerdict(
        first_entry_id=0,
        last_entry_id=9,
        ensemble=(BookieId("a:1"), BookieId("b:1"), BookieId("c:1")),
        grade=grade,
        copies_least=2,
    )
    fields: dict[str, Any] = {
        "state": "closed",
        "length": 1_000,
        "fragments": (fragment,),
    } | changes
    return LedgerVerdict(
        ledger_id=ledger_id,
        grade=grade,
        last_entry_id=9,
        metadata_version=0,
        mtime_ms=NOW_MS - age_ms,
        checked_ms=NOW_MS,
        entries_read=30,
        bytes_read=3_000,
        **fields,
    )
