"""The auditor in virtual time: which ledgers it marks after a loss, in which order, and what it
reports."""

import asyncio

import pytest
from prometheus_client import REGISTRY

from auditor import marker
from auditor.records import read_audit
from auditor.settings import AuditorSettings
from ledgers.model import BookieId
from replication.marks import read_urgent
from tests.auditor.auditing import auditing
from tests.auditor.scenes import (
    SOON_S,
    count_audits,
    marked_soon,
    replicas,
    set_delay,
    with_ledgers,
)
from tests.replication.cluster import Cluster, until
from tests.replication.ledger_values import B1, B2, B3, B4, B5
from tests.replication.nodes import PATHS, ROOT, working


@pytest.mark.compat("AuditorLedgerCheckerTest.testSimpleLedger", verdict="same")
async def test_the_ledgers_of_a_lost_bookie_are_marked() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3), (B2, B3))
    async with auditing(cluster):
        assert await marked_soon(cluster) == []

        await cluster.kill(B1)

        assert await marked_soon(cluster) == [0, 1]
        assert await replicas(cluster, 0) == (B1,)


async def test_workers_are_told_which_ledgers_are_urgent() -> None:
    """The list of urgent ledgers is empty again once their marks are deleted."""
    cluster = await with_ledgers((B1, B2), (B1, B2, B3), (B1, B3), (B4, B5))
    async with auditing(cluster, settings=AuditorSettings(bookie_check_interval_s=20)):
        await cluster.kill(B1, B3)
        await asyncio.sleep(SOON_S)
        urgent = await read_urgent(cluster.store, PATHS)
        assert set(urgent) == {0, 1, 2}
        assert urgent[-1] == 0, "the others have no copy left of some entries"

        await cluster.revive(B1)
        await cluster.revive(B3)
        await asyncio.sleep(20)
        assert await read_urgent(cluster.store, PATHS) == ()


async def test_bookies_lost_before_the_election_are_found_by_cookie() -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.kill(B1)

    async with auditing(cluster):
        assert await marked_soon(cluster) == [0]


async def test_a_bookie_without_cookie_that_a_ledger_names_is_lost_too() -> None:
    cluster = await with_ledgers((B1, B2), (B3, BookieId("decommissioned:3181")))

    async with auditing(cluster):
        assert await marked_soon(cluster) == [1]


async def test_a_bookie_whose_cookie_was_deleted_is_lost_when_it_stops() -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.store.delete(f"{ROOT}/cookies/{B1}")

    async with auditing(cluster):
        assert await marked_soon(cluster) == []
        await cluster.kill(B1)

        assert await marked_soon(cluster) == [0]


async def test_a_bookie_that_disappears_with_its_cookie_is_lost() -> None:
    cluster = await with_ledgers((B1, B2))

    async with auditing(cluster):
        assert await marked_soon(cluster) == []
        await set_delay(cluster, 0)  # asks for an audit, after which nothing happens for a while
        assert await marked_soon(cluster) == []
        await cluster.store.delete(f"{ROOT}/cookies/{B1}")
        await cluster.kill(B1)

        assert await marked_soon(cluster) == [0]


async def test_a_read_only_bookie_is_lost_only_once_it_disappears() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await cluster.register(B1, is_read_only=True)
        await cluster.store.delete(f"{ROOT}/available/{B1}")
        assert await marked_soon(cluster) == []

        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]


async def test_ledgers_with_the_fewest_copies_are_marked_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(marker, "MARKS_PER_MULTI", 1)
    cluster = await with_ledgers((B1, B3), (B1, B2), (B3, B4))
    await cluster.kill(B1, B2)

    async with auditing(cluster):
        assert await marked_soon(cluster) == [0, 1]

    worse, other = [await cluster.store.exists(PATHS.mark(i)) for i in (1, 0)]
    assert worse is not None
    assert other is not None
    assert worse.czxid < other.czxid
    assert await replicas(cluster, 1) == (B1, B2)


async def test_a_loss_is_handled_once() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster) as leader:
        await asyncio.sleep(SOON_S)
        audits = count_audits(leader)
        await cluster.kill(B1)
        await asyncio.sleep(100)
        await cluster.register(BookieId("new:3181"))
        await asyncio.sleep(100)

        assert len(audits) == 1


async def test_a_bookie_that_is_lost_a_second_time_is_audited_again() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]
        await cluster.revive(B1)
        await asyncio.sleep(SOON_S)
        await cluster.store.delete(PATHS.mark(0))  # a worker found it whole

        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]


@pytest.mark.compat("AuditorLedgerCheckerTest.testRestartBookie", verdict="same")
async def test_rule_s6_the_return_of_a_bookie_deletes_no_mark() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]

        await cluster.revive(B1)
        await asyncio.sleep(100)
        assert await cluster.marked() == [0]


@pytest.mark.compat("AuditorLedgerCheckerTest.testMultipleBookieFailures", verdict="same")
async def test_a_second_loss_marks_a_completed_ledger_again() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster), cluster.node() as node, working(node):
        await cluster.kill(B1)
        await until(cluster, lambda: _is_free_of(cluster, B1))
        assert await cluster.marked() == []

        await cluster.kill(B2)
        await until(cluster, lambda: _is_free_of(cluster, B2))

    await cluster.assert_whole(0)


@pytest.mark.compat(
    "AuditorBookieCheckTaskTest.testAuditBookies",
    verdict="same",
    why="in the record of the last audit, and in bookmender_marks_total",
)
async def test_the_number_of_marked_ledgers_is_logged() -> None:
    cluster = await with_ledgers(*[(B1, B2)] * 10, *[(B3, B4)] * 20)
    async with auditing(cluster):
        await asyncio.sleep(SOON_S)
        for bookie, count in ((B1, 10), (B3, 20)):
            before = marks_total("lost")
            await cluster.kill(bookie)
            await asyncio.sleep(SOON_S)

            audit = await read_audit(cluster.store, PATHS)
            assert audit is not None
            assert audit.mark_count == count
            assert marks_total("lost") - before == count


def marks_total(cause: str) -> float:
    return REGISTRY.get_sample_value("bookmender_marks_total", {"cause": cause}) or 0.0


async def _is_free_of(cluster: Cluster, bookie: BookieId) -> bool:
    return bookie not in (await cluster.metadata(0)).bookies and not await cluster.marked()


async def test_a_further_loss_extends_the_mark() -> None:
    cluster = await with_ledgers((B1, B2, B3))
    async with auditing(cluster):
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        await cluster.kill(B2)
        await asyncio.sleep(SOON_S)

        assert await replicas(cluster, 0) == (B1, B2)


async def test_the_result_of_the_last_audit_is_published() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    path = cluster.manager.path(1)
    _, stat = await cluster.store.get(path)
    await cluster.store.set(path, b"garbage", version=stat.version)

    async with auditing(cluster):
        await marked_soon(cluster)

    found = await read_audit(cluster.store, PATHS)
    assert found is not None
    assert (found.ledger_count, found.unreadable) == (2, (1,))
