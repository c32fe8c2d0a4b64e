"""A host that cannot write its journal of metadata writes: it changes nothing, and reports that."""

import asyncio

from structlog.testing import capture_logs

from ledgers.errors import JournalError
from replication.ledger_record import WaitingNotes
from replication.reasons import Reason
from replication.repair import OutcomeKind
from tests.replication.ledger_values import B2
from tests.replication.nodes import LEDGER, PATHS, working
from tests.replication.repairs import blocked_by, lost_b2, open_ledger, repair


async def full(ledger_id: int, before: bytes, after: bytes) -> None:
    raise JournalError("cannot write to /var/lib/x: No space left on device. Free disk space")


async def test_rule_s2_without_a_record_the_repair_is_deferred() -> None:
    """Nothing is changed."""
    cluster = await lost_b2()
    before = await cluster.manager.read(LEDGER)

    outcome = await repair(cluster, journal=full)

    assert (outcome.kind, outcome.reason) == (OutcomeKind.WAITING, Reason.JOURNAL)
    (error,) = blocked_by(outcome).facts.errors
    assert "/var/lib/x" in error
    assert "Free disk space" in error
    assert await cluster.manager.read(LEDGER) == before


async def test_an_open_ledger_is_not_recovered_without_a_record() -> None:
    cluster = await open_ledger()
    await cluster.kill(B2)
    before = await cluster.manager.read(LEDGER)

    async with cluster.node(journal=full) as node:
        lease = await node.lease()
        first = await node.repairer.repair(lease)
        outcome = await node.repairer.repair(lease, first.sighting)

    assert outcome.reason is Reason.JOURNAL
    assert await cluster.manager.read(LEDGER) == before


async def test_it_is_noted_without_a_traceback() -> None:
    """Another node repairs the ledger meanwhile."""
    cluster = await lost_b2()
    with capture_logs() as logs:
        async with cluster.node("full", journal=full) as ours, working(ours):
            await asyncio.sleep(60)
            (note,) = await WaitingNotes(cluster.store, PATHS).read_all([LEDGER])
            assert note.reason is Reason.JOURNAL

            async with cluster.node("healthy") as other, working(other):
                await asyncio.sleep(60)

    await cluster.assert_queue_empty()
    await cluster.assert_whole()
    assert "repair.crashed" not in {line["event"] for line in logs}
    told = [line["log_level"] for line in logs if line["event"] == "ledger.deferred"]
    assert told == ["debug"], "the journal has said it, once for all ledgers"
