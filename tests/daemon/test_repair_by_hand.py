"""``bookmender repair``: which ledgers it finds, and what it says of those that it can do nothing for."""

import json

import pytest
from click.testing import CliRunner

from daemon.operating import repair_command
from daemon.operating.repair_by_hand import RepairedByHand, find_ledgers
from tests.auditor.scenes import with_ledgers
from tests.daemon.visits import visiting
from tests.replication.cluster import in_virtual_time
from tests.replication.ledger_values import B1, B2, B3


@in_virtual_time
async def test_one_that_is_not_there_or_damaged_stops_none_of_the_others() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3), (B2, B3))
    await cluster.store.set(cluster.manager.path(1), b"", version=-1)

    found = await find_ledgers(visiting(cluster), [99, 1, 0], None)
    also_named = await find_ledgers(visiting(cluster), [99], B2)

    assert [each.ledger_id for each in found.ledgers] == [0]
    assert found.failed.keys() == {99, 1}
    assert "no such ledger" in found.failed[99]
    assert "cannot be read" in found.failed[1]
    assert {each.ledger_id for each in also_named.ledgers} == {0, 2}
    assert also_named.failed.keys() == {99}


@pytest.mark.parametrize("ledger_count", [0, 1])
def test_it_is_said_for_people_and_for_programs(
    monkeypatch: pytest.MonkeyPatch, ledger_count: int
) -> None:
    async def done(*_: object) -> RepairedByHand:
        return RepairedByHand(ledger_count=ledger_count, failed={99: "no such ledger"})

    monkeypatch.setenv("BOOKMENDER_METADATA_SERVICE_URI", "zk+hierarchical://127.0.0.1:1/ledgers")
    monkeypatch.setattr(repair_command, "_run", done)

    text = CliRunner().invoke(repair_command.repair, ["20", "99"])
    record = CliRunner().invoke(repair_command.repair, ["20", "99", "-o", "json"])

    assert (text.exit_code, record.exit_code) == (1, 1)
    whole = "1 ledger whole" if ledger_count else "0 ledgers whole"
    assert text.stdout.splitlines() == ["ledger 99: no such ledger", whole]
    assert json.loads(record.stdout)["failed"] == [{"ledger_id": 99, "error": "no such ledger"}]
    assert json.loads(record.stdout)["error"] == "nothing could be done for 1 ledger"
