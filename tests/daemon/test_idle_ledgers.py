"""Open ledgers that seem to have no writer, by the sightings of the check."""

import asyncio
import math

import pytest

from auditor.checks.idle import LastChange
from auditor.settings import ChecksSettings
from daemon.cli.ledger import idle_exit_code
from daemon.operations.close import doubts_about
from daemon.operations.ledgers import IdleLedger, IdleLedgers, find_idle
from ledgers.model import LedgerState
from tests.daemon.closing import DAY_S, remember
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time, shut_out
from tests.replication.ledger_values import B1, B2

IDLE = IdleLedger(ledger_id=1, state="OPEN", idle_s=DAY_S, last_entry_id=9, bookies=[B1, B2])


@in_virtual_time
async def test_unchanged_open_ledgers_are_listed_longest_idle_first() -> None:
    cluster = await Cluster.start()
    for ledger_id in range(4):
        await cluster.write_ledger((B1, B2), ledger_id=ledger_id, state=LedgerState.OPEN)
    await cluster.write_ledger((B1, B2), ledger_id=4)
    seen_ms = cluster.clock.wall_ms()
    ages_s = {3: 3, 0: 2, 1: 2, 4: 2, 5: 2, 2: 0}
    await remember(
        cluster,
        {
            ledger_id: LastChange(last_entry_id=9, since_ms=seen_ms + 1000 * (3 - age_s))
            for ledger_id, age_s in ages_s.items()
        },
    )
    await asyncio.sleep(3)
    versioned = await cluster.manager.read(1)
    await cluster.manager.write(1, versioned.metadata, read_as=versioned)

    found = await find_idle(visiting(cluster), after_s=1, clock=cluster.clock)

    assert [each.ledger_id for each in found.ledgers] == [3, 0]
    assert found.checked_ms is None
    assert found.ledgers[0].idle_s == 3
    assert found.ledgers[0].bookies == [B1, B2]


@in_virtual_time
async def test_unreadable_ledgers_are_not_listed() -> None:
    cluster = await Cluster.start()
    for ledger_id in range(3):
        await cluster.write_ledger((B1, B2), ledger_id=ledger_id, state=LedgerState.OPEN)
    seen = LastChange(last_entry_id=9, since_ms=cluster.clock.wall_ms())
    await remember(cluster, dict.fromkeys(range(3), seen))
    await cluster.store.set(cluster.manager.path(0), b"", version=-1)
    await asyncio.sleep(3)

    admin_session = visiting(cluster)
    shut_out(admin_session.store, cluster.manager.path(1))

    found = await find_idle(admin_session, after_s=1, clock=cluster.clock)

    assert [each.ledger_id for each in found.ledgers] == [2]


@pytest.mark.parametrize(
    ("ledgers", "checked_ms", "code"),
    [
        pytest.param([], 5_000, 0, id="none"),
        pytest.param([IDLE], 5_000, 1, id="one"),
        pytest.param([], None, 3, id="no check yet"),
        pytest.param([IDLE], None, 1, id="the first check is under way"),
    ],
)
def test_without_a_completed_check_the_exit_code_is_3(
    ledgers: list[IdleLedger], checked_ms: int | None, code: int
) -> None:
    found = IdleLedgers(ledgers=ledgers, checked_ms=checked_ms, unreadable_records=[])

    assert idle_exit_code(found) == code


def test_a_setting_of_0_counts_no_ledger_as_idle() -> None:
    """0 means never, not at once: a closing still has a doubt."""
    assert ChecksSettings(idle_open_after_s=0).counts_as_idle_after_s == math.inf
    assert ChecksSettings(idle_open_after_s=60).counts_as_idle_after_s == 60
    seen = LastChange(last_entry_id=9, since_ms=0)
    told = doubts_about(seen, last_entry_id=9, written_ms=0, now_ms=10**12, after_s=math.inf)
    assert len(told) == 1
