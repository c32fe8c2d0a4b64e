"""The Auditor in virtual time: whose ledgers it marks when a bookie is lost, in what order, and
what it says of it."""

import asyncio

import pytest
from prometheus_client import REGISTRY

from auditor import marker
from auditor.records import last_audit
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
from tests.replication.cluster import Cluster, in_virtual_time, until
from tests.replication.ledger_values import B1, B2, B3, B4, B5
from tests.replication.nodes import PATHS, ROOT, working


@pytest.mark.compat("AuditorLedgerCheckerTest.testSimpleLedger", verdict="same")
@in_virtual_time
async def test_the_ledgers_of_a_bookie_that_goes_are_marked() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3), (B2, B3))
    async with auditing(cluster):
        assert await marked_soon(cluster) == []

        await cluster.kill(B1)

        assert await marked_soon(cluster) == [0, 1]
        assert await replicas(cluster, 0) == (B1,)


@in_virtual_time
async def test_workers_are_told_which_ledgers_are_the_most_endangered_and_when_none_is_any_more() -> (
    None
):
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


@in_virtual_time
async def test_bookies_lost_before_the_election_are_found_by_their_cookies() -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.kill(B1)

    async with auditing(cluster):
        assert await marked_soon(cluster) == [0]


@in_virtual_time
async def test_a_bookie_that_a_ledger_names_though_it_has_no_cookie_is_lost_too() -> None:
    cluster = await with_ledgers((B1, B2), (B3, BookieId("decommissioned:3181")))

    async with auditing(cluster):
        assert await marked_soon(cluster) == [1]


@in_virtual_time
async def test_a_bookie_whose_cookie_was_deleted_while_it_ran_is_missed_when_it_goes() -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.store.delete(f"{ROOT}/cookies/{B1}")

    async with auditing(cluster):
        assert await marked_soon(cluster) == []
        await cluster.kill(B1)

        assert await marked_soon(cluster) == [0]


@in_virtual_time
async def test_a_bookie_that_goes_together_with_its_cookie_is_missed() -> None:
    cluster = await with_ledgers((B1, B2))

    async with auditing(cluster):
        assert await marked_soon(cluster) == []
        await set_delay(cluster, 0)  # asks for an audit, after which nothing happens for a while
        assert await marked_soon(cluster) == []
        await cluster.store.delete(f"{ROOT}/cookies/{B1}")
        await cluster.kill(B1)

        assert await marked_soon(cluster) == [0]


@in_virtual_time
async def test_a_bookie_that_turns_read_only_is_not_lost_until_it_goes() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await cluster.register(B1, is_read_only=True)
        await cluster.store.delete(f"{ROOT}/available/{B1}")
        assert await marked_soon(cluster) == []

        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]


@in_virtual_time
async def test_the_most_endangered_ledgers_are_marked_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(marker, "MARKS_PER_MULTI", 1)
    cluster = await with_ledgers((B1, B3), (B1, B2), (B3, B4))
    await cluster.kill(B1, B2)

    async with auditing(cluster):
        assert await marked_soon(cluster) == [0, 1]

    graver, other = [await cluster.store.exists(PATHS.mark(i)) for i in (1, 0)]
    assert graver is not None
    assert other is not None
    assert graver.czxid < other.czxid
    assert await replicas(cluster, 1) == (B1, B2)


@in_virtual_time
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


@in_virtual_time
async def test_a_lost_bookie_that_comes_back_and_goes_again_is_audited_again() -> None:
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
@in_virtual_time
async def test_rule_s6_a_bookie_that_comes_back_withdraws_no_mark() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]

        await cluster.revive(B1)
        await asyncio.sleep(100)
        assert await cluster.marked() == [0]


@pytest.mark.compat("AuditorLedgerCheckerTest.testMultipleBookieFailures", verdict="same")
@in_virtual_time
async def test_a_ledger_whose_first_mark_was_worked_off_is_marked_for_the_next_loss() -> None:
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
@in_virtual_time
async def test_how_many_ledgers_a_loss_got_marked_is_told() -> None:
    cluster = await with_ledgers(*[(B1, B2)] * 10, *[(B3, B4)] * 20)
    async with auditing(cluster):
        await asyncio.sleep(SOON_S)
        for bookie, count in ((B1, 10), (B3, 20)):
            before = marks_total("lost")
            await cluster.kill(bookie)
            await asyncio.sleep(SOON_S)

            audit = await last_audit(cluster.store, PATHS)
            assert audit is not None
            assert audit.mark_count == count
            assert marks_total("lost") - before == count


def marks_total(cause: str) -> float:
    return REGISTRY.get_sample_value("bookmender_marks_total", {"cause": cause}) or 0.0


async def _is_free_of(cluster: Cluster, bookie: BookieId) -> bool:
    return bookie not in (await cluster.metadata(0)).bookies and not await cluster.marked()


@in_virtual_time
async def test_a_ledger_that_misses_more_now_has_its_mark_extended() -> None:
    cluster = await with_ledgers((B1, B2, B3))
    async with auditing(cluster):
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        await cluster.kill(B2)
        await asyncio.sleep(SOON_S)

        assert await replicas(cluster, 0) == (B1, B2)


@in_virtual_time
async def test_what_the_last_audit_found_is_told_to_everybody() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    path = cluster.manager.path(1)
    _, stat = await cluster.store.get(path)
    await cluster.store.set(path, b"garbage", version=stat.version)

    async with auditing(cluster):
        await marked_soon(cluster)

    found = await last_audit(cluster.store, PATHS)
    assert found is not None
    assert (found.ledger_count, found.unreadable) == (2, (1,))
