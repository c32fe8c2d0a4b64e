"""Which open ledgers nobody seems to write any more, by what the check saw, and how that is
told."""

import asyncio
import math

import pytest

from auditor.checks.idle import LastChange
from auditor.settings import ChecksSettings
from daemon.cli.close_ledger import doubts_about
from daemon.cli.idle import IdleLedger, IdleLedgers, exit_code, find_idle
from ledgers.model import LedgerState
from tests.daemon.closing import DAY_S, remember
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time, shut_out
from tests.replication.ledger_values import B1, B2

IDLE = IdleLedger(
    ledger_id=1, state=LedgerState.OPEN, idle_s=DAY_S, last_entry_id=9, bookies=(B1, B2)
)


@in_virtual_time
async def test_those_that_are_still_as_they_were_seen_are_listed_the_longest_idle_first() -> None:
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
    assert found.ledgers[0].bookies == (B1, B2)


@in_virtual_time
async def test_of_those_that_cannot_be_read_any_more_nothing_is_listed() -> None:
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
        pytest.param((), 5_000, 0, id="none"),
        pytest.param((IDLE,), 5_000, 1, id="one"),
        pytest.param((), None, 3, id="no check has looked yet"),
        pytest.param((IDLE,), None, 1, id="the first check is still looking"),
    ],
)
def test_that_nobody_has_looked_for_idle_ledgers_is_not_that_there_are_none(
    ledgers: tuple[IdleLedger, ...], checked_ms: int | None, code: int
) -> None:
    assert exit_code(IdleLedgers(ledgers=ledgers, checked_ms=checked_ms)) == code


def test_where_the_settings_count_none_as_idle_none_is_however_long_it_was() -> None:
    """0 is no time but never: not "idle from the first moment on", nor closed without a doubt."""
    assert ChecksSettings(idle_open_after_s=0).counts_as_idle_after_s == math.inf
    assert ChecksSettings(idle_open_after_s=60).counts_as_idle_after_s == 60
    seen = LastChange(last_entry_id=9, since_ms=0)
    told = doubts_about(seen, last_entry_id=9, written_ms=0, now_ms=10**12, after_s=math.inf)
    assert len(told) == 1
