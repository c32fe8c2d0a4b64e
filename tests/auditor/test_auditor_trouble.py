"""Failures while an auditor works: it retries, skips, or ends its leadership, and never guesses."""

import asyncio
import random
from functools import partial
from typing import Any

import pytest

from auditor.auditor import RETRY_S
from auditor.ledger_map_updater import RETRY_MAX_S as INDEX_RETRY_MAX_S
from auditor.marker import Take
from auditor.records import read_absences
from daemon.threads import leaves
from ledgers.errors import LeadershipLostError, SessionLostError, UnavailableError
from ledgers.store import Delete
from tests.auditor.auditing import auditing, leading, running
from tests.auditor.scenes import DELAY, SOON_S, delayed, marked_soon, set_delay, with_ledgers
from tests.replication.cluster import Cluster, shut_out, until
from tests.replication.ledger_values import B1, B2, B3, B4, B5, BOOKIES
from tests.replication.nodes import PATHS, ROOT
from tests.replication.overload import overload, overloaded

scene = partial(with_ledgers, (B1, B2))


@pytest.mark.compat("G3", verdict="better", why="a failed audit is repeated until it succeeds")
@pytest.mark.compat(
    "AuditorBookieCheckTaskTest.testShutdownAuditBookiesException",
    verdict="better",
    why="the audit is repeated, and nothing is shut down",
)
async def test_rule_s8_a_failed_audit_is_repeated_until_it_has_marked(cluster: Cluster) -> None:
    async with auditing(cluster) as leader:
        await asyncio.sleep(SOON_S)
        mark_stream, failures = leader.marker.mark_stream, [UnavailableError("no answer")] * 2

        async def fail_at_first(take: Take, **options: Any) -> int:
            if failures:
                raise failures.pop()
            return await mark_stream(take, **options)

        leader.marker.mark_stream = fail_at_first  # type: ignore[method-assign]
        await cluster.kill(B1)

        async def is_marked() -> bool:
            return await cluster.marked() == [0]

        assert await until(cluster, is_marked) < 3 * RETRY_S


@pytest.mark.compat(
    "G4", verdict="better", why="the ledger is reported by id, and all others are marked"
)
async def test_rule_s8_an_unreadable_ledger_does_not_stop_the_marking() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3), (B1, B4))
    await cluster.store.set(cluster.manager.path(1), b"rubbish", version=-1)
    await cluster.kill(B1)

    async with auditing(cluster):
        assert await marked_soon(cluster) == [0, 2]


async def test_denied_access_to_a_directory_does_not_stop_the_marking(cluster: Cluster) -> None:
    """The ledger map is never complete, and the bookie was lost before it was built."""
    await cluster.write_ledger((B1, B2), ledger_id=10_000)
    await cluster.kill(B1)
    async with auditing(cluster) as leader:
        shut_out(leader.store, f"{ROOT}/00/0000")

        assert await marked_soon(cluster) == [10_000]

        assert not leader.updater.is_complete


@pytest.mark.parametrize("is_missing", [False, True], ids=["empty", "missing"])
async def test_rule_s8_an_empty_list_of_bookies_marks_nothing(is_missing: bool) -> None:
    """The same if the znode is missing."""
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await asyncio.sleep(SOON_S)
        paths = [*(f"available/{bookie}" for bookie in BOOKIES), "available/readonly", "available"]
        vanishing = paths if is_missing else paths[:-1]
        # All in one moment, as it looks from a new session on a server that is far behind.
        operations = [Delete(path=f"{ROOT}/{path}") for path in vanishing]
        cluster.tree.apply(cluster.store.session_id, operations)
        await asyncio.sleep(100)

        assert await cluster.marked() == []
        assert (await read_absences(cluster.store, PATHS)).since_ms == {}


async def test_a_new_leader_continues_an_interrupted_audit() -> None:
    cluster = await with_ledgers(*[(B1, B2)] * 20, *[(B3, B5)] * 5)
    async with auditing(cluster, "node-1") as first:
        await asyncio.sleep(SOON_S)

        async def cut_off(take: Take, **options: Any) -> int:
            for ledger in await take(7):
                await first.marker.mark(ledger.ledger_id, ledger.lost)
            await asyncio.sleep(3600)
            return 7

        first.marker.mark_stream = cut_off  # type: ignore[method-assign]
        await cluster.kill(B1)
        assert len(await marked_soon(cluster)) == 7

    async with auditing(cluster, "node-2"):
        assert await marked_soon(cluster) == list(range(20))


