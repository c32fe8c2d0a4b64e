"""Open ledgers of which what follows the last confirmed entry was not looked at: counted, and
said."""

import asyncio
import json
from pathlib import Path

import pyarrow as pa
import pytest

from auditor.fsck.options import Level
from auditor.fsck.results.finished_runs import verdict_history
from auditor.fsck.results.report import write_report
from auditor.fsck.results.rows import counts_of, from_table, to_batch
from auditor.fsck.results.summary import Counts
from daemon.fsck.advice import report_texts, tails_text
from daemon.fsck.texts import history_lines, summary_lines
from ledgers.bookies import LAST_ENTRY
from ledgers.errors import BusyError, NoAnswerError
from ledgers.memory.bookies import Fault, Op
from ledgers.model import BookieId, LedgerState
from tests.fsck.inspections import ALL, inspect_once, inspect_twice, one_ledger
from tests.fsck.results import leave_results, whole
from tests.fsck.test_report import Page
from tests.replication.cluster import in_virtual_time
from tests.replication.ledger_values import B1
from tests.replication.nodes import LEDGER

METADATA, ENDS, SAMPLE, FULL = Level
UNSEEN = whole(3, state="open", is_tail_unseen=True)


# --- A look ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [ENDS, SAMPLE, FULL], ids=lambda level: level.value)
@in_virtual_time
async def test_what_an_open_ledger_has_beyond_its_last_confirmed_entry_is_left_to_its_writer(
    level: Level,
) -> None:
    """Entry 9 is acknowledged, and lost but for one copy: only its writer knows."""
    cluster, _ = await one_ledger(state=LedgerState.OPEN, last=9)
    for bookie in ALL[1:]:
        cluster.bookie(bookie).lose(LEDGER, 9)

    verdict = await inspect_once(cluster, level)

    assert verdict.last_entry_id == 8
    assert verdict.is_tail_unseen


@in_virtual_time
async def test_that_nobody_writes_it_any_more_makes_nobody_look() -> None:
    cluster, _ = await one_ledger(state=LedgerState.OPEN, last=9)
    await asyncio.sleep(3_600)

    verdict = await inspect_twice(cluster, ENDS, idle_open_after_s=3_600.0)

    assert verdict is not None
    assert verdict.is_tail_unseen


@in_virtual_time
async def test_but_that_a_bookie_of_it_was_wiped_does() -> None:
    cluster, _ = await one_ledger(state=LedgerState.OPEN, last=9)
    await cluster.kill(B1)
    await cluster.wipe(B1)
    await cluster.revive(B1)
    await asyncio.sleep(3_600)

    verdict = await inspect_twice(cluster, ENDS, idle_open_after_s=3_600.0)

    assert verdict is not None
    assert not verdict.is_tail_unseen


@pytest.mark.parametrize(
    ("state", "level"),
    [
        pytest.param(LedgerState.CLOSED, FULL, id="closed"),
        pytest.param(
            LedgerState.IN_RECOVERY, FULL, id="in recovery: all that is shown is expected"
        ),
        pytest.param(LedgerState.OPEN, METADATA, id="no copy of any ledger is looked at"),
    ],
)
@in_virtual_time
async def test_no_other_ledger_has_a_tail_that_is_left(state: LedgerState, level: Level) -> None:
    cluster, _ = await one_ledger(state=state, last=9)

    assert not (await inspect_once(cluster, level)).is_tail_unseen


@in_virtual_time
async def test_but_a_recovery_of_which_a_bookie_does_not_say_how_far_it_has_the_ledger_has() -> (
    None
):
    """The others may all be without what came last."""
    cluster, _ = await one_ledger(state=LedgerState.IN_RECOVERY, last=9)
    read = cluster.bookies.read

    async def busy_with_the_last(bookie: BookieId, ledger_id: int, entry_id: int) -> bytes:
        if bookie == B1 and entry_id == LAST_ENTRY:
            raise BusyError("busy")
        return await read(bookie, ledger_id, entry_id)

    cluster.bookies.read = busy_with_the_last  # type: ignore[method-assign]

    assert (await inspect_once(cluster, FULL)).is_tail_unseen


@in_virtual_time
async def test_nor_one_whose_end_nobody_tells_which_is_unknown() -> None:
    cluster, _ = await one_ledger(state=LedgerState.OPEN, last=9)
    for bookie in ALL:
        cluster.bookies.fail(bookie, Op.READ_LAC, Fault(error=NoAnswerError))

    assert not (await inspect_once(cluster, ENDS)).is_tail_unseen


# --- What is said of them ----------------------------------------------------------------------------


def test_rows_keep_it_and_it_is_counted() -> None:
    table = pa.Table.from_batches([to_batch([UNSEEN, whole(1)])])

    assert list(from_table(table)) == [UNSEEN, whole(1)]
    assert counts_of(table).tails_unseen == 1
    assert (counts_of(table) + counts_of(table)).tails_unseen == 2


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, ""),
        (1, "entries after the last confirmed one were not checked in 1 open ledger"),
        (1_200, "entries after the last confirmed one were not checked in 1,200 open ledgers"),
    ],
)
def test_it_is_said_in_plain_words(count: int, text: str) -> None:
    said = tails_text(Counts(tails_unseen=count))

    assert said.startswith(text)
    assert bool(said) is bool(count)


def test_a_run_says_so_and_the_report_and_one_ledgers_past(tmp_path: Path) -> None:
    results = leave_results(tmp_path, [UNSEEN, whole(1)])
    text = tails_text(results.summary.counts)

    page = Page(write_report(results, {}, report_texts(results.summary)).read_text())

    assert text in summary_lines(results.summary)
    assert page.counts()["tails-unseen"] == 1
    assert text[1:] in page.text
    assert json.loads((tmp_path / "summary.json").read_text())["tails_unseen"] == 1
    said = [history_lines(verdict_history(tmp_path, ledger_id))[1] for ledger_id in (3, 1)]
    assert ["later entries not checked" in line for line in said] == [True, False]


def test_where_none_is_left_nothing_is_said(tmp_path: Path) -> None:
    results = leave_results(tmp_path, [whole(1)])

    page = Page(write_report(results, {}, report_texts(results.summary)).read_text())

    assert not any("not checked" in line for line in summary_lines(results.summary))
    assert "tails-unseen" not in page.counts()
