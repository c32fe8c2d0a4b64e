"""Findings of checks and fsck are repaired, even if Java's workers lease every mark that they
see."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from auditor.fsck.damage_marker import damaged_ledgers
from auditor.mark_reasons import SWEEP_S, read_findings
from auditor.settings import ChecksSettings
from tests.auditor.checking import check_each, checker
from tests.fsck.inspections import inspect_twice
from tests.fsck.test_damage_marker import publishing
from tests.replication.cluster import Cluster
from tests.replication.java_like import javas_worker
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import LEDGER, PATHS, working

EVERY = ChecksSettings(all_ledgers_share=1.0)
SOON_S = 1.0
LONG_S = 10.0


async def all_ledgers(cluster: Cluster) -> None:
    async with checker(cluster, settings=EVERY) as made:
        await check_each(made.all_ledgers, [LEDGER])


async def replicas(cluster: Cluster) -> None:
    async with checker(cluster) as made:
        await check_each(made.replicas, [LEDGER])


async def fsck(cluster: Cluster) -> None:
    verdict = await inspect_twice(cluster)
    assert verdict is not None
    async with publishing(cluster) as publisher:
        await publisher.mark(damaged_ledgers([verdict]))


by_each = pytest.mark.parametrize("find", [all_ledgers, replicas, fsck])
Find = Callable[[Cluster], Awaitable[None]]


async def a_ledger() -> Cluster:
    """Return a cluster with a ledger whose entries 0 to 9 are each on all three bookies."""
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), write_quorum=3, ack_quorum=2)
    return cluster


def lose_middle(cluster: Cluster) -> None:
    cluster.bookie(B2).lose(LEDGER, 4)


def damage_middle(cluster: Cluster) -> None:
    cluster.bookie(B2).corrupt(LEDGER, 4)


def damage_end(cluster: Cluster) -> None:
    """Damage an end. Java's LedgerChecker verifies no digest."""
    cluster.bookie(B2).corrupt(LEDGER, 9)


def lose_an_end_and_a_middle(cluster: Cluster) -> None:
    cluster.bookie(B1).lose(LEDGER, 0)
    cluster.bookie(B2).lose(LEDGER, 4)


def lose_both_on_one(cluster: Cluster) -> None:
    cluster.bookie(B2).lose(LEDGER, 0)
    cluster.bookie(B2).lose(LEDGER, 4)


by_harm = pytest.mark.parametrize(
    "harm", [lose_middle, damage_middle, damage_end, lose_an_end_and_a_middle, lose_both_on_one]
)


@by_each
@by_harm
async def test_damage_that_javas_worker_does_not_see_is_repaired(
    harm: Callable[[Cluster], None], find: Find
) -> None:
    cluster = await a_ledger()
    harm(cluster)

    async with javas_worker(cluster):
        await find(cluster)
        await asyncio.sleep(SOON_S)
        async with cluster.node() as node, working(node):
            await asyncio.sleep(LONG_S)

    await cluster.assert_whole()
    assert await cluster.marked() == []
    assert await cluster.marked(PATHS.private) == []


@by_each
async def test_a_finding_lasts_as_long_as_the_mark_that_java_leaves(
    find: Find,
) -> None:
    """The ledger has damage of both kinds: one that Java sees and one that it does not."""
    cluster = await a_ledger()
    lose_an_end_and_a_middle(cluster)

    async with javas_worker(cluster):
        await find(cluster)
        await asyncio.sleep(SWEEP_S + SOON_S)
    async with checker(cluster) as made:
        await made.findings.sweep()

    assert await cluster.marked() == []
    assert await cluster.marked(PATHS.private) == [LEDGER]
    assert B2 in (await read_findings(cluster.store, PATHS, [LEDGER]))[LEDGER].bookies


@by_each
@pytest.mark.parametrize(
    ("lost", "shared", "own"),
    [
        pytest.param(0, [LEDGER], [], id="the first entry"),
        pytest.param(9, [LEDGER], [], id="the last entry"),
        pytest.param(4, [], [LEDGER], id="an entry between the ends"),
    ],
)
async def test_a_mark_is_in_the_queue_of_a_worker_that_can_repair_it(
    lost: int, shared: list[int], own: list[int], find: Find
) -> None:
    cluster = await a_ledger()
    cluster.bookie(B2).lose(LEDGER, lost)

    await find(cluster)

    assert (await cluster.marked(), await cluster.marked(PATHS.private)) == (shared, own)
