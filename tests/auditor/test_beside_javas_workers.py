"""What checks and fsck find is mended, also where Java's workers take every mark that they see."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from auditor.findings import SWEEP_S, read_findings
from auditor.fsck.publishing import faults_of
from auditor.settings import ChecksSettings
from tests.auditor.checking import checker
from tests.fsck.looking import look_twice
from tests.fsck.test_publishing import publishing
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.java_like import javas_worker
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import LEDGER, PATHS, working

EVERY = ChecksSettings(all_ledgers_share=1.0)
SOON_S = 1.0
LONG_S = 10.0


async def all_ledgers(cluster: Cluster) -> None:
    async with checker(cluster, settings=EVERY) as made:
        await made.all_ledgers.look_at([LEDGER])


async def replicas(cluster: Cluster) -> None:
    async with checker(cluster) as made:
        await made.replicas.look_at([LEDGER])


async def fsck(cluster: Cluster) -> None:
    verdict = await look_twice(cluster)
    assert verdict is not None
    async with publishing(cluster) as publisher:
        await publisher.publish(faults_of([verdict]))


by_each = pytest.mark.parametrize("find", [all_ledgers, replicas, fsck])
Find = Callable[[Cluster], Awaitable[None]]


async def a_ledger() -> Cluster:
    """Entries 0 to 9, each on all three."""
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), write_quorum=3, ack_quorum=2)
    return cluster


def lose_middle(cluster: Cluster) -> None:
    cluster.bookie(B2).lose(LEDGER, 4)


def damage_middle(cluster: Cluster) -> None:
    cluster.bookie(B2).corrupt(LEDGER, 4)


def damage_end(cluster: Cluster) -> None:
    """No digest is checked by Java's LedgerChecker."""
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
@in_virtual_time
async def test_what_javas_worker_would_find_whole_is_mended_by_ours(
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
@in_virtual_time
async def test_of_a_ledger_with_both_kinds_the_finding_lives_as_long_as_the_mark_that_java_leaves(
    find: Find,
) -> None:
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
        pytest.param(4, [], [LEDGER], id="one between"),
    ],
)
@in_virtual_time
async def test_a_mark_stands_where_somebody_can_do_something_about_it(
    lost: int, shared: list[int], own: list[int], find: Find
) -> None:
    cluster = await a_ledger()
    cluster.bookie(B2).lose(LEDGER, lost)

    await find(cluster)

    assert (await cluster.marked(), await cluster.marked(PATHS.private)) == (shared, own)
