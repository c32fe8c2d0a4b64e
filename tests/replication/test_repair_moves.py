"""Ledgers that are marked for their placement: moved where that is wanted, and never at a copy's
cost."""

import asyncio

import pytest

from ledgers.model import BookieId
from replication.reasons import Reason
from replication.repair import DONE, OutcomeKind
from tests.replication.cluster import (
    Cluster,
    lease_attempts,
    queue_empty,
    until,
)
from tests.replication.ledger_values import B1, B2, B3, B4, B5
from tests.replication.nodes import LEDGER, working
from tests.replication.repairs import repair

RACKS = {B1: "/a", B2: "/a", B3: "/a", B4: "/b", B5: "/c"}
HOUR_S = 3_600.0


async def misplaced(*bookies: BookieId) -> Cluster:
    """Return a whole ledger on B1 and B2 in one rack, marked for that."""
    cluster = await Cluster.start(*bookies)
    await cluster.write_ledger((B1, B2))
    await cluster.mark()
    return cluster


@pytest.mark.compat(
    "TestReplicationWorker.testRepairedNotAdheringPlacementPolicyLedgerFragmentsOnRack",
    verdict="same",
)
async def test_a_ledger_marked_for_its_placement_moves_to_another_rack() -> None:
    cluster = await misplaced(B1, B2, B3, B4)

    outcome = await repair(cluster, racks=RACKS, moves_misplaced=True)

    [ensemble] = await cluster.ensembles()
    assert outcome.kind is OutcomeKind.DONE
    assert B4 in ensemble
    assert all(cluster.has_good_copy(B4, LEDGER, entry_id) for entry_id in range(10))
    assert outcome.entry_count == 10
    await cluster.assert_whole()
    await cluster.assert_queue_empty()


async def test_the_ledger_is_only_unmarked_if_moves_are_not_wanted() -> None:
    cluster = await misplaced()

    assert await repair(cluster, racks=RACKS) == DONE

    assert await cluster.ensembles() == [(B1, B2)]
    await cluster.assert_queue_empty()


async def test_a_ledger_marked_for_a_returned_bookie_is_only_unmarked(cluster: Cluster) -> None:
    """Its mark asks for that bookie's copies, not for a better placement."""
    await cluster.write_ledger((B1, B2))
    await cluster.mark(B2)

    outcome = await repair(cluster, racks=RACKS, moves_misplaced=True)

    assert (outcome.kind, outcome.entry_count) == (OutcomeKind.DONE, 0)
    assert await cluster.ensembles() == [(B1, B2)]
    await cluster.assert_queue_empty()


async def test_a_failing_target_does_not_harm_the_ledger() -> None:
    """B4 fails: another one is chosen. The metadata stays until all is copied."""
    cluster = await misplaced(B1, B2, B3, B4, B5)
    cluster.bookie(B4).is_down = True

    outcome = await repair(cluster, racks=RACKS, moves_misplaced=True)

    [ensemble] = await cluster.ensembles()
    assert outcome.kind is OutcomeKind.DONE
    assert B4 not in ensemble
    assert B5 in ensemble
    await cluster.assert_whole()


@pytest.mark.compat(
    "G18",
    verdict="better",
    why="the ledger waits, without a lock, for a better bookie; it is inspected at most once an "
    "hour",
)
async def test_without_a_better_placement_the_ledger_waits() -> None:
    """It is moved when a bookie appears."""
    cluster = await misplaced(B1, B2, B3)
    taken_s = lease_attempts(cluster)
    async with (
        cluster.node(racks=RACKS, moves_misplaced=True) as node,
        working(node),
    ):
        await asyncio.sleep(6 * HOUR_S)

        [note] = await node.notes.read_all([LEDGER])
        assert note.reason is Reason.MISPLACED
        assert "at least 2 racks" in note.blocked.facts.errors[0]
        assert await cluster.locked() == []
        assert len([at_s for at_s in taken_s if at_s > taken_s[0] + 3 * HOUR_S]) <= 4
        assert await cluster.ensembles() == [(B1, B2)]

        await cluster.register(B4)
        assert await until(cluster, lambda: queue_empty(cluster)) < 30

    assert B4 in (await cluster.ensembles())[0]
    await cluster.assert_whole()
