"""A whole run in this process, with a fake inspection of the ledgers."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from auditor.fsck import run as run_module
from auditor.fsck import tasks
from auditor.fsck.executor import Emit
from auditor.fsck.options import FsckJob, FsckOptions, FsckProgress, Level
from auditor.fsck.results.plan import PART_MAX, read_checked
from auditor.fsck.results.run_folder import Results, unfinished_runs
from auditor.fsck.results.summary import Summary
from auditor.fsck.run import InThisProcess, run_fsck
from auditor.fsck.verdicts import Finding, Grade, LedgerVerdict
from ledgers.errors import UnavailableError
from tests.fsck.planning import options
from tests.fsck.results import RUN, damaged, seen, whole

LOST = damaged(3, Grade.LOST, seen(Finding.MISSING))
SUSPECTED = damaged(4, Grade.UNKNOWN, seen(Finding.NOT_ANSWERED))


class Parts(InThisProcess):
    """One part after the other."""

    slot_count = 1


@dataclass(slots=True)
class Ledgers:
    """A fake of executors. Ledger 4 seems wrong at first; 5 and 6 are deleted during the run."""

    inspected: list[int] = field(default_factory=list)
    rechecked: list[int] = field(default_factory=list)

    async def list_ledger_ids(self, *_: object, **__: object) -> "array[int]":
        return array("q", range(1, 7))

    async def inspect(
        self, wanted: FsckOptions, ledger_ids: Iterable[int], emit: Emit, **_: object
    ) -> None:
        for ledger_id in ledger_ids:
            self.inspected.append(ledger_id)
            if ledger_id < 5:
                found = {3: LOST, 4: SUSPECTED}.get(ledger_id, whole(ledger_id))
                await emit(replace(found, entries_read=10))

    async def recheck(
        self, wanted: FsckOptions, verdicts: Iterable[LedgerVerdict], emit: Emit, **_: object
    ) -> None:
        for verdict in verdicts:
            self.rechecked.append(verdict.ledger_id)
            await emit(LOST if verdict.ledger_id == 3 else whole(4))


@pytest.fixture
def ledgers(monkeypatch: pytest.MonkeyPatch) -> Ledgers:
    made = Ledgers()
    monkeypatch.setitem(PART_MAX, Level.ENDS, 2)
    monkeypatch.setattr(run_module, "list_ledger_ids", made.list_ledger_ids)
    monkeypatch.setattr(tasks, "inspect", made.inspect)
    monkeypatch.setattr(tasks, "recheck", made.recheck)
    return made


def check(folder: Path, progress: list[FsckProgress], **job: Any) -> Summary:
    wanted = FsckJob(run=RUN, output=folder, **job)
    return run_fsck(Parts(), options(), wanted, progress.append)


def test_what_seems_wrong_is_reported_after_the_recheck(ledgers: Ledgers, tmp_path: Path) -> None:
    progress: list[FsckProgress] = []

    summary = check(tmp_path, progress)

    assert (ledgers.inspected, ledgers.rechecked) == ([1, 2, 3, 4, 5, 6], [3, 4])
    assert {grade: n for grade, n in summary.counts.verdicts.items() if n} == {
        "lost": 1,
        "whole": 3,
    }
    assert (summary.gone, summary.left, summary.exit_code) == (2, 0, 1)
    assert summary.counts.entries_read == 4 * 10 + 2 * 30, "of both checks"
    assert [each.ledger_id for each in Results.open(tmp_path).wrong()] == [3]
    assert read_checked(tmp_path / "state").num_rows == 4
    assert [(each.phase, each.ledgers_done, each.ledgers_expected) for each in progress] == [
        *(("checking", done, 6) for done in (0, 2, 4, 6)),
        *(("rechecking", done, 2) for done in (0, 2)),
        ("writing", 0, 0),
    ]


def test_a_continued_run_repeats_no_part(ledgers: Ledgers, tmp_path: Path) -> None:
    def die(progress: FsckProgress) -> None:
        if progress.ledgers_done == 4:
            raise UnavailableError("the driver dies")

    job = FsckJob(run=RUN, output=tmp_path)
    with pytest.raises(UnavailableError):
        run_fsck(Parts(), options(), job, die)
    assert unfinished_runs(tmp_path) == [RUN]
    assert not (tmp_path / "ledgers").exists()

    summary = check(tmp_path, [])

    assert ledgers.inspected == [1, 2, 3, 4, 5, 6]
    assert (summary.counts.ledgers, summary.gone) == (4, 2)
    assert unfinished_runs(tmp_path) == []


def test_a_run_without_time_leaves_ledgers_for_the_next_run(
    ledgers: Ledgers, tmp_path: Path
) -> None:
    summary = check(tmp_path, [], time_budget_s=1e-9)

    assert (summary.left, summary.counts.ledgers, summary.is_complete) == (6, 0, False)
