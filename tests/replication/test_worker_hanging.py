"""Ledgers that need a bookie which accepts connections and never answers delay no other ledgers."""

import asyncio

import pytest

from ledgers.errors import NoAnswerError
from ledgers.model import BookieId, LedgerState
from replication.settings import ReplicationSettings
from tests.memory.bookies import NO_FAULT, Fault
from tests.replication.cluster import Cluster, until
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import working
from tests.replication.repairs import THREE

OPEN_LEDGERS = 100
PLACES = 8
SETTINGS = ReplicationSettings(ledgers_at_once=PLACES, idle_wait_s=1, open_ledger_grace_s=30)
SILENCE = Fault(delay_s=5.0, error=NoAnswerError)


async def with_open_ledgers(hanging: BookieId) -> Cluster:
    """Return open ledgers marked for B2, which is not registered because it hangs or is dead."""
    cluster = await Cluster.start()
    for ledger_id in range(OPEN_LEDGERS):
        await cluster.write_ledger(
            THREE,
            ledger_id=ledger_id,
            last=3,
            write_quorum=3,
            ack_quorum=2,
            state=LedgerState.OPEN,
        )
        await cluster.mark(B2, ledger_id=ledger_id, ctime_ms=1)
    await (cluster.unregister(B2) if hanging == B2 else cluster.kill(B2))
    cluster.bookies.faults = lambda bookie, op, _: SILENCE if bookie == hanging else NO_FAULT
    return cluster


@pytest.mark.parametrize(
    ("hanging", "after_s"),
    [
        pytest.param(B2, 0, id="whether it is written to is asked before the grace"),
        pytest.param(B3, 31, id="the ledgers are recovered after it"),
    ],
)
async def test_open_ledgers_of_a_hanging_bookie_delay_no_closed_ones(
    hanging: BookieId, after_s: float
) -> None:
    """Were they to keep their places, the closed ones would wait for 5 s of each eighth of them."""
    cluster = await with_open_ledgers(hanging)
    closed = range(OPEN_LEDGERS, OPEN_LEDGERS + 5)

    async def are_done() -> bool:
        return not set(await cluster.marked()).intersection(closed)

    async with cluster.node(settings=SETTINGS) as node, working(node):
        await asyncio.sleep(after_s)
        for ledger_id in closed:
            await cluster.write_ledger((B1, B2), ledger_id=ledger_id, last=3)
            await cluster.mark(B2, ledger_id=ledger_id, ctime_ms=2)

        took_s = await until(cluster, are_done)

    assert took_s < 0.5 * OPEN_LEDGERS / PLACES * SILENCE.delay_s
