"""``bookmender plan`` shows ledgers that miss no copy but have an unproven end."""

from collections.abc import Collection, Sequence
from contextlib import nullcontext

import pytest

from daemon.cli import plan as plan_command
from daemon.cli.plan import to_text
from daemon.operations import plan as planning
from daemon.operations.plan import RepairPlan, plan
from ledgers.model import BookieId, LedgerState
from replication.by_hand import Preview
from replication.plan import Plan
from replication.reasons import Facts
from tests.daemon.in_memory import InMemory
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2
from tests.virtual_time import run


@pytest.fixture(autouse=True)
def _whole_previews(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every preview whole, without asking bookies."""

    class Whole:
        async def preview(self, ledger_id: int, *, suspects: Collection[BookieId]) -> Preview:
            return Preview(ledger_id=ledger_id, plan=Plan())

    monkeypatch.setattr(planning, "open_previewer", lambda *_, **__: nullcontext(Whole()))


async def prepare(cluster: Cluster) -> None:
    """Create ledgers 1 to 3. Recoveries of 1 and 2 failed, and 2 was closed since."""
    await cluster.write_ledger((B1, B2), ledger_id=1, state=LedgerState.IN_RECOVERY)
    await cluster.write_ledger((B1, B2), ledger_id=2)
    await cluster.write_ledger((B1, B2), ledger_id=3)
    async with cluster.node() as worker:
        for ledger_id in (1, 2):
            await worker.note_unproven(ledger_id, Facts(errors=("B2 was reformatted",)))


async def planned(ledger_ids: Sequence[int], bookie: BookieId | None = None) -> RepairPlan:
    cluster = await Cluster.start()
    await prepare(cluster)
    return await plan(visiting(cluster), ledger_ids, bookie, limit=9)


@in_virtual_time
async def test_without_ids_unmarked_ledgers_are_reported_too() -> None:
    found = await planned([])

    assert "the end of 1 other ledger cannot be proven: ledger 1." in to_text(found)
    assert (found.unproven_ends.count, found.unproven_ends.ledgers) == (1, [1])


@pytest.mark.parametrize(
    ("ledger_ids", "bookie"), [([1, 2, 3], None), ([], B1)], ids=["named", "of a bookie"]
)
def test_planned_ledgers_with_an_unproven_end_are_named(
    ledger_ids: Sequence[int], bookie: BookieId | None
) -> None:
    found = run(planned(ledger_ids, bookie))

    assert to_text(found).splitlines()[:3] == [
        "ledger 1: nothing to copy, but its end cannot be proven: see bookmender ledger show 1",
        "ledger 2: nothing to do",
        "ledger 3: nothing to do",
    ]
    assert (found.unproven_ends.count, found.unproven_ends.ledgers) == (1, [1])


@pytest.mark.parametrize(
    ("arguments", "exit_code"), [((), 1), (("1",), 1), (("3",), 0)], ids=["all", "one", "another"]
)
def test_an_unproven_end_exits_with_1(
    in_memory: InMemory, arguments: tuple[str, ...], exit_code: int
) -> None:
    result, _ = in_memory(plan_command.plan, *arguments, prepare=prepare)

    assert result.exit_code == exit_code
