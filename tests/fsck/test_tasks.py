"""A task: the options with which it checks its ledgers, and work that its process avoids."""

import subprocess
import sys
from array import array
from collections.abc import Iterable

import pyarrow as pa
import pytest

from auditor.fsck import tasks
from auditor.fsck.budget import fixed_pace
from auditor.fsck.executor import Emit
from auditor.fsck.options import FsckOptions, Level
from auditor.fsck.results.plan import Part
from auditor.fsck.results.rows import to_batch
from auditor.fsck.tasks import Recheck, run_check
from auditor.fsck.verdicts import LedgerVerdict
from tests.fsck.planning import options
from tests.fsck.results import whole
from tests.virtual_time import run

SAMPLE = options(Level.SAMPLE, share=0.1)


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Return the share of the sample with which each ledger is checked."""
    seen: dict[int, float] = {}

    async def look(
        wanted: FsckOptions, asked: Iterable[int | LedgerVerdict], emit: Emit, **_: object
    ) -> None:
        for each in asked:
            ledger_id = each if isinstance(each, int) else each.ledger_id
            seen[ledger_id] = wanted.share_of(ledger_id)
            await emit(whole(ledger_id))

    monkeypatch.setattr(tasks, "inspect", look)
    monkeypatch.setattr(tasks, "recheck", look)
    return seen


def test_suspects_are_read_completely_and_others_by_the_sample(shares: dict[int, float]) -> None:
    part = Part(number=3, ledger_ids=array("q", [1, 2, 5]), full_scan=frozenset({2}))

    batches = run(run_check(part, SAMPLE, fixed_pace))

    assert shares == {1: 0.1, 2: 1.0, 5: 0.1}
    assert sum(batch.num_rows for batch in batches) == 3


def test_suspects_are_read_completely_at_the_recheck_too(shares: dict[int, float]) -> None:
    doubtful = {
        number: pa.Table.from_batches([to_batch([whole(ledger_id) for ledger_id in ledger_ids])])
        for number, ledger_ids in {0: [1, 2], 4: [5, 6]}.items()
    }

    batches = run(run_check(Recheck.at(doubtful, frozenset({2, 6})), SAMPLE, fixed_pace))

    assert shares == {1: 0.1, 2: 1.0, 5: 0.1, 6: 1.0}
    rows = pa.Table.from_batches(batches)
    parts = dict(zip(rows["ledger_id"].to_pylist(), rows["part"].to_pylist(), strict=True))
    assert parts == {1: 0, 2: 0, 5: 4, 6: 4}


# --- Work that a process of an executor avoids ----------------------------------------------------


SET_UP = """
import gc, sys
import pyarrow as pa
from auditor.fsck.tasks import set_up
set_up()
set_up()
assert pa.array(["whole"], pa.string()).to_pylist() == ["whole"]
assert "pandas" not in sys.modules
"""


@pytest.mark.parametrize(
    "then",
    [
        pytest.param("import pandas", id="imported"),
        pytest.param(
            "assert list(pa.table({'n': [1]}).to_pandas()['n']) == [1]", id="used by pyarrow"
        ),
        pytest.param(
            "import pandas; assert pa.array(pandas.Series([1])).to_pylist() == [1]",
            id="given to pyarrow",
        ),
    ],
)
def test_pandas_is_imported_only_if_it_is_used(then: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SET_UP + then], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr


def test_imported_objects_are_exempt_from_garbage_collection() -> None:
    then = "assert len(gc.get_objects()) < gc.get_freeze_count() / 10, len(gc.get_objects())"
    done = subprocess.run(
        [sys.executable, "-c", SET_UP + then], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
