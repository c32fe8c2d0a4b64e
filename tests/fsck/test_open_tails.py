"""Entries of open ledgers after the last confirmed one: not checked, counted and reported."""

import asyncio
import json
from pathlib import Path

import pyarrow as pa
import pytest

from auditor.fsck.options import Level
from auditor.fsck.results.rows import counts_of, from_table, to_batch
from auditor.fsck.results.run_folder import verdict_history
from auditor.fsck.results.summary import Counts
from daemon.fsck.advice import tails_text
from daemon.fsck.texts import history_lines, summary_lines
from ledgers.bookies import LAST_ENTRY
from ledgers.errors import BusyError, NoAnswerError
from ledgers.model import BookieId, LedgerState
from tests.fsck.inspections import ALL, inspect_once, inspect_twice, one_ledger
from tests.fsck.results import leave_results, whole
from tests.fsck.test_report import Page, text_of
from tests.memory.bookies import Fault, Op
from tests.replication.cluster import in_virtual_time
from tests.replication.ledger_values import B1
from tests.replication.nodes import LEDGER

METADATA, ENDS, SAMPLE, FULL = Level
UNSEEN = whole(3, state="open", is_tail_unseen=True)


# --- Inspecting -----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [ENDS, SAMPLE, FULL], ids=lambda level: level.value)
@in_virtual_time
async def test_entries_after_the_last_confirmed_one_are_not_checked(level: Level) -> None:
    """Only the writer knows that entry 9, with one copy left, was acknowledged."""
    cluster, _ = await one_ledger(state=LedgerState.OPEN, last=9)
    for bookie in ALL[1:]:
        cluster.bookie(bookie).lose(LEDGER, 9)

    verdict = await inspect_once(cluster, level)

    assert verdict.last_entry_id == 8
    assert verdict.is_tail_unseen


@in_virtual_time
async def test_an_idle_ledgers_tail_is_not_checked() -> None:
    cluster, _ = await one_ledger(state=LedgerState.OPEN, last=9)
    await asyncio.sleep(3_600)

    verdict = await inspect_twice(cluster, ENDS, idle_open_after_s=3_600.0)

    assert verdict is not None
    assert verdict.is_tail_unseen


@in_virtual_time
async def test_with_a_reformatted_bookie_the_tail_is_checked() -> None:
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
            LedgerState.IN_RECOVERY, FULL, id="in recovery: every stored entry is expected"
        ),
        pytest.param(LedgerState.OPEN, METADATA, id="level metadata reads no copy"),
    ],
)
@in_virtual_time
async def test_only_open_ledgers_have_an_unchecked_tail(state: LedgerState, level: Level) -> None:
    cluster, _ = await one_ledger(state=state, last=9)

    assert not (await inspect_once(cluster, level)).is_tail_unseen


@in_virtual_time
async def test_an_unanswered_tail_in_recovery_is_unchecked() -> None:
    """All bookies that answer may lack the last entries."""
    cluster, _ = await one_ledger(state=LedgerState.IN_RECOVERY, last=9)
    read = cluster.bookies.read

    async def busy_with_the_last(bookie: BookieId, ledger_id: int, entry_id: int) -> bytes:
        if bookie == B1 and entry_id == LAST_ENTRY:
            raise BusyError("busy")
        return await read(bookie, ledger_id, entry_id)

    cluster.bookies.read = busy_with_the_last  # type: ignore[method-assign]

    assert (await inspect_once(cluster, FULL)).is_tail_unseen


@in_virtual_time
async def test_a_ledger_with_an_unknown_end_has_no_unchecked_tail() -> None:
    cluster, _ = await one_ledger(state=LedgerState.OPEN, last=9)
    for bookie in ALL:
        cluster.bookies.fail(bookie, Op.READ_LAC, Fault(error=NoAnswerError))

    assert not (await inspect_once(cluster, ENDS)).is_tail_unseen


# --- Reports --------------------------------------------------------------------------------------


def test_unchecked_tails_are_stored_and_counted() -> None:
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
def test_the_count_of_unchecked_tails_has_a_text(count: int, text: str) -> None:
    assert tails_text(Counts(tails_unseen=count)) == text


def test_run_report_and_history_mention_unchecked_tails(tmp_path: Path) -> None:
    results = leave_results(tmp_path, [UNSEEN, whole(1)])
    text = tails_text(results.summary.counts)

    page = Page(text_of(results))

    assert text in summary_lines(results.summary)
    assert page.counts()["tails-unseen"] == 1
    assert text[1:] in page.text
    assert json.loads((tmp_path / "summary.json").read_text())["tails_unseen"] == 1
    said = [history_lines(verdict_history(tmp_path, ledger_id))[1] for ledger_id in (3, 1)]
    assert ["later entries not checked" in line for line in said] == [True, False]


def test_without_unchecked_tails_they_are_not_mentioned(tmp_path: Path) -> None:
    results = leave_results(tmp_path, [whole(1)])

    page = Page(text_of(results))

    assert not any("not checked" in line for line in summary_lines(results.summary))
    assert "tails-unseen" not in page.counts()