async def test_rule_s8_a_delay_counts_again_once_it_can_be_read(cluster: Cluster) -> None:
    """The former delay stays in force until then."""
    async with auditing(cluster, settings=delayed(3600)) as leader:
        await asyncio.sleep(SOON_S)
        await cluster.kill(B1)
        throttled = overload(leader.store, DELAY)
        await set_delay(cluster, 10)
        await asyncio.sleep(60)
        assert await cluster.marked() == []

        throttled.clear()
        await asyncio.sleep(15)
        assert await cluster.marked() == [0]


@pytest.mark.parametrize(
    "path",
    [
        DELAY,
        *(f"{PATHS.private.directory}/{name}" for name in ("identities", "absences", "losses")),
    ],
    ids=lambda path: path.rpartition("/")[2],
)
async def test_rule_s8_a_leader_waits_until_it_has_read_the_records(path: str) -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.kill(B1)
    async with leading(cluster) as leader:
        throttled = overload(leader.store, path)
        async with running(leader.auditor.run()) as auditor:
            await asyncio.sleep(60)
            assert not auditor.done()
            assert await cluster.marked() == [], "the bookie may be neither absent for long nor new"

            throttled.clear()
            await asyncio.sleep(15)
            assert await cluster.marked() == [0]


async def test_rule_s8_a_loss_is_pending_before_the_first_read(cluster: Cluster) -> None:
    async with leading(cluster) as leader:
        throttled = overload(leader.store, DELAY)
        async with running(leader.auditor.run()):
            await asyncio.sleep(60)
            assert leader.auditor.tracker.is_loss_pending, "checks must wait, because they mark"

            throttled.clear()
            await asyncio.sleep(15)
            assert not leader.auditor.tracker.is_loss_pending


async def test_rule_s8_an_audit_waits_for_an_unreadable_disable_switch(cluster: Cluster) -> None:
    async with auditing(cluster) as leader:
        throttled = overload(leader.store, PATHS.disable)
        cluster.tree.suspend(leader.store)
        await asyncio.sleep(SOON_S)
        cluster.tree.resume(leader.store)
        await cluster.kill(B1)
        await asyncio.sleep(60)
        assert await cluster.marked() == []

        throttled.clear()
        await asyncio.sleep(15)
        assert await cluster.marked() == [0]


@pytest.mark.parametrize("seed", range(5))
async def test_an_auditor_survives_an_overloaded_zookeeper(seed: int) -> None:
    cluster = await with_ledgers(*[(B1, B2)] * 8, *[(B3, B2)] * 3)
    async with leading(cluster) as leader:
        runs = [leader.auditor.run(), leader.drainer.run()]
        tasks = [asyncio.create_task(each) for each in runs]
        with overloaded(leader.store, random.Random(seed)):
            await asyncio.sleep(30)
            await cluster.kill(B1)
            await asyncio.sleep(60)
        await asyncio.sleep(2 * INDEX_RETRY_MAX_S)
        assert await cluster.marked() == list(range(8))
        for task in tasks:
            assert not task.done(), task.exception()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_lost_session_ends_the_audit(cluster: Cluster) -> None:
    async with leading(cluster) as leader:
        auditor = asyncio.create_task(leader.auditor.run())
        await asyncio.sleep(SOON_S)
        cluster.tree.expire(leader.store)
        await asyncio.wait([auditor], timeout=60)

        error = auditor.exception()
        assert error is not None
        assert {type(leaf) for leaf in leaves(error)} == {SessionLostError}


async def test_rule_s9_a_lost_vote_ends_the_audit_before_any_mark(cluster: Cluster) -> None:
    async with leading(cluster) as leader:
        auditor = asyncio.create_task(leader.auditor.run())
        await asyncio.sleep(SOON_S)
        await cluster.store.delete(leader.leadership.vote_path)
        await cluster.kill(B1)
        await asyncio.wait([auditor], timeout=60)

        error = auditor.exception()
        assert error is not None
        assert {type(leaf) for leaf in leaves(error)} == {LeadershipLostError}
    assert await cluster.marked() == []
