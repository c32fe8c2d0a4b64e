"""What ``bookmender status`` says of ledgers whose end cannot be proven."""

from dataclasses import replace

from daemon.status.command import render
from daemon.status.gathering import gather_status
from ledgers.model import LedgerState
from replication.reasons import Facts
from tests.daemon.status_values import WHOLE
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2


def test_ends_that_cannot_be_proven_are_counted_with_what_to_do() -> None:
    status = replace(WHOLE, unproven=tuple(range(1, 11)))

    lines = render(status, now_ms=0).splitlines()

    assert lines[0] == "verdict   ends-unproven (an operator is needed for the end of 10 ledgers)"
    assert (
        "ends      10 cannot be proven: ledger 1, 2, 3, 4, 5, 6, 7, 8, …; bookmender ledger show ID says "
        "why, and what helps"
    ) in lines
    assert status.to_json()["unproven_ends"] == {"count": 10, "ledgers": list(range(1, 11))}


@in_virtual_time
async def test_a_ledger_whose_end_cannot_be_proven_is_told_until_it_is_closed() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2), ledger_id=1, state=LedgerState.IN_RECOVERY)
    await cluster.write_ledger((B1, B2), ledger_id=2)
    async with cluster.node() as worker:
        for ledger_id in (1, 2):
            await worker.ends.note(ledger_id, Facts(errors=("why",)))

    assert (await gather_status(visiting(cluster))).unproven == (1,)
